"""Counters of what is moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Transfers:
    """Bytes moved so far by this rank, raised by whoever moves them."""

    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    disk_read_bytes: int = 0

    def snapshot(self) -> tuple[int, int, int]:
        return self.host_to_device_bytes, self.device_to_host_bytes, self.disk_read_bytes
