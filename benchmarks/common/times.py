"""Times of a case's providers: medians of `triton.testing.do_bench` in microseconds, with a cleared L2 cache before each call.

Below 100 us the host's part of a launch counts, so graph_times.py adds a time by CUDA graph, with a warm cache.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from .diff_engine import DiffCase, Inputs, as_tuple, dtype_name

WARMUP_MS, REP_MS = (
    5.0,
    25.0,
)  # of a cell: do_bench's own 25 and 100 would take a minute for the 384 cells of a case and dtype
MIN_LAUNCHES = 10  # of each median, whatever REP_MS allows
Config = tuple[int, int, int]  # dim, batch size, sequence length


def problem_of(config: Config) -> tuple[int, int]:
    """Return (elements of a row, rows)."""
    dim, batch, length = config
    return dim, batch * length


def launches_us(call: Callable[[], Any], warmup_ms: float, rep_ms: float) -> list[float]:
    """Return the microseconds of each launch of `call` by do_bench, MIN_LAUNCHES or more."""
    from triton.testing import do_bench

    times = list(do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="all"))
    if len(times) < MIN_LAUNCHES:  # do_bench fits launches and clearing into rep, by an estimate
        more_ms = 2 * (MIN_LAUNCHES - len(times)) * max(times)
        times += do_bench(call, warmup=1, rep=more_ms, return_mode="all")
    return [float(time) * 1e3 for time in times]


class Times:
    """Times of the providers of a case, each measured once for each size.

    All of a size's elements are in one batch. Norms work on rows, so sizes with as many rows of the same length are one problem: it is
    compiled and timed once, for all of them.

    Attributes:
        us: median microseconds by (config, provider); nan where a provider could not run.
        spread_us: the 20th and 80th percentile of the same launches. graph_us: times by CUDA graph, of short sizes.
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

    def median_us(self, config: Config, provider: str) -> float:
        """Return the median microseconds, measured if need be; nan for a provider that failed, now or at an earlier size."""
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
        """Return the microseconds of each launch, sorted; none for a peer or compiled provider that fails, with a note on stderr."""
        try:
            return sorted(launches_us(self.call(config, provider), self.warmup_ms, self.rep_ms))
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

    def call(self, config: Config, provider: str) -> Callable[[], Any]:
        """Return the function to time: one pass of a provider, on inputs that all providers share."""
        dim, rows = size = problem_of(config)
        if self._inputs is None or self._inputs[0] != size:
            self._inputs = None
            self._inputs = size, self.case.build_inputs(dim, 1, rows, self.dtype, self.eps)
        inputs = self._inputs[1]
        run = self._make(provider, inputs)
        if not self.backward:
            return lambda: self.case.forward(run, inputs)
        outputs = as_tuple(self.case.forward(run, inputs))
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
                # each size is compiled by itself, as in a program that has one size
                torch._dynamo.config.recompile_limit = 256
                # a timed backward pass runs several times on the same saved tensors
                torch._functorch.config.donated_buffer = False
                _COMPILED[key] = torch.compile(made, fullgraph=True, dynamic=False)
            return _COMPILED[key]
        return self.case.make_peers(inputs)[provider]

    def rate_gb_per_s(self, config: Config, us: float) -> float:
        """Return GB/s (1e9 bytes) over the bytes of x-sized tensors that have to move."""
        tensors = self.case.backward_tensors if self.backward else self.case.forward_tensors
        return tensors * math.prod(config) * self.dtype.itemsize / us / 1e3


_COMPILED: dict[tuple[str, str], Any] = {}  # by case and provider: forward and backward passes are compiled together


def forget_compiled() -> None:
    """Drop compiled providers, after each case and dtype, whose sizes the next does not use."""
    _COMPILED.clear()
    torch._dynamo.reset()
