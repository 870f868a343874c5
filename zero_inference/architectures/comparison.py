"""Benchmark several models in one process, and summarize a comparison: speedups and differences of scores.

A comparison is a data frame with one row for each architecture, configuration and pass; `zero-inference compare` builds it from records.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from zero_inference.architectures import statistics

if TYPE_CHECKING:
    import pandas
    import torch

SPEED, QUALITY, FAILED = "speed", "quality", "failed"
COLUMNS = tuple(
    "architecture type config pass throughput latency_p50 latency_p95 latency_p99 memory_gb flops "
    "accuracy stderr total error".split()
)
SUMMARY = tuple(
    "architecture type config runs throughput speedup speedup_low speedup_high memory_gb flops "
    "accuracy stderr accuracy_difference accuracy_difference_stderr verdict error".split()
)


@dataclass(frozen=True)
class BenchmarkConfig:
    """What `compare_architectures` runs for each model.

    Attributes:
        device: None takes the GPU if there is one.
        generation: pairs (prompt tokens, tokens to generate).
        batch: pairs (batch size, sequence length).
        passes: passes over all models, in alternating order; fewer than 6 give no verdict.
        generation_runs, batch_runs: runs in each pass.
        quality: task -> its data, for `QualityBenchmark.evaluate_task`; scored in the first pass.
        tokenizers: architecture -> tokenizer, for those tasks.
    """

    device: str | None = None
    generation: Sequence[tuple[int, int]] = ((128, 32),)
    batch: Sequence[tuple[int, int]] = ((4, 128),)
    passes: int = statistics.LEAST_PAIRS
    generation_runs: int = 20
    batch_runs: int = 50
    quality: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: Mapping[str, Any] = field(default_factory=dict)

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

    Raises:
        ValueError: no architecture, or nothing to run.
    """
    import torch

    config = benchmark_config if isinstance(benchmark_config, BenchmarkConfig) else BenchmarkConfig(**benchmark_config)
    if not architectures:
        raise ValueError("no architectures to compare")
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows: list[dict[str, Any]] = []
    for number, name in alternate_runs(list(architectures), config.passes):
        if any(row["architecture"] == name and row["type"] == FAILED for row in rows):
            continue
        try:
            with _model_for_pass(architectures[name], device) as model:
                rows += [
                    {"architecture": name, "pass": number} | row
                    for row in _run_pass(name, model, device, config, number)
                ]
        except Exception as error:  # of the model's code; the other architectures go on
            reason = str(error).strip().splitlines() or [""]
            rows.append(
                {"architecture": name, "type": FAILED, "pass": number, "error": f"{type(error).__name__}: {reason[0]}"}
            )
    return build_frame(rows)


def alternate_runs(names: Sequence[str], passes: int) -> list[tuple[int, str]]:
    """Return (pass, name) in the order to run: every other pass is reversed (A B, B A, A B, ...)."""
    return [
        (number, name) for number in range(passes) for name in (names if number % 2 == 0 else list(reversed(names)))
    ]


def build_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a comparison's frame from rows that have some of COLUMNS."""
    import pandas

    return pandas.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], columns=list(COLUMNS))


def summarize(frame: pandas.DataFrame, baseline: str) -> pandas.DataFrame:
    """Return the differences of each architecture from `baseline`.

    Args:
        frame: of `compare_architectures`, or several concatenated.
        baseline: an architecture of the frame.

    Returns:
        One row for each architecture, type and config. Speed: the median `throughput` over passes, the largest `memory_gb`,
        `flops`, and the `speedup` with its 97% interval `speedup_low` to `speedup_high` and `verdict` ("faster", "slower", "no
        difference" where the interval contains 1, "too few runs" below 6 pairs), from the `runs` passes that both have. Quality:
        `accuracy` with its `stderr`, the `accuracy_difference` with `accuracy_difference_stderr`, and a verdict ("higher",
        "lower", "no difference"; or why there is none: "no standard error", "too few items" below 30). Failed: `error`. Configurations
        that the baseline lacks have no difference.

    Raises:
        ValueError: the frame has no such baseline.
    """
    import pandas

    names = list(dict.fromkeys(frame["architecture"]))
    if baseline not in names:
        raise ValueError(f"baseline {baseline!r} is not among {', '.join(names)}")
    rows = []
    for (name, kind, config), group in frame.groupby(["architecture", "type", "config"], sort=False, dropna=False):
        row: dict[str, Any] = {"architecture": name, "type": kind, "config": config}
        base = frame[(frame["architecture"] == baseline) & (frame["type"] == kind) & (frame["config"] == config)]
        if kind == FAILED:
            row["error"] = group["error"].iloc[0]
        elif kind == SPEED:
            row |= _speed(group, base)
        else:
            row |= _quality(group, base)
        rows.append(row)
    return pandas.DataFrame([{column: row.get(column) for column in SUMMARY} for row in rows], columns=list(SUMMARY))


