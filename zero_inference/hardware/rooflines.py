"""The rooflines that `zero-inference link` measures, and its report: a table or JSON with facts about links and host, and warnings.

Names of rooflines are keys of the JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.cpu.library import load_library, why_unavailable
from zero_inference.errors import RunError
from zero_inference.hardware import bench_copies, bench_cpu, bench_device, system
from zero_inference.hardware.bench_copies import while_copying
from zero_inference.hardware.bench_disk import disk_read_gb_per_s
from zero_inference.hardware.profile import CpuProductRate, CpuProfile, WeightFormat
from zero_inference.hardware.system import GpuLink
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.utils.format import first_line, format_bytes, three_digits
from zero_inference.utils.progress import current_progress
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows

CPU_PRODUCT_ROWS = (1, 8, 32)
CPU_FORMATS: tuple[tuple[WeightFormat, GroupQuantization | None], ...] = (
    ("bfloat16", None),
    ("int4", GroupQuantization(4, 64)),
)


@dataclass(frozen=True)
class Roofline:
    """A rate that bounds speed.

    Attributes:
        what: its description in the table.
        bounds: what it means for a run.
        measure: returns it in `unit` (GB/s and TFLOP/s are decimal) or raises RunError.
        first_only: ranks share it, so only the first one measures.
    """

    name: str
    what: str
    bounds: str
    measure: Callable[[], float]
    unit: str = "GB/s"
    first_only: bool = False


@dataclass(frozen=True)
class Result:
    """This rank's `value`, and `all_ranks`, the sum over ranks that measured at the same time; None if one failed."""

    roofline: Roofline
    value: float | None
    all_ranks: float | None

    def fields(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "all_ranks": self.all_ranks,
            "unit": self.roofline.unit,
            "what": self.roofline.what,
            "bounds": self.roofline.bounds,
        }


def measure_rooflines(
    ranks: Ranks, disk: Path | None, known: CpuProfile | None = None
) -> tuple[list[Result], list[str]]:
    """Measure on all ranks at the same time, and return the results and a line for each failure of this rank.

    Args:
        known: CPU rates that were just measured and are not measured again.
    """
    results, failures = [], []
    wanted = rooflines(ranks, disk, known)
    with current_progress().task("link", len(wanted), ticking=True) as task:
        for number, roofline in enumerate(wanted):
            task.at(f"rate {number + 1} of {len(wanted)} ({roofline.what})", number)
            value, failure = _measured(roofline, ranks)
            failures += [failure] if failure else []
            summed = ranks.total(round((value or 0) * 1e6)) / 1e6  # int64 sums: to 1e-6 of a unit
            complete = ranks.total(int(value is not None)) == (1 if roofline.first_only else ranks.world_size)
            results.append(Result(roofline, value, summed if complete else None))
    if load_library() is None:
        failures.append(f"the host's cores were not measured: {why_unavailable()}")
    return results, failures


def rooflines(ranks: Ranks, disk: Path | None, known: CpuProfile | None = None) -> list[Roofline]:
    """Return the rooflines of the link (without a GPU: host memory), the CPU, the device and `disk`."""
    on_gpu = ranks.device.type == "cuda"
    link = _link_rooflines(ranks) if on_gpu else _host_memory_rooflines(ranks.device)
    return (
        link
        + _cpu_rooflines(ranks, known)
        + _device_rooflines(ranks.device)
        + ([] if disk is None else [_disk_roofline(disk)])
    )


def _link_rooflines(ranks: Ranks) -> list[Roofline]:
    device = ranks.device
    found = [
        Roofline(
            "host_to_device_pinned_gbps",
            "host to GPU, page-locked",
            "bounds decode with weights in host memory",
            lambda: bench_copies.host_to_device_gb_per_s(device, pinned=True),
        ),
        Roofline(
            "host_to_device_pageable_gbps",
            "host to GPU, pageable",
            "the same with --pin-memory 0",
            lambda: bench_copies.host_to_device_gb_per_s(device, pinned=False),
        ),
        Roofline(
            "device_to_host_pinned_gbps",
            "GPU to host, page-locked",
            "bounds writing the KV cache with --kv-offload",
            lambda: bench_copies.device_to_host_gb_per_s(device),
        ),
        Roofline(
            "both_directions_gbps",
            "both ways at once, summed",
            "at best the sum of both: the KV cache leaves while weights arrive",
            lambda: bench_copies.both_directions_gb_per_s(device),
        ),
    ]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if ranks.world_size == 1 and len(devices) > 1:
        found.append(_of_all_links(devices))
    return found


