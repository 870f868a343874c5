"""Plans in words: configurations, predicted times and what they leave out, what is faster, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.engines.base import EnginePlan
from zero_inference.planning.changes import Faster, changes_that_fit
from zero_inference.planning.cost import Range, Times
from zero_inference.planning.memory import DEVICE_MEMORY, PAGE_LOCKED
from zero_inference.planning.plan import Plan
from zero_inference.planning.search import Candidate, SearchResult, ranked
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils.format import format_bytes, format_gib_rounded_up, format_seconds, significant

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FIRST = {"throughput": "Fastest", "latency": "Shortest decode step", "memory": "Least memory"}  # by goal


def seconds_in_words(seconds: float, range_s: Range | None) -> str:
    """Return such as "0.123 s (0.11 s to 0.14 s)"."""
    return format_seconds(seconds) + (f" ({' to '.join(map(format_seconds, range_s))})" if range_s else "")


def times_in_words(times: Times, batch_size: int) -> str:
    """Return token/s, decode step and first token on one line."""
    least, most = ("at least ", "at most ") if times.at_least else ("", "")
    rates = times.tokens_per_s_range(batch_size)
    within = f" ({' to '.join(map(significant, rates))})" if rates else ""
    return (
        f"{most}{significant(times.tokens_per_s(batch_size))}{within} token/s "
        f"(decode step {least}{format_seconds(times.step.seconds)}, bound by {RATE_WORDS[times.step.bound_by]}), "
        f"first token {least}{seconds_in_words(times.prefill.seconds, times.prefill.range_s)}"
    )


def left_out(times: Times) -> list[str]:
    """Return what the times do not count, a few words each."""
    parts = {
        "kernel launches (the host's time for them is not known)": not times.with_host,
        "the host's cores (their rate is not known; a run may be faster)": times.without_cores,
    }
    return [part for part, missing in parts.items() if missing]


def why_not_predicted(plans: Sequence[Plan]) -> str:
    """Return why no speed is predicted for any of `plans`, each reason once."""
    return "; ".join(dict.fromkeys(reason for plan in plans if (reason := plan.why_not_predicted)))


def experts_in_words(plan: EnginePlan) -> str | None:
    """Return a line about experts that a decode step copies, or reads from disk, though no token chose them; None where it moves none."""
    job, terms, (number, chosen) = plan.job, plan.cost_terms, plan.job.spec.experts
    idle_share = job.sizes.idle_expert_bytes / max(1, job.sizes.parameter_bytes)
    copies = job.on_gpu or terms.copies_within_host
    moved_bytes = plan.fetched_bytes - terms.chosen_expert_bytes if copies else plan.disk_bytes
    if not idle_share or moved_bytes <= plan.weight_bytes * (1 - idle_share):
        return None
    how = "copies" if copies else "reads from disk"
    return f"{job.config.engine} {how} all {number} experts of a layer in each step, a token uses {chosen}: {plan.why_whole_layers}"


def place_of_weights(plan: Plan) -> str:
    """Return "host", "85% host (cores 30%)" (the rest is on the device), "device" or "disk"; of what the CPU computes the largest share."""
    weights, terms = plan.weights, plan.weights.cost_terms
    if weights.footprint.disk:
        return "disk"
    if not plan.job.on_gpu:
        return "host"
    share = weights.footprint.host * plan.job.ranks.local_world_size / max(1, weights.weight_bytes)
    if not share:
        return "device"
    cpu_share = max(terms.step_cpu.layer_share, terms.step_cpu.expert_share)
    cores = " (cores ?)" if terms.cpu_rate_unknown else f" (cores {cpu_share:.0%})" if cpu_share else ""
    return ("host" if share > 0.99 else f"{share:.0%} host") + cores


def describe(plan: Plan) -> str:
    """Return such as "stream int4, 56% host (cores 97%), KV host"."""
    config = plan.job.config
    weights = f"int{config.quant_bits}" if config.quantized else SHORT_DTYPES[plan.job.spec.dtype_name]
    return f"{config.engine} {weights}, {place_of_weights(plan)}{', KV host' if config.kv_offload else ''}"


def describe_with_work(plan: Plan) -> str:
    """Return such as "stream int4, 56% host, batch 8, 2 GPUs"."""
    gpus = plan.job.ranks.world_size
    return f"{describe(plan)}, batch {plan.job.config.batch_size}" + (f", {gpus} GPUs" if gpus > 1 else "")


def headline(best: Sequence[Candidate], goal: str) -> str:
    """Return the first of `best` and the best for a single sequence, with their speed."""

    def speed(each: Candidate) -> str:
        text = f"predicted {times_in_words(each.times, each.config.batch_size)}"
        if each.measured_tokens_per_s is not None:
            text = f"{significant(each.measured_tokens_per_s)} token/s measured, {text}"
        return f"{format_bytes(each.memory_bytes)} of device and host memory, {text}" if goal == "memory" else text

    line = f"{FIRST[goal]}: {describe_with_work(best[0].plan)}: {speed(best[0])}."
    singles = [each for each in best if each.config.batch_size == 1 and not each.failed]
    if singles and best[0].config.batch_size > 1:
        single = ranked(singles, "latency")[0]
        line += f" For one sequence: {describe_with_work(single.plan)}: {speed(single)}."
    return line


def notes(found: SearchResult, candidates: Sequence[Candidate]) -> list[str]:
    """Return what to know about the predictions of `candidates` and about what is not predicted, a line each."""
    plans = [each.plan for each in candidates]
    lines = {
        "bounds, because": (reason for each in candidates for reason in each.times.bounds_because),
        "not counted:": (part for each in candidates for part in left_out(each.times)),
    }
    texts = [f"{label} {'; '.join(each)}" for label, parts in lines.items() if (each := dict.fromkeys(parts))]
    if any(each.lacks_overhead for each in candidates):
        texts.append("engines whose overhead was not measured are ranked last")
    texts += filter(None, dict.fromkeys(experts_in_words(plan.weights) for plan in plans))
    if found.unknown and candidates:
        texts.append(f"fit, but not predicted: {len(found.unknown)}: {why_not_predicted(found.unknown)}")
    return texts


def faster_in_words(found: Sequence[Faster]) -> str:
    """Return such as "--quant-bits 4 gives 3.39 token/s (4.8 times as many), --batch-size 64 gives 38.3 token/s (54 times as many)"."""
    return ", ".join(
        f"{each.options} gives {'at most ' if each.at_most else ''}{significant(each.tokens_per_s)} token/s "
        f"({each.times:.2g} times as many)"
        for each in found
    )


def what_does_not_fit(plan: Plan) -> str:
    """Return what is missing and what would fit."""
    # an engine may refuse a plan that meets all needs
    short = next((need for need in plan.needs if not need.fits), plan.needs[0])
    changes = changes_that_fit(plan.job)
    return f"{describe_with_work(plan)}: needs {short.shortage()}" + (f"; fits with {changes[0]}" if changes else "")


def why_none(found: SearchResult, model: str) -> str:
    """Return why no configuration of `model` is predicted; where none fits, with the smallest machine that would be enough."""
    if found.unknown:
        why = why_not_predicted(found.unknown)
        or_assume = ", or add it to --assume" if "=)" in why else ""  # it names a rate
        return (
            f"{model}: {len(found.unknown)} configurations fit, but their speed is not known: {why}; "
            f"measure it with zero-inference link --save (--disk DIR for the disk){or_assume}."
        )
    if not found.too_large:
        return f"{model}: none of these engines can run it with these options; drop some of them."

    def lacking_bytes(plan: Plan) -> tuple[int, int]:
        """First those of device memory, of which it is hardest to get more."""
        gpus, lacking = plan.job.ranks.world_size, {}
        for need in plan.needs:
            short = need.with_reserve_bytes - (need.available_bytes or 0)
            lacking[need.place] = max(0, short) * (gpus if need.place == DEVICE_MEMORY else 1)
        on_device = lacking.pop(DEVICE_MEMORY, 0)
        return on_device, sum(lacking.values())

    available = {need.place: need.available_bytes for plan in found.too_large for need in plan.needs}
    free = ", ".join(
        f"{format_bytes(nbytes)} of {place}"
        for place, nbytes in available.items()
        if place != PAGE_LOCKED and nbytes is not None
    )
    plan = min(found.too_large, key=lacking_bytes)
    config, gpus = plan.job.config, plan.job.ranks.world_size
    each = {DEVICE_MEMORY: f" on each of {gpus} GPUs"} if gpus > 1 else {}
    parts = [
        f"{format_gib_rounded_up(need.with_reserve_bytes)} of {need.place}{each.get(need.place, '')}"
        for need in plan.needs
        if need.place != PAGE_LOCKED
    ]
    options = f"--engine {config.engine} --quant-bits {config.quant_bits} --batch-size {config.batch_size}"
    options += f" --gpu-memory 0 --ring-depth {MIN_RING_DEPTH}" if config.ring_depth else ""
    return (
        f"none of {len(found.too_large)} ways to run {model} fits ({free}); the smallest machine that could run it has "
        f"{' and '.join(parts)} ({options})."
    )
