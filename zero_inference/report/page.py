"""The page of runs: fills page.html with findings, figures and the table; one self-contained file.

Matplotlib and not Plotly, whose script alone is megabytes: a figure is a small SVG that prints and needs no script.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import statistics
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from zero_inference.errors import UsageError
from zero_inference.records.hardware import HOST_COPY, RATE_WORDS
from zero_inference.report.columns import COLUMNS, SCORES, differing_columns
from zero_inference.report.results import faster_in_words, gpus_in_words, limit_in_words
from zero_inference.report.run import Run, find, grouped, positive
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import GIB, one_line, shorten_middle, significant, three_digits

FOLDER = Path(__file__).parent
WIDTH = 330  # points; on a phone of 390 pixels a point is a little more than a pixel
LINE, BAR = 13, 20  # points: a line of text, the bar below it
LETTERS = 52  # that fit into `WIDTH`
MAX_ROWS = 24  # of a figure, so that a page of paper holds it; the table has all runs
MAX_FIGURES, MAX_LINES = 6, 12  # of a kind; of a figure
# Figures are drawn in these colours, which become the variables of page.css: a light and a dark value each.
INK, MUTED, GRID = "#000101", "#000102", "#000103"
SERIES = tuple(f"#00020{number}" for number in range(1, 7))
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid"} | {colour: f"series-{colour[-1]}" for colour in SERIES}
MARKERS = "os^DvP"
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, selectable, searchable
    "svg.hashsalt": "zero-inference",
    "text.parse_math": False,  # a $ in a model's name is a $
    "font.size": 10.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def write_page(path: Path, source: str, runs: Sequence[Run], all_columns: bool) -> None:
    """Write the page about labelled `runs`, which were read from the folders `source`.

    Raises:
        UsageError: the file cannot be written.
    """
    page = _render_page(source, runs, all_columns)
    try:
        with write_atomically(path) as file:
            file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written ({error.strerror}); name a file in another folder."
        ) from error


def _render_page(source: str, runs: Sequence[Run], all_columns: bool) -> str:
    """Return the page. All text from records is escaped: by Jinja in the page, by matplotlib in the drawings."""
    template, style, script = ((FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    columns = COLUMNS if all_columns else differing_columns(runs, for_people=True)
    rows = []
    for run in runs:
        values = [column.value(run) for column in columns]
        values = [one_line(value) if isinstance(value, str) else value for value in values]
        rows.append((run, list(zip((one_line(column.text(run)) for column in columns), values))))
    gpus = Counter(run.gpus or "no GPU known" for run in runs)
    counted = [
        f"{len(runs)} runs of {len({run.model for run in runs})} models, {sum(run.failed for run in runs)} failed"
    ]
    counted += [f"{name} ({count} runs)" for name, count in gpus.most_common(6)]
    return environment.from_string(template).render(
        source=one_line(source),
        style=style,
        script=script,
        # Only this script may run, whatever a record holds, and nothing is fetched.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        counted="; ".join(counted),
        findings=_findings(runs),
        figures=_all_figures(runs),
        columns=columns,
        rows=rows,
        failed=[(run, one_line(run.record.error or "no error was recorded")) for run in runs if run.failed],
    )


# Findings: the fastest run of each model and lengths.


def _findings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a finding for each group with a throughput, those with the most runs first.

    Its `detail` has runs that are as fast, or the next setting; the fraction of the roofline; what would be faster.
    """
    found = []
    for group in sorted(grouped(runs, attrgetter("group")).values(), key=len, reverse=True):
        phase = "decode" if any(run.decode_throughput for run in group) else "total"
        rate = attrgetter(f"{phase}_throughput")
        ranked = sorted(filter(rate, group), key=rate, reverse=True)
        if not ranked:
            continue
        best, *others = (alike[0] for alike in grouped(ranked, _setting_and_batch).values())
        named = [f"{_setting_and_batch(run)}: {three_digits(rate(run))}" for run in others]
        equal = [name for run, name in zip(others, named) if _within_spread(best, run, phase)]
        detail = [
            limit_in_words(best.measured),
            faster_in_words(best.request, best.measured),
            *gpus_in_words(best.measured),
        ]
        if equal:
            more = " and more" * (len(equal) > 3)
            detail.insert(0, f"not distinguishable by the spread of their loops: {', '.join(equal[:3])}{more}")
        elif others:
            detail.insert(0, f"{rate(best) / rate(others[0]):.2f} times the next ({named[0]})")
        found.append({
            "group": best.group,
            "run": best,
            "throughput": f"{three_digits(rate(best))} token/s in {phase}",
            "detail": [one_line(each) for each in detail if each],
        })  # fmt: skip
    return found


