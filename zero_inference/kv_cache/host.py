"""A KV cache in host memory for any transformers model.

Each layer's keys and values are allocated once, position-major ([positions, batch, heads, head_dim]), so that what a
decode step appends and what it reads are both contiguous: one copy each way, no gather. On CUDA three device slots serve
all layers in turn; while a layer computes, the keys and values of the next two cross the link on a stream of their own, and
the last layers of a step prefetch the first ones of the next. Without a device the host memory is used where it lies.
"""

from __future__ import annotations

import itertools

import torch

from zero_inference.kv_cache.device import PreallocatedCache, PreallocatedLayer, check_layer_types, key_value_layers
from zero_inference.runtime.host_memory import host_empty
from zero_inference.runtime.transfers import Transfers

# One is read while two are filled. With two slots the link rested between copies, 160 us a layer of OPT-30B on an H200: a copy can only be
# asked for when attention has let go of a slot, which is then the moment when the copy before it has ended.
SLOTS = 3


class HostKVCache(PreallocatedCache):
    """Preallocated KV cache in host memory.

    Args:
        config: the transformers config; it says how many layers there are.
        max_length: positions to allocate: prompt plus generated tokens.
        pinned: page-lock the host memory (needs CUDA).
        asynchronous: write new tokens to the host without waiting for them (needs `pinned`).
        transfers: counters to raise.

    Raises:
        UsageError: the model keeps other state than keys and values (state-space layers).
    """

    def __init__(self, config, max_length: int, pinned: bool, asynchronous: bool, transfers: Transfers):
        check_layer_types(config)
        layers = key_value_layers(config)
        # layers that compute no keys of their own read those of the last layers that do, out of their slots
        shares = bool(getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0))
        self._pool = _DeviceSlots(layers, pinned, asynchronous, transfers, wraps=not shares)
        super().__init__(layers=[_HostLayer(self._pool, index, max_length) for index in range(layers)])

    def reset(self) -> None:
        self._pool.wait()
        super().reset()


class _HostLayer(PreallocatedLayer):
    """Keys and values of one layer, [positions, batch, heads, head_dim] in host memory."""

    def __init__(self, pool: _DeviceSlots, index: int, max_length: int):
        super().__init__(max_length)
        self.pool, self.index = pool, index

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.kept = tuple(
            host_empty(
                (self.max_length, states.shape[0], states.shape[1], states.shape[3]), states.dtype, self.pool.pinned
            )
            for states in (key_states, value_states)
        )
        self.pool.prepare(self.kept, self.device)

    def append(self, states: tuple[torch.Tensor, torch.Tensor], start: int, end: int) -> tuple[torch.Tensor, ...]:
        kept = self.pool.append(self, tuple(new.permute(2, 0, 1, 3) for new in states), start, end)
        return tuple(part.permute(1, 2, 0, 3) for part in kept)


