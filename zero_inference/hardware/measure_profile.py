"""Measure this machine: the rooflines that `zero-inference link` reports, with facts about links and host, and its hardware profile.

One process measures all visible GPUs. Names of rooflines are keys of the JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from zero_inference.config.options import ENGINES
from zero_inference.cpu.library import load_library, why_unavailable
from zero_inference.cpu.pool import numa_node_of_gpu
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware import bench_copies, bench_cpu, bench_device
from zero_inference.hardware.bench_copies import (
    DISK_SETTINGS,
    BusyLinks,
    DiskRate,
    Lane,
    copy_gb_per_s,
    lane_between,
    lane_from,
    lane_to,
    uncached_block_bytes,
)
from zero_inference.hardware.bench_cpu import FORMATS, ROWS, cpus_of_host, measure_cpu_profile
from zero_inference.hardware.bench_device import LaunchBench, measure_loading, product_times
from zero_inference.hardware.profile import (
    MEASURED_WITH,
    CpuProfile,
    CpuWorkload,
    DeviceProductRate,
    EngineOverhead,
    Gpu,
    HardwareProfile,
    WeightFormat,
    read_profile,
    why_outdated,
    write_profile,
)
from zero_inference.hardware.spec import LANE_RATES, link_gb_per_s
from zero_inference.kernels import extension
from zero_inference.kernels.products import FUSED_ROWS
from zero_inference.utils.environment import (
    CpuContention,
    available_host_bytes,
    describe_environment,
    rate_versions,
    resident_host_bytes,
)
from zero_inference.utils.files import machine_path, make_folder
from zero_inference.utils.format import (
    PIPED_WIDTH,
    Column,
    first_line,
    format_bytes,
    print_rows,
    significant,
    three_digits,
)
from zero_inference.utils.processes import isolated_module, process_group
from zero_inference.utils.progress import current_progress

EXPECTED_SHARE = 0.8  # of a link's rate; packet headers take the rest (an H200 has 55.5 of 63.0 GB/s)
SMI_FIELDS = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
CPU_PRODUCTS: tuple[tuple[WeightFormat, int], ...] = tuple(
    (name, rows) for name in ("bfloat16", "int4") for rows in (1, 8, 32)
)
CPU_ROWS = (*ROWS, 128)
# From FUSED_ROWS + 1 tokens on, codes are dequantized before they are multiplied; from some hundred on operations bind.
GPU_ROWS = (*ROWS, FUSED_ROWS + 1, 128, 512, 2048, 8192)
ENGINES_TIMEOUT_S = 600  # of what takes 30 s unless kernels are compiled

T = TypeVar("T")
Say = Callable[[str], None]  # takes warnings


NVLINK_RATIO = 1.1  # copies between GPUs that are at most so much faster than the link are taken to cross it


def visible_devices() -> tuple[torch.device, ...]:
    """Return all GPUs that this process can use, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.device("cuda", index) for index in range(count)) or (torch.device("cpu"),)


@dataclass(frozen=True)
class GpuLink:
    """One GPU's PCI Express link, now and at most; None is unknown."""

    name: str
    pci_id: str
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    numa_node: int | None = None
    source: str | None = None  # "nvidia-smi"

    @property
    def limit_gb_per_s(self) -> float | None:
        """GB/s (1e9) of the current generation and width, one direction before packet headers."""
        return link_gb_per_s(self.generation, self.width)


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
    answer = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    numbers = [int(word) if word.strip().isdigit() else None for word in answer.split(",")]
    source = "nvidia-smi" if len(numbers) == 4 else None
    generation, generation_max, width, width_max = numbers if source else [None] * 4
    own_generation = own_width = None
    with contextlib.suppress(OSError):
        speed = (folder / "max_link_speed").read_text().strip()
        generations = {f"{rate:.1f} GT/s PCIe": number for number, (rate, _) in LANE_RATES.items()}
        own_generation = generations.get(speed)
        lanes = (folder / "max_link_width").read_text().strip()
        own_width = int(lanes) if lanes in ("4", "8", "16") else None
    return GpuLink(
        name=gpu.name,
        pci_id=pci_id,
        generation=generation,
        generation_max=max(filter(None, (generation_max, own_generation)), default=None),
        width=width,
        width_max=max(filter(None, (width_max, own_width)), default=None),
        numa_node=numa_node_of_gpu(*place, root),
        source=source,
    )


