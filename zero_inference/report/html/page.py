"""Fills page.html with runs and figures: one self-contained file."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.report.columns import COLUMNS, differing_columns
from zero_inference.report.results import faster_in_words, limit_in_words
from zero_inference.report.run import Run, grouped
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import one_line, three_digits

FOLDER = Path(__file__).parent


def write_page(path: Path, source: str, runs: Sequence[Run], all_columns: bool) -> None:
    """Write the page about labelled `runs`, which were read from the folders `source`.

    Raises:
        UsageError: the file cannot be written.
    """
    page = render_page(source, runs, all_columns)
    try:
        with write_atomically(path) as file:
            file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written ({error.strerror}); name a file in another folder."
        ) from error


def render_page(source: str, runs: Sequence[Run], all_columns: bool) -> str:
    """Return the page. All text from records is escaped: by Jinja in the page, by matplotlib in the drawings."""
    from jinja2 import Environment, StrictUndefined

    from zero_inference.report.html.figures import all_figures

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    columns = COLUMNS if all_columns else differing_columns(runs, for_people=True)
    return template.render(
        source=one_line(source),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        # Only this script may run, whatever a record holds, and nothing is fetched.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        counted=_count_in_words(runs),
        findings=findings(runs),
        figures=all_figures(runs),
        columns=columns,
        rows=[
            (run, [(one_line(column.text(run)), _sort_value(column.value(run))) for column in columns]) for run in runs
        ],
        failed=[(run, one_line(run.record.error or "no error was recorded")) for run in runs if run.failed],
    )


def _sort_value(value: object) -> object:
    return one_line(value) if isinstance(value, str) else value


def _count_in_words(runs: Sequence[Run]) -> str:
    gpus = Counter(run.gpus or "no GPU known" for run in runs)
    return "; ".join([
        f"{len(runs)} runs of {len({run.model for run in runs})} models, {sum(run.failed for run in runs)} failed",
        *(f"{name} ({count} runs)" for name, count in gpus.most_common(6)),
    ])  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """The fastest run of one model and lengths.

    Attributes:
        group: model and lengths.
        throughput: token/s and the phase.
        detail: those that are as fast, or the next setting; share of the roofline; what would be faster.
    """

    group: str
    run: Run
    throughput: str
    detail: list[str]


def findings(runs: Sequence[Run]) -> list[Finding]:
    """Return one for each group with a throughput, those with the most runs first."""
    groups = sorted(grouped(runs, lambda run: run.group).values(), key=len, reverse=True)
    return [finding for group in groups if (finding := _finding(group)) is not None]


def _decode_rate(run: Run) -> float | None:
    return run.decode_throughput


def _total_rate(run: Run) -> float | None:
    return None if run.failed else run.measured.total_throughput


def _finding(runs: list[Run]) -> Finding | None:
    phase, rate = ("decode", _decode_rate) if any(map(_decode_rate, runs)) else ("total", _total_rate)
    ranked = sorted((run for run in runs if rate(run)), key=rate, reverse=True)
    if not ranked:
        return None
    best = ranked[0]
    others = [alike[0] for name, alike in grouped(ranked, _named).items() if name != _named(best)]
    equal = [run for run in others if _within_spread(best, run, rate, f"{phase}_s")]
    detail = []
    if equal:
        names = ", ".join(f"{_named(run)}: {three_digits(rate(run))}" for run in equal[:3])
        detail.append(f"not distinguishable by the spread of their loops: {names}{' and more' * (len(equal) > 3)}")
    elif others:
        ratio = rate(best) / rate(others[0])
        detail.append(f"{ratio:.2f} times the next ({_named(others[0])}: {three_digits(rate(others[0]))})")
    detail.append(limit_in_words(best.measured.limit, best.measured.transfers, best.measured.device != "cpu"))
    detail.append(faster_in_words(best.request, best.measured))
    throughput = f"{three_digits(rate(best))} token/s in {phase}"
    return Finding(best.group, best, throughput, [one_line(each) for each in detail if each])


def _within_spread(best: Run, other: Run, rate: Callable[[Run], float], key: str) -> bool:
    """Return whether two throughputs differ by no more than the ranges of both runs' loops together.

    A run of one loop is assumed to spread as the other. The ranges' sum, not their overlap: the ranges of two times two equal loops
    miss each other once in three.
    """
    known = [spread for run in (best, other) if (spread := run.loop_spread(key)) is not None]
    if not known:
        return False
    return rate(best) - rate(other) <= known[0] * rate(best) + known[-1] * rate(other)


def _named(run: Run) -> str:
    return f"{run.setting}, batch {run.request.batch_size}"
