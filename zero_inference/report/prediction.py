"""`zero-inference report DIR... --prediction`: measured values beside the plans' predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zero_inference.records.read import value_at
from zero_inference.runtime.tables import Column, print_rows

# Name of a column: its header, the key that was predicted, and the one that was measured.
QUANTITIES = {
    "load_s": ("loading", "load_s", "load_s"),
    "prefill_s": ("prefill", "prefill_s", "prefill_latency_s"),
    "decode_s": ("decode", "decode_s", "decode_latency_s"),
    "peak_host_bytes": ("peak host memory", "peak_host_bytes", "peak_host_bytes"),
    "weight_bytes": ("stored weights", "weight_bytes", "weight_bytes"),
    "peak_gpu_bytes": ("peak gpu memory", "peak_gpu_bytes", "peak_gpu_bytes"),
    **{
        f"{name}_bytes_per_step": (header, f"{name}_bytes_per_step", f"transfers.{name}_bytes_per_step")
        for name, header in (
            ("host_to_device", "to the device a step"),
            ("device_to_host", "from the device a step"),
            ("disk_read", "from disk a step"),
            ("cores", "read by the cores a step"),
        )
    },
}
SUMMARY = {"median": 0.5, "10th percentile": 0.1, "90th percentile": 0.9}


def _signed_percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


COLUMNS = (
    Column("model", "model", dtype="string"),
    Column("engine", "engine", dtype="string"),
    *(Column(name, header, _signed_percent) for name, (header, _, _) in QUANTITIES.items()),
    Column("folder", "folder", dtype="string"),
    Column("file", "file", dtype="string"),
)


def _said_and_found(record: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    _, said, found = QUANTITIES[name]
    return value_at(record, f"predicted.{said}", "Float64"), value_at(record, found, "Float64")


def time_over_predicted(record: Mapping[str, Any], name: str) -> float | None:
    """A measured latency as a multiple of the predicted one; `name` is prefill_s or decode_s. None where one of the two is not known
    or not above 0, as in a decode of no step."""
    predicted, measured = _said_and_found(record, name)
    return measured / predicted if predicted and measured and predicted > 0 and measured > 0 else None


def prediction_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each record of a run that says what was predicted: by how much more was measured, as shares of the prediction; None where
    nothing was predicted and measured."""
    rows = []
    for record in records:
        if not isinstance(record.get("predicted"), dict):
            continue
        row = {name: value_at(record, name, "string") for name in ("model", "engine", "folder", "file")}
        for name in QUANTITIES:
            predicted, measured = _said_and_found(record, name)
            row[name] = measured / predicted - 1 if predicted and measured is not None else None
        rows.append(row)
    return rows


def summary_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The distribution of each quantity over `rows`: median, 10th and 90th percentile, and the value farthest from zero."""
    import pandas

    found: list[dict[str, Any]] = [{"model": name} for name in (*SUMMARY, "largest")]
    for name in QUANTITIES:
        errors = pandas.Series([row[name] for row in rows], dtype="Float64").dropna()
        if errors.empty:
            continue
        for row, share in zip(found, SUMMARY.values()):
            row[name] = float(errors.quantile(share))
        found[-1][name] = float(errors[errors.abs().idxmax()])
    return found


def print_predictions(records: Iterable[dict[str, Any]], format: str) -> bool:
    """Print the rows, in a table followed by their distribution; false where no record has a prediction."""
    rows = prediction_rows(records)
    if not rows:
        return False
    several = len({row["folder"] for row in rows}) > 1
    shown = [
        each
        for each in COLUMNS
        if (each.name not in QUANTITIES or any(row[each.name] is not None for row in rows))
        and (each.name != "folder" or several)
    ]
    more = summary_rows(rows) if format in ("table", "md") else []
    print_rows(rows + more, shown, format)
    return True
