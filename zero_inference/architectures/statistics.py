"""How sure a speed-up is. Pure functions of numbers: no clock, no device.

Steps of one run are no independent samples: they share the process, its memory's place, the machine's clock and its other users.
So the run is the unit. Runs alternate (A B B A), and each is held against the baseline's run of the same pass, right next to it,
so that drift cancels; what is resampled are these pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# At most 1 in 20 comparisons of equal arms may find a difference. The bootstrap is only nearly exact, so it aims at 1 in 33: in 1000
# and more draws of normal, heavy-tailed (t, 2 degrees) and jumping noise each, with 6 to 40 pairs, it came to 0.011 to 0.035.
# Aiming at 1 in 20 it came to up to 0.053.
CONFIDENCE = 0.97
# With n pairs of equal arms all ratios fall on one side of 1 in 2 of 2^n cases; 6 is the first n where that is below 5%.
LEAST_PAIRS = 6
RESAMPLES = 4_000
# A percentile is read off the samples only where at least one of them lies beyond it.
LEAST_SAMPLES = {50: 1, 95: 20, 99: 100}

# Items of a task that a verdict takes. The standard error of a few answers is itself too rough: with equal models of any accuracy
# and as many items each, a difference was found in up to 5.3% of cases with 8 items and in 3.5% with 30 (all outcomes counted).
LEAST_ITEMS = 30

FASTER, SLOWER, NO_DIFFERENCE, TOO_FEW = "faster", "slower", "no difference", "too few runs"
NO_ERROR, TOO_FEW_ITEMS = "no standard error", "too few items"


@dataclass(frozen=True)
class Ratio:
    """A median ratio and its 97% interval, from `pairs` pairs of runs."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or `no difference` where the interval contains 1; `too few runs` below `LEAST_PAIRS`."""
        if self.pairs < LEAST_PAIRS:
            return TOO_FEW
        return FASTER if self.low > 1 else SLOWER if self.high < 1 else NO_DIFFERENCE


def speedup(candidate: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """How many times as fast `candidate` is: the median of its rates over the baseline's, pair by pair.

    The interval is the percentile bootstrap's of that median, over pairs, with the percentiles moved outwards by as much as
    Student's t is wider than the normal distribution (Hesterberg 2015, "What teachers should know about the bootstrap", section
    4.2: the "expanded percentile" interval): the plain one misses far more often than it says with few pairs.

    Args:
        candidate, baseline: a rate each run, above 0 (token/s); entries of the same place ran next to each other.

    Raises:
        ValueError: no runs, not as many of one as of the other, or a rate that is not above 0.
    """
    if len(candidate) != len(baseline) or not len(candidate):
        raise ValueError(f"{len(candidate)} runs against {len(baseline)}: each needs its partner of the same pass")
    rates = np.array([candidate, baseline], dtype=float)
    if not (np.isfinite(rates).all() and (rates > 0).all()):
        raise ValueError("a rate is not above 0")
    logs = np.log(rates[0] / rates[1])
    pairs = len(logs)
    middle = math.exp(np.median(logs))
    if pairs == 1:
        return Ratio(middle, 0.0, math.inf, 1)
    picks = np.random.default_rng(seed).integers(0, pairs, (RESAMPLES, pairs))
    medians = np.sort(np.median(logs[picks], axis=1))
    tail = expanded_tail(pairs)
    low, high = medians[int(tail * RESAMPLES)], medians[RESAMPLES - 1 - int(tail * RESAMPLES)]
    return Ratio(middle, math.exp(low), math.exp(high), pairs)


def expanded_tail(n: int) -> float:
    """Probability below the lower end of the expanded percentile interval of `n` samples: `Phi(-sqrt(n / (n - 1)) t)`, where t
    is Student's quantile of n - 1 degrees of freedom."""
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(0.5 + CONFIDENCE / 2, n - 1))


def student_quantile(probability: float, freedom: int) -> float:
    """Student's t with `freedom` degrees of freedom: the value below which it lies with `probability`, above 0.5."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)

    def below(t: float) -> float:
        angle = math.atan(
            t / math.sqrt(freedom)
        )  # t = sqrt(freedom) tan(angle): the density becomes cos(angle)^(freedom - 1)
        angles = np.linspace(0, angle, 4001)
        area = np.trapezoid(np.cos(angles) ** (freedom - 1), angles)
        return 0.5 + math.exp(log_scale) * math.sqrt(freedom) * float(area)

    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return high


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """The 50th, 95th or 99th percentile of `samples` (interpolated), None below 1, 20 and 100 samples."""
    if len(samples) < LEAST_SAMPLES[percent]:
        return None
    return float(np.percentile(samples, percent))


@dataclass(frozen=True)
class Score:
    """A mean of `items` values between 0 and 1 and its standard error; None for what was not recorded."""

    value: float
    error: float | None
    items: int | None

    @property
    def cautious_error(self) -> float:
        """`error`, but not less than that of a share with one right and one wrong answer more, `p = (value n + 1) / (n + 2)`
        (Agresti and Caffo 2000): answers that are all alike have no spread, and are no certainty for that."""
        n = self.items
        p = (self.value * n + 1) / (n + 2)
        return max(self.error, math.sqrt(p * (1 - p) / (n + 2)))


def difference(score: Score, baseline: Score) -> tuple[float, float | None, str]:
    """Difference of two scores: (score - baseline, its standard error, verdict).

    The verdict is higher, lower or no difference; `NO_ERROR` where a standard error is not known, `TOO_FEW_ITEMS` where the
    number of items is below `LEAST_ITEMS` or not known. The errors are added as of independent samples: `sqrt(e1^2 + e2^2)`.
    Models that answered the same questions are compared too carefully by that, never too boldly, as long as their answers do not
    oppose each other.
    """
    apart = score.value - baseline.value
    if score.error is None or baseline.error is None:
        return apart, None, NO_ERROR
    spread = math.hypot(score.error, baseline.error)
    if min(score.items or 0, baseline.items or 0) < LEAST_ITEMS:
        return apart, spread, TOO_FEW_ITEMS
    bound = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.hypot(score.cautious_error, baseline.cautious_error)
    return apart, spread, NO_DIFFERENCE if abs(apart) <= bound else "higher" if apart > 0 else "lower"
