"""Sentences about the configurations that were compared: which is best, what their times leave out, what does not fit, and why."""

from __future__ import annotations

from collections.abc import Sequence

from zero_inference.planning.candidates import Candidate, Found, command_of
from zero_inference.planning.changes import changes_that_fit
from zero_inference.planning.memory import PAGE_LOCKED
from zero_inference.planning.outlook import experts_in_words, first_token_in_words
from zero_inference.planning.plan import Plan
from zero_inference.planning.ranges import rate_in_words, seconds_in_words
from zero_inference.planning.ranking import ranked
from zero_inference.planning.smallest import least_machine
from zero_inference.planning.table import configuration_in_words, kind_of_weights
from zero_inference.planning.timing import unknown_in_words, unknown_rates, why_unknown
from zero_inference.planning.verdict import NOT_MEASURED
from zero_inference.utils.format import format_bytes, format_bytes_pair, significant

FIRST = {"throughput": "Fastest", "latency": "Shortest decode step", "memory": "Least memory"}  # by goal


def headline(best: Sequence[Candidate], goal: str) -> str:
    """What comes first, and beside it how fast a single sequence is; where that comes first, how fast the largest rate is.

    Args:
        best: all that fit, the best first.
    """
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


def in_short(candidate: Candidate) -> str:
    """Return such as "stream engine, int4, batch 1"."""
    gpus = f", {candidate.world_size} GPUs" if candidate.world_size > 1 else ""
    kind = kind_of_weights(candidate.plan)
    return f"{candidate.config.engine} engine, {kind}, batch {candidate.config.batch_size}{gpus}"


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


def notes(candidates: Sequence[Candidate]) -> list[str]:
    """What to know about the times in a table of `candidates`."""
    lines = []
    reasons = dict.fromkeys(reason for each in candidates for reason in each.times.bounds_because)
    if reasons:
        lines.append(f"≤, ≥: bounds, because {'; '.join(reasons)}")
    left_out = dict.fromkeys(what for each in candidates for what in each.times.left_out())
    if left_out:
        lines.append(f"not counted: {'; '.join(left_out)}")
    others = [
        line
        for each in candidates
        for line in (first_token_in_words(each.plan.weights, each.times), experts_in_words(each.plan.weights))
    ]
    return [*lines, *dict.fromkeys(filter(None, others))]


def gpus_in_words(candidates: Sequence[Candidate]) -> str | None:
    """Return what a batch of 1 leaves unused of several GPUs, and what would use them; None where nothing is to be said."""
    gpus = max((each.plan.job.machine.gpus() for each in candidates), default=0)
    if gpus < 2 or all(each.config.batch_size > 1 for each in candidates):
        return None
    every = "both" if gpus == 2 else f"all {gpus}"
    return f"batch 1 runs on one of the {gpus} GPUs, because they divide the batch: --batch-size {gpus} uses {every}"


def ranked_behind(best: Sequence[Candidate], goal: str) -> list[str]:
    """Engines with a better bound than some that come before them, a line for each: what they leave out is not known.

    Args:
        best: all that fit, the best first.
    """
    known = [each for each in best if not (each.lacks_overhead or each.failed)]
    behind: dict[str, Candidate] = {}
    for each in best:
        if each.lacks_overhead and goal != "memory" and any(_is_better(each, other, goal) for other in known):
            behind.setdefault(each.config.engine, each)
    return [
        f"{engine} is ranked after the others, because its overhead is not in its bound: {in_short(each)}: {speed(each, goal)}"
        for engine, each in behind.items()
    ]


def _is_better(each: Candidate, other: Candidate, goal: str) -> bool:
    if goal == "latency":
        return each.best_step_s < other.best_step_s
    return each.best_tokens_per_s > other.best_tokens_per_s


def what_does_not_fit(plans: Sequence[Plan]) -> list[str]:
    """A line for each engine and number of bits, with what would make it fit."""
    lines = []
    for plan in plans:
        config = plan.job.config
        short = next(
            (need for need in plan.needs if not need.fits), plan.needs[0]
        )  # its engine may refuse it all the same
        where = " on the device" if plan.job.on_gpu else " in host memory"
        place = {"cpu": " in host memory", "disk": " on disk"}.get(config.offload, where)
        gpus = f", {plan.job.ranks.world_size} GPUs" if plan.job.ranks.world_size > 1 else ""
        name = f"{config.engine} {kind_of_weights(plan)}{'' if config.engine == 'stream' else place}{gpus}"
        needed, there, unit = format_bytes_pair(short.with_reserve, short.available or 0)
        line = f"{name}: {needed} {unit} of {short.place}, {there} {unit} free"
        if changes := changes_that_fit(plan.job):
            line += f"; fits with {changes[0]}"
        lines.append(line)
    return lines


def why_none(found: Found, model: str) -> str:
    """Why no configuration of `model` can be shown; of one that fits nowhere, the smallest machine that would do."""
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
        f"{least_machine(found.too_large)}."
    )


def why_not_predicted(plans: Sequence[Plan]) -> str:
    """Return why no speed is predicted for them; each reason, and each rate that is not known, once."""
    rates: dict[str, None] = {}
    reasons: dict[str, None] = {}
    for plan in plans:
        description = plan.job.machine.described()
        names = [] if description is None else unknown_rates(plan.weights, description)
        rates |= dict.fromkeys(names)
        if description is None:
            reasons[NOT_MEASURED] = None
        elif not names:
            reasons[why_unknown(plan.weights, description)] = None
    of_rates = [unknown_in_words(list(rates), plans[0].job.machine.is_here)] if rates else []
    return "; ".join([*of_rates, *reasons])


def commands(plans: Sequence[tuple[int, Plan]], where: str) -> list[str]:
    """Return how to run `plans`, each with its place in the table, the command on a line of its own to be copied.

    Args:
        where: the options that name the machine, which a run does not take; they follow as a comment.
    """
    lines = []
    for place, plan in plans:
        config, gpus = plan.job.config, plan.job.ranks.world_size
        several = f", {gpus} GPUs" if gpus > 1 else ""
        lines.append(f"{place}. {configuration_in_words(plan)}{several}, batch {config.batch_size}:")
        lines.append(f"   {command_of(config, gpus)}{f'  # {where}' if where else ''}")
    return lines
