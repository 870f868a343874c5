"""`a * 1.2`, which is limited by memory bandwidth: from sizes that fit in a cache to far beyond it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zero_inference.micro.timing import MachineRates, measure_row, median_s
from zero_inference.utils.format import format_percent, four_digits
from zero_inference.utils.tables import Column

BYTES = 8  # an element of float32 is read and one is written
COLUMNS = (
    Column("n", "n", dtype="Int64"),
    Column("time_s", "time (us)", lambda seconds: four_digits(1e6 * seconds)),
    Column("gflops", "GFLOP/s", four_digits),
    Column("gbps", "GB/s", four_digits),
    Column("of_datasheet", "of datasheet", format_percent),
    Column("of_measured", "of measured", format_percent),
    Column("error", "error", dtype="string"),
)


def measure(rates: MachineRates, sizes: Sequence[int], min_run_time: float) -> Iterator[dict[str, Any]]:
    """Yield a row per size of a float32 vector: `n / t` FLOP/s and `8 n / t` bytes/s, and their share of the memory bandwidth.

    `of_measured` is relative to a copy inside the device's memory. Above 100% the vectors came from a cache.
    """

    def measure_one(n: int) -> dict[str, Any]:
        seconds = time_scale(rates.device, n, min_run_time)
        gb_per_s, datasheet = BYTES * n / seconds / 1e9, rates.datasheet_gb_per_s()
        return {
            "time_s": seconds,
            "gflops": n / seconds / 1e9,
            "gbps": gb_per_s,
            "of_datasheet": gb_per_s / datasheet if datasheet else None,
            "of_measured": gb_per_s / rates.copy_gb_per_s(),
        }

    for n in sizes:
        yield measure_row({"n": n}, lambda: measure_one(n))


def time_scale(device: torch.device, n: int, min_run_time: float) -> float:
    """Return the median seconds of `a * 1.2` into an existing vector: a new one would cost a CPU mostly page faults."""
    a = torch.randn(n, device=device)
    out = torch.empty_like(a)
    return median_s(lambda: torch.mul(a, 1.2, out=out), min_run_time)


def draw(axes, rows: Sequence[dict[str, Any]], rates: MachineRates) -> None:
    """Draw GB/s against n, and the rates it is compared with as dashed lines."""
    points = [(row["n"], row["gbps"]) for row in rows if "gbps" in row]
    if points:
        axes.plot(*zip(*points), marker="o", label="a * 1.2")
    axes.axhline(rates.copy_gb_per_s(), color="grey", linestyle=":", label="copy, measured")
    if rates.datasheet_gb_per_s():
        axes.axhline(rates.datasheet_gb_per_s(), color="black", linestyle="--", linewidth=1, label="datasheet")
    axes.set(xscale="log", yscale="log", xlabel="n (float32)", ylabel="GB/s", title="a * 1.2")
