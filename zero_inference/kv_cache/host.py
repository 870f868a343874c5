"""A KV cache in host memory for any transformers model.

Each layer's keys and values are one allocation with a row per position (all keys of the batch, then all values), so that what a decode
step appends and what it reads are both contiguous: one copy each way, no gather. On CUDA three slots of a device serve all of its layers
as a ring buffer: while a layer computes, the keys and values of the next two are copied on a stream of their own, and the last layers of
a step prefetch the first ones of the next. On a CPU the host memory is used directly.

A step calls `update` once per layer, and the link may have to wait for Python (benchmarks/LOG.md): hence one copy for keys and values,
and views and events that are created once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache

from zero_inference.kv_cache.device import Pair, PreallocatedCache, PreallocatedLayer, store
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import Transfers

# One is read while two are filled: with two, the link would idle until attention releases a slot.
SLOTS = 3


class HostKVCache(PreallocatedCache):
    """Preallocated KV cache in host memory.

    Args:
        max_length: positions to allocate: prompt plus generated tokens.
        pinned: page-lock the host memory (needs CUDA).
        asynchronous: write new tokens to the host without waiting for them (needs `pinned`).
        config, kind, raises: as of `PreallocatedCache`.
    """

    def __init__(
        self,
        config,
        max_length: int,
        pinned: bool,
        asynchronous: bool,
        transfers: Transfers,
        kind: type[DynamicCache] = DynamicCache,
    ):
        # layers without keys of their own read those of the last layers that have some, from their slots
        shares = bool(getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0))
        self.max_length, self.pinned = max_length, pinned
        self._new_ring = functools.partial(_DeviceSlots, asynchronous, transfers, wraps=not shares)
        self._rings: dict[torch.device, _DeviceSlots] = {}  # of each device that computes layers
        super().__init__(config, kind)

    def new_layer(self) -> PreallocatedLayer:
        return _HostLayer(self._ring_of, self.max_length, self.pinned)

    def _ring_of(self, device: torch.device) -> _DeviceSlots:
        if device not in self._rings:
            self._rings[device] = self._new_ring(device)
        return self._rings[device]

    def reset(self) -> None:
        for ring in self._rings.values():
            ring.wait()
        super().reset()


class _HostLayer(PreallocatedLayer):
    """Keys and values of one layer in host memory; `stored` views `rows` by `sizes`, (batch, heads, head_dim) of keys and of values.

    Args:
        ring_of: returns the ring buffer of a CUDA device.
    """

    rows: Tensor  # [positions, elements], all keys of a position and then all values

    def __init__(self, ring_of: Callable[[torch.device], _DeviceSlots], max_length: int, pinned: bool):
        super().__init__(max_length)
        self.ring_of, self.pinned = ring_of, pinned
        self.ring: _DeviceSlots | None = None  # of the device of this layer; None before its first tokens and on a CPU
        self.index = -1  # in `ring.layers`

    def allocate(self, *states: Tensor) -> None:
        self.sizes = tuple((one.shape[0], one.shape[1], one.shape[3]) for one in states)
        elements = sum(math.prod(size) for size in self.sizes)
        self.rows = host_empty((self.max_length, elements), states[0].dtype, self.pinned)
        self.stored = self.views(self.rows)
        if self.device.type != "cuda":
            return
        if self.ring is None:
            self.ring = self.ring_of(self.device)
            self.index = len(self.ring.layers)
            self.ring.layers.append(self)
        self.ring.prepare(self.rows)

    def views(self, rows: Tensor) -> Pair:
        """Return keys and values [batch, heads, positions, head_dim] as views of `rows` [positions, elements], here or in a slot."""
        parts = rows.split([math.prod(size) for size in self.sizes], 1)
        keys, values = (part.unflatten(1, size).permute(1, 2, 0, 3) for part, size in zip(parts, self.sizes))
        return keys, values

    def append(self, states: Pair, start: int, end: int) -> Pair:
        if self.ring is None:
            return super().append(states, start, end)
        return self.ring.append(self, states, start, end)


class _Slot:
    """Device memory for the rows of one layer at a time."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device):
        self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.filled = torch.cuda.Event()  # a layer's rows were copied from host memory
        self.written = torch.cuda.Event()  # a prompt's rows were copied to host memory
        self.views: dict[tuple, tuple[Tensor, Pair]] = {}  # by the sizes of layers

    def views_for(self, layer: _HostLayer) -> tuple[Tensor, Pair]:
        """Return the rows of `layer` in this memory, and its keys and values there."""
        if layer.sizes not in self.views:
            rows = self.memory[: layer.rows.numel()].view(layer.rows.shape)
            self.views[layer.sizes] = rows, layer.views(rows)
        return self.views[layer.sizes]


