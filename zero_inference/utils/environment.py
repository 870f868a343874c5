"""The host, its limits and the installed versions: for the record and the plan. Imports neither torch nor any of PACKAGES."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "numpy", "safetensors")


def describe_environment() -> dict:
    """Return the host, versions and checkout as JSON values; None where unknown.

    Memory is in bytes. `memlock_bytes` None means no limit, `host_memory_limit_bytes` None no cgroup limit.
    """
    import psutil

    memlock_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cpu_model = re.search(r"^model name\s*:(.*)", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "cpu_model": cpu_model[1].strip() if cpu_model else platform.processor() or platform.machine(),
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads_usable": len(os.sched_getaffinity(0)),
        "host_memory_bytes": psutil.virtual_memory().total,
        "host_memory_limit_bytes": cgroup_memory()[0],
        "host_memory_available_bytes": available_host_bytes(),
        "memlock_bytes": None if memlock_bytes == resource.RLIM_INFINITY else memlock_bytes,
        **_gpus(),
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": package_versions(),
        **_git_state(Path(__file__).resolve().parent),
    }


def rate_versions(environment: dict) -> dict[str, str | None]:
    """Return the values of `describe_environment` that measured rates depend on: packages, driver, CPU."""
    cpu = {"cpu_model": environment["cpu_model"], "cpu_threads": str(environment["cpu_threads_usable"])}
    return environment["packages"] | {"gpu_driver": environment["gpu_driver"]} | cpu


def package_versions() -> dict[str, str | None]:
    """Return the versions of PACKAGES; None for one that is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def available_host_bytes(root: str = "/") -> int:
    """Return the host memory that this process can still take: what is free, page cache included, or what its cgroup leaves if less."""
    import psutil

    available = psutil.virtual_memory().available
    left = cgroup_memory(root)[1]
    return available if left is None else min(available, left)


def resident_host_bytes() -> int:
    """Return the host memory of this process, its libraries and page-locked memory included."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_host_bytes() -> int:
    """Return the peak host memory of this process. The peak of `getrusage`, the fallback, counts from the parent process's memory on."""
    peak_kib = _read_table("/proc/self/status").get("VmHWM:", "").removesuffix("kB")
    return 1024 * (int(peak_kib) if peak_kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def usable_cores() -> float:
    """Return the cores that this process may use: those it may be scheduled on, or its cgroup's quota if less."""
    return min(float(len(os.sched_getaffinity(0))), cgroup_cores() or float("inf"))


class CpuContention:
    """The CPU time that other programs take, from its creation on."""

    def __init__(self) -> None:
        self._start_s, self._used_s = time.monotonic(), _others_cpu_s()

    def share(self) -> float:
        """Return the average share, 0 to 1, that they took of the cores that this process may use. Cores beyond its cgroup's quota are
        free for them."""
        usable, schedulable = usable_cores(), len(os.sched_getaffinity(0))
        taken = (_others_cpu_s() - self._used_s) / max(time.monotonic() - self._start_s, 1e-3)
        return min(1.0, max(0.0, taken - (schedulable - usable)) / usable)


def _others_cpu_s() -> float:
    """Return the seconds that the CPUs of this process were busy since boot, without what it and its children used."""
    import psutil

    own_s = sum(os.times()[:4])  # children that have ended included
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            own_s += sum(child.cpu_times()[:4])
    cpus = os.sched_getaffinity(0)
    times = [each for number, each in enumerate(psutil.cpu_times(percpu=True)) if number in cpus]
    return sum(sum(each) - each.idle - each.iowait - each.guest - each.guest_nice for each in times) - own_s


# cgroups v1 and v2, which psutil does not read. A parent's limit holds for its children, so each level is looked at.


def cgroup_memory(root: str = "/") -> tuple[int | None, int | None]:
    """Return (limit, bytes left under it) of the tightest cgroups from ours up to the top; None without a limit."""
    limits, lefts = [], []
    for folder in _cgroup_levels(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < 1 << 60:  # v1 writes "no limit" as the largest page-aligned int64
            stat = _read_table(folder / "memory.stat")
            cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # given up on demand
            used = int(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes") or 0) - int(cache)
            limits.append(int(limit))
            lefts.append(max(0, int(limit) - max(0, used)))
    return min(limits, default=None), min(lefts, default=None)


def cgroup_cores(root: str = "/") -> float | None:
    """Return the CPU quota, in cores, of the tightest cgroup from ours up to the top; None without a limit."""
    quotas = []
    for folder in _cgroup_levels(root, "cpu"):
        v1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (_read(folder / "cpu.max") or v1).partition(" ")
        if quota.isdigit() and period.isdigit():  # "max" and -1 mean no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_levels(root: str, controller: str) -> list[Path]:
    """Return the folder of each level of our cgroups that may limit `controller`."""
    levels: list[Path] = []
    mounts = Path(root, "sys/fs/cgroup")
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):  # v1
            tops = [mounts / controller]
        else:
            tops = [] if controllers else [mounts, mounts / "unified"]
        relative = Path(group.lstrip("/"))  # in a container it may be the host's, of which only the levels above exist
        levels += [top / level for top in tops for level in (relative, *relative.parents)]
    return levels


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _read_table(path: Path | str) -> dict[str, str]:
    """Return the rest of each line by its first word."""
    return {words[0]: words[1] for line in _read(path).splitlines() if len(words := line.split(None, 1)) == 2}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _gpus() -> dict:
    """Return `gpus`, those that this process sees, and `gpu_driver`, its version.

    torch is asked only if it already uses CUDA: before, asking would create a CUDA context.
    """
    driver, listed = _nvidia_smi()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        seen = [{"name": each.name, "memory_bytes": each.total_memory} for each in properties]
        return {"gpus": seen, "gpu_driver": driver}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = list(listed.values())
    if visible is not None:  # indices or beginnings of UUIDs; like CUDA, up to the first unknown one
        seen = []
        for entry in map(str.strip, visible.split(",")):
            named = [
                gpu
                for index, (uuid, gpu) in enumerate(listed.items())
                if entry == str(index) or uuid.startswith(entry or "no UUID")
            ]
            if len(named) != 1:
                break
            seen += named
    return {"gpus": seen, "gpu_driver": driver}


@functools.cache
def _nvidia_smi() -> tuple[str | None, dict[str, dict]]:
    """Return the driver version and the host's GPUs by UUID; (None, {}) without nvidia-smi."""
    query = "--query-gpu=driver_version,uuid,memory.total,name"
    driver, gpus = None, {}
    for line in (_output(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or "").splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) == 4:
            driver, uuid, mebibytes, name = fields
            gpus[uuid] = {"name": name, "memory_bytes": int(mebibytes) << 20 if mebibytes.isdigit() else None}
    return driver, gpus


def _git_state(folder: Path) -> dict:
    """Return commit and state of the checkout that tracks this package; None if only its virtual environment lies in a checkout."""
    # Git hooks export GIT_DIR of whatever repository they run in; optional locks would let ranks collide.
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {"GIT_OPTIONAL_LOCKS": "0"}
    git = ["git", "-C", str(folder)]
    if _output([*git, "ls-files", "--error-unmatch", "__init__.py"], env) is None:
        return {"git_commit": None, "git_dirty": None}
    changes = _output([*git, "status", "--porcelain", "--untracked-files=no"], env)
    commit = _output([*git, "rev-parse", "HEAD"], env) or None
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _output(command: list[str], env: dict | None = None) -> str | None:
    """Return the standard output of `command`; None if it cannot be run, fails or takes 10 s."""
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
