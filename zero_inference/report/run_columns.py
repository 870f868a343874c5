"""The columns of the table in the terminal: what was reached, and what was run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_inference.records.read import value_at
from zero_inference.report.columns import BY_NAME
from zero_inference.report.layout import Shown
from zero_inference.report.prediction import time_over_predicted
from zero_inference.report.run import Run, differing_options, short_folders, where
from zero_inference.utils.format import format_short_time, three_digits

LONGEST_FOLDER = 16  # characters; the end of it tells most
# Headers of what runs have to agree in for their figures to be comparable.
WORK = ("model", "batch", "prompt", "gen")
# By name of `report.columns`, the header of a column that is also here.
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
# Of options, those that tell most beside the column `where`, as a narrow terminal cuts what comes last.
FIRST_OPTIONS = ("cpu-compute", "cpu-threads", "decode-graph", "norm-kernels", "gpu-memory", "ring-depth")
BOUNDS = {"link_and_cores": "link+cores", "device_memory": "memory", "host_memory": "memory", "matmul": "products"}


def result_columns(runs: Sequence[Run]) -> list[Shown]:
    def figure(key: str, scale: float = 1) -> Callable[[Run], str | None]:
        def text(run: Run) -> str | None:
            value = None if run.failed else run.amount(key)
            return None if value is None else three_digits(value / scale)

        return text

    def decode(run: Run) -> str | None:
        return "failed" if run.failed else figure("decode_throughput")(run)

    def step(run: Run) -> str | None:
        decode_s, steps = run.amount("decode_latency_s"), (run.whole("gen_len") or 0) - 1
        return (
            format_short_time(decode_s / steps) if decode_s and decode_s > 0 and steps > 0 and not run.failed else None
        )

    def of_limit(run: Run) -> str | None:
        return None if run.share_of_limit is None else f"{run.share_of_limit:.1%}"

    def of_plan(run: Run) -> str | None:
        ratio = None if run.failed else time_over_predicted(run.record, "decode_s")
        return None if ratio is None else f"{ratio:.2f}"

    found = [
        *[Shown("#", lambda run: str(run.number), 0)] * any(run.failed for run in runs),
        Shown("decode\ntoken/s", decode, 0),
        Shown("of\nlimit", of_limit, 1),
        Shown("bound\nby", lambda run: BOUNDS.get(run.bound_by, run.bound_by), 1, longest=12, right=False),
        Shown("TTFT\n(s)", figure("prefill_latency_s"), 4),
        Shown("step", step, 6),
        Shown("total\ntoken/s", figure("total_throughput"), 8),
        Shown("time /\nplan", of_plan, 7),
        Shown("peak GPU\n(GiB)", figure("peak_gpu_bytes", 2**30), 9),
    ]
    for metric in dict.fromkeys(score.metric for run in runs for score in run.quality):
        found.append(Shown(metric.replace(" ", "\n", 1), _score(metric), 3))
    return found


def _score(metric: str) -> Callable[[Run], str | None]:
    return lambda run: next((score.text for score in run.quality if score.metric == metric), None)


def setting_columns(runs: Sequence[Run]) -> list[Shown]:
    """What was run. Those of `WORK` are never left out."""

    def setting(header: str, of: Callable[[Run], str | None], rank: int, right: bool = False, **more: Any) -> Shown:
        return Shown(header, of, rank, right=right, setting=True, **more)

    def counted(key: str) -> Callable[[Run], str | None]:
        return lambda run: None if (value := run.whole(key)) is None else str(value)

    def folder(run: Run) -> str | None:
        name = folders[run.number - 1]
        return name if name is None or len(name) <= LONGEST_FOLDER else f"…{name[1 - LONGEST_FOLDER :]}"

    folders = short_folders([run.text("folder") for run in runs])
    options = options_in_words([run.record for run in runs])
    found = [
        setting("model", lambda run: run.short_model, 0),
        setting("engine", lambda run: run.text("engine"), 0, longest=12),
        setting("bits", lambda run: run.weights if run.weights != "dtype unknown" else None, 1),
        setting("where", where, 2, longest=26),
        setting("batch", counted("batch_size"), 0, right=True, words="batch {}"),
        setting("prompt", counted("prompt_len"), 0, right=True, words="prompt {}"),
        setting("gen", counted("gen_len"), 0, right=True, words="{} generated"),
        setting("ranks", counted("world_size"), 1, right=True, words="{} ranks"),
        setting("options", lambda run: options[run.number - 1], 3, longest=200, least=16),
        setting("folder", folder, 5, words=""),
        setting("gpu", lambda run: (run.gpus or "").replace("NVIDIA ", "") or None, 5),
        setting("commit", lambda run: (run.text("environment.git_commit") or "")[:9] or None, 10, words=""),
    ]
    alike = Counter(tuple(each.of(run) for each in found) for run in runs)
    if max(alike.values()) > 1:  # nothing else tells them apart
        found.append(setting("file", lambda run: run.text("file"), 11, longest=32, words=""))
    return found


def with_sorted(columns: Sequence[Shown], name: str) -> list[Shown]:
    """The columns, with the one that `--sort` was given: it is never left out, as it explains the order."""
    header = _HEADERS.get(name)
    if any(column.header == header for column in columns):
        return [dataclasses.replace(column, rank=0) if column.header == header else column for column in columns]
    column = BY_NAME[name]

    def text(run: Run) -> str | None:
        value = column.of(run.record) if column.of else value_at(run.record, column.key, column.dtype)
        return None if value is None else column.show(value)

    return [Shown(column.header.replace(" (", "\n(", 1), text, 0, right=column.numeric), *columns]


def options_in_words(records: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """For each record those options in which the records differ, such as `gpu-memory 20, cpu-compute off`; None where it has none."""
    differing = differing_options(records)
    names = [
        *(name for name in FIRST_OPTIONS if name in differing),
        *(name for name in differing if name not in FIRST_OPTIONS),
    ]
    found = []
    for index in range(len(records)):
        given = [(name, value) for name in names if (value := differing[name][index]) is not None]
        found.append(", ".join(name if value == "yes" else f"{name} {value}" for name, value in given) or None)
    return found
