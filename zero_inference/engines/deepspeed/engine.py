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
    Places,
    build_ds_config,
    layer_sizes,
    layers_ahead,
    quantization_settings,
)
from zero_inference.engines.deepspeed.gathered import Moment
from zero_inference.engines.deepspeed.memory import places_of_weights
from zero_inference.engines.deepspeed.modules import (
    build_modules,
    check_aio,
    check_compilers,
    init_distributed,
    stderr_of_process,
    use_private_folder,
)
from zero_inference.engines.deepspeed.quantization import (
    QuantizationPlan,
    QuantizedFunctionals,
    dequantized_gb_per_s,
    plan_quantization,
    quantized_and_back,
    stored_numel,
)
from zero_inference.engines.deepspeed.release import Additions
from zero_inference.engines.deepspeed.store import ParameterStore, leave_adapters_alone
from zero_inference.engines.offload_folder import OffloadWorkspace, check_offload_folder
from zero_inference.errors import UsageError
from zero_inference.models.layers import decoder_layers
from zero_inference.models.weights import load_weights
from zero_inference.utils.format import format_bytes
from zero_inference.utils.progress import SLOW_IMPORT_S, current_progress
from zero_inference.utils.ranks import Ranks

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
    moments: tuple[Moment, ...]

    @property
    def prefilled_bytes(self) -> int:
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

    def as_stored(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """See `EnginePlan`."""
        if self.quantization is None or name not in self.quantization.names:
            return values
        return quantized_and_back(values.to(self.job.ranks.device), self.quantization.settings)

    def in_words(self) -> list[str]:
        """See `EnginePlan`."""
        lines = super().in_words() + self.dequantized_in_words()
        if self.job.config.disk_offload and not self.footprint.disk:
            least = Places.of(self.ds_config, self.job.spec.dtype, self.job.ranks.world_size).least_disk_bytes
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
        with stderr_of_process():
            build_modules(*self.modules, say=current_progress().say)

    def measure_restored_gb_per_s(self, dtype: torch.dtype) -> float | None:
        """See `EnginePlan`."""
        if self.quantization is None:
            return None
        if _dequantizes_by_kernel(self.job, dtype):
            build_modules(False, False, dequantize_on_gpu=True, say=None)
        return dequantized_gb_per_s(self.quantization.settings, dtype, self.job.ranks.device)


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
        parted_bytes=brought["device"] if config.offload == "gpu" else 0,
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
        with stderr_of_process():
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
        Places.of(ds_config, job.spec.dtype, job.ranks.world_size),
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
    use_private_folder(device.type)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    with current_progress().slow("importing DeepSpeed", SLOW_IMPORT_S):
        from deepspeed.utils import logger

    logger.setLevel(logging.ERROR if verbose < 2 else logging.INFO)
