"""What the host's cores add to the link: runs of the stream engine with and without them, beside DeepSpeed and llama.cpp.

    python benchmarks/beyond_link.py RESULTS                        # every case but the peers that need a source package
    python benchmarks/beyond_link.py RESULTS llama13b-int4-bs1-off llama13b-int4-bs1-auto --limit-s 120
    python benchmarks/beyond_link.py RESULTS --list                 # names, estimated seconds, commands
    python benchmarks/beyond_link.py RESULTS --table                # only the table, of what lies there

Each case is a process of its own, which leaves RESULTS/CASE.jsonl (llama.cpp: RESULTS/CASE.json) and what it printed in
RESULTS/CASE.out; a case that takes much longer than estimated is ended. RESULTS/table.md and table.tsv have the last record of each.
Estimates hold for an H200 with 16 cores and a link of 55 GB/s, and assume that the cores add nothing. Most of a short run is
loading and warming up: random weights of Llama-2-13B in int4 take 2 s to make and quantize, of Llama-3.1-70B 5 s, of Llama-3.1-405B 19 s.

Exit code: 0, 1 if a case failed or was left out, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.beyond_link_cases import CASES, COMMON  # noqa: E402
from zero_inference.records.read import read_records  # noqa: E402
from zero_inference.records.schema import STATUS_OK  # noqa: E402
from zero_inference.runtime.child_runs import ANY_ERROR, last_words, run_child  # noqa: E402
from zero_inference.runtime.tables import Column, decimals, percent, render  # noqa: E402

TIMES_AS_LONG, AT_LEAST_S = 2.5, 90  # when a case is ended
SOURCE = "--source"  # of llama.cpp, which only its cases need


COLUMNS = (
    Column("case", "case", dtype="string"),
    Column("model", "model", dtype="string"),
    Column("engine", "engine", dtype="string"),
    Column("bits", "bits", dtype="Int64"),
    Column("batch", "batch", dtype="Int64"),
    Column("tokens_per_s", "decode token/s", decimals(2)),
    Column("step_s", "s a step", decimals(4)),
    Column("weights_gb_per_s", "GB/s of weights a step", decimals(1)),
    Column("over_link_gb_per_s", "GB/s over the link", decimals(1)),
    Column("bound_by", "bound by", dtype="string"),
    Column("of_limit", "of the limit", percent),
    Column("times_off", "times off", decimals(2)),
    Column("load_s", "load s", decimals(1)),
)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    names = args.cases or [name for name, case in CASES.items() if args.source or not case.peer]
    if args.list:
        for name in names:
            print(f"{name}: {CASES[name].estimate_s:.0f} s: {shlex.join(command_of(name, args))}")
        print(f"{sum(CASES[name].estimate_s for name in names):.0f} s in all", file=sys.stderr)
        return 0
    args.results.mkdir(parents=True, exist_ok=True)
    failed = 0 if args.table else run_all(names, args)
    rows = list(rows_of(args.results))
    (args.results / "table.md").write_text(render(rows, COLUMNS, "md"))
    (args.results / "table.tsv").write_text(tsv_of(rows))
    print(render(rows, COLUMNS, "md"), end="")
    return 1 if failed else 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=f"cases: {', '.join(CASES)}")
    parser.add_argument("results", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all, llama.cpp's only with --source")
    parser.add_argument("--limit-s", type=float, help="start no case that is estimated to end after so many seconds")
    parser.add_argument("--threads", type=int, help="of the cores' products: --cpu-threads, and llama.cpp's -t")
    parser.add_argument(SOURCE, type=Path, help="folder with the source package of llama-cpp-python")
    parser.add_argument("--work", type=Path, help="where llama.cpp is built and its weights lie (default: RESULTS)")
    parser.add_argument("--extra", default="", help="options for every run of run_model.py, after those of the case")
    parser.add_argument("--program", type=Path, default=ROOT / "run_model.py", help="default: run_model.py")
    parser.add_argument("--list", action="store_true", help="only print names, estimates and commands")
    parser.add_argument("--table", action="store_true", help="only make the table of the records that lie there")
    args = parser.parse_intermixed_args(argv)  # cases may follow options
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if not args.source and not args.list and (peers := [name for name in args.cases if CASES[name].peer]):
        parser.error(f"{peers[0]} needs {SOURCE} FOLDER, with the source package of llama-cpp-python")
    return args


def run_all(names: list[str], args: argparse.Namespace) -> int:
    """Run the cases that the limit leaves time for; how many failed or were left out."""
    started = time.monotonic()
    failed = 0
    for number, name in enumerate(names, 1):
        passed_s = time.monotonic() - started
        head = f"[{passed_s:.0f} s, {number} of {len(names)}] {name}"
        left_s = float("inf") if args.limit_s is None else args.limit_s - passed_s
        if CASES[name].estimate_s > left_s:
            print(
                f"{head}: left out, estimated {CASES[name].estimate_s:.0f} s of {max(0.0, left_s):.0f} s",
                file=sys.stderr,
            )
            failed += 1
            continue
        why = run_one(name, args, left_s)
        failed += why is not None
        print(f"{head}: {why or 'done'} ({time.monotonic() - started - passed_s:.0f} s)", file=sys.stderr, flush=True)
    return failed


def run_one(name: str, args: argparse.Namespace, left_s: float) -> str | None:
    """Run a case to its end; None where it left a good result, else why not."""
    limit_s = min(max(AT_LEAST_S, TIMES_AS_LONG * CASES[name].estimate_s), max(AT_LEAST_S, left_s))
    path = args.results / f"{name}.jsonl"
    ended = run_child(
        command_of(name, args),
        args.results / f"{name}.out",
        limit_s=limit_s,
        records=lambda: read_records(path) if path.exists() else [],
        is_good=is_good,
    )
    if ended.code == 0 and (CASES[name].peer or (ended.record and is_good(ended.record))):
        return None
    if ended.code is None:
        return f"ended as it took longer than {limit_s:.0f} s"
    return f"failed ({ended.code}): {last_words(ended.said(), ANY_ERROR)}"


def command_of(name: str, args: argparse.Namespace) -> list[str]:
    case = CASES[name]
    if case.peer:
        threads = ["--threads", str(args.threads)] if args.threads else []
        work = args.work or args.results / "llama.cpp"
        places = [SOURCE, str(args.source), "--work", str(work), "--output", str(args.results / f"{name}.json")]
        program = ROOT / "benchmarks" / "peers" / "llama_cpp.py"
        return [sys.executable, str(program), *shlex.split(case.options), *places, *threads]
    threads = ["--cpu-threads", str(args.threads)] if args.threads and name.endswith("-auto") else []
    log = ["--log-file", str(args.results / f"{name}.log")]
    options = [*shlex.split(f"{COMMON} {case.options}"), *threads, *shlex.split(args.extra)]
    return [sys.executable, str(args.program), *options, *log]


def is_good(record: dict[str, Any]) -> bool:
    return record.get("status") == STATUS_OK and record.get("decode_throughput") is not None


def rows_of(results: Path) -> Iterator[dict[str, Any]]:
    """The last good record of each case in the order of CASES; of llama.cpp a row for each batch."""
    step_s: dict[str, float] = {}
    for name, case in CASES.items():
        path = results / f"{name}.{'json' if case.peer else 'jsonl'}"
        if not path.exists():
            continue
        if case.peer:
            yield from peer_rows(name, json.loads(path.read_text()))
            continue
        if good := [record for record in read_records(path) if is_good(record)]:
            row = row_of(name, good[-1])
            step_s[name] = row["step_s"]
            without, auto, _ = name.partition("-auto")
            off = step_s.get(f"{without}-off") if auto else None
            yield row | {"times_off": off and off / row["step_s"]}


def row_of(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """By COLUMNS. `GB/s of weights a step` counts all weights, also of experts that no token chose."""
    step_s = record["decode_latency_s"] / (record["gen_len"] - 1)
    over_link = (record.get("transfers") or {}).get("host_to_device_bytes_per_step")
    limit = record.get("limit") or {}
    return {
        "case": name,
        "model": record["model"],
        "engine": record["engine"],
        "bits": record["quant_bits"],
        "batch": record["batch_size"],
        "tokens_per_s": record["decode_throughput"],
        "step_s": step_s,
        "weights_gb_per_s": record["weight_bytes"] / step_s / 1e9,
        "over_link_gb_per_s": None if over_link is None else over_link / step_s / 1e9,
        "bound_by": limit.get("bound_by"),
        "of_limit": limit.get("fraction_of_limit"),
        "load_s": record["load_s"],
    }


def peer_rows(name: str, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in found["rows"]:
        yield {
            "case": name,
            "model": found["model"],
            "engine": f"{found['version']}, {found['threads']} threads",
            "bits": 4,
            "batch": each["batch"],
            "tokens_per_s": each["tokens_per_s"],
            "step_s": each["step_s"],
            "weights_gb_per_s": found["weight_bytes"] / each["step_s"] / 1e9,
        }


def tsv_of(rows: list[dict[str, Any]]) -> str:
    """In full precision under the columns' names; a value that is not known is empty."""
    values = [[row.get(column.name) for column in COLUMNS] for row in rows]
    lines = [[column.name for column in COLUMNS], *([("" if v is None else str(v)) for v in each] for each in values)]
    return "".join("\t".join(line) + "\n" for line in lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as error:
        sys.exit(f"error: {error}")
