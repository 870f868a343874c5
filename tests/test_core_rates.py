"""What cores give beside a link, in calls of several sizes and in several visits: real products, and a link that is only played."""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from zero_inference.cpu.hand_off import HostSide
from zero_inference.cpu.library import load_library
from zero_inference.cpu.pool import SPIN_US, CpuPool
from zero_inference.engines.stream.placement import Placement
from zero_inference.hardware import bench_cpu, cpu_workloads
from zero_inference.hardware.bench_cpu import CallOverhead, CpuBench
from zero_inference.hardware.cpu_workloads import CpuProducts
from zero_inference.hardware.rates import CPU_BLOCK_BYTES, ConcurrentRates
from zero_inference.kernels.quantization import GroupQuantization

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler")
COLUMNS = 512
INT4 = GroupQuantization(4, 32)


class PlayedLink:
    """Copies that end behind some calls of the cores."""

    class Event:
        def __init__(self, left: int):
            self.left = left

        def query(self) -> bool:
            self.left -= 1
            return self.left < 0

        def synchronize(self) -> None:
            pass

    def begin(self, copies=8):
        return self.Event(0), self.Event(6)

    def rate(self, start, end) -> float:
        return 50.0

    def round(self) -> float:
        return 55.0


class PlayedBench(bench_cpu.CpuBench):
    def __init__(self, device, cpus, rows, columns):
        self.device, self.columns, self.link = device, columns, PlayedLink()
        self.pool = CpuPool(cpus, SPIN_US)

    def hand_off_s(self, dtype, rows, rounds=3) -> float:
        return 1e-5 * rows

    def close(self) -> None:
        self.pool.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cpu_workloads, "CPU_BLOCK_BYTES", 8 << 20)
    monkeypatch.setattr(cpu_workloads, "SHORT_BYTES", 2 << 20)
    monkeypatch.setattr(cpu_workloads, "uncached_block_bytes", lambda: 8 << 20)
    monkeypatch.setattr(cpu_workloads, "EXPERT_COLUMNS", COLUMNS)
    monkeypatch.setattr(bench_cpu, "CpuBench", PlayedBench)
    monkeypatch.setattr(bench_cpu, "COLUMNS", COLUMNS)
    monkeypatch.setattr(bench_cpu, "ALONE_S", 0.01)


def measured():
    return bench_cpu.measure_cpu_rates(torch.device("cpu"), (-1, -1))


def test_every_format_is_visited_with_every_number_of_tokens(monkeypatch):
    visits = []
    visit = bench_cpu._visit

    def counted(bench, weights, rows, seen):
        visits.append((weights.dtype, weights.scheme, rows))
        visit(bench, weights, rows, seen)

    monkeypatch.setattr(bench_cpu, "_visit", counted)
    read_gb_per_s, rates = measured()
    assert [(each.format, each.rows) for each in rates] == [
        (name, rows) for name in ("bfloat16", "float16", "int8", "int4") for rows in (1, 8, 32)
    ]
    assert len(visits) == 3 * 12 and visits[:12] == visits[12:24] == visits[24:], "all of them before the next visit"
    for each in rates:
        assert each.link_gb_per_s == 50.0 and each.hand_off_s == pytest.approx(1e-5 * each.rows)
        assert 0 < each.cores_gb_per_s <= each.cores_alone_gb_per_s and min(each.call_s, each.expert_s) >= 0
    assert read_gb_per_s > 0


