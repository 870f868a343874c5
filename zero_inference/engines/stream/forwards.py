"""What modules compute in place of their own `forward`, and what a call says: how many tokens, and which experts they chose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_inference.quantization.groups import GroupQuantization
from zero_inference.quantization.products import ALIGNMENT, FUSED_ROWS, linear_groups, no_bias


def codes_forward(
    linear: nn.Linear, scheme: GroupQuantization, packed: Callable[[], tuple[torch.Tensor, ...]]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`linear_groups` for a module, without the questions that `can_fuse` has answered: asked each time, they would cost Python more than
    the product takes.

    Args:
        packed: gives codes, scales and minima where they lie now.
    """
    bits, group_size, rows = scheme.bits, scheme.group_size, linear.out_features
    bias = no_bias(linear.weight.device, linear.weight.dtype) if linear.bias is None else linear.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        codes, scales, minima, *_ = packed()
        flat = x.reshape(-1, linear.in_features).contiguous()
        if flat.shape[0] > FUSED_ROWS or flat.data_ptr() % ALIGNMENT:
            return linear_groups(x, codes, scales, minima, bits, group_size, rows, linear.bias)
        out = torch.ops.zero_inference.linear_groups(flat, codes, scales, minima, bits, group_size, rows, bias)
        return out.view(*x.shape[:-1], rows)

    return forward


def tokens_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """Of all sequences, in a call of the decoder: ids [batch, tokens] or embeddings [batch, tokens, width]."""
    for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if torch.is_tensor(value) and value.dim() >= 2:
            return value.shape[0] * value.shape[1]
    return sys.maxsize  # called in a way that is not known: computed as a long pass is, which is always right


def chosen_of(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The numbers of the experts that tokens chose, in a call of a module of experts; None where they are not found."""
    return args[1] if len(args) > 1 else kwargs.get("top_k_index")
