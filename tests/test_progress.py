"""What a person who waits is told: how far something is, how long it still takes, and nothing where it is quick or not wanted."""

from __future__ import annotations

import re
import sys
import threading
import time

import pytest

from zero_inference.architectures import command as compare
from zero_inference.cli import console_main, parse_options
from zero_inference.measure.loops import Remaining
from zero_inference.planning import search
from zero_inference.utils import progress as progress_module
from zero_inference.utils.format import GIB, format_duration, format_time_left
from zero_inference.utils.processes import last_progress, run_child
from zero_inference.utils.progress import ByteProgress, Progress, current_progress, is_reporting, use_progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lines(capsys) -> list[str]:
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def test_a_pipe_gets_a_line_every_ten_seconds_with_the_time_to_go(clock, capsys):
    progress = Progress(True, clock)
    with progress.task("work", 30) as task:
        for done in range(30):
            task.at(f"part {done + 1} of 30", done)
            clock.now += 1
    assert lines(capsys) == [
        "work: part 11 of 30, 10 s so far, about 20 s to go",
        "work: part 21 of 30, 20 s so far, about 10 s to go",
    ]


def test_what_takes_less_than_ten_seconds_says_nothing_however_often_it_is_done(clock, capsys):
    progress = Progress(True, clock)
    for _ in range(5):
        with progress.task("quick", 9) as task:
            for done in range(9):
                task.at(f"{done} of 9", done)
                clock.now += 1
    assert lines(capsys) == []


def test_nothing_is_said_at_verbose_0(clock, capsys):
    progress = Progress(False, clock)
    with progress.task("work", 2) as task:
        clock.now += 100
        task.at("part 2 of 2", 1)
        progress.say("a line")
    assert lines(capsys) == []


def test_a_unit_that_takes_longer_than_those_before_never_promises_less_than_the_units_after_it(clock):
    with Progress(True, clock).task("work", 4) as task:
        assert task.left_s() is None
        clock.now += 10
        task.at("second", 1)
        assert task.left_s() == 30
        clock.now += 4
        assert task.left_s() == 26
        clock.now += 100
        assert task.left_s() == 20


def test_a_caller_that_knows_better_gives_the_time_to_go(clock):
    with Progress(True, clock).task("work") as task:
        clock.now += 130
        task.at("run 3 of 8 (int4)", left_s=250)
        clock.now += 10
        assert task.line() == "work: run 3 of 8 (int4), 2 min 20 s so far, about 4 min to go"
        clock.now += 1000
        assert task.left_s() == 0


