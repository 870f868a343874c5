#!/usr/bin/env python3
"""Measures engines and their peers on this machine's GPU, with random weights: the cases of scripts/measure_gpu.yaml.

    python scripts/measure_gpu.py RESULTS readme --llama FOLDER --limit-s 1700
    python scripts/measure_gpu.py RESULTS opt13b-fp16-stream opt13b-int4-stream --extra "--num-gpus 2"
    python scripts/measure_gpu.py RESULTS readme --list

Names are of groups and cases, which run in turn. A case leaves CASE.txt (what it printed), CASE.jsonl (records of runs), CASE.plan.json
(a plan, whose first command is run) or CASE.json (llama.cpp). RESULTS, CHECKOUT, SITE and so on stand there for folders of this machine.
steps.txt has its seconds, and the most device memory that nvidia-smi saw in use, CUDA contexts included. Cases after link use its
RESULTS/machine.json.

A case is ended after 2.5 times its estimate, and 90 s at least. One whose estimate exceeds the rest of --limit-s is not started, and
named at the end. What fails leaves the files of an earlier start, and CASE.part with what it printed.

Exit code: 0; 1 if a case failed or was left out; 2 for bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from zero_inference.utils.processes import exit_on_stop, last_error_line, process_group  # noqa: E402

RUN = ["--dummy", "--gen-len", "17", "--loops", "3", "--warmup", "1"]  # options of a case overrule them
TIMES_AS_LONG, AT_LEAST_S = 2.5, 90  # when a case is ended
TIMED_OUT = 124  # the exit code of timeout(1)
MEMORY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
TEXTS = (".csv", ".json", ".jsonl", ".md", ".part", ".tsv", ".txt")


def main(argv: list[str] | None = None) -> int:
    args, cases = parse_args(argv)
    if args.list:
        for name, (estimate_s, lines) in cases.items():
            print(f"{name}: {estimate_s} s: {' & '.join(lines)}")
        print(f"{sum(estimate_s for estimate_s, _ in cases.values())} s in all", file=sys.stderr)
        return 0
    exit_on_stop()
    args.results.mkdir(parents=True, exist_ok=True)
    started, failed, skipped = time.monotonic(), [], []
    for name, (estimate_s, lines) in cases.items():
        passed_s = time.monotonic() - started
        left_s = args.limit_s - passed_s
        if estimate_s > left_s or (lines[0].startswith("llama_cpp ") and not args.llama):
            skipped.append(name)
            continue
        print(f"== [{passed_s:.0f} s] {name}, about {estimate_s} s", file=sys.stderr, flush=True)
        if not run_case(name, lines, min(max(AT_LEAST_S, TIMES_AS_LONG * estimate_s), left_s), args):
            failed.append(name)
    if list(args.results.glob("*.jsonl")):
        report = [sys.executable, "-m", "zero_inference", "report", str(args.results), "--format", "md"]
        with (args.results / "table.md").open("w") as table:
            subprocess.run(report, stdout=table, cwd=ROOT, check=False)
    print(f"== [{time.monotonic() - started:.0f} s] done", file=sys.stderr)
    for what, names in (("failed", failed), ("left (no time, or no --llama)", skipped)):
        if names:
            print(f"{what}: {' '.join(names)}", file=sys.stderr)
    return 1 if failed or skipped else 0


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, tuple[int, list[str]]]]:
    """Return the options and, by name, the cases: estimated seconds, and commands that run side by side."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=lambda text: Path(text).resolve(), metavar="RESULTS")
    parser.add_argument("names", nargs="+", metavar="NAME", help="groups and cases")
    parser.add_argument("--cases", type=Path, default=Path(__file__).with_suffix(".yaml"), metavar="FILE")
    parser.add_argument("--list", action="store_true", help="only print the cases, with estimated seconds")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds for all (default: no limit)")
    parser.add_argument(
        "--launch", default=shlex.quote(sys.executable), help="what starts a run (default: this Python)"
    )
    parser.add_argument("--extra", default="", help="options for every run, after those of its case")
    parser.add_argument(
        "--llama", type=Path, metavar="FOLDER", help="a build of llama.cpp, or llama-cpp-python's source package"
    )
    parser.add_argument("--work", default="/dev/shm/llama", help="for llama.cpp's weights (default: %(default)s)")
    args = parser.parse_intermixed_args(argv)  # names may follow options
    groups = yaml.safe_load(args.cases.read_text())
    texts = {name: text for group in groups.values() for name, text in group.items() if text}
    names = [case for name in args.names for case in groups.get(name, [name])]
    if unknown := [name for name in names if name not in texts]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join([*groups, *texts])}")
    split = {name: texts[name].split(maxsplit=1) for name in names}
    return args, {name: (int(estimate_s), text.split(" & ")) for name, (estimate_s, text) in split.items()}


