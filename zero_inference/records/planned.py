"""The keys of the record about what the plan said before anything was loaded."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.key import key

_AUTO = "--engine, --quant-bits or --batch-size auto"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the plan found of what was left open."""

    options: list[str] = key("", "options that were given as auto", only_with=_AUTO)
    goal: str | None = key(
        "", "--goal, what the choice was made by; null: as many bits as fit, then the highest token/s", only_with=_AUTO
    )
    decode_throughput: float = key("token/s", "predicted decode throughput", only_with=_AUTO)
    over: list[str] = key(
        "", "the next best configurations that fit: command and predicted decode throughput", only_with=_AUTO
    )


_RANGE = (
    "[low, high], within which 9 of 10 runs of this kind were; null where {} is or is a lower bound, and without a GPU"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan said before anything was loaded, under the names of what was measured."""

    load_s: float | None = key(
        "s",
        "time to load; null if the machine, or the disk with the checkpoint, was not measured before",
    )
    load_range_s: list[float] | None = key("s", _RANGE.format("`load_s`"), default=None)
    prefill_s: float | None = key("s", "prefill latency; null if the machine was not measured before")
    prefill_range_s: list[float] | None = key("s", _RANGE.format("`prefill_s`"), default=None)
    decode_s: float | None = key("s", "decode latency; null if the machine was not measured before")
    decode_range_s: list[float] | None = key("s", _RANGE.format("`decode_s`"), default=None)
    bound_by: str | None = key("", "what takes most of a decode step")
    weight_bytes: int = key("byte", "weights as the engine stores them")
    peak_gpu_bytes: int | None = key("byte", "peak device memory; null without a GPU")
    peak_host_bytes: int | None = key(
        "byte", "peak host memory of a process; null if the machine was not measured before"
    )
    host_to_device_bytes_per_step: int = key("byte", "weights and KV cache copied to the devices in a decode step")
    device_to_host_bytes_per_step: int = key("byte", "KV cache copied from the devices in a decode step")
    disk_read_bytes_per_step: int = key("byte", "weights read from disk in a decode step")
    cores_bytes_per_step: int = key(
        "byte", "weights and KV cache read by the host's cores in a decode step; of experts, the expected number"
    )
