"""Exact sizes of a model, its cache and its activations, counted before any weight is read; plans are based on these.

The rounder formulas of `zero_inference.utils` are for the log.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch

from zero_inference.models.layers import unused_tower_parameters
from zero_inference.models.meta_pass import (
    LayerObserver,
    LayersDiffer,
    PassObserver,
    observe_pass,
    run_on_meta,
    storage_of,
    tensors_in,
)
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.format import first_line
from zero_inference.utils.model_sizes import is_wrapper, kv_layers, kv_width

ALLOCATION_BYTES = 512  # PyTorch's CUDA allocator rounds up to a multiple of this


@dataclass(frozen=True)
class ModelSizes:
    """Counts of `count_sizes`. Tied weights count once.

    Attributes:
        parameters: elements of all parameters.
        parameter_bytes: their bytes, each in the dtype that it is computed in.
        idle_parameters: elements that a token of one sequence does not touch: rows of an embedding, experts not chosen, a vision tower.
        idle_bytes: the bytes of those, unquantized.
        idle_expert_bytes: the experts' part of `idle_bytes`.
        chooses_experts: whether a token uses only some experts.
        kv_widths: elements of keys and values together that a position adds to the cache, of each layer that has any.
        state_bytes: of a sequence's other state in the cache, such as that of recurrences: at any length, and per position.
        added_positions: that the model puts in the cache before a sequence's own.
        writes_weights: whether a pass changes weights, as RWKV's first one does.
        refuses_text: the model's error for token ids without images or sound; None if it accepts them.
    """

    parameters: int
    parameter_bytes: int
    idle_parameters: int
    idle_bytes: int
    idle_expert_bytes: int
    chooses_experts: bool
    kv_widths: tuple[int, ...]
    state_bytes: tuple[int, int] = (0, 0)
    added_positions: int = 0
    writes_weights: bool = False
    refuses_text: str | None = None


def count_sizes(model: torch.nn.Module, spec: ModelSpec) -> ModelSizes:
    """Count a model without weights. To be called before an engine fills it: engines may take parameters apart."""
    idle_experts = _idle_experts(model, spec)
    towers = unused_tower_parameters(model)
    idle = _idle_rows(model, {id(p) for p in towers}) + idle_experts + [(p.numel(), p.dtype) for p in towers]
    refusals: list[str] = []
    cached = _observe_cache(model, refusals)
    text = spec.text_config
    return ModelSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=parameter_bytes(model),
        idle_parameters=sum(numel for numel, _ in idle),
        idle_bytes=sum(numel * dtype.itemsize for numel, dtype in idle),
        idle_expert_bytes=sum(numel * dtype.itemsize for numel, dtype in idle_experts),
        chooses_experts=any(numel for numel, _ in idle_experts),
        kv_widths=tuple([2 * kv_width(text)] * kv_layers(text) if cached is None else cached.kv_widths()),
        state_bytes=(0, 0) if cached is None else cached.state_bytes(spec.dtype),
        added_positions=0 if cached is None else cached.added_positions(),
        writes_weights=cached is not None and cached.writes_weights,
        refuses_text=refusals[0] if refusals and is_wrapper(spec.config) else None,
    )


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def traced_kv_widths(model: torch.nn.Module) -> list[int] | None:
    """Return the elements of keys and values of one position, of each layer that caches any, from a pass of one token on the meta device.

    Latent attention caches other widths than its heads have, and layers may differ, share a cache or have none. None if the model
    cannot run there.
    """
    found = _observe_cache(model)
    return None if found is None else found.kv_widths()


def cache_class(model: torch.nn.Module) -> Any:
    """Return transformers' DynamicCache, or the subclass with more state by which `model` annotates its `past_key_values`."""
    from transformers import DynamicCache

    for module in model.modules():
        given = inspect.signature(type(module).forward).parameters.get("past_key_values")
        for kind in get_args(given.annotation) if given is not None else ():
            if isinstance(kind, type) and issubclass(kind, DynamicCache):
                return kind
    return DynamicCache


def new_cache(config: Any, kind: Any) -> Any:
    """Return an empty cache of transformers, of the class `kind` that `cache_class` returns."""
    from transformers import DynamicCache

    return DynamicCache(config=config) if kind is DynamicCache else kind()


