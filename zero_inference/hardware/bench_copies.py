"""Measure copies between host and device, and keep a link busy while the CPU is measured.

Rates are GB/s (1e9) of bytes copied, counted once; medians of rounds. On CUDA a round copies 2 GiB in blocks of up to 256 MiB, and each
copy is enqueued before the previous one ends, as by a prefetcher; rounds that begin on an idle link give less (benchmarks/link_rounds.py).
Without a GPU the device is host memory, too, and every rate is that of memory copies.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

from zero_inference.utils.host_memory import host_empty

BLOCK_BYTES = 256 << 20
BLOCKS = 8  # of a round and lane: 39 ms at 55 GB/s
LEAST_BYTES = 16 << 20  # of a given source block: 0.3 ms at 55 GB/s, a hundred times what it takes to start a copy

T = TypeVar("T")


class Rate(NamedTuple):
    """The median of rounds, and the distance from their 10th to their 90th percentile."""

    gb_per_s: float
    spread_gb_per_s: float


class Lane(NamedTuple):
    """Copies that follow each other in one direction. uint8."""

    target: torch.Tensor  # [block_bytes]
    sources: Iterator[torch.Tensor]  # endless, each of up to block_bytes
    device: torch.device  # that is measured; target or source is on it


def block_bytes(device: torch.device) -> int:
    """Return the most that one copy moves."""
    return BLOCK_BYTES if device.type == "cuda" else uncached_block_bytes()


def kind_of(device: torch.device) -> str:
    """Return what a "copy to the device" is, for labels."""
    return "host link" if device.type == "cuda" else "host memory copy"


def rate_of(rounds: list[float]) -> Rate:
    """Return the rate of two or more `rounds` (GB/s)."""
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return Rate(statistics.median(rounds), tenths[-1] - tenths[0])


def host_to_device_gb_per_s(device: torch.device, pinned: bool, seconds: float = 0.5) -> float:
    """Return the median of `host_to_device_rounds`."""
    return statistics.median(host_to_device_rounds(device, pinned, seconds))


def host_to_device_rounds(
    device: torch.device, pinned: bool, seconds: float = 0.5, sources: Iterator[torch.Tensor] | None = None
) -> list[float]:
    """Return GB/s of three or more rounds of copies from host memory to `device`.

    Args:
        pinned: page-lock the host memory.
        sources: blocks of host memory from `blocks_of` instead of new memory: the rate depends on where the source is, which a process
            cannot always see or choose.

    Raises:
        RunError: there is too little host memory, or it may not be page-locked.
    """
    return _rounds([_lane(_device_block(device), sources or _host_block(device, pinned))], seconds)


def blocks_of(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor] | None:
    """Yield the bytes of `tensors` (uint8, one dimension) in blocks for a round, endlessly; None if they are so small that the start of
    copies would dominate."""
    blocks = [
        block for tensor in tensors for block in tensor.split(block_bytes(device)) if block.numel() >= LEAST_BYTES
    ]
    return itertools.cycle(blocks) if blocks else None


def device_to_host_gb_per_s(device: torch.device, pinned: bool = True, seconds: float = 0.5) -> float:
    """Return median GB/s of copies from `device` to host memory. Raises RunError as `host_to_device_rounds`."""
    return statistics.median(_rounds([_lane(_host_block(device, pinned), _device_block(device))], seconds))


def both_directions_gb_per_s(device: torch.device, seconds: float = 0.5) -> float:
    """Return median GB/s, summed, of page-locked copies to and from `device` at the same time, the same bytes each way.

    The slower direction ends the round, so the sum is at most twice its rate. Raises RunError as `host_to_device_rounds`.
    """
    down = _lane(_device_block(device), _host_block(device, pinned=True))
    up = _lane(_host_block(device, pinned=True), _device_block(device))
    return statistics.median(_rounds([down, up], seconds))


def several_devices_gb_per_s(devices: Sequence[torch.device], seconds: float = 0.5) -> float:
    """Return median GB/s, summed, of page-locked copies to all `devices` at the same time, the same bytes to each.

    The slowest ends the round, as with ranks that wait for each other. Raises RunError as `host_to_device_rounds`.
    """
    return statistics.median(
        _rounds([_lane(_device_block(device), _host_block(device, pinned=True)) for device in devices], seconds)
    )


def while_copying(device: torch.device, read: Callable[[], T]) -> T:
    """Call `read` during page-locked copies to a CUDA device, since an idle GPU slows its link, and return its result."""
    target, source = _device_block(device), _host_block(device, pinned=True)
    with torch.cuda.device(device):
        # 10.7 GB: 0.2 s at generation 5 x16, 0.9 s at 3 x16; the link stays up for some seconds more
        for _ in range(40):
            target.copy_(source, non_blocking=True)
        value = read()
        torch.cuda.synchronize(device)
    return value


def _host_block(device: torch.device, pinned: bool) -> torch.Tensor:
    # filled: untouched memory is all one page of zeros
    return host_empty((block_bytes(device),), torch.uint8, pinned and device.type == "cuda").fill_(7)


def _device_block(device: torch.device) -> torch.Tensor:
    return torch.full((block_bytes(device),), 3, dtype=torch.uint8, device=device)


def _lane(target: torch.Tensor, source: torch.Tensor | Iterator[torch.Tensor]) -> Lane:
    if not isinstance(source, torch.Tensor):
        return Lane(target, source, target.device)
    return Lane(target, itertools.repeat(source), target.device if target.is_cuda else source.device)


def _rounds(lanes: list[Lane], seconds: float) -> list[float]:
    rounds = _CudaRounds(lanes) if lanes[0].device.type == "cuda" else _HostRounds(lanes)
    rates: list[float] = []
    try:
        rounds.next()
        stop = time.perf_counter() + seconds
        while len(rates) < 3 or time.perf_counter() < stop:
            copied, spent_s = rounds.next()
            rates.append(copied / spent_s / 1e9)
    finally:
        rounds.close()
    return rates


def _copy_next(lane: Lane) -> int:
    """Copy the lane's next source and return its bytes."""
    source = next(lane.sources)
    lane.target[: source.numel()].copy_(source, non_blocking=True)
    return source.numel()


