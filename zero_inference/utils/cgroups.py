"""What the cgroups of this process, v1 and v2, grant it of memory and cores.

A parent's limit holds for its children, so each level is looked at. `root` is where the system's files are looked for.
"""

from __future__ import annotations

from pathlib import Path

# Files of a level: limit, usage, and the key in memory.stat of the page cache that the kernel gives up when asked.
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def memory(root: str = "/") -> tuple[int | None, int | None]:
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


def cores(root: str = "/") -> float | None:
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
