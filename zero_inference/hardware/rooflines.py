"""The rooflines that `zero-inference link` measures, and its report: a table or JSON with facts about links and host, and warnings.

Names of rooflines are keys of the JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.cpu.library import load_library, why_unavailable
from zero_inference.errors import RunError
from zero_inference.hardware import bench_copies, bench_cpu, bench_device, system
from zero_inference.hardware.bench_copies import BusyLink, copy_gb_per_s, lane_from, lane_to
from zero_inference.hardware.profile import WeightFormat
from zero_inference.hardware.system import GpuLink
from zero_inference.kernels.extension import load_extension
from zero_inference.utils.format import first_line, format_bytes, significant
from zero_inference.utils.progress import current_progress
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows

CPU_PRODUCTS: tuple[tuple[WeightFormat, int], ...] = tuple(
    (name, rows) for name in ("bfloat16", "int4") for rows in (1, 8, 32)
)


@dataclass(frozen=True)
class Roofline:
    """A rate that bounds speed, in GB/s or TFLOP/s (decimal) by the end of its name.

    Attributes:
        what: its description in the table.
        bounds: what it means for a run.
        measure: returns it or raises RunError.
    """

    name: str
    what: str
    bounds: str
    measure: Callable[[], float]

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.name.endswith("tflops") else "GB/s"


def rooflines(ranks: Ranks, disk: Path | None) -> list[Roofline]:
    """Return the rooflines of the link (without a GPU: host memory), the CPU, the device and `disk`."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    found: list[Roofline] = []

    def add(name: str, what: str, bounds: str, measure: Callable[[], float]) -> None:
        found.append(Roofline(name, what, bounds, measure))

    decode = "decode with weights in host memory"
    if on_gpu:
        add("host_to_device_pinned_gbps", "host to GPU, page-locked", decode, lambda: copy_gb_per_s(lane_to(device)))
        add(
            "host_to_device_pageable_gbps",
            "host to GPU, pageable",
            "the same with --pin-memory 0",
            lambda: copy_gb_per_s(lane_to(device, pinned=False)),
        )
        add(
            "device_to_host_pinned_gbps",
            "GPU to host, page-locked",
            "writing the KV cache with --kv-offload",
            lambda: copy_gb_per_s(lane_from(device)),
        )
        add(
            "both_directions_gbps",
            "both ways at once, summed",
            "the KV cache leaves while weights arrive",
            lambda: copy_gb_per_s(lane_to(device), lane_from(device)),
        )
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if ranks.world_size == 1 and len(devices) > 1:
            add(
                "all_devices_gbps",
                f"host to all {len(devices)} GPUs at once, summed",
                f"decode of {len(devices)} ranks",
                lambda: copy_gb_per_s(*map(lane_to, devices)),
            )
    else:
        add("host_memory_copy_gbps", "host memory copy", decode, lambda: copy_gb_per_s(lane_to(device)))
        add(
            "host_memory_two_copies_gbps",
            "two such copies at once, summed",
            "the KV cache is written meanwhile",
            lambda: copy_gb_per_s(lane_to(device), lane_from(device)),
        )
    if load_library() is not None:
        _add_cpu_rooflines(add, ranks)
    where = "GPU" if on_gpu else "host"
    add(
        "device_copy_gbps",
        f"copy in {where} memory, read + write",
        "decode with weights on the device",
        lambda: bench_device.device_copy_gb_per_s(device),
    )
    for dtype in (torch.bfloat16, torch.float16 if on_gpu else torch.float32):
        name = str(dtype).removeprefix("torch.")
        add(
            f"matmul_{name}_tflops",
            f"matrix product in {name}",
            "prefill, and large batches",
            functools.partial(bench_device.matmul_tflops, device, dtype),
        )
    if disk is not None:
        add(
            "disk_read_gbps",
            f"read from {disk}, bypassing the page cache",
            "decode with --disk-offload",
            lambda: bench_copies.disk_read_gb_per_s(disk),
        )
    return found


def _add_cpu_rooflines(add: Callable[..., None], ranks: Ranks) -> None:
    """Add CPU reads and products and, with a GPU, products and copies while both are busy."""
    cpus = bench_cpu.cpus_of_rank(ranks)
    add(
        "cores_read_gbps",
        f"host memory read by {len(cpus)} cores",
        "what the cores can multiply",
        lambda: bench_cpu.measure_read_gb_per_s(cpus),
    )

    @functools.cache
    def products() -> dict[tuple[WeightFormat, int], float]:
        return bench_cpu.measure_products_gb_per_s(cpus, CPU_PRODUCTS)

    for name, rows in CPU_PRODUCTS:
        add(
            f"cores_{name}_{rows}_rows_gbps",
            f"{name} x {rows} tokens, {len(cpus)} cores",
            f"decode of batch {rows} on the cores",
            lambda key=(name, rows): products()[key],
        )
    if ranks.device.type == "cuda" and load_extension():  # it has the kernels of the hand-off
        work = bench_cpu.CpuWorkload(torch.bfloat16, None, rows=1, columns=bench_cpu.COLUMNS)
        add(
            "cores_beside_link_gbps",
            f"bfloat16 x 1 token, {len(cpus)} cores, link busy",
            "with the next line: decode with weights in host memory",
            lambda: bench_cpu.measure_concurrent_rates(ranks.device, cpus, work).cores_gb_per_s,
        )
        add(
            "link_beside_cores_gbps",
            "host to GPU, while the cores multiply",
            "cores and link read the same memory",
            lambda: bench_cpu.measure_concurrent_rates(ranks.device, cpus, work).link_gb_per_s,
        )


