"""The JSONL record of a run: its fields, appending one, reading many; and reading old four-line logs.

`FIELDS` is the one place that knows which keys a record has and what they mean; printers and readers
take them from here. A record may carry more keys than these.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.runtime.append import append_bytes
from zero_inference.runtime.text import printable
from zero_inference.utils import GB, LOG_LINES

SCHEMA_VERSION = 1
STATUS_OK = "ok"
STATUS_FAILED = "failed"
LONGEST_LINE = 64 << 20  # bytes, of records and logs that are read; a record of 100,000 steps has 2 MB
MOST_DEEP = 32  # levels of lists and objects in a record that is read; those written here have 5
SMALLEST, LARGEST = 1e-15, 1e20  # of any quantity of a run, in SI units


@dataclass(frozen=True)
class Field:
    """One required key. `asked` fields describe the request and are there even when the run failed."""

    name: str
    unit: str
    meaning: str
    asked: bool = False
    parts: tuple[str, ...] = ()  # keys of the object, or of each object in the list

    def missing_in(self, value: Any) -> list[str]:
        """Dotted names of the parts that `value` lacks; null stands for a whole that was not measured."""
        items = value if isinstance(value, (list, tuple)) else [value]
        present = [item if isinstance(item, Mapping) else {} for item in items if item is not None]
        return [f"{self.name}.{part}" for part in self.parts if any(part not in item for item in present)]


FIELDS = (
    Field("schema_version", "", f"layout of the record, {SCHEMA_VERSION}; filled in by append_record", asked=True),
    Field("status", "", f"'{STATUS_OK}', or '{STATUS_FAILED}' with the reason in `error`", asked=True),
    Field("timestamp", "", "start of the run, ISO 8601 with time zone", asked=True),
    Field("argv", "", "the command line, a list of strings", asked=True),
    Field("engine", "", "deepspeed, stream, accelerate or resident", asked=True),
    Field("model", "", "hub name, folder or preset as given", asked=True),
    Field("model_type", "", "transformers' name of the family; null if the config could not be read", asked=True),
    Field("dtype", "", "type of weights and activations, such as bfloat16", asked=True),
    Field("world_size", "processes", "ranks of all nodes together", asked=True),
    Field("num_nodes", "machines", "", asked=True),
    Field("batch_size", "sequences", "B, over all ranks", asked=True),
    Field("prompt_len", "token", "P, real tokens of each prompt", asked=True),
    Field("gen_len", "token", "G, tokens generated per sequence", asked=True),
    Field("quant_bits", "bit", "bits of a stored weight: 16 (not quantized), 8 or 4", asked=True),
    Field("quant_group_size", "elements", "weights that share a scale and a minimum", asked=True),
    Field("cpu_offload", "", "weights in host memory", asked=True),
    Field("disk_offload", "", "weights on disk", asked=True),
    Field("kv_offload", "", "KV cache in host memory", asked=True),
    Field("norm_kernels", "", "auto, cuda or off", asked=True),
    Field("dummy", "", "random weights and random token ids", asked=True),
    Field("model_bytes", "byte", "all parameters at 2 bytes, see utils.model_bytes"),
    Field("cache_bytes", "byte", "KV cache at 2 bytes, see utils.cache_bytes"),
    Field("hidden_bytes", "byte", "hidden states of prompt and generated tokens at 2 bytes, see utils.hidden_bytes"),
    Field("weight_bytes", "byte", "weights as the engine stores them, scales included, exact"),
    Field("load_s", "s", "from the engine's start to a model that can generate"),
    Field("cold_total_s", "s", "total latency of the first warm-up loop; null without one"),
    Field("loops", "", "every measured loop, in s; `step_s` has one entry per generated token",
          parts=("prefill_s", "decode_s", "total_s", "step_s")),
    Field("prefill_latency_s", "s", "time to first token, its selection included; median over loops"),
    Field("prefill_throughput", "token/s", "B P / prefill latency"),
    Field("decode_latency_s", "s", "total - prefill; median over loops"),
    Field("decode_throughput", "token/s", "B (G - 1) / decode latency; null when G = 1"),
    Field("total_latency_s", "s", "one generate call; median over loops"),
    Field("total_throughput", "token/s", "B G / total latency"),
    Field("peak_gpu_bytes", "byte", "most device memory held during the measured loops; null without a device"),
    Field("peak_host_bytes", "byte", "most resident host memory of the process"),
    Field("output_ids_sha256", "", "fingerprint of the generated ids, see output_ids_sha256"),
    Field("transfers", "byte", "bytes moved per decode step, counted",
          parts=("host_to_device_bytes_per_step", "disk_read_bytes_per_step")),
    Field("limit", "", "what the machine allows: measured rates (GB/s of 1e9, TFLOP/s; `link_from`: the link's is that of rounds of "
          "copies between the loops, or of the loops' own copies), the least time of a step by each, which one binds, the decode time it "
          "bounds, the share reached; beside it `link_use` (seconds: what the first rank's link did in the decode steps) where the engine "
          "observes it",
          parts=("link_gbps", "floor_decode_s", "fraction_of_limit")),
    Field("ds_config", "", "DeepSpeed's config as resolved; null for other engines"),
    Field("environment", "", "machine and versions, see environment.describe_environment"),
)  # fmt: skip
FIELD_NAMES = tuple(field.name for field in FIELDS)

# What run_model.py writes besides; a record without these is whole, and older ones lack them.
FURTHER_FIELDS = (
    Field("weights_place", "", "where the weights waited: cpu (host memory), disk or gpu; cpu also for a run without offload on a "
          "machine without a GPU. The place in the log's name"),
    Field("decode_latency_min_s", "s", "decode latency of the fastest loop; null with one loop or G = 1"),
    Field("decode_latency_max_s", "s", "decode latency of the slowest loop; null with one loop or G = 1"),
    Field("decode_spread", "share", "(slowest - fastest) / median of the loops' decode latencies; null with one loop or G = 1"),
    Field("slowest_step_over_median", "ratio", "the decode step that took longest beside the median step of its loop, over all loops; "
          "null with fewer than 3 steps in a loop"),
    Field("slowest_step_at", "", "that step, `loop` and `step` counted from 1", parts=("loop", "step", "step_s")),
    Field("load_average_before", "processes", "running or waiting to run on the whole machine, over the minute before loading"),
    Field("usable_cores", "cores", "that this process may use, by its affinity and its cgroup"),
)  # fmt: skip


def append_record(path: str | os.PathLike, record: Mapping[str, Any]) -> dict:
    """Appends `record` to `path` as one line of strict JSON, flushed to disk, and returns it as written.

    nan and infinities become null; numpy and torch numbers and arrays, and paths, are converted. With
    status 'failed' the measured fields may be left out and are written as null. Processes may append
    to one file at once.

    Raises ValueError for missing keys, naming them all, TypeError for a value JSON has no form for,
    and OSError when not all of the line could be written (then none of it is).
    """
    line = complete(record)
    text = json.dumps(line, allow_nan=False)
    append_bytes(path, (text + "\n").encode(), sync=True, on_new_line=True)
    return line


def complete(record: Mapping[str, Any]) -> dict:
    """`record` checked against FIELDS, in their order, further keys after them; as plain JSON values."""
    record = {"schema_version": SCHEMA_VERSION, **record}
    if record["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"record has schema_version {record['schema_version']!r}, this writes {SCHEMA_VERSION}")
    status = record.get("status")
    if status not in (None, STATUS_OK, STATUS_FAILED):
        raise ValueError(f"record has status {status!r}, it must be {STATUS_OK!r} or {STATUS_FAILED!r}")
    failed = status == STATUS_FAILED
    missing = [field.name for field in FIELDS if field.name not in record and (field.asked or not failed)]
    missing += [name for field in FIELDS for name in field.missing_in(record.get(field.name))]
    if failed and not record.get("error"):
        missing.append("error")
    if missing:
        raise ValueError(f"record lacks {', '.join(missing)}")
    ordered = {name: record.get(name) for name in FIELD_NAMES}
    return {name: _plain(value, name) for name, value in {**ordered, **record}.items()}


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _plain(value.tolist(), where)
    raise TypeError(f"record field {where} is a {type(value).__name__}, which JSON has no form for")


def read_records(path: str | os.PathLike) -> list[dict]:
    """The records of a .jsonl file, or of all *.jsonl files of a folder in the order of their names.

    A line that cannot be used (a writer that died, a full disk, no object, nested deeper than MOST_DEEP) is left out, and so is
    a file of a folder that cannot be read; one line on stderr for each file says how many, where and why the first. NaN and
    infinities read as None. Raises FileNotFoundError if `path` is not there, and OSError where a single file cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return _records_of(path)
    records = []
    for file in sorted(file for file in path.glob("*.jsonl") if file.is_file()):
        try:
            records += _records_of(file)
        except OSError as error:
            warn(f"{file}: left out: {error.strerror}")
    return records