def test_meetings_are_measured_one_behind_the_other_in_the_same_place(monkeypatch):
    """By a device that is a CPU, and a clock that only counts."""
    asked = []

    class Event:
        def __init__(self, enable_timing=True):
            pass

        def record(self):
            asked.append(bench.hand_off.number)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 13.0 * (1 + len(asked) // 2)  # ms, more in each round

    allocate_local_buffers = bench_cpu.allocate_local_buffers
    monkeypatch.setattr(
        bench_cpu, "allocate_local_buffers", lambda *sizes, pinned: allocate_local_buffers(*sizes, pinned=False)
    )
    monkeypatch.setattr(bench_cpu, "StreamSide", lambda device: HostSide())
    link = PlayedLink()
    link.device = torch.device("cpu")
    monkeypatch.setattr(bench_cpu, "BusyLink", lambda device: link)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    waited = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waited)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    bench = CpuBench(link.device, (-1, -1), 8, COLUMNS)
    assert bench.hand_off_s(torch.bfloat16, 1) == pytest.approx(3 * 13e-3 / 200), "the median of three rounds"
    assert bench.hand_off_s(torch.bfloat16, 8, rounds=1) == pytest.approx(5 * 13e-3 / 200)
    assert asked == [1, 201, 202, 402, 403, 603, 604, 804], "a call before the 200 that are timed"
    bench.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_is_measured_in_the_memory_of_whole_layers(dtype, monkeypatch):
    """One kind after the other, in the same memory."""
    monkeypatch.setattr(bench_cpu, "BusyLink", lambda device: PlayedLink())
    monkeypatch.setattr(cpu_workloads, "uncached_block_bytes", lambda: 40 << 20)
    monkeypatch.setattr(bench_cpu, "ATTENTION_ALONE_S", 0.01)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    bench = bench_cpu.AttentionBench(torch.device("cpu"), (-1, -1), dtype)
    layers = bench.memory.numel() / cpu_workloads.layer_bytes(dtype)
    assert layers == int(layers) and bench.memory.numel() >= 80 << 20
    for heads in (1, 4):
        found = bench.measure(dtype, heads)
        assert 0 < found.beside_link_gb_per_s <= found.alone_gb_per_s
    bench.close()


def test_a_visit_takes_the_rate_of_long_calls_from_those_beside_the_link(monkeypatch):
    bench = PlayedBench(torch.device("cpu"), (-1, -1), 1, COLUMNS)
    asked = []
    bench.call_overhead = lambda products, rows, gb_per_s: asked.append((rows, gb_per_s)) or CallOverhead(0.0, 0.0)
    monkeypatch.setattr(bench_cpu, "rates_together", lambda calls, link: (50.0, 80.0 + 20.0 * len(seen.alone)))
    seen = bench_cpu._Samples()
    bench_cpu._visit(bench, bench_cpu._all_products(bench)["int4"], 8, seen)
    assert asked == [(8, 100.0)] and seen.cores == [100.0, 100.0] and seen.link == [50.0, 50.0]
    bench.close()


def test_the_median_of_the_visits_counts():
    besides = [CallOverhead(0.0, 1e-5), CallOverhead(1e-4, 2e-5), CallOverhead(3e-5, 0.0)]
    seen = bench_cpu._Samples([50.0, 40.0, 51.0], [90.0, 100.0, 95.0], [93.0, 120.0, 92.0], besides)
    found = bench_cpu._median_rates("int4", 1, seen, 6e-5)
    assert (found.link_gb_per_s, found.cores_gb_per_s, found.cores_alone_gb_per_s) == (50.0, 93.0, 93.0)
    assert (found.call_s, found.expert_s, found.hand_off_s) == (3e-5, 1e-5, 6e-5)


def test_all_formats_lie_in_the_same_memory():
    """On a small machine four times as much would be too much."""
    bench = PlayedBench(torch.device("cpu"), (-1, -1), 32, COLUMNS)
    weights = bench_cpu._all_products(bench)
    assert {id(each.memory) for each in weights.values()} == {id(weights["bfloat16"].memory)}
    for each in weights.values():
        for calls in (each.calls(2), each.calls(2, short=True), each.expert_calls(2)):
            assert calls.one() == calls.nbytes and not torch.isnan(calls.out).any()
    bench.close()


