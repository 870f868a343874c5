"""The placement: which device each layer is on, which blocks are resident, streamed or CPU-computed, how many ring slots there are, and how
many experts are cached.

`assign_layers` and `plan_placement` decide by byte budgets before a weight is read; `cpu_plan.plan_cpu` then gives blocks to the CPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.disk import DISK_SLOTS, slot_bytes
from zero_inference.engines.stream.layout import aligned
from zero_inference.engines.stream.vocabulary import EmbeddingTable
from zero_inference.errors import DoesNotFit
from zero_inference.kernels.formats import WeightFormat
from zero_inference.utils.direct_io import aligned_up
from zero_inference.utils.format import format_bytes

GIB = 1 << 30
# Copies of this duration cover the time in which the host ends one token and prepares the next; chosen on the safe side, from traces
# (benchmarks/LOG.md). 55 GB/s is a PCIe 5 x16 link; a slower one needs fewer slots.
RING_COVERED_S = 0.05
RING_LINK_GB_PER_S = 55.0
DEFAULT_RING_DEPTH = 3  # at least; down to MIN_RING_DEPTH where there is less memory

# Text uses some experts more than others, and the expert cache holds those: with a share s of n experts cached, of which a token chooses k,
# (1 - s) ** (1 + 0.1 * sqrt(n / k - 1)) of the choices miss. The root is how much the use of an expert varies if each word has k of
# its own. Measured with tokens drawn as text (h100-mixtures, h100-predicted): Qwen3-30B-A3B hits 67 to 69% with 56% cached (this makes 68),
# 75% with 63% (75), 14 to 16% with 9 and 10% (12, 14); Mixtral 63% with 58% (64).
ROUTING_SKEW = 0.1
# Where the device fetches some of the misses, and evicts the least used experts for them, s ** 0.47 of the choices hit. Measured
# (h100-readme): Qwen3-30B-A3B 32% with 9% cached (this makes 32), 78% with 56% (76), gpt-oss-120b 49% with 23% (50). Longer runs hit more:
# Qwen3 with 9% cached 34% in 64 tokens, 36% in 96 (h100-smaller). Simulated (cpu/expert_reuse.txt): 33, 51 and 75% with 12, 25 and 50%
# (38, 52, 72).
CACHE_HIT_EXPONENT = 0.47
# Least share of a block's experts in the cache for which a long pass fetches the others alone: the kernel that does so reads host memory at
# 50 GB/s, a copy engine at 55 (H100).
MIN_CACHED_SHARE = 1 / 8


@dataclass
class Placement:
    """The placement of every block, named by its index in `blocks`. A decode pass has few tokens, that of a short prompt more; a long pass
    is computed by the devices, which are named by their index in `Job.devices`."""

    blocks: Sequence[Block]
    resident: list[int]  # in order
    offloaded: list[int]  # all others, in order
    ring_depth: int  # slots of the ring buffer of a device, 0 if nothing is offloaded; see `slots_on`
    outside_bytes: int  # parameters that are in no block, on the first device
    layer_devices: Sequence[int] = ()  # the device of each layer; empty: all are on the first one
    on_disk: frozenset[int] = frozenset()  # those of the offloaded blocks that are not in host memory
    host_expert_slots: int = 0  # experts of blocks on disk that host memory caches
    # blocks that the CPU multiplies in a decode pass: in host memory, also in ring slots, or with experts that host memory caches
    cpu_computed: frozenset[int] = frozenset()
    decode_tokens: int = 1  # tokens of a decode pass
    prompt_cpu_computed: frozenset[int] = frozenset()  # the same in the pass of a short prompt
    # by device: bytes of the expert cache, single experts of CPU-computed blocks
    expert_budgets: tuple[int, ...] = (0,)
    quota: tuple[int, ...] = ()  # experts of a layer that a decode pass fetches, by the number of those it misses
    # by device: for blocks, ring, workspace and fetched experts; None: unlimited
    free_bytes: tuple[int | None, ...] = (None,)
    link_shares: tuple[float, ...] = (1.0,)  # by device, of the rate of all links
    embedding: EmbeddingTable | None = None  # the input embedding if it is in host memory
    gathers: bool = True  # a kernel may assemble experts in a prefill from the expert cache and page-locked memory
    format: WeightFormat | None = None  # of most quantized weights; None where all have the model's dtype
    fuses_codes: bool = False  # the device has a kernel for products with these codes
    ring_in_host_memory: bool = False  # without a GPU: the CPU multiplies blocks on disk in the ring's slots
    graphs: bool = False  # decode steps are CUDA graphs, so each block has the same slot in every step

    @property
    def devices(self) -> range:
        return range(len(self.expert_budgets))

    @cached_property
    def block_devices(self) -> list[int]:  # of each block
        return [self.layer_devices[block.layer] if self.layer_devices else 0 for block in self.blocks]

    def device_of(self, block: int) -> int:
        return self.block_devices[block]

    def on(self, device: int, blocks: Iterable[int]) -> list[int]:
        """Return those of `blocks` whose layer is on `device`."""
        if len(self.devices) == 1:  # each decode step asks
            return list(blocks)
        devices = self.block_devices
        return [block for block in blocks if devices[block] == device]

    @property
    def in_host_memory(self) -> list[int]:
        return [block for block in self.offloaded if block not in self.on_disk]

    @property
    def streamed(self) -> list[int]:  # in a decode pass
        never_copied = self.cpu_computed - self.computed_in_slots
        return [block for block in self.offloaded if block not in never_copied]

    @property
    def computed_in_slots(self) -> frozenset[int]:
        """CPU-computed blocks that the ring buffer holds for the time of their computation: without a GPU, those on disk."""
        return (self.cpu_computed & self.on_disk) - self.cached_on_host

    @property
    def computable(self) -> list[int]:
        host = {*self.in_host_memory, *(self.on_disk if self.ring_in_host_memory else self.cached_on_host)}
        return [block for block in self.offloaded if block in host and self.blocks[block].computable]

    @property
    def cached_on_host(self) -> frozenset[int]:
        """Blocks on disk of which host memory caches experts: those of one form, with nothing else in them."""
        return frozenset(_cacheable(self.blocks, self.on_disk)) if self.host_expert_slots else frozenset()

    @property
    def expert_blocks(self) -> list[int]:  # those of the `computable` ones
        return [block for block in self.computable if self.blocks[block].experts is not None]

    @property
    def cpu_experts(self) -> frozenset[int]:  # that the CPU multiplies in a decode pass
        return self.cpu_computed.intersection(self.expert_blocks)

    @property
    def prompt_candidates(self) -> list[int]:
        """Blocks that the CPU could multiply in short prompts: experts; without experts feed-forwards, and also attention's projections
        if the CPU computes some in a decode pass."""
        computable = [block for block in self.computable if block not in self.on_disk]
        experts = [block for block in computable if self.blocks[block].experts is not None]
        feed_forwards = [block for block in computable if self.blocks[block].feed_forward]
        return experts or (feed_forwards if self.cpu_computed <= set(feed_forwards) else computable)

    @property
    def layers(self) -> int:
        return len({block.layer for block in self.blocks})

    @property
    def offloaded_layers(self) -> int:
        return len({self.blocks[block].layer for block in self.offloaded})

    # Bytes

    def nbytes_of(self, blocks: Iterable[int]) -> int:
        return sum(self.blocks[block].layout.nbytes for block in blocks)

    @property
    def layer_bytes(self) -> int:  # of a mean layer
        return self.nbytes_of(range(len(self.blocks))) // self.layers

    @property
    def slot_bytes(self) -> int:
        return max((self.blocks[block].layout.nbytes for block in self.offloaded), default=0)

    def slots_on(self, device: int) -> int:
        """Return the slots of the ring buffer of `device`, no more than it has offloaded blocks."""
        return min(self.ring_depth, len(self.on(device, self.offloaded)))

    @property
    def may_divide(self) -> bool:
        """True if rings can hold all blocks of a layer for several micro-batches, and prefetch one more if there is one."""
        in_layer = Counter(self.blocks[block].layer for block in self.offloaded)
        most = 1 + max(in_layer.values(), default=0)
        return all(self.slots_on(each) >= min(most, len(self.on(each, self.offloaded))) for each in self.devices)

    @property
    def refills_after_layers(self) -> bool:
        """True if a ring copies its next blocks only when its device has computed a layer, while others compute theirs: before, the link
        fetches experts."""
        all_alternate = all(device != following for device, following in pairwise(self.layer_devices))
        return bool(self.quota) and len(self.devices) > 1 and all_alternate and self.may_divide

    @property
    def workspace_bytes(self) -> int:
        return max(block.layout.workspace_bytes for block in self.blocks)

    def resident_bytes_on(self, device: int) -> int:
        """Return the bytes of resident blocks and cached experts on `device`."""
        experts = self.on(device, self.expert_slots)
        cached = sum(self.expert_slots[block] * self.expert_bytes(block) for block in experts)
        return self.nbytes_of(self.on(device, self.resident)) + cached

    @property
    def resident_bytes(self) -> int:  # on all devices
        return sum(map(self.resident_bytes_on, self.devices))

    def reserved_bytes_on(self, device: int) -> int:
        """Return the bytes for resident blocks and the expert cache on `device`."""
        return self.nbytes_of(self.on(device, self.resident)) + self.expert_budgets[device]

    @property
    def reserved_bytes(self) -> int:  # on the device that has most of them
        return max(map(self.reserved_bytes_on, self.devices))

    @property
    def host_bytes(self) -> int:
        return self.nbytes_of(self.in_host_memory)

    @property
    def disk_bytes(self) -> int:
        return self.nbytes_of(self.on_disk)

    @property
    def disk_step_bytes(self) -> int:
        """Bytes that a decode pass reads from disk; of cached experts, those that are expected to miss."""
        cached = self.cpu_computed & self.cached_on_host
        missed = sum(self._missed_on_host(block) * self.expert_bytes(block) for block in cached)
        return self.nbytes_of(self.on_disk - cached) + round(missed)

    @property
    def host_expert_bytes(self) -> int:  # of all slots
        cached = self.cached_on_host
        return self.host_expert_slots * self.expert_bytes(min(cached)) if cached else 0

    @property
    def disk_file(self) -> dict[int, int]:
        """Bytes of each block on disk, in order, as our own file has them."""
        return {block: aligned_up(self.blocks[block].layout.nbytes) for block in sorted(self.on_disk)}

    @property
    def disk_slots_bytes(self) -> int:
        """Bytes of host memory that blocks on disk are read into, of all devices."""
        largest = [
            max((self.disk_file[block] for block in self.on(each, self.on_disk)), default=0) for each in self.devices
        ]
        return DISK_SLOTS * sum(map(slot_bytes, largest))

    @property
    def embedding_bytes(self) -> int:
        return 0 if self.embedding is None else self.embedding.nbytes

    @property
    def embedding_row_bytes(self) -> int:  # that each token of a pass reads of the input embedding in host memory
        return 0 if self.embedding is None else self.embedding.row_bytes

    @property
    def stored_bytes(self) -> int:
        return self.outside_bytes + self.embedding_bytes + sum(block.layout.stored_bytes for block in self.blocks)

    def device_bytes_on(self, device: int) -> int:
        """Return the bytes of weights, slots and workspace on `device`."""
        slots = self.slots_on(device) * self.slot_bytes + self.staging_bytes_on(device)
        outside_bytes = self.outside_bytes if device == 0 else 0
        return outside_bytes + self.resident_bytes_on(device) + self.workspace_bytes + slots

    @property
    def device_bytes(self) -> int:  # on the device that has most of them
        return max(map(self.device_bytes_on, self.devices))

    # Bytes that the CPU reads in a decode pass

    @property
    def computed_bytes(self) -> int:
        """Stored bytes that the CPU reads in a decode pass; of experts, those that are expected to be chosen."""
        return round(sum(map(self.read_bytes, self.cpu_computed)))

    def read_bytes(self, block: int) -> float:
        """Return the stored bytes that the CPU reads of `block` in a decode pass: of experts, the misses that are not fetched."""
        stored, experts = self.blocks[block].layout.stored_bytes, self.blocks[block].experts
        if experts is None:
            return stored
        missed = self._missed(block)
        return stored * (missed - self._fetched(block, missed)) / experts.num_experts

    # The expert cache

    @cached_property
    def expert_slots(self) -> dict[int, int]:
        """Number of cached experts of each CPU-computed block of experts. A block with a cache has at least as many slots as experts may
        be fetched at once, because these go there. Where the budget is too small for that, some blocks have none."""
        found: dict[int, int] = {}
        for device, budget in enumerate(self.expert_budgets):
            if budget:
                found |= self._expert_slots_in(sorted(self.on(device, self.cpu_experts)), budget)
        return found

    def _expert_slots_in(self, blocks: list[int], budget: int) -> dict[int, int]:
        numbers = [self.blocks[block].experts.num_experts for block in blocks]
        sizes = [self.expert_bytes(block) for block in blocks]
        slots = share_out(numbers, sizes, budget)
        needed = [min(max(self.quota, default=0), number) for number in numbers]
        if any(count < fewest for count, fewest in zip(slots, needed)):
            some = spread([fewest * size for fewest, size in zip(needed, sizes)], budget)
            slots = [fewest if index in some else 0 for index, fewest in enumerate(needed)]
        return {block: count for block, count in zip(blocks, slots) if count}

    def expert_bytes(self, block: int) -> int:
        layout, experts = self.blocks[block].layout, self.blocks[block].experts
        return sum(piece.nbytes for name in experts.parameters for piece in layout[name].pieces) // experts.num_experts

    @property
    def expert_slot_bytes(self) -> int:
        return sum(count * self.expert_bytes(block) for block, count in self.expert_slots.items())

    @property
    def gathered(self) -> dict[int, int]:
        """The `expert_slots` that are copied from device memory in a long pass, and do not cross the link."""
        return {
            block: count
            for block, count in self.expert_slots.items()
            if self.gathers
            and block not in self.on_disk
            and count >= MIN_CACHED_SHARE * self.blocks[block].experts.num_experts
        }

    @property
    def gathered_bytes(self) -> int:
        found = self.gathered.items()
        return sum(count * self.expert_bytes(block) for block, count in found if block not in self.prompt_cpu_computed)

    def staging_bytes_on(self, device: int) -> int:
        """Return the memory of `device` for experts that are fetched for one pass; its blocks without a cache share it."""
        if not self.quota:
            return 0
        blocks, count = self.on(device, self.cpu_experts - self.expert_slots.keys()), max(self.quota)
        sizes = (sum(expert_memory(self.blocks[block], count)) for block in blocks)
        return max(sizes, default=0)

    @property
    def fetched_expert_bytes(self) -> float:
        """Stored bytes of missed experts that are expected to cross the link in a decode pass."""
        return sum(self._fetched(block, self._missed(block)) * self.expert_bytes(block) for block in self.cpu_experts)

    def _missed(self, block: int) -> float:
        """Return how many experts of `block` a decode pass is expected to choose that are not cached."""
        experts, slots, chosen = self.blocks[block].experts, self.expert_slots.get(block, 0), self._chosen(block)
        cached = slots / experts.num_experts
        exponent = 1 + ROUTING_SKEW * (experts.num_experts / max(1, experts.top_k) - 1) ** 0.5
        share = 1 - cached**CACHE_HIT_EXPONENT if any(self.quota) else (1 - cached) ** exponent
        # hit rates were measured with one sequence; many choose nearly all experts, of which no more hit than there are slots
        return max(chosen * share, chosen - slots)

    def _missed_on_host(self, block: int) -> float:
        """Return how many experts of `block` a decode pass is expected to choose that neither device nor host memory caches."""
        chosen, on_device = self._chosen(block), self.expert_slots.get(block, 0)
        slots = on_device + self.host_expert_slots / len(self.cached_on_host)
        share = min(1.0, slots / self.blocks[block].experts.num_experts)
        return max(chosen * (1 - share**CACHE_HIT_EXPONENT), chosen - slots)

    def _chosen(self, block: int) -> float:
        experts = self.blocks[block].experts
        return experts.num_experts * experts.share_read(self.decode_tokens)

    def _fetched(self, block: int, missed: float) -> float:
        """Return how many of `missed` experts the device fetches: into a cache, no more than it has slots whose experts were not chosen."""
        if not self.quota or block not in self.cpu_computed:
            return 0.0
        hits, slots = self._chosen(block) - missed, self.expert_slots.get(block)
        room = min(missed, slots - hits) if slots else missed
        return max(0.0, min(room, self.quota[round(missed)]))

    # Other placements of the same blocks

    def with_even_cpu_share(self, share: float) -> Placement:
        """Return the placement with about `share` of the bytes in host memory, or without a GPU of all offloaded bytes, CPU-computed, in
        whole, evenly spread blocks."""
        blocks = self.offloaded if self.ring_in_host_memory else self.in_host_memory
        return replace(self, cpu_computed=frozenset(self._spread_evenly(blocks, share)) | self.cached_on_host)

    def with_cpu_shares(self, of_experts: float, of_others: float) -> Placement:
        """Return the placement with a share of the experts' bytes and one of the others' CPU-computed."""
        experts = set(self.expert_blocks)
        others = [block for block in self.in_host_memory if block not in experts]
        chosen = {*self._spread_evenly(self.expert_blocks, of_experts), *self._spread_by_kind(others, of_others)}
        return replace(self, cpu_computed=frozenset(chosen) | self.cached_on_host)

    def with_prompt_share(self, share: float) -> Placement:
        return replace(self, prompt_cpu_computed=frozenset(self._spread_by_kind(self.prompt_candidates, share)))

    def for_short_prompt(self, tokens: int) -> Placement:
        """Return the placement whose decode pass is this one's pass of a short prompt."""
        slots = self.expert_slots if self.fuses_codes else {}
        cached = self.prompt_cpu_computed & slots.keys()
        budgets = (
            sum(slots[block] * self.expert_bytes(block) for block in self.on(each, cached)) for each in self.devices
        )
        placed = replace(self, cpu_computed=self.prompt_cpu_computed, decode_tokens=tokens)
        return replace(placed, quota=(), expert_budgets=tuple(budgets))

    def rebalanced(self, nbytes: float, candidates: Collection[int]) -> Placement:
        """Return the placement with about `nbytes` moved from the CPU to the link; if negative, from the link to the CPU, of `candidates`.
        Evenly spread blocks move, but no experts. Feed-forwards are the first that the CPU gets, and the last that it gives."""
        to_link, experts = nbytes > 0, set(self.expert_blocks)
        movable = sorted((self.cpu_computed if to_link else set(candidates).intersection(self.streamed)) - experts)
        share = min(1.0, abs(nbytes) / max(1, self.nbytes_of(movable)))
        moved = self._spread_by_kind(movable, share, feed_forwards_last=to_link)
        return replace(self, cpu_computed=self.cpu_computed ^ moved) if moved else self

    def with_quota(self, quota: tuple[int, ...], spare_slots: int | None) -> Placement:
        """Return the placement with some missed experts fetched: into the cache, or where the budget is too small for it, into memory that
        blocks share. That is taken from the budget and then from ring slots.

        Args:
            spare_slots: that each ring may lose. None: the expert cache has a budget of its own, and shared memory takes what the device
                has beside it. Fewer experts are fetched where either is too little.
        """
        placed = replace(self, quota=quota)
        if spare_slots is not None:
            missing = [placed.staging_bytes_on(each) - self.expert_budgets[each] for each in self.devices]
            slots = min(spare_slots, -(min(0, -max(missing)) // max(1, self.slot_bytes)))
            placed = replace(placed, ring_depth=self.ring_depth - slots)
            # a ring may have fewer slots
            freed = [self.slots_on(each) - placed.slots_on(each) for each in self.devices]
            budgets = (budget + count * self.slot_bytes for budget, count in zip(self.expert_budgets, freed))
            placed = replace(placed, expert_budgets=tuple(budgets))

        def fits(device: int) -> bool:
            room: float = placed.expert_budgets[device]
            free = self.free_bytes[device]
            if spare_slots is None:
                taken = self.workspace_bytes + self.reserved_bytes_on(device) + self.slots_on(device) * self.slot_bytes
                room += math.inf if free is None else max(0, free - taken)
            return placed.staging_bytes_on(device) <= room

        while placed.quota and not all(map(fits, self.devices)):
            most = max(placed.quota) - 1
            placed = replace(placed, quota=tuple(min(most, each) for each in quota) if most else ())
        left = (max(0, placed.expert_budgets[each] - placed.staging_bytes_on(each)) for each in self.devices)
        return replace(placed, expert_budgets=tuple(left))

    def with_budget_used(self) -> Placement:
        """Return the placement with evenly spread streamed blocks made resident, where the expert cache leaves memory for them; those on
        disk come first."""
        chosen: set[int] = set()
        budgets = []
        for device, budget in enumerate(self.expert_budgets):
            streamed = self.on(device, [block for block in self.streamed if block in self.on_disk] or self.streamed)
            cached_bytes = self.resident_bytes_on(device) - self.nbytes_of(self.on(device, self.resident))
            sizes = [self.blocks[block].layout.nbytes for block in streamed]
            more = {streamed[index] for index in spread(sizes, budget - cached_bytes)}
            budgets.append(budget - self.nbytes_of(more))
            chosen |= more
        host = [block for block in self.offloaded if block not in chosen]
        return replace(
            self,
            resident=sorted({*self.resident, *chosen}),
            offloaded=host,
            ring_depth=min(self.ring_depth, len(host)),
            expert_budgets=tuple(budgets),
            on_disk=self.on_disk - chosen,
        )

    def with_host_budget(self, nbytes: int, step_tokens: int = 0) -> Placement:
        """Return the placement with evenly spread blocks in host memory, and the others on disk. The slots that these are read into
        count as part of `nbytes`, and are there even if they alone exceed it.

        Args:
            step_tokens: tokens of a decode pass; 0: no experts are cached. Else blocks without experts come first, and then a cache of
                experts, if it holds those that such a pass can choose in one block.
        """
        all_on_disk = replace(self, on_disk=frozenset(self.offloaded))
        room = max(0, nbytes - all_on_disk.disk_slots_bytes)
        cacheable = _cacheable(self.blocks, self.offloaded) if step_tokens else []
        if not cacheable:
            return replace(self, on_disk=frozenset(self.offloaded) - self._spread_in(self.offloaded, room))
        experts, size = self.blocks[cacheable[0]].experts, self.expert_bytes(cacheable[0])
        fewest = min(experts.num_experts, step_tokens * experts.top_k)
        others = [block for block in self.offloaded if block not in set(cacheable)]
        kept = self._spread_in(others, max(0, room - fewest * size))
        slots = min((room - self.nbytes_of(kept)) // size, len(cacheable) * experts.num_experts)
        if slots < fewest:
            return self.with_host_budget(nbytes)
        return replace(self, on_disk=frozenset(self.offloaded) - kept, host_expert_slots=slots)

    def _spread_in(self, blocks: Sequence[int], nbytes: int) -> set[int]:
        """Return as many of `blocks`, evenly spread, of each device alike, as `nbytes` hold."""
        share, kept = min(1.0, nbytes / max(1, self.nbytes_of(blocks))), set()
        wanted = taken = 0.0
        for block in sorted(blocks, key=self.device_of):
            size = self.blocks[block].layout.nbytes
            wanted += share * size
            if taken + size <= wanted:
                kept.add(block)
                taken += size
        return kept

    def _spread_by_kind(self, blocks: Sequence[int], share: float, feed_forwards_last: bool = False) -> set[int]:
        """Return about `share` of the bytes of `blocks`, feed-forwards first: each takes one hand-off, attention's projections two."""
        wanted, chosen = share * self.nbytes_of(blocks), set()
        for feed_forward in (not feed_forwards_last, feed_forwards_last):
            kind = [block for block in blocks if (self.blocks[block].feed_forward is not None) is feed_forward]
            some = self._spread_evenly(kind, min(1.0, wanted / max(1, self.nbytes_of(kind))))
            wanted = max(0.0, wanted - self.nbytes_of(some))
            chosen |= some
        return chosen

    def _spread_evenly(self, blocks: Sequence[int], share: float) -> set[int]:
        """Return about `share` of the bytes of `blocks`, of each device alike, so that each link keeps an equal part of its own."""
        chosen: set[int] = set()
        wanted = taken = 0.0
        able = set(self.computable)
        for block in sorted(blocks, key=self.device_of):
            size = self.blocks[block].layout.nbytes
            wanted += share * size
            if block in able and taken + size / 2 <= wanted:
                chosen.add(block)
                taken += size
        return chosen


def assign_layers(
    layer_bytes: Sequence[int],
    capacities: Sequence[int | None],
    link_shares: Sequence[float] = (),
    alternate: bool = False,
) -> tuple[int, ...]:
    """Return the device of each layer.

    If the devices hold all layers together, each gets contiguous ones, because hidden states then change devices least often. Otherwise
    layers alternate between devices, so that each link copies while the other devices compute. Each device gets as many bytes as are
    resident there, and of the bytes that are not, the share that its link has of the rate of all links.

    Args:
        layer_bytes: of each layer.
        capacities: by device, the bytes of layers that may be resident; None: unlimited.
        link_shares: by device (0 to 1); empty: equal.
        alternate: do so even if all layers are resident, where that fits.
    """
    count, total = len(capacities), sum(layer_bytes)
    resident = [total / count if each is None else min(each, total) for each in capacities]
    streamed = max(0.0, total - sum(resident))
    links = link_shares or [1 / count] * count
    shares = [(each + link * streamed) / total for each, link in zip(resident, links, strict=True)]
    taken, turns = [0] * count, []
    for nbytes, passed in zip(layer_bytes, accumulate(layer_bytes)):
        turns.append(max(range(count), key=lambda device: shares[device] * passed - taken[device]))  # lacks most
        taken[turns[-1]] += nbytes
    if streamed:
        return tuple(turns)
    ends = [total * end / sum(resident) for end in accumulate(resident)]
    middles = (end - nbytes / 2 for end, nbytes in zip(accumulate(layer_bytes), layer_bytes))
    even = [min(count - 1, bisect_left(ends, middle)) for middle in middles]
    limits: list[float] = [math.inf if each is None else each for each in capacities]
    # each device as far as it goes: where memory is short this alone may fit
    device, room, filled = 0, limits.copy(), []
    for nbytes in layer_bytes:
        while device < count - 1 and room[device] < nbytes:
            device += 1
        room[device] -= nbytes
        filled.append(device)

    def fits(devices: Sequence[int]) -> bool:
        taken = (sum(nbytes for nbytes, each in zip(layer_bytes, devices) if each == device) for device in range(count))
        return all(nbytes <= limit for nbytes, limit in zip(taken, limits))

    choices = [turns, even, filled] if alternate else [even, filled]
    return tuple(next((each for each in choices if fits(each)), turns))


def plan_placement(
    blocks: Sequence[Block],
    outside_bytes: int,
    free_bytes: Sequence[int | None],
    gpu_memory_gib: float | None,
    depth: int | None,
    layer_devices: Sequence[int] = (),
    taken_by: Callable[[int], str] = lambda device: "",
) -> Placement:
    """Make as many layers resident as the budgets hold, spread evenly among those in host memory. Where a mixture's experts are blocks
    of their own, the other blocks come first, and the expert cache gets what is left.

    Args:
        free_bytes: of each device, left for layers, ring and workspace; None where nothing limits them (a CPU).
        gpu_memory_gib: budget of resident layers on each device; None takes what `free_bytes` leaves beside the ring, or 0 on a CPU.
        depth: slots of a ring; None takes `default_ring_depth`, or at least `MIN_RING_DEPTH` where there is less memory, and
            `DEFAULT_RING_DEPTH` on a CPU, where they are host memory.
        layer_devices: of `assign_layers`; empty with one device.
        taken_by: returns what takes the rest of a device's memory, for the error.

    Raises:
        DoesNotFit: a device does not hold what the options name, or not two slots of the largest layer.
    """
    workspace_bytes = max(block.layout.workspace_bytes for block in blocks)
    left = [None if free is None else max(0, free - workspace_bytes) for free in free_bytes]
    sizes = [block.layout.nbytes for block in blocks]
    largest, devices = max(sizes), range(len(free_bytes))
    own_bytes = [0 for _ in devices]  # by device
    for block, nbytes in zip(blocks, sizes):
        own_bytes[layer_devices[block.layer] if layer_devices else 0] += nbytes

    def place(gib: float | None, depth: int | None) -> Placement:
        """Return the placement for these options, whether or not it fits."""
        slots = depth or (DEFAULT_RING_DEPTH if None in left else default_ring_depth(blocks))
        short = [room for room, nbytes in zip(left, own_bytes) if room is not None and room < nbytes]  # of space
        if gib is None and short:
            slots = depth or max(MIN_RING_DEPTH, min(slots, min(short) // largest))
        placed = Placement(
            blocks,
            [],
            list(range(len(blocks))),
            slots,
            outside_bytes,
            layer_devices,
            expert_budgets=(0,) * len(devices),
            link_shares=(1 / len(devices),) * len(devices),
        )
        resident, budgets = [], []
        for device, room in enumerate(left):
            if gib is not None:
                budget = int(gib * GIB)
            elif room is None:
                budget = 0
            else:
                budget = own_bytes[device] if room >= own_bytes[device] else room - slots * largest
            mine = placed.on(device, range(len(blocks)))
            caches_experts = budget < own_bytes[device] and any(blocks[block].experts is not None for block in mine)
            layers: dict[int, list[int]] = {}  # blocks that become resident together
            for index in mine:
                if not (caches_experts and blocks[index].experts is not None):
                    layers.setdefault(blocks[index].layer, []).append(index)
            members = list(layers.values())
            chosen = spread([sum(sizes[index] for index in layer) for layer in members], budget)
            held = [block for index in chosen for block in members[index]]
            resident += held
            budgets.append(max(0, budget - placed.nbytes_of(held)) if caches_experts else 0)
        host = sorted(set(range(len(blocks))).difference(resident))
        placed = replace(
            placed,
            resident=sorted(resident),
            offloaded=host,
            ring_depth=min(slots, len(host)),
            expert_budgets=tuple(budgets),
            free_bytes=tuple(None if room is None else room + workspace_bytes for room in left),
        )
        if depth is None and placed.ring_depth > MIN_RING_DEPTH:
            # --gpu-memory comes first, the rings get what it leaves
            rooms = ((room, device) for device, room in enumerate(left) if room is not None)
            fitting = [
                (room - placed.reserved_bytes_on(each)) // placed.slot_bytes
                for room, each in rooms
                if placed.slots_on(each)
            ]
            fewest = min(fitting, default=placed.ring_depth)
            placed = replace(placed, ring_depth=max(MIN_RING_DEPTH, min(placed.ring_depth, fewest)))
        return placed

    def lacking(found: Placement) -> int | None:
        """Return a device that does not hold its part; None if all do."""
        for device, room in enumerate(left):
            needed = found.reserved_bytes_on(device) + found.slots_on(device) * found.slot_bytes
            if room is not None and needed > room:
                return device
        return None

    found = place(gpu_memory_gib, depth)
    device = lacking(found)
    if device is None:
        return found
    reserved_bytes, slots = found.reserved_bytes_on(device), found.slots_on(device)
    needed = [f"{format_bytes(reserved_bytes)} of resident layers"] if reserved_bytes else []
    needed += [f"{slots} ring slots of {format_bytes(found.slot_bytes)} each"] if slots else []

    def changes() -> Iterator[str]:
        """Yield changes of options that fit, the smallest first."""
        for slots in range((depth or MIN_RING_DEPTH) - 1, MIN_RING_DEPTH - 1, -1):
            if lacking(place(gpu_memory_gib, slots)) is None:
                yield f"; use --ring-depth {slots} or less"
        for slots in dict.fromkeys((depth, MIN_RING_DEPTH)):
            with_depth = f" with --ring-depth {slots}" if slots != depth else ""
            for tenths in range(int(found.reserved_bytes * 10 / GIB), -1, -1):
                if lacking(place(tenths / 10, slots)) is None:
                    yield f"; use --gpu-memory {tenths / 10:g} or less{with_depth}"

    raise DoesNotFit(
        f"{' and '.join(needed)} do not fit into the {format_bytes(left[device])} of device memory left for them"
        f"{taken_by(device)}{next(changes(), '')}."
    )


def default_ring_depth(blocks: Sequence[Block]) -> int:
    """Return the number of ring slots whose copies last `RING_COVERED_S`, and one more.

    Later choices, in this order: `plan_placement` takes fewer where device memory is short; `Placement.with_quota` gives slots to fetched
    experts, down to `DEFAULT_RING_DEPTH`; `Placement.with_budget_used` needs no more slots than blocks in host memory; and
    `plan._with_fewer_slots` plans again with fewer beside the CPU, where resident layers gain more or nothing is streamed.
    """
    mean_bytes = sum(block.layout.nbytes for block in blocks) / len(blocks)  # streamed blocks may be the small ones
    return max(DEFAULT_RING_DEPTH, 1 + math.ceil(RING_COVERED_S * RING_LINK_GB_PER_S * 1e9 / mean_bytes))


def main_format(blocks: Iterable[Block]) -> WeightFormat | None:
    """Return the format of most bytes of quantized weights; None if there are none."""
    nbytes: Counter[WeightFormat] = Counter()
    for block in blocks:
        for stored in block.layout.parameters:
            if stored.packed is not None:
                nbytes[stored.packed.format] += stored.plain.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else None


def _cacheable(blocks: Sequence[Block], among: Iterable[int]) -> list[int]:
    """Return those `among` the blocks that hold experts and nothing else, in the form of the first of them."""
    found = [block for block in sorted(among) if _expert_form(blocks[block]) is not None]
    return [block for block in found if _expert_form(blocks[block]) == _expert_form(blocks[found[0]])]


def _expert_form(block: Block) -> tuple | None:
    if block.experts is None or {stored.name for stored in block.layout.parameters} != set(block.experts.parameters):
        return None
    return block.experts, tuple((each.name, each.plain.shape, each.pieces) for each in block.layout.parameters)


def expert_memory(block: Block, count: int) -> tuple[int, int]:
    """Return the device bytes of `count` experts: of gate and up, and of down, with biases."""
    experts = block.experts

    def nbytes(*names: str) -> int:
        pieces = [piece for name in filter(None, names) for piece in block.layout[name].pieces]
        return sum(aligned(count * (piece.nbytes // experts.num_experts)) for piece in pieces)

    return nbytes(experts.gate_up, experts.gate_up_bias), nbytes(experts.down, experts.down_bias)


def share_out(numbers: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Return how many experts of each layer the budget holds: equally many, or one more in layers that are evenly spread; `sizes` are the
    bytes of one expert of each layer."""

    def taken(most: int) -> int:
        return sum(min(most, number) * size for number, size in zip(numbers, sizes))

    most = max(0, bisect_right(range(max(numbers, default=0) + 1), budget, key=taken) - 1)
    slots = [min(most, number) for number in numbers]
    growing = [layer for layer, number in enumerate(numbers) if number > most]
    for index in spread([sizes[layer] for layer in growing], budget - taken(most)):
        slots[growing[index]] += 1
    return slots


def spread(sizes: Sequence[int], budget: int) -> set[int]:
    """Return the indices of as many evenly spaced items as the budget holds; `sizes` are their bytes."""
    count, smallest = len(sizes), min(sizes, default=0)
    for kept in range(min(count, budget // smallest) if smallest else count, 0, -1):
        chosen = {int((index + 0.5) * count / kept) for index in range(kept)}
        if sum(sizes[index] for index in chosen) <= budget:
            return chosen
    return set()