def _setting_and_batch(run: Run) -> str:
    return f"{run.setting}, batch {run.request.batch_size}"


def _within_spread(best: Run, other: Run, phase: str) -> bool:
    """Return whether two throughputs differ by no more than the ranges of both runs' loops together.

    A run of one loop is assumed to spread as the other. The ranges' sum, not their overlap: the ranges of two times two equal loops
    miss each other once in three.
    """
    fast, slow = (getattr(run, f"{phase}_throughput") for run in (best, other))
    known = [spread for run in (best, other) if (spread := run.loop_spread(f"{phase}_s")) is not None]
    return bool(known) and fast - slow <= known[0] * fast + known[-1] * slow


# Figures: a function each takes the runs and yields its figures, none where no run has the data.


@dataclass(frozen=True)
class Plot:
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Row:
    """A bar with its texts left and right above it."""

    label: str
    text: str
    value: float
    limit: float = math.nan  # where an upright line stands
    error: float = 0.0  # length of an error bar to each side


def _all_figures(runs: Sequence[Run]) -> list[tuple[Plot, str]]:
    """Return (plot, its SVG)."""
    makers = (throughput, rooflines, shares_of_limit, predictions, quality)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **STYLE}):
        plots = [plot for maker in makers for plot in maker(runs)]
        return [(plot, _svg(plot.figure, f"figure-{number}-")) for number, plot in enumerate(plots)]


def throughput(runs: Sequence[Run]) -> Iterator[Plot]:
    """Draw each model and lengths: lines over batch sizes, or bars if there is one; those with a single run share one figure."""
    known = [run for run in runs if run.decode_throughput and positive(run.request.batch_size)]
    groups = sorted(grouped(known, attrgetter("group")).items(), key=lambda group: -len(group[1]))
    caption = "Decode token/s of all sequences together, the median of a setting's runs."
    limit = f"{caption} The upright line is the limit that the rates measured in the run allow."
    x_label = "decode throughput (token/s)"
    for name, group in [each for each in groups if len(each[1]) > 1][:MAX_FIGURES]:
        settings = grouped(group, attrgetter("setting"))
        if len({run.request.batch_size for run in group}) > 1:
            most_runs_first = sorted(settings.items(), key=lambda each: -len(each[1]))
            yield _lines(f"Throughput against batch size: {name}", caption, dict(most_runs_first[:MAX_LINES]))
        else:
            title = f"Throughput at batch {group[0].request.batch_size}: {name}"
            yield from _bars(title, limit, x_label, _speed_rows(settings))
    alone = {group[0].label: group for _, group in groups if len(group) == 1}
    yield from _bars("Throughput: models and lengths with one run", limit, x_label, _speed_rows(alone))


def _speed_rows(groups: dict[str, list[Run]]) -> list[Row]:
    rows = []
    for label, alike in groups.items():
        speed = statistics.median(run.decode_throughput for run in alike)
        limits = [run.decode_throughput / run.share_of_limit for run in alike if run.share_of_limit]
        rows.append(Row(label, significant(speed), speed, statistics.median(limits) if limits else math.nan))
    return sorted(rows, key=lambda row: -row.value)


def rooflines(runs: Sequence[Run]) -> Iterator[Plot]:
    """Draw a roofline for each machine: token/s against the bytes that a token needs."""
    known = [run for run in runs if run.decode_throughput and run.share_of_limit and positive(run.request.batch_size)]
    machines = grouped((run for run in known if _bytes_per_step(run) > 0), _machine)
    for machine, of_machine in sorted(machines.items(), key=lambda each: -len(each[1]))[:MAX_FIGURES]:
        yield _roofline(machine, of_machine)


