"""A lock that one process of a machine holds while it makes something that others wait for."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Iterator

MOST_S = 900.0  # DeepSpeed's slowest module takes about three minutes to compile


@contextlib.contextmanager
def held_lock(path: Path, most_s: float = MOST_S) -> Iterator[int]:
    """Hold an exclusive lock on the file `path`, which is made if need be; gives its descriptor. The lock
    is released when the last process that has the descriptor ends.

    Raises OSError where the file cannot be opened, and TimeoutError, which is one, where another process, perhaps a stopped one,
    has kept the lock for `most_s` seconds.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # a FIFO of that name must not block
    try:
        deadline = time.monotonic() + most_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process has kept it locked for {most_s:.0f} s", str(path)) from None
                time.sleep(0.05)
        yield fd
    finally:
        os.close(fd)
