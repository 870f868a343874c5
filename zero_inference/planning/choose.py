"""`--engine auto`, `--quant-bits auto`, `--batch-size auto`: the search chooses the values, and a hint names faster options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zero_inference.config.options import QUANT_BITS
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.models.empty_model import EmptyModel
from zero_inference.models.spec import ModelSpec
from zero_inference.planning.changes import BATCH_SIZES, faster_than
from zero_inference.planning.explain import faster_in_words, times_in_words, why_none
from zero_inference.planning.plan import Plan, build_job, check_launch, check_model
from zero_inference.planning.search import SearchSpace, command_of, find_candidates, ranked
from zero_inference.records.schema import AutoChoice
from zero_inference.utils.ranks import Ranks

MAX_OTHERS = 5  # in the record


def choose(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, machine: Machine, say: Callable[[str], None]
) -> tuple[RunConfig, AutoChoice | None, EmptyModel | None]:
    """Return `config` with the best values for its `auto` options, the choice for the record, and the empty model of the search, for the
    run to use; `config` alone where nothing is `auto`. Without a goal the most bits that fit come first.

    Raises:
        UsageError: nothing fits.
    """
    auto = config.auto
    if not auto:
        return config, None, None
    options = ", ".join(f"--{name.replace('_', '-')} auto" for name in auto)
    if machine.is_here and machine.profile() is None:
        from zero_inference.hardware.measure_profile import measure_and_cache

        measure_and_cache(say)
    space = SearchSpace(
        quant_bits=QUANT_BITS if "quant_bits" in auto else (config.quant_bits,),
        batch_sizes=BATCH_SIZES if "batch_size" in auto else (config.batch_size,),
        kv_offload=(False, True) if "engine" in auto and not config.kv_offload else (config.kv_offload,),
    )
    if "engine" not in auto:  # only the offload that was asked for
        offload = {"cpu_offload": config.cpu_offload, "disk_offload": config.disk_offload}
        space = replace(space, engines=(config.engine,), offloads={config.engine: (offload,)})
    job = build_job(replace(config, auto=(), goal=None), spec, ranks, machine=machine)
    found = find_candidates(job, space)
    if not found.candidates:
        raise UsageError(f"{options}: {why_none(found, config.model)}")
    best, *others = ranked(found.candidates, config.goal or "throughput")
    if config.goal is None:
        best, *others = sorted([best, *others], key=lambda each: -each.config.quant_bits)
    chosen = best.config
    check_launch(chosen, ranks, machine)
    check_model(chosen, spec)
    options = f"--engine {chosen.engine} --quant-bits {chosen.quant_bits} --batch-size {chosen.batch_size}"
    options += " --kv-offload" if chosen.kv_offload else ""
    say(f"chosen: {options}: predicted {times_in_words(best.times, chosen.batch_size)}")
    choice = AutoChoice(
        options=list(auto),
        goal=config.goal,
        decode_throughput=best.tokens_per_s,
        over=[f"{command_of(each.config)}: {each.tokens_per_s:.4g} token/s" for each in others[:MAX_OTHERS]],
    )
    return chosen, choice, job.empty_model


def hint(plan: Plan, chosen: AutoChoice | None) -> str | None:
    """Return a line about options that are predicted to be clearly faster; None without any, and for a run without `auto` options that
    fetches no weights. A larger batch is named only where options were `auto`."""
    fetches = plan.job.on_gpu and plan.weights.footprint.host + plan.weights.footprint.disk > 0
    if chosen is None and not fetches and plan.job.config.engine != "deepspeed":
        return None
    found = faster_than(plan, "latency" if chosen is None else chosen.goal)
    return f"hint: {faster_in_words(found)}; zero-inference plan compares them" if found else None
