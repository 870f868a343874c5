"""Fills page.html: one self-contained file."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.errors import UsageError
from zero_inference.report.html import figures, summary
from zero_inference.report.html.labels import make_runs
from zero_inference.report.run import Run, clean
from zero_inference.utils.files import write_atomically

FINDINGS_AT_ONCE = 6
SHORT_TEXT = 32  # is not broken in the table
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A row for each record: `texts[row][column]` is shown, `values[row][column]` (a number, a text or None) sorts. `in_order`: the rows
    are in that of `run.in_order`."""

    headers: list[str]
    numeric: list[bool]
    texts: list[list[str]]
    values: list[list[Any]]
    in_order: bool


def write_page(path: Path, source: str, runs: list[Run], table: Table) -> None:
    """Write the page about `runs`, which came from the folder `source`.

    Raises:
        UsageError: the file cannot be written.
    """
    page = render_page(source, runs, table)
    try:
        with write_atomically(path) as file:
            file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written ({error.strerror}); name a file in a folder that can be written."
        ) from error


def render_page(source: str, runs: list[Run], table: Table) -> str:
    """The page as text. All text from records is escaped, by Jinja in the page and by the XML writers in the drawings."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    runs = make_runs(runs)
    found = summary.findings(runs)
    subjects = figures.all_figures(runs)
    leading = [drawing for drawing in subjects[0] if not drawing.folded][:1] if subjects and found else []
    return template.render(
        source=clean(source),
        name=clean(_name(source)),
        short_text=SHORT_TEXT,
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        # Only this script may run, whatever a record holds, and nothing is fetched.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        counted=summary.counted(runs) if runs else "",
        leading=leading,
        lead=found[:1],
        findings=found[1:FINDINGS_AT_ONCE],
        more_findings=found[FINDINGS_AT_ONCE:],
        machines=_machines(runs),
        times=_times(runs),
        headers=list(zip(map(clean, table.headers), table.numeric)),
        scores=_scores(runs),
        in_order=table.in_order,
        rows=_rows(runs, table),
        subjects=[rest for each in subjects if (rest := [drawing for drawing in each if drawing not in leading])],
        failed=[
            (run.number, ", ".join(filter(None, (run.setting, run.rest))), run.error) for run in runs if run.failed
        ],
    )


def _name(source: str) -> str:
    """The folders by the last parts of their paths."""
    names = [part.rstrip("/").rpartition("/")[2] or part for part in source.split(", ")]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _rows(runs: list[Run], table: Table) -> list[dict[str, Any]]:
    """Cells as (text, value to sort by)."""
    metrics = _scores(runs)
    rows = []
    for run, texts, values in zip(runs, table.texts, table.values):
        cells = [(clean(text), clean(value) if isinstance(value, str) else value) for text, value in zip(texts, values)]
        scores = {score.metric: score for score in run.quality}
        quality = [
            (scores[metric].text, scores[metric].value) if metric in scores else ("-", None) for metric in metrics
        ]
        rows.append({"number": run.number, "failed": run.failed, "cells": cells, "quality": quality})
    return rows


def _scores(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(score.metric for run in runs for score in run.quality))


def _machines(runs: list[Run]) -> str:
    counts = Counter(
        run.gpus or ("no GPU" if run.record.result.environment else "machine not recorded") for run in runs
    )
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{name} ({count} run{'s' * (count != 1)})" for name, count in counts.most_common(6))


def _times(runs: list[Run]) -> str:
    days = sorted(time[:10] for run in runs if (time := run.request.timestamp))
    return "" if not days else days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