def _of_all_links(devices: list[torch.device]) -> Roofline:
    count = len(devices)
    return Roofline(
        "all_devices_gbps",
        f"host to all {count} GPUs at once, summed",
        f"bounds decode of {count} ranks; less than {count} times one GPU means that they share a link or host memory",
        lambda: bench_copies.several_devices_gb_per_s(devices),
    )


def _host_memory_rooflines(device: torch.device) -> list[Roofline]:
    return [
        Roofline(
            "host_memory_copy_gbps",
            f"{bench_copies.kind_of(device)}, counted once",
            "how weights are fetched without a GPU",
            lambda: bench_copies.host_to_device_gb_per_s(device, pinned=False),
        ),
        Roofline(
            "host_memory_two_copies_gbps",
            "two such copies at once, summed",
            "the KV cache is written meanwhile",
            lambda: bench_copies.both_directions_gb_per_s(device),
        ),
    ]


def _cpu_rooflines(ranks: Ranks, known: CpuProfile | None = None) -> list[Roofline]:
    """Return the rooflines of CPU reads and products and, with a GPU, those of CPU and link while both are busy."""
    if load_library() is None:
        return []
    cpus = bench_cpu.cpus_of_rank(ranks)
    many = f"{len(cpus)} core{'s' if len(cpus) > 1 else ''}"
    found = [
        Roofline(
            "cores_read_gbps",
            f"host memory read by {many}",
            "bounds what the cores can multiply",
            lambda: bench_cpu.measure_read_gb_per_s(cpus),
        )
    ]
    rates = {} if known is None else {(each.format, each.rows): each for each in known.products}
    wanted = [(scheme, rows) for name, scheme in CPU_FORMATS for rows in CPU_PRODUCT_ROWS if (name, rows) not in rates]

    @functools.cache
    def measured() -> dict[tuple[GroupQuantization | None, int], float]:
        return dict(zip(wanted, bench_cpu.measure_products_gb_per_s(cpus, torch.bfloat16, wanted)))

    def product_gb_per_s(name: WeightFormat, scheme: GroupQuantization | None, rows: int) -> float:
        rate = rates.get((name, rows))
        return measured()[scheme, rows] if rate is None else rate.cores_alone_gb_per_s

    for name, scheme in CPU_FORMATS:
        for rows in CPU_PRODUCT_ROWS:
            found.append(
                Roofline(
                    f"cores_{name}_{rows}_rows_gbps",
                    f"{name} x {rows} token{'s' if rows > 1 else ''}, {many}",
                    f"bounds decode of batch {rows} on the cores",
                    functools.partial(product_gb_per_s, name, scheme, rows),
                )
            )
    if ranks.device.type == "cuda" and load_extension():  # it has the kernels of the hand-off
        found += _cpu_beside_link_rooflines(ranks.device, cpus, many, rates.get(("bfloat16", 1)))
    return found


def _cpu_beside_link_rooflines(
    device: torch.device, cpus: tuple[int, ...], many: str, known: CpuProductRate | None
) -> list[Roofline]:
    def measured() -> CpuProductRate | bench_cpu.ConcurrentRates:
        return known or bench_cpu.measure_concurrent_rates(device, cpus, torch.bfloat16, None, 1, 8192)

    return [
        Roofline(
            "cores_beside_link_gbps",
            f"bfloat16 x 1 token, {many}, link busy",
            "together with the next line: bounds decode with weights in host memory",
            lambda: measured().cores_gb_per_s,
        ),
        Roofline(
            "link_beside_cores_gbps",
            "host to GPU, while the cores multiply",
            "cores and link read the same memory",
            lambda: measured().link_gb_per_s,
        ),
    ]


def _device_rooflines(device: torch.device) -> list[Roofline]:
    on_gpu = device.type == "cuda"
    memory = Roofline(
        "device_copy_gbps",
        f"copy in {'GPU' if on_gpu else 'host'} memory, read + write",
        "bounds decode with weights on the device",
        lambda: bench_device.device_copy_gb_per_s(device),
    )
    dtypes = (torch.bfloat16, torch.float16 if on_gpu else torch.float32)
    return [memory, *(_product_roofline(device, dtype) for dtype in dtypes)]


def _product_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    name = str(dtype).removeprefix("torch.")
    return Roofline(
        f"matmul_{name}_tflops",
        f"matrix product in {name}",
        "bounds prefill, and large batches",
        lambda: bench_device.matmul_tflops(device, dtype),
        unit="TFLOP/s",
    )


def _disk_roofline(disk: Path) -> Roofline:
    return Roofline(
        "disk_read_gbps",
        f"read from {disk}, bypassing the page cache",
        "bounds decode with --disk-offload",
        lambda: disk_read_gb_per_s(disk),
        first_only=True,
    )


