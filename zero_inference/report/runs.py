"""Run logs as rows: read from a folder, typed, sorted, and printed by the columns of `report.columns`.

Every run is one row. Rows come from the records (.jsonl) and from the blocks in .log files that have no record,
which is all that older tools wrote.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.config.options import LOG_PREFIX
from zero_inference.records.read import parse_log, read_records, value_at, warn
from zero_inference.records.schema import STATUS_OK
from zero_inference.report.columns import BY_NAME, COLUMNS
from zero_inference.utils import tables
from zero_inference.utils.format import one_line
from zero_inference.utils.log import LOG_LINES

if TYPE_CHECKING:
    import pandas


SUFFIXES = (".jsonl", ".log")

_LOG_NAME = re.compile(
    r"(?P<prefix>[^-]+)-(?P<model>.+)-bs(?P<batch>\d+)-prompt(?P<prompt>\d+)-gen(?P<gen>\d+)"
    r"-n(?P<nodes>\d+)x(?P<gpus>\d+)-(?P<place>cpu|disk|gpu)(?P<kv>-kv_offload)?(?P<quant>-w_quant)?"
)


def parse_log_name(stem: str) -> dict[str, Any]:
    """The record keys that a run log's name holds; a name of another pattern is taken as the model's.

    The name says whether the weights were quantized but not to how many bits: `quant_bits` is 16 or missing.
    """
    match = _LOG_NAME.fullmatch(stem)
    if match is None:
        return {"model": stem}
    nodes, place = int(match["nodes"]), match["place"]
    return {
        "model": match["model"],
        "engine": {prefix: engine for engine, prefix in LOG_PREFIX.items()}.get(match["prefix"], match["prefix"]),
        "num_nodes": nodes,
        "world_size": nodes * int(match["gpus"]),
        "batch_size": int(match["batch"]),
        "prompt_len": int(match["prompt"]),
        "gen_len": int(match["gen"]),
        "quant_bits": None if match["quant"] else 16,
        "weight_quantize": True if match["quant"] else None,
        "cpu_offload": place == "cpu",
        "disk_offload": place == "disk",
        "kv_offload": match["kv"] is not None,
    }


def _as_logged(run: dict[str, Any]) -> tuple[str | None, ...]:
    """Values by which a run's block and its record are matched, in the three decimals of the block."""
    values = (
        value_at(run, key, "Float64")
        for key in ("prefill_latency_s", "decode_latency_s", "total_latency_s", "total_throughput")
    )
    return tuple(None if value is None else f"{value:.3f}" for value in values)


def _read(reader: Callable[[Path], list[dict[str, Any]]], path: Path) -> list[dict[str, Any]]:
    """The file's entries; one that cannot be read is named on stderr and does not hide the other files."""
    if not path.is_file():
        return []
    try:
        return list(reader(path))
    except (OSError, ValueError) as error:
        warn(f"warning: {path} left out: {one_line(str(error))}")
        return []


def runs_frame(records: Iterable[dict[str, Any]]) -> pandas.DataFrame:
    """A row for each record, a typed column for each of `COLUMNS`, in SI units, missing values as `pandas.NA`."""
    import pandas

    rows = list(records)
    return pandas.DataFrame(
        {
            column.name: pandas.array(
                [column.of(row) if column.of else value_at(row, column.key, column.dtype) for row in rows],
                dtype=column.dtype,
            )
            for column in COLUMNS
        }
    )


def load_runs(folder: str | Path) -> pandas.DataFrame:
    """`load_records` as a table, see `runs_frame`."""
    return runs_frame(load_records(folder))


def load_records(folder: str | Path, only: Callable[[Path], bool] | None = None) -> list[dict[str, Any]]:
    """Every run whose record (.jsonl) or block (.log) lies in `folder`, in the order of the file names.

    A block whose run has a record in the .jsonl of the same name is listed once. `only` says which files to read, all where it is
    None. Raises `NotADirectoryError` where there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {folder}")
    rows: list[dict[str, Any]] = []
    files = {path for path in folder.iterdir() if path.suffix in SUFFIXES and (only is None or only(path))}
    for stem in sorted({path.with_suffix("") for path in files}):
        # Not with_suffix on the stem: model names hold dots.
        log, jsonl = stem.parent / f"{stem.name}.log", stem.parent / f"{stem.name}.jsonl"
        records = _read(read_records, jsonl) if only is None or jsonl in files else []
        rows += [record | {"file": jsonl.name} for record in records]
        unmatched = Counter(_as_logged(record) for record in records if record.get("status") == STATUS_OK)
        for block in _read(parse_log, log) if only is None or log in files else ():
            if unmatched[_as_logged(block)]:
                unmatched[_as_logged(block)] -= 1
            else:
                rows.append(parse_log_name(stem.name) | block | {"status": STATUS_OK, "file": log.name})
    return rows


def differing_columns(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The frame with the columns that tell its runs apart, beside the model, the engine and the main results.

    A value that one run has and another lacks is a difference; but not one that is missing only from failed runs.
    """
    good = frame[frame["status"] == STATUS_OK]

    def differ(name: str) -> bool:
        return frame[name].nunique() > 1 or good[name].nunique(dropna=False) > 1

    def keep(name: str) -> bool:
        shown = BY_NAME[name].shown
        return (
            shown == "always"
            or (shown == "differs" and differ(name))
            or (shown == "present" and bool(frame[name].notna().any()))
        )

    return frame[[name for name in frame.columns if keep(name)]]


def sort_runs(frame: pandas.DataFrame, name: str) -> pandas.DataFrame:
    """By one column, best first where larger is better, otherwise ascending; runs without a value last."""
    ascending = not BY_NAME[name].best_first
    return frame.sort_values(name, ascending=ascending, na_position="last", kind="stable", ignore_index=True)


def rows_of(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    """The frame's runs as rows of `tables.render`, None for what is missing."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def columns_of(frame: pandas.DataFrame) -> list[tables.Column]:
    return [BY_NAME[name] for name in frame.columns]


def render(frame: pandas.DataFrame, format: str, *, colour: bool = False, width: int | None = None) -> str:
    """The runs as text, see `tables.render`: csv and json hold SI units under the record's names."""
    return tables.render(rows_of(frame), columns_of(frame), format, colour=colour, width=width)


def print_frame(frame: pandas.DataFrame, format: str, folded: bool = True) -> None:
    """`render` on stdout, as `tables.print_rows`; a table that is not `folded` is as wide as its columns."""
    tables.print_rows(rows_of(frame), columns_of(frame), format, folded=folded)


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
