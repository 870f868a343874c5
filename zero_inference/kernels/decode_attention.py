"""Attention of decode steps: one kernel (csrc/attention/decode_attention.cu) if it applies, otherwise PyTorch's, with query heads that
share keys and values as rows of one product.

PyTorch's memory-efficient attention, which takes a mask, took an H100 28 us for a query over 576 positions of 32 heads that share 4
(h100-mixtures/host2/trace-gpu2.txt): few heads are few thread blocks, and it also reads masked positions. transformers without `pack_gqa`
(5.17 has none) first copies keys and values for each head: in a step of Llama-3.1-70B, batch 8, on an H200 49 us of the 449 us of a layer,
and attention over the copies 34 us (h200-kept/eighth_host/70b.txt).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_inference.kernels.extension import load_extension, operator_library
from zero_inference.utils.patching import Patches, SharedPatch

# arguments of attention functions that neither the kernel nor the grouped product supports
UNSUPPORTED_ARGUMENTS = ("position_bias", "softcap", "s_aux", "cache")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_QUERIES = 8  # of a sequence; keys and values are read once for 16 queries of heads that share them
HEAD_DIM_STEP, MAX_HEAD_DIM = 8, 256
ALIGNMENT = 16  # bytes: rows are read in vectors of this size
MIN_CAPABILITY = (8, 0)  # tensor cores with bfloat16

LIBRARY = operator_library(__name__)


class _DecodeAttention(SharedPatch):
    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
        return attend(self.before, *args, **options)


def using_decode_attention() -> Patches:
    """Let models with attention "sdpa" use `attend` until the result is closed."""
    patches = Patches()
    patches.share_item(ALL_ATTENTION_FUNCTIONS, "sdpa", _DecodeAttention)
    return patches


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
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the result of `original`, transformers' function for "sdpa", up to the order of summation.

    query [batch, heads, queries, head_dim], key and value [batch, key heads, positions, head_dim] -> [batch, queries, heads, head_dim].
    attention_mask: bool (True is visible) or float (added to scores), [batch, 1 or heads, queries, positions].
    """
    batch, heads, queries, width = query.shape
    if dropout or any(more.get(name) is not None for name in UNSUPPORTED_ARGUMENTS):
        return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    if attention_mask is not None and _has_kernel(query, key, value, attention_mask):
        scale = width**-0.5 if scaling is None else scaling
        return torch.ops.zero_inference.decode_attention(query, key, value, attention_mask, scale), None
    one_mask = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    if key.shape[1] == heads or queries > 1 or not one_mask:
        return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    rows = query.reshape(batch, key.shape[1], -1, width)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, queries, heads, value.shape[-1]), None


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether the kernel applies: for a few queries, on a CUDA device of capability 8.0 or newer."""
    return (
        query.is_cuda
        and query.shape[2] <= MAX_QUERIES
        and fits_operator(query, key, value, mask)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)))
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
