"""The plan of ZeRO-3: its configuration, where partitions are stored, and what is gathered on the device in a pass.

All follows from shapes and options; no weights are needed. Sizes count elements, as in DeepSpeed, unless they are called bytes.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_inference.engines.base import Footprint, Job
from zero_inference.engines.deepspeed.quantization import choose_quantized, quantization_settings
from zero_inference.errors import UsageError
from zero_inference.models.layers import decoder_layers

PREFETCHED_LAYERS = 3  # each takes a layer of device memory
OTHER_LIVE_LAYERS = 2  # on the device beside prefetched ones: the layer that computes and the one being released
PREFETCH_SHARE = 0.5  # of free device memory
SET_BY_OPTIONS = {  # keys that `--ds-config` may not have
    "optimizer": "is for training",  # DeepSpeed would build one
    "scheduler": "is for training",
    "weight_quantization": "is set by --quant-bits and --quant-group-size",
    "zero_optimization.offload_param.device": "of offload_param is set by --cpu-offload or --disk-offload",
    "zero_optimization.offload_param.nvme_path": "of offload_param is set by --offload-dir",
}


class StoredWeight(NamedTuple):
    """A parameter as ZeRO-3 stores it."""

    name: str
    parameter: nn.Parameter
    numel: int  # elements as stored, over all ranks: packed codes, scales and minima if it is quantized
    quantized: bool
    layer: int | None  # index of its decoder layer, or None
    uses: int  # modules that share it, such as embedding and head

    @property
    def nbytes(self) -> int:
        return self.numel * self.parameter.element_size()


def stored_weights(model: nn.Module, settings: dict | None, dtype: torch.dtype) -> list[StoredWeight]:
    """Return the parameters of a (meta) model in the order in which they are loaded; `settings` of quantization are None for 16 bits."""
    quantized = choose_quantized(model, settings, dtype) if settings else set()
    layer_of = {id(p): index for index, layer in enumerate(decoder_layers(model)[1]) for p in layer.parameters()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = []
    for name, p in model.named_parameters():
        numel = p.numel()
        if settings and name in quantized:
            numel = numel * settings["num_bits"] // 8 // p.element_size() + 2 * (numel // settings["group_size"])
        found.append(StoredWeight(name, p, numel, name in quantized, layer_of.get(id(p)), uses[id(p)]))
    return found


def build_ds_config(job: Job, weights: list[StoredWeight]) -> dict[str, Any]:
    """Return the generated configuration with `--ds-config` merged over it.

    A decoder layer is fetched as a whole (a leaf module), so prefetching must be at least a layer deep to keep the link busy. The common
    bucket of `2 h^2` elements is less than one MLP weight, which then is never prefetched.

    Raises:
        UsageError: the file is not a JSON object, or sets what other options set or offloading needs, or DeepSpeed rejects it.
    """
    config, dtype, ranks = job.config, job.spec.dtype, job.ranks.world_size
    layers: dict[int, list[StoredWeight]] = {}
    for weight in weights:
        if weight.layer is not None:
            layers.setdefault(weight.layer, []).append(weight)
    layer_numel = max(sum(weight.numel for weight in layer) for layer in layers.values())
    prefetched = PREFETCHED_LAYERS
    if job.free_device_bytes is not None:
        layer_bytes = max(sum(weight.nbytes for weight in layer) for layer in layers.values())
        fit = int(job.free_device_bytes * PREFETCH_SHARE / layer_bytes) - 1  # the other is the layer that computes
        prefetched = max(1, min(PREFETCHED_LAYERS, fit))
    live = prefetched + OTHER_LIVE_LAYERS
    outside_layers = (weight.numel for weight in weights if weight.layer is None)
    vectors = (weight.numel for weight in weights if weight.parameter.dim() == 1)  # biases, norms: stay on the device
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": prefetched * layer_numel,
        "stage3_max_live_parameters": live * layer_numel + max(outside_layers, default=0),
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": max(vectors, default=0),
    }
    generated: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": dtype == torch.float16},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }
    if config.cpu_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": job.pin_weights}
    elif config.disk_offload:
        swapped = [[weight for weight in layer if weight.parameter.dtype == dtype] for layer in layers.values()]
        largest = max(weight.numel for layer in swapped for weight in layer)
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(config.offload_path),
            "pin_memory": job.pin_weights,
            # one parameter a buffer, all pinned; a partition is padded to the number of ranks
            "buffer_size": -(-largest // ranks) + 1,
            "buffer_count": live * max(sum(weight.parameter.dim() > 1 for weight in layer) for layer in swapped),
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
    _refuse_conflicts(f"--ds-config {config.ds_config}:" if config.ds_config else None, dtype, generated, merged)
    return merged


def _refuse_conflicts(source: str | None, dtype: torch.dtype, generated: dict, merged: dict) -> None:
    """Raise UsageError if the user's file changes dtype or stage, has no number where the plan needs one, or if DeepSpeed rejects it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for block in ("fp16", "bf16"):
        if (found := merged[block].get("enabled")) is not generated[block]["enabled"]:
            used = str(dtype).removeprefix("torch.")
            raise UsageError(
                f"{source} {block}.enabled is {found!r}, but the run uses {used}; remove it and use --dtype."
            )
    for block in ("zero_optimization", "zero_optimization.offload_param", "aio"):
        given = _block(merged, block)
        for key, value in _block(generated, block).items():  # DeepSpeed would read "5" as 5
            if type(value) is int and type(given[key]) not in (int, float):
                raise UsageError(f"{source} {key} is {given[key]!r}; a number is needed.")
    if (stage := merged["zero_optimization"]["stage"]) != 3:
        raise UsageError(f"{source} zero_optimization.stage is {stage}; weights are only offloaded at stage 3.")
    try:
        DeepSpeedConfig(dict(merged))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        source = source or "the DeepSpeed configuration made from these options:"
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
    for name in ("", "zero_optimization", "zero_optimization.offload_param", "aio", "fp16", "bf16"):
        if not isinstance(block := _block(loaded, name), dict):
            raise UsageError(f"{source} {name or 'it'} holds a {type(block).__name__}; a JSON object is needed.")
    for name, why in SET_BY_OPTIONS.items():
        block, _, key = name.rpartition(".")
        if key in _block(loaded, block):
            raise UsageError(f"{source} {key} {why}; remove it.")
    return loaded


