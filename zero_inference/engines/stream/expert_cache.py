"""Experts of a mixture that the device multiplies, while the CPU multiplies others from host memory, which has all of them.

Each block has slots in device memory (`ExpertCache`). They hold the first experts until a pass of many tokens, which needs all experts of
a block on the device: those in slots are copied from there, the others cross the link (`ExpertSlots.gather`). Then slots are filled with
the experts used most. In a pass of few tokens the device fetches some of the missed experts over the link, and these evict the least used
ones; the use count of an expert halves every `HALF_LIFE_PASSES`. All of it is decided on the device, in the order of the model's stream, so
that a CUDA graph can contain it. Blocks without slots of their own fetch into memory that they share, and keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zero_inference.cpu.experts import CHOICES, COUNTS, FETCHED, HITS, UNREAD, WeightedRows
from zero_inference.engines.stream.expert_slots import expert_memory
from zero_inference.engines.stream.layout import BUFFER_ALIGNMENT, BlockLayout, BlockStore, TensorSpan
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import combination_of
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kernels.indexed import Combination, linear_groups_indexed, linear_indexed
from zero_inference.kernels.products import FUSED_DTYPES, FUSED_GROUP_SIZES
from zero_inference.models.experts import FusedExperts
from zero_inference.utils.transfers import ExpertCounts, Transfers

# Decode passes in which the use count of an expert halves: between LRU, which hits more where recent tokens repeat, and counting all uses,
# which hits more where they do not (benchmarks/expert_reuse.py).
HALF_LIFE_PASSES = 32
KEPT_USE = 0.5 ** (1 / HALF_LIFE_PASSES)  # factor of the use counts per pass


def multiplies_many(scheme: GroupQuantization | None) -> bool:
    """Return whether the device multiplies kept experts with many tokens as they are stored: otherwise it gathers a weight for each
    pair of a token and an expert."""
    return scheme is not None and scheme.dtype in FUSED_DTYPES and scheme.group_size in FUSED_GROUP_SIZES


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

    def _by_expert(self, piece: TensorSpan, buffer: torch.Tensor) -> torch.Tensor:
        return piece.of(buffer).view(self.number, -1)

    def copies(self) -> torch.Tensor:
        """Return for each piece what copies of it need, int64 [pieces, 4] on the device: its address in host memory, that of the slots, its
        offset in the block, and the bytes of an expert."""
        rows = [
            (waiting.data_ptr(), kept.data_ptr(), piece.offset, waiting[0].nbytes)
            for waiting, kept, piece in zip(self.waiting, self.kept, self.pieces)
        ]
        return torch.tensor(rows, device=self.kept[0].device)

    def load_first(self) -> None:
        """Fill the slots with the first experts, from host memory."""
        for kept, waiting in zip(self.kept, self.waiting):
            kept.copy_(waiting[: len(kept)], non_blocking=True)

    def put(self, slots: Sequence[int], buffer: torch.Tensor) -> None:
        """Copy all experts into the block in `buffer`: from `slots`, or from host memory where that is -1."""
        for kept, waiting, piece in zip(self.kept, self.waiting, self.pieces):
            for expert, (target, slot) in enumerate(zip(self._by_expert(piece, buffer), slots)):
                target.copy_(waiting[expert] if slot < 0 else kept[slot])

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
        pieces.append(TensorSpan(end, (slots, each.shape[1]), each.dtype))
        end += -(-pieces[-1].nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    if memory is None:
        memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return [piece.of(memory) for piece in pieces]


def _ranges_besides(layout: BlockLayout, experts: FusedExperts) -> list[tuple[int, int]]:
    """Return the ranges of a block's buffer that hold other parameters than `experts`."""
    ranges: list[tuple[int, int]] = []
    others = [stored for stored in layout.parameters if stored.name not in experts.parameters]
    for piece in sorted((piece for stored in others for piece in stored.pieces), key=lambda piece: piece.offset):
        begin, end = piece.offset, piece.offset + piece.nbytes
        if ranges and begin - ranges[-1][1] < BUFFER_ALIGNMENT:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return ranges


