"""The search over configurations: plan the candidates, rank them by what is predicted, run the best if asked, choose for `auto`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.options import (
    DEFAULTS,
    MAX_GIB,
    MIN_RING_DEPTH,
    MULTI_GPU_ENGINES,
    OPTIONS,
    QUANT_BITS,
    QUANTIZING_ENGINES,
    SELF,
    STORED,
    WITHOUT_SPECULATION,
)
from zero_inference.config.run_config import RunConfig, non_default_options, shell_words
from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit, RunError, UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.kv_cache.device import why_not_offloaded
from zero_inference.models.empty_model import EmptyModel
from zero_inference.models.spec import ModelSpec, check_stored
from zero_inference.planning.changes import BATCH_SIZES, Fields
from zero_inference.planning.make_plan import plan_with
from zero_inference.planning.memory import DEVICE_MEMORY, PAGE_LOCKED, Need
from zero_inference.planning.plan import Plan, build_job, check_launch, check_model, with_options
from zero_inference.records.read import read_records
from zero_inference.records.schema import AutoChoice
from zero_inference.utils import GB
from zero_inference.utils.format import format_bytes, format_gib_rounded_up, significant
from zero_inference.utils.processes import isolated_ranks, last_error_line, run_child, run_command
from zero_inference.utils.progress import current_progress
from zero_inference.utils.ranks import Ranks

# Offloads to try by engine; weights on disk only where nothing else fits. The stream engine decides by itself what has to be there.
OFFLOADS: dict[str, tuple[Fields, ...]] = {
    "stream": ({"cpu_offload": True},),
    "resident": ({},),
    "deepspeed": ({"cpu_offload": True}, {}, {"disk_offload": True}),
    "accelerate": ({"cpu_offload": True}, {"disk_offload": True}),
}
MIN_KV_GAIN = 1.05  # speedup for which the KV cache is moved to host memory
MIN_KV_SHARE = 0.05  # share of device memory that the KV cache takes, for host memory to be tried
ALL_IN_HOST_MEMORY = {"gpu_memory": 0.0, "ring_depth": MIN_RING_DEPTH, "host_memory": float(MAX_GIB)}  # stream engine
TRIAL_TOKENS = 17  # of a run of `verify`: 16 steps
MIN_SPECULATION_GAIN = 1.2  # predicted speedup for which a draft is used
MAX_OTHERS = 5  # alternatives in the record of a choice
BEST_WORDS = {"throughput": "Fastest", "latency": "Shortest decode step", "memory": "Least memory"}  # by goal


@dataclass
class SearchResult:
    job: Job
    candidates: list[Plan] = field(default_factory=list)  # configurations that fit and whose times are predicted
    unknown: list[Plan] = field(default_factory=list)  # plans that fit and whose times are unknown
    # plans that do not fit, the smallest of each engine and number of bits
    too_large: list[Plan] = field(default_factory=list)


def command_of(config: RunConfig, world_size: int = 1) -> str:
    """Return the shell command that runs `config` with so many GPUs."""
    launched = world_size > 1 or config.engine == "deepspeed"
    return run_command(options_of(config), world_size if launched else None)


def options_of(config: RunConfig) -> list[str]:
    """Return the options of run_model.py for `config`."""
    return shell_words(non_default_options(config))


def find_candidates(
    job: Job,
    *,
    engines: Collection[str] = tuple(OFFLOADS),
    quant_bits: Collection[int | str | None] | None = None,
    batch_sizes: Collection[int] = BATCH_SIZES,
    kv_offload: Sequence[bool] = (False, True),
    offload: Fields | None = None,
    gpus: Collection[int] | None = None,
) -> SearchResult:
    """Plan all configurations of these for the model and machine of `job`, those with weights on disk only where no other fits.

    Args:
        quant_bits: all by default, and a quantized checkpoint as it is stored; None among them is each engine's default.
        offload: options of where the weights are stored; by default those of OFFLOADS.
        gpus: numbers of GPUs, ascending, of one process or with a rank for each, as the engine does; by default those of the job.
    """
    found = SearchResult(job)
    if quant_bits is None:
        quant_bits = (STORED, *QUANT_BITS) if job.spec.checkpoint_format is not None else QUANT_BITS
    elif STORED in quant_bits:
        check_stored(job.spec)
    # where an engine's default keeps the weights of a quantized checkpoint, 16 bits have to be named
    keeps = {"stream"} if job.spec.checkpoint_format is not None else set()
    weights = [
        {"engine": engine, "quant_bits": None if bits == 16 and engine not in keeps else bits}
        | {"cpu_offload": False, "disk_offload": False}
        | each
        for engine in engines
        for bits in quant_bits
        if bits in (None, 16) or engine in (("stream",) if bits == STORED else QUANTIZING_ENGINES)
        for each in ([offload] if offload else OFFLOADS[engine])
        if each or engine != "deepspeed" or job.on_gpu  # without a GPU, the device is host memory
    ]
    for on_disk in (False, True):
        for fields in weights:
            if fields["disk_offload"] is not on_disk and not (on_disk and fields["engine"] == "stream"):
                continue
            options = fields if on_disk else fields | {"offload_dir": DEFAULTS["offload_dir"]}
            too_large: list[Plan] = []
            for count in [None] if gpus is None else gpus:
                of_count = _with_gpus(job, str(fields["engine"]), count)
                planned = _plan_batches(of_count, options, batch_sizes, kv_offload, on_disk)
                found.candidates += planned.candidates
                found.unknown += planned.unknown
                if planned.candidates or planned.unknown or planned.too_large:
                    too_large = planned.too_large  # with the most GPUs, each needs the least
            if fields["disk_offload"] is on_disk:  # else they are among these already
                found.too_large += too_large
        if found.candidates or found.unknown:
            break
    return found


def _with_gpus(job: Job, engine: str, count: int | None) -> Job:
    """Return `job` for an engine and so many GPUs of one node, which one process drives, or as many ranks, of which none is started. None:
    as many as the options of `job` ask for."""
    if count is None or engine in MULTI_GPU_ENGINES:
        named = job.config.num_gpus if count is None else count if job.machine.gpus() > 1 else None
        return with_options(job, replace(job.config, engine=engine, num_gpus=named))
    ranks = replace(job.ranks, world_size=count, local_world_size=count)
    of_ranks = [torch.device("cuda", index) for index in range(count)] if job.on_gpu else [ranks.device]
    free = job.machine.free_device_bytes(of_ranks)
    return replace(job, ranks=ranks, devices=(ranks.device,), free_by_device=(min(free),) if free else ())


def _plan_batches(
    job: Job, fields: Fields, batch_sizes: Collection[int], kv_offload: Sequence[bool], on_disk: bool
) -> SearchResult:
    """Plan the batches that divide over the ranks, from the smallest up, until one does not fit. A KV cache in host memory is a candidate
    where its batch fits only so, or decodes faster by `MIN_KV_GAIN`: predictions are not more precise.

    Args:
        on_disk: weights may be there.
    """
    found = SearchResult(job)
    tokens_per_s_on_device: dict[int, float] = {}  # by batch
    batch_sizes = sorted(size for size in batch_sizes if size % job.ranks.world_size == 0)
    for on_host in kv_offload:
        for batch_size in batch_sizes:
            if on_host and len(kv_offload) > 1 and not _kv_cache_is_large(job, batch_size):
                continue
            options = fields | {"batch_size": batch_size, "kv_offload": on_host}
            if on_host and job.on_gpu and not job.config.kv_offload:  # else as the user chose
                options |= {"pin_kv_cache": True, "async_kv_offload": True}
            refused = False
            try:
                plan = _plan_within_limit(job, options)
            except DoesNotFit:
                plan, refused = _least_plan(job, options)
            except UsageError:
                continue
            if plan.engine_plan.uses_disk and not on_disk:
                plan, refused = _plan_within_limit(job, options | {"host_memory": float(MAX_GIB)}), True
            if refused or not plan.fits:
                if batch_size == batch_sizes[0] and on_host == kv_offload[0]:
                    found.too_large.append(plan)
                break
            if plan.times is None:
                found.unknown.append(plan)
                continue
            if not on_host:
                tokens_per_s_on_device[batch_size] = plan.tokens_per_s
            if not on_host or plan.tokens_per_s >= MIN_KV_GAIN * tokens_per_s_on_device.get(batch_size, 0.0):
                found.candidates.append(plan)
    return found


def _plan_within_limit(job: Job, options: dict[str, Any]) -> Plan:
    """Return the plan with `options`. Where only a part of the device may be used, a plan of the stream engine names its bytes of weights
    and its ring slots as options, so that its command does the same on the whole device."""
    plan = plan_with(job, **options)
    nbytes = plan.engine_plan.gpu_memory_bytes
    if job.machine.device_limit_bytes is None or nbytes is None or job.config.gpu_memory is not None:
        return plan
    options = options | {"ring_depth": job.config.ring_depth or plan.engine_plan.ring_depth}
    try:  # GiB with four decimals
        return plan_with(job, **options, gpu_memory=math.ceil(1e4 * nbytes / GB) / 1e4)
    except DoesNotFit:  # single experts take all that is left
        return plan_with(job, **options, gpu_memory=math.floor(1e4 * nbytes / GB) / 1e4)


def _least_plan(job: Job, options: dict[str, Any]) -> tuple[Plan, bool]:
    """Return the plan of the stream engine with as little on the device as possible, unless the user chose that, and whether the engine
    refuses it too. A refused plan is made for a device without limit and whole layers, and then compared with the real free bytes."""
    chosen = job.config.ring_depth or job.config.gpu_memory is not None
    try:
        return plan_with(job, **options, **({} if chosen else ALL_IN_HOST_MEMORY)), False
    except DoesNotFit:
        whole_layers = ALL_IN_HOST_MEMORY | {"cpu_compute": "off", "cpu_threads": None}
        found = plan_with(replace(job, free_by_device=(1 << 60,) * len(job.free_by_device)), **options, **whole_layers)
        there = replace(found.job, free_by_device=job.free_by_device[: len(found.job.devices)])
        return Plan(there, replace(found.engine_plan, job=there)), True


def _kv_cache_is_large(job: Job, batch_size: int) -> bool:
    """Return whether the KV cache takes at least `MIN_KV_SHARE` of the free device memory and may be in host memory."""
    if why_not_offloaded(job.empty_model.model) or not job.free_by_device:
        return False
    rank_bytes = replace(job, config=replace(job.config, batch_size=batch_size)).kv_bytes()
    return rank_bytes >= MIN_KV_SHARE * sum(job.free_by_device)


# Sort keys by goal. Bounds without the engine's overhead say little about its speed, so they rank last.
GOALS: dict[str, Callable[[Plan], tuple[float, ...]]] = {
    "throughput": lambda plan: (plan.lacks_overhead, -plan.best_tokens_per_s, plan.best_step_s),
    "latency": lambda plan: (plan.lacks_overhead, plan.best_step_s, -plan.best_tokens_per_s),
    "memory": lambda plan: (float(plan.memory_bytes), -plan.best_tokens_per_s),
}


def precision(job: Job) -> int:
    """Return the bits of a weight, by which configurations are ranked: 16 where it is as the checkpoint has it."""
    return 16 if job.spec.kept_format(job.config) is not None else job.quant_bits


def bits_option(job: Job) -> int | str:
    """Return the value of --quant-bits with which weights are stored as in `job`."""
    return STORED if job.spec.kept_format(job.config) is not None else job.quant_bits


def ranked(candidates: Sequence[Plan], goal: str) -> list[Plan]:
    """Return the best first and failed ones last; among equals those with more bits, then those with less memory."""
    return sorted(
        candidates,
        key=lambda plan: (plan.failed, *GOALS[goal](plan), -precision(plan.job), plan.memory_bytes),
    )


def pareto_front(candidates: Sequence[Plan]) -> list[Plan]:
    """Return the candidates that no other beats in both step time and token/s, by step time. Bounds without overhead are left out where
    others are known."""
    good = [each for each in candidates if not each.failed]
    known = [each for each in good if not each.lacks_overhead] or good
    front: list[Plan] = []
    for each in ranked(known, "latency"):
        if not front or each.best_tokens_per_s > front[-1].best_tokens_per_s:
            front.append(each)
    return front


def verify(best: Sequence[Plan], count: int, goal: str, say: Callable[[str], None]) -> list[Plan]:
    """Run the first `count` of `best` for a few steps, each in a process of its own, and return `best` with these ranked by their measured
    rates; failed ones come last. Raises RunError: all of them failed."""
    measured, failed, chosen = [], [], best[:count]
    with (
        tempfile.TemporaryDirectory(prefix="zero-inference-plan-") as folder,
        current_progress().task("plan --verify", len(chosen), ticking=True) as task,
    ):
        for number, plan in enumerate(chosen, 1):
            run = f"run {number} of {len(chosen)}"
            task.at(run, number - 1)
            rate = _measured_tokens_per_s(plan, Path(folder), number, say)
            if rate is None:
                failed.append(replace(plan, failed=True))
                continue
            command = command_of(plan.job.config, plan.job.ranks.world_size)
            say(f"{run}: {rate:.3g} token/s, predicted {plan.tokens_per_s:.3g}: {command}")
            measured.append(replace(plan, measured_tokens_per_s=rate))
    if not measured:
        raise RunError(f"--verify {count}: every run failed; the reasons are above.")
    return ranked(measured, goal) + list(best[count:]) + failed


def _measured_tokens_per_s(plan: Plan, folder: Path, number: int, say: Callable[[str], None]) -> float | None:
    """Return the rate of a run; None, and a line to `say`, where it failed."""
    config, gpus = plan.job.config, plan.job.ranks.world_size
    trial = replace(config, gen_len=min(config.gen_len, TRIAL_TOKENS), dry_run=False, verbose=1)
    words = [*options_of(trial), "--loops", "1", "--log-file", str(folder / f"{number}.log")]
    records = folder / f"{number}.jsonl"
    ended = run_child(
        isolated_ranks("zero_inference", gpus, "run", *words),
        folder / f"{number}.out",
        records=lambda: read_records(records) if records.exists() else [],
    )
    rate = (ended.record or {}).get("decode_throughput")
    if rate is None:
        reason = last_error_line(ended.read_output()) or f"exit code {ended.code}"
        say(f"run {number} failed: {reason}: {command_of(config, gpus)}")
    return rate


def measure_if_unknown(machine: Machine, say: Callable[[str], None]) -> None:
    """Measure this machine and keep its hardware profile, if there is none."""
    if machine.is_here and machine.profile() is None:
        from zero_inference.hardware.measure_profile import measure_and_cache

        measure_and_cache(say)


def choose(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, machine: Machine, say: Callable[[str], None]
) -> tuple[RunConfig, AutoChoice | None, EmptyModel | None]:
    """Return `config` with the best values for its `auto` options, the choice for the record, and the empty model of the search, for the
    run to use; `config` alone where nothing is `auto`. Without a goal the most bits that fit come first.
    Raises UsageError: nothing fits."""
    auto = config.auto
    if not auto:
        return config, None, None
    measure_if_unknown(machine, say)
    alone = WITHOUT_SPECULATION if "speculate" in auto else {}
    job = build_job(replace(config, auto=(), goal=None, **alone), spec, ranks, machine=machine)
    offload = {"cpu_offload": config.cpu_offload, "disk_offload": config.disk_offload}
    by_plan = "engine" in auto
    found = find_candidates(
        job,
        engines=tuple(OFFLOADS) if by_plan else (config.engine,),
        quant_bits=None if "quant_bits" in auto else (config.quant_bits,),
        batch_sizes=BATCH_SIZES if "batch_size" in auto else (config.batch_size,),
        kv_offload=(False, True) if by_plan and not config.kv_offload else (config.kv_offload,),
        offload=None if by_plan else offload,
    )
    if not found.candidates and auto == ("speculate",):
        say(f"--speculate auto: off: {why_none(found)}")
        return job.config, None, job.empty_model
    if not found.candidates:
        asked = ", ".join(f"{OPTIONS[name].flag} auto" for name in auto)
        raise UsageError(f"{asked}: {why_none(found)}")
    by_goal = ranked(found.candidates, config.goal or "throughput")
    if config.goal is None:
        by_goal.sort(key=lambda each: -precision(each.job))
    best, *others = by_goal
    if "speculate" in auto and config.goal != "memory":
        with_draft = _with_draft_if_faster(best, config)
        if isinstance(with_draft, str):
            say(f"--speculate auto: off: {with_draft}")
        else:
            best = with_draft
    chosen = best.job.config
    check_launch(chosen, ranks, machine)
    check_model(chosen, spec)
    options = f"--engine {chosen.engine} --quant-bits {bits_option(best.job)} --batch-size {chosen.batch_size}"
    options += " --kv-offload" if chosen.kv_offload else ""
    options += f" --speculate {chosen.speculate}" if chosen.speculate else ""
    say(f"chosen: {options}: predicted {(best.speculation or best.times).in_words()}")
    choice = AutoChoice(
        options=list(auto),
        goal=config.goal,
        decode_throughput=best.tokens_per_s,
        over=[f"{command_of(each.job.config)}: {each.tokens_per_s:.4g} token/s" for each in others[:MAX_OTHERS]],
    )
    return chosen, choice, job.empty_model


def _with_draft_if_faster(plan: Plan, config: RunConfig) -> Plan | str:
    """Return `plan` with `--speculate self` and the draft options of `config`; or why it is not predicted to decode faster by
    `MIN_SPECULATION_GAIN`."""
    if plan.job.spec.experts[0]:
        return "a mixture of experts reads more experts in a pass of several tokens"
    if plan.keeps_all_weights and plan.job.on_gpu:
        return "all weights stay on the device"
    options = {name: getattr(config, name) for name in WITHOUT_SPECULATION} | {"speculate": SELF}
    try:
        other = plan_with(plan.job, **options)
    except UsageError as error:
        return str(error)
    if not other.fits:
        return "the draft does not fit beside the model"
    if other.speculation is None:
        return other.why_not_predicted or other.draft.why_not_predicted
    if other.tokens_per_s < MIN_SPECULATION_GAIN * plan.tokens_per_s:
        rates = significant(other.tokens_per_s), significant(plan.tokens_per_s)
        return f"{rates[0]} token/s are predicted with self, {rates[1]} without"
    return other


def headline(found: SearchResult, goal: str) -> str:
    """Return the first candidate and the best for a single sequence, with their speed, or why there is none."""
    if not found.candidates:
        return why_none(found)

    def describe(plan: Plan) -> str:
        text = f"predicted {plan.times.in_words()}"
        if plan.measured_tokens_per_s is not None:
            text = f"{significant(plan.measured_tokens_per_s)} token/s measured, {text}"
        if goal == "memory":
            text = f"{format_bytes(plan.memory_bytes)} of device and host memory, {text}"
        return f"{plan.describe(work=True)}: {text}."

    best = found.candidates[0]
    singles = [each for each in found.candidates if each.job.config.batch_size == 1 and not each.failed]
    line = f"{BEST_WORDS[goal]}: {describe(best)}"
    if singles and best.job.config.batch_size > 1:
        line += f" For one sequence: {describe(ranked(singles, 'latency')[0])}"
    return line


def notes(found: SearchResult) -> list[str]:
    """Return what to know about the machine, the predictions, and what is not predicted, a line each."""
    machine, best = found.job.machine.profile(), found.candidates
    texts = [machine.caveat() if machine else None]
    for label, parts in (
        ("bounds, because", [reason for each in best for reason in each.times.bounds_because]),
        ("not counted:", [part for each in best for part in each.times.left_out]),
    ):
        texts += [f"{label} {'; '.join(dict.fromkeys(parts))}"] if parts else []
    if any(each.lacks_overhead for each in best):
        texts.append("engines whose overhead was not measured are ranked last")
    texts += dict.fromkeys(each.unchosen_experts for each in best)
    if found.unknown and best:
        texts.append(f"fit, but not predicted: {len(found.unknown)}: {why_not_predicted(found.unknown)}")
    return [text for text in texts if text]


def why_not_predicted(plans: Sequence[Plan]) -> str:
    """Return why no speed is predicted for any of `plans`, each reason once."""
    return "; ".join(dict.fromkeys(reason for plan in plans if (reason := plan.why_not_predicted)))


def why_none(found: SearchResult) -> str:
    """Return why no configuration of the model is predicted; where none fits, with the smallest machine that would be enough."""
    model = found.job.config.model
    if found.unknown:
        why = why_not_predicted(found.unknown)
        or_assume = ", or add it to --assume" if "=)" in why else ""  # a rate that --assume takes, such as (link=)
        return (
            f"{model}: configurations that fit: {len(found.unknown)}; no speed is predicted, because {why}; "
            f"measure it with zero-inference link --save (--disk DIR for the disk){or_assume}."
        )
    if not found.too_large:
        return f"{model}: none of these engines can run it with these options; drop some of them."

    def lacking_bytes(plan: Plan) -> tuple[int, int]:
        # device memory first: it is hardest to get more of it
        short = [(need.place, max(0, need.with_reserve_bytes - (need.available_bytes or 0))) for need in plan.needs]
        on_devices = [nbytes for place, nbytes in short if place == DEVICE_MEMORY]
        of_gpus = plan.job.num_gpus // max(1, len(on_devices))  # of each such need
        return of_gpus * sum(on_devices), sum(nbytes for place, nbytes in short if place != DEVICE_MEMORY)

    plan = min(found.too_large, key=lacking_bytes)
    config, gpus = plan.job.config, plan.job.num_gpus
    most: dict[str, Need] = {}  # by place: of the GPU that needs most
    for need in sorted(plan.needs, key=lambda need: need.with_reserve_bytes):
        most[need.place] = need
    needs = [most[place] for place in dict.fromkeys(need.place for need in plan.needs) if place != PAGE_LOCKED]
    free = {need.place: need.available_bytes for each in found.too_large for need in each.needs}
    free_parts = [
        f"{format_bytes(nbytes)} of {place}"
        for place, nbytes in free.items()
        if place != PAGE_LOCKED and nbytes is not None
    ]
    of_each = {DEVICE_MEMORY: f" on each of {gpus} GPUs"} if gpus > 1 else {}
    parts = [
        f"{format_gib_rounded_up(need.with_reserve_bytes)} of {need.place}{of_each.get(need.place, '')}"
        for need in needs
    ]
    options = f"--engine {config.engine} --quant-bits {bits_option(plan.job)} --batch-size {config.batch_size}"
    options += f" --gpu-memory 0 --ring-depth {MIN_RING_DEPTH}" if config.ring_depth else ""
    return (
        f"none of {len(found.too_large)} ways to run {model} fits ({', '.join(free_parts)}); the smallest machine that could run it has "
        f"{' and '.join(parts)} ({options})."
    )
