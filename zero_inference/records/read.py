"""Reading many records, also old and damaged ones of schema 1, and four-line logs of older tools."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_inference.utils import GB
from zero_inference.utils.format import printable
from zero_inference.utils.log import LOG_LINES

LONGEST_LINE = 64 << 20  # bytes, of records and logs that are read; a record of 100,000 steps has 2 MB
MOST_DEEP = 32  # levels of lists and objects in a record that is read; those written here have 5
SMALLEST, LARGEST = 1e-15, 1e20  # of any quantity of a run, in SI units


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a .jsonl file, or of all *.jsonl files of a folder in the order of their names.

    A line that cannot be used (a writer that died, a full disk, no object, nested deeper than MOST_DEEP) is left out, and so is
    a file of a folder that cannot be read; one line on stderr for each file says how many, where and why the first. NaN and
    infinities read as None. Raises FileNotFoundError if `path` is not there, and OSError where a single file cannot be read.
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
    """The lines of a file, one in memory at a time; one that is longer than LONGEST_LINE is cut there, so it is no record."""
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
    """A line on stderr that may hold names and paths of any kind, also with line breaks."""
    print(printable(line).replace("\n", "\ufffd"), file=sys.stderr)


def value_at(record: Mapping[str, Any], key: str, dtype: str) -> Any:
    """The value at a dotted key, as the pandas dtype (Int64, Float64, boolean, string); None where it is missing, or of another
    kind, as in records of older or other tools, or a number that no run has (see `number_of`, and 64 bits for Int64)."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return None
    if dtype == "string":
        return printable(value if isinstance(value, str) else json.dumps(value))
    if dtype == "boolean":
        return bool(value) if isinstance(value, (bool, int, float)) else None
    if dtype == "Float64":
        return number_of(value)
    try:
        number = int(value)  # as it is, not by way of float, which would round above 2**53
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def number_of(value: Any) -> float | None:
    """`value` as a float; None if it is none, not finite, or so large or small that sums and ratios of such would not be."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == 0 or SMALLEST <= abs(number) <= LARGEST else None


# A first line may stand behind a line that a power cut tore.
_LOG_PATTERNS = tuple(
    re.compile(
        ("" if number else ".*?")
        + r"\t".join(rf"{re.escape(label)}: (\S+) {re.escape(unit)}" for label, unit, _ in line)
    )
    for number, line in enumerate(LOG_LINES)
)
_LOG_KEYS = tuple((key, unit) for line in LOG_LINES for _, unit, key in line)


def parse_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The blocks of a .log file, oldest first, each under the record's names for the same quantities.

    Sizes come back as whole bytes (from three decimals of a GB, so to about 0.5 MB), latencies in s,
    throughputs in token/s, `nan` as None. Lines that are no block are left out with a warning on stderr.
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
    value = number_of(float(text))
    if value is None:
        return None
    return round(value * GB) if unit == "GB" else value
