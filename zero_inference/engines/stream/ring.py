"""A ring of device slots that blocks of decoder layers pass through, filled ahead of the computation.

The order is circular: behind the last block of one token come the first ones of the next, so the link never waits for
a token to end. The host waits for nothing here: a copy into a slot is queued behind the event of its last use, and the
computation behind the event of the copy.
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


BetweenGraphs = Callable[
    [Callable[[], Any]], Any
]  # does what it is given, which is the ring's, between two parts of a pass


@dataclass
class _Fetch:
    """A block that was sent for: the slot it goes to, and the event that says it is there."""

    block: int
    slot: int
    full: Any


class RingBuffer:
    """Fetches blocks in the order that it is told, over and over, into `depth` slots.

    Over several ranks each copies its share of a block over its own link, into its own place in the slot, and an
    all-gather between the devices brings the others' shares.

    Args:
        blocks: all that may be fetched.
        depth: slots, each as large as the largest of these blocks.
        group: process group of the all-gathers, which has to be this ring's own.
        gathered: by block, for those that are not copied whole, with one rank: puts the block into a buffer on the device, on the current
            stream, and returns the bytes that come over the link for it. It may read what the model's stream has written.
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
        self.free: list[Any] = [None] * depth  # event behind the last use of each slot
        self.freed_by: list[Any] = [None] * depth  # and the computation that this was
        self.empty: deque[int] = deque(range(depth))  # slots that nothing was sent for
        self.copy_stream = streams.stream()
        self.gather_stream = streams.stream() if ranks.world_size > 1 else self.copy_stream
        self.pending: deque[_Fetch] = deque()
        self.held: _Fetch | None = None
        self.order = self.next_order = tuple(blocks)
        self.position = 0  # in `order`, of the next block to send for
        self.following = self.order  # that of the pass under way
        self.placed: tuple[int, ...] = ()  # an order whose blocks have slots of their own,
        self.places: dict[int, int] = {}  # and these
        self.early: set[int] = set()  # blocks of `order` that are pending before their turn

    def prime(self) -> None:
        """Start to fill the slots; the store has to be complete."""
        self.streams.synchronize()
        self._send_for_all()

    def fix_slots(self) -> None:
        """From now on each block of the pass under way, or just ended, comes into the same slot, whenever its order is followed."""
        self.placed = self.following
        slots = slots_in_use(len(self.placed), len(self.slots))
        self.places = {block: index % slots for index, block in enumerate(self.placed)}

    def follow_fixed_order(self) -> None:
        """A pass begins whose blocks have places."""
        self.follow(self.placed, self.placed)

    def follow(self, order: Sequence[int], then: Sequence[int]) -> None:
        """A pass begins: it will call `order`, and the passes behind it `then`. What is on its way and will be used stays."""
        order, then = tuple(order or then), tuple(then)
        on_their_way = [fetch.block for fetch in self.pending]
        in_place = all(
            self._in_place(fetch, order if index < len(order) else then) for index, fetch in enumerate(self.pending)
        )
        self.following = order
        if self.held is None and in_place and on_their_way == self._coming(order, then, len(on_their_way)):
            self.position = len(on_their_way)
            self.order, self.next_order = order, then
            while self.order and self.position >= len(self.order):
                self.position -= len(self.order)
                self.order = self.next_order
            self.early.clear()
        else:
            ahead = len(set(self.places.values())) if order == self.placed else len(self.slots)
            self._drop(all_but=set(order[:ahead]))
            self.order, self.next_order, self.position = order, then, 0
            self.early = {fetch.block for fetch in self.pending}
        self._send_for_all()

    def buffer_in(self, block: int, slot: int) -> torch.Tensor:
        """The buffer of `block`, uint8 [nbytes], as it lies in `slot`."""
        return self.slots[slot][: self.store.layouts[block].nbytes]

    def acquire(self, block: int) -> int:
        """Make the computation wait for `block`, and return its slot, which is the caller's until `release`."""
        if self.held is not None:
            self._drop()
        self.held = self._taken(block) or self._turned_to(block)
        self.streams.current().wait_event(self.held.full)
        return self.held.slot

    def release(self) -> None:
        """Give the slot of the last `acquire` back behind what the computation was asked so far, and send for one more block."""
        self.free[self.held.slot] = self.streams.record_event(self.streams.current())
        self.freed_by[self.held.slot] = self.timeline.latest_block()
        self.empty.append(self.held.slot)
        self.held = None
        self._send_for_all()

    def close(self) -> None:
        self.streams.synchronize()
        self.pending.clear()
        self.slots.clear()

    @staticmethod
    def _coming(order: tuple[int, ...], then: tuple[int, ...], count: int) -> list[int]:
        """The first `count` blocks of the order, with those behind it."""
        coming = list(order)
        while then and len(coming) < count:
            coming += then
        return coming[:count]

    def _taken(self, block: int) -> _Fetch | None:
        """The first fetch of `block`, which is pending no longer; None if there is none."""
        for fetch in self.pending:
            if fetch.block == block and self._in_place(fetch, self.following):
                self.pending.remove(fetch)
                return fetch
        return None

    def _turned_to(self, block: int) -> _Fetch:
        """The model calls another block than the next in order, as it does after a call that broke off."""
        self._drop()
        self.early.clear()
        if block in self.following:
            self.order = self.following
        if block not in self.order:
            self.order = self.next_order = tuple(sorted({*self.order, *self.next_order, block}))
        self.position = self.order.index(block)
        self._send_for_all()
        return self.pending.popleft()

    def _drop(self, all_but: Collection[int] = ()) -> None:
        """Let go of what is held and pending, but for `all_but`, each of which may stay once."""
        kept: deque[_Fetch] = deque()
        for fetch in self.pending:
            wanted = fetch.block in all_but and self._in_place(fetch, self.following)
            if wanted and all(fetch.block != other.block for other in kept):
                kept.append(fetch)
            else:
                self.free[fetch.slot] = fetch.full
                self.empty.append(fetch.slot)
        self.pending = kept
        if self.held is not None:
            self.free[self.held.slot] = self.streams.record_event(self.streams.current())
            self.empty.append(self.held.slot)
            self.held = None

    def _send_for_all(self) -> None:
        while self.empty and self._send_for_next():
            pass

    def _next_block(self) -> int | None:
        """What to send for now; None where nothing will be called."""
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

    def _in_place(self, fetch: _Fetch, order: tuple[int, ...]) -> bool:
        """Whether a block of `order` comes into the slot that it has to."""
        return order != self.placed or self.places.get(fetch.block, fetch.slot) == fetch.slot

    def _empty_slot(self, block: int) -> int | None:
        """Where the next block in order may go; None if that is in use."""
        slot = self.places[block] if self.order == self.placed else self.empty[0]
        if slot not in self.empty:
            return None
        self.empty.remove(slot)
        return slot

    def _send_for_next(self) -> bool:
        """False if there is nothing to send for, or no slot for it."""
        block = self._next_block()
        if block is None:
            return False
        slot = self._empty_slot(block)
        if slot is None:
            self.position -= 1
            return False
        buffer, share = self.buffer_in(block, slot), self.store.buffers[block]
        if self.free[slot] is not None:
            self.copy_stream.wait_event(self.free[slot])
        put = self.gathered.get(block)
        if put is not None:
            self.copy_stream.wait_event(self.streams.record_event(self.streams.current()))
        start, crossed = self.streams.record_event(self.copy_stream), share.numel()
        with self.streams.on(self.copy_stream):
            mine = buffer[self.ranks.rank * share.numel() :][: share.numel()]
            if put is None:
                mine.copy_(share, non_blocking=True)
            else:
                crossed = put(buffer)
        copied = full = self.streams.record_event(self.copy_stream)
        self.transfers.host_to_device_bytes += crossed
        gather = None
        if self.ranks.world_size > 1:
            self.gather_stream.wait_event(copied)
            begun = self.streams.record_event(self.gather_stream)
            with self.streams.on(self.gather_stream):
                # NCCL gathers in place; gloo wants its input apart
                _all_gather(buffer, mine if buffer.is_cuda else mine.clone(), group=self.group)
            full = self.streams.record_event(self.gather_stream)
            gather = begun, full
        self.timeline.record_copy(block, crossed, self.free[slot], self.freed_by[slot], start, copied, gather)
        self.pending.append(_Fetch(block, slot, full))
        return True


def slots_in_use(blocks: int, slots: int) -> int:
    """How many of `slots` the blocks of a pass go round in, so that each comes into the same one in every pass. The first ones of
    a pass have to wait for those in the last, unfinished round of the pass before: the fewer these are, the later they are computed."""
    least = max(2, slots // 2)
    return max(range(min(least, slots), slots + 1), key=lambda number: (blocks % number or number, number))
