"""Runs run_model.py for every combination of the given values, one process after the other.

    python scripts/sweep.py --model facebook/opt-66b --offload cpu disk --quant-bits 16 4 --batch-size 1 8 -- --loops 5

A failed case does not end the sweep. A case whose record lies in the log folder already is not run again, so a sweep
that was stopped goes on where it was. What follows `--` goes to run_model.py as it is. Progress goes to stderr, the
table to stdout. Exit code: 0, 1 if a case failed, 2 for bad usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from sweep_cases import AXES, Case, expand, options_of  # noqa: E402

from zero_inference.records.field import as_number  # noqa: E402
from zero_inference.records.read import read_records  # noqa: E402
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK  # noqa: E402
from zero_inference.report.run import Run  # noqa: E402
from zero_inference.report.terminal import print_short  # noqa: E402
from zero_inference.utils.format import printable  # noqa: E402
from zero_inference.utils.processes import (  # noqa: E402
    ANY_ERROR,
    ChildRun,
    exit_on_stop,
    last_error_line,
    run_child,
)


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what follows `--`. Hyphens and underscores are interchangeable in option names."""
    end = argv.index("--") if "--" in argv else len(argv)
    own = [re.sub(r"^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in argv[:end]]
    extra = argv[end + 1 :]
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [-- run_model.py options]", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    swept = parser.add_argument_group("swept: one or more values each")
    for axis in AXES:
        default = f"default: {axis.default}"
        swept.add_argument(
            f"--{axis.option}", nargs="+", type=axis.type, choices=axis.choices, default=[axis.default],
            metavar=axis.option.rpartition("-")[2].upper() if axis.choices is None else None, help=axis.help or default,
        )  # fmt: skip
    parser.add_argument("--dummy", action="store_true", help="random weights: needs no checkpoint")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="where records are looked for and written")
    parser.add_argument("--launcher", choices=("deepspeed", "torchrun", "python"), default="deepspeed")
    parser.add_argument("--program", type=Path, default=ROOT / "run_model.py", help="default: run_model.py")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="end a case that takes longer, which then failed (default: none)"
    )
    parser.add_argument("--redo", action="store_true", help="also run the cases that have a good record")
    parser.add_argument("--list", action="store_true", help="only print the commands that would run")
    args = parser.parse_args(own)

    taken = {axis.option for axis in AXES} | {"cpu-offload", "disk-offload", "dummy", "log-dir", "log-file"}
    if wrong := sorted(options_of(extra).keys() & taken):
        where = "records are found by --log-dir" if "log-file" in wrong else "give it before the --"
        parser.error(f"--{wrong[0]} after the -- would hold for every case: {where}")
    if "dry-run" in options_of(extra):
        parser.error("--dry-run leaves no record; --list prints the commands, add --dry-run to one of them")
    if extra and not extra[0].startswith("-"):
        parser.error(f"{extra[0]!r} after the -- is not an option of run_model.py")
    if args.launcher == "python" and any(gpus not in (None, 1) for gpus in args.num_gpus):
        parser.error("--launcher python runs one process; take deepspeed or torchrun for --num-gpus")
    if any(gpus is not None and gpus < 1 for gpus in args.num_gpus):
        parser.error("--num-gpus must be 1 or more")
    if args.time_limit is not None and not args.time_limit > 0:
        parser.error("--time-limit must be above 0 seconds")
    if not args.program.is_file():
        parser.error(f"no program {args.program}")
    if args.log_dir.exists() and not args.log_dir.is_dir():
        parser.error(f"--log-dir {args.log_dir} is a file")
    if not args.list and _launcher(args.launcher) is None:
        parser.error(f"{args.launcher} is not installed; install it or take another --launcher")
    return args, extra


def _launcher(name: str) -> str | None:
    """Its path; that of this environment also where the environment is not activated."""
    if name == "python":
        return sys.executable
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _records(log_dir: Path) -> list[dict[str, Any]]:
    return read_records(log_dir) if log_dir.is_dir() else []


