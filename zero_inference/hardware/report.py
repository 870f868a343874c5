"""What `zero-inference link` tells: the measured rooflines of all ranks, what their links are, and what costs speed."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from zero_inference.errors import RunError
from zero_inference.hardware import system
from zero_inference.hardware.copy import while_copying
from zero_inference.hardware.description import Cores
from zero_inference.hardware.rooflines import measure_rooflines
from zero_inference.hardware.system import GpuLink
from zero_inference.utils.format import format_bytes, three_digits
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows


def make_report(ranks: Ranks, disk: Path | None, cores: Cores | None = None) -> dict[str, Any]:
    """Measures, but not what `cores` say; facts and warnings are those of all ranks, on each of them. `rooflines` holds `Result`s, the rest
    is plain."""
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
    """One object; the rooflines are under `ceilings`, which is what readers of it know."""
    shown = {key if key != "rooflines" else "ceilings": value for key, value in report.items()}
    shown["ceilings"] = {each.roofline.name: each.fields() for each in report["rooflines"]}
    return json.dumps(shown, indent=2, allow_nan=False)


def print_report(report: dict[str, Any]) -> None:
    """Table and facts on stdout, warnings on stderr."""
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
    """Links of this rank's GPU, or of all visible ones where there is one rank; each read while it is busy."""
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
        except (RunError, torch.OutOfMemoryError):  # said where the rate was measured
            links.append(read())
    return links


def _facts(report: dict[str, Any]) -> list[str]:
    lines = []
    if report["device"] != "cuda":
        lines.append("no GPU: there is no link, and the rates are those of this machine's host memory and CPU")
    for gpu in report["gpus"]:
        rank = f"rank {gpu['rank']}, " if report["world_size"] > 1 else ""
        told = f"told by {gpu['source']}" if gpu["source"] else "neither NVML nor nvidia-smi told"
        limit = f", {three_digits(gpu['limit_gbps'])} GB/s before packet headers" if gpu["limit_gbps"] else ""
        lines.append(
            f"{rank}GPU {_shown(gpu['pci_id'])} ({gpu['name']}): PCI Express\n  generation {_shown(gpu['generation'])} of "
            f"{_shown(gpu['generation_max'])}, lanes {_shown(gpu['width'])} of {_shown(gpu['width_max'])}{limit}; "
            f"NUMA node {_shown(gpu['numa_node'])} ({told})"
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
