"""The DeepSpeed configuration of a run: generated from the model, with the user's `--ds-config` merged over it.

Sizes count elements, as in DeepSpeed. A decoder layer is fetched as a whole (a leaf module), so prefetching must be at least a layer deep
to keep the link busy. The common bucket of `2 h^2` elements is less than one MLP weight, which then is never prefetched.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.deepspeed.quantization import QuantizationPlan, stored_numel
from zero_inference.errors import UsageError
from zero_inference.models.layers import decoder_layers

PREFETCHED_LAYERS = 3  # each takes a layer of device memory
OTHER_LIVE_LAYERS = 2  # on the device beside prefetched ones: the layer that computes and the one being released
PREFETCH_SHARE = 0.5  # of free device memory


@dataclass(frozen=True)
class LayerSizes:
    """Elements of a model as stored, before sharding.

    Attributes:
        layer, layer_bytes: of the largest decoder layer.
    """

    layer: int
    layer_bytes: int
    largest_in_layer: int  # of the largest parameter of a layer that can be swapped (see `swappable`)
    parameters_per_layer: int  # number of a layer's matrices that can be swapped
    largest_outside: int  # of the largest parameter outside layers (embedding, head)
    largest_vector: int  # of the largest 1-D parameter (biases, norms); these stay on the device


def swappable(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ZeRO-3 can store `parameter` on NVMe: all buffers have the model's dtype."""
    return parameter.dtype == dtype


def measure_layers(model: Any, quantization: QuantizationPlan | None, dtype: torch.dtype) -> LayerSizes:
    """Measure a (meta) model of `dtype`."""
    numel = {id(p): stored_numel(quantization, name, p) for name, p in model.named_parameters()}
    in_layers = [list(layer.parameters()) for layer in decoder_layers(model)[1]]
    layer_ids = {id(p) for parameters in in_layers for p in parameters}
    swapped = [[p for p in parameters if swappable(p, dtype)] for parameters in in_layers]
    return LayerSizes(
        layer=max(sum(numel[id(p)] for p in parameters) for parameters in in_layers),
        layer_bytes=max(sum(numel[id(p)] * p.element_size() for p in parameters) for parameters in in_layers),
        largest_in_layer=max(numel[id(p)] for parameters in swapped for p in parameters),
        parameters_per_layer=max(sum(p.dim() > 1 for p in parameters) for parameters in swapped),
        largest_outside=max((n for key, n in numel.items() if key not in layer_ids), default=0),
        largest_vector=max((p.numel() for p in model.parameters() if p.dim() == 1), default=0),
    )


def build_ds_config(
    config: RunConfig,
    dtype: torch.dtype,
    sizes: LayerSizes,
    world_size: int,
    pin_memory: bool,
    free_device_bytes: int | None,
) -> dict[str, Any]:
    """Return the generated configuration with `--ds-config` merged over it.

    Args:
        free_device_bytes: limits how many layers are prefetched; None for no limit.

    Raises:
        UsageError: the file is not a JSON object, or sets what other options set or offloading needs, or DeepSpeed rejects it.
    """
    prefetched = PREFETCHED_LAYERS
    if free_device_bytes is not None:
        fit = int(free_device_bytes * PREFETCH_SHARE / sizes.layer_bytes) - 1
        prefetched = max(1, min(PREFETCHED_LAYERS, fit))
    live = prefetched + OTHER_LIVE_LAYERS
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": prefetched * sizes.layer,
        "stage3_max_live_parameters": live * sizes.layer + sizes.largest_outside,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": sizes.largest_vector,
    }
    generated: dict[str, Any] = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": dtype == torch.float16},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }
    if config.cpu_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    elif config.disk_offload:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(config.offload_path),
            "pin_memory": pin_memory,
            # one parameter a buffer, all pinned; a partition is padded to the number of ranks
            "buffer_size": -(-sizes.largest_in_layer // world_size) + 1,
            "buffer_count": live * sizes.parameters_per_layer,
        }
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
    _refuse_conflicts(config, dtype, generated, merged)
    return merged


def quantization_settings(config: RunConfig) -> dict:
    """Return DeepSpeed's `quantized_initialization` block."""
    return {"num_bits": config.quant_bits, "group_size": config.group_size, "group_dim": 1, "symmetric": False}


def _refuse_conflicts(config: RunConfig, dtype: torch.dtype, generated: dict, merged: dict) -> None:
    """Raise UsageError if the user's file changes dtype or stage, has no number where the plan needs one, or if DeepSpeed rejects it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    source = f"--ds-config {config.ds_config}:"
    for block in ("fp16", "bf16"):
        if (found := merged[block].get("enabled")) is not generated[block]["enabled"]:
            used = str(dtype).removeprefix("torch.")
            raise UsageError(
                f"{source} {block}.enabled is {found!r}, but the run uses {used}; remove it and use --dtype."
            )
    ours, zero = generated["zero_optimization"], merged["zero_optimization"]
    blocks = ((ours, zero), (ours.get("offload_param", {}), zero.get("offload_param", {})))
    for planned, given in (*blocks, (generated.get("aio", {}), merged.get("aio", {}))):
        for key, value in planned.items():  # DeepSpeed would read "5" as 5
            if type(value) is int and type(given[key]) not in (int, float):
                raise UsageError(f"{source} {key} is {given[key]!r}; a number is needed.")
    if zero["stage"] != 3:
        raise UsageError(f"{source} zero_optimization.stage is {zero['stage']}; weights are only offloaded at stage 3.")
    try:
        DeepSpeedConfig(dict(merged))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        source = source if config.ds_config else "the DeepSpeed configuration made from these options:"
        raise UsageError(f"{source} DeepSpeed rejects it: {' '.join(lines[:3])[:300]}") from error


def read_ds_config(path: str | None) -> dict:
    """Return the user's file, or {}. Raise UsageError if it is missing, not a JSON object, or sets what other options set."""
    if path is None:
        return {}
    source = f"--ds-config {path}:"
    if os.path.exists(path) and not os.path.isfile(path):  # opening a FIFO blocks
        raise UsageError(f"{source} not a regular file; name one that holds a JSON object.")
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{source} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} not JSON ({error}).") from error
    for block in ("", "zero_optimization", "zero_optimization.offload_param", "aio", "fp16", "bf16"):
        part = loaded
        for key in filter(None, block.split(".")):
            part = part.get(key, {})
        if not isinstance(part, dict):
            raise UsageError(f"{source} {block or 'it'} holds a {type(part).__name__}; a JSON object is needed.")
    of_offload = loaded.get("zero_optimization", {}).get("offload_param", {})
    for block, key, why in (
        (loaded, "optimizer", "is for training"),  # DeepSpeed would build one
        (loaded, "scheduler", "is for training"),
        (loaded, "weight_quantization", "is set by --quant-bits and --quant-group-size"),
        (of_offload, "device", "of offload_param is set by --cpu-offload or --disk-offload"),
        (of_offload, "nvme_path", "of offload_param is set by --offload-dir"),
    ):
        if key in block:
            raise UsageError(f"{source} {key} {why}; remove it.")
    return loaded


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_dicts else value
    return merged
