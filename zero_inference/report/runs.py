"""Reads the runs of folders: records (.jsonl), and the blocks in .log files without a record, which is all that older tools wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_inference.config.options import LOG_PREFIX
from zero_inference.records.read import parse_log, read_records, warn
from zero_inference.records.schema import STATUS_OK
from zero_inference.report.run import Run
from zero_inference.utils.format import one_line
from zero_inference.utils.log import LOG_LINES

SUFFIXES = (".jsonl", ".log")
_LOOKED_AT = 1 << 20  # bytes, of a file that may be something else
_LOG_NAME = re.compile(
    r"(?P<prefix>[^-]+)-(?P<model>.+)-bs(?P<batch>\d+)-prompt(?P<prompt>\d+)-gen(?P<gen>\d+)"
    r"-n(?P<nodes>\d+)x(?P<gpus>\d+)-(?P<place>cpu|disk|gpu)(?P<kv>-kv_offload)?(?P<quant>-w_quant)?"
)


def load_tree(roots: Sequence[Path]) -> list[Run]:
    """Return the runs in `roots` and all folders below; a folder that is reached twice counts once.

    Raises:
        NotADirectoryError: a root is no folder.
    """
    runs: list[Run] = []
    seen: set[str] = set()
    for root in roots:
        for folder in _folders_below(root):
            if (real := os.path.realpath(folder)) not in seen:
                seen.add(real)
                only = None if folder == root else _looks_like_a_run
                runs += [dataclasses.replace(run, folder=str(folder)) for run in load_runs(folder, only)]
    return runs


def _folders_below(root: Path) -> Iterator[Path]:
    """Yield `root` and its subfolders with runs by name, without hidden ones and without following links."""
    if not root.is_dir():
        raise NotADirectoryError(f"no folder {root}")
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if Path(folder) == root or any(name.endswith(SUFFIXES) for name in files):
            yield Path(folder)


def _looks_like_a_run(path: Path) -> bool:
    """Return whether a file in a subfolder is a run's: other programs write .jsonl and .log too."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".log":
                return LOG_LINES[0][0][0].encode() + b": " in file.read(_LOOKED_AT)
            first = json.loads(file.readline(64 * _LOOKED_AT))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "status" in first


def load_runs(folder: str | Path, only: Callable[[Path], bool] | None = None) -> list[Run]:
    """Return every run whose record (.jsonl) or block (.log) is in `folder`, in the order of the file names.

    A block whose run has a record in the .jsonl of the same name is listed once. `only` selects files.

    Raises:
        NotADirectoryError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {folder}")
    runs: list[Run] = []
    files = {path for path in folder.iterdir() if path.suffix in SUFFIXES and (only is None or only(path))}
    for stem in sorted({path.with_suffix("") for path in files}):
        # Not with_suffix on the stem: model names contain dots.
        log, jsonl = stem.parent / f"{stem.name}.log", stem.parent / f"{stem.name}.jsonl"
        records = _read(read_records, jsonl) if only is None or jsonl in files else []
        of_records = [Run.read(record | {"file": jsonl.name, "folder": None}) for record in records]
        runs += of_records
        unmatched = Counter(_as_logged(run) for run in of_records if run.record.status == STATUS_OK)
        for block in _read(parse_log, log) if only is None or log in files else ():
            run = Run.read(parse_log_name(stem.name) | block | {"status": STATUS_OK, "file": log.name})
            if unmatched[_as_logged(run)]:
                unmatched[_as_logged(run)] -= 1
            else:
                runs.append(run)
    return runs


def parse_log_name(stem: str) -> dict[str, Any]:
    """Return the keys of the record that a log's name holds; a name of another pattern is the model's.

    The name says whether weights were quantized but not to how many bits: `quant_bits` is 16 or None.
    """
    match = _LOG_NAME.fullmatch(stem)
    if match is None:
        return {"model": stem}
    nodes, place = int(match["nodes"]), match["place"]
    return {
        "model": match["model"],
        "engine": {prefix: engine for engine, prefix in LOG_PREFIX.items()}.get(match["prefix"], match["prefix"]),
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


def _as_logged(run: Run) -> tuple[str | None, ...]:
    """Return the values that match a run's block with its record, in the three decimals of the block."""
    of = run.measured
    values = (of.prefill_latency_s, of.decode_latency_s, of.total_latency_s, of.total_throughput)
    return tuple(None if value is None else f"{value:.3f}" for value in values)


def _read(reader: Callable[[Path], list[dict[str, Any]]], path: Path) -> list[dict[str, Any]]:
    """Return the file's entries; one that cannot be read is named on stderr."""
    if not path.is_file():
        return []
    try:
        return list(reader(path))
    except (OSError, ValueError) as error:
        warn(f"warning: {path} left out: {one_line(str(error))}")
        return []


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Return the runs by model, then equal work (batch, prompt, generated tokens), the fastest first and failed runs last."""

    def key(run: Run) -> tuple:
        asked = run.request
        work = (asked.batch_size or 0, asked.prompt_len or 0, asked.gen_len or 0)
        speed = run.decode_throughput or 0, 0 if run.failed else run.measured.total_throughput or 0
        return run.short_model.lower(), run.short_model, *work, run.failed, *(-each for each in speed)

    return sorted(runs, key=key)
