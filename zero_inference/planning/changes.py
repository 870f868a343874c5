"""Changes of options, single or in pairs, that make a run fit; and the memory check before loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from zero_inference.config.options import DEFAULTS, MIN_RING_DEPTH, QUANTIZING_ENGINES, SHARDING_ENGINES, STREAM_OPTIONS
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Job
from zero_inference.errors import UsageError
from zero_inference.kv_cache.device import why_not_offloaded
from zero_inference.planning.memory import node_needs
from zero_inference.planning.plan import Plan, plan_with

MOST_PAIRS = 3
SHORTER = "lower --batch-size or --prompt-len, or "


@dataclass(frozen=True)
class Change:
    """Options to add to a command.

    Attributes:
        fields: what they set in its RunConfig.
        instead_of: options of the command that have to be dropped.
    """

    options: str
    fields: dict[str, Any]
    instead_of: tuple[str, ...] = ()


def changes_that_fit(job: Job) -> list[str]:
    """Return options to add so that `job` fits, each planned: single changes, or the cheapest pairs where none does.

    Only the mildest change of each kind (8 or 4 bits, smaller and smaller batches) is named.
    """
    singles = [(change,) for change in _changes(job.config, job)]
    return list(_fitting(singles, job)) or list(islice(_fitting(_pairs(job), job), MOST_PAIRS))


def one_of(changes: Sequence[str]) -> str:
    """Return the result of `changes_that_fit` in a sentence."""
    return changes[0] if len(changes) == 1 else f"one of: {'; '.join(changes)}"


def _changes(config: RunConfig, job: Job) -> list[Change]:
    """Return single changes to `config`, which is the job's or a changed one, the cheapest first.

    First those that keep the tokens, then fewer bits, then a smaller batch, and last those that slow decoding several times:
    pageable memory ran at 0.17 of the speed of page-locked memory, the disk at 0.04 (README, one H200).
    """
    changes = []
    if config.engine == "deepspeed" and config.offload == "gpu":
        changes.append(Change("--cpu-offload", {"cpu_offload": True}))
    if config.engine == "resident":
        changes.append(Change("--engine stream", {"engine": "stream"}))
    if not config.kv_offload and why_not_offloaded(job.empty_model.model) is None:
        changes.append(Change("--kv-offload", {"kv_offload": True}))
    if config.engine == "stream" and config.ring_depth != MIN_RING_DEPTH:
        changes.append(Change(f"--ring-depth {MIN_RING_DEPTH}", {"ring_depth": MIN_RING_DEPTH}))
    if config.engine == "stream" and config.cpu_share != 0:  # CPU-computed experts are cached on the device as well
        threads = ("--cpu-threads",) if config.cpu_threads is not None else ()
        changes.append(Change("--cpu-compute off", {"cpu_compute": "off", "cpu_threads": None}, threads))
    if config.engine in QUANTIZING_ENGINES:
        changes += [Change(f"--quant-bits {bits}", {"quant_bits": bits}) for bits in (8, 4) if bits < config.quant_bits]
    ranks = job.ranks.world_size
    rank_batch = config.batch_size // ranks
    while rank_batch := rank_batch // 2:
        changes.append(Change(f"--batch-size {rank_batch * ranks}", {"batch_size": rank_batch * ranks}))
    if replace(job, config=config).pin_weights:
        changes.append(Change("--pin-memory 0", {"pin_memory": False}))
    if not config.disk_offload:
        engine = config.engine if config.engine == "accelerate" else "deepspeed"
        dropped = {
            "--cpu-offload": config.cpu_offload and config.engine != "stream",
            **{f"--{name.replace('_', '-')}": getattr(config, name) != DEFAULTS[name] for name in STREAM_OPTIONS},
        }
        defaults = {name: DEFAULTS[name] for name in STREAM_OPTIONS}
        changes.append(
            Change(
                f"--engine {engine} --disk-offload" if engine != config.engine else "--disk-offload",
                {"engine": engine, "cpu_offload": False, "disk_offload": True, **defaults},
                tuple(option for option, given in dropped.items() if given),
            )
        )
    return changes


def _pairs(job: Job) -> list[tuple[Change, ...]]:
    """Return pairs of changes of different options, the second possible after the first, the cheapest pairs first.

    A change costs its index in `_changes`, a pair the sum of both.
    """
    pairs: dict[frozenset[str], tuple[int, Change, Change]] = {}  # each once, in either order
    for first_cost, first in enumerate(_changes(job.config, job)):
        for second_cost, second in enumerate(_changes(replace(job.config, **first.fields), job)):
            if not first.fields.keys() & second.fields.keys():
                pair = (first_cost + second_cost, first, second)
                pairs.setdefault(frozenset((first.options, second.options)), pair)
    return [(first, second) for _, first, second in sorted(pairs.values(), key=lambda pair: pair[0])]


def _fitting(choices: Iterable[Sequence[Change]], job: Job) -> Iterator[str]:
    """Yield the options of those of `choices` that fit; of choices that set the same fields only the first."""
    fields_found = set()
    for changes in choices:
        fields = {name: value for change in changes for name, value in change.fields.items()}
        if frozenset(fields) not in fields_found and _fits(job, fields):
            fields_found.add(frozenset(fields))
            instead_of = [option for change in changes for option in change.instead_of]
            yield " ".join(change.options for change in changes) + (
                f" instead of {' '.join(instead_of)}" if instead_of else ""
            )


def _fits(job: Job, fields: dict[str, Any]) -> bool:
    try:
        return plan_with(job, **fields).fits
    except UsageError:
        return False


def more_memory(job: Job) -> str:
    """Return the advice for a run that no change of options makes fit."""
    more = "more GPUs, nodes or memory" if job.config.engine in SHARDING_ENGINES else "a machine with more memory"
    return f"{more}, or a smaller model"


def check_memory(plan: Plan) -> None:
    """Raises UsageError where weights, KV cache and ids, or all of them, exceed the memory.

    Only what is needed for certain counts: no activations and no gathered weights, which `--dry-run` estimates.
    """
    job, footprint = plan.job, plan.weights.footprint
    weights = (footprint.device - footprint.gathered, footprint.host)
    loading = max(footprint.host, footprint.loading - (0 if job.on_gpu else weights[0]))
    ids_bytes = 8 * job.config.batch_size * job.length  # all of them in every rank, as int64
    cache = (job.min_cache_device_bytes, job.kv_host_bytes + ids_bytes)
    cache_name = f"the KV cache and ids of {job.config.batch_size} x {job.length} tokens"
    for what, (device_bytes, host_bytes), shorter in (
        ("its weights and their buffers", (weights[0], loading), ""),
        (cache_name, cache, SHORTER),
        (f"its weights, {cache_name}", (weights[0] + cache[0], weights[1] + cache[1]), SHORTER),
    ):
        for need in node_needs(job, device_bytes, host_bytes):
            if not need.fits:
                changes = changes_that_fit(job)
                advice = f"use {one_of(changes)}." if changes else f"{shorter}use {more_memory(job)}."
                raise UsageError(f"{job.config.model}: {what} need {need.shortage()}; {advice}")
