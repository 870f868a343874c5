"""The machine that a run is planned for: this one, asked live, or another one known by its hardware profile."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.library import best_instructions, load_library, why_unavailable
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_cpu import CpuWorkload, cpus_of_host, measure_concurrent_rates
from zero_inference.hardware.profile import HardwareProfile, cached_profile
from zero_inference.hardware.rates import ConcurrentRates, attended_gb_per_s, concurrent_rates, format_of
from zero_inference.hardware.spec import resolve_profile
from zero_inference.kernels import extension
from zero_inference.utils.environment import available_host_bytes
from zero_inference.utils.ranks import Ranks


@dataclass(frozen=True)
class Machine:
    """The hardware of a plan: the machine of this process. Rates without a cached profile are measured when asked for.

    A plan may use `device_limit_bytes` of each GPU and `host_limit_bytes` of host memory; None is no limit.
    """

    device_limit_bytes: int | None = field(default=None, kw_only=True)
    host_limit_bytes: int | None = field(default=None, kw_only=True)
    is_here: ClassVar[bool] = True  # whether this process runs on it

    def profile(self) -> HardwareProfile | None:
        """Return its hardware profile; None if it was not measured yet."""
        return cached_profile()

    def ranks_there(self, ranks: Ranks) -> Ranks:
        """Return `ranks` as they would be started there: with a GPU each if there are any."""
        return ranks

    def gpus(self) -> int:
        """Return the number of GPUs of a node."""
        return torch.cuda.device_count()

    def free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        """Return the free memory of a rank's device, `agreed` the least of all ranks (a collective); None without a limit (a CPU)."""
        free = self._free_device_bytes(ranks, agreed)
        return free if free is None or self.device_limit_bytes is None else min(free, self.device_limit_bytes)

    def available_host_bytes(self) -> int:
        """Return the host memory of a node that a run can take."""
        free = self._available_host_bytes()
        return free if self.host_limit_bytes is None else min(free, self.host_limit_bytes)

    def _free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        return ranks.free_device_bytes(agreed)

    def _available_host_bytes(self) -> int:
        return available_host_bytes()

    def disk_free_bytes(self, folder: Path) -> int | None:
        """Return the free bytes of the file system that `folder` is or will be on; None if unknown."""
        return shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free

    def missing_code(self, on_gpu: bool) -> str | None:
        """Return why the CPU backend, or its hand-off with a GPU, cannot be compiled; None if it can."""
        if load_library() is None:
            return why_unavailable()
        if on_gpu and not extension.load_extension():
            return extension.why_unavailable()
        return None

    def instructions(self) -> str:
        """Return the instruction set of CPU products."""
        return best_instructions()

    def cpus(self, ranks: Ranks, threads: int | None) -> tuple[int, ...]:
        """Return a CPU for each worker thread, -1 for an unbound one. Raises UsageError if `threads` (--cpu-threads) are too many."""
        return cpus_of_host(ranks, threads)

    def concurrent_rates(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | str:
        """Return the rates of CPU and link while both are busy, or words on why they are unknown."""
        if ranks.device.type != "cuda":
            return "there is no GPU"
        if ranks.world_size > 1:
            return "their rate beside several GPUs is not known"
        profile = self.profile()
        usual_groups = work.scheme is None or work.scheme.group_size == GROUP_SIZES[work.scheme.bits]
        if profile is not None and usual_groups and profile.cores is not None and profile.cores.threads == len(cpus):
            known = _rates_of_profile(profile, work)
            if isinstance(known, ConcurrentRates):
                return known
        try:
            return measure_concurrent_rates(ranks.device, cpus, work)
        except (RunError, torch.OutOfMemoryError):  # it takes 1 to 2 GB, which weights may need
            return "there was too little memory to measure them"


@dataclass(frozen=True)
class ProfiledMachine(Machine):
    """The machine of a hardware profile. Nothing is read from the machine of this process."""

    hardware_profile: HardwareProfile
    is_here = False

    def profile(self) -> HardwareProfile:
        return self.hardware_profile

    def ranks_there(self, ranks: Ranks) -> Ranks:
        device = torch.device("cuda", ranks.local_rank) if self.hardware_profile.gpus else torch.device("cpu")
        return replace(ranks, device=device)

    def gpus(self) -> int:
        return len(self.hardware_profile.gpus)

    def _free_device_bytes(self, ranks: Ranks, agreed: bool) -> int | None:
        return min((gpu.free_bytes for gpu in self.hardware_profile.gpus[: ranks.local_world_size]), default=None)

    def _available_host_bytes(self) -> int:
        return self.hardware_profile.host_memory_bytes

    def disk_free_bytes(self, folder: Path) -> int | None:
        return self.hardware_profile.disk_free_bytes

    def missing_code(self, on_gpu: bool) -> str | None:
        return None

    def instructions(self) -> str:
        return self.hardware_profile.cores.instructions if self.hardware_profile.cores else ""

    def cpus(self, ranks: Ranks, threads: int | None) -> tuple[int, ...]:
        cpu = self.hardware_profile.cores
        if cpu and cpu.instructions and threads not in (None, cpu.threads):  # an assumed CPU has no instructions
            raise UsageError(
                f"--cpu-threads {threads}: {self.hardware_profile.name} was measured with {cpu.threads} threads; drop --cpu-threads."
            )
        return (-1,) * (threads or (cpu.threads if cpu else 1))

    def concurrent_rates(self, ranks: Ranks, cpus: tuple[int, ...], work: CpuWorkload) -> ConcurrentRates | str:
        if ranks.world_size > 1:
            return "their rate beside several GPUs is not known"
        return _rates_of_profile(self.hardware_profile, work)


def resolve_machine(name: str | None, assume: str | None) -> Machine:
    """Return the machine of `--machine` and `--assume`, or this one without them. Raises UsageError as `resolve_profile`."""
    profile = resolve_profile(name, assume)
    return Machine() if profile is None else ProfiledMachine(profile)


def limit_memory(machine: Machine, device_bytes: int | None = None, host_bytes: int | None = None) -> Machine:
    """Return `machine` with at most this much memory for a plan; None is no limit."""
    return replace(machine, device_limit_bytes=device_bytes, host_limit_bytes=host_bytes)


def _rates_of_profile(profile: HardwareProfile, work: CpuWorkload) -> ConcurrentRates | str:
    """Return the rates for `work` in `profile`, or words on why they are unknown."""
    rates = concurrent_rates(profile, format_of(work.dtype, work.scheme), work.rows)
    attended = attended_gb_per_s(profile, format_of(work.dtype, None), work.heads) if work.heads else None
    return rates if isinstance(rates, str) or attended is None else replace(rates, attended=attended)
