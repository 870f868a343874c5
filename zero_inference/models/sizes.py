"""Exact sizes of a model and of what a run of it keeps beside its weights, counted before any weight is read.

What is decided is decided by these, and by the parameters themselves where an engine lays them out. The rounder formulas of
`zero_inference.utils` are for the log.
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

KEY_VALUE_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
}  # of a config's layer_types


@dataclass(frozen=True)
class ModelSizes:
    """What `model_sizes` counted. Tied weights count once.

    Attributes:
        parameters: elements of all parameters.
        parameter_bytes: their bytes, each in the dtype that it is computed in.
        idle_parameters: elements that a token of one sequence does not touch: rows of an embedding, experts not chosen, a wrapper's
            vision tower.
        idle_bytes: the bytes of those, unquantized.
        idle_expert_bytes: of those, what experts are.
        chooses_experts: whether a token leaves experts out.
        kv_widths: elements of keys and values together that a position adds to the cache, of each layer that keeps any.
        state_bytes: of a sequence's other state in the cache, such as that of recurrences: at any length, and for each position.
        added_positions: that the model puts in the cache before a sequence's own.
        writes_weights: whether a pass changes weights, as RWKV's first one does.
        refuses_text: what the model says of token ids without images or sound; None where it takes them.
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


def model_sizes(model: torch.nn.Module, spec: ModelSpec) -> ModelSizes:
    """Count a model without weights (see `models.empty_model`). To be called before an engine fills it: it may take parameters apart."""
    idle_experts = _idle_experts(model, spec)
    towers = unused_tower_parameters(model)
    idle = _idle_rows(model, {id(p) for p in towers}) + idle_experts + [(p.numel(), p.dtype) for p in towers]
    refusals: list[str] = []
    cached = _cached_by(model, refusals)
    widths = _kv_widths_by_config(spec) if cached is None else cached.widths()
    return ModelSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=parameter_bytes(model),
        idle_parameters=sum(numel for numel, _ in idle),
        idle_bytes=sum(numel * dtype.itemsize for numel, dtype in idle),
        idle_expert_bytes=sum(numel * dtype.itemsize for numel, dtype in idle_experts),
        chooses_experts=any(numel for numel, _ in idle_experts),
        kv_widths=tuple(widths),
        state_bytes=(0, 0) if cached is None else cached.state_bytes(spec.dtype),
        added_positions=0 if cached is None else cached.added_positions(),
        writes_weights=cached is not None and cached.writes_weights,
        refuses_text=refusals[0] if refusals and is_wrapper(spec.config) else None,
    )


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def traced_kv_widths(model: torch.nn.Module) -> list[int] | None:
    """Elements of keys and values of one position, of each layer that caches any, by one token through `model` on the meta device.

    That is what the model itself puts in a cache: latent attention caches other widths than its heads have, and layers may
    differ, share a cache or keep none. None where the model cannot run there, because it looks at values.
    """
    found = _cached_by(model)
    return None if found is None else found.widths()


def _cached_by(model: torch.nn.Module, refusals: list[str] | None = None) -> _Cached | None:
    """Run one token, and return what it leaves in a cache; see `traced_kv_widths`.

    Args:
        refusals: gets what the model says where it does not accept its inputs.
    """

    def run(shapes: torch.nn.Module, cached: _Cached) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        known = inspect.signature(type(shapes).forward).parameters
        name = "cache_params" if "cache_params" in known and "past_key_values" not in known else "past_key_values"
        before = [parameter._version for parameter in shapes.parameters()]
        try:
            shapes(input_ids=ids, use_cache=True, **{name: cached.cache})
        except ValueError as error:
            if refusals is not None:
                refusals.append(first_line(error))
            raise
        cached.writes_weights = before != [parameter._version for parameter in shapes.parameters()]

    # grouped matrix products have no other dtype there
    return run_on_meta(model, torch.bfloat16, lambda shapes: _Cached(new_cache(model.config, cache_class(model))), run)


def cache_class(model: torch.nn.Module) -> Any:
    """Return the class of cache that `model` asks for by the annotation of its `past_key_values`: transformers' DynamicCache, or a subclass
    with state of its own."""
    from transformers import DynamicCache

    for module in model.modules():
        given = inspect.signature(type(module).forward).parameters.get("past_key_values")
        for kind in get_args(given.annotation) if given is not None else ():
            if isinstance(kind, type) and issubclass(kind, DynamicCache):
                return kind
    return DynamicCache


