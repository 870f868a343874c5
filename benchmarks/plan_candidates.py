"""Run the candidates of `zero-inference plan` and check that its best is within 5% of the fastest.

    python benchmarks/plan_candidates.py RESULTS --model opt-30b --model llama-3.1-70b --gpu-memory 16 24 48 --limit-s 700
    python benchmarks/plan_candidates.py RESULTS --model opt-30b --gpu-memory 16 --list    # what would be tried, estimated seconds
    python benchmarks/plan_candidates.py RESULTS --model opt-30b --gpu-memory 16 --limit-s 0    # only the tables, of what was tried
    python benchmarks/plan_candidates.py RESULTS --model llama-3.1-70b --gpu-memory 24 --quant-bits 4 --batch-size 1 --best 1

Each model is planned with each GiB of device memory, for the saved hardware profile of this machine or that of --machine. Then the first
places of all plans are run, then the second ones and so on, each command once, with random weights. Candidates that are predicted to decode
less than half as fast as the best get few tokens, and more if they turn out to be faster. A second call continues: no command is run twice,
also if it failed, unless it is removed from `trials` in RESULTS/candidates.json, which holds the candidates of this call and all commands
that were run. table.md is the table printed at the end; trials/NN.jsonl and NN.out are record and output of a trial.

Exit code: 0; 1 if a candidate was not run, or a plan's best is more than 5% slower than another candidate; 2 for bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.candidate_trials import ALL, ALL_COLUMNS, COLUMNS, Candidate, Pair, Result, Trials  # noqa: E402
from zero_inference.config.options import ENGINES, QUANT_BITS  # noqa: E402
from zero_inference.errors import UsageError  # noqa: E402
from zero_inference.records.read import read_records  # noqa: E402
from zero_inference.records.schema import STATUS_OK  # noqa: E402
from zero_inference.utils.files import write_atomically  # noqa: E402
from zero_inference.utils.processes import ANY_ERROR, isolated_module, isolated_ranks, last_error_line, run_child  # noqa: E402  # noqa: E402
from zero_inference.utils.tables import render  # noqa: E402

TIMEOUT_FACTOR, MIN_TIMEOUT_S = 2.5, 90  # of the estimate


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    args = parse_args(argv)
    try:
        results = read_results(args.results / "candidates.json")
        trials = Trials(plan_all(args), results, args.gen_len)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for each in trials.due():
            tokens = trials.tokens_of(each.command)
            print(f"{trials.estimate_s(each):.0f} s, {tokens} tokens, {each.predicted:.3g} token/s: {each.command}")
        print(f"{sum(map(trials.estimate_s, trials.due())):.0f} s in all", file=sys.stderr)
        return 0
    save(trials, args.results)
    run_all(trials, args.results, lambda: args.limit_s - (time.monotonic() - started))
    print(save(trials, args.results), end="")
    return 0 if all(row["holds"] for row in trials.verdicts()) else 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", action="append", required=True, help="may be given several times")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", nargs="+", default=[ALL], help="(default: all that is free)"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--gen-len", type=int, default=32, help="that is planned for (default: %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=["stream", "deepspeed"])
    parser.add_argument("--quant-bits", type=int, choices=QUANT_BITS, nargs="+", default=list(QUANT_BITS))
    parser.add_argument("--best", type=int, metavar="N", help="consider only the first N of each plan (default: all)")
    parser.add_argument("--machine", metavar="FILE", help="this one, as `zero-inference link --save FILE` wrote it")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="end, and start no trial that would not end"
    )
    parser.add_argument("--list", action="store_true", help="only print estimates and commands")
    args = parser.parse_args(argv)
    if args.gen_len < 2:
        parser.error(f"--gen-len {args.gen_len}: at least 2, or nothing is decoded")
    return args


def read_results(path: Path) -> dict[str, Result]:
    """Return the results of earlier calls, by command."""
    try:
        return json.loads(path.read_text())["trials"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} was not written by this script; name another folder, or remove it.") from error


def plan_all(args: argparse.Namespace) -> dict[Pair, list[Candidate]]:
    """Return the candidates of each pair. The first plan may measure the machine; the others run in parallel."""
    pairs = list(dict.fromkeys(itertools.product(args.model, args.gpu_memory)))
    first = plan(args, pairs[0])
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(pairs, [first, *pool.map(lambda pair: plan(args, pair), pairs[1:])]))


def plan(args: argparse.Namespace, pair: Pair) -> list[Candidate]:
    """Return the configurations of `zero-inference plan`. Raises UsageError where it fails; the reason is on stderr then."""
    model, gpu_memory = pair
    sizes = ["--batch-size", str(args.batch_size), "--prompt-len", str(args.prompt_len), "--gen-len", str(args.gen_len)]
    options = ["--model", model, "--dummy", *sizes, "--engine", *args.engine, "--all", "--json"]
    options += ["--quant-bits", *map(str, args.quant_bits)]
    options += [] if gpu_memory == ALL else ["--max-gpu-memory", str(gpu_memory)]
    options += [] if args.machine is None else ["--machine", args.machine]
    done = subprocess.run(isolated_module("zero_inference", "plan", *options), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UsageError(f"{model} with {gpu_memory} GiB: no plan (exit code {done.returncode}).")
    found = json.loads(done.stdout)
    if count := found["not_predicted"]["count"]:
        print(f"{model} with {gpu_memory} GiB: {count} more fit, and are not predicted", file=sys.stderr)
    return [Candidate(row["command"], row["tokens_per_s"], row) for row in found["configurations"][: args.best]]


def run_all(trials: Trials, results: Path, left_s: Callable[[], float]) -> None:
    """Run the trials that are due, as far as there is time."""
    left_out: set[str] = set()
    while due := [each for each in trials.due() if each.command not in left_out]:
        each, begun_s, now_left_s = due[0], time.monotonic(), left_s()
        estimate_s = trials.estimate_s(each)
        result = run_one(trials, each, results, now_left_s) if estimate_s <= now_left_s else None
        if result is None:
            left_out.add(each.command)
            outcome = f"no time, estimated {estimate_s:.0f} s of {max(0.0, now_left_s):.0f} s"
        else:
            trials.results[each.command] = result
            save(trials, results)
            rate = result["measured_tokens_per_s"]
            outcome = result["failed"] or f"{rate:.3g} token/s, predicted {each.predicted:.3g}"
        print(
            f"[{len(due)} to try] {each.command}: {outcome} ({time.monotonic() - begun_s:.0f} s)",
            file=sys.stderr,
            flush=True,
        )


def run_one(trials: Trials, candidate: Candidate, results: Path, left_s: float) -> Result | None:
    """Run `candidate`; None where it was stopped because the time was up."""
    folder = results / "trials"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{1 + max((int(path.stem) for path in folder.glob('*.out')), default=0):02d}"
    records, tokens = folder / f"{name}.jsonl", trials.tokens_of(candidate.command)
    limit_s = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * trials.estimate_s(candidate))
    ended = run_child(
        command_of(candidate, tokens, folder / f"{name}.log"),
        folder / f"{name}.out",
        timeout_s=min(limit_s, left_s),
        records=lambda: read_records(records) if records.exists() else [],
        is_good=lambda record: record.get("status") == STATUS_OK,
    )
    if ended.code is None and left_s < limit_s:
        return None
    rate, failed = (ended.record or {}).get("decode_throughput"), None
    if rate is None:
        why = f"ended as it took longer than {limit_s:.0f} s" if ended.code is None else f"exit code {ended.code}"
        failed = why if ended.code is None else last_error_line(ended.read_output(), ANY_ERROR) or why
    return {"tokens": tokens, "measured_tokens_per_s": rate, "failed": failed, "log": f"trials/{name}.jsonl"}


def command_of(candidate: Candidate, tokens: int, log: Path) -> list[str]:
    """Return the candidate's command as a child process, without its launcher; later options override earlier ones."""
    words = shlex.split(candidate.command)
    trial = ["--gen-len", str(tokens), "--loops", "1", "--warmup", "1", "--log-file", str(log)]
    options = [*words[words.index("run_model.py") + 1 :], *trial]
    return isolated_ranks("zero_inference", max(1, candidate.row["gpus"]), "run", *options)


def save(trials: Trials, results: Path) -> str:
    """Write candidates.json and table.md, and return the latter."""
    results.mkdir(parents=True, exist_ok=True)
    rows = trials.rows()
    found = json.dumps({"candidates": rows, "trials": trials.results}, indent=1)
    tables = f"{render(trials.verdicts(), COLUMNS, 'md')}\n{render(rows, ALL_COLUMNS, 'md')}"
    for name, text in (("candidates.json", f"{found}\n"), ("table.md", tables)):
        with write_atomically(results / name) as part:
            part.write_text(text)
    return tables


if __name__ == "__main__":
    sys.exit(main())
