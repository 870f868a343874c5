"""Measure copies between host and device and reads from disk, and keep links busy while the CPU is measured.

Rates are GB/s (1e9) of bytes copied, counted once; medians of rounds. On CUDA a round copies 2 GiB in blocks of up to 256 MiB, and each
copy is enqueued before the previous one ends, as by a prefetcher; rounds that begin on an idle link give less
(benchmarks/results/h200-x2/link_rounds.txt).
Without a GPU the device is host memory, too, and every rate is that of memory copies.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from zero_inference.errors import RunError
from zero_inference.utils.direct_io import QUEUE_DEPTH, READ_BYTES, DirectIO, open_direct
from zero_inference.utils.format import format_bytes
from zero_inference.utils.host_memory import host_empty

BLOCK_BYTES = 256 << 20
BLOCKS = 8  # of a round and lane: 39 ms at 55 GB/s
MIN_BYTES = 16 << 20  # smallest block to copy: 0.3 ms at 55 GB/s, a hundred times the start of a copy


class Rate(NamedTuple):
    """The median of rounds, and the distance from their 10th to their 90th percentile."""

    gb_per_s: float
    spread_gb_per_s: float


def rate_of(rounds: list[float]) -> Rate:
    """Return the rate of two or more `rounds` (GB/s)."""
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return Rate(statistics.median(rounds), tenths[-1] - tenths[0])


class Lane(NamedTuple):
    """Copies that follow each other in one direction. uint8."""

    target: torch.Tensor  # [block_bytes]
    sources: Iterator[torch.Tensor]  # endless, each of up to block_bytes
    device: torch.device  # that is measured; target or source is on it


def block_bytes(device: torch.device) -> int:
    """Return the most that one copy moves."""
    return BLOCK_BYTES if device.type == "cuda" else uncached_block_bytes()


def lane_to(device: torch.device, pinned: bool = True, sources: Iterator[torch.Tensor] | None = None) -> Lane:
    """Return copies to `device` from new host memory, page-locked if `pinned`, or from `sources` (`blocks_of`): the rate depends on where
    the source is, which a process cannot always see or choose.

    Raises:
        RunError: there is too little host memory, or it may not be page-locked.
    """
    return Lane(_device_block(device), sources or itertools.repeat(_host_block(device, pinned)), device)


def lane_from(device: torch.device) -> Lane:
    """Return copies from `device` to page-locked host memory. Raises RunError as `lane_to`."""
    return Lane(_host_block(device, pinned=True), itertools.repeat(_device_block(device)), device)


def _host_block(device: torch.device, pinned: bool) -> torch.Tensor:
    # filled: untouched memory is all one page of zeros
    return host_empty((block_bytes(device),), torch.uint8, pinned and device.type == "cuda").fill_(7)


def _device_block(device: torch.device) -> torch.Tensor:
    return torch.full((block_bytes(device),), 3, dtype=torch.uint8, device=device)


def copy_gb_per_s(*lanes: Lane, seconds: float = 0.5) -> float:
    """Return median GB/s, summed, of copies in all `lanes` at the same time, the same bytes in each."""
    return statistics.median(_rounds(lanes, seconds))


def lane_between(source: torch.device, target: torch.device) -> Lane:
    """Return copies from one GPU's memory to another's."""
    return Lane(_device_block(target), itertools.repeat(_device_block(source)), source)


def host_to_device_rounds(
    devices: Sequence[torch.device], seconds: float = 0.5, sources: Iterator[torch.Tensor] | None = None
) -> list[float]:
    """Return GB/s, summed, of three or more rounds of copies from page-locked memory to all `devices` at once, the same bytes to each.
    `sources` (`blocks_of`) go to the devices in turn; errors as of `lane_to`."""
    return _rounds([lane_to(device, sources=sources) for device in devices], seconds)


def blocks_of(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor] | None:
    """Yield the bytes of `tensors` (uint8, one dimension) in blocks for a round, endlessly; None if they are so small that the start of
    copies would dominate."""
    blocks = [block for tensor in tensors for block in tensor.split(block_bytes(device)) if block.numel() >= MIN_BYTES]
    return itertools.cycle(blocks) if blocks else None


def _rounds(lanes: Sequence[Lane], seconds: float) -> list[float]:
    """Return GB/s of three rounds or more in at least `seconds`, after one that warms up."""
    rates: list[float] = []
    endless = _cuda_rounds if lanes[0].device.type == "cuda" else _host_rounds
    with contextlib.closing(endless(lanes)) as rounds:
        next(rounds)
        stop = time.perf_counter() + seconds
        while len(rates) < 3 or time.perf_counter() < stop:
            copied, spent_s = next(rounds)
            rates.append(copied / spent_s / 1e9)
    return rates


def _copy_next(lane: Lane) -> int:
    source = next(lane.sources)
    lane.target[: source.numel()].copy_(source, non_blocking=True)
    return source.numel()


def _cuda_rounds(lanes: Sequence[Lane]) -> Generator[tuple[int, float], None, None]:
    """Yield the bytes of a round, and the time that they take at the sum of the lanes' rates. Each lane has a stream. A round is enqueued
    before the previous one is waited for, so that links are never idle, as with an engine's ring buffer."""
    streams = [torch.cuda.Stream(lane.device) for lane in lanes]
    for device in {lane.device for lane in lanes}:  # the blocks are filled on other streams
        torch.cuda.synchronize(device)

    def record_events() -> list[torch.cuda.Event]:
        events = [torch.cuda.Event(enable_timing=True) for _ in streams]
        for event, stream in zip(events, streams):
            event.record(stream)
        return events

    def enqueue() -> tuple[list[int], list[torch.cuda.Event], list[torch.cuda.Event]]:
        starts, total, left = record_events(), [0] * len(lanes), [BLOCKS * BLOCK_BYTES] * len(lanes)
        while any(count > 0 for count in left):  # alternating, so that all lanes start at once
            for index, (lane, stream) in enumerate(zip(lanes, streams)):
                if left[index] > 0:
                    with torch.cuda.stream(stream):
                        copied = _copy_next(lane)
                    total[index] += copied
                    left[index] -= copied
        return total, starts, record_events()

    enqueued = enqueue()
    try:
        while True:
            (copied, starts, ends), enqueued = enqueued, enqueue()
            for end in ends:
                end.synchronize()
            times_s = (start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends))
            yield sum(copied), sum(copied) / sum(nbytes / seconds for nbytes, seconds in zip(copied, times_s))
    finally:
        for end in enqueued[-1]:
            end.synchronize()


