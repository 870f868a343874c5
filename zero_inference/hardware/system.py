"""Read the PCI Express links and the host (NUMA nodes, limits), and warn of what costs speed."""

from __future__ import annotations

import os
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_inference.cpu.pool import numa_node_of_gpu
from zero_inference.hardware.spec import LANE_RATES, link_gb_per_s
from zero_inference.utils.environment import available_host_bytes
from zero_inference.utils.format import format_bytes, three_digits

EXPECTED_SHARE = (
    0.8  # of a link's rate; packet headers take the rest (an H200 at generation 5 x16: 55.5 of 63.0 GB/s, 88%)
)
SMI_FIELDS = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"


@dataclass(frozen=True)
class GpuLink:
    """One GPU's PCI Express link, now and at most; None is unknown.

    Attributes:
        source: "nvidia-smi", or None.
    """

    name: str
    pci_id: str
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    numa_node: int | None = None
    source: str | None = None

    @property
    def limit_gb_per_s(self) -> float | None:
        """GB/s (1e9) of the current generation and width, one direction before packet headers."""
        return link_gb_per_s(self.generation, self.width)


@dataclass(frozen=True)
class Host:
    """Host as this process sees it; `memlock_bytes` None is no limit."""

    numa_nodes: tuple[int, ...]
    memlock_bytes: int | None
    memory_bytes: int
    memory_available_bytes: int


def read_gpu_link(device: torch.device, root: str = "/") -> GpuLink:
    """Return the link of a CUDA device, from nvidia-smi; tests replace `root`.

    Its maximum is that of GPU and slot together. The GPU's own maximum, from sysfs, counts if it is higher: so an x16 GPU in an x8 slot
    shows.
    """
    gpu = torch.cuda.get_device_properties(device)
    place = gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id
    pci_id = "{:04x}:{:02x}:{:02x}.0".format(*place)
    folder = Path(root) / "sys/bus/pci/devices" / pci_id
    command = ["nvidia-smi", "-i", pci_id, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    numbers = [int(word) if word.strip().isdigit() else None for word in answer.split(",")]
    source = "nvidia-smi" if len(numbers) == 4 else None
    generation, generation_max, width, width_max = numbers if source else [None] * 4
    generations = {f"{rate:.1f} GT/s PCIe": number for number, (rate, _) in LANE_RATES.items()}
    own_width = _read(folder / "max_link_width")
    own = generations.get(_read(folder / "max_link_speed")), int(own_width) if own_width in ("4", "8", "16") else None
    generation_max, width_max = (
        max(filter(None, pair), default=None) for pair in zip((generation_max, width_max), own)
    )
    node = numa_node_of_gpu(*place, root)
    return GpuLink(gpu.name, pci_id, generation, generation_max, width, width_max, node, source)


def read_host() -> Host:
    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cpus = (Path(f"/sys/devices/system/cpu/cpu{cpu}") for cpu in os.sched_getaffinity(0))
    nodes = {int(node.name.removeprefix("node")) for cpu in cpus for node in cpu.glob("node[0-9]*")}
    return Host(
        numa_nodes=tuple(sorted(nodes)),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        memory_bytes=psutil.virtual_memory().total,
        memory_available_bytes=available_host_bytes(),
    )


def link_warnings(gpu: GpuLink, host: Host, pinned_gb_per_s: float | None = None) -> list[str]:
    """Return a sentence for each thing that slows copies; `pinned_gb_per_s` is the measured rate of page-locked copies to this GPU."""
    name = f"GPU {gpu.pci_id} ({gpu.name})"
    found = []
    if gpu.width and gpu.width_max and gpu.width < gpu.width_max:
        found.append(
            f"{name} has {gpu.width} of {gpu.width_max} PCI Express lanes: copies take {gpu.width_max / gpu.width:g} "
            "times as long; look at the slot, the riser and how the mainboard shares lanes."
        )
    if gpu.generation and gpu.generation_max and gpu.generation < gpu.generation_max:
        found.append(
            f"{name} has a link of PCI Express generation {gpu.generation} of {gpu.generation_max}: the slot, a switch or a BIOS setting "
            "holds it back (or it was idle: GPUs lower it then)."
        )
    if gpu.numa_node is not None and host.numa_nodes and gpu.numa_node not in host.numa_nodes:
        found.append(
            f"{name} is at NUMA node {gpu.numa_node}, this process is not: its memory is remote to the GPU; "
            f"start it under `numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node}`."
        )
    limit = gpu.limit_gb_per_s
    if pinned_gb_per_s is not None and limit is not None and pinned_gb_per_s < EXPECTED_SHARE * limit:
        found.append(
            f"{name}: page-locked copies reach {three_digits(pinned_gb_per_s)} GB/s, {pinned_gb_per_s / limit:.0%} of the "
            f"{three_digits(limit)} GB/s of generation {gpu.generation} x{gpu.width} (at least {EXPECTED_SHARE:.0%} is "
            "usual); other GPUs on the same switch, remote or busy host memory, or a virtual machine may be why."
        )
    return found


def memlock_warnings(host: Host) -> list[str]:
    if host.memlock_bytes is None or host.memlock_bytes >= host.memory_available_bytes:
        return []
    return [
        f"the limit of locked memory is {format_bytes(host.memlock_bytes)}, with {format_bytes(host.memory_available_bytes)} "
        "available: page-locked weights above it may be refused; `ulimit -l unlimited` lifts it."
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
