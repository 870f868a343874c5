"""What machine and versions this is, for the record. Loads neither torch nor any of the packages it names."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "numpy", "safetensors")


def describe_environment() -> dict:
    """The machine, the versions and the checkout, as values for JSON; what cannot be found out is None.

    Memory is in bytes. `memlock_bytes` None means no limit, `host_memory_limit_bytes` None no cgroup limit.
    """
    import psutil

    return {
        "cpu_model": _cpu_model(),
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads_usable": _usable_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "host_memory_limit_bytes": cgroup_memory()[0],
        "host_memory_available_bytes": available_host_bytes(),
        "memlock_bytes": _memlock_bytes(),
        **_gpus(),
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": package_versions(),
        **_git_state(Path(__file__).resolve().parent),
    }


def rate_versions(environment: dict) -> dict[str, str | None]:
    """Of what `describe_environment` gave, what measured rates depend on: packages, driver, CPU."""
    cpu = {"cpu_model": environment["cpu_model"], "cpu_threads": str(environment["cpu_threads_usable"])}
    return environment["packages"] | {"gpu_driver": environment["gpu_driver"]} | cpu


def available_host_bytes(root: str = "/") -> int:
    """Host memory this process can still take: what the machine has free, or what its cgroup leaves if less.

    The page cache counts as free in both, as the kernel gives it up when memory is asked for. Cgroups are looked for below `root`.
    """
    import psutil

    available = psutil.virtual_memory().available
    left = cgroup_memory(root)[1]
    return available if left is None else max(0, min(available, left))


def resident_host_bytes() -> int:
    """Host memory that this process has now, its libraries and page-locked memory included."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_host_bytes() -> int:
    """Most host memory that this process has had. The kernel's own peak of it: that of `getrusage` begins with what the process had that
    started this one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _usable_threads() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def usable_cores() -> float:
    """Cores that this process may use: those it may be scheduled on, or what its cgroup grants if less."""
    return min(float(_usable_threads() or 1), cgroup_cores() or float("inf"))


class CpuContention:
    """Measures how much of the CPU other programs use, from its creation on."""

    def __init__(self) -> None:
        self._start_s, self._used_s = time.monotonic(), _others_cpu_s()

    def share(self) -> float:
        """Return their average share, 0 to 1, of the CPU time that this process may use. What they take of CPUs beyond the quota of a
        cgroup does not count."""
        usable, there = usable_cores(), len(os.sched_getaffinity(0))
        cores = (_others_cpu_s() - self._used_s) / max(time.monotonic() - self._start_s, 1e-3)
        return min(1.0, max(0.0, cores - (there - usable)) / usable)


def _others_cpu_s() -> float:
    """Return the seconds since some moment that the CPUs of this process were busy, without what it and its children used."""
    import psutil

    cpus = os.sched_getaffinity(0)
    times = [each for number, each in enumerate(psutil.cpu_times(percpu=True)) if number in cpus]
    return sum(sum(each) - each.idle - each.iowait - each.guest - each.guest_nice for each in times) - own_cpu_s()


def own_cpu_s() -> float:
    """Return the CPU seconds that this process and its children have used, those that have ended included."""
    import psutil

    used_s = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            used_s += sum(child.cpu_times()[:4])
    return used_s


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def package_versions() -> dict[str, str | None]:
    """Of the packages that a run computes with; None for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> dict:
    """`gpus`: those this process sees, `gpu_driver`: its version.

    torch is asked only where it already holds a device: asking it earlier would create a CUDA context.
    """
    driver, listed = _nvidia_smi()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        seen = [{"name": each.name, "memory_bytes": each.total_memory} for each in properties]
    else:
        seen = _visible(listed)
    return {"gpus": seen, "gpu_driver": driver}


@functools.cache
def _nvidia_smi() -> tuple[str | None, list[dict]]:
    """Driver version and the machine's GPUs by index; (None, []) without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    query = "--query-gpu=driver_version,uuid,memory.total,name"
    output = _output([program, query, "--format=csv,noheader,nounits"]) if program else None
    driver, gpus = None, []
    for line in (output or "").splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) < 4:
            continue
        driver, uuid, mebibytes, name = fields
        memory = int(mebibytes) << 20 if mebibytes.isdigit() else None
        gpus.append({"uuid": uuid, "name": name, "memory_bytes": memory})
    return driver, gpus


def _visible(gpus: list[dict]) -> list[dict]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, up to the first unknown entry."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        chosen = []
        for entry in wanted.split(","):
            entry = entry.strip()
            if entry.isdigit() and int(entry) < len(gpus):
                chosen.append(gpus[int(entry)])
                continue
            named = [gpu for gpu in gpus if entry and gpu["uuid"].startswith(entry)]
            if len(named) != 1:
                break
            chosen += named
        gpus = chosen
    return [{"name": gpu["name"], "memory_bytes": gpu["memory_bytes"]} for gpu in gpus]


def _git_state(folder: Path) -> dict:
    """Commit of the checkout that tracks this package, and whether tracked files were changed since.

    A package installed inside somebody else's checkout (a virtual environment in it) is not tracked by it.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"git_commit": None, "git_dirty": None}
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit or None, "git_dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # Git hooks export GIT_DIR of whatever repository they run in; optional locks would let ranks collide.
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return _output(["git", "-C", str(folder), *arguments], {**env, "GIT_OPTIONAL_LOCKS": "0"})


def _output(command: list[str], env: dict | None = None) -> str | None:
    """Standard output of `command`, None if it cannot be run, fails or takes 10 s."""
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# Files of a level: limit, usage, and the key in memory.stat of the page cache that the kernel gives up when asked.
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def cgroup_memory(root: str = "/") -> tuple[int | None, int | None]:
    """(limit, bytes left under it) of the tightest cgroups from ours up to the top; None without one."""
    limits, lefts = [], []
    for folder, version in _folders(Path(root), "memory"):
        limit_file, usage_file, cache_key = MEMORY_FILES[version]
        limit = _read_int(folder / limit_file)
        # v1 writes "no limit" as the largest page-aligned int64
        if limit is None or limit >= 1 << 60:
            continue
        cache = 0
        for line in _read(folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == cache_key:
                cache = int(value)
        usage = _read_int(folder / usage_file) or 0
        limits.append(limit)
        lefts.append(max(0, limit - max(0, usage - cache)))
    return min(limits, default=None), min(lefts, default=None)


def cgroup_cores(root: str = "/") -> float | None:
    """Cores' worth of time that the tightest cgroup from ours up to the top grants; None without a limit."""
    grants = []
    for folder, version in _folders(Path(root), "cpu"):
        if version == 2:
            words = _read(folder / "cpu.max").split()
        else:
            words = [_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() for word in words):  # "max" and -1 mean no limit
            grants.append(int(words[0]) / int(words[1]))
    return min(grants, default=None)


def _folders(root: Path, controller: str) -> list[tuple[Path, int]]:
    """(folder, version 1 or 2) of each level of our cgroups that may limit `controller`."""
    folders: list[tuple[Path, int]] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            tops, version = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"], 2
        elif controller in controllers.split(","):
            tops, version = [root / "sys/fs/cgroup" / controller], 1
        else:
            continue
        # In a container the path may be the host's and not exist here; the levels above it then do.
        relative = Path(group.lstrip("/"))
        for top in tops:
            folders += [(top / level, version) for level in (relative, *relative.parents)]
    return list(dict.fromkeys(folders))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
