"""The page's figures: throughput, the roofline and shares of it, what was predicted, phases, step times, the link's time, quality.

Matplotlib and not Plotly, whose script alone is megabytes: a figure here is a small SVG, prints as it stands and needs
no script.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from zero_inference.report.html.bounds import bound_name, bounds_among, look
from zero_inference.report.html.drawing import (
    ROOM,
    Drawing,
    Row,
    fitting,
    row_figures,
)
from zero_inference.report.html.predicted import predicted_against_measured
from zero_inference.report.html.roofline import roofline
from zero_inference.report.html.svg import GRID, INK, MUTED, SERIES, STYLE, SURFACE
from zero_inference.report.html.throughput import throughput
from zero_inference.report.run import LINK_PARTS, Run
from zero_inference.utils.format import format_short_time

LINK_NAMES = dict(zip(LINK_PARTS, ("copying", "waiting for a slot", "host late", "start of a step")))


def all_figures(runs: list[Run]) -> list[list[Drawing]]:
    """The drawings, a list for each subject that the runs have data for."""
    import matplotlib

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **STYLE}):
        makers = (
            throughput,
            roofline,
            shares_of_limit,
            predicted_against_measured,
            phases,
            steps,
            link_use,
            quality,
        )
        return [drawings for drawings in (maker(runs) for maker in makers) if drawings]


def shares_of_limit(runs: list[Run]) -> list[Drawing]:
    """A row for each setting at each model and length, the highest share first; a mark for each run, whose shape says what binds
    it."""
    known = [run for run in runs if run.share_of_limit is not None]
    if not known:
        return []
    alike: dict[tuple, list[Run]] = {}
    for run in known:
        alike.setdefault((run.setting, run.group), []).append(run)
    groups = {run.group for run in known}
    bounds = bounds_among(run.bound_by for run in known)

    def median(each: list[Run]) -> float:
        return statistics.median(run.share_of_limit for run in each)

    rows = [
        Row(
            each[0].setting,
            each[0].group_name if len(groups) > 1 else "",
            f"{median(each):.1%}" + (f" ({len(each)} runs)" if len(each) > 1 else ""),
            each,
        )
        for each in sorted(alike.values(), key=median, reverse=True)
    ]
    most = max(1.0, max(run.share_of_limit for run in known)) * 1.04
    scale = _percent_step(most)

    def mark(axes, y: float, each: list[Run]) -> None:
        axes.plot([0, most], [y, y], color=GRID, linewidth=0.8, zorder=1)
        axes.plot([1, 1], [y - 0.5, y + 0.5], color=INK, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        middle = statistics.median(run.share_of_limit for run in each)
        axes.plot([middle, middle], [y - 0.4, y + 0.4], color=INK, linewidth=1.6, zorder=2)
        for run in each:
            colour, marker = look(run.bound_by)
            axes.plot([run.share_of_limit], [y], marker, color=colour, zorder=3, clip_on=False, alpha=0.85)

    def finish(axes) -> None:
        axes.set_xlim(0, most)
        axes.set_xticks([tick * scale for tick in range(int(most / scale) + 1)])
        axes.xaxis.set_major_formatter(lambda value, position: f"{100 * value:.0f}")

    return row_figures(
        "limit",
        "Share of the machine's limit",
        rows,
        mark,
        finish,
        "share of the limit (%)",
        "The least time of a decode step on this machine over the measured time. The least time is the bytes or operations "
        "of the step at the rates measured in the same process. Each mark is a run, and its shape shows the limit that "
        "applies; the bar is the median, the dashed line the limit.",
        legend=[(bound_name(bound), *look(bound)) for bound in bounds],
        what="settings",
    )


def _percent_step(most: float) -> float:
    return next(step for step in (0.2, 0.5, 1, 2, 5, 10 ** math.ceil(math.log10(most))) if most / step <= 7)


def phases(runs: list[Run]) -> list[Drawing]:
    rows = []
    for run in runs:
        prefill, decode = run.measured.prefill_latency_s, run.measured.decode_latency_s
        if not run.failed and prefill is not None and prefill >= 0 and (prefill + max(0.0, decode or 0)) > 0:
            rows.append(
                Row(
                    run.label,
                    run.rest,
                    f"{format_short_time(prefill)} + {format_short_time(decode)}"
                    if decode
                    else format_short_time(prefill),
                    (prefill, max(0.0, decode or 0)),
                )
            )
    return _stacked(
        "phases",
        "Phases: prefill and decode",
        rows,
        ("prefill", "decode"),
        "share of a generation's time (%)",
        "Prefill is the time to the first token, decode the time of all others; medians over the measured loops. "
        "The durations are right of the run's name.",
    )


def link_use(runs: list[Run]) -> list[Drawing]:
    rows = []
    for run in runs:
        if use := run.link_use:
            rate = run.measured.link_use.gb_per_s_while_busy
            rows.append(
                Row(run.label, run.rest, f"{rate:.1f} GB/s" if rate else "", tuple(use[name] for name in LINK_PARTS))
            )
    return _stacked(
        "link",
        "Where the stream engine's link time went",
        rows,
        tuple(LINK_NAMES.values()),
        "share of the link's time in decode (%)",
        "Copying: the link was busy, at the rate right of the run's name. Waiting for a slot: the device computes longer than a "
        "layer copies. Host late: the host asked too late for the next layer. Start of a step: the host prepares the token.",
    )


def _stacked(name: str, title: str, rows: list[Row], parts: Sequence[str], x_label: str, caption: str) -> list[Drawing]:
    def mark(axes, y: float, amounts: Sequence[float]) -> None:
        begin, total = 0.0, sum(amounts)
        for index, amount in enumerate(amounts):
            if amount > 0:
                axes.barh(
                    y,
                    100 * amount / total,
                    left=begin,
                    height=0.55,
                    color=SERIES[index],
                    edgecolor=SURFACE,
                    linewidth=0.8,
                )
            begin += 100 * amount / total

    def finish(axes) -> None:
        axes.set_xlim(0, 100)

    return row_figures(
        name,
        title,
        rows,
        mark,
        finish,
        x_label,
        caption,
        legend=[(part, SERIES[i], "s") for i, part in enumerate(parts)],
    )


def steps(runs: list[Run]) -> list[Drawing]:
    """Boxes on a scale of each run's own median: runs differ a thousandfold, the steps of one by a few percent."""
    rows = []
    for run in runs:
        if run.step_s and not run.failed:
            middle = statistics.median(run.step_s)
            rows.append(
                Row(
                    run.label,
                    run.rest,
                    format_short_time(middle),
                    sorted(100 * (step / middle - 1) for step in run.step_s),
                )
            )
    if not rows:
        return []
    low = max(-50.0, min(row.data[0] for row in rows)) - 1.5
    high = min(100.0, max(row.data[-1] for row in rows)) + 1.5
    beyond = any(row.data[-1] > high or row.data[0] < low for row in rows)

    def mark(axes, y: float, data: list[float]) -> None:
        axes.plot([0, 0], [y - 0.5, y + 0.5], color=MUTED, linewidth=0.8, zorder=0)
        axes.boxplot(
            [[min(max(value, low), high) for value in data]],
            positions=[y],
            orientation="horizontal",
            widths=0.55,
            whis=(5, 95),
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": SERIES[0], "edgecolor": SERIES[0], "alpha": 0.75},
            medianprops={"color": INK, "linewidth": 1.6},
            whiskerprops={"color": SERIES[0]},
            capprops={"color": SERIES[0]},
            flierprops={"marker": "o", "markersize": 3, "markeredgecolor": SERIES[1], "markerfacecolor": "none"},
        )
        for edge, gone, marker in ((high, data[-1] > high, ">"), (low, data[0] < low, "<")):
            if gone:
                axes.plot([edge], [y], marker, color=SERIES[1], markersize=7, clip_on=False)

    def finish(axes) -> None:
        axes.set_xlim(low, high)
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:+.3g}" if value else "0")

    caption = (
        "Decode steps of all measured loops, relative to the run's median step, which is right of its name. The box holds the "
        "middle half, the whiskers reach from the 5th to the 95th percentile, circles are steps outside."
    )
    caption += " An arrow: steps beyond the edge." if beyond else ""
    return row_figures("steps", "Step times", rows, mark, finish, "difference from the run's median step (%)", caption)


