"""Reads the lines of record files, damaged ones too, and the four-line logs of older tools."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from zero_inference.records.field import as_number
from zero_inference.utils import GB
from zero_inference.utils.files import LOG_LINES
from zero_inference.utils.format import printable


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file, or of all *.jsonl files of a folder in the order of their names, as JSON objects.

    Lines that are no JSON object are skipped, and so are unreadable files of a folder, with one line on stderr for each file.

    Raises:
        OSError: `path` does not exist, or is a file that cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return _records_of(path)
    records: list[dict[str, Any]] = []
    for file in sorted(file for file in path.glob("*.jsonl") if file.is_file()):
        try:
            records += _records_of(file)
        except OSError as error:
            warn(f"{file}: left out: {error.strerror}")
    return records


def _records_of(file: Path) -> list[dict[str, Any]]:
    records, skipped = [], []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = from_json(line)  # refuses what is nested too deeply, too
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            skipped.append(number)
    if skipped:
        more = f", and {len(skipped) - 1} more lines of this file" if len(skipped) > 1 else ""
        warn(f"{file}:{skipped[0]}: skipped line that is no JSON object{more}")
    return records


def warn(line: str) -> None:
    """Print a line on stderr that may contain names and paths of any kind."""
    print(printable(line).replace("\n", "\ufffd"), file=sys.stderr)


# A block may begin after the rest of a line that was torn by a power cut.
_BLOCK = re.compile(
    "\n".join(
        "\t".join(rf"{re.escape(label)}: ([-\w.+]+) {re.escape(unit)}" for label, unit, _ in line) for line in LOG_LINES
    )
)
_LOG_KEYS = tuple((key, unit) for line in LOG_LINES for _, unit, key in line)


def parse_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the blocks of a .log file, oldest first, each with the keys of the record.

    Sizes are in bytes (from three decimals of a GB, so exact to about 0.5 MB), latencies in s, throughputs in token/s; `nan` is None.
    Other lines are skipped, with a warning on stderr if there are blocks.
    """
    text = Path(path).read_bytes().decode(errors="replace")
    blocks = []
    for match in _BLOCK.finditer(text):
        values = [as_number(value) for value in match.groups()]
        blocks.append({
            key: round(value * GB) if unit == "GB" and value is not None else value
            for (key, unit), value in zip(_LOG_KEYS, values)
        })  # fmt: skip
    if blocks and _BLOCK.sub("", text).strip():
        warn(f"{path}: skipped lines that are no four-line block")
    return blocks
