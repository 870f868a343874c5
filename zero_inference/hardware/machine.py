"""The machine that a run is planned for: this one, asked live, or another one known by its hardware profile."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.library import best_instructions, load_library, why_unavailable
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_cpu import cpus_of_host, measure_concurrent_rates
from zero_inference.hardware.profile import (
    ConcurrentRates,
    CpuWorkload,
    HardwareProfile,
    cached_profile,
    concurrent_rates,
)
from zero_inference.hardware.spec import resolve_profile
from zero_inference.kernels import extension
from zero_inference.utils.environment import available_host_bytes
from zero_inference.utils.ranks import Ranks


@dataclass(frozen=True)
class Machine:
    """The hardware of a plan.

    Attributes:
        other: hardware profile of another machine, of which nothing is read here; None for the machine of this process, whose rates are
            measured when asked for unless they are in its cached profile.
        device_limit_bytes: what a plan may use of each GPU at most; None is no limit.
        host_limit_bytes: of host memory.
    """

    other: HardwareProfile | None = None
    device_limit_bytes: int | None = None
    host_limit_bytes: int | None = None

    @property
    def is_here(self) -> bool:
        """True for the machine of this process."""
        return self.other is None

    def profile(self) -> HardwareProfile | None:
        """Return its hardware profile; None if it was not measured yet."""
        return self.other or cached_profile()

    def ranks_there(self, ranks: Ranks) -> Ranks:
        """Return `ranks` as they would be started there: with a GPU each if there are any."""
        if self.other is None:
            return ranks
        return replace(ranks, device=torch.device("cuda", ranks.local_rank) if self.other.gpus else torch.device("cpu"))

    def gpus(self) -> int:
        """Return the number of GPUs of a node."""
        return len(self.other.gpus) if self.other else torch.cuda.device_count()

    def free_device_bytes(self, devices: Sequence[torch.device], ranks: Ranks | None = None) -> tuple[int, ...]:
        """Return the free memory of each device, or the least of all `ranks` (a collective); empty without a limit (a CPU)."""
        if devices[0].type != "cuda":
            return ()
        if self.other:
            free = [self.other.gpus[device.index].free_bytes for device in devices]
        else:
            free = [torch.cuda.mem_get_info(device)[0] for device in devices]
        if ranks is not None:
            free = [int(ranks.minimum(each)) for each in free]
        return tuple(free if self.device_limit_bytes is None else [min(each, self.device_limit_bytes) for each in free])

    def available_host_bytes(self) -> int:
        """Return the host memory of a node that a run can take."""
        free = self.other.host_memory_bytes if self.other else available_host_bytes()
        return free if self.host_limit_bytes is None else min(free, self.host_limit_bytes)

    def disk_free_bytes(self, folder: Path) -> int | None:
        """Return the free bytes of the file system that `folder` is or will be on; None if unknown."""
        if self.other:
            return self.other.disk_free_bytes
        return shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free

    def why_no_cpu_backend(self, on_gpu: bool) -> str | None:
        """Return why the CPU backend, or its hand-off with a GPU, cannot be compiled; None if it can."""
        if self.other:
            return None
        if load_library() is None:
            return why_unavailable()
        return extension.why_unavailable() if on_gpu and not extension.load_extension() else None

    def instructions(self) -> str:
        """Return the instruction set of CPU products."""
        if self.other:
            return self.other.cores.instructions if self.other.cores else ""
        return best_instructions()

    def cpus(self, devices: Sequence[torch.device], threads: int | None) -> tuple[int, ...]:
        """Return a CPU for each worker thread of a process that drives `devices`, -1 for an unbound one. Raises UsageError if `threads`
        (--cpu-threads) are too many."""
        if self.other is None:
            return cpus_of_host(devices, threads)
        cpu = self.other.cores
        if cpu and cpu.instructions and threads not in (None, cpu.threads):  # an assumed CPU has no instructions
            raise UsageError(
                f"--cpu-threads {threads}: {self.other.name} was measured with {cpu.threads} threads; drop --cpu-threads."
            )
        return (-1,) * (threads or (cpu.threads if cpu else 1))

    def concurrent_rates(
        self, devices: Sequence[torch.device], cpus: tuple[int, ...], work: CpuWorkload
    ) -> ConcurrentRates | str:
        """Return the rates of the CPU and the links of `devices` while all are busy, or words on why they are unknown."""
        if self.other:
            return concurrent_rates(self.other, work, len(devices))
        if devices[0].type != "cuda":
            return "there is no GPU"
        profile = self.profile()
        usual_groups = work.scheme is None or work.scheme.group_size == GROUP_SIZES[work.scheme.bits]
        if profile is not None and usual_groups and profile.cores is not None and profile.cores.threads == len(cpus):
            known = concurrent_rates(profile, work, len(devices))
            measured = profile.cores.most_links(work.weight_format) >= len(devices)  # else assumed
            if measured and isinstance(known, ConcurrentRates):
                return known
        try:
            return measure_concurrent_rates(tuple(devices), cpus, work)
        except (RunError, torch.OutOfMemoryError):  # it takes 1 to 2 GB, which weights may need
            return "there was too little memory to measure its rate"


def resolve_machine(name: str | None, assume: str | None) -> Machine:
    """Return the machine of `--machine` and `--assume`, or this one without them. Raises UsageError as `resolve_profile`."""
    return Machine(resolve_profile(name, assume))
