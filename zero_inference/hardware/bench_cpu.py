"""Products of weights in host memory by the host's cores: what is measured of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.attention import add_attention, run_attention
from zero_inference.cpu.experts import Expert, ExpertActivation, add_experts
from zero_inference.cpu.hand_off import HandOff, StreamSide, allocate_buffers, allocate_local_buffers
from zero_inference.cpu.library import INSTRUCTIONS, best_instructions, require_library
from zero_inference.cpu.pool import (
    SPIN_US,
    TOO_MANY_THREADS,
    CpuPool,
    CpuPoolProxy,
    Routing,
    Stage,
    Task,
    Weight,
    choose_cpus,
    choose_rank_cpus,
    numa_node_of_gpu,
)
from zero_inference.cpu.products import Matrix
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_copies import (
    RANDOM_BYTES,
    BusyLink,
    random_bytes,
    rate_alone,
    rates_together,
    uncached_block_bytes,
)
from zero_inference.hardware.bench_device import device_copy_gb_per_s
from zero_inference.hardware.profile import CpuProductRate
from zero_inference.hardware.profile import WeightFormat as Format
from zero_inference.hardware.rates import CPU_BLOCK_BYTES, AttentionRates, ConcurrentRates
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

WIDTH_STEP = 256  # of a feed-forward; groups of any size divide its width
SHORT_BYTES = 16 << 20  # of one that shows what a call takes besides its bytes
# Of a task with experts so small that what each takes besides its bytes shows, and those that each row chooses.
EXPERTS, CHOSEN, EXPERT_WIDTH, EXPERT_COLUMNS = 16, 8, 256, 2048


class CpuProducts:
    """Gated feed-forwards that the caches do not hold, their weights in the form that a run stores them: what a run gives the cores first.

    Args:
        shared: weights in another form, in whose memory these lie, too: any bytes do, and only scales have to be of a usual size.

    Attributes:
        kept: uint8, the weights.
    """

    def __init__(
        self,
        cores: CpuPool,
        dtype: torch.dtype,
        scheme: GroupQuantization | None,
        columns: int,
        shared: CpuProducts | None = None,
    ):
        self.cores, self.dtype, self.scheme, self.columns = cores, dtype, scheme, columns
        self.of_row = self.stored_bytes_of(columns)
        if shared is None:
            long = 3 * self._width(CPU_BLOCK_BYTES) * self.of_row
            least = max(2 * uncached_block_bytes(), 3 * EXPERTS * EXPERT_WIDTH * self.stored_bytes_of(EXPERT_COLUMNS))
            self.kept = random_bytes(-(-least // long) * long)
            if scheme is None:
                _fill(self.kept.view(dtype))
        else:
            self.kept = shared.kept
        self.tasks = self._blocks(CPU_BLOCK_BYTES)
        self.short_tasks: list[Task] = []
        self.expert_tasks: list[Task] = []

    def calls(self, rows: int, short: bool = False) -> CpuCalls:
        """Products with `rows` rows, of about `CPU_BLOCK_BYTES` or `SHORT_BYTES` each; of one of them at a time."""
        if short and not self.short_tasks:
            self.short_tasks = self._blocks(SHORT_BYTES)
        return CpuCalls(self.cores, self.short_tasks if short else self.tasks, self.kept, self.dtype, rows)

    def expert_calls(self, rows: int) -> CpuCalls:
        """The same with experts of a task, of which all rows choose `CHOSEN`."""
        if not self.expert_tasks:
            self.expert_tasks = self._experts()
        numbers = torch.arange(0, EXPERTS, EXPERTS // CHOSEN).repeat(rows, 1)
        choice = Routing(numbers, torch.full(numbers.shape, 1 / CHOSEN))
        nbytes = CHOSEN * 3 * EXPERT_WIDTH * self.stored_bytes_of(EXPERT_COLUMNS)
        return CpuCalls(self.cores, self.expert_tasks, self.kept, self.dtype, rows, choice, nbytes)

    def stored_bytes_of(self, columns: int) -> int:
        """Of a row of so many columns."""
        return columns * self.dtype.itemsize if self.scheme is None else self.scheme.stored_bytes(columns, self.dtype)

    def _width(self, nbytes: int) -> int:
        """Of gate, up and down, in blocks of about so many bytes."""
        return max(WIDTH_STEP, nbytes // (3 * self.of_row) // WIDTH_STEP * WIDTH_STEP)

    def _blocks(self, nbytes: int) -> list[Task]:
        return [
            self.cores.add_block([Stage([gate, up], "gated", "silu"), Stage([down])], self.dtype)
            for gate, up, down in self._feed_forwards(self._width(nbytes), self.columns)
        ]

    def _experts(self) -> list[Task]:
        every = self._feed_forwards(EXPERT_WIDTH, EXPERT_COLUMNS)
        experts = [Expert(*(weight.matrix for weight in each)) for each in every]
        whole = range(0, len(experts) - EXPERTS + 1, EXPERTS)
        return [
            add_experts(self.cores, experts[first : first + EXPERTS], ExpertActivation("silu"), self.dtype)
            for first in whole
        ]

    def _feed_forwards(self, width: int, columns: int) -> Iterator[tuple[Weight, Weight, Weight]]:
        """Gate, up and down, one behind the other in `kept`."""
        matrix_bytes = width * self.stored_bytes_of(columns)
        for block in self.kept.split(3 * matrix_bytes):
            if block.numel() < 3 * matrix_bytes:
                return
            gate, up = (self._weight(part, width, columns) for part in block.split(matrix_bytes)[:2])
            yield gate, up, self._weight(block[2 * matrix_bytes :], columns, width)

    def _weight(self, buffer: torch.Tensor, rows: int, columns: int) -> Weight:
        """In random bytes; scales and minima are made numbers of the usual size."""
        scheme = self.scheme
        if scheme is None:
            return Weight(Matrix.plain(buffer.view(self.dtype).view(rows, columns)), None, buffer.numel())
        codes, rest = buffer[: scheme.packed_bytes(rows * columns)], buffer[scheme.packed_bytes(rows * columns) :]
        groups = rows * columns // scheme.group_size
        scales, minima = (
            rest.view(self.dtype)[:groups].fill_(0.01),
            rest.view(self.dtype)[groups : 2 * groups].fill_(-0.07),
        )
        matrix = Matrix.groups(codes, scales, minima, scheme.bits, scheme.group_size, rows)
        return Weight(matrix, None, buffer.numel())


class CpuCalls:
    """The same number of rows multiplied with one task after the other.

    Args:
        kept: memory of the weights.
        choice: what the rows choose, of tasks with experts.
        nbytes: that a call reads, where tasks leave that to the choice.
    """

    def __init__(
        self,
        cores: CpuPool,
        tasks: list[Task],
        kept: object,
        dtype: torch.dtype,
        rows: int,
        choice: Routing | None = None,
        nbytes: int | None = None,
    ):
        self.cores, self.tasks, self.kept, self.choice, self.next = cores, tasks, kept, choice, 0
        self.nbytes = tasks[0].nbytes if nbytes is None else nbytes
        self.x = torch.randn(rows, tasks[0].columns).to(dtype)
        self.out = torch.empty(rows * tasks[0].widths[0], dtype=dtype)

    def one(self) -> int:
        """Multiply with the next task and return its bytes."""
        task = self.tasks[self.next]
        self.next = (self.next + 1) % len(self.tasks)
        self.cores.run(task, self.x, self.out, self.choice)
        return self.nbytes


def _fill(weights: torch.Tensor) -> None:
    """With numbers of the usual size."""
    random = torch.randn(min(weights.numel(), RANDOM_BYTES // 4)).to(weights.dtype)
    for part in weights.split(random.numel()):
        part.copy_(random[: part.numel()])


MEETINGS, MEETING_WIDTH = 200, 16  # of a feed-forward so narrow that it costs little but the meeting
MEETING_ROUNDS = 3
MEETING_COPIES = 4  # rounds of copies beside each, 156 ms at 55 GB/s; half of them before it begins: 0.4 ms a meeting


def hand_off_bytes(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of a rank's input and output where it has `rows` rows in `measure_hand_off_s`."""
    return (rows * columns * dtype.itemsize,) * 2


