"""`zero-inference compare`: run models, or configurations of one model, alternately in processes of their own, and print one table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zero_inference.config.checks import batch_advice
from zero_inference.config.options import DEFAULTS, MULTI_GPU_ENGINES, QUALITY_FIELDS
from zero_inference.config.parser import add_verbose, examples
from zero_inference.config.run_config import RunConfig, expand_config_files
from zero_inference.errors import ONLY_PLANNED, DoesNotFit, RunError, UsageError
from zero_inference.records.read import read_records
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK
from zero_inference.utils.format import FORMATS, PIPED_WIDTH, file_stem, one_line, print_rows, shown_columns
from zero_inference.utils.processes import ChildRun, exit_on_stop, isolated_ranks, last_error_line, run_child
from zero_inference.utils.progress import Progress, use_progress

WARMUP_SPREAD = 0.05
WARMUP_TRIES = 10
MAX_COUNT = 10_000  # rounds, warm-up loops, processes
# Options that `compare` sets for every run.
SET_BY_COMPARE = set("log-file log-dir dry-run json save-config warmup warmup-spread verbose local-rank".split())
# Options that name an output file; two arms must not write the same.
OUTPUT_FILES = ("quality_items", "trace")
VERDICT = re.compile(r'"verdict": ("(?:[^"\\]|\\.)*")')  # in the output of --dry-run --json, among a launcher's lines
# Fields of a record that the JSON output lists for each run.
RUN_FACTS = "status timestamp prefill_throughput decode_throughput total_throughput".split()
RUN_FACTS += "warmed_up warmup_total_s settling_s error".split()
Runs = dict[str, list[tuple[int, dict[str, Any]]]]  # arm -> (pass, record) of each of its runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        "zero-inference compare --model opt-125m --model opt-1.3b -- --dummy --engine resident",
        'zero-inference compare --arm "fp16=opt-13b" --arm "int4=opt-13b --quant-bits 4" -- --dummy --engine stream',
    )
    parser.usage = (
        '%(prog)s (--model NAME | --arm "NAME=OPTIONS") ... [options] [-- options of run_model.py for every arm]'
    )
    add = parser.add_argument
    arm = "compare this configuration: a name, and options of run_model.py, as in 'int4=MODEL --quant-bits 4'; repeat it for each"
    rounds = "rounds of runs, each through all arms and back, A B B A; fewer than 3 give no verdict (default: 3)"
    tries = (
        f"most warm-up loops of a run, which ends them once they differ by less than {WARMUP_SPREAD:.0%}% "
        f"(default: {WARMUP_TRIES}; one loop with --rounds 1)"
    )
    gpus = "GPUs, or processes, of each run (default: one process, and GPUs as `zero-inference run` takes them)"
    output = "of the output; csv and json have full precision (default: table)"
    add("--model", action="append", default=[], metavar="NAME", help="compare this model; repeat it for each")
    add("--arm", action="append", default=[], metavar="NAME=OPTIONS", help=arm)
    add("--baseline", metavar="NAME", help="the arm that the others are compared with (default: the first)")
    add("--rounds", type=_at_least(1), default=3, metavar="N", help=rounds)
    add("--warmup-tries", type=_at_least(3), metavar="N", help=tries)
    add("--num-gpus", type=_at_least(1), metavar="N", help=gpus)
    add("--log-dir", type=Path, metavar="DIR", help="folder for logs and records (default: a new one in logs/)")
    add("--format", choices=FORMATS, default="table", help=output)
    add_verbose(parser)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= MAX_COUNT:
            bound = f"less than {least}" if value < least else f"more than {MAX_COUNT}"
            raise argparse.ArgumentTypeError(f"{text} is {bound}")
        return value

    return number


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after the `--` of `compare`; argparse would take the latter for positional ones."""
    if argv[:1] != ["compare"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def main(args: argparse.Namespace, shared: list[str], config_of: Callable[[list[str]], RunConfig]) -> int:
    """Check all arms, run them alternately and print the table; return 0. `shared` and `config_of` as of `read_arms`.

    Raises UsageError if an arm cannot work, before any is run, and RunError if one failed; the others are in the table.
    """
    exit_on_stop()  # ends the current run too
    arms = read_arms(args.model, args.arm, shared, config_of)
    names = [arm.name for arm in arms]
    baseline = args.baseline or names[0]
    if baseline not in names:
        raise UsageError(f"--baseline {baseline}: there is no such arm; the arms are {', '.join(names)}.")
    ranks = args.num_gpus or 1
    if args.num_gpus == 1:
        arms = [arm.on_one_gpu() for arm in arms]
    for arm in arms:
        has_ranks = arm.config.engine != "stream"  # of which one process drives all GPUs
        if has_ranks and arm.config.batch_size % ranks:
            raise UsageError(f"arm {arm.name}: {batch_advice(arm.config.batch_size, ranks, f'--num-gpus {ranks}')}.")
    folder = make_log_folder(args.log_dir)
    until_steady = args.warmup_tries is not None or args.rounds > 1  # one round gives no verdict
    extra = ["--warmup", str(args.warmup_tries or (WARMUP_TRIES if until_steady else 1))]
    extra += ["--warmup-spread", str(WARMUP_SPREAD)] if until_steady else []
    with use_progress(Progress(args.verbose > 0)) as progress:
        check_arms(arms, extra, folder, ranks, progress)
        runs = run_arms(arms, args.rounds, extra, folder, ranks, progress)

    from zero_inference.architectures.comparison import arm_rows

    rows = arm_rows({arm.name: arm.config for arm in arms}, runs, baseline)
    if args.format == "json":
        listed = [
            {"arm": name, "pass": number} | {key: record[key] for key in RUN_FACTS if record.get(key) is not None}
            for name, of_arm in runs.items()
            for number, record in of_arm
        ]
        report = {"baseline": baseline, "rounds": args.rounds, "log_dir": str(folder), "arms": rows, "runs": listed}
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print_table(rows, baseline, args.format)
    progress.say(f"logs and records: {folder}")
    failed = [row["arm"] for row in rows if row.get("error")]
    if failed:
        raise RunError(f"{len(failed)} of {len(arms)} arms failed: {', '.join(failed)}; their output is in {folder}.")
    return 0


def make_log_folder(given: Path | None) -> Path:
    """Return the given folder, created if needed, or a new one in logs/. Raises UsageError if it cannot be created or written to."""
    folder = given or Path("logs") / f"compare-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    try:
        folder.mkdir(parents=True, exist_ok=given is not None)
    except OSError as error:
        raise UsageError(
            f"the log folder {error.filename} cannot be created ({error.strerror}); choose another --log-dir."
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the log folder {folder} is not writable; choose another --log-dir.")
    return folder


def check_arms(arms: list[Arm], extra: list[str], folder: Path, ranks: int, progress: Progress) -> None:
    with progress.task("compare", len(arms), ticking=True) as task:
        for count, arm in enumerate(arms):
            task.at(f"checking arm {count + 1} of {len(arms)} ({arm.name})", count)
            if does_not_fit := check_arm(arm, extra, folder, ranks):
                progress.say(f"warning: arm {arm.name}: {does_not_fit}")


def run_arms(arms: list[Arm], rounds: int, extra: list[str], folder: Path, ranks: int, progress: Progress) -> Runs:
    """Run `zero-inference run` for all arms alternately, in processes of its own; an arm that failed is not run again.

    A run without a record has `status` and `error`. The folder gets `<arm>-<pass>.log`, `.jsonl` and `.out`.
    """
    from zero_inference.architectures.comparison import alternate_runs

    runs: Runs = {arm.name: [] for arm in arms}
    order = alternate_runs(arms, 2 * rounds)
    progress.say(f"compare: {len(order)} runs, {2 * rounds} of each arm; their output is in {folder}")
    with progress.task("compare", len(order), ticking=True) as task:
        for count, (number, arm) in enumerate(order):
            if any(record["status"] != STATUS_OK for _, record in runs[arm.name]):
                continue
            run = f"run {count + 1} of {len(order)} ({arm.name})"
            task.at(run, count)
            log = folder / f"{arm.file_stem}-{number}.log"
            options = arm.options if number == 0 else speed_only(arm.options)
            command = ["run", *options, *extra, "--log-file", str(log)]
            ended = run_child(
                isolated_ranks("zero_inference", ranks, *command),
                log.with_suffix(".out"),
                records=partial(_records_in, log.with_suffix(".jsonl")),
            )
            record = ended.record or {"status": STATUS_FAILED, "error": failure_reason(ended)}
            runs[arm.name].append((number, record))
            if record["status"] == STATUS_OK:
                phase = "total" if record["decode_throughput"] is None else "decode"
                note = " (not settled)" if record.get("warmed_up") is False else ""
                progress.say(f"compare: {run}: {record[f'{phase}_throughput']:.3f} token/s{note}")
            else:
                progress.say(f"compare: {run}: failed: {one_line(record['error'])}")
    return runs


def _records_in(file: Path) -> list[dict[str, Any]]:
    return read_records(file) if file.is_file() else []


def print_table(rows: list[dict[str, Any]], baseline: str, format: str) -> None:
    from zero_inference.architectures.comparison import list_captions, list_columns

    columns = list_columns(rows, compact=format != "csv")
    if format != "csv":
        columns = shown_columns(rows, columns)
    print_rows(rows, columns, format, transpose=True, piped_width=PIPED_WIDTH)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    for line in list_captions(rows, baseline) if format in ("table", "md") else ():
        print(f"\n{line}" if format == "md" else textwrap.fill(line, width, subsequent_indent="  "))


@dataclass(frozen=True)
class Arm:
    """A name, its options of run_model.py, and the configuration that they give."""

    name: str
    options: tuple[str, ...]
    config: RunConfig

    @property
    def file_stem(self) -> str:
        return file_stem(self.name)

    def on_one_gpu(self) -> Arm:
        """Return this arm for one GPU, of which some engines take more by themselves."""
        takes_more = self.config.engine in MULTI_GPU_ENGINES and self.config.num_gpus is None
        return replace(self, options=(*self.options, "--num-gpus", "1")) if takes_more else self


def read_arms(
    models: Sequence[str], texts: Sequence[str], shared: Sequence[str], config_of: Callable[[list[str]], RunConfig]
) -> list[Arm]:
    """Return the arms of `--model NAME` and `--arm "NAME=OPTIONS"`. `shared` options are for all; an arm's own override them.

    `config_of` returns the validated configuration of options. Raises UsageError for less than two arms, equal names or invalid options.
    """
    names = [model.rstrip("/").rpartition("/")[2] or model for model in models]
    named = [(name if names.count(name) == 1 else model, ["--model", model]) for name, model in zip(names, models)]
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
    owners: dict[str, str] = {}  # file stem, or path of an output file -> arm
    for name, own in named:
        try:
            words = expand_config_files([*shared, *own])  # now, because a file may change while the arms run
            if refused := SET_BY_COMPARE & {_option_name(word) for word in words}:
                raise UsageError(
                    f"--{min(refused)} is set by compare itself; drop it (compare has --log-dir and --warmup-tries)."
                )
            arms.append(arm := Arm(name, tuple(words), config_of(words)))
        except UsageError as error:
            raise UsageError(f"arm {name}: {error}") from error
        if arm.file_stem in owners:
            raise UsageError(
                f"two arms are called {name}, or their names differ too little for separate files: name them with "
                '--arm "NAME=--model ...".'
            )
        owners[arm.file_stem] = name
        for option in OUTPUT_FILES:
            file = getattr(arm.config, option)
            if file and owners.setdefault(os.path.abspath(file), name) != name:
                raise UsageError(
                    f"arm {name}: --{option.replace('_', '-')} {file} is also written by arm "
                    f"{owners[os.path.abspath(file)]}; give each arm its own file."
                )
    return arms


def _option_name(word: str) -> str:
    """Return the name of an option with hyphens, without its value; "" for another word."""
    return word.partition("=")[0][2:].replace("_", "-") if word.startswith("--") else ""


def speed_only(options: Sequence[str]) -> list[str]:
    """Return `options` without those about scores, which are equal in every run: only the first run has them."""
    takes_value = {name.replace("_", "-"): not isinstance(DEFAULTS[name], bool) for name in QUALITY_FIELDS}
    found: list[str] = []
    words = iter(options)
    for word in words:
        name = _option_name(word)
        if name not in takes_value:
            found.append(word)
        elif takes_value[name] and "=" not in word:
            next(words, None)
    return found


def check_arm(arm: Arm, extra: Sequence[str], folder: Path, ranks: int = 1) -> str | None:
    """Check an arm by --dry-run, in its own processes: a process that has used a GPU holds some of its memory until it ends.

    Returns the plan's verdict if it estimates that the arm does not fit, else None; the plan goes to `<arm>-check.out` in the folder.
    Raises UsageError if the run would be refused.
    """
    command = isolated_ranks("zero_inference", ranks, "run", *arm.options, *extra, "--dry-run", "--json")
    ended = run_child(command, folder / f"{arm.file_stem}-check.out")
    text = ended.read_output()
    verdict = json.loads(found[1]) if (found := VERDICT.search(text)) else ""
    does_not_fit = verdict if verdict.startswith(DoesNotFit.VERDICT) else None
    if ended.code != 0 and does_not_fit is None:  # a plan that does not fit ends its --dry-run with an error too
        raise UsageError(f"arm {arm.name}: {failure_reason(ended)}")
    if refusal := next((line for line in text.splitlines() if line.startswith(ONLY_PLANNED)), None):
        raise UsageError(f"arm {arm.name}: {refusal.removeprefix(ONLY_PLANNED).strip()}")
    return does_not_fit


def failure_reason(ended: ChildRun) -> str:
    """Return the last error line of a run without a record."""
    words = last_error_line(ended.read_output())
    if words is None:
        return f"exit code {ended.code}, without output"
    return words.removeprefix("error: ") if words.startswith("error: ") else f"{words} (exit code {ended.code})"
