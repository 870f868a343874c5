"""This machine, measured for a file: what `zero-inference link --save` writes."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zero_inference.cpu.library import best_instructions, load_library
from zero_inference.errors import RunError
from zero_inference.hardware.bench_copies import uncached_block_bytes
from zero_inference.hardware.bench_cpu import (
    ATTENTION_HEADS,
    FORMATS,
    ROWS,
    AttentionBench,
    cpus_of_host,
    measure_cpu_rates,
)
from zero_inference.hardware.bench_device import measure_loading, product_times
from zero_inference.hardware.bench_launch import LaunchBench
from zero_inference.hardware.overhead_process import OverheadProcess
from zero_inference.hardware.profile import (
    MEASURED_WITH,
    CpuAttentionRate,
    CpuProfile,
    DeviceProductRate,
    EngineOverhead,
    Gpu,
    HardwareProfile,
    LoadingRates,
)
from zero_inference.hardware.rooflines import Result, make_report
from zero_inference.kernels import extension
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.products import FUSED_ROWS
from zero_inference.utils.environment import (
    CpuContention,
    available_host_bytes,
    describe_environment,
    rate_versions,
    resident_host_bytes,
)
from zero_inference.utils.format import first_line
from zero_inference.utils.progress import Task, current_progress
from zero_inference.utils.ranks import Ranks

DEVICE_ROWS = (*ROWS, 128)
# With one token more than codes are multiplied as they are, these are restored first; from some hundred on operations bind.
GPU_ROWS = (*ROWS, FUSED_ROWS + 1, 128, 512, 2048, 8192)
MATMUL = "matmul_{}_tflops"  # names of rooflines


@dataclass(frozen=True)
class Basics:
    """What is found before this process measures anything else: see `HardwareProfile`."""

    launching: LaunchBench
    process_bytes: int
    measuring_bytes: int
    library_bytes: dict[str, int]
    engine_overheads: tuple[EngineOverhead, ...]


def measure_this_machine(
    ranks: Ranks, engines: OverheadProcess, disk: Path | None, say: Callable[[str], None]
) -> tuple[dict[str, Any], HardwareProfile]:
    """What `link.report` tells, and what a file keeps.

    Args:
        engines: started before, so that it is ready.
        disk: a folder whose disk is measured.
        say: told what could not be measured.
    """
    on_gpu, others = ranks.device.type == "cuda", CpuContention()
    with current_progress().task("measuring this machine", 7 if on_gpu else 5, ticking=True) as task:
        step = Steps(task)
        basics = measure_basics(ranks, engines, say, step)
        cores = measure_cores(ranks, say, step)
        if on_gpu:  # ten seconds later, and once more; without one a host is as fast as it was
            basics.launching.visit()
        step("rates of links, memory and products")
        report = make_report(ranks, disk, cores)
        if on_gpu:
            basics.launching.visit()
        return report, _description(ranks, basics, cores, report["rooflines"], disk, say, step, others)


class Steps:
    """Counts the steps of `task` as each begins."""

    def __init__(self, task: Task):
        self.task, self.begun = task, 0

    def __call__(self, what: str) -> None:
        self.begun += 1
        self.task.at(f"step {self.begun} of {self.task.total:g}, {what}", self.begun - 1)


def measure_basics(
    ranks: Ranks, engines: OverheadProcess, say: Callable[[str], None], step: Callable[[str], None] = lambda what: None
) -> Basics:
    """To be called before anything else is measured: what that takes would stay with the process."""
    step("how long the host takes to launch operators")
    launching = LaunchBench(ranks.device)
    # a run without a GPU measures its memory by copies of such blocks
    measuring_bytes = 0 if ranks.device.type == "cuda" else 2 * uncached_block_bytes()
    process_bytes = resident_host_bytes() + measuring_bytes
    engines.wait_until_ready(say)  # a host that loads or compiles something is slower
    launching.visit()
    step("what engines add to the model's own work")
    found = engines.measured(say)
    engine_overheads = tuple(EngineOverhead.model_validate(each) for each in found.get("engine_overheads", ()))
    process_bytes = found.get("process_bytes", process_bytes)  # of one that has generated as runs do
    return Basics(launching, process_bytes, measuring_bytes, found.get("library_bytes", {}), engine_overheads)


def _description(
    ranks: Ranks,
    basics: Basics,
    cores: CpuProfile | None,
    results: Sequence[Result],
    disk: Path | None,
    say: Callable[[str], None],
    step: Callable[[str], None],
    others: CpuContention,
) -> HardwareProfile:
    """What was found, with products on the device and loading, which are measured here."""
    on_gpu = ranks.device.type == "cuda"
    found = {each.roofline.name: each.value for each in results if each.value is not None}
    environment = describe_environment()
    dtypes = {name: found.get(MATMUL.format(name)) for name in ("bfloat16", "float16", "float32")}
    return HardwareProfile(
        source="measured",
        measured_with=MEASURED_WITH,
        name=f"{platform.node()}, {environment['cpu_model']}",
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions=rate_versions(environment),
        gpus=_gpus() if on_gpu else (),
        host_memory_bytes=available_host_bytes(),
        disk_free_bytes=None if disk is None else shutil.disk_usage(disk).free,
        link_gb_per_s=found.get("host_to_device_pinned_gbps" if on_gpu else "host_memory_copy_gbps"),
        pageable_link_gb_per_s=found.get("host_to_device_pageable_gbps"),
        device_gb_per_s=found.get("device_copy_gbps"),
        device_products=_device_products(ranks, say, step),
        matmul_tflops={name: value for name, value in dtypes.items() if value is not None},
        disk_gb_per_s=found.get("disk_read_gbps"),
        cores=cores,
        launches=basics.launching.found(),
        engine_overheads=basics.engine_overheads,
        loading=_loading(ranks, say, step),
        process_bytes=basics.process_bytes,
        measuring_bytes=basics.measuring_bytes,
        library_bytes=basics.library_bytes,
        others_cpu_share=round(others.share(), 3),  # the last, with all that was measured
    )


def _gpus() -> tuple[Gpu, ...]:
    torch.cuda.empty_cache()
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(name=torch.cuda.get_device_name(index), memory_bytes=total, free_bytes=free))
    return tuple(gpus)


def _device_products(
    ranks: Ranks, say: Callable[[str], None], step: Callable[[str], None]
) -> tuple[DeviceProductRate, ...]:
    step("products on the device")
    on_gpu = ranks.device.type == "cuda"
    rates = []
    for name, (dtype, scheme) in FORMATS.items():
        if name == ("float32" if on_gpu else "float16"):  # which no run there has by itself
            continue
        tokens = GPU_ROWS if on_gpu else DEVICE_ROWS
        try:
            found = product_times(ranks.device, dtype, scheme, tokens)
        except torch.OutOfMemoryError as error:
            say(f"warning: not measured: {first_line(error)}")
            continue
        if lost := [count for count in tokens if count not in found]:
            say(
                f"warning: {name} products of {', '.join(map(str, lost))} tokens were not measured: not enough device memory"
            )
        rates += [
            DeviceProductRate(format=name, rows=rows, gb_per_s=each.gb_per_s, call_s=each.call_s)
            for rows, each in found.items()
        ]
    return tuple(rates)


def _loading(ranks: Ranks, say: Callable[[str], None], step: Callable[[str], None]) -> LoadingRates | None:
    step("loading of weights")
    try:
        return measure_loading(ranks.device)
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
        return None


def measure_cores(
    ranks: Ranks, say: Callable[[str], None], step: Callable[[str], None] = lambda what: None
) -> CpuProfile | None:
    """The rates of cores and link beside each other; None without a GPU, and where they cannot be measured, which is told."""
    if ranks.device.type != "cuda" or load_library() is None:  # which the rooflines tell
        return None
    if not load_extension():  # it has the kernels that meet the cores
        say(f"warning: the cores were not measured while the link is busy: {extension.why_unavailable()}")
        return None
    cpus = cpus_of_host(ranks)
    step(f"{len(cpus)} cores while the link is busy")
    try:
        found = measure_cpu_rates(ranks.device, cpus)
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
        return None
    return CpuProfile(
        threads=len(cpus),
        instructions=best_instructions(),
        read_gb_per_s=found.read_gb_per_s,
        products=found.products,
        attention=_attention(ranks, cpus, say, step),
    )


def _attention(
    ranks: Ranks, cpus: tuple[int, ...], say: Callable[[str], None], step: Callable[[str], None]
) -> tuple[CpuAttentionRate, ...]:
    step(f"attention by {len(cpus)} cores while the link is busy")
    rates = []
    names: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    try:
        with contextlib.closing(AttentionBench(ranks.device, cpus)) as bench:
            for name, heads in itertools.product(names, ATTENTION_HEADS):
                found = bench.measured(FORMATS[name][0], heads)
                beside, alone = found.beside_link_gb_per_s, found.alone_gb_per_s
                rates.append(CpuAttentionRate(format=name, heads=heads, gb_per_s=beside, alone_gb_per_s=alone))
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
    return tuple(rates)
