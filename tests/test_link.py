"""PCI Express links, the report of `zero-inference link`, and the process that measures engines; rates are in test_rates.py."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import types
from dataclasses import replace

import psutil
import pytest
import torch
from conftest import ROOT

from zero_inference.cli import console_main
from zero_inference.errors import RunError
from zero_inference.hardware import bench_copies, bench_device, command, measure_profile
from zero_inference.hardware.measure_profile import GpuLink, link_warnings, measure_engines, memlock_warnings
from zero_inference.hardware.profile import read_profile
from zero_inference.hardware.spec import link_gb_per_s

GIB = 2**30
HOST = dict(numa_nodes=[0], memlock_bytes=None, memory_bytes=64 * GIB, memory_available_bytes=60 * GIB)
GPU = GpuLink("NVIDIA H200", "0000:1b:00.0", 5, 5, 16, 16, numa_node=0, source="nvidia-smi")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_its_link():
    device = torch.device("cuda", 0)
    down, up = bench_copies.lane_to(device), bench_copies.lane_from(device)
    pinned, pageable = bench_copies.copy_gb_per_s(down), bench_copies.copy_gb_per_s(bench_copies.lane_to(device, False))
    both = bench_copies.copy_gb_per_s(down, up)
    up_alone = bench_copies.copy_gb_per_s(up)
    assert pageable < 1.2 * pinned and 0.8 * min(pinned, up_alone) < both < 1.2 * (pinned + up_alone)
    assert bench_device.device_copy_gb_per_s(device) > pinned
    assert bench_device.matmul_tflops(device, torch.float16) > 1
    gpu = measure_profile.read_gpu_link(device)
    if gpu.limit_gb_per_s is not None:
        assert pinned < gpu.limit_gb_per_s


@pytest.mark.parametrize(
    "generation, width, gb_per_s",
    [(1, 16, 4.0), (3, 16, 15.754), (4, 16, 31.508), (5, 8, 31.508), (6, 16, 118.0), (7, 16, None), (4, None, None)],
)
def test_what_generation_and_width_carry(generation, width, gb_per_s):
    assert link_gb_per_s(generation, width) == (None if gb_per_s is None else pytest.approx(gb_per_s, abs=5e-4))


def fake_gpus(monkeypatch, tmp_path, answers: list[str]) -> None:
    """GPUs at 0000:1b:00.0 and following, of which nvidia-smi prints `answers`."""
    properties = [
        types.SimpleNamespace(name="NVIDIA H200", pci_domain_id=0, pci_bus_id=0x1B + index, pci_device_id=0)
        for index in range(len(answers))
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    cases = "\n".join(f"0000:{0x1B + index:02x}:00.0) echo '{text}';;" for index, text in enumerate(answers))
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$2" in\n{cases}\nesac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    "answer, sysfs, expected",
    [
        ("5, 5, 16, 16", {}, GpuLink("NVIDIA H200", "0000:1b:00.0", 5, 5, 16, 16, None, "nvidia-smi")),
        (  # the slot has 8 lanes of generation 4
            "4, 4, 8, 8",
            {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16", "numa_node": "1"},
            GpuLink("NVIDIA H200", "0000:1b:00.0", 4, 5, 8, 16, 1, "nvidia-smi"),
        ),
        (  # of a virtual machine
            "[N/A], 5, 16, 16",
            {"max_link_speed": "Unknown", "max_link_width": "255", "numa_node": "-1"},
            GpuLink("NVIDIA H200", "0000:1b:00.0", None, 5, 16, 16, None, "nvidia-smi"),
        ),
        ("NVIDIA-SMI has failed because it could not communicate", {}, GpuLink("NVIDIA H200", "0000:1b:00.0")),
    ],
)
def test_a_link_is_read_from_nvidia_smi_and_sysfs(answer, sysfs, expected, monkeypatch, tmp_path):
    fake_gpus(monkeypatch, tmp_path, [answer])
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    for name, text in sysfs.items():
        (folder / name).write_text(text + "\n")
    assert measure_profile.read_gpu_link(torch.device("cuda", 0), str(tmp_path)) == expected


@pytest.mark.parametrize(
    "gpu, pinned, words",
    [
        (GPU, 55.5, None),
        (replace(GPU, width=8), 27.0, "8 of 16"),
        (replace(GPU, generation=3), 13.0, "generation 3 of 5"),
        (replace(GPU, numa_node=1), 55.5, "--cpunodebind=1 --membind=1"),
        (GPU, 31.0, "31.0 GB/s, 49% of the 63.0 GB/s"),
        (GpuLink("A GPU", "?"), 3.0, None),
    ],
)
def test_each_warning(gpu, pinned, words):
    lines = link_warnings(gpu, HOST, pinned)
    assert not lines if words is None else words in lines[0] and len(lines) == 1


def test_a_limit_of_locked_memory_is_warned_of():
    assert memlock_warnings(HOST) == memlock_warnings(HOST | {"memlock_bytes": 64 * GIB}) == []
    (line,) = memlock_warnings(HOST | {"memlock_bytes": 8 << 20})
    assert "8 MiB" in line and "60 GiB" in line and "ulimit -l" in line


class PlayedGpus:
    """Three GPUs on links of 40 GB/s, the third with half of its lanes; copies between GPUs are as fast as `peers` says by source."""

    def __init__(self, monkeypatch, tmp_path, peers=(200.0, 180.0, 190.0), reached=True):
        self.lanes, self.reached = {0: 40.0, 1: 41.0, 2: 20.0}, reached
        for name, value in dict(is_available=True, device_count=3, empty_cache=None, synchronize=None).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: reached or pair[0].index != 1)
        for name, lane in {
            "lane_to": lambda device, pinned=True: self.lanes[device.index] if pinned else 6.5,
            "lane_from": self.refuse,
            "lane_between": lambda source, target: peers[source.index],
            "BusyLinks": self.refuse,
            "copy_gb_per_s": lambda *lanes, seconds=0.5: sum(lanes),
            "load_library": lambda: None,
            "read_host": lambda: HOST,
        }.items():
            monkeypatch.setattr(measure_profile, name, lane)
        monkeypatch.setattr(bench_device, "device_copy_gb_per_s", lambda device: 3900.0)
        monkeypatch.setattr(bench_device, "matmul_tflops", lambda device, dtype: 700.0)
        fake_gpus(monkeypatch, tmp_path, ["5, 5, 16, 16", "4, 5, 16, 16", "5, 5, 8, 16"])
        self.devices = measure_profile.visible_devices()

    def refuse(self, device):
        raise RunError("0.25 GiB of host memory could not be page-locked")


def test_the_report_of_several_gpus(monkeypatch, tmp_path, capsys):
    """One process measures all of them; the GPUs' own calls are stand-ins here."""
    gpus = PlayedGpus(monkeypatch, tmp_path)
    assert [str(device) for device in gpus.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    args = argparse.Namespace(verbose=1, disk=None, json=True, save=None)
    assert command.main(args) == 0
    report = json.loads(capsys.readouterr().out)
    values = {name: each["value"] for name, each in report["ceilings"].items()}
    assert (values["host_to_device_pinned_gbps"], values["host_to_device_pageable_gbps"]) == (40, 6.5)
    assert values["all_devices_gbps"] == 101
    assert (values["peer_copy_gbps"], values["slowest_peer_copy_gbps"]) == (200, 180)
    assert values["device_to_host_pinned_gbps"] is values["both_directions_gbps"] is None
    assert [gpu["limit_gbps"] for gpu in report["gpus"]] == pytest.approx([63.0, 31.5, 31.5], abs=0.1)
    assert [(gpu["index"], gpu["host_to_device_pinned_gbps"]) for gpu in report["gpus"]] == [(0, 40), (1, 41), (2, 20)]
    assert {"name", "pci_id", "numa_node", "source", "width_max"} < set(report["gpus"][0])
    *failed, slow, generation, lanes, also_slow = report["warnings"]
    assert len(failed) == 3 and "page-locked" in failed[0]
    assert "GPU 0000:1b:00.0" in slow and "63%" in slow and "generation 4 of 5" in generation
    assert all("GPU 0000:1d:00.0" in line for line in (lanes, also_slow)) and "8 of 16" in lanes and "63%" in also_slow
    args.json = False
    assert command.main(args) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 100
    assert "host to all 3 GPUs at once" in shown.out and "3900" in shown.out
    assert "GPU 2, 0000:1d:00.0 (NVIDIA H200), NUMA node ?:" in shown.out
    assert "generation 5 of 5, 8 of 16 lanes, 31.5 GB/s; copies from host memory 20.0 GB/s" in shown.out
    assert shown.err.count("warning: ") == 7


@pytest.mark.parametrize(
    "peers, reached, expected",
    [
        ((200.0, 180.0, 190.0), True, 180.0),
        ((43.0, 300.0, 300.0), True, "link"),  # PCI Express, which the link's 40 GB/s cross, too
        ((300.0, 300.0, 300.0), False, "link"),  # by way of host memory
    ],
)
def test_the_rate_of_copies_between_gpus_in_a_profile(peers, reached, expected, monkeypatch, tmp_path):
    gpus = PlayedGpus(monkeypatch, tmp_path, peers, reached)
    report = measure_profile.make_report(gpus.devices, None)
    found = {name: each["value"] for name, each in report["ceilings"].items()}
    assert measure_profile.peers_gb_per_s(gpus.devices, found) == expected
    assert measure_profile.peers_gb_per_s(gpus.devices[:1], found) is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_links_and_copies_between_gpus():
    devices = measure_profile.visible_devices()
    report = measure_profile.make_report(devices, None)
    found = {name: each["value"] for name, each in report["ceilings"].items()}
    alone = [gpu["host_to_device_pinned_gbps"] for gpu in report["gpus"]]
    assert 0.5 * max(alone) < found["all_devices_gbps"] < 1.1 * sum(alone)
    assert 1 < found["peer_copy_gbps"] < 2000 and found.get("slowest_peer_copy_gbps", 1) < 2000
    assert 0 < found["all_links_beside_cores_gbps"] < 1.1 * sum(alone) and found["cores_beside_all_links_gbps"] > 0
    busy = bench_copies.BusyLinks(devices)
    together = busy.begin().gb_per_s()
    assert 0.5 * max(alone) < together < 1.1 * sum(alone)
    rounds = bench_copies.host_to_device_rounds(devices, 0.2)
    assert all(0.5 * max(alone) < rate < 1.1 * sum(alone) for rate in rounds[1:])


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
    assert (report["device"], report["gpus"]) == ("cpu", [])
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
        assert each["value"] > 0 and each["bounds"]
        assert each["unit"] == ("TFLOP/s" if name.endswith("tflops") else "GB/s")
    assert report["host"]["memory_available_bytes"] <= report["host"]["memory_bytes"]
    assert list(tmp_path.iterdir()) == []
    saved = read_profile(path)
    assert f"machine: {path}\n" in done.stderr and saved.source == "measured"
    assert (saved.gpus, saved.cores, saved.launches.graph_operator_s) == ((), None, None)
    assert saved.link_gb_per_s == ceilings["host_memory_copy_gbps"]["value"]
    assert saved.device_gb_per_s == ceilings["device_copy_gbps"]["value"]
    assert saved.disk_gb_per_s == ceilings["disk_read_gbps"]["value"] and saved.disk_free_bytes > 0
    settings = report["disk"] and (report["disk"]["read_bytes"], report["disk"]["queue_depth"])
    assert settings is None or settings in bench_copies.DISK_SETTINGS
    assert settings == (saved.disk_gb_per_s and (saved.disk_read_bytes, saved.disk_queue_depth))
    assert saved.matmul_tflops["bfloat16"] == ceilings["matmul_bfloat16_tflops"]["value"]
    formats = {(each.format, each.rows) for each in saved.device_products}
    assert formats == {(name, rows) for name in ("bfloat16", "float32", "int8", "int4") for rows in (1, 8, 32, 128)}
    assert saved.launches.operator_s + saved.launches.module_s > 0, "noise may give all of the time to one of the two"
    assert 1e8 < saved.process_bytes < 4e9 and 1e8 < saved.measuring_bytes < saved.process_bytes
    assert saved.library_bytes["deepspeed"] > 1e6 and 0 <= saved.others_cpu_share <= 1
    work = {(each.engine, each.quant_bits, each.kv_offload): each for each in saved.engine_overheads}
    quantized = [("stream", 4, False), *(("deepspeed", bits, False) for bits in (8, 4))]
    plain = [(engine, 16, False) for engine in ("resident", "stream", "accelerate", "deepspeed")]
    assert set(work) == {*plain, *quantized, ("stream", 16, True)}
    assert work["resident", 16, False].step_piece_s == 0.0 < work["resident", 16, False].start_s < 1.0
    assert all(0 < each.step_piece_s < 0.1 for each in saved.engine_overheads if each.engine == "deepspeed")
    restoring = {(each.engine, each.quant_bits) for each in work.values() if each.dequantized_gb_per_s is not None}
    assert restoring == {("deepspeed", 8), ("deepspeed", 4)}
    assert saved.versions["torch"] == importlib.metadata.version("torch")
    assert 0 < saved.host_memory_bytes <= report["host"]["memory_bytes"]


def engines_of(monkeypatch, code: str) -> tuple[dict, list[str]]:
    """What `measure_engines` returns and says of a process that runs `code`."""
    monkeypatch.setattr(measure_profile, "isolated_module", lambda *_: [sys.executable, "-c", code])
    said: list[str] = []
    return measure_engines(said.append), said


def test_engines_that_fail_are_reported_beside_those_that_were_measured(monkeypatch):
    code = """
import sys
print("deepspeed, 4 bits: no nvcc\\nmore", file=sys.stderr)
print('loaded\\n{"library_bytes": {}}')
"""
    warnings = ["warning: not measured: deepspeed, 4 bits: no nvcc"]
    assert engines_of(monkeypatch, code) == ({"library_bytes": {}}, warnings)


@pytest.mark.parametrize(
    "code, why",
    [
        ("import sys; sys.exit('out of memory')", "out of memory"),
        ("print('{}'); raise SystemExit(3)", "exit code 3"),
        ("print('[]')", "exit code 0"),
    ],
)
def test_an_engine_process_that_fails_is_reported(code, why, monkeypatch):
    found, (line,) = engines_of(monkeypatch, code)
    assert found == {} and line.startswith(f"warning: engines were not measured: {why}")


def test_an_engine_process_that_takes_too_long_ends_with_all_that_it_started(monkeypatch, tmp_path):
    """Such as a compiler, which would go on writing."""
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    monkeypatch.setattr(measure_profile, "ENGINES_TIMEOUT_S", 2)
    found, (line,) = engines_of(monkeypatch, code)
    assert found == {} and "not measured" in line
    start, pid = time.monotonic(), int((tmp_path / "pid").read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - start < 10
        time.sleep(0.05)


def test_a_file_that_cannot_be_saved_is_known_before_the_measuring(tmp_path, capfd):
    assert console_main(["zero-inference", "link", "--save", str(tmp_path / "no" / "box.json")]) == 2
    assert "cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("options", [(), ("--local_rank=0", "--save", "box.json")])  # torchrun's, deepspeed's
def test_one_process_measures_all_gpus(options, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert console_main(["zero-inference", "link", *options]) == 2
    said = (
        "error: zero-inference link measures all GPUs in one process, and 2 were started: start it without a launcher."
    )
    assert said in capfd.readouterr().err


def test_a_folder_that_is_not_there_is_refused_without_torch(tmp_path):
    done = link("--disk", tmp_path / "gone", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2 and "gone: there is no such folder" in done.stderr and done.stdout == ""
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
