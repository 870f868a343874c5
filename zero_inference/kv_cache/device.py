"""KV caches that are allocated once and filled by appending, for any transformers model: the base classes, and the cache on the device.

transformers' static cache makes attention read all of it at every step; these return the filled part, so that attention computes the same
as with transformers' dynamic cache, without its copies.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from zero_inference.errors import RunError, UsageError
from zero_inference.models.empty_model import cache_class, new_cache
from zero_inference.models.layers import cache_per_module

T = TypeVar("T")
Pair = tuple[Tensor, Tensor]  # keys and values

# values of a config's `layer_types`
KEY_VALUE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
STATE_OF_CACHE = ("layers", "layer_class_to_replicate")
STATE_OF_LAYER = ("keys", "values", "is_initialized", "device", "dtype", "cumulative_length")


def supports_preallocated(model: torch.nn.Module) -> bool:
    """Return whether `model` takes a cache whose layers hold keys and values and nothing else."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    return takes_cache(model) and KEY_VALUE_LAYERS.issuperset(kinds)


def takes_cache(model: torch.nn.Module) -> bool:
    return "past_key_values" in inspect.signature(type(model).forward).parameters


@cache_per_module
def why_not_offloaded(model: torch.nn.Module) -> str | None:
    """Return why keys and values of `model` cannot be offloaded, in words that follow its name; None where they can."""
    if not takes_cache(model):
        return "takes no past_key_values"
    try:
        return _why_not_replaceable(new_cache(model.config, cache_class(model)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"has no cache that transformers can make ({type(error).__name__}: {error})"


def refuse_kv_offload(model: torch.nn.Module, window_only_in_cache: bool = False) -> None:
    """Raise UsageError where keys and values of `model` cannot be offloaded; `window_only_in_cache` as of attention_patch."""
    reason = why_not_offloaded(model)
    if reason is None and window_only_in_cache:
        reason = "has a sliding window that may be in transformers' cache alone"
    if reason:
        raise _refusal(model.config, reason)


def _refusal(config: Any, reason: str) -> UsageError:
    kind = config.get_text_config(decoder=True).model_type
    return UsageError(f"--kv-offload keeps keys and values in host memory, and {kind} {reason}: drop --kv-offload.")


def _why_not_replaceable(own: Cache) -> str | None:
    """Return why our caches cannot hold the keys and values of transformers' cache `own`; None where they can."""
    layers = list(filter(has_keys, own.layers))
    if kinds := {type(layer).__name__ for layer in layers if not _is_replaceable(layer)}:
        return f"keeps them in a form of its own ({', '.join(sorted(kinds))})"
    return "has no layers that keep keys and values" if own.layers and not layers else None


def windows_of_layers(config: Any, length: int) -> dict[str, int] | None:
    """Return kind of decoder layer -> sliding window in positions, with the token's own; 0 where it sees all of `length`.

    None if a kind sees other positions, as chunks, or keeps no keys and values.
    """
    text = config.get_text_config(decoder=True)
    window, chunk = getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)
    only = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    windows: dict[str, int] = {}
    for kind in dict.fromkeys(getattr(text, "layer_types", None) or [only]):
        seen = window or chunk or 0
        if kind in ("full_attention", "attention") or (kind in KEY_VALUE_LAYERS and seen >= length):
            windows[kind] = 0
        elif kind == "sliding_attention" and window:
            windows[kind] = window
        else:
            return None
    return windows


def sees_all_positions(config: Any, length: int) -> bool:
    """Return whether each of `length` positions attends to all before it, in every layer of `config`'s decoder."""
    windows = windows_of_layers(config, length)
    return windows is not None and not any(windows.values())


@dataclass(frozen=True)
class StepMasks:
    """Masks of a decode step of one or several tokens, added to attention scores, in tensors at fixed addresses.

    Attributes:
        windows: kind of layer -> window in positions, 0: all.
        by_window: [B, 1, tokens, positions of the cache] each, in the model's dtype.
        shifted: the same for any number of cached positions, [tokens, 2 * positions]: a mask is as many columns of it.
    """

    windows: Mapping[str, int]
    by_window: Mapping[int, Tensor]
    shifted: Mapping[int, Tensor]

    @classmethod
    def like(cls, ids: Tensor, length: int, dtype: torch.dtype, windows: Mapping[str, int]) -> StepMasks:
        shape = ids.shape[0], 1, ids.shape[1], length
        masks = {each: torch.empty(shape, dtype=dtype, device=ids.device) for each in set(windows.values())}
        columns = torch.arange(-length, length, device=ids.device)
        after_own = columns - torch.arange(ids.shape[1], device=ids.device)[:, None]  # positions after the token's own
        shifted = {}
        for window in masks:
            hidden = (after_own > 0) | (after_own <= -window) if window else after_own > 0
            shifted[window] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
        return cls(windows, masks, shifted)

    @property
    def argument(self) -> Tensor | dict[str, Tensor]:
        """The model's `attention_mask`: one mask for all layers, or those of each kind, as transformers' models take them."""
        if len(self.by_window) == 1:
            return next(iter(self.by_window.values()))
        return {kind: self.by_window[window] for kind, window in self.windows.items()}

    def fill(self, cached: int, given: Tensor | None) -> None:
        """Let each token after `cached` positions see itself and the positions before it that are in its window, unless `given`
        [B, positions] (None: all) excludes them."""
        hidden = None if given is None else given[:, None, None] == 0
        for window, mask in self.by_window.items():
            length = mask.shape[3]
            mask.copy_(self.shifted[window][:, length - cached : 2 * length - cached])
            if hidden is not None:
                mask[..., : hidden.shape[3]].masked_fill_(hidden, torch.finfo(mask.dtype).min)


def has_keys(layer: Any) -> bool:
    return isinstance(layer, CacheLayerMixin)


def _is_replaceable(layer: CacheLayerMixin) -> bool:
    """Return whether `layer` handles keys and values like a plain layer, whatever other state it has."""
    plain = DynamicSlidingWindowLayer if isinstance(layer, DynamicSlidingWindowLayer) else DynamicLayer
    methods = ("update", "get_mask_sizes", "get_seq_length")
    return isinstance(layer, DynamicLayer) and all(
        getattr(type(layer), name) is getattr(plain, name) for name in methods
    )


def with_state_of(own: Any, ours: T, replaced: tuple[str, ...]) -> T:
    """Return `ours` with the class of `own` as a second base class and its state, except the attributes `replaced`.

    So a layer can also have a recurrence's state, and a cache can be of the class that a model checks for.
    """
    if not isinstance(ours, type(own)):
        ours.__class__ = type(f"{type(ours).__name__}And{type(own).__name__}", (type(ours), type(own)), {})
    vars(ours).update({name: value for name, value in vars(own).items() if name not in replaced})
    return ours


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer, allocated at the first tokens for `max_length` positions."""

    is_sliding = False  # transformers sees a full-attention layer: sliding windows are in its masks

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length, self.length = max_length, 0
        self.stored: Pair | None = None  # memory; None before the first tokens
        self.dtype: Any = None
        self.device: Any = None

    @abstractmethod
    def allocate(self, *states: Tensor) -> None:
        """Set `stored` for states [batch, heads, new, head_dim] like these."""

    def append(self, states: Pair, start: int, end: int) -> Pair:
        """Store `states` [batch, heads, end - start, head_dim]; return all positions, [batch, heads, end, head_dim]."""
        return store(self.stored, states, start, end)

    def lazy_initialization(self, *states: Tensor, **others: Any) -> None:
        """Allocate memory for keys and values like `states`, or for `others`, states of a recurrence."""
        if others:
            super().lazy_initialization(**others)
            return
        self.dtype, self.device = states[0].dtype, states[0].device
        self.allocate(*states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append key and value states [batch, heads, new, head_dim]; return all positions, [batch, heads, length, head_dim].

        Raises:
            RunError: more positions than the cache holds.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.max_length:
            raise RunError(f"the KV cache has {self.max_length} positions, but {end} are needed.")
        self.length = end  # first: `append` may prefetch this layer for the next step
        return self.append((key_states, value_states), start, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_length

    get_max_cache_shape = get_max_length  # its older name, in supported versions of transformers

    def reset(self) -> None:
        self.length = 0

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored or ())


def store(stored: Pair, states: Pair, start: int, end: int) -> Pair:
    """Write `states` to positions start..end of `stored` [batch, heads, positions, head_dim]; return all positions up to `end`."""
    keys, values = (side[:, :, :end] for side in stored)
    keys[:, :, start:].copy_(states[0])
    values[:, :, start:].copy_(states[1])
    return keys, values


class PreallocatedCache(Cache):
    """A cache of `PreallocatedLayer`s, whose memory survives `reset`. Other state, such as that of a recurrence, is in transformers' own
    layers, on the device that computes.

    Args:
        config: the transformers config.
        kind: `cache_class` of the model.

    Raises:
        UsageError: the model's cache does not hold plain keys and values.
    """

    def __init__(self, config: Any, kind: type[DynamicCache] = DynamicCache):
        self.new_own = functools.partial(new_cache, config, kind)
        own = self.new_own()
        if reason := _why_not_replaceable(own):
            raise _refusal(config, reason)
        super().__init__(layers=[self._replace(layer) for layer in own.layers])
        if own.layer_class_to_replicate is not None:  # created when first used
            self.layer_class_to_replicate = self.new_layer
        if type(own) is not DynamicCache:  # of a model that requires it
            with_state_of(own, self, STATE_OF_CACHE)

    @abstractmethod
    def new_layer(self) -> PreallocatedLayer:
        """Return an empty layer."""

    def _replace(self, own: Any) -> Any:
        """Return our layer instead of `own`, with its other state; `own` itself if it keeps no keys and values."""
        if not has_keys(own):
            return own
        plain = type(own) in (DynamicLayer, DynamicSlidingWindowLayer)
        return self.new_layer() if plain else with_state_of(own, self.new_layer(), STATE_OF_LAYER)

    @property
    def preallocated(self) -> list[PreallocatedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]

    def nbytes(self) -> int:
        return sum(layer.nbytes() for layer in self.preallocated)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions: like transformers' `crop`, it takes no positive number."""
        for layer in self.preallocated:
            layer.length += tokens_to_remove

    def advance_layer(self, layer: int, tokens: int) -> None:
        """Add `tokens` positions to a layer that a draft skips: masks are made for the length of any layer."""
        self.layers[layer].length += tokens

    def reset(self) -> None:
        """Forget all tokens; the memory of keys and values stays allocated."""
        for layer in self.preallocated:
            layer.reset()
        own = self.new_own()
        if own.layer_class_to_replicate is not None:  # the model may check how many layers there are
            created = iter(self.layers)
            self.layers: list[Any] = []
            self.layer_class_to_replicate = lambda: next(created, None) or self.new_layer()
        for index, new in enumerate(own.layers):
            if not isinstance(self.layers[index], PreallocatedLayer):
                self.layers[index] = new
            elif isinstance(self.layers[index], type(new)):  # it has other state too
                with_state_of(new, self.layers[index], STATE_OF_LAYER)
        if type(own) is not DynamicCache:
            with_state_of(own, self, STATE_OF_CACHE)


@dataclass
class MicroBatch:
    """The rows of the batch that keys and values are given for, where a layer computes a prompt in micro-batches."""

    rows: slice | None = None  # None: of all sequences
    batch: int = 0
    is_last: bool = True


class DeviceKVCache(PreallocatedCache):
    """Keys and values on the device that computes, [batch, heads, max_length, head_dim] per layer.

    Args:
        max_length: positions per sequence to allocate; later those of the current generation.
        rows: sequences to allocate for; None: as many as the first tokens have. See `begin`.
    """

    def __init__(self, config: Any, max_length: int, rows: int | None = None):
        self.max_length, self.rows, self.planned_length = max_length, rows, max_length
        self.micro_batch = MicroBatch()
        super().__init__(config)

    def new_layer(self) -> PreallocatedLayer:
        return _DeviceLayer(self.max_length, self.rows, self.micro_batch)

    def begin(self, rows: int) -> None:
        """Forget all tokens and start a generation of `rows` sequences in the same memory: more than planned get fewer positions."""
        planned = self.rows or rows
        self.max_length = min(self.planned_length, planned * self.planned_length // max(1, rows))
        for layer in self.preallocated:  # others use the keys of another layer
            layer.max_length, layer.length, layer.is_initialized = self.max_length, 0, False

    @contextlib.contextmanager
    def writing_at(self, positions: Mapping[torch.device, Tensor]) -> Iterator[None]:
        """Within it `update` writes new tokens to `positions`, int64 [tokens] on each device and read in stream order, and returns all
        positions, so that attention needs a mask. `advance` counts the tokens."""
        for layer in self.layers:
            layer.write_positions = positions.get(getattr(layer, "device", None))
        try:
            yield
        finally:
            for layer in self.layers:
                layer.write_positions = None

    def advance_layer(self, layer: int, tokens: int) -> None:
        if self.layers[layer].write_positions is None:  # else `advance` counts the tokens
            super().advance_layer(layer, tokens)

    def advance(self, tokens: int) -> None:
        """Add to the length the tokens that were written within `writing_at`."""
        for layer in self.layers:
            layer.length += tokens

    def at(self, positions: slice) -> list[Tensor]:
        """Return copies of keys and values, [batch, heads, positions, head_dim] each."""
        return [stored[:, :, positions].clone() for layer in self.layers for stored in layer.stored or ()]


class _DeviceLayer(PreallocatedLayer):
    """Keys and values of one layer on the device, `stored` [batch, heads, max_length, head_dim]."""

    def __init__(self, max_length: int, rows: int | None, micro_batch: MicroBatch):
        super().__init__(max_length)
        self.rows, self.planned_length, self.micro_batch = rows, max_length, micro_batch
        self.memory: list[Tensor] = []  # that `stored` views, flat; empty before the first tokens
        self.write_positions: Tensor | None = None  # of the new tokens while a graph is captured

    def allocate(self, *states: Tensor) -> None:
        batch = states[0].shape[0] if self.micro_batch.rows is None else self.micro_batch.batch
        if not self.memory:  # zeros: a mask hides unfilled positions, but a NaN there would spread
            positions = (self.rows or batch) * self.planned_length
            self.memory = [each.new_zeros(positions * each.shape[1] * each.shape[3]) for each in states]
        shapes = [(batch, each.shape[1], self.max_length, each.shape[3]) for each in states]
        self.stored = tuple(memory[: math.prod(shape)].view(shape) for memory, shape in zip(self.memory, shapes))

    def append(self, states: Pair, start: int, end: int) -> Pair:
        if self.micro_batch.rows is None:
            return super().append(states, start, end)
        keys, values = (side[self.micro_batch.rows] for side in self.stored)
        return store((keys, values), states, start, end)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Store the new keys and values, and return all; all allocated positions within `DeviceKVCache.writing_at`."""
        if self.write_positions is None:
            found = super().update(key_states, value_states, *args, **kwargs)
            if self.micro_batch.rows is not None and not self.micro_batch.is_last:
                self.length -= key_states.shape[2]  # the next rows begin at the same position
            return found
        for stored, new in zip(self.stored, (key_states, value_states)):
            stored.index_copy_(2, self.write_positions, new)
        return self.stored
