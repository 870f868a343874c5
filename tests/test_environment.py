import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata

import psutil
import pytest
from conftest import ROOT

from zero_inference.utils import environment

GIB = 1 << 30


def test_describes_this_machine_as_json():
    described = json.loads(json.dumps(environment.describe_environment(), allow_nan=False))
    assert described["host_memory_bytes"] == psutil.virtual_memory().total
    assert 0 < described["host_memory_available_bytes"] <= described["host_memory_bytes"]
    assert described["cpu_model"] and described["cpu_threads_usable"] >= 1
    assert described["python"] == platform.python_version()
    assert described["packages"]["numpy"] == metadata.version("numpy")
    assert {"gpus", "gpu_driver", "os", "memlock_bytes", "git_commit", "git_dirty"} <= set(described)


def described_in(folder, **variables):
    """What a Python in `folder`, which holds the package, finds."""
    code = "import json; from zero_inference.utils.environment import *; print(json.dumps(describe_environment()))"
    return json.loads(
        subprocess.check_output([sys.executable, "-c", code], cwd=folder, env={**os.environ, **variables}, text=True)
    )


def cgroup_root(tmp_path, membership, files):
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def test_cgroup_v2_takes_the_tightest_level_and_counts_page_cache_as_free(tmp_path):
    group = "sys/fs/cgroup"
    root = cgroup_root(tmp_path, "0::/slice/job\n", {
        f"{group}/slice/job/memory.max": "max\n",
        f"{group}/slice/job/memory.current": "1\n",
        f"{group}/slice/memory.max": f"{8 * GIB}\n",
        f"{group}/slice/memory.current": f"{5 * GIB}\n",
        f"{group}/slice/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file 9\n",
        f"{group}/memory.max": f"{64 * GIB}\n",
        f"{group}/memory.current": f"{6 * GIB}\n",
    })  # fmt: skip
    assert environment.cgroup_memory(root) == (8 * GIB, 4 * GIB)
    assert environment.available_host_bytes(root) <= 4 * GIB
    (tmp_path / group / "slice/memory.max").write_text("max\n")
    (tmp_path / group / "memory.max").write_text("9223372036854771712\n")
    assert environment.cgroup_memory(root) == (None, None)


def test_cgroup_cores_of_either_version(tmp_path):
    second = cgroup_root(tmp_path / "2", "0::/slice/job\n", {
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n", "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/cpu.max": "800000 100000\n",
    })  # fmt: skip
    assert environment.cgroup_cores(second) == 1.5
    first = cgroup_root(tmp_path / "1", "4:cpu,memory:/docker/abc\n0::/\n", {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert environment.cgroup_cores(first) == 2.0 and environment.cgroup_memory(first) == (3 * GIB, 2 * GIB)
    (tmp_path / "1/sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert environment.cgroup_cores(first) is None
    assert 0 < environment.usable_cores() <= len(os.sched_getaffinity(0))


H200 = {"name": "NVIDIA H200", "memory_bytes": 143771 << 20}
ODD = {"name": "NVIDIA Odd, Name", "memory_bytes": None}


@pytest.mark.parametrize("visible, expected", [
    (None, [H200, ODD]), ("1,0", [ODD, H200]), ("GPU-bb", [ODD]), ("0,7,1", [H200]), ("-1", []), ("", []),
])  # fmt: skip
def test_gpus_are_those_the_process_may_use(tmp_path, monkeypatch, visible, expected):
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\necho '570.1, GPU-aa11, 143771, NVIDIA H200'\necho '570.1, GPU-bb22, [N/A], NVIDIA Odd, Name'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    described = described_in(ROOT, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert described["gpu_driver"] == "570.1" and described["gpus"] == expected


def test_git_state_is_of_the_checkout_that_tracks_the_package(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_DIR", raising=False)

    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "core.hooksPath=/dev/null")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    def state(folder):
        described = described_in(folder, PYTHONPATH=str(folder))
        return described["git_commit"], described["git_dirty"]

    own, foreign = tmp_path / "checkout", tmp_path / "venv"
    for folder in (own, foreign):
        shutil.copytree(ROOT / "zero_inference" / "utils", folder / "zero_inference" / "utils")
        for name in ("__init__.py", "errors.py"):
            shutil.copy(ROOT / "zero_inference" / name, folder / "zero_inference" / name)
    git("init", "-q")
    assert state(own) == (None, None)
    git("add", "checkout")
    git("commit", "-q", "-m", "first")
    monkeypatch.setenv("GIT_DIR", "/nonexistent")  # as a hook of another repository would
    commit, dirty = state(own)
    assert len(commit) == 40 and dirty is False
    with (own / "zero_inference" / "errors.py").open("a") as file:
        file.write("changed = True\n")
    assert state(own) == (commit, True)
    assert state(foreign) == (None, None)


def test_other_programs_are_those_that_this_process_did_not_start(tmp_path):
    others, pid, start = environment.CpuContention(), tmp_path / "pid", time.monotonic()
    burn = shlex.join([sys.executable, "-c", "while True: pass"])
    subprocess.run(["sh", "-c", f"{burn} & echo $! > {pid}"], check=True)  # the shell ends: it is nobody's child
    process = psutil.Process(int(pid.read_text()))
    try:
        while sum(process.cpu_times()[:2]) < 1:
            time.sleep(0.05)
        share = others.share()
    finally:
        process.kill()
    assert 0 < share <= 1 and share * environment.usable_cores() * (time.monotonic() - start) > 0.9


@pytest.mark.parametrize("usable, share", [(4.0, 0.75), (2.0, 0.5), (1.0, 0.0)])
def test_what_others_use_beyond_the_own_quota_does_not_count(usable, share, monkeypatch):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(environment, "usable_cores", lambda: usable)
    clock, used = iter([100.0, 110.0]), iter([7.0, 37.0])  # three cores of four
    monkeypatch.setattr(environment.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(environment, "_others_cpu_s", lambda: next(used))
    assert environment.CpuContention().share() == share
