"""Streams and events of a device, with stand-ins for a CPU, where all work is done at once; and the timeline of copies and blocks.

The ring buffer is written against these, so that a machine without a GPU runs the same schedule.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_inference.records.hardware import LinkUse
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
    def wait(self, other: Any) -> None:
        pass

    wait_event = wait_stream = wait


class DeviceStreams:
    """Creates streams and events of `device`. A GPU's events keep their time, for the timeline; that costs nothing on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"

    def stream(self):
        return torch.cuda.Stream(self.device) if self.on_gpu else HostStream()

    def current(self):
        return torch.cuda.current_stream(self.device) if self.on_gpu else HostStream()

    def blocking_event(self):
        """Return an event without a time, whose `synchronize` leaves the CPU core to other threads."""
        return torch.cuda.Event(blocking=True) if self.on_gpu else HostEvent()

    def record_event(self, stream):
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else HostEvent()
        event.record(stream)
        return event

    def on(self, stream):
        return torch.cuda.stream(stream) if self.on_gpu else contextlib.nullcontext()

    def make_current(self, stream) -> None:
        if self.on_gpu:
            torch.cuda.set_stream(stream)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class ComputeStreams:
    """Runs every call of a module on own streams, one a device, in order with the caller's work before and after. A call begins and ends
    on the first device.

    On H200s that copy at once, copies are 2 to 4% slower where kernels run on the caller's stream, and where the host reads a result
    before it is there: callers of a language model choose a token and read it, and that read waits in a copy engine of the GPU. Only
    both changes together help, which is measured and not explained (benchmarks/LOG.md). One GPU alone loses nothing, and does not wait.
    """

    def __init__(self, module: nn.Module, devices: Sequence[DeviceStreams]):
        self.devices = devices
        self.streams = [device.stream() for device in devices]
        self.done = devices[0].blocking_event() if len(devices) > 1 else None
        self.caller_streams: list[Any] = []  # during a call
        self.device = 0  # index of the current one
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

    def enter(self, device: int) -> None:
        """Make the stream of `device`, and the device itself, current."""
        self.device = device
        self.devices[device].make_current(self.streams[device])

    def _begin(self, module, args) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self.device, self.caller_streams = 0, [device.current() for device in self.devices]
        for device, stream, caller in reversed(list(zip(self.devices, self.streams, self.caller_streams))):
            stream.wait_stream(caller)
            device.make_current(stream)

    def _end(self, module, args, output) -> None:
        if not self.depth:
            return  # the call failed before it began
        self.depth -= 1
        if self.depth:
            return
        for device, stream, caller in reversed(list(zip(self.devices, self.streams, self.caller_streams))):
            caller.wait_stream(stream)
            device.make_current(caller)
        if self.done is not None:
            self.done.record(self.streams[0])
            self.done.synchronize()


MAX_EVENTS = 8192  # copies and blocks that are stored, so that memory does not grow with a long generation


@dataclass
class BlockSpan:
    """The computation of a block, on the device or by the CPU; all times are events, `pass_index` is 0 for the prefill."""

    block: int
    start: Any
    pass_start: Any  # when the first block of the same pass began
    end: Any = None
    reached: Any = None  # when the device began to wait for a streamed block
    pass_index: int = 0


@dataclass
class Copy:
    """The copy of a block to the device; all times are events."""

    block: int
    nbytes: int
    slot_free: Any  # end of the slot's last use
    freed_by: BlockSpan | None  # the computation that used the slot before; None for an empty slot
    start: Any
    end: Any
    pass_index: int = 0  # of the pass in which it was requested, 0 for the prefill
    first: bool = False  # the first request of this pass


def thread_name(row: int, name: str) -> dict[str, Any]:
    """Return the event of a Chrome trace that names a row."""
    return {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}


def _clamp(value: float, upper: float) -> float:
    return min(upper, max(0.0, value))