def _roofline(machine: str, runs: list[Run]) -> Plot:
    gib = np.array([_bytes_per_step(run) / run.request.batch_size / GIB for run in runs])
    speeds = np.array([run.decode_throughput for run in runs])
    limits = speeds / np.array([run.share_of_limit for run in runs])  # at the run's own rates
    figure, axes = _new_axes(300)
    _set_log_axis(axes.xaxis, gib)
    _set_log_axis(axes.yaxis, [*speeds, *limits])
    ends = np.array(axes.get_xlim())
    for index, bound in enumerate(dict.fromkeys(run.bound_by for run in runs)):
        colour, marker = SERIES[index % 6], MARKERS[index % 6]
        label, at = RATE_WORDS.get(bound, shorten_middle(bound, 20)), np.array([run.bound_by == bound for run in runs])
        if rates := [rate for run in runs if (rate := _rates(run).get(bound))]:
            label += f", at most {significant(max(rates))} GB/s"
            axes.plot(ends, max(rates) * 1e9 / GIB / ends, color=colour, gid=f"line-{bound}")
        axes.vlines(gib[at], speeds[at], limits[at], color=colour, linewidth=1)
        axes.plot(gib[at], speeds[at], marker, color=colour, label=label, gid=f"runs-{bound}")
    axes.set(xlabel="GiB that a token needs", ylabel="decode throughput (token/s)", xlim=ends)
    axes.grid()
    figure.legend(loc="outside lower left")
    caption = (
        "A mark is a run, its colour shows what bounds it. Lines are the highest rates measured; a stem ends at what the run's own "
        "rates allow. A token needs its share of the bytes that a step moves at the rate that bounds it."
    )
    return Plot(f"Roofline: {machine}", caption, figure)


def _bytes_per_step(run: Run) -> float:
    """Return the bytes that a decode step moves at the rate that bounds it; 0 if unknown."""
    moved, limit = run.measured.transfers, run.measured.limit
    if run.bound_by == "disk":
        return moved.disk_read_bytes_per_step or 0
    if limit.rates.link_kind != HOST_COPY and run.bound_by in ("link", "link_and_cores"):
        ahead = (limit.link_ahead_bytes or 0) / max(1, (run.request.gen_len or 0) - 1)
        copied = (moved.host_to_device_bytes_per_step or 0) - ahead
        return max(0, copied) + max(0, moved.cores_bytes_per_step or 0)
    return (limit.floor_step_s.device_memory or 0) * _rates(run).get("device_memory", 0) * 1e9


def _rates(run: Run) -> dict[str, float]:
    """Return GB/s of all devices together by bound."""
    rates = run.measured.limit.rates
    link, cores = rates.link_beside_cores_gb_per_s, rates.cores_gb_per_s
    memory = (rates.device_copy_gb_per_s or 0) * max(1, run.request.world_size or 1)
    known = {
        "link": rates.link_gb_per_s,
        "link_and_cores": link + cores if link and cores else None,
        "disk": rates.disk_gb_per_s,
        "device_memory": memory,
        "host_memory": memory,
    }
    return {bound: rate for bound, rate in known.items() if positive(rate)}


def _machine(run: Run) -> str:
    cpu = find(run.record.result.environment, "cpu_model")
    return one_line(", ".join(filter(None, [run.gpus or "no GPU", cpu, run.processors])))


def shares_of_limit(runs: Sequence[Run]) -> Iterator[Plot]:
    """Draw the fraction of the roofline that each setting reached."""
    rows = []
    known = [run for run in runs if run.share_of_limit]
    for key, alike in grouped(known, attrgetter("setting", "group")).items():
        share = statistics.median(run.share_of_limit for run in alike)
        rows.append(Row(", ".join(key), f"{share:.1%}", 100 * min(share, 1.5), 100))
    rows.sort(key=lambda row: -row.value)
    caption = (
        "Shortest possible time of a decode step at the rates measured in the run, over the measured time (median)."
    )
    yield from _bars("Share of the machine's limit", caption, "share of the limit (%)", rows)


def predictions(runs: Sequence[Run]) -> Iterator[Plot]:
    """Draw measured over predicted times of decode and prefill, the farthest from 1 first."""
    for phase in ("decode", "prefill"):
        ratios = [(run, ratio) for run in runs if not run.failed and (ratio := run.time_over_predicted(phase))]
        ratios.sort(key=lambda each: -abs(math.log(each[1])))
        rows = [Row(run.label, f"{ratio:.3g}", min(ratio, 4.0), 1.0) for run, ratio in ratios]
        close = sum(abs(ratio - 1) <= 0.1 for _, ratio in ratios)
        caption = "Measured time over the time that the plan predicted before loading, the farthest from 1 first. "
        caption += f"{close} of {len(rows)} are within 10%."
        yield from _bars(f"Predicted against measured: {phase}", caption, "measured time / predicted time", rows)


