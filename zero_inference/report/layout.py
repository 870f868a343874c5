"""Tables of a report in the width of a terminal: the least important columns are left out, and headings stand between the rows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zero_inference.utils.format import one_line
from zero_inference.utils.tables import NOT_KNOWN, Column, terminal_table

GAP = 2  # characters between two columns


@dataclass(frozen=True)
class Shown:
    """A column. `of` makes the text of a row, None where it is not known.

    Attributes:
        rank: columns with the largest go first where the table is too wide; 0 stays.
        longest: characters of a text; more are cut out of the middle.
        least: characters to which its texts are cut at their ends before a column of a smaller rank goes; 0: they are not cut.
        right: aligned to the right, as numbers are.
        setting: says what was run, so it is left out where all runs agree. Otherwise it is a result, left out where no run has it.
        words: how a line says the setting's value; empty where that would tell nothing.
    """

    header: str
    of: Callable[[Any], str | None]
    rank: int
    longest: int = 24
    least: int = 0
    right: bool = True
    setting: bool = False
    words: str = "{}"

    def text(self, row: Any) -> str:
        return shortened(one_line(self.of(row) or NOT_KNOWN), self.longest)


def table_lines(
    columns: Sequence[Shown],
    rows: Sequence[Any],
    width: int,
    colour: bool = False,
    headings: Sequence[str | None] | None = None,
) -> tuple[list[str], list[Shown]]:
    """(lines at most `width` wide, the columns that found no room). `headings` has one for each row, or None for
    a row that needs none; it stands above the first of those that share it."""
    texts = {column.header: [column.text(row) for row in rows] for column in columns}
    kept = _fitting(columns, texts, width)
    for column in kept:
        if column.least:
            room = width - _width([other for other in kept if other is not column], texts) - GAP
            texts[column.header] = [cut(text, max(room, column.least)) for text in texts[column.header]]
    declared = [Column("", each.header, dtype="Float64" if each.right else "string") for each in kept]
    cells = [list(row) for row in zip(*(texts[each.header] for each in kept))]
    lines = terminal_table(declared, cells, colour, width, GAP).splitlines()
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


def _fitting(columns: Sequence[Shown], texts: dict[str, list[str]], width: int) -> list[Shown]:
    """Those columns that fit beside each other, the least important left out."""
    kept = list(columns)
    while _width(kept, texts) > width and any(each.rank for each in kept):
        kept.remove(max(reversed(kept), key=lambda each: each.rank))
    for column in columns:  # what was dropped for a wider one may have room after all
        if column not in kept and _width([*kept, column], texts) <= width:
            kept.append(column)
    return [column for column in columns if column in kept]


def _width(columns: Sequence[Shown], texts: dict[str, list[str]]) -> int:
    """Of the table, with texts as short as they may be cut."""
    from rich.cells import cell_len

    def taken(column: Shown) -> int:
        head, body = max(map(cell_len, column.header.split("\n"))), max(map(cell_len, texts[column.header]))
        return GAP + max(head, min(body, column.least) if column.least else body)

    return sum(map(taken, columns)) - GAP


def hidden_in_words(columns: Sequence[Shown], where: str, width: int) -> list[str]:
    """Lines that name the columns which found no room, and `where` they are."""
    if not columns:
        return []
    names = ", ".join(each.header.replace("-\n", "-").replace("\n", " ") for each in columns)
    text = f"{len(columns)} column{'s' * (len(columns) > 1)} hidden for width ({names}); {where}"
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def cut(line: str, width: int) -> str:
    """`line` in at most `width` cells of a terminal; what is left out is at its end."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= width else set_cell_size(line, width - 1).rstrip() + "…"


def shortened(text: str, longest: int) -> str:
    """At most `longest` characters; what is left out is in the middle."""
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]}…{text[len(text) - (longest - head - 1) :]}"
