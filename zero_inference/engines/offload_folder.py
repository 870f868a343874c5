"""The offload folder: one private subfolder a process, and no remains of runs that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zero_inference.errors import RunError, UsageError
from zero_inference.utils.format import format_bytes, format_bytes_pair
from zero_inference.utils.processes import defer_signals

PREFIX = "zero-inference-"
OURS = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as tempfile.mkdtemp names it
LOCK = "lock"
MARK = b"offload workspace of zero-inference: removed by the next run when its own has ended\n"
_open: set[OffloadWorkspace] = set()


class OffloadWorkspace:
    """A marked and locked subfolder of the offload folder for this process; removed on `close`.

    Its lock file ends with the process however that ends, so that whoever opens the offload folder next can tell the
    folders of living runs from remains. The mark is written under the lock: a folder that is marked and not locked is one
    whose run has ended.

    Raises:
        OSError: the folder cannot be listed or written to, or its file system has no locks.
    """

    def __init__(self, folder: Path):
        _remove_remains(folder)
        with defer_signals():
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            try:
                self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.write(self._lock, MARK)
            except OSError:  # a full disk, or no locks there
                _remove(self.path)
                raise
            _open.add(self)

    def close(self) -> None:
        """Remove it and what is in it. A second call does nothing; signals wait until it is done."""
        with defer_signals():
            if self in _open:
                _open.discard(self)
                _remove(self.path)
                os.close(self._lock)


def close_all() -> None:
    """Remove the workspaces of this process, from any thread, before it ends without running the main one to its end."""
    for workspace in list(_open):
        workspace.close()


def check_offload_folder(folder: Path, needed_bytes: int) -> None:
    """Make the folder if need be, and remove the remains of earlier runs.

    Raises:
        UsageError: it cannot be written to, or has less free space than `needed_bytes`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        OffloadWorkspace(folder).close()
    except OSError as error:
        raise UsageError(f"--offload-dir {folder}: not writable ({error.strerror}); choose another folder.") from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        needed, there, unit = format_bytes_pair(needed_bytes, free)
        raise UsageError(
            f"--offload-dir {folder}: {needed} {unit} is needed and {there} {unit} is free; choose another folder, or let --dry-run say "
            "what would fit."
        )


def reserve(path: Path, nbytes: int) -> None:
    """Make `path` a file of `nbytes` whose space is taken, so that writing it cannot find the disk full.

    Raises:
        RunError: the file system has no space for it, or refuses it.
    """
    with _told_if_full(path, nbytes):
        # not for appending: where the file system has no fallocate, glibc writes to each block in its place, and refuses that then
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a new file. Raises RunError as `reserve` does."""
    with _told_if_full(path, memoryview(data).nbytes), open(path, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def _told_if_full(path: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the offload folder has no space for {format_bytes(nbytes)} more: {error.strerror} ({path}); "
            "free some space or choose another --offload-dir."
        ) from error


def _remove_remains(folder: Path) -> None:
    """Delete the subfolders of runs that are no more. What does not carry the mark, or is another user's, is left alone."""
    for remain in os.listdir(folder):
        if OURS.fullmatch(remain):
            with _abandoned(folder / remain) as abandoned:
                if abandoned:
                    _remove(folder / remain)


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Whether `folder` is a workspace of this user whose run has ended. It stays locked inside the context."""
    descriptor, abandoned = None, False
    with contextlib.suppress(OSError):  # no folder, no lock file, not ours to read, or the lock of a living run
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO must not make it wait
        around, lock = folder.lstat(), os.fstat(descriptor)
        if stat.S_ISDIR(around.st_mode) and stat.S_ISREG(lock.st_mode) and around.st_uid == lock.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            abandoned = os.read(descriptor, len(MARK) + 1) == MARK
    try:
        yield abandoned
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Delete a workspace as far as that goes, its mark last: what is left of it stays known as a remain."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
        if os.listdir(folder) in ([], [LOCK]):
            shutil.rmtree(folder, ignore_errors=True)