class DeviceTimeline:
    """Events of the copies to one device, and of its blocks, in the latest generation. Recording one takes the host a microsecond and the
    device nothing."""

    def __init__(self, streams: DeviceStreams):
        self.streams = streams
        self.is_paused = False
        self.restart()

    def restart(self) -> None:
        self.copies: deque[Copy] = deque(maxlen=MAX_EVENTS)
        self.spans: deque[BlockSpan] = deque(maxlen=MAX_EVENTS)
        self.origin = self.streams.record_event(self.streams.current())
        self.pass_index = -1
        self.pass_start: Any = None  # of the first block of this pass; None before it
        self.requested = 0  # copies in this pass
        self.early_copies: list[Copy] = []  # those for the first decode step that were requested during the prefill
        self.prefill_end: Any = None  # event

    def begin_pass(self, pending: int) -> None:
        """Note that a pass begins, for which the last `pending` copies were requested in the pass before."""
        self.pass_index += 1
        self.requested, self.pass_start = 0, None
        # the first decode step, and the prefill, unless it failed, requested its first copies
        if self.pass_index == 1 and pending and self.spans and self.spans[-1].end is not None:
            self.early_copies, self.prefill_end = list(self.copies)[-pending:], self.spans[-1].end

    def record_copy(self, copy: Copy) -> None:
        copy.pass_index, copy.first = self.pass_index, self.requested == 0
        self.copies.append(copy)
        self.requested += 1

    def block_reached(self) -> Any:
        """Return the event at which the device begins to wait for a streamed block, the argument of `block_begins`."""
        return None if self.is_paused else self.streams.record_event(self.streams.current())

    def block_begins(self, block: int, reached: Any = None) -> None:
        if self.is_paused:
            return
        start = self.streams.record_event(self.streams.current())
        if self.pass_start is None:
            self.pass_start = start
        self.spans.append(BlockSpan(block, start, self.pass_start, reached=reached, pass_index=self.pass_index))

    def block_ends(self) -> None:
        if not self.is_paused:
            self.spans[-1].end = self.streams.record_event(self.streams.current())

    def link_use(self, first_pass: int = 1) -> LinkUse | None:
        """Return how long the link was busy, and idle by cause, in passes from `first_pass` on; None with fewer than two copies.

        Times begin at the end of the first copy. The idle time before a copy is divided in order: until the pass began that freed its slot
        (`step_start_s`), until that pass began the block in the slot (`host_late_s`), until the block was done (`slot_wait_s`), and until
        the host requested the copy (`host_late_s`, or `step_start_s` for the first request of a pass).
        """
        copies = [copy for copy in self.copies if copy.pass_index >= first_pass]
        if len(copies) < 2:
            return None
        self.streams.synchronize()
        busy = slot_wait = host_late = step_start = 0.0
        for before, copy in zip(copies, copies[1:]):
            busy += self._between(copy.start, copy.end)
            idle = max(0.0, self._between(before.end, copy.start))
            until_pass = until_block = until_free = 0.0  # seconds from the end of the copy before, at most `idle`
            if copy.freed_by is not None:
                until_pass = _clamp(self._between(before.end, copy.freed_by.pass_start), idle)
                until_block = _clamp(self._between(before.end, copy.freed_by.start), idle)
            if copy.slot_free is not None:
                until_free = _clamp(self._between(before.end, copy.slot_free), idle)
            request_late = idle - max(until_free, until_block)
            step_start += until_pass + (request_late if copy.first else 0.0)
            slot_wait += max(0.0, until_free - until_block)
            host_late += until_block - until_pass + (0.0 if copy.first else request_late)
        early_bytes = 0.0  # copied for the first decode step before the prefill ended; of a copy in progress, its part
        for copy in self.early_copies:
            copy_s = self._between(copy.start, copy.end)
            done_s = _clamp(self._between(copy.start, self.prefill_end), copy_s)
            early_bytes += copy.nbytes * (done_s / copy_s if copy_s else 1.0)
        return LinkUse(
            steps=copies[-1].pass_index - copies[0].pass_index + 1,
            busy_s=busy,
            slot_wait_s=slot_wait,
            host_late_s=host_late,
            step_start_s=step_start,
            copied_bytes=sum(copy.nbytes for copy in copies[1:]),
            ahead_bytes=int(early_bytes),
        )

    def waited_for_link_s(self, first_pass: int) -> float:
        self.streams.synchronize()
        waits = [span for span in self.spans if span.pass_index >= first_pass and span.reached is not None]
        return sum(self._between(span.reached, span.start) for span in waits)

    def trace_events(self, names: Sequence[str], first_row: int, suffix: str) -> list[dict[str, Any]]:
        """Return the events of a Chrome trace, in a row for copies and one for blocks."""
        self.streams.synchronize()
        rows = (f"host to device copies{suffix}", f"blocks of decoder layers{suffix}")
        events: list[dict] = [thread_name(first_row + row, name) for row, name in enumerate(rows)]
        for copy in self.copies:
            seconds = self._between(copy.start, copy.end)
            rate = round(copy.nbytes / seconds / 1e9, 2) if seconds else None
            args = {"bytes": copy.nbytes, "GB/s": rate, "token": copy.pass_index}
            events.append(
                self.trace_event(first_row, f"copy {names[copy.block]}", copy.start, copy.end) | {"args": args}
            )
        ended = (span for span in self.spans if span.end)
        return events + [self.trace_event(first_row + 1, names[span.block], span.start, span.end) for span in ended]

    def trace_event(self, row: int, name: str, start: Any, end: Any) -> dict:
        times_us = {"ts": self._between(self.origin, start) * 1e6, "dur": self._between(start, end) * 1e6}
        return {"ph": "X", "pid": 0, "tid": row, "name": name, **times_us}

    @staticmethod
    def _between(earlier: Any, later: Any) -> float:
        return earlier.elapsed_time(later) / 1e3


