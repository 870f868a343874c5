"""Numbers, bytes, durations and foreign text as they are printed, and sizes of memory parsed.

Amounts of memory are in GiB (2^30 bytes), rates in GB/s (10^9 bytes) as in datasheets. Three significant digits unless said otherwise.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

# Controls could move the cursor or recolour a terminal; halves of surrogate pairs and non-characters are in no encoding; marks of
# text direction would let a name turn the text around it. Tabs and line breaks stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of control characters, lone surrogates and marks of text direction."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\ufffd"))


def file_stem(text: str) -> str:
    """Return `text` as a file name that any file system takes, with room for a number and a suffix."""
    return re.sub(r"[^\w.-]+", "_", text).encode(errors="replace")[:200].decode(errors="ignore")


def first_line(error: BaseException) -> str:
    """Return the first line of the message, at most 200 characters; the class name if there is none."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


LONGEST_TEXT = 2000  # characters of a cell
GIB = 1 << 30
# An amount is given in the largest of these units of which it has at least 0.1, so 1000 MiB never appear.
BINARY_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


def one_line(value: Any) -> str:
    """Return `value` as printable text without line breaks, at most `LONGEST_TEXT` characters."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def decimals(count: int) -> Callable[[float], str]:
    """Return a function that formats a number with `count` decimals."""
    return lambda value: f"{value:.{count}f}"


def significant(value: float) -> str:
    """Return three significant digits without trailing zeros, and whole numbers from 1000 on."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """Return three significant digits with trailing zeros and without an exponent; whole numbers from 1000 on."""
    if not value:
        return "0"
    exponent = int(f"{value:.2e}".partition("e")[2])  # after rounding: 9.996 is 10.0
    return f"{value:.{min(max(0, 2 - exponent), 6)}f}"  # at most six decimals


def format_gib_exact(nbytes: float) -> str:
    """Return the number of GiB with three decimals."""
    return f"{nbytes / GIB:.3f}"


def format_percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _unit_of(nbytes: float) -> tuple[str, int]:
    return next((each for each in BINARY_UNITS if abs(nbytes) >= 0.1 * each[1]), BINARY_UNITS[-1])


def format_bytes(nbytes: float) -> str:
    """Return a text such as "20.4 GiB", "131 GiB", "353 KiB" or "7 bytes"."""
    unit, size = _unit_of(nbytes)
    return f"{significant(nbytes / size)} {unit}"


def format_gib(nbytes: float) -> str:
    """Return the number of GiB, for a column whose header has the unit."""
    return significant(nbytes / GIB)


def format_bytes_pair(part: float, whole: float) -> tuple[str, str, str]:
    """Return two amounts in the unit of the larger one, and that unit; with two decimals where three digits would hide their difference."""
    unit, size = _unit_of(max(part, whole))
    texts = significant(part / size), significant(whole / size)
    if part != whole and texts[0] == texts[1]:
        texts = f"{part / size:.2f}", f"{whole / size:.2f}"
    return *texts, unit


def format_gib_rounded_up(nbytes: float) -> str:
    """Return the GiB rounded up to a tenth: an amount that is enough."""
    return f"{math.ceil(10 * nbytes / GIB) / 10:g} GiB"


def format_duration(seconds: float) -> str:
    """Return a text such as "45 s", "2 min 10 s" or "1 h 5 min"."""
    minutes, s = divmod(round(seconds), 60)
    h, minutes = divmod(minutes, 60)
    parts = [f"{count} {unit}" for count, unit in ((h, "h"), (minutes, "min"), (s, "s")) if count]
    return " ".join(parts[: 1 if h and not minutes else 2]) or "0 s"


def format_seconds(value: float) -> str:
    """Return a text such as "0.295 s" or "45.2 s", and from ten minutes on as `format_duration` has it: "46 h"."""
    return f"{significant(value)} s" if value < 600 else format_duration(value)


def format_time_left(seconds: float | None) -> str:
    """Return a text such as ", about 4 min to go", as exact as an estimate is; "" without one, or with less than a second."""
    if seconds is None or seconds < 1:
        return ""
    size, unit = next((each for each in ((3600, "h"), (60, "min")) if seconds >= 1.5 * each[0]), (1, "s"))
    return f", about {seconds / size:.0f} {unit} to go"


# GB is 10^9 bytes, GiB 2^30. A bare G means 2^30, as in vLLM and most tools that take an amount of memory.
UNIT_BYTES: dict[str, float] = {}
for _power, _letter in enumerate("kmgt", 1):
    UNIT_BYTES |= {f"{_letter}ib": 2 ** (10 * _power), _letter: 2 ** (10 * _power), f"{_letter}b": 10 ** (3 * _power)}
_NUMBER = re.compile(r"([+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))\s*([A-Za-z/]*)")


def parse_number_and_unit(text: str) -> tuple[float, str] | None:
    """Return the number and its unit in lower case ('' without one); None for any other text."""
    found = _NUMBER.fullmatch(text.strip())
    return None if found is None else (float(found[1]), found[2].lower())


def parse_gib(text: str) -> float:
    """Return a size in GiB; a plain number is in GiB. The result may be negative, infinite or nan. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return float(text)
    found = parse_number_and_unit(text)
    if found is None or found[1] not in UNIT_BYTES:
        raise ValueError("not a size of memory; write 10 (GiB), 10GiB, 10GB or 512MiB")
    return found[0] * UNIT_BYTES[found[1]] / GIB


