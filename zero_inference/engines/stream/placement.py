"""Where each block of the decoder layers lives and how it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.expert_slots import expert_bytes, expert_memory, share_out, spread
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.vocabulary import EmbeddingTable
from zero_inference.errors import DoesNotFit
from zero_inference.utils.format import format_bytes

# Text uses some experts more than others, and the device keeps those: where it keeps a share s of n, of which a token chooses k,
# (1 - s) ** (1 + 0.1 * sqrt(n / k - 1)) of the choices miss. The root is how much the use of an expert varies if each word has k of
# its own. Measured with tokens drawn as text (h100-mixtures, h100-predicted): Qwen3-30B-A3B hits 67 to 69% with 56% kept (this makes 68),
# 75% with 63% (75), 14 to 16% with 9 and 10% (12, 14); Mixtral 63% with 58% (64).
USE_VARIES = 0.1
# Where the device fetches some of those that miss, and evicts the least used for them, s ** 0.47 of the choices hit. Measured
# (h100-readme): Qwen3-30B-A3B 32% with 9% kept (this makes 32), 78% with 56% (76), gpt-oss-120b 49% with 23% (50). Simulated
# (cpu/expert_reuse.txt): 33, 51 and 75% with 12, 25 and 50% (38, 52, 72).
HITS_OF_KEPT = 0.47
# Least share of a block's experts in slots for which a long pass fetches the others alone: the kernel that does so reads host memory at
# 50 GB/s, a copy engine at 55 (H100).
LEAST_KEPT = 1 / 8


@dataclass(frozen=True)
class CpuCall:
    """What a call of the cores is expected to read: stored bytes, and experts, if these are what it is for."""

    nbytes: float
    experts: float = 0.0


@dataclass
class Placement:
    """Where each block of the decoder layers lives, and how it is used.

    Attributes:
        layouts: of every block.
        resident, in_host_memory: indices of blocks, in order; together all of them.
        cpu_computed: those in host memory that the cores multiply in a pass of few tokens; the others are fetched then too.
        few_tokens: of such a pass.
        prompt_cpu_computed: those that they multiply in the pass of a short prompt; likewise.
        ring_depth: slots of the ring, 0 if nothing is in host memory.
        outside_bytes: parameters that are in no block, or tied to one that is not; on the device.
        blocks: what each block is; None where that does not matter.
        expert_budget: bytes of device memory for single experts of the blocks that the cores multiply.
        quota: by the number of experts of a layer that tokens chose and that the device does not keep, how many of them it fetches
            in a pass of few tokens; the CPU multiplies the others. Empty where it fetches none.
        free_bytes: of the device, for blocks, ring, workspace and fetched experts; None where nothing limits them.
        embedding: the input embedding where it is in host memory; None where it is among `outside_bytes`.
        gathers: whether a kernel may put blocks of experts together in a prefill, from slots and page-locked memory.
    """

    layouts: list[BlockLayout]
    resident: list[int]
    in_host_memory: list[int]
    ring_depth: int
    outside_bytes: int
    blocks: Sequence[Block] | None = None
    cpu_computed: frozenset[int] = frozenset()
    few_tokens: int = 1
    prompt_cpu_computed: frozenset[int] = frozenset()
    expert_budget: int = 0
    quota: tuple[int, ...] = ()
    free_bytes: int | None = None
    embedding: EmbeddingTable | None = None
    gathers: bool = True

    @property
    def streamed(self) -> list[int]:
        """Blocks that cross the link in a pass of few tokens."""
        return [block for block in self.in_host_memory if block not in self.cpu_computed]

    @property
    def slot_bytes(self) -> int:
        return max((self.layouts[block].nbytes for block in self.in_host_memory), default=0)

    @property
    def workspace_bytes(self) -> int:
        return max(layout.workspace_bytes for layout in self.layouts)

    @property
    def expert_slots(self) -> dict[int, int]:
        """Return how many experts the device keeps, by block of experts that the cores multiply: at least as many as it may fetch at
        once, because fetched experts go there. Where the budget is too small for that, some blocks keep none."""
        if not self.expert_budget:
            return {}
        blocks = [block for block in self.expert_blocks if block in self.cpu_computed]
        numbers = [self.blocks[block].experts.number for block in blocks]
        sizes = [self.expert_bytes(block) for block in blocks]
        slots = share_out(numbers, sizes, self.expert_budget)
        least = [min(max(self.quota, default=0), number) for number in numbers]
        if any(count < fewest for count, fewest in zip(slots, least)):
            some = spread([fewest * size for fewest, size in zip(least, sizes)], self.expert_budget)
            slots = [fewest if place in some else 0 for place, fewest in enumerate(least)]
        return {block: count for block, count in zip(blocks, slots) if count}

    def expert_bytes(self, block: int) -> int:
        """Of one of its experts as it is stored."""
        return expert_bytes(self.layouts[block], self.blocks[block].experts)

    @property
    def expert_slot_bytes(self) -> int:
        return sum(count * self.expert_bytes(block) for block, count in self.expert_slots.items())

    @property
    def gathered(self) -> dict[int, int]:
        """Return those of `expert_slots` that are copied from device memory in a pass of many tokens, and do not cross the link."""
        slots = self.expert_slots if self.gathers else {}
        return {
            block: count for block, count in slots.items() if count >= LEAST_KEPT * self.blocks[block].experts.number
        }

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of experts in slots, which a prefill does not fetch."""
        found = self.gathered.items()
        return sum(count * self.expert_bytes(block) for block, count in found if block not in self.prompt_cpu_computed)

    @property
    def staging_bytes(self) -> int:
        """Device memory for experts that are fetched for one pass, which all blocks without slots use in turn."""
        blocks = self.cpu_computed.intersection(self.expert_blocks) - self.expert_slots.keys() if self.quota else ()
        return max(
            (sum(expert_memory(self.layouts[block], self.blocks[block].experts, max(self.quota))) for block in blocks),
            default=0,
        )

    @property
    def fetched_expert_bytes(self) -> float:
        """Stored bytes of experts that cross the link for one pass of few tokens, as `read_bytes` expects."""
        slots = self.expert_slots
        return sum(
            self._fetched(block, self._missed(block, slots), slots) * self.expert_bytes(block)
            for block in self.cpu_computed.intersection(self.expert_blocks)
        )

    @property
    def resident_bytes(self) -> int:
        """Of blocks and of single experts."""
        return self.nbytes_of(self.resident) + self.expert_slot_bytes

    @property
    def reserved_bytes(self) -> int:
        """Device memory that is set apart for them."""
        return self.nbytes_of(self.resident) + self.expert_budget

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks in host memory over all ranks."""
        return sum(self.layouts[block].nbytes for block in self.in_host_memory)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the input embedding in host memory."""
        return 0 if self.embedding is None else self.embedding.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes that each token of a pass reads of the input embedding in host memory."""
        return 0 if self.embedding is None else self.embedding.row_bytes

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
        slots = self.expert_slots
        return round(sum(self.read_bytes(block, slots) for block in self.cpu_computed))

    @property
    def calls(self) -> dict[int, list[CpuCall]]:
        """Of the cores in a pass of few tokens, by block: one for each feed-forward and for a layer's experts, two for attention, whose
        projections are before and behind what the device does. Device and cores meet for each."""
        found, slots = {}, self.expert_slots
        for index in sorted(self.cpu_computed):
            part, nbytes = self.blocks[index], self.read_bytes(index, slots)
            experts = nbytes / self.layouts[index].stored_bytes * part.experts.number if part.experts else 0.0
            calls = 1 if part.feed_forward or part.experts else min(2, len(part.linears))
            found[index] = [CpuCall(nbytes / calls, experts)] * calls
        return found

    @property
    def computable(self) -> list[int]:
        """Blocks in host memory that the cores could multiply."""
        return [block for block in self.in_host_memory if self.blocks is not None and self.blocks[block].computable]

    @property
    def expert_blocks(self) -> list[int]:
        """Those of them that are experts."""
        return [block for block in self.computable if self.blocks[block].experts is not None]

    @property
    def prompt_candidates(self) -> list[int]:
        """Blocks that the cores could multiply in short prompts: experts, of which each gets few tokens; of a model without these
        feed-forwards, and attention's projections only if the cores have some in a pass of few tokens."""
        experts, forwards = self.expert_blocks, [block for block in self.computable if self._feeds_forward(block)]
        return experts or (forwards if self.cpu_computed <= set(forwards) else self.computable)

    def nbytes_of(self, blocks: Iterable[int]) -> int:
        return sum(self.layouts[block].nbytes for block in blocks)

    def read_bytes(self, block: int, slots: Mapping[int, int] | None = None) -> float:
        """Return the stored bytes that the cores read of `block` in a pass of few tokens; of experts, those that it is expected to choose
        and that the device does not keep. `slots` defaults to `expert_slots`."""
        stored, experts = self.layouts[block].stored_bytes, None if self.blocks is None else self.blocks[block].experts
        if experts is None:
            return stored
        slots = self.expert_slots if slots is None else slots
        missed = self._missed(block, slots)
        return stored * (missed - self._fetched(block, missed, slots)) / experts.number

    def _missed(self, block: int, slots: Mapping[int, int]) -> float:
        """Return how many experts of `block` a pass of few tokens is expected to choose that the device does not keep.

        Hit rates were measured with one sequence. Many choose nearly all experts, of which no more hit than there are slots.
        """
        experts, slots_here = self.blocks[block].experts, slots.get(block, 0)
        kept, chosen = slots_here / experts.number, experts.number * experts.share_read(self.few_tokens)
        exponent = 1 + USE_VARIES * (experts.number / max(1, experts.chosen) - 1) ** 0.5
        share = 1 - kept**HITS_OF_KEPT if any(self.quota) else (1 - kept) ** exponent
        return max(chosen * share, chosen - slots_here)

    def _fetched(self, block: int, missed: float, slots: Mapping[int, int]) -> float:
        """Return how many of `missed` experts the device fetches: with slots, no more than those that no token chose."""
        if not self.quota or block not in self.cpu_computed:
            return 0.0
        experts, most = self.blocks[block].experts, missed
        if block in slots:
            most = min(missed, slots[block] - (experts.number * experts.share_read(self.few_tokens) - missed))
        return max(0.0, min(most, self.quota[round(missed)]))

    def with_cpu_share(self, share: float) -> Placement:
        """The same with `share` of the bytes in host memory multiplied by the cores, as near as whole blocks come to it, spread
        evenly among those that are fetched."""
        return replace(self, cpu_computed=frozenset(self._spread_evenly(self.in_host_memory, share)))

    def with_cpu_shares(self, of_experts: float, of_others: float) -> Placement:
        """The same, with a share of the bytes of experts, and one of the other blocks': of feed-forwards first, because for one of those
        device and cores meet once, for attention's projections twice or more."""
        experts = set(self.expert_blocks)
        others = [block for block in self.in_host_memory if block not in experts]
        chosen = {*self._spread_evenly(self.expert_blocks, of_experts), *self._spread_in_turn(others, of_others)}
        return replace(self, cpu_computed=frozenset(chosen))

    def with_prompt_share(self, share: float) -> Placement:
        """Return the same with about `share` of the bytes of `prompt_candidates` multiplied by the cores in short prompts."""
        return replace(self, prompt_cpu_computed=frozenset(self._spread_in_turn(self.prompt_candidates, share)))

    def for_short_prompt(self, tokens: int, keeps: bool) -> Placement:
        """Return the placement in a short prompt, as if it were that in a pass of few tokens.

        Args:
            tokens: of the prompt.
            keeps: whether the device multiplies the experts that it keeps.
        """
        slots = self.expert_slots if keeps else {}
        budget = sum(
            slots.get(block, 0) * self.expert_bytes(block) for block in self.prompt_cpu_computed & slots.keys()
        )
        return replace(self, cpu_computed=self.prompt_cpu_computed, few_tokens=tokens, quota=(), expert_budget=budget)

    def rebalanced(self, nbytes: float, candidates: Collection[int]) -> Placement:
        """The same with about `nbytes` of the cores' work given to the link; if negative, of the link's to the cores. Evenly spaced blocks
        move, no experts. Feed-forwards go to the cores first, and leave them last.

        Args:
            candidates: blocks that may go to the cores.
        """
        to_link, experts = nbytes > 0, set(self.expert_blocks)
        movable = sorted((self.cpu_computed if to_link else set(candidates).intersection(self.streamed)) - experts)
        share = min(1.0, abs(nbytes) / max(1, self.nbytes_of(movable)))
        moved = self._spread_in_turn(movable, share, feed_forwards_last=to_link)
        return replace(self, cpu_computed=self.cpu_computed ^ moved) if moved else self

    def with_quota(self, quota: tuple[int, ...], spare_slots: int | None) -> Placement:
        """Return the same with some missed experts fetched: into slots, or where the budget does not hold enough of these, into memory
        that blocks share, which is taken from the budget and, if that is too little, from ring slots.

        Args:
            spare_slots: of the ring. None: what is kept has a budget of its own, and shared memory takes what the device has beside it.
                Fewer are fetched where either is too little.
        """
        staged = replace(self, quota=quota)
        if spare_slots is not None and staged.staging_bytes > self.expert_budget:
            slots = min(spare_slots, -((self.expert_budget - staged.staging_bytes) // self.slot_bytes))
            staged = replace(
                staged, ring_depth=self.ring_depth - slots, expert_budget=self.expert_budget + slots * self.slot_bytes
            )
        room: float = staged.expert_budget
        if spare_slots is None:
            taken = self.workspace_bytes + self.reserved_bytes + self.ring_depth * self.slot_bytes
            room += math.inf if self.free_bytes is None else max(0, self.free_bytes - taken)
        while staged.staging_bytes > room:
            most = max(staged.quota) - 1
            staged = replace(staged, quota=tuple(min(most, each) for each in quota) if most else ())
        return replace(staged, expert_budget=max(0, staged.expert_budget - staged.staging_bytes))

    def with_budget_used(self) -> Placement:
        """The same with fetched blocks on the device, evenly spaced, where single experts leave room for them."""
        fetched, left = self.streamed, self.expert_budget - self.expert_slot_bytes
        chosen = {fetched[place] for place in spread([self.layouts[block].nbytes for block in fetched], left)}
        host = [block for block in self.in_host_memory if block not in chosen]
        return replace(
            self,
            resident=sorted({*self.resident, *chosen}),
            in_host_memory=host,
            ring_depth=min(self.ring_depth, len(host)),
            expert_budget=self.expert_budget - self.nbytes_of(chosen),
        )

    def _spread_in_turn(self, blocks: Sequence[int], share: float, feed_forwards_last: bool = False) -> set[int]:
        """About `share` of the bytes of `blocks`, of one kind as far as there are any."""
        kinds: list[list[int]] = [[], []]
        for block in blocks:
            kinds[self._feeds_forward(block) is feed_forwards_last].append(block)
        wanted, chosen = share * self.nbytes_of(blocks), set()
        for kind in kinds:
            some = self._spread_evenly(kind, min(1.0, wanted / max(1, self.nbytes_of(kind))))
            wanted = max(0.0, wanted - self.nbytes_of(some))
            chosen |= some
        return chosen

    def _feeds_forward(self, block: int) -> bool:
        return self.blocks is not None and self.blocks[block].feed_forward is not None

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
        return self.outside_bytes + self.embedding_bytes + sum(layout.stored_bytes for layout in self.layouts)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights, slots and workspace on the device of each rank."""
        slots = self.ring_depth * self.slot_bytes + self.staging_bytes
        return self.outside_bytes + self.resident_bytes + self.workspace_bytes + slots


GIB = 1 << 30
# The copies that wait in the ring have to last while the host ends one token and prepares the next; this is a choice on the
# safe side, to be set by traces (docs/performance.md). 55 GB/s is a PCIe 5 x16 link; a slower one only needs less.
RING_COVERED_S = 0.05
RING_LINK_GB_PER_S = 55.0
DEFAULT_RING_DEPTH = 3  # or more; down to LEAST_RING_DEPTH where there is less memory


def plan_placement(
    layouts: list[BlockLayout],
    outside_bytes: int,
    free_bytes: int | None,
    gpu_memory_gib: float | None,
    depth: int | None,
    ranks: int = 1,
    blocks: Sequence[Block] | None = None,
    others: str = "",
) -> Placement:
    """Keep as many layers on the device as the budget holds, spread evenly among those in host memory. Where a mixture's experts are blocks
    of their own, the other blocks come first, and single experts get what is left.

    Args:
        free_bytes: device bytes that are left for layers, ring and workspace; None where nothing limits them (a CPU).
        gpu_memory_gib: budget of what stays; None takes what `free_bytes` leaves beside the ring, or 0 on a CPU.
        depth: slots of the ring; None takes as many as cover `RING_COVERED_S`, or at least `MIN_RING_DEPTH` where there is less memory.
        ranks: each copies its share of a layer over a link of its own, so a slot covers that much less time.
        blocks: which of them make a layer; None where each is one.
        others: what takes the rest of the device memory, for the error.

    Raises:
        DoesNotFit: the device does not hold what was asked for, or not two slots of the largest layer.
    """
    left = None if free_bytes is None else max(0, free_bytes - max(layout.workspace_bytes for layout in layouts))

    def plan_for(gib: float | None, slots: int | None) -> Placement:
        return _plan(layouts, outside_bytes, left, gib, slots, ranks, blocks)

    plan = plan_for(gpu_memory_gib, depth)
    if not _fits(plan, left):
        resident = [f"{format_bytes(plan.reserved_bytes)} of resident layers"] if plan.reserved_bytes else []
        ring = [f"{plan.ring_depth} ring slots of {format_bytes(plan.slot_bytes)} each"] if plan.ring_depth else []
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
) -> Placement:
    largest = max(layout.nbytes for layout in layouts)
    total = sum(layout.nbytes for layout in layouts)
    usual = total / len(layouts)  # blocks of a layer differ, and those that are fetched may be the small ones
    slots = depth or max(DEFAULT_RING_DEPTH, 1 + math.ceil(RING_COVERED_S * RING_LINK_GB_PER_S * 1e9 * ranks / usual))
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
    plan = Placement(
        layouts,
        sorted(chosen),
        [index for index in range(len(layouts)) if index not in chosen],
        0,
        outside_bytes,
        blocks,
        expert_budget=max(0, budget - sum(layouts[b].nbytes for b in chosen)) if apart else 0,
        free_bytes=None if left is None else left + max(layout.workspace_bytes for layout in layouts),
    )
    plan.ring_depth = min(slots, len(plan.in_host_memory))
    if left is not None and depth is None and plan.ring_depth > MIN_RING_DEPTH:
        plan.ring_depth = max(MIN_RING_DEPTH, min(plan.ring_depth, (left - plan.reserved_bytes) // plan.slot_bytes))
    return plan


def _layers(layouts: list[BlockLayout], blocks: Sequence[Block] | None) -> list[list[int]]:
    """Indices of the blocks of each layer."""
    if blocks is None:
        return [[index] for index in range(len(layouts))]
    members: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block.layer, []).append(index)
    return list(members.values())


def _fits(plan: Placement, left: int | None) -> bool:
    return left is None or plan.reserved_bytes + plan.ring_depth * plan.slot_bytes <= left


def _advice(
    plan_for: Callable[[float | None, int | None], Placement],
    gib: float | None,
    depth: int | None,
    plan: Placement,
    left: int,
) -> str:
    """The least change that fits, each tried; nothing where none of these is enough."""
    for slots in range((depth or MIN_RING_DEPTH) - 1, MIN_RING_DEPTH - 1, -1):
        if _fits(plan_for(gib, slots), left):
            return f"; use --ring-depth {slots} or less"
    for slots in dict.fromkeys((depth, MIN_RING_DEPTH)):
        for tenths in range(int(plan.reserved_bytes * 10 / GIB), -1, -1):
            if _fits(plan_for(tenths / 10, slots), left):
                return f"; use --gpu-memory {tenths / 10:g} or less" + (
                    f" with --ring-depth {slots}" if slots != depth else ""
                )
    return ""
