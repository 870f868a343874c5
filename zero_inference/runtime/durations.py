"""Times in words, for people who wait."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Such as "45 s", "2 min 10 s" or "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small = ((60, "min"), (1, "s")) if whole < 3600 else ((3600, "h"), (60, "min"))
    rest = whole % large[0] // small[0]
    return f"{whole // large[0]} {large[1]}" + (f" {rest} {small[1]}" if rest else "")


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
