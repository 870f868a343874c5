"""Forward passes of a model without weights on the meta device, where tensors have shapes and no bytes, for observers that count.

Only a few identical decoder layers (`models.layers`) run; calls of the others repeat the counts and outputs of these.
"""

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
from zero_inference.utils.patching import Patches

# More than any model has that computes its positions in parallel; recurrent ones that loop over them are estimated.
MAX_OPERATORS = 40_000


class LayersDiffer(Exception):
    """Layers of one kind did different things, or a call did something that cannot be repeated."""


class TooManyOperators(Exception):
    """A pass has more than `MAX_OPERATORS`."""


class LayerObserver(ABC):
    """Counts something in calls of decoder layers, and adds it again for calls that are repeated."""

    @abstractmethod
    def begin_call(self) -> Any:
        """Return the state that `end_call` needs."""

    @abstractmethod
    def end_call(self, start: Any, position: int, made: set[int]) -> Any:
        """Return the counts of a call since `start`: equal for calls that did the same.

        Args:
            position: index of the layer.
            made: storages that the call has allocated and returned.

        Raises:
            LayersDiffer: the call cannot be repeated.
        """

    @abstractmethod
    def repeat_call(self, position: int, counts: Any, made: list[torch.Tensor]) -> None:
        """Add the `counts` of an `end_call` once more.

        Args:
            position: index of the layer that is not run.
            made: a new tensor for each storage that the call allocated and returned.
        """

    def paused(self) -> AbstractContextManager:
        """Ignore operators inside the `with` block."""
        return nullcontext()


class PassObserver(LayerObserver, TorchDispatchMode):
    """Observes each operator of a pass, except in calls of layers that are repeated.

    Raises TooManyOperators after `MAX_OPERATORS`, repeated ones included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators_seen = 0
        self.is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.is_paused:
            return function(*args, **(kwargs or {}))
        self.count(1)
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        self.on_operator(function, args, kwargs or {}, given, out)
        return out

    def count(self, operators: int) -> None:
        self.operators_seen += operators
        if self.operators_seen > MAX_OPERATORS:
            raise TooManyOperators

    @abstractmethod
    def on_operator(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """Called after an operator; `given` are the storages of its arguments before it."""

    def on_module_call(self, module: nn.Module) -> None:
        """Called before a module's forward."""

    def on_module_return(self) -> None:
        """Called after a module's forward."""

    def on_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """Called for PyTorch's attention, which returns `out`."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See `LayerObserver`."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of its storage, unique while that is alive."""
    return tensor.untyped_storage()._cdata


Observer = TypeVar("Observer", bound=LayerObserver)
OperatorObserver = TypeVar("OperatorObserver", bound=PassObserver)


def observe_pass(
    model: Any, dtype: torch.dtype, tokens: int, past: int | None, make: Callable[[Any], OperatorObserver]
) -> OperatorObserver | None:
    """Observe one sequence's pass of `tokens` tokens after `past` others (None: without a cache).

    PyTorch's attention counts as one operator that stores no scores, like its fast kernels.

    Args:
        model: without weights; it is not changed.
        dtype: of parameters and buffers.
        make: makes the observer, given the copy of `model` on the meta device that will run.

    Returns:
        the observer; None if the model cannot run there: it reads values, has operators without meta functions, or too many.
    """

    def run(copied: Any, observer: PassObserver) -> None:
        last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(copied.forward).parameters else {}
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        cache = {} if past is None else {"past_key_values": _passing_cache(copied.config, past)}
        with _no_padding(), _module_hooks(observer), _AttentionWithoutScores(observer), observer:
            copied(input_ids=ids, **cache, use_cache=past is not None, **last_only)

    return run_on_meta(model, dtype, make, run)


