"""Copies of a process are told from processes of their own by nothing but how soon they start: output, exit code, signals, folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ENVIRONMENT, too_few_gpus
from forks import LIBRARIES, PROGRAM, ForkServer

pytestmark = pytest.mark.skipif(not too_few_gpus(1), reason="nothing is copied where there is a GPU")
WAITING = "import time; print(__import__('os').getpid(), flush=True); time.sleep(60)"


@pytest.fixture
def python(copy_python):
    """python(*arguments, **how): start what stands for Python, with pipes."""
    copy_python(PROGRAM)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return lambda *arguments, **how: subprocess.Popen([sys.executable, *arguments], **pipes, **how)


def test_what_is_started_for_python_prints_reads_and_ends_as_python_does(python, tmp_path):
    (tmp_path / "beside.py").write_text("x = 7")
    (tmp_path / "program.py").write_text("import sys, beside; print(sys.argv[1:], beside.x); sys.exit('no')")
    code = "import os, sys; print(input(), os.getcwd(), os.environ['OWN'], sys.argv); print('e', file=sys.stderr); sys.exit(3)"
    own = os.environ | {"OWN": "a"}
    process = python("-I", "-u", "-c", code, "b", "-c", cwd=tmp_path, env=own)
    assert (
        process.communicate("said\n") == (f"said {tmp_path} a ['-c', 'b', '-c']\n", "e\n") and process.returncode == 3
    )
    process = python(tmp_path / "program.py", "1", "2")
    assert process.communicate() == ("['1', '2'] 7\n", "no\n") and process.returncode == 1
    process = python("-m", "json.tool", "--compact")
    assert process.communicate("[1, 2]") == ("[1,2]\n", "") and process.returncode == 0


def test_what_it_starts_by_sys_executable_is_a_copy_too(python):
    imported = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {imported!r}])"
    assert python("-c", code).communicate() == ("True\n", "")


def test_signals_reach_it_and_it_ends_with_whoever_asked(python):
    process = python("-c", WAITING)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process = python("-c", WAITING)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_one_process_is_copied_for_all_that_ask_alike(fork_server):
    path = fork_server(LIBRARIES).path()
    assert path == ForkServer(LIBRARIES, ENVIRONMENT | {"PYTEST_XDIST_WORKER": "another"}).path()
    other = ForkServer(LIBRARIES, ENVIRONMENT | {"HF_HUB_OFFLINE": "0"})
    assert os.path.basename(path) != os.path.basename(other.path()), "the environment may matter to what is imported"
    fork_server(PROGRAM).path()
    assert {path, other.path()} < {entry.path for entry in os.scandir(os.path.dirname(path))}
