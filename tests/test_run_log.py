"""Log and record of a run whose files cannot be written, or are written by others at the same time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, small_disk

from zero_inference.cli import main
from zero_inference.engines import resident
from zero_inference.records import write
from zero_inference.records.read import parse_log, read_records
from zero_inference.utils import files, write_benchmark_log
from zero_inference.utils.files import append_bytes, check_appendable, check_output_file

SHORT = "--engine resident --prompt-len 4 --gen-len 2 --loops 1 --warmup 0 --dtype float32".split()


@pytest.fixture
def run(checkpoints, tmp_path, capfd):
    """run(*options) -> exit code, stdout and the error line of a run that logs to run.log."""

    def start(*options):
        files = ["--log-file", str(tmp_path / "run.log")]
        code = main(["run_model.py", "--model", str(checkpoints("opt")), *SHORT, *files, *map(str, options)])
        out, err = capfd.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == (code != 0) and "Traceback" not in err, err
        return code, out, "".join(errors)

    return start


@pytest.mark.parametrize("full, kept", [("run.log", "run.jsonl"), ("run.jsonl", "run.log")])
def test_a_full_disk_after_the_loops_costs_no_result(run, tmp_path, full, kept):
    (tmp_path / full).symlink_to("/dev/full")
    code, out, error = run()
    assert code == 1 and "time to first token (prefill)" in out and "\ntotal " in out
    assert f"not written to {tmp_path / full} (No space left on device)" in error and kept not in error
    if kept == "run.log":
        assert len(parse_log(tmp_path / kept)) == 1
    else:
        assert read_records(tmp_path / kept)[0]["status"] == "ok"


@pytest.mark.parametrize("while_doing", ["write_benchmark_log", "append_record"])
def test_a_signal_while_the_files_are_written_waits_for_them(run, tmp_path, monkeypatch, while_doing):
    written = getattr(write, while_doing)

    def interrupted(*args):
        signal.raise_signal(signal.SIGTERM)
        return written(*args)

    monkeypatch.setattr(write, while_doing, interrupted)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(parse_log(tmp_path / "run.log")) == 1
    assert [record["status"] for record in read_records(tmp_path / "run.jsonl")] == ["ok"]


@pytest.mark.parametrize("free", [0, 4096], ids=["name alone", "half a line"])
def test_a_full_disk_leaves_no_empty_file(free, tmp_path):
    with small_disk(tmp_path / "disk", "12k") as disk:
        (disk / "there").write_bytes(b"whole\n")
        (disk / "full").write_bytes(bytes(8192 - free))
        for name in ("new", "there"):
            with pytest.raises(OSError, match="No space left|bytes fitted"):
                append_bytes(disk / name, bytes(8192))
        assert sorted(path.name for path in disk.iterdir()) == ["full", "there"]
        assert (disk / "there").read_bytes() == b"whole\n"


@pytest.mark.parametrize(
    "option, name, words",
    [
        ("--log-file", "folder.log", "log"),
        ("--log-file", "record.log", "record"),  # its record.jsonl is a folder
        ("--log-file", "pipe.log", "neither a file nor a device"),
        ("--log-file", "n" * 251 + ".log", "record"),
        ("--log-file", "pipe.log/run.log", "log folder"),
        ("--log-file", "record.jsonl", "end the log's name in .log"),
        ("--log-file", "/", "is a folder"),
        ("--trace", "", "--trace"),
        ("--trace", "pipe.log", "--trace"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_loaded(
    run, option, name, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(resident, "load", lambda *args: pytest.fail("it was loaded"))
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "record.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    code, _, error = run(option, tmp_path / name)
    assert code == 2 and words in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.log", "pipe.log", "record.jsonl"]


def test_a_lock_that_is_never_released_is_not_waited_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "APPEND_LOCK_S", 0.3)
    for name in ("run.log", "run.jsonl"):
        with (tmp_path / name).open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            code, _, error = run()
            assert code == 2 and f"{name} is not writable (another process has kept it locked" in error
            with pytest.raises(TimeoutError, match="kept it locked"):
                append_bytes(tmp_path / name, b"x")
    assert run()[0] == 0


def test_a_check_leaves_no_file_and_takes_none_away(tmp_path):
    path = tmp_path / "new" / "run.log"
    check_appendable(path)
    assert path.parent.is_dir() and not path.exists()
    path.touch(0o600)
    append_bytes(path, b"a\n")
    check_appendable(path)
    check_output_file("--trace", path)
    assert path.read_bytes() == b"a\n" and path.stat().st_mode & 0o777 == 0o600
    check_output_file("--trace", tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_appends_survive_the_checks_of_others(tmp_path):
    """A check removes the empty file it made; a writer that opened it meanwhile must not write into what is gone."""
    path, stop = tmp_path / "run.log", threading.Event()
    lost = 0

    def keep_checking():
        while not stop.is_set():
            check_appendable(path)

    checkers = [threading.Thread(target=keep_checking) for _ in range(2)]
    for checker in checkers:
        checker.start()
    try:
        for _ in range(300):
            append_bytes(path, b"whole line\n")
            lost += path.read_bytes() != b"whole line\n"
            path.unlink()
    finally:
        stop.set()
        for checker in checkers:
            checker.join()
    assert lost == 0 and not path.exists()


@pytest.mark.parametrize("kept", [13, 95, 130, 260])
def test_a_torn_block_loses_itself_alone(tmp_path, capsys, kept):
    path = tmp_path / "run.log"
    write_benchmark_log(path, *range(10))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    write_benchmark_log(path, *range(1, 11))
    blocks = parse_log(path)
    assert [block["total_throughput"] for block in blocks] == [9.0, 10.0]
    assert "skipped" in capsys.readouterr().err


def test_what_fails_before_the_weights_are_read_leaves_a_record_too(run, tmp_path, monkeypatch):
    def fails(*args):
        raise ConnectionError("the hub is gone")

    monkeypatch.setattr(resident, "check", fails)
    monkeypatch.setattr(resident, "load", lambda *args: pytest.fail("it was loaded"))
    code, _, error = run()
    record = read_records(tmp_path / "run.jsonl")[-1]
    assert code == 1 and record["status"] == "failed" and "the hub is gone" in record["error"]
    assert "the hub is gone" in error


@pytest.mark.slow
def test_a_terminal_that_hangs_up_is_the_reason_in_the_record(checkpoints, tmp_path):
    """And not what the progress line says when there is no terminal left to write it on."""
    ours, terminal = os.openpty()
    # not a function for the child: this process would be copied for it, which is too large for some machines
    in_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", in_terminal]
        + [sys.executable, ROOT / "run_model.py", "--model", checkpoints("llama"), "--engine", "resident"]
        + ["--prompt-len", "8", "--gen-len", "50", "--loops", "100000", "--log-file", tmp_path / "run.log"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    while b"loop " not in shown:
        shown += os.read(ours, 65536)
    os.close(ours)
    assert run.wait(60) != 0
    record = read_records(tmp_path / "run.jsonl")[-1]
    assert record["status"] == "failed" and record["error"] == "stopped by SIGHUP", record["error"]
