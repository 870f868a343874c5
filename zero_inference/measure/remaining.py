"""How long the generations of a run still take, told from those that are done and from the steps of the one under way."""

from __future__ import annotations

import time
from collections.abc import Callable


class Remaining:
    """Seconds to go, while generations of as many tokens each follow each other.

    Args:
        generations: how many there will be; one that is not in the count can be begun with `extra`.
        gen_len: tokens of each.
        clock: seconds, as time.monotonic.
    """

    def __init__(self, generations: int, gen_len: int, clock: Callable[[], float] = time.monotonic):
        self._to_come, self._gen_len, self._clock = generations, gen_len, clock
        self._latest_s: float | None = None  # of a whole generation: later ones are not cold
        self._start = self._first = 0.0
        self._token = 0

    def begin(self, extra: bool = False) -> None:
        """A generation starts."""
        self._to_come -= not extra
        self._start, self._token = self._clock(), 0

    def token(self, number: int) -> float | None:
        """Token `number` of it, from 1, is there: seconds to the end of all, None where they cannot be told yet."""
        now, self._token = self._clock(), number
        if number == 1:
            self._first = now
        whole_s = self._latest_s
        if whole_s is None:
            if number < min(3, self._gen_len):  # the second step is often one more cold one
                return None
            step_s = (now - self._first) / max(1, number - 1)
            whole_s = self._first - self._start + step_s * (self._gen_len - 1)
        return max(0.0, whole_s - (now - self._start)) + whole_s * max(0, self._to_come)

    def end(self) -> None:
        """The generation is over; one that ended early tells nothing."""
        if self._token == self._gen_len:
            self._latest_s = self._clock() - self._start

    def skip(self, generations: int) -> None:
        """So many of those to come will not be."""
        self._to_come -= generations
