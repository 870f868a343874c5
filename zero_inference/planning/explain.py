"""Plans in words: predicted times and what they leave out, configurations, what is faster, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.engines.base import EnginePlan
from zero_inference.planning.changes import changes_that_fit
from zero_inference.planning.cost import Range, Times, lacks_dequantization, unknown_rates
from zero_inference.planning.memory import DEVICE_MEMORY, PAGE_LOCKED
from zero_inference.planning.plan import Plan
from zero_inference.planning.search import Candidate, Faster, SearchResult, ranked
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils.format import (
    format_bytes,
    format_bytes_pair,
    format_gib_rounded_up,
    format_seconds,
    significant,
)

if TYPE_CHECKING:
    from zero_inference.hardware.profile import HardwareProfile

NOT_MEASURED = "there are no current measurements of this machine (zero-inference link --save makes them, once)"
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FIRST = {"throughput": "Fastest", "latency": "Shortest decode step", "memory": "Least memory"}  # by goal


def seconds_in_words(predicted_s: float, within_s: Range | None) -> str:
    """Return such as "0.123 s (0.11 to 0.14)"."""
    if within_s is None:
        return format_seconds(predicted_s)
    low, high = map(format_seconds, within_s)
    if low.endswith(" s") and high.endswith(" s"):
        low, high = low.removesuffix(" s"), high.removesuffix(" s")
    return f"{format_seconds(predicted_s)} ({low} to {high})"


def rate_in_words(predicted: float, within: Range | None) -> str:
    """Return such as "16.4 (15.1 to 18.9)"."""
    return significant(predicted) + (f" ({' to '.join(map(significant, within))})" if within else "")


def times_in_words(times: Times, batch_size: int) -> str:
    """Return token/s, decode step and first token on one line."""
    least, most = ("at least ", "at most ") if times.at_least else ("", "")
    rate = rate_in_words(times.tokens_per_s(batch_size), times.tokens_per_s_range(batch_size))
    return (
        f"{most}{rate} token/s (decode step {least}{format_seconds(times.step.seconds)}, "
        f"bound by {RATE_WORDS[times.step.bound_by]}), "
        f"first token {least}{seconds_in_words(times.prefill.seconds, times.prefill_range_s)}"
    )


def left_out(times: Times) -> list[str]:
    """Return what the times do not count, a few words each."""
    return [
        *([] if times.with_host else ["kernel launches (the host's time for them is not known)"]),
        *(["the host's cores (their rate is not known; a run may be faster)"] if times.without_cores else []),
    ]


def why_unknown(plan: EnginePlan, machine: HardwareProfile) -> str:
    """Return why `cost.predict_times` gives None, in a few words."""
    if names := unknown_rates(plan, machine):
        return _unknown_in_words(names, plan.job.machine.is_here)
    if lacks_dequantization(plan, machine):
        return f"how long {plan.job.config.engine} takes to dequantize on a CPU was not measured (zero-inference link --save does)"
    return "the model cannot be traced without its weights"


def why_not_predicted(plans: Sequence[Plan]) -> str:
    """Return why no speed is predicted for any of `plans`; each reason and each unknown rate once."""
    rates: dict[str, None] = {}
    reasons: dict[str, None] = {}
    for plan in plans:
        machine = plan.job.machine.profile()
        if machine is None:
            reasons[NOT_MEASURED] = None
        elif names := unknown_rates(plan.weights, machine):
            rates |= dict.fromkeys(names)
        else:
            reasons[why_unknown(plan.weights, machine)] = None
    of_rates = [_unknown_in_words(list(rates), plans[0].job.machine.is_here)] if rates else []
    return "; ".join([*of_rates, *reasons])


def _unknown_in_words(names: Sequence[str], is_here: bool) -> str:
    remedy = ""
    if is_here and any("disk=" in name for name in names):
        remedy = " (measure it with zero-inference link --save --disk DIR)"
    if len(names) == 1:
        return f"the rate of {names[0]} is not known{remedy}"
    return f"the rates of {', '.join(names[:-1])} and {names[-1]} are not known{remedy}"


def experts_in_words(plan: EnginePlan) -> str | None:
    """Return a line about experts that a decode step copies, or reads from disk, though no token chose them; None where it moves none."""
    job, terms, (number, chosen) = plan.job, plan.cost_terms, plan.job.spec.experts
    idle_share = job.sizes.idle_expert_bytes / max(1, job.sizes.parameter_bytes)
    copies = job.on_gpu or terms.copies_within_host
    moved_bytes = plan.fetched_bytes - terms.chosen_expert_bytes if copies else plan.disk_bytes
    if not idle_share or moved_bytes <= plan.weight_bytes * (1 - idle_share):
        return None
    how = "copies" if copies else "reads from disk"
    where = "" if job.on_gpu or not copies else " within host memory"
    return f"{job.config.engine} {how} all {number} experts of a layer{where} in each step, a token uses {chosen}: {plan.why_whole_layers}"


def first_token_in_words(plan: EnginePlan, times: Times) -> str | None:
    """Return why the first token takes less than a step; None where it does not."""
    if times.prefill.seconds >= times.step.seconds:
        return None
    if plan.cost_terms.prefill_fetched_bytes < plan.fetched_bytes:
        return "the first token takes less than a step: its first layers are still on the device from the generation before"
    return "the first token takes less than a step, which also copies the KV cache" if plan.copied_kv_bytes else None


def format_of_weights(plan: Plan) -> str:
    """Return "int4", or the dtype: "bf16"."""
    config = plan.job.config
    return f"int{config.quant_bits}" if config.quantized else SHORT_DTYPES[plan.job.spec.dtype_name]


def place_of_weights(plan: Plan) -> str:
    """Return "host", "85% host" (the rest is on the device), "device" or "disk"."""
    weights = plan.weights
    host_bytes = weights.footprint.host * plan.job.ranks.local_world_size
    if weights.footprint.disk:
        return "disk"
    if not plan.job.on_gpu:
        return "host"
    if not host_bytes:
        return "device"
    share = host_bytes / max(1, weights.weight_bytes)
    return "host" if share > 0.99 else f"{share:.0%} host"


def weights_in_words(plan: Plan) -> str:
    """Return the place of the weights and the largest share that the CPU computes: "85% host (cores 30%)"."""
    place, terms = place_of_weights(plan), plan.weights.cost_terms
    if not plan.weights.footprint.host or not plan.job.on_gpu:
        return place
    if terms.cpu_rate_unknown:
        return f"{place} (cores not known)"
    share = max(terms.step_cpu.layer_share, terms.step_cpu.expert_share)
    return f"{place} (cores {share:.0%})" if share else place


def in_short(candidate: Candidate) -> str:
    """Return such as "stream engine, int4, batch 1"."""
    gpus = f", {candidate.world_size} GPUs" if candidate.world_size > 1 else ""
    config = candidate.config
    return f"{config.engine} engine, {format_of_weights(candidate.plan)}, batch {config.batch_size}{gpus}"


def speed(candidate: Candidate, goal: str) -> str:
    """Return the token/s of `candidate`, with a step's time or the memory where `goal` ranks by these."""
    most, least = ("at most ", "at least ") if candidate.times.at_least else ("", "")
    within = candidate.times.tokens_per_s_range(candidate.config.batch_size)
    predicted = rate_in_words(candidate.tokens_per_s, within)
    if candidate.measured_tokens_per_s is not None:
        return f"{significant(candidate.measured_tokens_per_s)} token/s measured, {most}{predicted} predicted"
    parts = [f"{most}{predicted} token/s"]
    if goal == "latency":
        step_s = seconds_in_words(candidate.times.step.seconds, candidate.times.step_range_s)
        parts.insert(0, f"{least}{step_s} a step")
    if goal == "memory":
        parts.insert(0, f"{format_bytes(candidate.memory_bytes)} of device and host memory")
    return f"{', '.join(parts)} predicted"


