"""Does a run fit? Bytes it needs on the device, in host memory, page-locked and on disk, against what is there.

Weights and caches are exact; activations are an estimate of the largest tensors alive in a prefill.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from zero_inference.config import RunConfig
from zero_inference.engines import engine_module
from zero_inference.engines.base import Footprint
from zero_inference.errors import UsageError
from zero_inference.kv_cache.device import other_layer_types
from zero_inference.kv_cache.host import SLOTS
from zero_inference.models.sizes import activation_bytes, kv_cache_bytes, kv_layer_bytes
from zero_inference.models.spec import ModelSpec
from zero_inference.runtime.distributed import Ranks
from zero_inference.runtime.environment import available_host_bytes
from zero_inference.utils import GB

MOST_PAIRS = 3


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
        needs.append(
            Need("page-locked memory", pinned * local, available_host_bytes())
        )  # the driver asks no memlock limit
    if weights.disk:
        needs.append(Need(f"disk ({config.offload_path})", weights.disk * local, _disk_free(config.offload_path)))
    return needs


def refuse_hopeless(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> None:
    """Raises UsageError where host memory cannot even hold what the weights or the tokens need there.

    Only what is exact is refused; a device that is too small shows itself, and `--dry-run` estimates it.
    """
    weights: Footprint = engine_module(config.engine).footprint(config, spec, ranks, spec.outline)
    need = Need("host memory", weights.host * ranks.local_world_size, available_host_bytes())
    if not need.fits:
        changes = changes_that_fit(config, spec, ranks)
        raise UsageError(
            f"{config.model}: its weights need {need.needed / GB:.1f} GiB of {need.place} and "
            f"{need.available / GB:.1f} GiB are there; "
            + (f"use one of: {'; '.join(changes)}." if changes else "use more GPUs, nodes or memory.")
        )
    length = config.prompt_len + config.gen_len
    tokens = 8 * config.batch_size * length  # every rank has all ids, as int64
    if config.kv_offload or ranks.device.type == "cpu":
        tokens += kv_cache_bytes(spec, config.batch_size // ranks.world_size, length)
    need = Need("host memory", tokens * ranks.local_world_size, available_host_bytes())
    if not need.fits:
        raise UsageError(
            f"--batch-size {config.batch_size}: {length} tokens each need {need.needed / GB:.1f} GiB of {need.place} "
            f"for ids, keys and values, and {need.available / GB:.1f} GiB are there; "
            "lower it, or shorten the prompts."
        )


@dataclass(frozen=True)
class Change:
    """Options to add to a command, what they set in its RunConfig, and given options that have to go for them."""

    options: str
    fields: dict[str, Any]
    instead_of: tuple[str, ...] = ()


def changes_that_fit(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> list[str]:
    """What to type so that it fits, each tried with the same arithmetic: single changes, or the cheapest pairs where none does.

    Of changes of one kind (8 or 4 bits, smaller and smaller batches) only the mildest that fits is named.
    """
    singles = [(change,) for change in _changes(config, spec, ranks)]
    found = list(_fitting(singles, config, spec, ranks))
    return found or list(islice(_fitting(_pairs(config, spec, ranks), config, spec, ranks), MOST_PAIRS))


def _changes(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> list[Change]:
    """Single changes to `config`, the cheapest first.

    First what keeps the tokens, then what rounds the weights, then a smaller batch, and last what slows decoding several times
    over: pageable memory ran at 0.17 of the speed of page-locked memory, the disk at 0.04 (README, one H200).
    """
    changes = []
    if config.engine == "deepspeed" and config.offload == "gpu":
        changes.append(Change("--cpu-offload", {"cpu_offload": True}))
    if config.engine == "resident":
        changes.append(Change("--engine stream", {"engine": "stream"}))
    if not config.kv_offload and not other_layer_types(spec.config):
        changes.append(Change("--kv-offload", {"kv_offload": True}))
    if config.engine in ("deepspeed", "stream"):
        changes += [Change(f"--quant-bits {bits}", {"quant_bits": bits}) for bits in (8, 4) if bits < config.quant_bits]
    of_rank = config.batch_size // ranks.world_size
    while of_rank := of_rank // 2:
        changes.append(Change(f"--batch-size {of_rank * ranks.world_size}", {"batch_size": of_rank * ranks.world_size}))
    if config.pin_memory is not False and config.offload != "gpu" and ranks.device.type == "cuda":
        changes.append(Change("--pin-memory 0", {"pin_memory": False}))
    if not config.disk_offload:
        engine = config.engine if config.engine == "accelerate" else "deepspeed"
        dropped = {
            "--cpu-offload": config.cpu_offload and config.engine != "stream",
            "--gpu-memory": config.gpu_memory is not None,
            "--ring-depth": config.ring_depth is not None,
        }
        changes.append(
            Change(
                f"--engine {engine} --disk-offload" if engine != config.engine else "--disk-offload",
                {"engine": engine, "cpu_offload": False, "disk_offload": True, "gpu_memory": None, "ring_depth": None},
                tuple(option for option, given in dropped.items() if given),
            )
        )
    return changes


def _pairs(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> list[tuple[Change, ...]]:
    """Two changes, the second one possible behind the first, in the order of the sum of their places among single changes."""
    pairs: dict[frozenset[str], tuple[int, Change, Change]] = {}
    for place, first in enumerate(_changes(config, spec, ranks)):
        changed = replace(config, **first.fields)
        for further, second in enumerate(_changes(changed, spec, ranks)):
            if not first.fields.keys() & second.fields.keys():
                pairs.setdefault(frozenset((first.options, second.options)), (place + further, first, second))
    return [changes for _, *changes in sorted(pairs.values(), key=lambda pair: pair[0])]


def _fitting(choices: Iterable[Sequence[Change]], config: RunConfig, spec: ModelSpec, ranks: Ranks) -> Iterator[str]:
    """Those of `choices` that fit, in words; of choices of the same kinds only the first."""
    found = set()
    for changes in choices:
        kinds = frozenset(tuple(change.fields) for change in changes)
        fields = {name: value for change in changes for name, value in change.fields.items()}
        if kinds not in found and _fits(config, fields, spec, ranks):
            found.add(kinds)
            instead_of = [option for change in changes for option in change.instead_of]
            yield " ".join(change.options for change in changes) + (
                f" instead of {' '.join(instead_of)}" if instead_of else ""
            )


def _fits(config: RunConfig, change: dict[str, Any], spec: ModelSpec, ranks: Ranks) -> bool:
    try:
        return all(need.fits for need in plan_memory(replace(config, **change).validate(), spec, ranks))
    except UsageError:
        return False


def describe(needs: list[Need]) -> str:
    """One line a place."""
    lines = []
    for need in needs:
        there = "no limit" if need.available is None else f"{need.available / GB:.2f} GiB free"
        lines.append(
            f"{need.place}: {need.needed / GB:.2f} GiB needed, {there}{'' if need.fits else '  <- does not fit'}"
        )
    return "\n".join(lines)


def _disk_free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
