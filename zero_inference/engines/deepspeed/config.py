"""The DeepSpeed configuration of a run: made from the model at hand, with the user's file merged over it.

Every size below counts elements, as DeepSpeed does. What drives them is the decoder layer: it is fetched as a whole
(a leaf module), and prefetching has to be at least a layer deep to keep the link busy. The often copied `2 h^2` is less
than one MLP weight, which then is never prefetched.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError

LAYERS_AHEAD = 3  # each costs a layer of device memory
LIVE_BESIDE = 2  # layers that are on the device beside those ahead: the one that computes, and the one that it releases
FREE_SHARE = 0.5  # of the free device memory, for layers ahead


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a model as stored, in elements, before they are split over ranks.

    Attributes:
        layer: the largest decoder layer.
        layer_bytes: the same in bytes.
        largest_in_layer: the largest parameter of a decoder layer that can be swapped (see `swappable`).
        parameters_per_layer: how many matrices of a layer can be swapped.
        largest_outside: the largest parameter that is not in a decoder layer (embedding, head).
        largest_vector: the largest one-dimensional parameter (biases, norms): these stay on the device.
    """

    layer: int
    layer_bytes: int
    largest_in_layer: int
    parameters_per_layer: int
    largest_outside: int
    largest_vector: int


def swappable(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ZeRO-3 can keep `parameter` of a layer on NVMe: its buffers have one dtype, the model's."""
    return parameter.dtype == dtype


def layer_sizes(model, layers: torch.nn.ModuleList, packed_numel, dtype: torch.dtype) -> LayerSizes:
    """Measure a (meta) model of `dtype`; `packed_numel(name, parameter)` is how many elements a parameter has as stored."""
    numel = {id(p): packed_numel(name, p) for name, p in model.named_parameters()}
    own = [list(layer.parameters()) for layer in layers]
    inside = {id(p) for parameters in own for p in parameters}
    swapped = [[p for p in parameters if swappable(p, dtype)] for parameters in own]
    return LayerSizes(
        layer=max(sum(numel[id(p)] for p in parameters) for parameters in own),
        layer_bytes=max(sum(numel[id(p)] * p.element_size() for p in parameters) for parameters in own),
        largest_in_layer=max(numel[id(p)] for parameters in swapped for p in parameters),
        parameters_per_layer=max(sum(p.dim() > 1 for p in parameters) for parameters in swapped),
        largest_outside=max((n for key, n in numel.items() if key not in inside), default=0),
        largest_vector=max((p.numel() for p in model.parameters() if p.dim() == 1), default=0),
    )


def layers_ahead(sizes: LayerSizes, free_device_bytes: int | None) -> int:
    """How many layers to prefetch: `LAYERS_AHEAD`, or what `FREE_SHARE` of the free device memory holds, but at least one."""
    if free_device_bytes is None:
        return LAYERS_AHEAD
    fit = int(free_device_bytes * FREE_SHARE / sizes.layer_bytes) - 1
    return max(1, min(LAYERS_AHEAD, fit))


def build_ds_config(
    config: RunConfig, dtype: torch.dtype, sizes: LayerSizes, world_size: int, pin_memory: bool, ahead: int
) -> dict:
    """The generated configuration, with `--ds-config` merged over it.

    Args:
        ahead: how many layers to prefetch.

    Raises:
        UsageError: the file is not a JSON object, or turns off what this tool is for.
    """
    generated: dict = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": dtype == torch.float16},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": _zero_optimization(config, sizes, world_size, pin_memory, ahead),
    }
    if config.disk_offload:
        generated["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": config.use_gds,
        }
    if config.quantized:
        generated["weight_quantization"] = {"quantized_initialization": quantization_settings(config)}
    merged = _merge(generated, read_ds_config(config.ds_config))
    _refuse_other_run(config, dtype, generated, merged)
    return merged


