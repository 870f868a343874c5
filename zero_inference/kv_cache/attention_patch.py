"""Patch a transformers model so that the CPU attends wherever its keys are in a `CpuAttentionCache`.

Most families call one of transformers' attention functions, which `patch_attention` wraps. BLOOM computes attention with ALiBi in its own
code: its modules get a `forward` that differs in passes where the CPU attends. All other calls, of other models too, are unchanged. A trial
on random numbers (`why_cpu_cannot_attend`) decides whether the patched model computes the same.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_inference.cpu.attention import LogitOptions, attention_reference
from zero_inference.kernels.decode_attention import SinkAttention, attend, attention_of, replace_eager
from zero_inference.kv_cache.cpu_attention import CpuAttentionCache, CpuAttentionLayer, UnsupportedAttention
from zero_inference.kv_cache.device import DeviceKVCache, StepMasks, supports_preallocated, windows_of_layers
from zero_inference.models.empty_model import cache_class, new_cache
from zero_inference.models.layers import find_layers, first_of_kind
from zero_inference.models.tracing import tensors_in
from zero_inference.utils.format import first_line
from zero_inference.utils.patching import Patches, SharedPatch
from zero_inference.utils.timing import Transfers

FUNCTIONS = ("sdpa", "eager")  # other implementations have masks of another kind
TRIAL_PROMPT, TRIAL_LENGTH = 6, 8  # tokens of a sequence, those of the decode steps included
TRIAL_WINDOW = 5  # sliding window: a step sees some of the padding in it
SMALL_ELEMENTS = 1 << 16  # parameters up to this size get random numbers in a trial


def why_cpu_cannot_attend(model: PreTrainedModel) -> str | None:
    """Return why the CPU cannot attend for `model`, which has no weights yet, in words that follow its name; None where it can.

    A trial decides: decode steps of two sequences, one padded on the left, must compute what the model's own attention does. They do not
    if it has another softmax, computes with the keys and values of all positions itself, or adds to the logits.
    """
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", None):
        return "has layers that share keys and values"
    if getattr(text, "kv_lora_rank", None):
        return "keeps keys and values in a compressed form"
    if not _bloom_attention_modules(model):
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        if not all(part._can_set_attn_implementation() for part in parts):
            return "does not attend by transformers' attention functions"
        if text._attn_implementation not in FUNCTIONS:
            return f"attends by {text._attn_implementation}, not by {' or '.join(FUNCTIONS)}"
    try:
        own, ours = (_attended_steps(model, by_cpu) for by_cpu in (False, True))
        same = _same_steps(own, ours)
    except UnsupportedAttention as error:
        return f"has an attention of its own ({error.why})"
    except Exception as error:  # whatever the model's own code raises
        return f"cannot be tried with CPU attention ({first_line(error)})"
    return None if same else "has an attention that computes something else than CPU attention"


def _attended_steps(model: PreTrainedModel, by_cpu: bool) -> Iterator[Tensor]:
    copied, begin_pass = _small_copy(model)
    kind = cache_class(copied)
    cache = new_cache(copied.config, kind)
    if by_cpu:
        cache = CpuAttentionCache(copied.config, TRIAL_LENGTH, False, False, Transfers(), _reference_attention, kind)
    with patch_attention(copied) if by_cpu else nullcontext():
        yield from _trial_steps(copied, begin_pass, cache)


def _bloom_attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "BloomAttention"]


def window_only_in_cache(model: PreTrainedModel) -> bool:
    """Return whether the sliding window of `model` is in transformers' cache alone, which drops keys, and not in its masks.

    A cache with all positions then gives other tokens. The model has no weights yet; a trial decides. True also where the trial fails or
    gives values that are not finite: transformers' own cache is right for any model.
    """
    sliding = any(getattr(layer, "is_sliding", False) for layer in new_cache(model.config, cache_class(model)).layers)
    if not (sliding and supports_preallocated(model)):
        return False
    try:
        own, ours = (_windowed_steps(model, preallocated) for preallocated in (False, True))
    except Exception:  # whatever the model's own code raises
        return True
    return not _same_steps(own, ours)


def takes_step_masks(model: PreTrainedModel) -> bool:
    """Return whether decode steps of `model` with `StepMasks`, as a graph has them, compute what the model's own steps do.

    If its attention is "eager", `attend` computes all of it. The model has no weights yet; a trial decides.
    """
    try:
        own, ours = _windowed_steps(model, False), _windowed_steps(model, True, masked=True)
    except Exception:  # whatever the model's own code raises
        return False
    return _same_steps(own, ours)


class _TrialAttention(SinkAttention):
    """Calls `attend`, and raises where that would leave a call to the model's own function."""

    def __init__(self, before: Callable[..., Any]):
        super().__init__(before)
        self.called: WeakSet[torch.nn.Module] = WeakSet()

    def __call__(self, module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        if module not in self.modules:
            return self.before(module, *args, **options)
        if "s_aux" not in options:
            raise UnsupportedAttention(f"{type(module).__name__} has no sinks")
        self.called.add(module)
        return attend(self.before if options["s_aux"] is None else _refuse, module, *args, **options)


def _refuse(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    raise UnsupportedAttention(f"{type(module).__name__} passes other arguments")


@contextmanager
def _trial_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let `model`, if its attention is "eager", attend by `attend` alone; raises UnsupportedAttention where it does not."""
    with Patches() as patches:
        patched = replace_eager(patches, model, _TrialAttention)
        yield
        if attention_of(model) == "eager" and not any(
            each in patch.called for patch in patched for each in model.modules()
        ):
            raise UnsupportedAttention("it has an attention function of another name")


def _windowed_steps(model: PreTrainedModel, preallocated: bool, masked: bool = False) -> list[Tensor]:
    """Return the results of `_trial_steps` of a copy with short windows."""
    copied, begin_pass = _small_copy(model)
    text = copied.config.get_text_config(decoder=True)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, TRIAL_WINDOW)
    cache = (
        DeviceKVCache(copied.config, TRIAL_LENGTH) if preallocated else new_cache(copied.config, cache_class(copied))
    )
    with _trial_attention(copied) if masked else nullcontext():
        return list(_trial_steps(copied, begin_pass, cache, masked))


def _same_steps(own: Iterable[Tensor], ours: Iterable[Tensor]) -> bool:
    own, ours = list(own), list(ours)
    if len(own) != len(ours) or not all(tensor.isfinite().all() for tensor in own):
        return False
    return all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(own, ours))


def _trial_steps(
    copied: PreTrainedModel, begin_pass: Callable[[], None], cache: Any, masked: bool = False
) -> Iterator[Tensor]:
    """Yield results of decode steps of a `_small_copy`: the inputs of products with large weights, and the logits.

    `masked`: steps are computed as a graph computes them, with `StepMasks` and a `DeviceKVCache` that returns all positions.
    """
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(copied).forward).parameters else {}
    vocabulary = copied.config.get_text_config(decoder=True).vocab_size
    ids = 1 + torch.arange(2 * TRIAL_LENGTH).reshape(2, TRIAL_LENGTH) % (vocabulary - 1)
    mask = torch.ones_like(ids)
    mask[0, : TRIAL_PROMPT // 2] = 0
    windows = windows_of_layers(copied.config, TRIAL_LENGTH) if masked else {}
    if windows is None:
        raise UnsupportedAttention("its layers see other positions than a mask can give")
    with torch.no_grad(), _RandomProducts() as products:
        for start, end in ((0, TRIAL_PROMPT), *((at, at + 1) for at in range(TRIAL_PROMPT, TRIAL_LENGTH))):
            begin_pass()
            products.inputs.clear()
            arguments: dict[str, Any] = dict(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, **last)
            if masked and start:
                masks = StepMasks.like(ids[:, start:end], TRIAL_LENGTH, torch.float32, windows)
                masks.fill(start, mask[:, :end])
                arguments |= dict(attention_mask=masks.argument, position_ids=torch.full((2, 1), start))
                with cache.writing_at({ids.device: torch.tensor([start])}):
                    logits = copied(**arguments).logits
                cache.advance(1)
            else:
                logits = copied(attention_mask=mask[:, :end], **arguments).logits
            if start:
                yield from products.inputs
                yield logits


def _small_copy(model: PreTrainedModel) -> tuple[PreTrainedModel, Callable[[], None]]:
    """Return a float32 copy of `model` with random numbers in small parameters (norms, sinks), and a function to call before each pass.

    One layer of each kind computes in a pass; the others return its result.
    """
    memo: dict[int, Any] = {}  # of copy.deepcopy: id of an object -> its copy, here one for all layers of a kind
    firsts, layers = first_of_kind(model), find_layers(model)[1]
    copies = {first: copy.deepcopy(layers[first], memo) for first in set(firsts.values())}
    memo |= {id(layers[position]): copies[first] for position, first in firsts.items()}
    copied = copy.deepcopy(model, memo).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    for module in copied.modules():
        if isinstance(getattr(module, "chunk_size", None), int):
            module.chunk_size = TRIAL_PROMPT  # recurrences pad a prompt to it, and give the same for any
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and parameter.numel() <= SMALL_ELEMENTS:
                numbers = torch.randn(parameter.shape, generator=generator)
                numbers = 1 + numbers / 10 if parameter.dim() < 2 else numbers * parameter.shape[-1] ** -0.5
                module._parameters[name] = torch.nn.Parameter(numbers.to(parameter.dtype), requires_grad=False)
    results: dict[int, Any] = {}  # of this pass, by first layer of a kind

    def computing_once(forward: Callable, first: int) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if first not in results:
                results[first] = forward(*args, **options)
            return results[first]

        return call

    for first, layer in copies.items():
        layer.forward = computing_once(layer.forward, first)
    return copied, results.clear


class _RandomProducts(TorchDispatchMode):
    """Return random numbers from operators with some arguments on the meta device, such as products with empty weights.

    Attributes:
        inputs: the other arguments of such operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors = tensors_in((args, kwargs))
        real = [tensor for tensor in tensors if not tensor.is_meta]
        if real and kwargs and str(kwargs.get("device")) == "meta":  # a copy to a weight's device
            kwargs = kwargs | {"device": real[0].device}
        if len(real) in (0, len(tensors)):
            return function(*args, **(kwargs or {}))
        numbers = [tensor for tensor in real if tensor.is_floating_point()]
        self.inputs += [tensor.clone() for tensor in numbers]
        grouped = "grouped_mm" in str(function)  # supports only this dtype on the meta device

        def on_meta(tensor: Tensor) -> Tensor:
            return tensor.to("meta", torch.bfloat16 if grouped and tensor.is_floating_point() else tensor.dtype)

        out = function(*tree_map_only(Tensor, on_meta, args), **tree_map_only(Tensor, on_meta, kwargs or {}))
        if function._overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_select) and not numbers:
            return out  # gathered weights, such as those of an expert
        return tree_map_only(Tensor, self._random_like, out)

    def _random_like(self, out: Tensor) -> Tensor:
        if not out.is_floating_point():
            return torch.zeros(out.shape, dtype=out.dtype)
        return torch.randn(out.shape, generator=self.generator)


def _reference_attention(layer: CpuAttentionLayer, query: Tensor, window: int, mask: Tensor | None) -> Tensor:
    """Do what `CpuAttention` does in plain PyTorch, without a pool."""
    layer.store(*layer.new_states)
    options: dict[str, Any] = dict(positions=layer.length, window=window, mask=mask)
    return attention_reference(query, *layer.stored, layer.logits, **options).to(query.dtype).transpose(1, 2)


def patch_attention(model: PreTrainedModel) -> Patches:
    """Let the CPU attend wherever a `CpuAttentionCache` holds the keys and values of `model`, until the result is closed.

    `why_cpu_cannot_attend` must have returned None before the weights were loaded.
    """
    patches, bloom = Patches(), _bloom_attention_modules(model)
    for module in bloom:
        patches.set_attr(module, "forward", partial(_bloom_forward, module, module.forward))
    if not bloom:
        name = model.config.get_text_config(decoder=True)._attn_implementation
        patches.share_item(ALL_ATTENTION_FUNCTIONS, name, _PatchedFunction)
    return patches


class _PatchedFunction(SharedPatch):
    """An attention function of transformers, replaced by CPU attention for keys that a `CpuAttentionLayer` marked.

    Attributes:
        before: the function; None: the `eager_attention_forward` of each model's own file.
    """

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any):
        layer = CpuAttentionLayer.claim(key)
        if layer is None:
            before = self.before or sys.modules[type(module).__module__].eager_attention_forward
            return before(module, query, key, value, *args, **options)
        mask = args[0] if args else options.get("attention_mask")
        if options.get("position_bias") is not None:
            raise UnsupportedAttention(
                f"{type(module).__name__} adds a position bias, which CPU attention does not support"
            )
        if layer.logits is None:
            scale, sinks = options.get("scaling"), options.get("s_aux")
            layer.logits = LogitOptions(
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                softcap=options.get("softcap") or 0.0,
                sinks=None if sinks is None else sinks.detach().float().cpu(),
            )
        return layer.attend(query, mask), None


def _bloom_forward(
    module: torch.nn.Module,
    before: Callable,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **options: Any,
):
    cache = layer_past
    if not isinstance(cache, CpuAttentionCache) or cache.get_seq_length(module.layer_idx) == 0:
        return before(hidden_states, residual, alibi, attention_mask, layer_past=cache, **options)
    query, key, value = module._reshape(module.query_key_value(hidden_states))  # [batch, heads, new, head_dim]
    layer = CpuAttentionLayer.claim(cache.update(key, value, module.layer_idx)[0])
    if layer.logits is None:  # slopes from the bias of two positions; `alibi` is rounded to the model's dtype
        rule = sys.modules[type(module).__module__].build_alibi_tensor
        slopes = rule(torch.ones((1, 2), dtype=torch.int64), module.num_heads, torch.float32)[:, 0, 1]
        layer.logits = LogitOptions(scale=module.inv_norm_factor, slopes=slopes.cpu())
    return module.dense(layer.attend(query, attention_mask).flatten(2)) + residual, None