def run_on_meta(
    model: Any, dtype: torch.dtype, make: Callable[[Any], Observer], run: Callable[[Any, Observer], None]
) -> Observer | None:
    """Let `run` call a copy of `model` on the meta device with a few layers of each kind; again with all layers, if those of a kind differ.

    Args:
        make, dtype: as of `observe_pass`.
        run: calls the copy; gets it and its observer.

    Returns:
        the observer; None if the model cannot run there.
    """
    kinds = layer_kinds(model)
    for each in (kinds, LayerKinds(())) if kinds.repeated else (kinds,):
        copied, layers = copy_with_few_layers(model, each)
        copied.to("meta", dtype)
        observer = make(copied)
        repeater = _LayerRepeater(layers, each, observer)
        try:
            with torch.no_grad():
                run(copied, observer)
            return observer
        except LayersDiffer:
            continue
        except Exception as error:  # the model's own code may raise anything
            if isinstance(error, TooManyOperators) or not repeater.repeated:
                return None
    return None


class _LayerRepeater:
    """Runs each layer of a copied model in its first call only; later calls, in place of other layers of its kind, repeat the recorded
    outputs and counts.

    Calls with arguments of the same shapes have to do the same.

    Attributes:
        repeated: number of repeated calls so far.
    """

    def __init__(self, layers: dict[int, nn.Module], kinds: LayerKinds, observer: LayerObserver) -> None:
        """
        Args:
            layers: by position, as `copy_with_few_layers` returns them.
        """
        self.repeated = 0
        self._observer = observer
        self._calls: dict[Any, _Call] = {}  # recorded calls by kind and arguments
        self._arguments: list[Any] = []  # keeps arguments alive: calls are distinguished by their ids
        self._weights = {storage_of(tensor) for layer in layers.values() for tensor in layer.parameters()}
        for kind, positions in enumerate(kinds.positions):
            others = positions[2:-1]
            for position in kinds.layers_to_run(kind) if others else ():
                layer = layers[position]
                later = iter(others if position == positions[0] else ())
                layer.forward = self._run_once(layer.forward, kind, position, later)

    def _run_once(self, forward: Callable, kind: int, position: int, later: Iterator[int]) -> Callable:
        """Return a forward that runs and records the first call, and answers each later one from the record.

        Args:
            kind: index of the layer's kind; layers of one kind share their records.
            position: index of the layer.
            later: indices of the layers that later calls stand for, in order.

        The forward raises LayersDiffer if a later call has no record, or two layers of one kind did different things.
        """
        has_run = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            arguments, structure = tree_flatten((args, kwargs))
            key = kind, str(structure), _describe_arguments(arguments, self._weights)
            if has_run:
                index = next(later, None)
                if index is None or key not in self._calls:
                    raise LayersDiffer
                self.repeated += 1
                return self._calls[key].repeat(index, arguments, self._observer)
            has_run = True
            self._arguments += [each for each in arguments if not isinstance(each, torch.Tensor)]
            start = self._observer.begin_call()
            out = forward(*args, **kwargs)
            recorded = _record_call(out, arguments, lambda made: self._observer.end_call(start, position, made))
            if self._calls.setdefault(key, recorded) != recorded:
                raise LayersDiffer
            return out

        return call


