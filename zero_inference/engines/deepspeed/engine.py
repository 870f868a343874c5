"""ZeRO-Inference: DeepSpeed ZeRO-3 with weights on the device, in host memory or on NVMe.

DeepSpeed's own way in (`from_pretrained` under `HfDeepSpeedConfig`) merges all shards in host memory and initialises
every weight first. Here each parameter is read or drawn, quantized, and handed to ZeRO-3 one at a time, so that host
memory holds the stored weights and one layer; `deepspeed.initialize` then finds a partitioned model as always.
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
    layers_ahead,
    quantization_settings,
)
from zero_inference.engines.deepspeed.memory import ModulePeak, PartitionRules, places_of_weights
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
    QuantizedFunctionals,
    measure_dequantized_gb_per_s,
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
        ds_config: as DeepSpeed gets it, but that `nvme_path` is the offload folder and not yet this process' own in it.
        quantization: None where weights keep 16 bits.
        moments: of a pass, with what is gathered.
    """

    ds_config: dict[str, Any]
    quantization: QuantizationPlan | None
    brought_parameters: int
    moments: tuple[ModulePeak, ...]

    @property
    def prefill_bytes(self) -> int:
        """See `EnginePlan`. Behind the last layers, where all keys and values are there, nothing more is fetched ahead."""
        waiting = self.footprint.device - max(moment.nbytes for moment in self.moments)
        length, layers = self.job.config.prompt_len, self.moments[-1].layers
        kv = self.job.kv_bytes(length) + self.job.state_bytes(length)
        return waiting + max(moment.nbytes + kv * moment.layers // layers for moment in self.moments)

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        """See `EnginePlan`. Hooks and dequantization take longer than a small model's own work."""
        return replace(
            super().cost_terms,
            fetches=self.brought_parameters,
            # a single rank waits for its copy stream before each layer, and prefetches only after that
            copies_wait_for_host=self.job.ranks.world_size == 1,
            overhead_negligible=False,
            quantizes_all=self.quantization is not None,
        )

    def quantize_dequantize(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """See `EnginePlan`."""
        if self.quantization is None or name not in self.quantization.names:
            return values
        return quantize_dequantize(values.to(self.job.ranks.device), self.quantization.settings)

    def in_words(self) -> list[str]:
        """See `EnginePlan`."""
        lines = super().in_words() + self.dequantization_warning()
        if self.job.config.disk_offload and not self.footprint.disk:
            least = PartitionRules.of(self.ds_config, self.job.spec.dtype, self.job.ranks.world_size).least_disk_bytes
            lines.append(
                f"warning: --disk-offload: no weight of a layer has {format_bytes(least)} a rank, the least that DeepSpeed writes "
                f"to disk: all stay {self.places_in_words()}"
            )
        return lines

    @property
    def modules(self) -> tuple[bool, bool, bool]:
        """The modules that a run needs, as `build_modules` takes them."""
        config = self.job.config
        by_kernel = config.quantized and _dequantizes_by_kernel(self.job, self.job.spec.dtype)
        return config.disk_offload, config.use_gds, by_kernel

    def prepare(self) -> None:
        """See `EnginePlan`."""
        _prepare_environment(self.job.config.verbose, self.job.ranks)
        with real_stderr():
            build_modules(*self.modules, say=current_progress().say)

    def measure_dequantized_gb_per_s(self, dtype: torch.dtype) -> float | None:
        """See `EnginePlan`."""
        if self.quantization is None:
            return None
        if _dequantizes_by_kernel(self.job, dtype):
            build_modules(False, False, dequantize_on_gpu=True, say=None)
        return measure_dequantized_gb_per_s(self.quantization.settings, dtype, self.job.ranks.device)


def plan(job: Job) -> DeepSpeedPlan:
    """Resolve DeepSpeed's configuration, which says where each partition waits.

    Raises:
        UsageError: see the message.
    """
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
    stored, brought, parameters, moments, footprint = job.empty_model.cached(
        ("places", str(zero), config.quant_bits, config.group_size, job.ranks.world_size, job.on_gpu),
        lambda: places_of_weights(job, quantization, ds_config, pinned),
    )
    return DeepSpeedPlan(
        job,
        footprint,
        pinned,
        ds_config,
        quantization,
        parameters,
        moments,
        weight_bytes=sum(stored.values()),
        fetched_bytes=brought["host"] + brought["disk"],
        disk_bytes=brought["disk"],
        sharded_bytes=brought["device"] if config.offload == "gpu" else 0,
    )


def check(plan: DeepSpeedPlan) -> None:
    """Raises UsageError where a compiler, libaio, GPUDirect Storage or the offload folder cannot be used, or has too little space."""
    config, ranks = plan.job.config, plan.job.ranks
    check_compilers(*plan.modules)
    if config.disk_offload:
        check_aio(config.use_gds)
        if not config.dry_run:  # the plan has a line for it
            check_offload_folder(config.offload_path, plan.footprint.disk * ranks.local_world_size)


def load(plan: DeepSpeedPlan, progress: Progress = lambda done: None) -> LoadedModel:
    """Fill and partition the model; see `zero_inference.engines.base`."""
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
    """`load`; what has to be undone goes on `releases`, which becomes the loaded model's `close`."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    job, model, quantization = plan.job, plan.job.empty_model.model, plan.quantization
    device = job.ranks.device
    ds_config = _with_nvme_path(plan.ds_config, str(workspace.path) if workspace else None)
    _, layers = decoder_layers(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    in_layers = {name for name, parameter in model.named_parameters() if id(parameter) in inside}
    store = ParameterStore(
        deepspeed.zero.Init(config_dict_or_path=ds_config),
        quantization,
        in_layers,
        PartitionRules.of(ds_config, job.spec.dtype, job.ranks.world_size),
        plan.pinned,
        job.ranks,
    )
    releases.callback(store.close)
    leave_adapters_alone()
    load_weights(model, job.spec, job.config.seed, device, store.adopt, progress)
    model.to(device)  # buffers; the parameters are empty shells by now
    set_z3_leaf_modules(model, sorted({type(layer) for layer in layers}, key=lambda kind: kind.__name__))
    additions = Additions(model)
    releases.callback(additions.remove)
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    additions.note()
    engine.module.eval()
    store.count_transfers(model)
    releases.callback(engine.destroy)
    facts: dict[str, Any] = {
        "ds_config": _with_nvme_path(plan.ds_config, job.config.offload_dir if workspace else None)
    }
    if quantization:
        releases.callback(QuantizedFunctionals().remove)
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


def _dequantizes_by_kernel(job: Job, dtype: torch.dtype) -> bool:
    """Whether DeepSpeed has a kernel that reads codes and writes weights once; else it calls up to eight operators of PyTorch."""
    return job.on_gpu and dtype == torch.float16


def _ds_config(job: Job, quantization: QuantizationPlan | None) -> dict[str, Any]:
    model, config = job.empty_model.model, job.config

    def find() -> LayerSizes:
        _, layers = decoder_layers(model)
        return layer_sizes(model, layers, lambda name, p: stored_numel(quantization, name, p), job.spec.dtype)

    sizes = job.empty_model.cached(("layer sizes", config.quant_bits, config.group_size), find)
    ahead = layers_ahead(sizes, job.free_device_bytes)
    merged = build_ds_config(job.config, job.spec.dtype, sizes, job.ranks.world_size, job.pin_weights, ahead)
    _check_by_deepspeed(merged, job.config.ds_config)
    return merged


def _with_nvme_path(ds_config: dict[str, Any], path: str | None) -> dict[str, Any]:
    """A copy; with `path` as the folder of the offloaded weights, if that is given."""
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
        what = f"--ds-config {path}" if path else "the DeepSpeed configuration made from these options"
        raise UsageError(f"{what}: DeepSpeed rejects it: {' '.join(lines[:3])[:300]}") from error


def compile_dequantization(ranks: Ranks, say: Callable[[str], None]) -> None:
    """Compile what dequantizes float16 on a GPU, unless that was done here before; `say` is told.

    Raises:
        Exception: whatever the compiler, or its absence, leads to.
    """
    _prepare_environment(0, ranks)
    build_modules(False, False, dequantize_on_gpu=True, say=say)


def _prepare_environment(verbose: int, ranks: Ranks | None) -> None:
    """Quiet DeepSpeed, and keep its builds apart and off architecture names it cannot parse (such as 9.0a).

    Args:
        ranks: of this machine; None where the plan is for another one, and nothing is built.
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
    """Takes parameters over one by one: quantizes them on the device and gives ZeRO-3 its partition of each.

    Args:
        context: DeepSpeed's `zero.Init`.
        in_layers: names of the parameters of decoder layers.

    Attributes:
        transfers: counters that rise while the model runs, once `count_transfers` was called.
        weight_bytes: of the parameters so far, as stored, over all ranks.
    """

    def __init__(
        self,
        context,
        quantization: QuantizationPlan | None,
        in_layers: set[str],
        places: PartitionRules,
        pinned: bool,
        ranks: Ranks,
    ):
        self.context, self.quantization, self.in_layers = context, quantization, in_layers
        self.places, self.pinned, self.ranks = places, pinned, ranks
        self.transfers = Transfers()
        self.weight_bytes = 0
        self.swapper = context.param_swapper if places.offload == "nvme" else None
        if self.swapper is not None:
            _reserve_before_writing(self.swapper)
            _hold_signals_while_counting(self.swapper)

    def close(self) -> None:
        """Wait for reads ahead, which an error or a signal in the middle of a pass leaves under way, and free the memory that libaio
        reads into: DeepSpeed aborts the process where a handle goes before it is done, and keeps that memory.

        Partitions may lie in it, so nothing may use the parameters any more.
        """
        if self.swapper is None:
            return
        self.swapper.synchronize_reads()
        if not self.swapper.use_gds:  # whose buffers are the device's, and go as any tensor does
            self.swapper.aio_read_handle.free_cpu_locked_tensor(self.swapper.buffers)
        self.swapper = None

    def adopt(self, name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.ranks.device)
        if self.quantization and name in self.quantization.names:
            quantize_parameter(parameter, self.quantization.settings)
        self.weight_bytes += parameter.numel() * parameter.element_size()
        self.context._convert_to_deepspeed_param(parameter)
        in_layer = name in self.in_layers
        if self.places.place(parameter, parameter.ds_numel, in_layer) == "host":
            self._place_in_host_memory(parameter)
        parameter.partition(has_been_updated=True)

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
        transfers, swapper = self.transfers, self.swapper
        if self.places.offload == "none":
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


def leave_adapters_alone() -> None:
    """Let DeepSpeed fetch and release only what it has partitioned: adapters add parameters of their own to modules later."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    own = coordinator.get_all_parameters
    if own.__module__ == __name__:  # done before
        return

    def partitioned(module, recurse=False):
        return [(name, parameter) for name, parameter in own(module, recurse) if hasattr(parameter, "ds_id")]

    coordinator.get_all_parameters = partitioned


def _reserve_before_writing(swapper) -> None:
    """Have the disk's space taken before DeepSpeed writes a partition: it does not look at what its writes return, and a later
    read of a short file aborts the process."""
    swap_out = swapper._swap_out

    def reserved_swap_out(params, *args, **kwargs):
        for path, buffer in zip(swapper._get_swap_paths(params), swapper._get_swap_buffers(params)):
            reserve(Path(path), buffer.numel() * buffer.element_size())
        return swap_out(params, *args, **kwargs)

    swapper._swap_out = reserved_swap_out


def _hold_signals_while_counting(swapper) -> None:
    """Have a signal take effect only once DeepSpeed has counted what it handed to libaio, or what it waited for: a count of
    nothing is not waited for, and waiting for nothing aborts the process. Writes are waited for in the same call."""

    def whole(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            with defer_signals():
                return method(*args, **kwargs)

        return call

    for name in ("_swap_out", "swap_in", "synchronize_writes", "synchronize_reads"):
        setattr(swapper, name, whole(getattr(swapper, name)))


def _counted_gather(gather, transfers: Transfers):
    def counted(params, *args, **kwargs):
        params = list(params)
        for parameter in params:
            # the gather may itself read NVMe first, so what counts is where a partition belongs, not where it is now
            if parameter.ds_tensor.final_location is not None or parameter.ds_tensor.device.type == "cpu":
                transfers.host_to_device_bytes += parameter.ds_tensor.ds_numel * parameter.element_size()
        return gather(params, *args, **kwargs)

    return counted


class Additions:
    """What DeepSpeed puts on the modules of `model` between the making of this and `note`."""

    def __init__(self, model: torch.nn.Module):
        self.before = {module: set(vars(module)) for module in model.modules()}
        self.added: dict[torch.nn.Module, set[str]] = {}

    def note(self) -> None:
        self.added = {module: set(vars(module)) - names for module, names in self.before.items()}

    def remove(self) -> None:
        """Take it all off, and have DeepSpeed forget the model, which cannot be called any more then. After `engine.destroy`."""
        for module in self.before:
            module._parameters = vars(module).get("_original_parameters", module._parameters)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()
            for name in self.added.get(module, ()):
                vars(module).pop(name, None)
        _forget_modules(set(map(id, self.before)))
        self.before, self.added = {}, {}


def _forget_modules(ids: set[int]) -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    # The model at its bottom, and above it the modules that an error or a signal ended in.
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in ids]
    for method in vars(PartitionedParameterCoordinator).values():
        _forget_results(method)


def _forget_results(method) -> None:
    """Clear what a method has of functools.lru_cache, which holds all that it was called with; a decorator may be around it."""
    cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
    for function in (method, *cells):
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()
