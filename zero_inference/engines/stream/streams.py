"""Streams and events of a device, and what stands for them on a CPU, where everything happens at once.

The ring is written against these, so that a CPU-only machine runs the same schedule as a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class HostEvent:
    """A moment on the host clock, with the methods of `torch.cuda.Event` that are used here."""

    def __init__(self) -> None:
        self.time_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds from this event to `later`."""
        return (later.time_s - self.time_s) * 1e3

    def synchronize(self) -> None:
        """Nothing to wait for: what was asked of a CPU is done."""


class HostStream:
    """The order of calls on a CPU."""

    def wait_event(self, event: HostEvent) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class DeviceStreams:
    """Makes streams and events for `device`.

    Events of a GPU keep the time, which costs nothing on the device: they tell afterwards where the link stood idle.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"

    def stream(self):
        return torch.cuda.Stream(self.device) if self.on_gpu else HostStream()

    def current(self):
        """The stream on which the model computes."""
        return torch.cuda.current_stream(self.device) if self.on_gpu else HostStream()

    def event(self):
        return torch.cuda.Event(enable_timing=True) if self.on_gpu else HostEvent()

    def blocking_event(self):
        """An event without a time, whose `synchronize` leaves the core to others."""
        return torch.cuda.Event(blocking=True) if self.on_gpu else HostEvent()

    def record_event(self, stream):
        """A new event behind everything that `stream` was given so far."""
        event = self.event()
        event.record(stream)
        return event

    def on(self, stream):
        """Context in which work goes to `stream`."""
        return torch.cuda.stream(stream) if self.on_gpu else contextlib.nullcontext()

    def make_current(self, stream) -> None:
        """Let work of this thread go to `stream` from now on."""
        if self.on_gpu:
            torch.cuda.set_stream(stream)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class ComputeStream:
    """Makes every call of a module compute on a stream of its own, in order with what the caller asked before and asks after.

    On H200s that copy at once, copies are 2 to 4% slower where kernels run on the caller's stream, and where the host reads a
    result before it is there: what a caller does with the output of a language model is to choose a token and read it, and the
    read waits in a copy engine of the GPU. Only both together help, which is measured and not explained (docs/performance.md).
    One GPU alone loses nothing.

    Args:
        host_waits: a call returns, to the host too, when its layers are done.
    """

    def __init__(self, module: nn.Module, streams: DeviceStreams, host_waits: bool):
        self.streams, self.stream = streams, streams.stream()
        self.done = streams.blocking_event() if host_waits else None
        self.callers: Any = None  # while a call is under way
        self.depth = 0  # of calls and of `entered`, which a step that is repeated as a graph is within its call
        self.hooks = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Send all work within it to this stream, in order with the caller's before and after."""
        self._begin(None, ())
        try:
            yield
        finally:
            self._end(None, (), None)

    def _begin(self, module, args) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self.callers = self.streams.current()
        self.stream.wait_stream(self.callers)
        self.streams.make_current(self.stream)

    def _end(self, module, args, output) -> None:
        if not self.depth:
            return  # the call broke off before it began
        self.depth -= 1
        if self.depth:
            return
        self.callers.wait_stream(self.stream)
        self.streams.make_current(self.callers)
        self.callers = None
        if self.done is not None:
            self.done.record(self.stream)
            self.done.synchronize()
