"""The keys of the record about the loops: their times, what they moved, how far they differ."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.key import key


@dataclass(frozen=True, slots=True)
class MovedPerStep:
    """Bytes moved per decode step, counted, and how long the cores worked; null where there was no decode step."""

    host_to_device_bytes_per_step: float | None = key(
        "byte", "weights, KV cache, and results of the host's cores", required="when measured"
    )
    device_to_host_bytes_per_step: float | None = key("byte", "KV cache, and inputs for the host's cores")
    disk_read_bytes_per_step: float | None = key("byte", "weights read from disk", required="when measured")
    cores_bytes_per_step: float | None = key(
        "byte", "weights and KV cache that the host's cores read in host memory", default=None
    )
    cores_busy_s_per_step: float | None = key(
        "s", "time the host's cores were computing; the rest of the step they waited for the device", default=None
    )


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Of the experts that tokens chose in the decode steps, what came of those that device memory keeps; counted."""

    hit_rate: float = key("share", "share of the choices (one token, one expert) whose expert was in device memory")
    saved_bytes_per_step: float = key(
        "byte", "bytes of experts that the host's cores did not have to read because of that"
    )
    fetched_bytes_per_step: float = key(
        "byte",
        "bytes of experts that the device read over the link, while the CPU multiplied others; also counted in `transfers`",
        default=0.0,
    )
    loaded_bytes_per_step: float | None = key(
        "byte",
        "bytes of experts copied to the device to be kept there, apart from fetched ones; also counted in `transfers`",
        only_with="records from before fetched experts stayed on the device",
        default=None,
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """One `generate` call; times are the maximum over ranks.

    Attributes:
        moved: of this rank, the average of the steps; not in the record, which has the sum over all ranks.
        experts: those of device memory; None where it keeps none. Not in the record, which has the last loop's.
    """

    prefill_s: float = key("s", "time to first token, including its selection", required="when measured")
    decode_s: float = key("s", "time from the first token to the last", required="when measured")
    total_s: float = key("s", "prefill plus decode", required="when measured")
    step_s: list[float] = key("s", "time of each decode step", required="when measured")
    moved: MovedPerStep = MovedPerStep(None, None, None)
    experts: ExpertUse | None = None


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """How busy the machine was before the run loaded anything."""

    load_average_before: float = key(
        "processes", "load average of the machine in the minute before loading: processes running or waiting to run"
    )
    usable_cores: float = key("cores", "cores this process may use, by CPU affinity and cgroup")


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
        "time of the slowest decode step / median step of its loop, over all loops; "
        "null with fewer than 3 steps in a loop",
    )
    slowest_step_at: StepPlace | None = key("", "which step `slowest_step_over_median` is about")
