"""Bytes that a run needs on the device, in host memory, page-locked and on disk, against what is there.

Weights and caches are exact; activations are an estimate of the largest tensors alive in a prefill.
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
    """What this node needs. On a CPU-only machine the device is host memory, and is counted there."""
    ranks_here = job.ranks.local_world_size
    device = weights.device + job.kv_device_bytes + job.activation_bytes
    host = weights.host + job.kv_host_bytes
    pinned = weights.pinned + (job.kv_host_bytes if job.config.pin_kv_cache else 0)
    needs = []
    if job.on_gpu:
        needs.append(Need("device memory (each GPU)", device, job.free_device_bytes))
    else:
        host += device
    needs.append(host_need(host * ranks_here))
    if job.on_gpu:  # the driver asks no memlock limit
        needs.append(Need("page-locked memory", pinned * ranks_here, available_host_bytes()))
    if weights.disk:
        folder = job.config.offload_path
        needs.append(Need(f"disk ({folder})", weights.disk * ranks_here, disk_free_bytes(folder)))
    return needs


def host_need(needed: int) -> Need:
    """Bytes of host memory, beside what this process can still take."""
    return Need("host memory", needed, available_host_bytes())


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