def run_case(name: str, lines: list[str], limit_s: float, args: argparse.Namespace) -> bool:
    """Run a case, add its line to steps.txt, and return whether it went well."""
    started, part, machine = time.time(), args.results / f"{name}.part", args.results / "machine.json"
    env = os.environ | ({"ZERO_INFERENCE_MACHINE": str(machine)} if machine.exists() else {})
    code, peak_mib = run_together([command_of(line, name, args) for line in lines], part, env, limit_s)
    if not code and lines[0].startswith("plan "):
        left_s = started + limit_s - time.time()
        command = first_planned_command(part.replace(part.with_suffix(".plan.json")), lines[0], name, args)
        code, peak_mib = run_together([command], part, env, left_s)
    step = f"{name} {time.time() - started:.0f} s, exit code {code}"
    step += f", at most {peak_mib} MiB of device memory in use" if peak_mib else ""
    with (args.results / "steps.txt").open("a") as steps:
        steps.write(f"{step}\n")
    said = last_error_line(part.read_text(errors="replace")) if code else None
    print(f"{step}{f': {said}' if said else ''}", file=sys.stderr, flush=True)
    if not code:
        part.replace(part.with_suffix(".txt"))
    (args.results / f"{name}.log").unlink(missing_ok=True)  # its figures are in the record
    replace_paths(args.results, started)
    return not code


def command_of(line: str, name: str, args: argparse.Namespace) -> list[str]:
    kind, *words = (word.replace("RESULTS", str(args.results)) for word in shlex.split(line))
    if kind == "run":
        log = ["--log-file", f"{args.results}/{name}.log"]
        return [*shlex.split(args.launch), "run_model.py", *RUN, *log, *words, *shlex.split(args.extra)]
    if kind == "plan":
        words = [*words[: words.index("--")], "--dummy", "--json", "--verbose", "0"]
        return [sys.executable, "-m", "zero_inference", "plan", *words]
    if kind == "llama_cpp":
        given = "--source" if list(args.llama.glob("llama_cpp_python-*.tar.*")) else "--programs"
        places = [given, str(args.llama), "--work", args.work, "--output", f"{args.results}/{name}.json"]
        return [sys.executable, "benchmarks/peers/llama_cpp.py", *places, *words]
    return [sys.executable, kind, *words]


def first_planned_command(plan: Path, line: str, name: str, args: argparse.Namespace) -> list[str]:
    """Return the first command of a plan, with what follows `--` in the line of its case; the file keeps only the JSON object."""
    text = plan.read_text()
    plan.write_text(text[text.index("{") : text.rindex("}") + 1] + "\n")
    first = json.loads(plan.read_text())["configurations"][0]["command"]
    return command_of(f"run {first.partition('run_model.py ')[2]} {line.partition(' -- ')[2]}", name, args)


def run_together(commands: list[list[str]], output: Path, env: Mapping[str, str], limit_s: float) -> tuple[int, int]:
    """Return an exit code (0 if all of them are), and the most MiB of a device's memory that nvidia-smi saw in use."""
    ends = time.monotonic() + limit_s
    with tempfile.TemporaryFile("w+") as used:
        with output.open("w") as out, contextlib.ExitStack() as stack:
            if shutil.which(MEMORY[0]):
                stack.enter_context(process_group(MEMORY, stdout=used, stderr=subprocess.DEVNULL))
            options = dict(stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
            leaders = [stack.enter_context(process_group(command, **options)) for command in commands]
            try:
                codes = [leader.wait(max(0, ends - time.monotonic())) for leader in leaders]
            except subprocess.TimeoutExpired:
                codes = [TIMED_OUT]
        used.seek(0)
        seen = [int(line) for line in used if line.strip().isdigit()]
    return next(filter(None, codes), 0), max(seen, default=0)


def replace_paths(results: Path, since: float) -> None:
    """Let words stand for this machine's folders in what was written since that time."""
    words = {str(Path.home()): "HOME", tempfile.gettempdir(): "TMP", sys.prefix: "PREFIX"}
    words |= {path: "SITE" for path in sys.path if path.endswith("-packages")}
    words |= {str(ROOT): "CHECKOUT", str(results): "RESULTS"}
    longest_first = sorted(set(words) - {"/", "/usr"}, key=len, reverse=True)
    folders = re.compile(rf"({'|'.join(map(re.escape, longest_first))})(?![\w.-])")
    for path in results.rglob("*"):
        if path.suffix in TEXTS and path.stat().st_mtime >= since:
            text = path.read_text(errors="replace")
            if (replaced := folders.sub(lambda found: words[found[0]], text)) != text:
                path.write_text(replaced)


if __name__ == "__main__":
    sys.exit(main())
