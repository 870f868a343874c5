"""Masks of a model, for attention on the host's cores."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from zero_inference.cpu.attention import AttentionTasks, attention
from zero_inference.cpu.hand_off import DirectCalls, HandOff
from zero_inference.errors import RunError
from zero_inference.kv_cache.device import PreallocatedCache, PreallocatedLayer
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.model_sizes import kv_width
from zero_inference.utils.transfers import Transfers

SEEN = 4  # a model has one or two kinds of masks in a pass


class HostMasks:
    """Masks of a model on the host, each brought there once a pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    def on_host(self, mask: torch.Tensor | None, positions: int) -> tuple[int, torch.Tensor | None]:
        """A window, and the mask [batch or 1, heads or 1, new, positions] on the CPU where it says more; else None.

        Args:
            mask: booleans that are true where a token sees, or what is added to its logits; None sees all.
        """
        if mask is None:
            return 0, None
        for known, window, rest in self.seen:
            if known is mask:
                return window, rest
        host = mask[..., :positions].cpu()
        window = window_of(host)
        rest = None if window else host
        self.seen = [*self.seen[1 - SEEN :], (mask, window, rest)]
        return window, rest


def window_of(mask: torch.Tensor) -> int:
    """How many of the last positions one token sees, if that is all that `mask` [batch, heads, new, positions] says; else 0."""
    if mask.shape[2] != 1:
        return 0
    seen = mask.flatten(0, 2)
    if mask.dtype != torch.bool:
        if not ((seen == 0) | (seen <= torch.finfo(mask.dtype).min)).all():
            return 0
        seen = seen == 0
    count = int(seen[0].sum())
    last = torch.arange(mask.shape[3]) >= mask.shape[3] - count
    return count if torch.equal(seen, last.expand_as(seen)) else 0


MOST_BLOCK_POSITIONS = 64  # also what the cores take between two looks at the softmax (csrc/cpu/attention_kernel.h)


def blocks_for(max_length: int) -> tuple[int, int]:
    """How many blocks hold `max_length` positions, and positions of each: as few as hold them all."""
    count = math.ceil(max_length / MOST_BLOCK_POSITIONS)
    return count, math.ceil(max_length / count)


@dataclass(frozen=True)
class LogitOptions:
    """What a layer does with its logits, as `zero_inference.cpu.attention.attention` has it; tensors on the CPU."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


class CpuAttention(Protocol):
    """How the device that computes and the cores meet (zero_inference.kv_cache.cpu_attention)."""

    def attend(
        self, layer: CpuAttentionLayer, query: torch.Tensor, window: int = 0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store the layer's `newest` keys and values as the last ones of its `length`, and attend.

        Args:
            query: [batch, heads, new, key_dim], where the model computes.
            window: how many of the last positions a token sees, its own included; 0: all.
            mask: on the CPU, for `attention`; None: a token sees the window up to its own position.

        Returns:
            [batch, new, heads, value_dim], where the queries are.
        """


