"""Exact sizes of a model, its cache and its activations, counted before any weight is read; plans are based on these."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, get_args

import torch

from zero_inference.models.layers import LayerKinds, unused_tower_parameters
from zero_inference.models.meta_pass import LayersDiffer, repeat_layers, run_on_meta, tensors_in
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.format import first_line
from zero_inference.utils.model_sizes import is_wrapper, kv_layers, kv_width


@dataclass(frozen=True)
class ModelSizes:
    """Counts of `count_sizes`. Tied weights count once; idle ones are those that a token of one sequence does not touch."""

    parameters: int  # elements
    parameter_bytes: int  # each in the dtype that it is computed in
    idle_parameters: int  # elements: rows of an embedding, experts not chosen, a vision tower
    idle_bytes: int  # unquantized
    idle_expert_bytes: int  # the experts' part
    chooses_experts: bool  # a token uses only some experts
    kv_widths: tuple[int, ...]  # elements of keys and values that a position adds, of each layer that has any
    # a sequence's other state, as of recurrences: at any length, and per position
    state_bytes: tuple[int, int] = (0, 0)
    added_positions: int = 0  # that the model puts in the cache before a sequence's own
    writes_weights: bool = False  # a pass changes weights, as RWKV's first one does
    refuses_text: str | None = None  # the model's error for token ids without images or sound


def count_sizes(model: torch.nn.Module, spec: ModelSpec) -> ModelSizes:
    """Count a model without weights. To be called before an engine fills it: engines may take parameters apart."""
    number, chosen = spec.experts
    # (elements, bytes of an element) that a token does not touch
    idle_experts = [(p.numel() * (number - chosen) // number, p.itemsize) for p in expert_parameters(model, spec)]
    towers, head = unused_tower_parameters(model), model.get_output_embeddings()
    skipped = {id(p) for p in (*towers, *(head.parameters() if head is not None else ()))}
    # a token reads one row of an embedding that is not tied to the head
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    idle = idle_experts + [(p.numel(), p.itemsize) for p in (*towers, *(p for p in tables if id(p) not in skipped))]
    refusals: list[str] = []
    cached = _trace_cache(model, spec.dtype, refusals)
    if cached is None:
        cached = {"kv_widths": (2 * kv_width(spec.text_config),) * kv_layers(spec.text_config)}
    return ModelSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=parameter_bytes(model),
        idle_parameters=sum(numel for numel, _ in idle),
        idle_bytes=sum(numel * itemsize for numel, itemsize in idle),
        idle_expert_bytes=sum(numel * itemsize for numel, itemsize in idle_experts),
        chooses_experts=any(numel for numel, _ in idle_experts),
        **cached,
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


def _trace_cache(model: torch.nn.Module, dtype: torch.dtype, refusals: list[str]) -> dict[str, Any] | None:
    """Run one token on the meta device and return the fields of `ModelSizes` about the cache; None if the model cannot run there.

    `dtype` is that of state that is not always in float32; `refusals` gets the model's error if it does not accept its inputs.
    """

    def run(copied: torch.nn.Module, layers: dict[int, torch.nn.Module], kinds: LayerKinds) -> dict[str, Any]:
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
        widths, fixed, growing = zip(*(states[index] for index in sorted(states))) if states else ((), (), ())
        keys = tensors_in([getattr(layer, "keys", None) for layer in cache.layers])
        positions = max((each.shape[2] for each in keys if each.dim() == 4), default=1)  # [B, heads, positions, width]
        return {
            "kv_widths": tuple(filter(None, widths)),
            "state_bytes": (sum(fixed), sum(growing)),
            "added_positions": positions - 1,
            "writes_weights": writes_weights,
        }

    return run_on_meta(model, torch.bfloat16, run)  # the only dtype of grouped matrix products there


def _read_cache(cache: Any, dtype: torch.dtype) -> dict[int, tuple[int, int, int]]:
    """Return by layer the elements of keys and values of one token, and bytes of other state, at any length and per position."""

    def nbytes(tensors: list[torch.Tensor]) -> int:
        return sum(each.numel() * (4 if each.dtype == torch.float32 else dtype.itemsize) for each in tensors)

    # a model's own cache class may have more lists with an entry per layer
    lists = [value for name, value in vars(cache).items() if isinstance(value, list) and name != "layers"]
    found = {}
    for index, (layer, *more) in enumerate(zip_longest(cache.layers, *lists)):
        fields = vars(layer) if layer is not None else {}
        kv = tensors_in([fields.get("keys"), fields.get("values")])
        others = {name: value for name, value in fields.items() if name not in ("keys", "values")}
        grows = tensors_in([value for name, value in others.items() if name.endswith("keys")])
        rest = tensors_in([[value for name, value in others.items() if not name.endswith("keys")], more])
        fixed = [each for each in rest if each.is_meta and each.is_floating_point()]
        found[index] = sum(each.numel() for each in kv), nbytes(fixed), nbytes(grows)
    return {index: state for index, state in found.items() if any(state)}


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
