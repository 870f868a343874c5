"""The columns of a report: every one that csv, json, md and the page know, and those of the table in the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from zero_inference.records.schema import STATUS_OK
from zero_inference.report.run import BOUND_NAMES, Run, differing_options, short_folders
from zero_inference.utils.format import decimals, format_short_time, one_line, three_digits
from zero_inference.utils.tables import Column


def _gib(value: float) -> str:
    return three_digits(value / 2**30)


def _bound_name(value: str) -> str:
    return one_line(BOUND_NAMES.get(value, value))


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _percent_number(value: float) -> str:
    return f"{100 * value:.1f}"


def _gpus(run: Run) -> str | None:
    environment = run.record.result.environment
    return None if environment is None else json.dumps([gpu.as_dict() for gpu in environment.gpus])


def _gpu_names(value: str) -> str:
    counts = Counter(gpu.get("name") for gpu in json.loads(value))
    return one_line(", ".join(f"{count} x {name}" for name, count in counts.items()) or "none")


def _task(name: str, attribute: str, k: int | None = None) -> Callable[[Run], float | None]:
    """Return a function from a run to `attribute` of the scores of task `name`, to its entry `k` if it is a dictionary."""

    def read(run: Run) -> float | None:
        value = getattr(getattr(run.tasks, name), attribute, None)
        return value if k is None else (value or {}).get(k)

    return read


def _of_request(name: str, header: str, *args: Any, **more: Any) -> Column:
    """Return a column of the request, shown where runs differ in it."""
    return Column(name, header, *args, **{"shown": "differs", "of": lambda run: getattr(run.request, name), **more})


def _of_measured(name: str, header: str, *args: Any, **more: Any) -> Column:
    """Return a column of a measured value, by its attribute."""
    return Column(name, header, *args, **{"of": lambda run: getattr(run.measured, name), **more})


TEXT: dict[str, Any] = {"dtype": "string"}
WHOLE: dict[str, Any] = {"dtype": "Int64"}
FLAG: dict[str, Any] = {"dtype": "boolean"}
DETAIL: dict[str, Any] = {"shown": "detail"}
PRESENT: dict[str, Any] = {"shown": "present"}
BEST_FIRST: dict[str, Any] = {"best_first": True}


def _score_columns(
    name: str, header: str, task: str, attribute: str, stderr: str = "stderr", k: int | None = None, share: bool = True
) -> tuple[Column, Column]:
    """Return the columns of a score, a share of 1 or a perplexity, and of its standard error."""
    show, unit = (_percent_number, " (%)") if share else (three_digits, "")
    return (
        Column(name, f"{header}{unit}", show, of=_task(task, attribute, k), best_first=share, **PRESENT),
        Column(f"{task}_{stderr}", f"+-{unit}", show, of=_task(task, stderr, k), **PRESENT),
    )


SCORES = (
    *_score_columns("mmlu_accuracy", "mmlu", "mmlu", "accuracy"),
    *_score_columns("hellaswag_accuracy", "hellaswag", "hellaswag", "accuracy"),
    *_score_columns("hellaswag_acc_norm", "hellaswag norm", "hellaswag", "acc_norm", "acc_norm_stderr"),
    *_score_columns("humaneval_pass_at_1", "humaneval pass@1", "humaneval", "pass_at_k", k=1),
    *_score_columns("perplexity", "perplexity", "perplexity", "perplexity", share=False),
)
COLUMNS = (
    _of_request("model", "model", shown="always", **TEXT),
    _of_request("engine", "engine", shown="always", **TEXT),
    _of_request("dtype", "dtype", **TEXT),
    _of_request("num_nodes", "nodes", **WHOLE),
    _of_request("world_size", "ranks", **WHOLE),
    _of_request("batch_size", "batch", **WHOLE),
    _of_request("prompt_len", "prompt (tokens)", **WHOLE),
    _of_request("gen_len", "gen (tokens)", **WHOLE),
    _of_request("quant_bits", "weights (bits)", **WHOLE),
    _of_request("quant_group_size", "group", **WHOLE),
    _of_request("weight_quantize", "quantized", _yes_no, of=lambda run: run.weight_quantize, **FLAG),
    _of_request("weights", "weights", of=lambda run: run.weights, **TEXT),
    _of_request("where", "where", of=lambda run: run.where, **TEXT),
    _of_request("cpu_offload", "CPU offload", _yes_no, **FLAG),
    _of_request("disk_offload", "disk offload", _yes_no, **FLAG),
    _of_request("kv_offload", "KV offload", _yes_no, **FLAG),
    _of_request("gpu_memory", "GPU memory (GiB)", three_digits, of=lambda run: run.given_number("gpu_memory")),
    _of_request("ring_depth", "ring depth", decimals(0), of=lambda run: run.given_number("ring_depth")),
    _of_request("cpu_compute", "CPU compute", **TEXT),
    _of_request("cpu_threads", "CPU threads", **WHOLE),
    _of_request("pin_memory", "pinned", _yes_no, **FLAG),
    _of_request("norm_kernels", "norm kernels", **TEXT),
    _of_request("dummy", "dummy", _yes_no, **FLAG),
    _of_request("gpus", "GPUs", _gpu_names, of=_gpus, **TEXT),
    _of_request(
        "git_commit", "commit", lambda value: one_line(value)[:9], of=lambda run: run.environment.git_commit, **TEXT
    ),
    _of_measured("total_throughput", "total (token/s)", three_digits, **BEST_FIRST),
    _of_measured("decode_throughput", "decode (token/s)", three_digits, **BEST_FIRST),
    Column(
        "decode_weights_gbps",
        "weights (GB/s)",
        three_digits,
        of=lambda run: run.measured.decode_weights_gb_per_s,
        **BEST_FIRST,
    ),
    _of_measured("prefill_latency_s", "prefill (s)", three_digits),
    Column(
        "decode_over_predicted",
        "decode / predicted",
        decimals(2),
        of=lambda run: run.time_over_predicted("decode_s"),
        **PRESENT,
    ),
    Column(
        "fraction_of_limit",
        "of limit (%)",
        _percent_number,
        of=lambda run: run.limit.fraction_of_limit,
        **BEST_FIRST,
    ),
    Column("bound_by", "bound by", _bound_name, of=lambda run: run.bound_by, **TEXT, **PRESENT),
    Column(
        "expert_hit_rate",
        "experts on GPU (%)",
        _percent_number,
        of=lambda run: run.measured.experts and run.measured.experts.hit_rate,
        **PRESENT,
        **BEST_FIRST,
    ),
    _of_measured("peak_gpu_bytes", "peak GPU (GiB)", _gib, **WHOLE),
    *SCORES,
    _of_measured("prefill_throughput", "prefill (token/s)", three_digits, **DETAIL, **BEST_FIRST),
    _of_measured("decode_latency_s", "decode (s)", three_digits, **DETAIL),
    Column(
        "predicted_prefill_s",
        "predicted prefill (s)",
        three_digits,
        of=lambda run: run.predicted.prefill_s,
        **DETAIL,
    ),
    Column("predicted_decode_s", "predicted decode (s)", three_digits, of=lambda run: run.predicted.decode_s, **DETAIL),
    _of_measured("total_latency_s", "total (s)", three_digits, **DETAIL),
    _of_measured("load_s", "load (s)", three_digits, **DETAIL),
    _of_measured("cold_total_s", "cold (s)", three_digits, **DETAIL),
    Column(
        "link_gbps", "link (GB/s)", three_digits, of=lambda run: run.limit.rates.link_gb_per_s, **DETAIL, **BEST_FIRST
    ),
    Column("floor_decode_s", "decode limit (s)", three_digits, of=lambda run: run.limit.floor_decode_s, **DETAIL),
    Column("expert_slots", "experts kept", decimals(1), of=lambda run: run.stream.expert_slots, **DETAIL),
    Column(
        "expert_saved_bytes",
        "experts saved (GiB/step)",
        _gib,
        of=lambda run: run.measured.experts and run.measured.experts.saved_bytes_per_step,
        **DETAIL,
        **BEST_FIRST,
    ),
    _of_measured("model_bytes", "model at 16 bits (GiB)", _gib, **WHOLE, **DETAIL),
    _of_measured("weight_bytes", "stored weights (GiB)", _gib, **WHOLE, **DETAIL),
    _of_measured("cache_bytes", "KV cache (GiB)", _gib, **WHOLE, **DETAIL),
    _of_measured("hidden_bytes", "hidden (GiB)", _gib, **WHOLE, **DETAIL),
    _of_measured("peak_host_bytes", "peak host (GiB)", _gib, **WHOLE, **DETAIL),
    _of_measured("output_ids_sha256", "ids sha256", **TEXT, **DETAIL),
    _of_request("timestamp", "time", **TEXT, **DETAIL),
    Column("folder", "folder", of=lambda run: run.folder, shown="differs", **TEXT),
    Column("file", "file", of=lambda run: run.file, **TEXT, **DETAIL),
    Column("status", "status", of=lambda run: run.record.status, **TEXT, **DETAIL),
    Column("error", "error", of=lambda run: run.record.error, **TEXT, **PRESENT),
)
BY_NAME = {column.name: column for column in COLUMNS}
# Columns that `weights` and `where` combine.
COMBINED = ("dtype", "quant_bits", "weight_quantize", "cpu_offload", "disk_offload", "kv_offload", "pin_memory")


def differing_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the columns in which the runs differ, and those that are always shown.

    A value that only some runs have is a difference, but not one that is missing only from failed runs.
    """
    good = [run for run in runs if run.record.status == STATUS_OK]

    def is_shown(column: Column) -> bool:
        if column.shown == "differs":
            known = {column.value(run) for run in runs} - {None}
            return len(known) > 1 or len({column.value(run) for run in good}) > 1
        return column.shown == "always" or (
            column.shown == "present" and any(column.value(run) is not None for run in runs)
        )

    return [column for column in COLUMNS if is_shown(column)]