def _host_rounds(lanes: Sequence[Lane]) -> Generator[tuple[int, float], None, None]:
    """Yield bytes and time of rounds of one copy in each lane; several lanes have a thread each."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        copy_all = pool.map if len(lanes) > 1 else map
        while True:
            start = time.perf_counter()
            copied = sum(copy_all(_copy_next, lanes))
            yield copied, time.perf_counter() - start


RANDOM_BYTES = 16 << 20  # drawn once and copied
SOURCES, COPIES = 4, 8  # blocks of host memory, and copies of a round: 39 ms at 55 GB/s


class CopyRound(NamedTuple):
    """Enqueued copies of a `BusyLinks`, with the events before and after those of each link."""

    starts: list[torch.cuda.Event]
    ends: list[torch.cuda.Event]
    link_bytes: int  # over each link

    def all_busy(self) -> bool:
        """Return whether no link has ended."""
        return not any(end.query() for end in self.ends)

    def wait(self) -> None:
        for end in self.ends:
            end.synchronize()

    def gb_per_s(self) -> float:
        """Wait for the copies, and return the sum of the links' GB/s."""
        self.wait()
        return sum(self.link_bytes / start.elapsed_time(end) / 1e6 for start, end in zip(self.starts, self.ends))


class BusyLinks:
    """Page-locked copies to one or several CUDA devices at once, on streams of their own; `source` may be that of another one."""

    def __init__(self, devices: Sequence[torch.device], source: torch.Tensor | None = None):
        if source is None:
            source = host_empty((SOURCES * BLOCK_BYTES,), torch.uint8, pinned=True)
            source.copy_(random_bytes(source.numel()))
        self.devices, self.source = devices, source
        self.targets = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device) for device in devices]
        self.streams = [torch.cuda.Stream(device) for device in devices]

    def begin(self, copies: int = COPIES) -> CopyRound:
        """Enqueue so many copies of `BLOCK_BYTES` to each device."""
        blocks = self.source.split(BLOCK_BYTES)
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in self.streams] for _ in range(2))
        for start, stream in zip(starts, self.streams):
            start.record(stream)
        for number in range(copies):  # alternating, so that all links start at once
            for index, (target, stream) in enumerate(zip(self.targets, self.streams)):
                with torch.cuda.stream(stream):  # each link reads another block
                    target.copy_(blocks[(number + index) % SOURCES], non_blocking=True)
        for end, stream in zip(ends, self.streams):
            end.record(stream)
        return CopyRound(starts, ends, copies * BLOCK_BYTES)


