"""Throughput: a drawing for each model and length, lines over batch sizes, or bars where there is only one."""

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
    Row,
    canvas,
    fitting,
    legend_below,
    log_axis,
    row_figures,
)
from zero_inference.report.html.summary import UNSTEADY
from zero_inference.report.html.svg import GRID, INK, MUTED, SERIES, SURFACE, embedded
from zero_inference.report.run import Run
from zero_inference.utils.format import format_number

PANELS_AT_ONCE = 6
FARTHEST_LIMIT = 3.0  # times the highest bar: the line of a limit beyond would leave the bars no width
STYLED_LINES = 12


def throughput(runs: list[Run]) -> list[Drawing]:
    """A drawing for each model, prompt length and number of generated tokens: bars where all runs have one batch size, otherwise a line
    for each setting, which looks the same in all panels. Models and lengths with a single run share one drawing of bars."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        if run.decode_throughput and (run.request.batch_size or 0) > 0:
            groups.setdefault(run.group, []).append(run)
    alone = [members[0] for members in groups.values() if len(members) == 1]
    several = sorted((members for members in groups.values() if len(members) > 1), key=len, reverse=True)
    looks = _looks([members for members in several if len(_batches(members)) > 1])
    drawings = []
    for index, group in enumerate(several):
        name, folded = f"throughput-{index}", index >= PANELS_AT_ONCE
        one_batch = len(_batches(group)) == 1
        drawings += _bars(name, group, folded) if one_batch else [_throughput_panel(name, group, looks, folded)]
    return drawings + (_bars("throughput-alone", alone, folded=False) if alone else [])


def _batches(runs: list[Run]) -> list[int]:
    return sorted({run.request.batch_size for run in runs})


def _looks(groups: list[list[Run]]) -> dict[str, int]:
    """The settings that are drawn in most runs, each with the number of its look."""
    plotted = [run for group in groups for run in group]
    count = Counter(run.setting for run in plotted)
    best = {setting: max(run.decode_throughput for run in plotted if run.setting == setting) for setting in count}
    ranked = sorted(count, key=lambda setting: (-count[setting], -best[setting]))
    return {setting: index for index, setting in enumerate(ranked[:STYLED_LINES])}


def _bars(name: str, runs: list[Run], folded: bool) -> list[Drawing]:
    """A bar for each setting, the fastest first, with a line at the limit that its own rates allow."""
    from matplotlib.ticker import MaxNLocator

    one_group, batches = len({run.group for run in runs}) == 1, _batches(runs)
    rows = _bar_rows(runs, not one_group, len(batches) > 1)
    most = max(speed for speed, _ in (row.data for row in rows))
    near = [limit for _, limit in (row.data for row in rows) if limit and limit <= FARTHEST_LIMIT * most]
    span = 1.02 * max(most, *near, 0.0)

    def mark(axes, y: float, data: tuple[float, float | None]) -> None:
        speed, limit = data
        axes.barh(y, span, height=0.5, color=GRID, alpha=0.45, linewidth=0, zorder=0)
        axes.barh(y, speed, height=0.5, color=SERIES[0], linewidth=0, zorder=1)
        if limit and limit <= span:
            axes.plot([limit, limit], [y - 0.4, y + 0.4], color=INK, linewidth=1.4, zorder=2)

    def finish(axes) -> None:
        axes.set_xlim(0, span)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, position: format_number(value) if value else "0")

    at = f" at batch {batches[0]}" if len(batches) == 1 else ""
    title = f"Throughput{at}: {runs[0].group_name if one_group else 'models and lengths with one run'}"
    caption = "Decode tokens per second of all sequences together; higher is better."
    caption += " The upright line is the limit that the rates measured in the run allow." if near else ""
    drawings = row_figures(name, title, rows, mark, finish, "decode throughput (token/s)", caption, what="settings")
    return [dataclasses.replace(each, folded=folded or each.folded) for each in drawings]


def _bar_rows(runs: list[Run], several_groups: bool, several_batches: bool) -> list[Row]:
    """`data` is (token/s, its limit or None), medians where a setting ran more than once."""
    alike: dict[tuple, list[Run]] = {}
    for run in runs:
        alike.setdefault((run.group, run.setting, run.request.batch_size), []).append(run)
    rows = []
    for each in alike.values():
        run, speed = each[0], statistics.median(run.decode_throughput for run in each)
        limits = [run.decode_throughput / run.share_of_limit for run in each if run.share_of_limit]
        rest = [run.short_model] * several_groups + [f"batch {run.request.batch_size}"] * several_batches
        rest += [f"prompt {run.request.prompt_len}", f"{run.request.gen_len} generated"] * several_groups
        slowest, fastest = (pick(run.decode_throughput for run in each) for pick in (min, max))
        apart = f", {format_number(slowest)} to {format_number(fastest)}" if fastest > UNSTEADY * slowest else ""
        several = f" ({len(each)} runs{apart})" if len(each) > 1 else ""
        data = (speed, statistics.median(limits) if limits else None)
        rows.append(Row(run.setting, ", ".join(rest), f"{format_number(speed)} token/s{several}", data))
    return sorted(rows, key=lambda row: -row.data[0])


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
    panel = _Panel(lines, named, looks, _batches(runs))
    legend = 13.5 * (len(named) + bool(panel.others)) + 4
    height = 210 + legend
    figure, axes = canvas(WIDTH, height, left=44, right=14, top=20, bottom=38 + legend)
    _plot_lines(axes, panel)
    _finish_axes(axes, panel.batches, [run.decode_throughput for run in runs])
    _draw_legend(figure, axes, panel)
    title = f"Throughput against batch size: {runs[0].group_name}"
    caption = "Tokens per second of all sequences together, in decode; higher is better. "
    if len({(run.setting, run.request.batch_size) for run in runs}) < len(runs):
        caption += "The median where a setting ran more than once."
    best = max(runs, key=lambda run: run.decode_throughput)
    described = (
        f"{len(lines)} settings at batch {', '.join(map(str, panel.batches))}. "
        f"Highest: {format_number(best.decode_throughput)} token/s by {best.setting} at batch {best.request.batch_size}."
    )
    return Drawing(title, caption.strip(), embedded(figure, name, title, described), folded)


def _plot_lines(axes, panel: _Panel) -> None:
    for setting in panel.others + panel.named:
        points = _medians(panel.lines[setting])  # batch, token/s
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
    axes.yaxis.set_major_formatter(lambda value, position: format_number(value) if value else "0")
    axes.set_title("decode throughput (token/s)", loc="left", x=-32 / (WIDTH - 58), color=INK)
    axes.set_xlabel("batch size (sequences)")
    axes.grid(True, axis="y")


def _draw_legend(figure, axes, panel: _Panel) -> None:
    handles = {handle.get_label(): handle for handle in axes.get_lines()}
    labels = [fitting(setting, LEGEND_ROOM) for setting in panel.named]
    shown = [handles[label] for label in labels]
    if panel.others:
        shown.append(handles[fitting(panel.others[0], LEGEND_ROOM)])
        labels.append(f"{len(panel.others)} other setting{'s' * (len(panel.others) > 1)} (see the table)")
    legend_below(figure, shown, labels)


def _medians(runs: list[Run]) -> list[tuple[float, float]]:
    speeds: dict[int, list[float]] = {}
    for run in runs:
        speeds.setdefault(run.request.batch_size, []).append(run.decode_throughput)
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
    axes.set_xticks(ticks, [format_number(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
