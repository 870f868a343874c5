"""Runs run_model.py for every combination of the given values, one process after the other.

    python scripts/sweep.py --model facebook/opt-66b --offload cpu disk --quant-bits 16 4 --batch-size 1 8 -- --loops 5

A failed case does not end the sweep. A case that the log folder has a good record of, with the same arguments, is not run again, so a
sweep that was stopped continues. What follows `--` is passed to run_model.py. Progress goes to stderr, the table to stdout.
Exit code: 0, 1 if a case failed, 2 for bad usage, 130 for Ctrl-C.
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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_inference.records.field import as_number  # noqa: E402
from zero_inference.records.read import read_records  # noqa: E402
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK  # noqa: E402
from zero_inference.report.command import print_short  # noqa: E402
from zero_inference.report.run import Run, in_order, label_runs  # noqa: E402
from zero_inference.utils.format import file_stem, printable  # noqa: E402
from zero_inference.utils.processes import exit_on_stop, last_error_line, run_child  # noqa: E402

# Option: default (None is run_model.py's, which depends on the bits) and choices. `offload` is --cpu-offload, --disk-offload or neither,
# num-gpus is for the launcher, and for run_model.py with the stream engine, which drives all GPUs from one process. The last one varies
# fastest.
AXES: dict[str, tuple[Any, tuple | None]] = {
    "model": ("facebook/opt-1.3b", None),
    "engine": ("deepspeed", None),
    "dtype": ("auto", None),
    "num-gpus": (0, None),
    "prompt-len": (512, None),
    "gen-len": (32, None),
    "offload": ("gpu", ("cpu", "disk", "gpu")),
    "quant-bits": (16, (16, 8, 4)),
    "quant-group-size": (None, None),
    "kv-offload": (0, (0, 1)),
    "batch-size": (1, None),
}


@dataclass(frozen=True)
class Case:
    """One combination: its values by axis, and the arguments of run_model.py, log folder excluded."""

    values: dict[str, Any]
    arguments: tuple[str, ...]

    @property
    def label(self) -> str:
        """Model, engine, offload, and what is not the default."""
        named = "model", "engine", "offload"
        parts = [self.values["model"].rstrip("/").rpartition("/")[2], self.values["engine"], self.values["offload"]]
        others = {name: value for name, value in self.values.items() if name not in named and value != AXES[name][0]}
        return file_stem("-".join([*parts, *(f"{name}{value}" for name, value in others.items())]))

    @property
    def one_process(self) -> bool:
        return self.values["engine"] == "stream"

    def launcher(self, args: argparse.Namespace) -> str:
        return "python" if self.one_process else args.launcher

    def command(self, args: argparse.Namespace) -> list[str]:
        gpus = self.values["num-gpus"]
        launch = {
            "deepspeed": ["deepspeed", *(["--num_gpus", str(gpus)] if gpus else [])],
            "torchrun": ["torchrun", "--standalone", f"--nproc-per-node={gpus or 1}"],
            "python": ["python"],
        }[self.launcher(args)]
        return [*launch, os.path.relpath(args.program), *self.arguments, "--log-dir", str(args.log_dir)]

    def records(self, log_dir: Path) -> list[dict[str, Any]]:
        """Return the records of `log_dir` that runs of this case wrote."""
        gpus = 0 if self.one_process else self.values["num-gpus"]  # else it is among the arguments
        with contextlib.redirect_stderr(io.StringIO()):  # remarks on damaged lines
            found = read_records(log_dir) if log_dir.is_dir() else []
        return [
            record
            for record in found
            if arguments_of(record) == self.arguments and gpus in (0, record.get("world_size"))
        ]


def arguments_of(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the arguments of the run without its log folder and what the launcher added."""
    argv = record.get("argv")
    words = [str(word) for word in argv if not str(word).startswith("--local_rank")] if isinstance(argv, list) else []
    end = words.index("--log-dir") if "--log-dir" in words else len(words)
    return tuple(words[1:end] + words[end + 2 :])


