"""A machine in a file, written by `zero-inference link --save` and read by `--machine`."""

from __future__ import annotations

import errno
import functools
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zero_inference.errors import UsageError
from zero_inference.hardware.description import MEASURED_WITH, SCHEMA_VERSION, Description
from zero_inference.utils.files import machine_path, write_atomically


def read_description(path: Path) -> Description:
    """The machine that a file describes.

    Raises:
        UsageError: there is no such file, or it says something that cannot be; names the first such key.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"--machine {path}: {reason}; `zero-inference link --save FILE` writes one.") from error
    try:
        return Description.model_validate_json(text)
    except ValidationError as error:
        if version := newer_version_of(path):
            raise UsageError(
                f"--machine {path}: {version}; update this package, or `zero-inference link --save FILE` writes one."
            ) from error
        raise UsageError(f"--machine {path}: {_first(error)}; `zero-inference link --save FILE` writes one.") from error


def kept_path() -> Path:
    """Return the file that this version reads and writes: that of the cache, or one beside it where a newer version has written that."""
    path = machine_path()
    return path if newer_version_of(path) is None else path.with_name(f"{path.stem}-v{MEASURED_WITH}{path.suffix}")


def newer_version_of(path: Path) -> str | None:
    """Say how a newer version of this package wrote the file; None of any other file."""
    try:
        return _newer_version(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=2)
def _newer_version(path: Path, changed: int) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        Description.model_validate(found)
    except (OSError, ValueError) as error:
        if not isinstance(error, ValidationError) or not isinstance(found, dict):
            return None
    else:
        return None
    for key, known in (("schema_version", SCHEMA_VERSION), ("measured_with", MEASURED_WITH)):
        if isinstance(found.get(key), int) and found[key] > known:
            return f"a newer version wrote it ({key} {found[key]}, this one knows {known})"
    return None


def write_description(description: Description, path: Path) -> None:
    """Replace the file at once, so that nobody finds half of it. Raises OSError."""
    with write_atomically(path) as part:
        part.write_text(description.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")


def _first(error: ValidationError) -> str:
    """The first of what is wrong: where, what was found and what it has to be."""
    found: Any = error.errors()[0]
    place = ".".join(str(part) for part in found["loc"]) or "all of it"
    if found["type"] == "json_invalid":
        return f"not JSON ({found['msg'].removeprefix('Invalid JSON: ')})"
    if found["type"] == "missing":
        return f"{place} is missing"
    if found["type"] == "extra_forbidden":
        return f"{place} is no key of a machine"
    message = found["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(found["input"], (dict, list)) else f" {str(found['input'])[:60]}"
    return f"{place}{shown}: {message[:1].lower()}{message[1:]}"
