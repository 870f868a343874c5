"""Calls of modules: what they say, and what is computed in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def tokens_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """Of all sequences, in a call of the decoder: ids [batch, tokens] or embeddings [batch, tokens, width]."""
    for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if torch.is_tensor(value) and value.dim() >= 2:
            return value.shape[0] * value.shape[1]
    return sys.maxsize  # called in a way that is not known: computed as a long pass is, which is always right


def chosen_of(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The numbers of the experts that tokens chose, in a call of a module of experts; None where they are not found."""
    return args[1] if len(args) > 1 else kwargs.get("top_k_index")


def replace_forward(
    module: nn.Module, other: Callable, applies: Callable[[], Any], seen: Callable = lambda *args: None
) -> None:
    """Let `module` compute `other` in passes in which it `applies`; what it computes itself is shown to `seen`."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if applies():
            return other(*args, **kwargs)
        seen(*args)
        return own(*args, **kwargs)

    module.forward = forward
