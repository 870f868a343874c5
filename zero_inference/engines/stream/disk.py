"""Blocks on NVMe: where they are (`DiskBlocks`), and reads of them ahead of use (`DiskReader`).

The ring buffer knows which blocks it will copy, also in the passes to come, so the reader goes ahead in that order: as soon as a slot in
host memory is free, it requests the next piece of a block into it, in parts that several threads read at once (`utils.direct_io`). The ring
buffer copies the piece to the device, and gives the slot back. The disk never waits for the device while a slot is free.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, islice, tee
from pathlib import Path
from typing import NamedTuple

import torch

from zero_inference.engines.offload_folder import OffloadWorkspace, reserve
from zero_inference.errors import RunError
from zero_inference.utils.direct_io import ALIGNMENT, DirectIO, open_direct
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import Transfers

FILE_NAME = "blocks.bin"
MEASURED_BYTES = 2 << 30  # of a measurement: about a second
PIECE_BYTES = 128 << 20  # that one slot holds: 50 ms of a fast disk
DISK_SLOTS = 4  # two are read, one is waited for and one is copied to the device
Wait = Callable[[], object]


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file that are part of a block's buffer; offsets in bytes."""

    path: Path
    offset: int
    nbytes: int
    buffer_offset: int = 0


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def extents_in_file(path: Path, sizes: Mapping[int, int]) -> dict[int, list[Extent]]:
    """Return where each block is in a file of whole blocks; `sizes`: bytes of the blocks, in the order of the file."""
    found, end = {}, 0
    for block, nbytes in sizes.items():
        found[block] = [Extent(path, end, nbytes)]
        end += _whole_pages(nbytes)
    return found


def slot_bytes(largest: int) -> int:
    """Return the bytes of each of `DISK_SLOTS` slots for blocks of up to `largest` bytes."""
    return min(PIECE_BYTES, _whole_pages(largest))


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
        self.file: int | None = None  # descriptor for writes
        self.closing = ExitStack()
        self.files: dict[Path, int] = {}  # descriptors for reads
        self.states: dict[Path, tuple[int, int]] = {}  # of the files when they were opened
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
            reserve(self.path, sum(map(_whole_pages, sizes.values())))
            self.file = _opened(self.path, os.O_WRONLY)
            self.closing.push(closing.pop_all())

    def empty_buffer(self, block: int) -> torch.Tensor:
        """Return host memory to fill with a block and to `write`: uint8, longer than the block."""
        return host_empty((_whole_pages(self.block_bytes(block)),), torch.uint8, pinned=False)

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

    def block_bytes(self, block: int) -> int:
        return max(extent.buffer_offset + extent.nbytes for extent in self.extents[block])

    def read(self, block: int, memory: torch.Tensor, begin: int, after: Wait | None = None) -> list[Future[int]]:
        """Request the bytes of a block's buffer from `begin` on into `memory`, uint8, as `DirectIO.read`; gaps in it are not read."""
        parts: list[Future[int]] = []
        for extent in self.extents[block]:
            first, last = extent.buffer_offset, extent.buffer_offset + extent.nbytes
            low, high = max(first, begin), min(last, begin + memory.numel())
            if low < high:
                file = self._open(extent.path)
                parts += self.io.read(file, memory[low - begin : high - begin], extent.offset + low - first, after)
        return parts

    def finish_read(self, block: int, parts: Sequence[Future[int]]) -> int:
        """Wait for `parts` of a `read`; return the bytes that the disk read.

        Raises:
            RunError: a file cannot be read, is too short, or has changed since it was opened.
        """
        wait(parts)
        for path in dict.fromkeys(extent.path for extent in self.extents[block]):
            if _state(self.files[path]) != self.states[path]:
                raise RunError(f"{path}: the file has changed while its weights were in use; start the run again.")
        try:
            return sum(part.result() for part in parts)
        except (OSError, RunError) as error:
            paths = ", ".join(str(path) for path in dict.fromkeys(each.path for each in self.extents[block]))
            raise RunError(f"{paths}: could not be read ({getattr(error, 'strerror', None) or error}).") from error

    def _open(self, path: Path) -> int:
        if path not in self.files:
            self.files[path] = _opened(path)
            self.closing.callback(os.close, self.files[path])
            self.states[path] = _state(self.files[path])
        return self.files[path]

    def close(self) -> None:
        with suppress(OSError):  # nobody reads the file any more
            self.finish()
        self.io.close()  # before its files
        self.closing.close()