def quality(runs: Sequence[Run]) -> Iterator[Plot]:
    """Draw each score with its standard error."""
    for score, stderr in zip(SCORES[::2], SCORES[1::2]):
        scale, rows = 100 if "%" in score.header else 1, []
        for run in runs:
            value, error = score.value(run), stderr.value(run)
            if value is not None and not run.failed:
                text = score.text(run) + (f" ± {stderr.text(run)}" if error is not None else "")
                rows.append(Row(run.label, text, scale * value, error=scale * (error or 0)))
        caption = "Score of the model as it was timed; the bar is one standard error to each side, if recorded."
        yield from _bars(f"Quality: {score.header}", caption, score.header, rows)


def _bars(title: str, caption: str, x_label: str, rows: Sequence[Row]) -> Iterator[Plot]:
    """Draw horizontal bars, the first `MAX_ROWS`; no figure without rows."""
    if not rows:
        return
    shown = rows[:MAX_ROWS]
    letters = LETTERS - 2 - max(len(row.text) for row in shown)
    labels = [textwrap.wrap(one_line(row.label), max(20, letters), max_lines=2, placeholder="…") for row in shown]
    height = LINE * max(map(len, labels)) + BAR  # points of a row, which is 1 on the axis
    figure, axes = _new_axes(height * len(shown) + 45)
    y, half = np.arange(len(shown)) + 1 - 0.5 * BAR / height, 0.3 * BAR / height
    values, limits, errors = (np.array([getattr(row, name) for row in shown]) for name in ("value", "limit", "error"))
    axes.barh(y, values, 2 * half, color=SERIES[0])
    axes.vlines(limits, y - half, y + half, color=INK, linewidth=2)
    if errors.any():
        axes.errorbar(values, y, xerr=errors, fmt="none", ecolor=INK, capsize=4)
    for index, (row, label) in enumerate(zip(shown, labels)):
        where = {"y": index + 2 / height, "va": "top", "transform": axes.get_yaxis_transform(), "in_layout": False}
        axes.text(0, s="\n".join(label), **where)
        axes.text(1, s=row.text, ha="right", **where)
    near = limits[limits <= 3 * values.max()]  # a limit far beyond would leave the bars no width
    right = near.max(initial=(values + errors).max())
    axes.set(xlabel=x_label, xlim=(0, 1.02 * right or 1), ylim=(len(shown), 0), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, position: significant(value))
    if len(rows) > len(shown):
        title += f" (first {len(shown)} of {len(rows)})"
    yield Plot(title, caption, figure)


def _lines(title: str, caption: str, settings: dict[str, list[Run]]) -> Plot:
    """Draw a line of throughput over batch sizes for each setting."""
    figure, axes = _new_axes(220 + 14 * len(settings))
    for index, (setting, runs) in enumerate(settings.items()):
        by_batch = sorted(grouped(runs, lambda run: run.request.batch_size).items())
        x, y = zip(*((batch, statistics.median(run.decode_throughput for run in alike)) for batch, alike in by_batch))
        colour, marker = SERIES[index % 6], MARKERS[(index + index // 6) % 6]
        axes.plot(x, y, color=colour, marker=marker, linewidth=1.5, label=shorten_middle(setting, LETTERS))
    axes.set(xlabel="batch size (sequences)", ylabel="decode throughput (token/s)")
    drawn = [run for runs in settings.values() for run in runs]
    _set_log_axis(axes.xaxis, [run.request.batch_size for run in drawn])
    _set_log_axis(axes.yaxis, [run.decode_throughput for run in drawn])
    axes.grid(axis="y")
    figure.legend(loc="outside lower left")
    return Plot(title, caption, figure)


def _new_axes(height: float) -> Any:
    """Return a figure of `height` points and its axes."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    return figure, figure.subplots()


def _set_log_axis(axis: Any, values: Iterable[float]) -> None:
    """Make the axis logarithmic over positive `values`, with ticks at round numbers."""
    low, high = min(values) / 1.5, max(values) * 1.5
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=6))
    axis.set_major_formatter(lambda value, position: significant(value) if 1e-3 < value < 1e5 else f"{value:.0e}")
    axis.set_minor_locator(NullLocator())


def _svg(figure: Figure, prefix: str) -> str:
    """Return the figure as an `<svg>` element, as wide as the page allows; `prefix` makes its ids unique in the page."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has other fonts
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for attribute in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {attribute}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}", text)
    # a hundredth of a point is invisible
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text
