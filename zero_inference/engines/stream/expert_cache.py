"""Experts of a mixture that the device multiplies, while the CPU multiplies others from host memory, which has all of them.

`ExpertSlots` are those that device memory keeps, `StagedExperts` those of the missed ones that the device fetches for one pass.
A pass of many tokens, which brings each block to the device whole, fills the slots with what its tokens chose most; between passes
of few tokens a few experts come over the link in place of others (expert_policy.py). Both happen in the order of the model's
stream, and a slot is in no table while it is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zero_inference.cores.choice import WeightedRows
from zero_inference.cores.experts import CHOICES, FETCHED, FIRST_USE, HITS, UNREAD
from zero_inference.engines.stream.codes import combination_of
from zero_inference.engines.stream.expert_policy import (
    LONG_PASS_KEEPS,
    PERIOD_PASSES,
    Exchange,
    decayed,
    exchanges,
)
from zero_inference.engines.stream.expert_slots import expert_memory
from zero_inference.engines.stream.layout import ALIGNMENT, BlockLayout, Piece
from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.store import BlockStore
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.models.experts import FusedExperts
from zero_inference.quantization.groups import GroupQuantization
from zero_inference.quantization.indexed import Combination, linear_groups_indexed, linear_indexed
from zero_inference.runtime.extension import load_extension
from zero_inference.runtime.host_memory import host_empty
from zero_inference.runtime.transfers import ExpertCounts, Transfers


class _Weights:
    """One of the two weights of some experts, as it is stored, and its bias if `bias` names one.

    Attributes:
        kept: of the experts in the slots, by piece: the weight, or codes, scales and minima, and then the bias; [slots, elements].
        waiting: of all experts in host memory, likewise.

    Args:
        memory: uint8 on the device for the slots, see `expert_memory`; None allocates it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        name: str,
        bias: str,
        number: int,
        slots: int,
        buffer: torch.Tensor,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ):
        stored = layout[name]
        self.pieces, self.number, self.quantized = stored.pieces, number, stored.packed is not None
        self.biased = bool(bias)
        if bias:
            self.pieces += layout[bias].pieces
        self.dtype, (_, self.rows, self.columns) = stored.plain.dtype, stored.plain.shape
        self.waiting = [self._by_expert(piece, buffer) for piece in self.pieces]
        self.kept = _in_one(slots, self.waiting, device, memory)

    def _by_expert(self, piece: Piece, buffer: torch.Tensor) -> torch.Tensor:
        return piece.of(buffer).view(self.number, -1)

    def take(self, experts: torch.Tensor, buffer: torch.Tensor) -> None:
        """Fill the slots with `experts`, int64 [slots], out of the block in `buffer` on the device."""
        for kept, piece in zip(self.kept, self.pieces):
            torch.index_select(_words(self._by_expert(piece, buffer)), 0, experts, out=_words(kept))

    def load(self, expert: int, slot: int) -> None:
        for kept, waiting in zip(self.kept, self.waiting):
            kept[slot].copy_(waiting[expert], non_blocking=True)

    def times(
        self,
        x: torch.Tensor,
        slot: torch.Tensor,
        scheme: GroupQuantization | None,
        combination: Combination | None = None,
        tokens: int = 0,
    ) -> torch.Tensor:
        """Return rows of x times the weights in slots, [pairs, rows]; x, slot and what follows as of `linear_groups_indexed`."""
        x, bias = x.to(self.dtype), self.kept[-1] if self.biased else None
        if not self.quantized or scheme is None:
            return linear_indexed(x, self.kept[0].view(-1, self.rows, self.columns), slot, bias, combination)
        codes, scale, minimum = self.kept[:3]
        return linear_groups_indexed(
            x, codes, scale, minimum, scheme.bits, scheme.group_size, self.rows, slot, bias, combination, tokens
        )


