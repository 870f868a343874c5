"""Bytes that a run needs on the device, in host memory, page-locked and on disk, against what is available.

Weights and caches are exact, but for the weights that an engine gathers for a moment, which are an upper bound; activations
are what a prefill keeps at its peak (models/sizes.py).
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
    """Bytes needed at one place of one node; `available` is None where it is not known.

    Attributes:
        which: of several such places, for people.
        reserve: bytes that have to stay free besides.
    """

    place: str
    needed: int
    available: int | None
    which: str = ""
    reserve: int = 0

    @property
    def fits(self) -> bool:
        return self.available is None or self.with_reserve <= self.available

    @property
    def with_reserve(self) -> int:
        """Free bytes that a run asks for."""
        return self.needed + self.reserve

    def in_words(self) -> str:
        """`20.4 of 23.5 GiB free`."""
        if self.available is None:
            return f"{format_bytes(self.needed)}; how much is free is not known"
        needed, there, unit = format_bytes_pair(self.needed, self.available)
        return f"{needed} of {there} {unit} free{self._reserved}"

    def shortage(self) -> str:
        """`24.8 GiB of host memory (23.5 GiB free)`."""
        needed, there, unit = format_bytes_pair(self.needed, self.available or 0)
        return f"{needed} {unit} of {self.name} ({there} {unit} free{self._reserved})"

    @property
    def _reserved(self) -> str:
        """Return the words about the reserve where nothing else is missing."""
        only_reserve = not self.fits and self.needed <= (self.available or 0)
        return f", of which {format_bytes(self.reserve)} have to stay free" if only_reserve else ""

    @property
    def name(self) -> str:
        return f"{self.place} {self.which}".rstrip()


def shown(needs: Sequence[Need]) -> list[Need]:
    """Without page-locked memory, which is a part of host memory, unless it alone does not fit."""
    host_fits = all(need.fits for need in needs if need.place == HOST_MEMORY)
    return [need for need in needs if need.place != PAGE_LOCKED or (host_fits and not need.fits)]


def memory_needs(plan: EnginePlan) -> list[Need]:
    """What a node needs."""
    job, weights = plan.job, plan.footprint
    ranks_here = job.ranks.local_world_size
    pinned = weights.pinned + (job.kv_host_bytes if job.config.pin_kv_cache else 0)
    device = plan.device_peak_bytes if job.on_gpu else 0
    reserve = max(0, plan.least_free_device_bytes - device) if job.on_gpu else 0
    needs = memory_of(job, device, plan.host_peak_bytes(), reserve)
    if job.on_gpu:  # the driver asks no memlock limit
        needs.append(Need(PAGE_LOCKED, pinned * ranks_here, job.machine.available_host_bytes()))
    if job.config.disk_offload:
        folder = job.config.offload_path
        needs.append(Need(DISK, weights.disk * ranks_here, job.machine.disk_free_bytes(folder), f"({folder})"))
    return needs


def memory_of(job: Job, device: int, host: int, reserve: int = 0) -> list[Need]:
    """A rank's bytes on its device, with its reserve there, and in host memory, for all ranks of this node; without a GPU, the device is
    host memory."""
    ranks_here = job.ranks.local_world_size
    if not job.on_gpu:
        return [Need(HOST_MEMORY, (device + host) * ranks_here, job.machine.available_host_bytes())]
    return [
        Need(DEVICE_MEMORY, device, job.free_device_bytes, "of each GPU" if ranks_here > 1 else "", reserve),
        Need(HOST_MEMORY, host * ranks_here, job.machine.available_host_bytes()),
    ]


@dataclass(frozen=True)
class LogSizes:
    """At 2 bytes an element, over all ranks; nothing is decided by them."""

    model_bytes: int
    cache_bytes: int
    hidden_bytes: int


def log_sizes(job: Job) -> LogSizes:
    config, batch = job.spec.config, job.config.batch_size
    return LogSizes(
        model_bytes(config, parameters=job.sizes.parameters),
        cache_bytes(config, batch, job.length),
        hidden_bytes(config, batch, job.length),
    )
