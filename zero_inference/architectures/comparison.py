"""Summarize a comparison: speedups and differences of scores with their uncertainty; and the table of `zero-inference compare`.

A comparison is a data frame with one row for each architecture, configuration and pass. The steps of a run are not independent: they share
the process, the clock rate and the machine's other users. So the unit is the run. Runs alternate (A B B A), and each is compared with the
baseline's run of the same pass, next to it, so that drift cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas
from scipy import stats

from zero_inference.config.run_config import RunConfig
from zero_inference.records.schema import STATUS_OK
from zero_inference.utils.format import Column, decimals, format_gib_exact, format_percent, one_line

SPEED, QUALITY, FAILED = "speed", "quality", "failed"
COLUMNS = (
    "architecture type config pass throughput latency_p50 latency_p95 latency_p99 memory_gb flops "
    "accuracy stderr total error"
).split()
SUMMARY = (
    "architecture type config runs throughput speedup speedup_low speedup_high memory_gb flops "
    "accuracy stderr accuracy_difference accuracy_difference_stderr verdict error"
).split()
SPEED_KEYS = ("throughput", "speedup", "speedup_low", "speedup_high", "verdict")
QUALITY_KEYS = ("accuracy", "stderr", "accuracy_difference", "accuracy_difference_stderr", "verdict")

CONFIDENCE = 0.95
# All ratios of n pairs of equal arms are on one side of 1 in 2 of 2^n cases; 6 is the first n where that is below 5%.
MIN_PAIRS = 6
# Between equal models of any accuracy a difference was found in up to 5.3% of cases with 8 items, and in 3.5% with 30.
MIN_ITEMS = 30
SCORE_CONFIDENCE = 0.97
NO_DIFFERENCE, TOO_FEW_RUNS = "no difference", "too few runs"
NO_ERROR, TOO_FEW_ITEMS = "no standard error", "too few items"
MIN_SAMPLES = {50: 1, 95: 20, 99: 100}  # a percentile needs at least one sample beyond it

T = TypeVar("T")


def alternate_runs(arms: Sequence[T], passes: int) -> list[tuple[int, T]]:
    """Return (pass, arm) in the order to run: every other pass is reversed (A B, B A, A B, ...)."""
    return [(number, arm) for number in range(passes) for arm in (arms if number % 2 == 0 else arms[::-1])]


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """Return the 50th, 95th or 99th percentile (interpolated); None below 1, 20 and 100 samples."""
    return float(np.percentile(samples, percent)) if len(samples) >= MIN_SAMPLES[percent] else None


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
    """Return the median of candidate / baseline over pairs of runs (token/s), its distribution-free interval and the verdict.

    Raises ValueError for a rate that is not above 0.
    """
    rates = np.array([candidate, baseline], dtype=float)
    if not (np.isfinite(rates) & (rates > 0)).all():
        raise ValueError("a rate is not above 0 token/s")
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
    difference = score["accuracy"] - baseline["accuracy"]
    stderr = float(np.hypot(*(np.array([each["stderr"] for each in (score, baseline)], dtype=float))))
    if math.isnan(stderr):
        verdict = NO_ERROR
    elif min(score["total"], baseline["total"]) < MIN_ITEMS:
        verdict = TOO_FEW_ITEMS
    else:
        spread = math.hypot(_cautious_stderr(score), _cautious_stderr(baseline))
        bound = stats.norm.ppf(0.5 + SCORE_CONFIDENCE / 2) * spread
        verdict = NO_DIFFERENCE if abs(difference) <= bound else "higher" if difference > 0 else "lower"
    return {"accuracy_difference": difference, "accuracy_difference_stderr": stderr, "verdict": verdict}


def _cautious_stderr(score: Mapping[str, Any]) -> float:
    """Return the larger of the standard error and that with one right and one wrong answer added (Agresti and Caffo 2000), because
    answers that are all alike have no spread."""
    n = score["total"]
    p = (score["accuracy"] * n + 1) / (n + 2)
    return max(score["stderr"], math.sqrt(p * (1 - p) / (n + 2)))


# The table of `zero-inference compare`: one row for each arm, from the records of its runs.

# Key of a row -> header.
SETTINGS = {"model": "model", "engine": "engine", "dtype": "type", "quant_bits": "bits", "runs": "runs"}
PHASES = ("decode", "prefill", "total")


def arm_rows(
    configs: Mapping[str, RunConfig], runs: Mapping[str, Sequence[tuple[int, dict[str, Any]]]], baseline: str
) -> list[dict[str, Any]]:
    """Return one row for each arm: JSON values under the names of `list_columns`, and `quality`: task -> its summary.

    Throughputs are medians over runs, percentiles over the decode steps of all runs, peaks maxima. An arm with a failed run has `error` and
    no speed.
    """
    # a row without speed, so that `summarize` knows the baseline even if all of its runs failed
    measured: list[dict[str, Any]] = [{"architecture": baseline, "type": FAILED}]
    good = {}
    for arm in configs:
        if all(record["status"] == STATUS_OK for _, record in runs[arm]):
            good[arm] = [record for _, record in runs[arm]]
            for number, record in runs[arm]:
                run = {"architecture": arm, "pass": number}
                for phase in PHASES:
                    if (rate := record[f"{phase}_throughput"]) is not None:
                        measured.append(run | {"type": SPEED, "config": phase, "throughput": rate})
                measured += [run | row for row in quality_rows(record.get("quality") or {})]
    summary = summarize(build_frame(measured), baseline).astype(object)
    summary = summary.where(summary.notna(), None)  # JSON has no nan
    expected = {record["output_ids_sha256"] for record in good.get(baseline, ())}
    rows = []
    for arm, config in configs.items():
        row: dict[str, Any] = {
            "arm": arm,
            "model": config.model,
            "engine": config.engine,
            "quant_bits": config.bits_of_plain,
        }
        row["runs"] = len(runs[arm])
        if arm not in good:
            failed = next(record for _, record in runs[arm] if record["status"] != STATUS_OK)
            rows.append(row | {"error": one_line(failed["error"])})
            continue
        records = good[arm]
        steps = [step for record in records for loop in record["loops"] for step in loop["step_s"]]
        row |= {name: records[0][name] for name in ("quant_bits", "dtype")} | {"step_samples": len(steps)}
        row |= {f"step_p{each}_s": percentile(steps, each) for each in (50, 95, 99)}
        for name in ("peak_gpu_bytes", "peak_host_bytes", "weight_bytes"):
            row[name] = max((record[name] for record in records if record[name] is not None), default=None)
        limits = [(record.get("limit") or {}).get("fraction_of_limit") for record in records]
        shares = sorted(share for share in limits if share is not None)
        row["fraction_of_limit"] = shares[len(shares) // 2] if shares else None
        row["unsettled_runs"] = sum(record.get("warmed_up") is False for record in records) or None
        row["same_ids"] = {record["output_ids_sha256"] for record in records} == expected
        for each in summary[summary["architecture"] == arm].to_dict("records"):
            if each["type"] == SPEED:
                row |= {f"{each['config']}_{name}": each[name] for name in SPEED_KEYS}
            elif each["type"] == QUALITY:
                score = {name.removeprefix("accuracy_"): each[name] for name in QUALITY_KEYS}
                row.setdefault("quality", {})[each["config"]] = score
                row |= {f"{each['config']}_{name}": value for name, value in score.items()}
        scores = [record.get("quality") or {} for record in records]
        for score in (each["perplexity"] for each in scores if "perplexity" in each):
            row |= {"perplexity": score["perplexity"], "perplexity_stderr": score["stderr"]}
        rows.append(row)
    return rows


def list_columns(rows: Sequence[Mapping[str, Any]], compact: bool) -> list[Column]:
    """Return the columns. For people (`compact`) only settings in which arms differ, and a speedup and its interval in one column."""
    columns = [Column("arm", "arm", dtype="string")]
    for name, header in SETTINGS.items():
        if not compact or len({row.get(name) for row in rows}) > 1:
            columns.append(Column(name, header, dtype="string" if name in ("model", "engine", "dtype") else "Int64"))
    for phase in PHASES:
        if compact and phase == "total" and any(row.get("decode_throughput") for row in rows):
            continue
        columns.append(Column(f"{phase}_throughput", f"{phase} (token/s)", decimals(1 if phase == "prefill" else 3)))
        if compact:
            columns.append(Column(f"{phase}_speedup", f"{phase} speedup", of=partial(_format_ratio, phase)))
        else:
            columns += [Column(f"{phase}_{name}", name) for name in ("speedup", "speedup_low", "speedup_high")]
        columns.append(Column(f"{phase}_verdict", f"{phase} verdict", dtype="string"))
    columns += [] if compact else [Column("step_samples", "steps", dtype="Int64")]
    columns += [
        *(Column(f"step_p{each}_s", f"p{each} (ms)", lambda seconds: f"{1e3 * seconds:.2f}") for each in (50, 95, 99)),
        Column("peak_gpu_bytes", "peak gpu (GiB)", format_gib_exact, "Int64"),
        Column("peak_host_bytes", "peak host (GiB)", format_gib_exact, "Int64"),
    ]
    columns += [] if compact else [Column("weight_bytes", "stored weights (GiB)", format_gib_exact, "Int64")]
    columns += [
        Column("fraction_of_limit", "of limit", format_percent),
        Column("unsettled_runs", "not settled", dtype="Int64"),
        Column("same_ids", "tokens as baseline", lambda same: "yes" if same else "no", "boolean"),
    ]
    for task in dict.fromkeys(task for row in rows for task in row.get("quality", {})):
        columns += [
            Column(f"{task}_accuracy", task, decimals(4)),
            Column(f"{task}_stderr", f"{task} se", decimals(4)),
            Column(f"{task}_difference", f"{task} difference", lambda value: f"{value:+.4f}"),
            Column(f"{task}_difference_stderr", f"{task} difference se", decimals(4)),
            Column(f"{task}_verdict", f"{task} verdict", dtype="string"),
        ]
    if any("perplexity" in row for row in rows):
        columns += [
            Column("perplexity", "perplexity", decimals(3)),
            Column("perplexity_stderr", "perplexity se", decimals(3)),
        ]
    return [*columns, Column("error", "error", dtype="string")]


def _format_ratio(phase: str, row: Mapping[str, Any]) -> str | None:
    ratio, low, high = (row.get(f"{phase}_speedup{end}") for end in ("", "_low", "_high"))
    if ratio is None:
        return None
    return f"{ratio:.3f}x" + (f" ({low:.3f} - {high:.3f})" if low is not None else "")


def list_captions(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[str]:
    """Return the lines below the table: what a speedup is, and why something has no verdict."""
    if any(row["arm"] == baseline and row.get("error") for row in rows):
        lines = [f"no speedup: the baseline {baseline} failed"]
    else:
        lines = [f"speedup: median over pairs of runs next to each other, against {baseline} (95% interval)"]
    verdicts = {value for row in rows for key, value in row.items() if key.endswith("_verdict")}
    reasons = {
        TOO_FEW_RUNS: f"a verdict takes {MIN_PAIRS} runs of each arm, --rounds {MIN_PAIRS // 2}",
        TOO_FEW_ITEMS: f"a verdict takes {MIN_ITEMS} items of each arm; use more data, or raise --quality-limit",
        NO_ERROR: "scores of one item have no verdict",
    }
    lines += [f"{verdict}: {reason}" for verdict, reason in reasons.items() if verdict in verdicts]
    if any(row.get("unsettled_runs") for row in rows):
        lines.append("not settled: runs whose last warm-up loops still differed by 5% or more")
    if any("quality" in row for row in rows):
        lines.append("difference: against the baseline; se: standard error")
    if any("perplexity" in row for row in rows):
        lines.append("perplexity: lower is better, without a verdict; se: standard error")
    return lines
