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

from zero_inference.engines.base import CostTerms, EnginePlan, Job, LoadedModel, LoadProgress, refuse_written_weights
from zero_inference.engines.deepspeed.modules import (
    build_modules,
    check_aio,
    check_compilers,
    init_distributed,
    set_build_folder,
)
from zero_inference.engines.deepspeed.plan import (
    StoredWeight,
    WeightMemory,
    build_ds_config,
    locate,
    measure_memory,
    min_disk_bytes,
    offload_device,
    stored_weights,
)
from zero_inference.engines.deepspeed.quantization import (
    measure_dequantized_gb_per_s,
    patch_functionals,
    quantization_settings,
    quantize_dequantize,
    quantize_parameter,
)
from zero_inference.engines.offload_folder import OffloadWorkspace, check_offload_folder, reserve
from zero_inference.models.layers import decoder_layers
from zero_inference.models.weights import load_weights
from zero_inference.utils.format import format_bytes
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.patching import Patches, SharedPatch
from zero_inference.utils.processes import defer_signals
from zero_inference.utils.progress import SLOW_IMPORT_S, current_progress
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.timing import Transfers


@dataclass(frozen=True)
class DeepSpeedPlan(EnginePlan):
    ds_config: dict[str, Any]  # as resolved; `nvme_path` is the offload folder, not yet this process' subfolder
    settings: dict | None  # of quantization; None for 16 bits
    stored: dict[str, StoredWeight]  # by name of the parameter
    memory: WeightMemory

    def prefill_bytes_on(self, device: int) -> int:
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
            quantizes_all=self.settings is not None,
        )

    def quantize_dequantize(self, name: str, values: torch.Tensor) -> torch.Tensor:
        stored = self.stored.get(name)  # None if it is untied after the plan, see `ParameterStore.add`
        if self.settings is None or stored is None or not stored.quantized:
            return values
        return quantize_dequantize(values.to(self.job.ranks.device), self.settings)

    def in_words(self) -> list[str]:
        lines = super().in_words() + self.dequantization_warning()
        if self.job.config.disk_offload and not self.footprint.disk:
            smallest = format_bytes(min_disk_bytes(self.ds_config))
            lines.append(
                f"warning: --disk-offload: no weight of a layer has {smallest} a rank, the least that DeepSpeed writes to disk: "
                f"all stay {self.describe_location()}"
            )
        return lines

    @property
    def needed_modules(self) -> dict[str, bool]:
        """Arguments of `build_modules` and `check_compilers` for this run."""
        config = self.job.config
        dequantizes = config.quantized and _has_dequantize_kernel(self.job, self.job.spec.dtype)
        return {"disk": config.disk_offload, "use_gds": config.use_gds, "dequantize_on_gpu": dequantizes}

    def prepare(self) -> None:
        _prepare_environment(self.job.config.verbose, self.job.ranks)
        build_modules(**self.needed_modules, say=current_progress().say)

    def measure_dequantized_gb_per_s(self, dtype: torch.dtype) -> float | None:
        if self.settings is None:
            return None
        if _has_dequantize_kernel(self.job, dtype):
            build_modules(disk=False, use_gds=False, dequantize_on_gpu=True, say=None)
        return measure_dequantized_gb_per_s(self.settings, dtype, self.job.ranks.device)


def plan(job: Job) -> DeepSpeedPlan:
    """Resolve DeepSpeed's configuration and measure the weights by it. Raise UsageError for options that DeepSpeed cannot run."""
    refuse_written_weights(job)
    config, dtype, empty = job.config, job.spec.dtype, job.empty_model
    _prepare_environment(config.verbose, job.ranks if job.machine.is_here else None)
    settings = quantization_settings(config) if config.quantized else None
    stored_as = (config.quant_bits, config.group_size)
    weights = empty.cached(("stored weights", *stored_as), lambda: stored_weights(empty.model, settings, dtype))
    ds_config = build_ds_config(job, weights)
    zero = ds_config["zero_optimization"]
    pinned = bool(zero.get("offload_param", {}).get("pin_memory")) and job.on_gpu
    memory = empty.cached(
        ("weight memory", str(zero), *stored_as, job.ranks.world_size, job.on_gpu),
        lambda: measure_memory(job, weights, ds_config, pinned),
    )
    return DeepSpeedPlan(
        job,
        memory.footprint,
        pinned,
        ds_config=ds_config,
        settings=settings,
        stored={weight.name: weight for weight in weights},
        memory=memory,
        weight_bytes=memory.stored_bytes,
        fetched_bytes=memory.fetched_bytes["host"] + memory.fetched_bytes["disk"],
        disk_bytes=memory.fetched_bytes["disk"],
        sharded_bytes=memory.fetched_bytes["device"] if config.offload == "gpu" else 0,
    )


