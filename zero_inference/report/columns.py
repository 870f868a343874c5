"""The columns of a report, in the order of all formats: settings, then results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_inference.records.field import as_number
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.records.schema import STATUS_OK
from zero_inference.report.run import Run, find
from zero_inference.utils.format import Column, decimals, one_line, three_digits


@dataclass(frozen=True)
class RunColumn(Column):
    """A column of runs, or of another table that fits the terminal."""

    shown: str = "always"  # or where runs differ (`differs`), any has a value (`present`), or --all-columns (`detail`)
    best_first: bool = False  # sorted in descending order
    rank: int = 0  # where the terminal is too narrow, columns of the highest rank are hidden first; 0 stays


def _gib(value: float) -> str:
    return three_digits(value / 2**30)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _bound_name(value: str) -> str:
    return RATE_WORDS.get(value, value).removeprefix("the ")


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _gpus(run: Run) -> str | None:
    gpus = find(run.record.result.environment, "gpus")
    return None if gpus is None else json.dumps([gpu.as_dict() for gpu in gpus])


def _gpu_names(value: str) -> str:
    names = [str(gpu.get("name")) for gpu in json.loads(value)]
    return one_line(", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none")


def _decode_over_predicted(run: Run) -> float | None:
    return run.time_over_predicted("decode")


def _setting(name: str, header: str, of: Any = None, dtype: str = "string", rank: int = 3, **more: Any) -> RunColumn:
    """Declare a column of `of`: a path from the run, by default to the request, or a function of the run."""
    path = of or f"request.{name}"
    of = path if callable(path) else lambda run: find(run, path)
    return RunColumn(name, header, dtype=dtype, of=of, rank=rank, **{"shown": "differs", **more})


def _option(name: str, header: str, show: Any) -> RunColumn:
    return _setting(name, header, lambda run: as_number(run.given_options().get(name)), "Float64", show=show)


def _result(name: str, header: str, show: Any = three_digits, of: Any = None, rank: int = 5, **more: Any) -> RunColumn:
    more = {"dtype": "Float64", "shown": "always", **more}
    return _setting(name, header, of or f"measured.{name}", rank=rank, show=show, **more)


def _detail(name: str, header: str, show: Any = three_digits, of: Any = None, **more: Any) -> RunColumn:
    return _result(name, header, show, of, shown="detail", **more)


def _score(name: str, header: str, path: str, show: Any = _percent, best_first: bool = False) -> RunColumn:
    path = f"record.result.quality.by_task.{path}"
    return _result(name, header, show, path, 2, shown="present", best_first=best_first)


SCORES = (  # each followed by its standard error
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
)
COLUMNS = (
    _setting("model", "model", shown="always", rank=0),
    _setting("engine", "engine", shown="always", rank=0),
    _setting("dtype", "dtype"),
    _setting("num_nodes", "nodes", dtype="Int64"),
    _setting("world_size", "ranks", dtype="Int64"),
    _setting("num_gpus", "GPUs used", "num_gpus", dtype="Int64"),
    _setting("batch_size", "batch", dtype="Int64", rank=0),
    _setting("prompt_len", "prompt", dtype="Int64", rank=0),
    _setting("gen_len", "gen", dtype="Int64", rank=0),
    _setting("quant_bits", "weights (bits)", dtype="Int64"),
    _setting("quant_group_size", "group", dtype="Int64", rank=7),
    _setting("weight_quantize", "quantized", "weight_quantize", dtype="boolean", show=_yes_no),
    _setting("weights", "weights", "weights", rank=1),
    _setting("where", "weights in", "where", rank=1),
    _setting("cpu_offload", "CPU offload", dtype="boolean", show=_yes_no),
    _setting("disk_offload", "disk offload", dtype="boolean", show=_yes_no),
    _setting("kv_offload", "KV offload", dtype="boolean", show=_yes_no),
    _option("gpu_memory", "GPU memory (GiB)", three_digits),
    _option("ring_depth", "ring depth", decimals(0)),
    _setting("cpu_compute", "CPU compute"),
    _setting("cpu_threads", "CPU threads", dtype="Int64"),
    _setting("pin_memory", "pinned", dtype="boolean", show=_yes_no),
    _setting("norm_kernels", "norm kernels"),
    _setting("options", "options", lambda run: run.options or None, rank=2),
    _setting("dummy", "dummy", dtype="boolean", show=_yes_no, rank=8),
    _setting("gpus", "GPUs", _gpus, show=_gpu_names, rank=6),
    _setting("git_commit", "commit", "record.result.environment.git_commit", show=lambda text: text[:9], rank=9),
    _result("decode_throughput", "decode (token/s)", rank=0, best_first=True),
    _result("fraction_of_limit", "of limit (%)", _percent, "share_of_limit", 1, best_first=True),
    _result("bound_by", "bound by", _bound_name, "bound_by", 2, dtype="string", shown="present"),
    _result("prefill_latency_s", "TTFT (s)", rank=4),
    _result("total_throughput", "total (token/s)", rank=8, best_first=True),
    _result("decode_weights_gbps", "weights (GB/s)", of="measured.decode_weights_gb_per_s", rank=9, best_first=True),
    _result("decode_over_predicted", "decode / predicted", decimals(2), _decode_over_predicted, 7, shown="present"),
    _result(
        "expert_hit_rate", "expert hits (%)", _percent, "measured.experts.hit_rate", 8, shown="present", best_first=True
    ),
    _result(
        "tokens_per_pass",
        "tokens / pass",
        decimals(2),
        "measured.speculation.tokens_per_pass",
        8,
        shown="present",
        best_first=True,
    ),
    _result(
        "speculation_gain",
        "times without draft",
        decimals(2),
        "measured.speculation.baseline.gain",
        8,
        shown="present",
        best_first=True,
    ),
    _result("peak_gpu_bytes", "peak GPU (GiB)", _gib, dtype="Int64", rank=6),
    *SCORES,
    _detail("prefill_throughput", "prefill (token/s)", best_first=True),
    _detail("decode_latency_s", "decode (s)"),
    _detail("predicted_prefill_s", "predicted prefill (s)", of="measured.predicted.prefill_s"),
    _detail("predicted_decode_s", "predicted decode (s)", of="measured.predicted.decode_s"),
    _detail("total_latency_s", "total (s)"),
    _detail("load_s", "load (s)"),
    _detail("cold_total_s", "cold (s)"),
    _detail("link_gbps", "link (GB/s)", of="measured.limit.rates.link_gb_per_s", best_first=True),
    _detail("floor_decode_s", "decode limit (s)", of="measured.limit.floor_decode_s"),
    _detail("expert_slots", "experts kept", decimals(1), "record.result.engine.stream.expert_slots"),
    _detail("expert_saved_bytes", "saved (GiB/step)", _gib, "measured.experts.saved_bytes_per_step", best_first=True),
    _detail("model_bytes", "model at 16 bits (GiB)", _gib, dtype="Int64"),
    _detail("weight_bytes", "stored weights (GiB)", _gib, dtype="Int64"),
    _detail("cache_bytes", "KV cache (GiB)", _gib, dtype="Int64"),
    _detail("hidden_bytes", "hidden (GiB)", _gib, dtype="Int64"),
    _detail("peak_host_bytes", "peak host (GiB)", _gib, dtype="Int64"),
    _detail("output_ids_sha256", "ids sha256", one_line, dtype="string"),
    _detail("timestamp", "time", one_line, "request.timestamp", dtype="string"),
    _setting("folder", "folder", "folder", rank=9),
    _setting("file", "file", "file", shown="detail"),
    _setting("status", "status", "record.status", rank=1),
    _setting("error", "error", "record.error", shown="present"),
)
BY_NAME = {column.name: column for column in COLUMNS}
# Not in tables for people: `weights`, `where` and `options` combine them, and errors stand below the table.
COMBINED = {
    *("dtype", "quant_bits", "weight_quantize", "cpu_offload", "disk_offload", "kv_offload", "pin_memory", "error"),
    *("gpu_memory", "ring_depth", "cpu_compute", "cpu_threads", "norm_kernels", "quant_group_size"),
}


def differing_columns(runs: Sequence[Run], for_people: bool = False) -> list[RunColumn]:
    """Return the main results and the settings in which runs differ; a value that only failed runs lack is no difference."""

    def is_shown(column: RunColumn) -> bool:
        known = {column.value(run) for run in runs} - {None}
        if column.shown == "differs":
            return len(known) > 1 or len({column.value(run) for run in runs if run.record.status == STATUS_OK}) > 1
        return column.shown == "always" or (column.shown == "present" and bool(known))

    return [column for column in COLUMNS if is_shown(column) and not (for_people and column.name in COMBINED)]


def sort_runs(runs: Sequence[Run], name: str) -> list[Run]:
    """Return the runs by one column, best first where larger is better, otherwise ascending; runs without a value last."""
    column = BY_NAME[name]
    known = [run for run in runs if column.value(run) is not None]
    unknown = [run for run in runs if column.value(run) is None]
    return sorted(known, key=column.value, reverse=column.best_first) + unknown