class _CudaRounds:
    """Rounds with a stream for each lane. A round is enqueued before the previous one is waited for, so that links are never idle, as with
    an engine's ring buffer."""

    def __init__(self, lanes: list[Lane]):
        self.lanes = lanes
        self.streams = [torch.cuda.Stream(lane.device) for lane in lanes]
        for device in {lane.device for lane in lanes}:  # the blocks are filled on other streams
            torch.cuda.synchronize(device)
        self.ends = self._record_events()
        self.enqueued = self._enqueue()

    def next(self) -> tuple[int, float]:
        """Return the bytes of a round, and the time of its slowest stream."""
        (copied, ends), self.enqueued = self.enqueued, self._enqueue()
        spent_s = []
        for start, end in zip(self.ends, ends):
            end.synchronize()
            spent_s.append(start.elapsed_time(end) / 1e3)
        self.ends = ends
        return copied, max(spent_s)

    def close(self) -> None:
        for end in self.enqueued[1]:
            end.synchronize()

    def _enqueue(self) -> tuple[int, list[torch.cuda.Event]]:
        """Enqueue a round, and return its bytes and an event after it on each stream."""
        total = 0
        left = [BLOCKS * BLOCK_BYTES] * len(self.lanes)
        while any(count > 0 for count in left):  # alternating, so that all lanes start at once
            for index, (lane, stream) in enumerate(zip(self.lanes, self.streams)):
                if left[index] > 0:
                    with torch.cuda.stream(stream):
                        copied = _copy_next(lane)
                    total += copied
                    left[index] -= copied
        return total, self._record_events()

    def _record_events(self) -> list[torch.cuda.Event]:
        events = []
        for stream in self.streams:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(stream)
        return events


