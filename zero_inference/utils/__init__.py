"""Sizes of a run, its log, and what every package uses: ranks, processes, signals, files, host memory, tables.

Importing this package loads neither torch nor transformers.
"""

from zero_inference.utils.files import GB, KB, MB, T, get_filename, write_benchmark_log
from zero_inference.utils.model_sizes import cache_bytes, hidden_bytes, model_bytes

__all__ = [
    "GB",
    "KB",
    "MB",
    "T",
    "cache_bytes",
    "get_filename",
    "hidden_bytes",
    "model_bytes",
    "write_benchmark_log",
]
