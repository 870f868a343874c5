"""Reading a checkpoint one layer at a time, so that no more than a layer waits in host memory.

The renaming, fusing and casting of tensors is transformers' own (`convert_and_load_state_dict_in_model`): it is handed the
checkpoint's keys group by group instead of all at once, and so serves every family it knows, fused experts included.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from zero_inference.errors import RunError
from zero_inference.models.dummy import fill_dummy
from zero_inference.models.skeleton import unique_parameter_names
from zero_inference.models.spec import ModelSpec

Adopt = Callable[[str, nn.Parameter], None]
Progress = Callable[[int], None]


def load_weights(model, spec: ModelSpec, seed: int, device: torch.device, adopt: Adopt,
                 progress: Progress = lambda done: None) -> None:
    """Give every parameter of an `empty_model` its values, and hand each to `adopt(name, parameter)` once.

    Args:
        device: where dummy weights are drawn; checkpoint weights come in host memory.
        adopt: takes the parameter over (moves, quantizes or partitions it in place); afterwards it may be empty.
        progress: called with the bytes of each parameter that was adopted.

    Raises:
        RunError: a file is damaged, a parameter is missing or has another shape.
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
        _replace_everywhere(model, parameter, drawn)
        adopt(name, drawn)
        progress(size)


def _read_weights(model, spec: ModelSpec, adopt: Adopt, progress: Progress) -> None:
    folder = spec.checkpoint_folder()
    with ExitStack() as files:
        tensors = _open_lazily(folder, files)
        _resolve_ties(model, tensors)
        groups = _group_by_layer(tensors)
        convert = _converter(model, spec.dtype)
        adopted: set[int] = set()
        for group in groups:
            _check_readable(group)
            convert({key: tensor for key, (tensor, _) in group.items()}, folder)
            for name, parameter in model.named_parameters():
                if parameter.device.type != "meta" and id(parameter) not in adopted:
                    parameter.requires_grad_(False)
                    size = parameter.numel() * parameter.element_size()
                    adopt(name, parameter)
                    adopted.add(id(parameter))
                    progress(size)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise RunError(f"{folder}: the checkpoint has no tensor for {_few(missing)}; it belongs to another model "
                       "or a shard is missing.")


def _resolve_ties(model, tensors: dict[str, tuple[Any, Path]]) -> None:
    """Where a checkpoint holds both sides of a tie: one of two equal tensors is enough, two different ones are not tied."""
    for names in unique_parameter_names(model).values():
        # in the order of the model, whose first name is the one that the others are tied to
        present = [key for name in names for key in tensors if key == name or name.endswith("." + key)]
        if len(names) < 2 or len(present) < 2:
            continue
        first, *others = (tensors[key][0][:] for key in present)
        if all(torch.equal(first, other) for other in others):
            for key in present[1:]:
                del tensors[key]
            continue
        model.config.get_text_config(decoder=True).tie_word_embeddings = False
        model.config.tie_word_embeddings = False
        for name in names[1:]:
            module, _, leaf = name.rpartition(".")
            owner = model.get_submodule(module)
            setattr(owner, leaf, nn.Parameter(torch.empty_like(getattr(owner, leaf)), requires_grad=False))


def _converter(model, dtype: torch.dtype):
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    mapping = get_model_conversion_mapping(model)

    def convert(tensors: dict[str, Any], folder: Path) -> None:
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

    return convert


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder: safetensors where there are any, else PyTorch's.

    Raises:
        RunError: there are none, or the index names one that is not there.
    """
    for single, index in (("model.safetensors", "model.safetensors.index.json"),
                          ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        if (folder / index).is_file():
            names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise RunError(f"{folder}: {index} names {_few(missing)}, which is not there; fetch the checkpoint again.")
            return [folder / name for name in names]
        if (folder / single).is_file():
            return [folder / single]
    raise RunError(f"{folder}: neither model.safetensors nor pytorch_model.bin (or their index) is there.")


def _open_lazily(folder: Path, files: ExitStack) -> dict[str, tuple[Any, Path]]:
    """Key -> (tensor that is read when it is used, its file)."""
    from safetensors import safe_open

    tensors: dict[str, tuple[Any, Path]] = {}
    for path in checkpoint_files(folder):
        try:
            if path.suffix == ".safetensors":
                opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
                tensors.update((key, (opened.get_slice(key), path)) for key in opened.keys())
            else:
                state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                tensors.update((key, (value, path)) for key, value in state.items())
        except Exception as error:
            raise RunError(f"{path}: damaged or not a weight file ({str(error).strip().splitlines()[0]}); "
                           "fetch it again.") from error
    return tensors


def _group_by_layer(tensors: dict[str, tuple[Any, Path]]) -> list[dict[str, tuple[Any, Path]]]:
    """Split by the first number in the key, which is the layer's; what has none comes first."""
    groups: dict[int, dict] = {}
    for key, value in tensors.items():
        number = re.search(r"(?:^|\.)(\d+)\.", key)
        groups.setdefault(int(number.group(1)) if number else -1, {})[key] = value
    return [groups[number] for number in sorted(groups)]


def _check_readable(group: dict[str, tuple[Any, Path]]) -> None:
    """A file cut short is an error here rather than a bus error in a memory-mapped read."""
    for path in {path for _, path in group.values()}:
        if path.suffix == ".safetensors":
            with open(path, "rb") as file:
                header = int.from_bytes(file.read(8), "little")
                last = max((entry["data_offsets"][1] for key, entry in json.loads(file.read(header)).items()
                            if key != "__metadata__"), default=0)
            if path.stat().st_size < 8 + header + last:
                raise RunError(f"{path}: the file is cut short; fetch it again.")


def _replace_everywhere(model, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is old:
                module._parameters[key] = new


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
