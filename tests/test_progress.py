"""Progress lines: what is under way and how long it still takes; nothing where it is quick or not wanted."""

from __future__ import annotations

import re
import threading

import pytest

from zero_inference.cli import console_main
from zero_inference.utils import progress as progress_module
from zero_inference.utils.format import GIB
from zero_inference.utils.progress import Progress, current_progress, is_reporting, use_progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lines(capsys) -> list[str]:
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def test_a_pipe_gets_a_line_every_ten_seconds_with_the_time_left(clock, capsys):
    def work(progress: Progress) -> None:
        with progress.task("work", 30) as task:
            for done in range(30):
                task.at(f"part {done + 1} of 30", done)
                clock.now += 1

    work(Progress(True, clock))
    assert lines(capsys) == [
        "work: part 11 of 30, 10 s so far, about 20 s to go",
        "work: part 21 of 30, 20 s so far, about 10 s to go",
    ]
    work(Progress(False, clock))
    progress = Progress(True, clock)
    for _ in range(5):
        with progress.task("quick", 9) as task:
            task.at("8 of 9", 8)
            clock.now += 9
    assert lines(capsys) == [], "--verbose 0, and what takes less than ten seconds"


def test_the_time_left_is_that_of_the_units_so_far_or_the_callers(clock):
    with Progress(True, clock).task("work", 4) as task:
        assert task.left_s() is None
        clock.now += 10
        task.at("second", 1)
        assert task.left_s() == 30
        clock.now += 4
        assert task.left_s() == 26
        clock.now += 100
        assert task.left_s() == 20, "the units after a slow one"
    with Progress(True, clock).task("work") as task:
        clock.now += 130
        task.at("run 3 of 8 (int4)", left_s=250)
        clock.now += 10
        assert task.line() == "work: run 3 of 8 (int4), 2 min 20 s so far, about 4 min to go"


def test_a_terminal_shows_the_inner_task(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(True, clock)

    with progress.task("outer", 2) as outer:
        outer.at("1 of 2")
        assert progress.live_line == "outer: 1 of 2"
        with progress.task("inner") as inner:
            clock.now += 1
            outer.refresh()
            assert progress.live_line == "outer: 1 of 2"
            inner.at("something")
            assert progress.live_line == "inner: something, 1 s so far"
    assert progress.live_line == "" and "inner: something" in capsys.readouterr().err


def test_loading_counts_bytes(clock, capsys):
    add = Progress(True, clock).loading(100 * GIB)
    add(20 * GIB)
    clock.now += 100
    add(20 * GIB)
    assert lines(capsys) == ["loading weights: 40.0 of 100.0 GiB, 1 min 40 s so far, about 2 min to go"]


def test_something_slow_is_mentioned_from_a_thread(monkeypatch):
    monkeypatch.setattr(progress_module, "TICK_S", 0.01)
    said, shown, progress = threading.Event(), [], Progress(True)
    monkeypatch.setattr(progress, "say", lambda line: (shown.append(line), said.set()))
    with progress.slow("looking up some/model on the hub", 0.02):
        assert said.wait(10)
    with progress.slow("something quick", 60):
        pass
    assert shown == ["looking up some/model on the hub ..."]


def test_a_library_call_is_quiet_and_a_command_is_not(capsys):
    current_progress().say("nobody asked")
    assert not is_reporting()
    with use_progress(Progress(True)) as progress:
        assert current_progress() is progress and is_reporting()
        current_progress().say("asked")
    assert lines(capsys) == ["asked"] and not is_reporting()


def test_micro_is_quiet_when_fast_and_results_are_alone_on_stdout(capsys):
    options = ["micro", "elementwise", "--device", "cpu", "--sizes", "64", "128", "--min-run-time", "0.001"]
    assert console_main(["zero-inference", *options, "--format", "csv"]) == 0
    shown = capsys.readouterr()
    assert [line.split(",")[0] for line in shown.out.splitlines()] == ["n", "64", "128"]
    assert not re.search("micro elementwise: row", shown.err)
