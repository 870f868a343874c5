"""Files that are written anew: whole or not at all, and never over the logs and records of runs."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from zero_inference.errors import UsageError

BEGINNINGS = (b'{"schema_version"', b"model size: ")  # of a record and of a log


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
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
    """Raises OSError where `replacing` could not write `path` now, or must not: no regular file, or the logs or records of runs.

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
