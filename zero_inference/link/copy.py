"""Bandwidth between host and device, measured in this process."""

from __future__ import annotations

import statistics
import time

import torch

from zero_inference.offload.host_memory import host_empty

BLOCK_BYTES = 256 << 20


def host_to_device_gbps(device: torch.device, pinned: bool, seconds: float = 0.5) -> float:
    """Median GB/s (1e9 bytes) of copies of 256 MiB blocks from host memory to `device`.

    On a CPU-only machine the 'device' is host memory too, and this is the rate of a memory copy.
    """
    host = host_empty((BLOCK_BYTES,), torch.uint8, pinned and device.type == "cuda")
    host.random_(0, 256) if device.type == "cpu" else host.fill_(7)
    target = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)
    target.copy_(host, non_blocking=True)
    rates: list[float] = []
    stop = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < stop:
        rates.append(BLOCK_BYTES / _timed_copy(target, host, device) / 1e9)
    return statistics.median(rates)


def _timed_copy(target: torch.Tensor, host: torch.Tensor, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        target.copy_(host)
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    target.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
