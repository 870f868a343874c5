"""The keys of the record about what the plan said before anything was loaded."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.key import key

_AUTO = "--engine, --quant-bits or --batch-size auto"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the plan found of what was left open."""

    options: list[str] = key("", "names of those that were auto", only_with=_AUTO)
    goal: str | None = key("", "what was best; null: as many bits as fit, then token/s", only_with=_AUTO)
    decode_throughput: float = key("token/s", "predicted", only_with=_AUTO)
    over: list[str] = key("", "the next best that fit: command and predicted decode throughput", only_with=_AUTO)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plan said before anything was loaded, under the names of what was measured."""

    load_s: float | None = key(
        "s", "loading; null as `prefill_s`, and for a checkpoint on a disk that was not measured"
    )
    prefill_s: float | None = key("s", "prefill latency; null where the machine was not measured before")
    decode_s: float | None = key("s", "decode latency; null as `prefill_s`")
    bound_by: str | None = key("", "what most of a decode step is for")
    weight_bytes: int = key("byte", "weights as the engine stores them")
    peak_gpu_bytes: int | None = key("byte", "most device memory held; null without a device")
    peak_host_bytes: int | None = key("byte", "most host memory of a process; null as `prefill_s`")
    host_to_device_bytes_per_step: int = key("byte", "to the devices in a decode step: weights, keys and values")
    device_to_host_bytes_per_step: int = key("byte", "from the devices: keys and values")
    disk_read_bytes_per_step: int = key("byte", "weights read from disk")
    cores_bytes_per_step: int = key("byte", "read by the host's cores; of experts as many as are expected to be chosen")