class _DeviceSlots:
    """A ring buffer of `SLOTS` slots on a CUDA device, filled ahead of the computation.

    Args:
        wraps: the last layers of a step prefetch the first ones of the next.
    """

    def __init__(self, asynchronous: bool, transfers: Transfers, device: torch.device, wraps: bool = True):
        self.asynchronous, self.transfers, self.device, self.wraps = asynchronous, transfers, device, wraps
        self.layers: list[_HostLayer] = []  # of this device, with keys and values, in the order of computation
        self.slots: list[_Slot] = []
        self.next_slot = 0
        self.filled: dict[int, _Slot] = {}  # by layer index, the slot that its rows are in or being copied to
        self.fetch_stream, self.write_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # recorded again for each layer: earlier waits refer to earlier recordings; they belong to the device that first records them
        self.released, self.appended, self.written = (torch.cuda.Event() for _ in range(3))

    def prepare(self, rows: Tensor) -> None:
        """Allocate slots that hold such rows; called with the first tokens, when slots hold nothing that is needed."""
        if not self.slots or self.slots[0].memory.numel() < rows.numel():
            self.slots = [_Slot(rows.numel(), rows.dtype, self.device) for _ in range(SLOTS)]
            for slot in self.slots:  # a copy may be in flight when the cache is dropped
                slot.memory.record_stream(self.fetch_stream)
                slot.memory.record_stream(self.write_stream)

    def append(self, layer: _HostLayer, new: Pair, start: int, end: int) -> Pair:
        """Store `new` [batch, heads, new, head_dim] at positions start..end; return all positions up to `end`."""
        compute = torch.cuda.current_stream(self.device)
        if start == 0:  # a prompt attends to the states themselves
            slot = self._next_slot()
            compute.wait_event(slot.written)
            rows, stored = slot.views_for(layer)
            store(stored, new, start, end)
            self._write(layer.rows[:end], rows[:end], compute)
            slot.written.record(self.write_stream)
            return new
        if layer.index not in self.filled:
            self._fetch(layer, start, compute)
        self._prefetch(layer, compute)
        slot = self.filled.pop(layer.index)
        compute.wait_event(slot.filled)
        rows, stored = slot.views_for(layer)
        found = store(stored, new, start, end)
        self._write(layer.rows[start:end], rows[start:end], compute)
        return found

    def _next_slot(self) -> _Slot:
        slot = self.slots[self.next_slot]
        self.next_slot = (self.next_slot + 1) % SLOTS
        return slot

    def _prefetch(self, layer: _HostLayer, compute: torch.cuda.Stream) -> None:
        """Prefetch the layers after `layer`, which is about to compute. After the last one come the first ones, which already have all
        positions of this step."""
        count = len(self.layers)
        for offset in range(1, SLOTS if self.wraps else min(SLOTS, count - layer.index)):
            following = self.layers[(layer.index + offset) % count]
            if following is not layer and following.index not in self.filled:
                self._fetch(following, following.length, compute)

    def _fetch(self, layer: _HostLayer, length: int, compute: torch.cuda.Stream) -> None:
        """Copy the first `length` positions of `layer` to the next slot, after attention of the slot's last layer and after all copies to
        host memory that are queued: one of them reads this slot, others write `layer`'s newest positions."""
        slot = self._next_slot()
        self.released.record(compute)
        self.fetch_stream.wait_event(self.released)
        self.fetch_stream.wait_event(self.written)
        rows = slot.views_for(layer)[0][:length]
        with torch.cuda.stream(self.fetch_stream):
            rows.copy_(layer.rows[:length], non_blocking=True)
            slot.filled.record(self.fetch_stream)
        self.transfers.host_to_device_bytes += rows.nbytes
        self.filled[layer.index] = slot

    def _write(self, host: Tensor, rows: Tensor, compute: torch.cuda.Stream) -> None:
        """Copy rows of new positions to the host, after the kernels that compute them."""
        self.appended.record(compute)
        self.write_stream.wait_event(self.appended)
        with torch.cuda.stream(self.write_stream):
            host.copy_(rows, non_blocking=self.asynchronous)
            self.written.record(self.write_stream)
        self.transfers.device_to_host_bytes += rows.nbytes

    def wait(self) -> None:
        self.fetch_stream.synchronize()
        self.write_stream.synchronize()
        self.filled.clear()
