"""Reading a checkpoint one layer at a time, so that no more than a layer waits in host memory.

The renaming, fusing and casting of tensors is transformers' own (`convert_and_load_state_dict_in_model`): it is handed the
checkpoint's keys group by group instead of all at once, and so serves every family it knows, fused experts included.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from zero_inference.errors import RunError
from zero_inference.models.dummy import fill_dummy
from zero_inference.models.files import checkpoint_files, few
from zero_inference.models.skeleton import replace_everywhere, unique_parameter_names
from zero_inference.models.spec import ModelSpec

logger = logging.getLogger(__name__)
Adopt = Callable[[str, nn.Parameter], None]
Progress = Callable[[int], None]


def load_weights(model, spec: ModelSpec, seed: int, device: torch.device, adopt: Adopt,
                 progress: Progress = lambda done: None) -> None:
    """Give every parameter of an `empty_model` its values in its dtype, and hand each to `adopt(name, parameter)` once.

    Persistent buffers that the checkpoint holds are set in the model, in host memory. One that it lacks keeps the value that
    the model starts with, as in transformers, and a warning says so; dummy weights leave all buffers as they are.

    Args:
        device: where dummy weights are drawn; checkpoint weights come in host memory.
        adopt: takes the parameter over (moves, quantizes or partitions it in place); afterwards it may be empty.
        progress: called with the bytes of each parameter that was adopted.

    Raises:
        RunError: a file is damaged, a parameter is missing, or a tensor has another shape.
    """
    if spec.dummy:
        _draw_weights(model, seed, device, adopt, progress)
    else:
        _read_weights(model, spec, adopt, progress)
    model.tie_weights()


def _draw_weights(model, seed: int, device: torch.device, adopt: Adopt, progress: Progress) -> None:
    for name, parameter in list(model.named_parameters()):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        drawn = nn.Parameter(fill_dummy(values, name, seed), requires_grad=False)
        size = drawn.numel() * drawn.element_size()
        replace_everywhere(model, parameter, drawn)
        adopt(name, drawn)
        progress(size)


def _read_weights(model, spec: ModelSpec, adopt: Adopt, progress: Progress) -> None:
    folder = spec.checkpoint_folder()
    where = _keys(folder)
    _resolve_ties(model, where)
    convert = _converter(model, spec.dtype)
    adopted: set[int] = set()
    unset = set(model.state_dict())
    for group in _group_by_layer(where):
        _check_readable(group)
        with _opened(group) as tensors:  # and closed behind it: pages of a mapped file count as memory of the process
            unset &= convert(tensors, folder)
        del tensors
        for name, parameter in model.named_parameters():
            if parameter.device.type != "meta" and id(parameter) not in adopted:
                parameter.requires_grad_(False)
                size = parameter.numel() * parameter.element_size()
                adopt(name, parameter)
                adopted.add(id(parameter))
                progress(size)
        return_free_memory()
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise RunError(f"{folder}: the checkpoint has no tensor for {few(missing)}; it belongs to another model "
                       "or a shard is missing.")
    _warn_of_buffers(model, folder, unset)


def _warn_of_buffers(model, folder: Path, unset: set[str]) -> None:
    """Say which persistent buffers of `unset` stay as the model made them, unless its family expects that."""
    ignored = "|".join(f"({pattern})" for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or [])
    names = [name for name, _ in model.named_buffers() if name in unset and not (ignored and re.search(ignored, name))]
    if names and not (dist.is_initialized() and dist.get_rank()):
        logger.warning("warning: %s: the checkpoint has no tensor for %s; the model's initial values stay.", folder, few(names))


def _resolve_ties(model, where: dict[str, Path]) -> None:
    """Where a checkpoint holds both sides of a tie: one of two equal tensors is enough, two different ones are not tied."""
    for names in unique_parameter_names(model).values():
        # in the order of the model, whose first name is the one that the others are tied to
        present = [key for name in names for key in where if key == name or name.endswith("." + key)]
        if len(names) < 2 or len(present) < 2:
            continue
        with _opened({key: where[key] for key in present}) as tensors:
            first, *others = (tensors[key][:] for key in present)
            equal = all(torch.equal(first, other) for other in others)
        if equal:
            for key in present[1:]:
                del where[key]
            continue
        model.config.get_text_config(decoder=True).tie_word_embeddings = False
        model.config.tie_word_embeddings = False
        for name in names[1:]:
            module, _, leaf = name.rpartition(".")
            owner = model.get_submodule(module)
            setattr(owner, leaf, nn.Parameter(torch.empty_like(getattr(owner, leaf)), requires_grad=False))


def _converter(model, dtype: torch.dtype) -> Callable[[dict[str, Any], Path], set[str]]:
    """What reads a group of tensors into the model, and returns the names of the model's tensors that were not in it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    mapping = get_model_conversion_mapping(model)

    def convert(tensors: dict[str, Any], folder: Path) -> set[str]:
        # no dtype plan: a tensor whose place in the skeleton has another dtype than `dtype` is cast to that one
        load_config = LoadStateDictConfig(pretrained_model_name_or_path=str(folder), dtype=dtype, weight_mapping=mapping)
        try:
            info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=load_config)
        except Exception as error:
            raise RunError(f"{folder}: the checkpoint cannot be read ({error}); fetch it again.") from error
        if info.mismatched_keys:
            name, found, expected = sorted(info.mismatched_keys)[0]
            raise RunError(f"{folder}: {name} has shape {list(found)} in the checkpoint and {list(expected)} in config.json.")
        if info.conversion_errors:
            name, reason = next(iter(info.conversion_errors.items()))
            raise RunError(f"{folder}: {name} cannot be converted ({str(reason).strip().splitlines()[-1]}).")
        return info.missing_keys

    return convert


