"""Time copies of experts from page-locked host memory by the kernels of csrc/hand_off/expert_fetch.cu, and by the copy engine.

    python benchmarks/expert_fetch_speed.py

An expert of Qwen3-30B-A3B has 2.65 MB in 4 bits. Needs a CUDA device and nvcc.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

EXPERT_BYTES, EXPERTS, BLOCK, REPETITIONS = 2654208, 512, 128, 60  # BLOCK: experts of a layer


def main() -> None:
    from zero_inference.kernels.extension import load_extension, why_unavailable

    if not load_extension():
        raise SystemExit(f"the CUDA kernels are not there: {why_unavailable()}")
    host = torch.zeros(EXPERTS * EXPERT_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(8 * EXPERT_BYTES, dtype=torch.uint8, device="cuda")
    piece = torch.tensor([[host.data_ptr(), device.data_ptr(), 0, EXPERT_BYTES]], device="cuda")
    seconds = seconds_of(lambda turn: device[:EXPERT_BYTES].copy_(host[:EXPERT_BYTES], non_blocking=True))
    print(f"copy engine, one expert: {EXPERT_BYTES / seconds / 1e9:.1f} GB/s")
    for count in (1, 2, 3, 4, 8):
        places = torch.arange(count, device="cuda")
        chosen = [torch.randint(0, EXPERTS, (count,), device="cuda") for _ in range(REPETITIONS + 5)]

        def fetch(turn: int, chosen: list[torch.Tensor] = chosen, places: torch.Tensor = places) -> None:
            torch.ops.zero_inference.expert_fetch(chosen[turn], places, piece, True)

        seconds = seconds_of(fetch)
        rate = count * EXPERT_BYTES / seconds / 1e9
        print(f"kernel, {count} expert{'s' * (count > 1)}: {rate:.1f} GB/s, {1e6 * seconds:.0f} us", flush=True)
    block = torch.zeros(BLOCK * EXPERT_BYTES, dtype=torch.uint8, device="cuda")
    slots = torch.zeros_like(block)
    pieces = torch.tensor([[host.data_ptr(), slots.data_ptr(), 0, EXPERT_BYTES]], device="cuda")
    seconds = seconds_of(lambda turn: block.copy_(host[: len(block)], non_blocking=True))
    print(f"copy engine, block of {BLOCK} experts: {len(block) / seconds / 1e9:.1f} GB/s, {1e6 * seconds:.0f} us")
    for cached in (0, BLOCK // 8, BLOCK // 2, BLOCK):
        table = torch.full((BLOCK,), -1, device="cuda")  # slot of each expert, -1: in host memory
        table[torch.randperm(BLOCK, device="cuda")[:cached]] = torch.arange(cached, device="cuda")

        def fill(turn: int, table: torch.Tensor = table) -> None:
            torch.ops.zero_inference.expert_fill(table, BLOCK, pieces, block, True)

        seconds = seconds_of(fill)
        rate = (BLOCK - cached) * EXPERT_BYTES / seconds / 1e9
        print(f"kernel, block with {cached} experts in slots: {rate:.1f} GB/s of the link, {1e6 * seconds:.0f} us")


def seconds_of(call: Callable[[int], object]) -> float:
    """Return the mean seconds of `call(turn)` on the device."""
    for turn in range(5):
        call(turn)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for turn in range(5, REPETITIONS + 5):
        call(turn)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPETITIONS / 1e3


if __name__ == "__main__":
    main()