class CpuAttentionCache(PreallocatedCache):
    """Preallocated KV cache in host memory, attended by the cores from the second pass on.

    Args:
        config: the transformers config.
        max_length: positions to allocate: prompt plus generated tokens.
        pinned: page-lock the host memory (needs CUDA).
        asynchronous: write the prompt's keys and values without waiting for them (needs `pinned`).
        transfers: counters to raise.
        meeting: how the model's device and the cores meet.
        kind: what `cache_class` gives for the model.

    Attributes:
        waiting: the layer whose new keys and values are on their way from `update` to the attention function.

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
        meeting: CpuAttention,
        kind: type[DynamicCache] = DynamicCache,
    ):
        self.writer = PromptWriter(asynchronous, transfers)
        self.max_length, self.meeting, self.pinned, self.masks = max_length, meeting, pinned, HostMasks()
        self.waiting: CpuAttentionLayer | None = None
        super().__init__(config, kind)

    def new_layer(self) -> PreallocatedLayer:
        return CpuAttentionLayer(self, self.max_length)

    def reset(self) -> None:
        self.waiting, self.masks = None, HostMasks()
        self.writer.wait()
        super().reset()


class CpuAttentionLayer(PreallocatedLayer):
    """Keys and values of one layer in host memory.

    Attributes:
        newest: new keys and values, [batch, kv_heads, new, dim], where the model computes; not in `kept` yet.
        kept: keys and values, [blocks, batch, kv_heads, positions of a block, dim].
        logits: what the layer does with its logits; whoever sends for `Meeting.attend` sets it before the first time.
    """

    def __init__(self, cache: CpuAttentionCache, max_length: int):
        super().__init__(max_length)
        self.cache = cache
        self.logits: LogitOptions | None = None
        self.newest: tuple[torch.Tensor, torch.Tensor] | None = None

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        blocks, positions = blocks_for(self.max_length)
        self.kept = tuple(
            host_empty((blocks, *states.shape[:2], positions, states.shape[3]), states.dtype, self.cache.pinned)
            for states in (key_states, value_states)
        )

    def append(self, states: tuple[torch.Tensor, torch.Tensor], start: int, end: int) -> tuple[torch.Tensor, ...]:
        if self.cache.waiting is not None:
            raise UnsupportedAttention(
                "a layer did not attend through transformers' attention functions, or changed its keys"
            )
        if start == 0:
            self.cache.writer.write(self.kept, states, self.device)
            return states
        self.newest = states
        # of the length that models expect; if one computes with them itself, the next layer's `append` finds out
        shown = tuple(new[:, :, :1].expand(-1, -1, end, -1) for new in states)
        shown[0].attended = self.cache.waiting = self
        return shown

    @staticmethod
    def of(key: torch.Tensor) -> CpuAttentionLayer | None:
        """The layer whose mark `key` has, which waits no longer; None for keys that are to be attended where they are."""
        layer: CpuAttentionLayer | None = getattr(key, "attended", None)
        if layer is not None:
            layer.cache.waiting = None
        return layer

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention [batch, new, heads, value_dim] of `query` [batch, heads, new, key_dim], for `mask` as `Masks.on_host` takes it."""
        if self.newest is None:
            raise UnsupportedAttention("a layer attends more than once to its keys")
        window, rest = self.cache.masks.on_host(mask, self.length)
        out = self.cache.meeting.attend(self, query, window, rest)
        self.newest = None
        return out

    def keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `newest`, of which `keys` and `values` are copies on the CPU."""
        for kept, new in zip(self.kept, (keys, values)):
            first = self.length - new.shape[2]
            for index in range(new.shape[2]):
                block, place = divmod(first + index, kept.shape[3])
                kept[block, :, :, place].copy_(new[:, :, index])


class PromptWriter:
    """Brings the prompt's keys and values to the host, on a stream of its own."""

    def __init__(self, asynchronous: bool, transfers: Transfers):
        self.asynchronous, self.transfers = asynchronous, transfers
        self.stream: torch.cuda.Stream | None = None
        self.under_way = False

    def write(self, kept: tuple[torch.Tensor, ...], states: tuple[torch.Tensor, ...], device: torch.device) -> None:
        """Store `states` [batch, kv_heads, positions, dim] in the first blocks of `kept`."""
        for host, new in zip(kept, states):
            whole, rest = divmod(new.shape[2], host.shape[3])
            blocks = new.new_empty((whole + (rest > 0), *host.shape[1:])) if new.is_cuda else host
            if whole:
                in_blocks = new[:, :, : whole * host.shape[3]].unflatten(2, (whole, host.shape[3]))
                blocks[:whole].copy_(in_blocks.permute(2, 0, 1, 3, 4))
            if rest:
                blocks[whole, :, :, :rest].copy_(new[:, :, -rest:])  # what lies behind them is never read
            if new.is_cuda:
                self._copy(host[: len(blocks)], blocks, device)

    def _copy(self, host: torch.Tensor, blocks: torch.Tensor, device: torch.device) -> None:
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            blocks.record_stream(self.stream)
            host.copy_(blocks, non_blocking=self.asynchronous)
        self.under_way = True
        self.transfers.device_to_host_bytes += blocks.nbytes

    def before_reading(self, device: torch.device) -> None:
        """What the current stream does from now on happens when the prompt's keys and values are on the host."""
        if self.under_way:
            torch.cuda.current_stream(device).wait_stream(self.stream)
            self.under_way = False

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
            self.under_way = False


class UnsupportedAttention(RunError):
    """The model uses keys and values of an `CpuAttentionCache` otherwise than by attending over them once; `why` says how."""

    def __init__(self, why: str):
        super().__init__(f"attention by the cores, over keys and values in host memory: {why}; use --cpu-compute off.")
        self.why = why


