"""The expert cache: experts of a mixture on the device, while the CPU multiplies others from host memory, which has all of them.

Each block has slots in device memory (`ExpertCache`). They hold the first experts until a pass of many tokens, which needs all experts of
a block on the device: those in slots are copied from there, the others cross the link (`ExpertCache.gather`). Then the slots are filled
with the most used experts. In a pass of few tokens the device fetches some of the missed experts over the link, which evict the least used
ones; the use count of an expert halves every `HALF_LIFE_PASSES`. All of it is decided on the device, in stream order, so that a CUDA graph
can contain it. Blocks without slots of their own fetch into memory that they share, and cache nothing.

For blocks on disk, host memory caches some of the experts (`HostExperts`). The host waits for the ids of the chosen experts, reads those
that neither cache has, and evicts the least used ones, by the same counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from zero_inference.cpu.experts import CHOICES, COUNTS, FETCHED, HITS, SAVED, WeightedRows
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.disk import DiskBlocks
from zero_inference.engines.stream.layout import (
    BUFFER_ALIGNMENT,
    BlockLayout,
    BlockStore,
    TensorSpan,
    aligned,
    lay_out_experts,
)
from zero_inference.engines.stream.placement import Placement, expert_memory
from zero_inference.engines.stream.products import epilogue_of
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.formats import QuantizedWeight
from zero_inference.kernels.products import Epilogue, expert_linear, quantized_expert_linear
from zero_inference.models.mlp import FusedExperts
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import ExpertCounts, Transfers

# Decode passes in which the use count of an expert halves: between LRU, which hits more where recent tokens repeat, and LFU, which hits
# more where they do not (benchmarks/results/cpu/expert_reuse.txt).
HALF_LIFE_PASSES = 32
USE_DECAY = 0.5 ** (1 / HALF_LIFE_PASSES)  # factor of the use counts per pass


@dataclass(frozen=True)
class _ExpertTensor:
    """One tensor of all experts of a block: a plain weight, one of a quantized weight, or a bias."""

    piece: TensorSpan  # in the block's buffer
    host: torch.Tensor  # [experts, elements] in host memory
    slots: torch.Tensor  # [slots, elements] on the device

    def of_block(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor [experts, elements] in `buffer`, which holds the block on the device."""
        return self.piece.of(buffer).view(self.host.shape)


class _ExpertWeights:
    """One of the two weights of a block's experts as stored, with its bias if `bias` names one.

    Args:
        buffer: the block in host memory.
        memory: uint8 on the device for the slots, of `expert_memory`.
    """

    def __init__(
        self, layout: BlockLayout, name: str, bias: str, slots: int, buffer: torch.Tensor, memory: torch.Tensor
    ):
        stored = layout[name]
        self.dtype, (number, self.rows, self.columns) = stored.plain.dtype, stored.plain.shape
        self.tensors: list[_ExpertTensor] = []
        offset = 0
        for piece in (*stored.pieces, *(layout[bias].pieces if bias else ())):
            host = piece.of(buffer).view(number, -1)
            span = TensorSpan(offset, (slots, host.shape[1]), host.dtype)
            self.tensors.append(_ExpertTensor(piece, host, span.of(memory)))
            offset += aligned(span.nbytes)
        self.slots = [each.slots for each in self.tensors]
        self.bias = self.slots[-1] if bias else None
        self.weight: QuantizedWeight | None = None  # as stored in the slots, if quantized
        if stored.packed is not None:
            self.weight = QuantizedWeight(stored.packed.format, **dict(zip(stored.packed.spans, self.slots)))

    def copy_table(self) -> torch.Tensor:
        """Return int64 [tensors, 4] on the device for the copy kernels: address in host memory, address of the slots, offset in the block,
        bytes of an expert."""
        rows = [
            (each.host.data_ptr(), each.slots.data_ptr(), each.piece.offset, each.host[0].nbytes)
            for each in self.tensors
        ]
        return torch.tensor(rows, device=self.slots[0].device)

    def multiply(
        self, x: torch.Tensor, slot: torch.Tensor, epilogue: Epilogue | None = None, tokens: int = 0
    ) -> torch.Tensor:
        """Return the product [pairs, rows] of each token-expert pair; `slot` is int64 [pairs], others as of `quantized_expert_linear`."""
        x = x.to(self.dtype)
        if self.weight is None:
            return expert_linear(x, self.slots[0].view(-1, self.rows, self.columns), slot, self.bias, epilogue)
        return quantized_expert_linear(x, self.weight, self.rows, slot, self.bias, epilogue, tokens)


