"""The plan of a run: exact sizes, what lies where, and whether it fits, decided once and before anything is loaded.

`load` uses it, `--dry-run` prints it, limits and the record read it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from zero_inference.config.checks import batch_advice
from zero_inference.config.options import DEFAULTS
from zero_inference.config.run_config import RunConfig
from zero_inference.engines import engine_module
from zero_inference.engines.base import EnginePlan, Job, LoadedModel, Progress
from zero_inference.engines.stream.overlap import LEAST_GAIN
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.hardware.bench_copies import BLOCK_BYTES as LINK_BLOCK_BYTES
from zero_inference.hardware.machine import LocalMachine, Machine
from zero_inference.kv_cache.device import refuse_kv_offload
from zero_inference.models.empty_model import EmptyModel, build_empty_model
from zero_inference.models.spec import ModelSpec
from zero_inference.norms.choice import check_norm_kernels_option
from zero_inference.planning.cost import RANGES, Range, Times, predict_load_s, predict_times
from zero_inference.planning.memory import Need, memory_needs
from zero_inference.records.schema import Predicted
from zero_inference.utils.ranks import Ranks


def check_launch(config: RunConfig, ranks: Ranks, machine: Machine) -> None:
    """Raises UsageError: the batch does not divide over the ranks, or there is no GPU for what was asked."""
    if config.batch_size % ranks.world_size:
        advice = batch_advice(config.batch_size, ranks.world_size, f"{ranks.world_size} ranks")
        raise UsageError(f"{advice} (deepspeed --num_gpus N, torchrun --nproc-per-node N).")
    if not machine.is_here and ranks.device.type == "cuda" and ranks.local_world_size > machine.gpus():
        raise UsageError(
            f"{ranks.local_world_size} ranks were started for a machine with {machine.gpus()} GPU"
            f"{'s' * (machine.gpus() > 1)}; start one rank per GPU."
        )
    if ranks.device.type == "cpu":
        for flag, given in (("--pin-memory 1", config.pin_memory), ("--pin-kv-cache", config.pin_kv_cache)):
            if given:
                raise UsageError(f"{flag} page-locks memory for copies to a GPU, and there is no GPU here; drop it.")
        if config.norm_kernels == "cuda":
            raise UsageError("--norm-kernels cuda: there is no CUDA device here; use auto or off.")
    elif ranks.local_rank >= machine.gpus():
        raise UsageError(
            f"local rank {ranks.local_rank} has no GPU: {machine.gpus()} are visible; start fewer processes."
        )


def check_model(config: RunConfig, spec: ModelSpec) -> None:
    """Raises UsageError: too many positions, or norms that our kernels do not know."""
    positions = spec.max_positions
    if positions is not None and config.positions > positions:
        raise UsageError(
            f"--prompt-len {config.prompt_len} and --gen-len {config.gen_len} need {config.positions} positions; "
            f"{spec.name} has {positions}: shorten one of them."
        )
    check_norm_kernels_option(config.norm_kernels, spec.config.model_type)
    if config.dummy_routing != DEFAULTS["dummy_routing"] and spec.dummy_routing is None:
        raise UsageError(f"--dummy-routing {config.dummy_routing}: {spec.name} has no experts; drop it.")


THIS_MACHINE = LocalMachine()


@dataclass(frozen=True)
class Plan:
    """What a run will do, and what it takes of this node's memory and disk."""

    job: Job
    weights: EnginePlan

    @functools.cached_property
    def needs(self) -> list[Need]:
        """Of this node. To be asked for before `load`, if at all: what a prefill keeps is found by running the empty model, which takes
        longer the more layers it has."""
        return memory_needs(self.weights)

    @property
    def fits(self) -> bool:
        return all(need.fits for need in self.needs)

    @functools.cached_property
    def predicted(self) -> Predicted:
        """For the record. What `load` keeps of it was found before it began."""
        moved, times, steps = self.weights.moved_per_step(), self.times, self.job.config.gen_len - 1
        step_range_s, load_range_s = times.step_range_s if times else None, self.load_range_s
        return Predicted(
            load_s=self.load_s,
            load_range_s=None if load_range_s is None else list(load_range_s),
            prefill_s=times.prefill.seconds if times else None,
            prefill_range_s=list(times.prefill_range_s) if times and times.prefill_range_s else None,
            decode_s=times.step.seconds * steps if times else None,
            decode_range_s=None if step_range_s is None else [steps * each for each in step_range_s],
            bound_by=times.step.bound_by if times else None,
            weight_bytes=self.weights.weight_bytes,
            peak_gpu_bytes=self.weights.device_peak_bytes if self.job.on_gpu else None,
            peak_host_bytes=self._peak_host_bytes,
            host_to_device_bytes_per_step=int(moved.host_to_device_bytes_per_step or 0),
            device_to_host_bytes_per_step=int(moved.device_to_host_bytes_per_step or 0),
            disk_read_bytes_per_step=int(moved.disk_read_bytes_per_step or 0),
            cores_bytes_per_step=int(moved.cores_bytes_per_step or 0),
        )

    @functools.cached_property
    def times(self) -> Times | None:
        """Of prefill and decode; None where the machine's rates or the model's operators are not known. To be asked for before `load`."""
        description = self.job.machine.profile()
        return None if description is None else predict_times(self.weights, description)

    @property
    def load_s(self) -> float | None:
        """Of loading the weights; None where it is not known."""
        description = self.job.machine.profile()
        return None if description is None else predict_load_s(self.weights, description)

    @property
    def load_range_s(self) -> Range | None:
        """Return the range of `load_s`; None where that is not known, and without a GPU."""
        load_s = self.load_s if self.job.on_gpu else None
        return None if load_s is None else RANGES["load"].of(load_s)

    @property
    def _peak_host_bytes(self) -> int | None:
        """Of a process: the libraries, and what the plan takes of host memory."""
        description = self.job.machine.profile()
        if description is None or description.process_bytes is None:
            return None
        libraries = description.process_bytes + description.library_bytes.get(self.job.config.engine, 0)
        measuring = description.measuring_bytes
        peak = libraries - measuring + self.weights.host_peak_bytes(measuring)
        # with a GPU the link is measured between the loops, when all else is there
        return peak + (0 if not self.job.on_gpu or self.weights.copies_own_memory else LINK_BLOCK_BYTES)

    def check(self) -> None:
        """Whether the machine has what is needed besides memory, if it is this one. Raises UsageError."""
        if self.job.machine.is_here:
            engine_module(self.job.config.engine).check(self.weights)

    def with_memory_of_now(self) -> Plan:
        """The same plan for the device memory that is free now, on all ranks. To be called by all of them alike.

        Raises:
            UsageError: it has become too little.
        """
        if self.job.free_device_bytes is None:
            return self
        return make_plan(replace(self.job, free_device_bytes=self.job.machine.free_device_bytes(self.job.ranks, True)))

    def load(self, progress: Progress = lambda done: None) -> LoadedModel:
        """The model, ready to generate. Call it once: it fills the plan's empty model. Raises RunError."""
        self.predicted  # noqa: B018  while the model is empty
        self.weights.prepare()
        return engine_module(self.job.config.engine).load(self.weights, progress)


