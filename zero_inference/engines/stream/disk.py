"""Blocks on NVMe: where they are (`DiskBlocks`), and reads of them ahead of use (`DiskReader`).

The ring buffer knows which blocks it will copy, also in the passes to come, so the reader goes ahead in that order: as soon as a slot in
host memory is free, it requests the next piece of a block into it, in parts that several threads read at once (`utils.direct_io`). The ring
buffer copies the piece to the device, and gives the slot back. The disk never waits for the device while a slot is free.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from itertools import chain, cycle, islice, takewhile
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from zero_inference.engines.offload_folder import OffloadWorkspace, reserve
from zero_inference.errors import RunError
from zero_inference.utils.direct_io import DirectIO, Extent, aligned_up, open_direct
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import Transfers

FILE_NAME = "blocks.bin"
MEASURED_S = 1.0
PIECE_BYTES = 128 << 20  # that one slot holds: 50 ms of a fast disk
DISK_SLOTS = 4  # two are read, one is waited for and one is copied to the device
BUFFER_OFFSET = attrgetter("buffer_offset")  # of an extent
SlotFree = Callable[[], object]  # returns once a slot may be read into


def extents_in_file(path: Path, sizes: Mapping[int, int]) -> dict[int, list[Extent]]:
    """Return where each block is in a file of whole blocks; `sizes`: bytes of the blocks, in the order of the file."""
    found, end = {}, 0
    for block, nbytes in sizes.items():
        found[block] = [Extent(path, end, nbytes)]
        end += aligned_up(nbytes)
    return found


def slot_bytes(largest: int) -> int:
    """Return the bytes of each of `DISK_SLOTS` slots for blocks of up to `largest` bytes."""
    return min(PIECE_BYTES, aligned_up(largest))


class DiskBlocks:
    """Reads blocks on disk, and writes to a file those that no existing file has in the layout of a device.

    The file is in a workspace of the offload folder, which is removed when the run ends.

    Args:
        in_place: blocks that are read from a checkpoint's files.
        sizes: bytes of the others, in the order of the file.

    Raises:
        OSError: as `OffloadWorkspace`.
        RunError: the disk has too little space, or the file system refuses direct writes.
    """

    def __init__(self, folder: Path, in_place: Mapping[int, Sequence[Extent]], sizes: Mapping[int, int], io: DirectIO):
        self.io, self.written = io, frozenset(sizes)
        # a block of experts may have more than a thousand, which `read` finds by bisection
        self.extents = {block: sorted(extents, key=BUFFER_OFFSET) for block, extents in in_place.items()}
        self.file: int | None = None  # descriptor for writes
        self.closing = ExitStack()
        self.files: dict[Path, int] = {}  # descriptors for reads
        self.states: dict[Path, tuple[int, int]] = {}  # of the files when they were opened
        with ExitStack() as closing:
            for path in dict.fromkeys(extent.path for extents in in_place.values() for extent in extents):
                self._open(path, closing)
            if sizes:
                self._create(folder, sizes, closing)
            self.closing.push(closing.pop_all())
        self.paths = {block: {extent.path for extent in extents} for block, extents in self.extents.items()}

    def _create(self, folder: Path, sizes: Mapping[int, int], closing: ExitStack) -> None:
        workspace = OffloadWorkspace(folder)
        closing.callback(workspace.close)
        self.path = workspace.path / FILE_NAME
        self.extents |= extents_in_file(self.path, sizes)
        reserve(self.path, sum(map(aligned_up, sizes.values())))
        self.file = _opened(self.path, os.O_WRONLY)
        closing.callback(os.close, self.file)

    def empty_buffer(self, block: int) -> torch.Tensor:
        """Return host memory to fill with a block and to `write`: uint8, longer than the block."""
        return host_empty((aligned_up(self.block_bytes(block)),), torch.uint8, pinned=False)

    def write(self, block: int, buffer: torch.Tensor) -> None:
        with self._writing():
            self.io.write(self.file, buffer, self.extents[block][0].offset)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.path}: could not be written ({error.strerror}); choose another --offload-dir."
            ) from error

    def finish(self) -> None:
        """Wait until all blocks are on the disk; nothing is written afterwards. Raises RunError."""
        if self.file is not None:
            with self._writing():
                os.fsync(self.file)
            self._open(self.path, self.closing)

    def block_bytes(self, block: int) -> int:
        last = self.extents[block][-1]
        return last.buffer_offset + last.nbytes

    def read(
        self, block: int, memory: torch.Tensor, begin: int, memory_free: SlotFree | None = None
    ) -> list[Future[int]]:
        """Request the bytes of a block's buffer from `begin` on into `memory`, uint8, as `DirectIO.read`; gaps in it are not read."""
        parts: list[Future[int]] = []
        extents, end = self.extents[block], begin + memory.numel()
        start = max(0, bisect_right(extents, begin, key=BUFFER_OFFSET) - 1)
        for extent in takewhile(lambda each: each.buffer_offset < end, islice(extents, start, None)):
            first, last = extent.buffer_offset, extent.buffer_offset + extent.nbytes
            low, high = max(first, begin), min(last, end)
            if low < high:
                own, file = memory[low - begin : high - begin], self.files[extent.path]
                parts += self.io.read(file, own, extent.offset + low - first, memory_free)
        return parts

    def finish_read(self, block: int, parts: Sequence[Future[int]]) -> int:
        """Wait for `parts` of a `read`; return the bytes that the disk read.

        Raises:
            RunError: a file cannot be read, is too short, or has changed since it was opened.
        """
        wait(parts)
        for path in self.paths[block]:
            if _state(self.files[path]) != self.states[path]:
                raise RunError(f"{path}: the file has changed while its weights were in use; start the run again.")
        try:
            return sum(part.result() for part in parts)
        except (OSError, RunError) as error:
            paths = ", ".join(map(str, sorted(self.paths[block])))
            raise RunError(f"{paths}: could not be read ({getattr(error, 'strerror', None) or error}).") from error

    def _open(self, path: Path, closing: ExitStack) -> None:
        self.files[path] = _opened(path)
        closing.callback(os.close, self.files[path])
        self.states[path] = _state(self.files[path])

    def close(self) -> None:
        self.io.close()  # before its files
        self.closing.close()


