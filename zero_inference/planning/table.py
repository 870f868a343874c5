"""The configurations that were compared: as rows for `--json`, and as a table for people that fits 100 columns."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from zero_inference.planning.candidates import Candidate, command_of
from zero_inference.planning.memory import HOST_MEMORY
from zero_inference.planning.plan import Plan
from zero_inference.planning.ranking import pareto_front
from zero_inference.utils.format import LONG_S, format_gib, format_seconds, significant
from zero_inference.utils.tables import PIPED_WIDTH, Column, terminal_table, texts_of

GAP = 2  # characters between columns, 1 where the table would not fit
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# By key of `RATE_WORDS`, short enough for a column.
BOUND_BY = {
    "device_memory": "memory",
    "host_memory": "memory",
    "matmul": "products",
    "link": "link",
    "peers": "GPU copies",
    "link_and_cores": "link+cores",
    "cores": "cores",
    "disk": "disk",
    "launches": "launches",
}
# Numbers are texts by then: a bound stands before them.
COLUMNS = (
    Column("place", ""),
    Column("configuration", "engine: weights, KV cache", dtype="string"),
    Column("gpus", "GPUs"),
    Column("batch_size", "batch"),
    Column("tokens_per_s", "token/s"),
    Column("range", "9 in 10\nwithin"),
    Column("measured", "measured\ntoken/s"),
    Column("step_s", "step\n(s)"),
    Column("prefill_s", "first\ntoken (s)"),
    Column("total_s", "total\n(s)"),
    Column("device", "device\n(GiB)"),
    Column("host", "host\n(GiB)"),
    Column("cores", "on the\ncores"),
    Column("bound_by", "bound by", dtype="string"),
)
UNKNOWN = "?"
ONLY_WITH_ALL = ("total_s", "cores")


def rows_of(candidates: Sequence[Candidate], everyone: Sequence[Candidate]) -> list[dict[str, Any]]:
    """A row of `candidates` each; those on the Pareto front of `everyone` are marked."""
    front = {id(each) for each in pareto_front(everyone)}
    return [
        _row(place, each.plan)
        | {
            "prefill_s": each.times.prefill.seconds,
            "step_s": each.times.step.seconds,
            "tokens_per_s": each.tokens_per_s,
            "tokens_per_s_range": each.times.tokens_per_s_range(each.config.batch_size),
            "prefill_range_s": each.times.prefill_range_s,
            "step_range_s": each.times.step_range_s,
            "at_most": each.times.at_least,
            "total_s": each.total_s,
            "measured_tokens_per_s": each.measured_tokens_per_s,
            "bound_by": each.times.step.bound_by,
            "tried": "failed" if each.failed else None,
            "front": id(each) in front,
        }
        for place, each in enumerate(candidates, 1)
    ]


def rows_without_times(plans: Sequence[Plan], first: int) -> list[dict[str, Any]]:
    """Return rows of configurations that fit and are not predicted, numbered from `first` on."""
    times = ("prefill_s", "step_s", "tokens_per_s", "total_s", "measured_tokens_per_s", "bound_by", "tried")
    unknown = (*times, "tokens_per_s_range", "prefill_range_s", "step_range_s")
    return [
        _row(place, plan) | dict.fromkeys(unknown) | {"at_most": False, "front": False}
        for place, plan in enumerate(plans, first)
    ]


def _row(place: int, plan: Plan) -> dict[str, Any]:
    """Return the part of a row that needs no prediction."""
    config = plan.job.config
    return {
        "place": place,
        "engine": config.engine,
        "quant_bits": config.quant_bits,
        "gpus": plan.job.ranks.world_size if plan.job.on_gpu else 0,
        "weights": weights_in_words(plan),
        "keys_and_values": "host" if config.kv_offload or not plan.job.on_gpu else "device",
        "batch_size": config.batch_size,
        "device_bytes": plan.weights.device_peak_bytes if plan.job.on_gpu else None,
        "host_bytes": next(need.needed for need in plan.needs if need.place == HOST_MEMORY),
    }


def weights_in_words(plan: Plan) -> str:
    """Where they are, and what share of the layers, or of their experts, the host's cores multiply."""
    words, cores = place_of_weights(plan), max(plan.weights.share_on_cores())
    if not plan.weights.footprint.host or not plan.job.on_gpu:
        return words
    if plan.weights.lacks_cores:
        return f"{words} (cores not known)"
    return f"{words} (cores {cores:.0%})" if cores else words


