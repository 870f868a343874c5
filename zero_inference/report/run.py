"""The runs of a report, read from folders: records (.jsonl), and logs (.log) of older tools, which wrote no record."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.config.options import DEFAULTS, LOG_PREFIX, PAGE_LOCKING_ENGINES, SHORT_DTYPES, STREAM_OPTIONS
from zero_inference.measure.steadiness import relative_spread
from zero_inference.records.field import as_number
from zero_inference.records.read import parse_log, read_records, warn
from zero_inference.records.schema import STATUS_FAILED, STATUS_OK, Measured, Record, Request
from zero_inference.utils.format import one_line

SUFFIXES = (".jsonl", ".log")
LOOKED_AT_BYTES = 1 << 20
# Options that change the speed and are in no other column: runs with the same values are repetitions.
SPEED_OPTIONS = (
    *STREAM_OPTIONS,
    "norm_kernels",
    "quant_group_size",
    "ds_config",
    "async_kv_offload",
    "use_gds",
    "speculate",
    "draft_len",
    "draft_memory",
    "draft_bits",
    "temperature",
    "top_p",
)


def find(value: Any, path: str) -> Any:
    """Return the attribute at a dotted path; None where a part of the record is missing."""
    for name in path.split("."):
        value = value.get(int(name)) if isinstance(value, dict) else getattr(value, name, None)
    return value


@dataclass(frozen=True)
class Run:
    """A record, where it was read, and what follows from it. Unknown values are None."""

    record: Record
    file: str | None = None
    folder: str | None = None
    weight_quantize: bool | None = None  # from a log's name, which does not have the bits
    number: int = 0  # row in the table, from 1
    options: str = ""  # `SPEED_OPTIONS` in which the runs of the report differ
    work: str = ""  # model, batch and lengths, as far as the runs of the report differ in them

    @classmethod
    def read(cls, data: Mapping[str, Any], file: str | None = None, folder: str | None = None) -> Run:
        """Return the run of a record as a file has it, see `Part.read`."""
        return cls(Record.read(data), file, folder, data.get("weight_quantize") is True or None)

    @property
    def request(self) -> Request:
        return self.record.request

    @property
    def measured(self) -> Measured:
        return self.record.result.measured

    @property
    def failed(self) -> bool:
        return self.record.status == STATUS_FAILED

    @property
    def model(self) -> str:
        """The last part of a hub name or a path."""
        return model_in_short(self.request.model or "model unknown")

    @property
    def weights(self) -> str | None:
        request = self.request
        return weights_in_short(request.quant_bits, request.dtype, bool(self.weight_quantize), request.stored_format)

    @property
    def where(self) -> str | None:
        """Placement of weights and KV cache: `device`, `host`, `66% host` (the rest is on the device) or `disk`."""
        return self._placement(with_shares=True)

    def _placement(self, with_shares: bool) -> str | None:
        asked, stream, on_cpu = self.request, self.record.result.engine.stream, self.measured.device == "cpu"
        if asked.cpu_offload is None and asked.disk_offload is None:
            return None
        resident, streamed = find(stream, "resident_layers") or 0, find(stream, "streamed_layers") or 0
        words = "host" if on_cpu else "device"
        if asked.disk_offload:
            words = "host" if asked.weights_place == "cpu" else "disk"
        elif asked.cpu_offload:
            share = streamed / (resident + streamed) if resident + streamed > 0 else 1.0  # of the layers
            both = f"{share:.0%} host" if with_shares else "device+host"
            words = "device" if share == 0 else "host" if share > 0.99 else both
        if "host" in words and asked.pin_memory is False and asked.engine in PAGE_LOCKING_ENGINES and not on_cpu:
            words += " pageable"
        cached, stored = find(stream, "expert_slot_bytes"), self.measured.weight_bytes
        if cached and stored and with_shares:
            words += f", {cached / stored:.0%} cached"
        return words + ", KV host" * bool(asked.kv_offload)

    @property
    def gpus(self) -> str | None:
        found = find(self.record.result.environment, "gpus") or []
        counts = Counter(gpu.name for gpu in found if gpu.name)
        return ", ".join(f"{count} x {one_line(name)}" for name, count in counts.items()) or None

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all ranks; None without a GPU. In older records each rank has one."""
        if self.request.num_gpus is not None:
            return self.request.num_gpus or None
        return None if self.measured.device == "cpu" else self.request.world_size

    @property
    def processors(self) -> str | None:
        """Several GPUs or, without a GPU, several ranks, as in `4 GPUs`; None for one."""
        return processors_in_short(self.num_gpus, self.request.world_size)

    @property
    def setting(self) -> str:
        """Engine, placement, weights and differing options: runs that share them get one bar or line of a figure."""
        parts = [self.request.engine, self._placement(with_shares=False), self.weights, self.processors]
        return one_line(", ".join(filter(None, [*parts, self.options]))) or "unknown"

    @property
    def label(self) -> str:
        return ", ".join(filter(None, [f"#{self.number} {self.setting}", self.work]))

    @property
    def group(self) -> str:
        """Model and lengths; runs that share them are comparable."""
        return f"{self.model}, prompt {self.request.prompt_len}, {self.request.gen_len} generated"

    @property
    def decode_throughput(self) -> float | None:
        return None if self.failed else positive(self.measured.decode_throughput)

    @property
    def total_throughput(self) -> float | None:
        return None if self.failed else positive(self.measured.total_throughput)

    @property
    def share_of_limit(self) -> float | None:
        return None if self.failed else positive(self.measured.limit.fraction_of_limit)

    @property
    def bound_by(self) -> str | None:
        """The rate that bounds a decode step; on a CPU `device_memory` is host memory."""
        if self.share_of_limit is None:
            return None
        bound = self.measured.limit.bound_by or ("disk" if self.request.disk_offload else "link")  # of old records
        return "host_memory" if bound == "device_memory" and self.measured.device == "cpu" else bound

    def loop_spread(self, name: str) -> float | None:
        """Return (longest - shortest) / median of the loops' `decode_s` or `total_s`; None for fewer than two loops."""
        times = [time_s for loop in self.measured.loops if (time_s := positive(getattr(loop, name)))]
        return relative_spread(times) if len(times) > 1 else None

    def time_over_predicted(self, phase: str) -> float | None:
        """Return measured / predicted time of `prefill` or `decode`; None where either is unknown."""
        measured = positive(getattr(self.measured, f"{phase}_latency_s"))
        predicted = positive(find(self.measured.predicted, f"{phase}_s"))
        return measured / predicted if measured and predicted else None

    def given_options(self) -> dict[str, str]:
        """Return the options that differ from their defaults, by field name; a flag is `yes`."""
        words = {
            name.replace("-", "_"): "yes" if value is True else one_line(value)
            for name, value in (self.request.options or {}).items()
            if value is not None and value is not False
        }
        return {name: word for name, word in words.items() if word != str(DEFAULTS.get(name))}


def positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None


def weights_in_short(
    quant_bits: int | None, dtype: str | None, quantized: bool = False, stored_format: str | None = None
) -> str | None:
    """Return the format of stored weights: int4, int4 (GPTQ), MXFP4, fp16, ...; None where it is unknown."""
    if stored_format:
        name = stored_format.partition(" (")[0]
        return stored_format if name.startswith("int") else name  # int4 alone is our own
    if quant_bits is not None and quant_bits < 16:
        return f"int{quant_bits}"
    if quant_bits is None and quantized:
        return "quantized"
    return SHORT_DTYPES.get(dtype, dtype) if dtype else None


def processors_in_short(num_gpus: int | None, world_size: int | None) -> str | None:
    """Return `4 GPUs` or, without a GPU, `4 ranks`; None for one."""
    count, kind = (num_gpus, "GPUs") if num_gpus else (world_size or 1, "ranks")
    return f"{count} {kind}" if count > 1 else None


def model_in_short(model: str) -> str:
    return one_line(model.rstrip("/").rpartition("/")[2] or model)


def label_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs numbered in their order, with the options and the work in which they differ."""
    given = [run.given_options() for run in runs]
    options = [name for name in SPEED_OPTIONS if len({each.get(name) for each in given}) > 1]
    words = {"model": "{}", "batch_size": "batch {}", "prompt_len": "prompt {}", "gen_len": "{} generated"}
    works = [{name: run.model if name == "model" else getattr(run.request, name) for name in words} for run in runs]
    differing = [name for name in words if len({work[name] for work in works}) > 1]
    return [
        dataclasses.replace(
            run,
            number=number,
            options=", ".join(f"{name.replace('_', '-')} {_in_brief(has[name])}" for name in options if name in has),
            work=", ".join(words[name].format(work[name]) for name in differing if work[name] is not None),
        )
        for number, (run, has, work) in enumerate(zip(runs, given, works), start=1)
    ]


def _in_brief(value: str) -> str:
    number = as_number(value)
    return Path(value).name if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Return the runs by model, then equal work (batch, prompt, generated tokens), the fastest first and failed runs last."""

    def key(run: Run) -> tuple:
        asked = run.request
        work = (asked.batch_size or 0, asked.prompt_len or 0, asked.gen_len or 0)
        return run.model.lower(), *work, run.failed, -(run.decode_throughput or 0), -(run.total_throughput or 0)

    return sorted(runs, key=key)


