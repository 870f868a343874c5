"""When Python's garbage collector looks for cycles: not while libraries are imported, and while steps are timed only at what is new.

A full collection looks at every object there is, those of torch and transformers too.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

_postponed = False


@contextlib.contextmanager
def postpone_collections() -> Iterator[None]:
    """No collection until `resume_collections` or the end, which leaves the collector as it was before.

    For the time in which libraries are imported: that makes many objects and hardly any garbage (docs/performance.md, "Start of a run").
    """
    global _postponed
    enabled = gc.isenabled()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        gc.collect()  # an earlier run of this process may have left a model on the device
    gc.disable()
    _postponed = enabled
    try:
        yield
    finally:
        _postponed = False
        gc.unfreeze()
        if enabled:
            gc.enable()


def resume_collections() -> None:
    """End `postpone_collections`: collect again, but look at nothing that exists already. Does nothing outside of it."""
    global _postponed
    if _postponed:
        _postponed = False
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Keep what exists already out of the collections: nothing is launched during one, and a full one outlasts a ring of layers. Where
    some of it was kept out before, all of it is from now on."""
    kept_out = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not kept_out:
            gc.unfreeze()
