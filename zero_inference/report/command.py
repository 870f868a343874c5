"""`zero-inference report DIR...`: runs side by side, or beside what their plans had predicted."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_inference.config.parser import examples
from zero_inference.errors import UsageError
from zero_inference.records.field import list_keys
from zero_inference.records.read import warn
from zero_inference.records.schema import Record
from zero_inference.report.columns import BY_NAME, COLUMNS, RunColumn, differing_columns, sort_runs
from zero_inference.report.run import SUFFIXES, Run, find, in_order, label_runs, load_tree, model_in_short
from zero_inference.utils.files import check_output_file
from zero_inference.utils.format import (
    FORMATS,
    PIPED_WIDTH,
    Column,
    one_line,
    print_rows,
    shorten_middle,
    shown_columns,
    terminal_table,
)
from zero_inference.utils.processes import run_command

GAP = 2  # characters between two columns
LONGEST = 30  # characters of a cell
# columns above the table if all runs agree
NAMED_ABOVE = ("model", "engine", "weights", "where", "batch_size", "prompt_len", "gen_len", "gpus")
# Predicted quantity, which is also the name of its column: header, the measured value, `RunColumn.rank`.
QUANTITIES = {
    "load_s": ("load", "load_s", 1),
    "prefill_s": ("prefill", "prefill_latency_s", 0),
    "decode_s": ("decode", "decode_latency_s", 0),
    "peak_host_bytes": ("peak host", "peak_host_bytes", 2),
    "weight_bytes": ("weights", "weight_bytes", 5),
    "peak_gpu_bytes": ("peak GPU", "peak_gpu_bytes", 1),
    "host_to_device_bytes_per_step": ("step: to GPU", "transfers.host_to_device_bytes_per_step", 3),
    "device_to_host_bytes_per_step": ("step: from GPU", "transfers.device_to_host_bytes_per_step", 4),
    "disk_read_bytes_per_step": ("step: disk", "transfers.disk_read_bytes_per_step", 4),
    "cores_bytes_per_step": ("step: CPU", "transfers.cores_bytes_per_step", 4),
}
SUMMARY = {"median": 0.5, "10th percentile": 0.1, "90th percentile": 0.9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `zero-inference report`."""
    parser.epilog = examples("zero-inference report logs", "zero-inference report logs --html runs.html")
    parser.add_argument(
        "log_dir",
        metavar="DIR",
        type=Path,
        nargs="*",
        help="folders with the .jsonl and .log files of runs; their subfolders are searched too",
    )
    parser.add_argument(
        "--fields", action="store_true", help="describe every key of a record instead: its unit and its meaning"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="table (default) fits the terminal; csv and json hold SI units in full precision",
    )
    parser.add_argument(
        "--all-columns",
        action="store_true",
        help="every column, however wide; otherwise the main results and the columns in which runs differ",
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        type=lambda text: text.replace("-", "_"),
        choices=[column.name for column in COLUMNS],
        help="a column by its name in --format csv, such as total_throughput; throughputs sort best first "
        "(default: the table and the page list runs of equal work together, the fastest first; "
        "other formats are in the order of the files)",
    )
    parser.add_argument(
        "--prediction",
        action="store_true",
        help="how far each run was from what its plan had predicted, and the distribution of that",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write a page with results, figures and table: one file that opens offline",
    )


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for options that do not go together or a page that cannot be written."""
    if args.fields and (args.log_dir or args.html or args.sort or args.all_columns or args.prediction):
        raise UsageError("--fields takes no folder and no other option than --format.")
    if args.prediction and (args.sort or args.all_columns):
        raise UsageError("--prediction has columns and an order of its own: drop --sort and --all-columns.")
    if not args.fields and not args.log_dir:
        raise UsageError("the following arguments are required: DIR; see zero-inference report --help")
    for folder in args.log_dir:
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise UsageError(f"{folder} {what}; give the folder of --log-dir, logs/ where none was given.")
    if args.html:
        if Path(os.path.realpath(args.html)).suffix in SUFFIXES:
            raise UsageError(f"--html {args.html} has the name of a log or record; end it in .html.")
        check_output_file("--html", args.html)


def main(args: argparse.Namespace) -> int:
    """Print the report of the folders `args.log_dir`; return 0, or 2 if there is nothing to report (0 with --html)."""
    _check(args)
    if args.fields:
        print_rows(
            _field_rows(), [Column(name, name, dtype="string") for name in ("key", "unit", "meaning")], args.format
        )
        return 0
    runs = load_tree(args.log_dir)
    source = ", ".join(map(str, args.log_dir))
    ordered = label_runs(sort_runs(runs, args.sort) if args.sort else in_order(runs))
    if args.html:
        from zero_inference.report.page import write_page

        write_page(args.html, source, ordered, args.all_columns)
        warn(f"page: {args.html}")
    if not runs:
        what = f"no run in the .log and .jsonl files of {source}"
        warn(f"{'warning' if args.html else 'error'}: {what}; {run_command(['...'])} makes one")
        return 0 if args.html else 2
    if args.prediction:
        if not any(run.measured.predicted for run in runs):
            warn(f"error: no record in {source} has a prediction; runs of this version do")
            return 2
        print_predictions(ordered if args.format == "table" else runs, args.format)
    elif args.format == "table" and not args.all_columns:
        print_short(ordered, args.sort)
    else:
        shown = ordered if args.sort else label_runs(runs)
        columns = COLUMNS if args.all_columns else differing_columns(shown, for_people=args.format == "md")
        print_rows(shown, columns, args.format, folded=False)
    return 0


def _field_rows() -> list[dict[str, str]]:
    """Return a row for each key of the record in declared order; its condition follows its meaning."""
    rows = []
    for each in list_keys(Record):
        condition = f"; only with {each.only_with}" if each.only_with else ""
        rows.append({"key": each.key, "unit": each.unit, "meaning": each.meaning + condition})
    return rows


def print_short(runs: Sequence[Run], sort: str | None = None) -> None:
    """Print labelled runs as a table of the terminal's width: what all runs share stands above it, errors below."""
    texts = {name: {BY_NAME[name].text(run) for run in runs if not run.failed} for name in NAMED_ABOVE}
    shared = {name: found.pop() for name, found in texts.items() if len(found) == 1}
    named = [f"{BY_NAME[name].header.partition(' (')[0]} {text}" for name, text in shared.items() if text != "-"]
    _print_wrapped(", ".join(named))
    columns = [replace(BY_NAME[sort], rank=0)] if sort else []  # never hidden, as it explains the order
    columns += [
        column
        for column in shown_columns(runs, differing_columns(runs, for_people=True))
        if column.name not in {*shared, sort}
    ]
    columns = [replace(column, of=lambda run: run.model) if column.name == "model" else column for column in columns]
    print_fitted([RunColumn("number", "#", of=lambda run: run.number), *columns], runs, "--all-columns shows all")
    for run in runs:
        if run.failed:
            error = f"#{run.number} failed: {one_line(run.record.error or 'no error was recorded')}"
            _print_wrapped(shorten_middle(error, 2 * _terminal_width()))
    sys.stdout.flush()


