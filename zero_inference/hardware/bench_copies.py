"""Bandwidth between host and device, measured in this process.

Rates are GB/s of 1e9 bytes: bytes copied, counted once, over time. Each is the median of rounds. On CUDA a round copies 2 GiB
in blocks of up to 256 MiB, and each copy is asked for before the one before it ends, as an engine does that never lets its link
wait; rounds that begin on an idle link give less (benchmarks/link_rounds.py). On a CPU-only machine the 'device' is host memory
too, and every rate here is that of a memory copy (`kind_of` has the words), in blocks made for its caches (`link.caches`).
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
# of a block of somebody else's memory: 0.3 ms at 55 GB/s, a hundred times what it takes to start a copy
LEAST_BYTES = 16 << 20

T = TypeVar("T")


class Rate(NamedTuple):
    """A measured rate in GB/s: the median of rounds, and the distance between their 10th and 90th percentile (the whole of it)."""

    gb_per_s: float
    spread_gb_per_s: float


class Lane(NamedTuple):
    """What is copied one behind the other; either side is on the measured device. All uint8."""

    target: torch.Tensor  # [block_bytes]
    sources: Iterator[torch.Tensor]  # each of up to block_bytes, without an end
    device: torch.device  # the one that is measured


def block_bytes(device: torch.device) -> int:
    """The most that one copy moves in a measurement on `device`."""
    return BLOCK_BYTES if device.type == "cuda" else uncached_block_bytes()


def kind_of(device: torch.device) -> str:
    """What a 'copy to the device' is on this machine, for labels."""
    return "host link" if device.type == "cuda" else "host memory copy"


def rate_of(rounds: list[float]) -> Rate:
    """The rate that `rounds` (GB/s) give together; at least two."""
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return Rate(statistics.median(rounds), tenths[-1] - tenths[0])


def host_to_device_gb_per_s(device: torch.device, pinned: bool, seconds: float = 0.5) -> float:
    """Median GB/s of copies from host memory, page-locked where `pinned`, to `device`. Raises as `host_to_device_rounds`."""
    return statistics.median(host_to_device_rounds(device, pinned, seconds))


def host_to_device_rounds(
    device: torch.device, pinned: bool, seconds: float = 0.5, sources: Iterator[torch.Tensor] | None = None
) -> list[float]:
    """GB/s of each round, three or more, of copies from host memory to `device`.

    Args:
        pinned: page-lock the host memory.
        sources: copy from these in turn (host memory, as `blocks_of` gives it), and not from a block of their own: how fast
            a copy is depends on where its source lies, which a process cannot always see or choose.

    Raises:
        RunError: the host memory is not there, or may not be page-locked.
    """
    return _rounds([_lane(_device_block(device), sources or _host_block(device, pinned))], seconds)


def blocks_of(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor] | None:
    """The bytes of `tensors` (uint8, one dimension) in blocks that a round can copy to `device`, again and again; None where they are
    so small that starting the copies would be what is measured."""
    blocks = [
        block for tensor in tensors for block in tensor.split(block_bytes(device)) if block.numel() >= LEAST_BYTES
    ]
    return itertools.cycle(blocks) if blocks else None


def device_to_host_gb_per_s(device: torch.device, pinned: bool = True, seconds: float = 0.5) -> float:
    """Median GB/s of copies from `device` to host memory. Raises RunError as `host_to_device_rounds`."""
    return statistics.median(_rounds([_lane(_host_block(device, pinned), _device_block(device))], seconds))


def both_directions_gb_per_s(device: torch.device, seconds: float = 0.5) -> float:
    """Median GB/s of page-locked copies to and from `device` at the same time, as much each way; the sum of both.

    The slower direction ends the round, so twice the slower one's rate is the most that can come out.
    Raises RunError as `host_to_device_rounds`.
    """
    down = _lane(_device_block(device), _host_block(device, pinned=True))
    up = _lane(_host_block(device, pinned=True), _device_block(device))
    return statistics.median(_rounds([down, up], seconds))


def several_devices_gb_per_s(devices: Sequence[torch.device], seconds: float = 0.5) -> float:
    """Median GB/s of page-locked copies from host memory to all of `devices` at the same time; the sum over them.

    As much goes to each, and the slowest ends the round: what ranks that wait for each other get.
    Raises RunError as `host_to_device_rounds`.
    """
    return statistics.median(
        _rounds([_lane(_device_block(device), _host_block(device, pinned=True)) for device in devices], seconds)
    )


def while_copying(device: torch.device, read: Callable[[], T]) -> T:
    """What `read` returns while page-locked copies to `device`, a CUDA device, are under way: an idle GPU slows its link."""
    target, source = _device_block(device), _host_block(device, pinned=True)
    with torch.cuda.device(device):
        # 10.7 GB: 0.2 s at generation 5 x16, 0.9 s at 3 x16; the link stays up for some seconds more
        for _ in range(40):
            target.copy_(source, non_blocking=True)
        value = read()
        torch.cuda.synchronize(device)
    return value


def _host_block(device: torch.device, pinned: bool) -> torch.Tensor:
    # filled, or all of it would be the kernel's one page of zeros
    return host_empty((block_bytes(device),), torch.uint8, pinned and device.type == "cuda").fill_(7)


def _device_block(device: torch.device) -> torch.Tensor:
    return torch.full((block_bytes(device),), 3, dtype=torch.uint8, device=device)


def _lane(target: torch.Tensor, source: torch.Tensor | Iterator[torch.Tensor]) -> Lane:
    if not isinstance(source, torch.Tensor):
        return Lane(target, source, target.device)
    return Lane(target, itertools.repeat(source), target.device if target.is_cuda else source.device)


def _rounds(lanes: list[Lane], seconds: float) -> list[float]:
    measure = _CudaRound(lanes) if lanes[0].device.type == "cuda" else _HostRound(lanes)
    rates: list[float] = []
    try:
        measure()
        stop = time.perf_counter() + seconds
        while len(rates) < 3 or time.perf_counter() < stop:
            moved, spent = measure()
            rates.append(moved / spent / 1e9)
    finally:
        measure.close()
    return rates


def _copy_next(lane: Lane) -> int:
    """Copy the lane's next source and return its bytes."""
    source = next(lane.sources)
    lane.target[: source.numel()].copy_(source, non_blocking=True)
    return source.numel()