def measure_hand_off_s(
    crossing: HandOff, link: BusyLink, dtype: torch.dtype, rows: int, columns: int, rounds: int = MEETING_ROUNDS
) -> float:
    """Seconds of a meeting with `rows` rows of each rank, as `BesideLink` says; all ranks call it together.

    The meetings begin behind half of the copies, when Python has asked for all of them: its time is not what is measured. A kernel that
    waits for a number of cycles instead may wait until all copies have ended, where the device's clock is low.
    """
    task, weights = narrow_feed_forward(crossing.pool, dtype, columns)
    crossing.pool.reserve(task, rows)
    x = torch.zeros(rows, columns, dtype=dtype, device=link.device)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copies = [link.begin() for _ in range(MEETING_COPIES)]
        torch.cuda.current_stream(link.device).wait_event(copies[MEETING_COPIES // 2 - 1][1])
        (x,) = crossing(task, x)  # the ranks come together, and the cores' threads wake up
        start.record()
        for _ in range(MEETINGS):
            (x,) = crossing(task, x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / MEETINGS)
        copies[-1][1].synchronize()
    del weights  # the cores have read them
    return statistics.median(times)


def narrow_feed_forward(cores: CpuPool, dtype: torch.dtype, columns: int) -> tuple[Task, tuple[torch.Tensor, ...]]:
    """From `columns` to as many, and its weights, which are to be kept."""
    weights = torch.randn(MEETING_WIDTH, columns).to(dtype), torch.randn(columns, MEETING_WIDTH).to(dtype)
    first, last = (Weight(Matrix.plain(weight), None, 0) for weight in weights)
    return cores.add_block([Stage([first], "activation", "relu"), Stage([last])], dtype), weights


ATTENTION_HEADS = (1, 4, 8)  # query heads that share a key head: other numbers lie between them
SEQUENCES, KEY_HEADS, BLOCKS, BLOCK_POSITIONS, HEAD_DIM = 8, 8, 8, 64, 128  # of a layer: 16 MiB of keys and values
ATTENTION_ROUNDS, ATTENTION_ALONE_S = 5, 0.1


class CpuAttention:
    """Attention of a token of each sequence over layers that the caches do not hold, as a cache in host memory stores them.

    Args:
        kept: uint8, where keys and values are to lie; None takes as much as the caches do not hold.
    """

    def __init__(self, cores: CpuPool, dtype: torch.dtype, heads: int, kept: torch.Tensor | None = None):
        self.pool = cores
        shape = BLOCKS, SEQUENCES, KEY_HEADS, BLOCK_POSITIONS, HEAD_DIM
        self.nbytes = layer_bytes(dtype)
        kept = (_keys_and_values(dtype) if kept is None else kept).view(dtype)
        random = torch.randn(min(kept.numel(), 1 << 20)).to(dtype)
        for part in kept.split(random.numel()):
            part.copy_(random[: part.numel()])
        layers = (layer.chunk(2) for layer in kept.split(self.nbytes // dtype.itemsize))
        scale = HEAD_DIM**-0.5
        self.numbers = [
            add_attention(self.pool, k.view(shape), v.view(shape), heads * KEY_HEADS, scale) for k, v in layers
        ]
        queries = SEQUENCES * heads * KEY_HEADS * HEAD_DIM
        self.packed = torch.randn(queries + 2 * SEQUENCES * KEY_HEADS * HEAD_DIM).to(dtype)  # with new keys and values
        self.out = torch.empty(queries, dtype=dtype)
        self.next = 0

    def one(self) -> int:
        """Attend in the next layer and return the bytes of its keys and values."""
        number = self.numbers[self.next]
        self.next = (self.next + 1) % len(self.numbers)
        run_attention(self.pool, number, self.packed, self.out, 1, BLOCKS * BLOCK_POSITIONS, 0)
        return self.nbytes


def layer_bytes(dtype: torch.dtype) -> int:
    """Of a layer's keys and values."""
    return 2 * BLOCKS * SEQUENCES * KEY_HEADS * BLOCK_POSITIONS * HEAD_DIM * dtype.itemsize


def _keys_and_values(dtype: torch.dtype) -> torch.Tensor:
    return random_bytes(max(2, -(-2 * uncached_block_bytes() // layer_bytes(dtype))) * layer_bytes(dtype))


class AttentionBench:
    """Threads on the CPUs `cpus` and the link of the CUDA device `device`: measures one kind of keys and values at a time.

    Args:
        dtype: as wide as those of the keys and values that will be measured.

    Raises:
        RunError, torch.OutOfMemoryError: no memory.
    """

    def __init__(self, device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
        self.device = device
        self.cores = CpuPool(cpus, SPIN_US)
        try:
            self.link, self.kept = BusyLink(device), _keys_and_values(dtype)
        except BaseException:
            self.close()
            raise

    def measured(self, dtype: torch.dtype, heads: int) -> AttentionRates:
        """In a third of a second.

        Args:
            dtype: of keys and values.
            heads: query heads that share a key head.

        Raises:
            RunError: no host memory.
        """
        attention = CpuAttention(self.cores, dtype, heads, self.kept)
        alone = rate_alone(attention, ATTENTION_ALONE_S)
        beside = statistics.median(rates_together(attention, self.link)[1] for _ in range(ATTENTION_ROUNDS))
        return AttentionRates(min(alone, beside), alone)  # faster than alone is a host that others used meanwhile

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.cores.close()
        torch.cuda.empty_cache()  # the plan looks at the memory that is free


@functools.cache  # a plan is made for many options
def measure_attention(device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype, heads: int) -> AttentionRates:
    """As `AttentionBench` measures, in about a second."""
    with contextlib.closing(AttentionBench(device, cpus, dtype)) as bench:
        return bench.measured(dtype, heads)


ROUNDS = 5
READS, READ_ROUNDS = 3, 3  # of host memory by the cores, and rounds of copies beside each: a tenth of a second and more
PRODUCTS_S, DEVICE_S = 0.3, 0.02
BESIDES_COPIES = 5  # beside each kind of short calls, 24 ms at 55 GB/s: a hundred of them and more


@functools.cache  # a plan is made for many options
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
        scheme: how the weights are stored; None for plain ones of `dtype`.
        rows: of the inputs.
        columns: of the weights.

    Raises:
        RunError: no host memory.
    """
    with contextlib.closing(CpuBench(device, cpus, rows, columns)) as bench:
        products = CpuProducts(bench.cores, dtype, scheme, columns)
        alone = rate_alone(products.calls(rows), PRODUCTS_S)
        link_alone = statistics.median(bench.link.round() for _ in range(ROUNDS))
        together = [rates_together(products.calls(rows), bench.link) for _ in range(ROUNDS)]
        beside = statistics.median(rate for _, rate in together)
        besides = bench.besides(products, rows, beside)
        return ConcurrentRates(
            rows,
            link_alone,
            statistics.median(rate for rate, _ in together),
            min(alone, beside),  # more than alone is a host that others used meanwhile
            alone,
            statistics.median(measure_read_beside_link(cpus, bench.link, products.kept) for _ in range(READS)),
            bench.hand_off_s(dtype, rows),
            device_copy_gb_per_s(device, DEVICE_S),
            call_s=max(0.0, besides.call_s),
            expert_s=max(0.0, besides.expert_s),
        )


@dataclass(frozen=True)
class CallOverhead:
    """See `ConcurrentRates`; as they were measured, which on a host that others use may be less than nothing."""

    call_s: float
    expert_s: float


class CpuBench:
    """Threads and a link that are measured beside each other, with one kind of weights after the other.

    Args:
        rows, columns: the most of an input.

    Raises:
        RunError: no host memory.
    """

    def __init__(self, device: torch.device, cpus: tuple[int, ...], rows: int, columns: int):
        self.device, self.columns = device, columns
        place = allocate_local_buffers(*hand_off_bytes(rows, columns, torch.float32), pinned=True)
        self.cores = CpuPool(cpus, SPIN_US, place.flags)
        try:
            self.link = BusyLink(device)
            self.crossing = HandOff(self.cores, StreamSide(device), place, Transfers())
        except BaseException:
            self.cores.close()
            raise

    def hand_off_s(self, dtype: torch.dtype, rows: int, rounds: int = MEETING_ROUNDS) -> float:
        """See `ConcurrentRates`; the median of so many rounds."""
        return measure_hand_off_s(self.crossing, self.link, dtype, rows, self.columns, rounds)

    def besides(self, products: CpuProducts, rows: int, cores_gb_per_s: float) -> CallOverhead:
        """The time of a call grows by a line from that of hardly any width on, but for a step behind its beginning; one that reads experts
        takes longer than that.

        Args:
            cores_gb_per_s: of calls of `BLOCK_BYTES` while the link is busy.
        """
        task, weights = narrow_feed_forward(self.cores, products.dtype, self.columns)
        narrow = CpuCalls(self.cores, [task], weights, products.dtype, rows)
        short, long, experts = products.calls(rows, short=True), products.calls(rows), products.expert_calls(rows)
        none_s, short_s, experts_s = map(self._seconds_of_call, (narrow, short, experts))
        long_s = long.nbytes / (cores_gb_per_s * 1e9)
        if long.nbytes <= short.nbytes:  # rows of the weight are so long that a short block has as many as a long one
            return CallOverhead(0.0, 0.0)
        of_byte = (long_s - short_s) / (long.nbytes - short.nbytes)
        return CallOverhead(
            call_s=short_s - none_s - short.nbytes * of_byte,
            expert_s=(experts_s - short_s - (experts.nbytes - short.nbytes) * of_byte) / CHOSEN,
        )

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.cores.close()
        torch.cuda.empty_cache()  # the plan looks at the memory that is free

    def _seconds_of_call(self, calls: CpuCalls) -> float:
        """While the link is busy."""
        calls.one()
        count, (_, end) = 0, self.link.begin(BESIDES_COPIES)
        start = time.perf_counter()
        while not end.query():
            calls.one()
            count += 1
        return (time.perf_counter() - start) / max(1, count)


def cpus_of(ranks: Ranks) -> tuple[int, ...]:
    """CPUs for threads of this rank alone; -1 for each that is not bound to one: without a GPU the cores also compute what a device
    would, and the system keeps the two out of each other's way."""
    if ranks.device.type != "cuda":
        return (-1,) * torch.get_num_threads()
    return tuple(choose_rank_cpus(_numa_node_of(ranks.device), ranks.local_rank, ranks.local_world_size))


def cpus_of_host(ranks: Ranks, asked: int | None = None) -> tuple[int, ...]:
    """The same for threads that all ranks of this host call.

    Raises:
        UsageError: more threads than cores were asked for.
    """
    if ranks.device.type != "cuda":
        usable = len(os.sched_getaffinity(0))
        if asked is not None and asked > usable:
            raise UsageError(f"--cpu-threads {asked}: this process may use {usable} cores; use {usable} or fewer.")
        return (-1,) * (asked or min(usable, ranks.local_world_size * torch.get_num_threads()))
    nodes = [_numa_node_of(torch.device("cuda", local_rank)) for local_rank in range(ranks.local_world_size)]
    return tuple(choose_cpus(asked, nodes))


def _numa_node_of(device: torch.device) -> int | None:
    found = torch.cuda.get_device_properties(device)
    return numa_node_of_gpu(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)


def measure_products_gb_per_s(
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    wanted: Sequence[tuple[GroupQuantization | None, int]],
    columns: int = 8192,
) -> list[float]:
    """GB/s of stored bytes of weights that the cores multiply while the link rests, for each scheme and number of rows in `wanted`.

    All weights lie in the same memory: to touch it for the first time takes longer than to measure.
    """
    cores = CpuPool(cpus, SPIN_US)
    try:
        by_scheme: dict[GroupQuantization | None, CpuProducts] = {}
        for scheme, _ in wanted:
            if scheme not in by_scheme:
                shared = next(iter(by_scheme.values()), None)
                by_scheme[scheme] = CpuProducts(cores, dtype, scheme, columns, shared)
        return [rate_alone(by_scheme[scheme].calls(rows), PRODUCTS_S) for scheme, rows in wanted]
    finally:
        cores.close()


def measure_read_gb_per_s(cpus: tuple[int, ...], seconds: float = 0.3, memory: torch.Tensor | None = None) -> float:
    """GB/s at which the cores read host memory, and do no more with it than add it up.

    Args:
        memory: uint8, what they read; None takes as much as the caches do not hold.

    Raises:
        RunError: the system allows fewer threads.
    """
    memory = random_bytes(2 * uncached_block_bytes()) if memory is None else memory
    numbers = (ctypes.c_int32 * len(cpus))(*cpus)
    moved = ctypes.c_int64()
    instructions = INSTRUCTIONS.index(best_instructions())
    spent = require_library().zero_inference_measure_reads(
        memory.data_ptr(), memory.numel(), instructions, len(cpus), numbers, seconds, ctypes.byref(moved)
    )
    if spent < 0:
        raise RunError(TOO_MANY_THREADS.format(len(cpus)))
    return moved.value / spent / 1e9


def measure_read_beside_link(cpus: tuple[int, ...], link: BusyLink, memory: torch.Tensor) -> float:
    """GB/s of the cores while the link copies."""
    rounds = [link.begin() for _ in range(READ_ROUNDS)]
    rate = measure_read_gb_per_s(cpus, 0.05, memory)
    rounds[-1][1].synchronize()
    return rate


LONGER = 2  # as many rounds as the first rank takes, so that the other links are still busy in its last one


class LinkRates(NamedTuple):
    """GB/s of a rank's link, while the cores rest and while they multiply."""

    alone: float
    beside: float


def of_all_ranks(of_first: ConcurrentRates, links: Sequence[LinkRates]) -> ConcurrentRates:
    """The rates of a host: a block is there when each rank has brought its part of it, so all links together are as many times the
    slowest one."""
    return replace(
        of_first,
        link_alone_gb_per_s=len(links) * min(link.alone for link in links),
        link_gb_per_s=len(links) * min(link.beside for link in links),
    )


@functools.cache  # a plan is made more than once, by all ranks alike
def measure_concurrent_rates_of_ranks(
    ranks: Ranks,
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    scheme: GroupQuantization | None,
    rows: int,
    columns: int,
) -> ConcurrentRates:
    """As `measure_beside_link`, on the CUDA devices of all ranks; they call it together, and get the same.

    Args:
        cpus: of the first rank's threads.
        rows: of the inputs of each rank.

    Raises:
        RunError: in all ranks, where one has no memory for it.
    """
    device, count = ranks.device, ranks.world_size
    place = allocate_buffers(ranks, *hand_off_bytes(rows, columns, dtype), pinned=True)
    cores = CpuPool(cpus, SPIN_US, place.flags, ranks=count) if ranks.is_first else CpuPoolProxy(count)
    with contextlib.closing(cores):
        products, link, device_gb_per_s, problem = None, None, 0.0, None
        try:
            link = BusyLink(device)
            products = CpuProducts(cores, dtype, scheme, columns) if ranks.is_first else None
            device_gb_per_s = device_copy_gb_per_s(device, DEVICE_S)
        except (RunError, torch.OutOfMemoryError) as error:
            problem = str(error)
        problems = [found for found in ranks.gather_objects(problem) if found]
        if problems:
            raise RunError(problems[0])
        calls = products.calls(count * rows) if products is not None else None
        alone = rate_alone(calls, PRODUCTS_S) if calls is not None else 0.0
        mine, beside, read = _beside_each_other(ranks, cpus, link, calls, products)
        ranks.barrier()
        crossing = HandOff(cores, StreamSide(device), place, Transfers(), ranks.rank)
        spent_s = measure_hand_off_s(crossing, link, dtype, rows, columns)
        torch.cuda.synchronize(device)
    del link, products, calls
    torch.cuda.empty_cache()  # the plan looks at the memory that is free
    together = min(alone, beside)  # as in `measure_beside_link`
    found = ConcurrentRates(count * rows, mine.alone, mine.beside, together, alone, read, spent_s, device_gb_per_s)
    of_ranks = ranks.gather_objects((found, mine))
    return of_all_ranks(of_ranks[0][0], [link for _, link in of_ranks])


def _beside_each_other(
    ranks: Ranks, cpus: tuple[int, ...], link: BusyLink, calls: CpuCalls | None, products: CpuProducts | None
) -> tuple[LinkRates, float, float]:
    """Of this rank's link; and of the cores, in the rank that has `products` and their `calls`, the GB/s that they multiply and read."""
    ranks.barrier()
    alone = statistics.median(link.round() for _ in range(ROUNDS))
    ranks.barrier()
    if calls is None or products is None:
        rounds = [link.round() for _ in range(LONGER * ROUNDS)][:ROUNDS]
        ranks.barrier()
        for _ in range(LONGER * READS * READ_ROUNDS):
            link.round()
        return LinkRates(alone, statistics.median(rounds)), 0.0, 0.0
    together = [rates_together(calls, link) for _ in range(ROUNDS)]
    ranks.barrier()
    read = statistics.median(measure_read_beside_link(cpus, link, products.kept) for _ in range(READS))
    rates, multiplied = (statistics.median(each) for each in zip(*together))
    return LinkRates(alone, rates), multiplied, read


ROWS = (1, 8, 32)  # of the passes that are measured; other numbers of tokens lie between them
# By format: the dtype of weights or scales, and how the weights are stored.
FORMATS: dict[Format, tuple[torch.dtype, GroupQuantization | None]] = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float32": (torch.float32, None),
    "int8": (torch.bfloat16, GroupQuantization(8, GROUP_SIZES[8])),
    "int4": (torch.bfloat16, GroupQuantization(4, GROUP_SIZES[4])),
}
MEASURED: tuple[Format, ...] = ("bfloat16", "float16", "int8", "int4")  # a GPU would be given float32 weights by nobody
COLUMNS = 8192
VISITS = 3
VISIT_ROUNDS, ALONE_S = 2, 0.05  # of a visit


@dataclass(frozen=True)
class CpuRates:
    """
    Attributes:
        read_gb_per_s: host memory read while the link is busy.
        products: of every format and number of tokens.
    """

    read_gb_per_s: float
    products: tuple[CpuProductRate, ...]


@dataclass
class _Seen:
    """What visits found, a value each; rates in GB/s of 1e9 bytes."""

    link: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    besides: list[CallOverhead] = field(default_factory=list)


def measure_cpu_rates(device: torch.device, cpus: tuple[int, ...]) -> CpuRates:
    """Measure on the CUDA device `device` and the CPUs `cpus`, in about ten seconds.

    All formats and numbers of tokens are gone through `VISITS` times, and the median of each counts: what a host gives that others use
    changes from second to second. Measured in one go, int4 products of one token had 109 GB/s, and those of runs 88 and 92 behind it.

    Raises:
        RunError, torch.OutOfMemoryError: no memory.
    """
    seen: dict[tuple[Format, int], _Seen] = defaultdict(_Seen)
    crossings: dict[int, list[float]] = defaultdict(list)
    read: list[float] = []
    with contextlib.closing(CpuBench(device, cpus, max(ROWS), COLUMNS)) as bench:
        weights = _weights(bench)
        for _ in range(VISITS):
            read.append(measure_read_beside_link(cpus, bench.link, weights[MEASURED[0]].kept))
            for rows in ROWS:
                crossings[rows].append(bench.hand_off_s(torch.bfloat16, rows, rounds=1))
                for name, products in weights.items():
                    _visit(bench, products, rows, seen[name, rows])
    found = (
        _rates(name, rows, seen[name, rows], statistics.median(crossings[rows])) for name in weights for rows in ROWS
    )
    return CpuRates(statistics.median(read), tuple(found))


def _weights(bench: CpuBench) -> dict[Format, CpuProducts]:
    """Of all formats in the same memory."""
    found: dict[Format, CpuProducts] = {}
    for name in MEASURED:
        found[name] = CpuProducts(bench.cores, *FORMATS[name], COLUMNS, shared=found.get(MEASURED[0]))
    return found


def _visit(bench: CpuBench, products: CpuProducts, rows: int, seen: _Seen) -> None:
    calls = products.calls(rows)
    seen.alone.append(rate_alone(calls, ALONE_S))
    together = [rates_together(calls, bench.link) for _ in range(VISIT_ROUNDS)]
    seen.link += [link for link, _ in together]
    seen.cores += [cores for _, cores in together]
    seen.besides.append(bench.besides(products, rows, statistics.fmean(cores for _, cores in together)))


def _rates(name: Format, rows: int, seen: _Seen, hand_off_s: float) -> CpuProductRate:
    alone = statistics.median(seen.alone)
    return CpuProductRate(
        format=name,
        rows=rows,
        link_gb_per_s=statistics.median(seen.link),
        cores_gb_per_s=min(
            alone, statistics.median(seen.cores)
        ),  # more than alone is a host that others used meanwhile
        cores_alone_gb_per_s=alone,
        hand_off_s=hand_off_s,
        call_s=max(0.0, statistics.median(each.call_s for each in seen.besides)),
        expert_s=max(0.0, statistics.median(each.expert_s for each in seen.besides)),
    )
