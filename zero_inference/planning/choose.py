"""`--engine auto`, `--quant-bits auto`, `--batch-size auto`: what the plan finds best takes the place of what was left open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zero_inference.config.options import QUANT_BITS, UNTIL_PLANNED
from zero_inference.config.run_config import RunConfig, shell_words
from zero_inference.errors import UsageError
from zero_inference.hardware.cache import measure_if_needed
from zero_inference.hardware.machine import Machine
from zero_inference.models.empty_model import EmptyModel
from zero_inference.models.spec import ModelSpec
from zero_inference.planning.explain import Faster, faster_in_words, in_short, speed, why_none
from zero_inference.planning.plan import Plan, build_job, plan_with
from zero_inference.planning.search import BATCH_SIZES, Candidate, SearchSpace, command_of, find_candidates, ranked
from zero_inference.records.schema import AutoChoice
from zero_inference.utils.ranks import Ranks

DEFAULT_GOAL = "throughput"
MOST_OTHERS = 5
WORTH_A_LINE = 1.5  # times as fast; other options that gain less are not printed


def choose(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, machine: Machine, say: Callable[[str], None]
) -> tuple[RunConfig, AutoChoice | None, EmptyModel | None]:
    """Return `config` with `auto` resolved, what was chosen over what, and the empty model that the search has built.

    Without `auto` the configuration is returned as it is, with None and None.

    Raises:
        UsageError: nothing fits.
    """
    if not config.auto:
        return config, None, None
    asked = _asked(config)
    if machine.is_here:
        measure_if_needed(say)
    job = build_job(replace(config, auto=(), goal=None), spec, ranks, machine=machine)
    found = find_candidates(job, _free(config))
    if not found.candidates:
        raise UsageError(f"{asked}: {why_none(found, config.model)}")
    best, others = _best(found.candidates, config)
    say(f"chosen: {_in_words(best)}; zero-inference plan shows the alternatives")
    chosen = AutoChoice(
        options=list(config.auto),
        goal=config.goal,
        decode_throughput=best.tokens_per_s,
        over=[f"{command_of(each.config)}: {each.tokens_per_s:.4g} token/s" for each in others[:MOST_OTHERS]],
    )
    return best.config, chosen, job.empty_model


def check_single_process(config: RunConfig, ranks: Ranks) -> None:
    """Raises UsageError where several ranks were to find something: they would have to agree."""
    if config.auto and ranks.world_size > 1:
        raise UsageError(
            f"{_asked(config)}: this works in one process only, and {ranks.world_size} were started; name the values instead of auto."
        )


def _asked(config: RunConfig) -> str:
    return ", ".join(f"--{name.replace('_', '-')} auto" for name in config.auto)


def faster_than(plan: Plan, goal: str | None = None) -> list[Faster]:
    """Return what is predicted to decode at least `WORTH_A_LINE` times as fast: the best other engine, fewer bits, and larger batch.

    Fewer bits have to gain as much over the best engine with the bits of `plan`. Empty where no speed is predicted, and of a run in several
    processes.

    Args:
        goal: with "latency" no larger batch is looked for, with "memory" nothing.
    """
    config = plan.job.config
    if plan.times is None or plan.job.ranks.world_size > 1 or goal == "memory":
        return []
    own = plan.times.tokens_per_s(config.batch_size)
    others: list[dict[str, Any]] = [
        {"engine": engine, "cpu_offload": engine == "stream", "disk_offload": False, "ds_config": None}
        for engine in ("stream", "resident")
        if engine != config.engine
    ]
    fewer = [way | {"quant_bits": bits} for way in ({}, *others) for bits in QUANT_BITS if bits < config.quant_bits]
    larger = [{"batch_size": size} for size in BATCH_SIZES if size > config.batch_size]
    found, least = [], WORTH_A_LINE
    for changes in (others, fewer):
        best = _fastest(plan, changes, own)
        if best is not None and best.times >= least:
            found.append(best)
            least = WORTH_A_LINE * best.times
    batch = None if goal == "latency" or config.prompt or config.prompts else _fastest(plan, larger, own)
    return [*found, batch] if batch is not None and batch.times >= WORTH_A_LINE else found


def hint(plan: Plan, chosen: AutoChoice | None) -> str | None:
    """Return a line about what is predicted to be clearly faster than `plan`, for a run that chose its options or fetches weights; None
    without one. A larger batch is part of it only for who left a choice open."""
    fetches = plan.job.on_gpu and plan.weights.footprint.host + plan.weights.footprint.disk > 0
    if chosen is None and not fetches and plan.job.config.engine != "deepspeed":
        return None
    found = faster_than(plan, "latency" if chosen is None else chosen.goal)
    return f"hint: {faster_in_words(found)}; zero-inference plan compares them" if found else None


def what_is_faster(best: Sequence[Candidate], goal: str) -> str | None:
    """Return a line about the most bits and the smallest batch among `best`, and what is predicted to be clearly faster than these.

    Args:
        best: the best first.
    """
    plainest = min(
        best, key=lambda each: (each.failed, each.world_size, -each.config.quant_bits, each.config.batch_size)
    )
    found = faster_than(plainest.plan, goal)
    return f"faster than {in_short(plainest)} ({speed(plainest, goal)}): {faster_in_words(found)}" if found else None


def _fastest(plan: Plan, changes: Sequence[dict[str, Any]], own: float) -> Faster | None:
    """Return the one of `changes` with the most token/s, as a multiple of `own`; None where none of them fits or is predicted."""
    found = []
    for fields in changes:
        try:
            other = plan_with(plan.job, **fields)
        except UsageError:
            continue
        if other.fits and other.times is not None:
            rate = other.times.tokens_per_s(other.job.config.batch_size)
            named = {name: value for name, value in fields.items() if name in UNTIL_PLANNED}
            found.append(Faster(" ".join(shell_words(named)), rate, rate / own, other.times.at_least))
    return max(found, key=lambda each: each.tokens_per_s, default=None)


def _free(config: RunConfig) -> SearchSpace:
    """What may be tried: of an engine that was named, only the way in which it was asked for."""
    auto = config.auto
    own = {"cpu_offload": config.cpu_offload, "disk_offload": config.disk_offload}
    free = SearchSpace(
        quant_bits=QUANT_BITS if "quant_bits" in auto else (config.quant_bits,),
        batch_sizes=BATCH_SIZES if "batch_size" in auto else (config.batch_size,),
        kv_offload=(config.kv_offload,),
    )
    if "engine" in auto:
        return replace(free, kv_offload=(True,) if config.kv_offload else (False, True))
    return replace(free, engines=(config.engine,), ways={config.engine: (own,)})


def _best(candidates: list[Candidate], config: RunConfig) -> tuple[Candidate, list[Candidate]]:
    """And the others. Without a goal as many bits as fit come first."""
    best = ranked(candidates, config.goal or DEFAULT_GOAL)
    if config.goal is None:
        best.sort(key=lambda each: -each.config.quant_bits)
    return best[0], best[1:]


def _in_words(best: Candidate) -> str:
    config, times = best.config, best.times
    return (
        f"--engine {config.engine} --quant-bits {config.quant_bits} --batch-size {config.batch_size}"
        f"{' --kv-offload' if config.kv_offload else ''}: predicted {times.in_words(config.batch_size)}"
    )
