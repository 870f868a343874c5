"""Tables, speedups and traces of measured times."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import torch

from .times import Config, Times

LINE_NAMES = {
    "naive": "Naive",
    "compiled": "Compiled",
    "cuda": "Cuda",
    "speedup": "SpeedUp",
    "compiled_cuda": "Compiled Cuda",
    "torch": "Torch",
    "liger": "Liger",
    "quack": "Quack",
}
X_NAMES = ["dim", "batch_size", "seq_len"]
FIRST_LINES = ["naive", "compiled", "cuda", "speedup"]


def speedup(times: Times, config: Config, provider: str = "cuda") -> float:
    return times.median_us(config, "naive") / times.median_us(config, provider)


def write_table(path: Path, times: Times) -> None:
    """Write all times so far, a row for each size. The file is moved into place, so that a killed run leaves a whole table.

    Columns: size, microseconds and speedup, GB/s of every provider, microseconds of the other providers, times by CUDA graph (once
    there are any), 20th and 80th percentiles. A cell without a value is empty.
    """
    configs = list(dict.fromkeys(config for config, _ in times.us))
    us = {provider: [times.median_us(config, provider) for config in configs] for provider in times.providers}
    columns = {name: [config[place] for config in configs] for place, name in enumerate(X_NAMES)}
    columns |= {
        f"{LINE_NAMES[line]} (us)": us[line] if line in us else [speedup(times, config) for config in configs]
        for line in FIRST_LINES
    }
    columns |= {
        f"{LINE_NAMES[provider]} (GB/s)": list(map(times.rate_gb_per_s, configs, values))
        for provider, values in us.items()
    }
    # columns that are there already keep their place
    columns |= {f"{LINE_NAMES[provider]} (us)": values for provider, values in us.items()}
    if times.graph_us:
        columns |= {
            f"{LINE_NAMES[provider]} graph (us)": [times.graph_us.get((config, provider)) for config in configs]
            for provider in us
        }
    for place, name in enumerate(("p20", "p80")):
        columns |= {
            f"{LINE_NAMES[provider]} {name} (us)": [
                times.spread_us.get((config, provider), (None, None))[place] for config in configs
            ]
            for provider in us
        }
    part = path.with_suffix(".part")
    with open(part, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in zip(*columns.values()))
    os.replace(part, path)


def _cell(value: float | None) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3f}"
    return value


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def speedups_of(times: Times, configs: list[Config]) -> dict[str, list[float]]:
    """Return speedups over naive by name of the provider, without naive and those that failed."""
    speedups = {provider: [speedup(times, config, provider) for config in configs] for provider in times.providers}
    return {
        LINE_NAMES[provider]: values
        for provider, values in speedups.items()
        if provider != "naive" and not any(map(math.isnan, values))
    }


def draw_speedups(lengths: list[int], speedups: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw speedups over naive by sequence length, with their geometric means in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, values in speedups.items():
        axes.plot(lengths, values, marker="o", label=f"{name} (geometric mean {geometric_mean(values):.2f}x)")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(xlabel="sequence length, batch 1", ylabel="speedup over naive", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_traces(times: Times, config: Config, folder: Path) -> None:
    """Write a Chrome trace of a few calls of every provider: trace_{fwd|bwd}_{provider}_N{tokens}.json."""
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    for provider in times.providers:
        if math.isnan(times.median_us(config, provider)):
            continue
        call = times.call(config, provider)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(5):
                call()
            torch.cuda.synchronize()
        direction = "bwd" if times.backward else "fwd"
        recorded.export_chrome_trace(str(folder / f"trace_{direction}_{provider}_N{config[1] * config[2]}.json"))
