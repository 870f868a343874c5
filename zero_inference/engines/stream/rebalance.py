"""The division between link and cores, corrected by what the first decode steps show."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from zero_inference.engines.stream.cpu import CpuBackend
from zero_inference.engines.stream.cpu_plan import CpuPlan
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.trace import Timeline

# Of few tokens one behind the other, counted from 1: the first one follows a prefill, a trial or another division.
FIRST_PASS, LAST_PASS = 2, 7
MOST_LOOKS = 2
LEAST_AHEAD = 0.03  # of a step, that link or cores are ahead of the other: less is not worth a change
# Of a step, that the cores must be busy. Where they are less, Python is the bottleneck, and more work for the link would not help.
LEAST_BUSY_SHARE = 0.7


class Rebalancer:
    """Looks at passes `FIRST_PASS` to `LAST_PASS` that follow each other, corrects the division, and looks again.

    Args:
        team: None where there is nothing to divide.
    """

    def __init__(self, team: CpuBackend | None, timeline: Timeline):
        self.team, self.timeline = team, timeline
        self.passes, self.looks = 0, 0
        self.done = team is None or not team.plan.automatic  # a share that was asked for stays
        self.has_few = False  # whether passes of few tokens were seen
        self.start = 0.0, 0.0
        self.first = 1  # call of the model that is looked at

    def begin_again(self) -> None:
        """Passes so far are not like those to come."""
        self.passes = 0

    def steps_to_settle(self) -> int:
        """Decode steps behind a prefill until it has looked once more; 0 where it will not, and before the first of few tokens."""
        return 0 if self.done or not self.has_few else LAST_PASS

    def of(self, placement: Placement, few: bool, candidates: Collection[int]) -> Placement:
        """The placement for the pass that begins, which is of few tokens or not; `candidates` are blocks that may go to the cores."""
        self.has_few |= few
        if self.done or not few or self.team is None:
            self.passes = 0
            return placement
        self.passes += 1
        now = time.perf_counter(), self.team.cores.busy_s()
        if self.passes == FIRST_PASS:
            self.start, self.first = now, self.timeline.pass_index
        if self.passes != LAST_PASS:
            return placement
        step_s, busy_s = ((after - before) / (LAST_PASS - FIRST_PASS) for after, before in zip(now, self.start))
        found = self._look(self.team.plan, placement, step_s, busy_s)
        if found is None:
            return placement
        changed = placement.rebalanced(found, candidates) if found else placement
        self.passes = 0
        self.looks += 1
        self.done = changed is placement or self.looks == MOST_LOOKS
        return changed

    def _look(self, plan: CpuPlan, placement: Placement, step_s: float, busy_s: float) -> int | None:
        """Return `bytes_to_move` of the passes that were looked at; None where nothing crossed the link in them."""
        if not placement.streamed:
            return 0  # the plan had its reasons
        use = self.timeline.link_use(self.first)  # waits for the device
        if use is None or not use.gb_per_s_while_busy:
            return None
        waited_s = self.timeline.waited_for_link_s(self.first) / (LAST_PASS - FIRST_PASS)
        link_s = link_s_of_step(plan, placement, use.gb_per_s_while_busy)
        return bytes_to_move(plan, placement, MeasuredStep(step_s, link_s, busy_s, waited_s))


@dataclass(frozen=True)
class MeasuredStep:
    """A decode step as it was measured, in seconds.

    Attributes:
        whole: what it took.
        link: what the link needs for the copies of one. Its busy time is no measure: in the first steps it also fills the ring.
        cores: time the cores were busy.
        waited: time the device waited for blocks; the cores were idle then.
    """

    whole: float
    link: float
    cores: float
    waited: float


def link_s_of_step(plan: CpuPlan, placement: Placement, gb_per_s: float) -> float:
    """Seconds of the link in a decode step: for the weights at the rate of a rank's own copies of them, `gb_per_s`, or for weights and the
    keys and values that cross it at the rate of a link alone. These are copied beside each other, which lowers the former rate."""
    weights = placement.nbytes_of(placement.streamed)
    weights_s = weights / (plan.ranks * gb_per_s * 1e9)
    if plan.attends or plan.rates is None:
        return weights_s
    return max(weights_s, (weights + plan.carried_bytes) / (plan.rates.link_alone_gb_per_s * 1e9))


def bytes_to_move(plan: CpuPlan, placement: Placement, step: MeasuredStep) -> int:
    """Bytes of the cores' work that the link takes over, so that both end a step together; negative where the cores take over the link's.

    The plan does not know how long the device computes for itself, in which the cores cannot work. A step takes that, the cores' work
    and the time that the device waits for the link. So without that wait the cores would be done `step.waited` earlier, and the link
    could be done `step.whole - step.link` earlier: it is ahead of them by the difference, and each byte that it gets brings both nearer.
    Where the cores attend, their work grows from token to token, and they get no more of it for being ahead in the first steps.
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
