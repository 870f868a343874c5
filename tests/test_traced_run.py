"""Kernels of a traced run summed up; tracing itself takes a GPU."""

from benchmarks.traced_run import Kernel, main, print_kernels
from zero_inference import runner
from zero_inference.planning.plan import Plan


def test_times_and_gaps_of_the_second_half_are_told_by_kernel(capsys):
    """Each second kernel begins 20 us behind the end of the one before; two overlap."""
    kernels = []
    for step in range(20):
        kernels += [Kernel(100.0 * step, 30.0, "product"), Kernel(100.0 * step + 50.0, 50.0, "wait")]
    kernels.append(Kernel(1975.0, 25.0, "copy"))
    print_kernels(kernels)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.0 ms, of which 0.2 nothing computes"
    assert [line.split() for line in lines[1:4]] == [
        ["0.50", "ms", "in", "10", "x", "wait"],
        ["0.30", "ms", "in", "10", "x", "product"],
        ["0.03", "ms", "in", "1", "x", "copy"],
    ]
    assert any(line.split()[:3] == ["0.20", "ms", "before"] and line.endswith("wait") for line in lines)


def test_a_run_is_told_by_its_stages(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Plan, "load", Plan.load)  # put back afterwards, as the next one
    monkeypatch.setattr(runner, "measure_run", runner.measure_run)
    options = "--model opt-125m --dummy --engine resident --prompt-len 4 --gen-len 2 --loops 1 --warmup 0 --log-dir"
    assert main([*options.split(), str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert [stage for stage in ("before loading; predicted: ", "] loaded: ", "] measured: ") if stage not in out] == []
