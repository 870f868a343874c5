"""Time device and host work: repeat, synchronize, take the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def capture_graph(device: torch.device, action: Callable[[], object]) -> Callable[[], object]:
    """What repeats the kernels of `action`."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        action()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        action()
    return graph.replay


def measure_median_s(device: torch.device, action: Callable[[], object], seconds: float) -> float:
    """Median duration of `action` in seconds, of at least three; two before them are not counted, or one that took as long as all may."""
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds
    if timed(device, action) < seconds:
        timed(device, action)
    spent: list[float] = []
    stop = time.perf_counter() + seconds
    while len(spent) < 3 or time.perf_counter() < stop:
        spent.append(timed(device, action))
    return statistics.median(spent)


def _cuda_seconds(device: torch.device, action: Callable[[], object]) -> float:
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def _host_seconds(device: torch.device, action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_once_s(device: torch.device, action: Callable[[], object]) -> float:
    """Of one action, until the device has done it."""
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
