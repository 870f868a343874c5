"""A model without weights, every parameter on the meta device and every buffer real, each in the dtype it will have; and its exact sizes.

Plans are based on what is counted here before any weight is read.
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar, get_args

import torch
from torch.overrides import TorchFunctionMode

from zero_inference.errors import UsageError
from zero_inference.models.checkpoint_files import errors_as
from zero_inference.models.layers import cache_per_module, expert_parameters, unused_tower_parameters
from zero_inference.models.prompts import reset_generation_config
from zero_inference.models.spec import ModelSpec
from zero_inference.models.tracing import Pass, ShapeCache, copy_to_meta, tensors_in, trace_pass
from zero_inference.utils.format import first_line
from zero_inference.utils.model_sizes import auto_class, is_wrapper, kv_layers, kv_width

Found = TypeVar("Found")

LARGE_ELEMENTS = 1 << 20  # of tensors that are mapped; smaller ones are written in under a millisecond


@dataclass(frozen=True)
class ModelSizes:
    """Counts of a model. Tied weights count once; idle ones are those that a token of one sequence does not touch."""

    parameters: int  # elements
    parameter_bytes: int  # each in the dtype that it is computed in
    idle_parameters: int  # elements: rows of an embedding, experts not chosen, a vision tower
    idle_bytes: int  # unquantized
    idle_expert_bytes: int  # the experts' part
    chooses_experts: bool  # a token uses only some experts
    kv_widths: tuple[int, ...]  # elements of keys and values that a position adds, of each layer that has any
    kv_width_by_layer: tuple[int, ...] = ()  # the same of each layer of the cache, 0 for one without; empty if unknown
    state_bytes: int = 0  # of a sequence's other state, as of recurrences, at any length
    position_state_bytes: int = 0  # of other state that grows, for each position
    added_positions: int = 0  # that the model puts in the cache before a sequence's own
    writes_weights: bool = False  # a pass changes weights, as RWKV's first one does
    refuses_text: str | None = None  # the model's error for token ids without images or sound


@dataclass(frozen=True)
class EmptyModel:
    """A model without weights, built once a run: counted, planned with, and then filled by the engine that loads it."""

    model: Any
    sizes: ModelSizes
    facts: dict[Any, Any] = field(default_factory=dict, compare=False)  # of `cached`

    def cached(self, key: Any, find: Callable[[], Found]) -> Found:
        """Return `find()`, called once a `key`: plans of many configurations need the same facts. The result must not be changed."""
        if key not in self.facts:
            self.facts[key] = find()
        return self.facts[key]

    def activation_bytes(self, spec: ModelSpec, batch: int, prompt_len: int) -> int:
        """Return the peak bytes of `batch` prompts beside weights and KV cache; estimated if a length is first asked for after loading."""
        traced = self.traced_pass(spec, prompt_len, 0)
        peak_bytes = estimate_activation_bytes(spec, prompt_len) if traced is None else traced.peak_bytes
        return batch * max(peak_bytes, logits_bytes(spec))

    def traced_pass(self, spec: ModelSpec, tokens: int, past: int) -> Pass | None:
        """Return `trace_pass` of this model; None if it is already filled when this pass is first asked for."""
        key = "pass", tokens, past
        return self.cached(key, lambda: trace_pass(self.model, spec, tokens, past) if self.is_empty else None)

    @property
    def is_empty(self) -> bool:
        return all(parameter.is_meta for parameter in self.model.parameters())


def build_empty_model(spec: ModelSpec) -> EmptyModel:
    """Build and count the model of `spec`. Raises as `build_on_meta`."""
    model = build_on_meta(spec)
    return EmptyModel(model, count_sizes(model, spec))


def build_on_meta(spec: ModelSpec) -> Any:
    """Build the model of `spec` with parameters on the meta device, in the dtype that they are loaded in, tied weights tied.

    Buffers are real, because most are in no checkpoint. Raises UsageError if transformers cannot build it as a language model.
    """
    from accelerate import init_empty_weights

    try:
        family = auto_class(spec.config)
    except ValueError as error:
        raise UsageError(
            f"--model {spec.name}: {spec.config.model_type} is {error}; use a causal language model, such as llama or "
            "qwen3, or run this one in transformers."
        ) from error
    with (
        errors_as(UsageError, f"--model {spec.name}: transformers cannot build it as a causal language model"),
        init_empty_weights(include_buffers=False),
        MappedAllocations(),
    ):
        model = family.from_config(spec.config, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)
    model.tie_weights()
    _apply_dtype_plan(model, spec.dtype)
    reset_generation_config(model)
    model.requires_grad_(False)
    if isinstance(head := model.get_output_embeddings(), torch.nn.Module):
        head.register_forward_pre_hook(_make_contiguous)
    return model.eval()


def _make_contiguous(head: torch.nn.Module, args: tuple) -> tuple | None:
    """Copy the input of the output head if its rows are not adjacent, as those of the last position of a prompt.

    PyTorch would multiply it as a batch, and on a CPU copy the head for it: 3.8 s instead of 0.5 (benchmarks/results/cpu/prefill_head.txt).
    """
    if not args or not torch.is_tensor(args[0]):
        return None
    hidden, expected = args[0], 1
    # not is_contiguous(), which ignores strides of dimensions of size 1
    for size, stride in zip(reversed(hidden.shape), reversed(hidden.stride())):
        if stride != expected:
            return hidden.clone(memory_format=torch.contiguous_format), *args[1:]
        expected *= size
    return None


class MappedAllocations(TorchFunctionMode):
    """Allocate large `torch.empty` and `torch.zeros` by mmap, for parameters are made before they go to the meta device.

    From the heap, a few large models left gaps of 6 GiB of addresses, so that no process could fork; Llama-4-Scout's `zeros` took 102 s.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = {*kwargs} <= {"dtype", "device"} and not kwargs.get("device")
        if func in (torch.empty, torch.zeros) and args and plain:
            size = torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if size.numel() >= LARGE_ELEMENTS:
                dtype = kwargs.get("dtype") or torch.get_default_dtype()
                pages = mmap.mmap(-1, size.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=dtype).view(size)
        return func(*args, **kwargs)


