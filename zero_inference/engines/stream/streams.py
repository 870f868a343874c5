"""Streams and events of a device, with stand-ins for a CPU, where all work is done at once.

The ring buffer is written against these, so that a machine without a GPU runs the same schedule.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zero_inference.utils.patching import Patches


class HostEvent:
    """A time of the host clock, with the methods of `torch.cuda.Event` that are used here."""

    def __init__(self) -> None:
        self.time_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        """Return the milliseconds from this event to `later`."""
        return (later.time_s - self.time_s) * 1e3

    def synchronize(self) -> None:
        pass  # a CPU has done what was queued


class HostStream:
    """The stream of a CPU, on which nothing has to wait."""

    def wait_event(self, event: HostEvent) -> None:
        pass

    def wait_stream(self, stream: HostStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class DeviceStreams:
    """Creates streams and events of `device`. Events of a GPU keep their time, for the trace; that costs nothing on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"

    def stream(self):
        return torch.cuda.Stream(self.device) if self.on_gpu else HostStream()

    def current(self):
        """Return the stream on which the model computes."""
        return torch.cuda.current_stream(self.device) if self.on_gpu else HostStream()

    def event(self):
        return torch.cuda.Event(enable_timing=True) if self.on_gpu else HostEvent()

    def blocking_event(self):
        """Return an event without a time, whose `synchronize` leaves the CPU core to other threads."""
        return torch.cuda.Event(blocking=True) if self.on_gpu else HostEvent()

    def record_event(self, stream):
        """Return a new event after everything queued on `stream` so far."""
        event = self.event()
        event.record(stream)
        return event

    def on(self, stream):
        """Return a context in which work goes to `stream`."""
        return torch.cuda.stream(stream) if self.on_gpu else contextlib.nullcontext()

    def make_current(self, stream) -> None:
        if self.on_gpu:
            torch.cuda.set_stream(stream)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class ComputeStream:
    """Runs every call of a module on its own stream, in order with the caller's work before and after.

    On H200s that copy at once, copies are 2 to 4% slower where kernels run on the caller's stream, and where the host reads a result
    before it is there: callers of a language model choose a token and read it, and that read waits in a copy engine of the GPU. Only
    both changes together help, which is measured and not explained (benchmarks/LOG.md). One GPU alone loses nothing.

    Args:
        host_waits: a call returns when its layers are done on the device.
    """

    def __init__(self, module: nn.Module, streams: DeviceStreams, host_waits: bool):
        self.streams, self.stream = streams, streams.stream()
        self.done = streams.blocking_event() if host_waits else None
        self.callers: Any = None  # stream of the caller, during a call
        self.depth = 0  # of calls and of `entered`: a graph is replayed within the call of its step
        self.patches = Patches()
        self.patches.add_hooks(
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        )

    def close(self) -> None:
        self.patches.close()

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
            return  # the call failed before it began
        self.depth -= 1
        if self.depth:
            return
        self.callers.wait_stream(self.stream)
        self.streams.make_current(self.callers)
        self.callers = None
        if self.done is not None:
            self.done.record(self.stream)
            self.done.synchronize()
