"""One drawing of the page: its canvas, rows that carry their label above the mark, and text that fits its place."""

from __future__ import annotations

import bisect
import functools
import math
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_inference.report.html.svg import MUTED, STYLE, embedded

WIDTH = 330  # points; on a phone of 390 pixels a point is a little more than a pixel
LEFT, RIGHT = 12, 14
ROOM = WIDTH - LEFT - RIGHT
LEGEND_ROOM = WIDTH - 40
LINE, MARK, FOOT = 13, 20, 34  # a row is one or two lines of text and a mark
ROWS_AT_ONCE = 16  # so that a drawing fits on a printed page
MOST_ROWS = (
    20 * ROWS_AT_ONCE
)  # a row takes 10 ms and 5 KB of the page; thousands would take minutes and be too much for a browser
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Drawing:
    """One figure: `svg` is markup, the rest is plain text. `folded`: shown on request."""

    title: str
    caption: str
    svg: str
    folded: bool = False


@dataclass(frozen=True)
class Row:
    """`label` and `value` stand left and right above the mark, `rest` under the label; `data` is what the mark shows."""

    label: str
    rest: str
    value: str
    data: Any


def text_width(text: str) -> float:
    """In points, in the font with the widest letters that the browser may take."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    # That font has no East Asian letters; they are as wide as they are high.
    known = "".join("W" if unicodedata.east_asian_width(letter) in "WF" else letter for letter in text)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        return text_to_path.get_text_width_height_descent(known, FontProperties(size=STYLE["font.size"]), ismath=False)[
            0
        ]


@functools.lru_cache(10_000)  # a run has the same words in several drawings
def fitting(text: str, room: float) -> str:
    """One line at most `room` points wide, cut in the middle."""
    text = " ".join(text.split())
    if len(text) <= 200 and text_width(text) <= room:
        return text
    lengths = range(1, min(len(text) - 1, 200) + 1)
    fit = bisect.bisect_right(lengths, room, key=lambda letters: text_width(_without_middle(text, letters)))
    return _without_middle(text, max(1, fit))


def _without_middle(text: str, letters: int) -> str:
    head = (letters + 1) // 2
    return f"{text[:head]}…{text[len(text) - (letters - head) :]}"


def row_figures(
    name: str,
    title: str,
    rows: list[Row],
    mark: Callable,
    finish: Callable,
    x_label: str,
    caption: str,
    legend: Sequence[tuple[str, str, str]] = (),
    what: str = "runs",
) -> list[Drawing]:
    """The first `MOST_ROWS` rows in drawings of at most `ROWS_AT_ONCE`, whose titles say of how many; all but the first are folded."""
    drawings = []
    for start in range(0, min(len(rows), MOST_ROWS), ROWS_AT_ONCE):
        chunk = rows[start : start + ROWS_AT_ONCE]
        parts_title = (
            title
            if len(rows) <= ROWS_AT_ONCE
            else f"{title} ({what} {start + 1} to {start + len(chunk)} of {len(rows)})"
        )
        text = LINE * (2 if any(row.rest for row in chunk) else 1)
        unit = (text + MARK) / MARK  # of a row on the axis, on which a mark's place is 1 high
        head = LINE * math.ceil(len(legend) / 2) + 6 if legend else 2
        height = head + MARK * unit * len(chunk) + FOOT
        figure, axes = canvas(WIDTH, height, LEFT, RIGHT, head, FOOT)
        for index, row in enumerate(chunk):
            value = fitting(row.value, ROOM / 2)
            top, across = index * unit, axes.get_yaxis_transform()
            axes.text(
                0,
                top + 0.5 * LINE / MARK,
                fitting(row.label, ROOM - text_width(value) - 8),
                transform=across,
                va="center",
                ha="left",
            )
            axes.text(1, top + 0.5 * LINE / MARK, value, transform=across, va="center", ha="right")
            axes.text(
                0,
                top + 1.5 * LINE / MARK,
                fitting(row.rest, ROOM),
                transform=across,
                va="center",
                ha="left",
                color=MUTED,
            )
            mark(axes, top + text / MARK + 0.42, row.data)
        finish(axes)
        axes.set_ylim(unit * len(chunk), 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(x_label)
        _legend(figure, legend)
        # Said once for each row, so that readers who cannot see the drawing have its figures.
        described = "; ".join(f"{', '.join(filter(None, (row.label, row.rest)))}: {row.value}" for row in chunk)
        drawings.append(
            Drawing(parts_title, caption, embedded(figure, f"{name}-{start}", parts_title, described), folded=start > 0)
        )
    return drawings


def _legend(figure, legend: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.lines import Line2D

    if legend:
        handles = [
            Line2D([], [], color=colour, marker=marker, linestyle="", label=text) for text, colour, marker in legend
        ]
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(LEFT / WIDTH, 1),
            ncols=2,
            borderpad=0,
            borderaxespad=0,
            handletextpad=0.4,
            columnspacing=1.2,
            labelspacing=0.2,
            handlelength=1.2,
        )


def legend_below(figure, handles: Sequence, labels: Sequence[str]) -> None:
    """A line for each of `handles`, at the lower left."""
    figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 0),
        borderpad=0,
        labelspacing=0.25,
        handlelength=2.2,
        borderaxespad=0.2,
    )


def canvas(width: float, height: float, left: float, right: float, top: float, bottom: float):
    """A figure of that size in points, and axes with these margins."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )
    return figure, axes


def log_axis(axis, low: float, high: float, most_decades: int = 12) -> None:
    """Makes an x or y axis logarithmic between these, with ticks at round numbers; above `most_decades` at some powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    decades = math.log10(high / low)
    axis.set_major_locator(
        LogLocator(
            base=10, subs=(1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.5 else (1,), numticks=most_decades
        )
    )
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
