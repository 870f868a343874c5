"""The link as it is measured, beside a ring that copies as the stream engine does: is the limit what the engine's copies can reach?

    python benchmarks/link_rounds.py [--tensor-mib 109 327 629] [--turns 4] [--seconds 0.5]

On the first GPU. Page-locked host tensors, 4 GB of them together, go to device buffers of 3.3 GB together. GB/s of 1e9
bytes, for each size and turn: the ring before and after the others; rounds that each begin on an idle link; rounds behind each
other, which is how the limit is measured. Of rounds the median and, in brackets, how far the 10th and the 90th percentile lie
apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from zero_inference.hardware import bench_copies
from zero_inference.utils.host_memory import host_empty

HOST_BYTES, DEVICE_BYTES = 4_000_000_000, 3_300_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tensor-mib", type=int, nargs="+", default=[109, 327, 629], metavar="MIB", help="size of a tensor"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU here, and it is a GPU's link that is measured.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    print("MiB a tensor | ring | from idle | behind each other | ring")
    for size in args.tensor_mib:
        sources = [
            host_empty((size << 20,), torch.uint8, True).fill_(7) for _ in range(HOST_BYTES // (size << 20) or 1)
        ]
        buffers = [
            torch.empty(size << 20, dtype=torch.uint8, device=device) for _ in range(DEVICE_BYTES // (size << 20) or 1)
        ]
        for _ in range(args.turns):
            before = ring_gb_per_s(device, sources, buffers, args.seconds)
            idle = bench_copies.rate_of(rounds_from_idle(device, sources, args.seconds))
            behind = bench_copies.rate_of(
                bench_copies.host_to_device_rounds(device, True, args.seconds, bench_copies.blocks_of(sources, device))
            )
            after = ring_gb_per_s(device, sources, buffers, args.seconds)
            print(
                f"{size} | {before:.2f} | {idle.gb_per_s:.2f} ({idle.spread_gb_per_s:.2f}) | "
                f"{behind.gb_per_s:.2f} ({behind.spread_gb_per_s:.2f}) | {after:.2f}",
                flush=True,
            )
        del sources, buffers
        torch.cuda.empty_cache()
    return 0


def ring_gb_per_s(
    device: torch.device, sources: list[torch.Tensor], buffers: list[torch.Tensor], seconds: float
) -> float:
    """Copies end to end, each behind the event that frees its buffer; without those that find their buffer empty."""
    copies, compute = torch.cuda.Stream(device), torch.cuda.Stream(device)
    count = len(buffers) + max(2, int(seconds * 55e9 / sources[0].numel()))
    free: list[torch.cuda.Event | None] = [None] * len(buffers)
    starts, ends = [], []
    torch.cuda.synchronize(device)
    for number in range(count):
        slot = number % len(buffers)
        if free[slot] is not None:
            copies.wait_event(free[slot])
        starts.append(copies.record_event(torch.cuda.Event(enable_timing=True)))
        with torch.cuda.stream(copies):
            buffers[slot].copy_(sources[number % len(sources)], non_blocking=True)
        ends.append(copies.record_event(torch.cuda.Event(enable_timing=True)))
        compute.wait_event(ends[-1])
        free[slot] = compute.record_event(torch.cuda.Event(enable_timing=True))
    torch.cuda.synchronize(device)
    measured = count - len(buffers)
    return measured * sources[0].numel() / starts[-measured].elapsed_time(ends[-1]) / 1e6


def rounds_from_idle(device: torch.device, sources: list[torch.Tensor], seconds: float) -> list[float]:
    """GB/s of rounds, each of which begins when the one before it has ended."""
    target, blocks = (
        torch.empty(bench_copies.BLOCK_BYTES, dtype=torch.uint8, device=device),
        bench_copies.blocks_of(sources, device),
    )
    stream = torch.cuda.Stream(device)
    rates = []
    stop = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < stop:
        start = stream.record_event(torch.cuda.Event(enable_timing=True))
        moved = 0
        with torch.cuda.stream(stream):
            while moved < bench_copies.BLOCKS * bench_copies.BLOCK_BYTES:
                source = next(blocks)
                target[: source.numel()].copy_(source, non_blocking=True)
                moved += source.numel()
        end = stream.record_event(torch.cuda.Event(enable_timing=True))
        end.synchronize()
        rates.append(moved / start.elapsed_time(end) / 1e6)
    return rates


if __name__ == "__main__":
    sys.exit(main())
