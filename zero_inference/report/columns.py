"""The columns of a report of runs: what is read from a record, what each format shows, and what `--sort` accepts."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from zero_inference.report.prediction import time_over_predicted
from zero_inference.report.run import BOUND_NAMES, Run, given_number, where
from zero_inference.utils.format import decimals, one_line, three_digits
from zero_inference.utils.tables import Column


def _gib(value: float) -> str:
    return three_digits(value / 2**30)


def _weights(record: Mapping[str, Any]) -> str:
    return Run(0, dict(record)).weights


def _where(record: Mapping[str, Any]) -> str | None:
    return where(Run(0, dict(record)))


def _bound_by(record: Mapping[str, Any]) -> str | None:
    return Run(0, dict(record)).bound_by


def _bound_name(value: str) -> str:
    return one_line(BOUND_NAMES.get(value, value))


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _percent_number(value: float) -> str:
    return f"{100 * value:.1f}"


def _gpu_names(value: str) -> str:
    try:
        counts = Counter(str(gpu["name"]) for gpu in json.loads(value))
    except (ValueError, TypeError, KeyError, RecursionError):  # another tool's list: as it is
        return one_line(value)
    return one_line(", ".join(f"{count} x {name}" for name, count in counts.items()) or "none")


def _commit(value: str) -> str:
    return one_line(value)[:9]


def _score(name: str, header: str, key: str, show=_percent_number, best_first: bool = False) -> Column:
    return Column(name, header, show, key=f"quality.{key}", shown="present", best_first=best_first)


COLUMNS = (
    Column("model", "model", dtype="string"),
    Column("engine", "engine", dtype="string"),
    Column("dtype", "dtype", dtype="string", shown="differs"),
    Column("num_nodes", "nodes", dtype="Int64", shown="differs"),
    Column("world_size", "ranks", dtype="Int64", shown="differs"),
    Column("batch_size", "batch", dtype="Int64", shown="differs"),
    Column("prompt_len", "prompt (tokens)", dtype="Int64", shown="differs"),
    Column("gen_len", "gen (tokens)", dtype="Int64", shown="differs"),
    Column("quant_bits", "weights (bits)", dtype="Int64", shown="differs"),
    Column("quant_group_size", "group", dtype="Int64", shown="differs"),
    # Only for rows read from a log's name, which says that weights were quantized but not to how many bits.
    Column("weight_quantize", "quantized", _yes_no, dtype="boolean", shown="differs"),
    Column("weights", "weights", dtype="string", of=_weights, shown="differs"),
    Column("where", "where", dtype="string", of=_where, shown="differs"),
    Column("cpu_offload", "CPU offload", _yes_no, dtype="boolean", shown="differs"),
    Column("disk_offload", "disk offload", _yes_no, dtype="boolean", shown="differs"),
    Column("kv_offload", "KV offload", _yes_no, dtype="boolean", shown="differs"),
    Column(
        "gpu_memory",
        "GPU memory (GiB)",
        three_digits,
        of=functools.partial(given_number, name="gpu_memory"),
        shown="differs",
    ),
    Column(
        "ring_depth", "ring depth", decimals(0), of=functools.partial(given_number, name="ring_depth"), shown="differs"
    ),
    Column("cpu_compute", "CPU compute", dtype="string", shown="differs"),
    Column("cpu_threads", "CPU threads", dtype="Int64", shown="differs"),
    Column("pin_memory", "pinned", _yes_no, dtype="boolean", shown="differs"),
    Column("norm_kernels", "norm kernels", dtype="string", shown="differs"),
    Column("dummy", "dummy", _yes_no, dtype="boolean", shown="differs"),
    Column("gpus", "GPUs", _gpu_names, dtype="string", key="environment.gpus", shown="differs"),
    Column("git_commit", "commit", _commit, dtype="string", key="environment.git_commit", shown="differs"),
    Column("total_throughput", "total (token/s)", three_digits, best_first=True),
    Column("decode_throughput", "decode (token/s)", three_digits, best_first=True),
    Column("decode_weights_gbps", "weights (GB/s)", three_digits, best_first=True),
    Column("prefill_latency_s", "prefill (s)", three_digits),
    Column(
        "decode_over_predicted",
        "decode / predicted",
        decimals(2),
        shown="present",
        of=functools.partial(time_over_predicted, name="decode_s"),
    ),
    Column("fraction_of_limit", "of limit (%)", _percent_number, key="limit.fraction_of_limit", best_first=True),
    Column("bound_by", "bound by", _bound_name, dtype="string", of=_bound_by, shown="present"),
    Column(
        "expert_hit_rate",
        "experts on GPU (%)",
        _percent_number,
        key="experts.hit_rate",
        shown="present",
        best_first=True,
    ),
    Column("peak_gpu_bytes", "peak GPU (GiB)", _gib, dtype="Int64"),
    _score("mmlu_accuracy", "mmlu (%)", "mmlu.accuracy", best_first=True),
    _score("mmlu_stderr", "+- (%)", "mmlu.stderr"),
    _score("hellaswag_accuracy", "hellaswag (%)", "hellaswag.accuracy", best_first=True),
    _score("hellaswag_stderr", "+- (%)", "hellaswag.stderr"),
    _score("hellaswag_acc_norm", "hellaswag norm (%)", "hellaswag.acc_norm", best_first=True),
    _score("hellaswag_acc_norm_stderr", "+- (%)", "hellaswag.acc_norm_stderr"),
    _score("humaneval_pass_at_1", "humaneval pass@1 (%)", "humaneval.pass_at_k.1", best_first=True),
    _score("humaneval_stderr", "+- (%)", "humaneval.stderr.1"),
    _score("perplexity", "perplexity", "perplexity.perplexity", three_digits),
    _score("perplexity_stderr", "+-", "perplexity.stderr", three_digits),
    Column("prefill_throughput", "prefill (token/s)", three_digits, shown="detail", best_first=True),
    Column("decode_latency_s", "decode (s)", three_digits, shown="detail"),
    Column("predicted_prefill_s", "predicted prefill (s)", three_digits, key="predicted.prefill_s", shown="detail"),
    Column("predicted_decode_s", "predicted decode (s)", three_digits, key="predicted.decode_s", shown="detail"),
    Column("total_latency_s", "total (s)", three_digits, shown="detail"),
    Column("load_s", "load (s)", three_digits, shown="detail"),
    Column("cold_total_s", "cold (s)", three_digits, shown="detail"),
    Column("link_gbps", "link (GB/s)", three_digits, key="limit.link_gbps", shown="detail", best_first=True),
    Column("floor_decode_s", "decode limit (s)", three_digits, key="limit.floor_decode_s", shown="detail"),
    Column("expert_slots", "experts kept", decimals(1), key="stream.expert_slots", shown="detail"),
    Column(
        "expert_saved_bytes",
        "experts saved (GiB/step)",
        _gib,
        key="experts.saved_bytes_per_step",
        shown="detail",
        best_first=True,
    ),
    Column("model_bytes", "model at 16 bits (GiB)", _gib, dtype="Int64", shown="detail"),
    Column("weight_bytes", "stored weights (GiB)", _gib, dtype="Int64", shown="detail"),
    Column("cache_bytes", "KV cache (GiB)", _gib, dtype="Int64", shown="detail"),
    Column("hidden_bytes", "hidden (GiB)", _gib, dtype="Int64", shown="detail"),
    Column("peak_host_bytes", "peak host (GiB)", _gib, dtype="Int64", shown="detail"),
    Column("output_ids_sha256", "ids sha256", dtype="string", shown="detail"),
    Column("timestamp", "time", dtype="string", shown="detail"),
    Column("folder", "folder", dtype="string", shown="differs"),
    Column("file", "file", dtype="string", shown="detail"),
    Column("status", "status", dtype="string", shown="detail"),
    Column("error", "error", dtype="string", shown="present"),
)
# What `weights` and `where` say in words.
SAID_IN_WORDS = ("dtype", "quant_bits", "weight_quantize", "cpu_offload", "disk_offload", "kv_offload", "pin_memory")
BY_NAME = {column.name: column for column in COLUMNS}
