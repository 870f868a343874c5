"""Progress on stderr: a live line on a terminal, a plain line at most every ten seconds elsewhere, nothing at --verbose 0.

A command that takes long installs a `Progress` with `use_progress`; what it calls gets it from `current_progress`, which is silent if
no command did. So library calls stay quiet.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zero_inference.utils.format import GIB, format_duration, format_time_left, printable

QUIET_S = 10.0  # between two plain lines, and before the first one
TICK_S = 1.0
SLOW_IMPORT_S = 2.0


class Progress:
    """The progress output of a command. Only the first rank enables it."""

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.monotonic):
        self.enabled, self.clock = enabled, clock
        self.live_terminal = enabled and sys.stderr.isatty()
        self.live_line = ""
        self._live: Any = None  # rich.live.Live while there is a live line
        self._tasks: list[Task] = []
        self._lock = threading.RLock()  # a task may show itself from its thread

    def say(self, line: str) -> None:
        """Print a line that stays on the terminal."""
        with self._lock, contextlib.suppress(OSError):  # the reader of stderr is gone: the run goes on
            self.close()
            if self.enabled:
                print(printable(line), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def task(
        self, name: str, total: float | None = None, *, after_s: float | None = None, ticking: bool = False
    ) -> Iterator[Task]:
        """Yield a task that is shown until the block ends. Of nested tasks the innermost is shown.

        Args:
            total: units of work, if known; time per unit gives the time left.
            after_s: show nothing before. None shows it at once on a terminal, and after `QUIET_S` elsewhere.
            ticking: refresh it every second, for work that does not call `Task.at`.
        """
        task, ended = Task(self, name, total, after_s), threading.Event()

        def tick() -> None:
            while not ended.wait(TICK_S):
                with self._lock:
                    if not ended.is_set():  # or it would show a line that was just taken away
                        task.refresh()

        with self._lock:
            self._tasks.append(task)
        if ticking and self.enabled:
            threading.Thread(target=tick, daemon=True).start()
        try:
            yield task
        finally:
            ended.set()
            with self._lock:
                self._tasks.remove(task)
                self.close()

    def slow(self, name: str, after_s: float) -> contextlib.AbstractContextManager[Task]:
        """Return a task that is mentioned ("NAME ...") only if it takes longer than `after_s`."""
        return self.task(name, after_s=after_s, ticking=True)

    def loading(self, total_bytes: int) -> Callable[[int], None]:
        """Return a callback that takes the bytes of each loaded parameter."""
        task = Task(self, "loading weights", total_bytes)

        def add(nbytes: int) -> None:
            done = task.done + nbytes
            task.at(f"{done / GIB:.1f} of {max(total_bytes, done) / GIB:.1f} GiB", done)

        return add

    def close(self) -> None:
        """Remove the live line from the terminal; the next update shows it again."""
        with self._lock, contextlib.suppress(OSError):  # the terminal is gone
            live, self._live, self.live_line = self._live, None, ""
            if live is not None:
                live.stop()

    def show(self, task: Task) -> None:
        """Show the line of `task`: in place of the live line on a terminal, printed elsewhere."""
        if not self.live_terminal:
            return self.say(task.line())
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with self._lock, contextlib.suppress(OSError):
            if task in self._tasks[:-1]:
                return
            self.live_line = printable(task.line())
            if self._live is None:
                # stdout is for results, which may go elsewhere: rich would redirect it to the terminal too
                console = Console(stderr=True)
                self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
                self._live.start()
            # Text, not str: [...] is no markup
            self._live.update(Text(self.live_line, no_wrap=True, overflow="ellipsis"), refresh=True)


class Task:
    """A long piece of work: how far it is, and how long it still takes. See `Progress.task`."""

    def __init__(self, progress: Progress, name: str, total: float | None, after_s: float | None = None):
        self.progress, self.name, self.total, self.done = progress, name, total, 0.0
        self._start = self._since = progress.clock()
        self._words: str | None = None
        self._left_s: float | None = None
        self._every_s, first_s = (TICK_S / 10, 0.0) if progress.live_terminal else (QUIET_S, QUIET_S)
        self._next_shown = self._start + (first_s if after_s is None else after_s)

    def at(self, words: str, done: float | None = None, left_s: float | None = None) -> None:
        """Report what is under way.

        Args:
            done: units that are finished; unchanged if None.
            left_s: seconds from now to the end, where time per unit does not predict it.
        """
        with self.progress._lock:
            self._words = words
            if done is not None and done != self.done or left_s is not None:
                self._since, self._left_s = self.progress.clock(), left_s
                self.done = self.done if done is None else done
        self.refresh()

    def left_s(self) -> float | None:
        """Return the seconds left; None if unknown yet."""
        waited = self.progress.clock() - self._since
        if self._left_s is not None:
            return max(0.0, self._left_s - waited)
        if not self.total or not self.done:
            return None
        unit_s = (self._since - self._start) / self.done
        after_this = max(0.0, self.total - self.done - 1)  # units; the one under way may be slower than the others
        return max(unit_s * (self.total - self.done) - waited, unit_s * after_this, 0.0)

    def line(self) -> str:
        """Return a line like "compare: run 3 of 8 (int4), 2 min 10 s so far, about 4 min to go"."""
        elapsed_s = self.progress.clock() - self._start
        so_far = f", {format_duration(elapsed_s)} so far" if elapsed_s >= 1 else ""
        if self._words is None:
            return f"{self.name} ..." + (so_far if elapsed_s >= QUIET_S else "")
        return f"{self.name}: {self._words}{so_far}{format_time_left(self.left_s())}"

    def refresh(self) -> None:
        """Show the line, if it is time to."""
        now = self.progress.clock()
        if self.progress.enabled and now >= self._next_shown:
            self._next_shown = now + self._every_s
            self.progress.show(self)


_SILENT = Progress(enabled=False)
_current: list[Progress] = []


def current_progress() -> Progress:
    """Return the progress of the running command; a silent one without a command."""
    return _current[-1] if _current else _SILENT


def is_reporting() -> bool:
    """Return whether a command has installed progress output, even a silent one."""
    return bool(_current)


@contextlib.contextmanager
def use_progress(progress: Progress) -> Iterator[Progress]:
    """Install `progress` for the block; its live line is gone at the end."""
    _current.append(progress)
    try:
        yield progress
    finally:
        _current.remove(progress)
        progress.close()


def importing(what: str, enabled: bool = True) -> contextlib.AbstractContextManager[Task]:
    """Return a task for a block that imports large libraries: the first rank mentions it after two seconds."""
    return Progress(enabled and first_rank()).slow(f"importing {what}", SLOW_IMPORT_S)


def first_rank() -> bool:
    """Return whether this is rank 0 by the launcher's environment, before anything else is known about ranks."""
    return os.environ.get("RANK", "0") == "0"