def check(plan: DeepSpeedPlan) -> None:
    """Raise UsageError if a compiler, libaio or GPUDirect Storage is missing, or the offload folder cannot be used or is too small."""
    config, ranks = plan.job.config, plan.job.ranks
    check_compilers(**plan.needed_modules)
    if config.disk_offload:
        check_aio(config.use_gds)
        if not config.dry_run:  # a dry run prints the space instead
            check_offload_folder(config.offload_path, plan.footprint.disk * ranks.local_world_size)


def load(plan: DeepSpeedPlan, progress: LoadProgress = lambda done: None) -> LoadedModel:
    import deepspeed
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import set_z3_leaf_modules

    job, model = plan.job, plan.job.empty_model.model
    config, ranks = job.config, job.ranks
    _prepare_environment(config.verbose, ranks)
    init_distributed(ranks)
    ds_config = copy.deepcopy(plan.ds_config)
    facts: dict[str, Any] = {"ds_config": copy.deepcopy(plan.ds_config)}
    if plan.settings:
        weights = plan.stored.values()
        quantized = sum(weight.parameter.numel() for weight in weights if weight.quantized)
        facts["quantized_fraction"] = quantized / sum(weight.parameter.numel() for weight in weights)
        facts["not_quantized"] = [each.name for each in weights if each.parameter.dim() > 1 and not each.quantized]
    with ExitStack() as stack:  # on an error it undoes all; otherwise `close` does
        patches = stack.enter_context(Patches())
        if config.disk_offload:
            workspace = OffloadWorkspace(config.offload_path)
            stack.callback(workspace.close)
            ds_config["zero_optimization"]["offload_param"]["nvme_path"] = str(workspace.path)
            facts["ds_config"]["zero_optimization"]["offload_param"]["nvme_path"] = config.offload_dir
        context = deepspeed.zero.Init(config_dict_or_path=ds_config)
        store = ParameterStore(context, plan)
        stack.callback(store.close)
        patches.share_item(vars(coordinator), "get_all_parameters", _PartitionedParameters)
        load_weights(model, job.spec, config.seed, ranks.device, store.add, progress)
        model.to(ranks.device)  # buffers; the parameters are empty by now
        kinds = {type(layer) for layer in decoder_layers(model)[1]}
        set_z3_leaf_modules(model, sorted(kinds, key=lambda kind: kind.__name__))
        stack.callback(_forget_model, model)
        before = {module: [set(table) for table in _tables(module)] for module in model.modules()}
        engine = deepspeed.initialize(model=model, config=ds_config)[0]
        added = {
            module: [set(table) - names for table, names in zip(_tables(module), known)]
            for module, known in before.items()
        }
        stack.callback(_remove_from_modules, added)
        engine.module.eval()
        store.count_transfers(model)
        stack.callback(engine.destroy)
        if plan.settings:
            stack.callback(patch_functionals().close)
        close = stack.pop_all().close
    return LoadedModel(
        model=engine.module,
        device=ranks.device,
        dtype=job.spec.dtype,
        weight_bytes=store.weight_bytes,
        transfers=store.transfers,
        facts=facts,
        close=close,
    )


def _has_dequantize_kernel(job: Job, dtype: torch.dtype) -> bool:
    """Return whether DeepSpeed dequantizes with one kernel; otherwise it calls up to eight PyTorch operators."""
    return job.on_gpu and dtype == torch.float16


def compile_dequantization(ranks: Ranks, say: Callable[[str], None]) -> None:
    """Compile the kernel that dequantizes float16 on a GPU, once per machine; `say` gets a line before. Raise what the compiler raises."""
    _prepare_environment(0, ranks)
    build_modules(disk=False, use_gds=False, dequantize_on_gpu=True, say=say)


