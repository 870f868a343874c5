"""The known names that a mistyped one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` of `known` that resemble `name`, the closest first. Case does not count."""
    spellings: dict[str, str] = {}
    for each in known:
        spellings.setdefault(each.lower(), each)
    return [spellings[each] for each in difflib.get_close_matches(name.strip().lower(), spellings, max(1, most))]


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """`did you mean X?`, or nothing where no known name is close."""
    near = closest(name, known, most)
    return f"did you mean {', '.join(near)}?" if near else ""
