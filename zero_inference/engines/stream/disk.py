"""Blocks on NVMe: where they are (`DiskBlocks`), and reads of them ahead of use (`DiskReader`).

A pass uses all blocks on disk, in the same order each time, so a reader goes round in that order: as soon as a slot in host memory is free,
it requests the next block into it, in parts that several threads read at once (`utils.direct_io`). The ring buffer takes each block from
its slot. The disk never waits for the device while a slot is free.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.engines.offload_folder import OffloadWorkspace, reserve
from zero_inference.errors import RunError
from zero_inference.utils.direct_io import ALIGNMENT, DirectIO, open_direct
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import Transfers

FILE_NAME = "blocks.bin"
MEASURED_BYTES = 2 << 30  # of a measurement: about a second
DISK_SLOTS = 3  # one is read, one may be read next, and one is copied to the device


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file that are part of a block's buffer; offsets in bytes."""

    path: Path
    offset: int
    nbytes: int
    buffer_offset: int = 0

    @property
    def read_begin(self) -> int:
        return self.offset // ALIGNMENT * ALIGNMENT

    @property
    def read_bytes(self) -> int:
        """Bytes of the direct read that contains it."""
        return -(-(self.offset + self.nbytes) // ALIGNMENT) * ALIGNMENT - self.read_begin


def slot_bytes_of(extents: Sequence[Extent]) -> int:
    """Return the bytes of host memory that a block is read into."""
    return sum(extent.read_bytes for extent in extents)


def extents_in_file(path: Path, sizes: Mapping[int, int]) -> dict[int, list[Extent]]:
    """Return where each block is in a file of whole blocks; `sizes`: bytes of the blocks, in the order of the file."""
    found, end = {}, 0
    for block, nbytes in sizes.items():
        found[block] = [Extent(path, end, nbytes)]
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found


class DiskBlocks:
    """The blocks on disk: where each is, and the file of those that no checkpoint stores as a device needs them.

    That file is in a workspace of the offload folder, which is removed when the run ends.

    Args:
        in_place: blocks that are read from a checkpoint's files.
        sizes: bytes of the others, in the order of the file.

    Raises:
        RunError: the disk has too little space, or the file system refuses direct writes.
    """

    def __init__(self, folder: Path, in_place: Mapping[int, Sequence[Extent]], sizes: Mapping[int, int], io: DirectIO):
        self.io, self.extents, self.written = io, dict(in_place), frozenset(sizes)
        self.file: int | None = None
        self.closing = ExitStack()
        self.closing.callback(io.close)
        if not sizes:
            return
        with ExitStack() as closing:
            try:
                workspace = OffloadWorkspace(folder)
            except OSError as error:
                raise RunError(
                    f"--offload-dir {folder}: not writable ({error.strerror}); choose another folder."
                ) from error
            closing.callback(workspace.close)
            self.path = workspace.path / FILE_NAME
            self.extents |= extents_in_file(self.path, sizes)
            reserve(self.path, sum(slot_bytes_of(self.extents[block]) for block in sizes))
            self.file = _opened(self.path, os.O_WRONLY)
            self.closing.push(closing.pop_all())

    def empty_buffer(self, block: int) -> torch.Tensor:
        """Return host memory to fill with a block and to `write`: uint8, longer than the block."""
        return host_empty((slot_bytes_of(self.extents[block]),), torch.uint8, pinned=False)

    def write(self, block: int, buffer: torch.Tensor) -> None:
        try:
            self.io.write(self.file, buffer, self.extents[block][0].offset)
        except OSError as error:
            raise RunError(
                f"{self.path}: could not be written ({error.strerror}); choose another --offload-dir."
            ) from error

    def finish(self) -> None:
        """Wait until all blocks are on the disk; nothing is written afterwards."""
        if self.file is not None:
            os.fsync(self.file)
            os.close(self.file)
            self.file = None

    def close(self) -> None:
        with suppress(OSError):  # nobody reads the file any more
            self.finish()
        self.closing.close()


@dataclass
class _Read:
    block: int
    slot: int
    parts: list[Future[int]]


class DiskReader:
    """Reads blocks from disk into slots of host memory, in the order in which passes use them, over and over.

    Args:
        order: the blocks.
        extents: where each is.
        pinned: the slots are page-locked.
    """

    def __init__(self, order: Sequence[int], disk: DiskBlocks, pinned: bool, transfers: Transfers):
        self.order, self.extents, self.io, self.transfers = list(order), disk.extents, disk.io, transfers
        extents = self.extents
        paths = dict.fromkeys(extent.path for block in order for extent in extents[block])
        self.files = {path: _opened(path) for path in paths}
        self.states = {path: _state(file) for path, file in self.files.items()}
        nbytes = max(slot_bytes_of(extents[block]) for block in order)
        self.slots = [host_empty((nbytes,), torch.uint8, pinned) for _ in range(min(DISK_SLOTS, len(self.order)))]
        self.reads: deque[_Read] = deque()  # requested and not taken yet, in order
        self.position = 0  # in `order`, of the next block to request

    def start(self) -> None:
        """Request the first blocks."""
        for slot in range(len(self.slots)):
            self._request_next(slot)

    def is_read(self, block: int) -> bool:
        """Return whether `take` would not wait for `block`."""
        return bool(self.reads) and self.reads[0].block == block and all(part.done() for part in self.reads[0].parts)

    def take(self, block: int) -> tuple[int, list[tuple[torch.Tensor, int]]]:
        """Wait until `block` is read; return its slot and its pieces there: (uint8, offset in the block's buffer). `release` must follow.

        Raises:
            RunError: the file cannot be read, is too short, or has changed.
        """
        self._skip_to(block)
        read = self.reads.popleft()
        for path in dict.fromkeys(extent.path for extent in self.extents[block]):
            if _state(self.files[path]) != self.states[path]:
                raise RunError(f"{path}: the file has changed while its weights were in use; start the run again.")
        self.transfers.disk_read_bytes += self._finish(read)
        memory, begin, pieces = self.slots[read.slot], 0, []
        for extent in self.extents[block]:
            first = begin + extent.offset - extent.read_begin
            pieces.append((memory[first : first + extent.nbytes], extent.buffer_offset))
            begin += extent.read_bytes
        return read.slot, pieces

    def release(self, slot: int, after: Callable[[], object] | None = None) -> None:
        """Request the next block into `slot`, once `after` returns; it runs in other threads."""
        self._request_next(slot, after)

    def measure_gb_per_s(self, nbytes: int = MEASURED_BYTES) -> float:
        """Return the rate of reading the next blocks, at least `nbytes`, with no other work; what was read ahead is read again later."""
        self._wait()
        start, done = time.perf_counter(), 0
        self.start()
        while done < nbytes:
            read = self.reads.popleft()
            done += self._finish(read)
            self._request_next(read.slot)
        return done / (time.perf_counter() - start) / 1e9

    def close(self) -> None:
        self._wait()
        self.slots.clear()
        for file in self.files.values():
            os.close(file)
        self.files.clear()

    def _wait(self) -> None:
        for read in self.reads:
            wait(read.parts)
        self.reads.clear()

    def _request_next(self, slot: int, after: Callable[[], object] | None = None) -> None:
        block = self.order[self.position]
        self.position = (self.position + 1) % len(self.order)
        parts, begin = [], 0
        for extent in self.extents[block]:
            memory = self.slots[slot][begin : begin + extent.read_bytes]
            needed = extent.offset + extent.nbytes - extent.read_begin
            parts += self.io.read(self.files[extent.path], memory, extent.read_begin, needed, after)
            begin += extent.read_bytes
        self.reads.append(_Read(block, slot, parts))

    def _skip_to(self, block: int) -> None:
        """Drop reads before that of `block`, or all if it was not requested: the model was called again after a call that failed midway."""
        is_requested = any(read.block == block for read in self.reads)
        if not is_requested:
            self.position = self.order.index(block)
        dropped = []
        while self.reads and (self.reads[0].block != block or not is_requested):
            dropped.append(self.reads.popleft())
        for read in dropped:
            wait(read.parts)
        for read in dropped:
            self._request_next(read.slot)

    def _finish(self, read: _Read) -> int:
        """Wait for a read and return its bytes."""
        wait(read.parts)
        try:
            return sum(part.result() for part in read.parts)
        except (OSError, RunError) as error:
            paths = ", ".join(str(path) for path in dict.fromkeys(each.path for each in self.extents[read.block]))
            raise RunError(f"{paths}: could not be read ({getattr(error, 'strerror', None) or error}).") from error


def _opened(path: Path, flags: int = os.O_RDONLY) -> int:
    try:
        return open_direct(path, flags)
    except OSError as error:
        raise RunError(
            f"{path}: no direct reads ({error.strerror}); name a folder of a local disk with --offload-dir."
        ) from error


def _state(file: int) -> tuple[Any, ...]:
    """Return what changes when a file is written to."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns
