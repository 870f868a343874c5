"""Which blocks of the decoder layers stay on the device, decided before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.expert_slots import spread
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.residency import Residency
from zero_inference.errors import DoesNotFit
from zero_inference.utils.format import format_bytes

GIB = 1 << 30
# The copies that wait in the ring have to last while the host ends one token and prepares the next; this is a choice on the
# safe side, to be set by traces (docs/performance.md). 55 GB/s is a PCIe 5 x16 link; a slower one only needs less.
RING_COVERS_S = 0.05
RING_LINK_GB_PER_S = 55.0
USUAL_DEPTH = 3  # or more; down to LEAST_RING_DEPTH where there is less memory


def decide_residency(
    layouts: list[BlockLayout],
    outside_bytes: int,
    free_bytes: int | None,
    gpu_memory_gib: float | None,
    depth: int | None,
    ranks: int = 1,
    blocks: Sequence[Block] | None = None,
    others: str = "",
) -> Residency:
    """Keep as many layers on the device as the budget holds, spread evenly among those in host memory. Where a mixture's experts are blocks
    of their own, the other blocks come first, and single experts get what is left.

    Args:
        free_bytes: device bytes that are left for layers, ring and workspace; None where nothing limits them (a CPU).
        gpu_memory_gib: budget of what stays; None takes what `free_bytes` leaves beside the ring, or 0 on a CPU.
        depth: slots of the ring; None takes as many as cover `RING_COVERS_S`, or at least `MIN_RING_DEPTH` where there is less memory.
        ranks: each copies its share of a layer over a link of its own, so a slot covers that much less time.
        blocks: which of them make a layer; None where each is one.
        others: what takes the rest of the device memory, for the error.

    Raises:
        DoesNotFit: the device does not hold what was asked for, or not two slots of the largest layer.
    """
    left = None if free_bytes is None else max(0, free_bytes - max(layout.workspace_bytes for layout in layouts))

    def plan_for(gib: float | None, slots: int | None) -> Residency:
        return _plan(layouts, outside_bytes, left, gib, slots, ranks, blocks)

    plan = plan_for(gpu_memory_gib, depth)
    if not _fits(plan, left):
        resident = [f"{format_bytes(plan.kept_bytes)} of resident layers"] if plan.kept_bytes else []
        ring = [f"{plan.depth} ring slots of {format_bytes(plan.slot_bytes)} each"] if plan.depth else []
        raise DoesNotFit(
            f"{' and '.join(resident + ring)} do not fit into the {format_bytes(left)} of device memory left for them{others}"
            f"{_advice(plan_for, gpu_memory_gib, depth, plan, left)}."
        )
    return plan


def _plan(
    layouts: list[BlockLayout],
    outside_bytes: int,
    left: int | None,
    gib: float | None,
    depth: int | None,
    ranks: int,
    blocks: Sequence[Block] | None,
) -> Residency:
    largest = max(layout.nbytes for layout in layouts)
    total = sum(layout.nbytes for layout in layouts)
    usual = total / len(layouts)  # blocks of a layer differ, and those that are fetched may be the small ones
    slots = depth or max(USUAL_DEPTH, 1 + math.ceil(RING_COVERS_S * RING_LINK_GB_PER_S * 1e9 * ranks / usual))
    if gib is not None:
        budget = int(gib * GIB)
    elif left is None:
        budget = 0
    elif left >= total:
        budget = total
    else:
        slots = depth or max(MIN_RING_DEPTH, min(slots, left // largest))
        budget = left - slots * largest
    members = _layers(layouts, blocks)
    apart = ranks == 1 and budget < total and any(block.experts is not None for block in blocks or ())
    if apart:
        members = [others for layer in members if (others := [b for b in layer if blocks[b].experts is None])]
    chosen = {
        block
        for layer in spread([sum(layouts[b].nbytes for b in layer) for layer in members], budget)
        for block in members[layer]
    }
    plan = Residency(
        layouts,
        sorted(chosen),
        [index for index in range(len(layouts)) if index not in chosen],
        0,
        outside_bytes,
        blocks,
        expert_budget=max(0, budget - sum(layouts[b].nbytes for b in chosen)) if apart else 0,
        free_bytes=None if left is None else left + max(layout.workspace_bytes for layout in layouts),
    )
    plan.depth = min(slots, len(plan.in_host_memory))
    if left is not None and depth is None and plan.depth > MIN_RING_DEPTH:
        plan.depth = max(MIN_RING_DEPTH, min(plan.depth, (left - plan.kept_bytes) // plan.slot_bytes))
    return plan


def _layers(layouts: list[BlockLayout], blocks: Sequence[Block] | None) -> list[list[int]]:
    """Indices of the blocks of each layer."""
    if blocks is None:
        return [[index] for index in range(len(layouts))]
    members: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block.layer, []).append(index)
    return list(members.values())


def _fits(plan: Residency, left: int | None) -> bool:
    return left is None or plan.kept_bytes + plan.depth * plan.slot_bytes <= left


def _advice(
    plan_for: Callable[[float | None, int | None], Residency],
    gib: float | None,
    depth: int | None,
    plan: Residency,
    left: int,
) -> str:
    """The least change that fits, each tried; nothing where none of these is enough."""
    for slots in range((depth or MIN_RING_DEPTH) - 1, MIN_RING_DEPTH - 1, -1):
        if _fits(plan_for(gib, slots), left):
            return f"; use --ring-depth {slots} or less"
    for slots in dict.fromkeys((depth, MIN_RING_DEPTH)):
        for tenths in range(int(plan.kept_bytes * 10 / GIB), -1, -1):
            if _fits(plan_for(tenths / 10, slots), left):
                return f"; use --gpu-memory {tenths / 10:g} or less" + (
                    f" with --ring-depth {slots}" if slots != depth else ""
                )
    return ""
