"""The table that `zero-inference report` prints: results first, in the width of the terminal; what all runs share is said once above."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_inference.config.choices import PAGE_LOCKING_ENGINES, STREAM_OPTIONS
from zero_inference.report.folders import short_folders
from zero_inference.report.given import differing_options
from zero_inference.report.html.runs import Run
from zero_inference.report.html.summary import seconds
from zero_inference.report.prediction import time_over_predicted
from zero_inference.report.short import SHORT_DTYPES
from zero_inference.runtime.tables import Column, one_line, terminal_table, three_digits

PIPED_WIDTH = 100
GAP = 2  # characters between two columns
LONGEST_FOLDER = 16  # characters; the end of it tells most
MOST_FAILURES = 10  # that get a note below the table
BOUNDS = {"link_and_cores": "link+cores", "device_memory": "memory", "matmul": "products"}


@dataclass(frozen=True)
class Shown:
    """A column. `of` makes the text of a run, None where it is not known.

    Attributes:
        rank: columns with the largest go first where the table is too wide; 0 stays.
        setting: says what was run, so it is left out where all runs agree. Otherwise it is a result, left out where no run has it.
        longest: characters of a text; more are cut out of the middle.
        right: aligned to the right, as results are.
    """

    header: str
    of: Callable[[Run], str | None]
    rank: int
    setting: bool = True
    longest: int = 24
    right: bool = False

    def text(self, run: Run) -> str:
        return shortened(one_line(self.of(run) or "-"), self.longest)


def print_short(records: Sequence[dict[str, Any]]) -> None:
    """`short_table` on stdout, in the width and with the colours of the terminal, if it is one."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    print(short_table(records, terminal, width), end="", flush=True)


def short_table(records: Sequence[dict[str, Any]], colour: bool, width: int) -> str:
    """The report of `records` as lines at most `width` wide; runs keep their order."""
    runs = [Run(number, record) for number, record in enumerate(records, start=1)]
    shared, shown = _chosen(runs, [*_results(runs), *_settings(runs)])
    texts = {column.header: [column.text(run) for run in runs] for column in shown}
    kept = _fitting(shown, texts, width)
    columns = [
        Column("", each.header, dtype="Float64" if each.right or not each.setting else "string") for each in kept
    ]
    rows = [list(row) for row in zip(*(texts[each.header] for each in kept))]
    above = ("all: " if len(runs) > 1 and shared else "") + ", ".join(shared)
    hidden = _hidden([each for each in shown if each not in kept])
    lines = [
        *textwrap.wrap(above, width, subsequent_indent="  ", break_on_hyphens=False),
        *terminal_table(columns, rows, colour, width, GAP).splitlines(),
        *(cut(line, width) for line in _failures(runs)),
        *textwrap.wrap(hidden, width, subsequent_indent="  ", break_on_hyphens=False),
    ]
    return "".join(f"{line}\n" for line in lines)


def _results(runs: Sequence[Run]) -> list[Shown]:
    def figure(key: str, scale: float = 1) -> Callable[[Run], str | None]:
        def text(run: Run) -> str | None:
            value = None if run.failed else run.amount(key)
            return None if value is None else three_digits(value / scale)

        return text

    def decode(run: Run) -> str | None:
        return "failed" if run.failed else figure("decode_throughput")(run)

    def step(run: Run) -> str | None:
        decode_s, steps = run.amount("decode_latency_s"), (run.whole("gen_len") or 0) - 1
        return seconds(decode_s / steps) if decode_s and decode_s > 0 and steps > 0 and not run.failed else None

    def of_limit(run: Run) -> str | None:
        return None if run.share_of_limit is None else f"{run.share_of_limit:.1%}"

    def bound(run: Run) -> str | None:
        return BOUNDS.get(run.bound_by, run.bound_by)

    def of_plan(run: Run) -> str | None:
        ratio = None if run.failed else time_over_predicted(run.record, "decode_s")
        return None if ratio is None else f"{ratio:.2f}"

    found = [
        *[Shown("#", lambda run: str(run.number), 0, setting=False)] * any(run.failed for run in runs),
        Shown("decode\ntoken/s", decode, 0, setting=False),
        Shown("step", step, 6, setting=False),
        Shown("TTFT\n(s)", figure("prefill_latency_s"), 4, setting=False),
        Shown("total\ntoken/s", figure("total_throughput"), 8, setting=False),
        Shown("of\nlimit", of_limit, 1, setting=False),
        Shown("bound\nby", bound, 3, setting=False, longest=12),
        Shown("time /\nplan", of_plan, 7, setting=False),
        Shown("peak GPU\n(GiB)", figure("peak_gpu_bytes", 2**30), 9, setting=False),
    ]
    for metric in dict.fromkeys(score.metric for run in runs for score in run.quality):
        found.append(Shown(metric.replace(" ", "\n", 1), _score(metric), 3, setting=False))
    return found


def _score(metric: str) -> Callable[[Run], str | None]:
    return lambda run: next((score.text for score in run.quality if score.metric == metric), None)


