"""Measure the CPU backend while links are busy and while they are idle: products, reads, attention and hand-offs.

Weights, keys and values are stored as runs store them, in more memory than the caches hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.attention import LogitOptions, add_attention, run_attention
from zero_inference.cpu.experts import Expert, ExpertActivation, add_experts
from zero_inference.cpu.hand_off import HandOff, Lane, StreamSide, allocate_buffers
from zero_inference.cpu.library import INSTRUCTIONS, best_instructions, require_library
from zero_inference.cpu.pool import (
    SPIN_US,
    TOO_MANY_THREADS,
    CpuPool,
    Routing,
    Stage,
    Task,
    Weight,
    choose_cpus,
    numa_node_of_gpu,
)
from zero_inference.cpu.products import Matrix
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.bench_copies import COPIES, BusyLinks, random_bytes, uncached_block_bytes
from zero_inference.hardware.bench_device import device_copy_gb_per_s
from zero_inference.hardware.profile import (
    ATTENTION_HEAD_DIM,
    CPU_BLOCK_BYTES,
    ConcurrentRates,
    CpuAttentionRate,
    CpuProductRate,
    CpuProfile,
    CpuWorkload,
    Gpu,
    HardwareProfile,
    WeightFormat,
    concurrent_rates,
)
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.utils.format import first_line
from zero_inference.utils.timing import Transfers

StoredFormat = tuple[torch.dtype, GroupQuantization | None]  # the second None for plain weights
FORMATS: dict[WeightFormat, StoredFormat] = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float32": (torch.float32, None),
    "int8": (torch.bfloat16, GroupQuantization(8, GROUP_SIZES[8])),
    "int4": (torch.bfloat16, GroupQuantization(4, GROUP_SIZES[4])),
}
# A profile has these formats (float32 is not for GPUs), tokens of a pass, columns of weights, query heads per key head.
MEASURED_FORMATS: tuple[WeightFormat, ...] = ("bfloat16", "float16", "int8", "int4")
# These also while the links of all GPUs are busy, in one round of each visit.
ALL_LINKS_FORMATS: tuple[WeightFormat, ...] = ("bfloat16", "int8", "int4")
ATTENTION_FORMATS: tuple[WeightFormat, ...] = ("bfloat16", "float16")
ROWS, COLUMNS, ATTENTION_HEADS = (1, 8, 32), 8192, (1, 4, 8)
# All formats and rows are visited VISITS times and the median counts, because a shared host changes from second to second: measured in one
# go, int4 products of one token had 109 GB/s, and those of the runs that followed 88 and 92.
VISITS, VISIT_ROUNDS, ALONE_S = 3, 2, 0.05
LINK_ROUNDS, READ_ROUNDS, READ_S = 5, 3, 0.05  # rounds of copies: of an idle CPU, and beside a read of host memory
OVERHEAD_COPIES = 5  # beside each kind of short calls, 24 ms at 55 GB/s: a hundred calls and more
HAND_OFFS = 200
HAND_OFF_COPIES = 4  # rounds of copies, 156 ms at 55 GB/s; the hand-offs (0.4 ms each at most) begin after half of them
ATTENTION_ROUNDS, ATTENTION_ALONE_S = 5, 0.1
PRODUCTS_S, DEVICE_S = 0.3, 0.02

WIDTH_STEP = 256  # of a feed-forward; a multiple of any group size
SHORT_BYTES = 16 << 20  # of a call whose overhead beyond its bytes shows
# Experts so small that the overhead of each shows; every row chooses CHOSEN of them.
EXPERTS, CHOSEN, EXPERT_WIDTH, EXPERT_COLUMNS = 16, 8, 256, 2048
NARROW_WIDTH = 16  # of a feed-forward that costs little but its hand-off
SEQUENCES, KEY_HEADS, BLOCKS, BLOCK_POSITIONS = 8, 8, 8, 64
LAYER_SHAPE = BLOCKS, SEQUENCES, KEY_HEADS, BLOCK_POSITIONS, ATTENTION_HEAD_DIM  # of keys, and of values
RANDOM_NUMBERS = 1 << 20  # drawn once and copied


def cpus_of_host(devices: Sequence[torch.device], threads: int | None = None) -> tuple[int, ...]:
    """Return a CPU for each thread of the pool that serves `devices`; -1 (unbound) without a GPU, since PyTorch's threads need the CPUs,
    too. Raises UsageError: `threads` (--cpu-threads; None chooses) is more than the usable CPUs."""
    if devices[0].type != "cuda":
        usable = len(os.sched_getaffinity(0))
        if threads is not None and threads > usable:
            raise UsageError(f"--cpu-threads {threads}: this process may use {usable} cores; use {usable} or fewer.")
        return (-1,) * (threads or min(usable, torch.get_num_threads()))
    return tuple(choose_cpus(threads, [_numa_node_of(device) for device in devices]))


def _numa_node_of(device: torch.device) -> int | None:
    found = torch.cuda.get_device_properties(device)
    return numa_node_of_gpu(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)


def measure_read_gb_per_s(cpus: tuple[int, ...], seconds: float = 0.3, memory: torch.Tensor | None = None) -> float:
    """Return GB/s at which the CPU reads `memory` (uint8; None allocates more than the caches hold) and adds it up. Raises RunError: the
    system allows fewer threads."""
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


def measure_products_gb_per_s(
    cpus: tuple[int, ...], wanted: Sequence[tuple[WeightFormat, int]]
) -> dict[tuple[WeightFormat, int], float]:
    """Return GB/s of stored bytes multiplied while the link is idle, for each (format, rows) in `wanted`."""
    with contextlib.closing(CpuPool(cpus, SPIN_US)) as pool:
        products = products_of_formats(pool, {name: FORMATS[name] for name, _ in wanted}, COLUMNS)
        return {(name, rows): products[name].calls(rows).gb_per_s_alone(PRODUCTS_S) for name, rows in wanted}


class CpuProducts:
    """Gated feed-forwards of random weights in one format, `columns` wide outside.

    `memory` (uint8) may be that of another format: codes may be any bytes, and scales are set. None allocates it.
    """

    def __init__(
        self,
        pool: CpuPool,
        dtype: torch.dtype,
        scheme: GroupQuantization | None,
        columns: int,
        memory: torch.Tensor | None = None,
    ):
        self.pool, self.dtype, self.scheme, self.columns = pool, dtype, scheme, columns
        if memory is None:  # whole feed-forwards (3 matrices), more than the caches hold, and enough for the experts
            block_bytes = 3 * self._width(CPU_BLOCK_BYTES) * self._row_bytes(columns)
            min_bytes = max(2 * uncached_block_bytes(), 3 * EXPERTS * EXPERT_WIDTH * self._row_bytes(EXPERT_COLUMNS))
            memory = random_bytes(-(-min_bytes // block_bytes) * block_bytes)
            if scheme is None:
                _fill_normal(memory.view(dtype))
        self.memory = memory
        self.tasks = self._feed_forward_tasks(CPU_BLOCK_BYTES)

    def calls(self, rows: int, short: bool = False) -> CpuCalls:
        """Return calls with `rows` rows of about `CPU_BLOCK_BYTES`, or of `SHORT_BYTES`."""
        return product_calls(self.pool, self._short_tasks if short else self.tasks, self.memory, self.dtype, rows)

    def expert_calls(self, rows: int) -> CpuCalls:
        """Return calls in which each of `rows` rows is routed to the same `CHOSEN` experts."""
        expert_ids = torch.arange(0, EXPERTS, EXPERTS // CHOSEN).repeat(rows, 1)  # [rows, CHOSEN]
        routing = Routing(expert_ids, torch.full(expert_ids.shape, 1 / CHOSEN))
        nbytes = CHOSEN * 3 * EXPERT_WIDTH * self._row_bytes(EXPERT_COLUMNS)
        return product_calls(self.pool, self._expert_tasks, self.memory, self.dtype, rows, routing, nbytes)

    def _row_bytes(self, columns: int) -> int:
        return columns * self.dtype.itemsize if self.scheme is None else self.scheme.stored_bytes(columns, self.dtype)

    def _width(self, nbytes: int) -> int:
        return max(WIDTH_STEP, nbytes // (3 * self._row_bytes(self.columns)) // WIDTH_STEP * WIDTH_STEP)

    def _feed_forward_tasks(self, nbytes: int) -> list[Task]:
        return [
            self.pool.add_block([Stage([gate, up], "gated", "silu"), Stage([down])], self.dtype)
            for gate, up, down in self._feed_forwards(self._width(nbytes), self.columns)
        ]

    @functools.cached_property
    def _short_tasks(self) -> list[Task]:
        return self._feed_forward_tasks(SHORT_BYTES)

    @functools.cached_property
    def _expert_tasks(self) -> list[Task]:
        weights = self._feed_forwards(EXPERT_WIDTH, EXPERT_COLUMNS)
        experts = [Expert(*(weight.matrix for weight in each)) for each in weights]
        return [
            add_experts(self.pool, experts[first : first + EXPERTS], ExpertActivation("silu"), self.dtype)
            for first in range(0, len(experts) - EXPERTS + 1, EXPERTS)
        ]

    def _feed_forwards(self, width: int, columns: int) -> Iterator[tuple[Weight, Weight, Weight]]:
        matrix_bytes = width * self._row_bytes(columns)
        for first in range(0, self.memory.numel() - 3 * matrix_bytes + 1, 3 * matrix_bytes):
            gate, up, down = self.memory[first : first + 3 * matrix_bytes].split(matrix_bytes)
            yield (
                self._weight(gate, width, columns),
                self._weight(up, width, columns),
                self._weight(down, columns, width),
            )

    def _weight(self, buffer: torch.Tensor, rows: int, columns: int) -> Weight:
        scheme = self.scheme
        if scheme is None:
            return Weight(Matrix.plain(buffer.view(self.dtype).view(rows, columns)), None, buffer.numel())
        packed_bytes = scheme.packed_bytes(rows * columns)
        groups = rows * columns // scheme.group_size
        codes, rest = buffer[:packed_bytes], buffer[packed_bytes:].view(self.dtype)
        scales, minima = rest[:groups].fill_(0.01), rest[groups : 2 * groups].fill_(-0.07)
        weight = scheme.as_weight(codes, scales, minima)
        return Weight(Matrix.quantized(weight, rows, columns, self.dtype), None, buffer.numel())


def products_of_formats(
    pool: CpuPool, formats: Mapping[WeightFormat, StoredFormat], columns: int
) -> dict[WeightFormat, CpuProducts]:
    """Return products in each format, all in the same memory: touching it for the first time takes longer than measuring."""
    found: dict[WeightFormat, CpuProducts] = {}
    memory = None
    for name, (dtype, scheme) in formats.items():
        found[name] = CpuProducts(pool, dtype, scheme, columns, memory)
        memory = found[name].memory
    return found


class CpuCalls:
    """Calls of the pool one after the other, around and around; each reads `nbytes` of `memory`, which lives as long."""

    def __init__(self, calls: Sequence[Callable[[], None]], nbytes: int, memory: object, out: torch.Tensor):
        self.calls, self.nbytes, self.memory, self.out = calls, nbytes, memory, out
        self._next = itertools.cycle(calls)

    def one(self) -> None:
        next(self._next)()

    def gb_per_s_alone(self, seconds: float) -> float:
        """Return GB/s over `seconds`, after two calls that warm up."""
        for _ in range(2):
            self.one()
        start, count = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - start) < seconds:
            self.one()
            count += 1
        return count * self.nbytes / spent_s / 1e9

    def beside(self, links: BusyLinks, copies: int = COPIES) -> tuple[float, float]:
        """Return GB/s of a round of copies over all `links`, and the seconds of a call while they run."""
        self.one()
        copying = links.begin(copies)
        start, count = time.perf_counter(), 0
        while copying.all_busy():
            self.one()
            count += 1
        spent_s = time.perf_counter() - start
        return copying.gb_per_s(), spent_s / max(1, count)


def product_calls(
    pool: CpuPool,
    tasks: Sequence[Task],
    memory: object,
    dtype: torch.dtype,
    rows: int,
    routing: Routing | None = None,
    nbytes: int | None = None,
) -> CpuCalls:
    """Return products of the same rows with one task after the other; `nbytes` of each are read, None for all."""
    x = torch.randn(rows, tasks[0].columns).to(dtype)
    out = torch.empty(rows * tasks[0].widths[0], dtype=dtype)
    calls = [functools.partial(pool.run, task, x, out, routing) for task in tasks]
    return CpuCalls(calls, tasks[0].nbytes if nbytes is None else nbytes, memory, out)


def narrow_feed_forward(pool: CpuPool, dtype: torch.dtype, columns: int) -> tuple[Task, tuple[torch.Tensor, ...]]:
    """Return a feed-forward of hardly any width from `columns` to `columns`, and its weights, which have to live as long as the task."""
    weights = torch.randn(NARROW_WIDTH, columns).to(dtype), torch.randn(columns, NARROW_WIDTH).to(dtype)
    first, last = (Weight(Matrix.plain(weight), None, 0) for weight in weights)
    return pool.add_block([Stage([first], "activation", "relu"), Stage([last])], dtype), weights


def attention_calls(pool: CpuPool, dtype: torch.dtype, heads: int, memory: torch.Tensor) -> CpuCalls:
    """Return decode attention of `SEQUENCES` sequences with `heads` query heads per key head, over one layer after the other."""
    _fill_normal(memory.view(dtype))
    elements = 2 * torch.Size(LAYER_SHAPE).numel()
    pairs = (layer.view(2, *LAYER_SHAPE) for layer in memory.view(dtype).split(elements))
    numbers = [add_attention(pool, keys, values, heads * KEY_HEADS, LogitOptions()) for keys, values in pairs]
    queries = SEQUENCES * heads * KEY_HEADS * ATTENTION_HEAD_DIM
    new_keys_and_values = 2 * SEQUENCES * KEY_HEADS * ATTENTION_HEAD_DIM
    packed = torch.randn(queries + new_keys_and_values).to(dtype)
    out = torch.empty(queries, dtype=dtype)
    positions = BLOCKS * BLOCK_POSITIONS
    calls = [functools.partial(run_attention, pool, number, packed, out, 1, positions, 0) for number in numbers]
    return CpuCalls(calls, elements * dtype.itemsize, memory, out)


def _fill_normal(memory: torch.Tensor) -> None:
    random = torch.randn(min(memory.numel(), RANDOM_NUMBERS)).to(memory.dtype)
    for part in memory.split(random.numel()):
        part.copy_(random[: part.numel()])


class CpuBench:
    """A thread pool and the busy links of `devices`, for inputs of up to [rows, columns]; hand-offs are with the first device.

    Args:
        more_devices: if given, `ALL_LINKS_FORMATS` are also measured while the links of all of these are busy.

    Raises:
        RunError: there is too little host memory.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        cpus: tuple[int, ...],
        rows: int,
        columns: int,
        more_devices: Sequence[torch.device] = (),
    ):
        self.device, self.cpus, self.columns = devices[0], cpus, columns
        nbytes = rows * columns * torch.float32.itemsize
        flags, buffers = allocate_buffers(nbytes, nbytes, pinned=True)
        self.pool = CpuPool(cpus, SPIN_US, flags)
        try:
            self.links = BusyLinks(devices)
            self.more_links = BusyLinks(more_devices, self.links.source) if more_devices else None
            self.hand_off = HandOff(self.pool, [Lane(StreamSide(self.device), buffers[0])], Transfers())
        except BaseException:
            self.pool.close()
            raise

    def close(self) -> None:
        for device in {*self.links.devices, *(self.more_links.devices if self.more_links else ())}:
            torch.cuda.synchronize(device)
        self.pool.close()
        torch.cuda.empty_cache()  # the plan asks for free memory

    def profile(
        self,
        formats: Mapping[WeightFormat, StoredFormat],
        all_rows: Sequence[int],
        attention: Sequence[tuple[WeightFormat, int]],
        say: Callable[[str], None],
    ) -> CpuProfile:
        """Measure products of all `formats` and rows in each of `VISITS` visits, and CPU attention over keys and values of a format with
        a number of query heads per key head. `say` reports attention that has no memory."""
        samples: dict[tuple[WeightFormat, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        hand_offs: dict[tuple[int, int], list[float]] = defaultdict(list)
        products = products_of_formats(self.pool, formats, self.columns)
        gpus = len(self.links.devices)
        first = next(iter(products.values()))
        reads = []
        for _ in range(VISITS):
            reads.append(self.read_gb_per_s(first.memory))
            for rows in all_rows:
                hand_offs[rows, gpus].append(self.hand_off_s(first.dtype, rows, self.links))
                for name, each in products.items():
                    self.visit(each, rows, samples[name, rows, gpus])
                if self.more_links is not None:
                    more_gpus = len(self.more_links.devices)
                    hand_offs[rows, more_gpus].append(self.hand_off_s(first.dtype, rows, self.more_links))
                    for name in ALL_LINKS_FORMATS:
                        self.visit_beside(self.more_links, products[name], rows, samples[name, rows, more_gpus])
        del products, first, each  # their memory, before attention takes its own
        attended = []
        try:
            for name, heads in attention:
                attended.append(self.attention(name, heads))
        except (RunError, torch.OutOfMemoryError) as error:
            say(f"warning: not measured: {first_line(error)}")
        return CpuProfile(
            threads=len(self.cpus),
            instructions=best_instructions(),
            read_gb_per_s=statistics.median(reads),
            products=tuple(
                CpuProductRate(
                    format=name,
                    rows=rows,
                    gpus=count,
                    hand_off_s=statistics.median(hand_offs[rows, count]),
                    # rates of the CPU alone were measured beside one link
                    **median_rates(samples[name, rows, gpus] | samples[name, rows, count]),
                )
                for count in sorted({count for _, _, count in samples})
                for name in formats
                for rows in all_rows
                if (name, rows, count) in samples
            ),
            attention=tuple(attended),
        )

    def read_gb_per_s(self, memory: torch.Tensor) -> float:
        rounds = [self.links.begin() for _ in range(READ_ROUNDS)]
        rate = measure_read_gb_per_s(self.cpus, READ_S, memory)
        rounds[-1].wait()
        return rate

    def hand_off_s(self, dtype: torch.dtype, rows: int, links: BusyLinks) -> float:
        """Return the time of a hand-off with `rows` rows while `links` are busy, the median of `HAND_OFFS`: other work of a shared host
        makes single ones many times as long.

        Hand-offs begin after half of the copies, when Python has enqueued all of them, so that its time does not count.
        """
        task, weights = narrow_feed_forward(self.pool, dtype, self.columns)
        self.pool.reserve(task, rows)
        x = torch.zeros(rows, self.columns, dtype=dtype, device=self.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(HAND_OFFS + 1)]
        copies = [links.begin() for _ in range(HAND_OFF_COPIES)]
        torch.cuda.current_stream(self.device).wait_event(copies[HAND_OFF_COPIES // 2 - 1].ends[0])
        (x,) = self.hand_off(task, x)  # worker threads wake up
        events[0].record()
        for event in events[1:]:
            (x,) = self.hand_off(task, x)
            event.record()
        events[-1].synchronize()
        copies[-1].wait()
        del weights  # no task reads them any more
        return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events)) / 1e3

    def visit(self, products: CpuProducts, rows: int, samples: dict[str, list[float]]) -> None:
        """Append to `samples` rates of `products` with `rows` rows, by the fields of `CpuProductRate`."""
        calls = products.calls(rows)
        samples["cores_alone_gb_per_s"].append(calls.gb_per_s_alone(ALONE_S))
        cores = [self.visit_beside(self.links, products, rows, samples) for _ in range(VISIT_ROUNDS)]
        call_s, expert_s = self.call_and_expert_s(products, rows, statistics.fmean(cores))
        samples["call_s"].append(call_s)
        samples["expert_s"].append(expert_s)

    def visit_beside(
        self, links: BusyLinks, products: CpuProducts, rows: int, samples: dict[str, list[float]]
    ) -> float:
        """Append to `samples` the rates of `links` and of the CPU beside them, and return the latter, GB/s."""
        calls = products.calls(rows)
        link_gb_per_s, call_s = calls.beside(links)
        samples["link_gb_per_s"].append(link_gb_per_s)
        samples["cores_gb_per_s"].append(calls.nbytes / call_s / 1e9)
        return samples["cores_gb_per_s"][-1]

    def call_and_expert_s(self, products: CpuProducts, rows: int, cores_gb_per_s: float) -> tuple[float, float]:
        """Return (call_s, expert_s): what a call takes beyond a call of hardly any width and its bytes at a constant rate, and beyond that
        for each expert that it reads. Noise may make both negative.

        Args:
            cores_gb_per_s: of calls of `CPU_BLOCK_BYTES` while the link is busy.
        """
        task, weights = narrow_feed_forward(self.pool, products.dtype, self.columns)
        narrow = product_calls(self.pool, [task], weights, products.dtype, rows)
        short, long, experts = products.calls(rows, short=True), products.calls(rows), products.expert_calls(rows)
        narrow_s, short_s, experts_s = (
            each.beside(self.links, OVERHEAD_COPIES)[1] for each in (narrow, short, experts)
        )
        if long.nbytes <= short.nbytes:  # rows of the weight are so long that both have `WIDTH_STEP` of them
            return 0.0, 0.0
        byte_s = (long.nbytes / (cores_gb_per_s * 1e9) - short_s) / (long.nbytes - short.nbytes)
        call_s = short_s - narrow_s - short.nbytes * byte_s
        return call_s, (experts_s - short_s - (experts.nbytes - short.nbytes) * byte_s) / CHOSEN

    @functools.cached_property
    def key_values(self) -> torch.Tensor:
        """Memory for the keys and values of as many layers, in any dtype, as the caches do not hold. uint8."""
        layer_bytes = 2 * torch.Size(LAYER_SHAPE).numel() * torch.float32.itemsize
        return random_bytes(max(2, -(-2 * uncached_block_bytes() // layer_bytes)) * layer_bytes)

    def attention(self, name: WeightFormat, heads: int) -> CpuAttentionRate:
        """Measure CPU attention with `heads` query heads per key head, in a third of a second."""
        calls = attention_calls(self.pool, FORMATS[name][0], heads, self.key_values)
        alone = calls.gb_per_s_alone(ATTENTION_ALONE_S)
        beside_s = statistics.median(calls.beside(self.links)[1] for _ in range(ATTENTION_ROUNDS))
        beside = calls.nbytes / beside_s / 1e9
        # faster than alone: other programs used the host meanwhile
        return CpuAttentionRate(format=name, heads=heads, gb_per_s=min(alone, beside), alone_gb_per_s=alone)


def median_rates(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of the samples of `CpuBench.visit`."""
    found = {name: statistics.median(values) for name, values in samples.items()}
    # faster than alone: other programs used the host meanwhile
    found["cores_gb_per_s"] = min(found["cores_gb_per_s"], found["cores_alone_gb_per_s"])
    return found | {name: max(0.0, found[name]) for name in ("call_s", "expert_s")}


@functools.cache  # plans ask for every candidate
def measure_concurrent_rates(
    devices: tuple[torch.device, ...], cpus: tuple[int, ...], work: CpuWorkload
) -> ConcurrentRates:
    """Measure on the CUDA devices `devices` and the CPUs `cpus`, in about two seconds. Raises RunError, torch.OutOfMemoryError: no
    memory."""
    weights = {cast(WeightFormat, work.weight_format): (work.dtype, work.scheme)}
    attention = [(cast(WeightFormat, work.kv_format), work.heads)] if work.heads else []
    with contextlib.closing(CpuBench(devices, cpus, work.rows, work.columns)) as bench:
        # without memory for attention the plan takes the rate of reads
        cores = bench.profile(weights, (work.rows,), attention, say=lambda line: None)
        links_gb_per_s = statistics.median(bench.links.begin().gb_per_s() for _ in range(LINK_ROUNDS))
        measured = HardwareProfile(
            source="measured",
            name="the part that `work` needs",
            gpus=tuple(Gpu(name="", memory_bytes=0, free_bytes=0) for _ in devices),
            host_memory_bytes=0,
            link_gb_per_s=links_gb_per_s / len(devices),
            all_links_gb_per_s=links_gb_per_s,
            device_gb_per_s=device_copy_gb_per_s(devices[0], DEVICE_S),
            cores=cores,
        )
    rates = concurrent_rates(measured, work, len(devices))
    assert isinstance(rates, ConcurrentRates), rates
    return rates


def measure_cpu_profile(
    devices: Sequence[torch.device], cpus: tuple[int, ...], say: Callable[[str], None]
) -> CpuProfile:
    """Measure on the CUDA devices `devices` and the CPUs `cpus`, in about fifteen seconds, and five more for several devices. `say` reports
    attention that has no memory. Raises RunError, torch.OutOfMemoryError: no memory."""
    attention = [(name, heads) for name in ATTENTION_FORMATS for heads in ATTENTION_HEADS]
    more_devices = devices if len(devices) > 1 else ()
    with contextlib.closing(CpuBench(devices[:1], cpus, max(ROWS), COLUMNS, more_devices)) as bench:
        return bench.profile({name: FORMATS[name] for name in MEASURED_FORMATS}, ROWS, attention, say)
