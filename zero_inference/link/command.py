"""`zero-inference link`: what this machine can do, measured, and what about it costs speed.

`_ceilings` is the only place that knows which rates there are; the table and the JSON follow from it. Under a launcher every
rank measures its own GPU at the same time, and the first one prints the sum.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_inference.link.system import GpuLink
    from zero_inference.runtime.distributed import Ranks


@dataclass(frozen=True)
class Ceiling:
    """A rate to measure; `measure` gives it in `unit` (GB/s of 1e9 bytes, TFLOP/s of 1e12) or raises RunError where there is
    none.

    `first_only` is for what the ranks share.
    """

    name: str
    unit: str
    what: str
    bounds: str
    measure: Callable[[], float]
    first_only: bool = False


@dataclass(frozen=True)
class Result:
    """A measured ceiling: this rank's `value`, and `all_ranks`, the sum of what all had at the same time; None without it."""

    ceiling: Ceiling
    value: float | None
    all_ranks: float | None

    def fields(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "all_ranks": self.all_ranks,
            "unit": self.ceiling.unit,
            "what": self.ceiling.what,
            "bounds": self.ceiling.bounds,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference link`."""
    parser.add_argument(
        "--disk",
        metavar="DIR",
        type=Path,
        help="read from the disk of this folder too; writes 1 GiB there and removes it",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # set by the deepspeed launcher


def main(args: argparse.Namespace) -> int:
    """Measures and prints; 0. Raises UsageError for a folder or a GPU that is not there."""
    from zero_inference.errors import RunError, UsageError

    if args.disk is not None and not args.disk.is_dir():
        raise UsageError(f"--disk {args.disk}: there is no such folder.")
    import torch

    from zero_inference.runtime.distributed import detect_ranks, start_process_group, stop_process_group
    from zero_inference.runtime.watch import PeerWatch, lost_connection

    ranks = detect_ranks(args.local_rank)
    if ranks.device.type == "cuda" and ranks.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"{ranks.local_world_size} ranks were started on a node with {torch.cuda.device_count()} visible GPUs; "
            "start one rank a GPU."
        )
    watch = PeerWatch(ranks, lambda reason: reason)  # a rank that is lost ends the others
    watch.start()
    failed = True
    try:
        if ranks.world_size > 1:
            start_process_group(ranks)
        elif ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        report = _report(ranks, args.disk)
        failed = False
    except RuntimeError as error:
        if lost := lost_connection(error):
            raise RunError(f"{lost}.") from error
        raise
    finally:
        watch.stop(failed)
        if not failed or ranks.world_size == 1:  # to part could mean to wait for a rank that is gone
            stop_process_group()
    if not ranks.is_first:
        return 0
    if args.json:
        print(
            json.dumps(
                report | {"ceilings": {each.ceiling.name: each.fields() for each in report["ceilings"]}},
                indent=2,
                allow_nan=False,
            )
        )
    else:
        _print(report)
    return 0


def _ceilings(ranks: Ranks, disk: Path | None) -> list[Ceiling]:
    import torch

    from zero_inference.link import compute, copy
    from zero_inference.link.disk import disk_read_gbps

    device = ranks.device
    if device.type == "cuda":
        rates = [
            Ceiling(
                "host_to_device_pinned_gbps",
                "GB/s",
                "host to GPU, page-locked",
                "bounds decode with weights in host memory",
                lambda: copy.host_to_device_gbps(device, pinned=True),
            ),
            Ceiling(
                "host_to_device_pageable_gbps",
                "GB/s",
                "host to GPU, pageable",
                "bounds the same with --pin-memory 0",
                lambda: copy.host_to_device_gbps(device, pinned=False),
            ),
            Ceiling(
                "device_to_host_pinned_gbps",
                "GB/s",
                "GPU to host, page-locked",
                "bounds writing keys and values with --kv-offload",
                lambda: copy.device_to_host_gbps(device),
            ),
            Ceiling(
                "both_directions_gbps",
                "GB/s",
                "both ways at once, page-locked, summed",
                "at best the two together: keys and values leave while weights arrive",
                lambda: copy.both_directions_gbps(device),
            ),
        ]
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if ranks.world_size == 1 and len(devices) > 1:
            count = len(devices)
            rates.append(
                Ceiling(
                    "all_devices_gbps",
                    "GB/s",
                    f"host to all {count} GPUs at once, page-locked, summed",
                    f"bounds decode of {count} ranks; below {count} x one GPU they share a link or host memory",
                    lambda: copy.several_devices_gbps(devices),
                )
            )
        dtypes, memory = (torch.bfloat16, torch.float16), "GPU memory"
    else:
        rates = [
            Ceiling(
                "host_memory_copy_gbps",
                "GB/s",
                f"{copy.kind_of(device)} (bytes counted once)",
                "there is no GPU: fetching offloaded weights is a copy like this",
                lambda: copy.host_to_device_gbps(device, pinned=False),
            ),
            Ceiling(
                "host_memory_two_copies_gbps",
                "GB/s",
                f"{copy.kind_of(device)}, two at once, summed",
                "keys and values are written while weights are fetched",
                lambda: copy.both_directions_gbps(device),
            ),
        ]
        dtypes, memory = (torch.bfloat16, torch.float32), "host memory"
    rates.append(
        Ceiling(
            "device_copy_gbps",
            "GB/s",
            f"copy inside {memory}, read + write",
            "bounds decode with weights on the device",
            lambda: compute.device_copy_gbps(device),
        )
    )
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        rates.append(
            Ceiling(
                f"matmul_{name}_tflops",
                "TFLOP/s",
                f"matrix product in {name}",
                "bounds prefill, and decode with a large batch",
                lambda dtype=dtype: compute.matmul_tflops(device, dtype),
            )
        )
    if disk is not None:
        rates.append(
            Ceiling(
                "disk_read_gbps",
                "GB/s",
                f"read of {disk}, past the page cache",
                "bounds decode with --disk-offload",
                lambda: disk_read_gbps(disk),
                first_only=True,
            )
        )
    return rates


def _report(ranks: Ranks, disk: Path | None) -> dict[str, Any]:
    """What main prints: facts and warnings are those of all ranks, on each of them."""
    from zero_inference.link.system import read_host, warnings_for

    results, warnings = [], []
    for ceiling in _ceilings(ranks, disk):
        value, failure = _measured(ceiling, ranks)
        warnings += [failure] if failure else []
        summed = ranks.total(round((value or 0) * 1e6)) / 1e6  # int64 sums: to 1e-6 of a unit
        complete = ranks.total(int(value is not None)) == (1 if ceiling.first_only else ranks.world_size)
        results.append(Result(ceiling, value, summed if complete else None))
    host, gpus = read_host(), _gpu_links(ranks)
    pinned = next((each.value for each in results if each.ceiling.name == "host_to_device_pinned_gbps"), None)
    for index, gpu in enumerate(gpus or [None]):
        warnings += warnings_for(gpu, host, pinned if index == 0 else None)  # the first is the one that was measured
    rows = _from_all(
        ranks, {"node": platform.node(), "gpus": gpus, "warnings": warnings, "numa_nodes": host.numa_nodes}
    )
    return {
        "device": ranks.device.type,
        "world_size": ranks.world_size,
        "ceilings": results,
        "gpus": [
            {"rank": rank, "node": row["node"], **dataclasses.asdict(gpu), "limit_gbps": gpu.limit_gbps}
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


def _measured(ceiling: Ceiling, ranks: Ranks) -> tuple[float | None, str | None]:
    """The rate, or why there is none: one that fails must not hide the others."""
    import torch

    from zero_inference.errors import RunError
    from zero_inference.runtime.text import first_line

    ranks.barrier()
    if ceiling.first_only and not ranks.is_first:
        return None, None
    try:
        return ceiling.measure(), None
    except (RunError, torch.OutOfMemoryError) as error:
        return None, f"{ceiling.what}: not measured: {first_line(error)}"
    finally:
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def _gpu_links(ranks: Ranks) -> list[GpuLink]:
    """Links of this rank's GPU, or of all visible ones where there is one rank; each read while it is busy."""
    import torch

    from zero_inference.errors import RunError
    from zero_inference.link.copy import while_copying
    from zero_inference.link.system import read_gpu_link

    if ranks.device.type != "cuda":
        return []
    devices = [ranks.device]
    if ranks.world_size == 1:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    links = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)

        def read() -> GpuLink:
            return read_gpu_link(str(properties.uuid), properties.name)

        try:
            links.append(while_copying(device, read))
        except (RunError, torch.OutOfMemoryError):  # said where the rate was measured
            links.append(read())
    return links


def _from_all(ranks: Ranks, row: dict[str, Any]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    if ranks.world_size == 1:
        return [row]
    rows: list = [None] * ranks.world_size
    dist.all_gather_object(rows, row)
    return rows


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    several = report["world_size"] > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ceiling", overflow="fold")
    table.add_column("first rank" if several else "measured", justify="right", no_wrap=True)
    if several:
        table.add_column("all ranks at once", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("what it means here", overflow="fold")
    for each in report["ceilings"]:
        numbers = [each.value, each.all_ranks] if several else [each.value]
        cells = each.ceiling.what, *map(_figures, numbers), each.ceiling.unit, each.ceiling.bounds
        table.add_row(*map(Text, cells))  # str would be read as markup
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    with console.capture() as shown:  # rich would end the process where the reader of stdout has left
        console.print(table)
    print(shown.get(), end="")
    for line in _facts(report):
        print(line)
    sys.stdout.flush()
    for line in report["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


def _facts(report: dict[str, Any]) -> list[str]:
    lines = []
    if report["device"] != "cuda":
        lines.append("no GPU: there is no link, and the rates are those of this machine's host memory and CPU")
    for gpu in report["gpus"]:
        rank = f"rank {gpu['rank']}, " if report["world_size"] > 1 else ""
        told = f"told by {gpu['source']}" if gpu["source"] else "neither NVML nor nvidia-smi told"
        limit = f", {gpu['limit_gbps']:.1f} GB/s before packet headers" if gpu["limit_gbps"] else ""
        lines.append(
            f"{rank}GPU {_shown(gpu['pci_id'])} ({gpu['name']}): PCI Express generation {_shown(gpu['generation'])} of "
            f"{_shown(gpu['generation_max'])}, lanes {_shown(gpu['width'])} of {_shown(gpu['width_max'])}{limit}; "
            f"NUMA node {_shown(gpu['numa_node'])} ({told})"
        )
    host = report["host"]
    memlock = "none" if host["memlock_bytes"] is None else f"{host['memlock_bytes'] / 2**30:.3f} GiB"
    nodes = " | ".join(",".join(map(str, nodes)) or "unknown" for nodes in report["numa_nodes_of_ranks"])
    who = "each rank" if report["world_size"] > 1 else "this process"
    lines.append(
        f"host memory: {host['memory_bytes'] / 2**30:.1f} GiB, {host['memory_available_bytes'] / 2**30:.1f} GiB "
        f"available; limit of locked memory: {memlock}; NUMA nodes of {who}: {nodes}"
    )
    return lines


def _figures(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _shown(value: object) -> str:
    return "?" if value is None else str(value)