class Piece(NamedTuple):
    """Bytes of a block's buffer that are read into one slot."""

    block: int
    begin: int
    end: int


class _Read(NamedTuple):
    piece: Piece
    slot: int
    parts: list[Future[int]]


class DiskReader:
    """Reads blocks from disk, in pieces, into slots of host memory, in the order in which they will be taken.

    Args:
        blocks: those that it may be asked for.
        pinned: the slots are page-locked.
    """

    def __init__(self, blocks: Collection[int], disk: DiskBlocks, pinned: bool, transfers: Transfers):
        self.disk, self.transfers = disk, transfers
        nbytes = slot_bytes(max(disk.block_bytes(block) for block in blocks))
        self.slots = [host_empty((nbytes,), torch.uint8, pinned) for _ in range(DISK_SLOTS)]
        self.free: deque[tuple[int, Wait | None]] = deque((slot, None) for slot in range(DISK_SLOTS))
        self.reads: deque[_Read] = deque()  # requested and not taken yet, in order
        self.upcoming: Iterator[Piece] = iter(())  # those after `reads`

    def follow(self, blocks: Iterable[int], begin: int = 0) -> None:
        """Read these blocks from now on, which may be endless; the first one from byte `begin` on. What was read already is kept if it is
        what they begin with."""
        pieces = self._pieces(blocks, begin)
        expected = list(islice(pieces, len(self.reads)))
        if [read.piece for read in self.reads] != expected:
            self._drop()
            pieces = chain(expected, pieces)
        self.upcoming = pieces
        self._request_all()

    def is_read(self) -> bool:
        """Return whether `take` would not wait."""
        return bool(self.reads) and all(part.done() for part in self.reads[0].parts)

    def take(self, block: int) -> tuple[int, torch.Tensor, Piece]:
        """Wait for the next piece, which is of `block`; return its slot, and its bytes there, uint8. `release` must follow.

        Raises:
            RunError: the file cannot be read, is too short, or has changed.
        """
        read = self.reads.popleft()
        assert read.piece.block == block, (read.piece, block)
        self.transfers.disk_read_bytes += self.disk.finish_read(block, read.parts)
        return read.slot, self.slots[read.slot][: read.piece.end - read.piece.begin], read.piece

    def release(self, slot: int, after: Wait | None = None) -> None:
        """Let `slot` be read into once `after` returns; it is called in other threads."""
        self.free.append((slot, after))
        self._request_all()

    def measure_gb_per_s(self, nbytes: int = MEASURED_BYTES) -> float:
        """Return the rate of reading the next blocks, at least `nbytes` if there are so many, with no other work."""
        resumed = [read.piece for read in self.reads]
        self._drop()
        self.upcoming, before = tee(chain(resumed, self.upcoming))
        start, done = time.perf_counter(), 0
        self._request_all()
        while done < nbytes and self.reads:
            read = self.reads.popleft()
            done += self.disk.finish_read(read.piece.block, read.parts)
            self.release(read.slot)
        rate = done / (time.perf_counter() - start) / 1e9
        self._drop()
        self.upcoming = before
        self._request_all()
        return rate

    def close(self) -> None:
        self._drop()
        self.slots.clear()

    def _pieces(self, blocks: Iterable[int], begin: int) -> Iterator[Piece]:
        size = self.slots[0].numel()
        for block in blocks:
            nbytes = self.disk.block_bytes(block)
            for start in range(begin, nbytes, size):
                yield Piece(block, start, min(start + size, nbytes))
            begin = 0

    def _request_all(self) -> None:
        while self.free and (piece := next(self.upcoming, None)) is not None:
            slot, after = self.free.popleft()
            memory = self.slots[slot][: piece.end - piece.begin]
            self.reads.append(_Read(piece, slot, self.disk.read(piece.block, memory, piece.begin, after)))

    def _drop(self) -> None:
        for read in self.reads:
            wait(read.parts)
            self.free.append((read.slot, None))
        self.reads.clear()


def _opened(path: Path, flags: int = os.O_RDONLY) -> int:
    try:
        return open_direct(path, flags)
    except OSError as error:
        raise RunError(
            f"{path}: no direct reads ({error.strerror}); name a folder of a local disk with --offload-dir."
        ) from error


def _state(file: int) -> tuple[int, int]:
    """Return what changes when a file is written to."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns
