"""The figures of the page, one function each: it takes the runs and returns its plots, none where no run has the data.

Matplotlib and not Plotly, whose script alone is megabytes: a figure is a small SVG that prints and needs no script.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_inference.records.hardware import HOST_COPY
from zero_inference.report.html.plot import (
    GRID,
    INK,
    MUTED,
    SERIES,
    STYLE,
    Plot,
    Row,
    cut,
    embed,
    join,
    make_plot,
    new_axes,
    row_figure,
    set_log_axis,
)
from zero_inference.report.prediction import within_in_words
from zero_inference.report.run import BOUND_NAMES, LINK_PARTS, Run, clean
from zero_inference.utils.format import GIB, format_bytes, format_number, format_short_time

MOST_POINTS = 300  # of a roofline
MOST_FIGURES = 6  # of a kind
MARKERS = ("o", "s", "^", "D", "v", "P")
LINK_LABELS = ("copying", "waiting for a slot", "host late", "start of a step")  # of `LINK_PARTS`
HIGHEST_SHARE = 1.5  # of the limit; marks beyond are at the edge
DECODE_WITHIN, PREFILL_WITHIN = 0.10, 0.15  # the bands around a prediction
HIGHEST_RATIO = 4.0  # of a measured to its predicted time, and 1 / 4; marks beyond are at the edge
STEP_RANGE = (-50.0, 100.0)  # percent from the median; boxes and marks beyond end at the edge


def all_figures(runs: list[Run]) -> list[tuple[Plot, str]]:
    """Return (plot, its SVG)."""
    makers = (throughput, roofline, shares_of_limit, predictions, phases, steps, link_use, quality)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **STYLE}):
        plots = [plot for maker in makers for plot in maker(runs)]
        return [
            (plot, embed(plot.figure, f"figure-{number}", plot.title, plot.description))
            for number, plot in enumerate(plots)
        ]


def throughput(runs: list[Run]) -> list[Plot]:
    """Draw each model and length: lines over batch sizes, or bars if there is one; those with a single run share one figure."""
    known = [run for run in runs if run.decode_throughput and (run.request.batch_size or 0) > 0]
    groups = sorted(_grouped(known, lambda run: run.group).values(), key=len, reverse=True)
    several = [group for group in groups if len(group) > 1]
    alone = [run for group in groups if len(group) == 1 for run in group]
    ranks = {setting: rank for rank, (setting, _) in enumerate(Counter(run.setting for run in known).most_common())}
    plots = []
    for group in several[:MOST_FIGURES]:
        plots += _bars(group) if len({run.request.batch_size for run in group}) == 1 else [_lines(group, ranks)]
    return plots + _bars(alone)


def _bars(runs: list[Run]) -> list[Plot]:
    """Draw a bar for each setting, the fastest first, with a line at its limit."""
    one_group = len({run.group for run in runs}) == 1
    rows = []
    for alike in _grouped(runs, lambda run: (run.group, run.setting, run.request.batch_size)).values():
        run, speeds = alike[0], [run.decode_throughput for run in alike]
        value = format_number(statistics.median(speeds))
        if len(alike) > 1:
            value += f" ({len(alike)} runs, {format_number(min(speeds))} to {format_number(max(speeds))})"
        limits = [run.decode_throughput / run.share_of_limit for run in alike if run.share_of_limit]
        limit = statistics.median(limits) if limits else math.nan
        rest = "" if one_group else f"batch {run.request.batch_size}, {run.group_name}"
        rows.append(Row(run.setting, rest, value, (statistics.median(speeds), limit)))
    rows.sort(key=lambda row: -row.data[0])

    def draw(axes: Axes, y: np.ndarray, height: float, data: Sequence) -> None:
        speeds, limits = map(np.array, zip(*data))
        axes.barh(y, speeds, height, color=SERIES[0])
        near = limits[limits <= 3 * speeds.max()]  # a limit far beyond would leave the bars no width
        axes.set_xlim(0, 1.02 * near.max(initial=speeds.max()))
        axes.vlines(limits, y - height / 2, y + height / 2, color=INK, linewidth=2, label="limit")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, position: format_number(value))

    title = "Throughput: models and lengths with one run"
    if one_group:
        title = f"Throughput at batch {runs[0].request.batch_size}: {runs[0].group_name}"
    caption = (
        "Decode token/s of all sequences together; the median where a setting ran more than once. "
        "The upright line is the limit that the rates measured in the run allow."
    )
    return row_figure(title, caption, "decode throughput (token/s)", rows, draw, "settings")


def _lines(runs: list[Run], ranks: dict[str, int]) -> Plot:
    """Draw a line for each setting; its colour and marker follow from its rank, so that they are the same in all figures."""
    axes = new_axes(210)
    described = []
    by_setting = sorted(_grouped(runs, lambda run: run.setting).items(), key=lambda each: ranks[each[0]])
    for number, (setting, alike) in enumerate(by_setting):
        by_batch = sorted(_grouped(alike, lambda run: run.request.batch_size).items())
        x, y = zip(*((batch, statistics.median(run.decode_throughput for run in each)) for batch, each in by_batch))
        rank, count = ranks[setting], len(SERIES)
        colour, marker, label = SERIES[rank % count], MARKERS[(rank + rank // count) % count], cut(setting)
        if number >= count:
            colour, marker, label = MUTED, ".", "other settings (see the table)"
        axes.plot(x, y, color=colour, marker=marker, linewidth=1.5, label=label)
        described.append(f"{setting}: {', '.join(f'{format_number(s)} at batch {b}' for b, s in zip(x, y))}")
    batches = sorted({run.request.batch_size for run in runs})
    set_log_axis(axes.xaxis, batches)
    if len(batches) <= 8:
        axes.set_xticks(batches, map(format_number, batches))
    speeds = [run.decode_throughput for run in runs]
    if max(speeds) > 10 * min(speeds):
        set_log_axis(axes.yaxis, speeds)
    else:
        axes.set_ylim(0, 1.1 * max(speeds))
    axes.set(xlabel="batch size (sequences)", ylabel="decode throughput (token/s)")
    axes.grid(axis="y")
    title = f"Throughput against batch size: {runs[0].group_name}"
    caption = "Decode token/s of all sequences together; the median where a setting ran more than once."
    return make_plot(axes, title, caption, "token/s by " + "; ".join(described))


def roofline(runs: list[Run]) -> list[Plot]:
    """Draw a roofline for each machine: token/s against the bytes that a token needs."""
    known = [run for run in runs if run.decode_throughput and run.bound_by and (run.request.batch_size or 0) > 0]
    machines = _grouped((run for run in known if _bytes_per_step(run) > 0), _machine)
    ranked = sorted(machines.items(), key=lambda machine: -len(machine[1]))
    return [_roofline(name, runs) for name, runs in ranked[:MOST_FIGURES]]


def _roofline(machine: str, runs: list[Run]) -> Plot:
    shown = runs[:MOST_POINTS]
    x = np.array([_bytes_per_step(run) / run.request.batch_size / GIB for run in shown])
    y = np.array([run.decode_throughput for run in shown])
    limits = y / np.array([run.share_of_limit or 1 for run in shown])  # at the run's own rates
    bounds = np.array([run.bound_by for run in shown])
    axes = new_axes(280)
    set_log_axis(axes.xaxis, x)
    set_log_axis(axes.yaxis, [*y, *limits])
    left, right = axes.get_xlim()
    lines = []
    for bound, colour, marker, label in _looks(bounds):
        if rates := [rate for run in shown if (rate := _rates(run).get(bound))]:
            low, high = min(rates), max(rates)
            label += f": {format_number(low / 1e9)} to" if high > 1.05 * low else ":"
            label += f" {format_number(high / 1e9)} GB/s"
            axes.plot([left, right], [high / GIB / left, high / GIB / right], color=colour, gid=f"line-{bound}")
        lines.append(label)
        at = bounds == bound
        axes.vlines(x[at], y[at], limits[at], color=colour, linewidth=1)
        axes.plot(x[at], y[at], marker, color=colour, label=label, gid=f"runs-{bound}")
    places = (axes.transData - axes.transAxes).transform(np.stack([x, y], axis=1))  # [runs, 2], 0 to 1
    for run, place in zip(shown, places):
        right_by, above = (places - place).T
        if not ((right_by > 0) & (right_by < 0.12) & (abs(above) < 0.05)).any():  # no other mark is there
            style = {"textcoords": "offset points", "va": "center", "in_layout": False}
            axes.annotate(str(run.number), place, (6, 0), "axes fraction", **style)
    axes.set(xlabel="GiB that a token needs", ylabel="decode throughput (token/s)", xlim=(left, right))
    axes.grid()
    described = [
        f"{join(run.label, run.rest)}: {format_number(run.decode_throughput)} token/s at {format_bytes(gib * GIB)} a token, "
        f"{run.share_of_limit:.1%} of its limit by {_bound_name(run.bound_by)}"
        for run, gib in zip(shown, x)
    ]
    caption = (
        "Each mark is a run, numbered as in the table; colour and shape show what bounds it. Lines are the highest rates "
        "measured; a stem ends at what the run's own rates allow. A token needs its share of the bytes that a step copies over "
        "the link and reads from host memory with the CPU, reads from disk, or reads from memory, whichever bounds the run."
    )
    if len(runs) > len(shown):
        caption += f" The first {len(shown)} of {len(runs)} runs."
    return make_plot(axes, f"Roofline: {machine}", caption, f"{'; '.join(lines)}. {'; '.join(described)}")


def _bytes_per_step(run: Run) -> float:
    """Return the bytes that a decode step moves at the rate that bounds it; 0 if unknown."""
    moved = run.measured.transfers
    if run.bound_by == "disk":
        return moved.disk_read_bytes_per_step or 0
    if run.limit.rates.link_kind != HOST_COPY and run.bound_by != run.memory:
        steps = max(1, (run.request.gen_len or 0) - 1)
        copied = (moved.host_to_device_bytes_per_step or 0) - (run.limit.link_ahead_bytes or 0) / steps
        if outside := max(0, copied) + max(0, moved.cores_bytes_per_step or 0):
            return outside
    return (run.limit.floor_step_s.device_memory or 0) * _rates(run).get(run.memory, 0)


def _rates(run: Run) -> dict[str, float]:
    """Return bytes/s of all devices together by bound; those of the link, the CPU and the disk are so in the record."""
    rates = run.limit.rates
    link, cpu = rates.link_beside_cores_gb_per_s, rates.cores_gb_per_s
    known = {
        "link": rates.link_gb_per_s,
        "link_and_cores": link + cpu if link and cpu else None,
        "disk": rates.disk_gb_per_s,
        run.memory: (rates.device_copy_gb_per_s or 0) * max(1, run.request.world_size or 1),
    }
    return {bound: 1e9 * rate for bound, rate in known.items() if rate and rate > 0}


def _machine(run: Run) -> str:
    cpu, cores, ranks = run.environment.cpu_model, run.environment.cpu_cores, run.request.world_size
    parts = [run.gpus or ("no GPU" if cpu else "machine not recorded")]
    if cpu:
        parts.append(f"{cpu} with {cores} cores" if cores else cpu)
    if ranks and ranks > 1:
        parts.append(f"{ranks} ranks")
    return clean(", ".join(parts))


def shares_of_limit(runs: list[Run]) -> list[Plot]:
    """Draw a row for each setting at each model and length, the highest share first: a mark for each run."""
    known = [run for run in runs if run.share_of_limit is not None]
    several_groups = len({run.group for run in known}) > 1
    rows = []
    for alike in _grouped(known, lambda run: (run.setting, run.group)).values():
        median = statistics.median(run.share_of_limit for run in alike)
        value = f"{median:.1%}" + (f" ({len(alike)} runs)" if len(alike) > 1 else "")
        rows.append((median, Row(alike[0].setting, alike[0].group_name if several_groups else "", value, alike)))
    rows.sort(key=lambda row: -row[0])

    def draw(axes: Axes, y: np.ndarray, height: float, data: Sequence[list[Run]]) -> None:
        at = np.repeat(y, [len(alike) for alike in data])
        shares = np.array([run.share_of_limit for alike in data for run in alike]).clip(max=HIGHEST_SHARE)
        bounds = np.array([run.bound_by for alike in data for run in alike])
        axes.set_xlim(0, 104 * max(1, shares.max()))
        axes.hlines(y, 0, axes.get_xlim()[1], color=GRID)
        axes.vlines([100] * len(y), y - height / 2, y + height / 2, color=INK, linewidth=2)
        for bound, colour, marker, name in _looks(bounds):
            axes.plot(100 * shares[bounds == bound], at[bounds == bound], marker, color=colour, label=name)

    caption = (
        "Shortest possible time of a decode step over the measured time; the upright line is the limit. The shortest time is "
        "the bytes or operations of the step at the rates measured in the same process. Each mark is a run, its shape shows "
        "what bounds it; the figure is the median."
    )
    title = "Share of the machine's limit"
    return row_figure(title, caption, "share of the limit (%)", [row for _, row in rows], draw, "settings")


def predictions(runs: list[Run]) -> list[Plot]:
    """Draw measured over predicted times of decode and prefill, the farthest from 1 first."""
    runs = [run for run in runs if not run.failed]
    rows: list[Row] = []
    for run in runs:
        both = {phase: run.time_over_predicted(f"{phase}_s") for phase in ("decode", "prefill")}
        ratios = {phase: ratio for phase, ratio in both.items() if ratio is not None}
        if ratios:
            value = ", ".join(f"{phase} {ratio:{'.2f' if ratio < 1000 else '.1e'}}" for phase, ratio in ratios.items())
            rows.append(Row(run.label, run.rest, value, ratios))
    rows.sort(key=lambda row: -abs(math.log(next(iter(row.data.values())))))

    def draw(axes: Axes, y: np.ndarray, height: float, data: Sequence[dict[str, float]]) -> None:
        for within in (PREFILL_WITHIN, DECODE_WITHIN):
            axes.barh(y, 2 * within, 1.5 * height, left=1 - within, color=GRID, alpha=0.5)
        axes.vlines([1] * len(y), y - height / 2, y + height / 2, color=INK)
        for phase, marker, colour in (("decode", "o", SERIES[1]), ("prefill", "s", SERIES[0])):
            x = np.clip([each.get(phase, math.nan) for each in data], 1 / HIGHEST_RATIO, HIGHEST_RATIO)
            axes.plot(x, y, marker, color=colour, label=phase, gid=f"{phase}-ratio")
        set_log_axis(axes.xaxis, [0.8, 1.25, *axes.dataLim.intervalx], margin=1)

    parts = []
    for phase, within in (("decode", DECODE_WITHIN), ("prefill", PREFILL_WITHIN)):
        if found := [row.data[phase] for row in rows if phase in row.data]:
            near = sum(1 - within <= ratio <= 1 + within for ratio in found)
            parts.append(f"{near} of {len(found)} {phase} times are within {within:.0%}")
    if in_range := within_in_words(runs):
        parts.append(in_range)
    caption = (
        "Measured time over the time that the plan predicted before loading, the farthest from 1 first; right of 1 the run was "
        f"slower. Bands: {DECODE_WITHIN:.0%} and {PREFILL_WITHIN:.0%}. {'; '.join(parts)}."
    )
    title = "Predicted against measured"
    return row_figure(title, caption, "measured time / predicted time", rows, draw)


def phases(runs: list[Run]) -> list[Plot]:
    rows = []
    for run in runs:
        prefill_s, decode_s = run.measured.prefill_latency_s or 0, max(0, run.measured.decode_latency_s or 0)
        if prefill_s > 0 and not run.failed:
            value = format_short_time(prefill_s) + (f" + {format_short_time(decode_s)}" if decode_s else "")
            rows.append(Row(run.label, run.rest, value, (prefill_s, decode_s)))
    caption = "Prefill is the time to the first token, decode that of all others; medians over the measured loops."
    title = "Phases: prefill and decode"
    return _stacked(title, caption, "share of a generation's time (%)", rows, ("prefill", "decode"))


def link_use(runs: list[Run]) -> list[Plot]:
    rows = []
    for run in runs:
        if use := run.link_use:
            rate = run.measured.link_use.gb_per_s_while_busy
            value = f"{format_number(rate)} GB/s" if rate else ""
            rows.append(Row(run.label, run.rest, value, [use[name] for name in LINK_PARTS]))
    caption = (
        "Copying: the link was busy, at the rate right of the run's name. Waiting for a slot: the device computes longer than a "
        "layer copies. Host late: the host asked too late for the next layer. Start of a step: the host prepares the token."
    )
    title = "Where the stream engine's link time went"
    return _stacked(title, caption, "share of the link's time in decode (%)", rows, LINK_LABELS)


def _stacked(title: str, caption: str, x_label: str, rows: list[Row], parts: Sequence[str]) -> list[Plot]:
    def draw(axes: Axes, y: np.ndarray, height: float, data: Sequence[Sequence[float]]) -> None:
        shares = np.array(data).T  # [parts, rows]
        shares = 100 * shares / shares.sum(axis=0)
        for index, part in enumerate(parts):
            axes.barh(y, shares[index], height, left=shares[:index].sum(axis=0), color=SERIES[index], label=part)
        axes.set_xlim(0, 100)

    return row_figure(title, caption, x_label, rows, draw)


def steps(runs: list[Run]) -> list[Plot]:
    """Draw a box for each run, relative to its median step: runs differ a thousandfold, the steps of one by a few percent."""
    rows = []
    for run in runs:
        if run.step_s and not run.failed:
            median_s = statistics.median(run.step_s)
            percent = [100 * (step_s / median_s - 1) for step_s in run.step_s]
            value = f"{format_short_time(median_s)}, slowest {max(percent):+.0f}%"
            rows.append(Row(run.label, run.rest, value, percent))

    def draw(axes: Axes, y: np.ndarray, height: float, data: Sequence[list[float]]) -> None:
        percent = [np.clip(each, *STEP_RANGE) for each in data]
        line, box = {"color": SERIES[0]}, {"facecolor": SERIES[0], "edgecolor": SERIES[0]}
        looks = {"boxprops": box, "whiskerprops": line, "capprops": line, "medianprops": {"color": INK, "linewidth": 2}}
        places = {"positions": y, "widths": height, "orientation": "horizontal", "manage_ticks": False}
        axes.boxplot(percent, whis=(5, 95), showfliers=False, patch_artist=True, **places, **looks)
        axes.plot([each.max() for each in percent], y, "o", color=SERIES[1], markersize=4, label="slowest step")
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:+.3g}" if value else "0")

    caption = (
        "Decode steps of all measured loops, relative to the run's median step. The box holds the middle half, the whiskers "
        "reach from the 5th to the 95th percentile."
    )
    return row_figure("Step times", caption, "difference from the run's median step (%)", rows, draw)


def quality(runs: list[Run]) -> list[Plot]:
    """Draw each task and metric with its standard error."""

    def draw(axes: Axes, y: np.ndarray, height: float, data: Sequence[tuple[float, float]]) -> None:
        values, errors = zip(*data)
        axes.errorbar(values, y, xerr=errors, fmt="o", color=SERIES[0], capsize=4)
        low, high = axes.get_xlim()
        # Wide enough that a difference of a tenth of a point does not look large.
        margin = max(0, 0.04 * abs(sum(values) / len(values)) - (high - low)) / 2
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="x")

    plots = []
    metrics = dict.fromkeys((score.metric, score.share) for run in runs for score in run.quality)
    for metric, is_share in list(metrics)[: 2 * MOST_FIGURES]:
        scale = 100 if is_share else 1
        rows = [
            Row(run.label, run.rest, score.text, (score.value * scale, (score.stderr or 0) * scale))
            for run in runs
            for score in run.quality
            if score.metric == metric
        ]
        better = "lower" if "perplexity" in metric else "higher"
        x_label = f"{cut(metric, 25)}{' (%)' if is_share else ''}, {better} is better"
        caption = "Score of the model as it was timed; the bar is one standard error to each side, if recorded."
        plots += row_figure(f"Quality: {metric}", caption, x_label, rows, draw)
    return plots


def _looks(bounds: Iterable[str]) -> list[tuple[str, str, str, str]]:
    """Return (bound, colour, marker, name) of each of the bounds, in the order of `BOUND_NAMES`, then others."""
    looks = dict(zip(BOUND_NAMES, zip(SERIES, MARKERS)))
    found = sorted(set(bounds), key=[*BOUND_NAMES, *sorted(set(bounds))].index)
    return [(bound, *looks.get(bound, (MUTED, "X")), _bound_name(bound)) for bound in found]


def _bound_name(bound: str) -> str:
    return BOUND_NAMES.get(bound, cut(bound, 20))


def _grouped(items: Iterable, key: Callable[[Any], Hashable]) -> dict[Any, list]:
    groups: dict[Any, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
