"""Inference of models larger than the GPU, each figure compared with the hardware's limit.

    from zero_inference import run, plan, load

`run` measures a generation, as run_model.py does; `plan` says what a machine can run and how fast; `load` gives a transformers model
whose weights wait in host memory or on disk. Importing this package loads neither torch nor transformers; the first call does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_inference.api import PlannedRun, Plans, RunResult, load, plan, run, unload

__version__ = "0.1.0"
__all__ = ["PlannedRun", "Plans", "RunResult", "load", "plan", "run", "unload"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
