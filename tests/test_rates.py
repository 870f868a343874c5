"""The measured rooflines: copies, disk, matrix products, and how much a measurement touches."""

from __future__ import annotations

import contextlib
import itertools
import os
import types
from pathlib import Path

import pytest
import torch

from zero_inference.errors import RunError
from zero_inference.hardware import bench_copies, bench_device
from zero_inference.hardware.bench_copies import copy_gb_per_s, disk_read_rate, lane_from, lane_to

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("measured_as_for_users")


def test_every_rate_is_one_that_a_machine_can_have(tmp_path):
    assert 0.1 < bench_device.device_copy_gb_per_s(CPU, seconds=0.1) < 2000
    try:
        assert 0.01 < disk_read_rate(tmp_path, file_bytes=64 << 20).gb_per_s < 500
    except RunError as error:  # a file system without direct reads
        assert str(tmp_path) in str(error)
    with pytest.raises(RunError, match="cannot create a file in /proc "):
        disk_read_rate(Path("/proc"))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tick_s(monkeypatch):
    """The clock of a measurement goes on by this each time it is read, so that a round's rate tells the bytes it copied."""
    readings = itertools.count()
    monkeypatch.setattr(bench_copies, "time", types.SimpleNamespace(perf_counter=lambda: next(readings) * 2**-10))
    return 2**-10


def test_copies_at_once_count_the_bytes_of_all(monkeypatch, tick_s):
    monkeypatch.setattr(bench_copies, "uncached_block_bytes", lambda: 1 << 20)
    copied, copy_ = [], torch.Tensor.copy_

    def watching(target, source, **how):
        done = copy_(target, source, **how)
        copied.append((target.data_ptr(), source.data_ptr(), len(target), torch.equal(target, source)))
        return done

    monkeypatch.setattr(torch.Tensor, "copy_", watching)
    one = (1 << 20) / tick_s / 1e9
    assert copy_gb_per_s(lane_to(CPU), lane_from(CPU), seconds=0) == pytest.approx(2 * one)
    assert len(copied) == 2 * (1 + 3), "a first round and three that count"
    assert len({(target, source) for target, source, *_ in copied}) == len({target for target, *_ in copied}) == 2
    assert all(size == 1 << 20 and equal for *_, size, equal in copied)
    assert bench_copies.host_to_device_rounds([CPU], seconds=0) == pytest.approx([one] * 3)
    assert bench_copies.host_to_device_rounds([CPU, CPU], seconds=0) == pytest.approx([2 * one] * 3)
    assert len(bench_copies.host_to_device_rounds([CPU], seconds=99 * tick_s)) > 20, "as long as was asked"


def test_the_memory_of_an_engine_is_copied_block_by_block_in_turn(monkeypatch, tick_s):
    monkeypatch.setattr(bench_copies, "uncached_block_bytes", lambda: 1000)
    monkeypatch.setattr(bench_copies, "MIN_BYTES", 300)
    sizes = {1: 1000, 2: 2400, 3: 299, 4: 1200}  # by value; small ones are left out
    layers = [torch.full((size,), value, dtype=torch.uint8) for value, size in sizes.items()]
    blocks = bench_copies.blocks_of(layers, CPU)
    seen = [next(blocks) for _ in range(5)]
    assert [(int(block[0]), len(block)) for block in seen] == [(1, 1000), (2, 1000), (2, 1000), (2, 400), (4, 1000)]
    again = next(blocks)
    assert torch.equal(again, seen[0]) and seen[0].data_ptr() == layers[0].data_ptr(), "around again, where they lie"
    rates = bench_copies.host_to_device_rounds([CPU], 0, bench_copies.blocks_of(layers[1:], CPU))
    # the bytes that were copied, after a first round of 1000
    assert [rate * tick_s * 1e9 for rate in rates] == pytest.approx([1000, 400, 1000])
    assert bench_copies.blocks_of(layers[2:3], CPU) is None and bench_copies.blocks_of([], CPU) is None


