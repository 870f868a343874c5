"""A forward pass of a model without weights, on the meta device, where tensors have shapes and no bytes: for those who count."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from zero_inference.models.layers import LayerKinds, copy_with_few_layers, layer_kinds


class LayersDiffer(Exception):
    """Layers of one kind did different things, or a call did something that cannot be repeated."""


class LayerObserver(ABC):
    """What someone who counts saw of a layer's call, and adds for a call that is repeated."""

    @abstractmethod
    def start(self) -> Any:
        """What `seen` has to know of the time before the call."""

    @abstractmethod
    def seen(self, start: Any, position: int, made: set[int]) -> Any:
        """Of the call since `start`; equal if two calls did the same. Raises NotAlike where it cannot be repeated.

        Args:
            position: of the layer in the list.
            made: storages that the call has made and returned.
        """

    @abstractmethod
    def repeat(self, position: int, seen: Any, made: list[torch.Tensor]) -> None:
        """Count `seen` once more.

        Args:
            position: of the layer whose call is not run.
            made: as many tensors as there are storages that a call makes and returns.
        """

    def unseen(self) -> AbstractContextManager:
        """For what does not belong to the pass."""
        return nullcontext()


@dataclass(frozen=True)
class _Made:
    """A tensor that a call returns: one of storage number `storage` among those that it makes."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Call:
    """What a call returns, and what was seen of it.

    Attributes:
        leaves: each a `_Made`, the number of the argument that it is, in a tuple, or a plain value.
        storages: bytes of those that it makes.
    """

    leaves: tuple
    structure: TreeSpec
    storages: tuple[int, ...]
    seen: Any

    def repeat(self, position: int, given: list, watching: LayerObserver) -> Any:
        with watching.unseen():
            memory = [torch.empty(nbytes, dtype=torch.uint8, device="meta") for nbytes in self.storages]
            leaves = [self._leaf(each, given, memory) for each in self.leaves]
        watching.repeat(position, self.seen, memory)
        return tree_unflatten(leaves, self.structure)

    @staticmethod
    def _leaf(leaf: Any, given: list, memory: list[torch.Tensor]) -> Any:
        if isinstance(leaf, _Made):
            return leaf.within(memory[leaf.storage])
        return given[leaf[0]] if isinstance(leaf, tuple) else leaf


class Repeating:
    """Has each of a model's layers compute in its first call alone. Calls with arguments of the same shapes have to do the same.

    Attributes:
        repeated: calls, up to now.
    """

    def __init__(self, run: dict[int, nn.Module], kinds: LayerKinds, watching: LayerObserver) -> None:
        """
        Args:
            run: by position, as `copy_with_few_layers` gives them; those that stand for no others are left as they are.
        """
        self.repeated = 0
        self._watching = watching
        self._calls: dict[Any, _Call] = {}  # of all kinds
        self._given: list[Any] = []  # what calls were told apart by: nothing else gets the id of what is kept
        self._weights = {storage_of(tensor) for layer in run.values() for tensor in layer.parameters()}
        for kind, positions in enumerate(kinds.positions):
            others = positions[2:-1]
            for position in kinds.run_of(kind) if others else ():
                layer = run[position]
                later = iter(others if position == positions[0] else ())
                layer.forward = self._in_place_of(layer.forward, kind, position, later)

    def _in_place_of(self, forward: Callable, kind: int, position: int, others: Iterator[int]) -> Callable:
        ran = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            given, structure = tree_flatten((args, kwargs))
            key = kind, str(structure), _in_values(given, self._weights)
            if ran:
                other = next(others, None)
                if other is None or key not in self._calls:
                    raise LayersDiffer
                self.repeated += 1
                return self._calls[key].repeat(other, given, self._watching)
            ran = True
            self._given += [each for each in given if not isinstance(each, torch.Tensor)]
            start = self._watching.start()
            out = forward(*args, **kwargs)
            found = _call(out, given, lambda made: self._watching.seen(start, position, made))
            if self._calls.setdefault(key, found) != found:
                raise LayersDiffer
            return out

        return call


def _in_values(given: list, weights: set[int]) -> tuple:
    """Arguments in values that can be compared: which tensors share memory, and shapes, for nobody looks at what is in them."""
    storages: dict[int, int] = {}
    return tuple(
        (
            *(each.shape, each.stride(), each.dtype, each.storage_offset(), each.untyped_storage().nbytes()),
            storages.setdefault(storage_of(each), len(storages)),
            storage_of(each) in weights and storage_of(each),
        )
        if isinstance(each, torch.Tensor)
        else (type(each), each if _is_plain(each) else id(each))
        for each in given
    )


def _call(out: Any, given: list, seen: Callable[[set[int]], Any]) -> _Call:
    leaves, structure = tree_flatten(out)
    positions = {id(each): index for index, each in reversed([*enumerate(given)])}
    not_made = {storage_of(each) for each in given if isinstance(each, torch.Tensor)}
    storages: dict[int, int] = {}
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for leaf in leaves:
        if _is_plain(leaf):
            found.append(leaf)
        elif id(leaf) in positions:
            found.append((positions[id(leaf)],))
        elif isinstance(leaf, torch.Tensor) and storage_of(leaf) not in not_made:
            key = storage_of(leaf)
            storages[key] = leaf.untyped_storage().nbytes()
            number = numbers.setdefault(key, len(numbers))
            found.append(_Made(number, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()))
        else:
            raise LayersDiffer
    return _Call(tuple(found), structure, tuple(storages.values()), seen(set(storages)))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def storage_of(tensor: torch.Tensor) -> int:
    """Names it while it is alive."""
    return tensor.untyped_storage()._cdata


Counted = TypeVar("Counted", bound=LayerObserver)
Watched = TypeVar("Watched", bound="PassObserver")
# More than any model has that computes its positions at once; recurrent ones that loop over them are estimated.
MOST_OPERATORS = 40_000


class TooManyOperators(Exception):
    """Of a pass; see `MOST_OPERATORS`."""


class PassObserver(LayerObserver, TorchDispatchMode):
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


def observe_pass(
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

    def run(shapes: Any, watching: PassObserver) -> None:
        one = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(shapes.forward).parameters else {}
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        cache = {} if past is None else {"past_key_values": _passing_cache(shapes.config, past)}
        with _no_padding(), _seeing_modules(watching), _AttentionWithoutScores(watching), watching:
            shapes(input_ids=ids, **cache, use_cache=past is not None, **one)

    return run_on_meta(model, dtype, make, run)


def run_on_meta(
    model: Any, dtype: torch.dtype, make: Callable[[Any], Counted], run: Callable[[Any, Counted], None]
) -> Counted | None:
    """Have `run` call a copy of `model` on the meta device. Of identical layers (`models.layers`) a few run; where they turn out not to
    be, all of them.

    Args:
        make, dtype: as of `observe_pass`.
        run: given the copy, and what `make` made.

    Returns:
        what `make` made; None where the model cannot run there.
    """
    kinds = layer_kinds(model)
    for each in (kinds, LayerKinds(())) if kinds.repeated else (kinds,):
        shapes, few = copy_with_few_layers(model, each)
        shapes.to("meta", dtype)
        counting = make(shapes)
        repeating = Repeating(few, each, counting)
        try:
            with torch.no_grad():
                run(shapes, counting)
            return counting
        except LayersDiffer:
            continue
        except Exception as error:  # whatever the model's own code raises
            if isinstance(error, TooManyOperators) or not repeating.repeated:
                return None
    return None


@contextmanager
def _seeing_modules(watching: PassObserver) -> Iterator[None]:
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

    def __init__(self, watching: PassObserver) -> None:
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
