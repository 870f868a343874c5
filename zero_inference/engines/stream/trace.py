"""When each layer was copied and computed, so that a run can say where the link stood idle and why."""

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

KEPT = 8192  # copies and layers; older ones are forgotten, so that a long generation does not grow


@dataclass
class BlockSpan:
    """One block's computation, on the device or by the cores.

    Attributes:
        pass_start: when the first block of the same call of the model began.
        reached: when the device came to a block that is fetched, and began to wait for it.
        pass_index: which call of the model it is part of, 0 for the prefill.
    """

    block: int
    start: Any
    pass_start: Any
    end: Any = None
    reached: Any = None
    pass_index: int = 0


@dataclass
class Copy:
    """One block's copy to the device; events of the copy stream, and the one that the slot waited for.

    Attributes:
        freed_by: the computation that used the slot before; None for a slot that was empty.
        pass_index: which call of the model it was asked in, 0 for the prefill.
        first: the first that was asked for in this call.
        gather: start and end of the all-gather behind it; None for one rank.
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


def within(most: float, value: float) -> float:
    return min(most, max(0.0, value))


class Timeline:
    """Events of the latest generation. Recording one costs a microsecond of the host and nothing on the device.

    Args:
        names: of the blocks; "layer 0" and so on where not given.
    """

    def __init__(self, streams: DeviceStreams, names: Sequence[str] = ()):
        self.streams, self.names = streams, names
        self.is_paused = False
        self.restart()

    def restart(self) -> None:
        """Forget everything: a generation begins."""
        self.copies: deque[Copy] = deque(maxlen=KEPT)
        self.spans: deque[BlockSpan] = deque(maxlen=KEPT)
        self.origin = self.streams.record_event(self.streams.current())
        self.pass_index = -1
        self.pass_start: Any = None  # of the first block of this call of the model; None before it
        self.asked = 0  # copies in this call of the model
        self.ahead: list[Copy] = []  # those of the first decode step that were asked for before it
        self.prefill_end: Any = None

    def begin_pass(self, pending: int) -> None:
        """A call of the model, for which `pending` blocks have been asked already."""
        self.pass_index += 1
        self.asked, self.pass_start = 0, None
        if self.pass_index == 1 and pending:
            self.ahead, self.prefill_end = list(self.copies)[-pending:], self.spans[-1].end

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it no block is recorded: what is asked for is not computed now."""
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
        self.copies.append(
            Copy(block, nbytes, slot_free, freed_by, start, end, self.pass_index, self.asked == 0, gather)
        )
        self.asked += 1

    def block_reached(self) -> Any:
        """The moment from which the device waits for a block that is fetched, for `block_begins`."""
        return None if self.is_paused else self.streams.record_event(self.streams.current())

    def block_begins(self, block: int, reached: Any = None) -> None:
        if self.is_paused:
            return
        start = self.streams.record_event(self.streams.current())
        if self.pass_start is None:
            self.pass_start = start
        self.spans.append(BlockSpan(block, start, self.pass_start, reached=reached, pass_index=self.pass_index))

    def block_ends(self) -> None:
        if self.is_paused:
            return
        self.spans[-1].end = self.streams.record_event(self.streams.current())

    def link_use(self, first: int = 1) -> LinkUse | None:
        """What the link did in the decode steps from call `first` of the model on; None before the second copy there."""
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
                between_passes = within(gap, self._between(before.end, copy.freed_by.pass_start))
                not_begun = within(gap, self._between(before.end, copy.freed_by.start))
            if copy.slot_free is not None:
                until_free = within(gap, self._between(before.end, copy.slot_free))
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
        """Seconds that the device waited for blocks to arrive, from call `first` of the model on."""
        self.streams.synchronize()
        waits = [span for span in self.spans if span.pass_index >= first and span.reached is not None]
        return sum(self._between(span.reached, span.start) for span in waits)

    def _ahead_bytes(self) -> int:
        """Copies that were half done count by the share of their time."""
        total = 0.0
        for copy in self.ahead:
            spent = self._between(copy.start, copy.end)
            total += copy.nbytes * (
                within(spent, self._between(copy.start, self.prefill_end)) / spent if spent else 1.0
            )
        return int(total)

    def write_chrome_trace(self, path: Path) -> None:
        """Write what is kept as a Chrome trace: a row each for copies, layers and all-gathers. Times in microseconds.

        Format: Trace Event Format, complete events ("ph": "X"); chrome://tracing and Perfetto read it.
        """
        self.streams.synchronize()
        events: list[dict] = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in (
                (0, "host to device copies"),
                (1, "blocks of decoder layers" if self.names else "decoder layers"),
                (2, "all-gathers"),
            )
        ]
        for copy in self.copies:
            seconds = self._between(copy.start, copy.end)
            events.append(
                self._span(0, f"copy {self._name(copy.block)}", copy.start, copy.end)
                | {
                    "args": {
                        "bytes": copy.nbytes,
                        "GB/s": round(copy.nbytes / seconds / 1e9, 2) if seconds else None,
                        "token": copy.pass_index,
                    }
                }
            )
            if copy.gather is not None:
                events.append(self._span(2, f"gather {self._name(copy.block)}", *copy.gather))
        events += [
            self._span(1, self._name(span.block), span.start, span.end) for span in self.spans if span.end is not None
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _name(self, block: int) -> str:
        return self.names[block] if self.names else f"layer {block}"

    def _span(self, row: int, name: str, start: Any, end: Any) -> dict:
        return {
            "ph": "X",
            "pid": 0,
            "tid": row,
            "name": name,
            "ts": self._between(self.origin, start) * 1e6,
            "dur": self._between(start, end) * 1e6,
        }

    @staticmethod
    def _between(earlier: Any, later: Any) -> float:
        return earlier.elapsed_time(later) / 1e3
