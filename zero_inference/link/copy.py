"""Bandwidth between host and device, measured in this process.

Rates are GB/s of 1e9 bytes: bytes copied, counted once, over time. Each is the median of rounds. On CUDA a round copies eight
blocks of 256 MiB one behind the other, as an engine does that never lets its link wait: the start of a copy (0.3% of the time of
a single block) is hidden behind the copy before it. On a CPU-only machine the 'device' is host memory too, and every rate here
is that of a memory copy (`kind_of` has the words).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from zero_inference.offload.host_memory import host_empty

BLOCK_BYTES = 256 << 20
BLOCKS = 8  # of a round and pair: 39 ms at 55 GB/s

T = TypeVar("T")


class Rate(NamedTuple):
    """A measured rate in GB/s: the median of rounds, and the distance between their 10th and 90th percentile (the whole of it)."""

    gb_per_s: float
    spread_gb_per_s: float


Pair = tuple[torch.Tensor, torch.Tensor]  # target, source: uint8 [BLOCK_BYTES], at least one of them on the measured device


def kind_of(device: torch.device) -> str:
    """What a 'copy to the device' is on this machine, for labels."""
    return "host link" if device.type == "cuda" else "host memory copy"


def rate_of(rounds: list[float]) -> Rate:
    """The rate that `rounds` (GB/s) give together; at least two."""
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return Rate(statistics.median(rounds), tenths[-1] - tenths[0])


def host_to_device_gbps(device: torch.device, pinned: bool, seconds: float = 0.5) -> float:
    """Median GB/s of copies from host memory, page-locked where `pinned`, to `device`. Raises as `host_to_device_rounds`."""
    return statistics.median(host_to_device_rounds(device, pinned, seconds))


def host_to_device_rounds(device: torch.device, pinned: bool, seconds: float = 0.5) -> list[float]:
    """GB/s of each round, three or more, of copies from host memory, page-locked where `pinned`, to `device`.

    Raises:
        RunError: the host memory is not there, or may not be page-locked.
    """
    return _rounds([(_device_block(device), _host_block(device, pinned))], seconds)


def device_to_host_gbps(device: torch.device, pinned: bool = True, seconds: float = 0.5) -> float:
    """Median GB/s of copies from `device` to host memory. Raises RunError as `host_to_device_rounds`."""
    return statistics.median(_rounds([(_host_block(device, pinned), _device_block(device))], seconds))


def both_directions_gbps(device: torch.device, seconds: float = 0.5) -> float:
    """Median GB/s of page-locked copies to and from `device` at the same time, as much each way; the sum of both.

    The slower direction ends the round, so twice the slower one's rate is the most that can come out.
    Raises RunError as `host_to_device_rounds`.
    """
    down = _device_block(device), _host_block(device, pinned=True)
    up = _host_block(device, pinned=True), _device_block(device)
    return statistics.median(_rounds([down, up], seconds))


def several_devices_gbps(devices: Sequence[torch.device], seconds: float = 0.5) -> float:
    """Median GB/s of page-locked copies from host memory to all of `devices` at the same time; the sum over them.

    As much goes to each, and the slowest ends the round: what ranks that wait for each other get.
    Raises RunError as `host_to_device_rounds`.
    """
    return statistics.median(_rounds([(_device_block(device), _host_block(device, pinned=True)) for device in devices], seconds))


def while_copying(device: torch.device, read: Callable[[], T]) -> T:
    """What `read` returns while page-locked copies to `device`, a CUDA device, are under way: an idle GPU slows its link."""
    target, source = _device_block(device), _host_block(device, pinned=True)
    with torch.cuda.device(device):
        for _ in range(40):  # 10.7 GB: 0.2 s at generation 5 x16, 0.9 s at 3 x16; the link stays up for some seconds more
            target.copy_(source, non_blocking=True)
        value = read()
        torch.cuda.synchronize(device)
    return value


def _host_block(device: torch.device, pinned: bool) -> torch.Tensor:
    # filled, or all of it would be the kernel's one page of zeros
    return host_empty((BLOCK_BYTES,), torch.uint8, pinned and device.type == "cuda").fill_(7)


def _device_block(device: torch.device) -> torch.Tensor:
    return torch.full((BLOCK_BYTES,), 3, dtype=torch.uint8, device=device)


def _rounds(pairs: list[Pair], seconds: float) -> list[float]:
    on_cuda = any(tensor.is_cuda for pair in pairs for tensor in pair)
    measure = _CudaRound(pairs) if on_cuda else _HostRound(pairs)
    measure()
    rates: list[float] = []
    stop = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < stop:
        moved, spent = measure()
        rates.append(moved / spent / 1e9)
    return rates


class _CudaRound:
    """A call copies every pair on a stream of its own and gives (bytes, seconds of the slowest stream)."""

    def __init__(self, pairs: list[Pair]):
        self.lanes = []
        for target, source in pairs:
            device = target.device if target.is_cuda else source.device
            self.lanes.append((target, source, device, torch.cuda.Stream(device),
                               torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        for device in {lane[2] for lane in self.lanes}:  # the blocks are filled on other streams
            torch.cuda.synchronize(device)

    def __call__(self) -> tuple[int, float]:
        for _, _, _, stream, start, _ in self.lanes:
            start.record(stream)
        for _ in range(BLOCKS):
            for target, source, _, stream, _, _ in self.lanes:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for _, _, _, stream, _, end in self.lanes:
            end.record(stream)
        spent_s = []
        for _, _, device, _, start, end in self.lanes:
            end.synchronize()
            spent_s.append(start.elapsed_time(end) / 1e3)
        return BLOCKS * len(self.lanes) * BLOCK_BYTES, max(spent_s)


class _HostRound:
    """A call copies every pair, each in a thread of its own where there are several, and gives (bytes, seconds)."""

    def __init__(self, pairs: list[Pair]):
        self.pairs = pairs
        self.pool = ThreadPoolExecutor(len(pairs)) if len(pairs) > 1 else None

    def __call__(self) -> tuple[int, float]:
        start = time.perf_counter()
        if self.pool is None:
            for target, source in self.pairs:
                target.copy_(source)
        else:
            list(self.pool.map(lambda pair: pair[0].copy_(pair[1]), self.pairs))
        return len(self.pairs) * BLOCK_BYTES, time.perf_counter() - start
