"""From a config to a plan, before anything is loaded: check the launch, build the empty model, place the weights, predict memory and times.

`Plan.load` follows the plan, `--dry-run` prints it, roofline and record read it.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_inference.config.checks import batch_advice
from zero_inference.config.options import (
    DEFAULTS,
    MULTI_GPU_ENGINES,
    OPTIONS,
    SELF,
)
from zero_inference.config.run_config import RunConfig
from zero_inference.engines import engine_module
from zero_inference.engines.base import EnginePlan, Job, LoadedModel, LoadProgress
from zero_inference.engines.stream.blocks import why_one_device
from zero_inference.engines.stream.cpu_plan import MIN_GAIN
from zero_inference.errors import UsageError
from zero_inference.hardware.bench_copies import BLOCK_BYTES as LINK_BLOCK_BYTES
from zero_inference.hardware.machine import Machine
from zero_inference.kernels.decode_attention import using_prompt_attention
from zero_inference.kv_cache.device import refuse_kv_offload
from zero_inference.models.empty_model import EmptyModel, build_empty_model
from zero_inference.models.spec import ModelSpec
from zero_inference.norms.patch import check_norm_kernels_option
from zero_inference.planning.cost import (
    RANGES,
    NotPredictable,
    SpeculationTimes,
    Times,
    predict_load_s,
    predict_speculation,
    predict_times,
)
from zero_inference.planning.memory import DEVICE_MEMORY, HOST_MEMORY, Need, memory_needs
from zero_inference.records.schema import Predicted
from zero_inference.utils.format import format_bytes
from zero_inference.utils.ranks import Ranks


def check_launch(config: RunConfig, ranks: Ranks, machine: Machine) -> None:
    """Raises UsageError: several ranks with `auto` options or a batch that they do not divide, more GPUs than there are, or an option that
    needs one."""
    if config.auto and ranks.world_size > 1:  # they would have to agree
        options = ", ".join(f"{OPTIONS[name].flag} auto" for name in config.auto)
        raise UsageError(
            f"{options}: this works in one process only, and {ranks.world_size} were started; name values."
        )
    if config.batch_size % ranks.world_size:
        advice = batch_advice(config.batch_size, ranks.world_size, f"{ranks.world_size} ranks")
        raise UsageError(f"{advice} (deepspeed --num_gpus N, torchrun --nproc-per-node N).")
    if config.num_gpus is not None:
        _check_num_gpus(config.num_gpus, ranks, machine.gpus())
    if not machine.is_here and ranks.device.type == "cuda" and ranks.local_world_size > machine.gpus():
        raise UsageError(
            f"{ranks.local_world_size} ranks were started for a machine with {machine.gpus()} GPUs; start one rank per GPU."
        )
    if ranks.device.type == "cpu":
        for flag, given in (("--pin-memory 1", config.pin_memory), ("--pin-kv-cache", config.pin_kv_cache)):
            if given:
                raise UsageError(f"{flag} page-locks memory for copies to a GPU, and there is no GPU here; drop it.")
        if config.norm_kernels == "cuda":
            raise UsageError("--norm-kernels cuda: there is no CUDA device here; use auto or off.")
    elif ranks.local_rank >= machine.gpus():
        raise UsageError(f"local rank {ranks.local_rank} has no GPU: {machine.gpus()} are visible; start fewer ranks.")


def _check_num_gpus(asked: int | str, ranks: Ranks, gpus: int) -> None:
    """Raises UsageError: more GPUs than are visible, or several ranks, which have a GPU each."""
    if ranks.world_size > 1:
        raise UsageError(
            f"--num-gpus {asked}: {ranks.world_size} ranks were started, with a GPU each; start one process, or drop it."
        )
    if isinstance(asked, int) and asked > max(1, gpus):
        there = f"{gpus} are visible; use at most that, or all" if gpus else "there is no GPU; drop it"
        raise UsageError(f"--num-gpus {asked}: {there}.")


def check_model(config: RunConfig, spec: ModelSpec) -> None:
    """Raises UsageError: too many positions, norms that our kernels do not know, or routing of a model without experts."""
    positions = spec.max_positions
    if positions is not None and config.positions > positions:
        raise UsageError(
            f"--prompt-len {config.prompt_len} and --gen-len {config.gen_len} need {config.positions} positions; "
            f"{spec.name} has {positions}: shorten one of them."
        )
    check_norm_kernels_option(config.norm_kernels, spec.config.model_type)
    if config.dummy_routing != DEFAULTS["dummy_routing"] and spec.dummy_routing is None:
        raise UsageError(f"--dummy-routing {config.dummy_routing}: {spec.name} has no experts; drop it.")


THIS_MACHINE = Machine()
# Predicted gain for which a mixture of experts runs on several GPUs: without resident weights two were predicted to generate from
# Qwen3-30B-A3B 1.14 times as fast as one, and did 0.95 times (h200-x2-one-process/sixth_host).
MIN_MIXTURE_GAIN = 1.2


@dataclass(frozen=True)
class Plan:
    """The placement of a run, with its needs of memory and disk on this node and its predicted times.

    `needs`, `times` and `predicted` trace the empty model: read them before `load`.
    """

    job: Job
    engine_plan: EnginePlan  # the placement
    measured_tokens_per_s: float | None = None  # of decoding, where `zero-inference plan --verify` ran it
    failed: bool = False  # that run failed
    draft: Plan | None = None  # of the model that proposes tokens

    @functools.cached_property
    def needs(self) -> list[Need]:
        needs = memory_needs(self.engine_plan)
        if self.draft is None:
            return needs
        taken, found = draft_bytes(self.draft, self.job.config), []
        for each in needs:
            if self.job.on_gpu and each.place == DEVICE_MEMORY and each.available_bytes is not None:
                # the engine's plan counts only the memory that the draft leaves
                needed, available = each.needed_bytes + taken, each.available_bytes + taken
                each = replace(each, needed_bytes=needed, available_bytes=available)
            elif not self.job.on_gpu and each.place == HOST_MEMORY:
                each = replace(each, needed_bytes=each.needed_bytes + taken * self.job.ranks.local_world_size)
            found.append(each)
        return found

    @property
    def fits(self) -> bool:
        return all(need.fits for need in self.needs)

    @property
    def keeps_all_weights(self) -> bool:
        """True where all weights stay on the devices."""
        return not (self.engine_plan.footprint.host or self.engine_plan.footprint.disk)

    @functools.cached_property
    def _prediction(self) -> Times | str:
        machine = self.job.machine.profile()
        if machine is None:
            return "there are no current measurements of this machine (zero-inference link --save makes them)"
        try:
            return predict_times(self.engine_plan, machine)
        except NotPredictable as error:
            return str(error)

    @property
    def times(self) -> Times | None:
        """Predicted times of prefill and decode step; None where rates of the machine or operators of the model are unknown."""
        return self._prediction if isinstance(self._prediction, Times) else None

    @property
    def why_not_predicted(self) -> str | None:
        """Why there are no `times`, in a few words; None if there are."""
        return self._prediction if isinstance(self._prediction, str) else None

    @functools.cached_property
    def speculation(self) -> SpeculationTimes | None:
        """Predicted times with a draft of the same model; None without one, or where times are unknown."""
        if self.job.config.speculate != SELF or self.times is None or self.draft.times is None:
            return None
        skipped = len(self.draft.job.skipped) / self.job.spec.text_config.num_hidden_layers
        return predict_speculation(self.job.config, self.job.rank_batch, self.draft.times, self.times, skipped)

    @property
    def tokens_per_s(self) -> float:
        """Predicted token/s of decoding."""
        return (self.speculation or self.times).tokens_per_s

    @property
    def best_tokens_per_s(self) -> float:
        """Measured token/s of decoding, else predicted."""
        return self.measured_tokens_per_s or self.tokens_per_s

    @property
    def best_step_s(self) -> float:
        """Measured seconds of a decode step, else predicted."""
        return self.job.config.batch_size / self.best_tokens_per_s

    @property
    def lacks_overhead(self) -> bool:
        """True where its speed is a bound because the overhead of its engine was not measured."""
        return self.times.lacks_overhead and self.measured_tokens_per_s is None

    @property
    def memory_bytes(self) -> int:
        """Bytes on all devices and in host memory."""
        plan, devices = self.engine_plan, range(len(self.job.devices))
        rank_bytes = plan.host_peak_bytes() + (sum(map(plan.peak_bytes_on, devices)) if self.job.on_gpu else 0)
        return self.job.ranks.world_size * rank_bytes

    @functools.cached_property
    def predicted(self) -> Predicted:
        """All predictions, for the record."""
        job, plan, times, steps = self.job, self.engine_plan, self.times, self.job.config.gen_len - 1
        machine, peak_host_bytes = job.machine.profile(), None
        if machine is not None and machine.process_bytes is not None:
            libraries = machine.process_bytes + machine.library_bytes.get(job.config.engine, 0)
            peak_host_bytes = libraries - machine.measuring_bytes + plan.host_peak_bytes(machine.measuring_bytes)
            if job.on_gpu and not plan.measures_link_with_weights:
                peak_host_bytes += LINK_BLOCK_BYTES  # the link is measured between loops, while all else is allocated
        load_s = None if machine is None else predict_load_s(plan, machine)
        values: dict[str, Any] = dict.fromkeys(Predicted.model_fields)
        values |= {name: int(value or 0) for name, value in plan.moved_per_step() if name in values}
        values |= {
            "load_s": load_s,
            "load_range_s": RANGES["load"].of(load_s) if job.on_gpu and load_s is not None else None,
            "weight_bytes": plan.weight_bytes,
            "peak_gpu_bytes": plan.device_peak_bytes if job.on_gpu else None,
            "peak_host_bytes": peak_host_bytes,
        }
        if self.draft is not None:
            place = "peak_gpu_bytes" if job.on_gpu else "peak_host_bytes"
            values[place] = values[place] and values[place] + draft_bytes(self.draft, job.config)
        if times is not None:
            prefill, step = times.prefill, times.step
            values |= {"prefill_s": prefill.seconds, "prefill_range_s": prefill.range_s}
            if job.config.speculate is None:
                values |= {"bound_by": step.bound_by, "decode_s": step.seconds * steps}
                values["decode_range_s"] = step.range_s and [steps * each for each in step.range_s]
            elif self.speculation is not None:  # how many passes there will be is unknown
                values |= {"pass_s": self.speculation.pass_s, "draft_s": self.speculation.draft_s}
        return Predicted(**values)

    @property
    def short_placement(self) -> str:
        """ "host", "85% host (CPU 30%)" (the rest is on the device), "device" or "disk"; the CPU's share is that of layers or experts,
        whichever is larger."""
        plan, terms = self.engine_plan, self.engine_plan.cost_terms
        if plan.footprint.disk:
            return "disk"
        if not self.job.on_gpu:
            return "host"
        share = plan.footprint.host * self.job.ranks.local_world_size / max(1, plan.weight_bytes)
        if not share:
            return "device"
        cpu_share = max(terms.step_cpu.layer_share, terms.step_cpu.expert_share)
        cpu = " (CPU ?)" if terms.cpu_rate_unknown else f" (CPU {cpu_share:.0%})" if cpu_share else ""
        return ("host" if share > 0.99 else f"{share:.0%} host") + cpu

    def describe(self, work: bool = False) -> str:
        """Return a text such as "stream int4, 56% host (CPU 97%), KV host", with `work` also ", batch 8, 2 GPUs"."""
        config, gpus = self.job.config, self.job.num_gpus
        text = (
            f"{config.engine} {self.job.format_name}, {self.short_placement}{', KV host' if config.kv_offload else ''}"
        )
        return text + f", batch {config.batch_size}" * work + f", {gpus} GPUs" * (work and gpus > 1)

    @property
    def by_gpu(self) -> list[dict[str, int]]:
        """Layers, peak bytes and bytes over the link in a decode step of each GPU, where one process drives several; else empty."""
        plan, devices = self.engine_plan, self.engine_plan.layer_devices
        return [
            {
                "index": device,
                "layers": devices.count(device),
                "peak_bytes": plan.peak_bytes_on(device),
                "host_to_device_bytes_per_step": plan.fetched_bytes_on(device)
                + round(plan.cache_share_on(device).kv * plan.copied_kv_bytes),
            }
            for device in range(len(self.job.devices) if len(self.job.devices) > 1 else 0)
        ]

    def describe_gpus(self) -> list[tuple[str, str]]:
        """Return the layers on each GPU and the bytes over each link, if any, as label and text; nothing with one GPU."""
        gpus = self.by_gpu
        layers = [f"{each['layers']} on GPU {each['index']}" for each in gpus]
        sent = [f"{format_bytes(each['host_to_device_bytes_per_step'])} to GPU {each['index']}" for each in gpus]
        lines = [("layers", ", ".join(layers)), ("links", f"each decode step {', '.join(sent)}")]
        uses_links = any(each["host_to_device_bytes_per_step"] for each in gpus)
        return lines if uses_links else lines[:1] if gpus else []

    @property
    def unchosen_experts(self) -> str | None:
        """A line about experts that a decode step copies, or reads from disk, though no token chose them; None where it moves none."""
        job, plan, terms = self.job, self.engine_plan, self.engine_plan.cost_terms
        number, chosen = job.spec.experts
        idle_share = job.sizes.idle_expert_bytes / max(1, job.sizes.parameter_bytes)
        copies = job.on_gpu or terms.copies_within_host
        moved_bytes = plan.fetched_bytes - terms.chosen_expert_bytes if copies else plan.disk_bytes
        if not idle_share or moved_bytes <= plan.weight_bytes * (1 - idle_share):
            return None
        how = "copies" if copies else "reads from disk"
        return f"{job.config.engine} {how} all {number} experts of a layer in each step, a token uses {chosen}: {plan.why_whole_layers}"

    def check(self) -> None:
        """Raises UsageError: this machine lacks something besides memory that the engine needs."""
        if self.job.machine.is_here:
            engine_module(self.job.config.engine).check(self.engine_plan)

    def load(self, progress: LoadProgress = lambda done: None, target: LoadedModel | None = None) -> LoadedModel:
        """Return the model, ready to generate. Call it once: it fills the plan's empty model. Raises RunError.

        Args:
            target: of a draft with `job.target`, the model whose weights it shares.
        """
        self.predicted  # noqa: B018  while the model is empty
        self.engine_plan.prepare()
        shared = {} if self.job.target is None else {"target": target}
        loaded = engine_module(self.job.config.engine).load(self.engine_plan, progress, **shared)
        with contextlib.ExitStack() as closing:
            closing.callback(loaded.close)
            closing.enter_context(using_prompt_attention(loaded.model))
            loaded.close = closing.pop_all().close
        return loaded


def build_job(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    least_of_ranks: bool = False,
    machine: Machine = THIS_MACHINE,
    empty_model: EmptyModel | None = None,
) -> Job:
    """Read the free memory of the devices, or the least of all ranks (a collective), and build the empty model if needed.
    Raises UsageError: transformers cannot build the model."""
    empty_model = empty_model or build_empty_model(spec)
    devices = driven_devices(config, ranks, machine)
    free = machine.free_device_bytes(devices, ranks if least_of_ranks else None)
    return Job(config, spec, ranks, empty_model, free, machine, devices)


def driven_devices(config: RunConfig, ranks: Ranks, machine: Machine) -> tuple[torch.device, ...]:
    """Return the devices that this process drives: that of its rank, or as many GPUs as `--num-gpus` names, by default all."""
    if config.engine not in MULTI_GPU_ENGINES or ranks.world_size > 1 or ranks.device.type == "cpu":
        return (ranks.device,)
    count = config.num_gpus if isinstance(config.num_gpus, int) else machine.gpus()
    return (ranks.device, *(torch.device("cuda", index) for index in range(1, count)))


def with_options(job: Job, config: RunConfig) -> Job:
    """Return `job` with other options, for this rank alone, with the devices that they ask for and what is free there."""
    devices = driven_devices(config, job.ranks, job.machine)
    if devices == job.devices:
        return replace(job, config=config)
    return replace(job, config=config, devices=devices, free_by_device=job.machine.free_device_bytes(devices))


def draft_bytes(draft: Plan, config: RunConfig) -> int:
    """Return the bytes of a draft's weights, and of its KV cache if it has its own."""
    own_cache = 0 if config.speculate == SELF else draft.job.kv_bytes()
    return (
        draft.engine_plan.weight_bytes_on(0) + (0 if draft.job.on_gpu else draft.engine_plan.footprint.host) + own_cache
    )