def _words(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as words of 8 bytes where they are whole ones: a kernel that gathers rows takes an element at a time."""
    return rows if rows.shape[1] * rows.element_size() % 8 else rows.view(torch.int64)


class Dispatch(NamedTuple):
    """Who multiplies what tokens chose; the first three [tokens, k].

    Attributes:
        for_cpu: numbers for the CPU, as of `cores.choice.Choice`.
        slot: slot of an expert that the device has, -1 for none.
        fetched_slot: slot of an expert that it fetches in this pass, -1 for none.
        fetched: int64 [most], the experts to fetch, -1 for none.
        fetched_into: int64 [most], the slots to fetch them into, -1 for none.
    """

    for_cpu: torch.Tensor
    slot: torch.Tensor
    fetched_slot: torch.Tensor
    fetched: torch.Tensor
    fetched_into: torch.Tensor


def dispatch(
    chosen: torch.Tensor,
    table: torch.Tensor,
    uses: torch.Tensor,
    experts: int,
    quota: torch.Tensor,
    most: int,
    keeps: bool = True,
) -> Dispatch:
    """Divide what tokens chose over device memory, link and CPU, and count it in `uses`.

    The most used missed experts are fetched. Each evicts the least used expert that no token chose, and `table` is updated; if
    there are too few of those, fewer are fetched. Among experts used alike the lowest number comes first.
    One kernel on a CUDA device with the compiled extension; no value is read by the host.

    Args:
        chosen: int64 [tokens, k], numbers of experts.
        table: int64 [more than experts], the slot of each expert or -1.
        uses: float32 of that shape.
        quota: int64 [experts + 1], how many of so many missed experts to fetch.
        most: to fetch; up to `experts`.
        keeps: otherwise the table stays empty, and experts are fetched into slots 0, 1 ... for this pass.
    """
    if chosen.is_cuda and load_extension():
        found = Dispatch(
            *(torch.empty_like(chosen, memory_format=torch.contiguous_format) for _ in range(3)),
            *(chosen.new_empty(most) for _ in range(2)),
        )
        torch.ops.zero_inference.expert_division(
            chosen.contiguous(), table, uses, experts, quota, KEPT_USE, keeps, *found
        )
        return found
    number = torch.where((chosen >= 0) & (chosen < experts), chosen, experts)  # number `experts`: none
    slot = table[number]
    is_chosen = torch.zeros(experts + 1, dtype=torch.bool, device=chosen.device)
    is_chosen = is_chosen.index_fill_(0, number.view(-1), True)[:experts]
    used = uses[:experts].mul_(KEPT_USE).add_(is_chosen)
    held = table[:experts] >= 0
    missed, idle = is_chosen & ~held, held & ~is_chosen
    places = torch.arange(most, device=chosen.device)
    number_missed = missed.sum()
    count = torch.minimum(quota[number_missed], number_missed).clamp(max=most)
    if keeps:
        count = torch.minimum(count, idle.sum())
    fetches = places < count
    fetched = (-used).masked_fill(~missed, torch.inf).argsort(stable=True)[:most]
    if keeps:
        evicted = used.masked_fill(~idle, torch.inf).argsort(stable=True)[:most]
        places = table[evicted]
        table.scatter_(0, torch.where(fetches, evicted, experts), -1)
    else:
        table = table.clone()
    places = torch.where(fetches, places, -1)
    table.scatter_(0, torch.where(fetches, fetched, experts), places)
    fetched_slot = torch.where(slot < 0, table[number], -1)
    for_cpu = torch.where(slot >= 0, ~chosen, torch.where(fetched_slot >= 0, ~(chosen + experts), chosen))
    return Dispatch(for_cpu, slot, fetched_slot, torch.where(fetches, fetched, -1), places)


@dataclass(frozen=True)
class FetchConfig:
    """Settings of fetching, the same for all blocks.

    Attributes:
        quota: as of `dispatch`.
        most: the largest of it.
        streams, stream: where they are fetched, beside what the model's stream does.
    """

    quota: torch.Tensor
    most: int
    streams: DeviceStreams
    stream: Any


class ExpertCache:
    """The experts of one block that the device multiplies in a pass of few tokens.

    Attributes:
        table, uses: as of `dispatch`, on the device.
        keeps: whether the slots are this block's own.
        use: what the CPU counts, see `cores.experts.add_experts`.

    Args:
        count: slots.
        buffer: the block in host memory; page-locked where a GPU fetches from it.
        shared: uint8 on the device, memory of `count` slots that other blocks use, too; None allocates slots of its own.
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
        fetching: FetchConfig,
        shared: torch.Tensor | None = None,
    ):
        self.experts, self.scheme, self.combination = experts, scheme, combination_of(experts)
        self.table, self.uses, self.use, self.keeps = table, uses, use, shared is None
        self.fetching, self.most = fetching, min(fetching.most, experts.number)
        half = expert_memory(layout, experts, count)[0]
        self.first, self.last = (
            _Weights(layout, name, bias, experts.number, count, buffer, table.device, memory)
            for name, bias, memory in (
                (experts.first, experts.first_bias, None if shared is None else shared[:half]),
                (experts.last, experts.last_bias, None if shared is None else shared[half:]),
            )
        )
        self.numbers = torch.arange(count, device=table.device)
        self.copies = [each.copies() for each in (self.first, self.last)]
        self.copies_of_block = torch.cat(self.copies)
        self.in_vectors = not bool((self.copies_of_block % 16).any())
        self.buffer, self.others = buffer, _ranges_besides(layout, experts)
        self.held = 0  # slots with an expert
        self.gathering: Any = None  # event that follows the last `gather`

    @property
    def nbytes(self) -> int:
        """Of all slots, on the device."""
        return sum(kept.nbytes for weights in (self.first, self.last) for kept in weights.kept)

    @property
    def expert_bytes(self) -> int:
        return self.nbytes // self.numbers.numel()

    def load_first(self) -> None:
        """Fill the slots with the first experts."""
        self.first.load_first()
        self.last.load_first()
        self._hold(self.numbers)

    def gather(self, buffer: torch.Tensor) -> int:
        """Put the block into `buffer` on the device, on the current stream, and return the bytes that cross the link for it, which are not
        those of experts in slots."""
        for begin, end in self.others:
            buffer[begin:end].copy_(self.buffer[begin:end], non_blocking=True)
        number = self.experts.number
        if self.table.is_cuda:
            torch.ops.zero_inference.expert_fill(self.table, number, self.copies_of_block, buffer, self.in_vectors)
        else:
            for weights in (self.first, self.last):
                weights.put(self.table[:number].tolist(), buffer)
        self.gathering = self.fetching.streams.record_event(self.fetching.streams.current())
        return sum(end - begin for begin, end in self.others) + (number - self.held) * self.expert_bytes

    def take(self, chosen: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """Count what tokens chose, [tokens, k], and fill the slots with the experts used most. `await_gathering` has been called.

        Args:
            buffer: the block, on the device.
        """
        if chosen is not None:
            self.count(chosen)
        self.table.fill_(-1)  # a call that breaks off leaves no expert under a wrong number
        most_used = self.uses[: self.experts.number].topk(self.numbers.numel()).indices
        self.first.take(most_used, buffer)
        self.last.take(most_used, buffer)
        self._hold(most_used)

    def await_gathering(self) -> None:
        """Let the current stream wait for the last `gather`, which reads the slots, perhaps for the next pass; no part of a CUDA graph."""
        if self.gathering is not None:
            self.fetching.streams.current().wait_event(self.gathering)

    def count(self, chosen: torch.Tensor) -> None:
        """Count what tokens chose, [tokens, k], as if they had come one after the other."""
        flat, tokens = chosen.reshape(-1).to(torch.int64), chosen[..., 0].numel()
        kept = KEPT_USE**tokens
        each = self.uses.new_full((1,), (1 - kept) / (1 - KEPT_USE) / max(1, tokens))
        self.uses.mul_(kept).scatter_add_(0, flat, each.expand_as(flat))

    def divide(self, chosen: torch.Tensor) -> Dispatch:
        """Divide what the tokens of a pass of few chose, see `dispatch`; `products` or `forget` has to follow."""
        quota = self.fetching.quota
        return dispatch(chosen, self.table, self.uses, self.experts.number, quota, self.most, self.keeps)

    def forget(self) -> None:
        """Empty the slots until the next pass of many tokens: this pass failed, and the table names experts that were not fetched. The
        current stream waits for those under way, whose numbers lie in memory that is free now."""
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing of it was done
        streams = self.fetching.streams
        streams.current().wait_event(streams.record_event(self.fetching.stream))
        self.table.fill_(-1)
        self.held = 0

    def _hold(self, experts: torch.Tensor) -> None:
        """Note that the slots, of which the table names none, hold `experts`, int64 [slots]."""
        self.table.scatter_(0, experts, self.numbers)
        self.held = experts.numel()

    def products(self, x: torch.Tensor, division: Dispatch, weights: torch.Tensor) -> WeightedRows:
        """Return what the experts in slots and fetched ones compute of x [tokens, hidden], and their `weights` [tokens, k].

        Those in slots are multiplied while others are fetched.
        """
        rows = []
        arrived = self._fetch(division) if self.most else None
        if self.keeps:
            rows.append(self.rows(x, division.slot))
        if arrived is not None:
            rows.append(self.rows(x, division.fetched_slot, arrived))
        return WeightedRows(weights.contiguous(), *(each.to(x.dtype) for each in rows))

    def rows(self, x: torch.Tensor, slots: torch.Tensor, arrived: Sequence[Any] = (None, None)) -> torch.Tensor:
        """Return what those experts that are in slots compute of x [tokens, hidden]: [tokens * k, hidden].

        Args:
            slots: int64 [tokens, k], of the experts that each token chose; -1 for others, whose rows are zeros.
            arrived: events that the first and the last product wait for.
        """
        slot, current = slots.view(-1), self.fetching.streams.current()
        if arrived[0] is not None:
            current.wait_event(arrived[0])
        hidden = self.first.times(x, slot, self.scheme, self.combination)
        if arrived[1] is not None:
            current.wait_event(arrived[1])
        return self.last.times(hidden, slot, self.scheme, tokens=len(x))

    def _fetch(self, division: Dispatch) -> list[Any]:
        """Fetch experts and return the events that follow their first and their last weights, so that the first product is computed while
        the last weights come. Earlier products with these slots are done; this pass has none."""
        streams, stream = self.fetching.streams, self.fetching.stream
        stream.wait_event(streams.record_event(streams.current()))
        arrived = []
        for weights, pieces in zip((self.first, self.last), self.copies):
            with streams.on(stream):
                if division.fetched.is_cuda:
                    torch.ops.zero_inference.expert_fetch(
                        division.fetched, division.fetched_into, pieces, self.in_vectors
                    )
                else:
                    for expert, place in zip(division.fetched.tolist(), division.fetched_into.tolist()):
                        if expert >= 0:
                            weights.load(expert, place)
            arrived.append(streams.record_event(stream))
        return arrived


class ExpertCaches:
    """The slots of all blocks whose experts the CPU multiplies, where the device keeps or fetches some.

    Attributes:
        slots: by block.
    """

    def __init__(
        self,
        placement: Placement,
        store: BlockStore,
        scheme: GroupQuantization | None,
        device: torch.device,
        transfers: Transfers,
    ):
        self.transfers, self.gathered_blocks, streams = transfers, placement.gathered, DeviceStreams(device)
        counts, most = placement.expert_slots, max(placement.quota, default=0)
        indices = sorted(placement.cpu_computed.intersection(placement.expert_blocks) if most else counts)
        forms = [placement.blocks[index].experts for index in indices]
        # [blocks, columns]: a column for each expert, and one more for pairs without an expert
        columns = 1 + max(form.number for form in forms)
        tables = torch.full((len(forms), columns), -1, dtype=torch.int64, device=device)
        uses = torch.zeros(len(forms), columns, dtype=torch.float32, device=device)
        self.use = torch.zeros(len(forms), COUNTS, dtype=torch.int64)
        self.sizes = [placement.expert_bytes(index) for index in indices]
        quota = torch.tensor([*placement.quota, *[0] * columns][:columns], device=device)
        fetching = FetchConfig(quota, most, streams, streams.stream())
        shared = torch.zeros(placement.staging_bytes, dtype=torch.uint8, device=device)
        self.slots = {
            index: ExpertCache(
                form,
                placement.layouts[index],
                counts.get(index, most),
                store.buffers[index],
                scheme,
                *rows,
                fetching,
                None if index in counts else shared,
            )
            for index, form, rows in zip(indices, forms, zip(tables, uses, self.use))
        }
        transfers.expert_counts = self.counts

    def load_first(self) -> None:
        """Fill all slots that are a block's own; host memory is complete."""
        for slots in self.slots.values():
            if slots.keeps:
                slots.load_first()

    def gathered(self) -> dict[int, Callable[[torch.Tensor], int]]:
        """Return `ExpertSlots.gather` by block, of those that come to the device by it."""
        return {index: self.slots[index].gather for index in self.gathered_blocks}

    def await_gathering(self, index: int) -> None:
        """Let the current stream wait for the last `gather` of block `index`, if there was one: its slots may change then."""
        if index in self.slots:
            self.slots[index].await_gathering()

    def seen(self, index: int, chosen: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """The device computes all of block `index`, which is in `buffer`, for tokens that chose the experts `chosen` [tokens, k]."""
        if index in self.slots and self.slots[index].keeps:
            self.slots[index].take(chosen, buffer)

    def counts(self) -> ExpertCounts:
        """So far, of passes of few tokens."""
        choices, hits, unread, fetched = self.use[:, [CHOICES, HITS, UNREAD, FETCHED]].unbind(1)
        saved, crossed = (
            sum(count * size for count, size in zip(each.tolist(), self.sizes)) for each in (unread, fetched)
        )
        return ExpertCounts(int(choices.sum()), int(hits.sum()), saved, crossed)

    def close(self) -> None:
        """Let go of the slots; nothing may be under way."""
        self.transfers.host_to_device_bytes += self.counts().fetched_bytes  # a last snapshot has them, too
        self.transfers.expert_counts = None
        self.slots.clear()
