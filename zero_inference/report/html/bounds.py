"""What binds a run, in words and looks that are the same in all figures."""

from __future__ import annotations

from collections.abc import Iterable

from zero_inference.report.html.drawing import MARKERS, ROOM, fitting
from zero_inference.report.html.svg import SERIES

BOUNDS = {
    "link": "link",
    "link_and_cores": "link and cores",
    "disk": "disk",
    "device_memory": "device memory",
    "matmul": "matrix products",
}


def bounds_among(found: Iterable[str]) -> list[str]:
    """Those of `found` in the order of `BOUNDS`, then names from other tools."""
    found = set(found)
    return [bound for bound in (*BOUNDS, *sorted(found - set(BOUNDS))) if bound in found]


def look(bound: str) -> tuple[str, str]:
    """Colour and marker; names from other tools share the last."""
    index = list(BOUNDS).index(bound) if bound in BOUNDS else len(BOUNDS)
    return SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]


def bound_name(bound: str) -> str:
    return BOUNDS.get(bound, fitting(bound, ROOM / 3))
