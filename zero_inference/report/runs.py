"""Run logs side by side: `zero-inference report LOGDIR`.

Every run is one row. Rows come from the records (.jsonl) and from the blocks in .log files that have no record,
which is all that older tools wrote. `COLUMNS` is the only place that knows columns: what is read from a record,
what the table, Markdown, CSV and JSON printers show, and what `--sort` accepts all follow from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_inference.errors import UsageError
from zero_inference.records.read import parse_log, read_records, value_at, warn
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK
from zero_inference.report.fields import print_fields
from zero_inference.report.tables import FORMATS, decimals, gib, markdown, terminal_table
from zero_inference.runtime.replace import check_output_file
from zero_inference.runtime.text import printable

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".jsonl", ".log")
LONGEST_TEXT = 2000  # of a cell


def _plain(value: Any) -> str:
    return _one_line(str(value))


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


_three_decimals = decimals(3)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _one_line(value: str) -> str:
    text = printable(" ".join(value.split()))
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _gpu_names(value: str) -> str:
    try:
        counts = Counter(str(gpu["name"]) for gpu in json.loads(value))
    except (ValueError, TypeError, KeyError, RecursionError):  # another tool's list: as it is
        return _one_line(value)
    return _one_line(", ".join(f"{count}x {name}" for name, count in counts.items()) or "none")


@dataclass(frozen=True)
class Column:
    """One column of the report.

    `key` is where a record holds the value (dotted where nested) and `called`, or else its last part, names the column, `dtype` is
    the pandas dtype, `show` turns a value in SI units into the text under `header`. `shown` says when the
    column is kept: `always`, where the runs differ in it (`differs`), where any run has it (`present`), or only
    on request (`detail`: measured values differ between any two runs, which tells nothing about the choice).
    `best_first` sorts from the largest down.
    """

    key: str
    header: str
    dtype: str
    show: Callable[[Any], str] = _plain
    shown: str = "differs"
    best_first: bool = False
    called: str | None = None

    @property
    def name(self) -> str:
        return self.called or self.key.rpartition(".")[2]

    @property
    def numeric(self) -> bool:
        return self.dtype in ("Int64", "Float64")


def _score(
    key: str, header: str, called: str, show: Callable[[Any], str] = _percent, best_first: bool = True
) -> Column:
    return Column(f"quality.{key}", header, "Float64", show, "present", best_first, called)


COLUMNS = (
    Column("model", "model", "string", shown="always"),
    Column("engine", "engine", "string", shown="always"),
    Column("dtype", "dtype", "string"),
    Column("num_nodes", "nodes", "Int64"),
    Column("world_size", "ranks", "Int64"),
    Column("batch_size", "batch", "Int64"),
    Column("prompt_len", "prompt (tokens)", "Int64"),
    Column("gen_len", "gen (tokens)", "Int64"),
    Column("quant_bits", "weights (bits)", "Int64"),
    Column("quant_group_size", "group", "Int64"),
    # Only for rows read from a log's name, which says that weights were quantized but not to how many bits.
    Column("weight_quantize", "quantized", "boolean", _yes_no),
    Column("cpu_offload", "cpu offload", "boolean", _yes_no),
    Column("disk_offload", "disk offload", "boolean", _yes_no),
    Column("kv_offload", "kv offload", "boolean", _yes_no),
    Column("pin_memory", "pinned", "boolean", _yes_no),
    Column("norm_kernels", "norm kernels", "string"),
    Column("dummy", "dummy", "boolean", _yes_no),
    Column("environment.gpus", "gpus", "string", _gpu_names),
    Column("environment.git_commit", "commit", "string", lambda commit: _one_line(commit)[:9]),
    Column("total_throughput", "total (token/s)", "Float64", _three_decimals, "always", best_first=True),
    Column("decode_throughput", "decode (token/s)", "Float64", _three_decimals, "always", best_first=True),
    Column("decode_weights_gbps", "weights (GB/s)", "Float64", _three_decimals, "always", best_first=True),
    Column("prefill_latency_s", "prefill (s)", "Float64", _three_decimals, "always"),
    Column("limit.fraction_of_limit", "of limit (%)", "Float64", _percent, "always", best_first=True),
    Column("peak_gpu_bytes", "peak gpu (GiB)", "Int64", gib, "always"),
    _score("mmlu.accuracy", "mmlu (%)", "mmlu_accuracy"),
    _score("mmlu.stderr", "+- (%)", "mmlu_stderr", best_first=False),
    _score("hellaswag.accuracy", "hellaswag (%)", "hellaswag_accuracy"),
    _score("hellaswag.stderr", "+- (%)", "hellaswag_stderr", best_first=False),
    _score("hellaswag.acc_norm", "hellaswag norm (%)", "hellaswag_acc_norm"),
    _score("hellaswag.acc_norm_stderr", "+- (%)", "hellaswag_acc_norm_stderr", best_first=False),
    _score("humaneval.pass_at_k.1", "humaneval pass@1 (%)", "humaneval_pass_at_1"),
    _score("humaneval.stderr.1", "+- (%)", "humaneval_stderr", best_first=False),
    _score("perplexity.perplexity", "perplexity", "perplexity", _three_decimals, best_first=False),
    _score("perplexity.stderr", "+-", "perplexity_stderr", _three_decimals, best_first=False),
    Column("prefill_throughput", "prefill (token/s)", "Float64", _three_decimals, "detail", best_first=True),
    Column("decode_latency_s", "decode (s)", "Float64", _three_decimals, "detail"),
    Column("total_latency_s", "total (s)", "Float64", _three_decimals, "detail"),
    Column("load_s", "load (s)", "Float64", _three_decimals, "detail"),
    Column("cold_total_s", "cold (s)", "Float64", _three_decimals, "detail"),
    Column("limit.link_gbps", "link (GB/s)", "Float64", _three_decimals, "detail", best_first=True),
    Column("limit.floor_decode_s", "decode floor (s)", "Float64", _three_decimals, "detail"),
    Column("model_bytes", "model fp16 (GiB)", "Int64", gib, "detail"),
    Column("weight_bytes", "stored weights (GiB)", "Int64", gib, "detail"),
    Column("cache_bytes", "cache (GiB)", "Int64", gib, "detail"),
    Column("hidden_bytes", "hidden (GiB)", "Int64", gib, "detail"),
    Column("peak_host_bytes", "peak host (GiB)", "Int64", gib, "detail"),
    Column("output_ids_sha256", "ids sha256", "string", shown="detail"),
    Column("timestamp", "time", "string", shown="detail"),
    Column("file", "file", "string", shown="detail"),
    Column("status", "status", "string", shown="detail"),
    Column("error", "error", "string", _one_line, "present"),
)
_BY_NAME = {column.name: column for column in COLUMNS}

_LOG_NAME = re.compile(
    r"(?P<prefix>[^-]+)-(?P<model>.+)-bs(?P<batch>\d+)-prompt(?P<prompt>\d+)-gen(?P<gen>\d+)"
    r"-n(?P<nodes>\d+)x(?P<gpus>\d+)-(?P<place>cpu|disk|gpu)(?P<kv>-kv_offload)?(?P<quant>-w_quant)?"
)


def parse_log_name(stem: str) -> dict[str, Any]:
    """What a run log's name says, as record keys; a name of another pattern is taken as the model's.

    The name says whether the weights were quantized but not to how many bits: `quant_bits` is 16 or missing.
    """
    match = _LOG_NAME.fullmatch(stem)
    if match is None:
        return {"model": stem}
    nodes, place = int(match["nodes"]), match["place"]
    return {
        "model": match["model"],
        "engine": "deepspeed" if match["prefix"] == "ds" else match["prefix"],
        "num_nodes": nodes,
        "world_size": nodes * int(match["gpus"]),
        "batch_size": int(match["batch"]),
        "prompt_len": int(match["prompt"]),
        "gen_len": int(match["gen"]),
        "quant_bits": None if match["quant"] else 16,
        "weight_quantize": True if match["quant"] else None,
        "cpu_offload": place == "cpu",
        "disk_offload": place == "disk",
        "kv_offload": match["kv"] is not None,
    }


def _as_logged(run: dict[str, Any]) -> tuple[str | None, ...]:
    """What tells a run's block and its record to be of one run: figures in the three decimals of the block."""
    values = (
        value_at(run, key, "Float64")
        for key in ("prefill_latency_s", "decode_latency_s", "total_latency_s", "total_throughput")
    )
    return tuple(None if value is None else f"{value:.3f}" for value in values)


