"""Does a run fit? Bytes it needs on the device, in host memory, page-locked and on disk, against what is there.

Weights and caches are exact; activations are an estimate of the largest tensors alive in a prefill.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from zero_inference.config import RunConfig
from zero_inference.distributed import Ranks
from zero_inference.engines import engine_module
from zero_inference.engines.base import Footprint
from zero_inference.environment import available_host_bytes
from zero_inference.errors import UsageError
from zero_inference.models.sizes import activation_bytes, kv_cache_bytes, kv_layer_bytes
from zero_inference.models.spec import ModelSpec
from zero_inference.offload.host_cache import SLOTS
from zero_inference.utils import GB


@dataclass(frozen=True)
class Need:
    """Bytes needed at one place of one node; `available` is None where nothing limits it."""

    place: str
    needed: int
    available: int | None

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available


def plan_memory(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> list[Need]:
    """What this node needs. On a CPU-only machine the device is host memory, and is counted there."""
    model = spec.outline
    weights: Footprint = engine_module(config.engine).footprint(config, spec, ranks, model)
    local = ranks.local_world_size
    batch = config.batch_size // ranks.world_size or 1
    kv = kv_cache_bytes(spec, batch, config.prompt_len + config.gen_len)
    device = weights.device + activation_bytes(spec, batch, config.prompt_len)
    host, pinned = weights.host, weights.pinned
    if config.kv_offload:
        device += SLOTS * kv_layer_bytes(spec, batch, config.prompt_len + config.gen_len)
        host += kv
        pinned += kv if config.pin_kv_cache else 0
    else:
        device += kv
    on_cuda = ranks.device.type == "cuda"
    needs = []
    if on_cuda:
        needs.append(Need("device memory (each GPU)", device, ranks.free_device_bytes()))
    else:
        host += device
    needs.append(Need("host memory", host * local, available_host_bytes()))
    if on_cuda:
        needs.append(Need("page-locked memory", pinned * local, available_host_bytes()))  # the driver asks no memlock limit
    if weights.disk:
        needs.append(Need(f"disk ({config.offload_path})", weights.disk * local, _disk_free(config.offload_path)))
    return needs


def refuse_hopeless(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> None:
    """Raises UsageError where host memory cannot even hold what the weights need there.

    Only what is exact is refused; a device that is too small shows itself, and `--dry-run` estimates it.
    """
    weights: Footprint = engine_module(config.engine).footprint(config, spec, ranks, spec.outline)
    need = Need("host memory", weights.host * ranks.local_world_size, available_host_bytes())
    if not need.fits:
        changes = changes_that_fit(config, spec, ranks)
        raise UsageError(f"{config.model}: its weights need {need.needed / GB:.1f} GiB of {need.place} and "
                         f"{need.available / GB:.1f} GiB are there; "
                         + (f"use one of: {'; '.join(changes)}." if changes else "use --disk-offload, more nodes or memory."))


def changes_that_fit(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> list[str]:
    """Single changes, cheapest first, each tried with the same arithmetic."""
    candidates: list[tuple[str, dict]] = []
    if config.engine == "deepspeed" and config.offload == "gpu":
        candidates.append(("--cpu-offload", {"cpu_offload": True}))
    if config.engine == "resident":
        candidates.append(("--engine stream", {"engine": "stream"}))
    if config.engine in ("deepspeed", "stream"):
        candidates += [(f"--quant-bits {bits}", {"quant_bits": bits}) for bits in (8, 4) if bits < config.quant_bits]
    if not config.kv_offload:
        candidates.append(("--kv-offload", {"kv_offload": True}))
    if config.pin_memory is not False and config.offload != "gpu" and ranks.device.type == "cuda":
        candidates.append(("--pin-memory 0", {"pin_memory": False}))
    if config.cpu_offload:
        words = "--engine deepspeed --disk-offload" if config.engine == "stream" else "--disk-offload instead of --cpu-offload"
        engine = "deepspeed" if config.engine == "stream" else config.engine
        candidates.append((words, {"engine": engine, "cpu_offload": False, "disk_offload": True, "gpu_memory": None, "ring_depth": None}))
    fitting = [words for words, change in candidates if _fits(config, change, spec, ranks)]
    batch = config.batch_size // 2
    while batch >= ranks.world_size:  # the largest that fits
        if _fits(config, {"batch_size": batch}, spec, ranks):
            fitting.append(f"--batch-size {batch}")
            break
        batch //= 2
    return fitting


def _fits(config: RunConfig, change: dict, spec: ModelSpec, ranks: Ranks) -> bool:
    try:
        return all(need.fits for need in plan_memory(replace(config, **change).validate(), spec, ranks))
    except UsageError:
        return False


def describe(needs: list[Need]) -> str:
    """One line a place."""
    lines = []
    for need in needs:
        there = "no limit" if need.available is None else f"{need.available / GB:.2f} GiB free"
        lines.append(f"{need.place}: {need.needed / GB:.2f} GiB needed, {there}{'' if need.fits else '  <- does not fit'}")
    return "\n".join(lines)


def _disk_free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
