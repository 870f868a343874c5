"""Products of square matrices: the rate of the matrix units by size and type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zero_inference.micro.timing import (
    DTYPES,
    MachineRates,
    measure_row,
    median_s,
    once_s,
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


def matmul_operations(n: int) -> int:
    """Return the operations of [n, n] x [n, n]: a multiplication and an addition count two."""
    return 2 * n**3


def measure(
    rates: MachineRates, sizes: Sequence[int], kinds: Sequence[str], min_run_time: float, longest_call_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a row of [n, n] x [n, n] for every kind and size: `2 n^3 / t`, and its share of two rates.

    `of_datasheet` is the share of the card's rate for the type, None without a card; `of_measured` that of `best_tflops`, the best rate
    of the type so far (`MachineRates.best_tflops`). A size is `skipped`, with the reason, if one product is expected to take longer than
    `longest_call_s`; without enough memory the row has an `error`.
    """

    def measure_one(n: int, kind: str) -> dict[str, Any]:
        reason = too_long(predicted_product_s(rates.device, n, kind), longest_call_s, "one product")
        if reason is not None:
            return {"skipped": reason}
        seconds = time_matmul(rates.device, n, kind, min_run_time)
        tflops, datasheet = matmul_operations(n) / seconds / 1e12, rates.datasheet_tflops(kind)
        best = rates.best_tflops(kind, seen=tflops)
        return {
            "time_s": seconds,
            "tflops": tflops,
            "of_datasheet": tflops / datasheet if datasheet else None,
            "of_measured": tflops / best,
            "best_tflops": best,
        }

    for kind in kinds:
        for n in sizes:
            yield measure_row({"dtype": kind, "n": n}, lambda: measure_one(n, kind))


def time_matmul(device: torch.device, n: int, kind: str, min_run_time: float) -> float:
    """Return the median seconds of one product of [n, n] by [n, n] into an existing matrix."""
    action = _product(device, n, kind)
    with precision(kind):
        return median_s(action, min_run_time)


def predicted_product_s(device: torch.device, n: int, kind: str) -> float:
    """Predict the seconds of one product from smaller ones, each twice as large as the one before."""
    sizes = [n]
    while sizes[0] > FIRST_SIZE:
        sizes.insert(0, max(FIRST_SIZE, sizes[0] // 2))
    with precision(kind):
        return predicted_s(lambda size: once_s(device, _product(device, size, kind)), matmul_operations, sizes)


def _product(device: torch.device, n: int, kind: str) -> Callable[[], object]:
    # random values, as in hardware.bench_device.matmul_tflops: zeros are multiplied faster
    left, right = (torch.randn(n, n, device=device).to(DTYPES[kind]) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)


def draw(axes, rows: Sequence[dict[str, Any]], rates: MachineRates) -> None:
    """Draw TFLOP/s against n, a line per type, and the datasheet's rate dashed in its colour."""
    for kind in dict.fromkeys(row["dtype"] for row in rows):
        points = [(row["n"], row["tflops"]) for row in rows if row["dtype"] == kind and "tflops" in row]
        (line,) = axes.plot(*zip(*points), marker="o", label=kind) if points else (None,)
        if line is not None and rates.datasheet_tflops(kind):
            axes.axhline(rates.datasheet_tflops(kind), color=line.get_color(), linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="n", ylabel="TFLOP/s", title="[n, n] x [n, n] (dashed: datasheet)")
