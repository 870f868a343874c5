"""Appending to a file that other processes append to at the same time: all of it or nothing, and never without an end."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zero_inference.utils.locks import lock

LOCK_S = 10.0  # a lock is held for one write, so whoever holds it for longer does not come back
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


def append_bytes(path: str | os.PathLike, data: bytes, *, sync: bool = False, on_new_line: bool = False) -> None:
    """Appends `data` to `path` with one write under an exclusive lock: all of it, or nothing and OSError.

    `sync` returns only once it is on disk. `on_new_line` first ends a last line that an earlier crash left open (with the same
    write), so that the damage stays with that line. TimeoutError, an OSError, says that another process kept the lock for LOCK_S.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as opened:
        size = os.fstat(opened.fd).st_size
        if on_new_line and size and os.pread(opened.fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            written = os.write(opened.fd, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fitted", str(path))
        except OSError:  # of a full disk, which writes a part, or has room for a name alone
            if opened.regular:
                os.ftruncate(opened.fd, size)
                if opened.made and opened.locked and not size:
                    os.unlink(opened.path)
            raise
        if sync and opened.regular:
            os.fsync(opened.fd)


def check_appendable(path: str | os.PathLike) -> None:
    """Raises OSError where nothing could be appended to `path` now. Makes missing folders, but leaves no empty file behind."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as opened:
        # A writer that opened the file meanwhile notices that it is gone, but only behind the lock.
        if opened.made and opened.locked and os.fstat(opened.fd).st_size == 0:
            os.unlink(opened.path)


class _Opened:
    """A file opened for appending; `made` says that this made it."""

    def __init__(self, path: str | os.PathLike):
        self.path, self.locked = os.path.realpath(path), False
        self.fd, self.made = _open(self.path)
        kind = os.fstat(self.fd).st_mode
        self.regular = stat.S_ISREG(kind)
        if not self.regular and not stat.S_ISCHR(kind):
            os.close(self.fd)
            raise OSError(errno.EINVAL, "neither a file nor a device", str(path))

    def lock(self, since: float) -> None:
        """flock, where the file system has it; without it O_APPEND alone keeps writes apart."""
        try:
            lock(self.fd, self.path, since, LOCK_S)
            self.locked = True
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise

    def is_still_there(self) -> bool:
        """Whether its name still leads to it: `check_appendable` of another process may have removed the empty file."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except FileNotFoundError:
            return False


def _open(path: str) -> tuple[int, bool]:
    """A descriptor, and whether the file was made; others may make and remove it at the same time."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o666), True
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, FLAGS), False


@contextlib.contextmanager
def _locked(path: str | os.PathLike) -> Iterator[_Opened]:
    since = time.monotonic()
    while True:
        opened = _Opened(path)
        try:
            opened.lock(since)
            if opened.is_still_there():
                yield opened
                return
        finally:
            os.close(opened.fd)
