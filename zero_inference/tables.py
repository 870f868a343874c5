"""Rows of figures as text: for a terminal, as Markdown, CSV or JSON. A column is declared once, and every format follows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_inference.utils import GB

FORMATS = ("table", "md", "csv", "json")
NOT_KNOWN = "-"


@dataclass(frozen=True)
class Column:
    """`name` is the key of a row and the header of csv and json; people read `header` and what `show` makes of a value."""

    name: str
    header: str
    show: Callable[[Any], str] = str
    numeric: bool = True


def decimals(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{count}f}"


def gib(nbytes: float) -> str:
    return f"{nbytes / GB:.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def figures(value: float) -> str:
    """Four significant digits, without an exponent."""
    magnitude = 0 if value == 0 else len(str(int(abs(value)))) if abs(value) >= 1 else 1
    small = next((extra for extra in range(8) if abs(value) * 10**extra >= 0.1), 8) if value else 0
    return f"{value:.{max(0, 4 - magnitude) + (small if abs(value) < 1 else 0)}f}"


def render(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], format: str, *, colour: bool = False,
           width: int | None = None, turn: bool = False) -> str:
    """The rows as text that ends in a newline; a key that a row lacks, or None, is a value that is not known.

    `table` and `md` are for people, `csv` and `json` for programs, in full precision under the columns' names. With `turn`, a
    table wider than `width` gets a line for each column instead, so that few rows of many figures can be read on any terminal.
    Raises ValueError for another format.
    """
    if format == "csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.name for column in columns])
        writer.writerows([row.get(column.name) for column in columns] for row in rows)
        return out.getvalue()
    if format == "json":
        return json.dumps([{column.name: row.get(column.name) for column in columns} for row in rows], indent=2,
                          allow_nan=False) + "\n"
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; there are {', '.join(FORMATS)}")
    texts = [[NOT_KNOWN if row.get(column.name) is None else column.show(row[column.name]) for column in columns] for row in rows]
    if format == "md":
        return markdown(columns, texts)
    if turn and width and texts and max(map(len, terminal_table(columns, texts, False, None).splitlines())) > width:
        columns, texts = turned(columns, texts)
    return terminal_table(columns, texts, colour, width)


def turned(columns: Sequence[Column], texts: list[list[str]]) -> tuple[list[Column], list[list[str]]]:
    """The same table with rows and columns exchanged; the first column's texts become the headers."""
    headers = [Column("", columns[0].header, numeric=False), *(Column("", row[0]) for row in texts)]
    return headers, [[column.header, *(row[index] for row in texts)] for index, column in enumerate(columns) if index]


def shown_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """The columns that any row has a value for."""
    return [column for column in columns if any(row.get(column.name) is not None for row in rows)]


def markdown(columns: Sequence[Any], texts: list[list[str]]) -> str:
    """A pipe table of `texts`; `columns` need `header` and `numeric`."""
    from tabulate import tabulate

    return (
        tabulate(
            [[text.replace("|", r"\|") for text in row] for row in texts],
            headers=[column.header for column in columns],
            tablefmt="pipe",
            colalign=["right" if column.numeric else "left" for column in columns] if texts else None,
            disable_numparse=True,
        )
        + "\n"
    )


def terminal_table(columns: Sequence[Any], texts: list[list[str]], colour: bool, width: int | None) -> str:
    """A table of `texts` for a terminal of `width` columns, as wide as needed without one.

    `columns` need `name` (the one named `error` is red), `header` and `numeric`.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        # Folded, never cut: a table too wide for the terminal still holds every digit.
        table.add_column(column.header, justify="right" if column.numeric else "left", overflow="fold")
    for row in texts:
        # Text, not str: rich would read "[...]" in a name or an error as markup.
        table.add_row(*(Text(text, "red" if column.name == "error" else "") for column, text in zip(columns, row)))
    out = io.StringIO()
    console = Console(
        file=out, width=width or 10_000, force_terminal=colour, color_system="standard" if colour else None
    )
    console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines() if line.strip())


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], format: str, turn: bool = False) -> None:
    """`render` on stdout, in the width and with the colours of the terminal, if it is one."""
    import shutil
    import sys

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    print(render(rows, columns, format, colour=terminal, width=width, turn=turn), end="", flush=True)
