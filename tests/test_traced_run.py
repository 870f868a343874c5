"""Kernels of a traced run summed up; tracing itself takes a GPU."""

from benchmarks.traced_run import Kernel, print_kernels


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
