"""Attention of a decode step with a mask, where several query heads share keys and values: they are rows of one product.

transformers before it had `pack_gqa` (5.17 has none) copies keys and values for each of these heads first. In a step of Llama-3.1-70B,
batch 8, that took an H200 49 us of the 449 of a layer, and attention over the copies 34 (h200-kept/eighth_host/70b.txt).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TRANSFORMERS_DOES = hasattr(sdpa_attention, "pack_gqa")
CHANGES_SCORES = ("position_bias", "softcap")  # what transformers' own function knows and this one does not


@contextlib.contextmanager
def heads_share_keys() -> Iterator[None]:
    """Within it, models whose attention is PyTorch's copy no keys and values for heads that share them."""
    if TRANSFORMERS_DOES:
        yield
        return
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = functools.partial(attend, own)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what was set here hid it
        if ALL_ATTENTION_FUNCTIONS.get("sdpa") is not own:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = own


def attend(
    own: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What `own`, transformers' function for PyTorch's attention, gives.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, positions, head_dim].
        attention_mask: to be added to scores, [batch, 1 or heads, queries, positions].

    Returns:
        [batch, queries, heads, head_dim of the values], and no scores.
    """
    batch, heads, queries, width = query.shape
    one_mask = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    others = dropout or any(more.get(name) is not None for name in CHANGES_SCORES)
    if key.shape[1] == heads or queries > 1 or not one_mask or others:
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    rows = query.reshape(batch, key.shape[1], -1, width)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, queries, heads, value.shape[-1]), None