def random_bytes(count: int) -> torch.Tensor:
    """Return uint8 [count] in host memory: the same `RANDOM_BYTES` repeated."""
    random = torch.randint(0, 256, (RANDOM_BYTES,), dtype=torch.uint8)
    memory = host_empty((count,), torch.uint8, pinned=False)
    for part in memory.split(RANDOM_BYTES):
        part.copy_(random[: part.numel()])
    return memory


MIN_UNCACHED_BYTES, MAX_UNCACHED_BYTES = 64 << 20, 512 << 20
DEFAULT_UNCACHED_BYTES = 256 << 20  # if sysfs has no sizes of caches
CPUS = Path("/sys/devices/system/cpu")


def uncached_block_bytes() -> int:
    """Return the bytes of a block for copies by the CPU: twice its last-level caches, so that source and target are four times that.

    Not more, because touching memory for the first time takes longer than copying it, above all in a virtual machine. All of torch's
    threads copy, and Linux spreads them over the caches.
    """
    caches = {}  # bytes of each last-level cache, by the CPUs that share it
    for cpu in os.sched_getaffinity(0):
        last_level = max((CPUS / f"cpu{cpu}" / "cache").glob("index*"), default=None)
        with contextlib.suppress(OSError):  # virtual machines may have caches without a size
            if last_level is not None:
                kib = (last_level / "size").read_text().strip().removesuffix("K")
                caches[(last_level / "shared_cpu_list").read_text()] = int(kib) << 10 if kib.isdigit() else 0
    cache_bytes = sum(sorted(caches.values(), reverse=True)[: torch.get_num_threads()])
    if not cache_bytes:
        return DEFAULT_UNCACHED_BYTES
    return max(MIN_UNCACHED_BYTES, min(MAX_UNCACHED_BYTES, 2 * cache_bytes))


MAX_FILE_BYTES, READ_MEMORY_BYTES = 1 << 30, 128 << 20
# (bytes of a request, requests at once) that `zero-inference link` tries: all but the smallest read about as fast (h200-disk/reads.txt)
DISK_SETTINGS = tuple((mib << 20, depth) for mib in (1, 4, 8, 16) for depth in (8, 16, 32))


class DiskRate(NamedTuple):
    """The rate of direct reads, and the settings that gave it."""

    gb_per_s: float
    read_bytes: int  # of a request
    queue_depth: int  # requests at once


def disk_read_rate(
    folder: Path,
    file_bytes: int = MAX_FILE_BYTES,
    settings: Sequence[tuple[int, int]] = ((READ_BYTES, QUEUE_DEPTH),),
) -> DiskRate:
    """Return the fastest of reading a new file in `folder` with each of the `settings`; the file is unlinked at once.

    Args:
        file_bytes: rounded up to a whole number of MiB, at most MAX_FILE_BYTES.
        settings: (bytes of a request, requests at once).

    Raises:
        RunError: the file cannot be created, does not fit, or the file system refuses O_DIRECT.
    """
    file_bytes = max(1 << 20, min(MAX_FILE_BYTES, -(-file_bytes >> 20) << 20))
    memory = random_bytes(min(READ_MEMORY_BYTES, file_bytes))
    failure = f"cannot create a file in {folder}"
    try:
        with tempfile.NamedTemporaryFile(prefix="read-test-", dir=folder) as created:
            failure = f"no direct reads in {folder}"
            file = open_direct(Path(created.name), os.O_RDWR)
        try:
            if shutil.disk_usage(folder).free < file_bytes:
                raise RunError(f"{folder} has less than {format_bytes(file_bytes)} free")
            with contextlib.closing(DirectIO()) as io:
                for offset, part in _in_memory(file_bytes, memory):
                    io.write(file, part, offset)
            os.fsync(file)
            return max(_timed_read(file, file_bytes, memory, *each) for each in settings)
        finally:
            os.close(file)
    except OSError as error:
        raise RunError(f"{failure} ({error.strerror})") from error


def _in_memory(file_bytes: int, memory: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the parts of a file, (offset, memory), which share `memory`."""
    for offset in range(0, file_bytes, memory.numel()):
        yield offset, memory[: file_bytes - offset]


def _timed_read(file: int, file_bytes: int, memory: torch.Tensor, read_bytes: int, queue_depth: int) -> DiskRate:
    with contextlib.closing(DirectIO(read_bytes, queue_depth)) as io:
        start = time.perf_counter()
        reads = [part for offset, own in _in_memory(file_bytes, memory) for part in io.read(file, own, offset)]
        done = sum(part.result() for part in reads)
        return DiskRate(done / (time.perf_counter() - start) / 1e9, read_bytes, queue_depth)