def headline(best: Sequence[Candidate], goal: str) -> str:
    """Return the first of `best` with its speed, and the best for a single sequence; where that is the first, the one with most token/s."""
    first = best[0]
    line = f"{FIRST[goal]}: {in_short(first)}: {speed(first, goal)}."
    good = [each for each in best if not each.failed]
    if first.config.batch_size > 1:
        others = [each for each in ranked(good, "latency") if each.config.batch_size == 1]
        about = "For one sequence"
    else:
        others, about = ranked(good, "throughput"), "Most token/s"
    if others and others[0] is not first:
        line += f" {about}: {in_short(others[0])}: {speed(others[0], goal)}."
    return line


def notes(candidates: Sequence[Candidate]) -> list[str]:
    """Return what to know about the times in a table of `candidates`, a line each."""
    lines = []
    if reasons := dict.fromkeys(reason for each in candidates for reason in each.times.bounds_because):
        lines.append(f"≤, ≥: bounds, because {'; '.join(reasons)}")
    if missing := dict.fromkeys(what for each in candidates for what in left_out(each.times)):
        lines.append(f"not counted: {'; '.join(missing)}")
    others = [
        line
        for each in candidates
        for line in (first_token_in_words(each.plan.weights, each.times), experts_in_words(each.plan.weights))
    ]
    return [*lines, *dict.fromkeys(filter(None, others))]


