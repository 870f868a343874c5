"""ZeRO-Inference: DeepSpeed ZeRO-3 with weights on the device, in host memory or on NVMe.

DeepSpeed's own way in (`from_pretrained` under `HfDeepSpeedConfig`) merges all shards in host memory and initialises
every weight first. Here each parameter is read or drawn, quantized, and handed to ZeRO-3 one at a time, so that host
memory holds the stored weights and one layer; `deepspeed.initialize` then finds a partitioned model as always.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from zero_inference.config import RunConfig
from zero_inference.engines.base import Footprint, LoadedModel, Transfers
from zero_inference.engines.deepspeed.config import build_ds_config, layer_sizes, layers_ahead, swappable
from zero_inference.engines.deepspeed.modules import build_modules, check_aio, init_distributed, use_private_folder
from zero_inference.engines.deepspeed.quantization import (
    QuantizationPlan,
    QuantizedFunctionals,
    plan_quantization,
    quantize_parameter,
)
from zero_inference.engines.offload_folder import OffloadWorkspace, check_offload_folder, reserve
from zero_inference.errors import UsageError
from zero_inference.models.checkpoint import load_weights
from zero_inference.models.layers import decoder_layers
from zero_inference.models.skeleton import empty_model
from zero_inference.models.spec import ModelSpec
from zero_inference.runtime.distributed import Ranks
from zero_inference.runtime.host_memory import host_empty


def check(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> None:
    """Everything that can be known to fail before a weight is read.

    Raises:
        UsageError: see the message.
    """
    _prepare_environment(config, ranks)
    model = spec.outline
    plan = _plan(config, spec, model)
    _, layers = decoder_layers(model)
    if config.disk_offload:
        check_aio(config.use_gds)
        if not config.dry_run:  # the plan has a line for it
            needed = _disk_bytes(model, layers, plan, spec.dtype) * ranks.local_world_size // ranks.world_size
            check_offload_folder(config.offload_path, needed)
    _ds_config(config, spec, model, layers, plan, ranks, config.offload_path)


def load(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, progress: Callable[[int], None] = lambda done: None
) -> LoadedModel:
    """Build, fill and partition the model; see `zero_inference.engines.base`."""
    _prepare_environment(config, ranks)
    on_cuda = ranks.device.type == "cuda"
    build_modules(
        config.disk_offload,
        config.use_gds,
        unpack_on_gpu=config.quantized and on_cuda and spec.dtype == torch.float16,
        speak=ranks.is_first and config.verbose > 0,
    )
    init_distributed(ranks)
    model = empty_model(spec)
    plan = _plan(config, spec, model)
    _, layers = decoder_layers(model)
    releases = ExitStack()
    workspace = OffloadWorkspace(config.offload_path) if config.disk_offload else None
    if workspace:
        releases.callback(workspace.close)
    try:
        return _load_into(config, spec, ranks, progress, model, plan, layers, workspace, releases)
    except BaseException:
        releases.close()
        raise


def _load_into(config, spec, ranks, progress, model, plan, layers, workspace, releases: ExitStack) -> LoadedModel:
    """Fill `model`; what has to be undone goes on `releases`, which becomes the loaded model's `close`."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    ds_config = _ds_config(config, spec, model, layers, plan, ranks, workspace.path if workspace else None, agreed=True)
    context = deepspeed.zero.Init(config_dict_or_path=ds_config)
    transfers = Transfers()
    store = _Store(context, plan, model, layers, ds_config["zero_optimization"], spec.dtype, ranks, transfers)
    load_weights(model, spec, config.seed, ranks.device, store.adopt, progress)
    model.to(ranks.device)  # buffers; the parameters are empty shells by now
    set_z3_leaf_modules(model, sorted({type(layer) for layer in layers}, key=lambda kind: kind.__name__))
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    engine.module.eval()
    store.count_transfers(model)
    releases.callback(engine.destroy)
    if plan:
        releases.callback(QuantizedFunctionals().remove)
    facts = {"ds_config": _as_recorded(ds_config, config)}
    if plan:
        facts |= {"quantized_fraction": plan.fraction, "not_quantized": plan.skipped}
    return LoadedModel(
        model=engine.module,
        device=ranks.device,
        dtype=spec.dtype,
        weight_bytes=store.weight_bytes,
        transfers=transfers,
        facts=facts,
        close=releases.close,
    )


