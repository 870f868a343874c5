"""A machine of which a plan may use only a part of the memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zero_inference.hardware.cores import BesideLink
from zero_inference.hardware.machine import Machine, Work
from zero_inference.utils.ranks import Ranks

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description


@dataclass(frozen=True)
class LimitedMachine:
    """`machine` with at most so much memory; None leaves it as it is. See `Machine`."""

    machine: Machine
    device_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def is_here(self) -> bool:
        return self.machine.is_here

    def described(self) -> Description | None:
        return self.machine.described()

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

    def beside_link(self, ranks: Ranks, cpus: tuple[int, ...], work: Work) -> BesideLink | str:
        return self.machine.beside_link(ranks, cpus, work)


def _least(free: int | None, most: int | None) -> int | None:
    """None where nothing limits it: a CPU has no device memory."""
    return free if free is None or most is None else min(free, most)
