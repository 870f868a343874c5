"""Products of square matrices: what the matrix units reach, by size and type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zero_inference.micro import blocks
from zero_inference.micro.timing import (
    DTYPES,
    MachineRates,
    median_s,
    once_s,
    out_of_memory,
    precision,
    predicted_s,
    too_long,
)
from zero_inference.utils.format import format_percent, four_digits
from zero_inference.utils.tables import Column

COLUMNS = (
    Column("dtype", "type", dtype="string"),
    Column("n", "n", dtype="Int64"),
    Column("time_s", "time (us)", lambda seconds: four_digits(1e6 * seconds)),
    Column("tflops", "TFLOP/s", four_digits),
    Column("of_datasheet", "of datasheet", format_percent),
    Column("of_measured", "of measured", format_percent),
    Column("best_tflops", "best TFLOP/s measured", four_digits),
    Column("skipped", "skipped", dtype="string"),
    Column("error", "error", dtype="string"),
)
FIRST_SIZE = 64


def measure(
    rates: MachineRates, sizes: Sequence[int], kinds: Sequence[str], min_run_time: float, longest_call_s: float
) -> Iterator[dict[str, Any]]:
    """One row for [n, n] x [n, n] of every kind and size: `2 n^3 / t`, and its share of two rates.

    `of_datasheet` is the share of the card's rate for the type, None without a card; `of_measured` that of `best_tflops`, the
    best rate of the type seen so far (`MachineRates.best_tflops`). A size of which one product is expected to take longer than
    `longest_call_s` is `skipped`, with the reason; where memory did not suffice the row has an `error`.
    """
    for kind in kinds:
        for n in sizes:
            row: dict[str, Any] = {"dtype": kind, "n": n}
            try:
                reason = too_long(predicted_product_s(rates.device, n, kind), longest_call_s, "one product")
                if reason is not None:
                    yield row | {"skipped": reason}
                    continue
                spent = time_matmul(rates.device, n, kind, min_run_time)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                yield row | {"error": "out of memory"}
                continue
            tflops, datasheet = blocks.matmul_operations(n) / spent / 1e12, rates.datasheet_tflops(kind)
            best = rates.best_tflops(kind, seen=tflops)
            yield row | {
                "time_s": spent,
                "tflops": tflops,
                "of_datasheet": tflops / datasheet if datasheet else None,
                "of_measured": tflops / best,
                "best_tflops": best,
            }


def time_matmul(device: torch.device, n: int, kind: str, min_run_time: float) -> float:
    """Median seconds of one product of [n, n] by [n, n] into a third matrix that is there already."""
    action = _product(device, n, kind)
    with precision(kind):
        return median_s(action, min_run_time)


def predicted_product_s(device: torch.device, n: int, kind: str) -> float:
    """Seconds that one such product is expected to take, from smaller ones, each twice as large as the one before."""
    sizes = [n]
    while sizes[0] > FIRST_SIZE:
        sizes.insert(0, max(FIRST_SIZE, sizes[0] // 2))
    with precision(kind):
        return predicted_s(lambda size: once_s(device, _product(device, size, kind)), blocks.matmul_operations, sizes)


def _product(device: torch.device, n: int, kind: str) -> Callable[[], object]:
    # random values: see link.compute.matmul_tflops
    left, right = (torch.randn(n, n, device=device).to(DTYPES[kind]) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)


def draw(axes, rows: Sequence[dict[str, Any]], rates: MachineRates) -> None:
    """TFLOP/s against n, a line a type, and the datasheet's rate as a dashed one in its colour."""
    for kind in dict.fromkeys(row["dtype"] for row in rows):
        points = [(row["n"], row["tflops"]) for row in rows if row["dtype"] == kind and "tflops" in row]
        (line,) = axes.plot(*zip(*points), marker="o", label=kind) if points else (None,)
        if line is not None and rates.datasheet_tflops(kind):
            axes.axhline(rates.datasheet_tflops(kind), color=line.get_color(), linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="n", ylabel="TFLOP/s", title="[n, n] x [n, n] (dashed: datasheet)")