def _records_of(file: Path) -> list[dict]:
    records, skipped = [], []
    for number, line in enumerate(_lines_of(file), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda name: None)
            why = None if isinstance(record, dict) else "line that is no JSON object"
        except ValueError:  # covers text that is not UTF-8
            why = "line that is no JSON object" if line.endswith(b"\n") else "incomplete last line"
        except RecursionError:
            why = f"line nested deeper than {MOST_DEEP}"
        if why is None and _is_deep(record, MOST_DEEP):
            why = f"line nested deeper than {MOST_DEEP}"
        if why is None:
            records.append(record)
        else:
            skipped.append(f"{file}:{number}: skipped {why}")
    if skipped:
        more = len(skipped) - 1
        warn(skipped[0] + (f", and {more} more line{'s' * (more > 1)} of this file" if more else ""))
    return records


def _lines_of(file: str | os.PathLike) -> Iterator[bytes]:
    """The lines of a file, one in memory at a time; one that is longer than LONGEST_LINE is cut there, so it is no record."""
    with open(file, "rb") as lines:
        while line := lines.readline(LONGEST_LINE):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = lines.readline(LONGEST_LINE)
            yield line if rest is line or not rest else line[:-1] + b"\n"


def _is_deep(value: Any, left: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(item, left - 1) for item in items if isinstance(item, (dict, list)))


