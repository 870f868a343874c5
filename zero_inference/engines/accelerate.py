"""accelerate's CPU and disk offload, for comparison."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.engines.base import (
    CostTerms,
    EnginePlan,
    Footprint,
    Job,
    LoadedModel,
    LoadProgress,
    refuse_written_weights,
)
from zero_inference.engines.offload_folder import OffloadWorkspace, check_offload_folder, reserve
from zero_inference.errors import RunError, UsageError
from zero_inference.models.empty_model import parameter_bytes
from zero_inference.models.weights import load_weights, return_free_memory
from zero_inference.utils.format import first_line
from zero_inference.utils.patching import Patches
from zero_inference.utils.timing import Transfers

# torch's errors about a tensor on the meta device; other errors contain "metadata" or "meta-llama".
META_TENSOR_ERROR = re.compile(
    r"\b(on|device:?|two devices, [\w:, ]+) meta(?![\w/-])|two devices, meta\b|\bmeta'? (tensor|backend)|register_meta function",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class AcceleratePlan(EnginePlan):
    """accelerate's hooks copy a module's weights when it is called, and the host waits for them."""

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        modules = self.job.empty_model.model.modules()
        fetches = sum(any(True for _ in module.parameters(recurse=False)) for module in modules)
        return replace(super().cost_terms, copies_overlap=False, fetches=fetches)


def plan(job: Job) -> AcceleratePlan:
    """Plan copies of one module's weights at a time; disk offload still loads through host memory.

    Raises:
        UsageError: several ranks, or a model that changes its weights.
    """
    refuse_written_weights(job)
    if job.ranks.world_size > 1:
        raise UsageError(
            f"--engine accelerate runs in one process, but {job.ranks.world_size} were started; start one, "
            "or use --engine deepspeed."
        )
    model, total = job.empty_model.model, job.sizes.parameter_bytes
    largest = max(p.nbytes for p in model.parameters())
    # copied, and written to disk, under each name
    fetched = sum(p.nbytes for _, p in model.named_parameters(remove_duplicate=False))
    disk = fetched if job.config.disk_offload else 0
    if job.config.disk_offload and not job.on_gpu:
        # a weight is copied from its mapped file, whose pages count as the process's
        footprint = Footprint(device=2 * largest, gathered=2 * largest, disk=disk, loading=total)
    else:  # a CPU computes with weights in place
        footprint = Footprint(device=largest if job.on_gpu else 0, host=total, disk=disk)
    return AcceleratePlan(job, footprint, pinned=False, weight_bytes=total, fetched_bytes=fetched, disk_bytes=disk)


def check(plan: EnginePlan) -> None:
    """Raise UsageError if the offload folder cannot be used or has too little space."""
    if plan.job.config.disk_offload and not plan.job.config.dry_run:  # a dry run prints the space instead
        check_offload_folder(plan.job.config.offload_path, plan.footprint.disk)


def load(plan: EnginePlan, progress: LoadProgress = lambda done: None) -> LoadedModel:
    """Load into host memory, then `cpu_offload` or `disk_offload` with the device to execute on."""
    from accelerate import cpu_offload, disk_offload

    config, spec, device = plan.job.config, plan.job.spec, plan.job.ranks.device
    model = plan.job.empty_model.model

    def adopt(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.cpu()

    load_weights(model, spec, config.seed, device, adopt, progress)
    weight_bytes, transfers = parameter_bytes(model), Transfers()
    with ExitStack() as stack:  # on an error it undoes all; otherwise `close` does
        if config.disk_offload:
            workspace = OffloadWorkspace(config.offload_path)
            stack.callback(workspace.close)
            _write_weights(model, workspace.path)
            disk_offload(model, str(workspace.path), execution_device=device)
            return_free_memory()  # of the weights, which are on disk now
        else:
            cpu_offload(model, execution_device=device)
        stack.callback(_remove_hooks, model)
        # parameters are on the meta device between forwards; `generate` warns that inputs should be there too
        warnings.filterwarnings("ignore", message="You are calling .generate\\(\\) with the `input_ids`")
        _explain_missing_weights(model, stack.enter_context(Patches()))
        for module in model.modules():
            hook = getattr(module, "_hf_hook", None)
            for one in getattr(hook, "hooks", [hook]):  # of a SequentialHook all
                if getattr(one, "weights_map", None) is not None:
                    one.weights_map = _CountedWeights(one.weights_map, transfers, config.disk_offload)
        close = stack.pop_all().close
    return LoadedModel(
        model=model, device=device, dtype=spec.dtype, weight_bytes=weight_bytes, transfers=transfers, close=close
    )


def _remove_hooks(model: torch.nn.Module) -> None:
    """Undo accelerate's changes; its own `remove_hook_from_module` would read all weights again."""
    for module in model.modules():
        for name in ("_hf_hook", "_old_forward", "forward"):
            vars(module).pop(name, None)


def _explain_missing_weights(model: torch.nn.Module, patches: Patches) -> None:
    """Patch `model.forward` to raise RunError for a weight that accelerate has not copied."""
    original = model.forward

    @functools.wraps(original)  # generate inspects the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not META_TENSOR_ERROR.search(str(error)):
                raise
            raise RunError(
                f"--engine accelerate: {model.config.model_type} reads a weight without calling its module, but accelerate copies weights "
                f"only for that call; use --engine stream or deepspeed ({first_line(error)})"
            ) from error

    patches.set_attr(model, "forward", forward)


def _write_weights(model: torch.nn.Module, folder: Path) -> None:
    """Fill `folder` as `accelerate.utils.offload_state_dict` does, but not through mapped pages, which on a full disk end the process.

    Raises:
        RunError: the file system has no space for it, or refuses it.
    """
    files, index = {}, {}
    for name, tensor in model.state_dict().items():
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        files[f"{name}.dat"] = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    for name, data in (files | {"index.json": memoryview(json.dumps(index).encode())}).items():
        reserve(folder / name, max(1, data.nbytes))
        with open(folder / name, "r+b") as file:
            file.write(data)


class _CountedWeights(Mapping):
    """Counts the weights that accelerate's hooks copy before each forward."""

    def __init__(self, weights: Mapping, transfers: Transfers, from_disk: bool):
        self.weights, self.transfers, self.from_disk = weights, transfers, from_disk

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor = self.weights[key]
        self.transfers.host_to_device_bytes += tensor.nbytes
        self.transfers.disk_read_bytes += tensor.nbytes if self.from_disk else 0
        return tensor

    def __iter__(self):
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __getattr__(self, name: str):  # PEFT reads `dataset`
        return getattr(self.weights, name)

    def __deepcopy__(self, memo: dict):
        raise UsageError(
            "a module was copied: the engine has placed the weights, and they cannot be changed; use engine='resident'."
        )
