"""Progress on stderr: a live line or bar on a terminal, a plain line every few seconds elsewhere, nothing at --verbose 0."""

from __future__ import annotations

import contextlib
import sys
import time

from zero_inference.runtime.text import printable

QUIET_S = 10.0


class Progress:
    """What is going on, for the person who waits. Only the first rank speaks."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._console = self._live = None
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

            if not isinstance(self._live, Status):
                self._show(self._console.status(line))
            self._live.update(line)
        elif self.enabled and time.monotonic() - self._shown > QUIET_S:
            self._shown = time.monotonic()
            self.say(line)

    def loading(self, total_bytes: int):
        """A callback that takes the bytes of each parameter and shows how loading goes, in GB and GB/s of 1e9 bytes."""
        loaded, start = 0, time.monotonic()
        task = self._loading_bar(total_bytes) if self._console is not None else None

        def advance(nbytes: int) -> None:
            nonlocal loaded
            loaded += nbytes
            rate = loaded / max(time.monotonic() - start, 1e-9) / 1e9
            words = f"{loaded / 1e9:.1f} of {total_bytes / 1e9:.1f} GB ({rate:.1f} GB/s)"
            if task is not None:
                self._live.update(task, completed=loaded, words=words)
            else:
                self.update(f"loading {words}")

        return advance

    def close(self) -> None:
        self._show(None)

    def _loading_bar(self, total_bytes: int):
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._show(
            Bar(
                TextColumn("loading"),
                BarColumn(),
                TextColumn("{task.fields[words]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
        )
        return self._live.add_task("loading", total=total_bytes, words="")

    def _show(self, live) -> None:
        """At most one live display at a time."""
        if self._live is not None:
            self._live.stop()
        self._live = live
        if live is not None:
            live.start()
