"""The keys of the record about the loops: their times, what they moved, how far they differ."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.key import key


@dataclass(frozen=True, slots=True)
class MovedPerStep:
    """Bytes moved per decode step, counted, and how long the cores worked; null where there was no decode step."""

    host_to_device_bytes_per_step: float | None = key(
        "byte", "weights, keys and values, and the outputs of the host's cores", required="when measured"
    )
    device_to_host_bytes_per_step: float | None = key("byte", "keys and values, and the inputs of the host's cores")
    disk_read_bytes_per_step: float | None = key("byte", "weights", required="when measured")
    cores_bytes_per_step: float | None = key(
        "byte", "weights, keys and values that the host's cores read where they lie", default=None
    )
    cores_busy_s_per_step: float | None = key(
        "s", "that the host's cores worked on them; else they wait for the device", default=None
    )


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Of the experts that tokens chose in the decode steps, what came of those that device memory keeps; counted."""

    hit_rate: float = key("share", "of the choices (a token and an expert), whose expert was on the device")
    saved_bytes_per_step: float = key("byte", "of experts that the host's cores did not have to read because of that")
    loaded_bytes_per_step: float = key(
        "byte", "of experts that were copied to the device to be kept there; in `transfers` too"
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """One `generate` call; times are the maximum over ranks.

    Attributes:
        moved: of this rank, the average of the steps; not in the record, which has the sum over all ranks.
        experts: those of device memory; None where it keeps none. Not in the record, which has the last loop's.
    """

    prefill_s: float = key("s", "time to first token, its selection included", required="when measured")
    decode_s: float = key("s", "from then on to the last one", required="when measured")
    total_s: float = key("s", "prefill and decode", required="when measured")
    step_s: list[float] = key("s", "times of the decode steps, one entry each", required="when measured")
    moved: MovedPerStep = MovedPerStep(None, None, None)
    experts: ExpertUse | None = None


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """How busy the machine was before the run loaded anything."""

    load_average_before: float = key(
        "processes", "running or waiting to run on the whole machine, over the minute before loading"
    )
    usable_cores: float = key("cores", "that this process may use, by its affinity and its cgroup")


@dataclass(frozen=True, slots=True)
class StepPlace:
    """One decode step; `loop` and `step` are counted from 1."""

    loop: int = key("", "loop, counted from 1")
    step: int = key("", "decode step, counted from 1")
    step_s: float = key("s", "time of the step")


@dataclass(frozen=True, slots=True)
class Evenness:
    """How far the decode times of a run differ."""

    decode_latency_min_s: float | None = key("s", "decode latency of the fastest loop; null with one loop or G = 1")
    decode_latency_max_s: float | None = key("s", "decode latency of the slowest loop; null with one loop or G = 1")
    decode_spread: float | None = key(
        "share", "(slowest - fastest) / median of the loops' decode latencies; null with one loop or G = 1"
    )
    slowest_step_over_median: float | None = key(
        "ratio",
        "the decode step that took longest beside the median step of its loop, over all loops; "
        "null with fewer than 3 steps in a loop",
    )
    slowest_step_at: StepPlace | None = key("", "the step of `slowest_step_over_median`")
