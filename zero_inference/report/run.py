"""A record as tables and the page need it: missing or odd values read as None, and text is safe to show."""

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
from zero_inference.records.hardware import HOST_COPY
from zero_inference.records.read import number_of, value_at
from zero_inference.records.schema import STATUS_FAILED
from zero_inference.utils.format import LONGEST_TEXT, printable

LINK_PARTS = ("busy_s", "slot_wait_s", "host_late_s", "step_start_s")


def clean(text: str) -> str:
    """The text without characters that a page cannot hold (U+FFFD in their place), at most `LONGEST_TEXT` long."""
    text = printable(text.strip())
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


@dataclass(frozen=True)
class Score:
    """One figure of a quality task; `value` and `stderr` as in the record, accuracies as shares of 1."""

    metric: str
    value: float
    stderr: float | None
    share: bool

    @property
    def text(self) -> str:
        scale, unit = (100, " %") if self.share else (1, "")
        spread = "" if self.stderr is None else f" ± {self.stderr * scale:.{1 if self.share else 2}f}"
        return f"{self.value * scale:.{1 if self.share else 2}f}{spread}{unit}"


@dataclass(frozen=True)
class Run:
    """One record; `number` is its row in the table, from 1. Times in s, throughputs in token/s, shares of 1.

    `rest` is what tells it from other runs beside its setting, `options` are those in which runs of the same engine, place and weights
    differ; both are empty where no other runs are known, see `html.labels`.
    """

    number: int
    record: dict[str, Any]
    several_gpus: bool = False
    rest: str = ""
    options: tuple[str, ...] = ()

    def amount(self, key: str) -> float | None:
        return value_at(self.record, key, "Float64")

    def whole(self, key: str) -> int | None:
        return value_at(self.record, key, "Int64")

    def text(self, key: str) -> str | None:
        value = value_at(self.record, key, "string")
        return clean(value) if value else None

    @property
    def failed(self) -> bool:
        return self.record.get("status") == STATUS_FAILED

    @property
    def model(self) -> str:
        return self.text("model") or "model unknown"

    @property
    def short_model(self) -> str:
        return model_in_short(self.model)

    @property
    def engine(self) -> str:
        return self.text("engine") or "engine unknown"

    @property
    def weights(self) -> str:
        quantized = bool(self.record.get("weight_quantize"))
        return weights_in_short(self.whole("quant_bits"), self.text("dtype"), quantized) or "dtype unknown"

    @property
    def place(self) -> str:
        """Of the weights; for shares see `where.where`."""
        if self.record.get("cpu_offload"):
            resident, streamed = self.amount("stream.resident_layers"), self.amount("stream.streamed_layers")
            return "device" if resident and streamed == 0 else "device+host" if resident and streamed else "host"
        if self.record.get("disk_offload"):
            return "host" if self.record.get("weights_place") == "cpu" else "disk"
        return "device"

    @property
    def pageable(self) -> bool:
        """Weights in host memory are not page-locked, though the engine could have done so."""
        unpinned = self.record.get("pin_memory") is False and self.engine in PAGE_LOCKING_ENGINES
        return unpinned and self.place in ("host", "device+host")

    @cached_property
    def gpu_names(self) -> list[str]:
        environment = self.record.get("environment")
        gpus = environment.get("gpus") if isinstance(environment, dict) else None
        names = [gpu.get("name") for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
        return [clean(name) for name in names if isinstance(name, str)]

    @property
    def gpus(self) -> str | None:
        counts = Counter(self.gpu_names)
        return ", ".join(f"{count} x {name}" for name, count in counts.items()) or None

    @property
    def label(self) -> str:
        return f"#{self.number} {self.setting}"

    @property
    def setting(self) -> str:
        """Engine, place and kind of the weights and what else makes a line of its own in a plot."""
        return ", ".join((self._kind, *self.options))

    @cached_property
    def _kind(self) -> str:
        parts = [self.engine, self.place, self.weights]
        if self.record.get("kv_offload"):
            parts.append("KV on host")
        if self.pageable:
            parts.append("pageable")
        if (ranks := self.whole("world_size")) and ranks > 1:
            parts.append(f"{ranks} ranks")
        if self.several_gpus:
            parts += dict.fromkeys(self.gpu_names)
        return ", ".join(parts)

    @property
    def group(self) -> tuple[str, int | None, int | None]:
        """Runs of one model at one prompt length and one number of generated tokens can be compared."""
        return self.model, self.whole("prompt_len"), self.whole("gen_len")

    @property
    def group_name(self) -> str:
        model, prompt, gen = self.group
        lengths = [f"prompt {prompt}"] * (prompt is not None) + [f"{gen} generated"] * (gen is not None)
        return ", ".join([model, *lengths])

    @property
    def decode_throughput(self) -> float | None:
        value = None if self.failed else self.amount("decode_throughput")
        return value if value and value > 0 else None

    @property
    def share_of_limit(self) -> float | None:
        value = None if self.failed else self.amount("limit.fraction_of_limit")
        return value if value is not None and value >= 0 else None

    @property
    def bound_by(self) -> str | None:
        """What limits a decode step: link, disk, device_memory (host_memory on a CPU) or matmul. Older records do not name it; they
        had only link and disk."""
        if self.share_of_limit is None:
            return None
        disk_bytes, disk_gb_per_s = self.amount("transfers.disk_read_bytes_per_step"), self.amount("limit.disk_gbps")
        link_bytes, link_gb_per_s = (
            self.amount("transfers.host_to_device_bytes_per_step"),
            self.amount("limit.link_gbps"),
        )
        on_disk = (
            disk_bytes
            and disk_gb_per_s
            and (not link_gb_per_s or disk_bytes / disk_gb_per_s > (link_bytes or 0) / link_gb_per_s)
        )
        bound = self.text("limit.bound_by") or ("disk" if on_disk else "link")
        return self.memory if bound == "device_memory" else bound

    @property
    def memory(self) -> str:
        """What products read their weights from, as `bound_by` calls it."""
        return "host_memory" if self.text("device") == "cpu" else "device_memory"

    @cached_property
    def _loops(self) -> list[dict[str, Any]]:
        loops = self.record.get("loops")
        return [loop for loop in loops if isinstance(loop, dict)] if isinstance(loops, list) else []

    def loop_spread(self, key: str) -> float | None:
        """The longest of the loops' times `key` (decode_s, total_s) less the shortest, as a share of their median; None below two
        loops. The throughput, which is that of the median, is as uncertain."""
        times = [each for loop in self._loops if (each := value_at(loop, key, "Float64")) is not None and each > 0]
        return relative_spread(times) if len(times) > 1 else None

    def loop_rates(self, key: str, rate: float) -> tuple[float, float]:
        """The throughputs of the slowest and the fastest loop by their times `key`, of a run whose median loop has `rate`."""
        times = [each for loop in self._loops if (each := value_at(loop, key, "Float64")) is not None and each > 0]
        if not times:
            return rate, rate
        middle = statistics.median(times)
        return rate * middle / max(times), rate * middle / min(times)

    @cached_property
    def step_s(self) -> list[float]:
        """Every decode step of every measured loop."""
        steps = [loop.get("step_s") for loop in self._loops]
        return [
            seconds
            for each in steps
            if isinstance(each, list)
            for step in each
            if isinstance(step, (int, float)) and (seconds := number_of(step)) is not None and seconds > 0
        ]

    @property
    def link_use(self) -> dict[str, float] | None:
        """The parts of the link's time, or None where they were not observed, or where there is no link: without a GPU."""
        if self.text("limit.link_kind") == HOST_COPY:
            return None
        parts = {name: self.amount(f"link_use.{name}") for name in LINK_PARTS}
        known = {name: max(0.0, value or 0.0) for name, value in parts.items()}
        return known if sum(known.values()) > 0 and not self.failed else None

    @cached_property
    def quality(self) -> list[Score]:
        """The scores of `quality`, which holds tasks: {"accuracy", "stderr"}, {"acc_norm", "acc_norm_stderr"},
        {"pass_at_k": {k: share}, "stderr": {k: error}} or {"perplexity"}."""
        tasks = self.record.get("quality")
        found = []
        for task, scores in tasks.items() if isinstance(tasks, dict) else ():
            for name, value, stderr in _scores(scores if isinstance(scores, dict) else {"score": scores}):
                found.append(
                    Score(
                        clean(name if task == name else f"{task} {name}"),
                        value,
                        stderr,
                        share=name.startswith(("acc", "pass@")),
                    )
                )
        return found


def _scores(scores: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    for key in scores:
        if key == "pass_at_k" and isinstance(scores[key], dict):
            for k in scores[key]:
                if (value := value_at(scores[key], k, "Float64")) is not None:
                    errors = scores.get("stderr")
                    yield f"pass@{k}", value, value_at(errors, k, "Float64") if isinstance(errors, dict) else None
        elif key in ("acc", "accuracy", "acc_norm", "accuracy_norm", "score") or key.endswith("perplexity"):
            if (value := value_at(scores, key, "Float64")) is not None:
                own = value_at(scores, f"{key}_stderr", "Float64")
                yield key, value, own if own is not None or "norm" in key else value_at(scores, "stderr", "Float64")


def in_order(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """The order of tables and page: model, then equal work (batch, prompt, generated tokens) together, the fastest first; failed
    runs last among those of equal work."""

    def key(number: int) -> tuple:
        run = Run(number, dict(records[number]))
        work = (run.whole("batch_size") or 0, run.whole("prompt_len") or 0, run.whole("gen_len") or 0)
        speed = run.decode_throughput or 0, 0 if run.failed else run.amount("total_throughput") or 0
        return run.short_model.lower(), run.short_model, *work, run.failed, *(-each for each in speed), number

    return sorted(range(len(records)), key=key)


SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

# What limits a decode step, by the record's word for it.
BOUND_NAMES = {
    "link": "link",
    "link_and_cores": "link and cores",
    "disk": "disk",
    "device_memory": "device memory",
    "host_memory": "host memory",  # of a run on a CPU, whose record calls it device memory too
    "matmul": "matrix products",
}


def weights_in_short(quant_bits: int | None, dtype: str | None, quantized: bool = False) -> str | None:
    """What a weight is stored as: int4, int8, fp16, ...; None where nothing says so."""
    if quant_bits is not None and quant_bits < 16:
        return f"int{quant_bits}"
    if quant_bits is None and quantized:
        return "quantized"
    return SHORT_DTYPES.get(dtype, dtype) if dtype else "16 bit" if quant_bits == 16 else None


def model_in_short(model: str) -> str:
    """The last part of a hub name or a path."""
    return model.rstrip("/").rpartition("/")[2] or model


def short_folders(folders: Sequence[str | None]) -> list[str | None]:
    """The folders without the path that they have in common; None for those that are not known."""
    known = sorted({folder for folder in folders if folder})
    if len(known) < 2:
        return list(folders)
    try:
        common = os.path.commonpath(known)
    except ValueError:  # absolute and relative ones
        return list(folders)
    return [folder and os.path.relpath(folder, common or ".") for folder in folders]


LEAST_SHARE = 0.005  # less is 0%


def where(run: Run) -> str | None:
    """`66% host` (the rest is on the device), `host`, `device` or `disk`; None for a run that says nothing of it.

    Page-locked memory and a KV cache on the device are usual and not said: `host pageable`, `device, KV host`. `33% cached`: of the
    weights, experts that are in host memory and also on the device.
    """
    if run.record.get("cpu_offload") is None and run.record.get("disk_offload") is None:
        return None
    parts = [_weights(run)]
    cached, stored = run.amount("stream.expert_slot_bytes"), run.amount("weight_bytes")
    if cached and stored and cached / stored >= LEAST_SHARE:
        parts.append(f"{cached / stored:.0%} cached")
    if run.record.get("kv_offload"):
        parts.append("KV host")
    return ", ".join(parts)


def _weights(run: Run) -> str:
    without_gpu = run.text("device") == "cpu"
    if without_gpu and run.place != "disk":
        return "host"
    if run.place in ("device", "disk"):
        return run.place
    share = _share_in_host_memory(run)
    words = "host" if share > 0.99 else f"{share:.0%} host"
    return f"{words} pageable" if run.pageable else words


def _share_in_host_memory(run: Run) -> float:
    """Of the stored weights where all are read in a step, else of the layers; all where the record does not say."""
    resident, streamed = run.amount("stream.resident_layers"), run.amount("stream.streamed_layers")
    if resident is None or streamed is None or not resident + streamed > 0:
        return 1.0
    read = (run.amount("stream.fetched_bytes") or 0) + (run.amount("stream.computed_bytes") or 0)
    stored = run.amount("weight_bytes")
    if read > 0 and stored and run.amount("decode_weights_gbps"):
        return min(1.0, read / stored)
    return streamed / (resident + streamed)


# Fields that a table shows in other columns, that say where something lies, or how long was measured.
_TOLD_ELSEWHERE = {
    *("model", "engine", "batch_size", "prompt_len", "gen_len", "quant_bits", "cpu_offload", "disk_offload", "kv_offload"),
    *("pin_memory", "offload_dir", "trace", "log_file", "log_dir", "machine", "assume", "auto", "goal"),
    *("loops", "warmup", "warmup_spread", "verbose", "dry_run", "dtype"),
}  # fmt: skip
# Those that can make a run faster or slower, so that others with the same value are repetitions.
OF_SPEED = tuple(
    name.replace("_", "-")
    for name in (*STREAM_OPTIONS, "norm_kernels", "quant_group_size", "ds_config", "async_kv_offload", "use_gds")
)
TOLD = tuple(name for name in FIELD_NAMES if name not in _TOLD_ELSEWHERE and "quality" not in name)


def given_options(record: Mapping[str, Any]) -> dict[str, str]:
    """The options by field name; a flag without a value is `yes`. Of `argv` the last one counts."""
    listed = record.get("options")
    if isinstance(listed, dict):
        return {
            str(name).replace("-", "_"): _as_typed(value)
            for name, value in listed.items()
            if value not in (None, False)
        }
    argv = record.get("argv")
    words = [word for word in argv if isinstance(word, str)] if isinstance(argv, list) else []
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value or "yes"
        elif name is not None:
            found[name] = word if found[name] == "yes" else f"{found[name]} {word}"
    return found


def _as_typed(value: Any) -> str:
    if value is True:
        return "yes"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def told_options(record: Mapping[str, Any]) -> dict[str, str]:
    """What tells this run from one with the default options, beside model, engine, lengths and places: name as typed, and value."""
    told = {}
    for name, value in given_options(record).items():
        if name in TOLD and value != str(DEFAULTS[name]):
            told[name.replace("_", "-")] = PurePath(value).name if name in PATHS else value
    return told


def given_number(record: Mapping[str, Any], name: str) -> float | None:
    """The value of an option that is a number; None where it was not given or is none."""
    value = given_options(record).get(name)
    return None if value is None else number_of(value)


def differing_options(records: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """The options in which runs differ, as typed but without the dashes: for each record its value, None where it was not given."""
    told = [told_options(record) for record in records]
    names = dict.fromkeys(name for each in told for name in each)
    given = {name: [_in_brief(each.get(name)) for each in told] for name in names}
    return {name: values for name, values in given.items() if len(set(values)) > 1}


def _in_brief(value: str | None) -> str | None:
    """A number in three digits; anything else as it is."""
    number = None if value is None else number_of(value)
    return value if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"