def grouped(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    """Return the runs by `key(run)`, in the order of their first run."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def load_tree(roots: Sequence[Path]) -> list[Run]:
    """Return the runs in `roots` and all folders below, but for hidden ones; a folder that is reached twice counts once."""
    folders: dict[str, Path] = {}
    for root in roots:
        for folder, below, _ in os.walk(root):
            below[:] = sorted(name for name in below if not name.startswith("."))
            folders.setdefault(os.path.realpath(folder), Path(folder))
    return [run for folder in folders.values() for run in load_runs(folder)]


def load_runs(folder: Path) -> list[Run]:
    """Return the runs of a folder in the order of its file names; a .log is read where there is no .jsonl of its name."""
    runs: list[Run] = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file()):
        try:
            with path.open("rb") as file:  # other programs write .jsonl and .log too, of any size
                beginning = file.read(LOOKED_AT_BYTES)
            found: list[dict[str, Any]] = []
            if path.suffix == ".jsonl" and b'"status"' in beginning:
                found = [record for record in read_records(path) if "status" in record]
            elif path.suffix == ".log" and b"model size" in beginning and not path.with_suffix(".jsonl").is_file():
                found = [parse_log_name(path.stem) | block | {"status": STATUS_OK} for block in parse_log(path)]
        except OSError as error:
            warn(f"warning: {path} left out: {one_line(error)}")
            continue
        runs += [Run.read(record, path.name, str(folder)) for record in found]
    return runs


_LOG_NAME = re.compile(
    r"(?P<prefix>[^-]+)-(?P<model>.+)-bs(?P<batch>\d+)-prompt(?P<prompt>\d+)-gen(?P<gen>\d+)"
    r"-n(?P<nodes>\d+)x(?P<gpus>\d+)-(?P<place>cpu|disk|gpu)(?P<kv>-kv_offload)?(?P<quant>-w_quant)?"
)


def parse_log_name(stem: str) -> dict[str, Any]:
    """Return the keys of the record that a log's name holds, see `get_filename`; a name of another pattern is the model's."""
    match = _LOG_NAME.fullmatch(stem)
    if match is None:
        return {"model": stem}
    engines = {prefix: engine for engine, prefix in LOG_PREFIX.items()}
    return {
        "model": match["model"],
        "engine": engines.get(match["prefix"], match["prefix"]),
        "num_nodes": int(match["nodes"]),
        "world_size": int(match["nodes"]) * int(match["gpus"]),
        "batch_size": int(match["batch"]),
        "prompt_len": int(match["prompt"]),
        "gen_len": int(match["gen"]),
        "quant_bits": None if match["quant"] else 16,  # the name does not say how many
        "weight_quantize": True if match["quant"] else None,
        "cpu_offload": match["place"] == "cpu",
        "disk_offload": match["place"] == "disk",
        "kv_offload": match["kv"] is not None,
    }
