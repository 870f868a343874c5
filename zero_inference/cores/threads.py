"""Which cores multiply: physical ones near the GPU, less one for Python, of what this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.runtime import cgroups

CPUS = Path("sys/devices/system/cpu")


def choose_cpus(
    asked: int | None,
    numa_node: int | None = None,
    local_rank: int = 0,
    local_world_size: int = 1,
    root: str = "/",
    allowed: set[int] | None = None,
) -> list[int]:
    """Logical CPUs for the threads of this rank, one of each physical core.

    Args:
        asked: threads; None takes all cores of this rank's share but one.
        numa_node: take its cores only, if this process may use any of them.
        local_rank, local_world_size: each rank of a host takes an equal share of the cores.
        root: where the system's files are looked for.
        allowed: CPUs that the process may use; its affinity where not given.

    Raises:
        UsageError: more threads than cores were asked for.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    near = {cpu for cpu in allowed if numa_node is None or _node_of(cpu, Path(root)) == numa_node}
    cores = _one_of_each_core(near or allowed, Path(root))
    granted = cgroups.cores(root)
    if granted is not None:
        cores = cores[: max(1, int(granted))]
    count = len(cores) // local_world_size
    mine = cores[local_rank * count : (local_rank + 1) * count] or cores[:1]
    if asked is None:
        return mine[1:] or mine
    if asked > len(mine):
        raise UsageError(
            f"--cpu-threads {asked}: this rank has {len(mine)} physical cores for them; use {len(mine)} or fewer "
            "(hardware threads of one core would wait for each other)."
        )
    return mine[-asked:]


def numa_node_of_gpu(domain: int, bus: int, device: int, root: str = "/") -> int | None:
    """The NUMA node of a PCI device; None where the system does not say."""
    try:
        text = (Path(root) / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _one_of_each_core(cpus: set[int], root: Path) -> list[int]:
    found: dict[tuple[str, str], int] = {}
    for cpu in sorted(cpus):
        topology = root / CPUS / f"cpu{cpu}" / "topology"
        core = (_text(topology / "physical_package_id"), _text(topology / "core_id") or f"cpu{cpu}")
        found.setdefault(core, cpu)
    return list(found.values())


def _node_of(cpu: int, root: Path) -> int | None:
    for folder in (root / CPUS / f"cpu{cpu}").glob("node[0-9]*"):
        return int(folder.name.removeprefix("node"))
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
