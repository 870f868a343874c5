"""Bytes that a run needs on the device, in host memory, page-locked and on disk, against what is available.

Weights and caches are exact, but for the weights that an engine gathers for a moment, which are an upper bound; activations
are an estimate of the largest tensors alive in a prefill.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from zero_inference.engines.base import Footprint, Job
from zero_inference.runtime.environment import available_host_bytes
from zero_inference.utils import GB


@dataclass(frozen=True)
class Need:
    """Bytes needed at one place of one node; `available` is None where nothing limits it."""

    place: str
    needed: int
    available: int | None

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available


def memory_needs(job: Job, weights: Footprint) -> list[Need]:
    """What this node needs."""
    ranks_here = job.ranks.local_world_size
    pinned = weights.pinned + (job.kv_host_bytes if job.config.pin_kv_cache else 0)
    needs = memory_of(
        job, weights.device + job.kv_device_bytes + job.activation_bytes, weights.host + job.kv_host_bytes
    )
    if job.on_gpu:  # the driver asks no memlock limit
        needs.append(Need("page-locked memory", pinned * ranks_here, available_host_bytes()))
    if job.config.disk_offload:
        folder = job.config.offload_path
        needs.append(Need(f"disk ({folder})", weights.disk * ranks_here, disk_free_bytes(folder)))
    return needs


def memory_of(job: Job, device: int, host: int) -> list[Need]:
    """A rank's bytes on its device and in host memory, for all ranks of this node; without a GPU, the device is host memory."""
    ranks_here = job.ranks.local_world_size
    if not job.on_gpu:
        return [Need("host memory", (device + host) * ranks_here, available_host_bytes())]
    return [
        Need("device memory (each GPU)", device, job.free_device_bytes),
        Need("host memory", host * ranks_here, available_host_bytes()),
    ]


def describe(needs: list[Need]) -> str:
    """One line a place."""
    lines = []
    for need in needs:
        there = "no limit" if need.available is None else f"{need.available / GB:.2f} GiB free"
        lines.append(
            f"{need.place}: {need.needed / GB:.2f} GiB needed, {there}{'' if need.fits else '  <- does not fit'}"
        )
    return "\n".join(lines)


def disk_free_bytes(folder: Path) -> int:
    """Of the file system that `folder` is on, or will be on once it is made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