class Piece(NamedTuple):
    """Names the bytes of a block's buffer that are read into one slot."""

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
        self.blocks, self.disk, self.transfers = sorted(blocks), disk, transfers
        nbytes = slot_bytes(max(disk.block_bytes(block) for block in blocks))
        self.slots = [host_empty((nbytes,), torch.uint8, pinned) for _ in range(DISK_SLOTS)]
        self.free: deque[tuple[int, SlotFree | None]] = deque((slot, None) for slot in range(DISK_SLOTS))
        self.reads: deque[_Read] = deque()  # requested and not taken yet, in order
        self.upcoming: Iterator[Piece] = iter(())  # those after `reads`

    def follow(self, blocks: Iterable[int], begin: int = 0) -> None:
        """Read these blocks from now on, which may be endless, the first one from byte `begin` on. Reads that match their beginning are
        kept."""
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
        read = self.reads[0]
        assert read.piece.block == block, (read.piece, block)
        try:
            self.transfers.disk_read_bytes += self.disk.finish_read(block, read.parts)
        except BaseException:
            self._drop()  # the next pass reads again
            raise
        self.reads.popleft()
        return read.slot, self.slots[read.slot][: read.piece.end - read.piece.begin], read.piece

    def release(self, slot: int, slot_free: SlotFree | None = None) -> None:
        """Let `slot` be read into once `slot_free` returns, which other threads call."""
        self.free.append((slot, slot_free))
        self._request_all()

    def measure_gb_per_s(self, seconds: float = MEASURED_S) -> float:
        """Return the rate of reading blocks for so many seconds, with no other work; what was read ahead is then read again, before this
        returns, so that a prompt that follows begins as any other."""
        resumed = chain([read.piece for read in self.reads], self.upcoming)
        self._drop()
        self.upcoming = self._pieces(cycle(self.blocks), 0)
        try:
            start, done = time.perf_counter(), 0
            self._request_all()
            while time.perf_counter() < start + seconds:
                read = self.reads[0]
                done += self.disk.finish_read(read.piece.block, read.parts)
                self.reads.popleft()
                self.release(read.slot)
            return done / (time.perf_counter() - start) / 1e9
        finally:
            self._drop()
            self.upcoming = resumed
            self._request_all()
            self._wait_for_all()

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
            slot, slot_free = self.free[0]
            memory = self.slots[slot][: piece.end - piece.begin]
            self.reads.append(_Read(piece, slot, self.disk.read(piece.block, memory, piece.begin, slot_free)))
            self.free.popleft()

    def _wait_for_all(self) -> None:
        for read in self.reads:
            wait(read.parts)

    def _drop(self) -> None:
        self._wait_for_all()
        for read in self.reads:
            self.free.append((read.slot, None))
        self.reads.clear()


def _opened(path: Path, flags: int = os.O_RDONLY) -> int:
    try:
        return open_direct(path, flags)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be opened for direct reads ({error.strerror}); name a folder of a local disk with --offload-dir."
        ) from error


def _state(file: int) -> tuple[int, int]:
    """Return size and time of the last change of an open file."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns
