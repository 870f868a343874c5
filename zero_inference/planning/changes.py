"""Changes of options that make a run fit, or decode faster; and the memory check before loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from zero_inference.config.option import ALL
from zero_inference.config.options import (
    DEFAULTS,
    MIN_RING_DEPTH,
    OPTIONS,
    QUANT_BITS,
    QUANTIZING_ENGINES,
    SHARDING_ENGINES,
    STORED,
    STREAM_OPTIONS,
)
from zero_inference.config.run_config import RunConfig, shell_words
from zero_inference.engines.base import Job
from zero_inference.errors import UsageError
from zero_inference.kv_cache.device import why_not_offloaded
from zero_inference.planning.make_plan import plan_with
from zero_inference.planning.memory import node_needs
from zero_inference.planning.plan import Plan, driven_devices
from zero_inference.utils.format import significant

Fields = dict[str, Any]  # other values of options, by field name of RunConfig
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
MAX_PAIRS = 3  # of changes that fit, in one error
MIN_SPEEDUP = 1.5  # of options that `faster_than` names


def fitting_plan(job: Job, fields: Fields) -> Plan | None:
    """Return the plan with other options; None if they cannot work or do not fit."""
    try:
        plan = plan_with(job, **fields)
    except UsageError:
        return None
    return plan if plan.fits else None


def changes_that_fit(job: Job) -> list[str]:
    """Return options to add so that `job` fits, each planned: single changes, or the cheapest pairs where none does. Only the mildest
    change of each kind (8 or 4 bits, smaller and smaller batches) is named."""
    return list(_options_that_fit(_changes(job), job)) or list(islice(_options_that_fit(_pairs(job), job), MAX_PAIRS))


def advice_to_fit(job: Job, changes: Sequence[str], shorter: bool = False) -> str:
    """Return `changes` of `changes_that_fit`, or what else would help, to follow "use" or "it would fit with"; with `shorter` also fewer
    or shorter sequences."""
    if changes:
        return changes[0] if len(changes) == 1 else f"one of: {'; '.join(changes)}"
    more = "more GPUs, nodes or memory" if job.config.engine in SHARDING_ENGINES else "a machine with more memory"
    return f"{'fewer or shorter sequences, ' * shorter}{more}, or a smaller model"


def _changes(job: Job) -> list[Fields]:
    """Return single changes to the options of `job`, the cheapest first.

    First those that keep the tokens, then fewer bits, then a smaller batch, and last those that slow decoding several times:
    pageable memory ran at 0.17 of the speed of page-locked memory, the disk at 0.04 (README, one H200).
    """
    config, ranks = job.config, job.ranks.world_size
    changes: list[Fields] = []
    if config.engine == "deepspeed" and config.offload == "gpu":
        changes.append({"cpu_offload": True})
    if _leaves_gpus_out(job):
        changes.append({"num_gpus": ALL})
    if config.engine == "resident" and ranks == 1:
        changes.append({"engine": "stream"})
    if not config.kv_offload and why_not_offloaded(job.empty_model.model) is None:
        changes.append({"kv_offload": True})
    if config.host_memory is not None:
        changes.append({"host_memory": None})
    if config.engine == "stream" and config.ring_depth != MIN_RING_DEPTH:
        changes.append({"ring_depth": MIN_RING_DEPTH})
    if config.engine == "stream" and config.cpu_share != 0:  # CPU-computed experts are cached on the device as well
        changes.append({"cpu_compute": "off", "cpu_threads": None})
    if _could_keep_stored(job):
        changes.append({"quant_bits": STORED})
    if config.engine in QUANTIZING_ENGINES:
        changes += [{"quant_bits": bits} for bits in (8, 4) if bits < job.quant_bits]
    rank_batch = config.batch_size // ranks
    while rank_batch := rank_batch // 2:
        changes.append({"batch_size": rank_batch * ranks})
    if job.pin_weights:
        changes.append({"pin_memory": 0})
    if not config.disk_offload and config.engine != "stream":  # which uses the disk by itself
        engine = config.engine if config.engine == "accelerate" else "deepspeed"
        defaults = {name: DEFAULTS[name] for name in (*STREAM_OPTIONS, "num_gpus")}
        changes.append({"engine": engine, "disk_offload": True, "cpu_offload": False, **defaults})
    return changes


def _could_keep_stored(job: Job) -> bool:
    """Return whether the run converts the weights of a quantized checkpoint, which its engine could keep."""
    return job.spec.checkpoint_format is not None and job.config.engine == "stream" and not job.config.keeps_stored


def _leaves_gpus_out(job: Job) -> bool:
    """Return whether `--num-gpus` names fewer GPUs than the machine has."""
    every = driven_devices(replace(job.config, num_gpus=None), job.ranks, job.machine)
    return job.config.num_gpus is not None and len(every) > len(job.devices)


def _pairs(job: Job) -> list[Fields]:
    """Return pairs of changes of different options, the second possible after the first, the cheapest pairs first. A change costs its
    index in `_changes`, a pair the sum of both."""
    pairs: dict[frozenset, tuple[int, Fields]] = {}  # each once, in either order
    for first_cost, first in enumerate(_changes(job)):
        for second_cost, second in enumerate(_changes(replace(job, config=replace(job.config, **first)))):
            if not first.keys() & second.keys():
                both = first | second
                pairs.setdefault(frozenset(both.items()), (first_cost + second_cost, both))
    return [both for _, both in sorted(pairs.values(), key=lambda pair: pair[0])]


def _options_that_fit(choices: Iterable[Fields], job: Job) -> Iterator[str]:
    """Yield the options of those of `choices` that fit; of choices that set the same fields only the first."""
    names_found = set()
    for fields in choices:
        if frozenset(fields) not in names_found and fitting_plan(job, fields):
            names_found.add(frozenset(fields))
            yield _options(job.config, fields)


def _options(config: RunConfig, fields: Fields) -> str:
    """Return the options to add to a command, and those to drop: "--engine deepspeed --disk-offload instead of --gpu-memory"."""
    changed = {name: value for name, value in fields.items() if value != getattr(config, name)}
    drop = [
        name
        for name in ("cpu_offload", "num_gpus", *STREAM_OPTIONS)
        if name in changed and changed[name] == DEFAULTS[name]
    ]
    add = shell_words({name: value for name, value in changed.items() if name not in drop})
    # --cpu-offload was not typed where the stream engine implies it
    flags = [OPTIONS[name].flag for name in drop if name != "cpu_offload" or config.engine != "stream"]
    return " ".join(add) + (f" instead of {' '.join(flags)}" if flags else "")


@dataclass(frozen=True)
class Faster:
    """A change of options that is predicted to decode clearly faster."""

    options: str  # to add to the command, such as `--quant-bits 4`
    tokens_per_s: float  # of decoding with them
    times: float  # `tokens_per_s` as a multiple of that without them
    at_most: bool  # `tokens_per_s` is an upper bound

    def in_words(self) -> str:
        """Return a text such as "--quant-bits 4 gives at most 3.39 token/s (4.84 times as many)"."""
        most = "at most " if self.at_most else ""
        rate = f"{most}{significant(self.tokens_per_s)} token/s"
        return f"{self.options} gives {rate} ({significant(self.times)} times as many)"


def faster_than(plan: Plan, goal: str | None = None) -> list[Faster]:
    """Return changes that are predicted to decode at least `MIN_SPEEDUP` times as fast: the best other engine, all GPUs, fewer bits, larger
    batch (not with the goal "latency"); none with the goal "memory", where no speed is predicted, and for several ranks.

    If another engine is named, fewer bits have to be `MIN_SPEEDUP` times as fast as that.
    """
    config = plan.job.config
    if plan.times is None or plan.job.ranks.world_size > 1 or goal == "memory":
        return []
    engines: list[Fields] = [
        {"engine": engine, "cpu_offload": engine == "stream", "disk_offload": False, "ds_config": None}
        for engine in ("stream", "resident")
        if engine != config.engine
    ]
    bits = [engine | {"quant_bits": n} for engine in ({}, *engines) for n in QUANT_BITS if n < plan.job.quant_bits]
    bits += [{"quant_bits": STORED}] if _could_keep_stored(plan.job) else []
    batches = [{"batch_size": size} for size in BATCH_SIZES if size > config.batch_size]
    if goal == "latency" or config.prompt or config.prompts:
        batches = []
    found, engine_speedup = [], 1.0  # of the engine in `found`
    more_gpus: list[Fields] = [{"num_gpus": ALL}] if _leaves_gpus_out(plan.job) else []
    for choices in (engines, more_gpus, bits, batches):
        plans = [(fields, fitting_plan(plan.job, fields)) for fields in choices]
        timed = [(fields, other) for fields, other in plans if other and other.times]
        if not timed:
            continue
        fields, best = max(timed, key=lambda each: each[1].tokens_per_s)
        speedup = best.tokens_per_s / plan.tokens_per_s
        if speedup >= MIN_SPEEDUP * (engine_speedup if choices is bits else 1.0):
            shown = ("engine", "num_gpus", "quant_bits", "batch_size")  # the offload follows from the engine
            options = shell_words({name: value for name, value in fields.items() if name in shown})
            found.append(Faster(" ".join(options), best.tokens_per_s, speedup, best.times.is_bound))
            engine_speedup = speedup if choices is engines else engine_speedup
    return found


def what_does_not_fit(plan: Plan) -> str:
    """Return what is missing and what would fit."""
    # `_least_plan` also returns plans that meet all needs and that their engine refuses
    short = next((need for need in plan.needs if not need.fits), plan.needs[0])
    changes = changes_that_fit(plan.job)
    return f"{plan.describe(work=True)}: needs {short.shortage()}" + (f"; fits with {changes[0]}" if changes else "")


def check_memory(plan: Plan) -> None:
    """Raises UsageError where weights, KV cache and ids, or all of them, exceed the memory. Only what is needed for certain counts: no
    activations and no gathered weights, which `--dry-run` estimates."""
    job, footprint = plan.engine_plan.job, plan.engine_plan.footprint  # whose free memory is without the draft's
    devices, host = range(len(job.devices)), footprint.host
    weights = [plan.engine_plan.weight_bytes_on(device) - footprint.gathered for device in devices]
    # host memory besides the devices' bytes
    loading = max(host, footprint.loading - (0 if job.on_gpu else sum(weights)))
    cache = [job.min_cache_bytes_on(plan.engine_plan.cache_share_on(device)) for device in devices]
    cache_host = job.kv_host_bytes + 8 * job.config.batch_size * job.length  # every rank has all ids, as int64
    cache_name = f"the KV cache and ids of {job.config.batch_size} x {job.length} tokens"
    for what, device_bytes, host_bytes in (
        ("its weights and their buffers", weights, loading),
        (cache_name, cache, cache_host),
        (f"its weights, {cache_name}", list(map(sum, zip(weights, cache))), host + cache_host),
    ):
        for need in node_needs(job, device_bytes, host_bytes):
            if not need.fits:
                advice = advice_to_fit(job, changes_that_fit(plan.job), shorter=cache_name in what)
                raise UsageError(f"{job.config.model}: {what} need {need.shortage()}; use {advice}.")
