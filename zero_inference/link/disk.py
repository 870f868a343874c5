"""Read bandwidth of the offload folder's disk, past the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zero_inference.errors import RunError

CHUNK_BYTES = 8 << 20
THREADS = 16
PASSES = 2  # the faster one counts: a limit that a run exceeds would be none


def disk_read_gbps(folder: Path, file_bytes: int = 1 << 30) -> float:
    """GB/s (1e9 bytes) of O_DIRECT reads of a fresh file in `folder` by 16 threads.

    Raises:
        RunError: no file can be made there, the disk is full, or the file system refuses O_DIRECT.
    """
    path = None
    try:
        descriptor, name = tempfile.mkstemp(prefix="read-test-", dir=folder)
        os.close(descriptor)
        path = Path(name)
        return _write_and_read(path, file_bytes)
    except OSError as error:
        what = f"{folder} takes no file" if path is None else f"no direct reads in {folder}"
        raise RunError(f"{what} ({error.strerror})") from error
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _write_and_read(path: Path, file_bytes: int) -> float:
    chunk = mmap.mmap(-1, CHUNK_BYTES)
    chunk.write(os.urandom(CHUNK_BYTES))
    written = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        for offset in range(0, file_bytes, CHUNK_BYTES):
            os.pwritev(written, [chunk], offset)
        os.fsync(written)
    finally:
        os.close(written)
    rates = []
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            done = sum(pool.map(lambda first: _read_every(path, first, file_bytes), range(THREADS)))
            rates.append(done / (time.perf_counter() - start) / 1e9)
    return max(rates)


def _read_every(path: Path, first: int, file_bytes: int) -> int:
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done = 0
    try:
        for offset in range(first * CHUNK_BYTES, file_bytes, THREADS * CHUNK_BYTES):
            done += os.preadv(descriptor, [buffer], offset)
    finally:
        os.close(descriptor)
    return done