def print_fitted(columns: Sequence[RunColumn], rows: Sequence[Any], advice: str) -> None:
    """Print a table of the columns that fit the terminal, and a line with the hidden ones and `advice` on how to see them."""
    from rich.cells import cell_len

    width, kept, used = _terminal_width(), [], -GAP
    columns = [replace(column, header=column.header.replace(" (", "\n(", 1)) for column in columns]
    texts = [[shorten_middle(one_line(column.text(row)), LONGEST) for column in columns] for row in rows]
    for index in sorted(range(len(columns)), key=lambda index: columns[index].rank):
        cells = [*columns[index].header.split("\n"), *(row[index] for row in texts)]
        needed = GAP + max(map(cell_len, cells))
        if columns[index].rank == 0 or used + needed <= width:
            kept.append(index)
            used += needed
    kept.sort()
    shown = [[row[index] for index in kept] for row in texts]
    print(terminal_table([columns[index] for index in kept], shown, sys.stdout.isatty(), width, GAP), end="")
    if hidden := [column.header.replace("\n", " ") for index, column in enumerate(columns) if index not in kept]:
        _print_wrapped(f"hidden for width: {', '.join(hidden)}; {advice}")


def _terminal_width() -> int:
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns


def _print_wrapped(text: str) -> None:
    for line in textwrap.wrap(text, _terminal_width(), subsequent_indent="  ", break_on_hyphens=False):
        print(line)


# Predictions


def prediction_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each run with a prediction: measured / predicted - 1 by quantity, None where one of the two is unknown."""
    rows = []
    for run in runs:
        if run.measured.predicted is not None:
            row = {"model": run.request.model, "engine": run.request.engine, "folder": run.folder, "file": run.file}
            for name, (_, path, _) in QUANTITIES.items():
                predicted, measured = getattr(run.measured.predicted, name), find(run.measured, path)
                row[name] = measured / predicted - 1 if predicted and measured is not None else None
            rows.append(row)
    return rows


def print_predictions(runs: Sequence[Run], format: str) -> None:
    """Print the rows of runs with a prediction, in `table` and `md` with their distribution."""
    rows = prediction_rows(runs)
    columns = [
        RunColumn("model", "model", dtype="string"),
        RunColumn("engine", "engine", dtype="string", rank=2),
        *(RunColumn(name, header, _signed_percent, rank=rank) for name, (header, _, rank) in QUANTITIES.items()),
        *[RunColumn("folder", "folder", dtype="string", rank=6)] * (len({row["folder"] for row in rows}) > 1),
        RunColumn("file", "file", dtype="string", rank=3),
    ]
    columns = shown_columns(rows, columns)
    if format in ("table", "md"):
        rows += _summary_rows(rows)
    if format != "table":
        print_rows(rows, columns, format)
        return
    print("+10%: 10% more than predicted, of time, peak memory, or bytes per decode step")
    short = [row | {"model": model_in_short(row["model"] or "model unknown")} for row in rows]
    print_fitted(columns, short, "--format md shows all")
    if line := _within_in_words(runs):
        print(line, flush=True)


def _signed_percent(value: float) -> str:
    return f"{100 * value:+.1f}%".replace("-0.0%", "+0.0%")


def _summary_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distribution of each quantity over `rows`, and the value farthest from zero."""
    import numpy as np

    found: list[dict[str, Any]] = [{"model": name} for name in (*SUMMARY, "largest")]
    for name in QUANTITIES:
        if errors := [row[name] for row in rows if row[name] is not None]:
            values = [*np.quantile(errors, list(SUMMARY.values())).tolist(), max(errors, key=abs)]
            for row, value in zip(found, values):
                row[name] = value
    return found


def _within_in_words(runs: Sequence[Run]) -> str | None:
    """Return how many times of each phase were within the predicted range; None where no range is known."""
    parts = []
    for phase in ("load", "prefill", "decode"):
        both = [
            (find(run.measured, QUANTITIES[f"{phase}_s"][1]), find(run.measured.predicted, f"{phase}_range_s"))
            for run in runs
        ]
        within = [
            ends[0] <= time_s <= ends[1] for time_s, ends in both if time_s is not None and ends and len(ends) == 2
        ]
        parts += [f"{phase} {sum(within)} of {len(within)}"] if within else []
    return f"within the predicted range: {', '.join(parts)}" if parts else None
