"""Which cores multiply: physical ones near the GPUs of the ranks, less one for the Python of each, of what this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.utils import cgroups

CPUS = Path("sys/devices/system/cpu")


def choose_cpus(
    asked: int | None, numa_nodes: Sequence[int | None] = (None,), root: str = "/", allowed: set[int] | None = None
) -> list[int]:
    """Logical CPUs for the threads of a host, one of each physical core.

    Args:
        asked: threads; None takes all of the cores but one for the Python of each rank.
        numa_nodes: where the GPU of each rank is, None for one that is near no node: take the cores of these nodes only, if this
            process may use any of them.
        root: where the system's files are looked for.
        allowed: CPUs that the process may use; its affinity where not given.

    Raises:
        UsageError: more threads than cores were asked for.
    """
    cores = _cores_near(set(numa_nodes), root, allowed)
    of_python: list[int] = []
    for node in numa_nodes:
        free = [cpu for cpu in cores if cpu not in of_python]
        of_python += [cpu for cpu in free if node is None or _node_of(cpu, Path(root)) == node][:1] or free[:1]
    others = [cpu for cpu in cores if cpu not in of_python]
    if asked is None:
        return others or cores
    if asked > len(cores):
        raise UsageError(
            f"--cpu-threads {asked}: this process may use {len(cores)} physical cores; use {len(cores)} or fewer "
            "(hardware threads of one core would wait for each other)."
        )
    return (of_python + others)[-asked:]


def choose_own_cpus(
    numa_node: int | None,
    local_rank: int,
    local_world_size: int,
    root: str = "/",
    allowed: set[int] | None = None,
) -> list[int]:
    """The same for the threads of one rank, where each of a host takes an equal share of the cores: all of it but one."""
    cores = _cores_near({numa_node}, root, allowed)
    count = len(cores) // local_world_size
    mine = cores[local_rank * count : (local_rank + 1) * count] or cores[:1]
    return mine[1:] or mine


def _cores_near(numa_nodes: set[int | None], root: str, allowed: set[int] | None) -> list[int]:
    """A logical CPU of each physical core of these nodes that this process may use, or of any where it may use none of them."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    near = {cpu for cpu in allowed if None in numa_nodes or _node_of(cpu, Path(root)) in numa_nodes}
    cores = _one_of_each_core(near or allowed, Path(root))
    granted = cgroups.cores(root)
    return cores if granted is None else cores[: max(1, int(granted))]


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