def _prepare_environment(verbose: int, ranks: Ranks | None) -> None:
    """Set DeepSpeed's log level, build folder, and GPU architectures (it cannot parse names such as 9.0a).

    `ranks` is None in plans for another machine, for which nothing is built.
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
    """Quantizes parameters on the device one by one and partitions them under ZeRO-3; counts the bytes that ZeRO-3 then fetches."""

    def __init__(self, context, plan: DeepSpeedPlan):
        self.context, self.plan = context, plan  # the context is DeepSpeed's `zero.Init`
        self.transfers = Transfers()  # updated in each pass after `count_transfers`
        self.weight_bytes = 0  # parameters so far, as stored, over all ranks
        self.swapper = context.param_swapper if offload_device(plan.ds_config) == "nvme" else None
        if self.swapper is not None:
            _make_swapper_safe(self.swapper)

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
        parameter.data = parameter.data.to(self.plan.job.ranks.device)
        # a head is untied after the plan, where the checkpoint has other values for it
        stored = self.plan.stored.get(name)
        stored = stored or StoredWeight(name, parameter, parameter.numel(), quantized=False, layer=None, uses=1)
        if stored.quantized:
            quantize_parameter(parameter, self.plan.settings)
        self.weight_bytes += parameter.nbytes
        self.context._convert_to_deepspeed_param(parameter)
        ranks = self.plan.job.ranks.world_size
        if locate(stored, self.plan.ds_config, self.plan.job.spec.dtype, ranks) == "host":
            self._allocate_host_partition(parameter)
        parameter.partition(has_been_updated=True)

    def _allocate_host_partition(self, parameter: torch.nn.Parameter) -> None:
        """Do what ZeRO-3 does at a first partition, but allocate the exact size."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        aligned = self.context._aligned_size(parameter)
        share = aligned // self.plan.job.ranks.world_size
        parameter.ds_tensor = host_empty((share,), parameter.dtype, self.plan.pinned)
        parameter.ds_tensor.ds_numel = share
        parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        parameter.ds_tensor.final_location = None
        parameter.ds_numel_aligned = aligned

    def count_transfers(self, model) -> None:
        """Count bytes where ZeRO-3 fetches: host partitions at a gather, NVMe partitions at a swap-in."""
        if offload_device(self.plan.ds_config) == "none":
            return
        transfers, swapper = self.transfers, self.swapper

        def counted(gather):
            def call(params, *args, **kwargs):
                params = list(params)
                for parameter in params:
                    # where the partition belongs, not where it is: the gather itself may read NVMe first
                    if parameter.ds_tensor.final_location is not None or parameter.ds_tensor.device.type == "cpu":
                        transfers.host_to_device_bytes += parameter.ds_tensor.ds_numel * parameter.element_size()
                return gather(params, *args, **kwargs)

            return call

        for parameter in model.parameters():
            parameter.all_gather_coalesced = counted(parameter.all_gather_coalesced)
        if swapper is not None:
            swap_in = swapper.swap_in

            def counted_swap_in(params, *args, **kwargs):
                for p in params:
                    transfers.disk_read_bytes += swapper._io_aligned_numel(p.ds_tensor.ds_numel) * p.element_size()
                return swap_in(params, *args, **kwargs)

            swapper.swap_in = counted_swap_in


class _PartitionedParameters(SharedPatch):
    """Lets DeepSpeed fetch and release only parameters that it has partitioned: adapters add others to modules later."""

    def __call__(self, module, recurse=False):
        return [(name, parameter) for name, parameter in self.before(module, recurse) if hasattr(parameter, "ds_id")]


def _make_swapper_safe(swapper) -> None:
    """Patch `swapper`, which ends with the engine.

    It allocates disk space before it writes a partition: DeepSpeed ignores failed writes, and a later read of a short file ends the
    process. It defers signals until it has counted the requests to libaio, or those that it waited for: with a wrong count it would skip
    a wait, or wait for nothing, which ends the process.
    """
    swap_out = swapper._swap_out

    def reserved_swap_out(params, *args, **kwargs):
        for path, buffer in zip(swapper._get_swap_paths(params), swapper._get_swap_buffers(params)):
            reserve(Path(path), buffer.nbytes)
        return swap_out(params, *args, **kwargs)

    def deferred(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            with defer_signals():
                return method(*args, **kwargs)

        return call

    swapper._swap_out = reserved_swap_out
    for name in ("_swap_out", "swap_in", "synchronize_writes", "synchronize_reads"):
        setattr(swapper, name, deferred(getattr(swapper, name)))


def _tables(module: torch.nn.Module) -> tuple[dict, dict, dict]:
    """Return what `deepspeed.initialize` adds to: attributes, forward pre-hooks and forward hooks."""
    return vars(module), module._forward_pre_hooks, module._forward_hooks


def _remove_from_modules(added: dict[torch.nn.Module, list[set]]) -> None:
    """Remove DeepSpeed's entries in `_tables`; they keep the engine alive. The model cannot be called any more."""
    for module, names in added.items():
        module._parameters = vars(module).get("_original_parameters", module._parameters)
        for table, keys in zip(_tables(module), names):
            for key in keys:
                table.pop(key, None)


def _forget_model(model: torch.nn.Module) -> None:
    """Remove a model from DeepSpeed's global variables, which would keep all its weights in host memory."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    ids = set(map(id, model.modules()))
    # the model, and the modules that an error or a signal ended in
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in ids]
    for method in vars(PartitionedParameterCoordinator).values():
        cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        for function in (method, *cells):  # a decorator may wrap the cached function
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()  # it holds all arguments
