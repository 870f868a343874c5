"""The folders that a report is made of: those that were named, and below them every folder that holds runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_inference.report.runs import SUFFIXES, load_records
from zero_inference.utils.log import LOG_LINES

_LOOKED_AT = 1 << 20  # bytes, of a file that may be something else


def load_tree(roots: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs in `roots` and in all folders below them, each with its `folder`; a folder that is reached twice counts once.

    Raises NotADirectoryError where a root is no folder.
    """
    records: list[dict[str, Any]] = []
    seen: set[str] = set()
    for root in roots:
        for folder in _folders_below(root):
            if (real := os.path.realpath(folder)) not in seen:
                seen.add(real)
                files = None if folder == root else _ours
                records += [record | {"folder": str(folder)} for record in load_records(folder, files)]
    return records


def _folders_below(root: Path) -> Iterator[Path]:
    """`root` and its subfolders in the order of their names, without hidden ones and without following links."""
    if not root.is_dir():
        raise NotADirectoryError(f"no folder {root}")
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if Path(folder) == root or any(name.endswith(SUFFIXES) for name in files):
            yield Path(folder)


def _ours(path: Path) -> bool:
    """Whether a file in a subfolder looks like a run's: other programs write .jsonl and .log too."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".log":
                return LOG_LINES[0][0][0].encode() + b": " in file.read(_LOOKED_AT)
            first = json.loads(file.readline(64 * _LOOKED_AT))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "status" in first


def short_folders(folders: Sequence[str | None]) -> list[str | None]:
    """The folders without the path that they have in common; None for those that are not known."""
    known = sorted({folder for folder in folders if folder})
    if len(known) < 2:
        return list(folders)
    try:
        common = os.path.commonpath(known)
    except ValueError:  # absolute and relative ones
        return list(folders)
    return [folder and os.path.relpath(folder, common or ".") for folder in folders]