def test_of_tasks_inside_each_other_the_inner_one_is_shown_on_a_terminal(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(True, clock)

    def shown() -> str | None:
        return progress._live and progress._live.tasks[0].description

    with progress.task("outer", 2) as outer:
        outer.at("1 of 2")
        assert shown() == "outer: 1 of 2"
        with progress.task("inner") as inner:
            clock.now += 1
            outer.refresh()
            assert shown() == "outer: 1 of 2"
            inner.at("something")
            assert shown() == "inner: something, 1 s so far"
        assert shown() is None
        ByteProgress(progress, "loading", 2 * GIB).at(GIB)
        assert shown().startswith("loading: 1.00 of 2.00 GiB")
        assert progress._live.tasks[0].completed == GIB and progress._live.tasks[0].total == 2 * GIB
    assert shown() is None


def test_bytes_are_told_with_their_rate(clock, capsys):
    progress = Progress(True, clock)
    moved = ByteProgress(progress, "fetching weights", 100 * GIB, already=20 * GIB)
    moved.at(30 * GIB)
    clock.now += 100
    moved.at(40 * GIB)
    moved.at(41 * GIB)
    assert lines(capsys) == ["fetching weights: 40.0 of 100.0 GiB (0.21 GB/s), about 5 min to go"]
    advance = progress.loading(4 * GIB)
    clock.now += 11
    advance(GIB // 100)
    clock.now += 11
    advance(GIB - GIB // 100)
    assert lines(capsys) == [
        "loading weights: 0.01 of 4.00 GiB",  # too few bytes for a rate
        "loading weights: 1.00 of 4.00 GiB (0.049 GB/s), about 65 s to go",
    ]


def test_something_slow_is_mentioned_from_a_thread_while_it_goes_on(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "TICK_S", 0.01)
    said = threading.Event()
    progress = Progress(True)
    monkeypatch.setattr(progress, "say", lambda line: (lines_said.append(line), said.set()))
    lines_said: list[str] = []
    with progress.slow("looking up some/model on the hub", 0.02):
        assert said.wait(10)
    assert lines_said == ["looking up some/model on the hub ..."]
    with progress.slow("something quick", 60):
        pass
    assert len(lines_said) == 1


def test_a_library_call_is_quiet_and_a_command_is_not(capsys):
    current_progress().say("nobody asked")
    assert not is_reporting()
    with use_progress(Progress(True)) as progress:
        assert current_progress() is progress and is_reporting()
        current_progress().say("asked")
    assert lines(capsys) == ["asked"] and not is_reporting()


@pytest.mark.parametrize(
    "seconds, past, future",
    [
        (0.4, "0 s", ""),
        (7, "7 s", ", about 7 s to go"),
        (120, "2 min", ", about 2 min to go"),
        (62, "1 min 2 s", ", about 60 s to go"),
        (250, "4 min 10 s", ", about 4 min to go"),
        (3900, "1 h 5 min", ", about 65 min to go"),
        (9000, "2 h 30 min", ", about 2.5 h to go"),
    ],
)
def test_times_in_words(seconds, past, future):
    assert format_duration(seconds) == past and format_time_left(seconds) == future


def test_the_time_that_generations_still_take(clock):
    """Prefill 5 s and 1 s a token, three of 11 tokens: 15 s each, and 10 s each once they are warm."""
    remaining = Remaining(3, 11, clock)

    def generation(prefill_s, step_s, extra=False, tokens=11):
        remaining.begin(extra)
        clock.now += prefill_s
        told = [remaining.token(1)]
        for token in range(2, tokens + 1):
            clock.now += step_s
            told.append(remaining.token(token))
        remaining.end()
        return told

    first = generation(5, 1)
    assert first[:2] == [None, None] and first[2] == pytest.approx(8 + 30) and first[-1] == pytest.approx(30)
    assert generation(5, 1, extra=True, tokens=4)[0] == pytest.approx(10 + 30), "it is on top, and ends early"
    assert generation(5, 0.5)[0] == pytest.approx(10 + 15)
    assert generation(5, 0.5)[-1] == pytest.approx(0)


@pytest.fixture
def made_up_runs(monkeypatch):
    """Arms whose runs take no time, of which some last until a line was printed."""
    monkeypatch.setattr(compare, "check_arm", lambda *arguments: None)
    rates = {"fp16": 10.0, "int4": 20.0}
    good = {"status": "ok", "total_throughput": 1.0, "warmed_up": True}

    def run_arm(arm, *arguments):
        return good | {"decode_throughput": rates[arm.name]}

    monkeypatch.setattr(compare, "run_arm", run_arm)


ARMS = ["--arm", "fp16=--model opt-125m", "--arm", "int4=--model opt-125m --engine stream --quant-bits 4"]


def test_compare_says_which_run_ended_and_how_fast_it_was(made_up_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("zero_inference.architectures.table.arm_rows", lambda *arguments: [])
    monkeypatch.setattr(compare, "print_table", lambda *arguments: print("the table"))
    options = [*ARMS, "--rounds", "1", "--log-dir", str(tmp_path)]
    assert console_main(["zero-inference", "compare", *options, "--", "--dummy"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "the table\n"
    assert shown.err.splitlines() == [
        f"compare: 4 runs, 2 of each arm; their output is in {tmp_path}",
        "compare: run 1 of 4 (fp16): 10.000 token/s",
        "compare: run 2 of 4 (int4): 20.000 token/s",
        "compare: run 3 of 4 (int4): 20.000 token/s",
        "compare: run 4 of 4 (fp16): 10.000 token/s",
        f"logs and records: {tmp_path}",
    ]
    assert console_main(["zero-inference", "compare", *options, "--verbose", "0", "--", "--dummy"]) == 0
    assert capsys.readouterr().err == ""


def test_compare_tells_how_long_it_still_takes(made_up_runs, tmp_path, capsys, monkeypatch, clock):
    arms = compare.read_arms([], ARMS[1::2], ["--dummy"], parse_options)
    plain = compare.run_arm

    def a_minute_long(arm, *arguments):
        clock.now += 60 if arm.name == "fp16" else 30
        return plain(arm, *arguments)

    monkeypatch.setattr(compare, "run_arm", a_minute_long)
    compare.run_arms(arms, 1, [], tmp_path, 1, Progress(True, clock))
    told = [line for line in capsys.readouterr().err.splitlines() if "so far" in line]
    assert told == [
        "compare: run 2 of 4 (int4), 1 min so far, about 3 min to go",
        "compare: run 3 of 4 (int4), 1 min 30 s so far, about 90 s to go",
        "compare: run 4 of 4 (fp16), 2 min so far, about 40 s to go",
    ]


def test_verified_plans_are_told_one_by_one(clock, capsys, monkeypatch):
    class Candidate:
        failed, tokens_per_s = False, 2.0

        def command(self):
            return "--engine stream"

    monkeypatch.setattr(search, "replace", lambda each, **found: each)
    monkeypatch.setattr(search, "ranked", lambda found, goal: found)

    def measured(*arguments):
        clock.now += 20
        return 1.5

    monkeypatch.setattr(search, "_measured_tokens_per_s", measured)
    with use_progress(Progress(True, clock)) as progress:
        search.verify([Candidate(), Candidate(), Candidate()], 2, "throughput", progress.say)
    assert lines(capsys) == [
        "run 1 of 2: 1.5 token/s, predicted 2: --engine stream",
        "plan --verify: run 2 of 2 (--engine stream), 20 s so far, about 20 s to go",
        "run 2 of 2: 1.5 token/s, predicted 2: --engine stream",
    ]


def test_micro_is_quiet_when_fast_and_results_are_alone_on_stdout(capsys):
    options = ["micro", "elementwise", "--device", "cpu", "--sizes", "64", "128", "--min-run-time", "0.001"]
    assert console_main(["zero-inference", *options, "--format", "csv"]) == 0
    shown = capsys.readouterr()
    assert [line.split(",")[0] for line in shown.out.splitlines()] == ["n", "64", "128"]
    assert not re.search("micro elementwise: row", shown.err)


def test_a_waiting_command_shows_the_stage_of_its_child(tmp_path, capsys, monkeypatch):
    """The last line of the child, behind the command's own, while it runs."""
    monkeypatch.setattr(progress_module, "QUIET_S", 0.05)
    monkeypatch.setattr(progress_module, "TICK_S", 0.02)
    code = "import time; print('loaded 1 GiB\\n[rank0]: perplexity 7 of 8, about 30 s to go\\nwarning: no\\n', flush=True); time.sleep(1.0)"
    with use_progress(Progress(True)) as shown, shown.task("compare", ticking=True) as task:
        task.at("run 1 of 12 (16bit)")
        ended = run_child([sys.executable, "-c", code], tmp_path / "1.out")
        before = capsys.readouterr().err
        time.sleep(0.2)
    assert ended.code == 0
    assert re.search(
        r"^compare: run 1 of 12 \(16bit\).* \[perplexity 7 of 8, about 30 s to go\]$", before, re.MULTILINE
    )
    assert "perplexity" not in capsys.readouterr().err, "it has ended"
    assert last_progress(tmp_path / "nothing") is None