def _keys(folder: Path) -> dict[str, Path]:
    """Key of each tensor of the checkpoint -> its file."""
    where: dict[str, Path] = {}
    for path in checkpoint_files(folder):
        with ExitStack() as files:
            where.update((key, path) for key in _open(path, files))
    return where


@contextmanager
def _opened(where: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Key -> tensor that is read when it is used."""
    with ExitStack() as files:
        opened = {path: _open(path, files) for path in dict.fromkeys(where.values())}
        yield {key: opened[path][key]() for key, path in where.items()}


def _open(path: Path, files: ExitStack) -> dict[str, Callable[[], Any]]:
    """Key -> what gives its tensor, as long as `files` is open."""
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            return {key: partial(opened.get_slice, key) for key in opened.keys()}
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {key: partial(state.get, key) for key in state}
    except Exception as error:
        raise RunError(f"{path}: damaged or not a weight file ({str(error).strip().splitlines()[0]}); "
                       "fetch it again.") from error


def _group_by_layer(where: dict[str, Path]) -> list[dict[str, Path]]:
    """Split by the first number in the key, which is the layer's; what has none comes first."""
    groups: dict[int, dict] = {}
    for key, path in where.items():
        number = re.search(r"(?:^|\.)(\d+)\.", key)
        groups.setdefault(int(number.group(1)) if number else -1, {})[key] = path
    return [groups[number] for number in sorted(groups)]


def _check_readable(group: dict[str, Path]) -> None:
    """A file cut short is an error here rather than a bus error in a memory-mapped read."""
    for path in set(group.values()):
        if path.suffix == ".safetensors":
            with open(path, "rb") as file:
                header = int.from_bytes(file.read(8), "little")
                last = max((entry["data_offsets"][1] for key, entry in json.loads(file.read(header)).items()
                            if key != "__metadata__"), default=0)
            if path.stat().st_size < 8 + header + last:
                raise RunError(f"{path}: the file is cut short; fetch it again.")


def return_free_memory() -> None:
    """Give freed heap memory back to the system (glibc): it keeps what gaps of finished work left, layer after layer."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