def _speed(group: pandas.DataFrame, base: pandas.DataFrame) -> dict[str, Any]:
    row = {
        "runs": len(group),
        "throughput": group["throughput"].median(),
        "memory_gb": group["memory_gb"].max(),
        "flops": group["flops"].max(),
    }
    pairs = group.merge(base, on="pass", suffixes=("", "_base"))
    if pairs.empty:
        return row
    if group["architecture"].iloc[0] == base["architecture"].iloc[0]:
        return row | {"speedup": 1.0, "verdict": "baseline"}
    ratio = statistics.speedup(pairs["throughput"].tolist(), pairs["throughput_base"].tolist())
    return row | {
        "runs": ratio.pairs,
        "speedup": ratio.median,
        "speedup_low": ratio.low,
        "speedup_high": ratio.high,
        "verdict": ratio.verdict,
    }


def _quality(group: pandas.DataFrame, base: pandas.DataFrame) -> dict[str, Any]:
    """Summarize the last score: scores do not change from run to run."""
    last = group.iloc[-1]
    row = {"runs": len(group), "accuracy": last["accuracy"], "stderr": last["stderr"]}
    if base.empty:
        return row
    if last["architecture"] == base["architecture"].iloc[0]:
        return row | {"accuracy_difference": 0.0, "verdict": "baseline"}
    apart, error, verdict = statistics.difference(_score(last), _score(base.iloc[-1]))
    return row | {"accuracy_difference": apart, "accuracy_difference_stderr": error, "verdict": verdict}


def _score(row: pandas.Series) -> statistics.Score:
    """Return the score of a row, in which pandas has nan for missing values."""
    error, items = (None if value is None or value != value else value for value in (row["stderr"], row["total"]))
    return statistics.Score(row["accuracy"], error, items)


def _run_pass(
    name: str, model: torch.nn.Module, device: torch.device, config: BenchmarkConfig, number: int
) -> Iterator[dict[str, Any]]:
    from zero_inference.architectures.benchmark import ArchitectureBenchmark

    benchmark = ArchitectureBenchmark(model, device)
    results = [
        benchmark.benchmark_generation(prompt, length, config.generation_runs) for prompt, length in config.generation
    ]
    results += [benchmark.benchmark_batch_throughput(batch, seq, config.batch_runs) for batch, seq in config.batch]
    for result in results:
        fields = asdict(result)
        yield {"type": SPEED, "config": fields.pop("name")} | fields
    if config.quality and number == 0:
        from zero_inference.architectures.benchmark import QualityBenchmark

        judge = QualityBenchmark(model, config.tokenizers[name])
        for task, dataset in config.quality.items():
            yield from quality_rows({task: judge.evaluate_task(task, dataset)})


def quality_rows(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows of a comparison from `task -> result of evaluate_task`: accuracies, and one row for each k of pass@k.

    `total` is the number of items, of problems for pass@k.
    """
    for task, score in scores.items():
        if not isinstance(score, Mapping):
            continue
        if "pass_at_k" in score:
            errors = score.get("stderr")
            for k, value in score["pass_at_k"].items():
                error = errors.get(k) if isinstance(errors, Mapping) else errors
                row = {"accuracy": value, "stderr": error, "total": score.get("problems")}
                yield {"type": QUALITY, "config": f"{task} pass@{k}"} | row
        elif "accuracy" in score:
            row = {name: score.get(name) for name in ("accuracy", "stderr", "total")}
            yield {"type": QUALITY, "config": task} | row


@contextlib.contextmanager
def _model_for_pass(architecture: Any, device: torch.device) -> Iterator[torch.nn.Module]:
    """Give a model for one pass; then move it back to its device, or delete it if it was built: the next one needs the memory."""
    import torch

    is_model = isinstance(architecture, torch.nn.Module)
    model = architecture if is_model else architecture()
    home = next((parameter.device for parameter in model.parameters()), device)
    training = model.training
    try:
        yield model
    finally:
        if is_model:
            model.to(home).train(training)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
