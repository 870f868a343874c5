"""The log contract: the file name of a run's log and its four-line block."""

from __future__ import annotations

import os
from pathlib import Path

from zero_inference.utils.files import append_bytes

KB = 1 << 10
MB = 1 << 20
GB = 1 << 30
T = 1e12

# The log block: one tuple a line, (label, unit, key). A key is the one of the same quantity in the
# JSON record. Both the writer here and `records.read.parse_log` read this table.
LOG_LINES = (
    (("model size", "GB", "model_bytes"),
     ("cache size", "GB", "cache_bytes"),
     ("hidden size (p)", "GB", "hidden_bytes")),
    (("peak gpu mem", "GB", "peak_gpu_bytes"),
     ("prefill latency", "s", "prefill_latency_s"),
     ("prefill throughput", "token/s", "prefill_throughput")),
    (("decode latency", "s", "decode_latency_s"),
     ("decode throughput", "token/s", "decode_throughput")),
    (("total latency", "s", "total_latency_s"),
     ("total throughput", "token/s", "total_throughput")),
)  # fmt: skip


def get_filename(
    model_name: str,
    batch_size: int,
    prompt_len: int,
    gen_len: int,
    cpu_offload: bool,
    disk_offload: bool,
    num_nodes: int,
    num_gpus_per_node: int,
    kv_offload: bool,
    weight_quantize: bool,
    *,
    prefix: str = "ds",
) -> str:
    """Return the name of a run's log, without folder and extension; `prefix` is the engine's (`ds` is DeepSpeed).

    `model_name` is a hub name or a folder; its last part is used, for `.` and `..` that of the real folder.
    """
    name = Path(model_name).name
    if name in ("", ".", ".."):
        name = Path(model_name).resolve().name or "root"
    place = "cpu" if cpu_offload else "disk" if disk_offload else "gpu"
    filename = (
        f"{prefix}-{name}-bs{batch_size}-prompt{prompt_len}-gen{gen_len}-n{num_nodes}x{num_gpus_per_node}-{place}"
    )
    if kv_offload:
        filename += "-kv_offload"
    if weight_quantize:
        filename += "-w_quant"
    return filename


def write_benchmark_log(
    filename: str | os.PathLike,
    model_size: float | None,
    cache_size: float | None,
    hidden_size: float | None,
    gpu_peak_mem: float | None,
    prefill_latency: float | None,
    prefill_throughput: float | None,
    decode_latency: float | None,
    decode_throughput: float | None,
    total_latency: float | None,
    total_throughput: float | None,
) -> str:
    """Append the four-line block and a newline to `filename` in one write, and return the block.

    Sizes are bytes, latencies seconds, throughputs tokens per second; None prints as `nan`. Missing
    parent folders are made. Processes may append to one file at once.
    """
    block = benchmark_block(
        model_size, cache_size, hidden_size,
        gpu_peak_mem, prefill_latency, prefill_throughput,
        decode_latency, decode_throughput,
        total_latency, total_throughput,
    )  # fmt: skip
    append_bytes(filename, (block + "\n").encode())
    return block


def benchmark_block(*values: float | None) -> str:
    """Return the log's four lines, without a newline at the end; `values` in the order of LOG_LINES, None for what is not available."""
    left = iter(values)
    return "\n".join(
        "\t".join(f"{label}: {_in_log_unit(next(left), unit):.3f} {unit}" for label, unit, _ in line)
        for line in LOG_LINES
    )


def _in_log_unit(value: float | None, unit: str) -> float:
    if value is None:
        return float("nan")
    return float(value) / GB if unit == "GB" else float(value)
