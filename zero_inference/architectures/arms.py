"""The arms of `zero-inference compare`: what each is asked, and one run of one of them in a process of its own."""

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

# What `compare` says itself, to every run.
TAKEN = {"log-file", "log-dir", "dry-run", "json", "save-config", "warmup", "warmup-spread", "verbose", "local-rank"}
# Files that a run writes where an option says; two arms would overwrite each other's.
OWN_FILES = ("quality_items", "trace")


@dataclass(frozen=True)
class Arm:
    """A name, the options of run_model.py it stands for, and the configuration they come to."""

    name: str
    options: tuple[str, ...]
    config: RunConfig

    @property
    def file_stem(self) -> str:
        return file_stem(self.name)


def read_arms(
    models: Sequence[str], texts: Sequence[str], shared: Sequence[str], config_of: Callable[[list[str]], RunConfig]
) -> list[Arm]:
    """The arms that `--model NAME` and `--arm "NAME=OPTIONS"` ask for; `shared` options are of all of them, an arm's own win.

    Args:
        config_of: validated configuration of a list of run_model.py's options.

    Raises:
        UsageError: fewer than two arms, two of one name, or options that cannot be meant; says of which arm.
    """
    short = [model.rstrip("/").rpartition("/")[2] or model for model in models]
    asked = [(name if short.count(name) == 1 else model, ["--model", model]) for name, model in zip(short, models)]
    for text in texts:
        name, equals, options = text.partition("=")
        if not equals or not name.strip() or name.startswith("-") or not name.isprintable():
            raise UsageError(f'--arm {text!r}: write a name, = and options, such as "int4=--model X --quant-bits 4".')
        try:
            asked.append((name.strip(), shlex.split(options)))
        except ValueError as error:
            raise UsageError(f"--arm {text!r}: {error}.") from error
    arms = [_arm(name, [*shared, *options], config_of) for name, options in asked]
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
        options = expand_config_files(options)  # which may change while the arms run, and may say what is refused here
    except UsageError as error:
        raise UsageError(f"arm {name}: {error}") from error
    given = {_option_name(word) for word in options if word.startswith("--")}
    if taken := sorted(given & TAKEN):
        raise UsageError(
            f"arm {name}: --{taken[0]} is set by compare itself; drop it (compare has --log-dir and --warmup-tries)."
        )
    try:
        return Arm(name, tuple(options), config_of(options))
    except UsageError as error:
        raise UsageError(f"arm {name}: {error}") from error


def _refuse_shared_files(arms: Sequence[Arm]) -> None:
    for name in OWN_FILES:
        by_file: dict[str, str] = {}
        for arm in arms:
            file = getattr(arm.config, name)
            if file and by_file.setdefault(os.path.abspath(file), arm.name) != arm.name:
                raise UsageError(
                    f"arm {arm.name}: --{name.replace('_', '-')} {file} is also written by arm "
                    f"{by_file[os.path.abspath(file)]}; give each arm a file of its own."
                )


def _option_name(word: str) -> str:
    return word.partition("=")[0][2:].replace("_", "-")


def speed_only(options: Sequence[str]) -> list[str]:
    """`options` without those about scores, which take long and are the same in every run: the first run has them."""
    takes_value = {name.replace("_", "-"): not isinstance(DEFAULTS[name], bool) for name in QUALITY_FIELDS}
    kept: list[str] = []
    words = iter(options)
    for word in words:
        name = _option_name(word) if word.startswith("--") else ""
        if name not in takes_value:
            kept.append(word)
        elif takes_value[name] and "=" not in word:
            next(words, None)
    return kept


def check_arm(arm: Arm, extra: Sequence[str], folder: Path, ranks: int = 1) -> str | None:
    """Whether the first run of `arm` can work, found by its --dry-run, which loads nothing.

    In processes of its own, as a run is: one that asks a GPU keeps some of its memory until it ends. The later runs have the
    same options less those about scores.

    Args:
        extra, folder, ranks: as of `run_arm`; the folder gets the plan, `<arm>-check.out`.

    Returns:
        The plan's own words where it says that the arm does not fit, which it estimates, or None.

    Raises:
        UsageError: the run would be refused for what is no estimate; names the arm and says why.
    """
    output = _check_output(arm, folder)
    options = [*arm.options, *extra, "--dry-run", "--json"]
    ended = run_child(isolated_ranks("zero_inference", ranks, "run", *options), output)
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
    """Return the plan that `check_arm` left in `folder`, as `--dry-run --json` prints it; None without one."""
    output = _check_output(arm, folder)
    said = output.read_text(errors="replace") if output.is_file() else ""
    for begin in re.finditer(r"^\{", said, re.MULTILINE):  # libraries may have printed something before it
        with contextlib.suppress(ValueError):
            plan = json.JSONDecoder().raw_decode(said, begin.start())[0]
            if "fits" in plan:
                return plan
    return None


def run_arm(arm: Arm, extra: Sequence[str], folder: Path, number: int, ranks: int = 1) -> dict[str, Any]:
    """One run of `arm` as `zero-inference run`, in its own processes: its record, or one made up here that says why it has none.
    The first run, number 0, is the one that scores quality, where that was asked for.

    Args:
        extra: options on top of the arm's.
        folder: gets log, record and output, `<arm>-<number>.log`, `.jsonl` and `.out`.
        ranks: processes, started by torchrun where there are several.
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
    """What a run that left no record said last."""
    words = last_error_line(ended.read_output())
    if words is None:
        return f"exit code {ended.code}, and it said nothing"
    return words.removeprefix("error: ") if OWN_ERROR.match(words) else f"{words} (exit code {ended.code})"


def _records(log: Path) -> list[dict[str, Any]]:
    path = log.with_suffix(".jsonl")
    return read_records(path) if path.is_file() else []