def footprint(config: RunConfig, spec: ModelSpec, ranks: Ranks, model) -> Footprint:
    """Live layers on the device and the partition of this rank where it waits, as the resolved configuration says."""
    _prepare_environment(config, ranks)
    plan = _plan(config, spec, model)
    _, layers = decoder_layers(model)
    zero = _ds_config(config, spec, model, layers, plan, ranks, config.offload_path)["zero_optimization"]
    stored = [
        (plan.packed_numel(name, p) if plan else p.numel(), p.element_size()) for name, p in model.named_parameters()
    ]
    elements, total = sum(n for n, _ in stored), sum(n * width for n, width in stored)
    small = sum(n * width for n, width in stored if n <= zero["stage3_param_persistence_threshold"])
    live = min(zero["stage3_max_live_parameters"], elements) * total // elements + small
    unpacked = max(
        (p.numel() * p.element_size() for name, p in model.named_parameters() if plan and name in plan.names), default=0
    )
    share = total // ranks.world_size
    device = live + unpacked
    pinned = bool(zero.get("offload_param", {}).get("pin_memory")) and ranks.device.type == "cuda"
    if config.offload == "gpu":
        return Footprint(device=device + share)
    if config.cpu_offload:
        return Footprint(device=device, host=share, pinned=share if pinned else 0)
    disk = _disk_bytes(model, layers, plan, spec.dtype) // ranks.world_size
    offload = zero["offload_param"]
    buffers = offload["buffer_size"] * offload["buffer_count"] * spec.dtype.itemsize
    return Footprint(
        device=device, host=share - disk + buffers, pinned=buffers + (share - disk if pinned else 0), disk=disk
    )


