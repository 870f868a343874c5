"""The deepspeed engine (ZeRO-Inference): ZeRO-3 with weights on the device, in host memory or on NVMe.

DeepSpeed's own loading (`from_pretrained` under `HfDeepSpeedConfig`) merges all shards in host memory and initializes every weight first.
Here each parameter is read or drawn, quantized and partitioned one at a time, so that host memory holds the stored weights and one layer.
`deepspeed.initialize` then finds a partitioned model as usual.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.engines.base import (
    EnginePlan,
    Job,
    LoadedModel,
    Progress,
    no_communicator,
    refuse_written_weights,
)
from zero_inference.engines.cost_terms import CostTerms
from zero_inference.engines.deepspeed.config import (
    LayerSizes,
    build_ds_config,
    layer_sizes,
    prefetched_layers,
    quantization_settings,
)
from zero_inference.engines.deepspeed.memory import PartitionRules, WeightMemory, measure_weights
from zero_inference.engines.deepspeed.modules import (
    build_modules,
    check_aio,
    check_compilers,
    init_distributed,
    real_stderr,
    set_build_folder,
)
from zero_inference.engines.deepspeed.quantization import (
    QuantizationPlan,
    measure_dequantized_gb_per_s,
    patch_functionals,
    plan_quantization,
    quantize_dequantize,
    quantize_parameter,
    stored_numel,
)
from zero_inference.engines.offload_folder import OffloadWorkspace, check_offload_folder, reserve
from zero_inference.errors import UsageError
from zero_inference.models.layers import decoder_layers
from zero_inference.models.weights import load_weights
from zero_inference.utils.format import format_bytes
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.processes import defer_signals
from zero_inference.utils.progress import SLOW_IMPORT_S, current_progress
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

connect = no_communicator


@dataclass(frozen=True)
class DeepSpeedPlan(EnginePlan):
    """
    Attributes:
        ds_config: the resolved configuration; its `nvme_path` is the offload folder, not yet this process' subfolder.
        quantization: None for 16 bits.
    """

    ds_config: dict[str, Any]
    quantization: QuantizationPlan | None
    memory: WeightMemory

    @property
    def prefill_bytes(self) -> int:
        # in the last layers, when the whole cache exists, nothing more is prefetched
        peaks = self.memory.peaks
        stored = self.footprint.device - max(peak.nbytes for peak in peaks)
        length, layers = self.job.config.prompt_len, peaks[-1].layers
        kv = self.job.kv_bytes(length) + self.job.state_bytes(length)
        return stored + max(peak.nbytes + kv * peak.layers // layers for peak in peaks)

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        return replace(
            super().cost_terms,
            fetches=self.memory.fetched_parameters,
            # a single rank waits for its copy stream before each layer and prefetches only then
            copies_wait_for_host=self.job.ranks.world_size == 1,
            overhead_negligible=False,  # hooks and dequantization take longer than a small model's operators
            quantizes_all=self.quantization is not None,
        )

    def quantize_dequantize(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if self.quantization is None or name not in self.quantization.names:
            return values
        return quantize_dequantize(values.to(self.job.ranks.device), self.quantization.settings)

    def in_words(self) -> list[str]:
        lines = super().in_words() + self.dequantization_warning()
        if self.job.config.disk_offload and not self.footprint.disk:
            min_bytes = PartitionRules.of(self.ds_config, self.job.spec.dtype, self.job.ranks.world_size).min_disk_bytes
            lines.append(
                f"warning: --disk-offload: no weight of a layer has {format_bytes(min_bytes)} a rank, the least that DeepSpeed writes "
                f"to disk: all stay {self.describe_location()}"
            )
        return lines

    @property
    def modules(self) -> tuple[bool, bool, bool]:
        """Arguments of `build_modules` for this run."""
        config = self.job.config
        return (
            config.disk_offload,
            config.use_gds,
            config.quantized and _has_dequantize_kernel(self.job, self.job.spec.dtype),
        )

    def prepare(self) -> None:
        _prepare_environment(self.job.config.verbose, self.job.ranks)
        with real_stderr():
            build_modules(*self.modules, say=current_progress().say)

    def measure_dequantized_gb_per_s(self, dtype: torch.dtype) -> float | None:
        if self.quantization is None:
            return None
        if _has_dequantize_kernel(self.job, dtype):
            build_modules(False, False, dequantize_on_gpu=True, say=None)
        return measure_dequantized_gb_per_s(self.quantization.settings, dtype, self.job.ranks.device)


def plan(job: Job) -> DeepSpeedPlan:
    """Resolve DeepSpeed's configuration and measure the weights by it. Raise UsageError for options that DeepSpeed cannot run."""
    refuse_written_weights(job)
    config, spec = job.config, job.spec
    _prepare_environment(config.verbose, job.ranks if job.machine.is_here else None)
    quantization = None
    if config.quantized:
        settings = quantization_settings(config)
        quantization = job.empty_model.cached(
            ("quantization", str(settings)), lambda: plan_quantization(job.empty_model.model, settings, spec.dtype)
        )
    ds_config = _ds_config(job, quantization)
    zero = ds_config["zero_optimization"]
    pinned = bool(zero.get("offload_param", {}).get("pin_memory")) and job.on_gpu
    memory = job.empty_model.cached(
        ("weight memory", str(zero), config.quant_bits, config.group_size, job.ranks.world_size, job.on_gpu),
        lambda: measure_weights(job, quantization, ds_config, pinned),
    )
    return DeepSpeedPlan(
        job,
        memory.footprint,
        pinned,
        ds_config,
        quantization,
        memory,
        weight_bytes=sum(memory.stored_bytes.values()),
        fetched_bytes=memory.fetched_bytes["host"] + memory.fetched_bytes["disk"],
        disk_bytes=memory.fetched_bytes["disk"],
        sharded_bytes=memory.fetched_bytes["device"] if config.offload == "gpu" else 0,
    )


