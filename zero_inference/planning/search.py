"""The search over configurations: plan the candidates, rank them by what is predicted, and run the best ones if asked."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.options import DEFAULTS, MIN_RING_DEPTH, QUANT_BITS, QUANTIZING_ENGINES
from zero_inference.config.run_config import RunConfig, non_default_options, shell_words
from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit, RunError, UsageError
from zero_inference.kv_cache.device import why_not_offloaded
from zero_inference.planning.changes import BATCH_SIZES
from zero_inference.planning.cost import Times
from zero_inference.planning.plan import Plan, plan_with
from zero_inference.records.read import read_records
from zero_inference.utils import GB
from zero_inference.utils.processes import isolated_ranks, last_error_line, run_child, run_command
from zero_inference.utils.progress import current_progress

# Offloads to try by engine; weights on disk only where nothing else fits.
OFFLOADS: dict[str, tuple[dict[str, Any], ...]] = {
    "stream": ({"cpu_offload": True},),
    "resident": ({},),
    "deepspeed": ({"cpu_offload": True}, {}, {"disk_offload": True}),
    "accelerate": ({"cpu_offload": True}, {"disk_offload": True}),
}
MIN_GAIN = 1.05  # in token/s, for which the KV cache is moved to host memory
MIN_KV_SHARE = 0.05  # of device memory, which the KV cache takes, for host memory to be tried
ALL_IN_HOST_MEMORY = {"gpu_memory": 0.0, "ring_depth": MIN_RING_DEPTH}  # stream engine
TRIAL_TOKENS = 17  # of a run of `verify`: 16 steps


@dataclass(frozen=True)
class SearchSpace:
    """Values to try.

    Attributes:
        offloads: options of the offload by engine.
        world_sizes: numbers of ranks with a GPU each, ascending; None for the job's.
    """

    engines: tuple[str, ...] = tuple(OFFLOADS)
    quant_bits: tuple[int, ...] = QUANT_BITS
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    kv_offload: tuple[bool, ...] = (False, True)
    offloads: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=lambda: OFFLOADS)
    world_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits, with its predicted times.

    Attributes:
        measured_tokens_per_s: of decoding, where `verify` ran it.
        failed: `verify` ran it, and the run failed.
    """

    plan: Plan
    times: Times
    measured_tokens_per_s: float | None = None
    failed: bool = False

    @property
    def config(self) -> RunConfig:
        return self.plan.job.config

    @property
    def tokens_per_s(self) -> float:
        """Predicted token/s of decoding."""
        return self.times.tokens_per_s(self.config.batch_size)

    @property
    def best_tokens_per_s(self) -> float:
        """Measured token/s of decoding, else predicted."""
        return self.measured_tokens_per_s or self.tokens_per_s

    @property
    def best_step_s(self) -> float:
        """Measured seconds of a decode step, else predicted."""
        return self.config.batch_size / self.best_tokens_per_s

    @property
    def lacks_overhead(self) -> bool:
        """True where its speed is a bound because the overhead of its engine was not measured."""
        return self.times.without_own_work and self.measured_tokens_per_s is None

    @property
    def total_s(self) -> float:
        """Predicted seconds of a generation."""
        return self.times.prefill.seconds + (self.config.gen_len - 1) * self.times.step.seconds

    @property
    def world_size(self) -> int:
        return self.plan.job.ranks.world_size

    @property
    def memory_bytes(self) -> int:
        """Bytes on all devices and in host memory."""
        weights = self.plan.weights
        rank_bytes = weights.host_peak_bytes() + (weights.device_peak_bytes if self.plan.job.on_gpu else 0)
        return self.world_size * rank_bytes

    def command(self) -> str:
        return command_of(self.config, self.world_size)


@dataclass(frozen=True)
class SearchResult:
    """
    Attributes:
        candidates: configurations that fit and whose times are predicted.
        unknown: plans that fit and whose times are unknown.
        too_large: plans that do not fit, the smallest of each engine and number of bits.
    """

    candidates: list[Candidate] = field(default_factory=list)
    unknown: list[Plan] = field(default_factory=list)
    too_large: list[Plan] = field(default_factory=list)


def command_of(config: RunConfig, world_size: int = 1) -> str:
    """Return the shell command that runs `config` with so many GPUs."""
    launched = world_size > 1 or config.engine == "deepspeed"
    return run_command(options_of(config), world_size if launched else None)


def options_of(config: RunConfig) -> list[str]:
    """Return the options of run_model.py for `config`."""
    return shell_words(non_default_options(config))


