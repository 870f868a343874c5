"""A KV cache in host memory whose decode attention the CPU computes there.

The prefill attends on the device and writes keys and values to the host, as with `HostKVCache`. From then on they do not cross the link
again: a step takes the new queries, keys and values to the host and the outputs back, 1/256 of the bytes at 512 positions.

Keys and values are [blocks, batch, kv_heads, up to 64 positions, head_dim]: the rows of one head in a block are contiguous, 16 KB for 64
of 128 float16, which a processor prefetches; it does not prefetch single rows of position-major memory. The blocks of a prompt are
contiguous for all sequences and heads, so the prefill writes them with one copy.

`update` marks the new keys, by which the attention functions of `zero_inference.kv_cache.attention_patch` recognize them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from zero_inference.cpu.attention import LogitOptions, add_attention, attention, run_attention, submit_attention
from zero_inference.cpu.hand_off import DirectCalls, HandOff
from zero_inference.errors import RunError
from zero_inference.kv_cache.device import Pair, PreallocatedCache, PreallocatedLayer
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.model_sizes import kv_width
from zero_inference.utils.timing import Transfers

CACHED_MASKS = 4  # a model has one or two kinds of masks in a pass
MAX_BLOCK_POSITIONS = 64  # also the tile of the online softmax (csrc/cpu/attention_kernel.h)


def window_of(mask: Tensor) -> int:
    """Return how many of the last positions one new token sees by `mask` [batch, heads, new, positions]; 0 if it is no such window."""
    if mask.shape[2] != 1:
        return 0
    visible = mask.flatten(0, 2)
    if mask.dtype != torch.bool:
        if not ((visible == 0) | (visible <= torch.finfo(mask.dtype).min)).all():
            return 0
        visible = visible == 0
    count = int(visible[0].sum())
    last = torch.arange(mask.shape[3]) >= mask.shape[3] - count
    return count if torch.equal(visible, last.expand_as(visible)) else 0


def blocks_for(max_length: int) -> tuple[int, int]:
    """Return the number of blocks for `max_length` positions, and the fewest positions per block that suffice."""
    count = math.ceil(max_length / MAX_BLOCK_POSITIONS)
    return count, math.ceil(max_length / count)


class CpuAttentionCache(PreallocatedCache):
    """Preallocated KV cache in host memory, with attention on the CPU from the second pass on.

    Args:
        attend: computes attention of a layer whose `new_states` are set, as `CpuAttention` does.
        others, raises: as of `HostKVCache`.
    """

    def __init__(
        self,
        config: Any,
        max_length: int,
        pinned: bool,
        asynchronous: bool,
        transfers: Transfers,
        attend: Callable[[CpuAttentionLayer, Tensor, int, Tensor | None], Tensor],
        kind: type[DynamicCache] = DynamicCache,
    ):
        self.max_length, self.pinned, self.asynchronous, self.transfers = max_length, pinned, asynchronous, transfers
        self.attend = attend
        # by device: the latest masks, with results of `mask_on_host`
        self.masks: dict[torch.device, list[tuple[Tensor, int, Tensor | None]]] = {}
        self.pending: CpuAttentionLayer | None = None  # its new states are on their way to the attention function
        self.write_streams: dict[torch.device, torch.cuda.Stream] = {}  # of prompts
        self.in_flight: set[torch.device] = set()  # devices from which a prompt is being copied to the host
        super().__init__(config, kind)

    def new_layer(self) -> PreallocatedLayer:
        return CpuAttentionLayer(self, self.max_length)

    def reset(self) -> None:
        self.pending, self.masks = None, {}
        for stream in self.write_streams.values():
            stream.synchronize()
        self.in_flight.clear()
        super().reset()

    def mask_on_host(self, mask: Tensor | None, positions: int) -> tuple[int, Tensor | None]:
        """Return (window, None) if a window expresses `mask`, else (0, the mask on the host [batch or 1, heads or 1, new, positions])."""
        if mask is None:
            return 0, None
        latest = self.masks.setdefault(mask.device, [])
        for cached, window, host_mask in latest:
            if cached is mask:
                return window, host_mask
        on_host = mask[..., :positions].cpu()
        window = window_of(on_host)
        host_mask = None if window else on_host
        latest[:] = [*latest[1 - CACHED_MASKS :], (mask, window, host_mask)]
        return window, host_mask

    def write(self, host: Tensor, blocks: Tensor) -> None:
        """Copy `blocks` of a prompt from the GPU, after the kernels that compute them."""
        device = blocks.device
        if device not in self.write_streams:
            self.write_streams[device] = torch.cuda.Stream(device)
        stream = self.write_streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            blocks.record_stream(stream)
            host.copy_(blocks, non_blocking=self.asynchronous)
        self.in_flight.add(device)
        self.transfers.device_to_host_bytes += blocks.nbytes

    def await_prompt(self, device: torch.device) -> None:
        """Make the device's current stream wait until the prompt's keys and values of its layers are on the host."""
        if device in self.in_flight:
            torch.cuda.current_stream(device).wait_stream(self.write_streams[device])
            self.in_flight.remove(device)


class CpuAttentionLayer(PreallocatedLayer):
    """Keys and values of one layer in host memory; `stored` are [blocks, batch, kv_heads, positions per block, dim]."""

    def __init__(self, cache: CpuAttentionCache, max_length: int):
        super().__init__(max_length)
        self.cache = cache
        self.logits: LogitOptions | None = None  # to be set before the first `attend`
        self.new_states: Pair | None = None  # [batch, kv_heads, new, dim] where the model computes; not in `stored` yet

    def allocate(self, *states: Tensor) -> None:
        blocks, positions = blocks_for(self.max_length)
        shapes = [(blocks, *each.shape[:2], positions, each.shape[3]) for each in states]
        self.stored = tuple(host_empty(shape, self.dtype, self.cache.pinned) for shape in shapes)

    def append(self, states: Pair, start: int, end: int) -> tuple[Tensor, ...]:
        if self.cache.pending is not None:
            raise UnsupportedAttention(
                "a layer did not attend through transformers' attention functions, or changed its keys"
            )
        if start == 0:
            for stored, new in zip(self.stored, states):
                self._store_prompt(stored, new)
            return states
        self.new_states = states
        # Models expect this length. If a model computes with the placeholders itself, the next layer's `append` raises.
        placeholders = tuple(new[:, :, :1].expand(-1, -1, end, -1) for new in states)
        placeholders[0].cpu_attention_layer = self.cache.pending = self
        return placeholders

    def _store_prompt(self, stored: Tensor, new: Tensor) -> None:
        """Store `new` [batch, kv_heads, positions, dim] in the first blocks of `stored`."""
        whole, rest = divmod(new.shape[2], stored.shape[3])
        blocks = new.new_empty((whole + (rest > 0), *stored.shape[1:])) if new.is_cuda else stored
        if whole:
            in_blocks = new[:, :, : whole * stored.shape[3]].unflatten(2, (whole, stored.shape[3]))
            blocks[:whole].copy_(in_blocks.permute(2, 0, 1, 3, 4))
        if rest:
            blocks[whole, :, :, :rest].copy_(new[:, :, -rest:])  # the rest of the block is never read
        if new.is_cuda:
            self.cache.write(stored[: len(blocks)], blocks)

    @staticmethod
    def claim(key: Tensor) -> CpuAttentionLayer | None:
        """Return the layer that marked `key`, whose new states are pending no more; None for other keys."""
        layer: CpuAttentionLayer | None = getattr(key, "cpu_attention_layer", None)
        if layer is not None:
            layer.cache.pending = None
        return layer

    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention [batch, new, heads, value_dim] of `query` [batch, heads, new, key_dim]; `mask` as of `mask_on_host`."""
        if self.new_states is None:
            raise UnsupportedAttention("a layer attends more than once to its keys")
        out = self.cache.attend(self, query, *self.cache.mask_on_host(mask, self.length))
        self.new_states = None
        return out

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Store copies of `new_states` on the CPU."""
        for stored, new in zip(self.stored, (keys, values)):
            first = self.length - new.shape[2]
            for index in range(new.shape[2]):
                block, position = divmod(first + index, stored.shape[3])
                stored[block, :, :, position].copy_(new[:, :, index])


class UnsupportedAttention(RunError):
    """The model uses keys and values of a `CpuAttentionCache` other than by attending over them once; `why` says how."""

    def __init__(self, why: str):
        super().__init__(f"CPU attention, over keys and values in host memory: {why}; use --cpu-compute off.")
        self.why = why


def attention_hand_off_bytes(config: Any, batch: int, element_bytes: int) -> tuple[int, int]:
    """Return the bytes of a hand-off's input and output for one new token of `batch` sequences."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    query_width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return batch * (query_width + 2 * kv_width(text)) * element_bytes, batch * query_width * element_bytes


