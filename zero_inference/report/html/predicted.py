"""Predicted against measured: the time of each run over the time that its plan predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zero_inference.report.html.drawing import ROOM, Drawing, Row, row_figures
from zero_inference.report.html.svg import GRID, INK, SERIES
from zero_inference.report.prediction import within_in_words
from zero_inference.report.run import Run

DECODE_WITHIN, PREFILL_WITHIN = 0.10, 0.15  # the bands, to either side of 1
LOOKS = (("decode", SERIES[1], "o"), ("prefill", SERIES[0], "s"))  # colours as in the phases
FARTHEST = 4.0  # times as long, or a quarter: marks beyond stand at the edge as arrows
TICKS = (1, 0.5, 2, 0.25, 4, 1.5, 0.7, 1.25, 0.8, 1.1, 0.9, 3)  # as many as have room, the first of them first
TICK_ROOM = 30  # points


@dataclass(frozen=True)
class _Ratios:
    """Measured time by predicted time of a run; None where one of the two is not known."""

    run: int
    decode: float | None
    prefill: float | None

    @property
    def known(self) -> list[float]:
        return [ratio for ratio in (self.decode, self.prefill) if ratio is not None]

    @property
    def text(self) -> str:
        named = (("decode", self.decode), ("prefill", self.prefill))
        return ", ".join(f"{phase} {_times(ratio)}" for phase, ratio in named if ratio is not None)


def predicted_against_measured(runs: list[Run]) -> list[Drawing]:
    """A row for each run whose record has a prediction, farthest from it first; marks for decode and prefill."""
    found = [(run, _ratios(run)) for run in runs if not run.failed]
    rows = [Row(run.label, run.rest, ratios.text, ratios) for run, ratios in found if ratios.known]
    if not rows:
        return []
    rows.sort(key=lambda row: -_distance(row.data.known[0]))
    known = [ratio for row in rows for ratio in row.data.known]
    low = max(1 / FARTHEST, min(1 / 1.25, *known)) / 1.05
    high = min(FARTHEST, max(1.25, *known)) * 1.05

    def mark(axes, y: float, data: _Ratios) -> None:
        for within in (PREFILL_WITHIN, DECODE_WITHIN):  # one on the other is darker
            axes.barh(y, 2 * within, left=1 - within, height=0.9, color=GRID, alpha=0.5, linewidth=0, zorder=0)
        axes.plot([low, high], [y, y], color=GRID, linewidth=0.8, zorder=1)
        axes.plot([1, 1], [y - 0.45, y + 0.45], color=INK, linewidth=1, zorder=2)
        for (phase, colour, marker), shift in zip(LOOKS, (-0.16, 0.2)):
            if ratio := getattr(data, phase):
                axes.plot(
                    [min(max(ratio, low), high)],
                    [y + shift],
                    "<" if ratio < low else ">" if ratio > high else marker,
                    markersize=6,
                    color=colour,
                    clip_on=False,
                    zorder=3,
                    gid=f"{phase}-of-{data.run}",
                )

    def finish(axes) -> None:
        _ratio_axis(axes, low, high)

    caption = _caption([row.data for row in rows])
    if line := within_in_words([run for run, ratios in found if ratios.known]):
        caption += f" {line[0].upper()}{line[1:]}."
    if any(not low <= ratio <= high for ratio in known):
        caption += " An arrow: beyond the edge."
    return row_figures(
        "predicted",
        "Predicted against measured",
        rows,
        mark,
        finish,
        "measured time / predicted time",
        caption,
        legend=[look for look in LOOKS if any(getattr(row.data, look[0]) for row in rows)],
    )


def _ratios(run: Run) -> _Ratios:
    return _Ratios(run.number, run.time_over_predicted("decode_s"), run.time_over_predicted("prefill_s"))


def _distance(ratio: float) -> float:
    """Half the predicted time is as far off as twice the predicted time."""
    return abs(math.log(ratio))


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.01 <= ratio < 1000 else f"{ratio:.1e}"


def _caption(data: Sequence[_Ratios]) -> str:
    """How many runs were near their prediction."""
    parts = []
    for phase, within, band, ratios in (
        ("decode", DECODE_WITHIN, "inner band", [each.decode for each in data if each.decode]),
        ("prefill", PREFILL_WITHIN, "outer band", [each.prefill for each in data if each.prefill]),
    ):
        if not ratios:
            continue
        near = sum(1 - within <= ratio <= 1 + within for ratio in ratios)
        of = f"within {within:.0%} of the prediction ({band})"
        if len(ratios) == 1:
            parts.append(f"the {phase} time is {'' if near else 'not '}{of}")
        else:
            median = _times(statistics.median(ratios))
            parts.append(f"{near} of {len(ratios)} {phase} times are {of}, their median {median}")
    return (
        "Measured time over the time that the plan predicted before loading, farthest from 1 first; right of 1 the run was slower. "
        f"{'; '.join(parts)}."
    )


def _ratio_axis(axes, low: float, high: float) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    per_point = math.log(high / low) / ROOM
    ticks: list[float] = []
    for tick in TICKS:
        if low <= tick <= high and all(abs(math.log(tick / other)) >= TICK_ROOM * per_point for other in ticks):
            ticks.append(tick)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
