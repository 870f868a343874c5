"""Measure the hardware profile of this machine for `zero-inference link --save` and for the cache."""

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

CPU_ROWS = (*ROWS, 128)
# From FUSED_ROWS + 1 tokens on, codes are dequantized before they are multiplied; from some hundred on operations bind.
GPU_ROWS = (*ROWS, FUSED_ROWS + 1, 128, 512, 2048, 8192)

Say = Callable[[str], None]  # takes warnings
Step = Callable[[str], None]  # takes the name of a step that begins


@dataclass(frozen=True)
class Basics:
    """Results that are measured first, while this process is small; fields as in `HardwareProfile`."""

    launch_bench: LaunchBench
    process_bytes: int
    measuring_bytes: int
    library_bytes: dict[str, int]
    engine_overheads: tuple[EngineOverhead, ...]


def measure_this_machine(
    ranks: Ranks, engines: OverheadProcess, disk: Path | None, say: Say
) -> tuple[dict[str, Any], HardwareProfile]:
    """Return the report that `zero-inference link` prints, and the profile.

    Args:
        engines: started before, so that it loads libraries meanwhile.
        disk: a folder whose disk is measured, too.
    """
    on_gpu, contention = ranks.device.type == "cuda", CpuContention()
    with current_progress().task("measuring this machine", 7 if on_gpu else 5, ticking=True) as task:
        step = Steps(task)
        basics = measure_basics(ranks, engines, say, step)
        cpu = measure_cores(ranks, say, step)
        if on_gpu:  # ten seconds later, and once more after the report: shared hosts change; without a GPU it made no difference
            basics.launch_bench.visit()
        step("rates of links, memory and products")
        report = make_report(ranks, disk, cpu)
        if on_gpu:
            basics.launch_bench.visit()
        return report, _profile(ranks, basics, cpu, report["rooflines"], disk, say, step, contention)


class Steps:
    """Reports each step of `task` as it begins."""

    def __init__(self, task: Task):
        self.task, self.begun = task, 0

    def __call__(self, name: str) -> None:
        self.begun += 1
        self.task.at(f"step {self.begun} of {self.task.total:g}, {name}", self.begun - 1)


def measure_basics(ranks: Ranks, engines: OverheadProcess, say: Say, step: Step = lambda name: None) -> Basics:
    """Measure host memory, launch overhead and engine overhead. Call it first: memory that other benchmarks take stays with the process."""
    step("how long the host takes to launch operators")
    launch_bench = LaunchBench(ranks.device)
    # a run without a GPU measures host memory with two such blocks
    measuring_bytes = 0 if ranks.device.type == "cuda" else 2 * uncached_block_bytes()
    process_bytes = resident_host_bytes() + measuring_bytes
    engines.wait_until_ready(say)  # loading and compiling slow the host
    launch_bench.visit()
    step("what engines add to the model's own work")
    found = engines.measure(say)
    return Basics(
        launch_bench=launch_bench,
        process_bytes=found.get("process_bytes", process_bytes),  # of a process that has generated as runs do
        measuring_bytes=measuring_bytes,
        library_bytes=found.get("library_bytes", {}),
        engine_overheads=tuple(EngineOverhead.model_validate(each) for each in found.get("engine_overheads", ())),
    )


def _profile(
    ranks: Ranks,
    basics: Basics,
    cpu: CpuProfile | None,
    results: Sequence[Result],
    disk: Path | None,
    say: Say,
    step: Step,
    contention: CpuContention,
) -> HardwareProfile:
    """Measure products on the device and loading, and return the profile of all that was measured."""
    on_gpu = ranks.device.type == "cuda"
    found = {each.roofline.name: each.value for each in results if each.value is not None}
    environment = describe_environment()
    dtypes = {name: found.get(f"matmul_{name}_tflops") for name in ("bfloat16", "float16", "float32")}
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
        cores=cpu,
        launches=basics.launch_bench.result(),
        engine_overheads=basics.engine_overheads,
        loading=_loading(ranks, say, step),
        process_bytes=basics.process_bytes,
        measuring_bytes=basics.measuring_bytes,
        library_bytes=basics.library_bytes,
        others_cpu_share=round(contention.share(), 3),  # last: it covers all measurements
    )


def _gpus() -> tuple[Gpu, ...]:
    torch.cuda.empty_cache()
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(name=torch.cuda.get_device_name(index), memory_bytes=total, free_bytes=free))
    return tuple(gpus)


def _device_products(ranks: Ranks, say: Say, step: Step) -> tuple[DeviceProductRate, ...]:
    step("products on the device")
    on_gpu = ranks.device.type == "cuda"
    tokens = GPU_ROWS if on_gpu else CPU_ROWS
    rates = []
    for name, (dtype, scheme) in FORMATS.items():
        if name == ("float32" if on_gpu else "float16"):  # no run chooses it by itself
            continue
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


def _loading(ranks: Ranks, say: Say, step: Step) -> LoadingRates | None:
    step("loading of weights")
    try:
        return measure_loading(ranks.device)
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
        return None


def measure_cores(ranks: Ranks, say: Say, step: Step = lambda name: None) -> CpuProfile | None:
    """Measure CPU and link while both are busy. Returns None without a GPU, and where it fails, which `say` reports."""
    if ranks.device.type != "cuda" or load_library() is None:  # the report says why there is no library
        return None
    if not load_extension():  # it has the kernels of the hand-off
        say(f"warning: the cores were not measured while the link is busy: {extension.why_unavailable()}")
        return None
    cpus = cpus_of_host(ranks)
    step(f"{len(cpus)} cores while the link is busy")
    try:
        read_gb_per_s, products = measure_cpu_rates(ranks.device, cpus)
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
        return None
    step(f"attention by {len(cpus)} cores while the link is busy")
    return CpuProfile(
        threads=len(cpus),
        instructions=best_instructions(),
        read_gb_per_s=read_gb_per_s,
        products=products,
        attention=_attention(ranks, cpus, say),
    )


def _attention(ranks: Ranks, cpus: tuple[int, ...], say: Say) -> tuple[CpuAttentionRate, ...]:
    rates = []
    names: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    try:
        with contextlib.closing(AttentionBench(ranks.device, cpus)) as bench:
            for name, heads in itertools.product(names, ATTENTION_HEADS):
                found = bench.measure(FORMATS[name][0], heads)
                beside, alone = found.beside_link_gb_per_s, found.alone_gb_per_s
                rates.append(CpuAttentionRate(format=name, heads=heads, gb_per_s=beside, alone_gb_per_s=alone))
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
    return tuple(rates)