def _in_one(
    slots: int, like: Sequence[torch.Tensor], device: torch.device, memory: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return tensors [slots, elements] with as many elements in a row as each of `like`, in `memory` or in one allocation of zeros:
    PyTorch rounds up each, to 2 MiB."""
    pieces, end = [], 0
    for each in like:
        pieces.append(Piece(end, (slots, each.shape[1]), each.dtype))
        end += -(-pieces[-1].nbytes // ALIGNMENT) * ALIGNMENT
    if memory is None:
        memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return [piece.of(memory) for piece in pieces]


def _words(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as words of 8 bytes where they are whole ones: a kernel that gathers rows takes an element at a time."""
    return rows if rows.shape[1] * rows.element_size() % 8 else rows.view(torch.int64)


class Division(NamedTuple):
    """Who multiplies what tokens chose; each [tokens, k].

    Attributes:
        for_cpu: numbers for the CPU, as of `cores.choice.Choice`.
        slot: of `ExpertSlots`, -1 for none.
        staged: number in `fetched`, -1 for none.
        fetched: int64 [most], the experts to fetch, -1 for none.
    """

    for_cpu: torch.Tensor
    slot: torch.Tensor
    staged: torch.Tensor
    fetched: torch.Tensor


def divide(chosen: torch.Tensor, table: torch.Tensor, experts: int, quota: torch.Tensor, most: int) -> Division:
    """Divide what tokens chose over device memory, link and CPU; of missed experts those with the lowest numbers are fetched.

    One kernel on a CUDA device with the compiled extension; no value is read by the host.

    Args:
        chosen: int64 [tokens, k], numbers of experts.
        table: int64 [experts or more], the slot of each expert or -1.
        quota: int64 [experts + 1], how many of so many missed experts to fetch.
        most: to fetch.
    """
    if chosen.is_cuda and load_extension():
        for_cpu, slot, staged = (torch.empty_like(chosen, memory_format=torch.contiguous_format) for _ in range(3))
        found = Division(for_cpu, slot, staged, chosen.new_empty(most))
        torch.ops.zero_inference.expert_division(chosen.contiguous(), table, experts, quota, *found)
        return found
    none = chosen.new_full((1,), -1)
    number = torch.where((chosen >= 0) & (chosen < experts), chosen, experts)  # number `experts`: none
    slot = torch.cat([table[:experts], none])[number]
    missed = chosen.new_zeros(experts + 1)
    missed.scatter_(0, torch.where(slot < 0, number, experts).view(-1), torch.ones_like(number).view(-1))
    missed[experts] = 0
    rank = missed.cumsum(0) * missed  # from 1 on, 0 for those that are not missed
    fetches = (rank > 0) & (rank <= quota[missed.sum()].clamp(max=most))
    staged = torch.where((slot < 0) & fetches[number], rank[number] - 1, -1)
    fetched = chosen.new_full((most + 1,), -1)
    fetched.scatter_(0, torch.where(fetches, rank - 1, most), torch.arange(experts + 1, device=chosen.device))
    for_cpu = torch.where(slot >= 0, ~chosen, torch.where(staged >= 0, ~(chosen + experts), chosen))
    return Division(for_cpu, slot, staged, fetched[:most])


class StagedExperts:
    """The missed experts of a block that the device fetches for one pass, into memory that all blocks use in turn.

    Args:
        buffer: the block in host memory; page-locked where the device is a GPU.
        memory: uint8 on the device.
        most: experts to fetch.
        streams, stream: where they are fetched, beside what the model's stream does.
    """

    def __init__(
        self,
        experts: FusedExperts,
        layout: BlockLayout,
        buffer: torch.Tensor,
        scheme: GroupQuantization | None,
        memory: torch.Tensor,
        most: int,
        streams: DeviceStreams,
        stream: Any,
    ):
        self.scheme, self.most = scheme, most
        self.combination = combination_of(experts)
        self.streams, self.stream = streams, stream
        half = expert_memory(layout, experts, most)[0]
        self.weights = [
            _Weights(layout, name, bias, experts.number, most, buffer, memory.device, part)
            for name, bias, part in (
                (experts.first, experts.first_bias, memory[:half]),
                (experts.last, experts.last_bias, memory[half:]),
            )
        ]
        addresses = [
            [(waiting.data_ptr(), kept.data_ptr(), waiting[0].nbytes) for waiting, kept in zip(each.waiting, each.kept)]
            for each in self.weights
        ]
        self.in_vectors = not any(number % 16 for rows in addresses for row in rows for number in row)
        self.pieces = [torch.tensor(rows, device=memory.device) for rows in addresses]

    def fetch(self, fetched: torch.Tensor) -> list[Any]:
        """Fetch the experts `fetched`, int64 [most], and return the events that follow their first and their last weights, so that the
        first product is computed while the last weights come. The products of those before are done."""
        self.stream.wait_event(self.streams.recorded(self.streams.current()))
        there = []
        for weights, pieces in zip(self.weights, self.pieces):
            with self.streams.on(self.stream):
                if fetched.is_cuda:
                    torch.ops.zero_inference.expert_fetch(fetched, pieces, self.in_vectors)
                else:
                    for place, expert in enumerate(fetched.tolist()):
                        if expert >= 0:
                            weights.load(expert, place)
            there.append(self.streams.recorded(self.stream))
        return there

    def products(self, x: torch.Tensor, staged: torch.Tensor, there: list[Any]) -> torch.Tensor:
        """Return what fetched experts compute, as of `ExpertSlots.products`; `there` as of `fetch`."""
        slot, (first, last) = staged.view(-1), self.weights
        self.streams.current().wait_event(there[0])
        hidden = first.times(x, slot, self.scheme, self.combination)
        self.streams.current().wait_event(there[1])
        return last.times(hidden, slot, self.scheme, tokens=len(x))


class ExpertSlots:
    """Those of one block.

    Attributes:
        table: int64 [experts + 1 or more] on the device: the slot of each expert, or -1; what stands for no expert is behind them.
        uses: float32, of the same shape, on the device: decayed, as of the last pass of many tokens.
        use: what the cores count, see `cores.experts.add_experts`.
    """

    def __init__(
        self,
        experts: FusedExperts,
        layout: BlockLayout,
        count: int,
        buffer: torch.Tensor,
        scheme: GroupQuantization | None,
        table: torch.Tensor,
        uses: torch.Tensor,
        use: torch.Tensor,
    ):
        self.experts, self.scheme, self.combination = experts, scheme, combination_of(experts)
        self.table, self.uses, self.use = table, uses, use
        self.first, self.last = (
            _Weights(layout, name, bias, experts.number, count, buffer, table.device)
            for name, bias in ((experts.first, experts.first_bias), (experts.last, experts.last_bias))
        )
        self.numbers = torch.arange(count, device=table.device)

    @property
    def nbytes(self) -> int:
        """Of all slots, on the device."""
        return sum(kept.nbytes for weights in (self.first, self.last) for kept in weights.kept)

    @property
    def expert_bytes(self) -> int:
        return self.nbytes // self.numbers.numel()

    def take(self, chosen: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """Count what tokens chose, and fill the slots with the experts used most, out of the block in `buffer` on the device."""
        if chosen is not None:
            flat = chosen.reshape(-1).to(torch.int64)
            self.uses.scatter_add_(0, flat, self.uses.new_ones(1).expand_as(flat))
        most_used = self.uses[: self.experts.number].topk(self.numbers.numel()).indices
        self.first.take(most_used, buffer)
        self.last.take(most_used, buffer)
        self.table.fill_(-1)
        self.table.scatter_(0, most_used, self.numbers)

    def load(self, expert: int, slot: int) -> None:
        """Copy an expert from host memory, on the current stream."""
        self.first.load(expert, slot)
        self.last.load(expert, slot)

    def products(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return what those experts that are in slots compute of x [tokens, hidden]: [tokens * k, hidden].

        Args:
            slots: int64 [tokens, k], of the experts that each token chose; -1 for others, whose rows are zeros.
        """
        slot = slots.view(-1)
        hidden = self.first.times(x, slot, self.scheme, self.combination)
        return self.last.times(hidden, slot, self.scheme, tokens=len(x))


@dataclass(frozen=True)
class OnDevice:
    """The experts of a block that the device multiplies in a pass of few tokens.

    Attributes:
        number: of experts.
        table, quota: as of `divide`.
        use: what the CPU counts, see `cores.experts.add_experts`.
        slots, staged: None where it keeps none, or fetches none.
    """

    number: int
    table: torch.Tensor
    use: torch.Tensor
    quota: torch.Tensor
    slots: ExpertSlots | None
    staged: StagedExperts | None

    def divide(self, chosen: torch.Tensor) -> Division:
        most = 0 if self.staged is None else self.staged.most
        return divide(chosen, self.table, self.number, self.quota, most)

    def products(self, x: torch.Tensor, division: Division, weights: torch.Tensor) -> WeightedRows:
        """Return what the experts in slots and fetched ones compute of x [tokens, hidden], and their `weights` [tokens, k].

        Those in slots are multiplied while others are fetched.
        """
        rows = []
        there = None if self.staged is None else self.staged.fetch(division.fetched)
        if self.slots is not None:
            rows.append(self.slots.products(x, division.slot))
        if self.staged is not None:
            rows.append(self.staged.products(x, division.staged, there))
        return WeightedRows(weights.contiguous(), *(each.to(x.dtype) for each in rows))


class ExpertCache:
    """The slots of all blocks, and what changes in them from pass to pass; and the memory of staged experts.

    The host knows what is in them and how often each expert was used: it asks for that behind a pass of many tokens, waits for nothing,
    and adds what the cores counted since.
    """

    def __init__(
        self,
        residency: Residency,
        store: BlockStore,
        scheme: GroupQuantization | None,
        device: torch.device,
        transfers: Transfers,
    ):
        self.streams, self.transfers = DeviceStreams(device), transfers
        self.copy_stream = self.streams.stream()
        counts = residency.expert_slots
        others = (
            sorted(residency.computed.intersection(residency.expert_blocks) - counts.keys()) if residency.quota else []
        )
        forms = {index: residency.blocks[index].experts for index in (*counts, *others)}
        numbers = [form.number for form in forms.values()]
        # a row each for a block; its last column, or those behind its experts, stand for none
        shape, pinned = (len(numbers), max(numbers) + 1), self.streams.on_gpu
        self.tables = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.uses = torch.zeros(shape, dtype=torch.float32, device=device)
        self.host_tables = host_empty(shape, torch.int64, pinned).fill_(-1)
        self.host_uses = host_empty(shape, torch.float32, pinned).zero_()
        self.use = torch.zeros(len(numbers), FIRST_USE + shape[1], dtype=torch.int64)
        self.counted = self.use.clone()  # at the last look
        self.tables_on_host = [row[:number] for row, number in zip(self.host_tables, numbers)]
        self.uses_on_host = [row[:number] for row, number in zip(self.host_uses, numbers)]
        self.slots = {
            index: ExpertSlots(form, residency.layouts[index], counts[index], store.buffers[index], scheme, *rows)
            for (index, form), rows in zip(forms.items(), zip(self.tables, self.uses, self.use))
            if index in counts
        }
        self.blocks = list(self.slots.values())
        self.sizes = [residency.expert_bytes(index) for index in forms]
        quota = torch.tensor([*residency.quota, *[0] * (1 + max(numbers))][: 1 + max(numbers)], device=device)
        most, staging, fetches = max(residency.quota, default=0), None, self.streams.stream()
        if most:
            staging = torch.zeros(residency.staging_bytes, dtype=torch.uint8, device=device)
        self.on_device = {
            index: OnDevice(
                form.number,
                table,
                use,
                quota,
                self.slots.get(index),
                None
                if staging is None
                else StagedExperts(
                    form, residency.layouts[index], store.buffers[index], scheme, staging, most, self.streams, fetches
                ),
            )
            for (index, form), table, use in zip(forms.items(), self.tables, self.use)
        }
        self.loaded_bytes = 0
        self.passes = 0  # of few tokens, since the last of many
        self.asked: Any = None  # event behind the copies of what the host wants to know
        self.known = False  # whether it does
        self.pending: list[Exchange] = []  # experts on their way
        self.copied: Any = None  # event behind them
        transfers.expert_counts = self.counts

    def pass_begins(self, few: bool) -> None:
        """A pass of few tokens, or of many, in which `seen` will be called for each block."""
        if not self.blocks:
            return
        self._install()
        if not few:
            if self.known:
                self.uses.copy_(self.host_uses, non_blocking=True)
            self.uses.mul_(LONG_PASS_KEEPS)
            self.known, self.passes = False, 0
            return
        if self.passes == 0:
            self._ask()
        self.passes += 1
        if self.passes % PERIOD_PASSES == 0:
            self._look()

    def seen(self, index: int, chosen: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """The device computes all of block `index`, which is in `buffer`, for tokens that chose the experts `chosen` [tokens, k]."""
        if index in self.slots:
            self.slots[index].take(chosen, buffer)

    def counts(self) -> ExpertCounts:
        """So far, of passes of few tokens."""
        choices, hits, unread, fetched = self.use[:, [CHOICES, HITS, UNREAD, FETCHED]].unbind(1)
        saved, crossed = (
            sum(count * size for count, size in zip(each.tolist(), self.sizes)) for each in (unread, fetched)
        )
        return ExpertCounts(int(choices.sum()), int(hits.sum()), saved, self.loaded_bytes, crossed)

    def close(self) -> None:
        """Let go of the slots; nothing may be under way."""
        self.transfers.host_to_device_bytes += self.counts().fetched_bytes  # a last snapshot has them, too
        self.transfers.expert_counts = None
        self.on_device.clear()
        self.slots.clear()
        self.blocks.clear()

    def _ask(self) -> None:
        self.host_tables.copy_(self.tables, non_blocking=True)
        self.host_uses.copy_(self.uses, non_blocking=True)
        self.asked = self.streams.recorded(self.streams.current())
        self.counted.copy_(self.use)

    def _look(self) -> None:
        """Choose experts that are worth a place, and send for them into the places of others, which are in no table from now on."""
        if not self.known:
            self.asked.synchronize()  # some tokens ago: the host, which reads each of them, does not wait here
            self.known = True
        now = self.use.clone()
        self.host_uses.copy_(decayed(self.host_uses, PERIOD_PASSES) + (now - self.counted)[:, FIRST_USE:])
        self.counted = now
        found = exchanges(self.uses_on_host, self.tables_on_host, self.sizes)
        if not found:
            return
        for cache, _, slot in found:
            table = self.tables_on_host[cache]
            gone = int((table == slot).nonzero())
            table[gone] = self.blocks[cache].table[gone] = -1
        self.copy_stream.wait_event(self.streams.recorded(self.streams.current()))
        with self.streams.on(self.copy_stream):
            for cache, expert, slot in found:
                self.blocks[cache].load(expert, slot)
                self.loaded_bytes += self.sizes[cache]
                self.transfers.host_to_device_bytes += self.sizes[cache]
        self.pending, self.copied = found, self.streams.recorded(self.copy_stream)

    def _install(self) -> None:
        """What was sent for in the pass before is used from now on."""
        if not self.pending:
            return
        self.streams.current().wait_event(self.copied)
        for cache, expert, slot in self.pending:
            self.tables_on_host[cache][expert] = self.blocks[cache].table[expert] = slot
        self.pending = []
