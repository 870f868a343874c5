"""How fast the host's cores multiply feed-forwards as a decode step asks for them, in builds of the kernels that take turns.

    python benchmarks/cores_blocks.py [--formats int4 int8] [--rows 1 8 32] [--gaps 0 150] [--hidden 5120] [--inner 13824] [--blocks 16]
        [--rounds 3] [--threads N] [--busy-link] [--flags="-DZERO_INFERENCE_AHEAD_BYTES=0"]

Blocks of gate, up and down are multiplied one behind the other through the queue that an engine uses. A gap is the microseconds from
when a call is asked for until its input arrives: in a step the device computes for itself meanwhile, and the cores read ahead. A
figure is GB/s (1e9 bytes) of the weights as stored, over the median time from the arrival to the output. --flags and --busy-link as
in cores_products.py. --stages: behind each line, where the time of a call goes: microseconds of the fastest, the middle and the slowest
thread for each part of gate and up, and of down.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy
import torch

from benchmarks.common.host_cores import FORMATS, GROUP, busy_link, fill, library_of, processor
from zero_inference.cpu.pool import ARRIVED, DONE, FLAG_BYTES, SPIN_US, CpuPool, Stage, Task, Weight, flag_bytes

TIMED = (64, 2, 5)  # csrc/cpu/stage_times.h
PARTS = ("input", "wait for it", "own rows", "shared rows", "wait for rows")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["int4"], choices=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of the input")
    parser.add_argument("--gaps", type=int, nargs="+", default=[0, 150], help="in microseconds")
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--inner", type=int, default=13824)
    parser.add_argument("--blocks", type=int, default=16, help="that are multiplied before the first one comes again")
    parser.add_argument("--rounds", type=int, default=3, help="of all blocks")
    parser.add_argument("--threads", type=int, help="default: one for each CPU of this process but one")
    parser.add_argument("--stages", action="store_true", help="where the time goes, thread by thread")
    parser.add_argument("--busy-link", action="store_true", help="copy to the GPU meanwhile")
    parser.add_argument(
        "--flags",
        action="append",
        help="for the compiler, behind the usual ones (--flags=-DNAME=1); again for another build",
    )
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    args.threads = args.threads or max(1, len(cpus) - 1)
    if args.threads > len(cpus):
        parser.error(f"--threads {args.threads}: this process may use {len(cpus)} CPUs")
    args.cpus = cpus[: args.threads]
    timed = " -DZERO_INFERENCE_STAGE_TIMES" if args.stages else ""
    builds = {flags: Build(flags + timed, args.cpus) for flags in args.flags or [""]}
    print(f"{processor()}, {len(args.cpus)} threads, feed-forwards {args.hidden} x {args.inner}, gap/rows:", flush=True)
    asked = [(gap, rows) for gap in args.gaps for rows in args.rows]
    print(f"{'':<10}" + "".join(f"{f'{gap}/{rows}':>9}" for gap, rows in asked) + "  flags", flush=True)
    with busy_link() if args.busy_link else contextlib.nullcontext():
        for name in args.formats:
            measure(args, name, builds, asked)
    for build in builds.values():
        build.cores.close()
    return 0


def measure(args: argparse.Namespace, name: str, builds: dict[str, Build], asked: list[tuple[int, int]]) -> None:
    """One line for each build."""
    dtype, bits = FORMATS[name]
    elements = args.hidden * args.inner
    size = elements * bits // 8 + elements // GROUP * 2 * dtype.itemsize if bits else elements * dtype.itemsize
    memory = torch.empty(3 * args.blocks * size, dtype=torch.uint8)
    wide = fill(memory[: 2 * args.blocks * size], name, args.inner, args.hidden)
    down = fill(memory[2 * args.blocks * size :], name, args.hidden, args.inner)
    blocks = [
        [
            Stage([Weight(wide[2 * index], None, size), Weight(wide[2 * index + 1], None, size)], "gated", "silu"),
            Stage([Weight(down[index], None, size)]),
        ]
        for index in range(args.blocks)
    ]
    tasks = {flags: [build.cores.add_block(stages, dtype) for stages in blocks] for flags, build in builds.items()}
    times: dict[tuple[str, int, int], list[float]] = {}
    stages: dict[tuple[str, int, int], list[numpy.ndarray]] = {}
    for _ in range(args.rounds):
        for flags, build in builds.items():
            time.sleep(1.5 * SPIN_US / 1e6)  # the threads of the other builds sleep by then
            for gap, rows in asked:
                times.setdefault((flags, gap, rows), []).extend(build.times(tasks[flags], rows, gap, dtype))
                if args.stages:
                    stages.setdefault((flags, gap, rows), []).append(build.stage_us(len(blocks) + 1))
    for flags in builds:
        rates = (3 * size / statistics.median(times[flags, gap, rows]) / 1e9 for gap, rows in asked)
        print(f"{name:<10}" + "".join(f"{rate:9.1f}" for rate in rates) + f"  {flags}".rstrip(), flush=True)
        for (of, gap, rows), found in stages.items():
            if of == flags:
                print_stages(f"{gap}/{rows}", numpy.median(found, axis=0))


def print_stages(title: str, microseconds: numpy.ndarray) -> None:
    """A line for each stage: of [threads, stages, parts] the least, the median and the most of all threads."""
    for stage, name in enumerate(("gate, up", "down")):
        each = microseconds[:, stage]
        low, middle, high = each.min(axis=0), numpy.median(each, axis=0), each.max(axis=0)
        parts = (f"{part} {low[i]:.0f} {middle[i]:.0f} {high[i]:.0f}" for i, part in enumerate(PARTS))
        print(f"  {title:<8}{name:<10}us: " + ", ".join(parts), flush=True)


class Build:
    """The cores as one build of their library drives them; this process is the device that they wait for."""

    def __init__(self, flags: str, cpus: list[int]):
        self.flags = torch.zeros(flag_bytes(1), dtype=torch.uint8)
        self.cores = CpuPool(cpus, SPIN_US, self.flags, library=library_of(flags))
        self.number = 0

    def stage_us(self, calls: int) -> numpy.ndarray:
        """Microseconds of a call since the last time, [threads, stages, parts]."""
        found = numpy.zeros(TIMED, dtype=numpy.int64)
        self.cores.library.zero_inference_take_stage_times(ctypes.c_void_p(found.ctypes.data))
        return found[: self.cores.threads] / calls / 1e3

    def times(self, tasks: list[Task], rows: int, gap_us: int, dtype: torch.dtype) -> list[float]:
        """Seconds of each call, from when its input is there until its output is."""
        arrived, done = (self.flags[flag * FLAG_BYTES :][:4].view(torch.int32).numpy() for flag in (ARRIVED, DONE))
        x = torch.randn(rows, tasks[0].columns).to(dtype)
        out = torch.empty(rows * tasks[0].widths[0], dtype=dtype)
        found = []
        for task in [tasks[-1], *tasks]:  # the first one does not count
            self.cores.reserve(task, rows)
            self.number += 1
            self.cores.submit(task, rows, x.data_ptr(), out.data_ptr(), self.number)
            until = time.perf_counter() + gap_us / 1e6
            while time.perf_counter() < until:
                pass
            start = time.perf_counter()
            arrived[0] = self.number
            while done[0] != self.number:
                pass
            found.append(time.perf_counter() - start)
        return found[1:]


if __name__ == "__main__":
    sys.exit(main())
