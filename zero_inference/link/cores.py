"""What the host's cores give beside a busy link: products of weights where they lie."""

from __future__ import annotations

import ctypes
import functools
import os
import statistics
from dataclasses import dataclass

import torch

from zero_inference.cores.cores import SPIN_US, Cores, Stage, Task, Weight
from zero_inference.cores.library import best_instructions, needed_library
from zero_inference.cores.matrix import INSTRUCTIONS, Matrix
from zero_inference.cores.meeting_place import own_place
from zero_inference.cores.threads import choose_cpus, choose_own_cpus, numa_node_of_gpu
from zero_inference.errors import UsageError
from zero_inference.link.attention import Attended
from zero_inference.link.caches import block_bytes
from zero_inference.link.compute import device_copy_gb_per_s
from zero_inference.link.copies import RANDOM_BYTES, Copies, random_bytes, rate_alone, rates_together
from zero_inference.link.meeting import Meeting, crossed_bytes, crossing_s
from zero_inference.quantization.groups import GroupQuantization
from zero_inference.runtime.distributed import Ranks

BLOCK_BYTES, WIDTH_STEP = 128 << 20, 256  # of a feed-forward; groups of any size divide its width
GROUP_SIZE = 64  # of quantized weights whose rates are kept: the default of runs
ROUNDS = 5
READS, READ_ROUNDS = 3, 3  # of host memory by the cores, and rounds of copies beside each: a tenth of a second and more
PRODUCTS_S, DEVICE_S = 0.3, 0.02


@dataclass(frozen=True)
class BesideLink:
    """Rates in GB/s of 1e9 bytes; those of copies, and of both together, are medians of rounds.

    Attributes:
        rows: of the products.
        link_alone_gb_per_s: page-locked copies to the device while the cores rest.
        link_gb_per_s, cores_gb_per_s: copies, and stored bytes of weights multiplied, at the same time.
        cores_alone_gb_per_s: products while the link rests.
        read_gb_per_s: host memory read by the cores, while the link is busy.
        crossing_s: from the moment when the device has an input for the cores to the one when it has their output, while the link is
            busy, for a feed-forward between as many columns as the weights have, and of hardly any width.
        device_gb_per_s: copies inside the memory of the device, read and written bytes both counted.
        attended: keys and values that the cores attend over; None where that was not measured.
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

    def attention_gb_per_s(self, link_rests: bool) -> float:
        """Of keys and values; where that was not measured, what the cores read, which is more."""
        if self.attended is None:
            return self.read_gb_per_s
        return self.attended.alone_gb_per_s if link_rests else self.attended.beside_link_gb_per_s


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
    place = own_place(*crossed_bytes(rows, columns, dtype), pinned=True)
    cores = Cores(cpus, SPIN_US, place.flags)
    try:
        products = Products(cores, dtype, scheme, rows, columns)
        link = Copies(device)
        cores_alone = rate_alone(products, PRODUCTS_S)
        link_alone = statistics.median(link.round() for _ in range(ROUNDS))
        together = [rates_together(products, link) for _ in range(ROUNDS)]
        return BesideLink(
            rows,
            link_alone,
            statistics.median(rate for rate, _ in together),
            # more than alone is a host that others used meanwhile
            min(cores_alone, statistics.median(rate for _, rate in together)),
            cores_alone,
            statistics.median(read_beside(cpus, link, products.kept) for _ in range(READS)),
            crossing_s(Meeting(cores, place, link), dtype, rows, columns),
            device_copy_gb_per_s(device, DEVICE_S),
        )
    finally:
        torch.cuda.synchronize(device)
        cores.close()
        torch.cuda.empty_cache()  # the plan looks at the memory that is free


def cpus_of(ranks: Ranks) -> tuple[int, ...]:
    """CPUs for threads of this rank alone; -1 for each that is not bound to one: without a GPU the cores also compute what a device
    would, and the system keeps the two out of each other's way."""
    if ranks.device.type != "cuda":
        return (-1,) * torch.get_num_threads()
    return tuple(choose_own_cpus(_numa_node_of(ranks.device), ranks.local_rank, ranks.local_world_size))


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