class _HostRounds:
    """Rounds of one copy in each lane; several lanes have a thread each."""

    def __init__(self, lanes: list[Lane]):
        self.lanes = lanes
        self.pool = ThreadPoolExecutor(len(lanes)) if len(lanes) > 1 else None

    def next(self) -> tuple[int, float]:
        start = time.perf_counter()
        copied = sum((map if self.pool is None else self.pool.map)(_copy_next, self.lanes))
        return copied, time.perf_counter() - start

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


RANDOM_BYTES = 16 << 20  # drawn once and copied
SOURCES, COPIES = 4, 8  # blocks of host memory, and copies of a round: 39 ms at 55 GB/s


class BusyLink:
    """Page-locked copies to a CUDA device, on a stream of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.source = host_empty((SOURCES * BLOCK_BYTES,), torch.uint8, pinned=True)
        self.source.copy_(random_bytes(self.source.numel()))
        self.target = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device)

    def begin(self, copies: int = COPIES) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueue a round, and return the events before and after it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            for block in itertools.islice(itertools.cycle(self.source.split(BLOCK_BYTES)), copies):
                self.target.copy_(block, non_blocking=True)
            end.record()
        return start, end

    def rate(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Wait for a round of `COPIES`, and return its GB/s."""
        end.synchronize()
        return COPIES * BLOCK_BYTES / start.elapsed_time(end) / 1e6

    def round(self) -> float:
        return self.rate(*self.begin())


class CpuWork(Protocol):
    def one(self) -> int:
        """Do the next piece of work, and return the bytes that it reads."""


def rate_alone(work: CpuWork, seconds: float) -> float:
    """Return GB/s over `seconds`, after two pieces of warm-up."""
    for _ in range(2):
        work.one()
    start, moved = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        moved += work.one()
    return moved / spent / 1e9


def rates_together(work: CpuWork, link: BusyLink) -> tuple[float, float]:
    """Return GB/s of the link and of the CPU while both are busy."""
    work.one()
    events = link.begin()
    start, moved = time.perf_counter(), 0
    while not events[1].query():
        moved += work.one()
    spent = time.perf_counter() - start
    return link.rate(*events), moved / spent / 1e9


def random_bytes(count: int) -> torch.Tensor:
    """Return uint8 [count] in host memory: the same `RANDOM_BYTES` repeated."""
    random = torch.randint(0, 256, (RANDOM_BYTES,), dtype=torch.uint8)
    memory = host_empty((count,), torch.uint8, pinned=False)
    for part in memory.split(RANDOM_BYTES):
        part.copy_(random[: part.numel()])
    return memory


LEAST_UNCACHED_BYTES, MOST_UNCACHED_BYTES = 64 << 20, 512 << 20
DEFAULT_UNCACHED_BYTES = 256 << 20  # if sysfs has no sizes of caches
CPUS = Path("/sys/devices/system/cpu")


def uncached_block_bytes() -> int:
    """Return the bytes of a block for copies by the CPU: twice its last-level caches, so that source and target are four times that.

    Not more, because touching memory for the first time takes longer than copying it, above all in a virtual machine. All of torch's
    threads copy, and Linux spreads them over the caches.
    """
    try:
        caches = sorted(_last_level_caches(), reverse=True)
    except (OSError, ValueError):  # sysfs lacks it or has another format
        caches = []
    cache_bytes = sum(caches[: torch.get_num_threads()])
    return (
        max(LEAST_UNCACHED_BYTES, min(MOST_UNCACHED_BYTES, 2 * cache_bytes)) if cache_bytes else DEFAULT_UNCACHED_BYTES
    )


def _last_level_caches() -> list[int]:
    """Return the bytes of each last-level cache of the CPUs that this process may use."""
    found = {}
    for core in os.sched_getaffinity(0):
        levels = [(int(_text(index, "level")), index) for index in (CPUS / f"cpu{core}" / "cache").glob("index*")]
        if levels:
            level, index = max(levels)
            found[level, _text(index, "shared_cpu_list")] = _bytes(_text(index, "size"))
    return list(found.values())


def _text(index: Path, name: str) -> str:
    return (index / name).read_text().strip()


def _bytes(size: str) -> int:
    """Parse a size such as 32768K."""
    return int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]] if size[-1:] in ("K", "M", "G") else int(size)
