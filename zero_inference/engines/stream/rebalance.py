"""Rebalance: move blocks between link and CPU after the first decode steps, by their measured times."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from zero_inference.engines.stream.cpu import CpuBackend
from zero_inference.engines.stream.cpu_plan import CpuPlan
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.trace import Timeline

# Consecutive passes of few tokens, counted from 1: the first one follows a prefill, a trial or another placement.
FIRST_PASS, LAST_PASS = 2, 7
MOST_LOOKS = 2
LEAST_AHEAD = 0.03  # of a step, by which link or CPU must be ahead of the other to rebalance
# Of a step, that the CPU must be busy. Otherwise Python is the bottleneck, and more work for the link would not help.
LEAST_BUSY_SHARE = 0.7


class Rebalancer:
    """Measures consecutive passes `FIRST_PASS` to `LAST_PASS`, rebalances, and measures again, up to `MOST_LOOKS` times.

    Args:
        backend: None where nothing can move.
    """

    def __init__(self, backend: CpuBackend | None, timeline: Timeline):
        self.backend, self.timeline = backend, timeline
        self.passes, self.looks = 0, 0
        self.done = backend is None or not backend.plan.automatic  # a share given by the user stays
        self.has_few = False  # whether there was a pass of few tokens
        self.start = 0.0, 0.0
        self.first = 1  # call of the model that is measured first

    def begin_again(self) -> None:
        """Forget the passes so far, which are not like those to come."""
        self.passes = 0

    def steps_to_settle(self) -> int:
        """Return the decode steps after a prefill until it may rebalance; 0 where it will not, and before the first pass of few tokens."""
        return 0 if self.done or not self.has_few else LAST_PASS

    def of(self, placement: Placement, few: bool, candidates: Collection[int]) -> Placement:
        """Return the placement for the next pass, of few tokens or not; `candidates` are blocks that may become CPU-computed."""
        self.has_few |= few
        if self.done or not few or self.backend is None:
            self.passes = 0
            return placement
        self.passes += 1
        now = time.perf_counter(), self.backend.pool.busy_s()
        if self.passes == FIRST_PASS:
            self.start, self.first = now, self.timeline.pass_index
        if self.passes != LAST_PASS:
            return placement
        step_s, busy_s = ((after - before) / (LAST_PASS - FIRST_PASS) for after, before in zip(now, self.start))
        found = self._look(self.backend.plan, placement, step_s, busy_s)
        if found is None:
            return placement
        changed = placement.rebalanced(found, candidates) if found else placement
        self.passes = 0
        self.looks += 1
        self.done = changed is placement or self.looks == MOST_LOOKS
        return changed

    def _look(self, plan: CpuPlan, placement: Placement, step_s: float, busy_s: float) -> int | None:
        """Return `bytes_to_move` of the measured passes; None where nothing crossed the link in them."""
        if not placement.streamed:
            return 0  # as planned
        use = self.timeline.link_use(self.first)  # waits for the device
        if use is None or not use.gb_per_s_while_busy:
            return None
        waited_s = self.timeline.waited_for_link_s(self.first) / (LAST_PASS - FIRST_PASS)
        link_s = link_s_of_step(plan, placement, use.gb_per_s_while_busy)
        return bytes_to_move(plan, placement, MeasuredStep(step_s, link_s, busy_s, waited_s))


@dataclass(frozen=True)
class MeasuredStep:
    """Measured seconds of a decode step.

    Attributes:
        whole: of all.
        link: of the step's copies at the measured rate; not the busy time, because in the first steps the link also fills the ring.
        cores: that the CPU was busy.
        waited: that the device waited for blocks; the CPU was idle then.
    """

    whole: float
    link: float
    cores: float
    waited: float


def link_s_of_step(plan: CpuPlan, placement: Placement, gb_per_s: float) -> float:
    """Return the seconds of the link in a decode step: the weights at `gb_per_s`, the measured rate of a rank's copies, or, if longer,
    weights with keys and values at the rate of a link alone, since both are copied at the same time."""
    weights = placement.nbytes_of(placement.streamed)
    weights_s = weights / (plan.ranks * gb_per_s * 1e9)
    if plan.attends or plan.rates is None:
        return weights_s
    return max(weights_s, (weights + plan.carried_bytes) / (plan.rates.link_alone_gb_per_s * 1e9))


def bytes_to_move(plan: CpuPlan, placement: Placement, step: MeasuredStep) -> int:
    """Return the bytes to move from the CPU to the link so that both end a step together; negative: from the link to the CPU.

    A step takes the device's own computing, which the plan does not know and in which the CPU cannot work, the CPU's work and the device's
    wait for the link. Without that wait the CPU would be done `step.waited` earlier, and the link could be done `step.whole - step.link`
    earlier: it is ahead by the difference, which each moved byte reduces on both sides. With CPU attention, whose work grows with each
    token, no bytes move to the CPU.
    """
    rates = plan.rates
    ahead_s = step.whole - step.link - step.waited
    if rates is None or abs(ahead_s) <= LEAST_AHEAD * step.whole:
        return 0
    if ahead_s > 0 and step.cores < LEAST_BUSY_SHARE * step.whole:
        return 0
    if ahead_s < 0 and plan.attends:
        return 0
    link, cores = rates.link_gb_per_s * 1e9, plan.in_steps_gb_per_s(placement, step.cores) * 1e9
    return int(ahead_s * link * cores / (link + cores))
