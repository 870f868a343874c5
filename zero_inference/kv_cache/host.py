"""A KV cache in host memory for any transformers model.

Each layer's keys and values are allocated once, in one block with a row for each position (all keys of the batch, then all values), so
that what a decode step appends and what it reads are both contiguous: one copy each way, no gather. On CUDA three device slots serve
all layers in turn; while a layer computes, the keys and values of the next two cross the link on a stream of their own, and
the last layers of a step prefetch the first ones of the next. Without a device the host memory is used where it lies.

A step calls `update` once a layer, and the link may wait for Python (docs/performance.md): so there is one copy for keys and values, and
views and events are made once.
"""

from __future__ import annotations

import math

import torch
from transformers import DynamicCache

from zero_inference.kv_cache.device import PreallocatedCache, PreallocatedLayer
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.transfers import Transfers

# One is read while two are filled: a copy can only be asked for when attention has let go of a slot, and the link is not to rest then.
SLOTS = 3

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


class HostKVCache(PreallocatedCache):
    """Preallocated KV cache in host memory.

    Args:
        config: the transformers config.
        max_length: positions to allocate: prompt plus generated tokens.
        pinned: page-lock the host memory (needs CUDA).
        asynchronous: write new tokens to the host without waiting for them (needs `pinned`).
        transfers: counters to raise.
        kind: what `cache_class` gives for the model.

    Raises:
        UsageError: the model has no keys and values that could be kept so.
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
        # layers that compute no keys of their own read those of the last layers that do, out of their slots
        shares = bool(getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0))
        self.max_length = max_length
        self._pool = _DeviceSlots(pinned, asynchronous, transfers, wraps=not shares)
        super().__init__(config, kind)

    def new_layer(self) -> PreallocatedLayer:
        return _HostLayer(self._pool, self.max_length)

    def reset(self) -> None:
        self._pool.wait()
        super().reset()


class _HostLayer(PreallocatedLayer):
    """Keys and values of one layer in host memory.

    Attributes:
        rows: [positions, elements], all keys of a position and then all values.
        index: among the layers that keep keys and values, in the order in which they got their first ones.
        sizes: of keys and of values of one position: batch, heads, head_dim.
        kept: [batch, heads, positions, head_dim] each, views of `rows`.
    """

    def __init__(self, pool: _DeviceSlots, max_length: int):
        super().__init__(max_length)
        self.pool, self.index = pool, -1

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.sizes = tuple((one.shape[0], one.shape[1], one.shape[3]) for one in (key_states, value_states))
        elements = sum(math.prod(size) for size in self.sizes)
        self.rows = host_empty((self.max_length, elements), key_states.dtype, self.pool.pinned)
        self.kept = self.views(self.rows)
        if self.index < 0:
            self.index = self.pool.add(self)
        self.pool.prepare(self.rows, self.device)

    def views(self, rows: torch.Tensor) -> Pair:
        """Keys and values [batch, heads, positions, head_dim] in rows like its own."""
        parts = rows.split([math.prod(size) for size in self.sizes], 1)
        keys, values = (part.unflatten(1, size).permute(1, 2, 0, 3) for part, size in zip(parts, self.sizes))
        return keys, values

    def append(self, states: Pair, start: int, end: int) -> Pair:
        return self.pool.append(self, states, start, end)


class _Slot:
    """Device memory for the rows of one layer at a time.

    Attributes:
        filled: rows of a layer have come from host memory.
        written: the rows of a prompt have gone there.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device):
        self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.filled, self.written = torch.cuda.Event(), torch.cuda.Event()
        self.places: dict[tuple, tuple[torch.Tensor, Pair]] = {}  # of layers that have the same sizes

    def place_of(self, layer: _HostLayer) -> tuple[torch.Tensor, Pair]:
        """The rows of `layer` in this memory, and its keys and values there."""
        if layer.sizes not in self.places:
            rows = self.memory[: layer.rows.numel()].view(layer.rows.shape)
            self.places[layer.sizes] = rows, layer.views(rows)
        return self.places[layer.sizes]


