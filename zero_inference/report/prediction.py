"""`zero-inference report DIR... --prediction`: measured values compared with predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_inference.report.columns import RunColumn
from zero_inference.report.run import Run, find, in_order, model_in_short
from zero_inference.report.terminal import print_fitted
from zero_inference.utils.tables import print_rows

# Predicted quantity, which is also the name of its column: header, the measured value, `RunColumn.rank`.
QUANTITIES = {
    "load_s": ("load", "load_s", 1),
    "prefill_s": ("prefill", "prefill_latency_s", 0),
    "decode_s": ("decode", "decode_latency_s", 0),
    "peak_host_bytes": ("peak host", "peak_host_bytes", 2),
    "weight_bytes": ("weights", "weight_bytes", 5),
    "peak_gpu_bytes": ("peak GPU", "peak_gpu_bytes", 1),
    "host_to_device_bytes_per_step": ("step: to GPU", "transfers.host_to_device_bytes_per_step", 3),
    "device_to_host_bytes_per_step": ("step: from GPU", "transfers.device_to_host_bytes_per_step", 4),
    "disk_read_bytes_per_step": ("step: disk", "transfers.disk_read_bytes_per_step", 4),
    "cores_bytes_per_step": ("step: CPU", "transfers.cores_bytes_per_step", 4),
}
CAPTION = "+10%: 10% more than predicted, of time, peak memory, or bytes per decode step"
SUMMARY = {"median": 0.5, "10th percentile": 0.1, "90th percentile": 0.9}


def _signed_percent(value: float) -> str:
    return f"{100 * value:+.1f}%".replace("-0.0%", "+0.0%")


COLUMNS = (
    RunColumn("model", "model", dtype="string"),
    RunColumn("engine", "engine", dtype="string", rank=2),
    *(RunColumn(name, header, _signed_percent, rank=rank) for name, (header, _, rank) in QUANTITIES.items()),
    RunColumn("folder", "folder", dtype="string", rank=6),
    RunColumn("file", "file", dtype="string", rank=3),
)


def prediction_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each run with a prediction: measured / predicted - 1 by quantity, None where one of the two is unknown."""
    rows = []
    for run in runs:
        if run.measured.predicted is not None:
            row = {"model": run.request.model, "engine": run.request.engine, "folder": run.folder, "file": run.file}
            for name, (_, path, _) in QUANTITIES.items():
                predicted, measured = getattr(run.measured.predicted, name), find(run.measured, path)
                row[name] = measured / predicted - 1 if predicted and measured is not None else None
            rows.append(row)
    return rows


def summary_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distribution of each quantity over `rows`: median, 10th and 90th percentile, and the value farthest from zero."""
    import numpy as np

    found: list[dict[str, Any]] = [{"model": name} for name in (*SUMMARY, "largest")]
    for name in QUANTITIES:
        if errors := [row[name] for row in rows if row[name] is not None]:
            values = [*np.quantile(errors, list(SUMMARY.values())).tolist(), max(errors, key=abs)]
            for row, value in zip(found, values):
                row[name] = value
    return found


def within_in_words(runs: Sequence[Run]) -> str | None:
    """Return a text such as "within the predicted range: load 9 of 10, prefill 9 of 10, decode 8 of 10"; None where no range is known."""
    parts = []
    for phase, path in (("load", "load_s"), ("prefill", "prefill_latency_s"), ("decode", "decode_latency_s")):
        both = [(find(run.measured, path), find(run.measured.predicted, f"{phase}_range_s")) for run in runs]
        known = [
            ends[0] <= time_s <= ends[1] for time_s, ends in both if time_s is not None and ends and len(ends) == 2
        ]
        parts += [f"{phase} {sum(known)} of {len(known)}"] if known else []
    return f"within the predicted range: {', '.join(parts)}" if parts else None


def print_predictions(runs: Sequence[Run], format: str) -> bool:
    """Print the rows, in `table` and `md` with their distribution; return False if no run has a prediction."""
    rows = prediction_rows(in_order(runs) if format == "table" else runs)
    if not rows:
        return False
    several = len({row["folder"] for row in rows}) > 1
    known = [column for column in COLUMNS if any(column.value(row) is not None for row in rows)]
    columns = [column for column in known if several or column.name != "folder"]
    if format in ("table", "md"):
        rows += summary_rows(rows)
    if format != "table":
        print_rows(rows, columns, format)
        return True
    print(CAPTION)
    short = [row | {"model": model_in_short(row["model"] or "model unknown")} for row in rows]
    print_fitted(columns, short, "--format md shows all")
    if line := within_in_words(runs):
        print(line, flush=True)
    return True
