"""benchmarks/run_cases.py on a CPU: cases that check themselves, and a refusal that says why."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, without_gpus

sys.path.insert(0, str(ROOT / "benchmarks"))
import run_cases  # noqa: E402
from cases import CASES  # noqa: E402
from common import bench_framework  # noqa: E402
from common.diff_engine import WrongResult, calculate_diff  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", run_cases.NAMES)
def test_every_case_is_right(name, dtype):
    case = CASES[name]
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
    monkeypatch.setattr(run_cases, "why_not_here", lambda: None)
    monkeypatch.setitem(CASES, "rms", Wrong())
    monkeypatch.setattr(run_cases, "check", lambda case, dtype: calculate_diff(case, bs=2, sl=8, hidden_size=64, device="cpu"))
    assert run_cases.main(["--case", "rms"]) == 1
    assert "rms: " in capsys.readouterr().err


def test_padding_and_empty_experts_are_among_the_inputs():
    inputs = CASES["grouped_mul_poly"].build_inputs(16, 1, 1024, torch.float32, 1e-6, "cpu")
    ends = inputs["offsets"].tolist()
    assert len(ends) == 48 and ends == sorted(ends) and ends[-1] == 1008 and len(set(ends)) < 48 and ends[0] == 0


def test_sizes():
    table = run_cases.sizes(CASES["rms"], False, None)
    assert len(table) == 32 and (4096, 8, 8192) in table
    assert [size[1] for size in run_cases.sizes(CASES["rms"], True, None)] == [1] * 4
    assert run_cases.sizes(CASES["grouped_mul_poly"], False, None)[-1] == (1280, 1, 65536)
    assert {size[0] for size in run_cases.sizes(CASES["poly"], False, [8192, 16384])} == {8192, 16384}


def test_rates_behind_the_times(tmp_path):
    path = tmp_path / "rms-bf16-fwd-perf.csv"
    path.write_text("dim,batch_size,seq_len,Naive (us),Compiled (us),Cuda (us),SpeedUp (us)\n"
                    "4096.0,1.0,1024.0,40.0,20.0,8.0,5.0\n")
    times = bench_framework.Times(CPUCase(), torch.bfloat16, 1e-6, peers=False, backward=False)
    times.us = {((4096, 1, 1024), name): value for name, value in (("naive", 40.0), ("compiled", 20.0), ("cuda", 8.0))}
    times.graph_us = {((4096, 1, 1024), "cuda"): 7.5}
    bench_framework.add_rates(path, times)
    header, row = (line.split(",") for line in path.read_text().splitlines())
    assert header[:7] == ["dim", "batch_size", "seq_len", "Naive (us)", "Compiled (us)", "Cuda (us)", "SpeedUp (us)"]
    values = dict(zip(header, row))
    assert values["dim"] == "4096" and float(values["Cuda (GB/s)"]) == pytest.approx(2 * 4096 * 1024 * 2 / 8e-6 / 1e9)
    assert values["Cuda graph (us)"] == "7.5" and values["Naive graph (us)"] == ""


class CPUCase(type(CASES["rms"])):
    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        return super().build_inputs(hidden, bs, sl, dtype, eps, "cpu")


def test_without_a_device_it_says_so():
    command = [sys.executable, str(ROOT / "benchmarks" / "run_cases.py"), "--case", "poly"]
    done = subprocess.run(command, capture_output=True, text=True, env=without_gpus())
    assert done.returncode == 2 and "CUDA device" in done.stderr and "Traceback" not in done.stderr


def test_geometric_mean_and_image(tmp_path):
    assert bench_framework.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    times = bench_framework.Times(CPUCase(), torch.bfloat16, 1e-6, peers=False, backward=True)
    configs = [(4096, 1, 1024), (4096, 1, 2048)]
    us = {"naive": 40.0, "compiled": 20.0, "cuda": 8.0}
    times.us = {(config, name): value for config in configs for name, value in us.items()}
    bench_framework.draw_speedups(times, configs, "rms", tmp_path / "image.png")
    assert (tmp_path / "image.png").read_bytes()[:4] == b"\x89PNG"