def find_candidates(job: Job, space: SearchSpace) -> SearchResult:
    """Plan all configurations of `space` for the model and machine of `job`, those with weights on disk only where no other fits."""
    found = SearchResult()
    jobs = [job] if space.world_sizes is None else [_with_ranks(job, count) for count in space.world_sizes]
    for on_disk in (False, True):
        for fields in _weight_options(job, space, on_disk):
            too_large: list[Plan] = []
            for each in jobs:
                part = _plan_batches(each, space, fields)
                found.candidates.extend(part.candidates)
                found.unknown.extend(part.unknown)
                if part.candidates or part.unknown or part.too_large:
                    too_large = part.too_large  # of the most GPUs, of which each then needs the least
            found.too_large.extend(too_large)
        if found.candidates or found.unknown:
            break
    return found


def _with_ranks(job: Job, count: int) -> Job:
    """Return `job` for `count` ranks of one node, with the least free memory of their GPUs; no rank is started."""
    if count == job.ranks.world_size:
        return job
    ranks = replace(job.ranks, world_size=count, local_world_size=count)
    every = [replace(ranks, rank=rank, local_rank=rank, device=torch.device("cuda", rank)) for rank in range(count)]
    free = [job.machine.free_device_bytes(each, False) for each in every]
    return replace(job, ranks=ranks, free_device_bytes=min(each for each in free if each is not None))


def _weight_options(job: Job, space: SearchSpace, on_disk: bool) -> Iterator[dict[str, Any]]:
    """Yield engine, bits and offload of each configuration."""
    for engine in space.engines:
        for bits in space.quant_bits if engine in QUANTIZING_ENGINES else {16} & set(space.quant_bits):
            for offload in space.offloads[engine]:
                if engine == "deepspeed" and not offload and not job.on_gpu and space.offloads is OFFLOADS:
                    continue  # the same as in host memory
                if bool(offload.get("disk_offload")) == on_disk:
                    fields = {"engine": engine, "quant_bits": bits, "cpu_offload": False, "disk_offload": False}
                    yield fields | offload | ({} if on_disk else {"offload_dir": DEFAULTS["offload_dir"]})


def _plan_batches(job: Job, space: SearchSpace, fields: dict[str, Any]) -> SearchResult:
    """Plan the batches that divide over the ranks, from the smallest up, until one does not fit.

    A KV cache in host memory is a candidate where its batch fits only so, or decodes faster by `MIN_GAIN`: predictions are not more
    precise, and what crosses the link or waits for the CPU may be late.
    """
    found = SearchResult()
    tokens_per_s_on_device: dict[int, float] = {}  # by batch
    batch_sizes = sorted(size for size in space.batch_sizes if size % job.ranks.world_size == 0)
    for kv_offload in space.kv_offload:
        for batch_size in batch_sizes:
            if kv_offload and len(space.kv_offload) > 1 and not _kv_cache_is_large(job, batch_size):
                continue
            options = fields | {"batch_size": batch_size, "kv_offload": kv_offload}
            if kv_offload and job.on_gpu and not job.config.kv_offload:  # else as the user chose
                options |= {"pin_kv_cache": True, "async_kv_offload": True}
            refused = False
            try:
                plan = _plan_within_limit(job, options)
            except DoesNotFit:
                plan, refused = _least_plan(job, options)
            except UsageError:
                continue
            if refused or not plan.fits:
                if batch_size == batch_sizes[0] and kv_offload == space.kv_offload[0]:
                    found.too_large.append(plan)
                break
            if plan.times is None:
                found.unknown.append(plan)
                continue
            candidate = Candidate(plan, plan.times)
            if not kv_offload:
                tokens_per_s_on_device[batch_size] = candidate.tokens_per_s
            if not kv_offload or candidate.tokens_per_s >= MIN_GAIN * tokens_per_s_on_device.get(batch_size, 0.0):
                found.candidates.append(candidate)
    return found


def _plan_within_limit(job: Job, options: dict[str, Any]) -> Plan:
    """Return the plan with `options`. Where only a part of the device may be used, a plan of the stream engine names its bytes of weights
    and its ring slots as options, so that its command does the same on the whole device."""
    plan = plan_with(job, **options)
    nbytes = plan.weights.gpu_memory_bytes
    if job.machine.device_limit_bytes is None or nbytes is None or job.config.gpu_memory is not None:
        return plan
    options = options | {"ring_depth": job.config.ring_depth or plan.weights.ring_depth}
    try:
        return plan_with(job, **options, gpu_memory=math.ceil(1e4 * nbytes / GB) / 1e4)
    except DoesNotFit:  # single experts take all that is left
        return plan_with(job, **options, gpu_memory=math.floor(1e4 * nbytes / GB) / 1e4)


