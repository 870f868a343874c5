"""What binds a run, in words and looks that are the same in all figures."""

from __future__ import annotations

from collections.abc import Iterable

from zero_inference.report.html.drawing import MARKERS, ROOM, fitting
from zero_inference.report.html.svg import SERIES
from zero_inference.report.run import BOUND_NAMES


def bounds_among(found: Iterable[str]) -> list[str]:
    """Those of `found` in the order of `BOUND_NAMES`, then names from other tools."""
    found = set(found)
    return [bound for bound in (*BOUND_NAMES, *sorted(found - set(BOUND_NAMES))) if bound in found]


def look(bound: str) -> tuple[str, str]:
    """Colour and marker; both memories share one, and names from other tools the last."""
    known = [name for name in BOUND_NAMES if name != "host_memory"]
    bound = "device_memory" if bound == "host_memory" else bound
    index = known.index(bound) if bound in known else len(known)
    return SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]


def bound_name(bound: str) -> str:
    return BOUND_NAMES.get(bound, fitting(bound, ROOM / 3))
