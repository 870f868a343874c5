"""Benchmarks of a case by `triton.testing.perf_report`: one for each pass, with a line for each provider.

times.py takes the times, tables.py writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .diff_engine import DiffCase
from .tables import FIRST_LINES, LINE_NAMES, X_NAMES, speedup
from .times import REP_MS, WARMUP_MS, Config, Times


def _maker(report: Callable, backward: bool) -> Callable:
    """Return a function that makes a `perf_report` benchmark of the forward or backward pass, by `report`: `_table` or `_speedups`.

    Run it with `benchmark.run(print_data=True, save_path=...)`; its attribute `times` is a Times.
    """

    def make(
        *,
        case: DiffCase,
        configs: list[Config],
        plot_name: str,
        dtype: torch.dtype,
        eps: float = 1e-6,
        peers: bool = False,
        warmup_ms: float = WARMUP_MS,
        rep_ms: float = REP_MS,
    ):
        return report(configs, plot_name, Times(case, dtype, eps, peers, backward, warmup_ms, rep_ms))

    return make


def _table(configs: list[Config], plot_name: str, times: Times):
    """Return a benchmark with a row for each size: microseconds of each provider, and `SpeedUp`, naive over cuda."""
    lines = FIRST_LINES + [provider for provider in times.providers if provider not in FIRST_LINES]

    def value(provider: str, dim: int, batch_size: int, seq_len: int) -> float:
        config = (dim, batch_size, seq_len)
        found = speedup(times, config) if provider == "speedup" else times.median_us(config, provider)
        if provider == lines[-1]:
            times.on_size(config)
        return found

    return _benchmark(times, value, X_NAMES, configs, lines, "us", plot_name)


def _speedups(configs: list[Config], plot_name: str, times: Times):
    """Return a benchmark that plots speedups over naive by sequence length, a line for each provider."""
    lines = [provider for provider in times.providers if provider != "naive"]
    by_length = {config[2]: config for config in configs}

    def value(provider: str, seq_len: int) -> float:
        found = speedup(times, by_length[seq_len], provider)
        if provider == lines[-1]:
            times.on_size(by_length[seq_len])
        return found

    return _benchmark(times, value, ["seq_len"], list(by_length), lines, "speedup", plot_name)


def _benchmark(
    times: Times,
    value: Callable[..., float],
    x_names: list[str],
    x_vals: Sequence[Any],
    lines: list[str],
    unit: str,
    plot_name: str,
):
    from triton.testing import Benchmark, perf_report

    names = [LINE_NAMES[line] for line in lines]
    of = dict(line_arg="provider", line_vals=lines, line_names=names, ylabel=unit, plot_name=plot_name, args={})
    benchmark = perf_report(Benchmark(x_names=x_names, x_vals=x_vals, **of))(value)
    benchmark.times = times
    return benchmark


make_fwd_benchmark_for_case = _maker(_table, backward=False)
make_bwd_benchmark_for_case = _maker(_table, backward=True)
make_fwd_benchmark_plot_for_case = _maker(_speedups, backward=False)
make_bwd_benchmark_plot_for_case = _maker(_speedups, backward=True)
