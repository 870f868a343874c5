"""What the host's cores and the link give beside each other, for each format of weights and several numbers of tokens: for a file."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.hardware.copies import rate_alone, rates_together
from zero_inference.hardware.cores import Bench, Besides, read_beside
from zero_inference.hardware.description import CoreRates
from zero_inference.hardware.description import Products as Format
from zero_inference.hardware.products import Products
from zero_inference.kernels.groups import GroupQuantization

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
ROUNDS, ALONE_S = 2, 0.05  # of a visit


@dataclass(frozen=True)
class OfCores:
    """
    Attributes:
        read_gb_per_s: host memory read while the link is busy.
        products: of every format and number of tokens.
    """

    read_gb_per_s: float
    products: tuple[CoreRates, ...]


@dataclass
class _Seen:
    """What visits found, a value each; rates in GB/s of 1e9 bytes."""

    link: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    besides: list[Besides] = field(default_factory=list)


def measure_core_rates(device: torch.device, cpus: tuple[int, ...]) -> OfCores:
    """Measure on the CUDA device `device` and the CPUs `cpus`, in about ten seconds.

    All formats and numbers of tokens are gone through `VISITS` times, and the median of each counts: what a host gives that others use
    changes from second to second. Measured in one go, int4 products of one token had 109 GB/s, and those of runs 88 and 92 behind it.

    Raises:
        RunError, torch.OutOfMemoryError: no memory.
    """
    seen: dict[tuple[Format, int], _Seen] = defaultdict(_Seen)
    crossings: dict[int, list[float]] = defaultdict(list)
    read: list[float] = []
    with contextlib.closing(Bench(device, cpus, max(ROWS), COLUMNS)) as bench:
        weights = _weights(bench)
        for _ in range(VISITS):
            read.append(read_beside(cpus, bench.link, weights[MEASURED[0]].kept))
            for rows in ROWS:
                crossings[rows].append(bench.crossing_s(torch.bfloat16, rows, rounds=1))
                for name, products in weights.items():
                    _visit(bench, products, rows, seen[name, rows])
    found = (
        _rates(name, rows, seen[name, rows], statistics.median(crossings[rows])) for name in weights for rows in ROWS
    )
    return OfCores(statistics.median(read), tuple(found))


def _weights(bench: Bench) -> dict[Format, Products]:
    """Of all formats in the same memory."""
    found: dict[Format, Products] = {}
    for name in MEASURED:
        found[name] = Products(bench.cores, *FORMATS[name], COLUMNS, shared=found.get(MEASURED[0]))
    return found


def _visit(bench: Bench, products: Products, rows: int, seen: _Seen) -> None:
    calls = products.calls(rows)
    seen.alone.append(rate_alone(calls, ALONE_S))
    together = [rates_together(calls, bench.link) for _ in range(ROUNDS)]
    seen.link += [link for link, _ in together]
    seen.cores += [cores for _, cores in together]
    seen.besides.append(bench.besides(products, rows, statistics.fmean(cores for _, cores in together)))


def _rates(name: Format, rows: int, seen: _Seen, crossing_s: float) -> CoreRates:
    alone = statistics.median(seen.alone)
    return CoreRates(
        format=name,
        rows=rows,
        link_gb_per_s=statistics.median(seen.link),
        cores_gb_per_s=min(
            alone, statistics.median(seen.cores)
        ),  # more than alone is a host that others used meanwhile
        cores_alone_gb_per_s=alone,
        crossing_s=crossing_s,
        call_s=max(0.0, statistics.median(each.call_s for each in seen.besides)),
        expert_s=max(0.0, statistics.median(each.expert_s for each in seen.besides)),
    )
