"""The arms of `zero-inference compare`: their options, and checks and runs of an arm in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.config.options import DEFAULTS, QUALITY_FIELDS
from zero_inference.config.run_config import RunConfig
from zero_inference.config.run_options import expand_config_files
from zero_inference.errors import ONLY_PLANNED, DoesNotFit, UsageError
from zero_inference.records.read import read_records
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK
from zero_inference.utils.format import file_stem
from zero_inference.utils.processes import OWN_ERROR, ChildRun, isolated_ranks, last_error_line, run_child

# Options that `compare` sets for every run.
SET_BY_COMPARE = set("log-file log-dir dry-run json save-config warmup warmup-spread verbose local-rank".split())
# Options that name an output file; two arms must not write the same.
OUTPUT_FILES = ("quality_items", "trace")


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
    arms = [_arm(name, [*shared, *options], config_of) for name, options in named]
    _refuse_shared_files(arms)
    if len(arms) < 2:
        raise UsageError(
            f'{len(arms)} arm was given and two are compared: add --model NAME or --arm "NAME=OPTIONS".'
            if arms
            else 'nothing to compare: give --model NAME twice, or --arm "NAME=OPTIONS".'
        )
    stems = [arm.file_stem for arm in arms]
    for arm in arms:
        if stems.count(arm.file_stem) > 1:
            raise UsageError(
                f"two arms are called {arm.name}, or their names differ too little for separate files: name them with "
                '--arm "NAME=--model ...".'
            )
    return arms


def _arm(name: str, options: list[str], config_of: Callable[[list[str]], RunConfig]) -> Arm:
    try:
        options = expand_config_files(options)  # now, because a file may change while the arms run
        given = {_option_name(word) for word in options if word.startswith("--")}
        if refused := sorted(given & SET_BY_COMPARE):
            raise UsageError(
                f"--{refused[0]} is set by compare itself; drop it (compare has --log-dir and --warmup-tries)."
            )
        return Arm(name, tuple(options), config_of(options))
    except UsageError as error:
        raise UsageError(f"arm {name}: {error}") from error


def _refuse_shared_files(arms: Sequence[Arm]) -> None:
    for name in OUTPUT_FILES:
        by_file: dict[str, str] = {}
        for arm in arms:
            file = getattr(arm.config, name)
            if file and by_file.setdefault(os.path.abspath(file), arm.name) != arm.name:
                raise UsageError(
                    f"arm {arm.name}: --{name.replace('_', '-')} {file} is also written by arm "
                    f"{by_file[os.path.abspath(file)]}; give each arm its own file."
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


def check_arm(arm: Arm, extra: Sequence[str], folder: Path, ranks: int = 1) -> str | None:
    """Check an arm by --dry-run, in its own processes: a process that has used a GPU holds some of its memory until it ends.

    Args:
        extra, folder, ranks: as of `run_arm`; the plan goes to `<arm>-check.out` in the folder.

    Returns:
        The plan's verdict if it estimates that the arm does not fit, else None.

    Raises:
        UsageError: the run would be refused; names the arm and the reason.
    """
    output = _check_output(arm, folder)
    command = isolated_ranks("zero_inference", ranks, "run", *arm.options, *extra, "--dry-run", "--json")
    ended = run_child(command, output)
    verdict = (read_plan(arm, folder) or {}).get("verdict", "")
    doubt = verdict if verdict.startswith(DoesNotFit.VERDICT) else None
    if ended.code != 0 and doubt is None:  # a plan that does not fit ends its --dry-run with an error too
        raise UsageError(f"arm {arm.name}: {failure_reason(ended)}")
    if fails := next((line for line in ended.read_output().splitlines() if line.startswith(ONLY_PLANNED)), None):
        raise UsageError(f"arm {arm.name}: {fails.removeprefix(ONLY_PLANNED).strip()}")
    return doubt


def _check_output(arm: Arm, folder: Path) -> Path:
    return folder / f"{arm.file_stem}-check.out"


def read_plan(arm: Arm, folder: Path) -> dict[str, Any] | None:
    """Return the plan that `check_arm` wrote to `folder`, as of `--dry-run --json`; None without one."""
    output = _check_output(arm, folder)
    text = output.read_text(errors="replace") if output.is_file() else ""
    for begin in re.finditer(r"^\{", text, re.MULTILINE):  # libraries may have printed something before it
        with contextlib.suppress(ValueError):
            plan = json.JSONDecoder().raw_decode(text, begin.start())[0]
            if "fits" in plan:
                return plan
    return None


def run_arm(arm: Arm, extra: Sequence[str], folder: Path, number: int, ranks: int = 1) -> dict[str, Any]:
    """Run `zero-inference run` in its own processes; return the record, or `status` and `error` if there is none.

    Args:
        extra: options added to the arm's.
        folder: for log, record and output: `<arm>-<number>.log`, `.jsonl` and `.out`.
        number: the first run, 0, is the one that scores quality.
        ranks: processes; several are started by torchrun.
    """
    log, output = folder / f"{arm.file_stem}-{number}.log", folder / f"{arm.file_stem}-{number}.out"
    options = arm.options if number == 0 else speed_only(arm.options)
    ended = run_child(
        isolated_ranks("zero_inference", ranks, "run", *options, *extra, "--log-file", str(log)),
        output,
        records=lambda: _records(log),
        is_good=lambda record: record.get("status") == STATUS_OK,
    )
    return ended.record or {"status": STATUS_FAILED, "error": failure_reason(ended)}


def failure_reason(ended: ChildRun) -> str:
    """Return the last error line of a run without a record."""
    words = last_error_line(ended.read_output())
    if words is None:
        return f"exit code {ended.code}, without output"
    return words.removeprefix("error: ") if OWN_ERROR.match(words) else f"{words} (exit code {ended.code})"


def _records(log: Path) -> list[dict[str, Any]]:
    path = log.with_suffix(".jsonl")
    return read_records(path) if path.is_file() else []
