"""When Python's garbage collector looks for cycles: neither while libraries are imported nor while steps are timed.

A full collection looks at every object there is, and those of torch and transformers alone take it 0.1 to 0.4 s.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """No collection until `look_from_here` or the end.

    For the time in which libraries are imported: that makes many objects and hardly any garbage, and collections were a fifth of it
    (4.8 instead of 5.8 s of one core up to a first model of transformers).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def look_from_here() -> None:
    """Collect again, but never what exists already."""
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keep what exists already out of the collections: nothing is launched during one, and a full one outlasts a ring of layers."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