def check(plan: DeepSpeedPlan) -> None:
    """Raise UsageError if a compiler, libaio or GPUDirect Storage is missing, or the offload folder cannot be used or is too small."""
    config, ranks = plan.job.config, plan.job.ranks
    check_compilers(*plan.modules)
    if config.disk_offload:
        check_aio(config.use_gds)
        if not config.dry_run:  # a dry run prints the space instead
            check_offload_folder(config.offload_path, plan.footprint.disk * ranks.local_world_size)


def load(plan: DeepSpeedPlan, progress: Progress = lambda done: None) -> LoadedModel:
    config, ranks = plan.job.config, plan.job.ranks
    _prepare_environment(config.verbose, ranks)
    init_distributed(ranks)
    releases = ExitStack()
    workspace = OffloadWorkspace(config.offload_path) if config.disk_offload else None
    if workspace:
        releases.callback(workspace.close)
    try:
        with real_stderr():
            return _load(plan, progress, workspace, releases)
    except BaseException:
        releases.close()
        raise


def _load(
    plan: DeepSpeedPlan, progress: Progress, workspace: OffloadWorkspace | None, releases: ExitStack
) -> LoadedModel:
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    job, model, quantization = plan.job, plan.job.empty_model.model, plan.quantization
    device = job.ranks.device
    ds_config = _with_nvme_path(plan.ds_config, str(workspace.path) if workspace else None)
    _, layers = decoder_layers(model)
    layer_ids = {id(parameter) for layer in layers for parameter in layer.parameters()}
    in_layers = {name for name, parameter in model.named_parameters() if id(parameter) in layer_ids}
    store = ParameterStore(
        deepspeed.zero.Init(config_dict_or_path=ds_config),
        quantization,
        in_layers,
        PartitionRules.of(ds_config, job.spec.dtype, job.ranks.world_size),
        plan.pinned,
        job.ranks,
    )
    releases.callback(store.close)
    ignore_adapters()
    load_weights(model, job.spec, job.config.seed, device, store.add, progress)
    model.to(device)  # buffers; the parameters are empty by now
    set_z3_leaf_modules(model, sorted({type(layer) for layer in layers}, key=lambda kind: kind.__name__))
    attributes_before = {module: set(vars(module)) for module in model.modules()}
    additions: dict[torch.nn.Module, set[str]] = {module: set() for module in attributes_before}
    releases.callback(remove_additions, additions)
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    for module, names in attributes_before.items():
        additions[module] = set(vars(module)) - names
    engine.module.eval()
    store.count_transfers(model)
    releases.callback(engine.destroy)
    facts: dict[str, Any] = {
        "ds_config": _with_nvme_path(plan.ds_config, job.config.offload_dir if workspace else None)
    }
    if quantization:
        releases.callback(patch_functionals().close)
        facts |= {"quantized_fraction": quantization.fraction, "not_quantized": quantization.skipped}
    return LoadedModel(
        model=engine.module,
        device=device,
        dtype=job.spec.dtype,
        weight_bytes=store.weight_bytes,
        transfers=store.transfers,
        facts=facts,
        close=releases.close,
    )