def new_cache(config: Any, kind: Any) -> Any:
    """Return an empty cache of transformers, of the class `kind` that `cache_class` gives."""
    from transformers import DynamicCache

    return DynamicCache(config=config) if kind is DynamicCache else kind()


class _Kept(NamedTuple):
    """Elements that a layer keeps of one token: keys and values; other state, at any length and for each position; and of the former,
    what is in float32 whatever the model is in."""

    keys_and_values: int = 0
    state: int = 0
    of_position: int = 0
    in_float32: int = 0


def _kept_in(cache: Any) -> dict[int, _Kept]:
    """Return by index what each layer of a cache keeps. A cache of a class of its own may have more lists with an entry per layer."""
    lists = [value for name, value in vars(cache).items() if isinstance(value, list) and name != "layers"]
    found = {}
    for index, layer in enumerate(cache.layers):
        others = {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}
        pair = tensors_in([getattr(layer, "keys", None), getattr(layer, "values", None)])
        grows = tensors_in([value for name, value in others.items() if name.endswith("keys")])
        states = tensors_in([value for name, value in others.items() if not name.endswith("keys")])
        states = [each for each in states if each.is_meta and each.is_floating_point()]
        found[index] = _Kept(_elements(pair), _elements(states), _elements(grows), _float32(states))
    for index, state in enumerate(zip(*lists)):
        states = tensors_in(state)
        before = found.get(index, _Kept())
        found[index] = before._replace(
            state=before.state + _elements(states), in_float32=before.in_float32 + _float32(states)
        )
    return {index: kept for index, kept in found.items() if any(kept)}