def place_of_weights(plan: Plan) -> str:
    """`host`, `85% host` (the rest is on the device), `device` or `disk`."""
    weights = plan.weights
    host = weights.footprint.host * plan.job.ranks.local_world_size
    if weights.footprint.disk:
        return "disk"
    if not plan.job.on_gpu:
        return "host"
    if not host:
        return "device"
    return "host" if host > 0.99 * weights.weight_bytes else f"{host / max(1, weights.weight_bytes):.0%} host"


def kind_of_weights(plan: Plan) -> str:
    """`int4`, or the dtype: `bf16`."""
    config = plan.job.config
    return f"int{config.quant_bits}" if config.quantized else SHORT_DTYPES[plan.job.spec.dtype_name]


def configuration_in_words(plan: Plan) -> str:
    """Without batch and GPUs: `stream: int4 85% host, KV device`."""
    config = plan.job.config
    keys = "host" if config.kv_offload or not plan.job.on_gpu else "device"
    return f"{config.engine}: {kind_of_weights(plan)} {place_of_weights(plan)}, KV {keys}"


def in_json(rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The same rows with their commands, what is not in their times, and what both passes give together."""
    return [
        row
        | {
            "bounds_because": list(each.times.bounds_because),
            "with_host": each.times.with_host,
            "without_cores": each.times.without_cores,
            "total_tokens_per_s": each.config.batch_size * each.config.gen_len / each.total_s,
            "command": each.command(),
        }
        for row, each in zip(rows, candidates)
    ]


def without_times_in_json(plans: Sequence[Plan], first: int) -> list[dict[str, Any]]:
    """The rows of configurations that are not predicted, with their commands."""
    return [
        row | {"command": command_of(plan.job.config, plan.job.ranks.world_size)}
        for row, plan in zip(rows_without_times(plans, first), plans)
    ]


def table(
    rows: Sequence[dict[str, Any]], candidates: Sequence[Candidate], every_column: bool, unknown: Sequence[Plan] = ()
) -> str:
    """For the terminal, or `PIPED_WIDTH` wide; with every column as wide as that takes where it is no terminal.

    Args:
        rows: of `candidates`, and below them of `unknown`.
    """
    terminal = sys.stdout.isatty()
    width = None if every_column and not terminal else shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    texts = [_texts(row, each) for row, each in zip(rows, [*(each.plan for each in candidates), *unknown])]
    columns = [
        column
        for column in COLUMNS
        if (every_column or column.name not in ONLY_WITH_ALL) and any(row[column.name] for row in texts)
    ]
    without_range = [column for column in columns if column.name != "range"]
    tried = ((columns, GAP), (columns, 1), (without_range, GAP), (without_range, 1))
    shown, gap = next((each for each in tried if width is None or _width(texts, *each) <= width), tried[-1])
    return terminal_table(shown, texts_of(texts, shown), terminal, width, gap)


def _width(texts: Sequence[dict[str, Any]], columns: Sequence[Column], gap: int) -> int:
    """Return how wide the table is."""
    return max(map(len, terminal_table(columns, texts_of(texts, columns), False, None, gap).splitlines()))


def _texts(row: dict[str, Any], plan: Plan) -> dict[str, str | None]:
    most, least = ("≤", "≥") if row["at_most"] else ("", "")
    measured = row["measured_tokens_per_s"]
    cores = max(plan.weights.share_on_cores())
    return {
        "place": f"{'*' if row['front'] else ''}{row['place']}",
        "configuration": configuration_in_words(plan),
        "gpus": str(row["gpus"]) if plan.job.machine.gpus() > 1 else None,
        "batch_size": str(row["batch_size"]),
        "tokens_per_s": UNKNOWN if row["tokens_per_s"] is None else most + significant(row["tokens_per_s"]),
        "range": None if row["tokens_per_s_range"] is None else "-".join(map(significant, row["tokens_per_s_range"])),
        "measured": row["tried"] if measured is None else significant(measured),
        "device": None if row["device_bytes"] is None else format_gib(row["device_bytes"]),
        "host": format_gib(row["host_bytes"]),
        "cores": UNKNOWN if plan.weights.lacks_cores else f"{cores:.0%}" if cores else None,
        "bound_by": UNKNOWN if row["bound_by"] is None else BOUND_BY[row["bound_by"]],
    } | {name: _seconds(row[name], least) for name in ("step_s", "prefill_s", "total_s")}


def _seconds(value: float | None, bound: str) -> str:
    """The number alone, or a duration where that is easier to read."""
    return UNKNOWN if value is None else bound + format_seconds(value).removesuffix(" s" if value < LONG_S else "")
