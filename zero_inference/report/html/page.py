"""Fills page.html with runs and figures: one self-contained file."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.errors import UsageError
from zero_inference.report.html import summary
from zero_inference.report.run import OF_SPEED, Run, clean, differing_options
from zero_inference.utils.files import write_atomically

SHORT_TEXT = 32  # characters that the table does not break
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A row for each run: `texts[row][column]` is shown, `values[row][column]` (a number, a text or None) sorts.

    in_order: the rows are in the order of `runs.in_order`.
    """

    headers: list[str]
    numeric: list[bool]
    texts: list[list[str]]
    values: list[list[Any]]
    in_order: bool


def write_page(path: Path, source: str, runs: list[Run], table: Table) -> None:
    """Write the page about `runs`, which were read from the folders `source`.

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
    """Return the page. All text from records is escaped: by Jinja in the page, by ElementTree in the drawings."""
    from jinja2 import Environment, StrictUndefined

    from zero_inference.report.html.figures import all_figures

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    runs = label_runs(runs)
    figures = all_figures(runs)
    scores = list(dict.fromkeys(score.metric for run in runs for score in run.quality))
    return template.render(
        source=clean(source),
        name=clean(_last_parts(source)),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        # Only this script may run, whatever a record holds, and nothing is fetched.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        counted=summary.count_in_words(runs),
        machines=_machines(runs),
        days=_days(runs),
        findings=summary.findings(runs),
        figures=figures,
        headers=list(zip(map(clean, table.headers), table.numeric)) + [(score, True) for score in scores],
        in_order=table.in_order,
        rows=[(run, _cells(run, texts, values, scores)) for run, texts, values in zip(runs, table.texts, table.values)],
        short_text=SHORT_TEXT,
        failed=[run for run in runs if run.failed],
    )


def label_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs numbered in their order; `rest` and `options` of each distinguish it from the others."""
    several_gpus = len({name for run in runs for name in run.gpu_names}) > 1
    several_models = len({run.model for run in runs}) > 1
    differing = {
        key: words
        for key, words in (("batch_size", "batch {}"), ("prompt_len", "prompt {}"), ("gen_len", "{} generated"))
        if len({getattr(run.request, key) for run in runs}) > 1
    }
    labelled = []
    for number, run in enumerate(runs, start=1):
        known = {words: getattr(run.request, key) for key, words in differing.items()}
        rest = [words.format(value) for words, value in known.items() if value is not None]
        rest = [run.short_model] * several_models + rest
        labelled.append(dataclasses.replace(run, number=number, several_gpus=several_gpus, rest=", ".join(rest)))
    alike: dict[tuple, list[Run]] = {}
    for run in labelled:
        alike.setdefault((run.group, run.setting), []).append(run)
    options: dict[int, list[str]] = {}  # that set the speed and differ between runs of one model, length and setting
    for runs_alike in alike.values():
        for name, values in differing_options(runs_alike).items():
            for run, value in zip(runs_alike, values):
                if name in OF_SPEED and value is not None:
                    options.setdefault(run.number, []).append(clean(f"{name} {value}"))
    return [dataclasses.replace(run, options=tuple(options.get(run.number, ()))) for run in labelled]


def _cells(run: Run, texts: list[str], values: list[Any], scores: list[str]) -> list[tuple[str, Any]]:
    """Return (text, value to sort by) of a row of the table."""
    cells = [(clean(text), clean(value) if isinstance(value, str) else value) for text, value in zip(texts, values)]
    found = {score.metric: (score.text, score.value) for score in run.quality}
    return cells + [found.get(score, ("-", None)) for score in scores]


def _last_parts(source: str) -> str:
    names = [folder.rstrip("/").rpartition("/")[2] or folder for folder in source.split(", ")]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _machines(runs: list[Run]) -> str:
    counts = Counter(
        run.gpus or ("no GPU" if run.record.result.environment else "machine not recorded") for run in runs
    )
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{name} ({count} run{'s' * (count != 1)})" for name, count in counts.most_common(6))


def _days(runs: list[Run]) -> str:
    days = sorted(time[:10] for run in runs if (time := run.request.timestamp))
    return "" if not days else days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