@pytest.mark.parametrize(
    "dtype, scheme", [(torch.bfloat16, None), (torch.bfloat16, GroupQuantization(8, 64)), (torch.bfloat16, INT4)]
)
@pytest.mark.parametrize("short", [False, True])
def test_calls_multiply_with_weights_of_the_size_that_was_asked_for(dtype, scheme, short):
    team = CpuPool((-1, -1), SPIN_US)
    try:
        weights = CpuProducts(team, dtype, scheme, COLUMNS)
        calls = weights.calls(3, short=short)
        wanted = (2 << 20) if short else (8 << 20)
        assert 0.7 * wanted <= calls.nbytes <= wanted
        assert all(calls.one() == calls.nbytes for _ in range(2 * len(calls.tasks))), "around and around"
        assert len(calls.tasks) * calls.nbytes <= weights.memory.numel()
        assert torch.isfinite(calls.out).all()
    finally:
        team.close()


def test_experts_are_read_by_a_call():
    team = CpuPool((-1, -1), SPIN_US)
    try:
        weights = CpuProducts(team, torch.bfloat16, INT4, COLUMNS)
        calls = weights.expert_calls(3)
        assert len(calls.tasks) > 0 and len(calls.tasks) * 2 * calls.nbytes <= weights.memory.numel(), "half of them"
        read = team.chosen_bytes()
        assert calls.one() == calls.nbytes == 8 * 3 * 256 * weights._row_bytes(COLUMNS)
        assert team.chosen_bytes() - read == calls.nbytes, "each once, though three rows chose it"
    finally:
        team.close()


def test_the_time_of_a_call_besides_its_bytes():
    """A line through calls of two sizes begins above a call of no width, and one with experts lies above it."""
    team = CpuPool((-1,), SPIN_US)
    try:
        bench = PlayedBench(torch.device("cpu"), (-1,), 1, COLUMNS)
        weights = CpuProducts(team, torch.bfloat16, None, COLUMNS)
        short, long = weights.calls(1, short=True).nbytes, weights.calls(1).nbytes
        experts = weights.expert_calls(1).nbytes
        assert len({0, short, long, experts}) == 4
        times = {0: 1.0, short: 3.0, experts: 12.0}
        bench._call_s = lambda calls: times[calls.nbytes]
        rate = long / 9.0 / 1e9
        found = bench.call_overhead(weights, 1, rate)
        assert found.call_s == pytest.approx(2.0 - 6.0 * short / (long - short))
        line = 3.0 + (experts - short) * 6.0 / (long - short)
        assert found.expert_s == pytest.approx((12.0 - line) / 8)
        times |= {short: 1.5, experts: 0.5}
        found = bench.call_overhead(weights, 1, rate)
        assert found.call_s < 0 and found.expert_s < 0
        seen = bench_cpu._Samples([50.0], [90.0], [95.0], [found])
        rates = bench_cpu._median_rates("int4", 1, seen, 6e-5)
        assert (rates.call_s, rates.expert_s) == (0.0, 0.0), "a median below nothing is nothing"
        bench.close()
    finally:
        team.close()


def test_a_short_call_costs_what_a_long_one_has_in_its_rate():
    rates = ConcurrentRates(1, 55.0, 50.0, 100.0, 110.0, 120.0, 6e-5, 4000.0, call_s=4e-5)
    assert rates.call_overhead_s(0) == pytest.approx(1e-4) and rates.call_overhead_s(CPU_BLOCK_BYTES) == 6e-5
    assert (
        rates.call_overhead_s(CPU_BLOCK_BYTES // 2) == pytest.approx(8e-5)
        and rates.call_overhead_s(4 * CPU_BLOCK_BYTES) == 6e-5
    )
    assert statistics.fmean(map(rates.call_overhead_s, (0, CPU_BLOCK_BYTES))) == pytest.approx(8e-5)
    assert Placement([], [], [], 0, 0).calls == {}
    with_experts = replace(rates, expert_s=1e-5)
    assert with_experts.call_overhead_s(CPU_BLOCK_BYTES, 8) == pytest.approx(6e-5 + 8e-5)