class _DeviceSlots:
    """The device side: `SLOTS` buffers that the layers use in turn, filled ahead of the computation.

    Args:
        wraps: the last layers of a step ask for the first ones of the next.

    Attributes:
        layers: those that keep keys and values, in the order in which they compute.
        filled: by layer the slot that its rows are in, or on their way to.
    """

    def __init__(self, pinned: bool, asynchronous: bool, transfers: Transfers, wraps: bool = True):
        self.wraps = wraps
        self.pinned, self.asynchronous, self.transfers = pinned, asynchronous, transfers
        self.layers: list[_HostLayer] = []
        self.slots: list[_Slot] = []
        self.next_slot = 0
        self.filled: dict[int, _Slot] = {}
        self.fetch_stream: torch.cuda.Stream | None = None
        self.write_stream: torch.cuda.Stream | None = None

    def add(self, layer: _HostLayer) -> int:
        """Return the index of `layer`, which gets its first keys and values: it comes after those that have some."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def prepare(self, rows: torch.Tensor, device: torch.device) -> None:
        """Have slots that hold such rows. To be called with the first tokens, when slots hold nothing that is needed."""
        if device.type != "cuda":
            return
        if self.fetch_stream is None:
            self.fetch_stream, self.write_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            # recorded anew for each layer; who waited before waits for what was recorded then
            self.let_go, self.appended, self.written = (torch.cuda.Event() for _ in range(3))
        if not self.slots or self.slots[0].memory.numel() < rows.numel():
            self.slots = [_Slot(rows.numel(), rows.dtype, device) for _ in range(SLOTS)]
            for slot in self.slots:  # a copy may be under way when the cache is dropped
                slot.memory.record_stream(self.fetch_stream)
                slot.memory.record_stream(self.write_stream)

    def append(self, layer: _HostLayer, new: Pair, start: int, end: int) -> Pair:
        """Store `new` [batch, heads, new, head_dim] at positions start..end and return everything up to `end`."""
        if layer.device.type != "cuda":
            return _store(layer.kept, new, start, end)
        compute = torch.cuda.current_stream(layer.device)
        if start == 0:  # attention takes what the model has computed
            slot = self._next_slot()
            compute.wait_event(slot.written)
            rows, kept = slot.place_of(layer)
            _store(kept, new, start, end)
            self._write(layer.rows[:end], rows[:end], compute)
            slot.written.record(self.write_stream)
            return new
        if layer.index not in self.filled:
            self._fetch(layer, start, compute)
        self._fetch_ahead(layer, compute)
        slot = self.filled.pop(layer.index)
        compute.wait_event(slot.filled)
        rows, kept = slot.place_of(layer)
        found = _store(kept, new, start, end)
        self._write(layer.rows[start:end], rows[start:end], compute)
        return found

    def _next_slot(self) -> _Slot:
        slot = self.slots[self.next_slot]
        self.next_slot = (self.next_slot + 1) % SLOTS
        return slot

    def _fetch_ahead(self, layer: _HostLayer, compute: torch.cuda.Stream) -> None:
        """Ask for the layers behind `layer`, which is about to compute. Behind the last one come the first ones, which have all positions
        of this step already, like every one that follows them in the next."""
        count = len(self.layers)
        for ahead in range(1, SLOTS if self.wraps else min(SLOTS, count - layer.index)):
            following = self.layers[(layer.index + ahead) % count]
            if following is not layer and following.index not in self.filled:
                self._fetch(following, following.length, compute)

    def _fetch(self, layer: _HostLayer, length: int, compute: torch.cuda.Stream) -> None:
        """Copy the first `length` positions of `layer` into the slot that is next, once what is queued is done with it: attention of the
        last layer that it served, and the copies to host memory that were asked for so far. One of these is of that layer's new
        positions, others of those that `layer` itself has got since it was last fetched."""
        slot = self._next_slot()
        self.let_go.record(compute)
        self.fetch_stream.wait_event(self.let_go)
        self.fetch_stream.wait_event(self.written)
        rows = slot.place_of(layer)[0][:length]
        with torch.cuda.stream(self.fetch_stream):
            rows.copy_(layer.rows[:length], non_blocking=True)
            slot.filled.record(self.fetch_stream)
        self.transfers.host_to_device_bytes += rows.nbytes
        self.filled[layer.index] = slot

    def _write(self, host: torch.Tensor, rows: torch.Tensor, compute: torch.cuda.Stream) -> None:
        """Copy rows of new positions to the host, behind what computes them."""
        self.appended.record(compute)
        self.write_stream.wait_event(self.appended)
        with torch.cuda.stream(self.write_stream):
            host.copy_(rows, non_blocking=self.asynchronous)
            self.written.record(self.write_stream)
        self.transfers.device_to_host_bytes += rows.nbytes

    def wait(self) -> None:
        if self.fetch_stream is not None:
            self.fetch_stream.synchronize()
            self.write_stream.synchronize()
        self.filled.clear()


def _store(kept: Pair, new: Pair, start: int, end: int) -> Pair:
    """Put `new` at positions start..end of `kept`, [batch, heads, positions, head_dim] each; all up to `end`."""
    keys, values = (side[:, :, :end] for side in kept)
    keys[:, :, start:].copy_(new[0])
    values[:, :, start:].copy_(new[1])
    return keys, values
