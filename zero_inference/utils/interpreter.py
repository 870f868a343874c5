"""Python's own costs: the garbage collector, off while libraries are imported and limited to new objects while steps are timed, and memory
for calls.

A full collection visits every object, those of torch and transformers too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable)

STACK_WORDS = 70_000  # of 8 bytes: CPython maps 1 MiB for such a call; the calls inside use what it leaves, half a MiB
_postponed = _frozen = False  # by this module; gc.get_freeze_count() walks all objects, 41 ms (cpu/plan_time.txt)


@contextlib.contextmanager
def postpone_collections() -> Iterator[None]:
    """Disable the collector until `resume_collections` or the end of the block, which restores it, for imports of libraries."""
    global _postponed, _frozen
    enabled, were_frozen = gc.isenabled(), _frozen
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        gc.collect()  # an earlier run of this process may have left a model on the device
    gc.disable()
    _postponed = enabled
    try:
        yield
    finally:
        _postponed = False
        if not were_frozen:
            _frozen = False
            gc.unfreeze()
        if enabled:
            gc.enable()


def resume_collections() -> None:
    """End `postpone_collections`: freeze existing objects (gc.freeze), then enable the collector. Does nothing outside of it."""
    global _postponed, _frozen
    if _postponed:
        _postponed, _frozen = False, True
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Freeze existing objects within the block: a full collection takes longer than a ring of layers. An inner block ends nothing."""
    global _frozen
    were_frozen = _frozen
    gc.collect()
    gc.freeze()
    _frozen = True
    try:
        yield
    finally:
        if not were_frozen:
            _frozen = False
            gc.unfreeze()


def reserve_stack(function: Function) -> Function:
    """Decorate `function` so that the Python calls inside share one piece of memory of half a MiB.

    CPython (3.11 and later) keeps calls in pieces of 16 KiB and frees a piece when the first call in it returns. A loop that is just as
    deep as a piece ends maps and unmaps memory for each call: 720,000 times in five plans of a 70B model, a third of their time
    (benchmarks/LOG.md).
    """

    def reserved(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    reserved.__code__ = reserved.__code__.replace(co_stacksize=STACK_WORDS)  # memory that is not touched costs nothing
    return cast(Function, functools.wraps(function)(reserved))
