"""A record as tables and the page need it: missing or odd values read as None, and text is safe to show."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zero_inference.config.options import PAGE_LOCKING_ENGINES
from zero_inference.measure.steadiness import relative_range
from zero_inference.records.limit import HOST_COPY
from zero_inference.records.read import number_of, value_at
from zero_inference.records.schema import STATUS_FAILED
from zero_inference.report.short import model_in_short, weights_in_short
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
        return relative_range(times) if len(times) > 1 else None

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
