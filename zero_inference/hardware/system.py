"""Read the PCI Express link and the host (NUMA nodes, limits), and warn of what costs speed. Imports no torch."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.utils.environment import available_host_bytes
from zero_inference.utils.format import format_bytes, three_digits

# Generation -> (GT/s of a lane, share of the transferred bits that are data), PCI Express Base Specification, revisions 1.0 to
# 6.0: 8b/10b, then 128b/130b; from 6.0 flits of 256 bytes with 236 of packets (6 are link control, 8 CRC, 6 error correction).
LANES = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 236 / 256),
}
WIDTHS = (1, 2, 4, 8, 12, 16, 32)
EXPECTED_SHARE = 0.8  # of the above; packet headers take the rest (an H200 at generation 5 x16: 55.5 of 63.0 GB/s, 88%)
SMI_FIELDS = (
    "uuid",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)


@dataclass(frozen=True)
class GpuLink:
    """One GPU's PCI Express link, now and at most; None is unknown.

    Attributes:
        numa_node: None also on a machine without NUMA nodes.
        source: "nvml", "nvidia-smi", or None.
    """

    name: str
    pci_id: str | None = None
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


def link_gb_per_s(generation: int | None, width: int | None) -> float | None:
    """Return GB/s (1e9) of a link, one direction before packet headers; None for an unknown generation or width."""
    if generation not in LANES or not width:
        return None
    rate, share = LANES[generation]
    return rate * share * width / 8


def read_gpu_link(uuid: str, name: str, root: str = "/") -> GpuLink:
    """Return the link of the GPU that CUDA calls `uuid`, from NVML, else from nvidia-smi; tests replace `root`.

    NVML's maximum is that of GPU and slot together. The GPU's own maximum, from sysfs, counts if it is higher: so an x16 GPU in an x8
    slot shows.
    """
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    known: dict[str, Any] = {"name": name}
    for source, ask in (("nvml", _ask_nvml), ("nvidia-smi", _ask_nvidia_smi)):
        answer = ask(uuid)
        if answer is not None:
            known |= answer | {"source": source}
            break
    if known.get("pci_id"):
        folder = Path(root) / "sys/bus/pci/devices" / known["pci_id"]
        width = _parse_int(_read(folder / "max_link_width"))
        for key, own in (
            ("generation_max", parse_link_speed(_read(folder / "max_link_speed"))),
            ("width_max", width if width in WIDTHS else None),
        ):
            known[key] = max((value for value in (known.get(key), own) if value is not None), default=None)
        node = _parse_int(_read(folder / "numa_node"))
        known["numa_node"] = node if node is not None and node >= 0 else None  # -1: no node known
    return GpuLink(**known)


def read_host(root: str = "/") -> Host:
    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        numa_nodes=tuple(numa_nodes(os.sched_getaffinity(0), root)),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        memory_bytes=psutil.virtual_memory().total,
        memory_available_bytes=available_host_bytes(),
    )


def numa_nodes(cpus: Iterable[int], root: str = "/") -> list[int]:
    """Return the NUMA nodes of `cpus`, ascending; empty if the kernel has none."""
    wanted = set(cpus)
    return sorted(
        int(folder.name.removeprefix("node"))
        for folder in (Path(root) / "sys/devices/system/node").glob("node[0-9]*")
        if wanted & parse_cpulist(_read(folder / "cpulist"))
    )


def parse_cpulist(text: str) -> set[int]:
    """Parse the kernel's list format: `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def parse_smi_csv(text: str) -> dict[str, dict]:
    """Parse `nvidia-smi --query-gpu=<SMI_FIELDS> --format=csv,noheader,nounits`: uuid -> fields of GpuLink; `[N/A]` becomes None."""
    gpus = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(SMI_FIELDS):
            continue
        uuid, pci_id, *numbers = fields
        names = ("generation", "generation_max", "width", "width_max")
        gpus[uuid] = {"pci_id": sysfs_pci_id(pci_id)} | {
            name: _parse_int(number) for name, number in zip(names, numbers)
        }
    return gpus


def parse_link_speed(text: str) -> int | None:
    """Return the generation of sysfs' `32.0 GT/s PCIe`; None for `Unknown` and the like."""
    rate = text.split(" ")[0]
    return next((generation for generation, (lane, _) in LANES.items() if rate in (f"{lane:.1f}", f"{lane:g}")), None)


def sysfs_pci_id(bus_id: str) -> str:
    """Return sysfs' folder name, `0000:1b:00.0`, for NVIDIA's `00000000:1B:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def warnings_for(gpu: GpuLink | None, host: Host, pinned_gb_per_s: float | None = None) -> list[str]:
    """Return a sentence for each thing that costs speed.

    Args:
        gpu: None without a GPU.
        pinned_gb_per_s: measured rate of page-locked copies to this GPU.
    """
    found = _link_warnings(gpu, host, pinned_gb_per_s) if gpu is not None else []
    if host.memlock_bytes is not None and host.memlock_bytes < host.memory_available_bytes:
        found.append(
            f"the limit of locked memory is {format_bytes(host.memlock_bytes)}, with {format_bytes(host.memory_available_bytes)} of "
            "host memory available: page-locked weights above it may be refused (CUDA often does not count it, for root "
            "and in containers), and it applies to other locked memory, such as buffers of libaio reads; "
            "`ulimit -l unlimited` lifts it."
        )
    return found


def _link_warnings(gpu: GpuLink, host: Host, pinned_gb_per_s: float | None) -> list[str]:
    name = f"GPU {gpu.pci_id or '?'} ({gpu.name})"
    found = []
    if gpu.width and gpu.width_max and gpu.width < gpu.width_max:
        found.append(
            f"{name} has {gpu.width} of {gpu.width_max} PCI Express lanes: copies take {gpu.width_max / gpu.width:g} "
            "times as long; look at the slot, the riser and how the mainboard shares lanes."
        )
    if gpu.generation and gpu.generation_max and gpu.generation < gpu.generation_max:
        found.append(
            f"{name} has a link of PCI Express generation {gpu.generation}, and could do {gpu.generation_max}: the "
            "slot, a switch or a BIOS setting holds it back (or it was idle when asked: GPUs lower it then)."
        )
    if gpu.numa_node is not None and host.numa_nodes and gpu.numa_node not in host.numa_nodes:
        nodes = ", ".join(map(str, host.numa_nodes))
        found.append(
            f"{name} is at NUMA node {gpu.numa_node} and this process runs on {nodes}: its memory is remote to the GPU; "
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


def _ask_nvml(uuid: str) -> dict | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        bus_id = pynvml.nvmlDeviceGetPciInfo(gpu).busId
    except pynvml.NVMLError:
        return None
    else:

        def known(ask) -> int | None:
            try:
                return int(ask(gpu))
            except pynvml.NVMLError:  # a virtual GPU knows some of these and not others
                return None

        return {
            "pci_id": sysfs_pci_id(bus_id.decode() if isinstance(bus_id, bytes) else bus_id),
            "generation": known(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
            "generation_max": known(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
            "width": known(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
            "width_max": known(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        }
    finally:
        pynvml.nvmlShutdown()


def _ask_nvidia_smi(uuid: str) -> dict | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_smi_csv(done.stdout).get(uuid)


def _parse_int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
