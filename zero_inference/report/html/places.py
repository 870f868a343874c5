"""Places for short texts beside the marks of a plot, so that they cover neither marks nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_inference.report.html.drawing import text_width

MOST_TEXTS = 100  # each is held against all marks
TEXT_HEIGHT, MARK_RADIUS, GAP = 12.0, 4.5, 2.0  # points


@dataclass(frozen=True)
class Box:
    """In points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.bottom <= other.bottom
            and other.top <= self.top
        )


def places_beside(
    marks: Sequence[tuple[float, float]], texts: Sequence[str], avoided: Sequence[Box], within: Box
) -> list[tuple[float, float] | None]:
    """The middle of each text in points, beside the mark of the same index; None where no place is free.

    Args:
        marks: their middles.
        avoided: what a text stands on only if there is nowhere else.
    """
    taken = [Box(x - MARK_RADIUS, y - MARK_RADIUS, x + MARK_RADIUS, y + MARK_RADIUS) for x, y in marks]
    places: list[tuple[float, float] | None] = []
    for (x, y), text in zip(marks[:MOST_TEXTS], texts):
        width = text_width(text)
        free = [
            (middle, box)
            for middle in _around(x, y, width)
            if within.holds(box := _box(middle, width)) and not any(box.overlaps(other) for other in taken)
        ]
        if not free:
            places.append(None)
            continue
        middle, box = min(free, key=lambda each: sum(each[1].overlaps(other) for other in avoided))
        taken.append(box)
        places.append(middle)
    return places + [None] * (len(marks) - len(places))


def _around(x: float, y: float, width: float) -> list[tuple[float, float]]:
    """Right, left, below, above and the corners: a stem goes up from a mark."""
    across, along = MARK_RADIUS + GAP + width / 2, MARK_RADIUS + TEXT_HEIGHT / 2
    straight = [(x + across, y), (x - across, y), (x, y - along), (x, y + along)]
    return straight + [(x + right * across, y + up * along) for up in (-0.8, 0.8) for right in (1, -1)]


def _box(middle: tuple[float, float], width: float) -> Box:
    x, y = middle
    return Box(x - width / 2, y - TEXT_HEIGHT / 2, x + width / 2, y + TEXT_HEIGHT / 2)
