"""A group of processes ends with the one that runs it, in whatever way that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT

RUN = (
    "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom zero_inference.runtime.processes import run_with_group\n"
    "print(run_with_group(['sh', '-c', sys.argv[2]], Path('out')))"
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
