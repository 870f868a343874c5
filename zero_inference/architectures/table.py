"""The table of `zero-inference compare`: one row for each arm, from the records of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zero_inference.architectures import statistics
from zero_inference.architectures.arms import Arm
from zero_inference.architectures.comparison import QUALITY, SPEED, build_frame, quality_rows, summarize
from zero_inference.records.schema import STATUS_OK
from zero_inference.utils.format import decimals, format_gib_exact, format_percent
from zero_inference.utils.tables import Column

PHASES = ("decode", "prefill", "total")
Runs = Mapping[str, Sequence[tuple[int, dict[str, Any]]]]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _times(ratio: float) -> str:
    return f"{ratio:.3f}x"


def _speed_columns(phase: str, digits: int) -> list[Column]:
    return [
        Column(f"{phase}_throughput", f"{phase} (token/s)", decimals(digits)),
        Column(f"{phase}_speedup", f"{phase} speedup", _times),
        Column(f"{phase}_speedup_low", f"{phase} from", _times),
        Column(f"{phase}_speedup_high", f"{phase} to", _times),
        Column(f"{phase}_verdict", f"{phase} verdict", dtype="string"),
    ]


COLUMNS = (
    Column("arm", "arm", dtype="string"),
    Column("model", "model", dtype="string"),
    Column("engine", "engine", dtype="string"),
    Column("dtype", "type", dtype="string"),
    Column("quant_bits", "bits", dtype="Int64"),
    Column("runs", "runs", dtype="Int64"),
    *_speed_columns("decode", 3),
    *_speed_columns("prefill", 1),
    *_speed_columns("total", 3),
    Column("step_samples", "steps", dtype="Int64"),
    Column("step_p50_s", "p50 (ms)", _milliseconds),
    Column("step_p95_s", "p95 (ms)", _milliseconds),
    Column("step_p99_s", "p99 (ms)", _milliseconds),
    Column("peak_gpu_bytes", "peak gpu (GiB)", format_gib_exact, "Int64"),
    Column("peak_host_bytes", "peak host (GiB)", format_gib_exact, "Int64"),
    Column("weight_bytes", "stored weights (GiB)", format_gib_exact, "Int64"),
    Column("fraction_of_limit", "of limit", format_percent),
    Column("unsettled_runs", "not settled", dtype="Int64"),
    Column("same_ids", "same tokens", lambda same: "yes" if same else "no", "boolean"),
)
ERROR = Column("error", "error", dtype="string")


def columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return COLUMNS, those of each quality task, and the error's."""
    found = list(COLUMNS)
    for task in dict.fromkeys(task for row in rows for task in row.get("quality", {})):
        found += [
            Column(f"{task}_accuracy", task, decimals(4)),
            Column(f"{task}_stderr", f"{task} se", decimals(4)),
            Column(f"{task}_difference", f"{task} difference", lambda value: f"{value:+.4f}"),
            Column(f"{task}_difference_stderr", f"{task} difference se", decimals(4)),
            Column(f"{task}_verdict", f"{task} verdict", dtype="string"),
        ]
    return [*found, ERROR]


def compact_for_display(
    found: Sequence[Column], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[Column], list[dict[str, Any]]]:
    """Return fewer columns, for a terminal: choices only if arms differ in them, speedups with intervals in one column, total throughput
    only without decode."""
    shown = [dict(row) for row in rows]
    left_out = {"step_samples", "weight_bytes"}
    left_out |= {
        name
        for name in ("model", "engine", "dtype", "quant_bits", "runs")
        if len({row.get(name) for row in shown}) == 1
    }
    if any(row.get("decode_throughput") for row in shown):
        left_out |= {column.name for column in found if column.name.startswith("total_")}
    for phase in PHASES:
        left_out |= {f"{phase}_speedup_low", f"{phase}_speedup_high"}
        for row in shown:
            row[f"{phase}_speedup"] = _ratio(*(row.get(f"{phase}_speedup{end}") for end in ("", "_low", "_high")))
    return [
        replace(column, show=str) if column.name.endswith("_speedup") else column
        for column in found
        if column.name not in left_out
    ], shown


def _ratio(middle: float | None, low: float | None, high: float | None) -> str | None:
    if middle is None or low is None or high is None:
        return None if middle is None else f"{middle:.3f}x"
    return f"{middle:.3f}x ({low:.3f} - {high:.3f})"


def arm_rows(arms: Sequence[Arm], runs: Runs, baseline: str) -> list[dict[str, Any]]:
    """Return one row for each arm: JSON values under the names of `columns`, and `quality`: task -> its summary.

    Throughputs are medians over runs, percentiles over the decode steps of all runs, peaks maxima. An arm with a failed run has `error` and
    no speed.
    """
    summary = _summary(arms, runs, baseline)
    return [_row(arm, runs[arm.name], runs[baseline], summary) for arm in arms]


