"""Compare models: speed, memory and quality, with confidence intervals of the differences."""

from __future__ import annotations

import importlib
from typing import Any

# Imported at first use, so that `zero-inference --help` does not wait for torch.
_HOMES = {
    "ArchitectureBenchmark": "benchmark",
    "BenchmarkResult": "benchmark",
    "QualityBenchmark": "benchmark",
    "BenchmarkConfig": "benchmark",
    "compare_architectures": "benchmark",
    "summarize": "comparison",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
