"""A ring of device slots that decoder layers pass through, filled ahead of the computation.

The order is circular: behind the last layer of one token come the first layers of the next, so the link never waits for
a token to end. The host waits for nothing here: a copy into a slot is queued behind the event of its last use, and the
computation behind the event of the copy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero_inference.engines.stream.store import LayerStore
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.engines.stream.timeline import Timeline
from zero_inference.runtime.distributed import Ranks
from zero_inference.runtime.transfers import Transfers

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


@dataclass
class _Fetch:
    """A layer that was sent for: the slot it goes to, and the event that says it is there."""

    layer: int
    slot: int
    full: Any


class LayerRing:
    """Fetches layers in the order `order`, over and over, into `depth` slots.

    Over several ranks each copies its share of a layer over its own link, into its own place in the slot, and an
    all-gather between the devices brings the others' shares.

    Args:
        order: the streamed layers, in the order in which the model calls them.
        depth: slots, each as large as the largest of these layers.
        group: process group of the all-gathers, which has to be this ring's own.
    """

    def __init__(
        self,
        store: LayerStore,
        order: list[int],
        depth: int,
        ranks: Ranks,
        streams: DeviceStreams,
        transfers: Transfers,
        timeline: Timeline,
        group: Any = None,
    ):
        self.store, self.order, self.ranks, self.streams = store, order, ranks, streams
        self.transfers, self.timeline, self.group = transfers, timeline, group
        slot_bytes = max(store.layouts[layer].nbytes for layer in order)
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=ranks.device) for _ in range(depth)]
        self.free: list[Any] = [None] * depth  # event behind the last use of each slot
        self.freed_by: list[Any] = [None] * depth  # and the computation that this was
        self.copy_stream = streams.stream()
        self.gather_stream = streams.stream() if ranks.world_size > 1 else self.copy_stream
        self.pending: deque[_Fetch] = deque()
        self.held: _Fetch | None = None
        self.next_position = self.next_slot = 0

    def prime(self) -> None:
        """Start to fill the slots; the store has to be complete."""
        self.streams.synchronize()
        self._send_for_all()

    def buffer_in(self, layer: int, slot: int) -> torch.Tensor:
        """The buffer of `layer`, uint8 [nbytes], as it lies in `slot`."""
        return self.slots[slot][: self.store.layouts[layer].nbytes]

    def acquire(self, layer: int) -> int:
        """Make the computation wait for `layer`, and return its slot, which is the caller's until `release`."""
        if not self.pending or self.pending[0].layer != layer:
            self._turn_to(layer)
        self.held = self.pending.popleft()
        self.streams.current().wait_event(self.held.full)
        return self.held.slot

    def release(self) -> None:
        """Give the slot of the last `acquire` back behind what the computation was asked so far, and send for one more layer."""
        self.free[self.held.slot] = self.streams.recorded(self.streams.current())
        self.freed_by[self.held.slot] = self.timeline.latest_layer()
        self.held = None
        self._send_for_next()

    def close(self) -> None:
        self.streams.synchronize()
        self.pending.clear()
        self.slots.clear()

    def _turn_to(self, layer: int) -> None:
        """The model calls another layer than the next in order, as it does after a call that broke off."""
        for fetch in self.pending:
            self.free[fetch.slot] = fetch.full
        self.pending.clear()
        if self.held is not None:
            self.free[self.held.slot] = self.streams.recorded(self.streams.current())
            self.held = None
        self.next_position = self.order.index(layer)
        self._send_for_all()

    def _send_for_all(self) -> None:
        while len(self.pending) < len(self.slots):
            self._send_for_next()

    def _send_for_next(self) -> None:
        layer = self.order[self.next_position]
        slot = self.next_slot
        self.next_position = (self.next_position + 1) % len(self.order)
        self.next_slot = (slot + 1) % len(self.slots)
        buffer, share = self.buffer_in(layer, slot), self.store.buffers[layer]
        if self.free[slot] is not None:
            self.copy_stream.wait_event(self.free[slot])
        start = self.streams.recorded(self.copy_stream)
        with self.streams.on(self.copy_stream):
            mine = buffer[self.ranks.rank * share.numel() :][: share.numel()]
            mine.copy_(share, non_blocking=True)
        copied = full = self.streams.recorded(self.copy_stream)
        self.transfers.host_to_device_bytes += share.numel()
        gather = None
        if self.ranks.world_size > 1:
            self.gather_stream.wait_event(copied)
            begun = self.streams.recorded(self.gather_stream)
            with self.streams.on(self.gather_stream):
                # NCCL gathers in place; gloo wants its input apart
                _all_gather(buffer, mine if buffer.is_cuda else mine.clone(), group=self.group)
            full = self.streams.recorded(self.gather_stream)
            gather = begun, full
        self.timeline.fetched(layer, share.numel(), self.free[slot], self.freed_by[slot], start, copied, gather)
        self.pending.append(_Fetch(layer, slot, full))
