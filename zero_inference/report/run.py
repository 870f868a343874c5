"""A run as tables and the page need it: its record, where it was read, and what follows from both. Unknown values are None."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from zero_inference.config.options import DEFAULTS, FIELD_NAMES, PAGE_LOCKING_ENGINES, PATHS, STREAM_OPTIONS
from zero_inference.measure.steadiness import relative_spread
from zero_inference.records.field import as_number
from zero_inference.records.hardware import HOST_COPY, Environment, Limit
from zero_inference.records.schema import STATUS_FAILED, Measured, Predicted, Record, Request, StreamPlacement
from zero_inference.records.scores import PerplexityScores, ProgramScores, Tasks
from zero_inference.utils.format import LONGEST_TEXT, printable

LINK_PARTS = ("busy_s", "slot_wait_s", "host_late_s", "step_start_s")
LEAST_SHARE = 0.005  # less is 0%
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
# Names of `bound_by`.
BOUND_NAMES = {
    "link": "link",
    "link_and_cores": "link and cores",
    "disk": "disk",
    "device_memory": "device memory",
    "host_memory": "host memory",  # of a run on a CPU, whose record says device_memory too
    "matmul": "matrix products",
}
# Parts that a record may lack.
_NO_STREAM, _NO_TASKS = StreamPlacement.read({}), Tasks.read({})
_NO_PREDICTION, _NO_ENVIRONMENT = Predicted.read({}), Environment.read({})


def clean(text: str) -> str:
    """Return the text without characters that a page cannot hold, at most `LONGEST_TEXT` long."""
    text = printable(text.strip())
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


@dataclass(frozen=True)
class Score:
    """A figure of a quality task; accuracies are shares of 1."""

    metric: str
    value: float
    stderr: float | None
    share: bool

    @property
    def text(self) -> str:
        scale, unit, digits = (100, " %", 1) if self.share else (1, "", 2)
        spread = "" if self.stderr is None else f" ± {self.stderr * scale:.{digits}f}"
        return f"{self.value * scale:.{digits}f}{spread}{unit}"


@dataclass(frozen=True)
class Run:
    """A record and where it was read.

    Attributes:
        number: row in the table, from 1.
        weight_quantize: from a log's name, which does not say to how many bits.
        rest: what distinguishes it from other runs besides its setting, see `html.labels`.
        options: those in which runs of the same engine, placement and weights differ.
    """

    record: Record
    number: int = 0
    file: str | None = None
    folder: str | None = None
    weight_quantize: bool | None = None
    several_gpus: bool = False
    rest: str = ""
    options: tuple[str, ...] = ()

    @classmethod
    def read(cls, data: Mapping[str, Any], number: int = 0) -> Run:
        """Return the run of a record as a file has it, see `Part.read`."""
        quantized = data.get("weight_quantize") is True or None
        return cls(Record.read(data), number, data.get("file"), data.get("folder"), quantized)

    @property
    def request(self) -> Request:
        return self.record.request

    @property
    def measured(self) -> Measured:
        return self.record.result.measured

    @property
    def limit(self) -> Limit:
        return self.measured.limit

    @property
    def predicted(self) -> Predicted:
        return self.measured.predicted or _NO_PREDICTION

    @property
    def stream(self) -> StreamPlacement:
        return self.record.result.engine.stream or _NO_STREAM

    @property
    def tasks(self) -> Tasks:
        return self.record.result.quality.by_task or _NO_TASKS

    @property
    def environment(self) -> Environment:
        return self.record.result.environment or _NO_ENVIRONMENT

    @property
    def failed(self) -> bool:
        return self.record.status == STATUS_FAILED

    @property
    def error(self) -> str:
        return clean(self.record.error or "") or "no error was recorded"

    @property
    def model(self) -> str:
        return clean(self.request.model or "") or "model unknown"

    @property
    def short_model(self) -> str:
        return model_in_short(self.model)

    @property
    def engine(self) -> str:
        return clean(self.request.engine or "") or "engine unknown"

    @property
    def weights(self) -> str:
        return (
            weights_in_short(self.request.quant_bits, self.request.dtype, bool(self.weight_quantize)) or "dtype unknown"
        )

    @property
    def place(self) -> str:
        """Where the weights are; see `where` for shares."""
        if self.request.cpu_offload:
            resident, streamed = self.stream.resident_layers, self.stream.streamed_layers
            return "device" if resident and streamed == 0 else "device+host" if resident and streamed else "host"
        if self.request.disk_offload:
            return "host" if self.request.weights_place == "cpu" else "disk"
        return "device"

    @property
    def where(self) -> str | None:
        """Placement of weights and KV cache: `66% host` (the rest is on the device), `host`, `device` or `disk`; None if unknown.

        Page-locked memory and a KV cache on the device are usual and not named: `host pageable`, `device, KV host`. `33% cached`: share
        of the weights that are experts both in host memory and on the device.
        """
        if self.request.cpu_offload is None and self.request.disk_offload is None:
            return None
        parts = [self._place_of_weights()]
        cached, stored = self.stream.expert_slot_bytes, self.measured.weight_bytes
        if cached and stored and cached / stored >= LEAST_SHARE:
            parts.append(f"{cached / stored:.0%} cached")
        if self.request.kv_offload:
            parts.append("KV host")
        return ", ".join(parts)

    def _place_of_weights(self) -> str:
        if self.measured.device == "cpu" and self.place != "disk":
            return "host"
        if self.place in ("device", "disk"):
            return self.place
        share = self._share_in_host_memory()
        words = "host" if share > 0.99 else f"{share:.0%} host"
        return f"{words} pageable" if self.pageable else words

    def _share_in_host_memory(self) -> float:
        """Return the share of the stored weights if all are read in a step, else of the layers; 1 where it is unknown."""
        resident, streamed = self.stream.resident_layers, self.stream.streamed_layers
        if resident is None or streamed is None or not resident + streamed > 0:
            return 1.0
        read, stored = (self.stream.fetched_bytes or 0) + (self.stream.computed_bytes or 0), self.measured.weight_bytes
        if read > 0 and stored and self.measured.decode_weights_gb_per_s:
            return min(1.0, read / stored)
        return streamed / (resident + streamed)

    @property
    def pageable(self) -> bool:
        """Weights in host memory are not page-locked, though the engine supports it."""
        unpinned = self.request.pin_memory is False and self.engine in PAGE_LOCKING_ENGINES
        return unpinned and self.place in ("host", "device+host")

    @cached_property
    def gpu_names(self) -> list[str]:
        return [clean(gpu.name) for gpu in self.environment.gpus if gpu.name]

    @property
    def gpus(self) -> str | None:
        return ", ".join(f"{count} x {name}" for name, count in Counter(self.gpu_names).items()) or None

    @property
    def label(self) -> str:
        return f"#{self.number} {self.setting}"

    @property
    def setting(self) -> str:
        """Engine, placement, weights and whatever else gives a line of its own in a plot."""
        return ", ".join((self._kind, *self.options))

    @cached_property
    def _kind(self) -> str:
        parts = [self.engine, self.place, self.weights]
        if self.request.kv_offload:
            parts.append("KV on host")
        if self.pageable:
            parts.append("pageable")
        if (ranks := self.request.world_size) and ranks > 1:
            parts.append(f"{ranks} ranks")
        if self.several_gpus:
            parts += dict.fromkeys(self.gpu_names)
        return ", ".join(parts)

    @property
    def group(self) -> tuple[str, int | None, int | None]:
        """Runs of one model, prompt length and number of generated tokens are comparable."""
        return self.model, self.request.prompt_len, self.request.gen_len

    @property
    def group_name(self) -> str:
        model, prompt, gen = self.group
        lengths = [f"prompt {prompt}"] * (prompt is not None) + [f"{gen} generated"] * (gen is not None)
        return ", ".join([model, *lengths])

    @property
    def decode_throughput(self) -> float | None:
        value = None if self.failed else self.measured.decode_throughput
        return value if value and value > 0 else None

    @property
    def share_of_limit(self) -> float | None:
        value = None if self.failed else self.limit.fraction_of_limit
        return value if value is not None and value >= 0 else None

    @property
    def bound_by(self) -> str | None:
        """The rate that limits a decode step, a key of `BOUND_NAMES`."""
        if self.share_of_limit is None:
            return None
        bound = clean(self.limit.bound_by or "link")
        return self.memory if bound == "device_memory" else bound

    @property
    def memory(self) -> str:
        """The memory that products read weights from, as `bound_by` names it."""
        return "host_memory" if self.measured.device == "cpu" else "device_memory"

    def loop_spread(self, name: str) -> float | None:
        """Return (longest - shortest) / median of the loops' `decode_s` or `total_s`; None for fewer than two loops."""
        times = self._loop_times(name)
        return relative_spread(times) if len(times) > 1 else None

    def loop_rates(self, name: str, rate: float) -> tuple[float, float]:
        """Return the throughputs of the slowest and fastest loop, where the loop of median time `name` has `rate`."""
        times = self._loop_times(name)
        if not times:
            return rate, rate
        middle = statistics.median(times)
        return rate * middle / max(times), rate * middle / min(times)

    def _loop_times(self, name: str) -> list[float]:
        return [time_s for loop in self.measured.loops if (time_s := getattr(loop, name)) is not None and time_s > 0]

    @cached_property
    def step_s(self) -> list[float]:
        """Every decode step of every measured loop."""
        return [step_s for loop in self.measured.loops for step_s in loop.step_s if as_number(step_s) and step_s > 0]

    @property
    def link_use(self) -> dict[str, float] | None:
        """Seconds by `LINK_PARTS`; None where they were not observed, and without a GPU."""
        use = self.measured.link_use
        if use is None or self.failed or self.limit.rates.link_kind == HOST_COPY:
            return None
        parts = {name: max(0.0, getattr(use, name) or 0.0) for name in LINK_PARTS}
        return parts if sum(parts.values()) > 0 else None

    def time_over_predicted(self, name: str) -> float | None:
        """Return measured / predicted of `prefill_s` or `decode_s`; None where either is unknown or not positive."""
        measured = {"prefill_s": self.measured.prefill_latency_s, "decode_s": self.measured.decode_latency_s}[name]
        predicted = getattr(self.predicted, name)
        return measured / predicted if predicted and measured and predicted > 0 and measured > 0 else None

    @cached_property
    def quality(self) -> list[Score]:
        return [score for task, scores in self.tasks if scores is not None for score in _scores(task, scores)]

    @cached_property
    def given_options(self) -> dict[str, str]:
        """Options as typed, by field name; a flag is `yes`."""
        given = (self.request.options or {}).items()
        return {name.replace("-", "_"): _as_typed(value) for name, value in given if value not in (None, False)}

    @property
    def other_options(self) -> dict[str, str]:
        """Options that differ from their defaults and are in no other column: name as typed without dashes, and value."""
        return {
            name.replace("_", "-"): PurePath(value).name if name in PATHS else value
            for name, value in self.given_options.items()
            if name in SHOWN_OPTIONS and value != str(DEFAULTS[name])
        }

    def given_number(self, name: str) -> float | None:
        return as_number(self.given_options.get(name))


