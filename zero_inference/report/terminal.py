"""The table that `zero-inference report` prints: results first, in the width of the terminal; what all runs share is said once above."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from zero_inference.report.layout import Shown, cut, hidden_in_words, shortened, table_lines
from zero_inference.report.run import Run, in_order
from zero_inference.report.run_columns import WORK, result_columns, setting_columns, with_sorted
from zero_inference.utils.format import one_line
from zero_inference.utils.tables import PIPED_WIDTH

MOST_FAILURES = 10  # that get a note below the table
_ONE_RANK = ("ranks", "1")  # which is not worth saying


def print_short(records: Sequence[dict[str, Any]], sort: str | None = None) -> None:
    """`short_table` on stdout, in the width and with the colours of the terminal, if it is one."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    print(short_table(records, terminal, width, sort), end="", flush=True)


def short_table(records: Sequence[dict[str, Any]], colour: bool, width: int, sort: str | None = None) -> str:
    """The report of `records` as lines at most `width` wide.

    Runs of equal work stand together, the fastest first, below a heading that says what they did unless most would have one of their
    own. Where they are in the order of the column `sort` of `report.columns`, they keep it.
    """
    if sort is None:
        records = [records[index] for index in in_order(records)]
    runs = [Run(number, record) for number, record in enumerate(records, start=1)]
    columns = [*result_columns(runs), *setting_columns(runs)]
    shared, shown = _chosen(runs, columns if sort is None else with_sorted(columns, sort))
    headings = _headings(runs, [column for column in shown if column.header in WORK]) if sort is None else None
    if headings:
        shown = [column for column in shown if column.header not in WORK]
    lines, hidden = table_lines(shown, runs, width, colour, headings)
    above = ("all: " if len(runs) > 1 and shared else "") + ", ".join(shared)
    lines = [
        *textwrap.wrap(above, width, subsequent_indent="  ", break_on_hyphens=False),
        *lines,
        *(cut(line, width) for line in _failures(runs)),
        *hidden_in_words(hidden, "--all-columns shows all", width),
    ]
    return "".join(f"{line}\n" for line in lines)


def _headings(runs: Sequence[Run], work: Sequence[Shown]) -> list[str] | None:
    """What each run did, of what differs between runs; None where nothing does, or most runs would have a heading of their own."""
    headings = [
        ", ".join(column.words.format(column.text(run)) for column in work if column.of(run) is not None)
        for run in runs
    ]
    return headings if work and 2 * len(set(headings)) <= len(runs) else None


def _chosen(runs: Sequence[Run], columns: Sequence[Shown]) -> tuple[list[str], list[Shown]]:
    """(what all runs share, in words; the columns that are worth showing)."""
    shared, shown = [], []
    for column in columns:
        known = [column.of(run) for run in runs if not run.failed or column.of(run) is not None]
        values = set(known)
        if values <= {None}:
            continue
        if not column.setting or len(values) > 1:
            shown.append(column)
            continue
        value = shortened(one_line(known[0]), column.longest)
        if column.words and (column.header, value) != _ONE_RANK:
            shared.append(column.words.format(value))
    return shared, shown


def _failures(runs: Sequence[Run]) -> list[str]:
    failed = [run for run in runs if run.failed]
    lines = [
        f"#{run.number} failed: {one_line(run.text('error') or 'no error was recorded')}"
        for run in failed[:MOST_FAILURES]
    ]
    if len(failed) > MOST_FAILURES:
        lines.append(f"and {len(failed) - MOST_FAILURES} more failed runs; --all-columns shows their errors")
    return lines
