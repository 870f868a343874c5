"""What the link is read to be, and `zero-inference link`; its rates are in test_rates.py."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, free_port, start_python, without_gpus
from forks import AS_USERS, PROGRAM, rank_variables
from test_machine import CORES, rates

from zero_inference.cpu.library import load_library
from zero_inference.errors import RunError
from zero_inference.hardware import bench_copies, bench_cpu, bench_device, command, rooflines, system
from zero_inference.hardware.profile import read_profile
from zero_inference.hardware.system import GpuLink, Host, warnings_for
from zero_inference.measure import engine_overhead
from zero_inference.utils.ranks import Ranks, stop_process_group
from zero_inference.utils.watch import store_key

GIB = 2**30
HOST = Host(numa_nodes=(0,), memlock_bytes=None, memory_bytes=64 * GIB, memory_available_bytes=60 * GIB)
GPU = GpuLink(
    "NVIDIA H200", "0000:1b:00.0", generation=5, generation_max=5, width=16, width_max=16, numa_node=0, source="nvml"
)
UUID = "GPU-8f2c0e6a-1d0b-4c0f-9c59-0d6c8a3a1b77"
SECOND_UUID = "GPU-11111111-2222-3333-4444-555555555555"
# the second GPU sits in a x8 slot and idles, the third is a virtual one that knows nothing
SMI = f"""{UUID}, 00000000:1B:00.0, 5, 5, 16, 16
{SECOND_UUID}, 00000000:C1:00.0, 1, 4, 8, 16
GPU-66666666-7777-8888-9999-000000000000, 00000002:00:00.0, [N/A], [N/A], [Not Supported], [N/A]
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_its_link():
    device = torch.device("cuda", 0)
    pinned, pageable = (bench_copies.host_to_device_gb_per_s(device, pinned) for pinned in (True, False))
    up, both = bench_copies.device_to_host_gb_per_s(device), bench_copies.both_directions_gb_per_s(device)
    assert pageable < 1.2 * pinned and 0.8 * min(pinned, up) < both < 1.2 * (pinned + up)
    assert bench_copies.several_devices_gb_per_s([device]) == pytest.approx(pinned, rel=0.2)
    assert bench_device.device_copy_gb_per_s(device) > pinned
    assert bench_device.matmul_tflops(device, torch.float16) > 1
    properties = torch.cuda.get_device_properties(device)
    gpu = bench_copies.while_copying(device, lambda: system.read_gpu_link(str(properties.uuid), properties.name))
    if gpu.limit_gb_per_s is not None:
        assert pinned < gpu.limit_gb_per_s


@pytest.mark.parametrize(
    "text, cpus", [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set()), ("", set())]
)
def test_cpulists(text, cpus):
    assert system.parse_cpulist(text) == cpus


def test_numa_nodes_are_those_of_the_cpus(tmp_path):
    for node, cpus in {0: "0-3,8-11", 1: "4-7,12-15", 10: "\n"}.items():
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    assert system.numa_nodes({1, 9}, str(tmp_path)) == [0]
    assert system.numa_nodes({3, 4}, str(tmp_path)) == [0, 1]
    assert system.numa_nodes({3, 4}, str(tmp_path / "elsewhere")) == []


def test_the_csv_of_nvidia_smi():
    gpus = system.parse_smi_csv(SMI)
    assert gpus[UUID] == {"pci_id": "0000:1b:00.0", "generation": 5, "generation_max": 5, "width": 16, "width_max": 16}
    second, third = list(gpus.values())[1:]
    assert (second["generation"], second["generation_max"], second["width"], second["width_max"]) == (1, 4, 8, 16)
    assert third == {
        "pci_id": "0002:00:00.0",
        "generation": None,
        "generation_max": None,
        "width": None,
        "width_max": None,
    }
    assert (
        system.parse_smi_csv("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n\n") == {}
    )


@pytest.mark.parametrize(
    "text, generation",
    [
        ("2.5 GT/s PCIe\n", 1),
        ("5.0 GT/s PCIe", 2),
        ("8.0 GT/s PCIe", 3),
        ("16.0 GT/s PCIe", 4),
        ("32.0 GT/s PCIe", 5),
        ("64.0 GT/s PCIe", 6),
        ("8 GT/s", 3),
        ("Unknown", None),
        ("", None),
    ],
)
def test_the_link_speed_of_sysfs(text, generation):
    assert system.parse_link_speed(text) == generation


