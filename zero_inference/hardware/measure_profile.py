"""Measure the hardware profile of this machine for `zero-inference link --save` and for the cache."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from zero_inference.config.options import ENGINES
from zero_inference.cpu.library import load_library
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_copies import uncached_block_bytes
from zero_inference.hardware.bench_cpu import FORMATS, ROWS, cpus_of_host, measure_cpu_profile
from zero_inference.hardware.bench_device import measure_loading, product_times
from zero_inference.hardware.bench_launch import LaunchBench
from zero_inference.hardware.profile import (
    MEASURED_WITH,
    CpuProfile,
    DeviceProductRate,
    EngineOverhead,
    Gpu,
    HardwareProfile,
    read_profile,
    why_outdated,
    write_profile,
)
from zero_inference.hardware.rooflines import make_report
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
from zero_inference.utils.format import first_line
from zero_inference.utils.processes import isolated_module, process_group
from zero_inference.utils.progress import current_progress
from zero_inference.utils.ranks import Ranks, detect_ranks

CPU_ROWS = (*ROWS, 128)
# From FUSED_ROWS + 1 tokens on, codes are dequantized before they are multiplied; from some hundred on operations bind.
GPU_ROWS = (*ROWS, FUSED_ROWS + 1, 128, 512, 2048, 8192)

ENGINES_TIMEOUT_S = 600  # of what takes 30 s unless kernels are compiled

T = TypeVar("T")
Say = Callable[[str], None]  # takes warnings


def measure_and_cache(say: Say) -> None:
    """Measure this machine and write the cache file.

    Raises:
        UsageError: the file is there and no hardware profile.
    """
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
    report, profile = measure_this_machine(detect_ranks(), None, say)
    for line in report["warnings"]:
        say(f"warning: {line}")
    write_profile(profile, path)


def measure_this_machine(ranks: Ranks, disk: Path | None, say: Say) -> tuple[dict[str, Any], HardwareProfile]:
    """Return the report that `zero-inference link` prints, and the profile.

    Args:
        disk: a folder whose disk is measured, too.
    """
    on_gpu, contention = ranks.device.type == "cuda", CpuContention()
    with current_progress().task("measuring this machine", 5, ticking=True) as task:
        task.at("step 1 of 5, launches and engines", 0)
        launch_bench, basics = measure_basics(ranks, say)
        task.at("step 2 of 5, CPU while the link is busy", 1)
        cpu = measure_cores(ranks, say)
        if on_gpu:  # ten seconds later, and once more after the report: shared hosts change; without a GPU it made no difference
            launch_bench.visit()
        task.at("step 3 of 5, links, memory and products", 2)
        report = make_report(ranks, disk)
        if on_gpu:
            launch_bench.visit()
        gpus, host_memory_bytes = _gpus() if on_gpu else (), available_host_bytes()
        task.at("step 4 of 5, products on the device", 3)
        device_products = _device_products(ranks.device, say)
        task.at("step 5 of 5, loading of weights", 4)
        loading = _or_warn(say, lambda: measure_loading(ranks.device))
        found = {name: each["value"] for name, each in report["ceilings"].items() if each["value"] is not None}
        environment = describe_environment()
        dtypes = {name: found.get(f"matmul_{name}_tflops") for name in ("bfloat16", "float16", "float32")}
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
            pageable_link_gb_per_s=found.get("host_to_device_pageable_gbps"),
            device_gb_per_s=found.get("device_copy_gbps"),
            device_products=device_products,
            matmul_tflops={name: value for name, value in dtypes.items() if value is not None},
            disk_gb_per_s=found.get("disk_read_gbps"),
            cores=cpu,
            launches=launch_bench.result(),
            loading=loading,
            others_cpu_share=round(contention.share(), 3),  # last: it covers all measurements
            **basics,
        )


def measure_basics(ranks: Ranks, say: Say) -> tuple[LaunchBench, dict[str, Any]]:
    """Measure host memory, launch overhead and engine overhead; the latter as fields of `HardwareProfile`.

    Call it first: memory that other benchmarks take stays with the process.
    """
    launch_bench = LaunchBench(ranks.device)
    # a run without a GPU measures host memory with two such blocks
    measuring_bytes = 0 if ranks.device.type == "cuda" else 2 * uncached_block_bytes()
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


def measure_cores(ranks: Ranks, say: Say) -> CpuProfile | None:
    """Measure CPU and link while both are busy. Returns None without a GPU, and where it fails, which `say` reports."""
    if ranks.device.type != "cuda" or load_library() is None:  # the report says why there is no library
        return None
    if not extension.load_extension():  # it has the kernels of the hand-off
        say(f"warning: the cores were not measured while the link is busy: {extension.why_unavailable()}")
        return None
    return _or_warn(say, lambda: measure_cpu_profile(ranks.device, cpus_of_host(ranks), say))


def _or_warn(say: Say, measure: Callable[[], T]) -> T | None:
    try:
        return measure()
    except (RunError, torch.OutOfMemoryError) as error:
        say(f"warning: not measured: {first_line(error)}")
        return None


def _gpus() -> tuple[Gpu, ...]:
    torch.cuda.empty_cache()
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(name=torch.cuda.get_device_name(index), memory_bytes=total, free_bytes=free))
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
