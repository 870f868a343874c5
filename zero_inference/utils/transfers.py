"""Counters of the bytes that a run moves and reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class ExpertCounts(NamedTuple):
    """Totals of the expert cache, for experts in host memory of which some are cached in device memory."""

    choices: int  # (token, expert) pairs
    hits: int  # choices whose expert was in device memory
    saved_bytes: int  # of experts that the CPU did not have to read because of hits
    fetched_bytes: int  # of experts that the device read over the link while the CPU computed the others


@dataclass
class Transfers:
    """Bytes moved so far by this rank; the code that moves them adds to the counters.

    Attributes:
        cpu_bytes: bytes of weights, keys and values that the CPU read from host memory.
        cores_counts: returns the bytes that only the CPU backend can count: experts that tokens chose.
        cores_busy_s: returns the seconds that the CPU has computed; None without a CPU backend, or if another rank counts.
        expert_counts: returns the totals of the expert cache; None without one.
    """

    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    disk_read_bytes: int = 0
    cpu_bytes: int = 0
    cores_counts: Callable[[], int] | None = None
    cores_busy_s: Callable[[], float] | None = None
    expert_counts: Callable[[], ExpertCounts] | None = None

    def snapshot(self) -> tuple[int, int, int, int]:
        """Return bytes so far: host to device, device to host, read from disk, read by the CPU."""
        cores = self.cpu_bytes + (0 if self.cores_counts is None else self.cores_counts())
        fetched = 0 if self.expert_counts is None else self.expert_counts().fetched_bytes
        return self.host_to_device_bytes + fetched, self.device_to_host_bytes, self.disk_read_bytes, cores

    def settle(self) -> None:
        """Add what the CPU backend counted, before it is closed."""
        *_, self.cpu_bytes = self.snapshot()
        self.cores_counts = self.cores_busy_s = None
