"""Progress on stderr: a live line or bar on a terminal, a plain line every few seconds elsewhere, nothing at --verbose 0."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_inference.runtime.text import printable

if TYPE_CHECKING:  # rich is imported where a terminal is there to show it
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.status import Status

QUIET_S = 10.0


class Progress:
    """What is going on, for the person who waits. Only the first rank speaks."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._console: Console | None = None
        self._live: Status | Bar | None = None
        self._shown = time.monotonic()
        if enabled and sys.stderr.isatty():
            from rich.console import Console

            self._console = Console(stderr=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        line = printable(line)
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False)
        elif self.enabled:
            with contextlib.suppress(OSError):  # whoever read it is gone: the run goes on
                print(line, file=sys.stderr, flush=True)

    def update(self, line: str) -> None:
        """A line that the next one replaces."""
        if self._console is not None:
            from rich.status import Status

            if isinstance(self._live, Status):
                self._live.update(line)
            else:
                self._show(self._console.status(line))
        elif self.enabled and time.monotonic() - self._shown > QUIET_S:
            self._shown = time.monotonic()
            self.say(line)

    def loading(self, total_bytes: int) -> Callable[[int], None]:
        """A callback that takes the bytes of each parameter and shows how loading goes, in GB and GB/s of 1e9 bytes."""
        loaded, start = 0, time.monotonic()
        bar = self._loading_bar(total_bytes) if self._console is not None else None

        def advance(nbytes: int) -> None:
            nonlocal loaded
            loaded += nbytes
            rate = loaded / max(time.monotonic() - start, 1e-9) / 1e9
            words = f"{loaded / 1e9:.1f} of {total_bytes / 1e9:.1f} GB ({rate:.1f} GB/s)"
            if bar is not None:
                bar.update(bar.task_ids[0], completed=loaded, words=words)
            else:
                self.update(f"loading {words}")

        return advance

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._show(None)

    def _loading_bar(self, total_bytes: int) -> Bar:
        """With one task."""
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("loading"),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._show(bar)
        bar.add_task("loading", total=total_bytes, words="")
        return bar

    def _show(self, live: Status | Bar | None) -> None:
        """At most one live display at a time."""
        if self._live is not None:
            self._live.stop()
        self._live = live
        if live is not None:
            live.start()