def sort_runs(runs: Sequence[Run], name: str) -> list[Run]:
    """Return the runs by one column, best first where larger is better, otherwise ascending; runs without a value last."""
    column = BY_NAME[name]
    known = [run for run in runs if column.value(run) is not None]
    unknown = [run for run in runs if column.value(run) is None]
    return sorted(known, key=column.value, reverse=column.best_first) + unknown


# The table in the terminal.

LONGEST_FOLDER = 16  # characters; its end distinguishes it
WORK = ("model", "batch", "prompt", "gen")  # headers of what comparable runs agree in
# Headers of columns of `COLUMNS` in the terminal.
_HEADERS = {
    "decode_throughput": "decode\ntoken/s",
    "fraction_of_limit": "of\nlimit",
    "bound_by": "bound\nby",
    "prefill_latency_s": "TTFT\n(s)",
    "total_throughput": "total\ntoken/s",
    "decode_over_predicted": "time /\nplan",
    "peak_gpu_bytes": "peak GPU\n(GiB)",
    "batch_size": "batch",
    "prompt_len": "prompt",
    "gen_len": "gen",
    "weights": "bits",
    "world_size": "ranks",
    **{name: name for name in ("model", "engine", "where", "folder", "file")},
}
# Options listed first, as a narrow terminal cuts the last.
FIRST_OPTIONS = ("cpu-compute", "cpu-threads", "decode-graph", "norm-kernels", "gpu-memory", "ring-depth")
BOUNDS = {"link_and_cores": "link+cores", "device_memory": "memory", "host_memory": "memory", "matmul": "products"}