def _elements(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _float32(tensors: list[torch.Tensor]) -> int:
    return _elements([tensor for tensor in tensors if tensor.dtype == torch.float32])


class _Cached(LayerObserver):
    """Notes what decoder layers put in a cache, and whether the pass changed weights."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.writes_weights = cache, False
        self.repeated: dict[int, _Kept] = {}

    def kept(self) -> list[_Kept]:
        """Return what each layer keeps, of those that keep anything, in order."""
        found = _kept_in(self.cache) | self.repeated
        return [found[index] for index in sorted(found)]

    def widths(self) -> list[int]:
        """Return the elements of keys and values of each layer that keeps any, in order."""
        return [kept.keys_and_values for kept in self.kept() if kept.keys_and_values]

    def added_positions(self) -> int:
        """See `ModelSizes`."""
        keys = tensors_in([getattr(layer, "keys", None) for layer in self.cache.layers])
        return max((each.shape[2] for each in keys if each.dim() == 4), default=1) - 1

    def state_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """See `ModelSizes`."""
        at_any_length = sum(
            (kept.state - kept.in_float32) * dtype.itemsize + 4 * kept.in_float32 for kept in self.kept()
        )
        return at_any_length, sum(kept.of_position for kept in self.kept()) * dtype.itemsize

    def start(self) -> dict[int, _Kept]:
        """See `LayerObserver`."""
        return _kept_in(self.cache)

    def seen(self, start: dict[int, _Kept], position: int, made: set[int]) -> _Kept | None:
        """See `LayerObserver`. The index in the cache has to be the layer's own, or nobody knows which the others' are."""
        new = {index: kept for index, kept in _kept_in(self.cache).items() if start.get(index) != kept}
        if new.keys() - {position}:
            raise LayersDiffer
        return new.get(position)

    def repeat(self, position: int, seen: _Kept | None, made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        if seen is not None:
            self.repeated[position] = seen


def logits_bytes(spec: ModelSpec) -> int:
    """Of a sequence, while its token is chosen: a row in the model's dtype, and that of this and of the step before in float32."""
    return spec.text_config.vocab_size * (spec.dtype.itemsize + 2 * 4)


def estimate_prefill_bytes(spec: ModelSpec, prompt_len: int) -> int:
    """Of a sequence, where `activations.prefill_peak_bytes` finds nothing: six hidden states and three MLP inner states of the prompt."""
    config = spec.text_config
    h = config.hidden_size
    inner = next(
        (v for k in ("intermediate_size", "ffn_dim", "n_inner") if isinstance(v := getattr(config, k, None), int)),
        4 * h,
    )
    return prompt_len * (6 * h + 3 * inner) * spec.dtype.itemsize


def _kv_widths_by_config(spec: ModelSpec) -> list[int]:
    text = spec.text_config
    return [2 * kv_width(text)] * kv_layers(text)


def _idle_rows(model: Any, counted: set[int]) -> list[tuple[int, torch.dtype]]:
    """Elements, with their dtype, of embeddings that are no head, but for the parameters whose ids are `counted` already."""
    head = model.get_output_embeddings()
    return [
        (module.weight.numel(), module.weight.dtype)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        and id(module.weight) not in counted
        and (head is None or module.weight is not head.weight)
    ]


def _idle_experts(model: Any, spec: ModelSpec) -> list[tuple[int, torch.dtype]]:
    """Elements, with their dtype, of the experts that a token does not choose."""
    number, chosen = spec.experts
    return [(p.numel() * (number - chosen) // number, p.dtype) for p in expert_parameters(model, spec)]


def expert_parameters(model: Any, spec: ModelSpec) -> Iterator[torch.nn.Parameter]:
    """Those of experts that a token may leave out."""
    number, _ = spec.experts
    for name, module in model.named_modules():
        if number and f".{name}.".count(".experts.") and not _multiplies_all(module):
            for p in module.parameters(recurse=False):
                if p.dim() == 3 and p.shape[0] == number or p.dim() == 2:
                    yield p


def _multiplies_all(experts: torch.nn.Module) -> bool:
    """Whether a module of stacked experts is not told which were chosen, as that of Llama 4: a token goes through all of them."""
    stacked = any(p.dim() == 3 for p in experts.parameters(recurse=False))
    return stacked and len(inspect.signature(type(experts).forward).parameters) == 2  # self and the hidden states


ALLOCATION_BYTES = 512  # that CUDA's caching allocator of PyTorch rounds up to


def prefill_peak_bytes(model: Any, dtype: torch.dtype, prompt_len: int) -> int | None:
    """Most bytes of tensors that the prefill of one sequence of `prompt_len` tokens holds at once, without weights, keys and values that
    stay. Those of several sequences are as many times as large.

    A model whose operators know bfloat16 alone on the meta device, as grouped matrix products do, is counted in that. None where it cannot
    run there at all, because it looks at values, or where it loops over positions.

    Args:
        model: without weights, as `empty_model.build_on_meta` makes it; it is left as it is.
        dtype: of the hidden states.
    """
    for tried in dict.fromkeys((dtype, torch.bfloat16)):
        alive = observe_pass(model, tried, prompt_len, 0, lambda shapes: _Alive())
        if alive is not None:
            return alive.most * dtype.itemsize // tried.itemsize
    return None


class _Alive(PassObserver):
    """Adds up the storages that operators make, while they are there.

    Attributes:
        now, most: bytes.
        known: by storage the number of it, in the order in which they were made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, int] = {}
        self.made = 0

    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `PassObserver`."""
        for tensor in tensors_in(out):
            if storage_of(tensor) not in given:
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if key in self.known:
            return
        self.known[key] = self.made = self.made + 1
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        del self.known[key]
        self.now -= nbytes

    def start(self) -> tuple[set[int], int, int, int]:
        """See `LayerObserver`."""
        before = set(self.known.values()), self.most, self.now, self.operators_seen
        self.most = self.now
        return before

    def seen(self, start: tuple[set[int], int, int, int], position: int, made: set[int]) -> tuple[int, int]:
        """See `LayerObserver`. What the call keeps elsewhere, as in a cache, cannot be repeated."""
        before, most, now, operators = start
        if set(self.known.values()) != before | {self.known.get(storage, -1) for storage in made}:
            raise LayersDiffer
        peak = self.most - now
        self.most = max(self.most, most)
        return peak, self.operators_seen - operators

    def repeat(self, position: int, seen: tuple[int, int], made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        peak, operators = seen
        self.most = max(self.most, self.now + peak)
        self.count(operators)
        for tensor in made:
            self._note(tensor.untyped_storage())
