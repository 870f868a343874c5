"""Python's garbage collector: off while libraries are imported, and limited to new objects while steps are timed.

A full collection visits every object, those of torch and transformers too.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

_postponed = False


@contextlib.contextmanager
def postpone_collections() -> Iterator[None]:
    """Disable the collector until `resume_collections` or the end of the block, which restores it, for imports of libraries."""
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
    """End `postpone_collections`: freeze existing objects (gc.freeze), then enable the collector. Does nothing outside of it."""
    global _postponed
    if _postponed:
        _postponed = False
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Freeze existing objects within the block: a full collection takes longer than a ring of layers. Frozen ones stay frozen."""
    were_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not were_frozen:
            gc.unfreeze()
