"""The timing helper: repeat, synchronize, take the median. Also captures CUDA graphs of what is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# By type of device: seconds of copies and products that a run measures around its loops, rows and columns of these products.
LINK_S, PRODUCT_S = {"cuda": 0.4, "cpu": 0.1}, {"cuda": 0.1, "cpu": 0.05}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}


def measure_median_s(device: torch.device, action: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of `action` on `device`, of three runs or more in at least `seconds`.

    Two runs before them warm up, or one if that took `seconds`.
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
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
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
