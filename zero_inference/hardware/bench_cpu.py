"""Measure the CPU backend while the link is busy and while it is idle: products, reads, attention and hand-offs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.hand_off import HandOff, StreamSide, allocate_buffers, allocate_local_buffers
from zero_inference.cpu.library import INSTRUCTIONS, best_instructions, require_library
from zero_inference.cpu.pool import (
    SPIN_US,
    TOO_MANY_THREADS,
    CpuPool,
    CpuPoolProxy,
    choose_cpus,
    choose_rank_cpus,
    numa_node_of_gpu,
)
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_copies import (
    BusyLink,
    random_bytes,
    rate_alone,
    rates_together,
    uncached_block_bytes,
)
from zero_inference.hardware.bench_device import device_copy_gb_per_s
from zero_inference.hardware.cpu_workloads import (
    CHOSEN,
    CpuAttention,
    CpuCalls,
    CpuProducts,
    key_value_memory,
    narrow_feed_forward,
)
from zero_inference.hardware.profile import CpuProductRate, WeightFormat
from zero_inference.hardware.rates import AttentionRates, ConcurrentRates
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

ROUNDS = 5
PRODUCTS_S, DEVICE_S = 0.3, 0.02
READS, READ_ROUNDS = 3, 3  # of host memory, and rounds of copies beside each: 0.1 s and more
OVERHEAD_COPIES = 5  # beside each kind of short calls, 24 ms at 55 GB/s: a hundred calls and more
HAND_OFFS, HAND_OFF_ROUNDS = 200, 3
HAND_OFF_COPIES = 4  # rounds of copies, 156 ms at 55 GB/s; the hand-offs (0.4 ms each at most) begin after half of them


def cpus_of_rank(ranks: Ranks) -> tuple[int, ...]:
    """Return a CPU for each worker thread of this rank alone; -1 (unbound) without a GPU, since PyTorch's threads need the CPUs, too."""
    if ranks.device.type != "cuda":
        return (-1,) * torch.get_num_threads()
    return tuple(choose_rank_cpus(_numa_node_of(ranks.device), ranks.local_rank, ranks.local_world_size))


def cpus_of_host(ranks: Ranks, threads: int | None = None) -> tuple[int, ...]:
    """Return a CPU for each thread of the pool that all ranks of this host share; -1 (unbound) without a GPU.

    Args:
        threads: --cpu-threads; None chooses.

    Raises:
        UsageError: `threads` is more than the usable CPUs.
    """
    if ranks.device.type != "cuda":
        usable = len(os.sched_getaffinity(0))
        if threads is not None and threads > usable:
            raise UsageError(f"--cpu-threads {threads}: this process may use {usable} cores; use {usable} or fewer.")
        return (-1,) * (threads or min(usable, ranks.local_world_size * torch.get_num_threads()))
    nodes = [_numa_node_of(torch.device("cuda", local_rank)) for local_rank in range(ranks.local_world_size)]
    return tuple(choose_cpus(threads, nodes))


def _numa_node_of(device: torch.device) -> int | None:
    found = torch.cuda.get_device_properties(device)
    return numa_node_of_gpu(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)


def measure_products_gb_per_s(
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    wanted: Sequence[tuple[GroupQuantization | None, int]],
    columns: int = 8192,
) -> list[float]:
    """Return GB/s of stored bytes multiplied while the link is idle, for each (scheme, rows) in `wanted`.

    All formats share memory: touching it for the first time takes longer than measuring.
    """
    with contextlib.closing(CpuPool(cpus, SPIN_US)) as pool:
        by_scheme: dict[GroupQuantization | None, CpuProducts] = {}
        for scheme, _ in wanted:
            if scheme not in by_scheme:
                shared = next(iter(by_scheme.values()), None)
                by_scheme[scheme] = CpuProducts(pool, dtype, scheme, columns, shared)
        return [rate_alone(by_scheme[scheme].calls(rows), PRODUCTS_S) for scheme, rows in wanted]


