"""What a plan asks of the hardware: of this machine, live, or of one that a description stands for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.library import best_instructions, load_library, why_unavailable
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_cpu import (
    cpus_of_host,
    measure_attention,
    measure_concurrent_rates,
    measure_concurrent_rates_of_ranks,
)
from zero_inference.hardware.cache import cached_profile
from zero_inference.hardware.rates import ConcurrentRates, attended_gb_per_s, concurrent_rates, format_of
from zero_inference.hardware.spec import resolve_profile
from zero_inference.kernels import extension
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.utils.environment import available_host_bytes
from zero_inference.utils.ranks import Ranks

if TYPE_CHECKING:
    from zero_inference.hardware.profile import HardwareProfile


@dataclass(frozen=True)
class CpuWorkload:
    """What the host's cores would multiply.

    Attributes:
        scheme: how the weights are stored; None for plain ones of `dtype`.
        rows: of a rank's pass.
        columns: of the weights.
        heads: query heads that share a key head, where the cores might attend over keys and values of `dtype`; else 0.
    """

    dtype: torch.dtype
    scheme: GroupQuantization | None
    rows: int
    columns: int
    heads: int = 0


class Machine(Protocol):
    """The hardware of a plan."""

    @property
    def is_here(self) -> bool:
        """Whether it is the one that this process runs on, so that it can be asked and used."""

    def profile(self) -> HardwareProfile | None:
        """Its measured rates; None where it was not measured yet."""

    def ranks_there(self, ranks: Ranks) -> Ranks:
        """`ranks` as they would be started there: with a GPU each, if there are any."""

    def gpus(self) -> int:
        """GPUs of a node, that ranks may have one each."""

    def free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        """Memory that is free on the device of a rank; None where nothing limits it (a CPU).

        Args:
            agreed: the least of all ranks; a collective.
        """

    def available_host_bytes(self) -> int:
        """Host memory of a node that a run can take."""

    def disk_free_bytes(self, folder: Path) -> int | None:
        """Of the file system that `folder` is on or will be on; None where it is not known."""

    def missing_code(self, on_gpu: bool) -> str | None:
        """Why there is no code for the cores, or for a GPU to meet them; None where there is."""

    def instructions(self) -> str:
        """The instruction set of the cores' products."""

    def cpus(self, ranks: Ranks, asked: int | None) -> tuple[int, ...]:
        """A CPU for each thread that multiplies; -1 for one that is bound to none. Raises UsageError: fewer than `asked`."""

    def concurrent_rates(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | str:
        """What link and cores give beside each other; or why that is not known, in a few words. Ranks that are connected call it
        together."""


@dataclass(frozen=True)
class LocalMachine:
    """The one that this process runs on. Memory is looked at when it is asked for, and so are rates that were not kept."""

    is_here = True

    def profile(self) -> HardwareProfile | None:
        return cached_profile()

    def ranks_there(self, ranks: Ranks) -> Ranks:
        return ranks

    def gpus(self) -> int:
        return torch.cuda.device_count()

    def free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        return ranks.free_device_bytes(agreed)

    def available_host_bytes(self) -> int:
        return available_host_bytes()

    def disk_free_bytes(self, folder: Path) -> int | None:
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def missing_code(self, on_gpu: bool) -> str | None:
        if load_library() is None:
            return why_unavailable()
        if on_gpu and not load_extension():
            return extension.why_unavailable()
        return None

    def instructions(self) -> str:
        return best_instructions()

    def cpus(self, ranks: Ranks, asked: int | None) -> tuple[int, ...]:
        return cpus_of_host(ranks, asked)

    def concurrent_rates(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | str:
        if ranks.device.type != "cuda":
            return "there is no GPU"
        if (kept := self._kept_beside_link(ranks, cpus, work)) is not None:
            return kept
        what: Any = cpus, work.dtype, work.scheme, work.rows, work.columns
        try:
            if ranks.world_size > 1:
                return measure_concurrent_rates_of_ranks(ranks, *what)
            found = measure_concurrent_rates(ranks.device, *what)
        except (RunError, torch.OutOfMemoryError):  # it takes a gigabyte or two: weights go first
            return "there was too little memory to measure them"
        if not work.heads:
            return found
        try:
            return replace(found, attended=measure_attention(ranks.device, cpus, work.dtype, work.heads))
        except (RunError, torch.OutOfMemoryError):
            return found  # they are taken to attend as fast as they read

    def _kept_beside_link(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | None:
        as_measured = work.scheme is None or work.scheme.group_size == GROUP_SIZES[work.scheme.bits]
        kept = self.profile() if ranks.world_size == 1 and as_measured else None
        if kept is None or kept.cores is None or kept.cores.threads != len(cpus):
            return None
        found = _beside_link(kept, work)
        return None if isinstance(found, str) else found


def _beside_link(description: HardwareProfile, work: CpuWorkload) -> ConcurrentRates | str:
    found = concurrent_rates(description, format_of(work.dtype, work.scheme), work.rows)
    attended = attended_gb_per_s(description, format_of(work.dtype, None), work.heads) if work.heads else None
    return found if isinstance(found, str) or attended is None else replace(found, attended=attended)


@dataclass(frozen=True)
class ProfiledMachine:
    """Another one. Nothing of the machine that this process runs on is asked."""

    description: HardwareProfile
    is_here = False

    def profile(self) -> HardwareProfile | None:
        return self.description

    def gpus(self) -> int:
        return len(self.description.gpus)

    def free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        return min((gpu.free_bytes for gpu in self.description.gpus[: ranks.local_world_size]), default=None)

    def available_host_bytes(self) -> int:
        return self.description.host_memory_bytes

    def disk_free_bytes(self, folder: Path) -> int | None:
        return self.description.disk_free_bytes

    def missing_code(self, on_gpu: bool) -> str | None:
        return None

    def instructions(self) -> str:
        return self.description.cores.instructions if self.description.cores else ""

    def cpus(self, ranks: Ranks, asked: int | None) -> tuple[int, ...]:
        cores = self.description.cores
        if asked is not None and cores is not None and cores.instructions and asked != cores.threads:
            raise UsageError(
                f"--cpu-threads {asked}: {self.description.name} was measured with {cores.threads} threads; drop --cpu-threads."
            )
        return (-1,) * (asked or (cores.threads if cores else 1))

    def concurrent_rates(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | str:
        if ranks.world_size > 1:
            return "their rate beside several GPUs is not known"
        return _beside_link(self.description, work)

    def ranks_there(self, ranks: Ranks) -> Ranks:
        if not self.description.gpus:
            return replace(ranks, device=torch.device("cpu"))
        return replace(ranks, device=torch.device("cuda", ranks.local_rank))


def resolve_machine(name: str | None, assume: str | None) -> Machine:
    """Return this machine, or the one that `resolve_profile` describes. Raises as that."""

    found = resolve_profile(name, assume)
    return LocalMachine() if found is None else ProfiledMachine(found)


@dataclass(frozen=True)
class LimitedMachine:
    """`machine` with at most so much memory; None leaves it as it is. See `Machine`."""

    machine: Machine
    device_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def is_here(self) -> bool:
        return self.machine.is_here

    def profile(self) -> HardwareProfile | None:
        return self.machine.profile()

    def ranks_there(self, ranks: Ranks) -> Ranks:
        return self.machine.ranks_there(ranks)

    def gpus(self) -> int:
        return self.machine.gpus()

    def free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        return _least(self.machine.free_device_bytes(ranks, agreed), self.device_bytes)

    def available_host_bytes(self) -> int:
        free = self.machine.available_host_bytes()
        return free if self.host_bytes is None else min(free, self.host_bytes)

    def disk_free_bytes(self, folder: Path) -> int | None:
        return self.machine.disk_free_bytes(folder)

    def missing_code(self, on_gpu: bool) -> str | None:
        return self.machine.missing_code(on_gpu)

    def instructions(self) -> str:
        return self.machine.instructions()

    def cpus(self, ranks: Ranks, asked: int | None) -> tuple[int, ...]:
        return self.machine.cpus(ranks, asked)

    def concurrent_rates(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | str:
        return self.machine.concurrent_rates(ranks, cpus, work)


def _least(free: int | None, most: int | None) -> int | None:
    """None where nothing limits it: a CPU has no device memory."""
    return free if free is None or most is None else min(free, most)
