"""The one launcher of child runs: what is taken for a run's record and last words, and that a time limit ends all of it."""

from __future__ import annotations

import json
import sys
import time

import psutil
import pytest

from zero_inference.records.read import read_records
from zero_inference.utils.processes import ANY_ERROR, OWN_ERROR, last_error_line, run_child


def run(tmp_path, *new, code=0, old=(), **named):
    """A child that appends the records `new` to a file that holds `old`."""
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in old))
    text = "".join(json.dumps(record) + "\n" for record in new)
    program = "import sys; open(sys.argv[1], 'a').write(sys.argv[2]); print('said'); sys.exit(int(sys.argv[3]))"
    return run_child(
        [sys.executable, "-c", program, str(path), text, str(code)],
        tmp_path / "output",
        records=lambda: read_records(path),
        is_good=lambda record: record["status"] == "ok",
        **named,
    )


GOOD, BAD = {"status": "ok", "n": 1}, {"status": "failed", "error": "no"}


@pytest.mark.parametrize(
    "old, new, code, found",
    [
        ([], [GOOD], 0, GOOD),
        ([GOOD], [GOOD], 0, GOOD),  # an equal one that was there before is not the run's
        ([GOOD], [], 0, None),
        ([BAD], [GOOD, BAD], 1, BAD),  # the last one counts
        ([], [GOOD], 3, None),  # recorded as good, and ended as failed: not to be believed
        ([], [BAD], 0, BAD),
    ],
)
def test_the_record_is_the_one_that_the_run_added(old, new, code, found, tmp_path):
    ended = run(tmp_path, *new, code=code, old=old)
    assert (ended.record, ended.code, ended.read_output()) == (found, code, "said\n")


def test_a_run_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    program = f"sleep 1000 & echo $! > {tmp_path}/pid; sleep 1000"
    begin = time.monotonic()
    ended = run_child(["sh", "-c", program], tmp_path / "output", timeout_s=1.5)
    assert ended.code is None and ended.record is None and 1.5 <= time.monotonic() - begin < 15
    left = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_an_output_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    with pytest.raises(OSError):
        run_child(["touch", str(tmp_path / "ran")], tmp_path / "no" / "folder")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "said, own, any_error",
    [
        ("loading\nerror: does not fit\n[rank0] a remark\n", "error: does not fit", "error: does not fit"),
        ("a.py: error: argument --n: odd\nremark", "remark", "a.py: error: argument --n: odd"),
        ("[rank1]: RuntimeError: no\nremark", "remark", "RuntimeError: no"),
        ("[rank1]: error: one\n  \nerrors: two\n", "error: one", "error: one"),
        ("loading\nKilled\n\n", "Killed", "Killed"),
        ("", None, None),
    ],
)
def test_last_words_are_the_runs_own_rather_than_its_launchers(said, own, any_error):
    assert (last_error_line(said, OWN_ERROR), last_error_line(said, ANY_ERROR)) == (own, any_error)
