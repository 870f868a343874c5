"""The configurations worth considering for a model, each with its plan."""

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
from zero_inference.planning.cost import Times
from zero_inference.planning.plan import Plan, plan_with
from zero_inference.records.read import read_records
from zero_inference.records.schema import STATUS_OK
from zero_inference.utils import GB
from zero_inference.utils.processes import isolated_ranks, last_error_line, run_child, run_command
from zero_inference.utils.progress import current_progress

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# By engine the ways to run it; those with weights on disk are for models that fit nowhere else.
OFFLOADS: dict[str, tuple[dict[str, Any], ...]] = {
    "stream": ({"cpu_offload": True},),
    "resident": ({},),
    "deepspeed": ({"cpu_offload": True}, {}, {"disk_offload": True}),
    "accelerate": ({"cpu_offload": True}, {"disk_offload": True}),
}
LEAST_GAIN = 1.05  # in speed, for which keys and values are moved to host memory
LEAST_KV_SHARE = 0.05  # of device memory, that keys and values take, for host memory to be worth a thought for them
LEAST = {"gpu_memory": 0.0, "ring_depth": MIN_RING_DEPTH}  # of the stream engine on the device


@dataclass(frozen=True)
class SearchSpace:
    """What is left to be found.

    Attributes:
        engines, quant_bits, batch_sizes, kv_offload: the values to try.
        ways: by engine those in which it may be run.
        world_sizes: ranks, each with a GPU of its own, in ascending order; None for those that the job has.
    """

    engines: tuple[str, ...] = tuple(OFFLOADS)
    quant_bits: tuple[int, ...] = QUANT_BITS
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    kv_offload: tuple[bool, ...] = (False, True)
    ways: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=lambda: OFFLOADS)
    world_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits, and what is predicted of it.

    Attributes:
        measured_tokens_per_s: of decoding, where a run of it was tried.
        failed: a run of it was tried, and failed.
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
        """Of decoding."""
        return self.times.tokens_per_s(self.config.batch_size)

    @property
    def best_tokens_per_s(self) -> float:
        """Measured, or predicted where it was not tried."""
        return self.measured_tokens_per_s or self.tokens_per_s

    @property
    def lacks_overhead(self) -> bool:
        """Whether its speed is a bound only because nobody measured what its engine takes besides the model's work."""
        return self.times.without_own_work and self.measured_tokens_per_s is None

    @property
    def best_step_s(self) -> float:
        """The same of a step."""
        return self.config.batch_size / self.best_tokens_per_s

    @property
    def total_s(self) -> float:
        """Predicted of a generation: first token and all others."""
        return self.times.prefill.seconds + (self.config.gen_len - 1) * self.times.step.seconds

    @property
    def world_size(self) -> int:
        return self.plan.job.ranks.world_size

    @property
    def memory_bytes(self) -> int:
        """On the devices and in host memory."""
        weights = self.plan.weights
        of_rank = weights.host_peak_bytes() + (weights.device_peak_bytes if self.plan.job.on_gpu else 0)
        return self.world_size * of_rank

    def command(self) -> str:
        """That runs it."""
        return command_of(self.config, self.world_size)


@dataclass(frozen=True)
class SearchResult:
    """
    Attributes:
        candidates: those that fit, and whose times are known.
        unknown: that fit; nobody knows how fast they are.
        too_large: plans that do not fit, of each engine and number of bits the least one.
    """

    candidates: list[Candidate]
    unknown: list[Plan]
    too_large: list[Plan]

    def __bool__(self) -> bool:
        return bool(self.candidates or self.unknown or self.too_large)


def command_of(config: RunConfig, world_size: int = 1) -> str:
    """What to type for `config` with so many GPUs."""
    launched = world_size > 1 or config.engine == "deepspeed"
    return run_command(options_of(config), world_size if launched else None)


def options_of(config: RunConfig) -> list[str]:
    """Those of run_model.py that ask for `config`."""
    return shell_words(non_default_options(config))


def find_candidates(job: Job, free: SearchSpace) -> SearchResult:
    """Plan what `free` leaves open of `job`, from the smallest batch up; a batch larger than one that does not fit is not tried."""
    found = SearchResult([], [], [])
    jobs = [job] if free.world_sizes is None else [_with_ranks(job, count) for count in free.world_sizes]
    for on_disk in (False, True):
        for fields in _ways(job, free, on_disk):
            parts = [_plan_batches(each, free, fields) for each in jobs]
            for part in parts:
                found.candidates.extend(part.candidates)
                found.unknown.extend(part.unknown)
            # with the most GPUs, each of which needs the least then
            found.too_large.extend(next((part.too_large for part in reversed(parts) if part), []))
        if found.candidates or found.unknown:
            break
    return found


