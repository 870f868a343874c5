"""What a machine allows, in numbers: the rate of rounds, the rounds of several measurements, and the bound that a decode has."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from conftest import replace

from zero_inference.hardware.bench_copies import rate_of
from zero_inference.measure.session import LinkMonitor, update_rates
from zero_inference.planning import roofline
from zero_inference.planning.roofline import StepWork
from zero_inference.records.hardware import LinkUse, Rates
from zero_inference.records.schema import MovedPerStep
from zero_inference.utils.ranks import Ranks

CPU = torch.device("cpu")
ONE = Ranks(0, 1, 0, 1, CPU)
RATES = Rates(
    link_gb_per_s=50.0,
    link_spread=0.034,
    link_kind="host to device, pinned",
    device_copy_gb_per_s=2000.0,
    matmul_tflops=500.0,
    disk_gb_per_s=5.0,
)
WORK = StepWork(device_bytes=2 * 10**9, flops=10**12)  # 1 ms and 2 ms a step
MOVED = MovedPerStep(
    host_to_device_bytes_per_step=10**9, device_to_host_bytes_per_step=0, disk_read_bytes_per_step=0
)  # 20 ms a step


class Three(Ranks):
    """A rank whose two peers have what it has."""

    def total(self, value: int) -> int:
        return 3 * value


def limit_of(
    ahead_bytes: int = 0, steps: int = 4, decode_s: float = 0.1, rates: Rates = RATES, moved=MOVED, on_gpu: bool = True
):
    return roofline.decode_roofline(rates, moved, ahead_bytes, WORK, on_gpu, steps, decode_s)


def test_a_rate_is_the_median_of_its_rounds_and_its_spread_leaves_the_outer_tenths_out():
    rounds = [float(number) for number in range(100, 121)]
    assert rate_of(rounds[::-1]) == pytest.approx((110.0, 16.0))  # from 102 to 118
    assert rate_of(rounds + [1.0]).gb_per_s == 109.5, "one slow round hardly moves the median"
    uneven = [55.1, 54.0, 55.3, 21.0, 55.2, 54.9, 55.0]
    assert rate_of(uneven) == pytest.approx((np.median(uneven), np.percentile(uneven, 90) - np.percentile(uneven, 10)))
    assert rate_of([50.0, 50.0]) == (50.0, 0.0)


NOTHING = MovedPerStep.unknown()


def test_the_links_rate_is_that_of_the_rounds_of_all_measurements():
    link = LinkMonitor(ONE)
    link.measure(seconds=0)
    first = list(link.rounds)
    link.measure(seconds=0)
    assert len(first) >= 3 and len(link.rounds) >= len(first) + 3 and link.rounds[: len(first)] == first
    pooled = link.rate()
    assert pooled == pytest.approx(rate_of(link.rounds), abs=2e-6)
    assert pooled.gb_per_s == pytest.approx(statistics.median(link.rounds), abs=2e-6)
    assert update_rates(RATES, link, NOTHING) == replace(
        RATES, link_gb_per_s=pooled.gb_per_s, link_spread=pooled.spread_gb_per_s / pooled.gb_per_s
    )


def after_loops(ranks, busy_s: float, copied_bytes: int, host_late_s: float = 0.0) -> LinkMonitor:
    """Rounds between the loops in which somebody else used the host, and one loop."""
    link = LinkMonitor(ranks)
    link.rounds = [40.0, 40.0, 49.0, 50.0]
    link.uses = [link_use(busy_s, host_late_s=host_late_s, copied_bytes=copied_bytes)]
    return link


def test_a_link_is_as_fast_as_the_loops_own_copies():
    three = Three(0, 1, 0, 1, CPU)
    rounds = update_rates(RATES, after_loops(three, 1.0, 80 * 10**9, host_late_s=0.1), NOTHING)
    assert rounds.link_gb_per_s == pytest.approx(3 * 44.5) and rounds.link_from == "rounds", "not busy all of the time"
    faster = update_rates(RATES, after_loops(three, 2.0, int(110.4e9)), NOTHING)
    assert faster.link_gb_per_s == pytest.approx(3 * 55.2) and faster.link_from == "loops"
    assert faster.link_spread == pytest.approx(9.7 / 55.2)
    assert update_rates(RATES, after_loops(three, 2.0, 88 * 10**9), NOTHING) == rounds


def test_a_disk_is_as_fast_as_between_the_loops_on_average_or_as_in_them():
    link = after_loops(ONE, 1.0, 0)
    found = update_rates(RATES, link, NOTHING, disk_rounds=[5.0, 4.0, 4.5], disk_loops=[4.2, 4.4])
    assert (found.disk_gb_per_s, found.disk_alone_gb_per_s) == (4.5, 4.5)
    found = update_rates(RATES, link, NOTHING, disk_rounds=[5.0, 4.0, 4.5], disk_loops=[4.6, 4.4])
    assert (found.disk_gb_per_s, found.disk_alone_gb_per_s) == (4.6, 4.5)
    found = update_rates(RATES, link, NOTHING, disk_rounds=[None, None], disk_loops=[4.6])
    assert found.disk_alone_gb_per_s is None, "not measurable"


def test_link_and_cores_are_as_fast_as_they_were_in_the_loops():
    """So that no step is faster than its limit: here 3 GB over the link and 4 read by the cores."""
    moved = MovedPerStep(
        host_to_device_bytes_per_step=3 * 10**9,
        device_to_host_bytes_per_step=0,
        disk_read_bytes_per_step=0,
        cores_bytes_per_step=4 * 10**9,
        cores_busy_s_per_step=0.05,
    )
    planned = replace(RATES, link_beside_cores_gb_per_s=48.0, cores_gb_per_s=60.0)
    found = update_rates(planned, after_loops(ONE, 1.0, 53 * 10**9), moved)
    assert (found.link_beside_cores_gb_per_s, found.cores_gb_per_s) == (53.0, 80.0)
    limit = limit_of(rates=found, moved=moved, decode_s=4 * 0.06)
    assert limit.bound_by == "link" and limit.floor_step_s.link_and_cores == pytest.approx(7 / 133)
    of_three = update_rates(planned, after_loops(Three(0, 1, 0, 1, CPU), 1.0, 53 * 10**9), moved)
    assert (of_three.link_beside_cores_gb_per_s, of_three.cores_gb_per_s) == (159.0, 240.0)
    slower = update_rates(planned, after_loops(ONE, 1.0, 0), replace(moved, cores_busy_s_per_step=0.09))
    assert (slower.link_beside_cores_gb_per_s, slower.cores_gb_per_s) == (48.0, 60.0)


class Uses:
    """A timeline of loops whose last one had more copied before its first step, as behind a slow prefill."""

    def __init__(self, *uses):
        self.uses = list(uses)

    def link_use(self):
        self.last = self.uses.pop(0)
        return self.last

    def by_device(self):
        return [self.last]


def test_what_the_link_did_is_the_median_of_the_measured_loops():
    loops = [
        link_use(2.0, copied_bytes=copied, ahead_bytes=ahead)
        for copied, ahead in ((110 * 10**9, 5), (100 * 10**9, 7), (112 * 10**9, 1000))
    ]
    around = LinkMonitor(ONE, timeline=Uses(*loops))
    assert (around.copied_gb_per_s(), around.ahead_bytes()) == (0.0, 0), "nothing was measured yet"
    for _ in range(4):  # before each of three loops and behind the last
        around.between_loops()
    assert around.uses == loops and (around.copied_gb_per_s(0.98), around.ahead_bytes()) == (55.0, 7)
    assert loops[-1].as_dict()["gbps_while_busy"] == 56.0
    short = LinkMonitor(ONE, timeline=Uses(None, None))
    for _ in range(3):
        short.between_loops()
    assert (short.copied_gb_per_s(), short.ahead_bytes(), short.uses, short.peak_gpu_bytes) == (0.0, 0, [], None)


def test_the_link_does_not_owe_what_had_crossed_before_the_first_step():
    assert limit_of().floor_decode_s == pytest.approx(4 * 0.020)
    limit = limit_of(ahead_bytes=15 * 10**8)
    assert limit.floor_decode_s == pytest.approx(4 * 0.020 - 0.030) and limit.link_ahead_bytes == 15 * 10**8
    assert limit.floor_step_s.as_dict() == pytest.approx({"device_memory": 0.001, "matmul": 0.002, "link": 0.020}), (
        "as each step costs"
    )
    assert limit.bound_by == "link" and limit.fraction_of_limit == pytest.approx(0.5)


def test_bounds_that_do_not_apply_are_left_out():
    assert set(limit_of(on_gpu=False).floor_step_s.as_dict()) == {"device_memory", "matmul"}, "a CPU has no link"
    unknown = replace(RATES, device_copy_gb_per_s=None, matmul_tflops=None)
    with_disk = limit_of(rates=unknown, moved=replace(MOVED, disk_read_bytes_per_step=10**9))
    assert (
        with_disk.floor_step_s.as_dict() == pytest.approx({"link": 0.020, "disk": 0.2}) and with_disk.bound_by == "disk"
    )
    nothing_owed = limit_of(ahead_bytes=4 * 10**9, rates=unknown)
    assert [getattr(nothing_owed, key) for key in ("bound_by", "floor_decode_s", "fraction_of_limit")] == [None] * 3


def link_use(busy_s: float, slot_wait_s: float = 0.0, host_late_s: float = 0.0, step_start_s: float = 0.0, **changes):
    given = dict(steps=4, copied_bytes=10**9, ahead_bytes=0) | changes
    return LinkUse(busy_s=busy_s, slot_wait_s=slot_wait_s, host_late_s=host_late_s, step_start_s=step_start_s, **given)
