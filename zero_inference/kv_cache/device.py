"""A KV cache that is allocated once and filled by appending, for any transformers model.

transformers' own cache of fixed size makes attention read all of it at every step; this one hands out what is filled, so
that attention computes what it would with transformers' growing cache, without its copies.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from zero_inference.errors import RunError, UsageError
from zero_inference.models.sizes import KEY_VALUE_LAYERS


def other_layer_types(config) -> set[str]:
    """Kinds of layers of `config`'s decoder that keep other state than keys and values."""
    text = config.get_text_config(decoder=True)
    return set(getattr(text, "layer_types", None) or ["full_attention"]) - KEY_VALUE_LAYERS


def check_layer_types(config) -> None:
    """Raises UsageError where a model keeps other state than keys and values."""
    kinds = other_layer_types(config)
    if kinds:
        raise UsageError(
            f"--kv-offload supports plain attention layers only, but {config.get_text_config(decoder=True).model_type} also has layers of "
            f"type {', '.join(sorted(kinds))}: drop --kv-offload."
        )


def attends_to_all(config, length: int) -> bool:
    """Whether each of `length` positions attends to all before it, in every layer of `config`'s decoder."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    return kinds <= {"full_attention", "attention"} or (kinds <= KEY_VALUE_LAYERS and bool(window) and window >= length)


def key_value_layers(config) -> int:
    """How many layers keep keys and values of their own."""
    text = config.get_text_config(decoder=True)
    return text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer, allocated at the first tokens for `max_length` positions.

    transformers sees a full-attention layer: sliding windows are left to its masks.

    Attributes:
        kept: the memory of keys and values, None before the first tokens.
    """

    is_sliding = False

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length, self.length = max_length, 0
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    @abstractmethod
    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set `kept`, for states like these [batch, heads, new, head_dim]."""

    @abstractmethod
    def append(self, states: tuple[torch.Tensor, torch.Tensor], start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Store `states` [batch, heads, end - start, head_dim]; return all so far, [batch, heads, end, head_dim]."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.allocate(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append key and value states [batch, heads, new, head_dim]; return all so far, [batch, heads, length, head_dim].

        Raises:
            RunError: more positions than the cache holds.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.max_length:
            raise RunError(f"the KV cache has {self.max_length} positions, but {end} are needed.")
        self.length = end  # first: a pool may fetch this very layer for the next step
        return self.append((key_states, value_states), start, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_length

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.length = 0

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.kept) if self.kept else 0


class PreallocatedCache(Cache):
    """A cache of `PreallocatedLayer`s, which keeps its memory over `reset`."""

    def nbytes(self) -> int:
        """Bytes the cache holds."""
        return sum(layer.nbytes() for layer in self.layers)

    def reset(self) -> None:
        """Forget all tokens and keep the memory."""
        for layer in self.layers:
            layer.reset()


class DeviceKVCache(PreallocatedCache):
    """Keys and values where the model computes, [batch, heads, max_length, head_dim] a layer.

    Args:
        config: the transformers config; it says how many layers there are.
        max_length: positions to allocate: prompt plus generated tokens.
    """

    def __init__(self, config, max_length: int):
        self.max_length = max_length
        super().__init__(layers=[self.new_layer() for _ in range(key_value_layers(config))])

    def new_layer(self) -> PreallocatedLayer:
        return _DeviceLayer(self.max_length)

    @contextlib.contextmanager
    def writing_at(self, place: torch.Tensor) -> Iterator[None]:
        """Within it the next token's keys and values go to position `place`, int64 [1] on the device, which is read when that happens;
        attention is given all positions, and needs a mask. Nobody counts the token: `advance` does."""
        for layer in self.layers:
            layer.place = place
        try:
            yield
        finally:
            for layer in self.layers:
                layer.place = None

    def advance(self, tokens: int) -> None:
        """Count tokens that were written within `writing_at`."""
        for layer in self.layers:
            layer.length += tokens

    def at(self, position: int) -> list[torch.Tensor]:
        """Copies of the keys and values at one position, [batch, heads, head_dim] each."""
        return [kept[:, :, position].clone() for layer in self.layers for kept in layer.kept or ()]


class CallsCache(DeviceKVCache):
    """One for many generations, of different numbers of sequences: as much memory as `rows` sequences of `max_length` positions take, which
    more sequences share. `begin` says how many come next.

    Attributes:
        max_length: positions of each sequence, in the generation that has begun.
    """

    def __init__(self, config, rows: int, max_length: int):
        self.planned_rows, self.planned_length = rows, max_length
        super().__init__(config, max_length)

    def new_layer(self) -> PreallocatedLayer:
        return _CallsLayer(self.planned_rows, self.planned_length)

    def begin(self, rows: int) -> None:
        """Forget all tokens; `rows` sequences follow."""
        fits = rows <= self.planned_rows
        self.max_length = self.planned_length if fits else self.planned_rows * self.planned_length // rows
        for layer in self.layers:
            layer.begin(self.max_length)


class _DeviceLayer(PreallocatedLayer):
    place: torch.Tensor | None = None  # where the next token goes, if a graph is recorded

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.kept = tuple(  # zeros: a mask keeps attention from what is not filled, and not from what is no number
            torch.zeros((*states.shape[:2], self.max_length, states.shape[3]), dtype=states.dtype, device=states.device)
            for states in (key_states, value_states)
        )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """See `PreallocatedLayer`; and `DeviceKVCache.writing_at`."""
        if self.place is None:
            return super().update(key_states, value_states, *args, **kwargs)
        for kept, new in zip(self.kept, (key_states, value_states)):
            kept.index_copy_(2, self.place, new)
        return self.kept

    def append(self, states: tuple[torch.Tensor, torch.Tensor], start: int, end: int) -> tuple[torch.Tensor, ...]:
        for kept, new in zip(self.kept, states):
            kept[:, :, start:end].copy_(new)
        return tuple(kept[:, :, :end] for kept in self.kept)


class _CallsLayer(_DeviceLayer):
    """
    Attributes:
        memory: of keys and of values, flat; None before the first tokens.
    """

    def __init__(self, rows: int, max_length: int):
        super().__init__(max_length)
        self.positions = rows * max_length
        self.memory: list[torch.Tensor] = []

    def begin(self, max_length: int) -> None:
        self.max_length, self.length, self.is_initialized = max_length, 0, False

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.memory:  # zeros: see `_DeviceLayer`
            self.memory = [
                torch.zeros(self.positions * each.shape[1] * each.shape[3], dtype=each.dtype, device=each.device)
                for each in (key_states, value_states)
            ]
        shapes = [(*each.shape[:2], self.max_length, each.shape[3]) for each in (key_states, value_states)]
        self.kept = tuple(memory[: math.prod(shape)].view(shape) for memory, shape in zip(self.memory, shapes))
