"""What cores give beside a link, in calls of several sizes and in several visits: real products, and a link that is only played."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_hand_off import HostSide

from zero_inference.cpu.hand_off import allocate_buffers
from zero_inference.cpu.library import load_library
from zero_inference.errors import RunError
from zero_inference.hardware import bench_cpu, measure_profile
from zero_inference.hardware.bench_cpu import CpuBench, CpuCalls, CpuProducts, products_of_formats
from zero_inference.hardware.profile import CPU_BLOCK_BYTES, ConcurrentRates, CpuWorkload
from zero_inference.kernels.quantization import GroupQuantization

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler")
CPU = torch.device("cpu")
COLUMNS = 512
INT4 = GroupQuantization(4, 32)


class PlayedLinks:
    """Copies over one or several links that end after some calls of the CPU; two links have 90 GB/s together, one has 50."""

    def __init__(self, devices, source=None):
        self.devices, self.source = devices, source

    def begin(self, copies=8):
        return PlayedRound(len(self.devices))


class PlayedRound:
    def __init__(self, links: int):
        self.links, self.left, self.ends = links, 6, [None] * links

    def all_busy(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def wait(self) -> None:
        pass

    def gb_per_s(self) -> float:
        return {1: 50.0, 2: 90.0}[self.links]


@pytest.fixture(autouse=True)
def small_blocks_and_no_gpu(monkeypatch):
    for name, value in {
        "CPU_BLOCK_BYTES": 8 << 20,
        "SHORT_BYTES": 2 << 20,
        "EXPERT_COLUMNS": COLUMNS,
        "COLUMNS": COLUMNS,
        "ALONE_S": 0.01,
        "ATTENTION_ALONE_S": 0.01,
        "READ_S": 0.01,
    }.items():
        monkeypatch.setattr(bench_cpu, name, value)
    monkeypatch.setattr(bench_cpu, "uncached_block_bytes", lambda: 8 << 20)
    monkeypatch.setattr(bench_cpu, "BusyLinks", PlayedLinks)
    monkeypatch.setattr(bench_cpu, "StreamSide", lambda device: HostSide())
    monkeypatch.setattr(bench_cpu, "allocate_buffers", lambda *sizes, pinned: allocate_buffers(*sizes, pinned=False))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(CpuBench, "hand_off_s", lambda bench, dtype, rows, links: 1e-5 * rows * len(links.devices))


@pytest.fixture
def bench():
    made = CpuBench([CPU], (-1, -1), 32, COLUMNS)
    yield made
    made.close()


def test_every_format_is_visited_with_every_number_of_tokens_in_turn(monkeypatch):
    """Attention without memory leaves the other rates."""
    visits, visit, attention = [], CpuBench.visit, CpuBench.attention
    lines: list[str] = []

    def counted(bench, products, rows, samples):
        visits.append((products.dtype, products.scheme, rows))
        visit(bench, products, rows, samples)

    def attend(bench, name, heads):
        if (name, heads) == ("float16", 4):
            raise RunError("no host memory is left")
        return attention(bench, name, heads)

    monkeypatch.setattr(CpuBench, "visit", counted)
    monkeypatch.setattr(CpuBench, "attention", attend)
    monkeypatch.setattr(measure_profile, "cpus_of_host", lambda devices: (-1, -1))
    monkeypatch.setattr(measure_profile.extension, "load_extension", lambda: True)
    found = measure_profile.measure_cores([torch.device("cuda", 0)], lines.append)
    assert [(each.format, each.rows) for each in found.products] == [
        (name, rows) for name in ("bfloat16", "float16", "int8", "int4") for rows in (1, 8, 32)
    ]
    assert len(visits) == 3 * 12 and visits[:12] == visits[12:24] == visits[24:], "all of them before the next visit"
    for each in found.products:
        assert each.link_gb_per_s == 50.0 and each.hand_off_s == pytest.approx(1e-5 * each.rows)
        assert 0 < each.cores_gb_per_s <= each.cores_alone_gb_per_s and min(each.call_s, each.expert_s) >= 0
    attended = [("bfloat16", 1), ("bfloat16", 4), ("bfloat16", 8), ("float16", 1)]
    assert [(each.format, each.heads) for each in found.attention] == attended and "no host memory" in lines[0]
    assert all(0 < each.gb_per_s <= each.alone_gb_per_s for each in found.attention)
    assert found.threads == 2 and found.read_gb_per_s > 0
    assert measure_profile.measure_cores([CPU], lines.append) is None


def test_the_rates_of_a_plan_are_measured_for_its_weights(monkeypatch):
    monkeypatch.setattr(bench_cpu, "device_copy_gb_per_s", lambda device, seconds: 4000.0)
    bench_cpu.measure_concurrent_rates.cache_clear()
    work = CpuWorkload(torch.float32, None, rows=2, columns=COLUMNS, heads=4)
    for devices, links_gb_per_s in (((CPU,), 50.0), ((CPU, CPU), 90.0)):
        found = bench_cpu.measure_concurrent_rates(devices, (-1, -1), work)
        assert (found.rows, found.gpus, found.device_gb_per_s) == (2, len(devices), 4000.0)
        assert found.link_alone_gb_per_s == pytest.approx(links_gb_per_s) == found.link_gb_per_s
        assert found.hand_off_s == pytest.approx(2e-5 * len(devices))
        assert 0 < found.cores_gb_per_s <= found.cores_alone_gb_per_s
        assert 0 < found.attended.beside_link_gb_per_s <= found.attended.alone_gb_per_s


def test_products_are_also_measured_beside_the_links_of_all_gpus():
    """What the CPU does without links is measured once; float16 has no measurement of its own there."""
    found = bench_cpu.measure_cpu_profile((CPU, CPU), (-1, -1), [].append)
    one, two = ({(each.format, each.rows): each for each in found.products if each.gpus == n} for n in (1, 2))
    assert set(one) == {(name, rows) for name in ("bfloat16", "float16", "int8", "int4") for rows in (1, 8, 32)}
    assert set(two) == {(name, rows) for name, rows in one if name != "float16"}
    for key, each in two.items():
        assert (each.link_gb_per_s, each.hand_off_s) == (90.0, pytest.approx(2 * one[key].hand_off_s))
        assert 0 < each.cores_gb_per_s <= each.cores_alone_gb_per_s
        same = ("cores_alone_gb_per_s", "call_s", "expert_s")
        assert [getattr(each, name) for name in same] == [getattr(one[key], name) for name in same]
    assert (found.most_links("int4"), found.most_links("float16"), found.most_links("float32")) == (2, 1, 0)


def test_hand_offs_are_measured_one_after_the_other(bench, monkeypatch):
    """By a device that is a CPU, and a clock that only counts."""
    monkeypatch.undo()
    asked = []

    class Event:
        def __init__(self, enable_timing=True):
            pass

        def record(self):
            self.number = bench.hand_off.lanes[0].number
            asked.append(self.number)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 13.0 if end.number % 10 == 0 else 0.065  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    assert bench.hand_off_s(torch.bfloat16, 8, bench.links) == pytest.approx(65e-6)
    assert asked == list(range(1, 202)), "a call before the 200 that are timed"


def test_all_formats_are_in_the_same_memory(bench):
    """On a small machine four times as much would be too much."""
    formats = {name: bench_cpu.FORMATS[name] for name in bench_cpu.MEASURED_FORMATS}
    weights = products_of_formats(bench.pool, formats, COLUMNS)
    assert {id(each.memory) for each in weights.values()} == {id(weights["bfloat16"].memory)}
    for each in weights.values():
        for calls in (each.calls(2), each.calls(2, short=True), each.expert_calls(2)):
            calls.one()
            assert not torch.isnan(calls.out).any()


@pytest.mark.parametrize("scheme", [None, GroupQuantization(8, 64), INT4])
@pytest.mark.parametrize("short, wanted", [(False, 8 << 20), (True, 2 << 20)])
def test_calls_multiply_with_weights_of_the_size_that_was_asked_for(scheme, short, wanted, bench):
    weights = CpuProducts(bench.pool, torch.bfloat16, scheme, COLUMNS)
    calls = weights.calls(3, short=short)
    assert 0.7 * wanted <= calls.nbytes <= wanted and len(calls.calls) * calls.nbytes <= weights.memory.numel()
    for _ in range(2 * len(calls.calls)):  # around and around
        calls.one()
    assert torch.isfinite(calls.out).all()


def test_experts_are_read_by_a_call(bench):
    weights = CpuProducts(bench.pool, torch.bfloat16, INT4, COLUMNS)
    calls = weights.expert_calls(3)
    assert len(calls.calls) > 0 and len(calls.calls) * 2 * calls.nbytes <= weights.memory.numel(), "half of them"
    read = bench.pool.chosen_bytes()
    calls.one()
    assert bench.pool.chosen_bytes() - read == calls.nbytes, "each once, though three rows chose it"


def test_attention_reads_more_than_the_caches_hold(bench):
    attention = bench_cpu.attention_calls(bench.pool, torch.bfloat16, 4, bench.key_values)
    attention.one()
    assert len(attention.calls) * attention.nbytes >= 16 << 20
    assert torch.isfinite(attention.out).all() and attention.out.abs().max() > 0


def test_the_time_of_a_call_besides_its_bytes(bench, monkeypatch):
    """A line through calls of two sizes begins above a call of no width, and one with experts lies above it."""
    weights = CpuProducts(bench.pool, torch.bfloat16, None, COLUMNS)
    short, long = weights.calls(1, short=True).nbytes, weights.calls(1).nbytes
    experts = weights.expert_calls(1).nbytes
    times = {0: 1.0, short: 3.0, experts: 12.0}
    monkeypatch.setattr(CpuCalls, "beside", lambda calls, links, copies: (50.0, times[calls.nbytes]))
    call_s, expert_s = bench.call_and_expert_s(weights, 1, long / 9.0 / 1e9)
    assert call_s == pytest.approx(2.0 - 6.0 * short / (long - short))
    line = 3.0 + (experts - short) * 6.0 / (long - short)
    assert expert_s == pytest.approx((12.0 - line) / 8)


def test_a_short_call_costs_what_a_long_one_has_in_its_rate():
    rates = ConcurrentRates(1, 55.0, 50.0, 100.0, 110.0, 120.0, 6e-5, 4000.0, call_s=4e-5)
    found = [rates.call_overhead_s(share * CPU_BLOCK_BYTES) for share in (0, 0.5, 1, 4)]
    assert found == pytest.approx([1e-4, 8e-5, 6e-5, 6e-5])
    with_experts = replace(rates, expert_s=1e-5)
    assert with_experts.call_overhead_s(CPU_BLOCK_BYTES, 8) == pytest.approx(6e-5 + 8e-5)
