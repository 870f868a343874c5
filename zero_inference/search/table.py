"""What is told of the configurations that were compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_inference.planning.changes import changes_that_fit
from zero_inference.planning.copies_time import lacks_peers
from zero_inference.planning.memory import Need
from zero_inference.planning.plan import Plan
from zero_inference.planning.timing import why_unknown
from zero_inference.records.limit import RATE_WORDS
from zero_inference.runtime.replace import replacing
from zero_inference.runtime.tables import Column, decimals, significant
from zero_inference.search.candidates import Candidate, Found
from zero_inference.search.ranking import pareto_front
from zero_inference.search.smallest import least_machine
from zero_inference.utils import GB


def _gib(nbytes: float) -> str:
    return f"{nbytes / GB:.1f}"


COLUMNS = (
    Column("place", "", decimals(0), "Int64"),
    Column("engine", "engine", dtype="string"),
    Column("quant_bits", "bits", decimals(0), "Int64"),
    Column("gpus", "GPUs", decimals(0), "Int64"),
    Column("weights", "weights in", dtype="string"),
    Column("keys_and_values", "keys and values in", dtype="string"),
    Column("batch_size", "batch", decimals(0), "Int64"),
    Column("prefill_s", "first token (s)", significant),
    Column("step_s", "decode step (s)", significant),
    Column("at_most", "", dtype="string"),
    Column("tokens_per_s", "decode (token/s)", significant),
    Column("total_s", "total (s)", significant),
    Column("measured_tokens_per_s", "measured", significant),
    Column("device_bytes", "device (GiB)", _gib, "Int64"),
    Column("host_bytes", "host (GiB)", _gib, "Int64"),
    Column("tried", "tried", dtype="string"),
    Column("bound_by", "mostly", lambda value: RATE_WORDS[value], dtype="string"),
    Column("front", "front", dtype="string"),
)


def rows_of(candidates: Sequence[Candidate], everyone: Sequence[Candidate]) -> list[dict[str, Any]]:
    """A row of `candidates` each; those on the Pareto front of `everyone` are marked."""
    front = {id(each) for each in pareto_front(everyone)}
    return [_row(place, each, id(each) in front) for place, each in enumerate(candidates, 1)]


def _row(place: int, candidate: Candidate, on_front: bool) -> dict[str, Any]:
    plan, config = candidate.plan, candidate.config
    return {
        "place": place,
        "engine": config.engine,
        "quant_bits": config.quant_bits,
        "gpus": candidate.world_size if plan.job.on_gpu else 0,
        "weights": weights_in_words(plan),
        "keys_and_values": "host" if config.kv_offload or not plan.job.on_gpu else "device",
        "batch_size": config.batch_size,
        "prefill_s": candidate.times.prefill.seconds,
        "step_s": candidate.times.step.seconds,
        "tokens_per_s": candidate.tokens_per_s,
        "at_most": "at most" if candidate.times.at_least else None,
        "total_s": candidate.total_s,
        "measured_tokens_per_s": candidate.measured_tokens_per_s,
        "device_bytes": plan.weights.device_peak_bytes if plan.job.on_gpu else None,
        "host_bytes": next(need.needed for need in plan.needs if need.place == "host memory"),
        "bound_by": candidate.times.step.bound_by,
        "tried": "failed" if candidate.failed else None,
        "front": "*" if on_front else None,
    }


def weights_in_words(plan: Plan) -> str:
    """Where they are, and what share of the layers, or of their experts, the host's cores multiply."""
    weights = plan.weights
    host = weights.footprint.host * plan.job.ranks.local_world_size
    if weights.footprint.disk:
        return "disk"
    if not plan.job.on_gpu:
        return "host"
    if not host:
        return "device"
    words = "host" if host > 0.99 * weights.weight_bytes else f"host {host / max(1, weights.weight_bytes):.0%}, device"
    cores = max(weights.share_on_cores())
    if weights.lacks_cores:
        return f"{words} (cores not known)"
    return f"{words} (cores {cores:.0%})" if cores else words


