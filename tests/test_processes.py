"""Processes that are started and their groups, a launcher watched, and the commands that are shown to be copied."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, free_port, without_gpus

from zero_inference.cli import console_parser
from zero_inference.records.read import read_records
from zero_inference.utils.processes import (
    as_installed_command,
    last_error_line,
    move_rank_option,
    process_group,
    run_child,
    run_command,
)

GOOD, BAD = {"status": "ok", "n": 1}, {"status": "failed", "error": "no"}


@pytest.mark.parametrize(
    "old, new, code, found",
    [
        ([GOOD], [GOOD], 0, GOOD),  # an equal one that was there before is not the run's
        ([GOOD], [], 0, None),
        ([BAD], [GOOD, BAD], 1, BAD),  # the last one counts
        ([], [GOOD], 3, None),  # recorded as good, and ended as failed: not to be believed
    ],
)
def test_the_record_is_the_one_that_the_run_added(old, new, code, found, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in old))
    text = "".join(json.dumps(record) + "\n" for record in new)
    program = "import sys; open(sys.argv[1], 'a').write(sys.argv[2]); print('said'); sys.exit(int(sys.argv[3]))"
    command = [sys.executable, "-c", program, str(path), text, str(code)]
    ended = run_child(command, tmp_path / "output", records=lambda: read_records(path))
    assert (ended.record, ended.code, ended.read_output()) == (found, code, "said\n")


def has_ended(file: Path) -> bool:
    pid = int(file.read_text())
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    program = f"sleep 1000 & echo $! > {tmp_path}/pid; sleep 1000"
    begin = time.monotonic()
    ended = run_child(["sh", "-c", program], tmp_path / "output", timeout_s=1.5)
    assert ended.code is None and ended.record is None and 1.5 <= time.monotonic() - begin < 15
    assert has_ended(tmp_path / "pid")


@pytest.mark.parametrize(
    "output, said",
    [
        ("loading\nerror: does not fit\n[rank0] a remark\n", "error: does not fit"),
        ("a.py: error: argument --n: odd\nremark", "a.py: error: argument --n: odd"),
        ("[rank1]: RuntimeError: no\nremark", "RuntimeError: no"),
        ("loading\nKilled\n\n", "Killed"),
        ("", None),
    ],
)
def test_last_words_are_the_runs_own_rather_than_its_launchers(output, said):
    assert last_error_line(output) == said


RUN = (
    "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom zero_inference.utils.processes import run_child\n"
    "print(run_child(['sh', '-c', sys.argv[2]], Path('out')).code)"
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_group_ends_with_its_parent(number, tmp_path):
    """SIGKILL, as of the kernel when memory is short, left a run of `compare` or a sweep going for as long as it took."""
    command = [sys.executable, "-c", RUN, str(ROOT), "sleep 1000 & sleep 1000; exit"]
    parent = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 30
    started = []
    while [one.name() for one in started].count("sleep") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        started = psutil.Process(parent.pid).children(recursive=True)
    os.killpg(parent.pid, number)
    parent.wait(timeout=60)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("last, code", [("exit 7", 7), ("kill -15 $$", -15)])
def test_the_exit_code_and_all_that_is_printed_come_back_and_nothing_goes_on(last, code, tmp_path):
    command = [sys.executable, "-c", RUN, str(ROOT), f"sleep 1000 & echo $!; {last}"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True, timeout=60) == f"{code}\n"
    assert has_ended(tmp_path / "out")


NINJA = """
rule compile
  command = echo $$$$ >pid; mv pid compiling; exec sleep 1000
rule compile_quickly
  command = while [ ! -e finish ]; do sleep 0.05; done
build slow: compile
build quick: compile_quickly
"""


def test_compilers_end_also_where_nobody_reads_what_ninja_prints(tmp_path):
    """It is killed by the next line that it prints, and has each compiler in a process group of its own."""
    (tmp_path / "build.ninja").write_text(NINJA)
    ninja = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    reading, writing = os.pipe()
    with process_group([ninja, "-C", str(tmp_path), "-j", "2"], stdout=writing, stderr=writing) as leader:
        os.close(writing)
        deadline = time.monotonic() + 60
        while not (tmp_path / "compiling").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.close(reading)
        (tmp_path / "finish").touch()
        assert leader.wait(60) == -signal.SIGPIPE
    assert has_ended(tmp_path / "compiling")


RANK = (
    "from zero_inference.utils.processes import launcher_watch\nimport os, time\nlauncher_watch.start()\n"
    "print(os.getpid(), flush=True)\ntime.sleep(100)"
)
# Both programs of deepspeed, and a shell between the second and the rank.
RUNNER = (
    "import subprocess, sys; subprocess.run([sys.executable, '-u', '-m', 'deepspeed.launcher.launch', *sys.argv[1:]])"
)
LAUNCH = "import subprocess, sys; subprocess.run(['sh', '-c', '\"$@\"; exit', 'sh', *sys.argv[1:]])"


@pytest.mark.parametrize("killed, ends", [("deepspeed", True), ("launch", True), ("outer shell", False)])
def test_a_rank_ends_with_each_of_its_launchers_but_not_with_a_shell(killed, ends, tmp_path):
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "launch.py").write_text(LAUNCH)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "deepspeed").write_text(RUNNER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    words = [sys.executable, str(tmp_path / "bin" / "deepspeed"), sys.executable, "-c", RANK]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = ["sh", "-c", '"$@"; exit', "sh", *words]
    shell = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        rank = psutil.Process(int(shell.stdout.readline()))
        launch, run = rank.parents()[1:3]
        {"deepspeed": run, "launch": launch, "outer shell": psutil.Process(shell.pid)}[killed].kill()
        left = psutil.wait_procs([rank], timeout=10 if ends else 2.5)[1]
        assert bool(left) != ends
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    assert ("the launcher has ended" in shell.communicate()[1]) == ends


@pytest.mark.parametrize("ranks, in_clone, installed", [
    (None, "python run_model.py", "zero-inference run"),
    (2, "deepspeed --num_gpus 2 run_model.py", "deepspeed --num_gpus 2 --module zero_inference run"),
])  # fmt: skip
def test_a_command_is_typed_as_it_works_in_the_current_folder(ranks, in_clone, installed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_command(["--prompt", "a b"], ranks) == f"{in_clone} --prompt 'a b'"
    assert as_installed_command(run_command(["--dummy"], ranks)) == f"{installed} --dummy"
    monkeypatch.chdir(tmp_path)
    assert run_command(["--prompt", "a b"], ranks) == f"{installed} --prompt 'a b'"


def test_the_launcher_may_write_the_rank_first():
    given = ["zero-inference", "--local_rank=1", "run", "--dummy"]
    assert move_rank_option(given) == ["zero-inference", "run", "--local_rank=1", "--dummy"]
    assert console_parser().parse_args(move_rank_option(given)[1:]).local_rank == 1
    assert move_rank_option(["zero-inference", "plan"]) == ["zero-inference", "plan"]


@pytest.mark.slow
def test_the_launcher_starts_the_installed_package(tmp_path):
    """Through deepspeed's own launcher, in a folder without run_model.py."""
    command = as_installed_command(run_command(["--model", "opt-125m", "--dummy", "--cpu-offload", "--dry-run"], 1))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]  # which is what `deepspeed` runs
    words = [*launcher, "--master_port", free_port(), *shlex.split(command)[1:]]
    environment = without_gpus() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "It fits." in done.stdout, done.stderr[-2000:]
