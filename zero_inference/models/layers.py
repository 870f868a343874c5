"""Finding the decoder layers of any model: found, not listed by family."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn

from zero_inference.errors import UsageError

T = TypeVar("T")


def remembered(read: Callable[[nn.Module], T]) -> Callable[[nn.Module], T]:
    """`read`, whose answer for a module is kept as long as the module: a model is planned for many options, and stays as it is."""
    known: weakref.WeakKeyDictionary[nn.Module, T] = weakref.WeakKeyDictionary()

    @functools.wraps(read)
    def answer(module: nn.Module) -> T:
        if module not in known:
            known[module] = read(module)
        return known[module]

    return answer


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and ModuleList of the decoder layers: the longest ModuleList that is not inside another one.

    Raises:
        UsageError: the model has no ModuleList of layers.
    """
    found = list(_lists_in(model))
    if not found:
        raise UsageError(f"{type(model).__name__} has no list of decoder layers to offload: use --engine resident.")
    return max(found, key=lambda pair: len(pair[1]))


def _lists_in(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    if isinstance(module, nn.ModuleList) and len(module):
        yield name, module
        return
    for own_name, child in module.named_children():
        yield from _lists_in(child, f"{name}.{own_name}" if name else own_name)