def _least_plan(job: Job, options: dict[str, Any]) -> tuple[Plan, bool]:
    """Return the plan of the stream engine with as little on the device as possible, unless the user chose that, and whether the engine
    refuses it too. A refused plan is that of a larger device and of whole layers, with the free bytes of the real one."""
    chosen = job.config.ring_depth or job.config.gpu_memory is not None
    try:
        return plan_with(job, **options, **({} if chosen else ALL_IN_HOST_MEMORY)), False
    except DoesNotFit:
        whole_layers = ALL_IN_HOST_MEMORY | {"cpu_compute": "off", "cpu_threads": None}
        found = plan_with(replace(job, free_device_bytes=1 << 60), **options, **whole_layers)
        return Plan(found.job, replace(found.weights, job=replace(job, config=found.job.config))), True


def _kv_cache_is_large(job: Job, batch_size: int) -> bool:
    """Return whether the KV cache takes enough device memory for host memory to be tried."""
    if why_not_offloaded(job.empty_model.model) or job.free_device_bytes is None:
        return False
    rank_bytes = replace(job, config=replace(job.config, batch_size=batch_size)).kv_bytes()
    return rank_bytes >= MIN_KV_SHARE * job.free_device_bytes


# Sort keys by goal. Bounds without the engine's overhead say little about its speed, so they rank last.
GOALS: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
    "throughput": lambda each: (each.lacks_overhead, -each.best_tokens_per_s, each.best_step_s),
    "latency": lambda each: (each.lacks_overhead, each.best_step_s, -each.best_tokens_per_s),
    "memory": lambda each: (float(each.memory_bytes), -each.best_tokens_per_s),
}


def ranked(candidates: Sequence[Candidate], goal: str) -> list[Candidate]:
    """Return the best first and failed ones last; among equals those with more bits, then those with less memory."""
    return sorted(
        candidates, key=lambda each: (each.failed, *GOALS[goal](each), -each.config.quant_bits, each.memory_bytes)
    )


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in both step time and token/s, by step time. Bounds without overhead are left out where
    others are known."""
    good = [each for each in candidates if not each.failed]
    known = [each for each in good if not each.lacks_overhead] or good
    front: list[Candidate] = []
    for each in ranked(known, "latency"):
        if not front or each.best_tokens_per_s > front[-1].best_tokens_per_s:
            front.append(each)
    return front


def verify(best: Sequence[Candidate], count: int, goal: str, say: Callable[[str], None]) -> list[Candidate]:
    """Run the first `count` of `best` for a few steps, each in a process of its own, and return `best` with these ranked by their measured
    rates; failed ones come last.

    Raises:
        RunError: all of them failed.
    """
    measured, failed = [], []
    chosen = best[:count]
    with (
        tempfile.TemporaryDirectory(prefix="zero-inference-plan-") as folder,
        current_progress().task("plan --verify", len(chosen), ticking=True) as task,
    ):
        for number, candidate in enumerate(chosen, 1):
            command = candidate.command()
            task.at(f"run {number} of {len(chosen)} ({command})", number - 1)
            rate = _measured_tokens_per_s(candidate, Path(folder), number, say)
            if rate is None:
                failed.append(replace(candidate, failed=True))
            else:
                predicted = f"predicted {candidate.tokens_per_s:.3g}"
                say(f"run {number} of {len(chosen)}: {rate:.3g} token/s, {predicted}: {command}")
                measured.append(replace(candidate, measured_tokens_per_s=rate))
    if not measured:
        raise RunError(f"--verify {count}: every run failed; the reasons are above.")
    return ranked(measured, goal) + list(best[count:]) + failed


def _measured_tokens_per_s(candidate: Candidate, folder: Path, number: int, say: Callable[[str], None]) -> float | None:
    """Return the rate of a run; None, and a line to `say`, where it failed."""
    config = replace(candidate.config, gen_len=min(candidate.config.gen_len, TRIAL_TOKENS), dry_run=False, verbose=1)
    log, output = folder / f"{number}.log", folder / f"{number}.out"
    records = log.with_suffix(".jsonl")
    options = (*options_of(config), "--loops", "1", "--log-file", str(log))
    ended = run_child(
        isolated_ranks("zero_inference", candidate.world_size, "run", *options),
        output,
        records=lambda: read_records(records) if records.exists() else [],
    )
    rate = (ended.record or {}).get("decode_throughput")
    if rate is None:
        reason = last_error_line(ended.read_output()) or f"exit code {ended.code}"
        say(f"run {number} failed: {reason}: {candidate.command()}")
    return rate
