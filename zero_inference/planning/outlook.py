"""What a machine that is described would do at best with a plan: the same limit that a run there would be compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan
from zero_inference.hardware.machine import DescribedMachine
from zero_inference.planning.copies_time import peers_s
from zero_inference.planning.limits import least_step, least_work
from zero_inference.records.key import as_mapping
from zero_inference.records.limit import RATE_WORDS, Rates
from zero_inference.utils.format import format_seconds, significant

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description
    from zero_inference.planning.timing import Times


def limit_in_words(plan: EnginePlan, predicted_step_s: float | None = None) -> str | None:
    """The most token/s of decoding with `plan` by one rate of the machine alone; None where that is what is predicted anyway, and where
    the plan is for this machine, whose rates a run measures."""
    machine = plan.job.machine
    if not isinstance(machine, DescribedMachine):
        return None
    if missing := missing_rates(plan, machine.description):
        return f"not known without the rate of {' and '.join(missing)}"
    found = least_step_s(plan, machine.description)
    if found is None:
        return "not known, because the description of the machine has no rates"
    bound_by, step_s = found
    if bound_by == "device_memory" and not plan.job.on_gpu:
        bound_by = "host_memory"
    if predicted_step_s is not None and significant(step_s) == significant(predicted_step_s):
        return None
    most = plan.job.config.batch_size / step_s
    bound = "about" if plan.expects_choices else "at most"  # tokens may choose other experts than are expected
    counted = "; the host's cores are not counted" if plan.lacks_cores else ""
    return f"{bound} {significant(most)} token/s ({format_seconds(step_s)} a step) by the rate of {RATE_WORDS[bound_by]} alone{counted}"


def experts_in_words(plan: EnginePlan) -> str | None:
    """Return a line about experts that a decode step copies, or reads from disk, though no token chose them; None where it moves none of
    these."""
    sizes, (number, chosen), job = plan.job.sizes, plan.job.spec.experts, plan.job
    idle = sizes.idle_expert_bytes / max(1, sizes.parameter_bytes)
    copies = job.on_gpu or plan.copies_on_cpu
    if not idle or (plan.fetched_bytes - plan.chosen_bytes if copies else plan.disk_bytes) <= plan.weight_bytes * (
        1 - idle
    ):
        return None
    how = "copies" if copies else "reads from disk"
    where = "" if job.on_gpu or not copies else " within host memory"
    return f"{job.config.engine} {how} all {number} experts of a layer{where} in each step, a token uses {chosen}: {plan.why_whole_layers}"


def first_token_in_words(plan: EnginePlan, times: Times) -> str | None:
    """Return why the first token is predicted to take less than a step; None where it is not."""
    if times.prefill.seconds >= times.step.seconds:
        return None
    if plan.prefill_fetched_bytes < plan.fetched_bytes:
        return "the first token takes less than a step: its first layers are still on the device from the generation before"
    return "the first token takes less than a step, which also copies the KV cache" if plan.carried_kv_bytes else None


def missing_rates(plan: EnginePlan, description: Description) -> list[str]:
    """What a step moves without a rate being known for it."""
    moved = plan.moved_per_step()
    over_link = plan.job.on_gpu and moved.host_to_device_bytes_per_step and not description.link_gb_per_s
    from_disk = moved.disk_read_bytes_per_step and not description.disk_gb_per_s
    return [name for name, lacks in (("the link", over_link), ("the disk", from_disk)) if lacks]


def least_step_s(plan: EnginePlan, description: Description) -> tuple[str, float] | None:
    """The rate that binds a decode step, a key of `RATE_WORDS`, and the seconds that the step takes at least; None without any rate."""
    job, moved = plan.job, plan.moved_per_step()
    work = least_work(job, plan.weight_bytes, moved.cores_bytes_per_step or 0)
    floors = as_mapping(least_step(_rates(plan, description), moved, work, job.on_gpu))
    over_link_s, others_s = peers_s(plan, description, plan.fetched_bytes)
    floors |= {"cores": plan.least_cores_s(), "peers": others_s, "link": (floors.get("link") or 0.0) + over_link_s}
    known = {name: format_seconds for name, format_seconds in floors.items() if format_seconds}
    return max(known.items(), key=lambda each: each[1]) if known else None


def _rates(plan: EnginePlan, description: Description) -> Rates:
    """As a run there would measure them. Each GPU has a link of its own, each node a disk."""
    job, together = plan.job, plan.beside_link()
    return Rates(
        link_gb_per_s=(description.link_gb_per_s or float("inf")) * job.ranks.world_size,
        link_spread=0.0,
        link_kind="",
        device_copy_gb_per_s=description.device_gb_per_s,
        matmul_tflops=description.matmul_tflops.get(job.spec.dtype_name),
        disk_gb_per_s=None if description.disk_gb_per_s is None else description.disk_gb_per_s * job.ranks.num_nodes,
        link_beside_cores_gb_per_s=together[0] if together else None,
        cores_gb_per_s=together[1] if together else None,
    )
