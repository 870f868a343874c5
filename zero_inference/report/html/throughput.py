"""Throughput against batch size: a panel for each model and length, a line for each setting."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from dataclasses import dataclass

from zero_inference.report.html.drawing import (
    LEGEND_ROOM,
    MARKERS,
    WIDTH,
    Drawing,
    canvas,
    fitting,
    legend_below,
    log_axis,
)
from zero_inference.report.html.runs import Run
from zero_inference.report.html.summary import number
from zero_inference.report.html.svg import INK, MUTED, SERIES, SURFACE, embedded

PANELS_AT_ONCE = 6
STYLED_LINES = 12


def throughput(runs: list[Run]) -> list[Drawing]:
    """A panel for each model, prompt length and number of generated tokens, a line for each setting. A setting looks the same in
    all panels."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        if run.decode_throughput and (run.whole("batch_size") or 0) > 0:
            groups.setdefault(run.group, []).append(run)
    alone = [group for group, members in groups.items() if len(members) == 1]
    if len(alone) < len(groups):  # a point by itself shows nothing that its row in the table does not
        groups = {group: members for group, members in groups.items() if group not in alone}
    plotted = [run for group in groups.values() for run in group]
    count = Counter(run.setting for run in plotted)
    best = {setting: max(run.decode_throughput for run in plotted if run.setting == setting) for setting in count}
    ranked = sorted(count, key=lambda setting: (-count[setting], -best[setting]))
    looks = {setting: index for index, setting in enumerate(ranked[:STYLED_LINES])}
    drawings = []
    for index, group in enumerate(sorted(groups.values(), key=len, reverse=True)):
        drawings.append(_throughput_panel(f"throughput-{index}", group, looks, folded=index >= PANELS_AT_ONCE))
    if drawings and len(alone) > 0 and len(plotted) > 1:
        note = f" Not drawn, as each has one run: {len(alone)} more model{'s' * (len(alone) > 1)} or lengths."
        drawings[0] = dataclasses.replace(drawings[0], caption=drawings[0].caption + note)
    return drawings


@dataclass(frozen=True)
class _Panel:
    """Runs of one model and length: the runs of each setting, those settings with a `look` of their own, and the batches that ran."""

    lines: dict[str, list[Run]]
    named: list[str]
    looks: dict[str, int]
    batches: list[int]

    @property
    def others(self) -> list[str]:
        return [setting for setting in self.lines if setting not in self.looks]


def _throughput_panel(name: str, runs: list[Run], looks: dict[str, int], folded: bool) -> Drawing:
    lines = {
        setting: [run for run in runs if run.setting == setting]
        for setting in dict.fromkeys(run.setting for run in runs)
    }
    named = sorted((setting for setting in lines if setting in looks), key=looks.get)
    panel = _Panel(lines, named, looks, sorted({run.whole("batch_size") for run in runs}))
    legend = 13.5 * (len(named) + bool(panel.others)) + 4
    height = (210 if len(panel.batches) > 1 else 170) + legend
    figure, axes = canvas(WIDTH, height, left=44, right=14, top=20, bottom=38 + legend)
    _plot_lines(axes, panel)
    _finish_axes(axes, panel.batches, [run.decode_throughput for run in runs])
    _draw_legend(figure, axes, panel)
    title = f"Throughput against batch size: {runs[0].group_name}"
    caption = "Tokens per second of all sequences together, in decode; higher is better. "
    if len({(run.setting, run.whole("batch_size")) for run in runs}) < len(runs):
        caption += "The median where a setting ran more than once."
    if len(panel.batches) == 1:
        caption += f"All have batch {panel.batches[0]}: points side by side, no lines."
    best = max(runs, key=lambda run: run.decode_throughput)
    described = (
        f"{len(lines)} settings at batch {', '.join(map(str, panel.batches))}. "
        f"Highest: {number(best.decode_throughput)} token/s by {best.setting} at batch {best.whole('batch_size')}."
    )
    return Drawing(title, caption.strip(), embedded(figure, name, title, described), folded)


def _plot_lines(axes, panel: _Panel) -> None:
    for place, setting in enumerate(panel.others + panel.named):
        points = _medians(panel.lines[setting])  # batch, token/s
        if len(panel.batches) == 1:  # side by side, as equal speeds would hide each other
            shift = 2 ** (0.6 * ((place + 0.5) / len(panel.lines) - 0.5))
            points = [(batch * shift, speed) for batch, speed in points]
        look = panel.looks.get(setting)
        colour = MUTED if look is None else SERIES[look % len(SERIES)]
        hollow = look is not None and look >= len(SERIES)
        axes.plot(
            [batch for batch, _ in points],
            [speed for _, speed in points],
            color=colour,
            zorder=1 if look is None else 2,
            linewidth=0.8 if look is None else None,
            linestyle="--" if hollow else "-",
            marker="." if look is None else MARKERS[look % len(MARKERS)],
            markerfacecolor=SURFACE if hollow else colour,
            markeredgecolor=colour,
            label=fitting(setting, LEGEND_ROOM),
        )


def _finish_axes(axes, batches: list[int], speeds: list[float]) -> None:
    _batch_axis(axes, batches)
    if max(speeds) > 10 * min(speeds):
        log_axis(axes.yaxis, min(speeds) / 1.3, max(speeds) * 1.3)
    else:
        axes.set_ylim(0, max(speeds) * 1.1)
    axes.yaxis.set_major_formatter(lambda value, position: number(value) if value else "0")
    axes.set_title("decode throughput (token/s)", loc="left", x=-32 / (WIDTH - 58), color=INK)
    axes.set_xlabel("batch size (sequences)")
    axes.grid(True, axis="y")


def _draw_legend(figure, axes, panel: _Panel) -> None:
    handles = {handle.get_label(): handle for handle in axes.get_lines()}
    labels = [fitting(setting, LEGEND_ROOM) for setting in panel.named]
    shown = [handles[label] for label in labels]
    if panel.others:
        shown.append(handles[fitting(panel.others[0], LEGEND_ROOM)])
        labels.append(f"{len(panel.others)} other settings (see the table)")
    legend_below(figure, shown, labels)


def _medians(runs: list[Run]) -> list[tuple[float, float]]:
    speeds: dict[int, list[float]] = {}
    for run in runs:
        speeds.setdefault(run.whole("batch_size"), []).append(run.decode_throughput)
    return [(batch, statistics.median(values)) for batch, values in sorted(speeds.items())]


def _batch_axis(axes, batches: list[int]) -> None:
    """Powers of two are equally far apart; the ticks are sizes that ran, as many as fit."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    low, high = math.log2(batches[0]), math.log2(batches[-1])
    margin = max(0.5, 0.06 * (high - low))
    axes.set_xlim(2 ** (low - margin), 2 ** (high + margin))
    ticks: list[int] = []
    apart = (high - low + 2 * margin) / 8
    for batch in batches:
        if not ticks or math.log2(batch / ticks[-1]) >= apart:
            ticks.append(batch)
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