def closest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return up to `most` of `known` that resemble `name`, ignoring case, the closest first."""
    spellings = {each.lower(): each for each in known}
    return [spellings[each] for each in difflib.get_close_matches(name.strip().lower(), spellings, max(1, most))]


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return `did you mean X?`, or nothing if no known name is close."""
    near = closest(name, known, most)
    return f"did you mean {', '.join(near)}?" if near else ""


def nearest_divisor(asked: int, whole: int, among: Iterable[int], packs: int = 1) -> int | None:
    """Return the value of `among` that divides `whole` and is nearest to `asked` by ratio, the larger of two. None if none divides it, or
    if it is not whole words of `packs` elements."""
    fitting = [size for size in among if whole % size == 0 and whole % packs == 0]
    return min(fitting, key=lambda size: (max(size / asked, asked / size), -size), default=None)


FORMATS = ("table", "md", "csv", "json")
NOT_KNOWN = "-"
PIPED_WIDTH = 100  # of a table if stdout is not a terminal


@dataclass(frozen=True)
class Column:
    """A column of a table, from which reading, printing and sorting follow."""

    name: str  # key of a row, and the name in csv and json
    header: str  # for people, with the unit
    show: Callable[[Any], str] = one_line  # text of a value in SI units
    dtype: str = "Float64"  # Int64, Float64, boolean or string; numbers are right-aligned
    of: Callable[[Any], Any] | None = None  # computes the value from a row; None looks `name` up in it
    whole: bool = False  # not folded where a terminal is too narrow for the table

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
    transpose: bool = False,
    gap: int = 3,
) -> str:
    """Return the rows as text; `table` and `md` have formatted values, `csv` and `json` full precision under the columns' names.

    Args:
        transpose: print rows as columns where a table is wider than `width`, so that few rows of many columns fit any terminal.
    """
    names, headers = [column.name for column in columns], [column.header for column in columns]
    if format == "csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
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
        return tabulate(cells, headers=headers, tablefmt="pipe", colalign=aligned, disable_numparse=True) + "\n"
    if transpose and width and texts:
        if max(map(len, terminal_table(columns, texts, False, None).splitlines())) > width:
            first, *texts = (list(row) for row in zip(headers, *texts))
            columns = [Column("", first[0], dtype="string"), *(Column("", name) for name in first[1:])]
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

    plain = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)  # dashes below the header and no other line
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
    transpose: bool = False,
    piped_width: int | None = None,
    folded: bool = True,
    gap: int = 3,
) -> None:
    """Print `render` to stdout: in the width and with the colours of a terminal, else `piped_width` characters wide. A table that is not
    `folded` is as wide as its columns."""
    terminal = sys.stdout.isatty()
    width = (shutil.get_terminal_size().columns if terminal else piped_width) if folded else None
    text = render(rows, columns, format, colour=terminal, width=width, transpose=transpose, gap=gap)
    print(text, end="", flush=True)
