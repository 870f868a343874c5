"""A model without weights: every parameter on the meta device, every buffer real, each in the dtype it will have."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from zero_inference.errors import UsageError, is_out_of_memory
from zero_inference.models.operators import Pass, trace_pass
from zero_inference.models.prompts import reset_generation_config
from zero_inference.models.sizes import (
    ModelSizes,
    estimate_prefill_bytes,
    logits_bytes,
    model_sizes,
    prefill_peak_bytes,
)
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.format import first_line
from zero_inference.utils.model_sizes import auto_class

Found = TypeVar("Found")

LARGE_ELEMENTS = 1 << 20  # of tensors with pages of their own; fewer are written in under a millisecond


@dataclass(frozen=True)
class EmptyModel:
    """A model without weights, built once a run: counted, planned with, and then filled by the engine that loads it.

    Attributes:
        model: the transformers model, as `build_on_meta` makes it. Loading changes it; `sizes` were counted before.
        activations: bytes of a sequence's prefill, by its length.
        passes: what `traced_pass` found, by its arguments.
        cache: what `cached` found.
    """

    model: Any
    sizes: ModelSizes
    activations: dict[int, int] = field(default_factory=dict, compare=False)
    passes: dict[tuple[int, int], Pass | None] = field(default_factory=dict, compare=False)
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)

    def cached(self, key: Any, find: Callable[[], Found]) -> Found:
        """What `find` gives, which follows from the empty model and `key`: plans of many configurations ask for it. Nobody changes it."""
        if key not in self.cache:
            self.cache[key] = find()
        return self.cache[key]

    def activation_bytes(self, spec: ModelSpec, batch: int, prompt_len: int) -> int:
        """Most bytes that `batch` prompts of `prompt_len` tokens keep at once beside weights, keys and values. An estimate for a length
        that is asked for only after an engine has filled the model."""
        if prompt_len not in self.activations:
            found = prefill_peak_bytes(self.model, spec.dtype, prompt_len) if self.is_empty else None
            self.activations[prompt_len] = estimate_prefill_bytes(spec, prompt_len) if found is None else found
        return batch * max(self.activations[prompt_len], logits_bytes(spec))

    def traced_pass(self, spec: ModelSpec, tokens: int, past: int) -> Pass | None:
        """What a sequence's pass of `tokens` tokens behind `past` others computes; None where the model cannot run without weights, or
        where that is asked for only after an engine has filled it."""
        if (tokens, past) not in self.passes:
            self.passes[tokens, past] = trace_pass(self.model, spec, tokens, past) if self.is_empty else None
        return self.passes[tokens, past]

    @property
    def is_empty(self) -> bool:
        """Whether no engine has filled the model yet."""
        return all(parameter.is_meta for parameter in self.model.parameters())


def build_empty_model(spec: ModelSpec) -> EmptyModel:
    """Build and count the model of `spec`. Raises as `build_on_meta`."""
    model = build_on_meta(spec)
    return EmptyModel(model, model_sizes(model, spec))


def build_on_meta(spec: ModelSpec):
    """Build the model of `spec` with parameters on the meta device, tied weights tied.

    Parameters are in `spec.dtype`, or in the dtype that transformers keeps them in (see `_apply_dtype_plan`). Buffers are
    computed for real, because most are in no checkpoint (rotary frequencies, position ids, masks).
    """
    from accelerate import init_empty_weights

    try:
        family = auto_class(spec.config)
    except ValueError as error:
        raise UsageError(
            f"--model {spec.name}: {spec.config.model_type} is {error}; use a causal language model, such as llama or "
            "qwen3, or run this one in transformers."
        ) from error
    try:
        with init_empty_weights(include_buffers=False), OwnPages():
            model = family.from_config(spec.config, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)
    except Exception as error:  # whatever a config makes transformers and torch stumble over
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"--model {spec.name}: transformers cannot build it as a causal language model ({first_line(error)})."
        ) from error
    model.tie_weights()
    _apply_dtype_plan(model, spec.dtype)
    reset_generation_config(model)
    model.requires_grad_(False)
    multiply_rows_at_once(model)
    return model.eval()


class OwnPages(TorchFunctionMode):
    """Give large `torch.empty` and `torch.zeros` pages of their own: no memory until they are touched, no addresses after the tensor.

    Each parameter is made before it goes to the meta device. In the heap, parameters of different sizes left gaps: a few plans of
    large models took 6 GiB of addresses, and a process with more than the machine's memory cannot fork. And a heap clears zeros at
    once: Llama-4-Scout makes its experts with `torch.zeros`, and writing 129 GB of them took 102 s.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            func in (torch.empty, torch.zeros)
            and args
            and {*kwargs} <= {"dtype", "device"}
            and not kwargs.get("device")
        ):
            size = torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if size.numel() >= LARGE_ELEMENTS:
                dtype = kwargs.get("dtype") or torch.get_default_dtype()
                pages = mmap.mmap(-1, size.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=dtype).view(size)
        return func(*args, **kwargs)


def _apply_dtype_plan(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give parameters and persistent buffers the dtype that `from_pretrained` would load them in.

    A family may keep some in float32 (the scores that choose experts, in float16 also norms); transformers says which by
    patterns of names. The loader casts each tensor to the dtype found here.
    """
    from transformers.core_model_loading import build_glob_alternation

    plan = {pattern: kept for pattern, kept in model._get_dtype_plan(dtype).items() if kept != dtype}
    if not plan:
        return
    pattern, pattern_of_group, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = pattern.search(name)
        if found is None or not torch.is_tensor(tensor) or not tensor.is_floating_point():
            continue
        kept = plan[pattern_of_group[found.lastgroup]]
        if isinstance(tensor, torch.nn.Parameter):
            replace_parameter(model, tensor, torch.nn.Parameter(tensor.data.to(kept), requires_grad=False))
        else:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, tensor.to(kept))


def replace_parameter(model: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Put `new` in each place of `model` that holds `old`, so that tied weights stay tied."""
    for holder, name in parameter_slots(model).get(id(old), ()):
        holder[name] = new


def parameter_slots(model: torch.nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Where each parameter is held, by its id: the parameters of a module, and its name there. More than one place means tied."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module._parameters, name))
    return places


def parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id: more than one name means tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def multiply_rows_at_once(model: Any) -> None:
    """Have the head of `model` called with rows that lie one behind the other.

    A prefill multiplies the last position alone, a slice of the hidden states. Where no gradient is asked for, PyTorch makes a product
    of batches of such a slice, even of one row, and copies the transposed head for it on a CPU: a prefill of 64 tokens of Llama-3.2-1B
    took 3.8 s instead of 0.5 (2 cores, bfloat16; benchmarks/results/cpu/prefill_head.txt).
    """
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Module):
        head.register_forward_pre_hook(_in_rows)


def _in_rows(head: torch.nn.Module, args: tuple) -> tuple | None:
    if not args or not torch.is_tensor(args[0]):
        return None
    hidden, expected = args[0], 1
    for size, stride in zip(reversed(hidden.shape), reversed(hidden.stride())):
        if stride != expected:
            return hidden.clone(memory_format=torch.contiguous_format), *args[1:]
        expected *= size
    return None
