"""The log contract: the file name of a run's log and its four-line block."""

from __future__ import annotations

import os
from pathlib import Path

from zero_inference.utils.files import append_bytes

KB = 1 << 10
MB = 1 << 20
GB = 1 << 30
T = 1e12

# The log block: one tuple a line, (label, unit, key of the record). Written here, read by `records.read.parse_log`.
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
    filename = f"{prefix}-{name}-bs{batch_size}-prompt{prompt_len}-gen{gen_len}"
    filename += f"-n{num_nodes}x{num_gpus_per_node}-{place}"
    return filename + ("-kv_offload" if kv_offload else "") + ("-w_quant" if weight_quantize else "")


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
    values = iter((
        model_size, cache_size, hidden_size,
        gpu_peak_mem, prefill_latency, prefill_throughput,
        decode_latency, decode_throughput,
        total_latency, total_throughput,
    ))  # fmt: skip

    def field(label: str, unit: str) -> str:
        value = next(values)
        return f"{label}: {float('nan') if value is None else value / (GB if unit == 'GB' else 1):.3f} {unit}"

    block = "\n".join("\t".join(field(label, unit) for label, unit, _ in line) for line in LOG_LINES)
    append_bytes(filename, (block + "\n").encode())
    return block
