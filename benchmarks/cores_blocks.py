"""How fast the host's cores multiply feed-forwards as a decode step asks for them.

    python benchmarks/cores_blocks.py [--formats int4 int8] [--rows 1 8 32] [--gaps 0 150] [--hidden 5120] [--inner 13824] [--blocks 16]
        [--rounds 3] [--threads N] [--busy-link]

Blocks of gate, up and down are multiplied one after the other through the queue that an engine uses. A gap is the microseconds from
when a call is asked for until its input arrives: in a step the device computes for itself meanwhile, and the cores read ahead. A
figure is GB/s (1e9 bytes) of the weights as stored, over the median time from the arrival to the output. --busy-link: page-locked
memory is copied to the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common.host_cores import FORMATS, GROUP, busy_link, fill, processor
from zero_inference.cpu.pool import ARRIVED, DONE, FLAG_BYTES, SPIN_US, CpuPool, Stage, Task, Weight, flag_bytes


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
    parser.add_argument("--busy-link", action="store_true", help="copy to the GPU meanwhile")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    args.threads = args.threads or max(1, len(cpus) - 1)
    if args.threads > len(cpus):
        parser.error(f"--threads {args.threads}: this process may use {len(cpus)} CPUs")
    args.cpus = cpus[: args.threads]
    device = Device(args.cpus)
    print(f"{processor()}, {len(args.cpus)} threads, feed-forwards {args.hidden} x {args.inner}, gap/rows:", flush=True)
    asked = [(gap, rows) for gap in args.gaps for rows in args.rows]
    print(f"{'':<10}" + "".join(f"{f'{gap}/{rows}':>9}" for gap, rows in asked), flush=True)
    with busy_link() if args.busy_link else contextlib.nullcontext():
        for name in args.formats:
            measure(args, name, device, asked)
    device.cores.close()
    return 0


def measure(args: argparse.Namespace, name: str, device: Device, asked: list[tuple[int, int]]) -> None:
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
    tasks = [device.cores.add_block(stages, dtype) for stages in blocks]
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for gap, rows in asked:
            times[gap, rows] += device.times(tasks, rows, gap, dtype)
    rates = (3 * size / statistics.median(times[cell]) / 1e9 for cell in asked)
    print(f"{name:<10}" + "".join(f"{rate:9.1f}" for rate in rates), flush=True)


class Device:
    """This process in the place of the device that the cores wait for."""

    def __init__(self, cpus: list[int]):
        self.flags = torch.zeros(flag_bytes(1), dtype=torch.uint8)
        self.cores = CpuPool(cpus, SPIN_US, self.flags)
        self.number = 0

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
