"""Refusals of keywords that a function does not have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from zero_inference.config.other_tools import OTHER_OPTIONS
from zero_inference.utils.suggestions import closest


def check_keywords(function: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that `function` does not have, with the nearest that it has.

    Args:
        elsewhere: advice for keywords of other functions.
    """
    for name in given:
        if name in known:
            continue
        if name in elsewhere:
            raise TypeError(f"{function}() has no keyword {name!r}: {elsewhere[name]}")
        advice = OTHER_OPTIONS.get(name.replace("_", "-"), ())  # another tool's name for it
        meant = [each.partition(" ")[0].strip("-,").replace("-", "_") for each in advice]
        near = [each for each in meant if each in known][:1] or closest(name, known)
        hint = f"did you mean {', '.join(near)}?" if near else f"help(zero_inference.{function}) lists them."
        raise TypeError(f"{function}() got an unexpected keyword {name!r}; {hint}")
