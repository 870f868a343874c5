"""The smallest machine on which a model that does not fit would run."""

from __future__ import annotations

from zero_inference.config.options import MIN_RING_DEPTH
from zero_inference.planning.memory import DEVICE_MEMORY, PAGE_LOCKED
from zero_inference.planning.plan import Plan
from zero_inference.utils.format import format_gib_rounded_up

DEVICE = "free device memory"


def least_machine(plans: list[Plan]) -> str:
    """What that one of `plans` needs which asks for least beyond what is there, in words; device memory, of which it is hardest to get
    more, counts first."""
    plan = min(plans, key=_needed_beyond)
    gpus, config = plan.job.ranks.world_size, plan.job.config
    needs = " and ".join(
        f"{format_gib_rounded_up(nbytes)} of {place}{f' on each of {gpus} GPUs' if place == DEVICE and gpus > 1 else ''}"
        for place, nbytes in _needed(plan).items()
    )
    least = f" --gpu-memory 0 --ring-depth {MIN_RING_DEPTH}" if config.ring_depth else ""
    return (
        f"{needs} (--engine {config.engine} --quant-bits {config.quant_bits} --batch-size {config.batch_size}{least})"
    )


def _needed_beyond(plan: Plan) -> tuple[int, int, int]:
    """Bytes of device memory that are not there, of host memory and disk that are not there or not known, and of all that it needs."""
    there = {need.place: need.available or 0 for need in plan.needs} | {DEVICE: plan.job.free_device_bytes or 0}
    needed = _needed(plan)
    short = {place: max(0, nbytes - there[place]) for place, nbytes in needed.items()}
    gpus = plan.job.ranks.world_size
    short_on_device, on_device = gpus * short.pop(DEVICE, 0), gpus * needed.pop(DEVICE, 0)
    return short_on_device, sum(short.values()), on_device + sum(needed.values())


def _needed(plan: Plan) -> dict[str, int]:
    """Free bytes by place; what is page-locked is host memory too."""
    return {
        DEVICE if need.place == DEVICE_MEMORY else need.place: need.with_reserve
        for need in plan.needs
        if need.with_reserve and need.place != PAGE_LOCKED
    }
