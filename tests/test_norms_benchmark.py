"""benchmarks/run_cases.py on a CPU: cases that check themselves, and a refusal that says why."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, without_gpus

sys.path.insert(0, str(ROOT / "benchmarks"))
import run_cases  # noqa: E402
from cases import CASES  # noqa: E402
from common import graph_times, tables  # noqa: E402
from common.diff_engine import WrongResult, calculate_diff  # noqa: E402
from common.times import Times  # noqa: E402
from common.worker import Worker  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", run_cases.NAMES)
def test_every_case_is_right(name, dtype):
    case = CASES[name]
    assert case.name == name, "a case is asked for by its file's name, and its results are kept by its own"
    errors = calculate_diff(case, bs=2, sl=67, hidden_size=72, dtype=dtype, device="cpu")
    inputs = case.build_inputs(72, 1, 8, dtype, 1e-6, "cpu")
    outputs = 2 if name.startswith("add") else 1
    assert len(errors) == outputs + len(case.grad_inputs(inputs))
    weights = [value for key, value in inputs.items() if key in ("weight", "bias")]
    assert weights and all(any(weight is one for one in case.grad_inputs(inputs)) for weight in weights)


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_wrong_kernel_is_told(wrong, monkeypatch, capsys):
    class Wrong(type(CASES["rms"])):
        def make_cuda(self, inputs):
            right = self.make_naive(inputs)
            if wrong == "output":
                return lambda x, weight, eps: right(x, weight, eps) * 1.05
            return lambda x, weight, eps: right(x, weight.detach() + 0 * weight, eps)

    with pytest.raises(WrongResult, match="rms: " + ("output 0" if wrong == "output" else "gradient of weight")):
        calculate_diff(Wrong(), bs=2, sl=8, hidden_size=64, device="cpu")
    monkeypatch.setitem(CASES, "rms", Wrong())
    assert run_cases.main(["--case", "rms"], device="cpu", checked=[(2, 8, 64)]) == 1
    assert "error: rms: " in capsys.readouterr().err


SIZE, LARGE = (4096, 1, 1024), (4096, 8, 8192)


def measured(*, case="rms", backward=False, **us) -> Times:
    """Times of two sizes as if they had been measured; the second takes a hundred times as long."""
    on_cpu, build_inputs = copy.copy(CASES[case]), CASES[case].build_inputs
    on_cpu.build_inputs = lambda *args: build_inputs(*args, "cpu")
    times = Times(on_cpu, torch.bfloat16, 1e-6, peers=False, backward=backward)
    times.providers = list(us)
    for name, value in us.items():
        times.us |= {(SIZE, name): value, (LARGE, name): 100 * value}
        times.spread_us |= {(SIZE, name): (value - 1, value + 1)} if value == value else {}
    return times


def test_columns_of_the_table(tmp_path):
    path = tmp_path / "rms-bf16-fwd-perf.csv"
    times = measured(naive=40.0, compiled=20.0, cuda=8.0, liger=float("nan"))
    tables.write_table(path, times)
    first = path.read_text().splitlines()[0]
    assert "graph" not in first
    times.graph_us = {(SIZE, "cuda"): 7.5}
    tables.write_table(path, times)
    header, row, large = (line.split(",") for line in path.read_text().splitlines())
    assert ",".join(header[:11]) == (
        "dim,batch_size,seq_len,Naive (us),Compiled (us),Cuda (us),SpeedUp (us),"
        "Naive (GB/s),Compiled (GB/s),Cuda (GB/s),Liger (GB/s)"
    )
    values = dict(zip(header, row))
    assert values["dim"] == "4096" and float(values["SpeedUp (us)"]) == 5.0 and float(values["Cuda (us)"]) == 8.0
    assert float(values["Cuda (GB/s)"]) == pytest.approx(2 * 4096 * 1024 * 2 / 8e-6 / 1e9)
    assert float(values["Cuda graph (us)"]) == 7.5 and values["Naive graph (us)"] == "" == values["Liger (us)"]
    assert (float(values["Cuda p20 (us)"]), float(values["Cuda p80 (us)"])) == (7.0, 9.0)
    assert dict(zip(header, large))["Cuda (us)"] == "800.000" and dict(zip(header, large))["Cuda p20 (us)"] == ""
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


CHILD = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from common.times import Times  # noqa: E402
from common.worker import serve

def answer(asked):
    print("what a library prints")
    if asked["provider"] == "naive":
        raise RuntimeError("operation failed due to a previous error during capture\\nand more")
    if asked["provider"] == "compiled":
        os.kill(os.getpid(), signal.SIGSEGV)
    if asked["provider"] == "quack":
        time.sleep(600)
    return os.getpid()

serve(answer)
"""