class CpuAttention:
    """Attention by the CPU pool: synchronous for a model on the CPU, through a hand-off for one on a GPU.

    In a hand-off the host does not wait and no copy engine is used, so queries do not queue after weights on the link.

    Args:
        calls: `DirectCalls` for a model on the CPU, `HandOff` for one on a GPU.
        cpus: CPUs for threads beside the pool's; None: those of this thread.
    """

    def __init__(self, calls: DirectCalls | HandOff, cpus: set[int] | None = None):
        self.calls, self.pool, self.transfers, self.cpus = calls, calls.pool, calls.transfers, cpus
        self.tasks: dict[CpuAttentionLayer, int] = {}  # numbers of `add_attention`

    def __call__(self, layer: CpuAttentionLayer, query: Tensor, window: int, mask: Tensor | None) -> Tensor:
        """Store the layer's `new_states` as the last of its `length` positions, and attend with window and mask as of `attention`.

        query [batch, heads, new, key_dim], where the model computes -> [batch, new, heads, value_dim] there.
        """
        batch, heads, new, _ = query.shape
        keys, values = layer.stored
        task, length, pool = self.tasks.get(layer), layer.length, self.pool
        positions = min(length, window + new - 1) if window else length  # those that any of the new tokens sees
        self.transfers.cpu_bytes += positions * sum(stored[0, :, :, 0].nbytes for stored in layer.stored)
        packed = torch.cat([part.flatten() for part in (query, *layer.new_states)])  # one buffer, one hand-off
        out = query.new_empty((batch, new, heads, values.shape[4]))
        hand_off = self.calls if isinstance(self.calls, HandOff) else None
        lane = hand_off and hand_off.lane_of(packed)
        too_large = lane and (packed.nbytes > lane.input.nbytes or out.nbytes > lane.output.nbytes)
        if mask is not None or too_large:
            return self._attend_blocking(layer, query, packed, window, mask)
        if task is None:
            task = self.tasks[layer] = add_attention(pool, keys, values, heads, layer.logits)
        if hand_off and lane:
            layer.cache.await_prompt(out.device)
            target, device = lane.output.data_ptr(), lane.index
            hand_off.run(
                [packed],
                out,
                lambda sources, call: submit_attention(
                    pool, task, sources[0], target, new, length, window, call, device
                ),
            )
        else:
            run_attention(pool, task, packed, out, new, length, window)
        return out

    def _attend_blocking(
        self, layer: CpuAttentionLayer, query: Tensor, packed: Tensor, window: int, mask: Tensor | None
    ) -> Tensor:
        """Attend with masks that no window expresses, or with more tokens than the hand-off's buffers hold, while the host waits."""
        states = (query, *layer.new_states)
        if packed.is_cuda:
            layer.cache.await_prompt(packed.device)
            self.transfers.device_to_host_bytes += packed.nbytes
        parts = packed.cpu().split([part.numel() for part in states])
        host_query, key, value = (part.view(like.shape) for part, like in zip(parts, states))
        layer.store(key, value)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus or before)  # threads that are started here inherit it
        options: dict[str, Any] = dict(positions=layer.length, window=window, mask=mask, threads=self.pool.threads)
        try:
            out = attention(host_query, *layer.stored, layer.logits, **options).transpose(1, 2)
        finally:
            os.sched_setaffinity(0, before)
        if packed.is_cuda:
            self.transfers.host_to_device_bytes += out.nbytes
        return out.to(query.device)
