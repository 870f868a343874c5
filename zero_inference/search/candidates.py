"""The configurations worth considering for a model, each with its plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zero_inference.config import RunConfig
from zero_inference.config.choices import DEFAULTS, LEAST_RING_DEPTH, QUANT_BITS, QUANTIZING_ENGINES
from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.kv_cache.device import other_layer_types
from zero_inference.machine.limited import LimitedMachine
from zero_inference.plan.plan import Plan, changed
from zero_inference.plan.timing import Times
from zero_inference.utils import GB

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# By engine the ways to run it; those with weights on disk are for models that fit nowhere else.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "stream": ({"cpu_offload": True},),
    "resident": ({},),
    "deepspeed": ({"cpu_offload": True}, {}, {"disk_offload": True}),
    "accelerate": ({"cpu_offload": True}, {"disk_offload": True}),
}
LEAST_KV_SHARE = 0.05  # of device memory, that keys and values take, for host memory to be worth a thought for them
LEAST = {"gpu_memory": 0.0, "ring_depth": LEAST_RING_DEPTH}  # of the stream engine on the device
LAUNCHER = {"deepspeed": "deepspeed --num_gpus 1"}


@dataclass(frozen=True)
class Free:
    """What is left to be found.

    Attributes:
        engines, quant_bits, batch_sizes, kv_offload: the values to try.
        ways: by engine those in which it may be run.
    """

    engines: tuple[str, ...] = tuple(WAYS)
    quant_bits: tuple[int, ...] = QUANT_BITS
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    kv_offload: tuple[bool, ...] = (False, True)
    ways: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=lambda: WAYS)


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits, and what is predicted of it.

    Attributes:
        measured_tokens_per_s: of decoding, where a run of it was tried.
        failed: a run of it was tried, and failed.
    """

    plan: Plan
    times: Times
    measured_tokens_per_s: float | None = None
    failed: bool = False

    @property
    def config(self) -> RunConfig:
        return self.plan.job.config

    @property
    def tokens_per_s(self) -> float:
        """Of decoding."""
        return self.times.tokens_per_s(self.config.batch_size)

    @property
    def best_tokens_per_s(self) -> float:
        """Measured, or predicted where it was not tried."""
        return self.measured_tokens_per_s or self.tokens_per_s

    @property
    def best_step_s(self) -> float:
        """The same of a step."""
        return self.config.batch_size / self.best_tokens_per_s

    @property
    def memory_bytes(self) -> int:
        """On the device and in host memory."""
        weights = self.plan.weights
        return weights.host_peak_bytes() + (weights.device_peak_bytes if self.plan.job.on_gpu else 0)

    def command(self) -> str:
        """That runs it."""
        return command_of(self.config)


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        candidates: those that fit, and whose times are known.
        unknown: that fit; nobody knows how fast they are.
        too_large: plans that do not fit, of each engine and number of bits the least one.
    """

    candidates: list[Candidate]
    unknown: list[Plan]
    too_large: list[Plan]


def command_of(config: RunConfig) -> str:
    """What to type for `config`."""
    return shlex.join([*LAUNCHER.get(config.engine, "python").split(), "run_model.py", *options_of(config)])


def options_of(config: RunConfig) -> list[str]:
    """Those of run_model.py that ask for `config`."""
    words = []
    for name, value in config.as_dict().items():
        implied = name == "cpu_offload" and config.engine == "stream"  # by itself
        if implied or value == DEFAULTS[name] or name in ("dry_run", "machine", "assume"):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if name == "pin_memory":
            words.append(str(int(value)))
        elif isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return words


def find_candidates(job: Job, free: Free) -> Found:
    """Plan what `free` leaves open of `job`, from the smallest batch up; a batch larger than one that does not fit is not tried."""
    found = Found([], [], [])
    for on_disk in (False, True):
        for fields in _ways(job, free, on_disk):
            _plan_batches(job, free, fields, found)
        if found.candidates or found.unknown:
            break
    return found


def _ways(job: Job, free: Free, on_disk: bool) -> Iterator[dict[str, Any]]:
    """Everything but the batch."""
    for engine in free.engines:
        for bits in free.quant_bits if engine in QUANTIZING_ENGINES else (16,):
            if bits not in free.quant_bits:
                continue
            for way in free.ways[engine]:
                if engine == "deepspeed" and not way and not job.on_gpu and free.ways is WAYS:
                    continue  # it would be the same as in host memory
                if bool(way.get("disk_offload")) == on_disk:
                    offload = {"cpu_offload": False, "disk_offload": False} | way
                    if not on_disk:
                        offload["offload_dir"] = DEFAULTS["offload_dir"]
                    yield {"engine": engine, "quant_bits": bits} | offload


def _plan_batches(job: Job, free: Free, fields: dict[str, Any], found: Found) -> None:
    for kv_offload in free.kv_offload:
        for batch_size in sorted(free.batch_sizes):
            asked = fields | {"kv_offload": kv_offload, "batch_size": batch_size}
            if kv_offload and len(free.kv_offload) > 1 and not _worth_moving(job, batch_size):
                continue
            refused = False
            try:
                plan = _within_limits(job, asked)
            except DoesNotFit:
                plan, refused = _least_plan(job, asked)
            except UsageError:
                continue
            if refused or not plan.fits:
                first = batch_size == min(free.batch_sizes) and kv_offload == free.kv_offload[0]
                found.too_large.extend([plan] if first else [])
                break
            if plan.times is None:
                found.unknown.append(plan)
            else:
                found.candidates.append(Candidate(plan, plan.times))


def _within_limits(job: Job, asked: dict[str, Any]) -> Plan:
    """The plan of `asked`. Where only a part of the device may be used, the stream engine's says how much of it weights take: its command
    is to do the same on the whole device."""
    plan = changed(job, **asked)
    limited = isinstance(job.machine, LimitedMachine) and job.machine.device_bytes is not None
    kept = plan.weights.gpu_memory_bytes
    if not limited or kept is None or job.config.gpu_memory is not None:
        return plan
    return changed(job, **asked, gpu_memory=math.ceil(100 * kept / GB) / 100)


def _least_plan(job: Job, asked: dict[str, Any]) -> tuple[Plan, bool]:
    """Of the stream engine, which refuses a device that is too small for its ring: with as little on the device as it can do with, unless
    the user said how much; and whether it refuses that too. Then the plan is that of a larger device, for the one that is there, and
    of whole layers, which the engine places first."""
    least = {} if job.config.ring_depth or job.config.gpu_memory is not None else LEAST
    try:
        return changed(job, **asked, **least), False
    except DoesNotFit:
        whole = LEAST | {"cpu_compute": "off", "cpu_threads": None}
        found = changed(replace(job, free_device_bytes=1 << 60), **asked, **whole)
        return Plan(found.job, replace(found.weights, job=replace(job, config=found.job.config))), True


def _worth_moving(job: Job, batch_size: int) -> bool:
    """Whether keys and values of so many sequences take a part of device memory that weights could use."""
    if other_layer_types(job.spec.config) or job.free_device_bytes is None:
        return False
    of_one = replace(job, config=replace(job.config, batch_size=job.ranks.world_size)).kv_bytes()
    return of_one * batch_size >= LEAST_KV_SHARE * job.free_device_bytes


def least_machine(plans: list[Plan]) -> str:
    """The least memory that one of `plans` would do with, in words."""
    plan = min(plans, key=lambda each: sum(_needed(each).values()))
    needs = " and ".join(f"{nbytes / GB:.1f} GiB of {place}" for place, nbytes in _needed(plan).items())
    config = plan.job.config
    least = f" --gpu-memory 0 --ring-depth {LEAST_RING_DEPTH}" if config.ring_depth else ""
    return (
        f"{needs} (--engine {config.engine} --quant-bits {config.quant_bits} --batch-size {config.batch_size}{least})"
    )


def _needed(plan: Plan) -> dict[str, int]:
    """Free bytes by place; what is page-locked is host memory too."""
    needed = {need.place: need.needed for need in plan.needs if need.needed and need.place != "page-locked memory"}
    if plan.job.on_gpu:
        needed = {"free device memory": plan.weights.least_free_device_bytes} | {
            place: nbytes for place, nbytes in needed.items() if not place.startswith("device memory")
        }
    return needed
