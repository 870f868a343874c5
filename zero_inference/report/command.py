"""`zero-inference report DIR...`: runs side by side."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from zero_inference.config.parser import examples
from zero_inference.errors import UsageError
from zero_inference.records.field import list_keys
from zero_inference.records.read import warn
from zero_inference.records.schema import Record
from zero_inference.report.columns import BY_NAME, COLUMNS, COMBINED, SCORES, differing_columns, sort_runs
from zero_inference.report.prediction import print_predictions
from zero_inference.report.run import Run, model_in_short, short_folders
from zero_inference.report.runs import SUFFIXES, in_order, load_tree
from zero_inference.report.terminal import print_short
from zero_inference.utils.files import check_output_file
from zero_inference.utils.processes import run_command
from zero_inference.utils.tables import FORMATS, Column, print_rows, texts_of

FIRST = ("model", "decode_throughput", "fraction_of_limit", "bound_by")  # on the page, as a phone shows no more


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


def _ordered(args: argparse.Namespace, runs: list[Run]) -> list[Run]:
    """Return the runs for the table and the page: by --sort, else runs of equal work together, the fastest first."""
    return sort_runs(runs, args.sort) if args.sort else in_order(runs)


def _columns_of_page(runs: list[Run], all_columns: bool) -> list[Column]:
    """Return the main results, then what differs, or all other columns; the page has columns of its own for scores."""
    names = {column.name for column in (COLUMNS if all_columns else differing_columns(runs))}
    names -= {column.name for column in SCORES}
    if not all_columns:
        names -= {*COMBINED, "error"}
        if any(run.failed for run in runs):
            names.add("status")
    shown = [*(name for name in FIRST if name in names), *(name for name in BY_NAME if name in names - {*FIRST})]
    return [BY_NAME[name] for name in shown]


def _write_html(args: argparse.Namespace, runs: list[Run]) -> None:
    from zero_inference.report.html.page import Table, write_page

    runs = _ordered(args, runs)
    folders = short_folders([run.folder for run in runs])
    models = {run.request.model: model_in_short(run.request.model) for run in runs if run.request.model}
    columns = _columns_of_page(runs, args.all_columns)
    rows = [
        {column.name: column.value(run) for column in columns} | {"folder": folder}
        for run, folder in zip(runs, folders)
    ]
    if len(set(models.values())) == len(models):
        rows = [row | {"model": models.get(row["model"])} for row in rows]
    columns = [dataclasses.replace(column, of=None) for column in columns]
    table = Table(
        [column.header for column in columns],
        [column.numeric for column in columns],
        texts_of(rows, columns),
        [[column.value(row) for column in columns] for row in rows],
        in_order=not args.sort,
    )
    write_page(args.html, _named(args.log_dir), runs, table)
    warn(f"page: {args.html}")


def _print_runs(args: argparse.Namespace, runs: list[Run]) -> None:
    """Print the runs; without --all-columns the table is short and fits the terminal."""
    if args.format == "table" and not args.all_columns:
        print_short(_ordered(args, runs), args.sort)
        return
    if args.sort:
        runs = sort_runs(runs, args.sort)
    columns = list(COLUMNS) if args.all_columns else differing_columns(runs)
    if args.format == "md" and not args.all_columns:  # for people
        columns = [column for column in columns if column.name not in COMBINED]
    print_rows(runs, columns, args.format, folded=False)


def _named(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))


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
        print_fields(args.format)
        return 0
    runs = load_tree(args.log_dir)
    if args.html:
        _write_html(args, runs)
    if not runs:
        what = f"no run in the .log and .jsonl files of {_named(args.log_dir)}"
        warn(f"{'warning' if args.html else 'error'}: {what}; {run_command(['...'])} makes one")
        return 0 if args.html else 2
    if args.prediction:
        if not print_predictions(runs, args.format):
            warn(f"error: no record in {_named(args.log_dir)} has a prediction; runs of this version do")
            return 2
        return 0
    _print_runs(args, runs)
    return 0


FIELD_COLUMNS = (
    Column("key", "key", dtype="string"),
    Column("unit", "unit", dtype="string"),
    Column("meaning", "meaning", dtype="string"),
)


def field_rows() -> list[dict[str, str]]:
    """Return a row for each key in declared order; its condition follows its meaning."""
    return [
        {
            "key": one.key,
            "unit": one.unit,
            "meaning": "; ".join(filter(None, (one.meaning, one.only_with and f"only with {one.only_with}"))),
        }
        for one in list_keys(Record)
    ]


def print_fields(format: str) -> None:
    """Print all keys of a record in a format of `utils.tables`."""
    print_rows(field_rows(), FIELD_COLUMNS, format)