@pytest.fixture
def worker():
    made = Worker([sys.executable, "-c", CHILD, str(ROOT / "benchmarks")])
    yield made
    made.close()


def test_a_failed_capture_ends_its_own_process_only(worker, capfd):
    times = measured(naive=40.0, compiled=20.0, cuda=0.8, torch=0.9, liger=float("nan"))
    graph_times.add_graph_times(times, [SIZE, LARGE], worker)
    assert set(times.graph_us) == {(SIZE, "cuda"), (SIZE, "torch"), (LARGE, "cuda"), (LARGE, "torch")}
    assert len(set(times.graph_us.values())) == 1, "one process answered all that went well behind the failures"
    told = capfd.readouterr()
    assert "graph times of naive, rms bf16 fwd, from (4096, 1, 1024) on: RuntimeError: operation failed due" in told.err
    assert (
        "graph times of compiled, rms bf16 fwd, from (4096, 1, 1024) on: its process ended with exit code -11"
        in told.err
    )
    assert told.err.count("note: ") == 2 and "what a library prints" in told.err and told.out == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_times_by_cuda_graph():
    (worker,) = graph_times.make_workers(1)
    try:
        for name in ("rms", "add_layer", "mul_poly", "grouped_mul_poly"):
            for backward in (False, True):
                times = Times(CASES[name], torch.bfloat16, 1e-6, peers=False, backward=backward)
                times.us = {((1024, 1, 256), provider): 1.0 for provider in times.providers}
                graph_times.add_graph_times(times, [(1024, 1, 256)], worker)
                assert set(times.graph_us) == set(times.us) and all(
                    0.5 < us < 1000 for us in times.graph_us.values()
                ), times.title
    finally:
        worker.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a CUDA device")
@pytest.mark.parametrize("name", ["poly", "mul_poly"])
def test_liger_gives_gradients_of_the_same_tensors(name):
    pytest.importorskip("liger_kernel", reason="Liger is not installed")
    calculate_diff(
        CASES[name],
        bs=2,
        sl=67,
        hidden_size=256,
        dtype=torch.float32,
        provider=lambda inputs: CASES[name].make_peers(inputs)["liger"],
    )


def test_without_a_device_it_says_so():
    command = [sys.executable, str(ROOT / "benchmarks" / "run_cases.py"), "--case", "poly"]
    done = subprocess.run(command, capture_output=True, text=True, env=without_gpus())
    assert done.returncode == 2 and "CUDA device" in done.stderr and "Traceback" not in done.stderr


def test_geometric_mean_and_image(tmp_path):
    assert tables.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    times = measured(naive=40.0, compiled=20.0, cuda=8.0, liger=float("nan"), backward=True)
    speedups = tables.speedups_of(times, [SIZE, LARGE])
    assert speedups == {"Compiled": [2.0, 2.0], "Cuda": [5.0, 5.0]}, "what failed is not drawn"
    tables.draw_speedups([SIZE[2], LARGE[2]], speedups, "rms", tmp_path / "image.png")
    assert (tmp_path / "image.png").read_bytes()[:4] == b"\x89PNG"
