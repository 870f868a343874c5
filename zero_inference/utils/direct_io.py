"""Direct reads and writes of files (O_DIRECT), which bypass the page cache, several at a time.

Threads wait in `preadv`, each for one part of a read. That reads as fast as libaio with as many requests in flight
(benchmarks/results/h200-disk/reads.txt), and needs nothing but Python.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_inference.errors import RunError
from zero_inference.utils.host_memory import host_empty

ALIGNMENT = 4096  # of offsets, lengths and memory; no disk asks for more
BUFFER_BYTES = 1 << 20  # of a thread that reads what is not aligned; smaller requests do not read slower
READ_BYTES, QUEUE_DEPTH = 8 << 20, 16  # of one request, and requests at once, where they were not measured
Action = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


@dataclass(frozen=True)
class Extent:
    """Names consecutive bytes of a file, and where they belong in a buffer; offsets in bytes."""

    path: Path
    offset: int
    nbytes: int
    buffer_offset: int = 0


def aligned_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def can_read_directly(path: Path) -> bool:
    """Return whether the file system of an existing file has direct reads."""
    try:
        os.close(open_direct(path))
    except OSError:
        return False
    return True


def open_direct(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file for direct reads, or with other `flags`. Raises OSError: it cannot be opened, or its file system has no direct reads."""
    return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)


class DirectIO:
    """Reads and writes parts of files by threads.

    Args:
        read_bytes: most bytes of one request.
        queue_depth: requests at once.
    """

    def __init__(self, read_bytes: int = READ_BYTES, queue_depth: int = QUEUE_DEPTH):
        self.read_bytes = read_bytes
        self.pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="direct-io")
        self.thread_state = threading.local()

    def read(
        self, file: int, memory: torch.Tensor, offset: int, memory_free: Callable[[], object] | None = None
    ) -> list[Future[int]]:
        """Request a read into `memory`, uint8 [bytes], from any `offset`; the result of each future is the bytes that the disk read.

        Memory and file are rarely aligned alike; then a thread reads into a buffer of its own, and copies.

        Args:
            memory_free: returns once `memory` may be written to; each thread that takes part calls it first.
        """
        # all parts but the first begin at aligned offsets
        starts = [0, *range(self.read_bytes - offset % ALIGNMENT, memory.numel(), self.read_bytes)]
        ends = [*starts[1:], memory.numel()]
        return [self.pool.submit(self._read, file, memory[a:b], offset + a, memory_free) for a, b in zip(starts, ends)]

    def _read(self, file: int, memory: torch.Tensor, offset: int, memory_free: Callable[[], object] | None) -> int:
        if memory_free is not None:
            memory_free()
        nbytes = memory.numel()
        if not (memory.data_ptr() % ALIGNMENT or offset % ALIGNMENT or nbytes % ALIGNMENT):
            return _transfer(os.preadv, file, memory, offset, nbytes)
        begin, done, buffer = offset // ALIGNMENT * ALIGNMENT, 0, self._buffer()
        for start in range(begin, offset + nbytes, buffer.numel()):
            end = min(start + buffer.numel(), offset + nbytes)
            part = buffer[: aligned_up(end - start)]
            done += _transfer(os.preadv, file, part, start, end - start)
            first = max(start, offset)
            # by numpy: torch would start threads
            memory.numpy()[first - offset : end - offset] = part.numpy()[first - start : end - start]
        return done

    def _buffer(self) -> torch.Tensor:
        """Return aligned memory of this thread."""
        if not hasattr(self.thread_state, "buffer"):
            self.thread_state.buffer = host_empty((BUFFER_BYTES,), torch.uint8, pinned=False)
        return self.thread_state.buffer

    def write(self, file: int, memory: torch.Tensor, offset: int) -> None:
        """Write `memory` at an aligned `offset`, and return when it is done. Raises OSError."""
        starts = range(0, memory.numel(), self.read_bytes)
        parts = [memory[start : start + self.read_bytes] for start in starts]
        futures = [
            self.pool.submit(_transfer, os.pwritev, file, part, offset + start, part.numel())
            for part, start in zip(parts, starts)
        ]
        wait(futures)
        for each in futures:
            each.result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def _transfer(action: Action, file: int, memory: torch.Tensor, offset: int, needed: int) -> int:
    """Read or write all of `memory`, or to the end of the file if that is after `needed` bytes. Raises RunError: the file ends before."""
    view, done = memoryview(memory.numpy()), 0
    while done < needed:
        count = action(file, [view[done:]], offset + done)
        if not count:
            raise RunError(f"the file ends at byte {offset + done}")
        done += count
    return done
