"""A model without weights: every parameter on the meta device, every buffer real, each in the dtype it will have."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from zero_inference.errors import UsageError
from zero_inference.models.checkpoint_files import errors_as
from zero_inference.models.operators import Pass, trace_pass
from zero_inference.models.prompts import reset_generation_config
from zero_inference.models.sizes import ModelSizes, count_sizes, estimate_prefill_bytes, logits_bytes
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.model_sizes import auto_class

Found = TypeVar("Found")

LARGE_ELEMENTS = 1 << 20  # of tensors that are mapped; smaller ones are written in under a millisecond


@dataclass(frozen=True)
class EmptyModel:
    """A model without weights, built once a run: counted, planned with, and then filled by the engine that loads it."""

    model: Any
    sizes: ModelSizes
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)

    def cached(self, key: Any, find: Callable[[], Found]) -> Found:
        """Return `find()`, called once a `key`: plans of many configurations need the same facts. The result must not be changed."""
        if key not in self.cache:
            self.cache[key] = find()
        return self.cache[key]

    def activation_bytes(self, spec: ModelSpec, batch: int, prompt_len: int) -> int:
        """Return the peak bytes of `batch` prompts beside weights and KV cache; estimated if a length is first asked for after loading."""
        traced = self.traced_pass(spec, prompt_len, 0)
        peak_bytes = estimate_prefill_bytes(spec, prompt_len) if traced is None else traced.peak_bytes
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
