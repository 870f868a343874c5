"""The arms of `zero-inference compare`: their options, and checks and runs of an arm in its own process."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.config.options import DEFAULTS, QUALITY_FIELDS
from zero_inference.config.run_config import RunConfig, expand_config_files
from zero_inference.errors import ONLY_PLANNED, DoesNotFit, UsageError
from zero_inference.records.read import read_records
from zero_inference.records.schema import STATUS_FAILED
from zero_inference.utils.format import file_stem
from zero_inference.utils.processes import ChildRun, isolated_ranks, last_error_line, run_child

# Options that `compare` sets for every run.
SET_BY_COMPARE = set("log-file log-dir dry-run json save-config warmup warmup-spread verbose local-rank".split())
# Options that name an output file; two arms must not write the same.
OUTPUT_FILES = ("quality_items", "trace")
VERDICT = re.compile(r'"verdict": ("(?:[^"\\]|\\.)*")')  # of --dry-run --json


@dataclass(frozen=True)
class Arm:
    """A name, its options of run_model.py, and the configuration that they give."""

    name: str
    options: tuple[str, ...]
    config: RunConfig

    @property
    def file_stem(self) -> str:
        return file_stem(self.name)


def read_arms(
    models: Sequence[str], texts: Sequence[str], shared: Sequence[str], config_of: Callable[[list[str]], RunConfig]
) -> list[Arm]:
    """Return the arms of `--model NAME` and `--arm "NAME=OPTIONS"`. `shared` options are for all; an arm's own override them.

    Args:
        config_of: returns the validated configuration of a list of run_model.py's options.

    Raises:
        UsageError: fewer than two arms, two of one name, or invalid options; names the arm.
    """
    short = [model.rstrip("/").rpartition("/")[2] or model for model in models]
    named = [(name if short.count(name) == 1 else model, ["--model", model]) for name, model in zip(short, models)]
    for text in texts:
        name, equals, options = text.partition("=")
        if not equals or not name.strip() or name.startswith("-") or not name.isprintable():
            raise UsageError(f'--arm {text!r}: write a name, = and options, such as "int4=--model X --quant-bits 4".')
        try:
            named.append((name.strip(), shlex.split(options)))
        except ValueError as error:
            raise UsageError(f"--arm {text!r}: {error}.") from error
    if len(named) < 2:
        raise UsageError(f'two arms are needed, and {len(named)} given: add --model NAME or --arm "NAME=OPTIONS".')
    arms = []
    for name, own in named:
        try:
            words = expand_config_files([*shared, *own])  # now, because a file may change while the arms run
            if refused := SET_BY_COMPARE & {_option_name(word) for word in words if word.startswith("--")}:
                raise UsageError(
                    f"--{min(refused)} is set by compare itself; drop it (compare has --log-dir and --warmup-tries)."
                )
            arms.append(Arm(name, tuple(words), config_of(words)))
        except UsageError as error:
            raise UsageError(f"arm {name}: {error}") from error
    _refuse_shared_files(arms)
    return arms


def _refuse_shared_files(arms: Sequence[Arm]) -> None:
    owners: dict[str, Arm] = {}
    for arm in arms:
        if owners.setdefault(arm.file_stem, arm) is not arm:
            raise UsageError(
                f"two arms are called {arm.name}, or their names differ too little for separate files: name them with "
                '--arm "NAME=--model ...".'
            )
        for option in OUTPUT_FILES:
            file = getattr(arm.config, option)
            if file and (other := owners.setdefault(os.path.abspath(file), arm)) is not arm:
                raise UsageError(
                    f"arm {arm.name}: --{option.replace('_', '-')} {file} is also written by arm {other.name}; "
                    "give each arm its own file."
                )


def _option_name(word: str) -> str:
    return word.partition("=")[0][2:].replace("_", "-")


def speed_only(options: Sequence[str]) -> list[str]:
    """Return `options` without those about scores, which are equal in every run: only the first run has them."""
    takes_value = {name.replace("_", "-"): not isinstance(DEFAULTS[name], bool) for name in QUALITY_FIELDS}
    found: list[str] = []
    words = iter(options)
    for word in words:
        name = _option_name(word) if word.startswith("--") else ""
        if name not in takes_value:
            found.append(word)
        elif takes_value[name] and "=" not in word:
            next(words, None)
    return found


def alternate_runs(names: Sequence[str], passes: int) -> list[tuple[int, str]]:
    """Return (pass, name) in the order to run: every other pass is reversed (A B, B A, A B, ...)."""
    return [(number, name) for number in range(passes) for name in (names if number % 2 == 0 else names[::-1])]


def check_arm(arm: Arm, extra: Sequence[str], folder: Path, ranks: int = 1) -> str | None:
    """Check an arm by --dry-run, in its own processes: a process that has used a GPU holds some of its memory until it ends.

    Args:
        extra, folder, ranks: as of `run_arm`; the plan goes to `<arm>-check.out` in the folder.

    Returns:
        The plan's verdict if it estimates that the arm does not fit, else None.

    Raises:
        UsageError: the run would be refused; names the arm and the reason.
    """
    command = isolated_ranks("zero_inference", ranks, "run", *arm.options, *extra, "--dry-run", "--json")
    ended = run_child(command, folder / f"{arm.file_stem}-check.out")
    text = ended.read_output()
    verdict = json.loads(found[1]) if (found := VERDICT.search(text)) else ""
    doubt = verdict if verdict.startswith(DoesNotFit.VERDICT) else None
    if ended.code != 0 and doubt is None:  # a plan that does not fit ends its --dry-run with an error too
        raise UsageError(f"arm {arm.name}: {failure_reason(ended)}")
    if fails := next((line for line in text.splitlines() if line.startswith(ONLY_PLANNED)), None):
        raise UsageError(f"arm {arm.name}: {fails.removeprefix(ONLY_PLANNED).strip()}")
    return doubt


def run_arm(arm: Arm, extra: Sequence[str], folder: Path, number: int, ranks: int = 1) -> dict[str, Any]:
    """Run `zero-inference run` in its own processes; return the record, or `status` and `error` if there is none.

    Args:
        extra: options added to the arm's.
        folder: for log, record and output: `<arm>-<number>.log`, `.jsonl` and `.out`.
        number: the first run, 0, is the one that scores quality.
        ranks: processes; several are started by torchrun.
    """
    log = folder / f"{arm.file_stem}-{number}.log"
    record = log.with_suffix(".jsonl")
    options = arm.options if number == 0 else speed_only(arm.options)
    ended = run_child(
        isolated_ranks("zero_inference", ranks, "run", *options, *extra, "--log-file", str(log)),
        log.with_suffix(".out"),
        records=lambda: read_records(record) if record.is_file() else [],
    )
    return ended.record or {"status": STATUS_FAILED, "error": failure_reason(ended)}


def failure_reason(ended: ChildRun) -> str:
    """Return the last error line of a run without a record."""
    words = last_error_line(ended.read_output())
    if words is None:
        return f"exit code {ended.code}, without output"
    return words.removeprefix("error: ") if words.startswith("error: ") else f"{words} (exit code {ended.code})"
