"""Give each parameter of an empty model its values: from a checkpoint, one decoder layer at a time, or random.

Renaming, fusing and casting of tensors is transformers', which gets the checkpoint's keys layer by layer. Random weights (--dummy) are
seeded by name, so that order, rank and engine do not matter. Fed its own greedy tokens, a mixture with random weights chooses the same few
experts in every step. `--dummy-routing text` chooses as text does, where an LRU cache of a quarter of the experts hits two thirds:
embeddings are so large (`embedding_std`) that the token decides the choices in every layer, and `draw_tokens` repeats recent tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero_inference.errors import RunError
from zero_inference.kernels.formats import QuantizedWeight, WeightFormat, dequantize_reference
from zero_inference.models.checkpoint_files import Shards, integer_keys, shorten_names
from zero_inference.models.checkpoint_formats import INSTEAD, StoredWeight
from zero_inference.models.empty_model import parameter_names, set_tensor
from zero_inference.models.layers import find_layers
from zero_inference.models.spec import ModelSpec
from zero_inference.models.stored_weights import convert_tensors, draw_stored, parameter_of_key, read_stored

logger = logging.getLogger(__name__)
# Causal masks and rotary tables that older versions of transformers stored in each layer.
OUTDATED_BUFFERS = re.compile(r"\b(attn|attention)\.bias$|\.(masked_bias|causal_mask|inv_freq|cos_cached|sin_cached)$")
MULTI_TOKEN = re.compile("nextn|mtp", re.IGNORECASE)  # fields of a config for multi-token prediction
TRIMMED_BYTES = 64 << 20  # of dummy weights between two `return_free_memory`: a layer or two of a small model
Adopt = Callable[[str, nn.Parameter], None]
AdoptStored = Callable[[str, QuantizedWeight], None]
Formats = Mapping[str, tuple[WeightFormat, bool]]  # of `stored_formats`
_observers: dict[Adopt, Collection[str]] = {}  # of `observe_loading`, with the names of their parameters

REPEATED = 0.6  # share of drawn tokens that repeat one of the last `RECENT` of their sequence
RECENT = 6
WEIGHT_STD = 0.02  # the init of GPT-2, OPT and Llama; keeps 16-bit activations finite through every preset


class Keep(NamedTuple):
    """Weights that an engine keeps as the checkpoint stores them."""

    formats: Formats
    adopt: AdoptStored  # gets each with the name of its parameter


def load_weights(
    model,
    spec: ModelSpec,
    seed: int,
    device: torch.device,
    adopt: Adopt,
    progress: Callable[[int], None] = lambda done: None,
    keep: Keep | None = None,
    in_place: Collection[str] = (),
) -> None:
    """Give every parameter of an empty model its values in its dtype, and pass each to `adopt(name, parameter)` once.

    `adopt` moves, quantizes or partitions it in place; `progress` gets its bytes. Dummy weights are drawn on `device`, others come in
    host memory. Raises RunError for a damaged file, a missing parameter, or a tensor of another shape or an unknown format.

    Args:
        keep: weights that are kept as the checkpoint stores them, instead; their parameters become empty.
        in_place: parameters that the engine reads from files itself. They become empty; only those that are observed are
            read and passed to `adopt`.
    """

    def take(name: str, parameter: nn.Parameter) -> None:
        nbytes = parameter.nbytes
        for observe in _observers_of(name):
            observe(name, parameter)
        adopt(name, parameter)
        progress(nbytes)

    def take_stored(name: str, weight: QuantizedWeight) -> None:
        assert keep is not None
        plain, transposed = model.get_parameter(name), keep.formats[name][1]
        if observers := _observers_of(name):
            values = torch.empty(
                plain.mT.shape if transposed else plain.shape, dtype=plain.dtype, device=weight.codes.device
            )
            dequantize_reference(weight, values)
            for observe in observers:
                observe(name, nn.Parameter(values.mT if transposed else values, requires_grad=False))
        keep.adopt(name, weight)
        progress(sum(each.nbytes for each in weight.tensors.values()))
        empty = nn.Parameter(torch.empty(0, dtype=plain.dtype, device=device), requires_grad=False)
        set_tensor(model, [name], empty)  # until its block is called

    kept = {} if keep is None else keep.formats
    unread = frozenset(name for name in in_place if not _observers_of(name))
    for name in unread:
        plain = model.get_parameter(name)
        progress(plain.nbytes)
        empty = nn.Parameter(torch.empty(0, dtype=plain.dtype, device=device), requires_grad=False)
        set_tensor(model, [name], empty)
    if spec.dummy:
        std = embedding_std(spec.text_config) if spec.dummy_routing == "text" else WEIGHT_STD
        _draw_weights(model, seed, device, take, std, kept, take_stored, unread)
    else:
        _read_weights(model, spec, take, kept, take_stored, unread)
    model.tie_weights()


@contextmanager
def observe_loading(observe: Adopt, names: Collection[str]) -> Iterator[None]:
    """Call `observe` for the parameters `names` that are loaded within the block, before the engine adopts them."""
    _observers[observe] = names
    try:
        yield
    finally:
        del _observers[observe]


def _observers_of(name: str) -> list[Adopt]:
    return [observe for observe, names in _observers.items() if name in names]


def _draw_weights(
    model,
    seed: int,
    device: torch.device,
    adopt: Adopt,
    std_of_embeddings: float,
    kept: Formats,
    adopt_stored: AdoptStored,
    unread: Collection[str],
) -> None:
    untrimmed_bytes = 0  # of drawn weights since `return_free_memory` was called
    # a checkpoint's own code may lack get_input_embeddings
    embedding = None if std_of_embeddings == WEIGHT_STD else model.get_input_embeddings().weight
    names = parameter_names(model)
    for name, parameter in list(model.named_parameters()):
        if name in unread:
            continue
        untrimmed_bytes += parameter.nbytes
        if untrimmed_bytes >= TRIMMED_BYTES:
            return_free_memory()
            untrimmed_bytes = parameter.nbytes
        if name in kept:
            form, transposed = kept[name]
            shape = tuple(parameter.mT.shape if transposed else parameter.shape)
            adopt_stored(name, draw_stored(form, shape, WEIGHT_STD, seeded(f"{seed}:{name}".encode(), device)))
            continue
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        fill_dummy(values, name, seed, std_of_embeddings if parameter is embedding else WEIGHT_STD)
        drawn = nn.Parameter(values, requires_grad=False)
        del values
        set_tensor(model, names[id(parameter)], drawn)
        adopt(name, drawn)
        del drawn
    return_free_memory()


def _read_weights(
    model, spec: ModelSpec, adopt: Adopt, kept: Formats, adopt_stored: AdoptStored, unread: Collection[str]
) -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping

    shards = Shards(spec.checkpoint_folder(), spec.checkpoint_format, spec.dtype)
    mapping = get_model_conversion_mapping(model)
    ties = _resolve_ties(model, shards, mapping)
    adopted = {id(model.get_parameter(name)) for name in unread}
    name_of = parameter_of_key(model, mapping, shards.keys) if unread else {}
    unset, unused = set(model.state_dict()), []
    for keys in shards.layers():
        shards.check_complete(keys)
        with shards.open([key for key in keys if key not in name_of or name_of[key][0] not in unread]) as tensors:
            stored = _take_stored(model, tensors, mapping, kept)
            missing, unexpected = _read_plain(model, tensors, mapping, shards)
            convert = partial(convert_tensors, model, mapping=mapping, dtype=spec.dtype, folder=shards.folder)
            for name, weight in read_stored(model, stored, kept, convert).items():
                adopt_stored(name, weight)
                adopted.add(id(model.get_parameter(name)))
        missing -= {name for name, _ in stored.values()}
        del tensors, stored
        unset &= missing
        unused += [key for key in unexpected if not _is_announced(key, model, spec)]
        for names in ties:  # put what was read under one name under the others
            read = next((p for name in names if (p := model.get_parameter(name)).device.type != "meta"), None)
            if read is not None:
                set_tensor(model, names, read)
        for name, parameter in model.named_parameters():
            if parameter.device.type != "meta" and id(parameter) not in adopted:
                adopt(name, parameter.requires_grad_(False))
                adopted.add(id(parameter))
        return_free_memory()
    model.tie_weights()
    if missing_names := [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]:
        raise RunError(
            f"{shards.folder}: the checkpoint has no tensor for {shorten_names(missing_names)}: it belongs to another "
            "model, or a shard is missing."
        )
    buffers = [name for name, _ in model.named_buffers() if name in unset]
    for names, problem in ((buffers, "initial values stay, no tensor for"), (unused, "ignored, no parameter for")):
        if names and not (dist.is_initialized() and dist.get_rank()):
            logger.warning("warning: %s: %s %s.", shards.folder, problem, shorten_names(names))


def _take_stored(model, tensors: dict[str, Any], mapping: list, kept: Formats) -> dict[str, tuple[str, StoredWeight]]:
    """Move the weights that are `kept` out of `tensors`; return checkpoint key -> (parameter, weight)."""
    quantized = [key for key, tensor in tensors.items() if isinstance(tensor, StoredWeight)] if kept else []
    names = parameter_of_key(model, mapping, quantized)
    return {key: (name, tensors.pop(key)) for key, (name, _) in names.items() if name in kept}


def _is_announced(key: str, model, spec: ModelSpec) -> bool:
    """Return whether config.json explains a tensor that the model has no parameter for: of multi-token prediction, or of a multimodal
    model of which only the language model is built."""
    fields = [item for config in (spec.config, spec.text_config) for item in vars(config).items()]
    if any(MULTI_TOKEN.search(name) and value for name, value in fields):
        if "mtp" in key.split(".") or _layer_of(key, model) >= len(find_layers(model)[1]):
            return True
    if model.config is spec.config:
        return False
    own = {name for part in (model, model.get_decoder()) for name, _ in part.named_children()}
    prefixes = {"model", "language_model", "text_model", model.base_model_prefix}
    return next((part for part in key.split(".") if part not in prefixes), "") not in own


def _layer_of(key: str, model) -> int:
    """Return the index of the decoder layer that a checkpoint's key names, which the model may not have; -1 for other keys."""
    prefix, _ = find_layers(model)
    prefixes = "|".join(re.escape(name) for name in (prefix, prefix.removeprefix(model.base_model_prefix + ".")))
    found = re.match(rf"(?:{prefixes})\.(\d+)\.", key)
    return int(found.group(1)) if found else -1