def _has_dequantize_kernel(job: Job, dtype: torch.dtype) -> bool:
    """Return whether DeepSpeed dequantizes with one kernel; otherwise it calls up to eight PyTorch operators."""
    return job.on_gpu and dtype == torch.float16


def _ds_config(job: Job, quantization: QuantizationPlan | None) -> dict[str, Any]:
    model, config = job.empty_model.model, job.config

    def measure() -> LayerSizes:
        _, layers = decoder_layers(model)
        return layer_sizes(model, layers, lambda name, p: stored_numel(quantization, name, p), job.spec.dtype)

    sizes = job.empty_model.cached(("layer sizes", config.quant_bits, config.group_size), measure)
    prefetched = prefetched_layers(sizes, job.free_device_bytes)
    merged = build_ds_config(job.config, job.spec.dtype, sizes, job.ranks.world_size, job.pin_weights, prefetched)
    _check_by_deepspeed(merged, job.config.ds_config)
    return merged


def _with_nvme_path(ds_config: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Return a copy with `path`, if given, as the folder of offloaded weights."""
    changed = copy.deepcopy(ds_config)
    if path is not None:
        changed["zero_optimization"]["offload_param"]["nvme_path"] = path
    return changed


def _check_by_deepspeed(merged: dict[str, Any], path: str | None) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(merged))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        source = f"--ds-config {path}" if path else "the DeepSpeed configuration made from these options"
        raise UsageError(f"{source}: DeepSpeed rejects it: {' '.join(lines[:3])[:300]}") from error


def compile_dequantization(ranks: Ranks, say: Callable[[str], None]) -> None:
    """Compile the kernel that dequantizes float16 on a GPU, once per machine; `say` gets a line before. Raise what the compiler raises."""
    _prepare_environment(0, ranks)
    build_modules(False, False, dequantize_on_gpu=True, say=say)


def _prepare_environment(verbose: int, ranks: Ranks | None) -> None:
    """Set DeepSpeed's log level, build folder, and GPU architectures (it cannot parse names such as 9.0a).

    Args:
        ranks: of this machine; None if the plan is for another one, where nothing is built.
    """
    device = ranks.device if ranks is not None else torch.device("cpu")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    set_build_folder(device.type)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    with current_progress().slow("importing DeepSpeed", SLOW_IMPORT_S):
        from deepspeed.utils import logger

    logger.setLevel(logging.ERROR if verbose < 2 else logging.INFO)


class ParameterStore:
    """Quantizes parameters on the device one by one and partitions them under ZeRO-3; counts the bytes that ZeRO-3 then fetches.

    Args:
        context: DeepSpeed's `zero.Init`.
        in_layers: names of the parameters of decoder layers.

    Attributes:
        transfers: byte counters, updated in each pass after `count_transfers`.
        weight_bytes: parameters so far, as stored, over all ranks.
    """

    def __init__(
        self,
        context,
        quantization: QuantizationPlan | None,
        in_layers: set[str],
        rules: PartitionRules,
        pinned: bool,
        ranks: Ranks,
    ):
        self.context, self.quantization, self.in_layers = context, quantization, in_layers
        self.rules, self.pinned, self.ranks = rules, pinned, ranks
        self.transfers = Transfers()
        self.weight_bytes = 0
        self.swapper = context.param_swapper if rules.offload == "nvme" else None
        if self.swapper is not None:
            _reserve_disk_before_writes(self.swapper)
            _defer_signals_in_io(self.swapper)

    def close(self) -> None:
        """Wait for prefetching reads, which an error or a signal may leave running, and free libaio's buffers.

        DeepSpeed ends the process if a handle is deleted before its reads are done, and never frees the buffers. Partitions may be in them,
        so the parameters are unusable afterwards.
        """
        if self.swapper is None:
            return
        self.swapper.synchronize_reads()
        if not self.swapper.use_gds:  # its buffers are device tensors
            self.swapper.aio_read_handle.free_cpu_locked_tensor(self.swapper.buffers)
        self.swapper = None

    def add(self, name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.ranks.device)
        if self.quantization and name in self.quantization.names:
            quantize_parameter(parameter, self.quantization.settings)
        self.weight_bytes += parameter.numel() * parameter.element_size()
        self.context._convert_to_deepspeed_param(parameter)
        if self.rules.location(parameter, parameter.ds_numel, name in self.in_layers) == "host":
            self._allocate_host_partition(parameter)
        parameter.partition(has_been_updated=True)

    def _allocate_host_partition(self, parameter: torch.nn.Parameter) -> None:
        """Do what ZeRO-3 does at a first partition, but allocate the exact size."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        aligned = self.context._aligned_size(parameter)
        share = aligned // self.ranks.world_size
        parameter.ds_tensor = host_empty((share,), parameter.dtype, self.pinned)
        parameter.ds_tensor.ds_numel = share
        parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        parameter.ds_tensor.final_location = None
        parameter.ds_numel_aligned = aligned

    def count_transfers(self, model) -> None:
        """Count bytes where ZeRO-3 fetches: host partitions at a gather, NVMe partitions at a swap-in."""
        transfers, swapper = self.transfers, self.swapper
        if self.rules.offload == "none":
            return
        for parameter in model.parameters():
            parameter.all_gather_coalesced = _counted_gather(parameter.all_gather_coalesced, transfers)
        if swapper is not None:
            swap_in = swapper.swap_in

            def counted_swap_in(params, *args, **kwargs):
                transfers.disk_read_bytes += sum(
                    swapper._io_aligned_numel(p.ds_tensor.ds_numel) * p.element_size() for p in params
                )
                return swap_in(params, *args, **kwargs)

            swapper.swap_in = counted_swap_in


def ignore_adapters() -> None:
    """Patch DeepSpeed to fetch and release only parameters that it has partitioned: adapters add others to modules later."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    original = coordinator.get_all_parameters
    if original.__module__ == __name__:  # patched already
        return

    def partitioned(module, recurse=False):
        return [(name, parameter) for name, parameter in original(module, recurse) if hasattr(parameter, "ds_id")]

    coordinator.get_all_parameters = partitioned


def _reserve_disk_before_writes(swapper) -> None:
    """Patch `swapper` to allocate disk space before it writes a partition.

    DeepSpeed ignores failed writes, and a later read of a short file ends the process.
    """
    swap_out = swapper._swap_out

    def reserved_swap_out(params, *args, **kwargs):
        for path, buffer in zip(swapper._get_swap_paths(params), swapper._get_swap_buffers(params)):
            reserve(Path(path), buffer.numel() * buffer.element_size())
        return swap_out(params, *args, **kwargs)

    swapper._swap_out = reserved_swap_out


def _defer_signals_in_io(swapper) -> None:
    """Patch `swapper` to defer signals until it has counted the requests to libaio, or those that it waited for. With a wrong count it
    would skip a wait, or wait for nothing, which ends the process."""

    def deferred(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            with defer_signals():
                return method(*args, **kwargs)

        return call

    for name in ("_swap_out", "swap_in", "synchronize_writes", "synchronize_reads"):
        setattr(swapper, name, deferred(getattr(swapper, name)))


def _counted_gather(gather, transfers: Transfers):
    def counted(params, *args, **kwargs):
        params = list(params)
        for parameter in params:
            # where the partition belongs, not where it is: the gather itself may read NVMe first
            if parameter.ds_tensor.final_location is not None or parameter.ds_tensor.device.type == "cpu":
                transfers.host_to_device_bytes += parameter.ds_tensor.ds_numel * parameter.element_size()
        return gather(params, *args, **kwargs)

    return counted


def remove_additions(additions: dict[torch.nn.Module, set[str]]) -> None:
    """Remove what DeepSpeed added to the modules of a model, after `engine.destroy`; the model cannot be called any more.

    Attributes and hooks hold the engine, and DeepSpeed's global variables hold the model: with any of them left all weights stay in host
    memory.

    Args:
        additions: for each module of the model, the attributes that `deepspeed.initialize` has added.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for module, names in additions.items():
        module._parameters = vars(module).get("_original_parameters", module._parameters)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        for name in names:
            vars(module).pop(name, None)
    ids = set(map(id, additions))
    additions.clear()
    # the model, and the modules that an error or a signal ended in
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in ids]
    for method in vars(PartitionedParameterCoordinator).values():
        cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        for function in (method, *cells):  # a decorator may wrap the cached function
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()  # it holds all arguments
