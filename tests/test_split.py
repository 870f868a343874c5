"""What goes over the link and what the cores do, from rates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from zero_inference.engines.stream import balance
from zero_inference.engines.stream.balance import LAST_PASS, Balance, surplus_bytes
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.cores import CoresPlan
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.split import best_split
from zero_inference.link.cores import BesideLink
from zero_inference.link.cores_of_host import LinkRates, of_all_ranks
from zero_inference.models.feed_forward import FeedForward
from zero_inference.records.limit import LinkUse

GB = 10**9
FORWARD = FeedForward(("up_proj",), "down_proj", "relu", False)


def residency(attention: int = GB, mlp: int = 2 * GB, layers: int = 10, computable: bool = True) -> Residency:
    """`layers` layers of two blocks, a feed-forward behind attention, all in host memory."""
    linears = ("q_proj", "o_proj") if computable else ()
    blocks = []
    for layer in range(layers):
        blocks += [
            Block(layer, "self_attn", (), linears),
            Block(layer, "mlp", (), linears, FORWARD if computable else None),
        ]
    layouts = [BlockLayout([], size, size) for _ in range(layers) for size in (attention, mlp)]
    return Residency(layouts, [], list(range(2 * layers)), 3, 0, blocks)


def rates(link=50.0, cores=100.0, read=110.0, alone=55.0, crossing_s=0.0, device=4000.0) -> BesideLink:
    return BesideLink(1, alone, link, cores, cores, read, crossing_s, device)


def test_link_and_cores_end_together():
    split = best_split(residency(), rates(), 0, False)
    assert split.of_others == pytest.approx(100 / 150) and not split.attends
    assert split.step_s == pytest.approx(30 / 150)
    placed = residency().with_shares_computed(0, split.of_others)
    assert placed.nbytes_of(placed.computed) == pytest.approx(20 * GB, abs=GB)


def test_what_the_device_needs_for_itself_is_time_that_the_cores_lose():
    """C = (U - h B_link) B_cores / (B_cores + B_link), as docs/design.md says."""
    split = best_split(residency(), rates(crossing_s=1e-3), 0, False)
    assert split.of_others * 30 == pytest.approx((30 - 10e-3 * 50) * 100 / 150), "ten feed-forwards, a meeting for each"
    more = best_split(residency(mlp=GB // 2), rates(crossing_s=1e-3), 0, False)
    assert more.of_others * 15 == pytest.approx((15 - 20e-3 * 50) * 100 / 150, rel=0.01), "and two for each attention"


def test_what_the_device_reads_itself_is_time_that_the_cores_lose():
    half = replace(residency(), resident=list(range(10)), in_host_memory=list(range(10, 20)))
    split = best_split(half, rates(device=1000.0), 0, False)
    assert split.of_others * 15 == pytest.approx((15 - 15 / 1000 * 50) * 100 / 150), "15 GB take the device 15 ms"
    assert split.step_s == pytest.approx((1 - split.of_others) * 15 / 50)


@pytest.mark.parametrize("share, attention, forward", [(0.28, 0, 4), (0.6, 0, 9), (0.8, 4, 10), (1.0, 10, 10)])
def test_feed_forwards_come_first(share, attention, forward):
    """There are 20 GB of them, and 10 of attention."""

    def numbers(blocks):
        return sum(block % 2 == 0 for block in blocks), sum(block % 2 for block in blocks)

    placed = residency().with_shares_computed(0, share)
    assert numbers(placed.computed) == (attention, forward) and placed.meetings == 2 * attention + forward
    fewer = placed.with_fewer_computed(3 * GB)
    assert numbers(placed.computed - fewer.computed) == (min(3, attention), 0 if attention else 2), "and go last"


@pytest.mark.parametrize(
    "slow", [rates(cores=2.0), rates(link=20.0, cores=36.0), rates(crossing_s=0.1)], ids=["few", "shared", "crossings"]
)
def test_cores_that_hardly_help_stay_out(slow):
    """Few of them, memory that link and cores take from each other, or meetings that cost more than they bring."""
    split = best_split(residency(), slow, 0, False)
    assert split.of_others == split.of_experts == 0 and not split.attends
    assert split.step_s == pytest.approx(30 / 55)


def test_nothing_that_they_could_multiply():
    assert best_split(residency(computable=False), rates(), 0, False).of_others == 0


def test_keys_and_values_are_attended_where_that_is_faster():
    split = best_split(residency(), rates(), 30 * GB, True)
    assert split.attends  # 30 GB of each: the link has one of them to carry, and the cores the other
    assert split.step_s == pytest.approx(max(30 / 50 * (1 - split.of_others), 30 / 110 + 30 * split.of_others / 100))
    carried = best_split(residency(), rates(), 30 * GB, False)
    assert not carried.attends and carried.step_s > split.step_s
    slow = best_split(residency(), rates(cores=100.0, read=20.0), 30 * GB, True)
    assert not slow.attends and slow.of_others > 0


def test_links_of_several_ranks_are_as_many_times_the_slowest():
    found = of_all_ranks(rates(), [LinkRates(55.0, 40.0), LinkRates(54.0, 48.0), LinkRates(56.0, 50.0)])
    assert (found.link_alone_gb_per_s, found.link_gb_per_s) == (162.0, 120.0)
    assert (
        replace(found, link_alone_gb_per_s=rates().link_alone_gb_per_s, link_gb_per_s=rates().link_gb_per_s) == rates()
    )
    fewer = best_split(residency(), found, 0, False)
    assert 0 < fewer.of_others < best_split(residency(), rates(), 0, False).of_others, "there is more of the link"


def test_keys_and_values_alone():
    """All weights on the device: the cores attend, or the link carries."""
    nothing = Residency([BlockLayout([], GB, GB)], [0], [], 0, 0, [Block(0, "", ())])
    assert best_split(nothing, rates(), 10 * GB, True).attends
    assert not best_split(nothing, rates(read=20.0), 10 * GB, True).attends


def test_what_the_link_waited_is_work_that_it_gets():
    placed = residency().with_shares_computed(0, 0.8)
    before = placed.nbytes_of(placed.computed)
    # in a step of 0.2 s the link is idle for 0.06: 2 GB of the cores' 24 take it 0.04 s, and them 0.02
    for automatic, busy_share, moved in ((True, 0.9, 2 * GB), (True, 0.3, 0), (False, 0.9, 0)):
        plan = CoresPlan((-1,), 0.8, 1, rates(), automatic=automatic)
        surplus = surplus_bytes(plan, 0.2, 0.14, busy_share)
        after = placed.with_fewer_computed(surplus)
        assert after.computed <= placed.computed and bool(surplus) == bool(moved)
        assert before - after.nbytes_of(after.computed) == pytest.approx(moved, abs=GB)
    plan = CoresPlan((-1,), 0.8, 1, rates(), automatic=True)
    assert surplus_bytes(plan, 0.2, 0.2, 1.0) == 0


def watched(monkeypatch, plan: CoresPlan, *uses: LinkUse | None) -> Balance:
    """Of passes that take 0.2 s each, in which the cores always work; `uses` are what is known of the link, time after time."""
    clock, said = itertools.count(step=0.2), iter(uses)
    monkeypatch.setattr(balance, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timeline = SimpleNamespace(link_use=lambda first: next(said), forward=7)
    busy_s = itertools.count(step=0.2).__next__
    return Balance(SimpleNamespace(plan=plan, cores=SimpleNamespace(busy_s=busy_s), of_first_rank=int), timeline)


FIFTY = LinkUse(4, 1.0, 0.0, 0.0, 0.0, 50 * GB, 0)  # GB/s while it is busy


def test_the_division_is_corrected_once_by_passes_that_follow_each_other(monkeypatch):
    """With 6 GB the link needs 0.12 s of a step's 0.2."""
    placed = residency(GB // 10, GB // 5, 100).with_shares_computed(0, 0.8)
    looks = watched(monkeypatch, CoresPlan((-1,), 0.8, 1, rates(), automatic=True), None, FIFTY)
    passes = [True] * (LAST_PASS - 1) + [False]  # of many tokens between them; and behind one window nothing is known
    for few in passes + passes + [True] * LAST_PASS + [False] + [True] * (LAST_PASS - 1):
        assert looks.of(placed, few) is placed
    corrected = looks.of(placed, True)
    moved = placed.nbytes_of(placed.computed) - corrected.nbytes_of(corrected.computed)
    assert moved == pytest.approx(0.08 * 50 * 100 / 150 * GB, abs=GB // 10)
    for _ in range(2 * LAST_PASS):
        assert looks.of(corrected, True) is corrected


@pytest.mark.parametrize("attends, ranks, moves", [(False, 1, False), (True, 1, True), (False, 2, True)])
def test_what_else_the_link_carries_is_no_time_to_spare(monkeypatch, attends, ranks, moves):
    """Keys and values of 5 GB, unless the cores attend; and the links of two ranks carry twice as much as one."""
    placed = residency().with_shares_computed(0, 0.8)
    alone = rates(alone=55.0 * ranks)
    plan = CoresPlan((-1,), 0.8, 1, alone, attends, 5 * GB, automatic=True, ranks=ranks)
    looks = watched(monkeypatch, plan, FIFTY)
    found = [looks.of(placed, True) for _ in range(LAST_PASS)]
    assert (found[-1] is not placed) == moves