def _resolve_ties(model, shards: Shards, mapping: list) -> list[list[str]]:
    """Return the names of each parameter that stays tied; those with different tensors in the checkpoint are untied."""
    ties = []
    tied = [names for names in parameter_names(model).values() if len(names) > 1]
    stored_as = _checkpoint_keys(model, mapping, shards.keys, {name for names in tied for name in names})
    for names in tied:
        # in the model's order: the others are tied to its first name
        first, *others = [stored_as[name] for name in names if name in stored_as] or [""]
        with shards.open([key for key in (first, *others) if key]) as tensors:
            equal = all(torch.equal(tensors[first][:], tensors[key][:]) for key in others)
        if equal:
            ties.append(names)
            for key in others:
                del shards.keys[key]
        else:
            model.config.get_text_config(decoder=True).tie_word_embeddings = model.config.tie_word_embeddings = False
            for name in names[1:]:
                own = nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False)
                set_tensor(model, [name], own)
    return ties


def _checkpoint_keys(model, mapping: list, keys: Iterable[str], wanted: set[str]) -> dict[str, str]:
    """Return the checkpoint's key of each of the `wanted` names in the model, by transformers' renaming."""
    if not wanted:
        return {}
    if not any(re.search(r"\.\d+\.", name) for name in wanted):  # no name in a layer: skip the keys of layers
        keys = [key for key in keys if not re.search(r"\.\d+\.", key)]
    found: dict[str, str] = {}
    for key, (name, converted) in parameter_of_key(model, mapping, keys).items():
        if name in wanted and not converted:
            found.setdefault(name, key)
    return found


