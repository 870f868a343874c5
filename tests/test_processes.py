"""A group of processes ends with the one that runs it, in whatever way that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from zero_inference.utils.processes import process_group

RUN = (
    "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom zero_inference.utils.processes import run_child\n"
    "print(run_child(['sh', '-c', sys.argv[2]], Path('out')).code)"
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_group_ends_with_its_parent(number, tmp_path):
    """SIGKILL, as of the kernel when memory is short, left a run of `compare` or a sweep going for as long as it took."""
    parent = subprocess.Popen(
        [sys.executable, "-c", RUN, str(ROOT), "sleep 1000 & sleep 1000; exit"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
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
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT), f"sleep 1000 & echo $!; {last}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{code}\n"
    left = int((tmp_path / "out").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


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
    left = int((tmp_path / "compiling").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


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
    shell = subprocess.Popen(
        ["sh", "-c", '"$@"; exit', "sh", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        rank = psutil.Process(int(shell.stdout.readline()))
        launch, run = rank.parents()[1:3]
        {"deepspeed": run, "launch": launch, "outer shell": psutil.Process(shell.pid)}[killed].kill()
        left = psutil.wait_procs([rank], timeout=10 if ends else 2.5)[1]
        assert bool(left) != ends
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    assert ("the launcher has ended" in shell.communicate()[1]) == ends
