"""Which cores multiply, on machines made of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from zero_inference.cpu.pool import choose_cpus, numa_node_of_gpu
from zero_inference.errors import UsageError


def machine(root: Path, cores: int, threads_of_core: int = 1, nodes: int = 1, quota: str | None = None) -> set[int]:
    """Make files of a machine whose CPUs are numbered as Linux does: the second thread of each core after all first ones."""
    for thread in range(threads_of_core):
        for core in range(cores):
            folder = root / f"sys/devices/system/cpu/cpu{thread * cores + core}"
            (folder / "topology").mkdir(parents=True)
            (folder / "topology/core_id").write_text(f"{core}\n")
            (folder / "topology/physical_package_id").write_text("0\n")
            (folder / f"node{core * nodes // cores}").mkdir()
    if quota is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/\n")
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    return set(range(cores * threads_of_core))


def test_one_thread_a_physical_core_and_one_core_for_python(tmp_path):
    allowed, root = machine(tmp_path, 8, threads_of_core=2), str(tmp_path)
    for threads, cpus in ((None, range(1, 8)), (3, range(5, 8)), (8, range(8))):
        assert choose_cpus(threads, root=root, allowed=allowed) == list(cpus)
    with pytest.raises(UsageError, match="--cpu-threads 9: this process may use 8 physical cores"):
        choose_cpus(9, root=root, allowed=allowed)


@pytest.mark.parametrize(
    "threads, gpu_nodes, allowed, cpus",
    [
        (None, [1], range(8), [5, 6, 7]),
        (None, [1], [0, 1, 6, 7], [7]),
        (None, [1], [0, 1, 2], [1, 2]),  # none of that node
        (None, [1, 0], range(8), [0, 1, 2, 3, 5, 6, 7]),  # one Python thread drives all GPUs, near the first one
        (None, [1, 1], range(8), [5, 6, 7]),
        (None, [None, None, None], range(8), [1, 2, 3, 4, 5, 6, 7]),
        (8, [1, 0], range(8), [4, 0, 1, 2, 3, 5, 6, 7]),
        (None, [1, 0], [0, 4], [0]),
        (None, [1, 0], [4], [4]),  # Python and threads share what there is
    ],
)
def test_cpus_near_the_gpus_that_the_process_may_use(threads, gpu_nodes, allowed, cpus, tmp_path):
    machine(tmp_path, 8, nodes=2)
    assert choose_cpus(threads, gpu_nodes, str(tmp_path), set(allowed)) == cpus


def test_the_node_of_a_gpu(tmp_path):
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert numa_node_of_gpu(0, 0x1B, 0, str(tmp_path)) == 1
    (folder / "numa_node").write_text("-1\n")
    assert numa_node_of_gpu(0, 0x1B, 0, str(tmp_path)) is None
    assert numa_node_of_gpu(0, 2, 0, str(tmp_path)) is None


FEW_THREADS = """
import os, resource, threading, time
from pathlib import Path

import pytest
import torch

from zero_inference.cpu.attention import attention
from zero_inference.cpu.pool import CpuPool
from zero_inference.cpu.products import linear_groups, quantize
from zero_inference.errors import RunError
from zero_inference.hardware.bench_cpu import measure_read_gb_per_s
from zero_inference.kernels.quantization import GroupQuantization

weight, x, threads = torch.randn(4096, 64), torch.randn(3, 64), 256
query, keys, values = torch.randn(2, 8, 1, 64), torch.randn(1, 2, 2, 500, 64), torch.randn(1, 2, 2, 500, 64)
scheme = GroupQuantization(4, 32, torch.float32)
codes = quantize(weight, scheme)
expected = linear_groups(x, scheme.as_weight(*codes), 4096), attention(query, keys, values, threads=1)
torch.set_num_threads(1)  # else OpenMP ends the process
torch.get_num_threads = lambda: threads  # of products and quantizing
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), resource.RLIM_INFINITY))
with pytest.raises(RuntimeError):
    [threading.Thread(target=time.sleep, args=(1,), daemon=True).start() for _ in range(threads)]
found = linear_groups(x, scheme.as_weight(*codes), 4096), attention(query, keys, values, threads=threads)
assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(found, expected))
assert all(torch.equal(*pair) for pair in zip(quantize(weight, scheme), codes))
with pytest.raises(RunError, match="256 CPU threads could not be started"):
    CpuPool([-1] * threads, spin_us=0)
with pytest.raises(RunError, match="256 CPU threads could not be started"):
    measure_read_gb_per_s((-1,) * threads, memory=torch.zeros(1 << 16, dtype=torch.uint8))
os._exit(0)
"""


def test_where_the_system_allows_no_more_threads_those_that_there_are_compute_all():
    """In a process that has memory for its libraries and no thread's stack more."""
    done = subprocess.run([sys.executable, "-c", FEW_THREADS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