class _Store:
    """Takes parameters over one by one: quantizes them on the device and gives ZeRO-3 its partition of each."""

    def __init__(
        self,
        context,
        plan: QuantizationPlan | None,
        model,
        layers,
        zero: dict,
        dtype: torch.dtype,
        ranks: Ranks,
        transfers: Transfers,
    ):
        self.context, self.plan, self.dtype, self.ranks, self.transfers = context, plan, dtype, ranks, transfers
        offload = zero.get("offload_param", {})
        self.device = offload.get("device", "none")
        self.pinned = bool(offload.get("pin_memory")) and ranks.device.type == "cuda"
        self.persistent_numel = zero["stage3_param_persistence_threshold"]
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        self.in_layers = {name for name, parameter in model.named_parameters() if id(parameter) in inside}
        self.weight_bytes = 0
        if self.device == "nvme":
            _reserve_before_writing(context.param_swapper)

    def adopt(self, name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.ranks.device)
        if self.plan and name in self.plan.names:
            quantize_parameter(parameter, self.plan.settings)
        self.weight_bytes += parameter.numel() * parameter.element_size()
        self.context._convert_to_deepspeed_param(parameter)
        if self._waits_in_host_memory(name, parameter):
            self._place_in_host_memory(parameter)
        parameter.partition(has_been_updated=True)

    def _waits_in_host_memory(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """All that is offloaded; with NVMe only the large weights outside the layers, and what is not `swappable`.

        An NVMe buffer holds one parameter and all are as large as the largest: an embedding there would multiply them.
        """
        if self.device == "nvme" and not swappable(parameter, self.dtype):
            return True
        if parameter.ds_numel <= self.persistent_numel or self.device == "none":
            return False
        return self.device == "cpu" or name not in self.in_layers

    def _place_in_host_memory(self, parameter: torch.nn.Parameter) -> None:
        """What ZeRO-3 does at a first partition, in host memory of the exact size."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        aligned = self.context._aligned_size(parameter)
        share = aligned // self.ranks.world_size
        parameter.ds_tensor = host_empty((share,), parameter.dtype, self.pinned)
        parameter.ds_tensor.ds_numel = share
        parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        parameter.ds_tensor.final_location = None
        parameter.ds_numel_aligned = aligned

    def count_transfers(self, model) -> None:
        """Raise the counters wherever ZeRO-3 fetches: host partitions at a gather, NVMe partitions at a swap-in."""
        transfers = self.transfers
        swapper = None
        if self.device == "none":
            return
        for parameter in model.parameters():
            parameter.all_gather_coalesced = _counted_gather(parameter.all_gather_coalesced, transfers)
            swapper = swapper or parameter.nvme_swapper
        if swapper is not None:
            swap_in = swapper.swap_in

            def counted_swap_in(params, *args, **kwargs):
                transfers.disk_read_bytes += sum(
                    swapper._io_aligned_numel(p.ds_tensor.ds_numel) * p.element_size() for p in params
                )
                return swap_in(params, *args, **kwargs)

            swapper.swap_in = counted_swap_in


def _reserve_before_writing(swapper) -> None:
    """Have the disk's space taken before DeepSpeed writes a partition: it does not look at what its writes return, and a later
    read of a short file aborts the process."""
    swap_out = swapper._swap_out

    def reserved_swap_out(params, *args, **kwargs):
        for path, buffer in zip(swapper._get_swap_paths(params), swapper._get_swap_buffers(params)):
            reserve(Path(path), buffer.numel() * buffer.element_size())
        return swap_out(params, *args, **kwargs)

    swapper._swap_out = reserved_swap_out


def _counted_gather(gather, transfers: Transfers):
    def counted(params, *args, **kwargs):
        params = list(params)
        for parameter in params:
            # the gather may itself read NVMe first, so what counts is where a partition belongs, not where it is now
            if parameter.ds_tensor.final_location is not None or parameter.ds_tensor.device.type == "cpu":
                transfers.host_to_device_bytes += parameter.ds_tensor.ds_numel * parameter.element_size()
        return gather(params, *args, **kwargs)

    return counted


def _plan(config: RunConfig, spec: ModelSpec, model) -> QuantizationPlan | None:
    if not config.quantized:
        return None
    return plan_quantization(
        model,
        {"num_bits": config.quant_bits, "group_size": config.quant_group_size, "group_dim": 1, "symmetric": False},
        spec.dtype,
    )


def _ds_config(
    config: RunConfig, spec: ModelSpec, model, layers, plan, ranks: Ranks, nvme_path, agreed: bool = False
) -> dict:
    """The resolved configuration; `agreed`: by the rank with the least free memory, for ranks that fetch together."""
    sizes = layer_sizes(
        model, layers, plan.packed_numel if plan else lambda _, parameter: parameter.numel(), spec.dtype
    )
    pin = config.pin_memory if config.pin_memory is not None else ranks.device.type == "cuda"
    merged = build_ds_config(
        config,
        spec.dtype,
        sizes,
        ranks.world_size,
        pin,
        layers_ahead(sizes, ranks.free_device_bytes(agreed)),
        nvme_path,
    )
    _check_by_deepspeed(merged, config.ds_config)
    return merged


def _as_recorded(ds_config: dict, config: RunConfig) -> dict:
    """The resolved configuration with the offload folder as it was given, not the subfolder of this process."""
    recorded = copy.deepcopy(ds_config)
    if config.disk_offload:
        recorded["zero_optimization"]["offload_param"]["nvme_path"] = config.offload_dir
    return recorded


def _check_by_deepspeed(merged: dict, path: str | None) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(merged))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise UsageError(f"--ds-config {path}: DeepSpeed refuses it: {' '.join(lines[:3])[:300]}") from error


def _disk_bytes(model, layers, plan: QuantizationPlan | None, dtype: torch.dtype) -> int:
    inside = {id(p) for layer in layers for p in layer.parameters() if swappable(p, dtype)}
    return sum(
        (plan.packed_numel(name, p) if plan else p.numel()) * p.element_size()
        for name, p in model.named_parameters()
        if id(p) in inside
    )


def _prepare_environment(config: RunConfig, ranks: Ranks) -> None:
    """Quiet DeepSpeed, and keep its builds apart and off architecture names it cannot parse (such as 9.0a)."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if ranks.device.type == "cuda" else "cpu")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    use_private_folder(ranks.device.type)
    if ranks.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(ranks.device)
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR if config.verbose < 2 else logging.INFO)