def _scores(task: str, scores: Any) -> Iterator[Score]:
    if isinstance(scores, ProgramScores):
        errors = scores.stderr or {}
        found = [(f"{task} pass@{k}", share, errors.get(k)) for k, share in (scores.pass_at_k or {}).items()]
    elif isinstance(scores, PerplexityScores):
        found = [(task, scores.perplexity, scores.stderr)]
    else:
        found = [(f"{task} accuracy", scores.accuracy, scores.stderr)]
        if hasattr(scores, "acc_norm"):
            found.append((f"{task} acc_norm", scores.acc_norm, scores.acc_norm_stderr))
    for metric, value, stderr in found:
        if value is not None:
            yield Score(metric, value, stderr, share=not isinstance(scores, PerplexityScores))


def weights_in_short(quant_bits: int | None, dtype: str | None, quantized: bool = False) -> str | None:
    """Return the format of stored weights: int4, int8, fp16, ...; None where it is unknown."""
    if quant_bits is not None and quant_bits < 16:
        return f"int{quant_bits}"
    if quant_bits is None and quantized:
        return "quantized"
    return SHORT_DTYPES.get(dtype, dtype) if dtype else "16 bit" if quant_bits == 16 else None


def model_in_short(model: str) -> str:
    """Return the last part of a hub name or a path."""
    return model.rstrip("/").rpartition("/")[2] or model


