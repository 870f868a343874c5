"""What a command does besides its work: what it imports, when the collector runs, and how its process ends."""

from __future__ import annotations

import gc
import importlib
import resource
import subprocess
import sys

import pytest
import tomllib
from conftest import ROOT, without_gpus

from zero_inference.cli import main
from zero_inference.utils import interpreter

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


def test_the_installed_command_does_not_tear_down_what_it_imported():
    module, _, name = entry_point().partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    code = (
        "import atexit, sys\natexit.register(print, 'torn down')\nsys.argv = ['zero-inference', 'report', '--fields']\n"
        f"from {module} import {name}\n{name}()"
    )
    out = run_python(code).stdout
    assert "weight_bytes" in out and "torn down" not in out


@pytest.fixture(autouse=True)
def enabled_again(nothing_frozen):
    yield
    gc.enable()


def test_collections_are_put_off_and_come_back_whatever_happens():
    with pytest.raises(ValueError), interpreter.postpone_collections():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    with interpreter.postpone_collections():
        interpreter.resume_collections()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.disable()
    with interpreter.postpone_collections():
        interpreter.resume_collections()
        assert not gc.isenabled()
    assert not gc.isenabled(), "who had switched it off keeps it so"
    gc.enable()
    interpreter.resume_collections()
    assert gc.get_freeze_count() == 0, "there is nothing to end"
    with interpreter.freeze_existing_objects():
        with interpreter.postpone_collections():
            interpreter.resume_collections()
        assert gc.get_freeze_count() > 0, "the inner block must not unfreeze"
    assert gc.get_freeze_count() == 0


def test_calls_map_no_memory_however_deep_they_are():
    def faults_at(depth):
        if depth:
            return faults_at(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(1000):
            nothing()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def nothing():
        pass

    twice = interpreter.reserve_stack(interpreter.reserve_stack(faults_at))
    for reserved in (interpreter.reserve_stack(faults_at), twice):
        assert max(map(reserved, range(300))) < 100  # 1000 at some depths without


def test_a_run_loads_with_the_collector_on_and_without_what_was_imported(checkpoints, tmp_path, monkeypatch):
    from zero_inference import runner
    from zero_inference.engines import resident

    seen = []

    def watched(function):
        return lambda *args: seen.append((gc.isenabled(), gc.get_freeze_count())) or function(*args)

    monkeypatch.setattr(runner, "detect_ranks", watched(runner.detect_ranks))
    monkeypatch.setattr(resident, "load", watched(resident.load))
    words = "--engine resident --dtype float32 --prompt-len 4 --gen-len 2 --loops 1 --warmup 0 --log-file"
    options = ["run_model.py", "--model", str(checkpoints("opt")), *words.split(), str(tmp_path / "run.log")]
    assert main(options) == 0
    assert seen[0] == (False, 0) and seen[1][0] and seen[1][1] > 100_000
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert main([*options, "--prompt-len", "5000"]) == 2 and gc.isenabled()
