"""Moves blocks between link and CPU after the first decode steps, by measured times; and predicts that for a plan."""

from __future__ import annotations

import time
from collections.abc import Collection

from zero_inference.engines.stream.cpu import CpuBackend
from zero_inference.engines.stream.cpu_plan import CpuPlan
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.streams import Timeline

# Consecutive decode passes that are measured, counted from 1; the first one, after a prefill or a change, is left out.
FIRST_PASS, LAST_PASS = 2, 7
MAX_MEASUREMENTS = 2
# The share of a step by which link or CPU must be done before the other, and that the CPU must be busy. Otherwise Python is the
# bottleneck, and more work for the link would not help.
MIN_AHEAD_SHARE, MIN_BUSY_SHARE = 0.03, 0.7


def bytes_to_move(
    plan: CpuPlan, placement: Placement, step_s: float, link_s: float, busy_s: float, link_wait_s: float
) -> int:
    """Return the bytes to move from the CPU to the link so that both end a step together; negative: from the link to the CPU.

    In a step the device computes, waits for the CPU, and waits for the link. Device and CPU alone would take `step_s - link_wait_s`, the
    link alone `link_s`: the link is ahead by the difference. A moved byte reduces it by its time on the link plus its time on the CPU.

    Args:
        link_s: the step's copies at the measured rate: in the first steps the link is also busy filling the ring.
        busy_s: the CPU multiplied.
        link_wait_s: the device waited for blocks, and the CPU was idle.
    """
    rates, link_ahead_s = plan.rates, step_s - link_wait_s - link_s
    if rates is None or abs(link_ahead_s) <= MIN_AHEAD_SHARE * step_s:
        return 0
    if link_ahead_s > 0 and busy_s < MIN_BUSY_SHARE * step_s:
        return 0
    if link_ahead_s < 0 and plan.attends:  # the work of CPU attention grows with each token
        return 0
    link_rate, cpu_rate = rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    planned_s = placement.computed_bytes / cpu_rate + plan.attention_s
    if busy_s and planned_s and not placement.expert_blocks:  # of experts it is unknown which bytes were read
        cpu_rate *= planned_s / busy_s
    return int(link_ahead_s * link_rate * cpu_rate / (link_rate + cpu_rate))


def rebalanced_s(plan: CpuPlan, placement: Placement, link_s: float, compute_s: float) -> tuple[float, float]:
    """Return (link, compute) seconds of a decode step after rebalancing, from those of the planned placement. With CPU attention nothing
    moves."""
    if plan.rates is None or plan.attends or not plan.automatic or not placement.streamed:
        return link_s, compute_s
    link_rate, cpu_rate = plan.rates.link_gb_per_s * 1e9, plan.rates.cores_gb_per_s * 1e9
    busy_s, link_wait_s = placement.computed_bytes / cpu_rate, max(0.0, link_s - compute_s)
    nbytes = bytes_to_move(plan, placement, max(link_s, compute_s), link_s, busy_s, link_wait_s)
    after = placement.rebalanced(nbytes, placement.computable)
    nbytes = placement.nbytes_of(placement.cpu_computed) - placement.nbytes_of(after.cpu_computed)
    return link_s + nbytes / link_rate, compute_s - nbytes / cpu_rate


class Rebalancer:
    """Moves blocks between link and CPU by the times of decode passes `FIRST_PASS` to `LAST_PASS`, at most `MAX_MEASUREMENTS` times.

    Args:
        backend: None where nothing can move.
    """

    def __init__(self, backend: CpuBackend | None, timeline: Timeline):
        self.backend, self.timeline = backend, timeline
        self.passes = self.measurements = 0
        self.done = backend is None or not backend.plan.automatic  # a share given by the user stays
        self.has_decoded = False
        self.start = 0.0, 0.0  # clock and CPU busy time at the first measured pass, seconds
        self.first_pass = 1  # index of that pass in the timeline

    def steps_to_settle(self) -> int:
        """Return the decode steps after a prefill until it may rebalance; 0 if it will not, and before the first decode pass."""
        return 0 if self.done or not self.has_decoded else LAST_PASS

    def next_placement(self, placement: Placement, is_decode: bool, candidates: Collection[int]) -> Placement:
        """Return the placement for the next pass; `candidates` may become CPU-computed."""
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
        streamed_bytes = placement.nbytes_of(placement.streamed)
        if not streamed_bytes:
            return 0  # as planned
        use = self.timeline.link_use(self.first_pass)  # waits for the device
        if use is None or not use.gb_per_s_while_busy:
            return None
        link_wait_s = self.timeline.waited_for_link_s(self.first_pass) / (LAST_PASS - FIRST_PASS)
        link_s = streamed_bytes / (plan.gpus * use.gb_per_s_while_busy * 1e9)
        if not plan.attends and plan.rates is not None:  # keys and values cross the link at the same time
            both_bytes = streamed_bytes + plan.carried_bytes
            link_s = max(link_s, both_bytes / (plan.rates.link_alone_gb_per_s * 1e9))
        return bytes_to_move(plan, placement, step_s, link_s, busy_s, link_wait_s)
