"""Progress on stderr: one live line or bar on a terminal, a plain line at most every ten seconds elsewhere, nothing at --verbose 0.

A command that takes long makes a `Progress` the process's own with `use_progress`; what it calls finds it by `current_progress`, which says
nothing where no command did. So a library call stays quiet.
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

if TYPE_CHECKING:  # rich is imported where a terminal is there to show it
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress as Bar

QUIET_S = 10.0  # between two plain lines, and before the first one
TICK_S = 1.0
REFRESH_S = 0.1  # of a live line: a token may take less
SLOW_IMPORT_S = 2.0
LEAST_SHARE = 0.01  # of the bytes, before a rate is shown: the first ones may wait for a compiler


class Progress:
    """What is going on, for the person who waits. Only the first rank speaks.

    Args:
        clock: seconds, as time.monotonic.
    """

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.monotonic):
        self.enabled, self.clock = enabled, clock
        self._console: Console | None = None
        self._live: Live | Bar | None = None
        self._tasks: list[Task] = []
        self._lock = threading.RLock()  # a task may show itself from its thread
        if enabled and sys.stderr.isatty():
            from rich.console import Console

            self._console = Console(stderr=True)
        # Before the first line of a task, and from one to the next.
        self.first_after_s, self.every_s = (0.0, REFRESH_S) if self.on_terminal else (QUIET_S, QUIET_S)

    def say(self, line: str) -> None:
        """A line that stays."""
        line = printable(line)
        with self._lock:
            if self._console is not None:
                self._console.print(line, markup=False, highlight=False)
            elif self.enabled:
                with contextlib.suppress(OSError):  # whoever read it is gone: the run goes on
                    print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def task(
        self, name: str, total: float | None = None, *, after_s: float | None = None, ticking: bool = False
    ) -> Iterator[Task]:
        """Something that takes time, shown until the block ends. Of tasks inside each other the innermost is shown.

        Args:
            total: units of work, where they are known; time per unit gives the time to go.
            after_s: show nothing before. None shows it at once on a terminal, and after `QUIET_S` elsewhere.
            ticking: show it every second, for work that cannot say itself how far it is.
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
        """A task that is only mentioned if it takes longer than `after_s`: "NAME ..."."""
        return self.task(name, after_s=after_s, ticking=True)

    def loading(self, total_bytes: int) -> Callable[[int], None]:
        """A callback that takes the bytes of each parameter and shows how loading goes."""
        moved, loaded = ByteProgress(self, "loading weights", total_bytes), 0

        def advance(nbytes: int) -> None:
            nonlocal loaded
            loaded += nbytes
            moved.at(loaded)

        return advance

    @contextlib.contextmanager
    def with_detail(self, detail: Callable[[], str | None]) -> Iterator[None]:
        """The line of the innermost task ends with `detail` within."""
        task = self._tasks[-1] if self._tasks else Task(self, "", None, None)
        task.detail = detail
        try:
            yield
        finally:
            task.detail = lambda: None

    def clear(self) -> None:
        """Take the live line off the terminal; the next update puts it back."""
        with self._lock, contextlib.suppress(OSError):  # the terminal is gone
            self._show(None)

    close = clear

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is shown within, where results are printed to a stdout that may be the same terminal."""
        with self._lock:
            self.clear()
            yield

    @property
    def on_terminal(self) -> bool:
        return self._console is not None

    def show(self, task: Task, line: str) -> None:
        """The current line of `task`, which replaces the one before."""
        with self._lock:
            if self._console is None or task is not (self._tasks or [task])[-1]:
                return
            from rich.live import Live
            from rich.spinner import Spinner
            from rich.text import Text

            text = Text(printable(line), overflow="ellipsis", no_wrap=True)
            if isinstance(self._live, Live) and isinstance(self._live.renderable, Spinner):
                self._live.renderable.update(text=text)
            else:
                # stdout is for results, which may go elsewhere: rich would send it to the terminal too
                self._show(
                    Live(Spinner("dots", text=text), console=self._console, transient=True, redirect_stdout=False)
                )

    def show_bar(self, name: str, total: int, done: int, words: str) -> None:
        """The same with a bar, for bytes."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        with self._lock:
            if not isinstance(self._live, Bar):
                columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}")
                bar = Bar(*columns, console=self._console, transient=True, redirect_stdout=False)
                bar.add_task(name, total=total, words="")
                self._show(bar)
            assert isinstance(self._live, Bar)
            self._live.update(self._live.task_ids[0], description=name, total=total, completed=done, words=words)

    def _show(self, live: Live | Bar | None) -> None:
        """At most one live display at a time."""
        if self._live is not None:
            self._live.stop()
        self._live = live
        if live is not None:
            live.start()


