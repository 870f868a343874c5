"""Tables of values as text: for a terminal, as Markdown, CSV or JSON. A column is declared once for all formats."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zero_inference.utils.format import LONGEST_TEXT, one_line, printable

FORMATS = ("table", "md", "csv", "json")
NOT_KNOWN = "-"
PIPED_WIDTH = 100  # of a table if stdout is not a terminal


@dataclass(frozen=True)
class Column:
    """A column of a table, from which reading, printing and sorting follow.

    Attributes:
        name: key of a row, and the name in csv and json.
        header: what people read above it, with the unit.
        show: text of a value in SI units.
        dtype: Int64, Float64, boolean or string; numbers are right-aligned.
        of: value of a row that is no mapping; None looks `name` up.
        whole: texts are not folded where a terminal is too narrow for the table.
    """

    name: str
    header: str
    show: Callable[[Any], str] = one_line
    dtype: str = "Float64"
    of: Callable[[Any], Any] | None = None
    whole: bool = False

    @property
    def numeric(self) -> bool:
        return self.dtype in ("Int64", "Float64")

    def value(self, row: Any) -> Any:
        return self.of(row) if self.of else row.get(self.name)

    def text(self, row: Any) -> str:
        value = self.value(row)
        return NOT_KNOWN if value is None else shorten_middle(printable(self.show(value)), LONGEST_TEXT)


AnyColumn = TypeVar("AnyColumn", bound=Column)


def shorten_middle(text: str, longest: int) -> str:
    """Return at most `longest` characters of `text`, with the middle cut out."""
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]}…{text[len(text) - (longest - head - 1) :]}"


def texts_of(rows: Sequence[Any], columns: Sequence[Column]) -> list[list[str]]:
    return [[column.text(row) for column in columns] for row in rows]


def render(
    rows: Sequence[Any],
    columns: Sequence[Column],
    format: str,
    *,
    colour: bool = False,
    width: int | None = None,
    turn: bool = False,
    gap: int = 3,
) -> str:
    """Return the rows as text; `table` and `md` have formatted values, `csv` and `json` full precision under the columns' names.

    Args:
        turn: transpose a table wider than `width`, so that few rows of many columns fit any terminal.
    """
    if format == "csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.name for column in columns])
        values = ([column.value(row) for column in columns] for row in rows)
        writer.writerows([printable(value) if isinstance(value, str) else value for value in row] for row in values)
        return out.getvalue()
    if format == "json":
        objects = [{column.name: column.value(row) for column in columns} for row in rows]
        return json.dumps(objects, indent=2, allow_nan=False) + "\n"
    texts = texts_of(rows, columns)
    if format == "md":
        from tabulate import tabulate

        cells = [[text.replace("|", r"\|") for text in row] for row in texts]
        aligned = ["right" if column.numeric else "left" for column in columns] if texts else None
        headers = [column.header for column in columns]
        return tabulate(cells, headers=headers, tablefmt="pipe", colalign=aligned, disable_numparse=True) + "\n"
    if turn and width and texts and max(map(len, terminal_table(columns, texts, False, None).splitlines())) > width:
        first, *others = zip((column.header for column in columns), *texts)
        columns, texts = (
            [Column("", first[0], dtype="string"), *(Column("", name) for name in first[1:])],
            list(map(list, others)),
        )
    return terminal_table(columns, texts, colour, width, gap)


def shown_columns(rows: Sequence[Any], columns: Sequence[AnyColumn]) -> list[AnyColumn]:
    """Return the columns that any row has a value for."""
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def terminal_table(
    columns: Sequence[Column], texts: list[list[str]], colour: bool, width: int | None, gap: int = 3
) -> str:
    """Return `texts` as a table of at most `width` characters a line, if given. The column named `error` is red.

    `gap` is the number of characters between two columns, at least 1.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)
    head = box.SIMPLE_HEAD if colour else plain
    table = Table(box=head, pad_edge=False, show_edge=False, padding=(0, (gap - 1) // 2, 0, gap // 2))
    for column in columns:  # folded, never cut: a table too wide for the terminal still holds every digit
        side: Any = "right" if column.numeric else "left"
        table.add_column(column.header, justify=side, vertical="bottom", overflow="fold", no_wrap=column.whole)
    for row in texts:  # Text, not str: rich would read "[...]" in a name or an error as markup
        table.add_row(*(Text(text, "red" if column.name == "error" else "") for column, text in zip(columns, row)))
    out, colours = io.StringIO(), "standard" if colour else None
    Console(file=out, width=width or 10_000, force_terminal=colour, color_system=colours).print(table)  # type: ignore[arg-type]
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines() if line.strip())


def print_rows(
    rows: Sequence[Any],
    columns: Sequence[Column],
    format: str,
    turn: bool = False,
    piped_width: int | None = None,
    folded: bool = True,
    gap: int = 3,
) -> None:
    """Print `render` to stdout: in the width and with the colours of a terminal, else `piped_width` characters wide. A table that is not
    `folded` is as wide as its columns."""
    terminal = sys.stdout.isatty()
    width = (shutil.get_terminal_size().columns if terminal else piped_width) if folded else None
    print(render(rows, columns, format, colour=terminal, width=width, turn=turn, gap=gap), end="", flush=True)
