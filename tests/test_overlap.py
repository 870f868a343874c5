"""What copies and the other work of a decode step wait for each other: by hand, and for a ring of few slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.ring import BlockTimes, overlapped_step_s, simulate_passes, slots_in_steps

MS = 1e-3


def blocks(*times: tuple[float | None, float]) -> list[BlockTimes]:
    return [BlockTimes(copy_s, work_s) for copy_s, work_s in times]


def test_the_longer_of_both_where_blocks_are_alike():
    few = blocks(*[(2.0, 1.0)] * 10)
    assert simulate_passes(few, 3, False) == pytest.approx(20.0), "the link is never idle"
    assert simulate_passes(blocks(*[(1.0, 2.0)] * 10), 3, False) == pytest.approx(20.0), "blocks wait in the ring"
    assert simulate_passes(blocks(*[(None, 2.0)] * 10), 3, False) == pytest.approx(20.0)


def test_one_slot_lets_nothing_run_beside_anything():
    assert simulate_passes(blocks(*[(2.0, 1.0)] * 4), 1, False) == pytest.approx(12.0)


def test_a_large_block_comes_late_where_its_slot_is_free_too_late():
    """Nine small blocks and one that takes the link 8 s: with two slots it is sent for when the block before it is all that is left of
    the others, 3 s before it is needed; with ten there is time for all."""
    some = blocks(*[(0.5, 3.0)] * 9, (8.0, 3.0))
    link_s, work_s = 12.5, 30.0
    assert simulate_passes(some, 2, False) == pytest.approx(work_s + 8.0 - 3.0) and link_s < work_s
    assert simulate_passes(some, 10, False) == pytest.approx(work_s)


def test_blocks_with_places_wait_for_their_own_slot():
    """Of five blocks in two slots the first one's slot is that of the last one of the pass before."""
    some = blocks(*[(2.0, 1.0)] * 5)
    assert simulate_passes(some, 2, False) == pytest.approx(10.0)
    assert simulate_passes(some, 2, True) == pytest.approx(11.0), "block 5 of 5 is computed before block 1 is sent for"


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
    assert slots_in_steps(found) == 6
    assert slots_in_steps(replace(found, graphs=True)) == 4, "7 blocks fill 4 slots in two rounds, the last but one"