def measure_read_gb_per_s(cpus: tuple[int, ...], seconds: float = 0.3, memory: torch.Tensor | None = None) -> float:
    """Return GB/s at which the CPU reads host memory and adds it up.

    Args:
        memory: uint8; None allocates more than the caches hold.

    Raises:
        RunError: the system allows fewer threads.
    """
    memory = random_bytes(2 * uncached_block_bytes()) if memory is None else memory
    numbers = (ctypes.c_int32 * len(cpus))(*cpus)
    moved = ctypes.c_int64()
    instructions = INSTRUCTIONS.index(best_instructions())
    spent_s = require_library().zero_inference_measure_reads(
        memory.data_ptr(), memory.numel(), instructions, len(cpus), numbers, seconds, ctypes.byref(moved)
    )
    if spent_s < 0:
        raise RunError(TOO_MANY_THREADS.format(len(cpus)))
    return moved.value / spent_s / 1e9


def measure_read_beside_link(cpus: tuple[int, ...], link: BusyLink, memory: torch.Tensor) -> float:
    """Return GB/s of CPU reads while the link copies."""
    rounds = [link.begin() for _ in range(READ_ROUNDS)]
    rate = measure_read_gb_per_s(cpus, 0.05, memory)
    rounds[-1][1].synchronize()
    return rate