def _with_ranks(job: Job, count: int) -> Job:
    """The same in `count` processes of one node, each with a GPU, for the least memory that is free on these; nobody has started them."""
    if count == job.ranks.world_size:
        return job
    ranks = replace(job.ranks, world_size=count, local_world_size=count)
    every = [replace(ranks, rank=rank, local_rank=rank, device=torch.device("cuda", rank)) for rank in range(count)]
    free = [job.machine.free_device_bytes(each, False) for each in every]
    return replace(job, ranks=ranks, free_device_bytes=min(each for each in free if each is not None))


def _ways(job: Job, free: SearchSpace, on_disk: bool) -> Iterator[dict[str, Any]]:
    """Everything but the batch."""
    for engine in free.engines:
        for bits in free.quant_bits if engine in QUANTIZING_ENGINES else (16,):
            if bits not in free.quant_bits:
                continue
            for way in free.ways[engine]:
                if engine == "deepspeed" and not way and not job.on_gpu and free.ways is OFFLOADS:
                    continue  # it would be the same as in host memory
                if bool(way.get("disk_offload")) == on_disk:
                    offload = {"cpu_offload": False, "disk_offload": False} | way
                    if not on_disk:
                        offload["offload_dir"] = DEFAULTS["offload_dir"]
                    yield {"engine": engine, "quant_bits": bits} | offload


def _plan_batches(job: Job, free: SearchSpace, fields: dict[str, Any]) -> SearchResult:
    """Of the batches that divide over the ranks. Keys and values in host memory are a candidate where their batch fits only so, or decodes
    faster by more than predictions are worth: what crosses the link, or meets the cores, can be late."""
    found = SearchResult([], [], [])
    on_device: dict[int, float] = {}  # token/s by batch
    batch_sizes = sorted(size for size in free.batch_sizes if size % job.ranks.world_size == 0)
    for kv_offload in free.kv_offload:
        for batch_size in batch_sizes:
            asked = fields | _place_of_keys(job, kv_offload) | {"batch_size": batch_size}
            if kv_offload and len(free.kv_offload) > 1 and not _worth_moving(job, batch_size):
                continue
            refused = False
            try:
                plan = _within_limits(job, asked)
            except DoesNotFit:
                plan, refused = _least_plan(job, asked)
            except UsageError:
                continue
            if refused or not plan.fits:
                first = batch_size == batch_sizes[0] and kv_offload == free.kv_offload[0]
                found.too_large.extend([plan] if first else [])
                break
            if plan.times is None:
                found.unknown.append(plan)
                continue
            candidate = Candidate(plan, plan.times)
            if not kv_offload:
                on_device[batch_size] = candidate.tokens_per_s
            if not kv_offload or candidate.tokens_per_s >= LEAST_GAIN * on_device.get(batch_size, 0.0):
                found.candidates.append(candidate)
    return found


def _place_of_keys(job: Job, kv_offload: bool) -> dict[str, Any]:
    """Where keys and values are, and how they cross the link: page-locked and ahead of their layer, unless the user has said how."""
    quick = kv_offload and job.on_gpu and not job.config.kv_offload
    return {"kv_offload": kv_offload} | ({"pin_kv_cache": True, "async_kv_offload": True} if quick else {})


def _within_limits(job: Job, asked: dict[str, Any]) -> Plan:
    """The plan of `asked`. Where only a part of the device may be used, the stream engine's says how much of it weights take, and how many
    slots its ring has: its command is to do the same on the whole device."""
    plan = plan_with(job, **asked)
    limited = job.machine.device_limit_bytes is not None
    kept = plan.weights.gpu_memory_bytes
    if not limited or kept is None or job.config.gpu_memory is not None:
        return plan
    depth = job.config.ring_depth or plan.weights.ring_depth
    try:
        return plan_with(job, **asked, gpu_memory=math.ceil(1e4 * kept / GB) / 1e4, ring_depth=depth)
    except DoesNotFit:  # single experts take all that is left
        return plan_with(job, **asked, gpu_memory=math.floor(1e4 * kept / GB) / 1e4, ring_depth=depth)


