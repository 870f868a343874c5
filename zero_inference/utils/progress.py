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
from typing import TYPE_CHECKING

from zero_inference.utils.format import BINARY_UNITS, format_duration, format_time_left, printable

if TYPE_CHECKING:  # rich is imported only for a terminal: it takes 50 ms
    from rich.console import Console
    from rich.progress import Progress as Live

QUIET_S = 10.0  # between two plain lines, and before the first one
TICK_S = 1.0
REFRESH_S = 0.1  # of a live line: a token may take less
SLOW_IMPORT_S = 2.0
MIN_RATE_SHARE = 0.01  # of the bytes, before a rate is shown: the first ones may wait for a compiler


class Progress:
    """The progress output of a command. Only the first rank enables it.

    Args:
        clock: seconds, as time.monotonic.
    """

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.monotonic):
        self.enabled, self.clock = enabled, clock
        self._console: Console | None = None
        self._live: Live | None = None
        self._tasks: list[Task] = []
        self._lock = threading.RLock()  # a task may show itself from its thread
        if enabled and sys.stderr.isatty():
            from rich.console import Console

            self._console = Console(stderr=True)
        # Before the first line of a task, and between lines.
        self.first_after_s, self.every_s = (0.0, REFRESH_S) if self._console else (QUIET_S, QUIET_S)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        line = printable(line)
        with self._lock:
            if self._console is not None:
                self._console.print(line, markup=False, highlight=False)
            elif self.enabled:
                with contextlib.suppress(OSError):  # the reader of stderr is gone: the run goes on
                    print(line, file=sys.stderr, flush=True)

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
        task = Task(self, name, total, after_s)
        with self._lock:
            self._tasks.append(task)
        ended = threading.Event()
        if ticking and self.enabled:
            threading.Thread(target=_tick, args=(task, ended), daemon=True).start()
        try:
            yield task
        finally:
            ended.set()
            with self._lock:
                self._tasks.remove(task)
                self.clear()

    def slow(self, name: str, after_s: float) -> contextlib.AbstractContextManager[Task]:
        """Return a task that is mentioned ("NAME ...") only if it takes longer than `after_s`."""
        return self.task(name, after_s=after_s, ticking=True)

    def loading(self, total_bytes: int) -> Callable[[int], None]:
        """Return a callback that takes the bytes of each loaded parameter."""
        loading = ByteProgress(self, "loading weights", total_bytes)
        return lambda nbytes: loading.at(int(loading.done) + nbytes)

    @contextlib.contextmanager
    def with_detail(self, detail: Callable[[], str | None]) -> Iterator[None]:
        """Append `detail` to the line of the innermost task within the block."""
        task = self._tasks[-1] if self._tasks else Task(self, "", None, None)
        task.detail = detail
        try:
            yield
        finally:
            task.detail = lambda: None

    def clear(self) -> None:
        """Remove the live line from the terminal; the next update shows it again."""
        with self._lock, contextlib.suppress(OSError):  # the terminal is gone
            if self._live is not None:
                self._live.stop()
            self._live = None

    close = clear  # for contextlib.closing

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing within the block, for results that are printed to a stdout that may be the same terminal."""
        with self._lock:
            self.clear()
            yield

    def show(self, task: Task, line: str) -> None:
        """Show `line` of `task`: in place of the live line on a terminal, printed elsewhere."""
        if self._console is None:
            return self.say(line)
        with self._lock:
            if task in self._tasks and task is not self._tasks[-1]:
                return
            with_bar = isinstance(task, ByteProgress)
            if self._live is None or len(self._live.columns) != 2 + with_bar:
                self.clear()
                self._live = self._start_live(with_bar)
            total, done = (task.total, task.done) if with_bar else (None, 0)
            self._live.update(self._live.task_ids[0], description=printable(line), total=total, completed=done)

    def _start_live(self, with_bar: bool) -> Live:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
        from rich.table import Column

        one_line = Column(no_wrap=True, overflow="ellipsis")
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False, table_column=one_line)]
        bar = [BarColumn()] if with_bar else []
        # stdout is for results, which may go elsewhere: rich would redirect it to the terminal too
        live = Progress(*columns, *bar, console=self._console, transient=True, redirect_stdout=False)
        live.add_task("", total=None)
        live.start()
        return live


class Task:
    """A long piece of work: how far it is, and how long it still takes. See `Progress.task`.

    Attributes:
        done: units that are finished.
        detail: returns what to append to the line, such as the stage of a child process; None for nothing.
    """

    def __init__(self, progress: Progress, name: str, total: float | None, after_s: float | None):
        self.progress, self.name, self.total, self.done = progress, name, total, 0.0
        self._start = self._since = progress.clock()
        self._words: str | None = None
        self.detail: Callable[[], str | None] = lambda: None
        self._left_s: float | None = None
        self._next_shown = self._start + (progress.first_after_s if after_s is None else after_s)

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
        elapsed, left = self.progress.clock() - self._start, self.left_s()
        if self._words is None:
            return f"{self.name} ..." + (f" ({format_duration(elapsed)} so far)" if elapsed >= QUIET_S else "")
        so_far = f", {format_duration(elapsed)} so far" if elapsed >= 1 else ""
        detail = self.detail()
        return f"{self.name}: {self._words}{so_far}{format_time_left(left)}" + (f" [{detail}]" if detail else "")

    def refresh(self) -> None:
        """Show the line, if it is time to."""
        now = self.progress.clock()
        if self.progress.enabled and now >= self._next_shown:
            self._next_shown = now + self.progress.every_s
            self.progress.show(self, self.line())


class ByteProgress(Task):
    """Bytes that are loaded or fetched, with a bar on a terminal.

    Args:
        already: bytes that were there before and took no time.
    """

    def __init__(self, progress: Progress, name: str, total: int, already: int = 0):
        super().__init__(progress, name, total, None)
        self._already = already

    def at(self, done: int) -> None:  # type: ignore[override]
        """Report that `done` bytes are there."""
        self.done, self.total = done, max(self.total or 0, done)
        self.refresh()

    def line(self) -> str:
        total = self.total or 0
        unit, size = next((found for found in BINARY_UNITS if total >= found[1]), BINARY_UNITS[-1])
        digits = 1 if total >= 10 * size else 2
        line = f"{self.name}: {self.done / size:.{digits}f} of {total / size:.{digits}f} {unit}"
        moved = self.done - self._already
        if moved < max(MIN_RATE_SHARE * total, 1):
            return line
        rate = moved / max(self.progress.clock() - self._start, 1e-9)
        return f"{line} ({rate / 1e9:.2g} GB/s){format_time_left((total - self.done) / rate)}"


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
        progress.clear()


def importing(what: str, enabled: bool = True) -> contextlib.AbstractContextManager[Task]:
    """Return a task for a block that imports large libraries: the first rank mentions it after two seconds."""
    return Progress(enabled and first_rank()).slow(f"importing {what}", SLOW_IMPORT_S)


def first_rank() -> bool:
    """Return whether this is rank 0 by the launcher's environment, before anything else is known about ranks."""
    return os.environ.get("RANK", "0") == "0"


def _tick(task: Task, ended: threading.Event) -> None:
    while not ended.wait(TICK_S):
        with task.progress._lock:
            if not ended.is_set():  # or it would show a line that was just taken away
                task.refresh()
