"""Benchmark several models in one process, and summarize a comparison: speedups and differences of scores, with their uncertainty.

A comparison is a data frame with one row for each architecture, configuration and pass; `zero-inference compare` builds it from records.

The steps of a run are not independent: they share the process, the clock rate and the machine's other users. So the unit is the run. Runs
alternate (A B B A), and each is compared with the baseline's run of the same pass, next to it, so that drift cancels.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas
import torch
from scipy import stats

from zero_inference.architectures.arms import alternate_runs
from zero_inference.architectures.benchmark import ArchitectureBenchmark, QualityBenchmark

SPEED, QUALITY, FAILED = "speed", "quality", "failed"
COLUMNS = (
    "architecture type config pass throughput latency_p50 latency_p95 latency_p99 memory_gb flops "
    "accuracy stderr total error"
).split()
SUMMARY = (
    "architecture type config runs throughput speedup speedup_low speedup_high memory_gb flops "
    "accuracy stderr accuracy_difference accuracy_difference_stderr verdict error"
).split()

CONFIDENCE = 0.95
# All ratios of n pairs of equal arms are on one side of 1 in 2 of 2^n cases; 6 is the first n where that is below 5%.
MIN_PAIRS = 6
# Between equal models of any accuracy a difference was found in up to 5.3% of cases with 8 items, and in 3.5% with 30.
MIN_ITEMS = 30
SCORE_CONFIDENCE = 0.97
NO_DIFFERENCE, TOO_FEW_RUNS = "no difference", "too few runs"
NO_ERROR, TOO_FEW_ITEMS = "no standard error", "too few items"


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
    passes: int = MIN_PAIRS
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
    """Return the rows of one pass. A given model is then moved back to its device; a built one is deleted, as the next needs the memory."""
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


def quality_rows(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows of a comparison from `task -> result of evaluate_task`: accuracies, and one row for each k of pass@k."""
    for task, score in scores.items():
        if "pass_at_k" in score:
            for k, value in score["pass_at_k"].items():
                row = {"accuracy": value, "stderr": score["stderr"].get(k), "total": score["problems"]}
                yield {"type": QUALITY, "config": f"{task} pass@{k}"} | row
        elif "accuracy" in score:
            yield {"type": QUALITY, "config": task} | {key: score[key] for key in ("accuracy", "stderr", "total")}


def build_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a comparison's frame from rows that have some of COLUMNS."""
    return pandas.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], columns=COLUMNS)


def summarize(frame: pandas.DataFrame, baseline: str) -> pandas.DataFrame:
    """Return the differences of each architecture from `baseline`.

    Args:
        frame: of `compare_architectures`, or several concatenated.
        baseline: an architecture of the frame.

    Returns:
        One row for each architecture, type and config. Speed: the median `throughput` over passes, the largest `memory_gb`,
        `flops`, and the `speedup` with its 95% interval `speedup_low` to `speedup_high` and `verdict` ("faster", "slower", "no
        difference" where the interval contains 1, "too few runs" below 6 pairs), from the `runs` passes that both have. Quality:
        `accuracy` with its `stderr`, the `accuracy_difference` with `accuracy_difference_stderr`, and a verdict ("higher",
        "lower", "no difference"; or why there is none: "no standard error", "too few items" below 30). Failed: `error`. Configurations
        that the baseline lacks have no difference.

    Raises:
        ValueError: the frame has no such baseline.
    """
    names = list(dict.fromkeys(frame["architecture"]))
    if baseline not in names:
        raise ValueError(f"baseline {baseline!r} is not among {', '.join(names)}")
    rows = []
    for (name, kind, config), group in frame.groupby(["architecture", "type", "config"], sort=False, dropna=False):
        base = frame[(frame["architecture"] == baseline) & (frame["type"] == kind) & (frame["config"] == config)]
        last = group.iloc[-1]  # scores do not change from run to run
        row: dict[str, Any] = {"architecture": name, "type": kind, "config": config, "runs": len(group)}
        if kind == FAILED:
            row["error"] = last["error"]
        elif kind == SPEED:
            row |= {"throughput": group["throughput"].median(), "memory_gb": group["memory_gb"].max()}
            row["flops"] = group["flops"].max()
            pairs = group.merge(base, on="pass", suffixes=("", "_base"))
            if name == baseline:
                row |= {"speedup": 1.0, "verdict": "baseline"}
            elif len(pairs):
                row |= {"runs": len(pairs)} | speedup(pairs["throughput"], pairs["throughput_base"])
        else:
            row |= {"accuracy": last["accuracy"], "stderr": last["stderr"]}
            if name == baseline:
                row |= {"accuracy_difference": 0.0, "verdict": "baseline"}
            elif len(base):
                row |= score_difference(last, base.iloc[-1])
        rows.append(row)
    return pandas.DataFrame([{name: row.get(name) for name in SUMMARY} for row in rows], columns=SUMMARY)


def speedup(candidate: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return the median of candidate / baseline over pairs of runs, its distribution-free interval and the verdict.

    Args:
        candidate, baseline: rates above 0 (token/s), one for each run; entries of the same index ran next to each other.

    Raises:
        ValueError: no runs, lists of different lengths, or a rate that is not above 0.
    """
    if len(candidate) != len(baseline) or not len(candidate):
        raise ValueError(f"{len(candidate)} runs against {len(baseline)}: each needs its partner of the same pass")
    rates = np.array([candidate, baseline], dtype=float)
    if not (np.isfinite(rates).all() and (rates > 0).all()):
        raise ValueError("a rate is not above 0")
    ratios = np.log(rates[0] / rates[1])
    low, high = np.exp(stats.quantile_test(ratios, p=0.5).confidence_interval(CONFIDENCE))  # nan below MIN_PAIRS
    verdict = "faster" if low > 1 else "slower" if high < 1 else NO_DIFFERENCE
    return {
        "speedup": math.exp(np.median(ratios)),
        "speedup_low": float(low),
        "speedup_high": float(high),
        "verdict": TOO_FEW_RUNS if math.isnan(low) else verdict,
    }


def score_difference(score: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return accuracy minus the baseline's, its standard error and a verdict, from `accuracy`, `stderr` and `total` items of both.

    Errors add as of independent samples, which is cautious for models that answered the same questions.
    """
    apart = score["accuracy"] - baseline["accuracy"]
    stderr = float(np.hypot(*(np.array([each["stderr"] for each in (score, baseline)], dtype=float))))
    if math.isnan(stderr):
        verdict = NO_ERROR
    elif min(score["total"], baseline["total"]) < MIN_ITEMS:
        verdict = TOO_FEW_ITEMS
    else:
        spread = math.hypot(_cautious_stderr(score), _cautious_stderr(baseline))
        bound = stats.norm.ppf(0.5 + SCORE_CONFIDENCE / 2) * spread
        verdict = NO_DIFFERENCE if abs(apart) <= bound else "higher" if apart > 0 else "lower"
    return {"accuracy_difference": apart, "accuracy_difference_stderr": stderr, "verdict": verdict}


def _cautious_stderr(score: Mapping[str, Any]) -> float:
    """Return at least the error of a share with one right and one wrong answer added (Agresti and Caffo 2000): answers that are all alike
    have no spread."""
    n = score["total"]
    p = (score["accuracy"] * n + 1) / (n + 2)
    return max(score["stderr"], math.sqrt(p * (1 - p) / (n + 2)))