def _where(run: Run) -> str | None:
    """Offload, page-locking and place of the KV cache, such as `cpu pinned, KV cpu`; None for a run that says nothing of it."""
    if run.record.get("cpu_offload") is None and run.record.get("disk_offload") is None:
        return None
    place = {"host": "cpu", "device": "gpu"}.get(run.place, run.place)
    stream = run.record.get("stream")
    if isinstance(stream, dict) and stream.get("resident_layers") and stream.get("streamed_layers") == 0:
        place = "gpu"
    pinned = run.record.get("pin_memory")
    if place == "cpu" and run.engine in PAGE_LOCKING_ENGINES and isinstance(pinned, bool):
        place += " pinned" if pinned else " pageable"
    return f"{place}, KV cpu" if run.record.get("kv_offload") else place


def _settings(runs: Sequence[Run]) -> list[Shown]:
    def counted(key: str) -> Callable[[Run], str | None]:
        return lambda run: None if (value := run.whole(key)) is None else str(value)

    def option(name: str, values: Sequence[str | None]) -> Shown:
        rank = 2 if name.replace("-", "_") in STREAM_OPTIONS else 4
        return Shown(name.replace("-", "-\n", 1), lambda run: values[run.number - 1], rank, longest=16)

    def folder(run: Run) -> str | None:
        name = folders[run.number - 1]
        return name if name is None or len(name) <= LONGEST_FOLDER else f"…{name[1 - LONGEST_FOLDER :]}"

    folders = short_folders([run.text("folder") for run in runs])
    found = [
        Shown("model", lambda run: run.short_model, 0),
        Shown("engine", lambda run: run.text("engine"), 0, longest=12),
        Shown("bits", lambda run: run.weights if run.weights != "dtype unknown" else None, 1),
        Shown("where", _where, 1),
        Shown("batch", counted("batch_size"), 0, right=True),
        *(option(name, values) for name, values in differing_options([run.record for run in runs]).items()),
        Shown("dtype", lambda run: SHORT_DTYPES.get(run.text("dtype"), run.text("dtype")), 7),
        Shown("prompt", counted("prompt_len"), 4, right=True),
        Shown("generated", counted("gen_len"), 4, right=True),
        Shown("ranks", counted("world_size"), 1, right=True),
        Shown("folder", folder, 0),
        Shown("gpu", lambda run: (run.gpus or "").replace("NVIDIA ", "") or None, 4),
        Shown("commit", lambda run: (run.text("environment.git_commit") or "")[:9] or None, 10),
    ]
    alike = Counter(tuple(each.of(run) for each in found) for run in runs)
    if max(alike.values()) > 1:  # nothing else tells them apart
        found.append(Shown("file", lambda run: run.text("file"), 11, longest=32))
    return found


_UNITS = {"batch": "batch {}", "prompt": "prompt {}", "generated": "{} generated"}
_UNSAID = ("file", "folder", "commit", "dtype")  # that all runs share it tells nothing
_ONE_RANK = ("ranks", "1")


def _chosen(runs: Sequence[Run], columns: Sequence[Shown]) -> tuple[list[str], list[Shown]]:
    """(what all runs share, in words; the columns that are worth showing)."""
    shared, shown = [], []
    for column in columns:
        known = [column.of(run) for run in runs if not run.failed or column.of(run) is not None]
        values = set(known)
        if values <= {None}:
            continue
        if column.setting and len(values) == 1:
            value = column.text(runs[0]) if len(runs) == 1 else shortened(one_line(known[0]), column.longest)
            if column.header not in _UNSAID and (column.header, value) != _ONE_RANK:
                words = f"{value} ranks" if column.header == "ranks" else _UNITS.get(column.header, "{}").format(value)
                shared.append(words)
        else:
            shown.append(column)
    return shared, shown


def _fitting(columns: Sequence[Shown], texts: dict[str, list[str]], width: int) -> list[Shown]:
    """Those columns that fit beside each other, the least important left out."""
    from rich.cells import cell_len

    def taken(column: Shown) -> int:
        return GAP + max(map(cell_len, (*column.header.split("\n"), *texts[column.header])))

    kept = list(columns)
    while sum(map(taken, kept)) - GAP > width and any(each.rank for each in kept):
        kept.remove(max(reversed(kept), key=lambda each: each.rank))
    for column in columns:  # what was dropped for a wider one may have room after all
        if column not in kept and sum(map(taken, [*kept, column])) - GAP <= width:
            kept.append(column)
    return [column for column in columns if column in kept]


def _failures(runs: Sequence[Run]) -> list[str]:
    failed = [run for run in runs if run.failed]
    lines = [
        f"#{run.number} failed: {one_line(run.text('error') or 'no error was recorded')}"
        for run in failed[:MOST_FAILURES]
    ]
    if len(failed) > MOST_FAILURES:
        lines.append(f"and {len(failed) - MOST_FAILURES} more failed runs; --all-columns shows their errors")
    return lines


def _hidden(columns: Sequence[Shown]) -> str:
    if not columns:
        return ""
    names = ", ".join(each.header.replace("-\n", "-").replace("\n", " ") for each in columns)
    return f"{len(columns)} column{'s' * (len(columns) > 1)} hidden for width ({names}); --all-columns shows all"


def cut(line: str, width: int) -> str:
    """`line` in at most `width` cells of a terminal; what is left out is at its end."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= width else set_cell_size(line, width - 1).rstrip() + "…"


def shortened(text: str, longest: int) -> str:
    """At most `longest` characters; what is left out is in the middle."""
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]}…{text[len(text) - (longest - head - 1) :]}"