def _observe_cache(model: torch.nn.Module, refusals: list[str] | None = None) -> _CacheObserver | None:
    """Run one token on the meta device, and return what it leaves in a cache.

    Args:
        refusals: gets the model's error if it does not accept its inputs.
    """

    def run(copied: torch.nn.Module, observer: _CacheObserver) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        arguments = inspect.signature(type(copied).forward).parameters
        mamba = "cache_params" in arguments and "past_key_values" not in arguments
        before = [parameter._version for parameter in copied.parameters()]
        try:
            copied(input_ids=ids, use_cache=True, **{"cache_params" if mamba else "past_key_values": observer.cache})
        except ValueError as error:
            if refusals is not None:
                refusals.append(first_line(error))
            raise
        observer.writes_weights = before != [parameter._version for parameter in copied.parameters()]

    def make(copied: torch.nn.Module) -> _CacheObserver:
        return _CacheObserver(new_cache(model.config, cache_class(model)))

    return run_on_meta(model, torch.bfloat16, make, run)  # the only dtype of grouped matrix products there


class _LayerState(NamedTuple):
    """Elements that a layer caches of one token.

    Attributes:
        keys_and_values: per position.
        state: other state, at any length.
        state_per_position: other state that grows.
        float32_state: the part of `state` in float32 whatever the model is in.
    """

    keys_and_values: int = 0
    state: int = 0
    state_per_position: int = 0
    float32_state: int = 0


def _read_cache(cache: Any) -> dict[int, _LayerState]:
    """Return by index the state of each layer of a cache. A model's own cache class may have more lists with an entry per layer."""
    lists = [value for name, value in vars(cache).items() if isinstance(value, list) and name != "layers"]
    found = {}
    for index, layer in enumerate(cache.layers):
        others = {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}
        pair = tensors_in([getattr(layer, "keys", None), getattr(layer, "values", None)])
        grows = tensors_in([value for name, value in others.items() if name.endswith("keys")])
        states = tensors_in([value for name, value in others.items() if not name.endswith("keys")])
        states = [each for each in states if each.is_meta and each.is_floating_point()]
        found[index] = _LayerState(_elements(pair), _elements(states), _elements(grows), _float32_elements(states))
    for index, state in enumerate(zip(*lists)):
        states = tensors_in(state)
        before = found.get(index, _LayerState())
        found[index] = before._replace(
            state=before.state + _elements(states),
            float32_state=before.float32_state + _float32_elements(states),
        )
    return {index: state for index, state in found.items() if any(state)}


