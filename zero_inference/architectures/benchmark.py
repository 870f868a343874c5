"""Benchmark one transformers model, or several alternately: generation and batch throughput with memory and FLOPs, and quality."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zero_inference.architectures.comparison import (
    FAILED,
    MIN_PAIRS,
    SPEED,
    alternate_runs,
    build_frame,
    percentile,
    quality_rows,
)
from zero_inference.config.options import QUALITY_TASKS
from zero_inference.errors import UsageError
from zero_inference.measure.loops import is_steady
from zero_inference.models.prompts import greedy_config, random_ids, reset_generation_config
from zero_inference.models.spec import max_positions
from zero_inference.quality.data import check_items, iterate_rows, load_items
from zero_inference.quality.evaluate import QualitySettings, evaluate, pass_at_k
from zero_inference.quality.sandbox import check_isolation
from zero_inference.utils import GB
from zero_inference.utils.model_sizes import text_config
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.timing import time_wall_s

WARMUP_SPREAD = 0.05
WARMUP_TRIES = 10


@dataclass(frozen=True)
class BenchmarkResult:
    """Result of one benchmark of one model."""

    name: str  # `gen_p{prompt}_l{generated}` or `batch_b{batch}_s{sequence}`
    throughput: float  # tokens/s of the median run: generated tokens, or all tokens of a batch
    latency_p50: float | None  # ms of a run; percentiles are None below 1, 20 and 100 runs
    latency_p95: float | None
    latency_p99: float | None
    memory_gb: float  # of 2^30 bytes: weights and the peak that a run allocated beside them
    flops: int  # of the matrix products of one run, counted


class ArchitectureBenchmark:
    """Times a transformers model on one device. The model is moved there and put into eval mode.

    Args:
        model: called with `input_ids`; only `benchmark_generation` needs `generate`.
        seed: of the random prompts.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device | str, seed: int = 0):
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.seed = seed

    @contextlib.contextmanager
    def measure_memory(self) -> Iterator[SimpleNamespace]:
        """Measure `peak_bytes`, set at the end of the context: parameters and buffers, plus the peak that torch allocated within it.

        On CUDA by the allocator's counters, on a CPU by the allocations that torch's profiler records, which slows the work.
        """
        memory = SimpleNamespace(peak_bytes=None)
        unique = {each.data_ptr(): each.nbytes for each in (*self.model.parameters(), *self.model.buffers())}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            yield memory
            torch.cuda.synchronize(self.device)
            allocated = torch.cuda.max_memory_allocated(self.device) - before
        else:
            cpu = torch.profiler.ProfilerActivity.CPU
            with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
                yield memory
            events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
            changes = sorted((event.start_ns(), event.nbytes()) for event in events)
            allocated = int(np.cumsum([0, *(nbytes for _, nbytes in changes)]).max())
        memory.peak_bytes = sum(unique.values()) + allocated

    def benchmark_generation(
        self, prompt_tokens: int | torch.Tensor, generation_length: int, num_runs: int = 20
    ) -> BenchmarkResult:
        """Time greedy generation of exactly `generation_length` tokens with a KV cache, each run from the same prompt.

        `prompt_tokens` are ids int64 [B, P], or P for one sequence of P random ids. Raises ValueError for a length or number below 1, more
        positions than the model has, or a model that cannot generate.
        """
        if isinstance(prompt_tokens, torch.Tensor):
            ids = prompt_tokens.to(self.device)
            if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
                raise ValueError(f"prompt_tokens must be ids [batch, P], got {ids.dtype} {list(ids.shape)}")
        else:
            _check_at_least_1(prompt_tokens=prompt_tokens)
            ids = self._random_ids(1, prompt_tokens)
        _check_at_least_1(generation_length=generation_length, num_runs=num_runs)
        if not (hasattr(self.model, "can_generate") and self.model.can_generate()):
            raise ValueError(f"{type(self.model).__name__} cannot generate; benchmark_batch_throughput runs any model")
        batch, prompt_len = ids.shape
        self._check_positions(prompt_len + generation_length)
        settings, mask = greedy_config(generation_length), torch.ones_like(ids)
        run = partial(self.model.generate, ids, attention_mask=mask, generation_config=settings)
        before = self.model.generation_config
        reset_generation_config(self.model)
        try:
            return self._measure(f"gen_p{prompt_len}_l{generation_length}", run, batch * generation_length, num_runs)
        finally:
            self.model.generation_config = before

    def benchmark_batch_throughput(self, batch_size: int, seq_len: int, num_runs: int = 50) -> BenchmarkResult:
        """Time forward passes over the same random ids [batch_size, seq_len], without a KV cache.

        Raises ValueError for a size or number below 1, or more positions than the model has.
        """
        _check_at_least_1(batch_size=batch_size, seq_len=seq_len, num_runs=num_runs)
        ids = self._random_ids(batch_size, seq_len)
        self._check_positions(seq_len)
        options = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        name = f"batch_b{batch_size}_s{seq_len}"
        return self._measure(name, lambda: self.model(input_ids=ids, **options), batch_size * seq_len, num_runs)

    def _random_ids(self, batch_size: int, length: int) -> torch.Tensor:
        return random_ids(self.seed, batch_size, length, text_config(self.model.config).vocab_size).to(self.device)

    def _check_positions(self, length: int) -> None:
        positions = max_positions(self.model.config)
        if positions and length > positions:
            raise ValueError(f"{length} positions are needed, {type(self.model).__name__} has {positions}")

    def _measure(self, name: str, run: Callable[[], object], tokens: int, num_runs: int) -> BenchmarkResult:
        with torch.inference_mode():
            warmup_s: list[float] = []
            while len(warmup_s) < WARMUP_TRIES and not is_steady(warmup_s, WARMUP_SPREAD):
                warmup_s.append(time_wall_s(self.device, run))
            if not is_steady(warmup_s, WARMUP_SPREAD):
                warnings.warn(
                    f"{name}: {WARMUP_TRIES} warm-up runs still differ by more than {WARMUP_SPREAD:.0%}", stacklevel=3
                )
            times_ms = [1e3 * time_wall_s(self.device, run) for _ in range(num_runs)]
            with self.measure_memory() as memory:
                run()
            # The counter does not know the CPU's fused attention; plain products have as many FLOPs.
            plain = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else contextlib.nullcontext()
            with plain, FlopCounterMode(display=False) as counter:
                run()
        p50, p95, p99 = (percentile(times_ms, percent) for percent in (50, 95, 99))
        throughput = tokens / (float(np.median(times_ms)) / 1e3)
        return BenchmarkResult(name, throughput, p50, p95, p99, memory.peak_bytes / GB, counter.get_total_flops())