def _measured(roofline: Roofline, ranks: Ranks) -> tuple[float | None, str | None]:
    """Return the rate, or why there is none: a failure must not hide the other rates."""
    ranks.barrier()
    if roofline.first_only and not ranks.is_first:
        return None, None
    try:
        return roofline.measure(), None
    except (RunError, torch.OutOfMemoryError) as error:
        return None, f"not measured: {roofline.what}: {first_line(error)}"
    finally:
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def make_report(ranks: Ranks, disk: Path | None, cores: CpuProfile | None = None) -> dict[str, Any]:
    """Measure everything but the CPU rates `cores`. Each rank gets the facts and warnings of all. `rooflines` has `Result`s."""
    results, warnings = measure_rooflines(ranks, disk, cores)
    host, gpus = system.read_host(), _gpu_links(ranks)
    pinned = next((each.value for each in results if each.roofline.name == "host_to_device_pinned_gbps"), None)
    for index, gpu in enumerate(gpus or [None]):
        warnings += system.warnings_for(
            gpu, host, pinned if index == 0 else None
        )  # the first is the one that was measured
    rows = ranks.gather_objects(
        {"node": platform.node(), "gpus": gpus, "warnings": warnings, "numa_nodes": host.numa_nodes}
    )
    return {
        "device": ranks.device.type,
        "world_size": ranks.world_size,
        "rooflines": results,
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


def as_json(report: dict[str, Any]) -> str:
    """Return one JSON object; the key of the rooflines is `ceilings`."""
    shown = {key if key != "rooflines" else "ceilings": value for key, value in report.items()}
    shown["ceilings"] = {each.roofline.name: each.fields() for each in report["rooflines"]}
    return json.dumps(shown, indent=2, allow_nan=False)


def print_report(report: dict[str, Any]) -> None:
    """Print table and facts on stdout, warnings on stderr."""
    several = report["world_size"] > 1
    columns = [
        Column("what", "roofline", dtype="string"),
        Column("value", "first rank" if several else "measured", _figures, whole=True),
        *([Column("all_ranks", "all ranks at once", _figures, whole=True)] if several else []),
        Column("unit", "unit", dtype="string", whole=True),
        Column("bounds", "what it means here", dtype="string"),
    ]
    rows = [vars(each.roofline) | {"value": each.value, "all_ranks": each.all_ranks} for each in report["rooflines"]]
    print_rows(rows, columns, "table", piped_width=PIPED_WIDTH)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    for line in _facts(report):
        for part in line.split("\n"):
            print(textwrap.fill(part, width, subsequent_indent="  ", break_long_words=False))
    sys.stdout.flush()
    for line in report["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


def _gpu_links(ranks: Ranks) -> list[GpuLink]:
    """Read the link of this rank's GPU, or of all visible GPUs with one rank, each while it is busy."""
    if ranks.device.type != "cuda":
        return []
    devices = [ranks.device]
    if ranks.world_size == 1:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    links = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        read = functools.partial(system.read_gpu_link, str(properties.uuid), properties.name)
        try:
            links.append(while_copying(device, read))
        except (RunError, torch.OutOfMemoryError):  # the failed rate has a warning
            links.append(read())
    return links


def _facts(report: dict[str, Any]) -> list[str]:
    lines = []
    if report["device"] != "cuda":
        lines.append("no GPU: there is no link, and the rates are those of this machine's host memory and CPU")
    for gpu in report["gpus"]:
        rank = f"rank {gpu['rank']}, " if report["world_size"] > 1 else ""
        source = f"by {gpu['source']}" if gpu["source"] else "unknown to NVML and nvidia-smi"
        limit = f", {three_digits(gpu['limit_gbps'])} GB/s before packet headers" if gpu["limit_gbps"] else ""
        lines.append(
            f"{rank}GPU {_shown(gpu['pci_id'])} ({gpu['name']}): PCI Express\n  generation {_shown(gpu['generation'])} of "
            f"{_shown(gpu['generation_max'])}, lanes {_shown(gpu['width'])} of {_shown(gpu['width_max'])}{limit}; "
            f"NUMA node {_shown(gpu['numa_node'])} ({source})"
        )
    host = report["host"]
    memlock = "none" if host["memlock_bytes"] is None else format_bytes(host["memlock_bytes"])
    nodes = " | ".join(",".join(map(str, nodes)) or "unknown" for nodes in report["numa_nodes_of_ranks"])
    who = "each rank" if report["world_size"] > 1 else "this process"
    lines.append(
        f"host memory: {format_bytes(host['memory_bytes'])}, {format_bytes(host['memory_available_bytes'])} available; "
        f"limit of locked memory: {memlock}; NUMA nodes of {who}: {nodes}"
    )
    return lines


def _figures(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _shown(value: object) -> str:
    return "?" if value is None else str(value)
