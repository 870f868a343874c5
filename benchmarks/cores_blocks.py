"""Time feed-forward blocks on the CPU backend as decode steps call them.

    python benchmarks/cores_blocks.py [--formats int4 int8] [--rows 1 8 32] [--gaps 0 150] [--hidden 5120] [--inner 13824] [--blocks 16]
        [--rounds 3] [--threads N] [--busy-link]

Blocks of gate, up and down are multiplied one after the other through the queue that an engine uses. A gap is the microseconds from
the submission of a call to the arrival of its input: in a step the device computes meanwhile, and the CPU reads weights ahead. A
figure is GB/s (1e9 bytes) of the weights as stored, over the median time from the arrival to the output. --busy-link: page-locked
memory is copied to the GPU at the same time.
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

from benchmarks.common.cpu_backend import Format, busy_link, cpu_model
from zero_inference.cpu.pool import ARRIVED, DEVICE_FLAG_BYTES, DONE, FLAG_BYTES, SPIN_US, CpuPool, Stage, Task, Weight

FORMATS = {
    "bf16": Format(torch.bfloat16),
    "fp16": Format(torch.float16),
    "fp32": Format(torch.float32),
    "int8": Format.own(torch.bfloat16, 8, 32),
    "int4": Format.own(torch.bfloat16, 4, 32),
    "int8-fp16": Format.own(torch.float16, 8, 32),
    "int4-fp16": Format.own(torch.float16, 4, 32),
}


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
    device = SimulatedDevice(cpus[: args.threads])
    print(f"{cpu_model()}, {args.threads} threads, feed-forwards {args.hidden} x {args.inner}, gap/rows:", flush=True)
    cells = [(gap, rows) for gap in args.gaps for rows in args.rows]
    print(f"{'':<10}" + "".join(f"{f'{gap}/{rows}':>9}" for gap, rows in cells), flush=True)
    with busy_link() if args.busy_link else contextlib.nullcontext():
        for name in args.formats:
            measure(args, name, device, cells)
    device.pool.close()
    return 0


def measure(args: argparse.Namespace, name: str, device: SimulatedDevice, cells: list[tuple[int, int]]) -> None:
    """Time blocks of one format in all cells, pairs of a gap and a number of rows, and print a line of rates."""
    stored = FORMATS[name]
    size = stored.weight_bytes(args.inner, args.hidden)
    memory = torch.empty(args.blocks, 3, size, dtype=torch.uint8)  # gate, up and down of each block
    stored.fill(memory[0, 0], args.inner, args.hidden)
    memory[:] = memory[0, 0].clone()

    def weight(of_block: torch.Tensor, index: int) -> Weight:
        rows, columns = (args.inner, args.hidden) if index < 2 else (args.hidden, args.inner)
        return Weight(stored.matrix(of_block[index], rows, columns), None, size)

    blocks = [[Stage([weight(each, 0), weight(each, 1)], "gated", "silu"), Stage([weight(each, 2)])] for each in memory]
    tasks = [device.pool.add_block(stages, stored.dtype) for stages in blocks]
    times_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for gap, rows in cells:
            times_s[gap, rows] += device.call_times_s(tasks, rows, gap, stored.dtype)
    rates = (3 * size / statistics.median(times_s[cell]) / 1e9 for cell in cells)
    print(f"{name:<10}" + "".join(f"{rate:9.1f}" for rate in rates), flush=True)


class SimulatedDevice:
    """Raises and awaits the flags of the CPU backend in place of a GPU."""

    def __init__(self, cpus: list[int]):
        self.flags = torch.zeros(DEVICE_FLAG_BYTES, dtype=torch.uint8)
        self.pool = CpuPool(cpus, SPIN_US, self.flags)
        self.number = 0  # of the latest call

    def call_times_s(self, tasks: list[Task], rows: int, gap_us: int, dtype: torch.dtype) -> list[float]:
        """Return the seconds of a call of each task, from the arrival of its input to its output."""
        arrived, done = (self.flags[flag * FLAG_BYTES :][:4].view(torch.int32).numpy() for flag in (ARRIVED, DONE))
        x = torch.randn(rows, tasks[0].columns).to(dtype)
        out = torch.empty(rows * tasks[0].widths[0], dtype=dtype)
        times_s = []
        for task in [tasks[-1], *tasks]:  # the first one does not count
            self.pool.reserve(task, rows)
            self.number += 1
            self.pool.submit(task, rows, x.data_ptr(), out.data_ptr(), self.number)
            until = time.perf_counter() + gap_us / 1e6
            while time.perf_counter() < until:
                pass
            start = time.perf_counter()
            arrived[0] = self.number
            while done[0] != self.number:
                pass
            times_s.append(time.perf_counter() - start)
        return times_s[1:]


if __name__ == "__main__":
    sys.exit(main())
