"""Timing of a case over `triton.testing.perf_report`: one benchmark a pass, one line a provider.

How times are taken is in times.py, what is kept of them in tables.py; the names of both are here too.
"""

from __future__ import annotations

import torch

from .diff_engine import DiffCase
from .tables import (
    FIRST_LINES,
    LINE_NAMES,
    X_NAMES,
    draw_speedups,
    geometric_mean,
    speedup,
    speedups_of,
    write_table,
    write_traces,
)
from .times import REP_MS, WARMUP_MS, Config, Times, forget_compiled, problem_of

__all__ = [
    "Times",
    "draw_speedups",
    "forget_compiled",
    "geometric_mean",
    "make_bwd_benchmark_for_case",
    "make_bwd_benchmark_plot_for_case",
    "make_fwd_benchmark_for_case",
    "make_fwd_benchmark_plot_for_case",
    "problem_of",
    "speedups_of",
    "write_table",
    "write_traces",
]


def make_fwd_benchmark_for_case(
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
    """A `perf_report` benchmark of the forward pass: columns in us, and `SpeedUp`, naive over cuda.

    Its attribute `times` is a Times; run it with `benchmark.run(print_data=True, save_path=...)`.
    """
    return _table(case, configs, plot_name, Times(case, dtype, eps, peers, False, warmup_ms, rep_ms))


def make_bwd_benchmark_for_case(
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
    """The same of the backward pass alone, with the gradients of everything that has one."""
    return _table(case, configs, plot_name, Times(case, dtype, eps, peers, True, warmup_ms, rep_ms))


def make_fwd_benchmark_plot_for_case(
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
    """Speedups over naive by sequence length: one line a provider."""
    return _speedups(case, configs, plot_name, Times(case, dtype, eps, peers, False, warmup_ms, rep_ms))


def make_bwd_benchmark_plot_for_case(
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
    """The same of the backward pass."""
    return _speedups(case, configs, plot_name, Times(case, dtype, eps, peers, True, warmup_ms, rep_ms))


def _table(case: DiffCase, configs: list[Config], plot_name: str, times: Times):
    from triton.testing import Benchmark, perf_report

    lines = FIRST_LINES + [provider for provider in times.providers if provider not in FIRST_LINES]

    @perf_report(
        Benchmark(
            x_names=X_NAMES,
            x_vals=configs,
            line_arg="provider",
            line_vals=lines,
            line_names=[LINE_NAMES[line] for line in lines],
            ylabel="us",
            plot_name=plot_name,
            args={},
        )
    )
    def benchmark(dim: int, batch_size: int, seq_len: int, provider: str) -> float:
        config = (dim, batch_size, seq_len)
        value = speedup(times, config) if provider == "speedup" else times.of(config, provider)
        if provider == lines[-1]:
            times.on_size(config)
        return value

    benchmark.times = times
    return benchmark


def _speedups(case: DiffCase, configs: list[Config], plot_name: str, times: Times):
    from triton.testing import Benchmark, perf_report

    lines = [provider for provider in times.providers if provider != "naive"]
    by_length = {config[2]: config for config in configs}

    @perf_report(
        Benchmark(
            x_names=["seq_len"],
            x_vals=list(by_length),
            line_arg="provider",
            line_vals=lines,
            line_names=[LINE_NAMES[line] for line in lines],
            ylabel="speedup",
            plot_name=plot_name,
            args={},
        )
    )
    def benchmark(seq_len: int, provider: str) -> float:
        value = speedup(times, by_length[seq_len], provider)
        if provider == lines[-1]:
            times.on_size(by_length[seq_len])
        return value

    benchmark.times = times
    return benchmark
