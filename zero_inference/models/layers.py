"""Finding the decoder layers of any model: found, not listed by family."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn

from zero_inference.errors import UsageError
from zero_inference.utils.log import text_config

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

    Those of the language model, where it is one part of several: a vision tower may have more layers.

    Raises:
        UsageError: the model has no ModuleList of layers.
    """
    name, decoder = _language_model(model)
    others = _other_configs(model)
    found = list(_lists_in(decoder, name, others)) or list(_lists_in(model, "", others))
    if not found:
        raise UsageError(f"{type(model).__name__} has no list of decoder layers to offload: use --engine resident.")
    return max(found, key=lambda pair: len(pair[1]))


def parameters_of_towers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a wrapper that text does not use, such as those of its vision tower and projector; none of another model."""
    if not _other_configs(model):
        return []
    head = model.get_output_embeddings()
    used = {id(p) for part in (_language_model(model)[1], head) if part is not None for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in used]


def _language_model(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the part that transformers says decodes; the model itself where it names none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return next(((name, module) for name, module in model.named_modules() if module is decoder), ("", model))


def _other_configs(model: nn.Module) -> set[type]:
    """Classes of the configurations of a wrapper's other parts, such as its vision tower."""
    config = getattr(model, "config", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return {type(part) for part in parts} - {type(None), type(config), type(text_config(config))}


def _lists_in(module: nn.Module, name: str, others: set[type]) -> Iterator[tuple[str, nn.ModuleList]]:
    if isinstance(module, nn.ModuleList) and len(module):
        yield name, module
        return
    for own_name, child in module.named_children():
        if type(getattr(child, "config", None)) not in others:
            yield from _lists_in(child, f"{name}.{own_name}" if name else own_name, others)