def quantization_settings(config: RunConfig) -> dict:
    """DeepSpeed's `quantized_initialization` block."""
    return {
        "num_bits": config.quant_bits,
        "group_size": config.group_size,
        "group_dim": 1,
        "symmetric": False,
    }


def _zero_optimization(config: RunConfig, sizes: LayerSizes, world_size: int, pin_memory: bool, ahead: int) -> dict:
    zero: dict = {
        "stage": 3,
        "stage3_prefetch_bucket_size": ahead * sizes.layer,
        "stage3_max_live_parameters": (ahead + LIVE_BESIDE) * sizes.layer + sizes.largest_outside,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": sizes.largest_vector,
    }
    if config.cpu_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    elif config.disk_offload:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(config.offload_path),
            "pin_memory": pin_memory,
            # one parameter a buffer, all of them page-locked; a partition is padded to the number of ranks
            "buffer_size": -(-sizes.largest_in_layer // world_size) + 1,
            "buffer_count": (ahead + LIVE_BESIDE) * sizes.parameters_per_layer,
        }
    return zero


def _refuse_other_run(config: RunConfig, dtype: torch.dtype, generated: dict, merged: dict) -> None:
    """Raises UsageError where the user's file changes the dtype or the stage, or holds words where our plan computes with numbers."""
    for block in ("fp16", "bf16"):
        if merged[block].get("enabled") is not generated[block]["enabled"]:
            raise UsageError(
                f"--ds-config {config.ds_config}: {block}.enabled is {merged[block].get('enabled')!r}, but the run "
                f"uses {str(dtype).removeprefix('torch.')}; remove it and use --dtype."
            )
    both = generated["zero_optimization"], merged["zero_optimization"]
    offloads = [part.get("offload_param", {}) for part in both]
    for made, found in (both, offloads, (generated.get("aio", {}), merged.get("aio", {}))):
        for key, value in made.items():  # DeepSpeed reads "5" as 5
            if type(value) is int and type(found[key]) not in (int, float):
                raise UsageError(f"--ds-config {config.ds_config}: {key} is {found[key]!r}; a number is needed.")
    if merged["zero_optimization"].get("stage") != 3:
        raise UsageError(
            f"--ds-config {config.ds_config}: zero_optimization.stage is "
            f"{merged['zero_optimization'].get('stage')}; weights are only offloaded at stage 3."
        )


def read_ds_config(path: str | None) -> dict:
    """The user's file, or {}.

    Raises:
        UsageError: not there, not JSON, or not an object.
    """
    if path is None:
        return {}
    if os.path.exists(path) and not os.path.isfile(path):  # opening a FIFO waits for ever
        raise UsageError(f"--ds-config {path}: not a regular file; name one that holds a JSON object.")
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--ds-config {path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--ds-config {path}: not JSON ({error}).") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--ds-config {path}: holds a {type(loaded).__name__}; a JSON object is needed.")
    for block in ("zero_optimization", "zero_optimization.offload_param", "aio", "fp16", "bf16", "weight_quantization"):
        part = loaded
        for key in block.split("."):
            part = part.get(key, {})
            if not isinstance(part, dict):
                raise UsageError(f"--ds-config {path}: {block} holds a {type(part).__name__}; a JSON object is needed.")
    for block in ("optimizer", "scheduler"):  # DeepSpeed would compile and build one
        if block in loaded:
            raise UsageError(f"--ds-config {path}: {block} is for training; remove it.")
    if "weight_quantization" in loaded:
        raise UsageError(
            f"--ds-config {path}: weight_quantization is set by --quant-bits and --quant-group-size; remove it."
        )
    for key, option in (
        ("device", "--cpu-offload or --disk-offload"),
        ("nvme_path", "--offload-dir"),
    ):  # it empties nvme_path
        if key in loaded.get("zero_optimization", {}).get("offload_param", {}):
            raise UsageError(f"--ds-config {path}: offload_param.{key} is set by {option}; remove it.")
    return loaded


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = (
            _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
        )
    return merged