def faster_in_words(found: Sequence[Faster]) -> str:
    """Return such as "--quant-bits 4 gives 3.39 token/s (4.8 times as many), --batch-size 64 gives 38.3 token/s (54 times)"."""
    return ", ".join(
        f"{each.options} gives {'at most ' if each.at_most else ''}{significant(each.tokens_per_s)} token/s "
        f"({significant(each.times) if each.times >= 10 else f'{each.times:.1f}'} times{' as many' if not number else ''})"
        for number, each in enumerate(found)
    )


def what_does_not_fit(plans: Sequence[Plan]) -> list[str]:
    """Return a line for each of `plans`: what is missing and what would fit."""
    lines = []
    for plan in plans:
        config = plan.job.config
        # an engine may refuse a plan that meets all needs
        short = next((need for need in plan.needs if not need.fits), plan.needs[0])
        where = " on the device" if plan.job.on_gpu else " in host memory"
        place = {"cpu": " in host memory", "disk": " on disk"}.get(config.offload, where)
        gpus = f", {plan.job.ranks.world_size} GPUs" if plan.job.ranks.world_size > 1 else ""
        name = f"{config.engine} {format_of_weights(plan)}{'' if config.engine == 'stream' else place}{gpus}"
        needed, there, unit = format_bytes_pair(short.with_reserve, short.available or 0)
        line = f"{name}: {needed} {unit} of {short.place}, {there} {unit} free"
        if changes := changes_that_fit(plan.job):
            line += f"; fits with {changes[0]}"
        lines.append(line)
    return lines


def why_none(found: SearchResult, model: str) -> str:
    """Return why no configuration of `model` is predicted; where none fits, with the smallest machine that would be enough."""
    if found.unknown:
        many, why = len(found.unknown) > 1, why_not_predicted(found.unknown)
        remedy = "" if "link --save" in why else "; measure it with zero-inference link --save, or add it to --assume"
        fit = f"{len(found.unknown)} configurations of {model} fit" if many else f"1 configuration of {model} fits"
        return f"{fit}, but how fast {'they are' if many else 'it is'} is not known: {why}{remedy}."
    if not found.too_large:
        return f"{model}: none of these engines can run it with these options; drop some of them."
    available = {
        need.name: need.available
        for plan in found.too_large
        for need in plan.needs
        if need.available is not None and need.place != PAGE_LOCKED
    }
    there = ", ".join(f"{format_bytes(nbytes)} of {place}" for place, nbytes in available.items())
    return (
        f"none of {len(found.too_large)} ways to run {model} fits ({there}); the smallest machine that could run it has "
        f"{_smallest_machine(found.too_large)}."
    )


def _smallest_machine(plans: Sequence[Plan]) -> str:
    """Return the requirements of the plan with the smallest shortfall, first of device memory, of which it is hardest to get more."""

    def needed_bytes(plan: Plan) -> dict[str, int]:
        return {need.place: need.with_reserve for need in plan.needs if need.with_reserve and need.place != PAGE_LOCKED}

    def shortfall(plan: Plan) -> tuple[int, int, int]:
        """Missing device bytes of all GPUs, missing bytes of host memory and disk, and all bytes that it needs."""
        gpus = plan.job.ranks.world_size
        there = {need.place: need.available or 0 for need in plan.needs}
        there[DEVICE_MEMORY] = plan.job.free_device_bytes or 0
        needed = needed_bytes(plan)
        short = {place: max(0, nbytes - there[place]) for place, nbytes in needed.items()}
        short_on_device, on_device = gpus * short.pop(DEVICE_MEMORY, 0), gpus * needed.pop(DEVICE_MEMORY, 0)
        return short_on_device, sum(short.values()), on_device + sum(needed.values())

    plan = min(plans, key=shortfall)
    gpus, config = plan.job.ranks.world_size, plan.job.config
    requirements = []
    for place, nbytes in needed_bytes(plan).items():
        on_device = place == DEVICE_MEMORY
        each = f" on each of {gpus} GPUs" if on_device and gpus > 1 else ""
        requirements.append(f"{format_gib_rounded_up(nbytes)} of {'free ' if on_device else ''}{place}{each}")
    options = f"--engine {config.engine} --quant-bits {config.quant_bits} --batch-size {config.batch_size}"
    options += f" --gpu-memory 0 --ring-depth {MIN_RING_DEPTH}" if config.ring_depth else ""
    return f"{' and '.join(requirements)} ({options})"
