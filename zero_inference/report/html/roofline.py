"""The roofline of a machine with its runs: tokens a second against the bytes that a token needs, a figure for each machine."""

from __future__ import annotations

import dataclasses
import math

from zero_inference.report.html.bounds import bound_name, bounds_among, look
from zero_inference.report.html.drawing import (
    LEGEND_ROOM,
    MOST_ROWS,
    WIDTH,
    Drawing,
    canvas,
    fitting,
    legend_below,
    log_axis,
)
from zero_inference.report.html.machines import Machine, Point, machines_of
from zero_inference.report.html.places import Box, places_beside
from zero_inference.report.html.svg import INK, embedded
from zero_inference.report.run import BOUND_NAMES, Run
from zero_inference.utils.format import GIB, format_bytes, format_number

MACHINES_AT_ONCE, MOST_MACHINES = 2, 12
LEFT, RIGHT, TOP, BOTTOM, PLOT_HEIGHT, LEGEND_LINE = 44, 20, 20, 38, 230, 13.5  # points
LEAST_SPAN = 6.0  # an axis reaches over at least this factor
CAPTION = (
    "Each mark is a run, numbered as in the table where there is room; colour and shape show the limit that applies. The lines are the "
    "token/s that the highest rates measured here allow; a thin stem ends at what the run's own rates allow. "
)


def roofline(runs: list[Run]) -> list[Drawing]:
    """A figure for each machine that the runs have enough data for, the one with most runs first."""
    machines = machines_of(runs)
    drawings = [
        _figure(f"roofline-{index}", machine, folded=index >= MACHINES_AT_ONCE)
        for index, machine in enumerate(machines[:MOST_MACHINES])
    ]
    if len(machines) > MOST_MACHINES:
        note = f" Not drawn: {len(machines) - MOST_MACHINES} more machines."
        drawings[0] = dataclasses.replace(drawings[0], caption=drawings[0].caption + note)
    return drawings


def _figure(name: str, machine: Machine, folded: bool) -> Drawing:
    caption = CAPTION + _what_x_is(machine)
    if len(machine.points) > MOST_ROWS:
        caption += f" Of {len(machine.points)} runs here, the first {MOST_ROWS} of the table are drawn."
        machine = dataclasses.replace(machine, points=machine.points[:MOST_ROWS])
    bounds = bounds_among([*machine.rates, *(point.bound for point in machine.points)])
    legend = LEGEND_LINE * len(bounds) + 4
    height = TOP + PLOT_HEIGHT + BOTTOM + legend
    figure, axes = canvas(WIDTH, height, LEFT, RIGHT, TOP, BOTTOM + legend)
    _set_axes(axes, machine.points)
    _draw_lines(axes, machine)
    _draw_points(axes, machine.points)
    _number_points(axes, machine)
    _draw_legend(figure, machine, bounds)
    title = f"Roofline: {machine.name}"
    return Drawing(title, caption, embedded(figure, name, title, _described(machine)), folded)