def read_host() -> dict[str, Any]:
    """Return the host as this process sees it; `memlock_bytes` None is no limit."""
    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cpus = (Path(f"/sys/devices/system/cpu/cpu{cpu}") for cpu in os.sched_getaffinity(0))
    return {
        "numa_nodes": sorted({int(node.name.removeprefix("node")) for cpu in cpus for node in cpu.glob("node[0-9]*")}),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": available_host_bytes(),
    }


def link_warnings(gpu: GpuLink, host: dict[str, Any], pinned_gb_per_s: float | None = None) -> list[str]:
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
    if gpu.numa_node is not None and host["numa_nodes"] and gpu.numa_node not in host["numa_nodes"]:
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


def memlock_warnings(host: dict[str, Any]) -> list[str]:
    limit, available = host["memlock_bytes"], host["memory_available_bytes"]
    if limit is None or limit >= available:
        return []
    return [
        f"the limit of locked memory is {format_bytes(limit)}, with {format_bytes(available)} available: page-locked weights above it "
        "may be refused; `ulimit -l unlimited` lifts it."
    ]


@dataclass(frozen=True)
class Roofline:
    """A rate that bounds speed, in GB/s or TFLOP/s (decimal) by the end of its name."""

    name: str
    what: str
    bounds: str  # what it means for a run
    measure: Callable[[], float]  # returns it or raises RunError