class _DeviceSlots:
    """The device side: `SLOTS` buffers that the layers use in turn, filled ahead of the computation.

    Args:
        wraps: the last layers of a step ask for the first ones of the next.
    """

    def __init__(self, num_layers: int, pinned: bool, asynchronous: bool, transfers: Transfers, wraps: bool = True):
        self.wraps = wraps
        self.num_layers, self.pinned, self.asynchronous, self.transfers = num_layers, pinned, asynchronous, transfers
        self.layers: dict[int, _HostLayer] = {}
        self.slots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.next_slot = 0
        self.filled: dict[int, tuple[int, torch.cuda.Event]] = {}  # layer -> its slot, copy done
        self.written: dict[int, torch.cuda.Event] = {}  # layer -> its new positions are in host memory
        self.read_out: dict[int, torch.cuda.Event] = {}  # slot -> new positions were copied out of it
        self.fetch_stream: torch.cuda.Stream | None = None
        self.write_stream: torch.cuda.Stream | None = None

    def prepare(self, host: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> None:
        if device.type != "cuda":
            return
        if self.fetch_stream is None:
            self.fetch_stream, self.write_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        need = (
            [max(t.numel() for t in pair) for pair in zip(*([host] + self.slots))]
            if self.slots
            else [t.numel() for t in host]
        )
        if not self.slots or any(slot.numel() < n for slot, n in zip(self.slots[0], need)):
            self.slots = [tuple(torch.empty(n, dtype=host[0].dtype, device=device) for n in need) for _ in range(SLOTS)]
            for part in itertools.chain(*self.slots):  # a copy ahead may be under way when the cache is dropped
                part.record_stream(self.fetch_stream)

    def append(self, layer: _HostLayer, new: tuple[torch.Tensor, torch.Tensor], start: int, end: int):
        """Store `new` [new, batch, heads, head_dim] at positions start..end and return everything up to `end`."""
        self.layers[layer.index] = layer
        if layer.device.type != "cuda":
            for host, states in zip(layer.kept, new):
                host[start:end].copy_(states)
            return tuple(host[:end] for host in layer.kept)
        compute = torch.cuda.current_stream(layer.device)
        if start == 0:
            self._write(layer, new, start, end, compute)
            return new
        if layer.index not in self.filled:
            self._fetch(layer, start, compute)
        self._fetch_ahead(layer, compute)
        slot_index, copied = self.filled.pop(layer.index)
        compute.wait_event(copied)
        kept = self._views(layer, slot_index, end)
        for slot, states in zip(kept, new):
            slot[start:end].copy_(states)
        self.read_out[slot_index] = self._write(layer, tuple(slot[start:end] for slot in kept), start, end, compute)
        return kept

    def _views(self, layer: _HostLayer, slot_index: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            slot[: host.numel()].view(host.shape)[:end] for slot, host in zip(self.slots[slot_index], layer.kept)
        )

    def _fetch_ahead(self, layer: _HostLayer, compute: torch.cuda.Stream) -> None:
        """Ask for the layers behind `layer`, which is about to compute. Behind the last one come the first ones, which have all positions
        of this step already, like every one that follows them in the next."""
        for ahead in range(1, SLOTS if self.wraps else min(SLOTS, self.num_layers - layer.index)):
            following = self.layers[(layer.index + ahead) % self.num_layers]
            if following is not layer and following.index not in self.filled:
                self._fetch(following, following.length, compute)

    def _fetch(self, layer: _HostLayer, length: int, compute: torch.cuda.Stream) -> None:
        """Copy the first `length` positions of `layer` into the slot that is next, once what is queued is done with it: attention of the
        last layer that it served, and the copy of that layer's new positions."""
        slot_index, self.next_slot = self.next_slot, (self.next_slot + 1) % SLOTS
        slot_free = torch.cuda.Event()
        slot_free.record(compute)
        self.fetch_stream.wait_event(slot_free)
        for copied in (self.read_out.get(slot_index), self.written.get(layer.index)):
            if copied is not None:
                self.fetch_stream.wait_event(copied)
        with torch.cuda.stream(self.fetch_stream):
            for slot, host in zip(self._views(layer, slot_index, length), layer.kept):
                slot.copy_(host[:length], non_blocking=True)
                self.transfers.host_to_device_bytes += slot.numel() * slot.element_size()
            done = torch.cuda.Event()
            done.record(self.fetch_stream)
        self.filled[layer.index] = (slot_index, done)

    def _write(self, layer: _HostLayer, new, start: int, end: int, compute: torch.cuda.Stream) -> torch.cuda.Event:
        """Copy new positions to the host, behind what computes them; the event behind that."""
        self.write_stream.wait_stream(compute)
        with torch.cuda.stream(self.write_stream):
            for host, states in zip(layer.kept, new):
                packed = states.contiguous()
                packed.record_stream(self.write_stream)
                states.record_stream(self.write_stream)
                host[start:end].copy_(packed, non_blocking=self.asynchronous)
                self.transfers.device_to_host_bytes += packed.numel() * packed.element_size()
            done = torch.cuda.Event()
            done.record(self.write_stream)
        self.written[layer.index] = done
        return done

    def wait(self) -> None:
        if self.fetch_stream is not None:
            self.fetch_stream.synchronize()
            self.write_stream.synchronize()
        self.filled.clear()