def _set_axes(axes, points: list[Point]) -> None:
    log_axis(axes.xaxis, *_span([point.bytes_per_token / GIB for point in points]), most_decades=5)
    log_axis(axes.yaxis, *_span([value for point in points for value in (point.tokens_per_s, point.limit) if value]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(
            lambda value, position: format_number(value) if 1e-3 <= value < 99_999 else f"{value:.0e}"
        )
    axes.set_xlabel("GiB that a token needs")
    axes.set_title("decode throughput (token/s)", loc="left", x=-32 / (WIDTH - LEFT - RIGHT), color=INK)
    axes.grid(True)


def _span(values: list[float]) -> tuple[float, float]:
    """A margin around the values, and at least `LEAST_SPAN` from end to end."""
    low, high = min(values), max(values)
    margin = max(1.5, math.sqrt(LEAST_SPAN / (high / low)))
    return low / margin, high * margin


def _draw_lines(axes, machine: Machine) -> None:
    low, high = axes.get_xlim()
    for bound, (_, most) in machine.rates.items():
        axes.plot(
            [low, high],
            [most / GIB / low, most / GIB / high],
            color=look(bound)[0],
            linewidth=1.4,
            zorder=2,
            gid=f"line-{bound}",
        )


def _draw_points(axes, points: list[Point]) -> None:
    for bound in bounds_among(point.bound for point in points):
        colour, marker = look(bound)
        bound_so = [point for point in points if point.bound == bound]
        stems = [(p.bytes_per_token / GIB, p.tokens_per_s, p.limit) for p in bound_so if p.limit]
        if stems:
            x, begin, end = zip(*stems)
            axes.vlines(x, begin, end, color=colour, linewidth=1, zorder=2)
            axes.plot(x, end, "_", color=colour, markersize=6, markeredgewidth=1.2, zorder=2)
        axes.plot(
            [point.bytes_per_token / GIB for point in bound_so],
            [point.tokens_per_s for point in bound_so],
            marker,
            color=colour,
            alpha=0.9,
            zorder=3,
            gid=f"runs-{bound}" if bound in BOUND_NAMES else None,
        )


def _number_points(axes, machine: Machine) -> None:
    """The runs' numbers where there is room, if possible not on a line or a stem."""
    to_points = 72 / axes.figure.dpi

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y)) * to_points
        return float(across), float(up)

    marks = [place(point.bytes_per_token / GIB, point.tokens_per_s) for point in machine.points]
    stems = [
        Box(x - 1, min(y, end) - 1, x + 1, max(y, end) + 1)
        for (x, y), point in zip(marks, machine.points)
        for end in ([place(point.bytes_per_token / GIB, point.limit)[1]] if point.limit else [])
    ]
    frame = axes.get_window_extent()
    within = Box(*(edge * to_points for edge in (frame.x0, frame.y0, frame.x1, frame.y1)))
    on_lines = []
    for _, most in machine.rates.values():  # as boxes along them
        for step in range(int(within.left), int(within.right), 4):
            x = axes.transData.inverted().transform((step / to_points, 0))[0]
            up = place(x, most / GIB / x)[1]
            on_lines.append(Box(step - 2, up - 3, step + 2, up + 3))
    texts = [str(point.run.number) for point in machine.points]
    for text, middle in zip(texts, places_beside(marks, texts, stems + on_lines, within)):
        if middle is not None:
            axes.annotate(text, middle, xycoords="figure points", ha="center", va="center", zorder=4)


def _draw_legend(figure, machine: Machine, bounds: list[str]) -> None:
    from matplotlib.lines import Line2D

    binding = {point.bound for point in machine.points}
    handles = []
    for bound in bounds:
        colour, marker = look(bound)
        handles.append(
            Line2D(
                [],
                [],
                color=colour,
                linestyle="-" if bound in machine.rates else "",
                linewidth=1.4,
                marker=marker if bound in binding else "",
                label=fitting(f"{bound_name(bound)}{_rate_text(machine, bound)}", LEGEND_ROOM),
            )
        )
    legend_below(figure, handles, [handle.get_label() for handle in handles])


def _rate_text(machine: Machine, bound: str) -> str:
    """The line's rate, and the lowest where runs differ in it, as cores read some kinds of weights faster than others."""
    if bound not in machine.rates:
        return ""
    least, most = (format_number(rate / 1e9) for rate in machine.rates[bound])
    alike = machine.rates[bound][1] < 1.05 * machine.rates[bound][0]
    return f": {most} GB/s" if alike else f": {least} to {most} GB/s"


def _what_x_is(machine: Machine) -> str:
    """What the bytes of a token are, of the rates that this machine has a line for."""
    outside = "that lie outside device memory, copied over the link or read by the host's cores"
    kinds = {
        "link": outside if "link_and_cores" in machine.rates else "that are copied over the link",
        "disk": "that are read from disk where that binds the run",
        "device_memory": "of device memory that are read where that binds it"
        if len(machine.rates) > 1
        else "of memory that are read",
        "host_memory": "of memory that are read",
    }
    known = [words for bound, words in kinds.items() if bound in machine.rates]
    return f"A token needs its share of the bytes of a step {'; '.join(known)}."


def _described(machine: Machine) -> str:
    lines = [f"{bound_name(bound)}{_rate_text(machine, bound)}" for bound in machine.rates]
    runs = [
        f"{', '.join(filter(None, (point.run.label, point.run.rest)))}: {format_number(point.tokens_per_s)} token/s at "
        f"{format_bytes(point.bytes_per_token)} a token, {point.run.share_of_limit:.1%} of its limit by {bound_name(point.bound)}"
        for point in machine.points
    ]
    return "; ".join(lines) + ". " + "; ".join(runs)
