"""Forward passes of a model without weights on the meta device, where tensors have shapes and no bytes.

Only a few of identical decoder layers (`models.layers`) run; the others repeat their outputs and counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero_inference.models.layers import LayerKinds, copy_with_few_layers, layer_kinds
from zero_inference.utils.patching import Patches

Result = TypeVar("Result")


class LayersDiffer(Exception):
    """Layers of one kind did different things, or a call did something that cannot be repeated."""


class TooManyOperators(Exception): ...


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of its storage, unique while that is alive."""
    return tensor.untyped_storage()._cdata


def run_on_meta(
    model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module, dict[int, nn.Module], LayerKinds], Result]
) -> Result | None:
    """Return what `run` returns for a copy of `model` on the meta device, or None if the model cannot run there.

    `run` gets a copy with a few layers of each kind, these by position, and the kinds; all layers if those of a kind turn out to differ.
    """
    kinds = layer_kinds(model)
    for each in (kinds, LayerKinds(())) if kinds.repeated else (kinds,):
        copied, layers = copy_with_few_layers(model, each)
        copied.to("meta", dtype)
        try:
            with torch.no_grad():
                return run(copied, layers, each)
        except LayersDiffer:
            continue
        except Exception as error:  # the model's own code may raise anything, and because of repeated layers
            repeats = any(getattr(layer.forward, "count", 0) > 1 for layer in layers.values())
            if isinstance(error, TooManyOperators) or not repeats:
                return None
    return None


def repeat_layers(layers: dict[int, nn.Module], kinds: LayerKinds, recorder: Any = None) -> None:
    """Have each of `layers` run its first call only; later calls, in place of other layers, repeat outputs and `recorder`'s counts."""
    for kind, positions in enumerate(kinds.positions):
        recorded: dict[Any, Any] = {}  # by arguments: calls with arguments of the same shapes have to do the same
        for position in kinds.layers_to_run(kind) if len(positions) > 3 else ():
            layers[position].forward = _run_once(layers[position].forward, recorded, recorder)


def _run_once(forward: Callable, recorded: dict[Any, Any], recorder: Any) -> Callable:
    """Return a forward that runs and records its first call. It raises LayersDiffer if a later call has no record."""
    objects: list[Any] = []  # arguments other than tensors stay alive, because calls are distinguished by their ids

    def call(*args: Any, **kwargs: Any) -> Any:
        call.count += 1  # type: ignore[attr-defined]
        arguments, structure = tree_flatten((args, kwargs))
        key = str(structure), _describe_arguments(arguments)
        if call.count > 1:  # type: ignore[attr-defined]
            if key not in recorded:
                raise LayersDiffer
            outputs, out_structure, counts = recorded[key]
            if recorder is not None:
                recorder.repeat_call(counts)
            return tree_unflatten([_repeat_output(each, arguments) for each in outputs], out_structure)
        objects.extend(each for each in arguments if not isinstance(each, torch.Tensor))
        start = recorder and recorder.begin_call()
        out = forward(*args, **kwargs)
        leaves, out_structure = tree_flatten(out)
        outputs = _describe_outputs(leaves, arguments)
        new = [leaf for leaf, (how, *_) in zip(leaves, outputs) if how == "new"]
        found = outputs, out_structure, recorder and recorder.end_call(start, new)
        if recorded.setdefault(key, found) != found:
            raise LayersDiffer
        return out

    call.count = 0  # type: ignore[attr-defined]
    return call


def _describe_arguments(arguments: list) -> tuple:
    """Return a hashable that is equal for calls that compute the same: shapes, and which tensors share memory, without values."""
    storages: dict[int, int] = {}
    return tuple(
        (each.shape, each.stride(), each.dtype, storages.setdefault(storage_of(each), len(storages)))
        if isinstance(each, torch.Tensor)
        else (type(each), each if _is_plain(each) else id(each))
        for each in arguments
    )


def _describe_outputs(leaves: list, arguments: list) -> list[tuple]:
    """Describe each output: a new tensor, an argument or a plain value. Raises LayersDiffer for views and other objects."""
    index_of = {id(each): index for index, each in reversed([*enumerate(arguments)])}
    known = {storage_of(each) for each in tensors_in(arguments)}
    described: list[tuple] = []
    for leaf in leaves:
        if _is_plain(leaf):
            described.append(("value", leaf))
        elif id(leaf) in index_of:
            described.append(("argument", index_of[id(leaf)]))
        elif isinstance(leaf, torch.Tensor) and storage_of(leaf) not in known:
            known.add(storage_of(leaf))
            nbytes = leaf.untyped_storage().nbytes()
            described.append(("new", nbytes, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()))
        else:
            raise LayersDiffer
    return described


def _repeat_output(described: tuple, arguments: list) -> Any:
    how, first, *rest = described
    if how != "new":
        return arguments[first] if how == "argument" else first
    dtype, size, stride, offset = rest
    return torch.empty(first, dtype=torch.uint8, device="meta").view(dtype).as_strided(size, stride, offset)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def call_model(model: Any, tokens: int, past: int | None, recorder: Any) -> None:
    """Run one sequence's pass of `tokens` tokens after `past` others (None: without a cache) on the meta device."""
    from transformers import masking_utils

    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    cache = {} if past is None else {"past_key_values": _passing_cache(model.config, past)}
    with Patches() as patches, _ReplacedAttention(recorder.count_attention), recorder.module_hooks(), recorder:
        # transformers would read the values of a mask that a model makes, as OPT's
        patches.set_attr(masking_utils, "fast_all", lambda mask: True)
        model(input_ids=ids, **cache, use_cache=past is not None, **last_only)


def _passing_cache(config: Any, past: int) -> Any:
    """Return a cache of `past` positions that stores nothing; without a cache transformers would read position ids."""
    from transformers import DynamicCache

    class Passing(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            both = key_states, value_states  # [B, heads, tokens, width]
            if not past:
                return both
            return tuple(new.new_empty(*new.shape[:-2], past + new.shape[-2], new.shape[-1]) for new in both)

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return past

        def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
            new = query_length if isinstance(query_length, int) else query_length.shape[0]
            return past + new, 0

    return Passing(config=config)


class _ReplacedAttention(TorchFunctionMode):
    def __init__(self, on_attention: Callable) -> None:
        super().__init__()
        self.on_attention = on_attention

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return self.on_attention(*args[:3])
        if function is torch.Tensor.__contains__:  # transformers looks for the padding token among the ids
            return False
        return function(*args, **(kwargs or {}))
