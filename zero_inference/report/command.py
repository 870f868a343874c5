"""`zero-inference report LOGDIR`: run logs side by side."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from zero_inference.errors import UsageError
from zero_inference.options import examples
from zero_inference.records.read import warn
from zero_inference.records.schema import STATUS_FAILED
from zero_inference.report.columns import COLUMNS
from zero_inference.report.fields import print_fields
from zero_inference.report.prediction import print_predictions
from zero_inference.report.runs import (
    SUFFIXES,
    columns_of,
    differing_columns,
    load_records,
    print_frame,
    rows_of,
    runs_frame,
    sort_runs,
)
from zero_inference.runtime.replace import check_output_file
from zero_inference.runtime.tables import FORMATS, texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference report`."""
    parser.epilog = examples("zero-inference report logs", "zero-inference report logs --html runs.html")
    parser.add_argument(
        "log_dir", metavar="LOGDIR", type=Path, nargs="?", help="folder with the .jsonl and .log files of runs"
    )
    parser.add_argument(
        "--fields", action="store_true", help="instead of runs: every key of a record, its unit and its meaning"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="csv and json hold SI units in full precision (default: table)",
    )
    parser.add_argument(
        "--all-columns", action="store_true", help="not only the main results and the columns in which the runs differ"
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        type=lambda text: text.replace("-", "_"),
        choices=[column.name for column in COLUMNS],
        help="a column by its name in --format csv, such as total_throughput; throughputs sort best first",
    )
    parser.add_argument(
        "--prediction",
        action="store_true",
        help="by how much runs differ from what their plans said before loading, and the distribution of that",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write a page with the table and figures, which needs nothing beside it",
    )


def _write_html(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """The page: runs in the order of --sort, else the fastest of each model and length first."""
    from zero_inference.report.html.page import Table, write_page
    from zero_inference.report.html.runs import fastest_first

    frame = runs_frame(records)
    if args.sort:
        order = sort_runs(frame.assign(row=range(len(frame))), args.sort)["row"].tolist()
    else:
        order = fastest_first(records)
    frame = frame.iloc[order]
    shown = frame if args.all_columns else differing_columns(frame).drop(columns="error", errors="ignore")
    if (frame["status"] == STATUS_FAILED).any() and not args.all_columns:
        shown = shown.assign(status=frame["status"])
    # the page has columns of its own for scores, each with its error
    shown = shown.drop(
        columns=[column.name for column in COLUMNS if column.key.startswith("quality.")], errors="ignore"
    )
    columns, rows = columns_of(shown), rows_of(shown)
    values = [list(row.values()) for row in rows]
    table = Table(
        [column.header for column in columns], [column.numeric for column in columns], texts_of(rows, columns), values
    )
    write_page(args.html, str(args.log_dir), [records[index] for index in order], table)
    warn(f"page: {args.html}")


def main(args: argparse.Namespace) -> int:
    """Prints the report of `args.log_dir`; 0, or 2 where there is nothing to report.

    With --html an empty folder gets a page that says so, and 0. Raises UsageError where the page cannot be written.
    """
    if args.fields:
        if args.log_dir or args.html or args.sort or args.all_columns or args.prediction:
            raise UsageError(
                "--fields describes the keys of any record: drop the folder and the other options but --format."
            )
        print_fields(args.format)
        return 0
    if args.prediction and (args.sort or args.all_columns):
        raise UsageError(
            "--prediction has columns of its own, in the order of the files: drop --sort and --all-columns."
        )
    if args.log_dir is None:
        raise UsageError("the following arguments are required: LOGDIR; see zero-inference report --help")
    if not args.log_dir.is_dir():
        what = "is a file, not a folder" if args.log_dir.exists() else "does not exist"
        warn(f"error: {args.log_dir} {what}; give the folder that run_model.py logs to")
        return 2
    if args.html:
        if Path(os.path.realpath(args.html)).suffix in SUFFIXES:
            raise UsageError(f"--html {args.html} has the name of a log or record; end it in .html.")
        check_output_file("--html", args.html)
    records = load_records(args.log_dir)
    if args.html:
        _write_html(args, records)
    if not records:
        found = any(path.suffix in SUFFIXES for path in args.log_dir.iterdir())
        what = "no run in the .log and .jsonl files of" if found else "no .log or .jsonl in"
        warn(f"{'warning' if args.html else 'error'}: {what} {args.log_dir}; run run_model.py first")
        return 0 if args.html else 2
    if args.prediction:
        if not print_predictions(records, args.format):
            warn(f"error: no record in {args.log_dir} says what was predicted; runs of this version do")
            return 2
        return 0
    frame = runs_frame(records)
    if args.sort:
        frame = sort_runs(frame, args.sort)
    if not args.all_columns:
        frame = differing_columns(frame)
    print_frame(frame, args.format)
    return 0
