"""A link that is kept busy, and work of the cores that is measured alone and beside it."""

from __future__ import annotations

import itertools
import time
from typing import Protocol

import torch

from zero_inference.hardware.copy import BLOCK_BYTES
from zero_inference.utils.host_memory import host_empty

RANDOM_BYTES = 16 << 20  # of which all else are copies
SOURCES, COPIES = 4, 8  # blocks in host memory, and copies of a round of the link: 39 ms at 55 GB/s


class Copies:
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


class Work(Protocol):
    """What the cores do piece by piece, with memory that the caches do not hold."""

    def one(self) -> int:
        """Do the next piece and return the bytes that it reads."""


def rate_alone(work: Work, seconds: float) -> float:
    """GB/s over about so many seconds, from the third piece on."""
    for _ in range(2):
        work.one()
    start, moved = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        moved += work.one()
    return moved / spent / 1e9


def rates_together(work: Work, link: Copies) -> tuple[float, float]:
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