def rooflines(devices: Sequence[torch.device], disk: Callable[[], DiskRate] | None = None) -> list[Roofline]:
    """Return the rooflines of the links (without a GPU: host memory), the CPU, the first device and the disk that `disk` measures."""
    device, on_gpu = devices[0], devices[0].type == "cuda"
    decode = "decode with weights in host memory"
    found: list[Roofline] = []

    def add(name: str, what: str, bounds: str, measure: Callable[..., float], *args: Any) -> None:
        found.append(Roofline(name, what, bounds, functools.partial(measure, *args)))

    def copies(*lanes: Callable[[torch.device], Lane]) -> float:
        return copy_gb_per_s(*(lane(device) for lane in lanes))

    if on_gpu:
        pageable = functools.partial(lane_to, pinned=False)
        add("host_to_device_pinned_gbps", "host to GPU, page-locked", decode, copies, lane_to)
        add("host_to_device_pageable_gbps", "host to GPU, pageable", "the same with --pin-memory 0", copies, pageable)
        add("device_to_host_pinned_gbps", "GPU to host, page-locked", "KV cache with --kv-offload", copies, lane_from)
        add("both_directions_gbps", "both ways at once, summed", "weights and KV cache", copies, lane_to, lane_from)
        if len(devices) > 1:
            what, bounds = f"host to all {len(devices)} GPUs at once, summed", f"{decode}, all GPUs"
            add("all_devices_gbps", what, bounds, lambda: copy_gb_per_s(*map(lane_to, devices)))
            add("peer_copy_gbps", "GPU 0 to GPU 1", "hidden states between layers", _peer_copy_gb_per_s, devices[:2])
        if len(devices) > 2:
            what = "each GPU to the next, one at a time, the slowest"
            add("slowest_peer_copy_gbps", what, "the same", lambda: min(map(_peer_copy_gb_per_s, _neighbors(devices))))
    else:
        add("host_memory_copy_gbps", "host memory copy", decode, copies, lane_to)
        add("host_memory_two_copies_gbps", "two copies at once, summed", "KV cache", copies, lane_to, lane_from)
    if load_library() is not None:
        cpus = cpus_of_host(devices)
        cores = f"{len(cpus)} cores"
        read = f"host memory read by {cores}"
        add("cores_read_gbps", read, "what the CPU can multiply", bench_cpu.measure_read_gb_per_s, cpus)
        products = functools.cache(lambda: bench_cpu.measure_products_gb_per_s(cpus, CPU_PRODUCTS))
        for name, rows in CPU_PRODUCTS:
            what, bounds = f"{name} x {rows} tokens, {cores}", f"decode of batch {rows} on the CPU"
            add(f"cores_{name}_{rows}_rows_gbps", what, bounds, lambda *key: products()[key], name, rows)
        if on_gpu and extension.load_extension():  # it has the kernels of the hand-off
            work = CpuWorkload(torch.bfloat16, None, rows=1, columns=bench_cpu.COLUMNS)

            def beside(rate: str, busy: Sequence[torch.device]) -> float:
                return getattr(bench_cpu.measure_concurrent_rates(tuple(busy), cpus, work), rate)

            busy, what = devices[:1], f"bfloat16 x 1 tokens, {cores}, link busy"
            add("cores_beside_link_gbps", what, decode, beside, "cores_gb_per_s", busy)
            what = "host to GPU, while the cores multiply"
            add("link_beside_cores_gbps", what, decode, beside, "link_gb_per_s", busy)
            if len(devices) > 1:
                bounds, what = f"{decode}, all GPUs", f"bfloat16 x 1 tokens, {cores}, all links busy"
                add("cores_beside_all_links_gbps", what, bounds, beside, "cores_gb_per_s", devices)
                what = f"host to all {len(devices)} GPUs, while the cores multiply"
                add("all_links_beside_cores_gbps", what, bounds, beside, "link_gb_per_s", devices)
    what = f"copy in {'GPU' if on_gpu else 'host'} memory, read + write"
    add("device_copy_gbps", what, "decode with weights on the device", bench_device.device_copy_gb_per_s, device)
    for dtype in (torch.bfloat16, torch.float16 if on_gpu else torch.float32):
        kind, bounds = str(dtype).removeprefix("torch."), "prefill, and large batches"
        add(f"matmul_{kind}_tflops", f"matrix product in {kind}", bounds, bench_device.matmul_tflops, device, dtype)
    if disk is not None:
        add("disk_read_gbps", "direct reads from the disk", "decode with weights on disk", lambda: disk().gb_per_s)
    return found


def _neighbors(devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.device]]:
    """Return the pairs of GPUs that hidden states cross: each with the next, and the last with the first."""
    return list(zip(devices, (*devices[1:], devices[0])))


def _link_gb_per_s(device: torch.device) -> float:
    return copy_gb_per_s(lane_to(device))


def _peer_copy_gb_per_s(pair: Sequence[torch.device]) -> float:
    return copy_gb_per_s(lane_between(*pair), seconds=0)  # three rounds of 2 GiB


