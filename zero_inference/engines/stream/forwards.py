"""What a call of a module says: how many tokens, and which experts they chose."""

from __future__ import annotations

import sys
from typing import Any

import torch


def tokens_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """Of all sequences, in a call of the decoder: ids [batch, tokens] or embeddings [batch, tokens, width]."""
    for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if torch.is_tensor(value) and value.dim() >= 2:
            return value.shape[0] * value.shape[1]
    return sys.maxsize  # called in a way that is not known: computed as a long pass is, which is always right


def chosen_of(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The numbers of the experts that tokens chose, in a call of a module of experts; None where they are not found."""
    return args[1] if len(args) > 1 else kwargs.get("top_k_index")
