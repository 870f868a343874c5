"""Bytes as users read them: amounts in GiB (2^30 bytes; MiB and KiB where they are small), three significant digits. Rates are in GB/s
(10^9 bytes), as in datasheets, and are not formatted here."""

from __future__ import annotations

import math

GIB = 1 << 30
# An amount is given in the first of these units of which it has at least `LEAST`: 1000 MiB never appear.
UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))
LEAST = 0.1


def amount(nbytes: float) -> str:
    """`20.4 GiB`, `131 GiB`, `353 KiB`, `7 bytes`."""
    for unit, size in UNITS:
        if abs(nbytes) >= LEAST * size:
            return f"{_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} bytes"


def in_gib(nbytes: float) -> str:
    """The number alone, for a column whose header has the unit."""
    return _digits(nbytes / GIB)


def compared(part: float, whole: float) -> tuple[str, str, str]:
    """Two amounts in the unit of the larger one, and that unit: `20.4`, `23.5`, `GiB`. They get more digits where three would hide that
    they differ."""
    unit, size = next(((unit, size) for unit, size in UNITS if max(part, whole) >= LEAST * size), ("bytes", 1))
    texts = _digits(part / size), _digits(whole / size)
    if part != whole and texts[0] == texts[1]:
        texts = f"{part / size:.2f}", f"{whole / size:.2f}"
    return *texts, unit


def amount_or_more(nbytes: float) -> str:
    """In GiB, rounded up to a tenth: so much is enough."""
    return f"{math.ceil(10 * nbytes / GIB) / 10:g} GiB"


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
