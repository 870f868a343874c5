"""The process that `link --save` asks what engines take: what it says, how it fails, and that it never stays behind."""

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from zero_inference.cli import console_main
from zero_inference.hardware import measure_profile, overhead_process
from zero_inference.hardware.overhead_process import OverheadProcess
from zero_inference.utils.processes import isolated_module
from zero_inference.utils.ranks import Ranks


def asked(monkeypatch, code: str, **options) -> tuple[dict, list[str]]:
    """What a process that runs `code` is found to have measured, and what was said."""
    monkeypatch.setattr(overhead_process, "isolated_module", lambda *_: [sys.executable, "-c", code])
    said: list[str] = []
    with contextlib.closing(OverheadProcess(**options)) as process:
        process.wait_until_ready(said.append)
        return process.measure(said.append), said


def test_it_measures_when_it_is_told_to(monkeypatch):
    code = """
import sys
print("compiling ...", flush=True)
print("ready", flush=True)
told = sys.stdin.readline().strip()
print("deepspeed, 4 bits: no nvcc\\nmore", file=sys.stderr)
print("loaded\\n{\\"told\\": \\"%s\\"}" % told)
"""
    found, said = asked(monkeypatch, code)
    assert found == {"told": "go"}
    assert said == ["compiling ...", "warning: not measured: deepspeed, 4 bits: no nvcc"]


@pytest.mark.parametrize(
    "code, why",
    [
        ("import sys; sys.exit('out of memory')", "out of memory"),
        ("print('ready', flush=True); input(); print('{}'); raise SystemExit(3)", "it printed no reason"),
        ("print('ready', flush=True); input(); print('[]')", "it printed no reason"),
        ("import os; os.close(0); print('ready', flush=True); os.kill(os.getpid(), 9)", "it printed no reason"),
    ],
)
def test_what_fails_is_told_and_nothing_is_measured(code, why, monkeypatch):
    assert asked(monkeypatch, code) == ({}, [f"warning: engines were not measured: {why}"])


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "import time; print('ready', flush=True); input(); time.sleep(60)"]
)
def test_what_takes_too_long_is_ended(code, monkeypatch):
    found, said = asked(monkeypatch, code, timeout_s=0.5)
    assert (found, said) == ({}, ["warning: engines were not measured: it took longer than 0.5 s"])


@pytest.mark.slow
def test_it_ends_with_the_process_that_asked(tmp_path):
    """Nobody tells it to go, so it measures nothing."""
    process = subprocess.Popen(
        isolated_module("zero_inference", "link", "--engines"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    last, _ = process.communicate(timeout=120)  # which closes its stdin at once
    assert process.returncode == 0 and last.splitlines()[-1] == "ready"
    assert not list(tmp_path.glob("zero-inference-thin-*"))


@pytest.mark.parametrize("ends", [OverheadProcess.close, lambda process: process.measure(lambda line: None)])
def test_it_ends_with_all_that_it_started_however_far_it_is(ends, monkeypatch):
    """Such as a compiler, which would go on writing."""
    code = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
print("ready", flush=True)
time.sleep(60)
"""
    monkeypatch.setattr(overhead_process, "isolated_module", lambda *_: [sys.executable, "-c", code])
    process, said = OverheadProcess(timeout_s=3.0), []
    process.wait_until_ready(said.append)
    both = [psutil.Process(process._process.pid), psutil.Process(int(said[0]))]
    start = time.monotonic()
    ends(process)
    # who reaps them is not ours
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in both):
        assert time.monotonic() - start < 10
        time.sleep(0.05)
    process.close()
    process.close()


def test_nothing_is_started_under_a_launcher_of_several(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("zero_inference.hardware.overhead_process.OverheadProcess", lambda: pytest.fail("started"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert console_main(["zero-inference", "link", "--save", str(tmp_path / "machine.json")]) == 2
    assert "start it without a launcher" in capfd.readouterr().err


@pytest.mark.parametrize("kind, visits", [("cpu", 1), ("cuda", 3)])
def test_the_host_is_measured_while_nothing_is_loaded_beside_it(kind, visits, monkeypatch):
    done = []

    class Launching:
        def __init__(self, device):
            done.append("launching")

        def visit(self):
            done.append("visit")

    class Engines:
        def wait_until_ready(self, say):
            done.append("ready")

        def measure(self, say):
            done.append("engines")
            return {"library_bytes": {"deepspeed": 5}} | ({"process_bytes": 7} if kind == "cuda" else {})

    def described(ranks, basics, *_):
        done.append("described")
        return basics

    monkeypatch.setattr(measure_profile, "LaunchBench", Launching)
    monkeypatch.setattr(measure_profile, "measure_cores", lambda *_: done.append("cores"))
    monkeypatch.setattr(measure_profile, "make_report", lambda *_: {"rooflines": []})
    monkeypatch.setattr(measure_profile, "_profile", described)
    ranks = Ranks(0, 1, 0, 1, torch.device(kind))
    _, basics = measure_profile.measure_this_machine(ranks, Engines(), None, lambda line: None)
    assert done[:5] == ["launching", "ready", "visit", "engines", "cores"] and done.count("visit") == visits
    assert done[-1] == "described", "with all visits"
    assert basics.library_bytes == {"deepspeed": 5}
    assert basics.process_bytes == 7 if kind == "cuda" else basics.process_bytes > basics.measuring_bytes > 0
