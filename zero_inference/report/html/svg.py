"""Drawings that can stand inside a page: colours of the page's theme, ids of their own, a description for those who cannot see them."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

# The figures are drawn in these colours, which stand for the page's variables: page.html gives each a light and a dark value.
INK, MUTED, GRID, SURFACE = "#000101", "#000102", "#000103", "#000104"
SERIES = ("#000201", "#000202", "#000203", "#000204", "#000205", "#000206")
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    **{colour: f"--series-{index}" for index, colour in enumerate(SERIES, start=1)},
}
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, selectable, searchable
    "svg.hashsalt": "zero-inference",
    "text.parse_math": False,  # a $ in a model's name is a $
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 7,
}


def embedded(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an `<svg>` element to stand in HTML, as wide as its place.

    Args:
        name: makes the ids differ from those of the page's other figures.
        title, description: read out in place of the drawing.
    """
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has its own fonts
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(written.getvalue())
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        for key, value in element.attrib.items():
            element.set(key, _attribute(key, value, name))
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(index, element)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == f"{{{XLINK}}}href":
        return value.replace("#", f"#{name}-", 1)
    if key in ("d", "x", "y", "transform", "points"):
        return re.sub(
            r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", value
        )  # a hundredth of a point is seen by nobody
    value = re.sub(r"url\(#", f"url(#{name}-", value)
    if key == "style":
        return re.sub(
            r"#[0-9a-f]{6}", lambda match: f"var({_VARIABLES[match[0]]})" if match[0] in _VARIABLES else match[0], value
        )
    return value
