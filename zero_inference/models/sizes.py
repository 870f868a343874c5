"""Exact sizes of a model, its cache and its activations, counted before any weight is read; plans are based on these.

The rounder formulas of `zero_inference.utils` are for the log.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, get_args

import torch

from zero_inference.models.layers import LayerKinds, unused_tower_parameters
from zero_inference.models.meta_pass import LayersDiffer, repeat_layers, run_on_meta, tensors_in
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.format import first_line
from zero_inference.utils.model_sizes import is_wrapper, kv_layers, kv_width


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
    number, chosen = spec.experts
    # (elements, bytes of an element) that a token does not touch
    idle_experts = [(p.numel() * (number - chosen) // number, p.itemsize) for p in expert_parameters(model, spec)]
    idle = idle_experts + [(p.numel(), p.itemsize) for p in (*unused_tower_parameters(model), *_looked_up_rows(model))]
    refusals: list[str] = []
    cached = _trace_cache(model, spec.dtype, refusals)
    if cached is None:
        text = spec.text_config
        cached = _TracedCache((2 * kv_width(text),) * kv_layers(text), (0, 0), 0, False)
    return ModelSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=parameter_bytes(model),
        idle_parameters=sum(numel for numel, _ in idle),
        idle_bytes=sum(numel * itemsize for numel, itemsize in idle),
        idle_expert_bytes=sum(numel * itemsize for numel, itemsize in idle_experts),
        chooses_experts=any(numel for numel, _ in idle_experts),
        **cached._asdict(),
        refuses_text=refusals[0] if refusals and is_wrapper(spec.config) else None,
    )


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


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


class _TracedCache(NamedTuple):
    """What a token leaves in a cache; see `ModelSizes`."""

    kv_widths: tuple[int, ...]
    state_bytes: tuple[int, int]
    added_positions: int
    writes_weights: bool


class _LayerState(NamedTuple):
    """What a layer caches of one token: elements of keys and values, and bytes of other state, at any length and per position."""

    kv_width: int
    state_bytes: int
    bytes_per_position: int


def _trace_cache(model: torch.nn.Module, dtype: torch.dtype, refusals: list[str]) -> _TracedCache | None:
    """Run one token on the meta device and read its cache; None if the model cannot run there.

    Args:
        dtype: of state that is not always in float32.
        refusals: gets the model's error if it does not accept its inputs.
    """

    def run(copied: torch.nn.Module, layers: dict[int, torch.nn.Module], kinds: LayerKinds) -> _TracedCache:
        repeat_layers(layers, kinds)
        cache = new_cache(model.config, cache_class(model))
        arguments = inspect.signature(type(copied).forward).parameters
        mamba = "cache_params" in arguments and "past_key_values" not in arguments
        before = [parameter._version for parameter in copied.parameters()]
        ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        try:
            copied(input_ids=ids, use_cache=True, **{"cache_params" if mamba else "past_key_values": cache})
        except ValueError as error:
            refusals.append(first_line(error))
            raise
        writes_weights = before != [parameter._version for parameter in copied.parameters()]
        states = _read_cache(cache, dtype)
        # the index in the cache has to be the layer's own, or those of the others would be unknown
        if layers and not states.keys() <= layers.keys():
            raise LayersDiffer
        for kind in range(len(kinds.positions)) if layers else ():
            if len({states.get(position) for position in kinds.layers_to_run(kind)}) > 1:
                raise LayersDiffer
        states |= {position: states[first] for position, first in kinds.repeated.items() if first in states}
        in_order = [states[index] for index in sorted(states)]
        keys = tensors_in([getattr(layer, "keys", None) for layer in cache.layers])
        positions = max((each.shape[2] for each in keys if each.dim() == 4), default=1)  # [B, heads, positions, width]
        return _TracedCache(
            tuple(each.kv_width for each in in_order if each.kv_width),
            (sum(each.state_bytes for each in in_order), sum(each.bytes_per_position for each in in_order)),
            positions - 1,
            writes_weights,
        )

    return run_on_meta(model, torch.bfloat16, run)  # the only dtype of grouped matrix products there


def _read_cache(cache: Any, dtype: torch.dtype) -> dict[int, _LayerState]:
    """Return the state of each layer by index. A model's own cache class may have more lists with an entry per layer."""
    lists = [value for name, value in vars(cache).items() if isinstance(value, list) and name != "layers"]
    found = {}
    for index, (layer, *more) in enumerate(zip_longest(cache.layers, *lists)):
        fields = vars(layer) if layer is not None else {}
        kv = tensors_in([fields.get("keys"), fields.get("values")])
        others = {name: value for name, value in fields.items() if name not in ("keys", "values")}
        grows = tensors_in([value for name, value in others.items() if name.endswith("keys")])
        fixed = tensors_in([[value for name, value in others.items() if not name.endswith("keys")], more])
        fixed = [each for each in fixed if each.is_meta and each.is_floating_point()]
        found[index] = _LayerState(
            sum(each.numel() for each in kv), _state_bytes(fixed, dtype), _state_bytes(grows, dtype)
        )
    return {index: state for index, state in found.items() if any(state)}


def _state_bytes(tensors: list[torch.Tensor], dtype: torch.dtype) -> int:
    return sum(each.numel() * (4 if each.dtype == torch.float32 else dtype.itemsize) for each in tensors)


def estimate_prefill_bytes(spec: ModelSpec, prompt_len: int) -> int:
    """Estimate the peak of a prompt if the model cannot run on the meta device: six hidden states and three inner ones of the MLP."""
    config = spec.text_config
    h = config.hidden_size
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((value for name in names if isinstance(value := getattr(config, name, None), int)), 4 * h)
    return prompt_len * (6 * h + 3 * inner) * spec.dtype.itemsize


def logits_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a sequence's logits while its token is chosen: in the model's dtype, and of two steps in float32."""
    return spec.text_config.vocab_size * (spec.dtype.itemsize + 2 * 4)


def _looked_up_rows(model: Any) -> list[torch.nn.Parameter]:
    """Return the embeddings of the language model that are not tied to the head: of these a token reads one row."""
    head, towers = model.get_output_embeddings(), {id(p) for p in unused_tower_parameters(model)}
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return [weight for weight in embeddings if id(weight) not in towers and (head is None or weight is not head.weight)]


def expert_parameters(model: Any, spec: ModelSpec) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of experts that a token may leave out."""
    number, _ = spec.experts
    for name, module in model.named_modules():
        if number and ".experts." in f".{name}.":
            own = list(module.parameters(recurse=False))
            # stacked experts that get only hidden states and no choice, as those of Llama 4, are all used
            gets_choice = len(inspect.signature(type(module).forward).parameters) > 2  # with self
            if gets_choice or not any(p.dim() == 3 for p in own):
                yield from (p for p in own if p.dim() == 2 or (p.dim() == 3 and p.shape[0] == number))