def _check_at_least_1(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")


class QualityBenchmark:
    """Scores a causal language model on tasks.

    Args:
        model: a transformers model; it is not changed.
        device: of the inputs; None takes that of the model's parameters.
        allow_code_execution: let humaneval run the model's programs, in `zero_inference.quality.sandbox`.
        settings: fields of `QualitySettings`: batch_size, samples, temperature, ks, window, stride, seed, limits, allow_unsafe_code.

    Raises:
        UsageError: no tokenizer.
        ValueError: a k of pass@k above the number of samples.
    """

    def __init__(self, model, tokenizer, *, device=None, allow_code_execution: bool = False, **settings):
        if tokenizer is None:
            raise UsageError("QualityBenchmark needs the model's tokenizer, and got None.")
        self.model, self.tokenizer = model, tokenizer
        # parameters that accelerate has offloaded are on meta between forward passes
        devices = (each.device for each in model.parameters() if each.device.type != "meta")
        self.device = torch.device(device or next(devices, None) or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.allow_code_execution = allow_code_execution
        self.settings = QualitySettings(**settings)
        for k in self.settings.resolved_ks():
            pass_at_k(self.settings.samples, 0, k)  # refuses a k above them

    def evaluate_task(self, task: str, dataset: Any) -> dict[str, Any]:
        """Score the model on `dataset`: dicts, a datasets.Dataset, a DataFrame, or the path of a file or folder (`quality.data`).

        Returns:
            For mmlu and hellaswag `accuracy`, `stderr` (None for one item), `correct`, `total`, and hellaswag's `acc_norm`; for
            humaneval `pass_at_k` ({k: value}), `n` samples a problem and `k`, the list of them; for perplexity `perplexity`,
            `stderr`, `tokens`, `window` and `stride`; more keys as in the record.

        Raises:
            ValueError: unknown task.
            UsageError: data that is empty or wrong, or programs that may not be run or cannot be isolated.
            RunError: the scores are not finite, or a prompt is too long.
        """
        if task not in QUALITY_TASKS:
            raise ValueError(f"unknown task {task!r}; there are {', '.join(QUALITY_TASKS)}")
        is_file = isinstance(dataset, (str, Path))
        items = load_items(task, dataset) if is_file else check_items(task, iterate_rows(dataset))
        if task == "humaneval":
            if not self.allow_code_execution:
                raise UsageError("humaneval runs code that the model wrote: allow it with allow_code_execution=True.")
            check_isolation(self.settings.allow_unsafe_code)
        alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=self.device)
        scores, _ = evaluate({task: items}, self.model, self.tokenizer, self.device, alone, self.settings)
        return scores[task]


@dataclass(frozen=True)
class BenchmarkConfig:
    """What `compare_architectures` runs for each model."""

    device: str | None = None  # the GPU if there is one
    generation: Sequence[tuple[int, int]] = ((128, 32),)  # prompt tokens, tokens to generate
    batch: Sequence[tuple[int, int]] = ((4, 128),)  # batch size, sequence length
    passes: int = MIN_PAIRS  # over all models, in alternating order; fewer than 6 give no verdict
    generation_runs: int = 20  # in each pass
    batch_runs: int = 50
    quality: Mapping[str, Any] = field(default_factory=dict)  # task -> data of `evaluate_task`, for the first pass
    tokenizers: Mapping[str, Any] = field(default_factory=dict)  # by architecture, for those tasks

    def __post_init__(self):
        if self.passes < 1:
            raise ValueError(f"passes is {self.passes}, it must be at least 1")
        if not (self.generation or self.batch or self.quality):
            raise ValueError("nothing to do: give generation, batch or quality")


def compare_architectures(
    architectures: Mapping[str, torch.nn.Module | Callable[[], torch.nn.Module]],
    benchmark_config: BenchmarkConfig | Mapping[str, Any],
) -> pandas.DataFrame:
    """Benchmark the architectures in the order A B B A A B ..., so that drift of the machine affects all alike.

    Args:
        architectures: name -> a model, moved to the device for its passes and back, or a function that builds one, called in each pass.
        benchmark_config: a `BenchmarkConfig`, or its fields as a mapping.

    Returns:
        COLUMNS; `type` is "speed" (one row a configuration and pass, as in `BenchmarkResult`), "quality" (one row a task) or
        "failed": an architecture that raised is not run again; the reason is in `error`.
    """
    config = benchmark_config if isinstance(benchmark_config, BenchmarkConfig) else BenchmarkConfig(**benchmark_config)
    if not architectures:
        raise ValueError("no architectures to compare")
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows: list[dict[str, Any]] = []
    failed: set[str] = set()
    for number, name in alternate_runs(list(architectures), config.passes):
        if name in failed:
            continue
        run = {"architecture": name, "pass": number}
        try:
            rows += [run | row for row in _run_pass(name, architectures[name], device, config, number)]
        except Exception as error:  # of the model's code; the other architectures go on
            failed.add(name)
            reason = str(error).strip().splitlines() or [""]
            rows.append(run | {"type": FAILED, "error": f"{type(error).__name__}: {reason[0]}"})
    return build_frame(rows)


def _run_pass(
    name: str, architecture: Any, device: torch.device, config: BenchmarkConfig, number: int
) -> list[dict[str, Any]]:
    """Return the rows of one pass, after which a given model is back on its device and a built one deleted: the next needs the memory."""
    given = isinstance(architecture, torch.nn.Module)
    model = architecture if given else architecture()
    home, training = next((each.device for each in model.parameters()), device), model.training
    try:
        benchmark = ArchitectureBenchmark(model, device)
        results = [benchmark.benchmark_generation(*each, config.generation_runs) for each in config.generation]
        results += [benchmark.benchmark_batch_throughput(*each, config.batch_runs) for each in config.batch]
        rows = [{"type": SPEED, "config": result.name} | asdict(result) for result in results]
        if config.quality and number == 0:
            judge = QualityBenchmark(model, config.tokenizers[name])
            rows += quality_rows({task: judge.evaluate_task(task, data) for task, data in config.quality.items()})
        return rows
    finally:
        if given:
            model.to(home).train(training)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