def short_folders(folders: Sequence[str | None]) -> list[str | None]:
    """Return the folders without the path that they have in common; None for unknown ones."""
    known = sorted({folder for folder in folders if folder})
    if len(known) < 2:
        return list(folders)
    try:
        common = os.path.commonpath(known)
    except ValueError:  # absolute and relative ones
        return list(folders)
    return [folder and os.path.relpath(folder, common or ".") for folder in folders]


# Options in other columns, of paths, or of how long was measured.
_IN_OTHER_COLUMNS = {
    *("model", "engine", "batch_size", "prompt_len", "gen_len", "quant_bits", "cpu_offload", "disk_offload", "kv_offload"),
    *("pin_memory", "offload_dir", "trace", "log_file", "log_dir", "machine", "assume", "auto", "goal"),
    *("loops", "warmup", "warmup_spread", "verbose", "dry_run", "dtype"),
}  # fmt: skip
# Options that change the speed: runs with the same values are repetitions.
OF_SPEED = tuple(
    name.replace("_", "-")
    for name in (*STREAM_OPTIONS, "norm_kernels", "quant_group_size", "ds_config", "async_kv_offload", "use_gds")
)
SHOWN_OPTIONS = tuple(name for name in FIELD_NAMES if name not in _IN_OTHER_COLUMNS and "quality" not in name)


def _as_typed(value: Any) -> str:
    if value is True:
        return "yes"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def differing_options(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return the options in which runs differ, as typed without dashes: for each run its value, None where it was not given."""
    given_by_run = [run.other_options for run in runs]
    names = dict.fromkeys(name for each in given_by_run for name in each)
    given = {name: [_in_brief(each.get(name)) for each in given_by_run] for name in names}
    return {name: values for name, values in given.items() if len(set(values)) > 1}


def _in_brief(value: str | None) -> str | None:
    number = as_number(value)
    return value if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"
