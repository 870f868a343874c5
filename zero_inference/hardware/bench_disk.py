"""Measure the read bandwidth of the offload folder's disk, bypassing the page cache."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zero_inference.errors import RunError
from zero_inference.utils.format import format_bytes

CHUNK_BYTES = 8 << 20
THREADS = 16
LEAST_BYTES = THREADS * CHUNK_BYTES  # a chunk for each thread
MOST_BYTES = 1 << 30
PASSES = 2  # the faster one counts: a run must not exceed its limit


def disk_read_gb_per_s(folder: Path, file_bytes: int = MOST_BYTES) -> float:
    """Return GB/s (1e9) of O_DIRECT reads by 16 threads of a new file in `folder`, which is unlinked at once.

    Args:
        file_bytes: see `whole_chunks`.

    Raises:
        RunError: the file cannot be created, does not fit, or the file system refuses O_DIRECT.
    """
    try:
        created, name = tempfile.mkstemp(prefix="read-test-", dir=folder)
        os.close(created)
    except OSError as error:
        raise RunError(f"cannot create a file in {folder} ({error.strerror})") from error
    try:
        file = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        raise RunError(f"no direct reads in {folder} ({error.strerror})") from error
    finally:
        os.unlink(name)
    file_bytes = whole_chunks(file_bytes)
    try:
        if shutil.disk_usage(folder).free < file_bytes:
            raise RunError(f"{folder} has less than {format_bytes(file_bytes)} free")
        return _write_and_read(file, file_bytes)
    except OSError as error:
        raise RunError(f"no direct reads in {folder} ({error.strerror})") from error
    finally:
        os.close(file)


def whole_chunks(file_bytes: int) -> int:
    """Return `file_bytes` rounded up to a whole number of chunks for each thread, at most MOST_BYTES."""
    return min(MOST_BYTES, max(1, -(-file_bytes // LEAST_BYTES)) * LEAST_BYTES)


def _write_and_read(file: int, file_bytes: int) -> float:
    chunk = os.urandom(CHUNK_BYTES)
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(THREADS)]
    for buffer in buffers:
        buffer.write(chunk)  # before the clock starts: a first touch can take longer than the read
    for offset in range(0, file_bytes, CHUNK_BYTES):
        os.pwritev(file, [buffers[0]], offset)
    os.fsync(file)
    rates = []
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            done = sum(pool.map(lambda first: _read_every(file, first, file_bytes, buffers[first]), range(THREADS)))
            rates.append(done / (time.perf_counter() - start) / 1e9)
    return max(rates)


def _read_every(file: int, first: int, file_bytes: int, buffer: mmap.mmap) -> int:
    return sum(
        os.preadv(file, [buffer], offset) for offset in range(first * CHUNK_BYTES, file_bytes, THREADS * CHUNK_BYTES)
    )