def refuse_inputs(job: Job) -> None:
    """Raise UsageError where the model does not run on text alone, or adds positions."""
    sizes, problem = job.sizes, None
    if sizes.refuses_text is not None:
        sense = "audio" if hasattr(job.spec.config, "audio_config") else "images"
        problem = f"needs {sense} and does not run on text alone (transformers: {sizes.refuses_text.rstrip('.')})"
    elif sizes.added_positions:
        problem = f"puts {sizes.added_positions} positions of its own before each sequence, which no engine plans for"
    if problem is not None:
        raise UsageError(f"--model {job.spec.name}: {job.spec.config.model_type} {problem}; run it in transformers.")


def plan_target(job: Job) -> Plan:
    """Place the weights of `job` without loading anything.

    Unless `--num-gpus` is given, the plan uses all of `job.devices` if they gain enough, otherwise the first alone.

    Raises:
        UsageError: the engine cannot run it, the KV cache cannot be in host memory, or the model adds positions or takes no text.
    """
    refuse_inputs(job)
    if job.config.kv_offload:
        refuse_kv_offload(job.empty_model.model, job.window_only_in_cache)
    if job.config.num_gpus is not None or len(job.devices) == 1:
        return _plan_for_devices(job)
    one = replace(job, devices=job.devices[:1], free_by_device=job.free_by_device[:1])
    if why_one_device(job.empty_model.model) is not None:
        return _plan_for_devices(one)
    # without rates nothing is predicted, and each plan measures the CPU beside its links for some seconds: make a single one
    predicts = job.machine.profile() is not None
    if not predicts and _holds_all_weights(one):
        return _plan_for_devices(one)
    plans: list[Plan] = []
    refused: UsageError | None = None
    for each in (job, one):
        try:
            plans.append(_plan_for_devices(each))
        except UsageError as error:  # too little memory, or all weights on the devices and none for --cpu-compute
            refused = refused or error
            continue
        if not predicts and plans[-1].fits:
            return plans[-1]
    if refused is not None and not plans:
        raise refused
    return _more_gpus_if_they_help(*plans) if len(plans) == 2 else plans[0]