class _CudaRound:
    """A call copies in every lane on a stream of its own and gives (bytes, seconds of the slowest stream).

    It asks for the next round before it waits for its own, so a stream of page-locked copies never runs dry, of several the slowest one:
    that is how an engine's ring copies.
    """

    def __init__(self, lanes: list[Lane]):
        self.lanes = lanes
        self.streams = [torch.cuda.Stream(lane.device) for lane in lanes]
        for device in {lane.device for lane in lanes}:  # the blocks are filled on other streams
            torch.cuda.synchronize(device)
        self.ends = self._events()
        self.asked = self._ask()

    def __call__(self) -> tuple[int, float]:
        (moved, ends), self.asked = self.asked, self._ask()
        spent_s = []
        for start, end in zip(self.ends, ends):
            end.synchronize()
            spent_s.append(start.elapsed_time(end) / 1e3)
        self.ends = ends
        return moved, max(spent_s)

    def close(self) -> None:
        """Wait for what was asked for."""
        for end in self.asked[1]:
            end.synchronize()

    def _ask(self) -> tuple[int, list[torch.cuda.Event]]:
        moved = 0
        left = [BLOCKS * BLOCK_BYTES] * len(self.lanes)
        while any(count > 0 for count in left):  # in turns, so that all lanes start at once
            for index, (lane, stream) in enumerate(zip(self.lanes, self.streams)):
                if left[index] > 0:
                    with torch.cuda.stream(stream):
                        copied = _copy_next(lane)
                    moved += copied
                    left[index] -= copied
        return moved, self._events()

    def _events(self) -> list[torch.cuda.Event]:
        """One of each stream, behind what it was asked."""
        events = []
        for stream in self.streams:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(stream)
        return events


