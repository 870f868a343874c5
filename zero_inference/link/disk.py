"""Read bandwidth of the offload folder's disk, past the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 8 << 20
THREADS = 16
PASSES = 2  # the faster one counts: a limit that a run exceeds would be none


def disk_read_gbps(folder: Path, file_bytes: int = 1 << 30) -> float | None:
    """GB/s (1e9 bytes) of O_DIRECT reads of a fresh file in `folder` by 16 threads; None where O_DIRECT is refused."""
    descriptor, name = tempfile.mkstemp(prefix="read-test-", dir=folder)
    os.close(descriptor)
    path = Path(name)
    chunk = mmap.mmap(-1, CHUNK_BYTES)
    chunk.write(os.urandom(CHUNK_BYTES))
    try:
        written = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        path.unlink()
        return None
    try:
        for offset in range(0, file_bytes, CHUNK_BYTES):
            os.pwritev(written, [chunk], offset)
        os.fsync(written)
        rates = []
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(PASSES):
                start = time.perf_counter()
                done = sum(pool.map(lambda first: _read_every(path, first, file_bytes), range(THREADS)))
                rates.append(done / (time.perf_counter() - start) / 1e9)
        return max(rates)
    except OSError:
        return None
    finally:
        os.close(written)
        path.unlink(missing_ok=True)


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
