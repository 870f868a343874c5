"""The roofline of a decode: the bytes and operations that a step cannot avoid, the time they take at the measured rates, and the share of
that limit that the run reached."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.engines.base import Job
from zero_inference.records.hardware import Limit, Rates, StepBounds
from zero_inference.records.schema import MovedPerStep


@dataclass(frozen=True)
class StepWork:
    """What one device cannot avoid in a decode step: bytes of its memory, and floating-point operations."""

    device_bytes: int
    flops: int


def step_work(job: Job, weight_bytes: int, cores_bytes: float) -> StepWork:
    """Each active weight read once as stored, keys and values read once at their mean length; 2 operations a weight and sequence.

    Of experts only as many count as one token uses; an embedding table that is not the head counts as nothing. Idle experts are
    taken off as if they took the mean bits of all weights, which is no less than they do, other idle weights unquantized, and all that the
    host's cores read as weights that every sequence uses: the bound errs to the low side.

    Args:
        cores_bytes: what the host's cores read in a step, in kernels of their own. Without a GPU the memory is the same.
    """
    sizes, config = job.sizes, job.config
    active = sizes.parameters - sizes.idle_parameters
    kv = job.mean_kv_bytes
    stored_share = min(1.0, weight_bytes / max(1, sizes.parameter_bytes))
    idle = sizes.idle_bytes - int((1 - stored_share) * sizes.idle_expert_bytes)
    bits = 8 * job.spec.dtype.itemsize if config.quant_bits == 16 else config.quant_bits
    return StepWork(
        device_bytes=max(0, max(0, weight_bytes - idle) + kv - int(cores_bytes if job.on_gpu else 0)),
        flops=2 * max(0, active - int(cores_bytes * 8 / bits)) * job.rank_batch,
    )


def decode_roofline(
    rates: Rates,
    moved: MovedPerStep,
    ahead_bytes: int,
    work: StepWork,
    on_gpu: bool,
    steps: int,
    decode_s: float,
) -> Limit:
    """The least time of a step by each of the rates, which one binds, and the share reached.

    Args:
        moved: what crossed link and disk in a step, counted over all ranks.
        ahead_bytes: those of the decode's bytes that had crossed before its first step, over all ranks. The link does not owe them.
    """
    floor_step = step_bounds(rates, moved, work, on_gpu)
    in_all = {name: step_s * steps for name, step_s in floor_step.as_dict().items()}
    for name, gb_per_s in (("link", rates.link_gb_per_s), ("link_and_cores", _together_gb_per_s(rates))):
        if name in in_all and gb_per_s:
            in_all[name] = max(0.0, in_all[name] - ahead_bytes / (gb_per_s * 1e9))
    bound_by = max(in_all, key=lambda name: in_all[name], default=None)
    floor = in_all[bound_by] if bound_by else 0.0
    return Limit(
        rates=rates,
        link_ahead_bytes=ahead_bytes,
        floor_step_s=floor_step,
        bound_by=bound_by if floor else None,
        floor_decode_s=floor or None,
        fraction_of_limit=floor / decode_s if floor else None,
    )


def step_bounds(rates: Rates, moved: MovedPerStep, work: StepWork, on_gpu: bool) -> StepBounds:
    """The least time of a step by each of the rates that apply."""
    return StepBounds(
        device_memory=_seconds(work.device_bytes, rates.device_copy_gb_per_s),
        matmul=work.flops / (rates.matmul_tflops * 1e12) if rates.matmul_tflops else None,
        link=_seconds(moved.host_to_device_bytes_per_step or None, rates.link_gb_per_s) if on_gpu else None,
        link_and_cores=_link_and_cores_s(rates, moved) if on_gpu else None,
        disk=_seconds(moved.disk_read_bytes_per_step or None, rates.disk_gb_per_s),
    )


def _link_and_cores_s(rates: Rates, moved: MovedPerStep) -> float | None:
    """None where the cores multiply nothing."""
    if not moved.cores_bytes_per_step:
        return None
    return _seconds((moved.host_to_device_bytes_per_step or 0) + moved.cores_bytes_per_step, _together_gb_per_s(rates))


def _together_gb_per_s(rates: Rates) -> float | None:
    if rates.cores_gb_per_s is None or rates.link_beside_cores_gb_per_s is None:
        return None
    return rates.link_beside_cores_gb_per_s + rates.cores_gb_per_s


def _seconds(nbytes: float | None, gb_per_s: float | None) -> float | None:
    """None where there is nothing to move, or its rate is not known."""
    return nbytes / (gb_per_s * 1e9) if nbytes is not None and gb_per_s else None
