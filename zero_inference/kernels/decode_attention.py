"""Attention of decode steps: one kernel (csrc/attention/decode_attention.cu) if it applies, otherwise PyTorch's, with query heads that
share keys and values as rows of one product. And attention with sinks for any number of queries.

PyTorch's memory-efficient attention, which takes a mask, took an H100 28 us for a query over 576 positions of 32 heads that share 4
(h100-mixtures/host2/trace-gpu2.txt): few heads are few thread blocks, and it also reads masked positions. transformers without `pack_gqa`
(5.17 has none) first copies keys and values for each head: in a step of Llama-3.1-70B, batch 8, on an H200 49 us of the 449 us of a layer,
and attention over the copies 34 us (h200-kept/eighth_host/70b.txt).

PyTorch's attention has no sinks, so families with them attend by transformers' "eager" function, which stores the scores of all pairs
several times: 2 GB each for the 64 heads of gpt-oss and 4000 tokens. A sink s only adds exp(s) to the denominator of the softmax, so the
result is PyTorch's times sigmoid(l - s), where l is the log-sum-exp of the scores, which its kernels return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_inference.kernels.extension import load_extension, operator_library
from zero_inference.utils.patching import Patches, SharedPatch

# arguments of attention functions that neither the kernel nor the products below support
UNSUPPORTED_ARGUMENTS = ("position_bias", "softcap", "cache")
EAGER_FUNCTION = "eager_attention_forward"  # of a family's file; transformers calls it for attention "eager"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_QUERIES = 8  # of a sequence; keys and values are read once for 16 queries of heads that share them
HEAD_DIM_STEP, MAX_HEAD_DIM = 8, 256
ALIGNMENT = 16  # bytes: rows are read in vectors of this size
MIN_CAPABILITY = (8, 0)  # tensor cores with bfloat16

LIBRARY = operator_library(__name__)
aten = torch.ops.aten


class _DecodeAttention(SharedPatch):
    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        return attend(self.before, *args, **options)


class SinkAttention(SharedPatch):
    """Replaces a family's `EAGER_FUNCTION` where the modules of some models call it with sinks."""

    def __init__(self, before: Callable[..., Any]):
        super().__init__(before)
        self.modules: WeakSet[torch.nn.Module] = WeakSet()

    def __call__(self, module: torch.nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        # in other files a function of this name may compute something else than attention
        call = self.attend if module in self.modules and "s_aux" in options else self.before
        return call(module, *args, **options)

    def attend(self, module: torch.nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        return attend(self.before, module, *args, **options)


class _PromptAttention(SinkAttention):
    """Uses `attend` for several queries; steps of one query keep the family's function, the reference for their graphs. The reference
    for graphs of several tokens is `attend` itself."""

    def attend(self, module: torch.nn.Module, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        call = self.before if query.shape[2] == 1 else super().attend
        return call(module, query, *args, **options)


class _StepAttention(SinkAttention):
    """A class of its own, since `share_item` shares by class."""


def using_decode_attention(model: torch.nn.Module) -> Patches:
    """Let models with attention "sdpa", and `model` if it has sinks, use `attend` until the result is closed."""
    patches = Patches()
    patches.share_item(ALL_ATTENTION_FUNCTIONS, "sdpa", _DecodeAttention)
    replace_eager(patches, model, _StepAttention)
    return patches


def using_prompt_attention(model: torch.nn.Module) -> Patches:
    """Let `model`, if it has sinks, use `attend` for several queries until the result is closed."""
    patches = Patches()
    replace_eager(patches, model, _PromptAttention)
    return patches


Replacement = TypeVar("Replacement", bound=SinkAttention)


def replace_eager(patches: Patches, model: torch.nn.Module, kind: type[Replacement]) -> list[Replacement]:
    """Replace the functions that `model` calls for attention "eager" by `kind`, and return these; none if it attends by another one."""
    found = []
    if attention_of(model) == "eager":
        names = dict.fromkeys(type(module).__module__ for module in model.modules())
        for file in filter(None, map(sys.modules.get, names)):  # a generated class may have no file
            if callable(vars(file).get(EAGER_FUNCTION)):
                found.append(patches.share_item(vars(file), EAGER_FUNCTION, kind))
                found[-1].modules.update(model.modules())
    return found


def attention_of(model: Any) -> str | None:
    """Return the name of the attention function of the decoder of a transformers model."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config(decoder=True)
    return getattr(text, "_attn_implementation", None) or getattr(config, "_attn_implementation", None)


def attend(
    original: Callable[..., Any],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Any]:
    """Return the result of `original`, an attention function of transformers, up to the order of summation.

    query [batch, heads, queries, head_dim], key and value [batch, key heads, positions, head_dim] -> [batch, queries, heads, head_dim].
    attention_mask: bool (True is visible) or float (added to scores), [batch, 1 or heads, queries, positions].
    s_aux: sinks [heads], one more logit of each softmax, without a value.
    """
    batch, heads, queries, width = query.shape
    one_mask = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    scale = width**-0.5 if scaling is None else scaling
    supported = not any(more.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
    returns_weights = more.get("output_attentions") or getattr(
        getattr(module, "config", None), "output_attentions", False
    )
    if dropout or returns_weights or not supported or not isinstance(scale, int | float):
        pass
    elif attention_mask is not None and _has_kernel(query, key, value, attention_mask, s_aux):
        return torch.ops.zero_inference.decode_attention(query, key, value, attention_mask, scale, s_aux), None
    elif s_aux is not None:
        if attention_mask is not None and _has_log_sum_exp(query, key, value, attention_mask, s_aux):
            return _attend_with_sinks(query, key, value, attention_mask, scale, s_aux), None
    elif key.shape[1] != heads and queries == 1 and one_mask:
        rows = query.reshape(batch, key.shape[1], -1, width)
        out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, queries, heads, value.shape[-1]), None
    sinks = {} if s_aux is None else {"s_aux": s_aux}
    return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **sinks, **more)


def _attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Return attention [batch, queries, heads, value_dim]; arguments as of the operator, with any number of queries."""
    (batch, heads, queries, width), groups = query.shape, query.shape[1] // key.shape[1]
    if query.is_meta:  # while a pass is traced, which counts this function as one operator
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    if queries == 1 and mask.shape[1] == 1:  # heads that share keys are the rows of one product
        query, sinks = query.reshape(batch, -1, groups, width), sinks.view(-1, groups)
    else:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        sinks = sinks[:, None]
    if query.is_cuda:
        # it takes a mask with rows of 16 elements
        mask = pad(mask, (0, -mask.shape[3] % 16))[..., : mask.shape[3]]
        mask = mask.expand(*query.shape[:3], -1)
        out, log_sum_exp, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scale)
        log_sum_exp = log_sum_exp[..., : query.shape[2]]  # it is padded, too
    else:
        call = aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum_exp = call(query, key, value, attn_mask=mask, scale=scale)
    out = (out * torch.sigmoid(log_sum_exp - sinks).unsqueeze(-1)).to(query.dtype)
    return out.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous()


def _has_log_sum_exp(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> bool:
    """Return whether the PyTorch kernels of `_attend_with_sinks` apply."""
    return (
        query.device.type in ("cpu", "cuda", "meta")
        and fits_operator(query, key, value, mask)
        and (sinks.shape, sinks.device) == (query.shape[1:2], query.device)
        and value.shape[3] == query.shape[3]
        and not _needs_gradient(query, key, value, sinks)
    )


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernel applies: for a few queries, on a CUDA device of capability 8.0 or newer."""
    return (
        query.is_cuda
        and query.shape[2] <= MAX_QUERIES
        and fits_operator(query, key, value, mask, sinks)
        and not _needs_gradient(query, key, value, sinks)
        and torch.cuda.get_device_capability(query.device) >= MIN_CAPABILITY
        and load_extension()
    )


def fits_operator(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None = None) -> bool:
    """Return whether shapes, dtypes, devices and strides are those that the operator takes."""
    (batch, heads, queries, width), positions = query.shape, mask.shape[-1]
    states = query, key, value
    given = (*states, mask) if sinks is None else (*states, mask, sinks)
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != query.dtype or not sinks.is_contiguous()):
        return False
    if (
        len({each.device for each in given}) > 1
        or query.dtype not in DTYPES
        or not query.dtype == key.dtype == value.dtype
        or key.shape != (batch, key.shape[1], positions, width)
        or value.shape[:3] != key.shape[:3]
        or not positions
        or heads % key.shape[1]
    ):
        return False
    for each in states:
        byte_steps = [stride * each.element_size() for size, stride in zip(each.shape[:3], each.stride()) if size > 1]
        if (
            each.shape[3] % HEAD_DIM_STEP
            or not HEAD_DIM_STEP <= each.shape[3] <= MAX_HEAD_DIM
            or each.stride(3) != 1
            or any(offset % ALIGNMENT for offset in (each.data_ptr(), *byte_steps))
        ):
            return False
    expands = mask.dim() == 4 and all(size in (1, full) for size, full in zip(mask.shape, (batch, heads, queries)))
    return expands and mask.dtype in (torch.bool, query.dtype) and (positions == 1 or mask.stride(3) == 1)


def _without_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute the operator with PyTorch; raise ValueError for arguments that it does not take."""
    if not fits_operator(query, key, value, mask, sinks):
        given = (query, key, value, mask, *(() if sinks is None else (sinks,)))
        found = ", ".join(f"{each.dtype} {list(each.shape)}" for each in given)
        raise ValueError(f"decode_attention does not take query, key, value, mask and sinks of {found}")
    added = mask if mask.dtype == torch.bool else mask.float()
    states = [each.float() for each in (query, key, value)]
    if sinks is None:
        out = scaled_dot_product_attention(*states, attn_mask=added, scale=scale, enable_gqa=True)
    else:
        keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in states[1:])
        scores = states[0] @ keys.transpose(2, 3) * scale  # [B, heads, queries, positions]
        scores = scores.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else scores + added
        sink = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        out = torch.cat([scores, sink], dim=3).softmax(dim=3)[..., :-1] @ values
    return out.transpose(1, 2).to(query.dtype).contiguous()


LIBRARY.define(
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, Tensor? sinks=None) -> Tensor"
)
LIBRARY.impl("decode_attention", _without_kernel, "CompositeExplicitAutograd")
