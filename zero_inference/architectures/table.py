"""The table of `zero-inference compare`: one row for each arm, from the records of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zero_inference.architectures.arms import Arm
from zero_inference.architectures.benchmark import percentile
from zero_inference.architectures.comparison import (
    FAILED,
    MIN_ITEMS,
    MIN_PAIRS,
    NO_ERROR,
    QUALITY,
    SPEED,
    TOO_FEW_ITEMS,
    TOO_FEW_RUNS,
    build_frame,
    quality_rows,
    summarize,
)
from zero_inference.records.schema import STATUS_OK
from zero_inference.utils.format import Column, decimals, format_gib_exact, format_percent

SETTINGS = {"model": "model", "engine": "engine", "dtype": "type", "quant_bits": "bits", "runs": "runs"}
PHASES = ("decode", "prefill", "total")
SPEED_KEYS = ("throughput", "speedup", "speedup_low", "speedup_high", "verdict")
QUALITY_KEYS = ("accuracy", "stderr", "accuracy_difference", "accuracy_difference_stderr", "verdict")
Runs = Mapping[str, Sequence[tuple[int, dict[str, Any]]]]


def arm_rows(arms: Sequence[Arm], runs: Runs, baseline: str) -> list[dict[str, Any]]:
    """Return one row for each arm: JSON values under the names of `list_columns`, and `quality`: task -> its summary.

    Throughputs are medians over runs, percentiles over the decode steps of all runs, peaks maxima. An arm with a failed run has `error` and
    no speed.
    """
    # a row without speed, so that `summarize` knows the baseline even if all of its runs failed
    measured: list[dict[str, Any]] = [{"architecture": baseline, "type": FAILED}]
    good = {}
    for arm in arms:
        if all(record["status"] == STATUS_OK for _, record in runs[arm.name]):
            good[arm.name] = [record for _, record in runs[arm.name]]
            for number, record in runs[arm.name]:
                run = {"architecture": arm.name, "pass": number}
                for phase in PHASES:
                    if (rate := record[f"{phase}_throughput"]) is not None:
                        measured.append(run | {"type": SPEED, "config": phase, "throughput": rate})
                measured += [run | row for row in quality_rows(record.get("quality") or {})]
    summary = summarize(build_frame(measured), baseline).to_dict("records")
    expected = {record["output_ids_sha256"] for record in good.get(baseline, ())}
    rows = []
    for arm in arms:
        row = {name: getattr(arm.config, name) for name in ("model", "engine", "quant_bits")}
        row |= {"arm": arm.name, "runs": len(runs[arm.name])}
        if arm.name in good:
            row |= _facts(good[arm.name])
            row["same_ids"] = {record["output_ids_sha256"] for record in good[arm.name]} == expected
            for each in (each for each in summary if each["architecture"] == arm.name):
                if each["type"] == SPEED:
                    row |= {f"{each['config']}_{name}": _plain(each[name]) for name in SPEED_KEYS}
                elif each["type"] == QUALITY:
                    score = {name.removeprefix("accuracy_"): _plain(each[name]) for name in QUALITY_KEYS}
                    row.setdefault("quality", {})[each["config"]] = score
                    row |= {f"{each['config']}_{name}": value for name, value in score.items()}
        else:
            failed = next(record for _, record in runs[arm.name] if record["status"] != STATUS_OK)
            row["error"] = " ".join(str(failed["error"]).split())
        rows.append(row)
    return rows


def _facts(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [step for record in records for loop in record["loops"] for step in loop["step_s"]]
    row: dict[str, Any] = {"dtype": records[0]["dtype"], "step_samples": len(steps)}
    row |= {f"step_p{each}_s": percentile(steps, each) for each in (50, 95, 99)}
    for name in ("peak_gpu_bytes", "peak_host_bytes", "weight_bytes"):
        row[name] = max((record[name] for record in records if record[name] is not None), default=None)
    limits = [(record.get("limit") or {}).get("fraction_of_limit") for record in records]
    shares = sorted(share for share in limits if share is not None)
    row["fraction_of_limit"] = shares[len(shares) // 2] if shares else None
    row["unsettled_runs"] = sum(record.get("warmed_up") is False for record in records) or None
    return row


def _plain(value: Any) -> Any:
    """Return None for nan, which JSON has not."""
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def run_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that the JSON output lists for each run."""
    rates = [f"{phase}_throughput" for phase in ("prefill", "decode", "total")]
    names = ["status", "timestamp", *rates, "warmed_up", "warmup_total_s", "settling_s", "error"]
    return {name: record[name] for name in names if record.get(name) is not None}


def list_columns(rows: Sequence[Mapping[str, Any]], compact: bool) -> list[Column]:
    """Return the columns. For people (`compact`) settings are there only if arms differ in them, and a speedup with its interval is one
    column."""
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
        Column(f"step_p{each}_s", f"p{each} (ms)", lambda seconds: f"{1e3 * seconds:.2f}") for each in (50, 95, 99)
    ]
    columns += [
        Column("peak_gpu_bytes", "peak gpu (GiB)", format_gib_exact, "Int64"),
        Column("peak_host_bytes", "peak host (GiB)", format_gib_exact, "Int64"),
    ]
    columns += [] if compact else [Column("weight_bytes", "stored weights (GiB)", format_gib_exact, "Int64")]
    columns += [
        Column("fraction_of_limit", "of limit", format_percent),
        Column("unsettled_runs", "not settled", dtype="Int64"),
        Column("same_ids", "same tokens", lambda same: "yes" if same else "no", "boolean"),
    ]
    for task in dict.fromkeys(task for row in rows for task in row.get("quality", {})):
        columns += [
            Column(f"{task}_accuracy", task, decimals(4)),
            Column(f"{task}_stderr", f"{task} se", decimals(4)),
            Column(f"{task}_difference", f"{task} difference", lambda value: f"{value:+.4f}"),
            Column(f"{task}_difference_stderr", f"{task} difference se", decimals(4)),
            Column(f"{task}_verdict", f"{task} verdict", dtype="string"),
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
    return lines