def make_report(devices: Sequence[torch.device], disk: Path | None) -> dict[str, Any]:
    """Measure the rooflines, and return the JSON object. The rooflines of one GPU are those of the first of `devices`, whose links are
    also measured one by one."""
    results: dict[str, dict[str, Any]] = {}
    warnings = []

    def measured(what: str, measure: Callable[[], float]) -> float | None:
        try:
            return measure()
        except (RunError, torch.OutOfMemoryError) as error:  # a failure must not hide the other rates
            warnings.append(f"not measured: {what}: {first_line(error)}")
            return None
        finally:
            if devices[0].type == "cuda":
                torch.cuda.empty_cache()

    measure_disk = None
    if disk is not None:
        measure_disk = functools.cache(lambda: bench_copies.disk_read_rate(disk, settings=DISK_SETTINGS))
    wanted = rooflines(devices, measure_disk)
    with current_progress().task("link", len(wanted), ticking=True) as task:
        for number, roofline in enumerate(wanted):
            task.at(f"rate {number + 1} of {len(wanted)} ({roofline.what})", number)
            results[roofline.name] = {
                "value": measured(roofline.what, roofline.measure),
                "unit": "TFLOP/s" if roofline.name.endswith("tflops") else "GB/s",
                "what": roofline.what,
                "bounds": roofline.bounds,
            }
    if load_library() is None:
        warnings.append(f"the CPU backend was not measured: {why_unavailable()}")
    host, gpus = read_host(), []
    for index, device in enumerate(devices if devices[0].type == "cuda" else ()):
        rate = results["host_to_device_pinned_gbps"]["value"]
        if index > 0:
            rate = measured(f"host to GPU {index}, page-locked", functools.partial(_link_gb_per_s, device))
        gpu = _busy_gpu_link(device)
        facts = {"index": index, **dataclasses.asdict(gpu), "limit_gbps": gpu.limit_gb_per_s}
        gpus.append(facts | {"host_to_device_pinned_gbps": rate})
        warnings += link_warnings(gpu, host, rate)
    return {
        "device": devices[0].type,
        "ceilings": results,
        "gpus": gpus,
        "host": host,
        "disk": measure_disk()._asdict() if results.get("disk_read_gbps", {}).get("value") else None,
        "warnings": list(dict.fromkeys([*warnings, *memlock_warnings(host)])),
    }


def _busy_gpu_link(device: torch.device) -> GpuLink:
    """Read the link of a GPU while it is busy."""
    busy = None
    with contextlib.suppress(RunError, torch.OutOfMemoryError):
        busy = BusyLinks([device])
        # an idle GPU slows its link; 10.7 GB take 0.2 s at generation 5 x16, 0.9 s at 3 x16, and the link stays up for some seconds
        busy.begin(40)
    link = read_gpu_link(device)
    torch.cuda.synchronize(device)
    return link


