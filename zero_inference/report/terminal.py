"""Tables that fit the terminal: what all runs share stands above, the least important columns are hidden and named below."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from zero_inference.report.columns import BY_NAME, RunColumn, differing_columns
from zero_inference.report.run import Run, in_order, label_runs
from zero_inference.utils.format import one_line
from zero_inference.utils.tables import PIPED_WIDTH, shorten_middle, terminal_table

GAP = 2  # characters between two columns
LONGEST = 30  # characters of a cell
# columns above the table if all runs agree
NAMED_ABOVE = ("model", "engine", "weights", "where", "batch_size", "prompt_len", "gen_len", "gpus")


def print_short(runs: Sequence[Run], sort: str | None = None) -> None:
    """Print the runs as a table in the width and with the colours of the terminal; without `sort` as `in_order` has them."""
    runs = label_runs(in_order(runs) if sort is None else runs)
    values = {name: {BY_NAME[name].text(run) for run in runs if not run.failed} for name in NAMED_ABOVE}
    shared = {name: texts.pop() for name, texts in values.items() if len(texts) == 1}
    columns = [column for column in differing_columns(runs, for_people=True) if column.name not in shared]
    columns = [
        column for column in columns if column.name == sort or any(column.value(run) is not None for run in runs)
    ]
    if sort is not None:  # never hidden, as it explains the order
        columns = [BY_NAME[sort], *(column for column in columns if column.name != sort)]
        columns[0] = dataclasses.replace(columns[0], rank=0)
    number = RunColumn("number", "#", of=lambda run: run.number)
    columns = [
        dataclasses.replace(column, of=lambda run: run.model) if column.name == "model" else column
        for column in columns
    ]
    width = terminal_width()
    above = ", ".join(
        f"{BY_NAME[name].header.partition(' (')[0]} {text}" for name, text in shared.items() if text != "-"
    )
    _print_wrapped(above, width)
    print_fitted([number, *columns], runs, "--all-columns shows all")
    for run in runs:
        if run.failed:
            error = one_line(run.record.error or "no error was recorded")
            _print_wrapped(shorten_middle(f"#{run.number} failed: {error}", 2 * width), width)
    sys.stdout.flush()


def terminal_width() -> int:
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns


def print_fitted(columns: Sequence[RunColumn], rows: Sequence[Any], where: str) -> None:
    """Print a table of the columns that fit the terminal, and a line with the hidden ones, which are in `where`."""
    from rich.cells import cell_len

    width = terminal_width()
    columns = [dataclasses.replace(column, header=column.header.replace(" (", "\n(", 1)) for column in columns]
    texts = [[shorten_middle(one_line(column.text(row)), LONGEST) for column in columns] for row in rows]
    needed = [
        GAP + max(map(cell_len, [*column.header.split("\n"), *(row[index] for row in texts)]))
        for index, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while sum(needed[index] for index in kept) - GAP > width and any(columns[index].rank for index in kept):
        kept.remove(max(reversed(kept), key=lambda index: columns[index].rank))
    for index in sorted(set(range(len(columns))) - set(kept), key=lambda index: columns[index].rank):
        if sum(needed[each] for each in kept) + needed[index] - GAP <= width:  # after a wider one was hidden
            kept = sorted([*kept, index])
    cells = [[row[index] for index in kept] for row in texts]
    print(terminal_table([columns[index] for index in kept], cells, sys.stdout.isatty(), width, GAP), end="")
    if hidden := [column.header.replace("\n", " ") for index, column in enumerate(columns) if index not in kept]:
        _print_wrapped(f"hidden for width: {', '.join(hidden)}; {where}", width)


def _print_wrapped(text: str, width: int) -> None:
    for line in textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False):
        print(line)
