"""The division between link and cores, corrected once by what the first decode steps show: by what the link waited for, or, where it is
Python that both wait for, to one in which nothing is fetched, so that a step can be one CUDA graph (step_graph.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zero_inference.engines.stream.core_team import CoreTeam
from zero_inference.engines.stream.cores import CoresPlan
from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.split import LEAST_GAIN, cores_s
from zero_inference.engines.stream.timeline import Timeline
from zero_inference.records.limit import LinkUse

FIRST_PASS, LAST_PASS = (
    3,
    10,
)  # of few tokens one behind the other, counted from 1: the very first have copies that are there already
# Of the time, that cores are busy in steps that wait for them: the rest is the device's own. With less Python is late, and more work
# for the link would not help.
LEAST_BUSY_SHARE = 0.7
UNKNOWN = -1
COMPARED_STEPS = 8  # of a placement on trial with those before
MOST_LINK_SHARE = 0.97  # of the time, that the link is busy where there is something to gain


@dataclass(frozen=True)
class Fetching:
    """How decode steps were that fetched what the cores multiply now.

    Attributes:
        residency: their placement.
        step_s: what one took, from its beginning to that of the next.
    """

    residency: Residency
    step_s: float


class Balance:
    """Looks at passes `FIRST_PASS` to `LAST_PASS` that follow each other, in the first generation that has as many. Of several ranks, whose
    passes are alike, the first one looks for all.

    Args:
        team: None where there is nothing to divide.
        nothing_fetched: a placement in which the cores multiply all that is fetched, too; None where there is no such one.

    Attributes:
        before: set where that placement is on trial, until it is known whether it is faster.
    """

    def __init__(self, team: CoreTeam | None, timeline: Timeline, nothing_fetched: Residency | None = None):
        self.team, self.timeline, self.nothing_fetched = team, timeline, nothing_fetched
        self.passes, self.done = 0, False
        self.start = 0.0, 0.0
        self.before: Fetching | None = None
        self.goes_back = False
        self.beginnings: list[float] = []  # of steps on trial, one behind the other

    @property
    def may_stop_fetching(self) -> bool:
        """Whether a pass to come may be the first one that fetches nothing."""
        return self.nothing_fetched is not None and not self.done

    def slower_than_before(self) -> float | None:
        """A step on trial begins. The mean seconds of `COMPARED_STEPS` of them, where that is no less than before; where it
        is less, the trial has ended."""
        if self.before is None:
            return None
        self.beginnings.append(time.perf_counter())
        if len(self.beginnings) <= COMPARED_STEPS:
            return None
        step_s = (self.beginnings[-1] - self.beginnings[0]) / COMPARED_STEPS
        if step_s >= self.before.step_s:
            return step_s
        self.before = None
        return None

    def go_back(self) -> None:
        """From the next pass on the placement before holds, if another one is on trial."""
        self.goes_back = self.before is not None

    def of(self, residency: Residency, few: bool) -> Residency:
        """The placement for the pass that begins, which is of few tokens or not."""
        if self.goes_back and self.before is not None:
            residency, self.before, self.goes_back = self.before.residency, None, False
            return residency
        if not few:
            self.beginnings.clear()
        if self.done or not few or self.team is None:
            self.passes = 0
            return residency
        self.passes += 1
        now = time.perf_counter(), self.team.cores.busy_s()
        if self.passes == FIRST_PASS:
            self.start = now
        if self.passes != LAST_PASS:
            return residency
        use = self.timeline.link_use()  # waits for the device, once in a run
        passed_s, busy_s = (after - before for after, before in zip(now, self.start))
        step_s = passed_s / (LAST_PASS - FIRST_PASS)
        if self.nothing_fetched is not None and step_s >= LEAST_GAIN * cores_s(
            self.nothing_fetched, self.team.plan.rates
        ):
            self.done, self.before = True, Fetching(residency, step_s)
            return self.nothing_fetched
        surplus = UNKNOWN if use is None else surplus_bytes(self.team.plan, use, busy_s / passed_s)
        surplus = self.team.of_first_rank(surplus)
        self.done = surplus != UNKNOWN
        return residency.with_fewer_computed(surplus) if surplus > 0 else residency


def surplus_bytes(plan: CoresPlan, use: LinkUse, busy_share: float) -> int:
    """The plan does not know how long the device computes for itself. Where the cores are late by that, the link has waited for them, and
    gets so much of their work that both end together; no share that was asked for is changed.

    Args:
        use: what the link did in some decode steps; of several, which end together, one is as good as another.
        busy_share: of their time, that the cores were at work.
    """
    rates = plan.rates
    if rates is None or not plan.automatic or busy_share < LEAST_BUSY_SHARE or use.busy_share > MOST_LINK_SHARE:
        return 0
    idle_s = (use.slot_wait_s + use.host_late_s + use.step_start_s) / use.steps
    link, cores = rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    return int(idle_s * link * cores / (link + cores))