def product_gb_per_s(
    cpus: tuple[int, ...], dtype: torch.dtype, scheme: GroupQuantization | None, rows: int, columns: int = 8192
) -> float:
    """GB/s of stored bytes of weights that the cores multiply while the link rests."""
    cores = Cores(cpus, SPIN_US)
    try:
        return rate_alone(Products(cores, dtype, scheme, rows, columns), PRODUCTS_S)
    finally:
        cores.close()


def read_gb_per_s(cpus: tuple[int, ...], seconds: float = 0.3, memory: torch.Tensor | None = None) -> float:
    """GB/s at which the cores read host memory, and do no more with it than add it up.

    Args:
        memory: uint8, what they read; None takes as much as the caches do not hold.
    """
    memory = random_bytes(2 * block_bytes()) if memory is None else memory
    numbers = (ctypes.c_int32 * len(cpus))(*cpus)
    moved = ctypes.c_int64()
    instructions = INSTRUCTIONS.index(best_instructions())
    spent = needed_library().zero_inference_measure_reads(
        memory.data_ptr(), memory.numel(), instructions, len(cpus), numbers, seconds, ctypes.byref(moved)
    )
    return moved.value / spent / 1e9


class Products:
    """Products of `rows` rows with gated feed-forwards that the caches do not hold, their weights in the form that a run stores them: what
    a run gives the cores first."""

    def __init__(self, cores: Cores, dtype: torch.dtype, scheme: GroupQuantization | None, rows: int, columns: int):
        self.cores = cores
        of_row = columns * dtype.itemsize if scheme is None else scheme.stored_bytes(columns, dtype)
        width = max(WIDTH_STEP, BLOCK_BYTES // (3 * of_row) // WIDTH_STEP * WIDTH_STEP)  # of gate, up and down
        matrix_bytes = width * of_row
        count = -(-2 * block_bytes() // (3 * matrix_bytes))
        self.kept = random_bytes(count * 3 * matrix_bytes)
        self.tasks: list[Task] = []
        for block in self.kept.split(3 * matrix_bytes):
            gate, up = (_weight(part, width, columns, dtype, scheme) for part in block.split(matrix_bytes)[:2])
            down = _weight(block[2 * matrix_bytes :], columns, width, dtype, scheme)
            self.tasks.append(cores.add_block([Stage([gate, up], "gated", "silu"), Stage([down])], dtype))
        self.x = torch.randn(rows, columns).to(dtype)
        self.out = torch.empty(rows * columns, dtype=dtype)
        self.next = 0

    def one(self) -> int:
        """Multiply the next weight and return its bytes."""
        task = self.tasks[self.next]
        self.next = (self.next + 1) % len(self.tasks)
        self.cores.run(task, self.x, self.out)
        return task.nbytes


def read_beside(cpus: tuple[int, ...], link: Copies, memory: torch.Tensor) -> float:
    """GB/s of the cores while the link copies."""
    rounds = [link.begin() for _ in range(READ_ROUNDS)]
    rate = read_gb_per_s(cpus, 0.05, memory)
    rounds[-1][1].synchronize()
    return rate


def _weight(
    buffer: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, scheme: GroupQuantization | None
) -> Weight:
    """A weight in random bytes; scales and minima are made numbers of the usual size."""
    if scheme is None:
        plain = buffer.view(dtype)
        random = torch.randn(min(plain.numel(), RANDOM_BYTES // 4)).to(dtype)
        for part in plain.split(random.numel()):
            part.copy_(random[: part.numel()])
        return Weight(Matrix.plain(plain.view(rows, columns)), None, buffer.numel())
    codes, rest = buffer[: scheme.packed_bytes(rows * columns)], buffer[scheme.packed_bytes(rows * columns) :]
    groups = rows * columns // scheme.group_size
    scales, minima = rest.view(dtype)[:groups].fill_(0.01), rest.view(dtype)[groups:].fill_(-0.07)
    matrix = Matrix.groups(codes, scales, minima, scheme.bits, scheme.group_size, rows)
    return Weight(matrix, None, buffer.numel())