def _other_ranges(layout: BlockLayout, experts: FusedExperts) -> list[tuple[int, int]]:
    """Return the byte ranges (begin, end) of a block's buffer that hold other parameters than `experts`; adjacent ones are joined."""
    ranges: list[tuple[int, int]] = []
    others = [stored for stored in layout.parameters if stored.name not in experts.parameters]
    for begin, end in sorted((each.offset, each.offset + each.nbytes) for stored in others for each in stored.pieces):
        if ranges and begin - ranges[-1][1] < BUFFER_ALIGNMENT:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return ranges


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """View `rows` as 8-byte elements where possible: the kernel that gathers rows copies one element at a time."""
    return rows if rows.shape[1] * rows.element_size() % 8 else rows.view(torch.int64)


class Dispatch(NamedTuple):
    """Where each token-expert pair is computed, all int64; -1 for none."""

    for_cpu: torch.Tensor  # [tokens, k], expert ids as `cpu.pool.Routing` takes them, with those of the device marked
    slot: torch.Tensor  # [tokens, k], of a cached expert
    fetched_slot: torch.Tensor  # [tokens, k], of an expert that is fetched in this pass
    fetched: torch.Tensor  # [max_fetches], the experts to fetch
    fetched_into: torch.Tensor  # [max_fetches], the slots to fetch them into


def dispatch(
    chosen: torch.Tensor,
    table: torch.Tensor,
    uses: torch.Tensor,
    experts: int,
    quota: torch.Tensor,
    max_fetches: int,
    owns_slots: bool = True,
) -> Dispatch:
    """Divide routed experts over cache, link and CPU, and count their use; no value is read by the host.

    The most used missed experts are fetched. Each evicts the least used expert that no token is routed to, and `table` is updated; with
    too few of those, fewer are fetched. Among equally used experts the lowest number comes first.

    Args:
        chosen: int64 [tokens, k], expert ids.
        table: int64 [>= experts + 1], the slot of each expert or -1; row `experts` takes writes for none.
        uses: float32 of that shape.
        quota: int64 [experts + 1], how many experts to fetch, by the number of missed ones.
        max_fetches: experts to fetch at most; up to `experts`.
        owns_slots: False: the slots are shared between blocks, so the table stays empty, and experts are fetched into slots 0, 1 ... for
            this pass alone.
    """
    if chosen.is_cuda and load_extension():
        found = Dispatch(
            *(torch.empty_like(chosen, memory_format=torch.contiguous_format) for _ in range(3)),
            *(chosen.new_empty(max_fetches) for _ in range(2)),
        )
        torch.ops.zero_inference.expert_division(
            chosen.contiguous(), table, uses, experts, quota, USE_DECAY, owns_slots, *found
        )
        return found
    expert = torch.where((chosen >= 0) & (chosen < experts), chosen, experts)  # [tokens, k]; `experts` if none
    slot = table[expert]
    is_chosen = torch.zeros(experts + 1, dtype=torch.bool, device=chosen.device)
    is_chosen = is_chosen.index_fill_(0, expert.view(-1), True)[:experts]
    used = uses[:experts].mul_(USE_DECAY).add_(is_chosen)
    cached = table[:experts] >= 0
    missed, idle = is_chosen & ~cached, cached & ~is_chosen  # [experts]
    slots = torch.arange(max_fetches, device=chosen.device)
    misses = missed.sum()
    count = torch.minimum(quota[misses], misses).clamp(max=max_fetches)
    if owns_slots:
        count = torch.minimum(count, idle.sum())
    is_fetch = slots < count  # [max_fetches]
    fetched = (-used).masked_fill(~missed, torch.inf).argsort(stable=True)[:max_fetches]
    if owns_slots:
        evicted = used.masked_fill(~idle, torch.inf).argsort(stable=True)[:max_fetches]
        slots = table[evicted]
        table.scatter_(0, torch.where(is_fetch, evicted, experts), -1)
    else:
        table = table.clone()
    slots = torch.where(is_fetch, slots, -1)
    table.scatter_(0, torch.where(is_fetch, fetched, experts), slots)
    fetched_slot = torch.where(slot < 0, table[expert], -1)
    for_cpu = torch.where(slot >= 0, ~chosen, torch.where(fetched_slot >= 0, ~(chosen + experts), chosen))
    return Dispatch(for_cpu, slot, fetched_slot, torch.where(is_fetch, fetched, -1), slots)


