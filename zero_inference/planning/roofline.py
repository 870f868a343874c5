"""The roofline of a decode step: the bytes and operations that it cannot avoid, their least time at given rates, and the share reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan, Job
from zero_inference.planning.cost import exchange_s, run_links_gb_per_s
from zero_inference.records.hardware import Limit, Rates, StepBounds
from zero_inference.records.schema import MovedPerStep

if TYPE_CHECKING:
    from zero_inference.hardware.profile import HardwareProfile


@dataclass(frozen=True)
class StepWork:
    """Work that one device cannot avoid in a decode step: bytes of its memory, and floating-point operations."""

    device_bytes: int
    flops: int


def step_work(job: Job, weight_bytes: int, cpu_bytes: float) -> StepWork:
    """Return the work of a decode step: each active weight read once as stored, keys and values read once at their mean length, and 2
    operations a weight and sequence.

    The bound errs to the low side. Of experts it counts those that one token uses, and nothing for an embedding that is not the head. Idle
    experts are subtracted at the mean bits of all weights, which is no less than they have, and other idle weights unquantized. The
    `cpu_bytes` that the CPU backend reads in a step count as weights that every sequence uses; without a GPU their memory is the device's.
    """
    sizes = job.sizes
    active = sizes.parameters - sizes.idle_parameters
    stored_share = min(1.0, weight_bytes / max(1, sizes.parameter_bytes))
    idle_bytes = sizes.idle_bytes - int((1 - stored_share) * sizes.idle_expert_bytes)
    bits = job.quant_bits if job.quantized else 8 * job.spec.dtype.itemsize
    read_bytes = max(0, weight_bytes - idle_bytes) + job.mean_kv_bytes - (int(cpu_bytes) if job.on_gpu else 0)
    flops = 2 * max(0, active - int(cpu_bytes * 8 / bits)) * job.rank_batch
    return StepWork(max(0, read_bytes), flops)


def decode_roofline(
    rates: Rates, moved: MovedPerStep, ahead_bytes: int, work: StepWork, on_gpu: bool, steps: int, decode_s: float
) -> Limit:
    """Return the bounds of a step by each of the rates, which one binds, and the share of it that a run reached.

    Args:
        moved: bytes that crossed link and disk in a step, over all ranks.
        ahead_bytes: those that had crossed before the first decode step; the link bound excludes them.
    """
    floor_step = step_bounds(rates, moved, work, on_gpu)
    decode_bounds_s = {name: step_s * steps for name, step_s in floor_step.as_dict().items()}
    for name, gb_per_s in (("link", rates.link_gb_per_s), ("link_and_cores", _link_and_cpu_gb_per_s(rates))):
        if name in decode_bounds_s and gb_per_s:
            decode_bounds_s[name] = max(0.0, decode_bounds_s[name] - ahead_bytes / (gb_per_s * 1e9))
    bound_by = max(decode_bounds_s, key=lambda name: decode_bounds_s[name], default=None)
    floor_s = decode_bounds_s[bound_by] if bound_by else 0.0
    return Limit(
        rates=rates,
        link_ahead_bytes=ahead_bytes,
        floor_step_s=floor_step,
        bound_by=bound_by if floor_s else None,
        floor_decode_s=floor_s or None,
        fraction_of_limit=floor_s / decode_s if floor_s else None,
    )


def step_bounds(rates: Rates, moved: MovedPerStep, work: StepWork, on_gpu: bool) -> StepBounds:
    """Return the least seconds of a step by each rate; None where nothing moves or the rate is unknown."""
    sent_bytes, cpu_bytes = moved.host_to_device_bytes_per_step or 0, moved.cores_bytes_per_step or 0
    both_gb_per_s = _link_and_cpu_gb_per_s(rates) if on_gpu and cpu_bytes else None
    return StepBounds(
        device_memory=_seconds(work.device_bytes, rates.device_copy_gb_per_s),
        matmul=work.flops / (rates.matmul_tflops * 1e12) if rates.matmul_tflops else None,
        link=_seconds(sent_bytes or None, rates.link_gb_per_s) if on_gpu else None,
        link_and_cores=_seconds(sent_bytes + cpu_bytes, both_gb_per_s),
        disk=_seconds(moved.disk_read_bytes_per_step or None, rates.disk_gb_per_s),
    )


def _link_and_cpu_gb_per_s(rates: Rates) -> float | None:
    if rates.cores_gb_per_s is None or rates.link_beside_cores_gb_per_s is None:
        return None
    return rates.link_beside_cores_gb_per_s + rates.cores_gb_per_s


def _seconds(nbytes: float | None, gb_per_s: float | None) -> float | None:
    return nbytes / (gb_per_s * 1e9) if nbytes is not None and gb_per_s else None


def planned_step_bound(plan: EnginePlan, machine: HardwareProfile) -> tuple[str, float] | None:
    """Return the rate that binds a planned decode step, a key of `RATE_WORDS`, and its seconds, which a run there would be
    compared with; None without any rate, or without that of a link or disk that the step uses."""
    job, terms, moved = plan.job, plan.cost_terms, plan.moved_per_step()
    link_gb_per_s, disk_gb_per_s = run_links_gb_per_s(job, machine), machine.disk_gb_per_s
    lacks_link = job.on_gpu and moved.host_to_device_bytes_per_step and not link_gb_per_s
    if lacks_link or (moved.disk_read_bytes_per_step and not disk_gb_per_s):
        return None
    rates = Rates(
        link_gb_per_s=link_gb_per_s or float("inf"),
        link_spread=0.0,
        link_kind="",
        device_copy_gb_per_s=machine.device_gb_per_s,
        matmul_tflops=machine.matmul_tflops.get(job.spec.dtype_name),
        disk_gb_per_s=disk_gb_per_s and disk_gb_per_s * job.ranks.num_nodes,  # each node has a disk
        link_beside_cores_gb_per_s=terms.link_beside_cpu_gb_per_s,
        cores_gb_per_s=terms.cpu_beside_link_gb_per_s,
    )
    work = step_work(job, plan.weight_bytes, moved.cores_bytes_per_step or 0)
    bounds = step_bounds(rates, moved, work, job.on_gpu).as_dict()
    peers_on_link_s, peers_s = exchange_s(plan, machine, plan.fetched_bytes)
    bounds |= {"cores": terms.cpu_alone_s, "peers": peers_s, "link": (bounds.get("link") or 0.0) + peers_on_link_s}
    if not job.on_gpu:
        bounds["host_memory"] = bounds.pop("device_memory", None)
    bound_by = max(bounds, key=lambda name: bounds[name] or 0.0)
    return (bound_by, bounds[bound_by]) if bounds[bound_by] else None