def _read(reader: Callable[[Path], list[dict[str, Any]]], path: Path) -> list[dict[str, Any]]:
    """The file's entries; one that cannot be read is named on stderr and does not hide the other files."""
    if not path.is_file():
        return []
    try:
        return list(reader(path))
    except (OSError, ValueError) as error:
        warn(f"warning: {path} left out: {_one_line(str(error))}")
        return []


def runs_frame(records: Iterable[dict[str, Any]]) -> pandas.DataFrame:
    """A row for each record, a typed column for each of `COLUMNS`, in SI units, missing values as `pandas.NA`."""
    import pandas

    rows = list(records)
    return pandas.DataFrame(
        {
            column.name: pandas.array([value_at(row, column.key, column.dtype) for row in rows], dtype=column.dtype)
            for column in COLUMNS
        }
    )


def load_runs(folder: str | Path) -> pandas.DataFrame:
    """`load_records` as a table, see `runs_frame`."""
    return runs_frame(load_records(folder))


def load_records(folder: str | Path) -> list[dict[str, Any]]:
    """Every run whose record (.jsonl) or block (.log) lies in `folder`, in the order of the file names.

    A block whose run has a record in the .jsonl of the same name is listed once. Raises `NotADirectoryError` where
    there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {folder}")
    rows: list[dict[str, Any]] = []
    for stem in sorted({path.with_suffix("") for path in folder.iterdir() if path.suffix in SUFFIXES}):
        # Not with_suffix on the stem: model names hold dots.
        log, jsonl = stem.parent / f"{stem.name}.log", stem.parent / f"{stem.name}.jsonl"
        records = _read(read_records, jsonl)
        rows += [record | {"file": jsonl.name} for record in records]
        unmatched = Counter(_as_logged(record) for record in records if record.get("status") == STATUS_OK)
        for block in _read(parse_log, log):
            if unmatched[_as_logged(block)]:
                unmatched[_as_logged(block)] -= 1
            else:
                rows.append(parse_log_name(stem.name) | block | {"status": STATUS_OK, "file": log.name})
    return rows


def differing_columns(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The frame with the columns that tell its runs apart, beside the model, the engine and the main results.

    A value that one run has and another lacks is a difference, as not knowing is not being equal; but what a failed
    run did not get to know is none.
    """
    good = frame[frame["status"] == STATUS_OK]

    def differ(name: str) -> bool:
        return frame[name].nunique() > 1 or good[name].nunique(dropna=False) > 1

    def keep(name: str) -> bool:
        shown = _BY_NAME[name].shown
        return (
            shown == "always"
            or (shown == "differs" and differ(name))
            or (shown == "present" and bool(frame[name].notna().any()))
        )

    return frame[[name for name in frame.columns if keep(name)]]


