"""Bytes that a run needs on the device, in host memory, page-locked and on disk, against what is available.

Weights and caches are exact, but for the weights that an engine gathers for a moment, which are an upper bound; activations
are what a prefill keeps at its peak (models/activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.engines.base import EnginePlan, Job
from zero_inference.utils import GB


@dataclass(frozen=True)
class Need:
    """Bytes needed at one place of one node; `available` is None where it is not known."""

    place: str
    needed: int
    available: int | None

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available


def memory_needs(plan: EnginePlan) -> list[Need]:
    """What a node needs."""
    job, weights = plan.job, plan.footprint
    ranks_here = job.ranks.local_world_size
    pinned = weights.pinned + (job.kv_host_bytes if job.config.pin_kv_cache else 0)
    needs = memory_of(job, plan.device_peak_bytes if job.on_gpu else 0, plan.host_peak_bytes())
    if job.on_gpu:  # the driver asks no memlock limit
        needs.append(Need("page-locked memory", pinned * ranks_here, job.machine.available_host_bytes()))
    if job.config.disk_offload:
        folder = job.config.offload_path
        needs.append(Need(f"disk ({folder})", weights.disk * ranks_here, job.machine.disk_free_bytes(folder)))
    return needs


def memory_of(job: Job, device: int, host: int) -> list[Need]:
    """A rank's bytes on its device and in host memory, for all ranks of this node; without a GPU, the device is host memory."""
    ranks_here = job.ranks.local_world_size
    if not job.on_gpu:
        return [Need("host memory", (device + host) * ranks_here, job.machine.available_host_bytes())]
    return [
        Need("device memory (each GPU)", device, job.free_device_bytes),
        Need("host memory", host * ranks_here, job.machine.available_host_bytes()),
    ]


def describe(needs: list[Need]) -> str:
    """One line a place."""
    lines = []
    for need in needs:
        there = "how much is free is not known" if need.available is None else f"{need.available / GB:.2f} GiB free"
        lines.append(
            f"{need.place}: {need.needed / GB:.2f} GiB needed, {there}{'' if need.fits else '  <- does not fit'}"
        )
    return "\n".join(lines)
