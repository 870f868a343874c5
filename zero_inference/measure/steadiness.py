"""How even the times of a run are, and how busy the machine was before it: whether a median can be trusted. Imports no torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from zero_inference.records.loops import Evenness, Loop, MachineLoad, StepPlace
from zero_inference.runtime.environment import usable_cores

UNEVEN_LOOPS = 0.10
# The steps of a loop do the same work. In benchmarks/results the slowest of a loop took at most 1.2 times its median step in 49 of
# 50 loops, and 2.2 times in the other one: beyond 3 something else had the machine.
SLOW_STEP = 3.0
FEWEST_STEPS = 3  # of two steps the median lies between them


def relative_range(times_s: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(times_s) - min(times_s)) / statistics.median(times_s)


def decode_evenness(loops: Sequence[Loop]) -> Evenness:
    """How decode times differ. Every loop and every step counts."""
    decode = [loop.decode_s for loop in loops if loop.step_s]
    compared = len(decode) > 1
    slowest = _slowest_step(loops)
    return Evenness(
        decode_latency_min_s=min(decode) if compared else None,
        decode_latency_max_s=max(decode) if compared else None,
        decode_spread=relative_range(decode) if compared else None,
        slowest_step_over_median=slowest[0] if slowest else None,
        slowest_step_at=StepPlace(*slowest[1:]) if slowest else None,
    )


def in_words(evenness: Evenness, loops: int) -> str | None:
    """One line for the results, or None where there is nothing to compare and no step stands out."""
    parts = []
    if evenness.decode_spread is not None:
        parts.append(
            f"decode latency of {loops} loops: {evenness.decode_latency_min_s:.3f} to {evenness.decode_latency_max_s:.3f} s, "
            f"{evenness.decode_spread:.1%} of the median apart"
        )
    at = evenness.slowest_step_at
    if at is not None and (evenness.slowest_step_over_median or 0) > SLOW_STEP:
        parts.append(
            f"decode step {at.step} of loop {at.loop} took {at.step_s:.3f} s, "
            f"{evenness.slowest_step_over_median:.1f} times the median step of its loop"
        )
    return "; ".join(parts) or None


def warning_of(evenness: Evenness) -> str | None:
    """What to say where the loops differ by more than `UNEVEN_LOOPS`."""
    spread = evenness.decode_spread
    if spread is None or spread <= UNEVEN_LOOPS:
        return None
    return (
        f"warning: the decode latencies of the loops lie {spread:.0%} of their median apart, so the median is uncertain by as much; "
        "let nothing else run, or use more --loops and --warmup"
    )


def machine_load() -> MachineLoad:
    """Over the last minute, of the whole machine. To be called before this run loads anything."""
    return MachineLoad(load_average_before=os.getloadavg()[0], usable_cores=usable_cores())


def load_warning(load: MachineLoad) -> str | None:
    """What to say where more was running than there are cores for this run."""
    if load.load_average_before <= load.usable_cores:
        return None
    return (
        f"warning: in the minute before loading the load average was {load.load_average_before:.1f}, and this run may use "
        f"{load.usable_cores:g} of the machine's {os.cpu_count()} cores: what else runs here will slow it down"
    )


def _slowest_step(loops: Sequence[Loop]) -> tuple[float, int, int, float] | None:
    """(times the median step of its loop, loop and decode step from 1, its seconds) of the step that stands out most."""
    found = [
        (step_s / statistics.median(loop.step_s), number, step, step_s)
        for number, loop in enumerate(loops, start=1)
        if len(loop.step_s) >= FEWEST_STEPS
        for step, step_s in enumerate(loop.step_s, start=1)
    ]
    return max(found, default=None)
