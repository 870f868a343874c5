"""`zero-inference report DIR...`: runs side by side."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zero_inference.config.parser import examples
from zero_inference.errors import UsageError
from zero_inference.records.field import list_keys
from zero_inference.records.read import warn
from zero_inference.records.schema import Record
from zero_inference.report.columns import COLUMNS, differing_columns, sort_runs
from zero_inference.report.prediction import print_predictions
from zero_inference.report.run import SUFFIXES, in_order, label_runs, load_tree
from zero_inference.report.terminal import print_short
from zero_inference.utils.files import check_output_file
from zero_inference.utils.processes import run_command
from zero_inference.utils.tables import FORMATS, Column, print_rows


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
            field_rows(), [Column(name, name, dtype="string") for name in ("key", "unit", "meaning")], args.format
        )
        return 0
    runs = load_tree(args.log_dir)
    source = ", ".join(map(str, args.log_dir))
    ordered = label_runs(sort_runs(runs, args.sort) if args.sort else in_order(runs))
    if args.html:
        from zero_inference.report.html.page import write_page

        write_page(args.html, source, ordered, args.all_columns)
        warn(f"page: {args.html}")
    if not runs:
        what = f"no run in the .log and .jsonl files of {source}"
        warn(f"{'warning' if args.html else 'error'}: {what}; {run_command(['...'])} makes one")
        return 0 if args.html else 2
    if args.prediction:
        if print_predictions(runs, args.format):
            return 0
        warn(f"error: no record in {source} has a prediction; runs of this version do")
        return 2
    if args.format == "table" and not args.all_columns:
        print_short(ordered, args.sort)
    else:
        shown = ordered if args.sort else label_runs(runs)
        columns = COLUMNS if args.all_columns else differing_columns(shown, for_people=args.format == "md")
        print_rows(shown, columns, args.format, folded=False)
    return 0


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