def fitted(header: str, of: Callable[[Any], str | None], rank: int, right: bool = True, **more: Any) -> Column:
    """Return a column of texts for a table that fits the terminal."""
    return Column("", header, of=of, rank=rank, **{"longest": 24, "dtype": "Float64" if right else "string", **more})


def result_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the columns of what was measured."""

    def figure(
        read: Callable[[Run], float | None], show: Callable[[float], str] = three_digits, failed: str | None = None
    ) -> Callable[[Run], str | None]:
        """Return a function from a run to the text of what `read` returns; None if that is unknown, `failed` for a failed run."""

        def text(run: Run) -> str | None:
            value = None if run.failed else read(run)
            return failed if run.failed else None if value is None else show(value)

        return text

    def step_s(run: Run) -> float | None:
        decode_s, steps = run.measured.decode_latency_s, (run.request.gen_len or 0) - 1
        return decode_s / steps if decode_s and decode_s > 0 and steps > 0 else None

    columns = [
        *[fitted("#", lambda run: str(run.number), 0)] * any(run.failed for run in runs),
        fitted("decode\ntoken/s", figure(lambda run: run.measured.decode_throughput, failed="failed"), 0),
        fitted("of\nlimit", figure(lambda run: run.share_of_limit, "{:.1%}".format), 1),
        fitted("bound\nby", lambda run: BOUNDS.get(run.bound_by, run.bound_by), 1, right=False, longest=12),
        fitted("TTFT\n(s)", figure(lambda run: run.measured.prefill_latency_s), 4),
        fitted("step", figure(step_s, format_short_time), 6),
        fitted("total\ntoken/s", figure(lambda run: run.measured.total_throughput), 8),
        fitted("time /\nplan", figure(lambda run: run.time_over_predicted("decode_s"), "{:.2f}".format), 7),
        fitted("peak GPU\n(GiB)", figure(lambda run: run.measured.peak_gpu_bytes, _gib), 9),
    ]
    for metric in dict.fromkeys(score.metric for run in runs for score in run.quality):
        columns.append(fitted(metric.replace(" ", "\n", 1), _score(metric), 3))
    return columns


def _score(metric: str) -> Callable[[Run], str | None]:
    return lambda run: next((score.text for score in run.quality if score.metric == metric), None)


def setting_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the columns of what was run."""

    def setting(header: str, of: Callable[[Run], Any], rank: int, right: bool = False, **more: Any) -> Column:
        return fitted(header, of, rank, right, setting=True, **more)

    def folder(run: Run) -> str | None:
        name = folders[run.number - 1]
        return name if name is None or len(name) <= LONGEST_FOLDER else f"…{name[1 - LONGEST_FOLDER :]}"

    folders = short_folders([run.folder for run in runs])
    options = _options_in_words(runs)
    found = [
        setting("model", lambda run: run.short_model, 0),
        setting("engine", lambda run: run.request.engine, 0, longest=12),
        setting("bits", lambda run: run.weights if run.weights != "dtype unknown" else None, 1),
        setting("where", lambda run: run.where, 2, longest=26),
        setting("batch", lambda run: run.request.batch_size, 0, right=True, words="batch {}"),
        setting("prompt", lambda run: run.request.prompt_len, 0, right=True, words="prompt {}"),
        setting("gen", lambda run: run.request.gen_len, 0, right=True, words="{} generated"),
        setting("ranks", lambda run: run.request.world_size, 1, right=True, words="{} ranks"),
        setting("options", lambda run: options[run.number - 1], 3, longest=200, least=16),
        setting("folder", folder, 5, words=""),
        setting("gpu", lambda run: (run.gpus or "").replace("NVIDIA ", "") or None, 5),
        setting("commit", lambda run: (run.environment.git_commit or "")[:9] or None, 10, words=""),
    ]
    alike = Counter(tuple(each.value(run) for each in found) for run in runs)
    if max(alike.values()) > 1:  # only the file distinguishes them
        found.append(setting("file", lambda run: run.file, 11, longest=32, words=""))
    return found


def with_sorted(columns: Sequence[Column], name: str) -> list[Column]:
    """Return the columns with that of `--sort`, which is never hidden, as it explains the order."""
    header = _HEADERS.get(name)
    if any(column.header == header for column in columns):
        return [dataclasses.replace(column, rank=0) if column.header == header else column for column in columns]
    column = BY_NAME[name]
    return [dataclasses.replace(column, header=column.header.replace(" (", "\n(", 1), longest=24), *columns]


def _options_in_words(runs: Sequence[Run]) -> list[str | None]:
    """Return for each run the options in which the runs differ, such as `gpu-memory 20, cpu-compute off`."""
    differing = differing_options(runs)
    names = sorted(
        differing, key=lambda name: FIRST_OPTIONS.index(name) if name in FIRST_OPTIONS else len(FIRST_OPTIONS)
    )
    found = []
    for index in range(len(runs)):
        given = [(name, value) for name in names if (value := differing[name][index]) is not None]
        found.append(", ".join(name if value == "yes" else f"{name} {value}" for name, value in given) or None)
    return found
