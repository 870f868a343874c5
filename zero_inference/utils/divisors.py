"""What to say of a number that does not divide: the nearest ones that do."""

from __future__ import annotations

from collections.abc import Iterable


def nearest_multiples(asked: int, parts: int) -> list[int]:
    """The multiples of `parts` on either side of `asked`, from 1 up; `asked` itself where it is one."""
    below = asked // parts * parts
    return [value for value in dict.fromkeys((below, -(-asked // parts) * parts)) if value > 0]


def nearest_divisor(asked: int, whole: int, among: Iterable[int], packs: int = 1) -> int | None:
    """The one of `among` that divides `whole` and is nearest to `asked` by its ratio, the larger of two; None where none does.

    Args:
        packs: has to divide `whole` too, or there is none.
    """
    fitting = [size for size in among if whole % size == 0 and whole % packs == 0]
    return min(fitting, key=lambda size: (max(size / asked, asked / size), -size), default=None)
