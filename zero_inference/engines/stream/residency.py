"""Where each block of the decoder layers lives and how it is used, decided before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from zero_inference.config.choices import LEAST_RING_DEPTH
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.expert_slots import expert_bytes, share_out, spread
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.errors import DoesNotFit

GIB = 1 << 30
# The copies that wait in the ring have to last while the host ends one token and prepares the next; this is a choice on the
# safe side, to be set by traces (docs/performance.md). 55 GB/s is a PCIe 5 x16 link; a slower one only needs less.
RING_COVERS_S = 0.05
RING_LINK_GB_PER_S = 55.0
USUAL_DEPTH = 3  # or more; down to LEAST_RING_DEPTH where there is less memory


@dataclass
class Residency:
    """Where each block of the decoder layers lives, and how it is used.

    Attributes:
        layouts: of every block.
        resident, in_host_memory: indices of blocks, in order; together all of them.
        computed: those in host memory that the cores multiply in a pass of few tokens; the others are fetched then too.
        few_tokens: of such a pass.
        depth: slots of the ring, 0 if nothing is in host memory.
        outside_bytes: parameters that are in no block, or tied to one that is not; on the device.
        blocks: what each block is; None where that does not matter.
        expert_budget: bytes of device memory for single experts of the blocks that the cores multiply.
    """

    layouts: list[BlockLayout]
    resident: list[int]
    in_host_memory: list[int]
    depth: int
    outside_bytes: int
    blocks: Sequence[Block] | None = None
    computed: frozenset[int] = frozenset()
    few_tokens: int = 1
    expert_budget: int = 0

    @property
    def fetched(self) -> list[int]:
        """Blocks that cross the link in a pass of few tokens."""
        return [block for block in self.in_host_memory if block not in self.computed]

    @property
    def slot_bytes(self) -> int:
        return max((self.layouts[block].nbytes for block in self.in_host_memory), default=0)

    @property
    def workspace_bytes(self) -> int:
        return max(layout.workspace_bytes for layout in self.layouts)

    @property
    def expert_slots(self) -> dict[int, int]:
        """Of each block of experts that the cores multiply: how many of its experts the device keeps; none where there is room for none."""
        blocks = [block for block in self.expert_blocks if block in self.computed]
        numbers = [self.blocks[block].experts.number for block in blocks]
        slots = share_out(numbers, [self.expert_bytes(block) for block in blocks], self.expert_budget)
        return {block: count for block, count in zip(blocks, slots) if count}

    def expert_bytes(self, block: int) -> int:
        """Of one of its experts as it is stored."""
        return expert_bytes(self.layouts[block], self.blocks[block].experts)

    @property
    def expert_slot_bytes(self) -> int:
        return sum(count * self.expert_bytes(block) for block, count in self.expert_slots.items())

    @property
    def resident_bytes(self) -> int:
        """Of blocks and of single experts."""
        return self.nbytes_of(self.resident) + self.expert_slot_bytes

    @property
    def kept_bytes(self) -> int:
        """Device memory that is set apart for them."""
        return self.nbytes_of(self.resident) + self.expert_budget

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks in host memory over all ranks."""
        return sum(self.layouts[block].nbytes for block in self.in_host_memory)

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.layers_of(range(len(self.layouts))))

    def layers_of(self, indices: Iterable[int]) -> set[int]:
        """The layers that these blocks belong to."""
        return {self.blocks[index].layer if self.blocks is not None else index for index in indices}

    @property
    def computed_bytes(self) -> int:
        """Stored bytes that the cores read in a pass of few tokens: of experts, those that it is expected to choose."""
        return round(sum(self.read_bytes(block) for block in self.computed))

    @property
    def computable(self) -> list[int]:
        """Blocks in host memory that the cores could multiply."""
        return [block for block in self.in_host_memory if self.blocks is not None and self.blocks[block].computable]

    @property
    def expert_blocks(self) -> list[int]:
        """Those of them that are experts."""
        return [block for block in self.computable if self.blocks[block].experts is not None]

    def nbytes_of(self, blocks: Iterable[int]) -> int:
        return sum(self.layouts[block].nbytes for block in blocks)

    def read_bytes(self, block: int) -> float:
        """Stored bytes that the cores read of `block` in a pass of few tokens, of experts those that it is expected to choose if none is
        chosen more often than others, and that the device does not keep."""
        stored, experts = self.layouts[block].stored_bytes, None if self.blocks is None else self.blocks[block].experts
        if experts is None:
            return stored
        return stored * experts.share_read(self.few_tokens) * (1 - self.expert_slots.get(block, 0) / experts.number)

    def with_share_computed(self, share: float) -> Residency:
        """The same with `share` of the bytes in host memory multiplied by the cores, as near as whole blocks come to it, spread
        evenly among those that are fetched."""
        return replace(self, computed=frozenset(self._spread_evenly(self.in_host_memory, share)))

    def with_shares_computed(self, of_experts: float, of_others: float) -> Residency:
        """The same, with a share of the bytes of experts, and one of the other blocks'."""
        experts = set(self.expert_blocks)
        others = [block for block in self.in_host_memory if block not in experts]
        chosen = {*self._spread_evenly(self.expert_blocks, of_experts), *self._spread_evenly(others, of_others)}
        return replace(self, computed=frozenset(chosen))

    def with_fewer_computed(self, nbytes: float) -> Residency:
        """The same with about `nbytes` less for the cores, of blocks that are no experts, evenly spaced."""
        others = sorted(self.computed - set(self.expert_blocks))
        dropped = self._spread_evenly(others, nbytes / max(1, self.nbytes_of(others)))
        return replace(self, computed=self.computed - dropped) if dropped else self

    def with_budget_used(self) -> Residency:
        """The same with fetched blocks on the device, evenly spaced, where single experts leave room for them."""
        fetched, left = self.fetched, self.expert_budget - self.expert_slot_bytes
        chosen = {fetched[place] for place in spread([self.layouts[block].nbytes for block in fetched], left)}
        host = [block for block in self.in_host_memory if block not in chosen]
        return replace(
            self,
            resident=sorted({*self.resident, *chosen}),
            in_host_memory=host,
            depth=min(self.depth, len(host)),
            expert_budget=self.expert_budget - self.nbytes_of(chosen),
        )

    def _spread_evenly(self, blocks: Sequence[int], share: float) -> set[int]:
        chosen: set[int] = set()
        wanted = taken = 0.0
        able = set(self.computable)
        for block in blocks:
            size = self.layouts[block].nbytes
            wanted += share * size
            if block in able and taken + size / 2 <= wanted:
                chosen.add(block)
                taken += size
        return chosen

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights as stored, gaps not counted."""
        return self.outside_bytes + sum(layout.stored_bytes for layout in self.layouts)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights, slots and workspace on the device of each rank."""
        return self.outside_bytes + self.resident_bytes + self.workspace_bytes + self.depth * self.slot_bytes


