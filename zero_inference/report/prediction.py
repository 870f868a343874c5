"""`zero-inference report DIR... --prediction`: measured values compared with predictions."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_inference.records.schema import Measured
from zero_inference.report.columns import fitted
from zero_inference.report.run import Run
from zero_inference.report.runs import in_order
from zero_inference.report.terminal import cut, hidden_in_words, table_lines, terminal_width
from zero_inference.utils.tables import Column, print_rows

# Name of a column, which is also the predicted attribute: its header and the measured value.
QUANTITIES: dict[str, tuple[str, Callable[[Measured], float | None]]] = {
    "load_s": ("loading", lambda measured: measured.load_s),
    "prefill_s": ("prefill", lambda measured: measured.prefill_latency_s),
    "decode_s": ("decode", lambda measured: measured.decode_latency_s),
    "peak_host_bytes": ("peak host memory", lambda measured: measured.peak_host_bytes),
    "weight_bytes": ("stored weights", lambda measured: measured.weight_bytes),
    "peak_gpu_bytes": ("peak gpu memory", lambda measured: measured.peak_gpu_bytes),
    "host_to_device_bytes_per_step": (
        "to the device a step",
        lambda measured: measured.transfers.host_to_device_bytes_per_step,
    ),
    "device_to_host_bytes_per_step": (
        "from the device a step",
        lambda measured: measured.transfers.device_to_host_bytes_per_step,
    ),
    "disk_read_bytes_per_step": ("from disk a step", lambda measured: measured.transfers.disk_read_bytes_per_step),
    "cores_bytes_per_step": ("read by the cores a step", lambda measured: measured.transfers.cores_bytes_per_step),
}
# In the terminal: a short header, and `Column.rank`.
SHORT_HEADERS = {
    "decode_s": ("decode", 0),
    "prefill_s": ("prefill", 0),
    "load_s": ("load", 1),
    "peak_gpu_bytes": ("peak\nGPU", 1),
    "peak_host_bytes": ("peak\nhost", 2),
    "weight_bytes": ("stored\nweights", 3),
    "host_to_device_bytes_per_step": ("step:\nto GPU", 3),
    "device_to_host_bytes_per_step": ("step:\nfrom GPU", 4),
    "disk_read_bytes_per_step": ("step:\ndisk", 4),
    "cores_bytes_per_step": ("step:\ncores", 4),
}
RANGED = ("load_s", "prefill_s", "decode_s")  # predicted with a range
EXACT = "0%"
CAPTION = "+10%: 10% more than the plan predicted, of time (load, prefill, decode), peak memory, bytes per step"
SUMMARY = {"median": 0.5, "10th percentile": 0.1, "90th percentile": 0.9}


def _signed_percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


COLUMNS = (
    Column("model", "model", dtype="string"),
    Column("engine", "engine", dtype="string"),
    *(Column(name, header, _signed_percent) for name, (header, _) in QUANTITIES.items()),
    Column("folder", "folder", dtype="string"),
    Column("file", "file", dtype="string"),
)


def _predicted_and_measured(run: Run, name: str) -> tuple[float | None, float | None]:
    return getattr(run.predicted, name), QUANTITIES[name][1](run.measured)


def is_within_range(run: Run, name: str) -> bool | None:
    """Return whether a time of `RANGED` was within its predicted range; None where one of the two is unknown."""
    _, measured = _predicted_and_measured(run, name)
    ends = getattr(run.predicted, f"{name.removesuffix('_s')}_range_s")
    return None if measured is None or ends is None or len(ends) != 2 else ends[0] <= measured <= ends[1]


def within_in_words(runs: Sequence[Run]) -> str | None:
    """Return such as "within the predicted range: loading 9 of 10, prefill 9 of 10, decode 8 of 10"; None where no range is known."""
    parts = []
    for name in RANGED:
        known = [found for run in runs if (found := is_within_range(run, name)) is not None]
        parts += [f"{QUANTITIES[name][0]} {sum(known)} of {len(known)}"] if known else []
    return f"within the predicted range: {', '.join(parts)}" if parts else None


def prediction_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each run with a prediction: measured / predicted - 1 by quantity, None where one of the two is unknown.

    `run` is the run, which no format prints.
    """
    rows = []
    for run in runs:
        if run.measured.predicted is None:
            continue
        asked = run.request
        row = {"run": run, "model": asked.model, "engine": asked.engine, "folder": run.folder, "file": run.file}
        for name in QUANTITIES:
            predicted, measured = _predicted_and_measured(run, name)
            row[name] = measured / predicted - 1 if predicted and measured is not None else None
        rows.append(row)
    return rows