def attention_hand_off_bytes(config: Any, batch: int, element_bytes: int) -> tuple[int, int]:
    """What the input and the output of a `HandOff` have to hold for one new token of `batch` sequences.

    Args:
        config: the transformers config.
        element_bytes: of the model's dtype.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    query_width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return batch * (query_width + 2 * kv_width(text)) * element_bytes, batch * query_width * element_bytes


class BlockingCpuAttention:
    """Copies to page-locked memory and back, and a host that waits for them; on a CPU nothing moves.

    Args:
        transfers: counters to raise.
        threads: cores that work; None: all that the process may use.
    """

    def __init__(self, transfers: Transfers, threads: int | None = None):
        self.transfers, self.threads = transfers, threads
        self.staging = torch.empty(0, dtype=torch.uint8)

    def attend(
        self, layer: CpuAttentionLayer, query: torch.Tensor, window: int = 0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        device = query.device
        states = query, *layer.newest
        query, key, value = self._to_host(layer, states) if device.type == "cuda" else states
        layer.keep(key, value)
        out = attention(
            query,
            *layer.kept,
            positions=layer.length,
            scale=layer.logits.scale,
            softcap=layer.logits.softcap,
            sinks=layer.logits.sinks,
            slopes=layer.logits.slopes,
            window=window,
            mask=mask,
            threads=self.threads,
        ).transpose(1, 2)
        self.transfers.cores_bytes += _read_bytes(layer, query, window)
        if device.type == "cuda":
            self.transfers.host_to_device_bytes += out.nbytes
        return out.to(device)

    def _to_host(self, layer: CpuAttentionLayer, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """`states` in page-locked memory, when they and the prompt's keys and values are there."""
        packed = torch.cat([part.flatten() for part in states])
        count = packed.nbytes
        if self.staging.numel() < count:
            self.staging = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        host = self.staging[:count].view(packed.dtype)
        layer.cache.writer.before_reading(packed.device)
        host.copy_(packed, non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        there.synchronize()
        self.transfers.device_to_host_bytes += count
        parts = host.split([part.numel() for part in states])
        return tuple(part.view(like.shape) for part, like in zip(parts, states))


class PooledCpuAttention:
    """Calls of the threads that `calls` has. Masks that are no window are left to a `BlockingCpuAttention`, and passes of so many tokens
    that queries, new keys and new values are larger than the input of `calls`, or the result than its output.

    Args:
        calls: for a model on the CPU `DirectCalls`, on a GPU `HandOff`.
        cpus: where the `BlockingCpuAttention` may run its threads, if this thread may not run there; None: where this one may.
    """

    def __init__(self, calls: DirectCalls | HandOff, cpus: set[int] | None = None):
        self.calls, self.transfers, self.cpus = calls, calls.transfers, cpus
        self.tasks = AttentionTasks(calls.cores)
        self.numbers: dict[CpuAttentionLayer, int] = {}
        self.others = BlockingCpuAttention(calls.transfers, calls.cores.threads)

    def attend(
        self, layer: CpuAttentionLayer, query: torch.Tensor, window: int = 0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, heads, new, _ = query.shape
        keys, values = layer.kept
        states = query, *layer.newest
        out = query.new_empty((batch, new, heads, values.shape[4]))
        if mask is not None or not self._has_room(states, out):
            with _running_on(self.cpus):
                return self.others.attend(layer, query, window, mask)
        if layer not in self.numbers:
            logits = layer.logits
            self.numbers[layer] = self.tasks.add(
                keys, values, heads, logits.scale, logits.softcap, logits.slopes, logits.sinks
            )
        self.transfers.cores_bytes += _read_bytes(layer, query, window)
        packed = torch.cat([part.flatten() for part in states])
        if isinstance(self.calls, HandOff):
            layer.cache.writer.before_reading(out.device)
            target, what = self.calls.output.data_ptr(), (new, layer.length, window)
            self.calls.meet(
                [packed],
                [out],
                lambda sources, call: self.tasks.submit(self.numbers[layer], sources[0], target, *what, call),
            )
        else:
            self.tasks.run(self.numbers[layer], packed, out, new, layer.length, window)
        return out

    def _has_room(self, states: tuple[torch.Tensor, ...], out: torch.Tensor) -> bool:
        if not isinstance(self.calls, HandOff):
            return True
        asked = sum(part.nbytes for part in states)
        return asked <= self.calls.input.nbytes and out.nbytes <= self.calls.output.nbytes


@contextlib.contextmanager
def _running_on(cpus: set[int] | None) -> Iterator[None]:
    """Threads that are started meanwhile may run on `cpus`: they inherit where this one may."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _read_bytes(layer: CpuAttentionLayer, query: torch.Tensor, window: int) -> int:
    """Of keys and values, which are read once for all new tokens."""
    positions = min(layer.length, window + query.shape[2] - 1) if window else layer.length
    return positions * sum(kept[0, :, :, 0].nbytes for kept in layer.kept)
