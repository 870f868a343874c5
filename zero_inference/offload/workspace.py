"""The offload folder: one private subfolder a process, and no remains of runs that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from zero_inference.errors import UsageError

PREFIX = "zero-inference-"


class OffloadWorkspace:
    """A locked subfolder of the offload folder for this process; removed on `close`.

    The lock ends with the process however it ends, so that whoever opens the offload folder next can tell the folders
    of living runs from remains.
    """

    def __init__(self, folder: Path):
        with _one_at_a_time(folder):
            _remove_remains(folder)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            self._lock = open(self.path / "lock", "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


@contextmanager
def _one_at_a_time(folder: Path):
    """Between making a folder and locking it nobody may look: hold the lock of the offload folder itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_remains(folder: Path) -> None:
    """Delete the subfolders of runs that are no more, as far as they are ours to delete."""
    for remain in folder.glob(PREFIX + "*"):
        try:
            with open(remain / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            continue
        except FileNotFoundError:
            pass  # killed between making it and locking it
        shutil.rmtree(remain, ignore_errors=True)


def check_offload_folder(folder: Path, needed_bytes: int) -> None:
    """Make the folder if need be.

    Raises:
        UsageError: it cannot be written to, or has less free space than `needed_bytes`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        with _one_at_a_time(folder):
            _remove_remains(folder)
    except OSError as error:
        raise UsageError(f"--offload-dir {folder}: not writable ({error.strerror}); choose another folder.") from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UsageError(f"--offload-dir {folder}: {needed_bytes / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are "
                         "free; choose another folder or quantize with --quant-bits 4.")

