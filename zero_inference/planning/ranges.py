"""The range beside a predicted time: within it were 9 of 10 committed runs of its kind, all with a GPU."""

from __future__ import annotations

from typing import NamedTuple

from zero_inference.utils.format import format_seconds, significant


class Range(NamedTuple):
    """From `low` to `high`: of a kind of predictions in multiples of them, of one prediction in its own unit."""

    low: float
    high: float

    def of(self, predicted: float) -> Range:
        """Return the range around `predicted`."""
        return Range(self.low * predicted, self.high * predicted)


# Measured over predicted time by kind. `python benchmarks/predictions.py --ranges` computes and prints them, and how many runs of each host
# are within the ranges that all other hosts make; a test does the same.
RANGES = {
    "load": Range(0.90, 1.80),
    "prefill": Range(0.90, 1.15),
    "step": Range(0.85, 1.15),
    "step with the CPU": Range(0.85, 1.30),
    "launched": Range(0.75, 1.60),
}
# A prefill counts as launched where the host takes more than `LAUNCHED_SHARE` of it to launch its operators; a step, where the device waits
# for that for more than `WAITED_SHARE`, and copies do not hide it: what is no copy is more than `LAUNCHED_SHARE`.
LAUNCHED_SHARE, WAITED_SHARE = 0.6, 0.1


def seconds_in_words(predicted_s: float, within_s: Range | None) -> str:
    """Return such as "0.123 s (0.11 to 0.14)"."""
    if within_s is None:
        return format_seconds(predicted_s)
    low, high = map(format_seconds, within_s)
    if low.endswith(" s") and high.endswith(" s"):
        low, high = low.removesuffix(" s"), high.removesuffix(" s")
    return f"{format_seconds(predicted_s)} ({low} to {high})"


def rate_in_words(predicted: float, within: Range | None) -> str:
    """Return such as "16.4 (15.1 to 18.9)"."""
    return significant(predicted) + (f" ({' to '.join(map(significant, within))})" if within else "")