def summary_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distribution of each quantity over `rows`: median, 10th and 90th percentile, and the value farthest from zero."""
    import numpy as np

    found: list[dict[str, Any]] = [{"model": name} for name in (*SUMMARY, "largest")]
    for name in QUANTITIES:
        errors = [row[name] for row in rows if row[name] is not None]
        if errors:
            values = [*np.quantile(errors, list(SUMMARY.values())).tolist(), max(errors, key=abs)]
            for row, value in zip(found, values):
                row[name] = value
    return found


NOTHING_ELSE = (
    "No times and no memory were predicted for these runs, because their machine had not been measured before: zero-inference link --save "
    "does that once."
)


def print_predictions(runs: Sequence[Run], format: str) -> bool:
    """Print the rows, in `table` and `md` with their distribution; return False if no run has a prediction."""
    rows = prediction_rows(in_order(runs) if format == "table" else runs)
    if not rows:
        return False
    if format == "table":
        print(prediction_table(rows, sys.stdout.isatty(), terminal_width()), end="", flush=True)
        return True
    several = len({row["folder"] for row in rows}) > 1
    shown = [
        each
        for each in COLUMNS
        if (each.name not in QUANTITIES or any(row[each.name] is not None for row in rows))
        and (each.name != "folder" or several)
    ]
    print_rows(rows + (summary_rows(rows) if format == "md" else []), shown, format)
    return True


def prediction_table(rows: list[dict[str, Any]], colour: bool, width: int) -> str:
    """Return `rows` and their distribution as lines at most `width` wide, with the quantities that were predicted exactly named below."""
    texts = {name: [_short_percent(row[name]) for row in rows] for name in SHORT_HEADERS}
    known = {name: set(found) - {None} for name, found in texts.items()}
    exact = [QUANTITIES[name][0] for name, found in known.items() if found == {EXACT}]
    figures = [
        fitted(header, _figure(name), rank)
        for name, (header, rank) in SHORT_HEADERS.items()
        if known[name] and QUANTITIES[name][0] not in exact
    ]
    if not figures:
        said = f"as predicted in all {len(rows)} runs: {', '.join(exact)}. " if exact else ""
        return "\n".join([*textwrap.wrap(f"{said}{NOTHING_ELSE}", width, break_on_hyphens=False), ""])
    of_runs = [
        fitted("model", lambda row: row["run"].short_model if "run" in row else row["model"], 0, False, longest=18),
        fitted("engine", _of_run(lambda run: run.request.engine), 2, False, longest=12),
        fitted("bits", _of_run(lambda run: run.weights if run.request.quant_bits else None), 2, False),
        fitted("batch", _of_run(lambda run: run.request.batch_size), 2),
        fitted("file", _of_run(lambda run: run.file), 5, False, longest=48, least=16),
    ]
    summary = summary_rows(rows) if len(rows) > 1 else []
    headings = [None] * len(rows) + [f"of {len(rows)} runs"] * len(summary)
    lines, hidden = table_lines([*of_runs[:-1], *figures, of_runs[-1]], [*rows, *summary], width, colour, headings)
    lines = [*textwrap.wrap(CAPTION, width), *lines]
    if exact:
        lines.append(cut(f"as predicted in all runs: {', '.join(exact)}", width))
    if line := within_in_words([row["run"] for row in rows]):
        lines.append(cut(line, width))
    return "".join(f"{line}\n" for line in [*lines, *hidden_in_words(hidden, "--format md shows all", width)])


def _figure(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda row: _short_percent(row.get(name))


def _of_run(of: Callable[[Run], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return what reads a row of a run, and gives None for rows of the summary."""
    return lambda row: of(row["run"]) if "run" in row else None


def _short_percent(value: float | None) -> str | None:
    """Return a signed percentage with one decimal, and none from 100% on."""
    if value is None:
        return None
    text = _signed_percent(value) if abs(value) < 0.9995 else f"{100 * value:+.0f}%"
    return EXACT if text in ("+0.0%", "-0.0%") else text