def warn(line: str) -> None:
    """A line on stderr that may hold names and paths of any kind, also with line breaks."""
    print(printable(line).replace("\n", "\ufffd"), file=sys.stderr)


def value_at(record: Mapping[str, Any], key: str, dtype: str) -> Any:
    """The value at a dotted key, as the pandas dtype (Int64, Float64, boolean, string); None where it is missing, or of another
    kind, as in records of older or other tools, or a number that no run has (see `number_of`, and 64 bits for Int64)."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return None
    if dtype == "string":
        return printable(value if isinstance(value, str) else json.dumps(value))
    if dtype == "boolean":
        return bool(value) if isinstance(value, (bool, int, float)) else None
    if dtype == "Float64":
        return number_of(value)
    try:
        number = int(value)  # as it is, not by way of float, which would round above 2**53
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def number_of(value: Any) -> float | None:
    """`value` as a float; None if it is none, not finite, or so large or small that sums and ratios of such would not be."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == 0 or SMALLEST <= abs(number) <= LARGEST else None


# A first line may stand behind a line that a power cut tore.
_LOG_PATTERNS = tuple(
    re.compile(
        ("" if number else ".*?")
        + r"\t".join(rf"{re.escape(label)}: (\S+) {re.escape(unit)}" for label, unit, _ in line)
    )
    for number, line in enumerate(LOG_LINES)
)
_LOG_KEYS = tuple((key, unit) for line in LOG_LINES for _, unit, key in line)


def parse_log(path: str | os.PathLike) -> list[dict]:
    """The blocks of a .log file, oldest first, each under the record's names for the same quantities.

    Sizes come back as whole bytes (from three decimals of a GB, so to about 0.5 MB), latencies in s,
    throughputs in token/s, `nan` as None. Lines that are no block are left out with a warning on stderr.
    """
    lines = [line.decode(errors="replace").rstrip() for line in _lines_of(path)]
    blocks: list[dict] = []
    skipped: list[str] = []
    at = 0
    while at < len(lines):
        matches = [pattern.fullmatch(line) for pattern, line in zip(_LOG_PATTERNS, lines[at:])]
        if len(matches) == len(LOG_LINES) and all(matches):
            values = [text for match in matches for text in match.groups()]
            try:
                blocks.append({key: _from_log(text, unit) for (key, unit), text in zip(_LOG_KEYS, values)})
                if matches[0].start(1) > len(f"{LOG_LINES[0][0][0]}: "):
                    warn(f"{path}:{at + 1}: skipped the torn line before this block")
                at += len(LOG_LINES)
                continue
            except ValueError:  # a field that is no number
                pass
        if lines[at].strip():
            skipped.append(f"{path}:{at + 1}: skipped, not part of a four-line block")
        at += 1
    if skipped:
        warn(skipped[0] + (f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""))
    return blocks


def _from_log(text: str, unit: str) -> float | int | None:
    value = number_of(float(text))
    if value is None:
        return None
    return round(value * GB) if unit == "GB" else value


def output_ids_sha256(ids: Any) -> str:
    """SHA-256, in hex, of generated ids [B, G] as int64 little-endian, row by row.

    `ids` is a torch tensor of any device, a numpy array or nested lists. Raises ValueError if it has not
    two dimensions or is not of integers.
    """
    import numpy as np

    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.ndim != 2 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"ids must be integers [B, G], got {array.dtype} of shape {list(array.shape)}")
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()