def _elements(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _float32_elements(tensors: list[torch.Tensor]) -> int:
    return _elements([tensor for tensor in tensors if tensor.dtype == torch.float32])


class _CacheObserver(LayerObserver):
    """Notes what decoder layers put in a cache, and whether the pass changed weights."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.writes_weights = cache, False
        self.repeated: dict[int, _LayerState] = {}

    def layers(self) -> list[_LayerState]:
        found = _read_cache(self.cache) | self.repeated
        return [found[index] for index in sorted(found)]

    def kv_widths(self) -> list[int]:
        return [layer.keys_and_values for layer in self.layers() if layer.keys_and_values]

    def added_positions(self) -> int:
        keys = tensors_in([getattr(layer, "keys", None) for layer in self.cache.layers])
        return max((each.shape[2] for each in keys if each.dim() == 4), default=1) - 1  # [B, heads, positions, width]

    def state_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        at_any_length = sum(
            (layer.state - layer.float32_state) * dtype.itemsize + 4 * layer.float32_state for layer in self.layers()
        )
        return at_any_length, sum(layer.state_per_position for layer in self.layers()) * dtype.itemsize

    def begin_call(self) -> dict[int, _LayerState]:
        """See `LayerObserver`."""
        return _read_cache(self.cache)

    def end_call(self, start: dict[int, _LayerState], position: int, made: set[int]) -> _LayerState | None:
        """See `LayerObserver`. The index in the cache has to be the layer's own, or the others' indices would be unknown."""
        new = {index: state for index, state in _read_cache(self.cache).items() if start.get(index) != state}
        if new.keys() - {position}:
            raise LayersDiffer
        return new.get(position)

    def repeat_call(self, position: int, counts: _LayerState | None, made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        if counts is not None:
            self.repeated[position] = counts


def prefill_peak_bytes(model: Any, dtype: torch.dtype, prompt_len: int) -> int | None:
    """Return the peak bytes of tensors in the prefill of one sequence of `prompt_len` tokens, without weights, keys and values.

    Scales with the number of sequences. A model whose operators support only bfloat16 on the meta device, as grouped matrix products do,
    is counted in that. None if it cannot run there, or loops over positions.

    Args:
        model: without weights, as `empty_model.build_on_meta` builds it; it is not changed.
        dtype: of the hidden states.
    """
    for tried in dict.fromkeys((dtype, torch.bfloat16)):
        memory = observe_pass(model, tried, prompt_len, 0, lambda copied: _MemoryObserver())
        if memory is not None:
            return memory.peak * dtype.itemsize // tried.itemsize
    return None


class _MemoryObserver(PassObserver):
    """Adds up the storages that operators make while they are alive.

    Attributes:
        now, peak: bytes.
        alive: storage -> its number, in the order in which they were made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, int] = {}
        self.made = 0

    def on_operator(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `PassObserver`."""
        for tensor in tensors_in(out):
            if storage_of(tensor) not in given:
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if key in self.alive:
            return
        self.alive[key] = self.made = self.made + 1
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        del self.alive[key]
        self.now -= nbytes

    def begin_call(self) -> tuple[set[int], int, int, int]:
        """See `LayerObserver`."""
        before = set(self.alive.values()), self.peak, self.now, self.operators_seen
        self.peak = self.now
        return before

    def end_call(self, start: tuple[set[int], int, int, int], position: int, made: set[int]) -> tuple[int, int]:
        """See `LayerObserver`. Tensors that the call stores elsewhere, as in a cache, cannot be repeated."""
        before, peak, now, operators = start
        if set(self.alive.values()) != before | {self.alive.get(storage, -1) for storage in made}:
            raise LayersDiffer
        added = self.peak - now
        self.peak = max(self.peak, peak)
        return added, self.operators_seen - operators

    def repeat_call(self, position: int, counts: tuple[int, int], made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        added, operators = counts
        self.peak = max(self.peak, self.now + added)
        self.count(operators)
        for tensor in made:
            self._add(tensor.untyped_storage())


def estimate_prefill_bytes(spec: ModelSpec, prompt_len: int) -> int:
    """Estimate `prefill_peak_bytes` of a model that cannot run on the meta device: six hidden states and three MLP inner states."""
    config = spec.text_config
    h = config.hidden_size
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((value for name in names if isinstance(value := getattr(config, name, None), int)), 4 * h)
    return prompt_len * (6 * h + 3 * inner) * spec.dtype.itemsize


def logits_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a sequence's logits while its token is chosen: in the model's dtype, and of two steps in float32."""
    return spec.text_config.vocab_size * (spec.dtype.itemsize + 2 * 4)


def _idle_rows(model: Any, counted: set[int]) -> list[tuple[int, torch.dtype]]:
    """Return elements and dtype of embeddings that are not tied to the head, except parameters with ids in `counted`."""
    head = model.get_output_embeddings()
    return [
        (module.weight.numel(), module.weight.dtype)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        and id(module.weight) not in counted
        and (head is None or module.weight is not head.weight)
    ]


def _idle_experts(model: Any, spec: ModelSpec) -> list[tuple[int, torch.dtype]]:
    """Return elements and dtype of the experts that a token does not choose."""
    number, chosen = spec.experts
    return [(p.numel() * (number - chosen) // number, p.dtype) for p in expert_parameters(model, spec)]


def expert_parameters(model: Any, spec: ModelSpec) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of experts that a token may leave out."""
    number, _ = spec.experts
    for name, module in model.named_modules():
        if number and ".experts." in f".{name}." and not _uses_all_experts(module):
            for p in module.parameters(recurse=False):
                if p.dim() == 3 and p.shape[0] == number or p.dim() == 2:
                    yield p


def _uses_all_experts(experts: torch.nn.Module) -> bool:
    """Return whether a module of stacked experts gets only hidden states and no choice, as that of Llama 4."""
    stacked = any(p.dim() == 3 for p in experts.parameters(recurse=False))
    return stacked and len(inspect.signature(type(experts).forward).parameters) == 2  # self and the hidden states