def _row(
    arm: Arm, of_arm: Sequence[tuple[int, dict]], of_baseline: Sequence[tuple[int, dict]], summary
) -> dict[str, Any]:
    config = arm.config
    row: dict[str, Any] = {
        "arm": arm.name,
        "model": config.model,
        "engine": config.engine,
        "quant_bits": config.quant_bits,
        "runs": len(of_arm),
    }
    failed = next((record for _, record in of_arm if record["status"] != STATUS_OK), None)
    if failed is not None:
        return row | {"error": " ".join(str(failed["error"]).split())}
    records = [record for _, record in of_arm]
    steps = [step for record in records for loop in record["loops"] for step in loop["step_s"]]
    row |= {"dtype": records[0]["dtype"], "step_samples": len(steps)}
    row |= {f"step_p{each}_s": statistics.percentile(steps, each) for each in (50, 95, 99)}
    row |= {
        name: max((record[name] for record in records if record[name] is not None), default=None)
        for name in ("peak_gpu_bytes", "peak_host_bytes", "weight_bytes")
    }
    shares = sorted(
        share for record in records if (share := (record.get("limit") or {}).get("fraction_of_limit")) is not None
    )
    row["fraction_of_limit"] = shares[len(shares) // 2] if shares else None
    row["unsettled_runs"] = sum(record.get("warmed_up") is False for record in records) or None
    ids = {record["output_ids_sha256"] for record in records}
    row["same_ids"] = ids == {record["output_ids_sha256"] for _, record in of_baseline if record["status"] == STATUS_OK}
    mine = summary[summary["architecture"] == arm.name]
    for each in mine.to_dict("records"):
        if each["type"] == SPEED:
            row |= {
                f"{each['config']}_{name}": _plain(each[name])
                for name in ("throughput", "speedup", "speedup_low", "speedup_high", "verdict")
            }
        elif each["type"] == QUALITY:
            names = ("accuracy", "stderr", "accuracy_difference", "accuracy_difference_stderr", "verdict")
            score = {name.removeprefix("accuracy_"): _plain(each[name]) for name in names}
            row.setdefault("quality", {})[each["config"]] = score
            row |= {f"{each['config']}_{short}": value for short, value in score.items()}
    return row


def _summary(arms: Sequence[Arm], runs: Runs, baseline: str):
    rows: list[dict[str, Any]] = []
    for arm in arms:
        if any(record["status"] != STATUS_OK for _, record in runs[arm.name]):
            rows.append({"architecture": arm.name, "type": "failed", "error": "failed"})
            continue
        for number, record in runs[arm.name]:
            run = {"architecture": arm.name, "pass": number}
            rows += [
                run | {"type": SPEED, "config": phase, "throughput": rate}
                for phase in PHASES
                if (rate := record[f"{phase}_throughput"]) is not None
            ]
            rows += [run | row for row in quality_rows(record.get("quality") or {})]
    return summarize(build_frame(rows), baseline)


def _plain(value: Any) -> Any:
    """Return None for nan and for an unbounded end of an interval."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def run_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that the JSON output lists for each run."""
    rates = [f"{phase}_throughput" for phase in ("prefill", "decode", "total")]
    names = ["status", "timestamp", *rates, "warmed_up", "warmup_total_s", "settling_s", "error"]
    return {name: record[name] for name in names if record.get(name) is not None}


def captions(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[str]:
    """Return the lines below the table."""
    lines = [
        f"speedup: median over pairs of runs next to each other, against {baseline} (97% interval, by bootstrap over the "
        "pairs); no difference: the interval contains 1"
    ]
    if any(row["arm"] == baseline and row.get("error") for row in rows):
        lines = [f"no speedup: the baseline {baseline} failed"]
    if any(statistics.TOO_FEW in (row.get("decode_verdict"), row.get("total_verdict")) for row in rows):
        least = statistics.LEAST_PAIRS
        lines.append(f"too few runs: a verdict takes {least} runs of each arm, --rounds {least // 2}")
    few = [row["arm"] for row in rows if 0 < (row.get("step_samples") or 0) < statistics.LEAST_SAMPLES[99]]
    if few:
        lines.append(
            f"no p99 below {statistics.LEAST_SAMPLES[99]} steps: {', '.join(few)}; raise --loops, --gen-len or --rounds"
        )
    unsettled = [row["arm"] for row in rows if row.get("unsettled_runs")]
    if unsettled:
        lines.append(
            f"not settled: runs whose last warm-up loops still differed by 5% or more ({', '.join(unsettled)})"
        )
    if any("quality" in row for row in rows):
        lines.append(
            "difference: of the scores, against the baseline; se: standard errors, added as of independent samples"
        )
    verdicts = {score["verdict"] for row in rows for score in row.get("quality", {}).values()}
    if statistics.TOO_FEW_ITEMS in verdicts:
        lines.append(
            f"too few items: a verdict takes {statistics.LEAST_ITEMS} items of each arm; use more data, "
            "or raise --quality-limit"
        )
    if statistics.NO_ERROR in verdicts:
        lines.append("no standard error: scores of one item, or whose error was not recorded, have no verdict")
    return lines
