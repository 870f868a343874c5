"""A forward pass of a model without weights, on the meta device, where tensors have shapes and no bytes: for those who count."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of one call of PyTorch's attention: query, key, value and what it returns.
SawAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
# More than any model has that computes its positions at once; recurrent ones that loop over them are estimated.
MOST_OPERATORS = 40_000


class Watching(TorchDispatchMode, ABC):
    """Sees each operator of a pass. Raises RuntimeError behind `MOST_OPERATORS`."""

    def __init__(self) -> None:
        super().__init__()
        self.operators_seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operators_seen += 1
        if self.operators_seen > MOST_OPERATORS:
            raise RuntimeError("the model has too many operators to be traced")
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        self.saw(function, args, kwargs or {}, given, out)
        return out

    @abstractmethod
    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """An operator has run.

        Args:
            given: storages of the arguments, as they were before.
        """


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Names it while it is alive."""
    return tensor.untyped_storage()._cdata


def on_meta(model: Any, dtype: torch.dtype) -> Any:
    """A copy of `model`, which has no weights, with parameters and buffers of `dtype` on the meta device."""
    return copy.deepcopy(model).to("meta", dtype)


def run_on_meta(
    shapes: Any,
    tokens: int,
    past: int,
    watching: AbstractContextManager,
    saw_attention: SawAttention | None = None,
) -> bool:
    """One sequence's pass of `tokens` tokens that follow `past` others, within `watching`.

    Attention counts as one operator that keeps no scores, as PyTorch's fast kernels do it, where the model calls PyTorch's.

    Args:
        shapes: what `on_meta` gave.
        saw_attention: told of each such call.

    Returns:
        whether the model can run there: not if it looks at values, or has operators that know no meta device.
    """
    one = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(shapes.forward).parameters else {}
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _AttentionWithoutScores(saw_attention), watching:
            shapes(input_ids=ids, past_key_values=_passing_cache(shapes.config, past), use_cache=True, **one)
    except Exception:  # whatever the model's own code raises
        return False
    return True


def _passing_cache(config: Any, past: int) -> Any:
    """A cache that hands on keys and values behind `past` others, and keeps none. Without any, transformers would look at positions."""
    from transformers import DynamicCache

    def longer(new: torch.Tensor) -> torch.Tensor:
        return new.new_empty(*new.shape[:-2], past + new.shape[-2], new.shape[-1]) if past else new

    class Passing(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return longer(key_states), longer(value_states)

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return past

        def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
            new = query_length if isinstance(query_length, int) else query_length.shape[0]
            return past + new, 0

    return Passing(config=config)


class _AttentionWithoutScores(TorchFunctionMode):
    """PyTorch's attention as its fast kernels do it: nothing but the output."""

    def __init__(self, saw: SawAttention | None) -> None:
        super().__init__()
        self.saw = saw

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            batch, heads, length, _ = query.shape
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
            if self.saw is not None:
                self.saw(query, key, value, out)
            return out
        return function(*args, **(kwargs or {}))
