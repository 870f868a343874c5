"""Models side by side: how fast, how large, how good, and how sure one can be of the difference."""

from __future__ import annotations

import importlib
from typing import Any

# Found when first asked for, so that `zero-inference --help` does not wait for torch.
_HOMES = {
    "ArchitectureBenchmark": "benchmark",
    "BenchmarkResult": "benchmark",
    "QualityBenchmark": "benchmark",
    "BenchmarkConfig": "comparison",
    "compare_architectures": "comparison",
    "summarize": "comparison",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