def _block(config: Any, name: str) -> Any:
    """Return the block with a dotted `name`; {} where `config` has none, and `config` itself for an empty name."""
    for key in filter(None, name.split(".")):
        config = config.get(key, {})
    return config


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_dicts else value
    return merged


def offload_device(ds_config: dict[str, Any]) -> str:
    """Return the device that a resolved configuration offloads parameters to: "none", "cpu" or "nvme"."""
    return _block(ds_config, "zero_optimization.offload_param").get("device", "none")


def min_disk_bytes(ds_config: dict[str, Any]) -> int:
    """Return the bytes of the smallest partition that ZeRO-3 writes to NVMe."""
    from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES

    return max(MIN_AIO_BYTES, ds_config["aio"]["block_size"])


def locate(weight: StoredWeight, ds_config: dict[str, Any], dtype: torch.dtype, ranks: int) -> str:
    """Return where ZeRO-3 stores the partitions of a weight between uses: "device", "host" or "disk".

    NVMe buffers hold one parameter each, of the model's `dtype`, and are all as large as the largest. Parameters outside layers, such as
    an embedding, would multiply their size, so they stay in host memory.
    """
    offload = offload_device(ds_config)
    if offload == "nvme":
        if weight.parameter.dtype != dtype:
            return "host"
        if -(-weight.numel // ranks) * weight.parameter.element_size() >= min_disk_bytes(ds_config):
            return "host" if weight.layer is None else "disk"
    persistent = weight.numel <= ds_config["zero_optimization"]["stage3_param_persistence_threshold"]
    return "device" if persistent or offload == "none" else "host"


class ModulePeak(NamedTuple):
    """Device memory while one module of a pass computes: gathered and prefetched weights, and one that is dequantized."""

    layers: int  # decoder layers that have begun
    nbytes: int


@dataclass(frozen=True)
class WeightMemory:
    stored_bytes: int  # all ranks' weights
    fetched_bytes: dict[str, int]  # by location, counted once for each module that uses a weight
    fetched_parameters: int  # that a step gathers, once for each use: offloaded ones, or without offload sharded ones
    peaks: tuple[ModulePeak, ...]  # for each module of a pass, in order
    footprint: Footprint


def measure_memory(job: Job, weights: list[StoredWeight], ds_config: dict[str, Any], pinned: bool) -> WeightMemory:
    """Return the memory that `weights` take with the resolved `ds_config`."""
    zero, ranks = ds_config["zero_optimization"], job.ranks.world_size
    offloads = offload_device(ds_config) != "none"
    locations = {weight.name: locate(weight, ds_config, job.spec.dtype, ranks) for weight in weights}
    stored = dict.fromkeys(("device", "host", "disk"), 0)  # bytes by location
    fetched, fetched_parameters = dict(stored), 0
    for weight in weights:
        location = locations[weight.name]
        stored[location] += weight.nbytes
        fetched[location] += weight.nbytes * weight.uses
        sharded = location != "device" if offloads else weight.numel > zero["stage3_param_persistence_threshold"]
        fetched_parameters += sharded * weight.uses
    peaks = module_peaks(job, weights, locations, zero, offloads)

    gathered = max(peak.nbytes for peak in peaks)
    share = {location: nbytes // ranks for location, nbytes in stored.items()}
    persistent = share["device"] if offloads else 0  # an upper bound: DeepSpeed may keep fewer
    buffers = 0
    if job.config.disk_offload:
        offload = zero["offload_param"]
        buffers = offload["buffer_size"] * offload["buffer_count"] * job.spec.dtype.itemsize
    footprint = Footprint(
        device=share["device"] + gathered,
        gathered=gathered + persistent,
        host=share["host"] + buffers,
        pinned=buffers + (share["host"] if pinned else 0),
        disk=share["disk"],
        loading=0 if job.on_gpu else _loading_bytes(job, weights, locations, buffers),
    )
    return WeightMemory(sum(stored.values()), fetched, fetched_parameters, peaks, footprint)


def _loading_bytes(job: Job, weights: list[StoredWeight], locations: dict[str, str], buffers: int) -> int:
    """Return the peak host memory of a rank without a GPU while `weights` are partitioned one by one.

    It holds `buffers`, the partitions so far, one parameter as read and as stored, and of a checkpoint the rest of its layer.
    """
    unpartitioned: Counter[int | None] = Counter()
    if not job.config.dummy:
        for weight in weights:
            unpartitioned[weight.layer] += weight.parameter.nbytes
    partitioned = peak = buffers
    for weight in weights:
        whole = weight.parameter.nbytes
        share = -(-weight.numel // job.ranks.world_size) * weight.parameter.element_size()
        if locations[weight.name] == "disk":
            share = 0  # it is in one of the buffers
        as_stored = share
        if weight.quantized:
            # codes, plus two more tensors while nibbles of 4 bits are swapped, then plus all in one tensor
            codes = weight.parameter.numel() * job.config.quant_bits // 8
            as_stored = codes + max(share, 2 * codes if job.config.quant_bits == 4 else 0)
        unpartitioned[weight.layer] -= whole if unpartitioned[weight.layer] else 0
        peak = max(peak, partitioned + unpartitioned[weight.layer] + whole + as_stored)
        partitioned += share
    return peak


def module_peaks(
    job: Job, weights: list[StoredWeight], locations: dict[str, str], zero: dict[str, Any], offloads: bool
) -> tuple[ModulePeak, ...]:
    """Return the peaks of a pass over the modules that DeepSpeed's hooks gather parameters for, in the order in which they were
    registered, as models call them.

    A single rank without a GPU gathers nothing, because ZeRO-3 points a parameter at its partition or at the buffer that it was read into;
    nor does a single rank whose weights stay on its GPU.
    """
    model, ranks = job.empty_model.model, job.ranks.world_size
    persistent_numel = zero["stage3_param_persistence_threshold"]
    by_id = {id(weight.parameter): weight for weight in weights}
    layers = list(decoder_layers(model)[1])
    inside_layers = {part for layer in layers for part in layer.modules()} - set(layers)
    # DeepSpeed's float16 kernel writes only the result; its Python code first unpacks 4 bits to bytes (on a CPU only of a few rows)
    unpacks = job.config.quant_bits == 4 and job.on_gpu and job.spec.dtype != torch.float16
    is_layer, fetched, dequantized_bytes = [], [], []
    for module in model.modules():
        if module in inside_layers:
            continue
        is_layer.append(module in layers)
        own = [by_id[id(p)] for p in module.parameters(recurse=is_layer[-1])]
        fetched.append([weight for weight in own if weight.numel > persistent_numel])
        # an embedding dequantizes only the rows that it reads
        linears = [each.weight for each in (module.modules() if is_layer[-1] else (module,)) if type(each) is nn.Linear]
        sizes = [p.numel() * (p.element_size() + int(unpacks)) for p in linears if by_id[id(p)].quantized]
        dequantized_bytes.append(max(sizes, default=0))
    if not job.on_gpu:  # a CPU keeps one buffer for dequantized weights, see `patch_functionals`
        dequantized_bytes = [max(dequantized_bytes)] * len(fetched)
    gathered_bytes = simulate_fetches(fetched, zero)
    if ranks == 1 and not (offloads and job.on_gpu):
        gathered_bytes = [0] * len(fetched)
    else:
        persistent = sum(
            weight.nbytes  # beside the partition, except for a single rank's on the device
            for weight in weights
            if weight.numel <= persistent_numel and (ranks > 1 or locations[weight.name] != "device")
        )
        gathered_bytes = [persistent + nbytes for nbytes in gathered_bytes]
    begun_layers = accumulate(map(int, is_layer))
    return tuple(
        ModulePeak(layers, gathered + dequantized)
        for layers, gathered, dequantized in zip(begun_layers, gathered_bytes, dequantized_bytes)
    )


def simulate_fetches(modules: list[list[StoredWeight]], zero: dict[str, Any]) -> list[int]:
    """Return the gathered bytes while each module computes, by the rules of `fetch_sub_module` of ZeRO-3's coordinator.

    A module's parameters are gathered, then those of the next modules up to the prefetch bucket while fewer than
    `stage3_max_live_parameters` elements are live. The limit is tested before a parameter is taken, so it is exceeded by up to one: by a
    whole output head. After the module its own parameters are released, even if a stream still uses them.

    Args:
        modules: the parameters of each module in turn, without persistent ones.
    """
    queue = deque((index, weight) for index, module in enumerate(modules) for weight in module)
    live: dict[str, StoredWeight] = {}
    last_use: dict[str, int] = {}  # index of the last module that a parameter was prefetched for
    gathered_bytes = []
    for index, module in enumerate(modules):
        live |= {weight.name: weight for weight in module}
        while queue and queue[0][0] <= index:
            queue.popleft()
        live_numel = sum(weight.numel for weight in live.values())
        limit = min(zero["stage3_max_live_parameters"] - live_numel, zero["stage3_prefetch_bucket_size"])
        prefetched = 0
        while queue and prefetched < limit:
            used_at, weight = queue.popleft()
            last_use[weight.name] = used_at
            prefetched += weight.numel * (weight.name not in live)
            live[weight.name] = weight
        gathered_bytes.append(sum(weight.nbytes for weight in live.values()))
        for weight in module:
            if last_use.get(weight.name, index) <= index:
                live.pop(weight.name, None)
    return gathered_bytes
