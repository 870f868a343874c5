"""Numbers, bytes, durations and foreign text as they are printed, and sizes of memory parsed.

Amounts of memory are in GiB (2^30 bytes), rates in GB/s (10^9 bytes) as in datasheets. Three significant digits unless said otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

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
MAX_DECIMALS = 6  # of `three_digits`


def one_line(value: Any) -> str:
    """Return `value` as printable text without line breaks, at most `LONGEST_TEXT` characters."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def decimals(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{count}f}"


def significant(value: float) -> str:
    """Return three significant digits without trailing zeros, and whole numbers from 1000 on."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """Return three significant digits with trailing zeros and without an exponent; whole numbers from 1000 on."""
    if not value:
        return "0"
    digits = 1 + math.floor(math.log10(abs(value)))
    if digits < 3 and round(abs(value), 3 - digits) >= 10**digits:  # 9.996 is 10.0
        digits += 1
    return f"{value:.{min(max(0, 3 - digits), MAX_DECIMALS)}f}"


def format_gib_exact(nbytes: float) -> str:
    """Return the number of GiB with three decimals."""
    return f"{nbytes / 2**30:.3f}"


def format_percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def four_digits(value: float) -> str:
    """Return four significant digits without an exponent, three below 1."""
    exponent = math.floor(math.log10(abs(value))) if value else -1
    return f"{value:.{max(0, (3 if exponent >= 0 else 2) - exponent)}f}"


def format_number(value: float) -> str:
    """Return three significant digits or all before the point, with a narrow space between thousands."""
    if value >= 100:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.3g}"


GIB = 1 << 30
# An amount is given in the largest of these units of which it has at least `MIN_OF_UNIT`, so 1000 MiB never appear.
BINARY_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))
MIN_OF_UNIT = 0.1


def format_bytes(nbytes: float) -> str:
    """Return such as "20.4 GiB", "131 GiB", "353 KiB" or "7 bytes"."""
    for unit, size in BINARY_UNITS:
        if abs(nbytes) >= MIN_OF_UNIT * size:
            return f"{significant(nbytes / size)} {unit}"
    return f"{nbytes:.0f} bytes"


def format_gib(nbytes: float) -> str:
    """Return the number of GiB, for a column whose header has the unit."""
    return significant(nbytes / GIB)


def format_bytes_pair(part: float, whole: float) -> tuple[str, str, str]:
    """Return two amounts in the unit of the larger one, and that unit; with two decimals where three digits would hide their difference."""
    unit, size = next(
        ((unit, size) for unit, size in BINARY_UNITS if max(part, whole) >= MIN_OF_UNIT * size), ("bytes", 1)
    )
    texts = significant(part / size), significant(whole / size)
    if part != whole and texts[0] == texts[1]:
        texts = f"{part / size:.2f}", f"{whole / size:.2f}"
    return *texts, unit


def format_gib_rounded_up(nbytes: float) -> str:
    """Return the GiB rounded up to a tenth: an amount that is enough."""
    return f"{math.ceil(10 * nbytes / GIB) / 10:g} GiB"


LONG_S = 600  # from here on times are in minutes and hours


def format_duration(seconds: float) -> str:
    """Return such as "45 s", "2 min 10 s" or "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small = ((60, "min"), (1, "s")) if whole < 3600 else ((3600, "h"), (60, "min"))
    rest = whole % large[0] // small[0]
    return f"{whole // large[0]} {large[1]}" + (f" {rest} {small[1]}" if rest else "")


def format_seconds(value: float) -> str:
    """Return such as "0.295 s" or "45.2 s", and from ten minutes on as `format_duration` has it: "46 h"."""
    return f"{significant(value)} s" if value < LONG_S else format_duration(value)


def format_time_left(seconds: float | None) -> str:
    """Return such as ", about 4 min to go", as exact as an estimate is; "" without one, or with less than a second."""
    if seconds is None or seconds < 1:
        return ""
    if seconds < 10:
        return f", about {round(seconds)} s to go"
    if seconds < 95:
        return f", about {5 * round(seconds / 5)} s to go"
    if seconds < 95 * 60:
        return f", about {round(seconds / 60)} min to go"
    return f", about {seconds / 3600:.1f} h to go"


# GB is 10^9 bytes, GiB 2^30. A bare G means 2^30, as in vLLM and most tools that take an amount of memory.
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SHORT_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNIT_BYTES = {unit.lower(): nbytes for unit, nbytes in (UNITS | SHORT_UNITS).items()}
_NUMBER = re.compile(r"([+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))\s*([A-Za-z/]*)")


def parse_number_and_unit(text: str) -> tuple[float, str] | None:
    """Return the number and its unit in lower case ('' without one); None for any other text."""
    found = _NUMBER.fullmatch(text.strip())
    return None if found is None else (float(found[1]), found[2].lower())


def parse_gib(text: str) -> float:
    """Return a size in GiB; a plain number is in GiB. The result may be negative, infinite or nan.

    Raises:
        ValueError: `text` is no size; the message shows what one looks like.
    """
    try:
        return float(text)
    except ValueError:
        pass
    found = parse_number_and_unit(text)
    if found is None or found[1] not in UNIT_BYTES:
        raise ValueError("not a size of memory; write 10 (GiB), 10GiB, 10GB or 512MiB")
    number, unit = found
    return number * UNIT_BYTES[unit] / 2**30
