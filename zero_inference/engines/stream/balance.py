"""The division between link and cores, corrected once by what the first decode steps show."""

from __future__ import annotations

import time

from zero_inference.engines.stream.core_team import CoreTeam
from zero_inference.engines.stream.cores import CoresPlan
from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.timeline import Timeline

# Of few tokens one behind the other, counted from 1: the first one follows a prefill, or a trial.
FIRST_PASS, LAST_PASS = 2, 7
# Of a step, that the cores must be busy. Where they are less, Python is the bottleneck, and more work for the link would not help.
LEAST_BUSY_SHARE = 0.7
UNKNOWN = -1
MOST_LINK_SHARE = 0.97  # of a step: where the link needs more of it for its copies, there is nothing to gain


class Balance:
    """Looks at passes `FIRST_PASS` to `LAST_PASS` that follow each other, in the first generation that has as many. Of several ranks, whose
    passes are alike, the first one looks for all.

    Args:
        team: None where there is nothing to divide.
    """

    def __init__(self, team: CoreTeam | None, timeline: Timeline):
        self.team, self.timeline = team, timeline
        self.passes, self.done = 0, False
        self.start = 0.0, 0.0
        self.first = 1  # call of the model that is looked at

    def begin_again(self) -> None:
        """Passes so far are not like those to come."""
        self.passes = 0

    def of(self, residency: Residency, few: bool) -> Residency:
        """The placement for the pass that begins, which is of few tokens or not."""
        if self.done or not few or self.team is None:
            self.passes = 0
            return residency
        self.passes += 1
        now = time.perf_counter(), self.team.cores.busy_s()
        if self.passes == FIRST_PASS:
            self.start, self.first = now, self.timeline.forward
        if self.passes != LAST_PASS:
            return residency
        use = self.timeline.link_use(self.first)  # waits for the device, once in a run
        passed_s, busy_s = (after - before for after, before in zip(now, self.start))
        plan, surplus = self.team.plan, UNKNOWN
        if use is not None and use.gb_per_s_while_busy:
            link_s = link_s_of_step(plan, residency, use.gb_per_s_while_busy)
            surplus = surplus_bytes(plan, passed_s / (LAST_PASS - FIRST_PASS), link_s, busy_s / passed_s)
        surplus = self.team.of_first_rank(surplus)
        self.done = surplus != UNKNOWN
        return residency.with_fewer_computed(surplus) if surplus > 0 else residency


def link_s_of_step(plan: CoresPlan, residency: Residency, gb_per_s: float) -> float:
    """Seconds of the link in a decode step: for the weights at the rate of a rank's own copies of them, `gb_per_s`, or for weights and the
    keys and values that cross it at the rate of a link alone. These are copied beside each other, which lowers the former rate."""
    weights = residency.nbytes_of(residency.fetched)
    weights_s = weights / (plan.ranks * gb_per_s * 1e9)
    if plan.attends or plan.rates is None:
        return weights_s
    return max(weights_s, (weights + plan.kv_bytes) / (plan.rates.link_alone_gb_per_s * 1e9))


def surplus_bytes(plan: CoresPlan, step_s: float, link_s: float, busy_share: float) -> int:
    """The plan does not know how long the device computes for itself. Where the cores are late by that, the link waits for them, and
    gets so much of their work that both end together; no share that was asked for is changed.

    Args:
        step_s: what some decode steps took, each.
        link_s: what the link needs for the copies of one. Its busy time is no measure: in the first steps it also fills the ring.
        busy_share: of their time, that the cores were at work.
    """
    rates = plan.rates
    if rates is None or not plan.automatic or busy_share < LEAST_BUSY_SHARE or link_s > MOST_LINK_SHARE * step_s:
        return 0
    idle_s = step_s - link_s
    link, cores = rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    return int(idle_s * link * cores / (link + cores))
