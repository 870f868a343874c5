"""Calls of decoder layers that are repeated instead of run, in a pass without weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zero_inference.models.alike import Kinds


class NotAlike(Exception):
    """Layers of one kind did different things, or a call did something that cannot be repeated."""


class OfLayers(ABC):
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

    def repeat(self, position: int, given: list, watching: OfLayers) -> Any:
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

    def __init__(self, run: dict[int, nn.Module], kinds: Kinds, watching: OfLayers) -> None:
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
                    raise NotAlike
                self.repeated += 1
                return self._calls[key].repeat(other, given, self._watching)
            ran = True
            self._given += [each for each in given if not isinstance(each, torch.Tensor)]
            start = self._watching.start()
            out = forward(*args, **kwargs)
            found = _call(out, given, lambda made: self._watching.seen(start, position, made))
            if self._calls.setdefault(key, found) != found:
                raise NotAlike
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
            raise NotAlike
    return _Call(tuple(found), structure, tuple(storages.values()), seen(set(storages)))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def storage_of(tensor: torch.Tensor) -> int:
    """Names it while it is alive."""
    return tensor.untyped_storage()._cdata
