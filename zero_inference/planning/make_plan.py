"""The plans of runs: of the target model, and of its draft in the same device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zero_inference.config.option import AUTO
from zero_inference.config.options import MIN_RING_DEPTH, NGRAM, SELF, WITHOUT_SPECULATION
from zero_inference.config.run_config import RunConfig
from zero_inference.engines import engine_module
from zero_inference.engines.base import Job, refuse_speculation
from zero_inference.engines.stream.placement import GIB, spread
from zero_inference.engines.stream.plan import StreamPlan
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.models.empty_model import EmptyModel, build_empty_model
from zero_inference.models.spec import ModelSpec, load_tokenizer, resolve_for_plan, resolve_model
from zero_inference.planning.cost import Times
from zero_inference.planning.plan import (
    Plan,
    build_job,
    check_model,
    draft_bytes,
    plan_target,
    refuse_inputs,
    with_options,
)
from zero_inference.utils.format import format_bytes
from zero_inference.utils.ranks import Ranks

# A draft shares resident layers of at most this many times the bytes of its own: a shared layer frees memory for other layers, which a pass
# then need not copy, but each of 16 proposals reads more. 8 bits gain from it beside 4, and 16 bits lose.
MAX_SHARED_RATIO = 2.0
# Most layers that it skips: without a third a pass gives 3 tokens (cpu/speculation_simulation/skip_layers.txt).
MAX_SKIPPED_SHARE = 1 / 3


def make_plan(job: Job) -> Plan:
    """Plan the draft, if there is one, and then the target model in the device memory that is left.

    Raises UsageError: as `plan_with_draft` and `plan_target`.
    """
    if job.config.speculate is None:
        return plan_target(job)
    asked = f"--speculate {job.config.speculate}"
    if job.spec.dummy_routing == "text":
        raise UsageError(
            f"{asked} verifies the model's own tokens, but random ones are fed: add --dummy-routing greedy."
        )
    refuse_speculation(job, asked)
    if job.config.speculate != NGRAM and len(job.devices) > 1 and job.config.num_gpus is None:
        job = replace(job, devices=job.devices[:1], free_by_device=job.free_by_device[:1])
    plan, draft = plan_with_draft(job, asked)
    # the engine plan's job has what is left, this one what there is: another plan of it subtracts the draft again
    return plan if draft is None else replace(plan, job=job, draft=draft)


def plan_run(config: RunConfig, spec: ModelSpec, ranks: Ranks, empty_model: EmptyModel | None = None) -> Plan:
    """Return the plan of connected ranks, checked against the machine: a collective. Raises UsageError: it cannot work here."""
    try:
        plan = make_plan(build_job(config, spec, ranks, least_of_ranks=True, empty_model=empty_model))
    except DoesNotFit as error:
        raise DoesNotFit(f"{error} --dry-run shows which options would.") from error
    plan.check()
    return plan


def without_draft(plan: Plan) -> Times | None:
    """Return the predicted times of the same run without speculation; None where they are unknown."""
    return plan_with(plan.job, **WITHOUT_SPECULATION).times


def plan_with(job: Job, **fields: Any) -> Plan:
    """Return the plan of the same model and machine with other options, to be compared and not loaded; this rank alone makes it.
    Raises UsageError: the options cannot work."""
    return make_plan(with_options(job, replace(job.config, **fields).validate()))


def with_current_memory(plan: Plan) -> Plan:
    """Return the same plan for the device memory that is free now, the least of all ranks: a collective.
    Raises UsageError: it has become too little."""
    job = plan.job
    if job.free_device_bytes is None:
        # the files of weights that have been fetched say how they are stored
        return make_plan(job) if job.stored_formats else plan
    return make_plan(replace(job, free_by_device=job.machine.free_device_bytes(job.devices, job.ranks)))


def plan_draft(
    job: Job,
    target: StreamPlan | None = None,
    shared: frozenset[int] = frozenset(),
    skipped: frozenset[int] = frozenset(),
) -> Plan | None:
    """Return the plan of the draft of `--speculate`, by the stream engine on one device; None if that is no model.

    Args:
        target: of the same model, whose weights outside of layers the draft shares; None: it has all of its own.
        shared: blocks whose weights it shares, too.
        skipped: layers that it leaves out.

    Raises UsageError: it has another tokenizer, its cache cannot forget tokens, or the device cannot hold all of its weights.
    """
    config, name = job.config, job.config.speculate
    if name in (None, NGRAM):
        return None
    if len(job.devices) > 1:
        raise UsageError(f"--speculate {name}: draft and target model are on one GPU; use --num-gpus 1.")
    same = "batch_size prompt_len gen_len dtype dummy trust_remote_code seed decode_graph verbose".split()
    own = RunConfig(
        **{each: getattr(config, each) for each in same},
        model=config.model if name == SELF else name,
        engine="stream",
        quant_bits=config.draft_bits,
        cpu_compute="off" if job.on_gpu or (target is not None and target.cpu is None) else AUTO,
        kv_offload=name == SELF and config.kv_offload and job.on_gpu,  # it continues the cache of the target model
    ).validate()

    def build() -> tuple[ModelSpec, EmptyModel]:
        if name == SELF:
            return job.spec, build_empty_model(job.spec)
        find = resolve_for_plan if config.dry_run or not job.machine.is_here else resolve_model
        spec = find(own, job.ranks.device.type)
        _check_same_tokenizer(job.spec, spec)
        check_model(own, spec)
        return spec, build_empty_model(spec)

    try:
        spec, empty_model = job.empty_model.cached(("draft", name), build)
    except UsageError as error:
        raise UsageError(str(error).replace("--model", "--speculate", 1)) from error
    # the target model is planned beside it, and shows whether both fit
    free = job.free_by_device if target is None else tuple(1 << 60 for _ in job.free_by_device)
    of_target: dict[str, Any] = dict(target=target, shared=shared, skipped=skipped)
    draft = replace(job, config=own, spec=spec, empty_model=empty_model, free_by_device=free, **of_target)
    if name != SELF:
        refuse_inputs(draft)
        refuse_speculation(draft, f"--speculate {name}")
    plan = Plan(draft, engine_module(own.engine).plan(draft))
    if plan.engine_plan.footprint.host and job.on_gpu:
        raise DoesNotFit(
            f"--speculate {name}: the draft has {format_bytes(plan.engine_plan.weight_bytes)} of weights, which do not fit beside KV "
            f"cache and activations in {format_bytes(job.free_device_bytes or 0)} of device memory: use ngram or a smaller model."
        )
    return plan


def _check_same_tokenizer(spec: ModelSpec, draft: ModelSpec) -> None:
    one, other = load_tokenizer(spec), load_tokenizer(draft)
    same = (
        spec.text_config.vocab_size == draft.text_config.vocab_size
        if one is None or other is None
        else one.get_vocab() == other.get_vocab()
    )
    if not same:
        raise UsageError(
            f"--speculate {draft.name}: its tokenizer has other tokens than that of {spec.name}; use a model of the same family."
        )


def plan_with_draft(job: Job, asked: str) -> tuple[Plan, Plan | None]:
    """Return the plans of the target model and of its draft, if that is a model.

    A draft of the same model shares what is outside of layers, and the layers that stay on the device, if the target model stores them in
    at most `MAX_SHARED_RATIO` times the bytes. Where not all of its layers fit, it skips up to `MAX_SKIPPED_SHARE` of them.

    Args:
        asked: the option, for messages.

    Raises UsageError: as `plan_draft` and `plan_target`, or the two do not fit together.
    """
    config, limit = job.config, math.inf if job.config.draft_memory is None else job.config.draft_memory * GIB
    if config.speculate != SELF or config.engine != "stream":
        draft = plan_draft(job)
        taken = 0 if draft is None else draft_bytes(draft, config)
        if taken > limit:
            remedy = (
                "use --engine stream, where it may skip layers" if config.speculate == SELF else "use a smaller model"
            )
            raise DoesNotFit(
                f"--draft-memory {config.draft_memory:g}: the draft of {asked} takes {format_bytes(taken)}; give it that, or {remedy}."
            )
        return _target_beside(job, taken, asked), draft
    small: dict[str, Any] = {"gpu_memory": 0.0} if config.gpu_memory is None else {}
    small |= {"ring_depth": MIN_RING_DEPTH} if config.ring_depth is None else {}
    target = stream_plan(plan_target(replace(job, config=replace(config, **small))))
    draft = plan_draft(job, target)
    taken, layer_bytes = draft_bytes(draft, config), stream_plan(draft).placement.layer_bytes
    room = job.free_device_bytes - target.min_free_bytes_on(0) if job.on_gpu else math.inf
    if taken <= room and target.placement.layer_bytes <= MAX_SHARED_RATIO * layer_bytes:
        plan, sharing = _share_layers(job, asked, taken, layer_bytes)
        if draft_bytes(sharing, config) <= limit:
            return plan, sharing
    skipped = _layers_to_skip(job, draft, min(room, limit), asked)
    if skipped:
        draft = plan_draft(job, target, skipped=skipped)
    plan = _target_beside(job, draft_bytes(draft, config), asked)
    return plan, plan_draft(job, stream_plan(plan), skipped=skipped)  # with the embedding where this plan has it


def stream_plan(plan: Plan) -> StreamPlan:
    assert isinstance(plan.engine_plan, StreamPlan)
    return plan.engine_plan


def _target_beside(job: Job, taken: int, asked: str) -> Plan:
    """Return the plan of the target model without the bytes that a draft takes on each device."""
    left = tuple(max(0, each - taken) for each in job.free_by_device)
    try:
        return plan_target(replace(job, free_by_device=left))
    except DoesNotFit as error:
        raise DoesNotFit(f"{error} The draft of {asked} takes {format_bytes(taken)}.") from error


def _share_layers(job: Job, asked: str, taken: int, layer_bytes: int) -> tuple[Plan, Plan]:
    """Return the plans of target model and draft with as many shared layers as fit: the more there are, the less memory the draft takes of
    its own.

    Args:
        taken, layer_bytes: of a draft that shares no layer, all bytes and those of a layer.
    """

    def plans(count: int) -> tuple[Plan, Plan]:
        plan = _target_beside(job, taken - count * layer_bytes, asked)
        return plan, plan_draft(job, stream_plan(plan), frozenset(stream_plan(plan).placement.resident))

    found = plans(0)
    placement = stream_plan(found[0]).placement
    fewest, most = 0, min(placement.layers, sum(job.free_by_device) // placement.layer_bytes)
    while fewest < most:
        count = (fewest + most + 1) // 2
        tried = plans(count)
        if draft_bytes(tried[1], job.config) <= taken - count * layer_bytes:
            fewest, found = count, tried
        else:
            most = count - 1
    return found


def skip_least_changes(draft: Plan, changes: Sequence[float]) -> Plan:
    """Return the plan of a draft that skips as many layers, but those with the least of `changes`, one for each layer; never the first."""
    order = sorted(range(1, len(changes)), key=lambda layer: changes[layer])
    job = replace(draft.job, skipped=frozenset(order[: len(draft.job.skipped)]))
    return Plan(job, engine_module(job.config.engine).plan(job))


def _layers_to_skip(job: Job, draft: Plan, room: float, asked: str) -> frozenset[int]:
    """Return as many evenly spread layers as a draft has to skip to take at most `room` bytes; `skip_least_changes` replaces them when the
    model is loaded. Raises DoesNotFit: they are too many, or the KV cache is in host memory."""
    placement, taken = stream_plan(draft).placement, draft_bytes(draft, job.config)
    if taken <= room:
        return frozenset()
    count, most = math.ceil((taken - room) / placement.layer_bytes), int(MAX_SKIPPED_SHARE * placement.layers)
    if count > most or job.config.kv_offload:
        least, memory = format_bytes(taken - most * placement.layer_bytes), job.config.draft_memory
        limited_by = "the device" if memory is None else f"--draft-memory {memory:g}"
        rule = f"without a third of its layers, the most that it skips, it takes {least}: make that free"
        if job.config.kv_offload:
            rule = "it skips no layers while keys and values are in host memory: drop --kv-offload"
        raise DoesNotFit(
            f"{asked}: the draft takes {format_bytes(taken)}, and {limited_by} leaves {format_bytes(max(0, int(room)))} for it; {rule}, or "
            "use ngram or a smaller model."
        )
    return frozenset(1 + index for index in spread([1] * (placement.layers - 1), count))  # never the first
