"""`zero-inference compare`: run models, or configurations of one model, alternately, and print one table."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero_inference.architectures.arms import Arm, check_arm, read_arms, read_plan, run_arm
from zero_inference.config.checks import batch_advice
from zero_inference.config.parser import add_verbose, examples
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import RunError, UsageError
from zero_inference.utils.format import format_duration
from zero_inference.utils.processes import exit_on_stop
from zero_inference.utils.progress import Progress, use_progress
from zero_inference.utils.tables import FORMATS

WARMUP_SPREAD = 0.05
WARMUP_TRIES = 10
SETTLED_LOOPS = 3  # fewest warm-up loops of a run
# For estimates: seconds of imports, and bytes/s of loading where the plan predicts none.
START_S, LOADED_BYTES_PER_S = 10.0, 5e8
MOST = 10_000  # rounds, warm-up loops, processes
Runs = dict[str, list[tuple[int, dict[str, Any]]]]  # arm -> (pass, record) of each of its runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        "zero-inference compare --model opt-125m --model opt-1.3b -- --dummy --engine resident",
        'zero-inference compare --arm "fp16=opt-13b" --arm "int4=opt-13b --quant-bits 4" -- --dummy --engine stream',
    )
    parser.usage = (
        '%(prog)s (--model NAME | --arm "NAME=OPTIONS") ... [options] [-- options of run_model.py for every arm]'
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="compare this model; repeat it for each"
    )
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="compare this configuration: a name, and options of run_model.py, as in 'int4=MODEL --quant-bits 4'; repeat it for each",
    )
    parser.add_argument(
        "--baseline", metavar="NAME", help="the arm that the others are compared with (default: the first)"
    )
    parser.add_argument(
        "--rounds",
        type=_at_least(1),
        default=3,
        metavar="N",
        help="rounds of runs, each through all arms and back, A B B A; fewer than 3 give no verdict (default: 3)",
    )
    parser.add_argument(
        "--warmup-tries",
        type=_at_least(3),
        metavar="N",
        help=f"most warm-up loops of a run, which ends them once they differ by less than {WARMUP_SPREAD:.0%}% "
        f"(default: {WARMUP_TRIES}; one loop with --rounds 1)",
    )
    parser.add_argument(
        "--num-gpus", type=_at_least(1), default=1, metavar="N", help="GPUs, or processes, of each run (default: 1)"
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="folder for logs and records (default: a new one in logs/)"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="of the output; csv and json have full precision (default: table)",
    )
    add_verbose(parser)


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
    baseline = args.baseline or arms[0].name
    _check_names_and_batches(arms, baseline, args.num_gpus)
    folder = _log_folder(args.log_dir)
    settles = args.warmup_tries is not None or args.rounds > 1  # one round gives no verdict
    args.warmup_tries = args.warmup_tries or (WARMUP_TRIES if settles else 1)
    extra = ["--warmup", str(args.warmup_tries), *(["--warmup-spread", str(WARMUP_SPREAD)] if settles else [])]
    with use_progress(Progress(args.verbose > 0)) as progress:
        _check_all(arms, args, extra, folder, progress)
        runs = _run_all(arms, args, extra, folder, progress)

    from zero_inference.architectures import table

    rows = table.arm_rows(arms, runs, baseline)
    if args.format == "json":
        _print_json(rows, runs, baseline, args.rounds, folder)
    else:
        _print_table(rows, baseline, args.format)
    progress.say(f"logs and records: {folder}")
    failed = [row["arm"] for row in rows if row.get("error")]
    if failed:
        raise RunError(f"{len(failed)} of {len(arms)} arms failed: {', '.join(failed)}; their output is in {folder}.")
    return 0


def _check_names_and_batches(arms: list[Arm], baseline: str, num_gpus: int) -> None:
    names = [arm.name for arm in arms]
    if baseline not in names:
        raise UsageError(f"--baseline {baseline}: there is no such arm; the arms are {', '.join(names)}.")
    for arm in arms:
        if arm.config.batch_size % num_gpus:
            advice = batch_advice(arm.config.batch_size, num_gpus, f"--num-gpus {num_gpus}")
            raise UsageError(f"arm {arm.name}: {advice}.")


def _print_json(rows: list[dict[str, Any]], runs: Runs, baseline: str, rounds: int, folder: Path) -> None:
    from zero_inference.architectures.table import run_facts

    of_runs = [
        {"arm": name, "pass": number, **run_facts(record)} for name, of_arm in runs.items() for number, record in of_arm
    ]
    report = {"baseline": baseline, "rounds": rounds, "log_dir": str(folder), "arms": rows, "runs": of_runs}
    print(json.dumps(report, indent=2, allow_nan=False))


def _print_table(rows: list[dict[str, Any]], baseline: str, format: str) -> None:
    from zero_inference.architectures import table
    from zero_inference.utils.tables import PIPED_WIDTH, print_rows, shown_columns

    columns, shown = table.columns(rows), rows
    if format != "csv":
        columns, shown = table.compact_for_display(columns, rows)
        columns = shown_columns(shown, columns)
    print_rows(shown, columns, format, turn=True, piped_width=PIPED_WIDTH)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    for line in table.captions(shown, baseline) if format in ("table", "md") else ():
        print(f"\n{line}" if format == "md" else textwrap.fill(line, width, subsequent_indent="  "))


def _log_folder(given: Path | None) -> Path:
    """Return the given folder, created if needed, or a new one. Raises UsageError if it cannot be created or written to."""
    try:
        folder = new_folder(Path("logs")) if given is None else given
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the log folder {error.filename} cannot be created ({error.strerror}); choose another --log-dir."
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the log folder {folder} is not writable; choose another --log-dir.")
    return folder


def new_folder(parent: Path) -> Path:
    """Create a folder in `parent` named after the time; unique, also for comparisons that start in the same second."""
    first = f"compare-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    parent.mkdir(parents=True, exist_ok=True)
    names = (first if number == 1 else f"{first}_{number}" for number in itertools.count(1))
    while True:
        folder = parent / next(names)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def _check_all(arms: list[Arm], args: argparse.Namespace, extra: list[str], folder: Path, progress: Progress) -> None:
    with progress.task("compare", len(arms), ticking=True) as task:
        for count, arm in enumerate(arms):
            task.at(f"checking arm {count + 1} of {len(arms)} ({arm.name})", count)
            doubt = check_arm(arm, extra, folder, args.num_gpus)
            if doubt:
                progress.say(f"warning: arm {arm.name}: {doubt}")


def _run_all(arms: list[Arm], args: argparse.Namespace, extra: list[str], folder: Path, progress: Progress) -> Runs:
    """Run all arms; one that failed is not run again."""
    from zero_inference.architectures.comparison import alternate_runs

    by_name = {arm.name: arm for arm in arms}
    runs: Runs = {arm.name: [] for arm in arms}
    least_s, most_s = (
        {arm.name: predict_run_s(arm, read_plan(arm, folder), loops) for arm in arms}
        for loops in (min(SETTLED_LOOPS, args.warmup_tries), args.warmup_tries)
    )
    order, times = alternate_runs(list(by_name), 2 * args.rounds), RunTimes(least_s)
    about = _about([least_s[name] for _, name in order], [most_s[name] for _, name in order])
    progress.say(f"compare: {len(order)} runs, {2 * args.rounds} of each arm{about}; their output is in {folder}")
    with progress.task("compare", ticking=True) as task:
        for count, (number, name) in enumerate(order, 1):
            if any(record["status"] != "ok" for _, record in runs[name]):
                continue
            left = [each for _, each in order[count - 1 :] if each not in times.failed]
            task.at(f"run {count} of {len(order)} ({name})", left_s=times.expected_s(left))
            start = progress.clock()
            record = run_arm(by_name[name], extra, folder, number, args.num_gpus)
            times.add(name, progress.clock() - start, record["status"] == "ok")
            runs[name].append((number, record))
            progress.say(f"compare: run {count} of {len(order)} ({name}): {_outcome(record, args.warmup_tries)}")
    return runs


def _about(least_s: list[float | None], most_s: list[float | None]) -> str:
    """Return the estimate of runs that take `least_s` to `most_s` each, such as `, about 3 min`; "" if one is unknown."""
    if None in least_s or None in most_s:
        return ""
    low, high = (format_duration(60 * max(1, round(sum(filter(None, each)) / 60))) for each in (least_s, most_s))
    return f", about {low}" + (f" to {high}, by how many warm-up loops each takes" if high != low else "")


def predict_run_s(arm: Arm, plan: dict[str, Any] | None, warmup: int) -> float | None:
    """Return the predicted seconds of a run with `warmup` loops, without scoring; None if unknown.

    By the plan's times, or without a GPU by its bytes and FLOPs over quickly measured rates of this machine.
    """
    if plan is None:
        return None
    predicted, config, sizes = plan["predicted"], plan["config"], plan["sizes"]
    prefill_s, step_s, load_s = (predicted[name] for name in ("prefill_s", "decode_step_s", "load_s"))
    if step_s is None:
        if plan["needs"] is None or any(each["place"] == "device memory" for each in plan["needs"]):
            return None
        gb_per_s, gflops = measure_quick_rates()
        step_s = sizes["weight_bytes"] / gb_per_s / 1e9
        tokens = config["batch_size"] * config["prompt_len"]
        # 2 FLOPs and 2 bytes for each parameter
        prefill_s = max(step_s, sizes["model_bytes"] * tokens / gflops / 1e9)
    loop_s = prefill_s + (config["gen_len"] - 1) * step_s
    return START_S + (load_s or sizes["weight_bytes"] / LOADED_BYTES_PER_S) + (warmup + arm.config.loops) * loop_s


@functools.cache
def measure_quick_rates() -> tuple[float, float]:
    """Return GB/s of memory and GFLOP/s of the CPU, measured in a fraction of a second."""
    import numpy

    data, square = numpy.ones(1 << 24, numpy.float32), numpy.ones((512, 512), numpy.float32)

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    return 2 * data.nbytes / seconds(data.copy) / 1e9, 2 * 512**3 / seconds(lambda: square @ square) / 1e9


class RunTimes:
    """Seconds of the runs of each arm so far, to predict the remaining ones."""

    def __init__(self, expected: Mapping[str, float | None] = MappingProxyType({})) -> None:
        self.expected = expected
        self.seconds: dict[str, list[float]] = {}
        self.failed: set[str] = set()

    def add(self, arm: str, seconds: float, good: bool) -> None:
        if good:
            self.seconds.setdefault(arm, []).append(seconds)
        else:
            self.failed.add(arm)

    def expected_s(self, arms: list[str]) -> float | None:
        """Return the seconds of one run of each of `arms`: its mean so far, or the mean of all arms if it has not run yet, or before the
        first run the prediction; None if unknown."""
        means = {arm: sum(found) / len(found) for arm, found in self.seconds.items()}
        if not means:
            known = [self.expected.get(arm) for arm in arms]
            return None if None in known else sum(filter(None, known))
        mean = sum(means.values()) / len(means)
        return sum(means.get(arm, mean) for arm in arms)


def _outcome(record: dict[str, Any], tries: int) -> str:
    if record["status"] != "ok":
        return f"failed: {' '.join(str(record['error']).split())}"
    rate = record["decode_throughput"] if record["decode_throughput"] is not None else record["total_throughput"]
    unsettled = f" (not settled: after {tries} warm-up loops they still differed by more than {WARMUP_SPREAD:.0%})"
    return f"{rate:.3f} token/s{unsettled if record.get('warmed_up') is False else ''}"


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= MOST:
            bound = f"less than {least}" if value < least else f"more than {MOST}"
            raise argparse.ArgumentTypeError(f"{text} is {bound}")
        return value

    return number
