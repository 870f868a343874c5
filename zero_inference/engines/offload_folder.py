"""The offload folder: a private subfolder for each process; those of killed runs are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from zero_inference.errors import RunError, UsageError
from zero_inference.utils.format import format_bytes, format_bytes_pair
from zero_inference.utils.processes import defer_signals

WORKSPACE_PREFIX = "zero-inference-"
WORKSPACE_NAME = re.compile(re.escape(WORKSPACE_PREFIX) + r"[a-z0-9_]{8}")  # as tempfile.mkdtemp names it
LOCK = "lock"
MARK = b"offload workspace of zero-inference: removed by the next run when its own has ended\n"
_open: set[OffloadWorkspace] = set()


class OffloadWorkspace:
    """A locked subfolder of the offload folder for this process, removed by `close`.

    The lock ends with the process, and MARK is written while it is held: a folder with MARK and without a lock belongs to a run that has
    ended.

    Raises:
        OSError: the folder cannot be listed or written to, or its file system has no locks.
    """

    def __init__(self, folder: Path):
        _remove_abandoned(folder)
        with defer_signals():
            self.path = Path(tempfile.mkdtemp(prefix=WORKSPACE_PREFIX, dir=folder))
            try:
                self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.write(self._lock, MARK)
            except OSError:  # a full disk, or no locks there
                _remove(self.path)
                raise
            _open.add(self)

    def close(self) -> None:
        """Remove the subfolder; signals are deferred. A second call does nothing."""
        with defer_signals():
            if self in _open:
                _open.discard(self)
                _remove(self.path)
                os.close(self._lock)


def close_all() -> None:
    """Remove the workspaces of this process, from any thread, before it exits without unwinding the main thread."""
    for workspace in list(_open):
        workspace.close()


def check_offload_folder(folder: Path, needed_bytes: int) -> None:
    """Create the folder if needed, and remove subfolders of killed runs.

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
            f"--offload-dir {folder}: {needed} {unit} is needed and {there} {unit} is free; choose another folder, or see with "
            "--dry-run what would fit."
        )


def reserve(path: Path, nbytes: int) -> None:
    """Create the file `path` with `nbytes` allocated, so that writing it cannot find the disk full. Raises RunError."""
    try:
        # not mode "ab": without fallocate in the file system, glibc writes into each block, which O_APPEND prevents
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(
            f"the offload folder has no space for {format_bytes(nbytes)} more: {error.strerror} ({path}); "
            "free some space or choose another --offload-dir."
        ) from error


def _remove_abandoned(folder: Path) -> None:
    """Remove workspaces of this user whose run has ended: with MARK and without a lock."""
    for name in filter(WORKSPACE_NAME.fullmatch, os.listdir(folder)):
        workspace = folder / name
        # not a folder, no lock file, not readable, or locked by a running process; O_NONBLOCK does not wait for a FIFO
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            descriptor = os.open(workspace / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            closing.callback(os.close, descriptor)
            parent, lock = workspace.lstat(), os.fstat(descriptor)
            if (
                stat.S_ISDIR(parent.st_mode)
                and stat.S_ISREG(lock.st_mode)
                and parent.st_uid == lock.st_uid == os.geteuid()
            ):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(descriptor, len(MARK) + 1) == MARK:
                    _remove(workspace)


def _remove(folder: Path) -> None:
    """Delete a workspace as far as possible, its lock file last, so that the next run finds the rest."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
        if os.listdir(folder) in ([], [LOCK]):
            shutil.rmtree(folder, ignore_errors=True)