def sort_runs(frame: pandas.DataFrame, name: str) -> pandas.DataFrame:
    """By one column, best first where larger is better, otherwise ascending; runs without a value last."""
    ascending = not _BY_NAME[name].best_first
    return frame.sort_values(name, ascending=ascending, na_position="last", kind="stable", ignore_index=True)


def render(frame: pandas.DataFrame, format: str, *, colour: bool = False, width: int | None = None) -> str:
    """The runs as text that ends in a newline.

    `table` (for a terminal `width` columns wide, as wide as needed without one) and `md` are for people, with
    the units in the header. `csv` and `json` are for programs: full precision in SI units under the record's
    names. Raises `ValueError` for another format.
    """
    if format == "csv":
        return frame.to_csv(index=False, lineterminator="\n")
    if format == "json":
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        return json.dumps(rows, indent=2, allow_nan=False) + "\n"
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; there are {', '.join(FORMATS)}")
    columns, texts = _texts(frame)
    if format == "md":
        return markdown(columns, texts)
    return terminal_table(columns, texts, colour, width)


def _texts(frame: pandas.DataFrame) -> tuple[list[Column], list[list[str]]]:
    """What people read: the columns, and a row of texts for each run."""
    columns = [_BY_NAME[name] for name in frame.columns]
    return columns, [
        ["-" if missing else column.show(value) for column, value, missing in zip(columns, row, gone)]
        for row, gone in zip(frame.astype(object).to_numpy(), frame.isna().to_numpy())
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zero-inference report`."""
    parser.add_argument(
        "log_dir", metavar="LOGDIR", type=Path, nargs="?", help="folder with the .jsonl and .log files of runs"
    )
    parser.add_argument(
        "--fields", action="store_true", help="instead of runs: every key of a record, its unit and its meaning"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="csv and json hold SI units in full precision (default: table)",
    )
    parser.add_argument(
        "--all-columns", action="store_true", help="not only the main results and the columns in which the runs differ"
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        type=lambda text: text.replace("-", "_"),
        choices=[column.name for column in COLUMNS],
        help="a column by its name in --format csv, such as total_throughput; throughputs sort best first",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write a page with the table and figures, which needs nothing beside it",
    )


def _write_html(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """The page: runs in the order of --sort, else the fastest of each model and length first."""
    from zero_inference.report.html.page import Table, write_page
    from zero_inference.report.html.runs import fastest_first

    frame = runs_frame(records)
    if args.sort:
        order = sort_runs(frame.assign(row=range(len(frame))), args.sort)["row"].tolist()
    else:
        order = fastest_first(records)
    frame = frame.iloc[order]
    shown = frame if args.all_columns else differing_columns(frame).drop(columns="error", errors="ignore")
    if (frame["status"] == STATUS_FAILED).any() and not args.all_columns:
        shown = shown.assign(status=frame["status"])
    # the page has columns of its own for scores, each with its error
    shown = shown.drop(
        columns=[column.name for column in COLUMNS if column.key.startswith("quality.")], errors="ignore"
    )
    columns, texts = _texts(shown)
    values = shown.astype(object).where(shown.notna(), None).to_numpy().tolist()
    table = Table([column.header for column in columns], [column.numeric for column in columns], texts, values)
    write_page(args.html, str(args.log_dir), [records[index] for index in order], table)
    warn(f"page: {args.html}")


def main(args: argparse.Namespace) -> int:
    """Prints the report of `args.log_dir`; 0, or 2 where there is nothing to report.

    With --html an empty folder gets a page that says so, and 0. Raises UsageError where the page cannot be written.
    """
    import shutil

    if args.fields:
        print_fields(args.format)
        return 0
    if args.log_dir is None:
        raise UsageError("the following arguments are required: LOGDIR; see zero-inference report --help")
    if not args.log_dir.is_dir():
        what = "is a file, not a folder" if args.log_dir.exists() else "does not exist"
        warn(f"error: {args.log_dir} {what}; give the folder that run_model.py logs to")
        return 2
    if args.html:
        if Path(os.path.realpath(args.html)).suffix in SUFFIXES:
            raise UsageError(f"--html {args.html} has the name of a log or record; end it in .html.")
        check_output_file("--html", args.html)
    records = load_records(args.log_dir)
    if args.html:
        _write_html(args, records)
    if not records:
        found = any(path.suffix in SUFFIXES for path in args.log_dir.iterdir())
        what = "no run in the .log and .jsonl files of" if found else "no .log or .jsonl in"
        warn(f"{'warning' if args.html else 'error'}: {what} {args.log_dir}; run run_model.py first")
        return 0 if args.html else 2
    frame = runs_frame(records)
    if args.sort:
        frame = sort_runs(frame, args.sort)
    if not args.all_columns:
        frame = differing_columns(frame)
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    print(render(frame, args.format, colour=terminal, width=width), end="")
    return 0