def _least_plan(job: Job, asked: dict[str, Any]) -> tuple[Plan, bool]:
    """Of the stream engine, which refuses a device that is too small for its ring: with as little on the device as it can do with, unless
    the user said how much; and whether it refuses that too. Then the plan is that of a larger device, for the one that is there, and
    of whole layers, which the engine places first."""
    least = {} if job.config.ring_depth or job.config.gpu_memory is not None else LEAST
    try:
        return plan_with(job, **asked, **least), False
    except DoesNotFit:
        whole = LEAST | {"cpu_compute": "off", "cpu_threads": None}
        found = plan_with(replace(job, free_device_bytes=1 << 60), **asked, **whole)
        return Plan(found.job, replace(found.weights, job=replace(job, config=found.job.config))), True


def _worth_moving(job: Job, batch_size: int) -> bool:
    """Whether keys and values of so many sequences take a part of device memory that weights could use."""
    if why_not_offloaded(job.empty_model.model) or job.free_device_bytes is None:
        return False
    of_rank = replace(job, config=replace(job.config, batch_size=batch_size)).kv_bytes()
    return of_rank >= LEAST_KV_SHARE * job.free_device_bytes


# By goal what is to be least. A bound that leaves out an engine's overhead shows nothing about its speed, so it comes behind those that do.
GOALS: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
    "throughput": lambda each: (each.lacks_overhead, -each.best_tokens_per_s, each.best_step_s),
    "latency": lambda each: (each.lacks_overhead, each.best_step_s, -each.best_tokens_per_s),
    "memory": lambda each: (float(each.memory_bytes), -each.best_tokens_per_s),
}


def ranked(candidates: Sequence[Candidate], goal: str) -> list[Candidate]:
    """The best first, those that failed last; of equals those with more bits, then those that need less memory."""
    return sorted(
        candidates, key=lambda each: (each.failed, *GOALS[goal](each), -each.config.quant_bits, each.memory_bytes)
    )


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats in both the time of a step and tokens a second, from the shortest step up. Bounds that leave out an
    overhead are not compared with others."""
    good = [each for each in candidates if not each.failed]
    known = [each for each in good if not each.lacks_overhead] or good
    front: list[Candidate] = []
    for each in ranked(known, "latency"):
        if not front or each.best_tokens_per_s > front[-1].best_tokens_per_s:
            front.append(each)
    return front


MOST_TOKENS = 17  # of a trial: 16 steps


def verify(best: Sequence[Candidate], count: int, goal: str, say: Callable[[str], None]) -> list[Candidate]:
    """`best` with the first `count` of them run and ranked by their measured rates; those that failed come last.

    Raises:
        RunError: all of them failed.
    """
    tried, failed = [], []
    chosen = best[:count]
    with (
        tempfile.TemporaryDirectory(prefix="zero-inference-plan-") as folder,
        current_progress().task("plan --verify", len(chosen), ticking=True) as task,
    ):
        for number, candidate in enumerate(chosen, 1):
            task.at(f"run {number} of {len(chosen)} ({candidate.command()})", number - 1)
            rate = _measured_tokens_per_s(candidate, Path(folder), number, say)
            if rate is None:
                failed.append(replace(candidate, failed=True))
            else:
                say(
                    f"run {number} of {len(chosen)}: {rate:.3g} token/s, predicted {candidate.tokens_per_s:.3g}: "
                    f"{candidate.command()}"
                )
                tried.append(replace(candidate, measured_tokens_per_s=rate))
    if not tried:
        raise RunError(f"--verify {count}: every run failed; the reasons are above.")
    return ranked(tried, goal) + list(best[count:]) + failed


def _measured_tokens_per_s(candidate: Candidate, folder: Path, number: int, say: Callable[[str], None]) -> float | None:
    """None where the run failed, which `say` is told."""
    config = replace(candidate.config, gen_len=min(candidate.config.gen_len, MOST_TOKENS), dry_run=False, verbose=1)
    log, output = folder / f"{number}.log", folder / f"{number}.out"
    options = [*options_of(config), "--loops", "1", "--log-file", str(log)]
    records = log.with_suffix(".jsonl")
    ended = run_child(
        isolated_ranks("zero_inference", candidate.world_size, "run", *options),
        output,
        records=lambda: read_records(records) if records.exists() else [],
        is_good=lambda record: record.get("status") == STATUS_OK,
    )
    rate = (ended.record or {}).get("decode_throughput")
    if rate is None:
        say(
            f"run {number} failed: {last_error_line(ended.read_output()) or f'exit code {ended.code}'}: {candidate.command()}"
        )
    return rate