class Clocks:
    """GPUs whose copies take the time that their rate says, and 0.1 ms more where they begin on an idle link."""

    START_S = 1e-4
    BLOCK_BYTES = 4 << 20  # a round of eight takes 0.6 ms at 55 GB/s

    def __init__(self, monkeypatch, gb_per_s: list[float]):
        self.now_s, self.current, self.streams = 0.0, None, []
        clocks = self

        class Memory:
            """On the GPU: a block of it, or the part of one that is copied to."""

            is_cuda = True

            def __init__(self, shape, value, dtype, device):
                assert dtype == torch.uint8 and shape == (clocks.BLOCK_BYTES,)
                self.device = device

            def __getitem__(self, part):
                return self

            def copy_(self, source, non_blocking):
                assert non_blocking
                begin_s = max(clocks.current.done_s, clocks.now_s + clocks.START_S)
                clocks.current.done_s = begin_s + source.nbytes / clocks.current.gb_per_s / 1e9

        class Stream:
            def __init__(self, device):
                self.done_s, self.gb_per_s = 0.0, gb_per_s[device.index]
                clocks.streams.append(self)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at_s = max(stream.done_s, clocks.now_s)

            def query(self):
                return clocks.now_s >= self.at_s

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
        monkeypatch.setattr(torch, "full", Memory)
        empty = torch.empty
        monkeypatch.setattr(
            torch,
            "empty",
            lambda size, dtype, device="cpu": (
                empty(size, dtype=dtype) if device == "cpu" else Memory((size,), 0, dtype, device)
            ),
        )
        monkeypatch.setattr(bench_copies, "host_empty", lambda shape, dtype, pinned: torch.empty(shape, dtype=dtype))
        monkeypatch.setattr(bench_copies, "BLOCK_BYTES", self.BLOCK_BYTES)


@pytest.mark.parametrize("links", [[55.0], [55.0, 55.0], [55.0, 20.0, 30.0]])
def test_busy_links_copy_at_the_same_time(links, monkeypatch):
    """The CPU is measured until the first one ends."""
    clocks = Clocks(monkeypatch, links)
    devices = [torch.device("cuda", index) for index in range(len(links))]
    busy = bench_copies.BusyLinks(devices, torch.zeros(bench_copies.SOURCES * clocks.BLOCK_BYTES, dtype=torch.uint8))
    assert len(clocks.streams) == len(links)
    copying = busy.begin(copies=5)
    copied_s = [5 * clocks.BLOCK_BYTES / rate / 1e9 for rate in links]
    assert copying.all_busy()
    clocks.now_s = clocks.START_S + 0.99 * min(copied_s)
    assert copying.all_busy()
    clocks.now_s = clocks.START_S + 1.01 * min(copied_s)
    assert not copying.all_busy()
    # all began on idle links
    expected = sum(rate * each / (clocks.START_S + each) for rate, each in zip(links, copied_s))
    assert copying.gb_per_s() == pytest.approx(expected)
    assert clocks.now_s >= max(stream.done_s for stream in clocks.streams), "all have ended"


@pytest.mark.parametrize("links, expected", [([55.0], 55.0), ([55.0, 55.0], 110.0), ([55.0, 20.0], 67.25)])
def test_equal_links_are_never_idle_while_they_are_measured(links, expected, monkeypatch):
    """A faster one starts each round on an idle link, after the slower one has ended the round before."""
    clocks = Clocks(monkeypatch, links)
    lanes = [lane_to(torch.device("cuda", index)) for index in range(len(links))]
    assert copy_gb_per_s(*lanes, seconds=0) == pytest.approx(expected, rel=1e-4)
    assert clocks.now_s == max(stream.done_s for stream in clocks.streams), "copies are still under way"


CORES = {
    0: ("32768K", "0-3"),
    1: ("32768K", "0-3"),
    4: ("16384K", "4-7"),
    8: ("65536K", "8-15"),
}  # a hybrid: its last-level caches by core


@pytest.mark.parametrize(
    "threads, cores, expected",
    [
        (1, CORES, 128),
        (2, CORES, 192),
        (3, CORES, 224),
        (64, CORES, 224),
        (1, {0: ("1024K", "0")}, 64),
        (2, {0: ("307200K", "0-55"), 56: ("307200K", "56-111")}, 512),
        (1, {}, 256),
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
    (tmp_path / "cpu201" / "cache" / "index0").mkdir(parents=True)  # of a virtual machine: no size
    monkeypatch.setattr(bench_copies, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores) | {200, 201})  # 200 has no caches
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert bench_copies.uncached_block_bytes() == expected << 20


def test_a_product_has_two_operations_an_element_and_the_best_number_of_rows_counts(monkeypatch):
    shapes = []

    def timed(device, action, seconds):
        shapes.append(tuple(action().shape))
        return {8: 1.0, 3: 0.125}[shapes[-1][0]]

    monkeypatch.setattr(bench_device, "measure_median_s", timed)
    assert bench_device.matmul_tflops(CPU, torch.float16, size=8, rows=(3,)) == 2 * 3 * 64 / 0.125 / 1e12
    assert bench_device.matmul_tflops(CPU, torch.float16, size=8) == 2 * 8 * 64 / 1e12
    assert shapes == [(8, 8), (3, 8), (8, 8)]
