"""What the host's cores give beside a busy link: products of weights where they lie."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_inference.cpu.hand_off import HandOff, StreamSide, allocate_local_buffers
from zero_inference.cpu.library import INSTRUCTIONS, best_instructions, require_library
from zero_inference.cpu.pool import SPIN_US, TOO_MANY_THREADS, CpuPool, choose_cpus, choose_rank_cpus, numa_node_of_gpu
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.attention import Attended
from zero_inference.hardware.caches import block_bytes
from zero_inference.hardware.compute import device_copy_gb_per_s
from zero_inference.hardware.copies import Copies, random_bytes, rate_alone, rates_together
from zero_inference.hardware.meeting import MEETING_ROUNDS, crossed_bytes, crossing_s, narrow_feed_forward
from zero_inference.hardware.products import BLOCK_BYTES, CHOSEN, Calls, Products
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

ROUNDS = 5
READS, READ_ROUNDS = 3, 3  # of host memory by the cores, and rounds of copies beside each: a tenth of a second and more
PRODUCTS_S, DEVICE_S = 0.3, 0.02
BESIDES_COPIES = 5  # beside each kind of short calls, 24 ms at 55 GB/s: a hundred of them and more


@dataclass(frozen=True)
class BesideLink:
    """Rates in GB/s of 1e9 bytes; those of copies, and of both together, are medians of rounds.

    Attributes:
        rows: of the products.
        link_alone_gb_per_s: page-locked copies to the device while the cores rest.
        link_gb_per_s, cores_gb_per_s: copies, and stored bytes of weights multiplied in calls of `BLOCK_BYTES`, at the same time.
        cores_alone_gb_per_s: products while the link rests.
        read_gb_per_s: host memory read by the cores, while the link is busy.
        crossing_s: from the moment when the device has an input for the cores to the one when it has their output, while the link is
            busy, for a feed-forward between as many columns as the weights have, and of hardly any width.
        device_gb_per_s: copies inside the memory of the device, read and written bytes both counted.
        attended: keys and values that the cores attend over; None where that was not measured.
        call_s: what a call of the cores takes besides its bytes and what one of hardly any width takes, while the link is busy.
        expert_s: what a call that reads experts takes besides, for each of them.
    """

    rows: int
    link_alone_gb_per_s: float
    link_gb_per_s: float
    cores_gb_per_s: float
    cores_alone_gb_per_s: float
    read_gb_per_s: float
    crossing_s: float
    device_gb_per_s: float
    attended: Attended | None = None
    call_s: float = 0.0
    expert_s: float = 0.0

    def attention_gb_per_s(self, link_rests: bool) -> float:
        """Of keys and values; where that was not measured, what the cores read, which is more."""
        if self.attended is None:
            return self.read_gb_per_s
        return self.attended.alone_gb_per_s if link_rests else self.attended.beside_link_gb_per_s

    def meeting_s(self, nbytes: float, experts: float = 0.0) -> float:
        """Seconds that a call for products of so many bytes, or of so many experts with them, takes besides these at `cores_gb_per_s`, in
        which a call of `BLOCK_BYTES` has its `call_s`."""
        return self.crossing_s + self.call_s * max(0.0, 1 - nbytes / BLOCK_BYTES) + self.expert_s * experts


@functools.cache  # a plan is made for many options
def measure_beside_link(
    device: torch.device,
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    scheme: GroupQuantization | None,
    rows: int,
    columns: int,
) -> BesideLink:
    """Measure on the CUDA device `device` and the CPUs `cpus`, in about two seconds.

    Args:
        scheme: how the weights are stored; None for plain ones of `dtype`.
        rows: of the inputs.
        columns: of the weights.

    Raises:
        RunError: no host memory.
    """
    with contextlib.closing(Bench(device, cpus, rows, columns)) as bench:
        products = Products(bench.cores, dtype, scheme, columns)
        alone = rate_alone(products.calls(rows), PRODUCTS_S)
        link_alone = statistics.median(bench.link.round() for _ in range(ROUNDS))
        together = [rates_together(products.calls(rows), bench.link) for _ in range(ROUNDS)]
        beside = statistics.median(rate for _, rate in together)
        besides = bench.besides(products, rows, beside)
        return BesideLink(
            rows,
            link_alone,
            statistics.median(rate for rate, _ in together),
            min(alone, beside),  # more than alone is a host that others used meanwhile
            alone,
            statistics.median(read_beside(cpus, bench.link, products.kept) for _ in range(READS)),
            bench.crossing_s(dtype, rows),
            device_copy_gb_per_s(device, DEVICE_S),
            call_s=max(0.0, besides.call_s),
            expert_s=max(0.0, besides.expert_s),
        )


@dataclass(frozen=True)
class Besides:
    """See `BesideLink`; as they were measured, which on a host that others use may be less than nothing."""

    call_s: float
    expert_s: float


class Bench:
    """Threads and a link that are measured beside each other, with one kind of weights after the other.

    Args:
        rows, columns: the most of an input.

    Raises:
        RunError: no host memory.
    """

    def __init__(self, device: torch.device, cpus: tuple[int, ...], rows: int, columns: int):
        self.device, self.columns = device, columns
        place = allocate_local_buffers(*crossed_bytes(rows, columns, torch.float32), pinned=True)
        self.cores = CpuPool(cpus, SPIN_US, place.flags)
        try:
            self.link = Copies(device)
            self.crossing = HandOff(self.cores, StreamSide(device), place, Transfers())
        except BaseException:
            self.cores.close()
            raise

    def crossing_s(self, dtype: torch.dtype, rows: int, rounds: int = MEETING_ROUNDS) -> float:
        """See `BesideLink`; the median of so many rounds."""
        return crossing_s(self.crossing, self.link, dtype, rows, self.columns, rounds)

    def besides(self, products: Products, rows: int, cores_gb_per_s: float) -> Besides:
        """The time of a call grows by a line from that of hardly any width on, but for a step behind its beginning; one that reads experts
        takes longer than that.

        Args:
            cores_gb_per_s: of calls of `BLOCK_BYTES` while the link is busy.
        """
        task, weights = narrow_feed_forward(self.cores, products.dtype, self.columns)
        narrow = Calls(self.cores, [task], weights, products.dtype, rows)
        short, long, experts = products.calls(rows, short=True), products.calls(rows), products.expert_calls(rows)
        none_s, short_s, experts_s = map(self._seconds_of_call, (narrow, short, experts))
        long_s = long.nbytes / (cores_gb_per_s * 1e9)
        if long.nbytes <= short.nbytes:  # rows of the weight are so long that a short block has as many as a long one
            return Besides(0.0, 0.0)
        of_byte = (long_s - short_s) / (long.nbytes - short.nbytes)
        return Besides(
            call_s=short_s - none_s - short.nbytes * of_byte,
            expert_s=(experts_s - short_s - (experts.nbytes - short.nbytes) * of_byte) / CHOSEN,
        )

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.cores.close()
        torch.cuda.empty_cache()  # the plan looks at the memory that is free

    def _seconds_of_call(self, calls: Calls) -> float:
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


def products_gb_per_s(
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
        by_scheme: dict[GroupQuantization | None, Products] = {}
        for scheme, _ in wanted:
            if scheme not in by_scheme:
                shared = next(iter(by_scheme.values()), None)
                by_scheme[scheme] = Products(cores, dtype, scheme, columns, shared)
        return [rate_alone(by_scheme[scheme].calls(rows), PRODUCTS_S) for scheme, rows in wanted]
    finally:
        cores.close()


def read_gb_per_s(cpus: tuple[int, ...], seconds: float = 0.3, memory: torch.Tensor | None = None) -> float:
    """GB/s at which the cores read host memory, and do no more with it than add it up.

    Args:
        memory: uint8, what they read; None takes as much as the caches do not hold.

    Raises:
        RunError: the system allows fewer threads.
    """
    memory = random_bytes(2 * block_bytes()) if memory is None else memory
    numbers = (ctypes.c_int32 * len(cpus))(*cpus)
    moved = ctypes.c_int64()
    instructions = INSTRUCTIONS.index(best_instructions())
    spent = require_library().zero_inference_measure_reads(
        memory.data_ptr(), memory.numel(), instructions, len(cpus), numbers, seconds, ctypes.byref(moved)
    )
    if spent < 0:
        raise RunError(TOO_MANY_THREADS.format(len(cpus)))
    return moved.value / spent / 1e9


def read_beside(cpus: tuple[int, ...], link: Copies, memory: torch.Tensor) -> float:
    """GB/s of the cores while the link copies."""
    rounds = [link.begin() for _ in range(READ_ROUNDS)]
    rate = read_gb_per_s(cpus, 0.05, memory)
    rounds[-1][1].synchronize()
    return rate
