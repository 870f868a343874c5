"""`zero-inference report DIR... --prediction`: measured values beside the plans' predictions."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_inference.records.read import value_at
from zero_inference.report.layout import Shown, cut, hidden_in_words, table_lines
from zero_inference.report.run import Run, in_order
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows

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
# In the terminal: a short header, and the rank as in `layout.Shown`.
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
RANGED = {
    name: f"{name.removesuffix('_s')}_range_s" for name in ("load_s", "prefill_s", "decode_s")
}  # keys of `predicted`
EXACT = "0%"
CAPTION = "+10%: 10% more than the plan predicted, of time (load, prefill, decode), peak memory, bytes per step"
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


def within_range(record: Mapping[str, Any], name: str) -> bool | None:
    """Return whether a measured time, a key of `RANGED`, was within its predicted range; None where one of the two is not known."""
    _, _, found = QUANTITIES[name]
    measured, said = value_at(record, found, "Float64"), record.get("predicted")
    ends = said.get(RANGED[name]) if isinstance(said, dict) else None
    if measured is None or not isinstance(ends, list) or len(ends) != 2:
        return None
    if not all(isinstance(end, (int, float)) for end in ends):
        return None
    return ends[0] <= measured <= ends[1]


def within_in_words(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return such as "within the predicted range: loading 9 of 10, prefill 9 of 10, decode 8 of 10"; None where no range is known."""
    parts = []
    for name in RANGED:
        known = [found for record in records if (found := within_range(record, name)) is not None]
        parts += [f"{QUANTITIES[name][0]} {sum(known)} of {len(known)}"] if known else []
    return f"within the predicted range: {', '.join(parts)}" if parts else None


def prediction_rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each record of a run that says what was predicted: by how much more was measured, as shares of the prediction; None where
    nothing was predicted and measured. `run` is the record as a `Run`, which no format prints."""
    rows = []
    for record in records:
        if not isinstance(record.get("predicted"), dict):
            continue
        row: dict[str, Any] = {name: value_at(record, name, "string") for name in ("model", "engine", "folder", "file")}
        row["run"] = Run(0, record)
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


NOTHING_ELSE = (
    "No times and no memory were predicted for these runs, because their machine had not been measured before: zero-inference link --save "
    "does that once."
)


def print_predictions(records: Sequence[dict[str, Any]], format: str) -> bool:
    """Print the rows, followed by their distribution where people read them; false where no record has a prediction."""
    if format == "table":
        records = [records[index] for index in in_order(records)]
    rows = prediction_rows(records)
    if not rows:
        return False
    if format == "table":
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
        print(prediction_table(rows, terminal, width), end="", flush=True)
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
    """`rows` and their distribution as lines at most `width` wide. Quantities that the plans said exactly are named below."""
    texts = {name: [_short_percent(row[name]) for row in rows] for name in SHORT_HEADERS}
    known = {name: set(found) - {None} for name, found in texts.items()}
    exact = [QUANTITIES[name][0] for name, found in known.items() if found == {EXACT}]
    figures = [
        Shown(header, _figure(name), rank)
        for name, (header, rank) in SHORT_HEADERS.items()
        if known[name] and QUANTITIES[name][0] not in exact
    ]
    if not figures:
        said = f"as predicted in all {len(rows)} runs: {', '.join(exact)}. " if exact else ""
        return "\n".join([*textwrap.wrap(f"{said}{NOTHING_ELSE}", width, break_on_hyphens=False), ""])
    runs = [
        Shown(
            "model",
            lambda row: row["model"] if "run" not in row else row["run"].short_model,
            0,
            longest=18,
            right=False,
        ),
        Shown("engine", _of_run(lambda run: run.text("engine")), 2, longest=12, right=False),
        Shown("bits", _of_run(lambda run: run.weights if run.whole("quant_bits") else None), 2, right=False),
        Shown("batch", _of_run(lambda run: None if (batch := run.whole("batch_size")) is None else str(batch)), 2),
        Shown("file", _of_run(lambda run: run.text("file")), 5, longest=48, least=16, right=False),
    ]
    summary = summary_rows(rows) if len(rows) > 1 else []
    headings = [None] * len(rows) + [f"of {len(rows)} runs"] * len(summary)
    lines, hidden = table_lines([*runs[:-1], *figures, runs[-1]], [*rows, *summary], width, colour, headings)
    lines = [*textwrap.wrap(CAPTION, width), *lines]
    if exact:
        lines.append(cut(f"as predicted in all runs: {', '.join(exact)}", width))
    if line := within_in_words([row["run"].record for row in rows]):
        lines.append(cut(line, width))
    return "".join(f"{line}\n" for line in [*lines, *hidden_in_words(hidden, "--format md shows all", width)])


def _figure(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda row: _short_percent(row.get(name))


def _of_run(of: Callable[[Run], str | None]) -> Callable[[Mapping[str, Any]], str | None]:
    """For rows of which some are of a run."""
    return lambda row: of(row["run"]) if "run" in row else None


def _short_percent(value: float | None) -> str | None:
    """One decimal, and none from 100% on."""
    if value is None:
        return None
    text = _signed_percent(value) if abs(value) < 0.9995 else f"{100 * value:+.0f}%"
    return EXACT if text in ("+0.0%", "-0.0%") else text