@dataclass(frozen=True)
class _Made:
    """A tensor that a call returns, in a storage that it allocates: number `storage` among those."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Call:
    """The result of a layer's call and what was counted in it.

    Attributes:
        leaves: outputs: each a `_Made`, a tuple with the index of the argument that is returned, or a plain value.
        storages: bytes of each storage that it allocates.
        counts: result of `LayerObserver.end_call`.
    """

    leaves: tuple
    structure: TreeSpec
    storages: tuple[int, ...]
    counts: Any

    def repeat(self, position: int, arguments: list, observer: LayerObserver) -> Any:
        """Return new outputs for `arguments`, and count the call once more, for the layer at `position`."""
        with observer.paused():
            memory = [torch.empty(nbytes, dtype=torch.uint8, device="meta") for nbytes in self.storages]
            leaves = [self._leaf(each, arguments, memory) for each in self.leaves]
        observer.repeat_call(position, self.counts, memory)
        return tree_unflatten(leaves, self.structure)

    @staticmethod
    def _leaf(leaf: Any, arguments: list, memory: list[torch.Tensor]) -> Any:
        if isinstance(leaf, _Made):
            return memory[leaf.storage].view(leaf.dtype).as_strided(leaf.size, leaf.stride, leaf.offset)
        return arguments[leaf[0]] if isinstance(leaf, tuple) else leaf


def _describe_arguments(arguments: list, weights: set[int]) -> tuple:
    """Return a hashable that is equal for calls that compute the same: shapes, and which tensors share memory, without values."""
    storages: dict[int, int] = {}
    return tuple(
        (
            *(each.shape, each.stride(), each.dtype, each.storage_offset(), each.untyped_storage().nbytes()),
            storages.setdefault(storage_of(each), len(storages)),
            storage_of(each) in weights and storage_of(each),
        )
        if isinstance(each, torch.Tensor)
        else (type(each), each if _is_plain(each) else id(each))
        for each in arguments
    )


def _record_call(out: Any, arguments: list, end_call: Callable[[set[int]], Any]) -> _Call:
    """Return the record of a call that returned `out`. Raises LayersDiffer if it returned views of arguments or other objects."""
    leaves, structure = tree_flatten(out)
    index_of = {id(each): index for index, each in reversed([*enumerate(arguments)])}
    argument_storages = {storage_of(each) for each in arguments if isinstance(each, torch.Tensor)}
    storages: dict[int, int] = {}  # storage -> bytes, in the order of `_Made.storage`
    recorded: list[Any] = []
    for leaf in leaves:
        if _is_plain(leaf):
            recorded.append(leaf)
        elif id(leaf) in index_of:
            recorded.append((index_of[id(leaf)],))
        elif isinstance(leaf, torch.Tensor) and storage_of(leaf) not in argument_storages:
            storages[storage_of(leaf)] = leaf.untyped_storage().nbytes()
            number = list(storages).index(storage_of(leaf))
            recorded.append(_Made(number, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()))
        else:
            raise LayersDiffer
    return _Call(tuple(recorded), structure, tuple(storages.values()), end_call(set(storages)))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _module_hooks(observer: PassObserver) -> Patches:
    def before(module: nn.Module, args: tuple) -> None:
        if not observer.is_paused:
            observer.on_module_call(module)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if not observer.is_paused:
            observer.on_module_return()

    hooks, patches = torch.nn.modules.module, Patches()
    patches.add_hooks(
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    )
    return patches


def _no_padding() -> Patches:
    """Make transformers treat attention masks as all ones, since it would read the values of a mask that a model makes, as OPT's."""
    from transformers import masking_utils

    patches = Patches()
    if hasattr(masking_utils, "fast_all"):
        patches.set_attr(masking_utils, "fast_all", lambda mask: True)
    return patches


def _passing_cache(config: Any, past: int) -> Any:
    """Return a cache that returns keys and values of `past` positions and the new ones, and stores none.

    Without a cache transformers would read position ids.
    """
    from transformers import DynamicCache

    def lengthen(new: torch.Tensor) -> torch.Tensor:  # [B, heads, tokens, width]
        return new.new_empty(*new.shape[:-2], past + new.shape[-2], new.shape[-1]) if past else new

    class Passing(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return lengthen(key_states), lengthen(value_states)

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return past

        def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
            new = query_length if isinstance(query_length, int) else query_length.shape[0]
            return past + new, 0

    return Passing(config=config)


class _AttentionWithoutScores(TorchFunctionMode):
    """Replaces PyTorch's attention by one operator that allocates its output only."""

    def __init__(self, observer: PassObserver) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            batch, heads, length, _ = query.shape
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
            self.observer.on_attention(query, key, value, out)
            return out
        if function is torch.Tensor.__contains__:  # transformers looks for the padding token among the ids
            return False
        return function(*args, **(kwargs or {}))
