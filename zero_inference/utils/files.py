"""Where files go that are made once and used again: one rule for models, our kernels and DeepSpeed's compiled modules.

| what | folder |
|---|---|
| unpacked models | `${ZERO_INFERENCE_CACHE}`, by default `${XDG_CACHE_HOME:-~/.cache}/zero-inference` |
| DeepSpeed's modules | `${TORCH_EXTENSIONS_DIR}`, by default a folder of `${XDG_CACHE_HOME:-~/.cache}/zero-inference/extensions` |
| what was measured of a machine | the file `${ZERO_INFERENCE_MACHINE}`, by default one named after the machine in that of unpacked models |
| our kernels, and what their trials found | the same two, but never in a folder of DeepSpeed's modules |
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zero_inference.errors import UsageError

EXTENSIONS = "zero-inference/extensions"


def user_cache() -> Path:
    """The user's folder for caches, absolute. An empty XDG_CACHE_HOME is as none (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()


def models_folder() -> Path:
    """Of checkpoints that were unpacked here."""
    own = os.environ.get("ZERO_INFERENCE_CACHE")
    return Path(own).expanduser().absolute() if own else user_cache() / "zero-inference"


def extensions_folder() -> Path:
    """Of compiled code. TORCH_EXTENSIONS_DIR where the user chose one (DeepSpeed's engine sets it to a folder in ours), else ours."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given and EXTENSIONS not in given else user_cache() / EXTENSIONS


def machine_path() -> Path:
    """Of what was measured of this machine: its own, because home folders are shared by machines."""
    if given := os.environ.get("ZERO_INFERENCE_MACHINE"):
        return Path(given).expanduser().absolute()
    return models_folder() / f"machine-{re.sub(r'[^A-Za-z0-9.-]', '_', platform.node()) or 'this'}.json"


def make_folder(folder: Path) -> Path:
    """Return `folder`, made if need be.

    Raises:
        UsageError: it cannot be made, for instance because a file is in its way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if os.path.lexists(path) and not path.is_dir()), None)
        given = ((name, os.environ.get(name, "")) for name in ("ZERO_INFERENCE_CACHE", "TORCH_EXTENSIONS_DIR"))
        asked = (name for name, value in given if value and EXTENSIONS not in value and str(folder).startswith(value))
        name = next(asked, "XDG_CACHE_HOME")
        raise UsageError(
            f"the cache folder {folder} cannot be made: {error.strerror if file is None else f'{file} is a file; remove it'}, "
            f"or name another folder with {name}."
        ) from error
    return folder


POLL_S = 0.01
MOST_S = 900.0  # DeepSpeed's modules take minutes to compile


@contextlib.contextmanager
def hold_lock(path: Path, most_s: float = MOST_S) -> Iterator[int]:
    """Hold an exclusive lock on the file `path`, which is made if need be; gives its descriptor.

    The lock is released when the last process that has the descriptor closes it or ends.

    Raises OSError where the file cannot be opened, and TimeoutError, which is one, where another process, perhaps a stopped one,
    has kept the lock for `most_s` seconds.
    """
    fd = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )  # a FIFO of that name must not block
    try:
        lock_descriptor(fd, path, time.monotonic(), most_s)
        yield fd
    finally:
        os.close(fd)


def lock_descriptor(fd: int, path: str | os.PathLike, since: float, most_s: float) -> None:
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


LOCK_S = 10.0  # a lock is held for one write, so whoever holds it for longer does not come back
OPEN_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


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
            lock_descriptor(self.fd, self.path, since, LOCK_S)
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
            return os.open(path, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o666), True
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, OPEN_FLAGS), False


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


BEGINNINGS = (b'{"schema_version"', b"model size: ")  # of a record and of a log


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """A new, empty file to write in place of `path`, whose name it takes at the end; what was there stays until then, and for good
    after an error. Symbolic links stay, and so does the mode of a file that was there.

    Raises OSError where it cannot be made or named.
    """
    part, target = _new_file_beside(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        yield part
        with open(part, "rb") as written:
            os.fsync(written.fileno())  # or a power cut could leave the name with nothing behind it
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike) -> None:
    """Raises OSError where `write_atomically` could not write `path` now, or must not: no regular file, or the logs or records of runs.

    Makes no folders and leaves nothing behind. Several processes may ask about one path at the same time.
    """
    if os.path.lexists(path) and not os.path.isfile(path):  # also a link to nowhere: its target is not what was named
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as there:
        if there.read(max(map(len, BEGINNINGS))).startswith(BEGINNINGS):
            raise OSError(errno.EEXIST, "it holds what runs have measured", str(path))
    _new_file_beside(path)[0].unlink()


def check_output_file(option: str, path: str | os.PathLike) -> None:
    """Whether a run may write `path`, which is replaced if it is there: better known before than after it.

    Raises:
        UsageError: it cannot be written, or is there and not a regular file (a folder, a device) or the log or record of runs.
    """
    try:
        check_replaceable(path)
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written ({error.strerror}); name another file, in a folder that can be written."
        ) from error


def _new_file_beside(path: str | os.PathLike) -> tuple[Path, Path]:
    """The file, and what `path` leads to."""
    target = Path(os.path.realpath(path))
    if len(os.fsencode(target.name)) > os.pathconf(target.parent, "PC_NAME_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))
    part = target.parent / f".{secrets.token_hex(8)}.part"
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return part, target