def _holds_all_weights(job: Job) -> bool:
    """Return whether the devices of `job` hold all weights; the CPU is not measured."""
    job = replace(job, config=replace(job.config, cpu_compute="off"))
    try:
        plan = Plan(job, engine_module(job.config.engine).plan(job))
    except UsageError:
        return False
    return plan.fits and plan.keeps_all_weights


def _more_gpus_if_they_help(several: Plan, one: Plan) -> Plan:
    """Return the plan that fits, then that of several GPUs if it is predicted to gain `MIN_GAIN`, a mixture
    `MIN_MIXTURE_GAIN`. Without times return that of one GPU only if it holds all weights."""
    if several.fits != one.fits:
        return several if several.fits else one
    if several.times is None or one.times is None:
        return one if one.keeps_all_weights else several
    of_one, of_several = (each.times.generation_s(each.job.config.gen_len) for each in (one, several))
    least = MIN_MIXTURE_GAIN if one.job.spec.experts[0] else MIN_GAIN
    return several if of_one >= least * of_several else one


def _plan_for_devices(job: Job) -> Plan:
    """Return the plan of the engine, or its alternative where the predicted step of that is shorter."""
    plan = _without_cpu_prefill_if_slower(Plan(job, engine_module(job.config.engine).plan(job)))
    alternative = None if job.machine.profile() is None else plan.engine_plan.alternative()
    if alternative is None or plan.times is None:
        return plan
    other = _without_cpu_prefill_if_slower(Plan(job, alternative))
    shorter = other.times is not None and other.times.step.seconds < plan.times.step.seconds
    return other if shorter and (other.fits or not plan.fits) else plan


def _without_cpu_prefill_if_slower(plan: Plan) -> Plan:
    """Return `plan`, or the same with prompts computed by the device alone where the CPU shortens the predicted prefill by less than
    `MIN_GAIN`. The engine decided without kernel launches, which this prediction counts."""
    on_device = plan.engine_plan.without_short_prompts()
    if on_device is None or plan.times is None:
        return plan
    other = Plan(plan.job, on_device)
    gains = other.times is None or other.times.prefill.seconds >= MIN_GAIN * plan.times.prefill.seconds
    return plan if gains else other
