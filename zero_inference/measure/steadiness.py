"""Checks of a run's times: how much they differ, and how busy the host was before. Imports no torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from zero_inference.records.schema import DecodeSpread, Loop, MachineLoad, SlowestStep
from zero_inference.utils.environment import usable_cores

UNEVEN_LOOPS = 0.10
# All steps of a loop do the same work. In benchmarks/results the slowest step took at most 1.2 times the median step in 49 of 50
# loops, and 2.2 times in one. Beyond 3, another program used the host.
SLOW_STEP = 3.0
MIN_STEPS = 3  # the median of two steps lies between them


def relative_spread(times_s: Sequence[float]) -> float:
    """Return (largest - smallest) / median."""
    return (max(times_s) - min(times_s)) / statistics.median(times_s)


def decode_spread(loops: Sequence[Loop]) -> DecodeSpread:
    """Return how much decode times differ, over loops and over their steps."""
    decode_s = [loop.decode_s for loop in loops if loop.step_s]
    compared = len(decode_s) > 1
    steps = [
        (step_s / statistics.median(loop.step_s), SlowestStep(loop=number, step=step, step_s=step_s))
        for number, loop in enumerate(loops, start=1)
        if len(loop.step_s) >= MIN_STEPS
        for step, step_s in enumerate(loop.step_s, start=1)
    ]
    ratio, slowest = max(steps, key=lambda each: each[0], default=(None, None))
    return DecodeSpread(
        decode_latency_min_s=min(decode_s) if compared else None,
        decode_latency_max_s=max(decode_s) if compared else None,
        decode_spread=relative_spread(decode_s) if compared else None,
        slowest_step_over_median=ratio,
        slowest_step_at=slowest,
    )


def describe_slow_step(spread: DecodeSpread) -> str | None:
    """Return a line about a decode step that is much slower than the median, or None."""
    at, ratio = spread.slowest_step_at, spread.slowest_step_over_median
    if at is None or ratio is None or ratio <= SLOW_STEP:
        return None
    return (
        f"decode step {at.step} of loop {at.loop} took {at.step_s:.3f} s, {ratio:.1f} times the median step of its loop"
    )


def spread_warning(spread: DecodeSpread) -> str | None:
    """Return the warning for loops that differ by more than `UNEVEN_LOOPS`, or None."""
    if (spread.decode_spread or 0.0) <= UNEVEN_LOOPS:
        return None
    return (
        f"warning: the decode times of the loops differ by {spread.decode_spread:.0%} of their median, so the median is "
        "just as uncertain; stop other programs, or use more --loops and --warmup"
    )


def machine_load() -> MachineLoad:
    """Return the host's load over the last minute. Call it before this run loads anything."""
    return MachineLoad(load_average_before=os.getloadavg()[0], usable_cores=usable_cores())


def load_warning(load: MachineLoad) -> str | None:
    """Return the warning for a load average above the usable cores, or None."""
    if load.load_average_before <= load.usable_cores:
        return None
    return (
        f"warning: the load average was {load.load_average_before:.1f} in the minute before loading, and this run may use "
        f"{load.usable_cores:g} of {os.cpu_count()} cores: other programs will slow it down"
    )
