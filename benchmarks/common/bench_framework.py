"""Timing of a case over `triton.testing.perf_report`: one benchmark a pass, one line a provider.

Times are medians of `triton.testing.do_bench` in microseconds, with a cleared L2 cache before each call. Below 100 us the host's
share counts, so a time by CUDA graph (which leaves the cache warm) stands beside it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Callable

import torch

from .diff_engine import DiffCase, Inputs, _as_tuple

GRAPH_BELOW_US = 100.0
LINE_NAMES = {"naive": "Naive", "compiled": "Compiled", "cuda": "Cuda", "speedup": "SpeedUp", "compiled_cuda": "Compiled Cuda",
              "torch": "Torch", "liger": "Liger", "quack": "Quack"}
X_NAMES = ["dim", "batch_size", "seq_len"]
Config = tuple[int, int, int]  # dim, batch size, sequence length


def make_fwd_benchmark_for_case(*, case: DiffCase, configs: list[Config], plot_name: str, dtype: torch.dtype, eps: float = 1e-6,
                                peers: bool = False):
    """A `perf_report` benchmark of the forward pass: columns in us, and `SpeedUp`, naive over cuda.

    Its attribute `times` is a Times; run it with `benchmark.run(print_data=True, save_path=...)`.
    """
    return _table(case, configs, plot_name, Times(case, dtype, eps, peers, backward=False))


def make_bwd_benchmark_for_case(*, case: DiffCase, configs: list[Config], plot_name: str, dtype: torch.dtype, eps: float = 1e-6,
                                peers: bool = False):
    """The same of the backward pass alone, with the gradients of everything that has one."""
    return _table(case, configs, plot_name, Times(case, dtype, eps, peers, backward=True))


def make_fwd_benchmark_plot_for_case(*, case: DiffCase, configs: list[Config], plot_name: str, dtype: torch.dtype,
                                     eps: float = 1e-6, peers: bool = False):
    """Speedups over naive by sequence length: one line a provider."""
    return _speedups(case, configs, plot_name, Times(case, dtype, eps, peers, backward=False))


def make_bwd_benchmark_plot_for_case(*, case: DiffCase, configs: list[Config], plot_name: str, dtype: torch.dtype,
                                     eps: float = 1e-6, peers: bool = False):
    """The same of the backward pass."""
    return _speedups(case, configs, plot_name, Times(case, dtype, eps, peers, backward=True))


class Times:
    """Times of the providers of a case, each measured once a size.

    Attributes:
        us: microseconds by (config, provider). graph_us: the same by CUDA graph, of what is short.
    """

    def __init__(self, case: DiffCase, dtype: torch.dtype, eps: float, peers: bool, backward: bool):
        self.case, self.dtype, self.eps, self.backward = case, dtype, eps, backward
        small = case.build_inputs(128, 1, 128, dtype, eps)
        self.providers = ["naive", "compiled", "cuda"] + (["compiled_cuda"] if case.compiles_cuda else [])
        self.providers += list(case.make_peers(small)) if peers else []
        self.us: dict[tuple[Config, str], float] = {}
        self.graph_us: dict[tuple[Config, str], float | None] = {}
        self._inputs: tuple[Config, Inputs] | None = None

    def of(self, config: Config, provider: str) -> float:
        """Median microseconds."""
        if (config, provider) not in self.us:
            from triton.testing import do_bench

            call = self.call(config, provider)
            self.us[config, provider] = do_bench(call, return_mode="median") * 1e3
            if self.us[config, provider] < GRAPH_BELOW_US:
                self.graph_us[config, provider] = self._by_graph(config, provider)
        return self.us[config, provider]

    def _by_graph(self, config: Config, provider: str) -> float | None:
        from triton.testing import do_bench_cudagraph

        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # a backward pass runs on its forward's stream
                return do_bench_cudagraph(self.call(config, provider), return_mode="median") * 1e3
        except RuntimeError as error:
            print(f"note: no CUDA-graph time of {provider} at {config}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
            return None

    def call(self, config: Config, provider: str) -> Callable[[], Any]:
        """What is timed: one pass of a provider on inputs that all of them share."""
        if self._inputs is None or self._inputs[0] != config:
            self._inputs = None
            dim, batch, length = config
            self._inputs = config, self.case.build_inputs(dim, batch, length, self.dtype, self.eps)
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
            torch._dynamo.reset()  # each size is compiled for itself
            made = self.case.make_naive(inputs) if provider == "compiled" else self.case.make_cuda(inputs)
            return torch.compile(made, fullgraph=True, dynamic=False)
        return self.case.make_peers(inputs)[provider]

    def rate_gbps(self, config: Config, us: float) -> float:
        """GB/s of 1e9 over the bytes of x-sized tensors that have to move."""
        tensors = self.case.backward_tensors if self.backward else self.case.forward_tensors
        return tensors * math.prod(config) * self.dtype.itemsize / us / 1e3


def _table(case: DiffCase, configs: list[Config], plot_name: str, times: Times):
    from triton.testing import Benchmark, perf_report

    first = ["naive", "compiled", "cuda", "speedup"]
    lines = first + [provider for provider in times.providers if provider not in first]

    @perf_report(Benchmark(x_names=X_NAMES, x_vals=configs, line_arg="provider", line_vals=lines,
                           line_names=[LINE_NAMES[line] for line in lines], ylabel="us", plot_name=plot_name, args={}))
    def benchmark(dim: int, batch_size: int, seq_len: int, provider: str) -> float:
        config = (dim, batch_size, seq_len)
        if provider == "speedup":
            return times.of(config, "naive") / times.of(config, "cuda")
        return times.of(config, provider)

    benchmark.times = times
    return benchmark


def _speedups(case: DiffCase, configs: list[Config], plot_name: str, times: Times):
    from triton.testing import Benchmark, perf_report

    lines = [provider for provider in times.providers if provider != "naive"]
    by_length = {config[2]: config for config in configs}

    @perf_report(Benchmark(x_names=["seq_len"], x_vals=list(by_length), line_arg="provider", line_vals=lines,
                           line_names=[LINE_NAMES[line] for line in lines], ylabel="speedup", plot_name=plot_name, args={}))
    def benchmark(seq_len: int, provider: str) -> float:
        config = by_length[seq_len]
        return times.of(config, "naive") / times.of(config, provider)

    benchmark.times = times
    return benchmark


def add_rates(path: Path, times: Times) -> None:
    """Append GB/s of every provider, and times by CUDA graph where there are any, to a table that perf_report wrote."""
    import pandas

    frame = pandas.read_csv(path)
    configs = [tuple(int(row[name]) for name in X_NAMES) for _, row in frame.iterrows()]
    for name in X_NAMES:
        frame[name] = frame[name].astype(int)
    for provider in times.providers:
        frame[f"{LINE_NAMES[provider]} (GB/s)"] = [times.rate_gbps(config, times.of(config, provider)) for config in configs]
    if times.graph_us:
        for provider in times.providers:
            frame[f"{LINE_NAMES[provider]} graph (us)"] = [times.graph_us.get((config, provider)) for config in configs]
    frame.to_csv(path, index=False)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def draw_speedups(times: Times, configs: list[Config], title: str, path: Path) -> None:
    """Speedups over naive by sequence length, their geometric means in the legend, as an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lengths = [config[2] for config in configs]
    for provider in times.providers:
        if provider != "naive":
            speedups = [times.of(config, "naive") / times.of(config, provider) for config in configs]
            label = f"{LINE_NAMES[provider]} (geometric mean {geometric_mean(speedups):.2f}x)"
            axes.plot(lengths, speedups, marker="o", label=label)
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