def in_json(rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The same rows with their commands, what is not in their times, and what both passes give together."""
    return [
        row
        | {
            "front": row["front"] is not None,
            "at_most": row["at_most"] is not None,
            "with_host": each.times.with_host,
            "without_cores": each.times.without_cores,
            "total_tokens_per_s": each.config.batch_size * each.config.gen_len / each.total_s,
            "command": each.command(),
        }
        for row, each in zip(rows, candidates)
    ]


def what_is_not_known(candidates: Sequence[Candidate]) -> list[str]:
    """Lines about what the times of `candidates` leave out."""
    lines = []
    if not all(each.times.with_host for each in candidates):
        lines.append("what the host takes to launch operators is not known: it is taken to be never late")
    if any(each.times.without_cores for each in candidates):
        lines.append(
            "cores not known: what the host's cores multiply there is measured by a run, which may be faster than predicted"
        )
    described = [(each.plan.weights, each.plan.job.machine.described()) for each in candidates]
    if any(machine is not None and lacks_peers(weights, machine) for weights, machine in described):
        lines.append(
            "how fast GPUs send each other weights is not known (--assume peers=): it is taken to cost nothing"
        )
    return lines


def what_does_not_fit(plans: Sequence[Plan]) -> list[str]:
    """A line for each engine and number of bits, with what would make it fit."""
    lines = []
    for plan in plans:
        config = plan.job.config
        free: int | None = plan.job.free_device_bytes
        refused = Need("free device memory", plan.weights.least_free_device_bytes, free or 0)
        short = next(
            (need for need in plan.needs if not need.fits), refused
        )  # which counts what the engine keeps free, too
        offload = {"cpu": " with weights in host memory", "disk": " with weights on disk"}.get(config.offload, "")
        gpus = f" on {plan.job.ranks.world_size} GPUs" if plan.job.ranks.world_size > 1 else ""
        line = (
            f"{config.engine} with {config.quant_bits} bits{'' if config.engine == 'stream' else offload}{gpus}: "
            f"{short.needed / GB:.1f} GiB of {short.place} needed, {(short.available or 0) / GB:.1f} GiB available"
        )
        if changes := changes_that_fit(plan.job):
            line += f"; fits with {changes[0]}"
        lines.append(line)
    return lines


def why_none(found: Found, model: str) -> str:
    """Why no configuration of `model` can be told of; of one that fits nowhere, the smallest machine that would do."""
    if found.unknown:
        return (
            f"{len(found.unknown)} configurations of {model} fit, and how fast they are is not known: {why_not_predicted(found.unknown)}; "
            "say what is missing with --assume, or measure it with zero-inference link --save."
        )
    if not found.too_large:
        return f"{model}: none of these engines runs it with these options; leave some of them out."
    available = {
        need.place: need.available for plan in found.too_large for need in plan.needs if need.available is not None
    }
    there = ", ".join(f"{nbytes / GB:.1f} GiB of {place}" for place, nbytes in available.items())
    return (
        f"none of {len(found.too_large)} ways to run {model} fits ({there}); the smallest machine that would do has "
        f"{least_machine(found.too_large)}."
    )


def why_not_predicted(plans: Sequence[Plan]) -> str:
    """Why nobody knows how fast they are; each reason once."""
    reasons = []
    for plan in plans:
        description = plan.job.machine.described()
        reasons.append(
            "the machine was not measured" if description is None else why_unknown(plan.weights, description)
        )
    return "; ".join(dict.fromkeys(reasons))


def draw(candidates: Sequence[Candidate], path: Path, title: str) -> None:
    """A picture of latency against throughput, PNG, PDF or SVG by the name. Raises OSError, or ValueError for another kind of file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    kinds: dict[str, list[Candidate]] = {}
    for each in candidates:
        gpus = f", {each.world_size} GPUs" if each.world_size > 1 else ""
        kinds.setdefault(f"{each.config.engine}, {each.config.quant_bits} bits{gpus}", []).append(each)
    for kind, some in kinds.items():
        axes.scatter(
            [1e3 * each.times.step.seconds for each in some],
            [each.tokens_per_s for each in some],
            label=kind,
            s=28,
        )
    front = pareto_front(candidates)
    steps = [1e3 * each.times.step.seconds for each in front]
    axes.plot(steps, [each.tokens_per_s for each in front], color="black", linewidth=1, label="Pareto front")
    for each, step in zip(front, steps):
        axes.annotate(
            f"batch {each.config.batch_size}",
            (step, each.tokens_per_s),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlabel="ms a step (latency of a token)", ylabel="token/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix.lstrip(".").lower() or "png")
    pyplot.close(figure)
