"""Finding the decoder layers of any model: found, not listed by family."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from zero_inference.errors import UsageError
from zero_inference.utils.model_sizes import text_config

T = TypeVar("T")


def cache_per_module(read: Callable[[nn.Module], T]) -> Callable[[nn.Module], T]:
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


def unused_tower_parameters(model: nn.Module) -> list[nn.Parameter]:
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


KNOWN_CODE = ("transformers.", "torch.")  # a checkpoint's own may keep anything between layers
COMPARED_BYTES = 8 << 30  # of layers that are kept in host memory to compare with; a layer of Llama-3.1-405B has 6.4e9
NAMES_OF_INDEX = {"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx"}


@dataclass(frozen=True)
class LayerKinds:
    """
    Attributes:
        positions: of the decoder layers in their list, by kind, in order. Empty where layers are not to be told apart.
    """

    positions: tuple[tuple[int, ...], ...]

    def run_of(self, kind: int) -> list[int]:
        """Positions of the layers that run: the first, and the second and the last to see that they do the same."""
        each = self.positions[kind]
        return sorted({*each[:2], each[-1]})

    @property
    def first(self) -> dict[int, int]:
        """By position the first layer of its kind."""
        return {position: each[0] for each in self.positions for position in each}

    @property
    def repeated(self) -> dict[int, int]:
        """Of the layers that do not run, by position, the first of their kind."""
        return {position: each[0] for each in self.positions for position in each[2:-1]}


@cache_per_module
def layer_kinds(model: nn.Module) -> LayerKinds:
    """Those of a model as transformers builds it. No kinds where code is not that of transformers, or where layers share something with
    each other or with the rest of the model."""
    try:
        _, layers = decoder_layers(model)
    except UsageError:
        return LayerKinds(())
    known = all(type(module).__module__.startswith(KNOWN_CODE) for module in model.modules())
    if not known or _share_something(model, layers):
        return LayerKinds(())
    of_config = _by_config(model.config, len(layers))
    kinds: dict[Any, list[int]] = {}
    for position, layer in enumerate(layers):
        kinds.setdefault((of_config[position], _held(layer, position)), []).append(position)
    return LayerKinds(tuple(map(tuple, kinds.values())))


def first_layer_bytes(model: nn.Module) -> dict[int, int]:
    """Return the bytes of the first layer of each kind, by position. Where kinds are not known it is the first layer alone; a model without
    a list of decoder layers has none."""
    try:
        _, layers = decoder_layers(model)
    except UsageError:
        return {}
    firsts = [each[0] for each in layer_kinds(model).positions] or [0]
    return {first: sum(p.numel() * p.element_size() for p in layers[first].parameters()) for first in firsts}


def copy_with_few_layers(model: nn.Module, kinds: LayerKinds) -> tuple[nn.Module, dict[int, nn.Module]]:
    """A copy of `model` in whose list of layers one that runs stands for those that do not.

    Returns:
        it, and by position the layers that run; none where each of them does, and stands for itself alone.
    """
    if not kinds.repeated:
        return copy.deepcopy(model), {}
    _, layers = decoder_layers(model)
    made: dict[int, Any] = {}  # as `copy.deepcopy` keeps them
    run = {
        position: copy.deepcopy(layers[position], made)
        for kind in range(len(kinds.positions))
        for position in kinds.run_of(kind)
    }
    made |= {id(layers[position]): run[other] for position, other in kinds.repeated.items()}
    return copy.deepcopy(model, made), run


def _share_something(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether a module, parameter or buffer of a layer is one of another layer or of the rest of the model too."""
    parts = [_objects(layer.modules()) for layer in layers]
    parts.append(_objects(module for _, module in model.named_modules(memo={layers})))
    return len(set().union(*parts)) < sum(map(len, parts))


def _objects(modules: Iterable[nn.Module]) -> set[int]:
    found: set[int] = set()
    for module in modules:
        tensors = (*module._parameters.values(), *module._buffers.values())
        found |= {id(module), *(id(tensor) for tensor in tensors if tensor is not None)}
    return found


def _by_config(config: Any, count: int) -> list[tuple]:
    """Of each layer its entries in those lists of the configuration that have as many as there are layers."""
    lists = [
        value
        for each in {id(part): part for part in (config, config.get_text_config())}.values()
        for value in vars(each).values()
        if isinstance(value, list | tuple)
        and len(value) == count
        and list(value) != list(range(count))  # but a list of all
    ]
    return [tuple(_described(value[position]) for value in lists) for position in range(count)]


def _held(layer: nn.Module, position: int) -> tuple:
    """What tells kinds apart, in values that can be compared."""
    return tuple(
        (
            name,
            type(module),
            tuple(_tensors(module)),
            tuple(
                (key, "its index" if key in NAMES_OF_INDEX and value == position else _described(value))
                for key, value in vars(module).items()
                if key not in ("_parameters", "_buffers", "_modules")
            ),
        )
        for name, module in layer.named_modules()
    )


def _tensors(module: nn.Module) -> Iterator[tuple]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield name, None if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def _described(value: Any) -> Any:
    """Equal of equal values; of an object that may do anything, only of the same one."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_described, value))
    if isinstance(value, functools.partial):
        return type(value), _described((value.func, value.args, value.keywords))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(_described, value))
    if isinstance(value, dict):
        return type(value), tuple((_described(key), _described(each)) for key, each in value.items())
    return type(value), id(value)
