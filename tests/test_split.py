"""What goes over the link and what the CPU does, from rates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from zero_inference.engines.stream import rebalance
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.cpu_plan import CpuPlan, Split, best_split
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.rebalance import LAST_PASS, MAX_MEASUREMENTS, Rebalancer, bytes_to_move
from zero_inference.engines.stream.ring import BlockTimes, overlapped_step_s, simulate_passes, slots_in_steps
from zero_inference.hardware.profile import AttentionRates, ConcurrentRates
from zero_inference.models.mlp import Mlp
from zero_inference.records.hardware import LinkUse

GB = 10**9
FORWARD = Mlp(("up_proj",), "down_proj", "relu", False)


def placement(attention: int = GB, mlp: int = 2 * GB, layers: int = 10, computable: bool = True) -> Placement:
    """`layers` layers of two blocks, a feed-forward after attention, all in host memory."""
    linears = ("q_proj", "o_proj") if computable else ()
    layouts = BlockLayout([], attention, attention), BlockLayout([], mlp, mlp)
    attn = [Block(layer, "self_attn", (), linears, layout=layouts[0]) for layer in range(layers)]
    mlps = [
        Block(layer, "mlp", (), linears, FORWARD if computable else None, layout=layouts[1]) for layer in range(layers)
    ]
    blocks = [block for pair in zip(attn, mlps) for block in pair]
    return Placement(blocks, [], list(range(2 * layers)), 3, 0)


def rates(link=50.0, cores=100.0, read=110.0, alone=55.0, hand_off_s=0.0, device=4000.0) -> ConcurrentRates:
    return ConcurrentRates(1, alone, link, cores, cores, read, hand_off_s, device)


def split_of(placement: Placement, rates: ConcurrentRates, kv_bytes: int = 0, can_attend: bool = False) -> Split:
    plan = CpuPlan((-1,), 0.0, 1, rates, can_attend, kv_bytes, link_rests=not placement.host_bytes)
    return best_split(placement, plan)


def test_link_and_cpu_end_together():
    split = split_of(placement(), rates())
    assert split.of_others == pytest.approx(100 / 150) and not split.attends
    assert split.step_s == pytest.approx(30 / 150)
    placed = placement().with_cpu_shares(0, split.of_others)
    assert placed.nbytes_of(placed.cpu_computed) == pytest.approx(20 * GB, abs=GB)


def test_what_the_device_needs_for_itself_is_time_that_the_cpu_loses():
    """C = (U - h B_link) B_cpu / (B_cpu + B_link), as docs/design.md says."""
    split = split_of(placement(), rates(hand_off_s=1e-3))
    assert split.of_others * 30 == pytest.approx((30 - 10e-3 * 50) * 100 / 150), "ten feed-forwards, a meeting for each"
    more = split_of(placement(mlp=GB // 2), rates(hand_off_s=1e-3))
    assert more.of_others * 15 == pytest.approx((15 - 20e-3 * 50) * 100 / 150, rel=0.01), "and two for each attention"


def test_what_the_device_reads_itself_is_time_that_the_cpu_loses():
    half = replace(placement(), resident=list(range(10)), offloaded=list(range(10, 20)))
    split = split_of(half, rates(device=1000.0))
    assert split.of_others * 15 == pytest.approx((15 - 15 / 1000 * 50) * 100 / 150), "15 GB take the device 15 ms"
    assert split.step_s == pytest.approx((1 - split.of_others) * 15 / 50)


@pytest.mark.parametrize("share, attention, forward", [(0.28, 0, 4), (0.6, 0, 9), (0.8, 4, 10), (1.0, 10, 10)])
def test_feed_forwards_come_first(share, attention, forward):
    """There are 20 GB of them, and 10 of attention."""

    def numbers(blocks):
        return sum(block % 2 == 0 for block in blocks), sum(block % 2 for block in blocks)

    placed = placement().with_cpu_shares(0, share)
    assert numbers(placed.cpu_computed) == (attention, forward)
    candidates = range(20)
    fewer = placed.rebalanced(3 * GB, candidates)
    assert numbers(placed.cpu_computed - fewer.cpu_computed) == (min(3, attention), 0 if attention else 2), "go last"
    more = placed.rebalanced(-3 * GB, candidates)
    assert placed.cpu_computed <= more.cpu_computed
    left = 10 - forward
    assert numbers(more.cpu_computed - placed.cpu_computed) == (
        min(10 - attention, 3 - 2 * min(1, left)) if left < 2 else 0,
        min(2, left),
    )
    assert placed.rebalanced(-3 * GB, ()) is placed and placed.rebalanced(0, candidates) is placed


@pytest.mark.parametrize(
    "slow", [rates(cores=2.0), rates(link=20.0, cores=36.0), rates(hand_off_s=0.1)], ids=["few", "shared", "crossings"]
)
def test_a_cpu_that_hardly_helps_stay_out(slow):
    """Few of them, memory that link and CPU take from each other, or meetings that cost more than they bring."""
    split = split_of(placement(), slow)
    assert split.of_others == split.of_experts == 0 and not split.attends
    assert split.step_s == pytest.approx(30 / 55)


def test_keys_and_values_are_attended_where_that_is_faster():
    split = split_of(placement(), rates(), 30 * GB, True)
    assert split.attends  # 30 GB of each: the link has one of them to carry, and the CPU the other
    assert split.step_s == pytest.approx(max(30 / 50 * (1 - split.of_others), 30 / 110 + 30 * split.of_others / 100))
    carried = split_of(placement(), rates(), 30 * GB, False)
    assert not carried.attends and carried.step_s > split.step_s
    slow = split_of(placement(), rates(cores=100.0, read=20.0), 30 * GB, True)
    assert not slow.attends and slow.of_others > 0


def test_keys_and_values_alone():
    """All weights on the device: the CPU attends, or the link carries."""
    nothing = Placement([Block(0, "", (), layout=BlockLayout([], GB, GB))], [0], [], 0, 0)
    assert split_of(nothing, rates(), 10 * GB, True).attends
    assert not split_of(nothing, rates(read=20.0), 10 * GB, True).attends
    slower = replace(rates(), attended=AttentionRates(beside_link_gb_per_s=20.0, alone_gb_per_s=100.0))
    alone = split_of(nothing, slower, 10 * GB, True)
    assert alone.attends and alone.step_s == pytest.approx(0.1 + 1 / 4000), "nothing else crosses the link"
    assert split_of(placement(), rates(), 10 * GB, True).attends
    assert not split_of(placement(), slower, 10 * GB, True).attends, "beside weights it takes five times as long"


@pytest.mark.parametrize(
    "step, moved",
    [
        ((0.2, 0.14, 0.16, 0.0), 2 * GB),  # the link is 0.06 s ahead: 2 GB take it 0.04 s, the CPU 0.02
        ((0.2, 0.14, 0.16, 0.03), GB),  # but they would be, too, if the device never waited for it
        ((0.2, 0.2, 0.16, 0.03), -GB),
        ((0.2, 0.2, 0.08, 0.03), -1.2 * GB),  # they are twice as fast as was measured
        ((0.2, 0.197, 0.16, 0.001), 0),
        ((0.2, 0.14, 0.06, 0.0), 0),  # Python is late
    ],
)
def test_who_is_done_first_gets_more_of_the_work(step, moved):
    placed = placement(GB // 10, GB // 5, 100).with_cpu_shares(0, 16 / 30)
    plan = CpuPlan((-1,), 16 / 30, 1, rates(), automatic=True)
    found = bytes_to_move(plan, placed, *step)
    assert found == pytest.approx(moved, rel=0.01)
    after = placed.rebalanced(found, range(200))
    nbytes = placed.nbytes_of(placed.cpu_computed) - after.nbytes_of(after.cpu_computed)
    assert nbytes == pytest.approx(moved, abs=GB // 10)


def test_a_cpu_that_attends_gets_no_more_work():
    """Their keys and values are fewer in the first steps than later."""
    placed = fine(16 / 30)
    plan = CpuPlan((-1,), 16 / 30, 1, rates(), attends=True, kv_bytes=GB, automatic=True)
    assert bytes_to_move(plan, placed, 0.2, 0.2, 0.16, 0.03) == 0
    assert bytes_to_move(plan, placed, 0.2, 0.14, 0.16, 0.0) > 0


def test_rates_of_attention():
    plan = CpuPlan((-1,), 16 / 30, 1, rates(), kv_bytes=11 * GB)
    attending = replace(plan, attends=True, rates=replace(rates(), attended=AttentionRates(55.0, 110.0)))
    assert attending.attention_s == pytest.approx(0.2) and plan.attention_s == 0.0
    assert replace(attending, link_rests=True).attention_s == pytest.approx(0.1)
    assert attending.of_step_gb_per_s(0) == pytest.approx(55.0)
    assert attending.of_step_gb_per_s(10 * GB) == pytest.approx(21 / 0.3)
    assert attending.facts(0).attention_gb_per_s == 55.0 and plan.facts(GB).attention_gb_per_s is None


def watched(monkeypatch, plan: CpuPlan, uses, waited_s: float = 0.0, step_s=(0.2,)) -> Rebalancer:
    """Of passes that take `step_s` of one look after the other, and the last one of all further ones, in which the CPU always works;
    `uses` are what is known of the link, time after time."""
    said, looks = iter(uses), {"made": 0, "now": 0.0}

    def now():
        looks["now"] += step_s[min(looks["made"], len(step_s) - 1)]
        return looks["now"]

    def link_use(first):
        looks["made"] += 1
        return next(said)

    monkeypatch.setattr(rebalance, "time", SimpleNamespace(perf_counter=now))
    timeline = SimpleNamespace(
        link_use=link_use, waited_for_link_s=lambda first: waited_s * (LAST_PASS - rebalance.FIRST_PASS), pass_index=7
    )
    backend = SimpleNamespace(plan=plan, pool=SimpleNamespace(busy_s=lambda: looks["now"]))
    return Rebalancer(backend, timeline)


FIFTY = LinkUse(
    steps=4, busy_s=1.0, slot_wait_s=0.0, host_late_s=0.0, step_start_s=0.0, copied_bytes=50 * GB, ahead_bytes=0
)  # GB/s while it is busy
ALL = range(200)
AUTOMATIC = CpuPlan((-1,), 0.8, 1, rates(cores=120.0), automatic=True)  # 24 GB in 0.2 s, as in `watched`


def fine(share: float) -> Placement:
    return placement(GB // 10, GB // 5, 100).with_cpu_shares(0, share)


def test_the_division_is_corrected_by_passes_that_follow_each_other(monkeypatch):
    """With 6 GB the link needs 0.12 s of a step's 0.2."""
    placed = fine(0.8)
    looks = watched(monkeypatch, AUTOMATIC, [None, FIFTY, FIFTY])
    assert looks.steps_to_settle() == 0, "no pass of few tokens yet"
    passes = [True] * (LAST_PASS - 1) + [False]  # of many tokens between them; and after one window nothing is known
    for few in passes + passes + [True] * LAST_PASS + [False] + [True] * (LAST_PASS - 1):
        assert looks.next_placement(placed, few, ALL) is placed
    assert looks.steps_to_settle() == LAST_PASS
    corrected = looks.next_placement(placed, True, ALL)
    moved = placed.nbytes_of(placed.cpu_computed) - corrected.nbytes_of(corrected.cpu_computed)
    assert moved == pytest.approx(0.08 * 50 * 120 / 170 * GB, abs=GB // 10)


def corrected(looks: Rebalancer, placed: Placement) -> list[Placement]:
    """How blocks are placed from look to look, as long as there could be one."""
    found = [placed]
    for _ in range((MAX_MEASUREMENTS + 2) * LAST_PASS):
        after = looks.next_placement(found[-1], True, ALL)
        if after is not found[-1]:
            found.append(after)
    return found


def test_the_division_is_looked_at_again(monkeypatch):
    looks = watched(monkeypatch, AUTOMATIC, [FIFTY] * 9, step_s=(0.2, 0.195, 0.19))
    found = corrected(looks, fine(0.8))
    assert len(found) == 1 + MAX_MEASUREMENTS and looks.steps_to_settle() == 0
    computed = [each.nbytes_of(each.cpu_computed) for each in found]
    assert computed == sorted(computed, reverse=True)


def test_work_goes_to_the_cpu_where_the_device_waits_for_the_link(monkeypatch):
    placed = fine(0.66)
    found = corrected(watched(monkeypatch, AUTOMATIC, [FIFTY] * 9, waited_s=0.05, step_s=(0.21, 0.2, 0.195)), placed)
    assert found[0].cpu_computed < found[1].cpu_computed


@pytest.mark.parametrize(
    "share, automatic, uses",
    [(1.0, True, []), (0.8, False, [FIFTY] * 9), (2 / 3, True, [FIFTY] * 9)],
    ids=["nothing streamed", "share given", "balanced"],
)
def test_a_placement_that_stays(share, automatic, uses, monkeypatch):
    placed = fine(share)
    assert corrected(watched(monkeypatch, replace(AUTOMATIC, automatic=automatic), uses), placed) == [placed]


@pytest.mark.parametrize("attends, gpus, moves", [(False, 1, False), (True, 1, True), (False, 2, True)])
def test_what_else_the_link_carries_is_no_time_to_spare(monkeypatch, attends, gpus, moves):
    """Keys and values of 5 GB, unless the CPU attends; and the links of two GPUs carry twice as much as one."""
    alone = rates(alone=55.0 * gpus)
    plan = CpuPlan((-1,), 0.8, 1, alone, attends, 5 * GB, automatic=True, gpus=gpus)
    found = corrected(watched(monkeypatch, plan, [FIFTY] * 9), fine(0.8))
    assert (len(found) > 1) == moves


# What copies and the other work of a decode step wait for each other

MS = 1e-3


def blocks(*times: tuple[float | None, float]) -> list[BlockTimes]:
    return [BlockTimes(copy_s, work_s) for copy_s, work_s in times]


def test_the_longer_of_both_where_blocks_are_alike():
    few = blocks(*[(2.0, 1.0)] * 10)
    assert simulate_passes(few, [3], False) == pytest.approx(20.0), "the link is never idle"
    assert simulate_passes(blocks(*[(1.0, 2.0)] * 10), [3], False) == pytest.approx(20.0), "blocks wait in the ring"
    assert simulate_passes(blocks(*[(None, 2.0)] * 10), [3], False) == pytest.approx(20.0)


def test_one_slot_lets_nothing_run_beside_anything():
    assert simulate_passes(blocks(*[(2.0, 1.0)] * 4), [1], False) == pytest.approx(12.0)


def test_a_large_block_comes_late_where_its_slot_is_free_too_late():
    """Nine small blocks and one that takes the link 8 s: with two slots it is sent for when the block before it is all that is left of
    the others, 3 s before it is needed; with ten there is time for all."""
    some = blocks(*[(0.5, 3.0)] * 9, (8.0, 3.0))
    link_s, work_s = 12.5, 30.0
    assert simulate_passes(some, [2], False) == pytest.approx(work_s + 8.0 - 3.0) and link_s < work_s
    assert simulate_passes(some, [10], False) == pytest.approx(work_s)


def test_blocks_with_places_wait_for_their_own_slot():
    """Of five blocks in two slots the first one's slot is that of the last one of the pass before."""
    some = blocks(*[(2.0, 1.0)] * 5)
    assert simulate_passes(some, [2], False) == pytest.approx(10.0)
    assert simulate_passes(some, [2], True) == pytest.approx(11.0), (
        "block 5 of 5 is computed before block 1 is sent for"
    )


def placed(sizes: list[int], computed: set[int], depth: int) -> Placement:
    layouts = [BlockLayout(nbytes=size, stored_bytes=size) for size in sizes]
    blocks = [Block(index, "", (), layout=layout) for index, layout in enumerate(layouts)]
    host = list(range(len(sizes)))
    return Placement(blocks, [], host, depth, 0, cpu_computed=frozenset(computed))


def test_the_blocks_of_a_plan_take_their_parts_of_the_time():
    found = placed([100, 300] * 4, {1, 3, 5}, depth=8)
    cpu_s = {1: 6 * MS, 3: 6 * MS, 5: 6 * MS}
    assert overlapped_step_s(found, cpu_s, 10 * MS, 26 * MS) == pytest.approx(26 * MS)
    tight = placed([100, 300] * 4, {1, 3, 5}, depth=2)
    late = overlapped_step_s(tight, cpu_s, 20 * MS, 26 * MS)
    assert 26 * MS < late < 46 * MS, "7 of 8 parts wait for what takes the link 8.6 ms"
    assert overlapped_step_s(found, {}, 0.0, 5.0) == 5.0 and overlapped_step_s(found, {}, 5.0, 0.0) == 5.0
    nothing = placed([100] * 4, {0, 1, 2, 3}, depth=4)
    assert overlapped_step_s(nothing, {}, 3.0, 4.0) == 4.0


def test_slots_that_steps_go_round_in():
    found = placed([100] * 10, {0, 1, 2}, depth=6)
    assert slots_in_steps(found, 0) == 6
    assert slots_in_steps(replace(found, graphs=True), 0) == 4, "7 blocks fill 4 slots in two rounds, the last but one"
