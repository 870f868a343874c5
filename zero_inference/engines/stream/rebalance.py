"""Rebalance: move blocks between link and CPU after the first decode steps, by their measured times."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from zero_inference.engines.stream.cpu import CpuBackend
from zero_inference.engines.stream.cpu_plan import CpuPlan
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.trace import Timeline

# Consecutive decode passes that are measured, counted from 1; the first one, after a prefill or a change, is left out.
FIRST_PASS, LAST_PASS = 2, 7
MAX_MEASUREMENTS = 2
MIN_AHEAD_SHARE = 0.03  # of a step, by which link or CPU must be done before the other to rebalance
# Share of a step that the CPU must be busy. Otherwise Python is the bottleneck, and more work for the link would not help.
MIN_BUSY_SHARE = 0.7


class Rebalancer:
    """Measures decode passes `FIRST_PASS` to `LAST_PASS`, rebalances, and measures again, up to `MAX_MEASUREMENTS` times.

    Args:
        backend: None where nothing can move.
    """

    def __init__(self, backend: CpuBackend | None, timeline: Timeline):
        self.backend, self.timeline = backend, timeline
        self.passes, self.measurements = 0, 0
        self.done = backend is None or not backend.plan.automatic  # a share given by the user stays
        self.has_decoded = False
        self.start = 0.0, 0.0  # clock and CPU busy time at the first measured pass, seconds
        self.first_pass = 1  # index of that pass in the timeline

    def begin_again(self) -> None:
        """Forget the passes so far: later ones take other times."""
        self.passes = 0

    def steps_to_settle(self) -> int:
        """Return the decode steps after a prefill until it may rebalance; 0 if it will not, and before the first decode pass."""
        return 0 if self.done or not self.has_decoded else LAST_PASS

    def next_placement(self, placement: Placement, is_decode: bool, candidates: Collection[int]) -> Placement:
        """Return the placement for the next pass.

        Args:
            is_decode: whether the CPU may compute its blocks in that pass.
            candidates: blocks that may become CPU-computed.
        """
        self.has_decoded |= is_decode
        if self.done or not is_decode or self.backend is None:
            self.passes = 0
            return placement
        self.passes += 1
        now = time.perf_counter(), self.backend.pool.busy_s()
        if self.passes == FIRST_PASS:
            self.start, self.first_pass = now, self.timeline.pass_index
        if self.passes != LAST_PASS:
            return placement
        step_s, busy_s = ((after - before) / (LAST_PASS - FIRST_PASS) for after, before in zip(now, self.start))
        nbytes = self._bytes_to_move(self.backend.plan, placement, step_s, busy_s)
        if nbytes is None:
            return placement
        changed = placement.rebalanced(nbytes, candidates) if nbytes else placement
        self.passes = 0
        self.measurements += 1
        self.done = changed is placement or self.measurements == MAX_MEASUREMENTS
        return changed

    def _bytes_to_move(self, plan: CpuPlan, placement: Placement, step_s: float, busy_s: float) -> int | None:
        """Return `bytes_to_move` for the measured passes; None if nothing crossed the link in them."""
        if not placement.streamed:
            return 0  # as planned
        use = self.timeline.link_use(self.first_pass)  # waits for the device
        if use is None or not use.gb_per_s_while_busy:
            return None
        waited_s = self.timeline.waited_for_link_s(self.first_pass) / (LAST_PASS - FIRST_PASS)
        link_s = link_s_of_step(plan, placement, use.gb_per_s_while_busy)
        return bytes_to_move(plan, placement, MeasuredStep(step_s, link_s, busy_s, waited_s))


@dataclass(frozen=True)
class MeasuredStep:
    """Measured seconds of a decode step.

    Attributes:
        step_s: the whole step.
        link_s: the step's copies at the measured rate; not the busy time, because in the first steps the link also fills the ring.
        cpu_busy_s: the CPU multiplied.
        waited_s: the device waited for blocks, and the CPU was idle.
    """

    step_s: float
    link_s: float
    cpu_busy_s: float
    waited_s: float


def link_s_of_step(plan: CpuPlan, placement: Placement, gb_per_s: float) -> float:
    """Return the link seconds of a decode step with copies at `gb_per_s` a rank.

    Keys and values, if they cross the link, do so at the same time: then at least the time of both at the rate of a link alone.
    """
    weights = placement.nbytes_of(placement.streamed)
    weights_s = weights / (plan.ranks * gb_per_s * 1e9)
    if plan.attends or plan.rates is None:
        return weights_s
    return max(weights_s, (weights + plan.carried_bytes) / (plan.rates.link_alone_gb_per_s * 1e9))


def bytes_to_move(plan: CpuPlan, placement: Placement, step: MeasuredStep) -> int:
    """Return the bytes to move from the CPU to the link so that both end a step together; negative: from the link to the CPU.

    In a step the device computes, waits for the CPU, and waits for the link. Device and CPU alone would take `step_s - waited_s`, the link
    alone `link_s`: the link is ahead by the difference. A moved byte reduces it by its time on the link plus its time on the CPU.
    """
    rates = plan.rates
    link_ahead_s = step.step_s - step.waited_s - step.link_s
    if rates is None or abs(link_ahead_s) <= MIN_AHEAD_SHARE * step.step_s:
        return 0
    if link_ahead_s > 0 and step.cpu_busy_s < MIN_BUSY_SHARE * step.step_s:
        return 0
    if link_ahead_s < 0 and plan.attends:  # the work of CPU attention grows with each token
        return 0
    link_rate, cpu_rate = rates.link_gb_per_s * 1e9, plan.in_steps_gb_per_s(placement, step.cpu_busy_s) * 1e9
    return int(link_ahead_s * link_rate * cpu_rate / (link_rate + cpu_rate))
