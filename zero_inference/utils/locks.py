"""Locks that one process of a machine holds while others wait, and no longer than a time limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.01
MOST_S = 900.0  # DeepSpeed's modules take minutes to compile


@contextlib.contextmanager
def held_lock(path: Path, most_s: float = MOST_S) -> Iterator[int]:
    """Hold an exclusive lock on the file `path`, which is made if need be; gives its descriptor.

    The lock is released when the last process that has the descriptor closes it or ends.

    Raises OSError where the file cannot be opened, and TimeoutError, which is one, where another process, perhaps a stopped one,
    has kept the lock for `most_s` seconds.
    """
    fd = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )  # a FIFO of that name must not block
    try:
        lock(fd, path, time.monotonic(), most_s)
        yield fd
    finally:
        os.close(fd)


def lock(fd: int, path: str | os.PathLike, since: float, most_s: float) -> None:
    """Lock the open file for this process alone; `path` is its name in errors.

    Raises OSError where the file system has no locks, and TimeoutError where another process keeps it until `most_s` seconds after
    `since` (time.monotonic).
    """
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - since > most_s:
                why = f"another process has kept it locked for {most_s:.0f} s"
                raise TimeoutError(errno.ETIMEDOUT, why, str(path)) from None
            time.sleep(POLL_S)
