"""Counters of what is moved and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class ExpertCounts(NamedTuple):
    """What became so far of the experts that tokens chose, where device memory keeps some of those in host memory.

    Attributes:
        choices: of a token and an expert.
        hits: those whose expert was on the device.
        saved_bytes: of experts that the host's cores did not have to read because of that.
        fetched_bytes: of experts that the device read over the link, while the cores multiplied the others.
    """

    choices: int
    hits: int
    saved_bytes: int
    fetched_bytes: int


@dataclass
class Transfers:
    """Bytes moved so far by this rank, raised by whoever moves them.

    Attributes:
        cores_bytes: of weights, keys and values that the host's cores read where they lie, instead of sending them.
        cores_counts: what they count themselves beside that, because only they know it: experts that tokens chose.
        cores_busy_s: seconds that they have worked so far; None where there are none, or another rank counts.
        expert_counts: how often those were on the device, up to the last `snapshot`; None where none are kept there.
    """

    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    disk_read_bytes: int = 0
    cores_bytes: int = 0
    cores_counts: Callable[[], int] | None = None
    cores_busy_s: Callable[[], float] | None = None
    expert_counts: Callable[[], ExpertCounts] | None = None

    def snapshot(self) -> tuple[int, int, int, int]:
        cores = self.cores_bytes + (0 if self.cores_counts is None else self.cores_counts())
        fetched = 0 if self.expert_counts is None else self.expert_counts().fetched_bytes
        return self.host_to_device_bytes + fetched, self.device_to_host_bytes, self.disk_read_bytes, cores

    def settle(self) -> None:
        """Add what the cores counted so far, as they end."""
        *_, self.cores_bytes = self.snapshot()
        self.cores_counts = self.cores_busy_s = None
