"""A ring buffer of device slots, into which the blocks of decoder layers are prefetched.

The order is circular: the first blocks of the next pass follow the last ones of this pass, so the link does not wait for a token to end.
The host never waits here: a copy into a slot is queued after the event of the slot's last use, the computation after that of the copy.
The number of slots is chosen by `placement.plan_placement` and, where the CPU multiplies too, by `plan.with_ring_for_cpu`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero_inference.engines.stream.layout import BlockStore
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.engines.stream.trace import Timeline
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


@dataclass
class _Fetch:
    """A block that was requested, its slot, and the event after its copy."""

    block: int
    slot: int
    arrived: Any


class RingBuffer:
    """Copies blocks into `depth` slots, in the order of the passes.

    Over several ranks each copies its share of a block over its own link into its own part of the slot, and an all-gather between the
    devices brings the others' shares.

    Args:
        blocks: all that may be streamed.
        depth: number of slots, each as large as the largest of these blocks.
        group: process group of the all-gathers, used by nothing else.
        gathered: by block, for those that one rank assembles instead of copying: a function that writes the block into a buffer on the
            device, on the current stream, and returns the bytes that crossed the link. It may read what the model's stream has written.
    """

    def __init__(
        self,
        store: BlockStore,
        blocks: Sequence[int],
        depth: int,
        ranks: Ranks,
        streams: DeviceStreams,
        transfers: Transfers,
        timeline: Timeline,
        group: Any = None,
        gathered: Mapping[int, Callable[[torch.Tensor], int]] | None = None,
    ):
        self.store, self.ranks, self.streams = store, ranks, streams
        self.gathered = gathered or {}
        self.transfers, self.timeline, self.group = transfers, timeline, group
        slot_bytes = max(store.layouts[block].nbytes for block in blocks)
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=ranks.device) for _ in range(depth)]
        self.last_use: list[Any] = [None] * depth  # by slot: the event after it
        self.last_span: list[Any] = [None] * depth  # by slot: the computation that used it
        self.empty: deque[int] = deque(range(depth))  # slots for which nothing was requested
        self.copy_stream = streams.stream()
        self.gather_stream = streams.stream() if ranks.world_size > 1 else self.copy_stream
        self.pending: deque[_Fetch] = deque()  # requested, not acquired yet
        self.held: _Fetch | None = None  # acquired, not released yet
        self.pass_order = tuple(blocks)  # of the pass that computes
        self.order = self.next_order = self.pass_order  # of the pass that is copied, and of those after it
        self.position = 0  # in `order`, of the next block to request
        self.early: set[int] = set()  # blocks of `order` that are pending before their turn
        self.fixed_order: tuple[int, ...] = ()  # of passes whose blocks always come into the same slots,
        self.fixed_slots: dict[int, int] = {}  # which are these

    def prime(self) -> None:
        """Start to fill the slots; the store has to be complete."""
        self.streams.synchronize()
        self._request_all()

    def fix_slots(self) -> None:
        """From now on copy each block of the current pass, or the last one, into the same slot whenever its order is followed."""
        self.fixed_order = self.pass_order
        slots = slots_in_use(len(self.fixed_order), len(self.slots))
        self.fixed_slots = {block: index % slots for index, block in enumerate(self.fixed_order)}

    def begin_fixed_pass(self) -> None:
        """Begin a pass whose blocks have fixed slots, followed by the same."""
        self.begin_pass(self.fixed_order, self.fixed_order)

    def begin_pass(self, order: Sequence[int], next_order: Sequence[int]) -> None:
        """Begin a pass that calls the blocks `order`, followed by passes that call `next_order`. Keep those pending that will be used."""
        order, next_order = tuple(order or next_order), tuple(next_order)
        pending = [fetch.block for fetch in self.pending]
        in_place = all(
            self._is_in_place(fetch, order if index < len(order) else next_order)
            for index, fetch in enumerate(self.pending)
        )
        self.pass_order = order
        if self.held is None and in_place and pending == self._first_blocks(order, next_order, len(pending)):
            self.position = len(pending)
            self.order, self.next_order = order, next_order
            while self.order and self.position >= len(self.order):
                self.position -= len(self.order)
                self.order = self.next_order
            self.early.clear()
        else:
            ahead = len(set(self.fixed_slots.values())) if order == self.fixed_order else len(self.slots)
            self._drop(all_but=set(order[:ahead]))
            self.order, self.next_order, self.position = order, next_order, 0
            self.early = {fetch.block for fetch in self.pending}
        self._request_all()

    def buffer_in(self, block: int, slot: int) -> torch.Tensor:
        """Return the part of `slot` that `block` takes, uint8 [nbytes]."""
        return self.slots[slot][: self.store.layouts[block].nbytes]

    def acquire(self, block: int) -> int:
        """Make the computation wait for `block`, and return its slot, which is the caller's until `release`."""
        if self.held is not None:
            self._drop()
        self.held = self._take_pending(block) or self._jump_to(block)
        self.streams.current().wait_event(self.held.arrived)
        return self.held.slot

    def release(self) -> None:
        """Free the slot of the last `acquire` after the work queued so far, and request one more block."""
        self.last_use[self.held.slot] = self.streams.record_event(self.streams.current())
        self.last_span[self.held.slot] = self.timeline.latest_block()
        self.empty.append(self.held.slot)
        self.held = None
        self._request_all()

    def close(self) -> None:
        self.streams.synchronize()
        self.pending.clear()
        self.slots.clear()

    @staticmethod
    def _first_blocks(order: tuple[int, ...], next_order: tuple[int, ...], count: int) -> list[int]:
        """Return the first `count` blocks of a pass and those after it."""
        found = list(order)
        while next_order and len(found) < count:
            found += next_order
        return found[:count]

    def _take_pending(self, block: int) -> _Fetch | None:
        for fetch in self.pending:
            if fetch.block == block and self._is_in_place(fetch, self.pass_order):
                self.pending.remove(fetch)
                return fetch
        return None

    def _jump_to(self, block: int) -> _Fetch:
        """Request `block`, which is not the next in order, and those after it: the model was called again after a call that broke off."""
        self._drop()
        self.early.clear()
        if block in self.pass_order:
            self.order = self.pass_order
        if block not in self.order:
            self.order = self.next_order = tuple(sorted({*self.order, *self.next_order, block}))
        self.position = self.order.index(block)
        self._request_all()
        return self.pending.popleft()

    def _drop(self, all_but: Collection[int] = ()) -> None:
        """Free the slots that are held and pending, except those of `all_but`, each of which may stay once."""
        stay: deque[_Fetch] = deque()
        for fetch in self.pending:
            wanted = fetch.block in all_but and self._is_in_place(fetch, self.pass_order)
            if wanted and all(fetch.block != other.block for other in stay):
                stay.append(fetch)
            else:
                self.last_use[fetch.slot] = fetch.arrived
                self.empty.append(fetch.slot)
        self.pending = stay
        if self.held is not None:
            self.last_use[self.held.slot] = self.streams.record_event(self.streams.current())
            self.empty.append(self.held.slot)
            self.held = None

    def _request_all(self) -> None:
        while self.empty and self._request_next():
            pass

    def _next_block(self) -> int | None:
        """Return the next block to request; None where none will be called."""
        while self.order or self.next_order:
            if self.position >= len(self.order):
                self.order, self.position = self.next_order, 0
                continue
            block = self.order[self.position]
            self.position += 1
            if block not in self.early:
                return block
            self.early.remove(block)
        return None

    def _is_in_place(self, fetch: _Fetch, order: tuple[int, ...]) -> bool:
        """Return whether a block of `order` is in the slot where that order needs it."""
        return order != self.fixed_order or self.fixed_slots.get(fetch.block, fetch.slot) == fetch.slot

    def _take_slot(self, block: int) -> int | None:
        """Return a slot for the next block in order; None if it is in use."""
        slot = self.fixed_slots[block] if self.order == self.fixed_order else self.empty[0]
        if slot not in self.empty:
            return None
        self.empty.remove(slot)
        return slot

    def _request_next(self) -> bool:
        """Queue the copy of the next block; return False if there is none, or no slot for it."""
        block = self._next_block()
        if block is None:
            return False
        slot = self._take_slot(block)
        if slot is None:
            self.position -= 1
            return False
        buffer, share = self.buffer_in(block, slot), self.store.buffers[block]
        if self.last_use[slot] is not None:
            self.copy_stream.wait_event(self.last_use[slot])
        assemble = self.gathered.get(block)
        if assemble is not None:
            self.copy_stream.wait_event(self.streams.record_event(self.streams.current()))
        start, link_bytes = self.streams.record_event(self.copy_stream), share.numel()
        with self.streams.on(self.copy_stream):
            own_part = buffer[self.ranks.rank * share.numel() :][: share.numel()]
            if assemble is None:
                own_part.copy_(share, non_blocking=True)
            else:
                link_bytes = assemble(buffer)
        copied = arrived = self.streams.record_event(self.copy_stream)
        self.transfers.host_to_device_bytes += link_bytes
        all_gather = None
        if self.ranks.world_size > 1:
            self.gather_stream.wait_event(copied)
            begun = self.streams.record_event(self.gather_stream)
            with self.streams.on(self.gather_stream):
                # NCCL gathers in place; gloo needs its input apart
                _all_gather(buffer, own_part if buffer.is_cuda else own_part.clone(), group=self.group)
            arrived = self.streams.record_event(self.gather_stream)
            all_gather = begun, arrived
        self.timeline.record_copy(
            block, link_bytes, self.last_use[slot], self.last_span[slot], start, copied, all_gather
        )
        self.pending.append(_Fetch(block, slot, arrived))
        return True


def slots_in_use(blocks: int, slots: int) -> int:
    """Return how many of `slots` a pass uses if each block comes into the same one in every pass.

    The first blocks of a pass wait for those in the last, incomplete round of the pass before: the fewer these are, the less they wait.
    """
    least = max(2, slots // 2)
    return max(range(min(least, slots), slots + 1), key=lambda number: (blocks % number or number, number))
