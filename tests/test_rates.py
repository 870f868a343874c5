"""The measured rooflines: copies, disk, matrix products, and how much a measurement touches."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch

from zero_inference.errors import RunError
from zero_inference.link import caches, compute, copy, disk
from zero_inference.link.disk import disk_read_gb_per_s

CPU = torch.device("cpu")


def own_copy_gb_per_s() -> float:
    """The best of five copies by plain bytes, without torch."""
    nbytes = copy.block_bytes(CPU)
    source, target = bytearray(b"\7") * nbytes, bytearray(b"\1") * nbytes
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        memoryview(target)[:] = source
        best = max(best, nbytes / (time.perf_counter() - start) / 1e9)
    return best


def test_the_copy_rate_is_that_of_an_independent_copy():
    for _ in range(3):  # other processes share this machine's memory
        measured = copy.host_to_device_gb_per_s(CPU, pinned=True, seconds=0.3)
        if 0.5 < measured / own_copy_gb_per_s() < 2:
            return
    pytest.fail(f"{measured:.1f} GB/s by torch, {own_copy_gb_per_s():.1f} GB/s by bytes")


def test_every_rate_is_one_that_a_machine_can_have(tmp_path):
    two = [CPU, CPU]
    for rate in (
        copy.device_to_host_gb_per_s(CPU, seconds=0.1),
        copy.both_directions_gb_per_s(CPU, seconds=0.1),
        copy.several_devices_gb_per_s(two, seconds=0.1),
        compute.device_copy_gb_per_s(CPU, seconds=0.1),
    ):
        assert 0.1 < rate < 2000
    try:
        assert 0.01 < disk_read_gb_per_s(tmp_path, file_bytes=64 << 20) < 500
    except RunError as error:  # a file system without direct reads
        assert str(tmp_path) in str(error)
    with pytest.raises(RunError, match="/proc takes no file"):
        disk_read_gb_per_s(Path("/proc"))
    assert not list(tmp_path.iterdir())
    assert copy.kind_of(CPU) == "host memory copy" and copy.kind_of(torch.device("cuda")) == "host link"


def test_two_copies_at_once_count_the_bytes_of_both(monkeypatch):
    monkeypatch.setattr(caches, "block_bytes", lambda: 1 << 20)
    lanes = [
        copy._lane(torch.zeros(1 << 20, dtype=torch.uint8), torch.full((1 << 20,), value, dtype=torch.uint8))
        for value in (3, 9)
    ]
    moved, spent = copy._HostRound(lanes)()
    assert moved == 2 << 20 and spent > 0
    assert lanes[0].target.eq(3).all() and lanes[1].target.eq(9).all()


def test_the_memory_of_an_engine_is_copied_block_by_block_in_turn(monkeypatch):
    monkeypatch.setattr(caches, "block_bytes", lambda: 1000)
    monkeypatch.setattr(copy, "LEAST_BYTES", 300)
    layers = [
        torch.full((size,), value, dtype=torch.uint8) for value, size in ((1, 1000), (2, 2400), (3, 299), (4, 1200))
    ]
    blocks = copy.blocks_of(layers, CPU)
    seen = [next(blocks) for _ in range(5)]
    assert [(int(block[0]), len(block)) for block in seen] == [(1, 1000), (2, 1000), (2, 1000), (2, 400), (4, 1000)], (
        "small ones are left out"
    )
    assert torch.equal(next(blocks), seen[0]) and seen[0].data_ptr() == layers[0].data_ptr(), (
        "around again, where they lie"
    )
    lane = copy._lane(torch.zeros(1000, dtype=torch.uint8), copy.blocks_of(layers[1:], CPU))
    measure = copy._HostRound([lane])
    assert [measure()[0] for _ in range(4)] == [1000, 1000, 400, 1000], "the bytes that were copied"
    assert lane.target.eq(4).all()
    assert copy.blocks_of(layers[2:3], CPU) is None and copy.blocks_of([], CPU) is None


def test_rounds_copy_from_the_memory_that_is_given(monkeypatch):
    monkeypatch.setattr(caches, "block_bytes", lambda: 1 << 20)
    monkeypatch.setattr(copy, "LEAST_BYTES", 1 << 10)
    taken = []

    def seen(blocks):
        for block in blocks:
            taken.append(block.data_ptr())
            yield block

    layers = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(3)]
    rates = copy.host_to_device_rounds(CPU, pinned=True, seconds=0, sources=seen(copy.blocks_of(layers, CPU)))
    assert len(rates) >= 3 and set(taken) == {layer.data_ptr() for layer in layers}


class Clocks:
    """GPUs whose copies take the time that their rate says, and 0.1 ms more where they begin on an idle link."""

    START_S = 1e-4

    def __init__(self, monkeypatch, gb_per_s: list[float]):
        self.now_s, self.current, self.streams = 0.0, None, []
        clocks = self

        class Stream:
            def __init__(self, device):
                self.done_s, self.gb_per_s = 0.0, gb_per_s[device.index]
                clocks.streams.append(self)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at_s = max(stream.done_s, clocks.now_s)

            def elapsed_time(self, later):
                return (later.at_s - self.at_s) * 1e3

            def synchronize(self):
                clocks.now_s = max(clocks.now_s, self.at_s)

        @contextlib.contextmanager
        def stream(which):
            self.current = which
            yield

        for name, stand_in in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", stream),
            ("synchronize", lambda device: None),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(copy, "_copy_next", self.copy_next)

    def copy_next(self, lane) -> int:
        begin_s = max(self.current.done_s, self.now_s + self.START_S)
        self.current.done_s = begin_s + copy.BLOCK_BYTES / self.current.gb_per_s / 1e9
        return copy.BLOCK_BYTES


@pytest.mark.parametrize("gb_per_s, together", [([55.0], 55.0), ([55.0, 20.0], 40.0)])
def test_a_link_is_never_idle_while_it_is_measured(monkeypatch, gb_per_s, together):
    clocks = Clocks(monkeypatch, gb_per_s)
    lanes = [copy.Lane(torch.empty(0), iter(()), torch.device("cuda", index)) for index in range(len(gb_per_s))]
    assert copy._rounds(lanes, seconds=0) == pytest.approx([together] * 3, rel=1e-9)
    assert clocks.now_s == max(stream.done_s for stream in clocks.streams), "copies are still under way"


CORES = {
    0: ("32768K", "0-3"),
    1: ("32768K", "0-3"),
    4: ("16M", "4-7"),
    8: ("64M", "8-15"),
}  # a hybrid: its last-level caches by core


@pytest.mark.parametrize(
    "threads, cores, expected",
    [
        (1, CORES, 128),
        (2, CORES, 192),
        (3, CORES, 224),
        (64, CORES, 224),
        (1, {0: ("1M", "0")}, 64),
        (1, {5: ("100M", "5")}, 200),
        (2, {0: ("300M", "0-55"), 56: ("300M", "56-111")}, 512),
        (1, {}, 256),
        (1, {0: ("0K", "0")}, 256),
        (1, {0: ("unknown", "0")}, 256),
    ],
)
def test_blocks_are_made_for_the_caches_of_the_cores_that_copy(threads, cores, expected, tmp_path, monkeypatch):
    for core, (size, shared) in cores.items():
        for number, words in enumerate([("1", "48K", str(core)), ("2", "1024K", str(core)), ("3", size, shared)]):
            index = tmp_path / f"cpu{core}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            for name, text in zip(("level", "size", "shared_cpu_list"), words):
                (index / name).write_text(f"{text}\n")
    monkeypatch.setattr(caches, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores) | {200})  # which tells nothing of its caches
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert caches.block_bytes() == expected << 20
    for damaged in tmp_path.glob("*/cache/index2/level"):
        damaged.unlink()
        assert caches.block_bytes() == caches.UNKNOWN_BYTES


def test_matmul_counts_two_operations_a_product():
    size = 384
    left, right = torch.randn(size, size), torch.randn(size, size)
    for _ in range(3):
        measured = compute.matmul_tflops(CPU, torch.float32, size=size, seconds=0.2)
        spent = []
        for _ in range(20):
            start = time.perf_counter()
            left @ right
            spent.append(time.perf_counter() - start)
        if 1 / 3 < measured / (2 * size**3 / sorted(spent)[10] / 1e12) < 3:
            return
    pytest.fail(f"{measured} TFLOP/s is not what {sorted(spent)[10]} s a product are")


@pytest.mark.parametrize(
    "asked, taken_mib",
    [(0, 128), (1, 128), (128 << 20, 128), ((128 << 20) + 1, 256), (900 << 20, 1024), (1 << 40, 1024)],
)
def test_all_threads_read_as_much_of_a_file_within_bounds(asked, taken_mib, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_write_and_read", lambda file, file_bytes: file_bytes)
    assert disk_read_gb_per_s(tmp_path, asked) == taken_mib << 20
