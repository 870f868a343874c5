"""The process that `link --save` asks what engines take: what it says, how it fails, and that it never stays behind."""

import contextlib
import subprocess
import sys

import psutil
import pytest

from zero_inference.link import engines
from zero_inference.link.engines import EnginesProcess
from zero_inference.runtime.processes import isolated_module


def asked(monkeypatch, code: str, **options) -> tuple[dict, list[str]]:
    """What a process that runs `code` is found to have measured, and what was said."""
    monkeypatch.setattr(engines, "isolated_module", lambda *_: [sys.executable, "-c", code])
    said: list[str] = []
    with contextlib.closing(EnginesProcess(**options)) as process:
        found = process.measured(said.append)
    return found, said


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
        ("print('ready', flush=True); input(); print('{}'); raise SystemExit(3)", "they said nothing"),
        ("print('ready', flush=True); input(); print('[]')", "they said nothing"),
        ("import os; os.close(0); print('ready', flush=True); os.kill(os.getpid(), 9)", "they said nothing"),
    ],
)
def test_what_fails_is_told_and_nothing_is_measured(code, why, monkeypatch):
    assert asked(monkeypatch, code) == ({}, [f"warning: engines were not measured: {why}"])


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "import time; print('ready', flush=True); input(); time.sleep(60)"]
)
def test_what_takes_too_long_is_ended(code, monkeypatch):
    found, said = asked(monkeypatch, code, most_s=0.5)
    assert (found, said) == ({}, ["warning: engines were not measured: it took longer than 0.5 s"])


def test_it_ends_with_the_process_that_asked():
    """Nobody tells it to go, so it measures nothing."""
    process = subprocess.Popen(
        isolated_module("zero_inference", "link", "--engines"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    last, _ = process.communicate(timeout=120)  # which closes its stdin at once
    assert process.returncode == 0 and last.splitlines()[-1] == "ready"


def test_closing_ends_it_however_far_it_is(monkeypatch):
    monkeypatch.setattr(engines, "isolated_module", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    process = EnginesProcess()
    child = psutil.Process(process._process.pid)
    process.close()
    assert not child.is_running()