class Task:
    """One long piece of work: how far it is, and how long it still takes. See `Progress.task`.

    Attributes:
        done: units that are finished.
        detail: what stands behind the line, such as the stage of a child process; None where there is nothing to say.
    """

    def __init__(self, progress: Progress, name: str, total: float | None, after_s: float | None):
        self.progress, self.name, self.total, self.done = progress, name, total, 0.0
        self._start = self._since = progress.clock()
        self._words: str | None = None
        self.detail: Callable[[], str | None] = lambda: None
        self._left_s: float | None = None
        self._next_shown = self._start + (progress.first_after_s if after_s is None else after_s)

    def at(self, words: str, done: float | None = None, left_s: float | None = None) -> None:
        """What is under way.

        Args:
            done: units that are finished; as before where not given.
            left_s: seconds from now to the end, where time per unit would not tell.
        """
        with self.progress._lock:
            self._words = words
            if done is not None and done != self.done or left_s is not None:
                self._since, self._left_s = self.progress.clock(), left_s
                self.done = self.done if done is None else done
        self.refresh()

    def left_s(self) -> float | None:
        """Seconds to go; None where that is not known yet."""
        waited = self.progress.clock() - self._since
        if self._left_s is not None:
            return max(0.0, self._left_s - waited)
        if not self.total or not self.done:
            return None
        unit_s = (self._since - self._start) / self.done
        after_this = max(0.0, self.total - self.done - 1)  # units; the one under way may be slower than the others
        return max(unit_s * (self.total - self.done) - waited, unit_s * after_this, 0.0)

    def line(self) -> str:
        """Such as "compare: run 3 of 8 (int4), 2 min 10 s so far, about 4 min to go"."""
        elapsed, left = self.progress.clock() - self._start, self.left_s()
        if self._words is None:
            return f"{self.name} ..." + (f" ({format_duration(elapsed)} so far)" if elapsed >= QUIET_S else "")
        so_far = f", {format_duration(elapsed)} so far" if elapsed >= 1 else ""
        detail = self.detail()
        return f"{self.name}: {self._words}{so_far}{format_time_left(left)}" + (f" [{detail}]" if detail else "")

    def refresh(self) -> None:
        """Show it, if it is time to."""
        if not self.progress.enabled:
            return
        now = self.progress.clock()
        if now < self._next_shown:
            return
        self._next_shown = now + self.progress.every_s
        if self.progress.on_terminal:
            self.progress.show(self, self.line())
        else:
            self.progress.say(self.line())


class ByteProgress:
    """Bytes that are loaded or fetched: a bar on a terminal, lines elsewhere.

    Args:
        already: bytes that were there before and took no time.
    """

    def __init__(self, progress: Progress, name: str, total: int, already: int = 0):
        self._progress, self._name, self._total, self._already = progress, name, total, already
        self._start = progress.clock()
        self._next_shown = self._start + progress.first_after_s

    def at(self, done: int) -> None:
        """`done` bytes are there."""
        progress, now = self._progress, self._progress.clock()
        if not progress.enabled or now < self._next_shown:
            return
        total = max(self._total, done)
        unit, size = next((found for found in BINARY_UNITS if total >= found[1]), BINARY_UNITS[-1])
        digits = 1 if total >= 10 * size else 2
        words = f"{done / size:.{digits}f} of {total / size:.{digits}f} {unit}"
        if (moved := done - self._already) >= max(LEAST_SHARE * total, 1):
            rate = moved / max(now - self._start, 1e-9)
            words += f" ({rate / 1e9:.2g} GB/s){format_time_left((total - done) / rate)}"
        self._next_shown = now + progress.every_s
        if progress.on_terminal:
            progress.show_bar(self._name, total, done, words)
        else:
            progress.say(f"{self._name}: {words}")


_NONE = Progress(enabled=False)
_current: list[Progress] = []


def current_progress() -> Progress:
    """The progress of the command that runs; a silent one where none does."""
    return _current[-1] if _current else _NONE


def is_reporting() -> bool:
    """Whether a command has set up progress output, even a silent one."""
    return bool(_current)


@contextlib.contextmanager
def use_progress(progress: Progress) -> Iterator[Progress]:
    """Make `progress` the `current_progress` one; its live line is gone at the end."""
    _current.append(progress)
    try:
        yield progress
    finally:
        _current.remove(progress)
        progress.clear()


def importing(what: str, enabled: bool = True) -> contextlib.AbstractContextManager[Task]:
    """A block that imports large libraries: says so where it takes more than two seconds, and this is the first rank."""
    return Progress(enabled and first_rank()).slow(f"importing {what}", SLOW_IMPORT_S)


def _tick(task: Task, ended: threading.Event) -> None:
    while not ended.wait(TICK_S):
        with task.progress._lock:
            if not ended.is_set():  # or it would show a line that was just taken away
                task.refresh()


def first_rank() -> bool:
    """Whether this is the process that speaks, before anything is known about the others."""
    return os.environ.get("RANK", "0") == "0"
