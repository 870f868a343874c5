"""What the cores of a host give beside the links of all its ranks, which are busy at once: measured by all of them together."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zero_inference.cpu.hand_off import HandOff, StreamSide, allocate_buffers
from zero_inference.cpu.pool import SPIN_US, CpuPool, CpuPoolProxy
from zero_inference.errors import RunError
from zero_inference.hardware.compute import device_copy_gb_per_s
from zero_inference.hardware.copies import Copies, rate_alone, rates_together
from zero_inference.hardware.cores import (
    DEVICE_S,
    PRODUCTS_S,
    READ_ROUNDS,
    READS,
    ROUNDS,
    BesideLink,
    read_beside,
)
from zero_inference.hardware.meeting import crossed_bytes, crossing_s
from zero_inference.hardware.products import Calls, Products
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

LONGER = 2  # as many rounds as the first rank takes, so that the other links are still busy in its last one


class LinkRates(NamedTuple):
    """GB/s of a rank's link, while the cores rest and while they multiply."""

    alone: float
    beside: float


def of_all_ranks(of_first: BesideLink, links: Sequence[LinkRates]) -> BesideLink:
    """The rates of a host: a block is there when each rank has brought its part of it, so all links together are as many times the
    slowest one."""
    return replace(
        of_first,
        link_alone_gb_per_s=len(links) * min(link.alone for link in links),
        link_gb_per_s=len(links) * min(link.beside for link in links),
    )


@functools.cache  # a plan is made more than once, by all ranks alike
def measure_beside_links(
    ranks: Ranks,
    cpus: tuple[int, ...],
    dtype: torch.dtype,
    scheme: GroupQuantization | None,
    rows: int,
    columns: int,
) -> BesideLink:
    """As `measure_beside_link`, on the CUDA devices of all ranks; they call it together, and get the same.

    Args:
        cpus: of the first rank's threads.
        rows: of the inputs of each rank.

    Raises:
        RunError: in all ranks, where one has no memory for it.
    """
    device, count = ranks.device, ranks.world_size
    place = allocate_buffers(ranks, *crossed_bytes(rows, columns, dtype), pinned=True)
    cores = CpuPool(cpus, SPIN_US, place.flags, ranks=count) if ranks.is_first else CpuPoolProxy(count)
    with contextlib.closing(cores):
        products, link, device_gb_per_s, problem = None, None, 0.0, None
        try:
            link = Copies(device)
            products = Products(cores, dtype, scheme, columns) if ranks.is_first else None
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
        spent_s = crossing_s(crossing, link, dtype, rows, columns)
        torch.cuda.synchronize(device)
    del link, products, calls
    torch.cuda.empty_cache()  # the plan looks at the memory that is free
    together = min(alone, beside)  # as in `measure_beside_link`
    found = BesideLink(count * rows, mine.alone, mine.beside, together, alone, read, spent_s, device_gb_per_s)
    of_ranks = ranks.gather_objects((found, mine))
    return of_all_ranks(of_ranks[0][0], [link for _, link in of_ranks])


def _beside_each_other(
    ranks: Ranks, cpus: tuple[int, ...], link: Copies, calls: Calls | None, products: Products | None
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
    read = statistics.median(read_beside(cpus, link, products.kept) for _ in range(READS))
    rates, multiplied = (statistics.median(each) for each in zip(*together))
    return LinkRates(alone, rates), multiplied, read
