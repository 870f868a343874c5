"""The decoder layers of any model, found by structure and not listed by family; and which of them are identical.

Layers are of one kind if they have the same modules, parameters, buffers and attributes, apart from their own index, and the same entries
in the config's per-layer lists.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from zero_inference.errors import UsageError
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.model_sizes import text_config

T = TypeVar("T")

KNOWN_CODE = ("transformers.", "torch.")  # a checkpoint's own code may store anything between layers
# Between two ways to compute the same, as a share of what is computed. Another order of sums adds up to 5% over the roundings of 40 layers
# in bfloat16; a position or mask that is wrong by one makes several times as much, and garbage 1 or more.
MAX_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 0.01}
COMPARED_BYTES = 8 << 30  # of reference layers in host memory, for comparison; a layer of Llama-3.1-405B has 6.4e9
VALUE_TYPES = (bool, int, float, str, list, tuple, dict, set, frozenset, torch.dtype, functools.partial, type(None))
INDEX_NAMES = {"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx"}


def cache_per_module(read: Callable[[nn.Module], T]) -> Callable[[nn.Module], T]:
    """Cache the results of `read` as long as the module lives: a model is planned for many options and does not change meanwhile."""
    results: weakref.WeakKeyDictionary[nn.Module, T] = weakref.WeakKeyDictionary()

    @functools.wraps(read)
    def cached(module: nn.Module) -> T:
        if module not in results:
            results[module] = read(module)
        return results[module]

    return cached


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return name and ModuleList of the decoder layers, the longest ModuleList outside of towers. Raises UsageError if there is none."""
    name, layers = find_layers(model)
    if not layers:
        raise UsageError(f"{type(model).__name__} has no list of decoder layers to offload: use --engine resident.")
    return name, layers


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the `decoder_layers`; an empty list if there is none."""
    name, decoder = _language_model(model)
    towers = _configs_of_towers(model)
    found = list(_outer_lists(decoder, name, towers)) or list(_outer_lists(model, "", towers))
    return max(found, key=lambda pair: len(pair[1]), default=("", nn.ModuleList()))


def unused_tower_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a multimodal model that text does not use, such as those of its vision tower and projector."""
    if not _configs_of_towers(model):
        return []
    head = model.get_output_embeddings()
    used = {id(p) for part in (_language_model(model)[1], head) if part is not None for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in used]


def _language_model(model: nn.Module) -> tuple[str, nn.Module]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return next(((name, module) for name, module in model.named_modules() if module is decoder), ("", model))


def _configs_of_towers(model: nn.Module) -> set[type]:
    """Return the config classes of a multimodal model's other parts, such as its vision tower."""
    config = getattr(model, "config", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return {type(part) for part in parts} - {type(None), type(config), type(text_config(config))}


def _outer_lists(module: nn.Module, name: str, towers: set[type]) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield name and module of the outermost ModuleLists in `module`, called `name`, that are not in towers."""
    if isinstance(module, nn.ModuleList) and len(module):
        yield name, module
        return
    for own_name, child in module.named_children():
        if type(getattr(child, "config", None)) not in towers:
            yield from _outer_lists(child, f"{name}.{own_name}" if name else own_name, towers)


def expert_parameters(model: Any, spec: ModelSpec) -> Iterator[nn.Parameter]:
    """Yield the parameters of experts that a token may leave out."""
    number, _ = spec.experts
    for name, module in model.named_modules():
        if number and ".experts." in f".{name}.":
            own = list(module.parameters(recurse=False))
            # stacked experts that get only hidden states and no choice, as those of Llama 4, are all used
            gets_choice = len(inspect.signature(type(module).forward).parameters) > 2  # with self
            if gets_choice or not any(p.dim() == 3 for p in own):
                yield from (p for p in own if p.dim() == 2 or (p.dim() == 3 and p.shape[0] == number))


@cache_per_module
def first_of_kind(model: nn.Module) -> dict[int, int]:
    """Return position of each decoder layer -> the first layer of its kind.

    Empty if code is not that of transformers, or if layers share something.
    """
    _, layers = find_layers(model)
    known = all(type(module).__module__.startswith(KNOWN_CODE) for module in model.modules())
    if not known or _share_something(model, layers):
        return {}
    configs = {id(part): part for part in (model.config, model.config.get_text_config())}.values()
    per_layer = [
        value
        for config in configs
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == len(layers) and list(value) != list(range(len(layers)))
    ]
    firsts: dict[Any, int] = {}  # by kind
    first_of = {}
    for position, layer in enumerate(layers):
        kind = repr([value[position] for value in per_layer]), _describe_layer(layer, position)
        first_of[position] = firsts.setdefault(kind, position)
    return first_of


def first_layer_bytes(model: nn.Module) -> dict[int, int]:
    """Return {position: bytes} of the first layer of each kind; of layer 0 alone if kinds are unknown, and {} without layers."""
    _, layers = find_layers(model)
    firsts = sorted(set(first_of_kind(model).values())) or [0][: len(layers)]
    return {first: sum(p.nbytes for p in layers[first].parameters()) for first in firsts}


def _share_something(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Return whether a module, parameter or buffer of a layer belongs to another layer or to the rest of the model too."""
    rest = [module for _, module in model.named_modules(memo={layers})]
    parts = [
        {id(each) for m in modules for each in (m, *m._parameters.values(), *m._buffers.values()) if each is not None}
        for modules in (*(layer.modules() for layer in layers), rest)
    ]
    return len(set().union(*parts)) < sum(map(len, parts))


def _describe_layer(layer: nn.Module, position: int) -> tuple:
    """Return names, types, tensors and attributes of all modules of a layer: equal for layers of one kind, which differ by values only."""
    description: list[Any] = []
    for name, module in layer.named_modules():
        description += [name, type(module)]
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            shape = None if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype)
            description.append((key, shape))
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                is_index = key in INDEX_NAMES and value == position
                # an object may have a long repr, as a config, and is equal to itself alone
                known = "its index" if is_index else repr(value) if isinstance(value, VALUE_TYPES) else id(value)
                description.append((key, known))
    return tuple(description)