@dataclass(frozen=True)
class FetchConfig:
    """Settings of fetching, the same for all blocks."""

    quota: torch.Tensor  # as of `dispatch`
    max_fetches: int  # the largest value in `quota`
    streams: DeviceStreams
    stream: Any  # on which experts are fetched, in parallel to the model's stream


class ExpertCache:
    """The experts of one block that the device multiplies in a pass of few tokens.

    Attributes:
        table, uses, owns_slots: as of `dispatch`.
        counts: what the CPU counts, see `cpu.experts.add_experts`.

    Args:
        count: slots.
        buffer: the block in host memory; page-locked where a GPU fetches from it.
        shared: uint8 on the device, memory of `count` slots that other blocks use, too; None allocates slots of its own.
    """

    def __init__(
        self,
        block: Block,
        count: int,
        buffer: torch.Tensor,
        table: torch.Tensor,
        uses: torch.Tensor,
        counts: torch.Tensor,
        fetching: FetchConfig,
        shared: torch.Tensor | None = None,
    ):
        experts, layout = block.experts, block.layout
        self.experts, self.epilogue = experts, epilogue_of(experts)
        self.table, self.uses, self.counts, self.owns_slots = table, uses, counts, shared is None
        self.fetching, self.max_fetches = fetching, min(fetching.max_fetches, experts.num_experts)
        first, second = expert_memory(block, count)
        memory = torch.zeros(first + second, dtype=torch.uint8, device=table.device) if shared is None else shared
        self.gate_up = _ExpertWeights(layout, experts.gate_up, experts.gate_up_bias, count, buffer, memory[:first])
        self.down = _ExpertWeights(layout, experts.down, experts.down_bias, count, buffer, memory[first:])
        self.weights = self.gate_up, self.down
        self.tensors = [*self.gate_up.tensors, *self.down.tensors]
        self.slot_ids = torch.arange(count, device=table.device)
        self.copy_tables = [each.copy_table() for each in self.weights]
        self.block_copy_table = torch.cat(self.copy_tables)
        self.in_vectors = not bool((self.block_copy_table % 16).any())  # kernels may copy so many bytes at once
        self.buffer, self.others = buffer, _other_ranges(layout, experts)
        self.filled = 0  # slots with an expert
        self.gathered: Any = None  # event after the last `gather`

    @property
    def nbytes(self) -> int:
        return sum(each.slots.nbytes for each in self.tensors)

    @property
    def expert_bytes(self) -> int:
        return self.nbytes // self.slot_ids.numel()

    def load_first(self) -> None:
        for each in self.tensors:
            each.slots.copy_(each.host[: len(each.slots)], non_blocking=True)
        self._fill(self.slot_ids)

    def gather(self, buffer: torch.Tensor) -> int:
        """Copy the block into `buffer` on the device, on the current stream, cached experts from their slots; return the bytes that cross
        the link."""
        for begin, end in self.others:
            buffer[begin:end].copy_(self.buffer[begin:end], non_blocking=True)
        number = self.experts.num_experts
        if self.table.is_cuda:
            torch.ops.zero_inference.expert_fill(self.table, number, self.block_copy_table, buffer, self.in_vectors)
        else:
            for each in self.tensors:
                for expert, slot in enumerate(self.table[:number].tolist()):
                    each.of_block(buffer)[expert].copy_(each.host[expert] if slot < 0 else each.slots[slot])
        self.gathered = self.fetching.streams.record_event(self.fetching.streams.current())
        return sum(end - begin for begin, end in self.others) + (number - self.filled) * self.expert_bytes

    def refill(self, chosen: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """Count the use of `chosen` [tokens, k], and fill the slots with the most used experts of the block in `buffer`; after
        `await_gathering`."""
        if chosen is not None:
            self.count_uses(chosen)
        self.table.fill_(-1)  # if the copies fail, no expert has a wrong slot
        most_used = self.uses[: self.experts.num_experts].topk(self.slot_ids.numel()).indices
        for each in self.tensors:
            torch.index_select(_as_words(each.of_block(buffer)), 0, most_used, out=_as_words(each.slots))
        self._fill(most_used)

    def await_gathering(self) -> None:
        """Let the current stream wait for the last `gather`, which reads the slots, perhaps for the next pass; not in a CUDA graph."""
        if self.gathered is not None:
            self.fetching.streams.current().wait_event(self.gathered)

    def count_uses(self, chosen: torch.Tensor) -> None:
        """Count the use of `chosen` [tokens, k], as if the tokens had come one after the other."""
        flat, tokens = chosen.reshape(-1).to(torch.int64), chosen[..., 0].numel()
        decay = USE_DECAY**tokens
        # each use counts the mean of USE_DECAY**0, ..., USE_DECAY**(tokens - 1)
        use = self.uses.new_full((1,), (1 - decay) / (1 - USE_DECAY) / max(1, tokens))
        self.uses.mul_(decay).scatter_add_(0, flat, use.expand_as(flat))

    def dispatch(self, chosen: torch.Tensor) -> Dispatch:
        """Call `dispatch` for a pass of few tokens; `products` or `invalidate` must follow."""
        quota, number = self.fetching.quota, self.experts.num_experts
        return dispatch(chosen, self.table, self.uses, number, quota, self.max_fetches, self.owns_slots)

    def invalidate(self) -> None:
        """Empty the cache until the next `refill`, after a failed pass: `table` may name experts that were not fetched."""
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a capture runs nothing
        streams = self.fetching.streams
        # fetches in flight read expert ids from memory that may be allocated again from here on
        streams.current().wait_event(streams.record_event(self.fetching.stream))
        self.table.fill_(-1)
        self.filled = 0

    def _fill(self, experts: torch.Tensor) -> None:
        self.table.scatter_(0, experts, self.slot_ids)
        self.filled = experts.numel()

    def products(self, x: torch.Tensor, dispatched: Dispatch, weights: torch.Tensor) -> WeightedRows:
        """Return outputs of cached and fetched experts for x [tokens, hidden], with their `weights` [tokens, k]."""
        arrived = self._fetch(dispatched) if self.max_fetches else None
        rows = [self.multiply(x, dispatched.slot)] if self.owns_slots else []
        if arrived is not None:
            rows.append(self.multiply(x, dispatched.fetched_slot, arrived))
        return WeightedRows(weights.contiguous(), *(each.to(x.dtype) for each in rows))

    def multiply(self, x: torch.Tensor, slots: torch.Tensor, arrived: Sequence[Any] = (None, None)) -> torch.Tensor:
        """Return outputs [tokens * k, hidden] of the experts in `slots`, int64 [tokens, k], for x [tokens, hidden]; zeros for slot -1. Its
        two products wait for one event each of `arrived`."""
        slot, current = slots.view(-1), self.fetching.streams.current()
        if arrived[0] is not None:
            current.wait_event(arrived[0])
        hidden = self.gate_up.multiply(x, slot, self.epilogue)
        if arrived[1] is not None:
            current.wait_event(arrived[1])
        return self.down.multiply(hidden, slot, tokens=len(x))

    def _fetch(self, dispatched: Dispatch) -> list[Any]:
        """Queue copies of the experts to fetch; return an event after each of both weights: the first product overlaps the second copy."""
        streams, stream = self.fetching.streams, self.fetching.stream
        stream.wait_event(streams.record_event(streams.current()))  # after products of earlier passes with these slots
        arrived = []
        for weights, copies in zip(self.weights, self.copy_tables):
            with streams.on(stream):
                if dispatched.fetched.is_cuda:
                    torch.ops.zero_inference.expert_fetch(
                        dispatched.fetched, dispatched.fetched_into, copies, self.in_vectors
                    )
                else:
                    for expert, slot in zip(dispatched.fetched.tolist(), dispatched.fetched_into.tolist()):
                        for each in weights.tensors if expert >= 0 else ():
                            each.slots[slot].copy_(each.host[expert], non_blocking=True)
            arrived.append(streams.record_event(stream))
        return arrived


class ExpertCaches:
    """The caches of all blocks whose experts the CPU multiplies, where the device caches or fetches some."""

    def __init__(self, placement: Placement, store: BlockStore, devices: Sequence[torch.device], transfers: Transfers):
        self.transfers, slots_of = transfers, placement.expert_slots
        max_fetches = max(placement.quota, default=0)
        indices = sorted(placement.cpu_experts if max_fetches else slots_of)
        # a column for each expert, and one more for pairs without an expert
        columns = 1 + max(placement.blocks[index].experts.num_experts for index in indices)
        self.task_counts = torch.zeros(len(indices), COUNTS, dtype=torch.int64)  # [blocks, COUNTS]
        self.sizes = [placement.expert_bytes(index) for index in indices]
        counts_of = dict(zip(indices, self.task_counts))
        self.by_block: dict[int, ExpertCache] = {}
        for number, device in enumerate(devices):
            streams, mine = DeviceStreams(device), placement.on(number, indices)
            tables = torch.full((len(mine), columns), -1, dtype=torch.int64, device=device)
            uses = torch.zeros(len(mine), columns, dtype=torch.float32, device=device)
            quota = torch.tensor([*placement.quota, *[0] * columns][:columns], device=device)
            fetching = FetchConfig(quota, max_fetches, streams, streams.stream())
            shared = torch.zeros(placement.staging_bytes_on(number), dtype=torch.uint8, device=device)
            for index, table, use in zip(mine, tables, uses):
                self.by_block[index] = ExpertCache(
                    placement.blocks[index],
                    slots_of.get(index, max_fetches),
                    # experts on disk are neither fetched nor gathered from here
                    store.buffers.get(
                        index, torch.empty(placement.blocks[index].layout.nbytes, dtype=torch.uint8, device="meta")
                    ),
                    table,
                    use,
                    counts_of[index],
                    fetching,
                    None if index in slots_of else shared,
                )
        transfers.expert_counts = self.counts

    def counts(self) -> ExpertCounts:
        choices, hits, saved, fetched = self.task_counts[:, [CHOICES, HITS, SAVED, FETCHED]].unbind(1)  # [blocks] each
        saved_bytes, fetched_bytes = (
            sum(count * size for count, size in zip(counts.tolist(), self.sizes)) for counts in (saved, fetched)
        )
        return ExpertCounts(int(choices.sum()), int(hits.sum()), saved_bytes, fetched_bytes)

    def close(self) -> None:
        """Release the slots; nothing may be in flight."""
        self.transfers.host_to_device_bytes += self.counts().fetched_bytes  # until now `expert_counts` added them
        self.transfers.expert_counts = None
        self.by_block.clear()


class HostExperts:
    """Caches experts of blocks on disk in host memory for decode passes, in which the CPU multiplies them.

    All such blocks share the slots of one buffer, which is laid out like a block of as many experts. So a slot is an expert to the CPU
    backend, and the ids of chosen experts become those of slots.

    Attributes:
        block: of as many experts as there are slots; `buffer`: its bytes.
    """

    def __init__(self, placement: Placement, disk: DiskBlocks, pinned: bool, transfers: Transfers):
        self.disk, self.transfers = disk, transfers
        self.blocks = sorted(placement.cached_on_host)
        first, slots = placement.blocks[self.blocks[0]], placement.host_expert_slots
        self.experts = first.experts.num_experts
        layout = lay_out_experts(first.layout, slots)
        self.block: Block = replace(first, experts=replace(first.experts, num_experts=slots), layout=layout)
        self.buffer = host_empty((layout.nbytes,), torch.uint8, pinned)
        # (offset in a block, offset in the buffer, bytes of one expert) of each tensor of experts
        pieces = zip(
            (piece for stored in first.layout.parameters for piece in stored.pieces),
            (piece for stored in layout.parameters for piece in stored.pieces),
        )
        self.pieces = [(of_block.offset, own.offset, own.nbytes // slots) for of_block, own in pieces]
        rows = len(self.blocks)
        self.row_of = {block: row for row, block in enumerate(self.blocks)}
        self.uses = np.zeros((rows, self.experts))
        self.slot_of = np.full((rows, self.experts), -1)
        self.owner = np.full((slots, 2), -1)  # row and expert in each slot
        self.choices = self.hits = 0  # (token, expert) pairs, and those whose expert was in host memory
        self.counts_of_device = transfers.expert_counts or ExpertCounts
        transfers.expert_counts = self.counts

    def counts(self) -> ExpertCounts:
        counts = self.counts_of_device()
        choices = counts.choices or self.choices  # no device cache counts them
        return counts._replace(choices=choices, host_choices=self.choices, host_hits=self.hits)

    def slots_for(self, block: int, chosen: list[int]) -> dict[int, int]:
        """Return the slots of experts that the tokens of a pass have chosen, once those that were missing are read.

        Args:
            chosen: an expert id for each token and choice. An id equal to the number of experts stands for no expert; it maps to the
                number of slots, which the CPU ignores.

        Raises:
            RunError: the disk cannot be read.
        """
        none = {expert: len(self.owner) for expert in chosen if expert >= self.experts}
        chosen = [expert for expert in chosen if expert not in none]
        row, needed = self.row_of[block], sorted(set(chosen))
        assert len(needed) <= len(self.owner), "the plan has slots for the experts of a decode pass"
        self.choices += len(chosen)
        self.hits += sum(self.slot_of[row, expert] >= 0 for expert in chosen)
        self.uses[row] *= USE_DECAY
        self.uses[row, needed] += 1
        missing = [expert for expert in needed if self.slot_of[row, expert] < 0]
        slots = self._evict(row, needed, len(missing))
        parts: list[Future[int]] = []
        try:
            for expert, slot in zip(missing, slots):
                parts += self._read(block, expert, slot)
            self.transfers.disk_read_bytes += self.disk.finish_read(block, parts)
        except BaseException:
            wait(parts)
            raise
        self.owner[slots] = [(row, expert) for expert in missing] or np.empty((0, 2), int)
        self.slot_of[row, missing] = slots
        return none | {expert: int(self.slot_of[row, expert]) for expert in needed}

    def close(self) -> None:
        self.transfers.expert_counts = None if self.counts_of_device is ExpertCounts else self.counts_of_device

    def _evict(self, row: int, needed: list[int], count: int) -> list[int]:
        """Return `count` slots to fill: empty ones first, then those of the least used experts that this pass does not need."""
        if not count:
            return []
        rows, experts = self.owner.T
        use = np.where(rows >= 0, self.uses[rows, experts], -1.0)
        use[self.slot_of[row, needed][self.slot_of[row, needed] >= 0]] = np.inf
        slots = np.argsort(use, kind="stable")[:count]
        for slot in slots[rows[slots] >= 0]:
            self.slot_of[tuple(self.owner[slot])] = -1
        self.owner[slots] = -1
        return slots.tolist()

    def _read(self, block: int, expert: int, slot: int) -> list[Future[int]]:
        parts: list[Future[int]] = []
        for in_block, own, nbytes in self.pieces:
            memory = self.buffer[own + slot * nbytes : own + (slot + 1) * nbytes]
            parts += self.disk.read(block, memory, in_block + expert * nbytes)
        return parts
