"""Rows of the files that questions come from, each with the place it stands at.

.jsonl and .csv are read line by line, .json is a list of objects, .parquet is read by pandas; .gz as well for the first two.
In a .csv a list is written as JSON: `["a", "b", "c", "d"]`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_inference.errors import UsageError, is_out_of_memory

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz")
TEXT_SUFFIXES = (".txt", ".md")
MOST_BYTES = 1 << 30  # of text, unpacked: a few MB of .gz can hold any amount, and all of it is kept in host memory


def read_rows(task: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a file, each with `file:line` (of .json and .parquet the position in the list, from 0)."""
    name = path.name.lower()
    if name.endswith(TEXT_SUFFIXES) and task == "perplexity":
        text = _text_of(path)
        return iter([(str(path), {"text": text})] if text.strip() else [])
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    for suffixes, reader in (
        ((".jsonl", ".jsonl.gz"), _jsonl_rows),
        ((".json",), _json_rows),
        ((".csv", ".csv.gz"), _csv_rows),
    ):
        if name.endswith(suffixes):
            return reader(path, _text_of(path))
    raise UsageError(
        f"--quality-data {path}: this type of file cannot be read for {task}; use one of {', '.join(suffixes_of(task))}."
    )


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", _from_json(line)
        except ValueError as error:
            raise UsageError(
                f"{path}:{number}: not JSON ({error}); a .jsonl file holds one JSON object per line."
            ) from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = _from_json(text) if text.strip() else []
    except ValueError as error:
        raise UsageError(f"--quality-data {path}: not JSON ({error}).") from error
    if not isinstance(rows, list):
        raise UsageError(f"--quality-data {path}: holds {kind_of(rows)}; a list of objects is needed.")
    for number, row in enumerate(rows):
        yield f"{path}[{number}]", row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    before = reader.line_num
    try:
        for row in reader:
            cells = {key: _from_cell(value) for key, value in row.items() if key and value is not None}
            yield f"{path}:{before + 1 if before else 2}", cells
            before = reader.line_num
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: not CSV ({error}).") from error


def _from_cell(text: str) -> Any:
    """A list where the cell holds one in JSON, else its text."""
    if text.lstrip().startswith("["):
        try:
            return _from_json(text)
        except ValueError:
            pass
    return text


def _from_json(text: str) -> Any:
    """Raises ValueError for whatever cannot be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise UsageError(f"--quality-data {path}: reading it needs pyarrow; pip install pyarrow.") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"--quality-data {path}: not a parquet file that pandas can read ({str(error)[:200]})."
        ) from error
    for number, row in enumerate(frame.to_dict("records")):
        yield f"{path}[{number}]", row


def _text_of(path: Path) -> str:
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UsageError(f"--quality-data {path}: more than {MOST_BYTES >> 20} MiB of text; use only a part of it.")
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"--quality-data {path}: cannot be read as UTF-8 text ({error}).") from error


def suffixes_of(task: str) -> tuple[str, ...]:
    return SUFFIXES + TEXT_SUFFIXES if task == "perplexity" else SUFFIXES


def kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)
