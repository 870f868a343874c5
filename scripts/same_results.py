#!/usr/bin/env python3
"""Shows that a refactoring changed nothing for users: small real runs of two checkouts, and what differs between them.

    python scripts/same_results.py run CHECKOUT FOLDER      runs every case with CHECKOUT/run_model.py, one at a time
    python scripts/same_results.py compare BEFORE AFTER     one line a difference and exit code 1, or exit code 0

A case that FOLDER already has is skipped, so a run that was stopped goes on where it was: take a new folder after a
change. `--only PATTERN` takes some of the cases.
FOLDER/results/CASE.json has the exit code, the output, the log and the records; FOLDER/CASE is where the case ran.
Both folders have to be made on one machine, and on one without a GPU. The cases are in same_results_cases.py.
What a machine measures (times, rates, peaks, free memory) and its description are masked; words, sizes and token ids are not. This script
imports nothing of the package that it looks at, so any module of that may move.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from same_results_cases import CASES, SHORT, Case, make_inputs

TIMEOUT_S = 300
PLAIN = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Where a checkout runs its cases."""

    checkout: Path
    folder: Path
    inputs: Path

    def named(self, text: str) -> str:
        """Return `text` with this machine's paths replaced by their roles."""
        roles = {self.inputs: "INPUTS", self.checkout: "CHECKOUT", self.folder: "FOLDER", sys.prefix: "PYTHON"}
        for path, role in sorted(roles.items(), key=lambda each: -len(str(each[0]))):  # one may lie in another
            text = text.replace(str(path), role)
        return text

    def result(self, case: Case) -> Path:
        return self.folder / "results" / f"{case.name}.json"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cases whose name matches, such as 'stream*'")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run the cases with a checkout")
    runs.add_argument("checkout", metavar="CHECKOUT", type=Path)
    runs.add_argument("folder", metavar="FOLDER", type=Path)
    runs.add_argument("--inputs", metavar="DIR", type=Path, help="of several folders (default: FOLDER/inputs)")
    compares = commands.add_parser("compare", help="compare two folders of results")
    compares.add_argument("before", metavar="BEFORE", type=Path)
    compares.add_argument("after", metavar="AFTER", type=Path)
    for command in (runs, compares):
        command.add_argument("--only", metavar="PATTERN", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.command == "compare":
        return compare(args.before, args.after, args.only)
    if not (args.checkout / "run_model.py").is_file():
        parser.error(f"{args.checkout} has no run_model.py")
    inputs = args.inputs or args.folder / "inputs"
    return run_all(Place(args.checkout.resolve(), args.folder.resolve(), inputs.resolve()), args.only)


# ---- running


def run_all(place: Place, pattern: str) -> int:
    """Run each case that has no result yet."""
    place.folder.joinpath("results").mkdir(parents=True, exist_ok=True)
    refuse_other_checkout(place)
    make_inputs(place.inputs)
    begun = time.monotonic()
    cases = [case for case in CASES if fnmatch.fnmatchcase(case.name, pattern)]
    for case in cases:
        if place.result(case).exists():
            continue
        started = time.monotonic()
        result = run_case(case, place)
        part = place.result(case).with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.rename(place.result(case))
        print(f"{case.name}: exit code {result['code']}, {time.monotonic() - started:.1f} s", flush=True)
    print(f"{len(cases)} cases in {time.monotonic() - begun:.0f} s: {place.folder}")
    return 0


def refuse_other_checkout(place: Place) -> None:
    """Exit where the folder has results of another checkout, which would be taken for those of this one."""
    note = place.folder / "checkout.txt"
    if note.exists() and note.read_text().strip() != str(place.checkout):
        raise SystemExit(f"{place.folder} has results of {note.read_text().strip()}; take another folder.")
    note.write_text(f"{place.checkout}\n")


def run_case(case: Case, place: Place) -> dict[str, Any]:
    """Start the case's processes in a folder of its own, and collect what they left."""
    scratch = place.folder / case.name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    (scratch / "inputs").symlink_to(place.inputs)  # so that the path of a model is the same in every folder
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment |= PLAIN | {"PYTHONPATH": str(place.checkout), "PATH": programs}
    options = case.options if case.bare else f"{SHORT} {case.options}"
    command = [*launch(case, place.checkout), *options.split()]
    code, stdout, stderr = run_to_end(command, scratch, environment)
    several = case.ranks > 1
    return {
        "command": place.named(" ".join(command[1:])),
        "code": code,
        "stdout": lines_of(place.named(stdout), several),
        "stderr": lines_of(place.named(stderr), several),
        "files": sorted(masked_text(str(path.relative_to(scratch))) for path in scratch.rglob("*") if path.is_file()),
        "log": {path.name: lines_of(path.read_text()) for path in sorted(scratch.rglob("*.log"))},
        "records": {
            path.name: [json.loads(place.named(line)) for line in path.read_text().splitlines()]
            for path in sorted(scratch.glob("logs/*.jsonl"))
        },
        "trace": {path.name: trace_events(path) for path in sorted(scratch.glob("trace*.json"))},
    }


def launch(case: Case, checkout: Path) -> list[str]:
    """Return the command before the options."""
    if case.launcher == "module":
        return [sys.executable, "-m", "zero_inference"]
    ranks, port = str(case.ranks), free_port()
    deepspeed = Path(sys.executable).parent / "deepspeed"
    starts = {
        "": [sys.executable],
        "deepspeed": [str(deepspeed), "--num_accelerators", ranks, "--master_port", port],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", port],
    }
    return [*starts[case.launcher], str(checkout / "run_model.py")]


def run_to_end(command: list[str], cwd: Path, environment: dict[str, str]) -> tuple[int | str, str, str]:
    """Return (exit code, stdout, stderr); a command that takes too long is ended with all it started."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, stdout, stderr
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"no end within {TIMEOUT_S} seconds", stdout, stderr
        raise


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def trace_events(path: Path) -> list[str]:
    """Return the kinds of events in a Chrome trace: categories, or names where an event has none."""
    return sorted({event.get("cat") or event["name"] for event in json.loads(path.read_text())["traceEvents"]})


# ---- comparing


def compare(before: Path, after: Path, pattern: str = "*") -> int:
    """Print what differs, a line each; return 1 if anything does. What only `after` has is a note."""
    old, new = (results_in(folder, pattern) for folder in (before, after))
    if not old:
        raise SystemExit(f"{before} has no results.")
    differences = [f"{name}: was run before only" for name in sorted(old.keys() - new.keys())]
    notes = [f"{name}: was run after only" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        for found, is_note in case_differences(old[name], new[name]):
            (notes if is_note else differences).append(f"{name}: {found}")
    print("".join([*(f"{line}\n" for line in differences), *(f"note: {line}\n" for line in notes)]), end="")
    words = f"{len(differences)} difference{'s' * (len(differences) > 1)}" if differences else "no difference"
    print(f"{len(old.keys() & new.keys())} runs, {words}" + f", {len(notes)} notes" * bool(notes))
    return 1 if differences else 0


def results_in(folder: Path, pattern: str) -> dict[str, dict]:
    """Return case name -> its result."""
    paths = [path for path in folder.glob("results/*.json") if fnmatch.fnmatchcase(path.stem, pattern)]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def case_differences(old: dict, new: dict) -> Iterator[tuple[str, bool]]:
    """Yield (what differs, whether that is only a note)."""
    for key in ("stdout", "stderr", "files"):
        for line in difflib.ndiff(old[key], new[key]):
            if line[0] in "-+":
                yield f"{key} {'before' if line[0] == '-' else 'after'} only: {line[2:]!r}", False
    for key in ("command", "code", "log", "trace", "records"):
        yield from value_differences(masked_values(old[key]), masked_values(new[key]), key)


def value_differences(old: Any, new: Any, where: str) -> Iterator[tuple[str, bool]]:
    """Yield the differences of two JSON values, each by its dotted path."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            path = f"{where}.{key}"
            if key not in new:
                yield f"{path} is gone, was {shown(old[key])}", False
            elif key not in old:
                yield f"{path} is new: {shown(new[key])}", True
            else:
                yield from value_differences(old[key], new[key], path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from value_differences(before, after, f"{where}[{number}]")
    elif old != new or type(old) is not type(new):
        yield f"{where} was {shown(old)}, is {shown(new)}", False


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---- masking

# Values of a record that are measured: only their kind (a number, a text, null) is compared, there and in all below.
MEASURED = re.compile(
    r".*(_s|_gbps|_tflops|_spread|_throughput)|seconds|timestamp|environment|peak_(gpu|host)_bytes"
    r"|load_average_before|usable_cores|slowest_step_at|slowest_step_over_median|gbps_while_busy|fraction_of_limit"
    r"|copied_bytes|ahead_bytes|link_ahead_bytes"  # how far the copies had got when a step began
    r"|bound_by|link_from"
)  # which of two measured rates was larger
# Of text: what is measured becomes "#". The words and all other numbers stay.
MASKS = tuple(
    (re.compile(pattern), mask)
    for pattern, mask in (
        (r"^[\d.]+% of (the limit|the \w+'s limit|the limit of [\w' ]+): .*", "#% of LIMIT"),
        (r"^(time to first token \(prefill\)|decode \(\d+ steps?\)|total)  .*", r"\1 #"),  # rows of the results' table
        (r"^((?:median of \d+ loops|1 loop)) {2,}seconds .*", r"\1"),  # its head: as wide as the figures below
        (r"\b\d+(\.\d+)?(?= ?(s|ms|us|token/s|GB/s|TFLOP/s|GiB free|GiB are there)\b)", "#"),
        (r"\b[\d.]+%(?= of (their median, so|the time))", "#%"),
        (r"(busy|planned:) [\d.]+", r"\1 #"),
        (r"(peak (?:gpu mem:|GPU|host)) [\d.]+", r"\1 #"),
        (r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d([.,:]\d+)?(\+\d\d:\d\d)?", "TIME"),
        (r"0x[0-9a-f]{6,}", "ADDRESS"),
        (r"(?i)\b((?:sub)?process(?:es)?|pids?) ?([:=] ?)?\d+", r"\1 PID"),
        (r"(master[_-]port[= ]|127\.0\.0\.1:|localhost:)\d+", r"\1PORT"),
    )
)
# Lines that come and go with the machine's speed and load.
PASSING = re.compile(
    r"loading [\d.]+ of |.*, token \d+/\d+$|loading weights: |generating: |importing |compiling or |decode step \d+ of loop"
    r"|warning: (the load average was|the decode times of)|-{20,}$"
    r"|.*\d(it/s|s/it)\b|.*DeepSpeed deepspeed\S* (built|compil)|.*Time to load \S+ op|USDT:.* profiler_"
)


def lines_of(text: str, in_any_order: bool = False) -> list[str]:
    """Return the lines of `text` with what is measured masked; those of several ranks sorted, and each kept once."""
    lines = [masked_text(line) for line in text.replace("\r", "\n").splitlines() if not PASSING.match(line)]
    return sorted(set(lines)) if in_any_order else lines


def masked_text(text: str) -> str:
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def masked_values(value: Any, measured: bool = False) -> Any:
    """Return `value` with what is measured replaced by its kind."""
    if isinstance(value, dict):
        return {key: masked_values(item, measured or bool(MEASURED.fullmatch(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [masked_values(item, measured) for item in value]
    if measured and value is not None:
        return "a text" if isinstance(value, str) else "a flag" if isinstance(value, bool) else "a number"
    return masked_text(value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
