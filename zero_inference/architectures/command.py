"""`zero-inference compare`: run models, or configurations of one model, alternately, and print one table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_inference.architectures.arms import Arm, alternate_runs, check_arm, read_arms, run_arm
from zero_inference.config.checks import batch_advice
from zero_inference.config.parser import add_verbose, examples
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import RunError, UsageError
from zero_inference.records.schema import STATUS_OK
from zero_inference.utils.format import FORMATS, PIPED_WIDTH, print_rows, shown_columns
from zero_inference.utils.processes import exit_on_stop
from zero_inference.utils.progress import Progress, use_progress

WARMUP_SPREAD = 0.05
WARMUP_TRIES = 10
MAX_COUNT = 10_000  # rounds, warm-up loops, processes
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
    gpus = "GPUs, or processes, of each run (default: 1)"
    output = "of the output; csv and json have full precision (default: table)"
    add("--model", action="append", default=[], metavar="NAME", help="compare this model; repeat it for each")
    add("--arm", action="append", default=[], metavar="NAME=OPTIONS", help=arm)
    add("--baseline", metavar="NAME", help="the arm that the others are compared with (default: the first)")
    add("--rounds", type=_at_least(1), default=3, metavar="N", help=rounds)
    add("--warmup-tries", type=_at_least(3), metavar="N", help=tries)
    add("--num-gpus", type=_at_least(1), default=1, metavar="N", help=gpus)
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
    """Check all arms, run them alternately and print the table; return 0.

    Args:
        shared: options of run_model.py for every arm.
        config_of: returns the validated configuration of such options.

    Raises:
        UsageError: an arm cannot work; nothing was run.
        RunError: an arm failed; the others are in the table.
    """
    exit_on_stop()  # ends the current run too
    arms = read_arms(args.model, args.arm, shared, config_of)
    names = [arm.name for arm in arms]
    baseline = args.baseline or names[0]
    if baseline not in names:
        raise UsageError(f"--baseline {baseline}: there is no such arm; the arms are {', '.join(names)}.")
    for arm in arms:
        if arm.config.batch_size % args.num_gpus:
            advice = batch_advice(arm.config.batch_size, args.num_gpus, f"--num-gpus {args.num_gpus}")
            raise UsageError(f"arm {arm.name}: {advice}.")
    folder = make_log_folder(args.log_dir)
    settles = args.warmup_tries is not None or args.rounds > 1  # one round gives no verdict
    extra = ["--warmup", str(args.warmup_tries or (WARMUP_TRIES if settles else 1))]
    extra += ["--warmup-spread", str(WARMUP_SPREAD)] if settles else []
    with use_progress(Progress(args.verbose > 0)) as progress:
        check_arms(arms, extra, folder, args.num_gpus, progress)
        runs = run_arms(arms, args.rounds, extra, folder, args.num_gpus, progress)

    from zero_inference.architectures import table

    rows = table.arm_rows(arms, runs, baseline)
    if args.format == "json":
        listed = [
            {"arm": name, "pass": number, **table.run_facts(record)}
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
    try:
        folder = make_new_folder(Path("logs")) if given is None else given
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the log folder {error.filename} cannot be created ({error.strerror}); choose another --log-dir."
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the log folder {folder} is not writable; choose another --log-dir.")
    return folder


def make_new_folder(parent: Path) -> Path:
    """Create a folder in `parent` named after the time, with a number if another comparison started in the same second."""
    parent.mkdir(exist_ok=True)
    name = f"compare-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, number = parent / name, 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}_{number}"


def check_arms(arms: list[Arm], extra: list[str], folder: Path, num_gpus: int, progress: Progress) -> None:
    with progress.task("compare", len(arms), ticking=True) as task:
        for count, arm in enumerate(arms):
            task.at(f"checking arm {count + 1} of {len(arms)} ({arm.name})", count)
            if doubt := check_arm(arm, extra, folder, num_gpus):
                progress.say(f"warning: arm {arm.name}: {doubt}")


def run_arms(arms: list[Arm], rounds: int, extra: list[str], folder: Path, num_gpus: int, progress: Progress) -> Runs:
    """Run all arms alternately; one that failed is not run again."""
    by_name = {arm.name: arm for arm in arms}
    runs: Runs = {name: [] for name in by_name}
    order = alternate_runs(list(by_name), 2 * rounds)
    progress.say(f"compare: {len(order)} runs, {2 * rounds} of each arm; their output is in {folder}")
    with progress.task("compare", len(order), ticking=True) as task:
        for count, (number, name) in enumerate(order):
            if any(record["status"] != STATUS_OK for _, record in runs[name]):
                continue
            run = f"run {count + 1} of {len(order)} ({name})"
            task.at(run, count)
            record = run_arm(by_name[name], extra, folder, number, num_gpus)
            runs[name].append((number, record))
            progress.say(f"compare: {run}: {_outcome(record)}")
    return runs


def _outcome(record: dict[str, Any]) -> str:
    if record["status"] != STATUS_OK:
        return f"failed: {' '.join(str(record['error']).split())}"
    rate = record["decode_throughput"] if record["decode_throughput"] is not None else record["total_throughput"]
    return f"{rate:.3f} token/s{' (not settled)' if record.get('warmed_up') is False else ''}"


def print_table(rows: list[dict[str, Any]], baseline: str, format: str) -> None:
    from zero_inference.architectures import table

    columns = table.list_columns(rows, compact=format != "csv")
    if format != "csv":
        columns = shown_columns(rows, columns)
    print_rows(rows, columns, format, turn=True, piped_width=PIPED_WIDTH)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    for line in table.list_captions(rows, baseline) if format in ("table", "md") else ():
        print(f"\n{line}" if format == "md" else textwrap.fill(line, width, subsequent_indent="  "))