def _matching(case: Case, log_dir: Path) -> list[dict[str, Any]]:
    # Damaged lines were named when the sweep began; naming them at every case would bury the progress.
    with contextlib.redirect_stderr(io.StringIO()):
        return [record for record in _records(log_dir) if case.is_request_of(record)]


def why_ended(ended: ChildRun, limit_s: float | None) -> str:
    """What a run that left no record said last: its own error rather than the launcher's remarks after it."""
    if ended.code is None:
        return f"ended as it took longer than --time-limit {limit_s:g}"
    words = last_error_line(ended.read_output(), ANY_ERROR)
    return f"exit code {ended.code}, no output" if words is None else f"{words} (exit code {ended.code})"


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Runs it to its end and returns its record, or one made up here where it left none that is new."""
    command = case.command(args.program, args.log_dir)
    # deepspeed starts `python -m`, which would look for modules in the current folder first (Python 3.10 still does)
    paths = os.pathsep.join(filter(None, [str(args.program.resolve().parent), os.environ.get("PYTHONPATH")]))
    ended = run_child(
        [_launcher(args.launcher), *command[1:]],
        args.log_dir / f"{case.label()}.out",
        env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": paths},
        timeout_s=args.time_limit,
        records=lambda: _matching(case, args.log_dir),
        is_good=_is_good,
    )
    if ended.record is not None and ended.code is not None:
        return ended.record
    if ended.code == 0:
        error = f"the run ended well but wrote no record of this request to {args.log_dir}"
    else:
        error = why_ended(ended, args.time_limit)
    return case.expected() | {"status": STATUS_FAILED, "error": error}


def _is_good(record: dict[str, Any]) -> bool:
    """Whether it is of a run that ended well, with the speed that it is there for."""
    return record.get("status") == STATUS_OK and as_number(record.get("total_throughput")) is not None


def outcome(record: dict[str, Any]) -> str:
    if _is_good(record):
        return f"{float(record['total_throughput']):.3f} token/s"
    return f"failed: {' '.join(str(record.get('error')).split())}"


def say(text: str, end: str = "\n") -> None:
    print(printable(text), end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    args, extra = parse_arguments(sys.argv[1:] if argv is None else argv)
    cases = expand(args, extra)
    done: dict[Case, dict[str, Any]] = {}
    records = [] if args.redo else _records(args.log_dir)
    good = [record for record in records if _is_good(record)]
    if useless := sum(record.get("status") == STATUS_OK for record in records) - len(good):
        say(f"{args.log_dir}: skipped {useless} record{'s' * (useless > 1)} with no speed that can be read")
    for case, record in itertools.product(cases, good):
        if case.is_request_of(record):
            done[case] = record  # the last one counts
    if args.list:
        for case in cases:
            if case not in done:
                print(shlex.join(case.command(args.program, args.log_dir)))
        if done:
            say(f"{len(done)} of {len(cases)} cases are in {args.log_dir} already; --redo runs them again")
        return 0

    try:
        args.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"error: --log-dir {args.log_dir} cannot be made ({error.strerror}); choose another.")
        return 2
    # A shell that starts a job in the background has it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_on_stop()
    results = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.label()}", end=": ")
        if case in done:
            results.append(done[case])
            say(f"{outcome(done[case])} (in {args.log_dir} already)")
            continue
        try:
            results.append(run_case(case, args))
        except OSError as error:  # its output has nowhere to go
            results.append(case.expected() | {"status": STATUS_FAILED, "error": str(error)})
        except KeyboardInterrupt:
            say("stopped; the same command goes on from here")
            return 130
        where = "" if _is_good(results[-1]) else f" (see {args.log_dir / case.label()}.out)"
        say(outcome(results[-1]) + where)

    print_short([Run.read(record) for record in results])
    return 0 if all(map(_is_good, results)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
