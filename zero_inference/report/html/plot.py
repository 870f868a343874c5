"""Building blocks of the figures: axes, rows of marks with their labels, and SVG in the colours of the page's theme."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from zero_inference.utils.format import format_number

WIDTH = 330  # points; on a phone of 390 pixels a point is a little more than a pixel
LINE, MARK = 13, 20  # points: a line of text, the bar or marks below it
LETTERS = 52  # of `WIDTH`
MOST_ROWS = 24  # of a figure, so that a page of paper holds it; the table has all runs
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
# Figures are drawn in these colours, which become the variables of page.css: a light and a dark value each.
INK, MUTED, GRID = "#000101", "#000102", "#000103"
SERIES = ("#000201", "#000202", "#000203", "#000204", "#000205", "#000206")
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid"} | {SERIES[i]: f"series-{i + 1}" for i in range(len(SERIES))}
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, selectable, searchable
    "svg.hashsalt": "zero-inference",
    "text.parse_math": False,  # a $ in a model's name is a $
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.markersize": 7,
}


@dataclass(frozen=True)
class Plot:
    """A figure with its texts; `description` is for screen readers."""

    title: str
    caption: str
    description: str
    figure: Figure


@dataclass(frozen=True)
class Row:
    """`label` (above `rest`) and `value` are left and right above the mark of `data`."""

    label: str
    rest: str
    value: str
    data: Any


Draw = Callable[[Axes, np.ndarray, float, Sequence[Any]], None]


def row_figure(title: str, caption: str, x_label: str, rows: list[Row], draw: Draw, what: str = "runs") -> list[Plot]:
    """Return a figure of the first `MOST_ROWS` rows; none without rows.

    Args:
        draw: gets the axes, the middle of each row's mark, the height of a bar, and the `data` of each row.
        what: what a row is, for the title.
    """
    if not rows:
        return []
    shown = rows[:MOST_ROWS]
    lines = 2 if any(row.rest for row in shown) else 1
    height = lines * LINE + MARK  # points of a row, which is 1 on the axis
    axes = new_axes(height * len(shown) + 45)
    for index, row in enumerate(shown):
        value = cut(row.value, LETTERS - 16)
        label = f"{cut(row.label, LETTERS - len(value) - 1)}\n{cut(row.rest)}".strip()
        where = {"y": index + 2 / height, "va": "top", "transform": axes.get_yaxis_transform(), "in_layout": False}
        axes.text(0, s=label, **where)
        axes.text(1, s=value, ha="right", **where)
    draw(axes, np.arange(len(shown)) + 1 - 0.5 * MARK / height, 0.6 * MARK / height, [row.data for row in shown])
    axes.set(xlabel=x_label, ylim=(len(shown), 0), yticks=[])
    axes.spines["left"].set_visible(False)
    if len(rows) > len(shown):
        title += f" (first {len(shown)} of {len(rows)} {what})"
    described = "; ".join(f"{join(row.label, row.rest)}: {row.value}" for row in shown)
    return [make_plot(axes, title, caption, described)]


def new_axes(height: float) -> Axes:
    return Figure(figsize=(WIDTH / 72, height / 72), layout="constrained").subplots()


def make_plot(axes: Axes, title: str, caption: str, description: str) -> Plot:
    """Return the plot of finished axes, with a legend below."""
    figure, by_label = axes.figure, dict(zip(*reversed(axes.get_legend_handles_labels())))
    if by_label:
        columns = 2 if max(map(len, by_label)) <= LETTERS // 2 - 4 else 1
        lines = math.ceil(len(by_label) / columns)
        figure.set_figheight(figure.get_figheight() + (LINE * lines + 8) / 72)
        figure.legend(by_label.values(), by_label, loc="outside lower left", ncols=columns, labelspacing=0.2)
    return Plot(title, caption, description, figure)


def set_log_axis(axis, values: Iterable[float], margin: float = 1.5) -> None:
    """Make the axis logarithmic over positive `values`, with ticks at round numbers."""
    low, high = min(values) / margin, max(values) * margin
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    decades = math.log10(high / low)
    steps = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2) if decades < 0.5 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=6))
    axis.set_major_formatter(lambda value, position: format_number(value) if 1e-3 < value < 1e5 else f"{value:.0e}")
    axis.set_minor_locator(NullLocator())


def cut(text: str, letters: int = LETTERS) -> str:
    """Return one line of at most so many letters, without its middle if it is longer."""
    text, tail = " ".join(text.split()), (letters - 1) // 2
    return text if len(text) <= letters else f"{text[: letters - 1 - tail]}…{text[-tail:]}"


def join(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def embed(figure: Figure, name: str, title: str, description: str) -> str:
    """Return the figure as an `<svg>` element of the page.

    Args:
        name: prefix of the ids, unique in the page.
        title, description: read by screen readers.
    """
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has other fonts
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", SVG.strip("{}"))
    ElementTree.register_namespace("xlink", XLINK.strip("{}"))
    root = ElementTree.fromstring(file.getvalue())
    root.remove(root.find(f"{SVG}metadata"))
    for element in root.iter():
        for key, value in element.attrib.items():
            element.set(key, _attribute(key, value, name))
    for key in ("width", "height"):  # as wide as the page allows
        del root.attrib[key]
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{SVG}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(index, element)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == f"{XLINK}href":
        return value.replace("#", f"#{name}-")
    if key in ("style", "clip-path"):
        value = value.replace("url(#", f"url(#{name}-")
        return re.sub(r"#\w{6}\b", lambda m: f"var(--{VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], value)
    return re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", value)  # a hundredth of a point is invisible
