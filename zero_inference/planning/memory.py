"""Bytes that a run needs on the device, in host memory, page-locked and on disk, and whether they are available.

Weights and KV cache are exact, except for gathered weights, which are an upper bound; activations are the peak of a traced prefill
(models/empty_model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_inference.engines.base import EnginePlan, Job
from zero_inference.utils import cache_bytes, hidden_bytes, model_bytes
from zero_inference.utils.format import format_bytes, format_bytes_pair

DEVICE_MEMORY, HOST_MEMORY, PAGE_LOCKED, DISK = "device memory", "host memory", "page-locked memory", "disk"


@dataclass(frozen=True)
class Need:
    """Bytes needed at one place of one node."""

    place: str
    needed_bytes: int
    available_bytes: int | None  # None where unknown
    which: str = ""  # one of several such places, or the folder of the disk
    reserve_bytes: int = 0  # have to stay free in addition

    @property
    def with_reserve_bytes(self) -> int:
        return self.needed_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.with_reserve_bytes <= self.available_bytes

    def in_words(self) -> str:
        """Return a text such as "20.4 of 23.5 GiB free"."""
        if self.available_bytes is None:
            return f"{format_bytes(self.needed_bytes)}; free space is not known"
        nbytes = self.needed_bytes if self.fits else self.with_reserve_bytes
        needed, free, unit = format_bytes_pair(nbytes, self.available_bytes)
        return f"{needed} of {free} {unit} free {self.which}".rstrip() + ("" if self.fits else "  <- does not fit")

    def shortage(self) -> str:
        """Return a text such as "24.8 GiB of host memory (23.5 GiB free)"."""
        needed, free, unit = format_bytes_pair(self.with_reserve_bytes, self.available_bytes or 0)
        return f"{needed} {unit} of {self.place} {self.which}".rstrip() + f" ({free} {unit} free)"


def without_page_locked(needs: Sequence[Need]) -> list[Need]:
    """Return `needs` without page-locked memory, which is part of host memory, unless it alone does not fit."""
    host_fits = all(need.fits for need in needs if need.place == HOST_MEMORY)
    return [need for need in needs if need.place != PAGE_LOCKED or (host_fits and not need.fits)]


def memory_needs(plan: EnginePlan) -> list[Need]:
    """Return what one node needs, over its ranks."""
    job, footprint, ranks = plan.job, plan.footprint, plan.job.ranks.local_world_size
    devices = range(len(job.devices)) if job.on_gpu else ()
    peaks = list(map(plan.peak_bytes_on, devices))
    reserves = [max(0, plan.min_free_bytes_on(device) - peaks[device]) for device in devices]
    needs = node_needs(job, peaks, plan.host_peak_bytes(), reserves)
    if job.on_gpu:  # the driver ignores the memlock limit
        pinned_bytes = footprint.pinned + (job.kv_host_bytes if job.config.pin_kv_cache else 0)
        needs.append(Need(PAGE_LOCKED, pinned_bytes * ranks, job.machine.available_host_bytes()))
    if job.config.disk_offload or footprint.disk:
        folder = job.config.offload_path
        needs.append(Need(DISK, footprint.disk * ranks, job.machine.disk_free_bytes(folder), f"({folder})"))
    return needs


def node_needs(job: Job, device_bytes: Sequence[int], host_bytes: int, reserves: Sequence[int] = ()) -> list[Need]:
    """Return the needs of a node for a rank's bytes on each of its devices and in host memory, one for all GPUs that are alike.

    Args:
        device_bytes: of each device; without a GPU, in host memory.
        reserves: bytes that have to stay free on each device besides.
    """
    ranks, available = job.ranks.local_world_size, job.machine.available_host_bytes()
    if not job.on_gpu:
        return [Need(HOST_MEMORY, (sum(device_bytes) + host_bytes) * ranks, available)]
    every = list(zip(device_bytes, job.free_by_device, reserves or [0] * len(device_bytes), strict=True))
    several = "of each GPU" if ranks > 1 or len(every) > 1 else ""
    alike = len(set(every)) == 1
    needs = [
        Need(DEVICE_MEMORY, nbytes, free, several if alike else f"of GPU {index}", reserve)
        for index, (nbytes, free, reserve) in enumerate(every[:1] if alike else every)
    ]
    return [*needs, Need(HOST_MEMORY, host_bytes * ranks, available)]


def log_sizes(job: Job) -> dict[str, int]:
    """Return the sizes of the log and the record, over all ranks, by the formulas of `zero_inference.utils`: 2 bytes an element."""
    config, batch = job.spec.config, job.config.batch_size
    return {
        "model_bytes": model_bytes(config, parameters=job.sizes.parameters),
        "cache_bytes": cache_bytes(config, batch, job.length),
        "hidden_bytes": hidden_bytes(config, batch, job.length),
    }
