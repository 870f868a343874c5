"""Whether a run fits, how fast it is predicted to be, and what would fit where it does not: the first line of `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit
from zero_inference.planning.changes import changes_that_fit, more_memory, one_of
from zero_inference.planning.memory import shown
from zero_inference.planning.plan import Plan
from zero_inference.planning.ranges import seconds_in_words
from zero_inference.planning.timing import why_unknown
from zero_inference.utils.format import significant

NOT_MEASURED = "there are no current measurements of this machine (zero-inference link --save makes them, once)"


@dataclass(frozen=True)
class Faster:
    """A change of options that is predicted to decode clearly faster.

    Attributes:
        options: to add to the command, such as `--quant-bits 4`.
        tokens_per_s: of decoding with them.
        times: how many times the token/s without them.
        at_most: they are an upper bound.
    """

    options: str
    tokens_per_s: float
    times: float
    at_most: bool


def faster_in_words(found: Sequence[Faster]) -> str:
    """Such as "--quant-bits 4 gives 3.39 token/s (4.8 times as many), --batch-size 64 gives 38.3 token/s (54 times)"."""
    return ", ".join(
        f"{each.options} gives {'at most ' if each.at_most else ''}{significant(each.tokens_per_s)} token/s "
        f"({significant(each.times) if each.times >= 10 else f'{each.times:.1f}'} times{' as many' if not number else ''})"
        for number, each in enumerate(found)
    )


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        why: it does not fit, a sentence; None where it does.
        changes: what to add to the command so that it fits, each for itself; empty where it fits, or where nothing helps.
        unpredicted: why nobody knows how fast it is; None where that is predicted, or where it does not fit.
        said: all of it in a line that begins with `word`.
    """

    fits: bool
    why: str | None
    changes: list[str]
    unpredicted: str | None
    said: str

    @property
    def word(self) -> str:
        return DoesNotFit.FITS if self.fits else DoesNotFit.VERDICT


def verdict_of(job: Job, plan: Plan | DoesNotFit) -> Verdict:
    """Of the plan of `job`, or of why there is none."""
    if isinstance(plan, Plan) and plan.fits:
        unpredicted = _why_unpredicted(plan)
        return Verdict(True, None, [], unpredicted, f"{DoesNotFit.FITS} {_speed(plan, unpredicted)}")
    why = _shortages(plan) if isinstance(plan, Plan) else str(plan)
    changes = changes_that_fit(job)
    advice = (
        f"It would fit with {one_of(changes)}."
        if changes
        else f"No change of options makes it fit, nor do two together: use {more_memory(job)}."
    )
    return Verdict(False, why, changes, None, f"{DoesNotFit.VERDICT} {why} {advice}")


def _shortages(plan: Plan) -> str:
    return f"It needs {' and '.join(need.shortage() for need in shown(plan.needs) if not need.fits)}."


def _why_unpredicted(plan: Plan) -> str | None:
    if plan.times is not None:
        return None
    description = plan.job.machine.described()
    return NOT_MEASURED if description is None else why_unknown(plan.weights, description)


def _speed(plan: Plan, unpredicted: str | None) -> str:
    loading = None if plan.load_s is None else f"loading {seconds_in_words(plan.load_s, plan.load_range_s)}"
    if plan.times is None:
        return f"No speed is predicted: {unpredicted}." + (f" Predicted: {loading}." if loading else "")
    return f"Predicted: {', '.join(filter(None, (plan.times.in_words(plan.job.config.batch_size), loading)))}."
