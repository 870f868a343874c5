"""Suggestions for error messages: known names close to a mistyped one, and numbers that divide."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return up to `most` of `known` that resemble `name`, ignoring case, the closest first."""
    spellings = {each.lower(): each for each in known}
    return [spellings[each] for each in difflib.get_close_matches(name.strip().lower(), spellings, max(1, most))]


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return `did you mean X?`, or nothing if no known name is close."""
    near = closest(name, known, most)
    return f"did you mean {', '.join(near)}?" if near else ""


def nearest_divisor(asked: int, whole: int, among: Iterable[int], packs: int = 1) -> int | None:
    """Return the value of `among` that divides `whole` and is nearest to `asked` by ratio, the larger of two; None if none divides.

    Args:
        packs: must divide `whole` too, or there is none.
    """
    fitting = [size for size in among if whole % size == 0 and whole % packs == 0]
    return min(fitting, key=lambda size: (max(size / asked, asked / size), -size), default=None)
