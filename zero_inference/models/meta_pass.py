"""A forward pass of a model without weights, on the meta device, where tensors have shapes and no bytes: for those who count."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_inference.models.alike import Kinds, copy_with_few_layers, kinds_of_layers
from zero_inference.models.repeat import NotAlike, OfLayers, Repeating, storage_of

Counted = TypeVar("Counted", bound=OfLayers)
Watched = TypeVar("Watched", bound="Watching")
# More than any model has that computes its positions at once; recurrent ones that loop over them are estimated.
MOST_OPERATORS = 40_000


class TooManyOperators(Exception):
    """Of a pass; see `MOST_OPERATORS`."""


class Watching(OfLayers, TorchDispatchMode):
    """Sees each operator of a pass, but for those of layers' calls that are repeated.

    Raises TooManyOperators behind `MOST_OPERATORS`, with those that are repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators_seen = 0
        self.looks_away = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.looks_away:
            return function(*args, **(kwargs or {}))
        self.count(1)
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        self.saw(function, args, kwargs or {}, given, out)
        return out

    def count(self, operators: int) -> None:
        self.operators_seen += operators
        if self.operators_seen > MOST_OPERATORS:
            raise TooManyOperators

    @abstractmethod
    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """An operator has run.

        Args:
            given: storages of the arguments, as they were before.
        """

    def saw_module(self, module: torch.nn.Module) -> None:
        """A module is called."""

    def left_module(self) -> None:
        """The call that began last has ended."""

    def saw_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """PyTorch's attention was called, and returns `out`."""

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Operators that do not belong to the pass."""
        self.looks_away = True
        try:
            yield
        finally:
            self.looks_away = False


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def watch_pass(
    model: Any, dtype: torch.dtype, tokens: int, past: int | None, make: Callable[[Any], Watched]
) -> Watched | None:
    """One sequence's pass of `tokens` tokens that follow `past` others, watched; None for a pass without a cache.

    Attention counts as one operator that keeps no scores, as PyTorch's fast kernels do it, where the model calls PyTorch's.

    Args:
        model: without weights; it is left as it is.
        dtype: of parameters and buffers.
        make: what watches the pass, given the copy of `model` on the meta device that will run.

    Returns:
        what watched. None where the model cannot run there: if it looks at values, has operators that know no meta device, or too many.
    """

    def run(shapes: Any, watching: Watching) -> None:
        one = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(shapes.forward).parameters else {}
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        cache = {} if past is None else {"past_key_values": _passing_cache(shapes.config, past)}
        with _no_padding(), _seeing_modules(watching), _AttentionWithoutScores(watching), watching:
            shapes(input_ids=ids, **cache, use_cache=past is not None, **one)

    return run_on_meta(model, dtype, make, run)


def run_on_meta(
    model: Any, dtype: torch.dtype, make: Callable[[Any], Counted], run: Callable[[Any, Counted], None]
) -> Counted | None:
    """Have `run` call a copy of `model` on the meta device. Of layers that are alike a few run (`models.alike`); where they turn out not to
    be, all of them.

    Args:
        make, dtype: as of `watch_pass`.
        run: given the copy, and what `make` made.

    Returns:
        what `make` made; None where the model cannot run there.
    """
    kinds = kinds_of_layers(model)
    for each in (kinds, Kinds(())) if kinds.repeated else (kinds,):
        shapes, few = copy_with_few_layers(model, each)
        shapes.to("meta", dtype)
        counting = make(shapes)
        repeating = Repeating(few, each, counting)
        try:
            with torch.no_grad():
                run(shapes, counting)
            return counting
        except NotAlike:
            continue
        except Exception as error:  # whatever the model's own code raises
            if isinstance(error, TooManyOperators) or not repeating.repeated:
                return None
    return None


@contextmanager
def _seeing_modules(watching: Watching) -> Iterator[None]:
    def called(module: torch.nn.Module, args: tuple) -> None:
        if not watching.looks_away:
            watching.saw_module(module)

    def ended(module: torch.nn.Module, args: tuple, output: Any) -> None:
        if not watching.looks_away:
            watching.left_module()

    hooks = torch.nn.modules.module
    handles = (
        hooks.register_module_forward_pre_hook(called),
        hooks.register_module_forward_hook(ended, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _no_padding() -> Iterator[None]:
    """Transformers may look at an attention mask that a model has made itself, as OPT does with version 5.17: it is all ones."""
    from transformers import masking_utils

    looks = getattr(masking_utils, "fast_all", None)
    if looks is not None:
        masking_utils.fast_all = lambda mask: True
    try:
        yield
    finally:
        if looks is not None:
            masking_utils.fast_all = looks


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

    def __init__(self, watching: Watching) -> None:
        super().__init__()
        self.watching = watching

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            batch, heads, length, _ = query.shape
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
            self.watching.saw_attention(query, key, value, out)
            return out
        if function is torch.Tensor.__contains__:  # transformers looks for the padding token among the ids
            return False
        return function(*args, **(kwargs or {}))
