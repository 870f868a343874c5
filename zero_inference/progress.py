"""Progress on stderr: a live line on a terminal, a plain line every few seconds elsewhere, nothing at --verbose 0."""

from __future__ import annotations

import sys
import time

QUIET_S = 10.0


class Progress:
    """What is going on, for the person who waits. Only the first rank speaks."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._status = None
        self._shown = time.monotonic()
        self._loaded_bytes, self._load_start = 0, time.monotonic()
        if enabled and sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("")
            self._status.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.enabled:
            print(line, file=sys.stderr, flush=True)

    def update(self, line: str) -> None:
        """A line that the next one replaces."""
        if self._status is not None:
            self._status.update(line)
        elif self.enabled and time.monotonic() - self._shown > QUIET_S:
            self._shown = time.monotonic()
            self.say(line)

    def loading(self, total_bytes: int):
        """A callback that takes the bytes of each parameter and shows how loading goes."""
        self._loaded_bytes, self._load_start = 0, time.monotonic()

        def advance(nbytes: int) -> None:
            self._loaded_bytes += nbytes
            rate = self._loaded_bytes / max(time.monotonic() - self._load_start, 1e-9) / 1e9
            self.update(f"loading {self._loaded_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB ({rate:.1f} GB/s)")

        return advance

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
