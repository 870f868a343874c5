"""How fast the host's cores multiply weights where they lie in host memory, against what they can read.

    python benchmarks/cores_products.py [--formats bf16 fp16 int8 int4] [--rows 1 2 4 8 16 32 64] [--instructions avx512 amx]
        [--shape 8192x8192] [--threads N] [--set-gb 4] [--seconds 0.2] [--rounds 1] [--peer] [--busy-link]
        [--flags="-DZERO_INFERENCE_PREFETCH=3"] [--json FILE]

All weights of a set are multiplied one behind the other, over and over, by threads pinned to a core each; the set is larger than the
caches. A figure is GB/s (1e9 bytes) of the weights as stored, scales and minima included. "read" is a loop that only adds up the
words. --peer: torch's own products of bfloat16 and int4 beside, with as many threads. --busy-link: page-locked memory is copied to
the GPU meanwhile, in blocks of 256 MiB, and its rate is in the next column. --flags: the kernels are compiled with more flags than
usual, to compare builds: each --flags, which may be empty, is a build, and they take turns. --rounds N: each figure is the median of N
rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common.host_cores import FORMATS, GROUP, Link, busy_link, fill, library_of, processor
from benchmarks.common.shapes import shape_of
from zero_inference.cpu.library import DTYPES, INSTRUCTIONS


@dataclass
class Row:
    """One figure, medians: `gbps` of stored bytes that the cores consumed, and `link_gbps` that were copied to the GPU meanwhile."""

    what: str
    instructions: str
    rows: int
    gbps: float
    link_gbps: float | None
    flags: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp16", "int8", "int4"], choices=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of the input")
    parser.add_argument("--instructions", nargs="+", choices=INSTRUCTIONS, help="default: the best two that are here")
    parser.add_argument("--shape", type=shape_of, default=(8192, 8192), metavar="ROWSxCOLUMNS", help="of every weight")
    parser.add_argument("--threads", type=int, help="default: one for each CPU of this process but one")
    parser.add_argument("--set-gb", type=float, default=4.0, help="weights of a format, in 1e9 bytes")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement")
    parser.add_argument("--peer", action="store_true", help="torch's own products beside")
    parser.add_argument("--busy-link", action="store_true", help="copy to the GPU meanwhile")
    parser.add_argument(
        "--flags",
        action="append",
        help="for the compiler, behind the usual ones (--flags=-DNAME=1); again for another build",
    )
    parser.add_argument("--rounds", type=int, default=1, help="each figure is the median of so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    args.threads = args.threads or max(1, len(cpus) - 1)
    args.cpus = (ctypes.c_int32 * args.threads)(*(cpus[-1 - index % len(cpus)] for index in range(args.threads)))
    args.flags = args.flags or [""]
    args.libraries = [library_of(flags) for flags in args.flags]
    best = args.libraries[0].zero_inference_best_instructions()
    args.instructions = args.instructions or list(INSTRUCTIONS[max(0, best - 1) : best + 1])
    torch.set_num_threads(args.threads)
    print(
        f"{processor()}, {args.threads} threads, {args.shape[0]} x {args.shape[1]} weights, groups of {GROUP}",
        flush=True,
    )
    print(f"{'what':<22}{'instructions':<14}{'rows':>5}{'GB/s':>9}{'link GB/s':>11}  flags", flush=True)
    with busy_link() if args.busy_link else contextlib.nullcontext(None) as link:
        rows = list(measure_all(args, link))
    if args.json:
        found = {"processor": processor(), "torch": torch.__version__, "arguments": given(args)}
        args.json.write_text(json.dumps(found | {"figures": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


def given(args: argparse.Namespace) -> dict:
    return {name: value for name, value in vars(args).items() if name not in ("json", "cpus", "libraries")}


def measure_all(args: argparse.Namespace, link: Link | None) -> Iterator[Row]:
    """Every figure, printed as it comes."""
    memory = torch.empty(int(args.set_gb * 1e9) // 4096 * 4096, dtype=torch.uint8)

    def figures(what: str, instructions: str, rows: int, runs: dict[str, Callable[[], float]]) -> Iterator[Row]:
        found: dict[str, list[tuple[float, float | None]]] = {flags: [] for flags in runs}
        for _ in range(args.rounds):
            for flags, run in runs.items():
                before = link.now() if link else None
                gbps = run()
                found[flags].append((gbps, link.rate_since(*before) if link and before else None))
        for flags, rates in found.items():
            copied = [rate for _, rate in rates if rate is not None]
            gbps = statistics.median(rate for rate, _ in rates)
            row = Row(what, instructions, rows, gbps, statistics.median(copied) if copied else None, flags)
            shown = "" if row.link_gbps is None else f"{row.link_gbps:.1f}"
            print(f"{what:<22}{instructions:<14}{rows:>5}{gbps:>9.1f}{shown:>11}  {flags}".rstrip(), flush=True)
            yield row

    for name in args.formats:
        weights = fill(memory, name, *args.shape)
        if name == args.formats[0]:
            for instructions in args.instructions:
                yield from figures("read", instructions, 0, {"": lambda: read_rate(args, memory, instructions)})
        for instructions in args.instructions:
            for rows in args.rows:
                measure = functools.partial(product_rate, args, weights, name, instructions, rows)
                runs = {
                    flags: functools.partial(measure, library) for flags, library in zip(args.flags, args.libraries)
                }
                yield from figures(name, instructions, rows, runs)
        if args.peer and name in PEERS:
            for rows in args.rows:
                yield from figures(f"{name} torch", "", rows, {"": lambda: PEERS[name](args, memory, rows)})


def product_rate(
    args: argparse.Namespace, weights: ctypes.Array, name: str, instructions: str, rows: int, library: ctypes.CDLL
) -> float:
    """GB/s of stored bytes."""
    x = torch.randn(rows, args.shape[1]).to(FORMATS[name][0])
    done = ctypes.c_int64()
    taken = library.zero_inference_measure_products(
        weights,
        len(weights),
        rows,
        INSTRUCTIONS.index(instructions),
        x.data_ptr(),
        DTYPES[x.dtype],
        args.threads,
        args.cpus,
        args.seconds,
        ctypes.byref(done),
    )
    return rate(done.value, taken, instructions)


def read_rate(args: argparse.Namespace, memory: torch.Tensor, instructions: str) -> float:
    """GB/s that the cores can read."""
    done = ctypes.c_int64()
    which = INSTRUCTIONS.index(instructions)
    taken = args.libraries[0].zero_inference_measure_reads(
        memory.data_ptr(), len(memory), which, args.threads, args.cpus, args.seconds, ctypes.byref(done)
    )
    return rate(done.value, taken, instructions)


def rate(done: int, taken: float, instructions: str) -> float:
    if taken == -2:
        raise SystemExit("the system allows no such number of threads, or has no memory for them")
    if taken < 0:
        raise SystemExit(f"--instructions {instructions}: this processor lacks them")
    return done / taken / 1e9


def torch_bfloat16(args: argparse.Namespace, memory: torch.Tensor, rows: int) -> float:
    """GB/s of F.linear over a set of bfloat16 weights."""
    height, width = args.shape
    size = height * width * 2
    weights = [memory[at : at + size].view(torch.bfloat16).view(height, width) for at in starts(memory, size)]
    x = torch.randn(rows, args.shape[1]).bfloat16()
    return torch_rate(args, len(weights), size, lambda index: torch.nn.functional.linear(x, weights[index]))


def torch_int4(args: argparse.Namespace, memory: torch.Tensor, rows: int) -> float:
    """GB/s of torch's product with int4 groups, in its own packed form, scales and zeros included."""
    codes = torch.randint(0, 16, args.shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    scales = torch.rand(args.shape[1] // GROUP, args.shape[0], 2).bfloat16()
    size, more = packed.numel(), scales.numel() * 2
    sets = []
    for at in starts(memory, size + more):
        memory[at : at + size].copy_(packed.view(torch.uint8).view(-1))
        memory[at + size : at + size + more].view(torch.bfloat16).copy_(scales.view(-1))
        sets.append(
            (memory[at : at + size].view(packed.shape), memory[at + size : at + size + more].view(torch.bfloat16))
        )
    x = torch.randn(rows, args.shape[1]).bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return torch_rate(
        args,
        len(sets),
        size + more,
        lambda index: multiply(x, sets[index][0], GROUP, sets[index][1].view(scales.shape)),
    )


PEERS = {"bf16": torch_bfloat16, "int4": torch_int4}


def starts(memory: torch.Tensor, size: int) -> range:
    return range(0, len(memory) - size + 1, size)


def torch_rate(args: argparse.Namespace, number: int, size: int, multiply: Callable[[int], object]) -> float:
    for index in range(min(3, number)):
        multiply(index)
    turns, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        multiply(turns % number)
        turns += 1
    return turns * size / (time.perf_counter() - begin) / 1e9


if __name__ == "__main__":
    sys.exit(main())
