"""`--engine auto`, `--quant-bits auto`, `--batch-size auto`: what the plan finds best takes the place of what was left open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zero_inference.config import RunConfig
from zero_inference.config.choices import QUANT_BITS
from zero_inference.errors import UsageError
from zero_inference.machine.kept import measure_and_keep
from zero_inference.machine.machine import Machine
from zero_inference.models.spec import ModelSpec
from zero_inference.planning.plan import Plan, changed, describe_job
from zero_inference.records.schema import Chosen
from zero_inference.runtime.distributed import Ranks
from zero_inference.search.candidates import BATCH_SIZES, Candidate, Free, command_of, find_candidates
from zero_inference.search.ranking import ranked
from zero_inference.search.words import why_none

DEFAULT_GOAL = "throughput"
MOST_OTHERS = 5
WORTH_A_LINE = 1.5  # times as fast, from which on another engine is told of


def choose(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, machine: Machine, say: Callable[[str], None]
) -> tuple[RunConfig, Chosen | None]:
    """`config` with what it left open, and what was chosen over what; as it is where nothing was.

    Raises:
        UsageError: nothing fits.
    """
    if not config.auto:
        return config, None
    asked = _asked(config)
    if machine.is_here and machine.described() is None:
        measure_and_keep(say)
    job = describe_job(replace(config, auto=(), goal=None), spec, ranks, machine=machine)
    found = find_candidates(job, _free(config))
    if not found.candidates:
        raise UsageError(f"{asked}: {why_none(found, config.model)}")
    best, others = _best(found.candidates, config)
    say(f"chosen: {_in_words(best)}; zero-inference plan shows the alternatives")
    chosen = Chosen(
        options=list(config.auto),
        goal=config.goal,
        decode_throughput=best.tokens_per_s,
        over=[f"{command_of(each.config)}: {each.tokens_per_s:.4g} token/s" for each in others[:MOST_OTHERS]],
    )
    return best.config, chosen


def check_alone(config: RunConfig, ranks: Ranks) -> None:
    """Raises UsageError where several ranks were to find something: they would have to agree."""
    if config.auto and ranks.world_size > 1:
        raise UsageError(
            f"{_asked(config)}: this works in one process only, and {ranks.world_size} were started; name the values instead of auto."
        )


def _asked(config: RunConfig) -> str:
    return ", ".join(f"--{name.replace('_', '-')} auto" for name in config.auto)


def faster_than(plan: Plan) -> str | None:
    """A line about another engine that is predicted to be much faster with the same bits and batch; None without one, or where this machine
    was not measured yet."""
    if plan.times is None or plan.job.ranks.world_size > 1:
        return None
    found = []
    for engine in ("stream", "resident"):
        try:
            other = changed(plan.job, engine=engine, cpu_offload=engine == "stream", disk_offload=False, ds_config=None)
        except UsageError:
            continue
        if other.fits and other.times is not None:
            found.append((other.times.step.seconds, engine))
    if not found or min(found)[0] * WORTH_A_LINE > plan.times.step.seconds:
        return None
    seconds, engine = min(found)
    times = plan.times.step.seconds / seconds
    return f"hint: --engine {engine} is predicted to decode {times:.1f} times as fast here; zero-inference plan compares them"


def _free(config: RunConfig) -> Free:
    """What may be tried: of an engine that was named, only the way in which it was asked for."""
    auto = config.auto
    own = {"cpu_offload": config.cpu_offload, "disk_offload": config.disk_offload}
    free = Free(
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
