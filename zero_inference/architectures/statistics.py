"""Speedups with confidence intervals, percentiles, and differences of scores.

The steps of a run are not independent: they share the process, the clock rate and the machine's other users. So the unit is the run. Runs
alternate (A B B A), and each is compared with the baseline's run of the same pass, next to it, so that drift cancels. The bootstrap
resamples these pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

# At most 1 in 20 comparisons of equal arms may find a difference. The bootstrap is not exact: with 0.95 up to 0.053 of comparisons did,
# with 0.97 0.011 to 0.035 (1000 or more draws each of normal, heavy-tailed (t, 2 degrees) and jumping noise, 6 to 40 pairs).
CONFIDENCE = 0.97
# All ratios of n pairs of equal arms are on one side of 1 in 2 of 2^n cases; 6 is the first n where that is below 5%.
LEAST_PAIRS = 6
RESAMPLES = 4_000
# A percentile needs at least one sample beyond it.
LEAST_SAMPLES = {50: 1, 95: 20, 99: 100}

# Items that a verdict on scores needs: between equal models of any accuracy a difference was found in up to 5.3% of cases with 8 items,
# and in 3.5% with 30 (all outcomes counted).
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
    """Return the median of candidate / baseline over pairs of runs, with its interval.

    The interval is the "expanded percentile" bootstrap (Hesterberg 2015, "What teachers should know about the bootstrap", section 4.2): the
    percentiles move outwards by as much as Student's t is wider than the normal distribution, because the plain interval of few pairs
    misses far more often than its level.

    Args:
        candidate, baseline: rates above 0 (token/s), one for each run; entries of the same index ran next to each other.

    Raises:
        ValueError: no runs, lists of different lengths, or a rate that is not above 0.
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
    found = stats.bootstrap(
        (logs,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=1 - 2 * expanded_tail(pairs),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = np.exp(found.confidence_interval)
    return Ratio(middle, float(low), float(high), pairs)


def expanded_tail(n: int) -> float:
    """Return the probability below the lower end of the interval of `n` samples: `Phi(-sqrt(n / (n - 1)) t)`, t Student's quantile of
    n - 1 degrees of freedom."""
    return float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)))


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """Return the 50th, 95th or 99th percentile (interpolated); None below 1, 20 and 100 samples."""
    if len(samples) < LEAST_SAMPLES[percent]:
        return None
    return float(np.percentile(samples, percent))


@dataclass(frozen=True)
class Score:
    """A mean of `items` values between 0 and 1, and its standard `error`; None where not recorded."""

    value: float
    error: float | None
    items: int | None

    @property
    def cautious_error(self) -> float:
        """`error`, at least that of a share with one right and one wrong answer added, `p = (value n + 1) / (n + 2)` (Agresti and Caffo
        2000): answers that are all alike have no spread."""
        n = self.items
        p = (self.value * n + 1) / (n + 2)
        return max(self.error, math.sqrt(p * (1 - p) / (n + 2)))


def difference(score: Score, baseline: Score) -> tuple[float, float | None, str]:
    """Return (score - baseline, its standard error, verdict).

    The verdict is higher, lower or no difference; `NO_ERROR` where a standard error is unknown, `TOO_FEW_ITEMS` where the number of items
    is below `LEAST_ITEMS` or unknown. The errors add as of independent samples, `sqrt(e1^2 + e2^2)`, which is cautious for models that
    answered the same questions.
    """
    apart = score.value - baseline.value
    if score.error is None or baseline.error is None:
        return apart, None, NO_ERROR
    spread = math.hypot(score.error, baseline.error)
    if min(score.items or 0, baseline.items or 0) < LEAST_ITEMS:
        return apart, spread, TOO_FEW_ITEMS
    bound = stats.norm.ppf(0.5 + CONFIDENCE / 2) * math.hypot(score.cautious_error, baseline.cautious_error)
    return apart, spread, NO_DIFFERENCE if abs(apart) <= bound else "higher" if apart > 0 else "lower"
