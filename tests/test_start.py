"""What a command does besides its work: what it imports, when the collector runs, and how its process ends."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import tomllib
from conftest import ROOT, without_gpus

from zero_inference.cli import console_main

MACHINE = "gpus=1x24GiB,host=128GiB,link=25GB/s,cores=60GB/s,memory=1000GB/s,matmul=150TFLOP/s"
PLAN = ["zero-inference", "plan", "--model", "opt-125m", "--dummy", "--assume", MACHINE]
NOT_FOR_A_PLAN = ("matplotlib", "pandas", "datasets", "lm_eval", "sklearn", "tensorboard", "IPython")


def entry_point() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["zero-inference"]


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=without_gpus(), check=True
    )


def test_a_plan_imports_what_it_needs():
    code = "import sys\nfrom zero_inference.cli import console_main\n" + "".join(
        f"assert console_main({[*PLAN, '--engine', *engines]}) == 0\nprint('imported', *sys.modules)\n"
        for engines in (["stream", "resident"], ["deepspeed"])
    )
    lines = run_python(code).stdout.splitlines()
    without, further = (set(line.split()[1:]) for line in lines if line.startswith("imported "))
    assert "transformers" in without and "deepspeed" not in without and "deepspeed" in further
    assert not further & {*NOT_FOR_A_PLAN}


def test_a_plan_searches_without_the_collector(monkeypatch, capsys):
    from zero_inference.planning import search

    seen, find = [], search.find_candidates
    monkeypatch.setattr(search, "find_candidates", lambda *args: seen.append(gc.isenabled()) or find(*args))
    assert console_main([*PLAN, "--engine", "resident"]) == 0
    assert seen == [False] and gc.isenabled()
    assert "resident" in capsys.readouterr().out


def test_the_installed_command_does_not_tear_down_what_it_imported():
    module, _, name = entry_point().partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    code = (
        "import atexit, sys\natexit.register(print, 'torn down')\nsys.argv = ['zero-inference', 'report', '--fields']\n"
        f"from {module} import {name}\n{name}()"
    )
    out = run_python(code).stdout
    assert "weight_bytes" in out and "torn down" not in out