class Timeline:
    """The timelines of all devices, from which a run reports how long the links were idle and why."""

    def __init__(self, devices: Sequence[DeviceStreams], names: Sequence[str] = ()):
        self.devices = [DeviceTimeline(streams) for streams in devices]
        self.names = names
        self.spans: deque[tuple[str, Any, Any]] = deque(maxlen=MAX_EVENTS)  # name, and events of begin and end

    @property
    def pass_index(self) -> int:
        return self.devices[0].pass_index

    @property
    def is_paused(self) -> bool:
        return self.devices[0].is_paused

    def restart(self) -> None:
        for device in self.devices[1:]:
            device.streams.synchronize()  # their times begin together
        self.spans.clear()
        for device in self.devices:
            device.restart()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note the time of the `with` block on the first device, under a name."""
        streams = self.devices[0].streams
        start = streams.record_event(streams.current())
        yield
        self.spans.append((name, start, streams.record_event(streams.current())))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no blocks inside the `with` block: a graph capture computes nothing."""
        for device in self.devices:
            device.is_paused = True
        try:
            yield
        finally:
            for device in self.devices:
                device.is_paused = False

    def by_device(self, first_pass: int = 1) -> list[LinkUse | None]:
        """Return the `DeviceTimeline.link_use` of each device."""
        return [device.link_use(first_pass) for device in self.devices]

    def link_use(self, first_pass: int = 1) -> LinkUse | None:
        """Return the sums of seconds and bytes over all links; None where none has two copies."""
        uses = [use for use in self.by_device(first_pass) if use is not None]
        if len(uses) < 2:
            return next(iter(uses), None)
        names = "busy_s slot_wait_s host_late_s step_start_s copied_bytes ahead_bytes".split()
        sums: dict[str, Any] = {name: sum(getattr(use, name) for use in uses) for name in names}
        return LinkUse(steps=max(use.steps for use in uses), **sums)

    def waited_for_link_s(self, first_pass: int) -> float:
        return sum(device.waited_for_link_s(first_pass) for device in self.devices)

    def write_chrome_trace(self, path: Path) -> None:
        """Write the events as a Chrome trace (chrome://tracing, Perfetto): for each device a row of copies and one of blocks, and with
        speculation a row of drafts and passes."""
        events: list[dict[str, Any]] = []
        last_row = 2 * len(self.devices)
        if self.spans:
            events.append(thread_name(last_row, "drafts and passes"))
        for index, device in enumerate(self.devices):
            events += device.trace_events(self.names, 2 * index, f", GPU {index}" if len(self.devices) > 1 else "")
        events += [self.devices[0].trace_event(last_row, *span) for span in self.spans]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
