"""State of the caller's process, which many calls share in a notebook: restored, and memory freed, after each call."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

# Models of `load` that are not unloaded.
LOADED: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def preserve_process_state(verbose: int) -> Iterator[None]:
    """Restore signal handlers and the verbosity of transformers at the end, and keep a process group that is there already. With `verbose`
    below 2, transformers logs only errors meanwhile."""
    from transformers.utils import logging as transformers_logging

    from zero_inference.utils import processes
    from zero_inference.utils.ranks import keep_process_group

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    if verbose < 2:
        transformers_logging.set_verbosity_error()
    try:
        with processes.restore_signals(), keep_process_group():
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def free_memory() -> None:
    """Free cached memory of the last model on the device and in host memory: the next plan counts it as free."""
    import torch

    from zero_inference.models.weights import return_free_memory

    gc.collect()
    if torch.cuda.is_initialized():
        if not LOADED and (clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)) is not None:
            clear()  # CUDA graphs of models that are still loaded use theirs
        torch.cuda.empty_cache()
    return_free_memory()
