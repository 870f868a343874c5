"""A KV cache in host memory whose decode attention the host's cores compute where the keys and values lie.

The prefill attends on the device and writes keys and values to the host, as with `HostKVCache`. From then on they do not cross the
link again: a step brings the new queries, keys and values to the host and the weighted sums back, 1/256 of them at 512 positions.

Keys and values are kept as [blocks, batch, kv_heads, up to 64 positions, head_dim]: the rows of a head in a block are one run of memory,
16 KB at 64 of 128 float16. A processor reads ahead along such runs, and not along single rows in position-major memory. The
blocks of a prompt are one run for all sequences and heads, so that the prefill writes them by one copy.

transformers' attention functions get the new keys with a mark from `update`, by which `zero_inference.kv_cache.diverted` knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import DynamicCache

from zero_inference.errors import RunError
from zero_inference.kv_cache.device import PreallocatedCache, PreallocatedLayer
from zero_inference.kv_cache.masks import Masks
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.transfers import Transfers

MOST_BLOCK_POSITIONS = 64  # also what the cores take between two looks at the softmax (csrc/cpu/attention_kernel.h)


def blocks_for(max_length: int) -> tuple[int, int]:
    """How many blocks hold `max_length` positions, and positions of each: as few as hold them all."""
    count = math.ceil(max_length / MOST_BLOCK_POSITIONS)
    return count, math.ceil(max_length / count)


@dataclass(frozen=True)
class Logits:
    """What a layer does with its logits, as `zero_inference.cpu.attention.attention` has it; tensors on the CPU."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


class Meeting(Protocol):
    """How the device that computes and the cores meet (zero_inference.kv_cache.meetings)."""

    def attend(
        self, layer: AttendedLayer, query: torch.Tensor, window: int = 0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store the layer's `newest` keys and values as the last ones of its `length`, and attend.

        Args:
            query: [batch, heads, new, key_dim], where the model computes.
            window: how many of the last positions a token sees, its own included; 0: all.
            mask: on the CPU, for `attention`; None: a token sees the window up to its own position.

        Returns:
            [batch, new, heads, value_dim], where the queries are.
        """


class AttendedCache(PreallocatedCache):
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
        meeting: Meeting,
        kind: type[DynamicCache] = DynamicCache,
    ):
        self.writer = PromptWriter(asynchronous, transfers)
        self.max_length, self.meeting, self.pinned, self.masks = max_length, meeting, pinned, Masks()
        self.waiting: AttendedLayer | None = None
        super().__init__(config, kind)

    def new_layer(self) -> PreallocatedLayer:
        return AttendedLayer(self, self.max_length)

    def reset(self) -> None:
        self.waiting, self.masks = None, Masks()
        self.writer.wait()
        super().reset()


class AttendedLayer(PreallocatedLayer):
    """Keys and values of one layer in host memory.

    Attributes:
        newest: new keys and values, [batch, kv_heads, new, dim], where the model computes; not in `kept` yet.
        kept: keys and values, [blocks, batch, kv_heads, positions of a block, dim].
        logits: what the layer does with its logits; whoever sends for `Meeting.attend` sets it before the first time.
    """

    def __init__(self, cache: AttendedCache, max_length: int):
        super().__init__(max_length)
        self.cache = cache
        self.logits: Logits | None = None
        self.newest: tuple[torch.Tensor, torch.Tensor] | None = None

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        blocks, positions = blocks_for(self.max_length)
        self.kept = tuple(
            host_empty((blocks, *states.shape[:2], positions, states.shape[3]), states.dtype, self.cache.pinned)
            for states in (key_states, value_states)
        )

    def append(self, states: tuple[torch.Tensor, torch.Tensor], start: int, end: int) -> tuple[torch.Tensor, ...]:
        if self.cache.waiting is not None:
            raise NotAttended("a layer did not attend through transformers' attention functions, or changed its keys")
        if start == 0:
            self.cache.writer.write(self.kept, states, self.device)
            return states
        self.newest = states
        # of the length that models expect; if one computes with them itself, the next layer's `append` finds out
        shown = tuple(new[:, :, :1].expand(-1, -1, end, -1) for new in states)
        shown[0].attended = self.cache.waiting = self
        return shown

    @staticmethod
    def of(key: torch.Tensor) -> AttendedLayer | None:
        """The layer whose mark `key` has, which waits no longer; None for keys that are to be attended where they are."""
        layer: AttendedLayer | None = getattr(key, "attended", None)
        if layer is not None:
            layer.cache.waiting = None
        return layer

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention [batch, new, heads, value_dim] of `query` [batch, heads, new, key_dim], for `mask` as `Masks.on_host` takes it."""
        if self.newest is None:
            raise NotAttended("a layer attends more than once to its keys")
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


class NotAttended(RunError):
    """The model uses keys and values of an `AttendedCache` otherwise than by attending over them once; `why` says how."""

    def __init__(self, why: str):
        super().__init__(f"attention by the cores, over keys and values in host memory: {why}; use --cpu-compute off.")
        self.why = why
