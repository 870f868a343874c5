"""Tables that fit the terminal: the least important columns are hidden, headings stand between rows, shared settings above."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from zero_inference.report.columns import WORK, result_columns, setting_columns, with_sorted
from zero_inference.report.run import Run
from zero_inference.report.runs import in_order
from zero_inference.utils.format import one_line
from zero_inference.utils.tables import PIPED_WIDTH, Column, terminal_table

GAP = 2  # characters between two columns
MOST_FAILURES = 10  # with a note below the table
_ONE_RANK = ("ranks", "1")  # not worth a mention


def print_short(runs: Sequence[Run], sort: str | None = None) -> None:
    """Print `short_table` in the width and with the colours of the terminal."""
    print(short_table(runs, sys.stdout.isatty(), terminal_width(), sort), end="", flush=True)


def terminal_width() -> int:
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns


def short_table(runs: Sequence[Run], colour: bool, width: int, sort: str | None = None) -> str:
    """Return the report of `runs` as lines at most `width` wide.

    Runs of equal work stand together, the fastest first, below a heading with that work unless most would have one of their own. Runs
    that are sorted by the column `sort` keep their order.
    """
    runs = number_runs(in_order(runs) if sort is None else runs)
    columns = [*result_columns(runs), *setting_columns(runs)]
    shared, shown = _shared_and_shown(runs, columns if sort is None else with_sorted(columns, sort))
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


def number_runs(runs: Sequence[Run]) -> list[Run]:
    return [dataclasses.replace(run, number=number) for number, run in enumerate(runs, start=1)]


def _headings(runs: Sequence[Run], work: Sequence[Column]) -> list[str] | None:
    """Return what each run did, as far as runs differ; None where nothing differs, or most runs would have their own heading."""
    headings = [
        ", ".join(column.words.format(column.text(run)) for column in work if column.value(run) is not None)
        for run in runs
    ]
    return headings if work and 2 * len(set(headings)) <= len(runs) else None


def _shared_and_shown(runs: Sequence[Run], columns: Sequence[Column]) -> tuple[list[str], list[Column]]:
    """Return (texts of settings that all runs share, columns to show); columns without any value are in neither."""
    shared, shown = [], []
    for column in columns:
        known = [run for run in runs if not run.failed or column.value(run) is not None]
        values = {column.value(run) for run in known}
        if values <= {None}:
            continue
        if not column.setting or len(values) > 1:
            shown.append(column)
        elif column.words and (column.header, (text := column.text(known[0]))) != _ONE_RANK:
            shared.append(column.words.format(text))
    return shared, shown


def _failures(runs: Sequence[Run]) -> list[str]:
    failed = [run for run in runs if run.failed]
    lines = [f"#{run.number} failed: {one_line(run.error)}" for run in failed[:MOST_FAILURES]]
    if len(failed) > MOST_FAILURES:
        lines.append(f"and {len(failed) - MOST_FAILURES} more failed runs; --all-columns shows their errors")
    return lines


def table_lines(
    columns: Sequence[Column],
    rows: Sequence[Any],
    width: int,
    colour: bool = False,
    headings: Sequence[str | None] | None = None,
) -> tuple[list[str], list[Column]]:
    """Return (lines at most `width` wide, hidden columns). A heading of `headings`, one for each row, stands above the first row of
    those that share it."""
    texts = {column.header: [one_line(column.text(row)) for row in rows] for column in columns}
    kept = _fitting(columns, texts, width)
    for column in kept:
        if column.least:
            room = width - _width([other for other in kept if other is not column], texts) - GAP
            texts[column.header] = [cut(text, max(room, column.least)) for text in texts[column.header]]
    cells = [list(row) for row in zip(*(texts[each.header] for each in kept))]
    lines = terminal_table(kept, cells, colour, width, GAP).splitlines()
    head = len(lines) - len(rows)
    if (
        headings is not None and head > 0 and _width(kept, texts) <= width
    ):  # else a row may be folded into several lines
        lines = [*lines[:head], *_with_headings(lines[head:], headings, width, colour)]
    return lines, [each for each in columns if each not in kept]


def _with_headings(lines: Sequence[str], headings: Sequence[str | None], width: int, colour: bool) -> Iterator[str]:
    above = None
    for line, heading in zip(lines, headings):
        if heading is not None and heading != above:
            yield f"\x1b[1m{cut(heading, width)}\x1b[0m" if colour else cut(heading, width)
        yield line
        above = heading


def _fitting(columns: Sequence[Column], texts: dict[str, list[str]], width: int) -> list[Column]:
    """Return the columns that fit beside each other, hiding those of the highest rank."""
    kept = list(columns)
    while _width(kept, texts) > width and any(each.rank for each in kept):
        kept.remove(max(reversed(kept), key=lambda each: each.rank))
    for column in columns:  # one that was hidden for a wider one may fit after all
        if column not in kept and _width([*kept, column], texts) <= width:
            kept.append(column)
    return [column for column in columns if column in kept]


def _width(columns: Sequence[Column], texts: dict[str, list[str]]) -> int:
    """Return the width of the table, with texts as short as they may be cut."""
    from rich.cells import cell_len

    def taken(column: Column) -> int:
        head, body = max(map(cell_len, column.header.split("\n"))), max(map(cell_len, texts[column.header]))
        return GAP + max(head, min(body, column.least) if column.least else body)

    return sum(map(taken, columns)) - GAP


def hidden_in_words(columns: Sequence[Column], where: str, width: int) -> list[str]:
    """Return lines that name the hidden columns, and `where` they are."""
    if not columns:
        return []
    names = ", ".join(each.header.replace("-\n", "-").replace("\n", " ") for each in columns)
    text = f"{len(columns)} column{'s' * (len(columns) > 1)} hidden for width ({names}); {where}"
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def cut(line: str, width: int) -> str:
    """Return the beginning of `line` in at most `width` cells of a terminal."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= width else set_cell_size(line, width - 1).rstrip() + "…"