def _read_plain(model, tensors: dict[str, Any], mapping: list, shards: Shards) -> tuple[set[str], list[str]]:
    """Read some tensors into the model; return names that were not among them, and keys that the model unexpectedly does not use."""
    folder, of_modules = shards.folder, {key.removesuffix("weight") for key in shards.quantized}
    biases = {key for key in tensors if key.endswith(".bias") and key.removesuffix("bias") in of_modules}
    biases -= {key for key in biases if tensors[key][...].any()}  # AutoGPTQ wrote zeros for modules without one
    info = convert_tensors(model, tensors, mapping, shards.dtype, folder)
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    for key in set(integer_keys(tensors)) - set(info.unexpected_keys):
        if key.rpartition(".")[2] not in buffers and not OUTDATED_BUFFERS.search(key):
            raise RunError(f"{folder}: {key} holds integers, a quantization format that is not supported; {INSTEAD}.")
    model._adjust_missing_and_unexpected_keys(info)
    unexpected = sorted(key for key in info.unexpected_keys - biases if not OUTDATED_BUFFERS.search(key))
    for key in unexpected:
        # layers after the model's last one are ignored, as in transformers: DeepSeek-V3 stores its multi-token prediction there
        if 0 <= _layer_of(key, model) < len(find_layers(model)[1]):
            raise RunError(
                f"{folder}: {key} is part of a decoder layer, and {type(model).__name__} has no place for it: the "
                f"checkpoint is another model's, or quantized in an unsupported format; {INSTEAD}."
            )
    return info.missing_keys, unexpected