def expand(args: argparse.Namespace, extra: list[str]) -> list[Case]:
    """Return every combination once, in the order given."""
    cases: dict[tuple, Case] = {}
    for chosen in itertools.product(*(getattr(args, name.replace("-", "_")) for name in AXES)):
        values = dict(zip(AXES, chosen))
        if values["engine"] == "stream" and values["offload"] == "gpu":
            values["offload"] = "cpu"  # that engine keeps what does not fit the device in host memory either way
        not_passed = ["quant-group-size"] if values["quant-bits"] == 16 else []
        not_passed += [] if values["engine"] == "stream" and values["num-gpus"] else ["num-gpus"]
        words = ["--dummy"] if args.dummy else []
        for name, value in values.items():
            if name == "offload":
                words += [] if value == "gpu" else [f"--{value}-offload"]
            elif name == "kv-offload":
                words += ["--kv-offload"] if value else []
            elif name not in not_passed and value is not None:
                words += [f"--{name}", str(value)]
        case = Case(values, (*words, *extra))
        cases.setdefault((values["num-gpus"], case.arguments), case)
    return list(cases.values())


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and what follows `--`. Hyphens and underscores are interchangeable in option names."""
    end = argv.index("--") if "--" in argv else len(argv)
    own = [re.sub(r"^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in argv[:end]]
    extra = argv[end + 1 :]
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [-- run_model.py options]", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    swept = parser.add_argument_group("swept: one or more values each")
    for name, (default, choices) in AXES.items():
        shown = "the launcher's" if name == "num-gpus" else "run_model.py's" if default is None else default
        kind = int if default is None else type(default)
        swept.add_argument(
            f"--{name}", nargs="+", type=kind, choices=choices, default=[default], help=f"default: {shown}"
        )
    parser.add_argument("--dummy", action="store_true", help="random weights: needs no checkpoint")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="where records are looked for and written")
    parser.add_argument("--launcher", choices=("deepspeed", "torchrun", "python"), default="deepspeed")
    parser.add_argument("--program", type=Path, default=ROOT / "run_model.py", help="default: run_model.py")
    parser.add_argument("--time-limit", type=float, metavar="S", help="end a case that takes longer, as failed")
    parser.add_argument("--redo", action="store_true", help="also run the cases that have a good record")
    parser.add_argument("--list", action="store_true", help="only print the commands that would run")
    args = parser.parse_args(own)

    given = {word.partition("=")[0].replace("_", "-") for word in extra if word.startswith("--")}
    taken = {f"--{name}" for name in (*AXES, "cpu-offload", "disk-offload", "dummy", "log-dir", "log-file", "dry-run")}
    if wrong := sorted(given & taken):
        parser.error(f"{wrong[0]} after the -- cannot hold for every case; give the sweep's own options before the --")
    if args.launcher == "python" and any(gpus > 1 for gpus in args.num_gpus) and set(args.engine) != {"stream"}:
        parser.error("--launcher python runs one process; use deepspeed or torchrun for --num-gpus")
    if args.time_limit is not None and not args.time_limit > 0:
        parser.error("--time-limit must be above 0 seconds")
    if not args.program.is_file():
        parser.error(f"no program {args.program}")
    if not args.list and find_launcher(args.launcher) is None:
        parser.error(f"{args.launcher} is not installed; install it or use another --launcher")
    return args, extra


def find_launcher(name: str) -> str | None:
    """Return its path; that of this environment also where the environment is not activated."""
    if name == "python":
        return sys.executable
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run the case to its end and return its record, or one made here where it left none."""
    # deepspeed starts `python -m`, which would look for modules in the current folder first (Python 3.10 still does)
    paths = os.pathsep.join(filter(None, [str(args.program.resolve().parent), os.environ.get("PYTHONPATH")]))
    failed = {name.replace("-", "_"): value for name, value in case.values.items()} | {"status": STATUS_FAILED}
    try:
        ended = run_child(
            [find_launcher(case.launcher(args)), *case.command(args)[1:]],
            args.log_dir / f"{case.label}.out",
            env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": paths},
            timeout_s=args.time_limit,
            records=lambda: case.records(args.log_dir),
        )
    except OSError as error:  # its output cannot be written
        return failed | {"error": str(error)}
    if ended.code is None:
        return failed | {"error": f"ended as it took longer than --time-limit {args.time_limit:g}"}
    if ended.record is not None:
        return ended.record
    if ended.code == 0:
        return failed | {"error": f"the run ended well but wrote no record of this request to {args.log_dir}"}
    said = last_error_line(ended.read_output()) or "no output"
    return failed | {"error": f"{said} (exit code {ended.code})"}


def is_good(record: dict[str, Any]) -> bool:
    """Return whether the run ended well and has a speed."""
    return record.get("status") == STATUS_OK and as_number(record.get("total_throughput")) is not None


def say(text: str, end: str = "\n") -> None:
    print(printable(text), end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    args, extra = parse_arguments(sys.argv[1:] if argv is None else argv)
    cases = expand(args, extra)
    earlier = [[] if args.redo else list(filter(is_good, case.records(args.log_dir))) for case in cases]
    if args.list:
        for case, found in zip(cases, earlier):
            if not found:
                print(shlex.join(case.command(args)))
        if done := sum(map(bool, earlier)):
            say(f"{done} of {len(cases)} cases are in {args.log_dir} already; --redo runs them again")
        return 0
    try:
        args.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"error: --log-dir {args.log_dir} cannot be made ({error.strerror}); choose another.")
        return 2
    exit_on_stop()
    results = []
    for number, (case, found) in enumerate(zip(cases, earlier), 1):
        say(f"[{number}/{len(cases)}] {case.label}", end=": ")
        try:
            result = found[-1] if found else run_case(case, args)
        except KeyboardInterrupt:
            say("stopped; the same command continues from here")
            return 130
        results.append(result)
        note = f" (in {args.log_dir} already)" if found else ""
        if is_good(result):
            say(f"{float(result['total_throughput']):.3f} token/s{note}")
        else:
            error = " ".join(str(result.get("error")).split())
            say(f"failed: {error} (see {args.log_dir / case.label}.out)")
    print_short(label_runs(in_order(map(Run.read, results))))
    return 0 if all(map(is_good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
