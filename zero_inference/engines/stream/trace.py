"""The timeline of copies and blocks, from which a run reports how long the link was idle and why."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.records.hardware import LinkUse

MAX_EVENTS = 8192  # copies and blocks that are stored, so that memory does not grow with a long generation


@dataclass
class BlockSpan:
    """The computation of a block, on the device or by the CPU; all times are events.

    Attributes:
        pass_start: when the first block of the same pass began.
        reached: when the device came to a streamed block, and began to wait for it.
        pass_index: number of the call of the model, 0 for the prefill.
    """

    block: int
    start: Any
    pass_start: Any
    end: Any = None
    reached: Any = None
    pass_index: int = 0


@dataclass
class Copy:
    """The copy of a block to the device; all times are events.

    Attributes:
        slot_free: after the last use of the slot.
        freed_by: the computation that used the slot before; None for an empty slot.
        pass_index: number of the call of the model in which it was requested, 0 for the prefill.
        first: it was the first request of this pass.
        gather: start and end of the all-gather after it; None for one rank.
    """

    block: int
    nbytes: int
    slot_free: Any
    freed_by: BlockSpan | None
    start: Any
    end: Any
    pass_index: int
    first: bool
    gather: tuple[Any, Any] | None = None


def _clamp(value: float, most: float) -> float:
    return min(most, max(0.0, value))


class Timeline:
    """Events of the latest generation. Recording one costs a microsecond of the host and nothing on the device.

    Args:
        names: of the blocks; "layer 0" and so on if empty.
    """

    def __init__(self, streams: DeviceStreams, names: Sequence[str] = ()):
        self.streams, self.names = streams, names
        self.is_paused = False
        self.restart()

    def restart(self) -> None:
        """Forget everything: a generation begins."""
        self.copies: deque[Copy] = deque(maxlen=MAX_EVENTS)
        self.spans: deque[BlockSpan] = deque(maxlen=MAX_EVENTS)
        self.origin = self.streams.record_event(self.streams.current())
        self.pass_index = -1
        self.pass_start: Any = None  # of the first block of this pass; None before it
        self.requested = 0  # copies in this pass
        self.ahead: list[Copy] = []  # of the first decode step, those that were requested before it
        self.prefill_end: Any = None

    def begin_pass(self, pending: int) -> None:
        """Begin a pass for which `pending` blocks were requested before."""
        self.pass_index += 1
        self.requested, self.pass_start = 0, None
        if self.pass_index == 1 and pending:
            self.ahead, self.prefill_end = list(self.copies)[-pending:], self.spans[-1].end

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no block within it: a capture computes nothing."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def latest_block(self) -> BlockSpan | None:
        return self.spans[-1] if self.spans else None

    def record_copy(
        self,
        block: int,
        nbytes: int,
        slot_free: Any,
        freed_by: BlockSpan | None,
        start: Any,
        end: Any,
        gather: tuple[Any, Any] | None = None,
    ) -> None:
        first = self.requested == 0
        self.copies.append(Copy(block, nbytes, slot_free, freed_by, start, end, self.pass_index, first, gather))
        self.requested += 1

    def block_reached(self) -> Any:
        """Return the event from which the device waits for a streamed block, for `block_begins`."""
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

    def link_use(self, first: int = 1) -> LinkUse | None:
        """Return what the link did in passes from `first` on, the gaps between copies by cause; None before the second copy there."""
        decode = [copy for copy in self.copies if copy.pass_index >= first]
        if len(decode) < 2:
            return None
        self.streams.synchronize()
        busy = slot_wait = host_late = step_start = 0.0
        for before, copy in zip(decode, decode[1:]):
            busy += self._between(copy.start, copy.end)
            gap = max(0.0, self._between(before.end, copy.start))
            between_passes = not_begun = until_free = 0.0
            if copy.freed_by is not None:
                between_passes = _clamp(self._between(before.end, copy.freed_by.pass_start), gap)
                not_begun = _clamp(self._between(before.end, copy.freed_by.start), gap)
            if copy.slot_free is not None:
                until_free = _clamp(self._between(before.end, copy.slot_free), gap)
            asked_late = gap - max(until_free, not_begun)
            step_start += between_passes + (asked_late if copy.first else 0.0)
            slot_wait += max(0.0, until_free - not_begun)
            host_late += not_begun - between_passes + (0.0 if copy.first else asked_late)
        return LinkUse(
            steps=decode[-1].pass_index - decode[0].pass_index + 1,
            busy_s=busy,
            slot_wait_s=slot_wait,
            host_late_s=host_late,
            step_start_s=step_start,
            copied_bytes=sum(copy.nbytes for copy in decode[1:]),
            ahead_bytes=self._ahead_bytes(),
        )

    def waited_for_link_s(self, first: int) -> float:
        """Return the seconds that the device waited for blocks to arrive, in passes from `first` on."""
        self.streams.synchronize()
        waits = [span for span in self.spans if span.pass_index >= first and span.reached is not None]
        return sum(self._between(span.reached, span.start) for span in waits)

    def _ahead_bytes(self) -> int:
        """Return the bytes that were copied for the first decode step before the prefill ended; a copy under way counts in part."""
        total = 0.0
        for copy in self.ahead:
            spent = self._between(copy.start, copy.end)
            total += copy.nbytes * (
                _clamp(self._between(copy.start, self.prefill_end), spent) / spent if spent else 1.0
            )
        return int(total)

    def write_chrome_trace(self, path: Path) -> None:
        """Write the events as a Chrome trace (chrome://tracing, Perfetto): a row each for copies, blocks and all-gathers, in microseconds.

        Format: Trace Event Format, complete events ("ph": "X").
        """
        self.streams.synchronize()
        rows = ("host to device copies", "blocks of decoder layers" if self.names else "decoder layers", "all-gathers")
        events: list[dict] = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in enumerate(rows)
        ]
        for copy in self.copies:
            seconds = self._between(copy.start, copy.end)
            rate = round(copy.nbytes / seconds / 1e9, 2) if seconds else None
            args = {"bytes": copy.nbytes, "GB/s": rate, "token": copy.pass_index}
            events.append(self._event(0, f"copy {self._name(copy.block)}", copy.start, copy.end) | {"args": args})
            if copy.gather is not None:
                events.append(self._event(2, f"gather {self._name(copy.block)}", *copy.gather))
        events += [
            self._event(1, self._name(span.block), span.start, span.end) for span in self.spans if span.end is not None
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _name(self, block: int) -> str:
        return self.names[block] if self.names else f"layer {block}"

    def _event(self, row: int, name: str, start: Any, end: Any) -> dict:
        times_us = {"ts": self._between(self.origin, start) * 1e6, "dur": self._between(start, end) * 1e6}
        return {"ph": "X", "pid": 0, "tid": row, "name": name, **times_us}

    @staticmethod
    def _between(earlier: Any, later: Any) -> float:
        """Return seconds."""
        return earlier.elapsed_time(later) / 1e3
