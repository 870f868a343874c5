"""What one call of a norm costs the host, ours beside the peers: the time to enqueue it, with a GPU that is never waited for.

    python benchmarks/norm_host_time.py [--case rms ...] [--out FILE]        (exit code 2 without device or kernels)

Forward passes of one row of 4096 elements in bfloat16, without and with gradients wanted. Microseconds a call: the median and the
20th and 80th percentile of ROUNDS rounds of CALLS calls. A provider that is not installed or fails is left out, and stderr says so.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CASES = ("rms", "add_rms", "layer", "add_layer", "poly", "mul_poly")
HIDDEN = 4096
CALLS, ROUNDS = 200, 25  # a round's launches fit in the queue of a stream, so that the host does not wait for the GPU
COLUMNS = ("case", "gradient", "provider", "us", "p20 (us)", "p80 (us)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as TSV")
    args = parser.parse_args()
    from run_cases import why_not_here

    reason = why_not_here()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    rows = [row for name in args.case for row in measure(name)]
    for row in (COLUMNS, *rows):
        print("\t".join(map(str, row)))
    if args.out:
        with open(args.out, "w", newline="") as file:
            csv.writer(file, delimiter="\t", lineterminator="\n").writerows((COLUMNS, *rows))
    return 0


def measure(name: str) -> list[tuple]:
    """Rows of COLUMNS for all providers of a case."""
    import torch
    from cases import CASES as cases

    case = cases[name]
    rows = []
    for gradient in (False, True):
        inputs = case.build_inputs(HIDDEN, 1, 1, torch.bfloat16, 1e-6)
        providers = {"cuda": case.make_cuda(inputs), "naive": case.make_naive(inputs), **case.make_peers(inputs)}
        for provider, run in providers.items():
            try:
                with torch.set_grad_enabled(gradient):
                    us = sorted(round_us(functools.partial(case.forward, run, inputs)) for _ in range(ROUNDS))
            except Exception as error:  # libraries raise classes of their own
                print(
                    f"note: no time of {provider}, {name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}",
                    file=sys.stderr,
                )
                continue
            low, high = (us[round(share * (ROUNDS - 1))] for share in (0.2, 0.8))
            rows.append(
                (
                    name,
                    "yes" if gradient else "no",
                    provider,
                    *(f"{value:.2f}" for value in (statistics.median(us), low, high)),
                )
            )
    return rows


def round_us(call) -> float:
    """Host microseconds a call over CALLS calls; the GPU has nothing to do when it starts."""
    import torch

    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent_s = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent_s / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
