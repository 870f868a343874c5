"""Timers of device work, CUDA graphs of what is timed, and counters of the bytes that a run moves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# For measurements around a run's loops, by type of device: seconds of link copies and of matrix products; n of an [n, n] product.
LINK_S, PRODUCT_S = {"cuda": 0.4, "cpu": 0.1}, {"cuda": 0.1, "cpu": 0.05}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}


def measure_median_s(device: torch.device, action: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of `action` on `device`, of three runs or more in at least `seconds`.

    Two warm-up runs come first, or one if it took `seconds`.
    """
    if time_on_device_s(device, action) < seconds:
        time_on_device_s(device, action)
    times_s: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times_s) < 3 or time.perf_counter() < stop:
        times_s.append(time_on_device_s(device, action))
    return statistics.median(times_s)


def time_on_device_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds of one run: between two events on CUDA, else by the host's clock."""
    if device.type != "cuda":
        return time_wall_s(device, action)
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_wall_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds of one run by the host's clock, from an idle device to an idle device."""
    synchronize([device])
    start = time.perf_counter()
    action()
    synchronize([device])
    return time.perf_counter() - start


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until the GPUs of `devices` are idle."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def capture_graph(device: torch.device, action: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays the kernels of `action` as a CUDA graph."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        action()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        action()
    return graph.replay


class ExpertCounts(NamedTuple):
    """Totals of the expert caches: that on the device, and, where experts are on disk, that in host memory."""

    choices: int = 0  # (token, expert) pairs
    hits: int = 0  # choices whose expert was in device memory
    saved_bytes: int = 0  # of experts that the CPU did not have to read because of hits
    fetched_bytes: int = 0  # of experts that the device read over the link while the CPU computed the others
    host_choices: int = 0  # choices that were not in device memory, where experts may be on disk
    host_hits: int = 0  # those of them whose expert was in host memory


@dataclass
class Transfers:
    """Bytes moved so far by this rank; the code that moves them adds to the counters."""

    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    disk_read_bytes: int = 0
    cpu_bytes: int = 0  # of weights, keys and values that the CPU read from host memory
    cpu_counted_bytes: Callable[[], int] | None = None  # read by the CPU backend and counted there: routed experts
    cpu_busy_s: Callable[[], float] | None = None  # of the CPU backend; None without one, or if another rank counts
    expert_counts: Callable[[], ExpertCounts] | None = None  # totals of the expert cache; None without one

    def snapshot(self) -> tuple[int, int, int, int]:
        """Return bytes so far: host to device, device to host, read from disk, read by the CPU."""
        cpu_bytes = self.cpu_bytes + (0 if self.cpu_counted_bytes is None else self.cpu_counted_bytes())
        fetched = 0 if self.expert_counts is None else self.expert_counts().fetched_bytes
        return self.host_to_device_bytes + fetched, self.device_to_host_bytes, self.disk_read_bytes, cpu_bytes

    def keep_cpu_counts(self) -> None:
        """Add what the CPU backend counted to `cpu_bytes`, before it is closed."""
        *_, self.cpu_bytes = self.snapshot()
        self.cpu_counted_bytes = self.cpu_busy_s = None