def print_report(report: dict[str, Any]) -> None:
    """Print table and facts on stdout, warnings on stderr."""
    columns = [
        Column("what", "roofline", dtype="string"),
        Column("value", "measured", significant, whole=True),
        Column("unit", "unit", dtype="string", whole=True),
        Column("bounds", "bounds", dtype="string"),
    ]
    print_rows(list(report["ceilings"].values()), columns, "table", piped_width=PIPED_WIDTH)
    for gpu in report["gpus"]:
        shown = {name: "?" if value is None else value for name, value in gpu.items()}
        rate = gpu["host_to_device_pinned_gbps"]
        print(
            "GPU {index}, {pci_id} ({name}), NUMA node {numa_node}:\n"
            "  PCI Express generation {generation} of {generation_max}, {width} of {width_max} lanes".format(**shown)
            + (f", {gpu['limit_gbps']:.1f} GB/s" if gpu["limit_gbps"] else "")
            + (f"; copies from host memory {three_digits(rate)} GB/s" if rate else "")
        )
    host = report["host"]
    memlock = "none" if host["memlock_bytes"] is None else format_bytes(host["memlock_bytes"])
    print(
        f"host memory: {format_bytes(host['memory_bytes'])}, {format_bytes(host['memory_available_bytes'])} available\n"
        f"limit of locked memory: {memlock}\n"
        f"NUMA nodes of this process: {', '.join(map(str, host['numa_nodes'])) or 'unknown'}",
        flush=True,
    )
    for line in report["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


def measure_and_cache(say: Say) -> None:
    """Measure this machine and write the cache file. Raises UsageError: the file is there and no hardware profile."""
    path = machine_path()
    again = ""
    if path.exists():
        try:
            again = f" again ({why_outdated(read_profile(path))})"
        except UsageError as error:
            raise UsageError(
                f"{path}: the hardware profile of this machine is cached here, but the file is not one that this version reads; remove it, "
                "or set ZERO_INFERENCE_MACHINE to another file."
            ) from error
    make_folder(path.parent)
    say(f"measuring this machine{again}; the results are kept until a version, the CPU or a GPU changes ...")
    report, profile = measure_this_machine(None, say)
    for line in report["warnings"]:
        say(f"warning: {line}")
    write_profile(profile, path)


def measure_this_machine(disk: Path | None, say: Say) -> tuple[dict[str, Any], HardwareProfile]:
    """Return the report that `zero-inference link` prints, and the profile.

    Args:
        disk: a folder whose disk is measured, too.
    """
    devices, contention = visible_devices(), CpuContention()
    device, on_gpu = devices[0], devices[0].type == "cuda"
    with current_progress().task("measuring this machine", 5, ticking=True) as task:
        task.at("step 1 of 5, launches and engines", 0)
        launch_bench, basics = measure_basics(device, say)
        task.at("step 2 of 5, CPU while the link is busy", 1)
        cpu = measure_cores(devices, say)
        if on_gpu:  # ten seconds later, and once more after the report: shared hosts change; without a GPU it made no difference
            launch_bench.visit()
        task.at("step 3 of 5, links, memory and products", 2)
        report = make_report(devices, disk)
        if on_gpu:
            launch_bench.visit()
        links_gb_per_s = [gpu["host_to_device_pinned_gbps"] for gpu in report["gpus"]]
        gpus, host_memory_bytes = _gpus(devices, links_gb_per_s) if on_gpu else (), available_host_bytes()
        task.at("step 4 of 5, products on the device", 3)
        device_products = _device_products(device, say)
        task.at("step 5 of 5, loading of weights", 4)
        loading = _or_warn(say, lambda: measure_loading(device))
    found = {name: each["value"] for name, each in report["ceilings"].items() if each["value"] is not None}
    dtypes = {name: f"matmul_{name}_tflops" for name in ("bfloat16", "float16", "float32")}
    environment = describe_environment()
    return report, HardwareProfile(
        source="measured",
        measured_with=MEASURED_WITH,
        name=f"{platform.node()}, {environment['cpu_model']}",
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions=rate_versions(environment),
        gpus=gpus,
        host_memory_bytes=host_memory_bytes,
        disk_free_bytes=None if disk is None else shutil.disk_usage(disk).free,
        link_gb_per_s=found.get("host_to_device_pinned_gbps" if on_gpu else "host_memory_copy_gbps"),
        all_links_gb_per_s=found.get("all_devices_gbps"),
        pageable_link_gb_per_s=found.get("host_to_device_pageable_gbps"),
        peers_gb_per_s=peers_gb_per_s(devices, found),
        device_gb_per_s=found.get("device_copy_gbps"),
        device_products=device_products,
        matmul_tflops={name: found[key] for name, key in dtypes.items() if key in found},
        disk_gb_per_s=found.get("disk_read_gbps"),
        disk_read_bytes=report["disk"] and report["disk"]["read_bytes"],
        disk_queue_depth=report["disk"] and report["disk"]["queue_depth"],
        cores=cpu,
        launches=launch_bench.result(),
        loading=loading,
        others_cpu_share=round(contention.share(), 3),  # last: it covers all measurements
        **basics,
    )


def peers_gb_per_s(devices: Sequence[torch.device], found: dict[str, float]) -> float | Literal["link"] | None:
    """Return the rate of copies between GPUs, "link" if they cross the links; None with one GPU, or if not measured.

    Args:
        found: rates by the names of `rooflines`.
    """
    if len(devices) < 2:
        return None
    if not all(torch.cuda.can_device_access_peer(*pair) for pair in _neighbors(devices)):
        return "link"  # the driver copies by way of host memory
    rate = found.get("slowest_peer_copy_gbps", found.get("peer_copy_gbps"))
    link = found.get("host_to_device_pinned_gbps")
    return "link" if rate is not None and link is not None and rate <= NVLINK_RATIO * link else rate


def measure_basics(device: torch.device, say: Say) -> tuple[LaunchBench, dict[str, Any]]:
    """Measure host memory, launch overhead and engine overhead; the latter as fields of `HardwareProfile`.

    Call it first: memory that other benchmarks take stays with the process.
    """
    launch_bench = LaunchBench(device)
    # a run without a GPU measures host memory with two such blocks
    measuring_bytes = 0 if device.type == "cuda" else 2 * uncached_block_bytes()
    process_bytes = resident_host_bytes() + measuring_bytes
    launch_bench.visit()
    found = measure_engines(say)
    return launch_bench, {
        "process_bytes": found.get("process_bytes", process_bytes),  # of a process that has generated as runs do
        "measuring_bytes": measuring_bytes,
        "library_bytes": found.get("library_bytes", {}),
        "engine_overheads": tuple(map(EngineOverhead.model_validate, found.get("engine_overheads", ()))),
    }


def measure_engines(say: Say) -> dict[str, Any]:
    """Return what `zero-inference link --engines` prints; nothing if it failed, which `say` reports.

    It is a process of its own, because an engine's library stays where it was imported.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = isolated_module("zero_inference", "link", "--engines")
        with contextlib.suppress(subprocess.TimeoutExpired):
            with process_group(command, stdout=output, stderr=errors) as process:
                process.wait(ENGINES_TIMEOUT_S)
        output.seek(0)
        errors.seek(0)
        last = (output.read().splitlines() or [""])[-1]
        lines = errors.read().strip().splitlines()
    for line in lines:
        if line.startswith(ENGINES):
            say(f"warning: not measured: {line}")
    if process.returncode == 0 and last.startswith("{"):
        return json.loads(last)
    why = lines[-1] if lines else f"exit code {process.returncode} after at most {ENGINES_TIMEOUT_S} s"
    say(f"warning: engines were not measured: {why}")
    return {}


def measure_cores(devices: Sequence[torch.device], say: Say) -> CpuProfile | None:
    """Measure CPU and links while both are busy. Returns None without a GPU, and where it fails, which `say` reports."""
    if devices[0].type != "cuda" or load_library() is None:  # the report says why there is no library
        return None
    if not extension.load_extension():  # it has the kernels of the hand-off
        say(f"warning: the cores were not measured while the link is busy: {extension.why_unavailable()}")
        return None
    return _or_warn(say, lambda: measure_cpu_profile(devices, cpus_of_host(devices), say))


def _or_warn(say: Say, measure: Callable[[], T]) -> T | None:
    try:
        return measure()
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
        return None


def _gpus(devices: Sequence[torch.device], links_gb_per_s: Sequence[float | None]) -> tuple[Gpu, ...]:
    torch.cuda.empty_cache()
    gpus = []
    for device, rate in zip(devices, links_gb_per_s, strict=True):
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        gpus.append(Gpu(name=name, memory_bytes=total, free_bytes=free, link_gb_per_s=rate))
    return tuple(gpus)


def _device_products(device: torch.device, say: Say) -> tuple[DeviceProductRate, ...]:
    tokens = GPU_ROWS if device.type == "cuda" else CPU_ROWS
    unusual = "float32" if device.type == "cuda" else "float16"  # no run chooses it by itself
    rates = []
    for name, (dtype, scheme) in FORMATS.items():
        if name == unusual:
            continue
        found = _or_warn(say, functools.partial(product_times, device, dtype, scheme, tokens)) or {}
        if lost := [count for count in tokens if count not in found]:
            say(f"warning: {name} products of {lost} tokens were not measured: not enough device memory")
        rates += [
            DeviceProductRate(format=name, rows=rows, gb_per_s=each.gb_per_s, call_s=each.call_s)
            for rows, each in found.items()
        ]
    return tuple(rates)