@pytest.mark.parametrize(
    "generation, width, gb_per_s",
    [
        (1, 16, 4.0),
        (2, 8, 4.0),
        (3, 16, 15.754),
        (4, 16, 31.508),
        (5, 16, 63.015),
        (5, 8, 31.508),
        (6, 16, 118.0),
        (7, 16, None),
        (None, 16, None),
        (4, None, None),
    ],
)
def test_what_generation_and_width_carry(generation, width, gb_per_s):
    assert system.link_gb_per_s(generation, width) == (None if gb_per_s is None else pytest.approx(gb_per_s, abs=5e-4))


def fake_sysfs(root: Path, **files: str) -> str:
    folder = root / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return str(root)


def fake_nvml(monkeypatch, second: dict | None = None, bus_id="00000000:1B:00.0", **answers):
    """A pynvml that knows one GPU by its `answers`, or a `second` one too; an answer of None is an error."""
    known = {UUID: {"bus_id": bus_id, **answers}, SECOND_UUID: second}

    class NVMLError(Exception):
        pass

    def answer(name):
        def ask(handle):
            if known[handle][name] is None:
                raise NVMLError("Not Supported")
            return known[handle][name]

        return ask

    def by_uuid(uuid):
        if not known.get(uuid):
            raise NVMLError("Not Found")
        return uuid

    names = {
        "CurrPcieLinkGeneration": "generation",
        "MaxPcieLinkGeneration": "generation_max",
        "CurrPcieLinkWidth": "width",
        "MaxPcieLinkWidth": "width_max",
    }
    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetPciInfo=lambda handle: types.SimpleNamespace(busId=known[handle]["bus_id"]),
        **{f"nvmlDeviceGet{name}": answer(key) for name, key in names.items()},
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_a_link_told_by_nvml_and_what_the_gpu_alone_could_do(monkeypatch, tmp_path):
    fake_nvml(monkeypatch, generation=4, generation_max=4, width=8, width_max=8)  # the slot's maximum
    root = fake_sysfs(tmp_path, max_link_speed="32.0 GT/s PCIe", max_link_width="16", numa_node="1")
    assert system.read_gpu_link(UUID.removeprefix("GPU-"), "A GPU", root) == GpuLink(
        "A GPU", "0000:1b:00.0", generation=4, generation_max=5, width=8, width_max=16, numa_node=1, source="nvml"
    )


def test_sysfs_of_a_virtual_machine_adds_nothing(monkeypatch, tmp_path):
    fake_nvml(monkeypatch, generation=None, generation_max=5, width=16, width_max=16)
    root = fake_sysfs(tmp_path, max_link_speed="Unknown", max_link_width="255", numa_node="-1")
    assert system.read_gpu_link(UUID, "A GPU", root) == GpuLink(
        "A GPU",
        "0000:1b:00.0",
        generation=None,
        generation_max=5,
        width=16,
        width_max=16,
        numa_node=None,
        source="nvml",
    )


def test_a_link_told_by_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not importable
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpu = system.read_gpu_link(UUID, "A GPU", str(tmp_path))
    assert (gpu.source, gpu.generation, gpu.width_max, gpu.numa_node) == ("nvidia-smi", 5, 16, None)
    assert system.read_gpu_link("GPU-unknown", "A GPU", str(tmp_path)) == GpuLink("A GPU")