def decide_residency(
    layouts: list[BlockLayout],
    outside_bytes: int,
    free_bytes: int | None,
    gpu_memory_gib: float | None,
    depth: int | None,
    ranks: int = 1,
    blocks: Sequence[Block] | None = None,
) -> Residency:
    """Keep as many layers on the device as the budget holds, spread evenly among those in host memory. Where a mixture's experts are blocks
    of their own, the other blocks come first, and single experts get what is left.

    Args:
        free_bytes: device bytes that are left for layers, ring and workspace; None where nothing limits them (a CPU).
        gpu_memory_gib: budget of what stays; None takes what `free_bytes` leaves beside the ring, or 0 on a CPU.
        depth: slots of the ring; None takes as many as cover `RING_COVERS_S`, or at least `LEAST_RING_DEPTH` where there is less memory.
        ranks: each copies its share of a layer over a link of its own, so a slot covers that much less time.
        blocks: which of them make a layer; None where each is one.

    Raises:
        DoesNotFit: the device does not hold what was asked for, or not two slots of the largest layer.
    """
    left = None if free_bytes is None else max(0, free_bytes - max(layout.workspace_bytes for layout in layouts))

    def plan_for(gib: float | None, slots: int | None) -> Residency:
        return _plan(layouts, outside_bytes, left, gib, slots, ranks, blocks)

    plan = plan_for(gpu_memory_gib, depth)
    if not _fits(plan, left):
        raise DoesNotFit(
            f"{plan.kept_bytes / GIB:.2f} GiB of resident layers and {plan.depth} slots of {plan.slot_bytes / GIB:.2f} GiB do not fit "
            f"into the {left / GIB:.2f} GiB of device memory left for them: {_advice(plan_for, gpu_memory_gib, depth, plan, left)}."
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
        slots = depth or max(LEAST_RING_DEPTH, min(slots, left // largest))
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
    )
    plan.depth = min(slots, len(plan.in_host_memory))
    if left is not None and depth is None and plan.depth > LEAST_RING_DEPTH:
        plan.depth = max(LEAST_RING_DEPTH, min(plan.depth, (left - plan.kept_bytes) // plan.slot_bytes))
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
    """The least change that fits, each tried."""
    for slots in range((depth or LEAST_RING_DEPTH) - 1, LEAST_RING_DEPTH - 1, -1):
        if _fits(plan_for(gib, slots), left):
            return f"use --ring-depth {slots} or less"
    for slots in dict.fromkeys((depth, LEAST_RING_DEPTH)):
        for tenths in range(int(plan.kept_bytes * 10 / GIB), -1, -1):
            if _fits(plan_for(tenths / 10, slots), left):
                return f"use --gpu-memory {tenths / 10:g} or less" + (
                    f" with --ring-depth {slots}" if slots != depth else ""
                )
    return "fewer of them do not fit either; see with --dry-run which other options would"
