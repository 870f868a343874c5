"""What a machine that is described would do at best with a plan: the same limit that a run there would be compared with."""

from __future__ import annotations

from zero_inference.engines.base import EnginePlan, Job
from zero_inference.link.description import Description
from zero_inference.machine.machine import DescribedMachine
from zero_inference.plan.limits import least_step, least_work
from zero_inference.records.key import as_mapping
from zero_inference.records.limit import Rates
from zero_inference.records.loops import MovedPerStep

WORDS = {
    "device_memory": "device memory",
    "matmul": "matrix products",
    "link": "the link",
    "link_and_cores": "link and cores",
    "disk": "the disk",
}


def limit_in_words(plan: EnginePlan) -> str | None:
    """The most token/s of a decode with `plan`, and what binds it; None where the plan is for this machine, which a run measures."""
    machine = plan.job.machine
    if not isinstance(machine, DescribedMachine):
        return None
    found = least_step_s(plan, machine.description)
    if found is None:
        return "decode: no limit is known, because the description of the machine has no rates"
    bound_by, step_s = found
    most = plan.job.config.batch_size / step_s
    return f"decode: at most {most:.3g} token/s ({step_s:.3g} s a step), bound by {WORDS[bound_by]}"


def least_step_s(plan: EnginePlan, description: Description) -> tuple[str, float] | None:
    """The rate that binds a decode step, a name of `FloorStep`, and the seconds that the step takes at least; None without any rate."""
    job, moved = plan.job, plan.moved_per_step()
    work = least_work(job, plan.weight_bytes, moved.cores_bytes_per_step or 0)
    floors = as_mapping(least_step(_rates(plan, description, moved), moved, work, job.on_gpu))
    known = {name: seconds for name, seconds in floors.items() if seconds}
    return max(known.items(), key=lambda each: each[1]) if known else None


def _rates(plan: EnginePlan, description: Description, moved: MovedPerStep) -> Rates:
    """As a run there would measure them. Each GPU has a link of its own."""
    job, together = plan.job, plan.beside_link()
    return Rates(
        link_gb_per_s=(description.link_gb_per_s or float("inf")) * job.ranks.world_size,
        link_spread=0.0,
        link_kind="",
        device_copy_gb_per_s=description.device_gb_per_s,
        matmul_tflops=_matmul(job, description),
        disk_gb_per_s=description.disk_gb_per_s,
        link_beside_cores_gb_per_s=together[0] if together else None,
        cores_gb_per_s=together[1] if together else None,
    )


def _matmul(job: Job, description: Description) -> float | None:
    return description.matmul_tflops.get(job.spec.dtype_name)
