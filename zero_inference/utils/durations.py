"""Times in words, for people who wait."""

from __future__ import annotations

from zero_inference.utils.tables import significant

LONG_S = 600  # from here on seconds are no unit that people read


def duration(seconds: float) -> str:
    """Such as "45 s", "2 min 10 s" or "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small = ((60, "min"), (1, "s")) if whole < 3600 else ((3600, "h"), (60, "min"))
    rest = whole % large[0] // small[0]
    return f"{whole // large[0]} {large[1]}" + (f" {rest} {small[1]}" if rest else "")


def seconds(value: float) -> str:
    """Return such as "0.295 s" or "45.2 s", and from ten minutes on as `duration` has it: "46 h"."""
    return f"{significant(value)} s" if value < LONG_S else duration(value)


def to_go(seconds: float | None) -> str:
    """Such as ", about 4 min to go", no more exact than an estimate is; nothing without one, and at the end."""
    if seconds is None or seconds < 1:
        return ""
    if seconds < 10:
        return f", about {round(seconds)} s to go"
    if seconds < 95:
        return f", about {5 * round(seconds / 5)} s to go"
    if seconds < 95 * 60:
        return f", about {round(seconds / 60)} min to go"
    return f", about {seconds / 3600:.1f} h to go"