def _apply_dtype_plan(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give parameters and persistent buffers the dtype of `from_pretrained`: a family may need some in float32, such as router scores."""
    from transformers.core_model_loading import build_glob_alternation

    plan = {pattern: other for pattern, other in model._get_dtype_plan(dtype).items() if other != dtype}
    if not plan:
        return
    pattern, pattern_of_group, _ = build_glob_alternation(list(plan))
    names = parameter_names(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = pattern.search(name)
        if found is None or not torch.is_tensor(tensor) or not tensor.is_floating_point():
            continue
        cast = tensor.data.to(plan[pattern_of_group[found.lastgroup]])
        if isinstance(tensor, torch.nn.Parameter):
            cast = torch.nn.Parameter(cast, requires_grad=False)
        set_tensor(model, names.get(id(tensor), [name]), cast)  # tied weights stay tied


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
    return ModelSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=parameter_bytes(model),
        idle_parameters=sum(numel for numel, _ in idle),
        idle_bytes=sum(numel * itemsize for numel, itemsize in idle),
        idle_expert_bytes=sum(numel * itemsize for numel, itemsize in idle_experts),
        chooses_experts=any(numel for numel, _ in idle_experts),
        **_trace_cache(model, spec),
    )


def _trace_cache(model: torch.nn.Module, spec: ModelSpec) -> dict[str, Any]:
    """Run one token on the meta device and return the fields of `ModelSizes` about it, by the config if the model cannot run there."""
    by_config = {"kv_widths": (2 * kv_width(spec.text_config),) * kv_layers(spec.text_config)}
    arguments = inspect.signature(type(model).forward).parameters
    mamba = "cache_params" in arguments and "past_key_values" not in arguments
    try:
        copied = copy_to_meta(model, torch.bfloat16)  # the only dtype of grouped matrix products there
        cache = new_cache(model.config, cache_class(model))
        before = [parameter._version for parameter in copied.parameters()]
        ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        with torch.no_grad(), ShapeCache():
            try:
                copied(input_ids=ids, use_cache=True, **{"cache_params" if mamba else "past_key_values": cache})
            except ValueError as error:
                return by_config | ({"refuses_text": first_line(error)} if is_wrapper(spec.config) else {})
        fields = _read_cache(cache, spec.dtype)
    except Exception:  # the model's own code may raise anything
        return by_config
    keys = tensors_in([getattr(layer, "keys", None) for layer in cache.layers])
    return fields | {
        # keys are [B, heads, positions, width]
        "added_positions": max((each.shape[2] for each in keys if each.dim() == 4), default=1) - 1,
        "writes_weights": before != [parameter._version for parameter in copied.parameters()],
    }


def _read_cache(cache: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of `ModelSizes` about the cache, from that of one token; `dtype` is that of state that is not always in float32."""

    def nbytes(tensors: list[torch.Tensor]) -> int:
        return sum(each.numel() * (4 if each.dtype == torch.float32 else dtype.itemsize) for each in tensors)

    # a model's own cache class may have more lists with an entry per layer
    lists = [value for name, value in vars(cache).items() if isinstance(value, list) and name != "layers"]
    kv_widths, state_bytes, position_state_bytes = [], 0, 0
    for layer, *more in zip_longest(cache.layers, *lists):
        fields = dict(vars(layer)) if layer is not None else {}
        kv = tensors_in([fields.pop("keys", None), fields.pop("values", None)])
        grows = tensors_in([value for name, value in fields.items() if name.endswith("keys")])
        rest = tensors_in([[value for name, value in fields.items() if not name.endswith("keys")], more])
        fixed = [each for each in rest if each.is_meta and each.is_floating_point()]
        kv_widths.append(sum(each.numel() for each in kv))
        state_bytes += nbytes(fixed)
        position_state_bytes += nbytes(grows)
    return dict(
        kv_widths=tuple(filter(None, kv_widths)),
        kv_width_by_layer=tuple(kv_widths),
        state_bytes=state_bytes,
        position_state_bytes=position_state_bytes,
    )


@cache_per_module
def cache_class(model: torch.nn.Module) -> Any:
    """Return transformers' DynamicCache, or the subclass with more state by which `model` annotates its `past_key_values`."""
    from transformers import DynamicCache

    classes: dict[Any, None] = dict.fromkeys(type(module) for module in model.modules())
    for module_class in classes:
        given = inspect.signature(module_class.forward).parameters.get("past_key_values")
        for kind in get_args(given.annotation) if given is not None else ():
            if isinstance(kind, type) and issubclass(kind, DynamicCache):
                return kind
    return DynamicCache


def new_cache(config: Any, kind: Any) -> Any:
    """Return an empty cache of transformers, of the class `kind` that `cache_class` returns."""
    from transformers import DynamicCache

    return DynamicCache(config=config) if kind is DynamicCache else kind()


def estimate_activation_bytes(spec: ModelSpec, prompt_len: int) -> int:
    """Estimate the peak of a prompt if the model cannot run on the meta device: six hidden states and three inner ones of the MLP."""
    config = spec.text_config
    h = config.hidden_size
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((value for name in names if isinstance(value := getattr(config, name, None), int)), 4 * h)
    return prompt_len * (6 * h + 3 * inner) * spec.dtype.itemsize


def logits_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a sequence's logits while its token is chosen: in the model's dtype, and of two steps in float32."""
    return spec.text_config.vocab_size * (spec.dtype.itemsize + 2 * 4)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters, tied ones once."""
    return sum(p.nbytes for p in model.parameters())


def set_tensor(model: torch.nn.Module, names: list[str], tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer that `model` has under each of `names`."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, tensor)


def parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    """Return, by the id of a parameter, all its names; several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