def return_free_memory() -> None:
    """Give freed heap memory back to the system: glibc keeps the gaps that each layer leaves."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def fill_dummy(tensor: torch.Tensor, name: str, seed: int, std: float = WEIGHT_STD) -> torch.Tensor:
    """Fill `tensor` in place and return it: matrices N(0, std^2), norm weights 1 + N(0, 0.02^2), biases N(0, 0.02^2)."""
    generator = seeded(f"{seed}:{name}".encode(), tensor.device)
    tensor.normal_(0.0, std if tensor.dim() > 1 else WEIGHT_STD, generator=generator)
    if tensor.dim() == 1 and not name.endswith("bias"):
        tensor.add_(1.0)
    return tensor


def seeded(seed: bytes, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator seeded by a hash: a CPU's takes 32 bits of a seed."""
    number = int.from_bytes(hashlib.sha256(seed).digest()[:8], "little") >> 1
    return torch.Generator(device=device).manual_seed(number)


def embedding_std(text_config: Any) -> float:
    """Return the standard deviation of a mixture's embeddings with `--dummy-routing text`, 1 or more.

    A layer amplifies the component that all tokens share by g = WEIGHT_STD^2 sqrt(hidden x heads x head_dim) and adds it to a residual
    stream of deviation s, so its square grows by g^2 / s^2 a layer; s^2 = L g^2 bounds the growth over L layers by a factor of e. With 8
    for Qwen3-30B-A3B an LRU cache of a quarter of the experts hits 60 to 64% in all layers (results/cpu/expert_reuse.txt).
    """
    heads = text_config.num_attention_heads
    widths = [getattr(text_config, name, None) for name in ("v_head_dim", "head_dim")]
    head_dim = widths[0] or widths[1] or text_config.hidden_size // heads
    gain = WEIGHT_STD**2 * math.sqrt(text_config.hidden_size * heads * head_dim)
    return max(1.0, gain * math.sqrt(text_config.num_hidden_layers))


def draw_tokens(prompts: torch.Tensor, count: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Return the tokens int64 [B, count] to feed after `prompts` int64 [B, P]; a row depends on its prompt and `seed` alone."""
    rows = []
    for prompt in prompts.cpu():
        generator = seeded(seed.to_bytes(8, "little") + prompt.numpy().tobytes())
        repeats = (torch.rand(count, generator=generator) < REPEATED).tolist()
        fresh = torch.randint(vocab_size, (count,), generator=generator).tolist()
        back = torch.randint(RECENT, (count,), generator=generator).tolist()
        row = prompt.tolist()
        for repeat, new, distance in zip(repeats, fresh, back):
            row.append(row[-1 - min(distance, len(row) - 1)] if repeat else new)
        rows.append(row[len(prompt) :])
    return torch.tensor(rows, dtype=torch.int64)
