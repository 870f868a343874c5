"""Read bandwidth of the offload folder's disk, past the page cache."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 8 << 20
THREADS = 16
PASSES = 2  # the faster one counts: a limit that a run exceeds would be none


def disk_read_gbps(folder: Path, file_bytes: int = 1 << 30) -> float | None:
    """GB/s (1e9 bytes) of O_DIRECT reads of a fresh file in `folder` by 16 threads.

    None where O_DIRECT is refused or the file does not fit. It has no name while it is there, so it goes with this process.
    """
    if shutil.disk_usage(folder).free < file_bytes:
        return None
    created, name = tempfile.mkstemp(prefix="read-test-", dir=folder)
    os.close(created)
    try:
        file = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    finally:
        os.unlink(name)
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as chunk:
            chunk.write(os.urandom(CHUNK_BYTES))
            for offset in range(0, file_bytes, CHUNK_BYTES):
                os.pwritev(file, [chunk], offset)
        os.fsync(file)
        rates = []
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(PASSES):
                start = time.perf_counter()
                done = sum(pool.map(lambda first: _read_every(file, first, file_bytes), range(THREADS)))
                rates.append(done / (time.perf_counter() - start) / 1e9)
        return max(rates)
    except OSError:
        return None
    finally:
        os.close(file)


def _read_every(file: int, first: int, file_bytes: int) -> int:
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    return sum(os.preadv(file, [buffer], offset) for offset in range(first * CHUNK_BYTES, file_bytes, THREADS * CHUNK_BYTES))