def quality(runs: list[Run]) -> list[Drawing]:
    """A drawing for each task and metric, with the standard error as a bar."""
    from matplotlib.ticker import MaxNLocator

    drawings: list[Drawing] = []
    metrics = dict.fromkeys((score.metric, score.share) for run in runs for score in run.quality)
    for index, (metric, share) in enumerate(metrics):
        scale = 100 if share else 1
        rows = [
            Row(run.label, run.rest, score.text, (score.value * scale, (score.stderr or 0) * scale))
            for run in runs
            for score in run.quality
            if score.metric == metric
        ]
        low, high = min(row.data[0] - row.data[1] for row in rows), max(row.data[0] + row.data[1] for row in rows)
        # Wide enough that a difference of a tenth of a point does not look like a gulf.
        margin = max(0.08 * (high - low), ((2.0 if share else 0.04 * abs(high)) - (high - low)) / 2) or 1.0

        def mark(axes, y: float, data: tuple[float, float]) -> None:
            axes.errorbar([data[0]], [y], xerr=[data[1]], fmt="o", color=SERIES[0], capsize=4, clip_on=False)

        def finish(axes, low=low - margin, high=high + margin, share=share) -> None:
            axes.set_xlim(max(0, low) if share else low, min(100.5, high) if share else high)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(lambda value, position: f"{value:.6g}")
            axes.grid(True, axis="x")

        better = "lower" if "perplexity" in metric else "higher"
        drawings += row_figures(
            f"quality-{index}",
            f"Quality: {metric}",
            rows,
            mark,
            finish,
            f"{fitting(metric, ROOM / 2)}{' (%)' if share else ''}, {better} is better",
            ""
            if drawings
            else "Scores of the model as it was timed; the bar is one standard error to each side, where the record has it.",
        )
    return drawings
