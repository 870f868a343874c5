"""Sizes of memory as people write them: 10GiB, 10 GB, 512M."""

from __future__ import annotations

import re

# As everywhere in computing, GB is 10^9 bytes and GiB is 2^30. A bare G means 2^30, as it does for vLLM and for most tools that take an
# amount of memory.
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SHORT_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTES_OF = {unit.lower(): nbytes for unit, nbytes in (UNITS | SHORT_UNITS).items()}
_NUMBER = re.compile(r"([+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))\s*([A-Za-z/]*)")


def number_and_unit(text: str) -> tuple[float, str] | None:
    """The number, and the unit in lower case ('' without one); None where `text` is something else."""
    found = _NUMBER.fullmatch(text.strip())
    return None if found is None else (float(found[1]), found[2].lower())


def gib_of(text: str) -> float:
    """The size in GiB; a plain number is in GiB already. It may be negative, infinite or not a number: the caller knows what it allows.

    Raises:
        ValueError: `text` is no size; says what one looks like.
    """
    try:
        return float(text)
    except ValueError:
        pass
    found = number_and_unit(text)
    if found is None or found[1] not in BYTES_OF:
        raise ValueError("not a size of memory; write 10 (GiB), 10GiB, 10GB or 512MiB")
    number, unit = found
    return number * BYTES_OF[unit] / 2**30
