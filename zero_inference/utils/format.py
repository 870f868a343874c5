"""Numbers, bytes, durations and foreign text as they are printed, and sizes of memory parsed.

Amounts of memory are in GiB (2^30 bytes), rates in GB/s (10^9 bytes) as in datasheets. Three significant digits unless said otherwise.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterable
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
    exponent = int(f"{value:.2e}".partition("e")[2])  # after rounding: 9.996 is 10.0
    return f"{value:.{min(max(0, 2 - exponent), 6)}f}"


def format_gib_exact(nbytes: float) -> str:
    """Return the number of GiB with three decimals."""
    return f"{nbytes / GIB:.3f}"


def format_percent(value: float) -> str:
    return f"{100 * value:.1f}%"


GIB = 1 << 30
# An amount is given in the largest of these units of which it has at least 0.1, so 1000 MiB never appear.
BINARY_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


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
    """Return the value of `among` that divides `whole` and is nearest to `asked` by ratio, the larger of two; None if none divides, or if
    `packs`, elements that share a word, do not."""
    fitting = [size for size in among if whole % size == 0 and whole % packs == 0]
    return min(fitting, key=lambda size: (max(size / asked, asked / size), -size), default=None)