def measure_rooflines(ranks: Ranks, disk: Path | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Measure on all ranks at the same time (the disk: on the first), and return the results by name and a line for each failure of this
    rank. `all_ranks` is the sum over ranks; None if one failed."""
    results, failures = {}, []
    wanted = rooflines(ranks, disk)
    with current_progress().task("link", len(wanted), ticking=True) as task:
        for number, roofline in enumerate(wanted):
            task.at(f"rate {number + 1} of {len(wanted)} ({roofline.what})", number)
            ranks.barrier()
            value = None
            try:
                if ranks.is_first or roofline.name != "disk_read_gbps":
                    value = roofline.measure()
            except (RunError, torch.OutOfMemoryError) as error:  # a failure must not hide the other rates
                failures.append(f"not measured: {roofline.what}: {first_line(error)}")
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            summed = ranks.total(round((value or 0) * 1e6)) / 1e6  # int64 sums: to 1e-6 of a unit
            count = 1 if roofline.name == "disk_read_gbps" else ranks.world_size
            results[roofline.name] = {
                "value": value,
                "all_ranks": summed if ranks.total(int(value is not None)) == count else None,
                "unit": roofline.unit,
                "what": roofline.what,
                "bounds": roofline.bounds,
            }
    if load_library() is None:
        failures.append(f"the host's cores were not measured: {why_unavailable()}")
    return results, failures


def make_report(ranks: Ranks, disk: Path | None) -> dict[str, Any]:
    """Measure the rooflines, and return the JSON object. Each rank gets the facts and warnings of all."""
    results, warnings = measure_rooflines(ranks, disk)
    host, gpus = system.read_host(), _gpu_links(ranks)
    pinned = results.get("host_to_device_pinned_gbps", {}).get("value")
    for index, gpu in enumerate(gpus):  # the first is the one that was measured
        warnings += system.link_warnings(gpu, host, pinned if index == 0 else None)
    warnings += system.memlock_warnings(host)
    rows = ranks.gather_objects(
        {"node": platform.node(), "gpus": gpus, "warnings": warnings, "numa_nodes": host.numa_nodes}
    )
    return {
        "device": ranks.device.type,
        "world_size": ranks.world_size,
        "ceilings": results,
        "gpus": [
            {"rank": rank, "node": row["node"], **dataclasses.asdict(gpu), "limit_gbps": gpu.limit_gb_per_s}
            for rank, row in enumerate(rows)
            for gpu in row["gpus"]
        ],
        "host": dataclasses.asdict(host),
        "numa_nodes_of_ranks": [row["numa_nodes"] for row in rows],
        "warnings": list(
            dict.fromkeys(
                f"{row['node']}: {line}" if ranks.num_nodes > 1 else line for row in rows for line in row["warnings"]
            )
        ),
    }


def _gpu_links(ranks: Ranks) -> list[GpuLink]:
    """Read the link of this rank's GPU, or of all visible GPUs with one rank, each while it is busy."""
    if ranks.device.type != "cuda":
        return []
    devices = [ranks.device]
    if ranks.world_size == 1:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    links = []
    for device in devices:
        busy = None
        with contextlib.suppress(RunError, torch.OutOfMemoryError), torch.cuda.device(device):
            busy = BusyLink(device)
            # an idle GPU slows its link; 10.7 GB take 0.2 s at generation 5 x16, 0.9 s at 3 x16, and the link stays up for some seconds
            busy.begin(40)
        links.append(system.read_gpu_link(device))
        torch.cuda.synchronize(device)
        del busy
    return links


def print_report(report: dict[str, Any]) -> None:
    """Print table and facts on stdout, warnings on stderr."""
    several = report["world_size"] > 1
    columns = [
        Column("what", "roofline", dtype="string"),
        Column("value", "first rank" if several else "measured", significant, whole=True),
        *([Column("all_ranks", "all ranks", significant, whole=True)] if several else []),
        Column("unit", "unit", dtype="string", whole=True),
        Column("bounds", "bounds", dtype="string"),
    ]
    print_rows(list(report["ceilings"].values()), columns, "table", piped_width=PIPED_WIDTH)
    for gpu in report["gpus"]:
        shown = {name: "?" if value is None else value for name, value in gpu.items()}
        print("GPU {pci_id} ({name}), rank {rank}, NUMA node {numa_node}:".format(**shown))
        print(
            "  PCI Express generation {generation} of {generation_max}, {width} of {width_max} lanes".format(**shown)
            + (f", {gpu['limit_gbps']:.1f} GB/s" if gpu["limit_gbps"] else "")
        )
    host = report["host"]
    memlock = "none" if host["memlock_bytes"] is None else format_bytes(host["memlock_bytes"])
    nodes = " | ".join(",".join(map(str, nodes)) or "unknown" for nodes in report["numa_nodes_of_ranks"])
    print(
        f"host memory: {format_bytes(host['memory_bytes'])}, {format_bytes(host['memory_available_bytes'])} available\n"
        f"limit of locked memory: {memlock}\nNUMA nodes of each rank: {nodes}",
        flush=True,
    )
    for line in report["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