def hand_off_bytes(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a rank's input and output in `measure_hand_off_s`."""
    return (rows * columns * dtype.itemsize,) * 2


def measure_hand_off_s(
    hand_off: HandOff, link: BusyLink, dtype: torch.dtype, rows: int, columns: int, rounds: int = HAND_OFF_ROUNDS
) -> float:
    """Return the time of a hand-off with `rows` rows of each rank while the link is busy; all ranks call it together.

    Hand-offs begin after half of the copies, when Python has enqueued all of them, so that its time does not count. A kernel that waits
    for a number of cycles instead can outlast the copies if the device's clock is low.
    """
    task, weights = narrow_feed_forward(hand_off.pool, dtype, columns)
    hand_off.pool.reserve(task, rows)
    x = torch.zeros(rows, columns, dtype=dtype, device=link.device)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copies = [link.begin() for _ in range(HAND_OFF_COPIES)]
        torch.cuda.current_stream(link.device).wait_event(copies[HAND_OFF_COPIES // 2 - 1][1])
        (x,) = hand_off(task, x)  # ranks synchronize, and worker threads wake up
        start.record()
        for _ in range(HAND_OFFS):
            (x,) = hand_off(task, x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / HAND_OFFS)
        copies[-1][1].synchronize()
    del weights  # no task reads them any more
    return statistics.median(times)


@dataclass(frozen=True)
class CallOverhead:
    """`call_s` and `expert_s` of `ConcurrentRates` as measured: may be negative (noise)."""

    call_s: float
    expert_s: float


class CpuBench:
    """A thread pool and a busy link, for one weight format after the other.

    Args:
        rows, columns: upper limits of an input.

    Raises:
        RunError: no host memory.
    """

    def __init__(self, device: torch.device, cpus: tuple[int, ...], rows: int, columns: int):
        self.device, self.columns = device, columns
        buffers = allocate_local_buffers(*hand_off_bytes(rows, columns, torch.float32), pinned=True)
        self.pool = CpuPool(cpus, SPIN_US, buffers.flags)
        try:
            self.link = BusyLink(device)
            self.hand_off = HandOff(self.pool, StreamSide(device), buffers, Transfers())
        except BaseException:
            self.pool.close()
            raise

    def hand_off_s(self, dtype: torch.dtype, rows: int, rounds: int = HAND_OFF_ROUNDS) -> float:
        return measure_hand_off_s(self.hand_off, self.link, dtype, rows, self.columns, rounds)

    def call_overhead(self, products: CpuProducts, rows: int, cores_gb_per_s: float) -> CallOverhead:
        """Return what calls take beyond their bytes: the time of a call grows linearly from that of hardly any width, but for a step at
        its beginning (`call_s`); calls that read experts take longer.

        Args:
            cores_gb_per_s: of calls of `CPU_BLOCK_BYTES` while the link is busy.
        """
        task, weights = narrow_feed_forward(self.pool, products.dtype, self.columns)
        narrow = CpuCalls(self.pool, [task], weights, products.dtype, rows)
        short, long, experts = products.calls(rows, short=True), products.calls(rows), products.expert_calls(rows)
        narrow_s, short_s, experts_s = map(self._call_s, (narrow, short, experts))
        long_s = long.nbytes / (cores_gb_per_s * 1e9)
        if long.nbytes <= short.nbytes:  # rows of the weight are so long that both have `WIDTH_STEP` of them
            return CallOverhead(0.0, 0.0)
        byte_s = (long_s - short_s) / (long.nbytes - short.nbytes)
        return CallOverhead(
            call_s=short_s - narrow_s - short.nbytes * byte_s,
            expert_s=(experts_s - short_s - (experts.nbytes - short.nbytes) * byte_s) / CHOSEN,
        )

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.pool.close()
        torch.cuda.empty_cache()  # the plan asks for free memory

    def _call_s(self, calls: CpuCalls) -> float:
        """Return the time of a call while the link is busy."""
        calls.one()
        count, (_, end) = 0, self.link.begin(OVERHEAD_COPIES)
        start = time.perf_counter()
        while not end.query():
            calls.one()
            count += 1
        return (time.perf_counter() - start) / max(1, count)


@functools.cache  # plans ask for every candidate
def measure_concurrent_rates(
    device: torch.device,
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    scheme: GroupQuantization | None,
    rows: int,
    columns: int,
) -> ConcurrentRates:
    """Measure on the CUDA device `device` and the CPUs `cpus`, in about two seconds.

    Args:
        scheme: of the weights; None for weights of `dtype`.
        rows: of the inputs.
        columns: of the weights.

    Raises:
        RunError: no host memory.
    """
    with contextlib.closing(CpuBench(device, cpus, rows, columns)) as bench:
        products = CpuProducts(bench.pool, dtype, scheme, columns)
        alone = rate_alone(products.calls(rows), PRODUCTS_S)
        link_alone = statistics.median(bench.link.round() for _ in range(ROUNDS))
        together = [rates_together(products.calls(rows), bench.link) for _ in range(ROUNDS)]
        beside = statistics.median(rate for _, rate in together)
        overhead = bench.call_overhead(products, rows, beside)
        return ConcurrentRates(
            rows=rows,
            link_alone_gb_per_s=link_alone,
            link_gb_per_s=statistics.median(rate for rate, _ in together),
            cores_gb_per_s=min(alone, beside),  # faster than alone: other programs used the host meanwhile
            cores_alone_gb_per_s=alone,
            read_gb_per_s=statistics.median(
                measure_read_beside_link(cpus, bench.link, products.memory) for _ in range(READS)
            ),
            hand_off_s=bench.hand_off_s(dtype, rows),
            device_gb_per_s=device_copy_gb_per_s(device, DEVICE_S),
            call_s=max(0.0, overhead.call_s),
            expert_s=max(0.0, overhead.expert_s),
        )


class LinkRates(NamedTuple):
    """GB/s of a rank's link, while the CPU is idle and while it multiplies."""

    alone: float
    beside: float


def of_all_ranks(of_first: ConcurrentRates, links: Sequence[LinkRates]) -> ConcurrentRates:
    """Return the rates of a host. Each rank brings its part of a block, so all links together are a multiple of the slowest one."""
    return replace(
        of_first,
        link_alone_gb_per_s=len(links) * min(link.alone for link in links),
        link_gb_per_s=len(links) * min(link.beside for link in links),
    )


@functools.cache  # plans of all ranks ask for every candidate, in the same order
def measure_concurrent_rates_of_ranks(
    ranks: Ranks,
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    scheme: GroupQuantization | None,
    rows: int,
    columns: int,
) -> ConcurrentRates:
    """Measure on the CUDA devices of all ranks, which call it together and get the same rates.

    Args:
        cpus: of the first rank's worker threads.
        rows: of the inputs of each rank.

    Raises:
        RunError: in all ranks if one has too little memory.
    """
    device, count = ranks.device, ranks.world_size
    buffers = allocate_buffers(ranks, *hand_off_bytes(rows, columns, dtype), pinned=True)
    pool = CpuPool(cpus, SPIN_US, buffers.flags, ranks=count) if ranks.is_first else CpuPoolProxy(count)
    with contextlib.closing(pool):
        products, link, device_gb_per_s, problem = None, None, 0.0, None
        try:
            link = BusyLink(device)
            products = CpuProducts(pool, dtype, scheme, columns) if ranks.is_first else None
            device_gb_per_s = device_copy_gb_per_s(device, DEVICE_S)
        except (RunError, torch.OutOfMemoryError) as error:
            problem = str(error)
        problems = [found for found in ranks.gather_objects(problem) if found]
        if problems:
            raise RunError(problems[0])
        calls = products.calls(count * rows) if products is not None else None
        alone = rate_alone(calls, PRODUCTS_S) if calls is not None else 0.0
        mine, beside, read = _measure_together(ranks, cpus, link, calls, products)
        ranks.barrier()
        hand_off = HandOff(pool, StreamSide(device), buffers, Transfers(), ranks.rank)
        hand_off_s = measure_hand_off_s(hand_off, link, dtype, rows, columns)
        torch.cuda.synchronize(device)
    del link, products, calls
    torch.cuda.empty_cache()  # the plan asks for free memory
    together = min(alone, beside)  # as in `measure_concurrent_rates`
    found = ConcurrentRates(count * rows, mine.alone, mine.beside, together, alone, read, hand_off_s, device_gb_per_s)
    of_ranks = ranks.gather_objects((found, mine))
    return of_all_ranks(of_ranks[0][0], [link for _, link in of_ranks])


def _measure_together(
    ranks: Ranks, cpus: tuple[int, ...], link: BusyLink, calls: CpuCalls | None, products: CpuProducts | None
) -> tuple[LinkRates, float, float]:
    """Return the rates of this rank's link and, in the rank that has `products`, GB/s of CPU products and reads.

    The other ranks copy for twice as many rounds, so that their links are still busy in the first rank's last round.
    """
    ranks.barrier()
    alone = statistics.median(link.round() for _ in range(ROUNDS))
    ranks.barrier()
    if calls is None or products is None:
        rounds = [link.round() for _ in range(2 * ROUNDS)][:ROUNDS]
        ranks.barrier()
        for _ in range(2 * READS * READ_ROUNDS):
            link.round()
        return LinkRates(alone, statistics.median(rounds)), 0.0, 0.0
    together = [rates_together(calls, link) for _ in range(ROUNDS)]
    ranks.barrier()
    read = statistics.median(measure_read_beside_link(cpus, link, products.memory) for _ in range(READS))
    beside, multiplied = (statistics.median(each) for each in zip(*together))
    return LinkRates(alone, beside), multiplied, read


ATTENTION_HEADS = (1, 4, 8)  # query heads per key head in a profile
ATTENTION_ROUNDS, ATTENTION_ALONE_S = 5, 0.1


class AttentionBench:
    """A thread pool and a busy link, for CPU attention with one dtype and number of heads after the other.

    Args:
        dtype: as wide as those that will be measured.

    Raises:
        RunError, torch.OutOfMemoryError: no memory.
    """

    def __init__(self, device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
        self.device = device
        self.pool = CpuPool(cpus, SPIN_US)
        try:
            self.link, self.memory = BusyLink(device), key_value_memory(dtype)
        except BaseException:
            self.close()
            raise

    def measure(self, dtype: torch.dtype, heads: int) -> AttentionRates:
        """Measure for a third of a second with `heads` query heads per key head."""
        attention = CpuAttention(self.pool, dtype, heads, self.memory)
        alone = rate_alone(attention, ATTENTION_ALONE_S)
        beside = statistics.median(rates_together(attention, self.link)[1] for _ in range(ATTENTION_ROUNDS))
        return AttentionRates(min(alone, beside), alone)  # faster than alone: other programs used the host meanwhile

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.pool.close()
        torch.cuda.empty_cache()  # the plan asks for free memory


@functools.cache  # plans ask for every candidate
def measure_attention(device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype, heads: int) -> AttentionRates:
    """Measure CPU attention in about a second. Raises as `AttentionBench`."""
    with contextlib.closing(AttentionBench(device, cpus, dtype)) as bench:
        return bench.measure(dtype, heads)


ROWS = (1, 8, 32)  # tokens of a pass in a profile
FORMATS: dict[WeightFormat, tuple[torch.dtype, GroupQuantization | None]] = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float32": (torch.float32, None),
    "int8": (torch.bfloat16, GroupQuantization(8, GROUP_SIZES[8])),
    "int4": (torch.bfloat16, GroupQuantization(4, GROUP_SIZES[4])),
}
MEASURED: tuple[WeightFormat, ...] = ("bfloat16", "float16", "int8", "int4")  # float32 is not for GPUs
COLUMNS = 8192
VISITS, VISIT_ROUNDS, ALONE_S = 3, 2, 0.05


@dataclass
class _Samples:
    """One value a visit, link and cores one a round; GB/s."""

    link: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    overhead: list[CallOverhead] = field(default_factory=list)


def measure_cpu_rates(device: torch.device, cpus: tuple[int, ...]) -> tuple[float, tuple[CpuProductRate, ...]]:
    """Measure on the CUDA device `device` and the CPUs `cpus`, in about ten seconds.

    Returns GB/s of reads while the link is busy, and the rates of each format and number of tokens. All are visited `VISITS` times and
    the median counts, because a shared host changes from second to second: measured in one go, int4 products of one token had 109 GB/s,
    and those of the runs that followed 88 and 92.

    Raises:
        RunError, torch.OutOfMemoryError: no memory.
    """
    samples: dict[tuple[WeightFormat, int], _Samples] = defaultdict(_Samples)
    hand_offs: dict[int, list[float]] = defaultdict(list)
    reads: list[float] = []
    with contextlib.closing(CpuBench(device, cpus, max(ROWS), COLUMNS)) as bench:
        weights = _all_products(bench)
        for _ in range(VISITS):
            reads.append(measure_read_beside_link(cpus, bench.link, weights[MEASURED[0]].memory))
            for rows in ROWS:
                hand_offs[rows].append(bench.hand_off_s(torch.bfloat16, rows, rounds=1))
                for name, products in weights.items():
                    _visit(bench, products, rows, samples[name, rows])
    rates = (
        _median_rates(name, rows, samples[name, rows], statistics.median(hand_offs[rows]))
        for name in weights
        for rows in ROWS
    )
    return statistics.median(reads), tuple(rates)


def _all_products(bench: CpuBench) -> dict[WeightFormat, CpuProducts]:
    """Return products in each format, all in the same memory."""
    found: dict[WeightFormat, CpuProducts] = {}
    for name in MEASURED:
        found[name] = CpuProducts(bench.pool, *FORMATS[name], COLUMNS, shared=found.get(MEASURED[0]))
    return found


def _visit(bench: CpuBench, products: CpuProducts, rows: int, samples: _Samples) -> None:
    calls = products.calls(rows)
    samples.alone.append(rate_alone(calls, ALONE_S))
    together = [rates_together(calls, bench.link) for _ in range(VISIT_ROUNDS)]
    samples.link += [link for link, _ in together]
    samples.cores += [cores for _, cores in together]
    samples.overhead.append(bench.call_overhead(products, rows, statistics.fmean(cores for _, cores in together)))


def _median_rates(name: WeightFormat, rows: int, samples: _Samples, hand_off_s: float) -> CpuProductRate:
    alone = statistics.median(samples.alone)
    return CpuProductRate(
        format=name,
        rows=rows,
        link_gb_per_s=statistics.median(samples.link),
        cores_gb_per_s=min(alone, statistics.median(samples.cores)),  # as in `measure_concurrent_rates`
        cores_alone_gb_per_s=alone,
        hand_off_s=hand_off_s,
        call_s=max(0.0, statistics.median(each.call_s for each in samples.overhead)),
        expert_s=max(0.0, statistics.median(each.expert_s for each in samples.overhead)),
    )
