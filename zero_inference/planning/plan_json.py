"""The one JSON object that `--dry-run --json` prints on stdout. The exit code is as without `--json`: 0 where it fits, 2 where not.

Bytes and seconds throughout; null is a value that is not known. Keys:

    fits                    whether all needs are met
    verdict                 the line that `--dry-run` prints first
    config                  every option as it is used, with `dtype`, `pin_memory`, `model_type` and `world_size` as resolved
    sizes                   `model_bytes`, `cache_bytes`, `hidden_bytes` as in the record; `weight_bytes` as the engine stores them
    needs                   by place of one node: `place` (device memory, host memory, page-locked memory, disk), `which`,
                            `needed_bytes`, `reserve_bytes` (to stay free besides), `available_bytes`, `fits`; null where the engine
                            makes no plan because of `refused`
    refused                 why the engine makes no plan; else null
    predicted               `prefill_s`, `decode_step_s`, `decode_throughput` (token/s), `bound_by`, `load_s`; `prefill_range_s`,
                            `decode_step_range_s`, `decode_throughput_range`, `load_range_s`: [low, high], within which 9 of 10 runs
                            of this kind were, null for bounds and without a GPU; `bounds_because`: why they are lower bounds, empty
                            where they are not; `left_out`: what they do not count; `unknown_because`: why there are none
    limit                   of a described machine: `decode_step_s` by its rates alone, `decode_throughput`, `bound_by`; else null
    moved_per_step          bytes of a decode step, over all ranks, by the record's names
    placement               where the weights are, and what a decode step does, in words
    changes_that_fit        options to add, each for itself, where it does not fit
    faster                  options that are predicted to decode clearly faster: `options`, `tokens_per_s`, `times` (of the token/s
                            without them), `at_most`
    machine                 `name`, `source` (measured, datasheet, assumed), `is_here`, `gpus` (`name`, `memory_bytes`),
                            `host_memory_bytes`; null where it is this one, and was not measured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import DescribedMachine
from zero_inference.planning.log_sizes import log_sizes
from zero_inference.planning.memory import Need
from zero_inference.planning.outlook import least_step_s, missing_rates
from zero_inference.planning.plan import Plan
from zero_inference.planning.verdict import Faster, Verdict
from zero_inference.records.key import as_mapping


def plan_in_json(job: Job, plan: Plan | DoesNotFit, verdict: Verdict, faster: Sequence[Faster] = ()) -> dict[str, Any]:
    """See above."""
    found = plan if isinstance(plan, Plan) else None
    return {
        "fits": verdict.fits,
        "verdict": verdict.said,
        "config": resolved(job, found.weights.pinned if found else job.pin_weights),
        "sizes": asdict(log_sizes(job)) | {"weight_bytes": found.weights.weight_bytes if found else None},
        "needs": None if found is None else [_need(need) for need in found.needs],
        "refused": None if found else str(plan),
        "predicted": _predicted(found, verdict),
        "limit": None if found is None else _limit(found),
        "moved_per_step": None if found is None else as_mapping(found.weights.moved_per_step()),
        "placement": [] if found is None else [found.weights.places_in_words(), *found.weights.in_words()],
        "changes_that_fit": verdict.changes,
        "faster": [asdict(each) for each in faster],
        "machine": _machine(job),
    }


def resolved(job: Job, pinned: bool) -> dict[str, Any]:
    """Every option as it is used."""
    return job.config.as_dict() | {
        "dtype": job.spec.dtype_name,
        "model_type": job.spec.config.model_type,
        "world_size": job.ranks.world_size,
        "pin_memory": pinned,
    }


def _need(need: Need) -> dict[str, Any]:
    return {
        "place": need.place,
        "which": need.which or None,
        "needed_bytes": need.needed,
        "reserve_bytes": need.reserve,
        "available_bytes": need.available,
        "fits": need.fits,
    }


def _predicted(plan: Plan | None, verdict: Verdict) -> dict[str, Any]:
    times = plan.times if plan else None
    return {
        "prefill_s": times.prefill.seconds if times else None,
        "decode_step_s": times.step.seconds if times else None,
        "decode_throughput": times.tokens_per_s(plan.job.config.batch_size) if plan and times else None,
        "bound_by": times.step.bound_by if times else None,
        "load_s": plan.load_s if plan else None,
        "prefill_range_s": times.prefill_range_s if times else None,
        "decode_step_range_s": times.step_range_s if times else None,
        "decode_throughput_range": times.tokens_per_s_range(plan.job.config.batch_size) if plan and times else None,
        "load_range_s": plan.load_range_s if plan else None,
        "bounds_because": list(times.bounds_because) if times else [],
        "left_out": times.left_out() if times else [],
        "unknown_because": verdict.unpredicted,
    }


def _limit(plan: Plan) -> dict[str, Any] | None:
    machine = plan.job.machine
    if not isinstance(machine, DescribedMachine) or missing_rates(plan.weights, machine.description):
        return None
    if (found := least_step_s(plan.weights, machine.description)) is None:
        return None
    bound_by, step_s = found
    return {"decode_step_s": step_s, "decode_throughput": plan.job.config.batch_size / step_s, "bound_by": bound_by}


def _machine(job: Job) -> dict[str, Any] | None:
    found = job.machine.described()
    if found is None:
        return None
    gpus = [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in found.gpus]
    return {
        "name": found.name,
        "source": found.source,
        "is_here": job.machine.is_here,
        "gpus": gpus,
        "host_memory_bytes": found.host_memory_bytes,
    }