def build_job(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    group: Any = None,
    agreed: bool = False,
    machine: Machine = THIS_MACHINE,
    empty_model: EmptyModel | None = None,
) -> Job:
    """Build the model without weights, unless it is given, and look at the device.

    Args:
        agreed: take the least free memory of all ranks; a collective.
        machine: where it is to run.

    Raises:
        UsageError: transformers cannot build the model.
    """
    empty_model = empty_model or build_empty_model(spec)
    return Job(config, spec, ranks, empty_model, machine.free_device_bytes(ranks, agreed), group, machine)


def _refuse_unplannable(job: Job) -> None:
    """Raises UsageError: the model does not run on token ids alone, or takes more of them than it is given."""
    kind, sizes = job.spec.config.model_type, job.sizes
    if sizes.refuses_text is not None:
        sense = "audio" if hasattr(job.spec.config, "audio_config") else "images"
        raise UsageError(
            f"--model {job.spec.name}: {kind} needs {sense} and does not run on text alone (transformers: "
            f"{sizes.refuses_text.rstrip('.')}); run it in transformers."
        )
    if sizes.added_positions:
        raise UsageError(
            f"--model {job.spec.name}: {kind} puts {sizes.added_positions} positions of its own before each sequence, which no engine here "
            "plans for; run it in transformers."
        )


def make_plan(job: Job) -> Plan:
    """Decide everything, without loading anything; with a `job.group` all ranks call it. Raises UsageError: see the engine's
    `plan`; where keys and values cannot be in host memory; and for a model that adds positions or takes no text."""
    _refuse_unplannable(job)
    if job.config.kv_offload:
        refuse_kv_offload(job.empty_model.model, job.window_only_in_cache)
    found = _with_cores_in_prompts(Plan(job, engine_module(job.config.engine).plan(job)))
    other = None if job.machine.profile() is None else found.weights.alternative()
    if other is None or found.times is None:
        return found
    instead = _with_cores_in_prompts(Plan(job, other))
    shorter = instead.times is not None and instead.times.step.seconds < found.times.step.seconds
    return instead if shorter and (instead.fits or not found.fits) else found


def _with_cores_in_prompts(found: Plan) -> Plan:
    """Return `found`, or the same without the host's cores in prompts where these are not predicted to gain enough. The engine has compared
    link and cores; times that also count launches need all rates of the machine."""
    other = found.weights.without_short_prompts()
    if other is None or found.times is None:
        return found
    without = Plan(found.job, other)
    gains = without.times is None or without.times.prefill.seconds >= LEAST_GAIN * found.times.prefill.seconds
    return found if gains else without


def plan_run(config: RunConfig, spec: ModelSpec, ranks: Ranks, empty_model: EmptyModel | None = None) -> Plan:
    """Connect the ranks, plan, and check what the machine must have besides memory. Called by all ranks alike.

    Args:
        empty_model: where a search has built it.

    Raises:
        UsageError: it cannot work here.
    """
    group = engine_module(config.engine).connect(ranks)
    try:
        plan = make_plan(build_job(config, spec, ranks, group, agreed=True, empty_model=empty_model))
    except DoesNotFit as error:
        raise DoesNotFit(f"{error} --dry-run shows which options would.") from error
    plan.check()
    return plan


def plan_with(job: Job, **fields: Any) -> Plan:
    """The plan of the same model and machine with other options, to be compared and not to be loaded: no rank but this one makes it. Raises
    UsageError where they cannot work."""
    return make_plan(replace(job, config=replace(job.config, **fields).validate(), group=None))
