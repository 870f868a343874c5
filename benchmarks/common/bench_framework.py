"""Timing of a case over `triton.testing.perf_report`: one benchmark a pass, one line a provider.

Times are medians of `triton.testing.do_bench` in microseconds, with a cleared L2 cache before each call. Below 100 us the host's
share counts, so a time by CUDA graph (which leaves the cache warm, see graph_times.py) stands beside it.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .diff_engine import DiffCase, Inputs, _as_tuple, dtype_name

WARMUP_MS, REP_MS = 5.0, 25.0  # of a cell: 384 cells a case and dtype would take a minute at do_bench's own 25 and 100
LEAST_LAUNCHES = 10  # whatever REP_MS allows, behind each median
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
Config = tuple[int, int, int]  # dim, batch size, sequence length


def problem_of(config: Config) -> tuple[int, int]:
    """(elements of a row, rows)."""
    dim, batch, length = config
    return dim, batch * length


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


class Times:
    """Times of the providers of a case, each measured once a size.

    All of a size's elements are in one batch: what is timed normalizes rows, so that sizes of as many equal rows are one problem,
    which is compiled once, timed once, and has its times at each of them.

    Attributes:
        us: median microseconds by (config, provider); nan where a provider could not run.
        spread_us: the 20th and 80th percentile of the same launches. graph_us: times by CUDA graph, of what is short.
        on_size: called with each config when all its providers are measured.
    """

    def __init__(
        self,
        case: DiffCase,
        dtype: torch.dtype,
        eps: float,
        peers: bool,
        backward: bool,
        warmup_ms: float = WARMUP_MS,
        rep_ms: float = REP_MS,
    ):
        self.case, self.dtype, self.eps, self.peers, self.backward = case, dtype, eps, peers, backward
        self.warmup_ms, self.rep_ms = warmup_ms, rep_ms
        small = case.build_inputs(128, 1, 128, dtype, eps)
        self.providers = ["naive", "compiled", "cuda"] + (["compiled_cuda"] if case.compiles_cuda else [])
        self.providers += list(case.make_peers(small)) if peers else []
        self.us: dict[tuple[Config, str], float] = {}
        self.spread_us: dict[tuple[Config, str], tuple[float, float]] = {}
        self.graph_us: dict[tuple[Config, str], float] = {}
        self.on_size: Callable[[Config], None] = lambda config: None
        self._launches: dict[tuple[tuple[int, int], str], list[float]] = {}
        self._failed: set[str] = set()
        self._inputs: tuple[tuple[int, int], Inputs] | None = None

    @property
    def title(self) -> str:
        return f"{self.case.name} {dtype_name(self.dtype)} {'bwd' if self.backward else 'fwd'}"

    def of(self, config: Config, provider: str) -> float:
        """Median microseconds; nan for a provider that failed, here or at an earlier size, of which stderr then has the reason."""
        if (config, provider) not in self.us:
            problem = problem_of(config), provider
            if problem not in self._launches:
                self._launches[problem] = [] if provider in self._failed else self._measured(config, provider)
            launches = self._launches[problem]
            self.us[config, provider] = statistics.median(launches) if launches else math.nan
            if launches:
                self.spread_us[config, provider] = tuple(
                    launches[round(share * (len(launches) - 1))] for share in (0.2, 0.8)
                )
        return self.us[config, provider]

    def _measured(self, config: Config, provider: str) -> list[float]:
        """Microseconds of each launch, sorted; none if a provider fails without which there is still a comparison."""
        try:
            return sorted(self._launches_us(self.call(config, provider)))
        except Exception as error:  # libraries raise classes of their own
            if provider in ("naive", "cuda"):
                raise
            self._failed.add(provider)
            lines = str(error).strip().splitlines() or [""]
            print(
                f"note: no times of {provider}, {self.title}, from {config} on: {type(error).__name__}: {lines[0][:200]}",
                file=sys.stderr,
            )
            return []

    def _launches_us(self, call: Callable[[], Any]) -> list[float]:
        from triton.testing import do_bench

        times = list(do_bench(call, warmup=self.warmup_ms, rep=self.rep_ms, return_mode="all"))
        if len(times) < LEAST_LAUNCHES:  # do_bench fits launches and clearing into rep, by an estimate
            rep_ms = 2 * (LEAST_LAUNCHES - len(times)) * max(times)
            times += do_bench(call, warmup=1, rep=rep_ms, return_mode="all")
        return [float(time) * 1e3 for time in times]

    def call(self, config: Config, provider: str) -> Callable[[], Any]:
        """What is timed: one pass of a provider on inputs that all of them share."""
        dim, rows = size = problem_of(config)
        if self._inputs is None or self._inputs[0] != size:
            self._inputs = None
            self._inputs = size, self.case.build_inputs(dim, 1, rows, self.dtype, self.eps)
        inputs = self._inputs[1]
        run = self._make(provider, inputs)
        if not self.backward:
            return lambda: self.case.forward(run, inputs)
        outputs = _as_tuple(self.case.forward(run, inputs))
        grads = [torch.randn_like(output) for output in outputs]
        wanted = self.case.grad_inputs(inputs)
        return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

    def _make(self, provider: str, inputs: Inputs):
        if provider == "naive":
            return self.case.make_naive(inputs)
        if provider == "cuda":
            return self.case.make_cuda(inputs)
        if provider in ("compiled", "compiled_cuda"):
            key = self.case.name, provider
            if key not in _COMPILED:
                made = self.case.make_naive(inputs) if provider == "compiled" else self.case.make_cuda(inputs)
                torch._dynamo.config.recompile_limit = (
                    256  # each size is compiled for itself, as who has one size gets it
                )
                torch._functorch.config.donated_buffer = (
                    False  # a backward pass that is timed runs again on what it saved
                )
                _COMPILED[key] = torch.compile(made, fullgraph=True, dynamic=False)
            return _COMPILED[key]
        return self.case.make_peers(inputs)[provider]

    def rate_gb_per_s(self, config: Config, us: float) -> float:
        """GB/s of 1e9 over the bytes of x-sized tensors that have to move."""
        tensors = self.case.backward_tensors if self.backward else self.case.forward_tensors
        return tensors * math.prod(config) * self.dtype.itemsize / us / 1e3


_COMPILED: dict[tuple[str, str], Any] = {}  # by case and provider: forward and backward passes are compiled together


def forget_compiled() -> None:
    """Behind each case and dtype: the sizes of another would only be in the way."""
    _COMPILED.clear()
    torch._dynamo.reset()


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


def speedup(times: Times, config: Config, provider: str = "cuda") -> float:
    return times.of(config, "naive") / times.of(config, provider)


def write_table(path: Path, times: Times) -> None:
    """What is measured so far, a size a row. Written whole and moved into place, so that a killed run leaves a table.

    Columns: size, microseconds and speedup, GB/s of every provider, microseconds of the others, of all by CUDA graph (once there
    are any) and their 20th and 80th percentiles. A cell without a value is empty.
    """
    configs = list(dict.fromkeys(config for config, _ in times.us))
    us = {provider: [times.of(config, provider) for config in configs] for provider in times.providers}
    columns = {name: [config[place] for config in configs] for place, name in enumerate(X_NAMES)}
    columns |= {
        f"{LINE_NAMES[line]} (us)": us[line] if line in us else [speedup(times, config) for config in configs]
        for line in FIRST_LINES
    }
    columns |= {
        f"{LINE_NAMES[provider]} (GB/s)": list(map(times.rate_gb_per_s, configs, values))
        for provider, values in us.items()
    }
    columns |= {
        f"{LINE_NAMES[provider]} (us)": values for provider, values in us.items()
    }  # those that are there keep their place
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
    """Speedups over naive by provider, without naive and those that failed."""
    speedups = {provider: [speedup(times, config, provider) for config in configs] for provider in times.providers}
    return {
        LINE_NAMES[provider]: values
        for provider, values in speedups.items()
        if provider != "naive" and not any(map(math.isnan, values))
    }


def draw_speedups(lengths: list[int], speedups: dict[str, list[float]], title: str, path: Path) -> None:
    """Speedups over naive by sequence length, their geometric means in the legend, as an image."""
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
    """A Chrome trace of a few calls of every provider: trace_{fwd|bwd}_{provider}_N{tokens}.json."""
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    for provider in times.providers:
        if math.isnan(times.of(config, provider)):
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
