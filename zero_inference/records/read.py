"""Reads the lines of record files, damaged ones too, and the four-line logs of older tools."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_inference.records.field import as_number
from zero_inference.utils import GB
from zero_inference.utils.format import printable
from zero_inference.utils.log import LOG_LINES

LONGEST_LINE = 64 << 20  # bytes, of records and logs that are read; a record of 100,000 steps has 2 MB
MOST_DEEP = 32  # levels of lists and objects in a record that is read; those written here have 5


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file, or of all *.jsonl files of a folder in the order of their names, as JSON objects.

    Lines that are no JSON object or nested deeper than `MOST_DEEP` are skipped, and so are unreadable files of a folder, with one line
    on stderr for each file. NaN and infinities are None.

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
    for number, line in enumerate(_lines_of(file), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda name: None)
            why = None if isinstance(record, dict) else "line that is no JSON object"
        except ValueError:  # covers text that is not UTF-8
            why = "line that is no JSON object" if line.endswith(b"\n") else "incomplete last line"
        except RecursionError:
            why = f"line nested deeper than {MOST_DEEP}"
        if why is None and _is_deep(record, MOST_DEEP):
            why = f"line nested deeper than {MOST_DEEP}"
        if why is None:
            records.append(record)
        else:
            skipped.append(f"{file}:{number}: skipped {why}")
    if skipped:
        more = len(skipped) - 1
        warn(skipped[0] + (f", and {more} more line{'s' * (more > 1)} of this file" if more else ""))
    return records


def _lines_of(file: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a file; one longer than `LONGEST_LINE` is cut there, so it is no record."""
    with open(file, "rb") as lines:
        while line := lines.readline(LONGEST_LINE):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = lines.readline(LONGEST_LINE)
            yield line if rest is line or not rest else line[:-1] + b"\n"


def _is_deep(value: Any, left: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(item, left - 1) for item in items if isinstance(item, (dict, list)))


def warn(line: str) -> None:
    """Print a line on stderr that may contain names and paths of any kind."""
    print(printable(line).replace("\n", "\ufffd"), file=sys.stderr)


# A block may begin after the rest of a line that was torn by a power cut.
_LOG_PATTERNS = tuple(
    re.compile(
        ("" if number else ".*?")
        + r"\t".join(rf"{re.escape(label)}: (\S+) {re.escape(unit)}" for label, unit, _ in line)
    )
    for number, line in enumerate(LOG_LINES)
)
_LOG_KEYS = tuple((key, unit) for line in LOG_LINES for _, unit, key in line)


def parse_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the blocks of a .log file, oldest first, each with the keys of the record.

    Sizes are in bytes (from three decimals of a GB, so exact to about 0.5 MB), latencies in s, throughputs in token/s; `nan` is None.
    Other lines are skipped with a warning on stderr.
    """
    lines = [line.decode(errors="replace").rstrip() for line in _lines_of(path)]
    blocks: list[dict[str, Any]] = []
    skipped: list[str] = []
    at = 0
    while at < len(lines):
        found = [pattern.fullmatch(line) for pattern, line in zip(_LOG_PATTERNS, lines[at:])]
        matches = [match for match in found if match is not None]
        if len(matches) == len(LOG_LINES):
            values = [text for match in matches for text in match.groups()]
            try:
                blocks.append({key: _from_log(text, unit) for (key, unit), text in zip(_LOG_KEYS, values)})
                if matches[0].start(1) > len(f"{LOG_LINES[0][0][0]}: "):
                    warn(f"{path}:{at + 1}: skipped the torn line before this block")
                at += len(LOG_LINES)
                continue
            except ValueError:  # a field that is no number
                pass
        if lines[at].strip():
            skipped.append(f"{path}:{at + 1}: skipped, not part of a four-line block")
        at += 1
    if skipped:
        warn(skipped[0] + (f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""))
    return blocks


def _from_log(text: str, unit: str) -> float | int | None:
    value = as_number(float(text))
    if value is None:
        return None
    return round(value * GB) if unit == "GB" else value