class _HostRound:
    """A call copies once in every lane, each in a thread of its own where there are several, and gives (bytes, seconds)."""

    def __init__(self, lanes: list[Lane]):
        self.lanes = lanes
        self.pool = ThreadPoolExecutor(len(lanes)) if len(lanes) > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self.pool is not None:
            self.pool.shutdown()

    def __call__(self) -> tuple[int, float]:
        start = time.perf_counter()
        moved = sum((map if self.pool is None else self.pool.map)(_copy_next, self.lanes))
        return moved, time.perf_counter() - start


RANDOM_BYTES = 16 << 20  # of which all else are copies
SOURCES, COPIES = 4, 8  # blocks in host memory, and copies of a round of the link: 39 ms at 55 GB/s


class BusyLink:
    """Copies from page-locked host memory, on a stream of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.source = host_empty((SOURCES * BLOCK_BYTES,), torch.uint8, pinned=True)
        self.source.copy_(random_bytes(self.source.numel()))
        self.target = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device)

    def begin(self, copies: int = COPIES) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Ask for a round, or one of so many copies; events at its ends."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            for block in itertools.islice(itertools.cycle(self.source.split(BLOCK_BYTES)), copies):
                self.target.copy_(block, non_blocking=True)
            end.record()
        return start, end

    def rate(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return COPIES * BLOCK_BYTES / start.elapsed_time(end) / 1e6

    def round(self) -> float:
        return self.rate(*self.begin())


class CpuWork(Protocol):
    """What the cores do piece by piece, with memory that the caches do not hold."""

    def one(self) -> int:
        """Do the next piece and return the bytes that it reads."""


def rate_alone(work: CpuWork, seconds: float) -> float:
    """GB/s over about so many seconds, from the third piece on."""
    for _ in range(2):
        work.one()
    start, moved = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        moved += work.one()
    return moved / spent / 1e9


def rates_together(work: CpuWork, link: BusyLink) -> tuple[float, float]:
    """GB/s of the link and of the cores while both work."""
    work.one()
    events = link.begin()
    start, moved = time.perf_counter(), 0
    while not events[1].query():
        moved += work.one()
    spent = time.perf_counter() - start
    return link.rate(*events), moved / spent / 1e9


def random_bytes(count: int) -> torch.Tensor:
    """uint8 [count] in host memory: the same `RANDOM_BYTES` again and again."""
    random = torch.randint(0, 256, (RANDOM_BYTES,), dtype=torch.uint8)
    memory = host_empty((count,), torch.uint8, pinned=False)
    for part in memory.split(RANDOM_BYTES):
        part.copy_(random[: part.numel()])
    return memory


LEAST_UNCACHED_BYTES, MOST_UNCACHED_BYTES = 64 << 20, 512 << 20
DEFAULT_UNCACHED_BYTES = 256 << 20
CPUS = Path("/sys/devices/system/cpu")


def uncached_block_bytes() -> int:
    """Bytes of a block for copies by the cores: twice what their last-level caches hold, so source and target are four times that.

    Not larger than it has to be, because touching memory for the first time takes longer than copying it, above all in a virtual
    machine; and never beyond MOST_BYTES, which a few processors' caches exceed. All of torch's threads copy, and
    Linux spreads them over as many caches as there are.
    """
    try:
        caches = sorted(_last_level_caches(), reverse=True)
    except (OSError, ValueError):  # a machine that does not tell, or in other words
        caches = []
    held = sum(caches[: torch.get_num_threads()])
    return max(LEAST_UNCACHED_BYTES, min(MOST_UNCACHED_BYTES, 2 * held)) if held else DEFAULT_UNCACHED_BYTES


def _last_level_caches() -> list[int]:
    """Bytes of each last-level cache of the cores that this process may use."""
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
    """Of such as 32768K."""
    return int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]] if size[-1:] in ("K", "M", "G") else int(size)