def test_a_link_that_nobody_tells_about(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = system.read_gpu_link(UUID, "A GPU", str(tmp_path))
    assert gpu == GpuLink("A GPU") and gpu.limit_gb_per_s is None and warnings_for(gpu, HOST, 3.0) == []


def test_a_good_link_warns_of_nothing():
    assert warnings_for(GPU, HOST, pinned_gb_per_s=55.5) == warnings_for(None, HOST) == []
    assert warnings_for(GPU, replace(HOST, numa_nodes=())) == warnings_for(replace(GPU, numa_node=None), HOST) == []
    assert warnings_for(GPU, replace(HOST, numa_nodes=(0, 1), memlock_bytes=HOST.memory_bytes)) == []


@pytest.mark.parametrize(
    "gpu, host, pinned, words",
    [
        (replace(GPU, width=8), HOST, 27.0, ["8 of 16", "2 times"]),
        (replace(GPU, generation=3), HOST, 13.0, ["generation 3", "could do 5", "idle"]),
        (replace(GPU, numa_node=1), HOST, 55.5, ["NUMA node 1", "--cpunodebind=1 --membind=1"]),
        (GPU, HOST, 31.0, ["31.0 GB/s", "49%", "63.0 GB/s", "generation 5 x16"]),
        (GPU, replace(HOST, memlock_bytes=8 << 20), 55.5, ["8 MiB", "60 GiB", "may be refused", "libaio"]),
        (None, replace(HOST, memlock_bytes=2 * GIB), None, ["2 GiB", "ulimit -l"]),
    ],
    ids=["lanes", "generation", "numa", "rate", "memlock", "memlock without a GPU"],
)
def test_each_warning(gpu, host, pinned, words):
    (line,) = warnings_for(gpu, host, pinned)
    assert all(word in line for word in words), line


def test_all_is_wrong_at_once():
    gpu = replace(GPU, width=8, generation=4, numa_node=1)
    assert len(warnings_for(gpu, replace(HOST, memlock_bytes=1 << 16), pinned_gb_per_s=3.0)) == 5


def test_the_report_of_two_gpus(monkeypatch, capsys):
    """The words around the numbers; the GPUs' own calls are stand-ins here."""
    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cuda", 0))
    monkeypatch.setattr("zero_inference.utils.ranks.detect_ranks", lambda local_rank: ranks)
    for name, value in (("device_count", 2), ("set_device", None), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    def refused(device):
        raise RunError("0.25 GiB of host memory could not be page-locked")

    monkeypatch.setattr(bench_copies, "host_to_device_gb_per_s", lambda device, pinned: 40.0 if pinned else 6.5)
    monkeypatch.setattr(bench_copies, "device_to_host_gb_per_s", refused)
    monkeypatch.setattr(bench_copies, "both_directions_gb_per_s", lambda device: 70.25)
    monkeypatch.setattr(bench_copies, "several_devices_gb_per_s", lambda devices: 40.0 * len(devices))
    monkeypatch.setattr(bench_device, "device_copy_gb_per_s", lambda device: 3900.0)
    monkeypatch.setattr(bench_device, "matmul_tflops", lambda device, dtype: 700.0)
    monkeypatch.setattr("zero_inference.hardware.rooflines._cpu_rooflines", lambda ranks, known: [])
    monkeypatch.setattr("zero_inference.hardware.rooflines.while_copying", lambda device, read: refused(device))
    uuids = UUID.removeprefix("GPU-"), SECOND_UUID.removeprefix("GPU-")
    properties = [types.SimpleNamespace(uuid=uuid, name="NVIDIA H200") for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    told = dict(generation=5, generation_max=5, width=16, width_max=16)
    # a PCI domain that no machine has, so that its own sysfs adds nothing
    fake_nvml(monkeypatch, second=told | {"width": 8, "bus_id": "0000FFF1:C1:00.0"}, bus_id="0000FFF1:1B:00.0", **told)
    monkeypatch.setattr(system, "read_host", lambda: HOST)
    args = argparse.Namespace(verbose=1, disk=None, json=True, save=None, local_rank=None)
    assert command.main(args) == 0
    report = json.loads(capsys.readouterr().out)
    ceilings = report["ceilings"]
    assert ceilings["all_devices_gbps"]["value"] == 80 and ceilings["host_to_device_pageable_gbps"]["all_ranks"] == 6.5
    assert (
        ceilings["device_to_host_pinned_gbps"]["value"] is ceilings["device_to_host_pinned_gbps"]["all_ranks"] is None
    )
    assert [gpu["limit_gbps"] for gpu in report["gpus"]] == pytest.approx([63.0, 31.5], abs=0.1)
    failed, slow, lanes = report["warnings"]
    assert "page-locked" in failed and "GPU fff1:1b:00.0" in slow and "63%" in slow and "GPU fff1:c1:00.0" in lanes
    args.json = False
    assert command.main(args) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 100
    assert "host to all 2 GPUs at once" in shown.out and "3900" in shown.out and "70.2" in shown.out
    assert "generation 5 of 5, lanes 8 of 16, 31.5 GB/s before packet headers; NUMA node ? (by nvml)" in shown.out
    assert shown.err.count("warning: ") == 3


def link(*options, launcher=(), **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "zero_inference", "link", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, **changes},
    )


@pytest.mark.slow
def test_json_of_one_process_and_the_machine_that_it_saves(tmp_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "machine.json"
    done = link("--json", "--disk", tmp_path, "--save", path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and "measuring this machine: about a minute" in done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert (report["device"], report["world_size"], report["gpus"]) == ("cpu", 1, [])
    ceilings = report["ceilings"]
    assert set(ceilings) == {
        "host_memory_copy_gbps",
        "host_memory_two_copies_gbps",
        "cores_read_gbps",
        *(f"cores_{name}_{rows}_rows_gbps" for name in ("bfloat16", "int4") for rows in (1, 8, 32)),
        "device_copy_gbps",
        "matmul_bfloat16_tflops",
        "matmul_float32_tflops",
        "disk_read_gbps",
    }
    for name, each in ceilings.items():
        if name == "disk_read_gbps" and each["value"] is None:  # a file system without O_DIRECT
            assert any("O_DIRECT" in line for line in report["warnings"])
            continue
        assert each["value"] > 0 and each["all_ranks"] == pytest.approx(each["value"], abs=1e-6) and each["bounds"]
        assert each["unit"] == ("TFLOP/s" if name.endswith("tflops") else "GB/s")
    assert "host memory copy" in ceilings["host_memory_copy_gbps"]["what"]
    assert report["host"]["memory_available_bytes"] <= report["host"]["memory_bytes"]
    assert list(tmp_path.iterdir()) == []
    saved = read_profile(path)
    assert (
        f"machine: {path}\n" in done.stderr and saved.source == "measured" and saved.gpus == () and saved.cores is None
    )
    assert 0 <= saved.others_cpu_share <= 1
    assert saved.link_gb_per_s == ceilings["host_memory_copy_gbps"]["value"]
    assert saved.device_gb_per_s == ceilings["device_copy_gbps"]["value"]
    assert saved.disk_gb_per_s == ceilings["disk_read_gbps"]["value"] and saved.disk_free_bytes > 0
    assert saved.matmul_tflops["bfloat16"] == ceilings["matmul_bfloat16_tflops"]["value"]
    formats = {(each.format, each.rows) for each in saved.device_products}
    assert formats == {(name, rows) for name in ("bfloat16", "float32", "int8", "int4") for rows in (1, 8, 32, 128)}
    launches = saved.launches  # noise may give all of the time to one of the two, see hardware/bench_launch.py
    assert min(launches.operator_s, launches.module_s) >= 0 and launches.operator_s + launches.module_s > 0
    assert launches.graph_operator_s is None
    assert 1e8 < saved.process_bytes < 4e9 and 1e8 < saved.measuring_bytes < saved.process_bytes
    assert saved.library_bytes["deepspeed"] > 1e6
    work = {(each.engine, each.quant_bits, each.kv_offload, each.resident): each for each in saved.engine_overheads}
    quantized = [("stream", 4, False, False), *(("deepspeed", bits, False, False) for bits in (8, 4))]
    plain = [(engine, 16, False, False) for engine in ("resident", "stream", "accelerate", "deepspeed")]
    assert set(work) == {*plain, *quantized, ("stream", 16, True, False)}, "without a GPU none are restored on it"
    assert {each.engine for each in saved.engine_overheads if each.load_layer_s == 0} == {"resident"}, "whose is load_s"
    resident, attending = work["resident", 16, False, False], work["stream", 16, True, False]
    assert resident.step_piece_s == 0.0 < resident.start_s < 1.0 and attending.prefill_piece_s < 0.1
    assert all(0 < each.step_piece_s < 0.1 for each in saved.engine_overheads if each.engine == "deepspeed")
    restoring = {
        (each.engine, each.quant_bits) for each in saved.engine_overheads if each.restored_gb_per_s is not None
    }
    assert restoring == {("deepspeed", 8), ("deepspeed", 4)}
    # torch itself may say more of its build
    assert saved.versions["torch"] == importlib.metadata.version("torch")
    assert 0 < saved.host_memory_bytes <= report["host"]["memory_bytes"]


def test_what_every_run_loads_is_there_before_libraries_are_weighed(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK"):
        monkeypatch.setenv(name, "")  # as it was afterwards
        monkeypatch.delenv(name)
    loaded: dict[str, bool] = {}

    def weigh(library):
        loaded[library] = dist.is_initialized() and "transformers.models.llama.modeling_llama" in sys.modules
        return 0

    monkeypatch.setattr(engine_overhead, "_import", weigh)
    monkeypatch.setattr(engine_overhead, "signal_ready", lambda: False)
    try:
        engine_overhead.print_engine_overheads()
    finally:
        stop_process_group()
    assert loaded == {"accelerate": True, "deepspeed": True}


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler")
def test_what_is_known_of_the_cores_is_not_measured_again(monkeypatch):
    known = CORES.model_copy(update={"products": (rates("bfloat16", 1, 100.0), rates("bfloat16", 8, 90.0))})
    monkeypatch.setattr(rooflines, "_link_rooflines", lambda ranks: [])
    monkeypatch.setattr(rooflines, "_device_rooflines", lambda device: [])
    monkeypatch.setattr(rooflines, "load_extension", lambda: True)
    monkeypatch.setattr(bench_cpu, "cpus_of_rank", lambda ranks: (-1,))
    monkeypatch.setattr(bench_cpu, "measure_read_gb_per_s", lambda cpus: 130.0)
    monkeypatch.setattr(bench_cpu, "measure_concurrent_rates", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(
        bench_cpu, "measure_products_gb_per_s", lambda cpus, dtype, wanted: [-rows for _, rows in wanted]
    )
    found = rooflines.rooflines(Ranks(0, 1, 0, 1, torch.device("cuda", 0)), None, known)
    assert {each.name: each.measure() for each in found} == {
        "cores_read_gbps": 130.0,
        "cores_bfloat16_1_rows_gbps": 110.0,
        "cores_bfloat16_8_rows_gbps": 100.0,
        "cores_bfloat16_32_rows_gbps": -32,
        **{f"cores_int4_{rows}_rows_gbps": -rows for rows in (1, 8, 32)},
        "cores_beside_link_gbps": 100.0,
        "link_beside_cores_gbps": 50.0,
    }


def test_without_a_compiler_it_says_why_the_cores_are_missing(monkeypatch):
    monkeypatch.setattr(rooflines, "load_library", lambda: None)
    monkeypatch.setattr(rooflines, "why_unavailable", lambda: "no C++ compiler: c++ and g++ were not found on PATH")
    monkeypatch.setattr(rooflines, "_host_memory_rooflines", lambda device: [])
    monkeypatch.setattr(rooflines, "_device_rooflines", lambda device: [])
    results, warnings = rooflines.measure_rooflines(Ranks(0, 1, 0, 1, torch.device("cpu")), None)
    assert results == [] and warnings == [
        "the host's cores were not measured: no C++ compiler: c++ and g++ were not found on PATH"
    ]


@pytest.mark.slow
def test_two_ranks_measure_at_once_and_the_first_prints_the_sum(copy_python):
    copy_python(AS_USERS)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    done = link("--json", launcher=launcher, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one object, so one rank printed
    assert report["world_size"] == 2 and len(report["numa_nodes_of_ranks"]) == 2
    assert all(each["all_ranks"] > each["value"] > 0 for each in report["ceilings"].values())
    assert len(set(report["warnings"])) == len(report["warnings"])


LINK = """
import sys
sys.path.insert(0, {root!r})
from zero_inference.__main__ import program
sys.argv[1:1] = ["link"]
program()
"""


def test_a_killed_rank_ends_the_other(fork_server, tmp_path):
    program, port = tmp_path / "link.py", free_port()
    program.write_text(LINK.format(root=str(ROOT)))
    files = [(tmp_path / f"{rank}.out", tmp_path / f"{rank}.err") for rank in range(2)]
    ranks = [
        start_python(
            fork_server(PROGRAM), [program], ROOT, *files[rank], without_gpus() | rank_variables(rank, 2, port)
        )
        for rank in range(2)
    ]
    try:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60))
        store.wait([store_key(1)], timedelta(seconds=60))  # one that never said that it lives is waited for longer
        ranks[1].kill()
        code = ranks[0].wait(timeout=120)  # 6 s, and half a minute beside other work
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    errors = files[0][1].read_text()
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1 and ("another rank ended" in line or "has said nothing" in line), errors


def test_the_table_of_one_process(no_gpu, monkeypatch, capsys):
    """Its rates are stand-ins: what measures them ran for the JSON."""
    monkeypatch.setattr(rooflines, "_measured", lambda roofline, ranks: (12.5, None))
    monkeypatch.setattr(system, "read_host", lambda: HOST)
    assert command.main(argparse.Namespace(verbose=1, disk=None, json=False, save=None, local_rank=None)) == 0
    shown = capsys.readouterr()
    for words in (
        "roofline",
        "host memory copy",
        "12.5   GB/s",
        "12.5   TFLOP/s",
        "bounds decode with weights on the device",
        "no GPU",
        "NUMA nodes",
    ):
        assert words in shown.out, shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    assert "warning" not in shown.out + shown.err


def test_a_folder_that_is_not_there_is_bad_usage(tmp_path):
    done = link("--disk", tmp_path / "gone")
    assert done.returncode == 2 and "gone: there is no such folder" in done.stderr and done.stdout == ""


def test_help_and_bad_usage_load_no_torch():
    for options in (["--help"], ["--disk", "/gone"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "zero_inference", "link", *options],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
