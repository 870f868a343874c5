"""The hardware profile: memory and rates of one machine, the JSON file of `zero-inference link --save`, and look-ups for plans.

None is unknown. GB/s are 1e9 bytes a second. Rates between measured numbers of tokens and heads are interpolated by their inverse, because
times grow along lines. Imports no torch, so that a bad file is refused at once.
"""

from __future__ import annotations

import bisect
import functools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_inference.errors import UsageError
from zero_inference.utils.environment import describe_environment, rate_versions
from zero_inference.utils.files import machine_path, write_atomically
from zero_inference.utils.format import format_bytes, one_line

if TYPE_CHECKING:
    import torch

    from zero_inference.kernels.quantization import GroupQuantization

MOST = 1e18  # upper limit of any number in a profile; more is a mistake
MIN_RATE = 1e-9  # a byte a second: with less a step would take inf seconds
# Raised when `link --save` measures more or measures differently, so that machines are measured again.
MEASURED_WITH = 9
BUSY_SHARE = 0.25  # of the CPU in other programs, above which rates are considered too low

Bytes = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MOST, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Source = Literal["measured", "datasheet", "assumed"]
WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4"]
# Fields with another name in the file, where also `gb_per_s` is `gbps` and `dequantized` is `restored`.
FILE_KEYS = {"engine_overheads": "own_work", "hand_off_s": "crossing_s"}


class _ProfilePart(BaseModel):
    """Refuses numbers in strings and unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        populate_by_name=True,
        alias_generator=lambda field: FILE_KEYS.get(
            field, field.replace("gb_per_s", "gbps").replace("dequantized", "restored")
        ),
    )


class Gpu(_ProfilePart):
    name: str
    memory_bytes: Bytes
    free_bytes: Bytes  # available to a process that has created its CUDA context
    link_gb_per_s: Rate | None = None  # page-locked copies to this GPU alone

    @model_validator(mode="after")
    def _check(self) -> Gpu:
        if self.free_bytes > self.memory_bytes:
            raise ValueError(f"free_bytes {self.free_bytes} is more than memory_bytes {self.memory_bytes}")
        return self


class CpuProductRate(_ProfilePart):
    """CPU and links while both are busy, for weights in one format and `rows` tokens. GB/s of CPU products count stored bytes."""

    format: WeightFormat
    rows: Count
    gpus: Count = 1  # whose links were busy
    link_gb_per_s: Rate  # of these links together
    cores_gb_per_s: Rate
    cores_alone_gb_per_s: Rate  # CPU products while all links are idle
    hand_off_s: Seconds  # from the device to the CPU and back
    call_s: Seconds = 0.0  # of a CPU call beyond its bytes and the hand-off
    expert_s: Seconds = 0.0  # beyond that, for each expert that a call reads


class CpuAttentionRate(_ProfilePart):
    """CPU attention over keys and values in host memory: `gb_per_s` while the link is busy, `alone_gb_per_s` while it is idle."""

    format: WeightFormat  # of keys and values
    heads: Count  # query heads per key head
    gb_per_s: Rate
    alone_gb_per_s: Rate


class CpuProfile(_ProfilePart):
    threads: Count
    instructions: str  # instruction set of the products
    read_gb_per_s: Rate  # host memory read by all threads while one link is busy
    products: tuple[CpuProductRate, ...] = Field(min_length=1, strict=False)
    attention: tuple[CpuAttentionRate, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _check(self) -> CpuProfile:
        found = Counter((each.format, each.rows, each.gpus) for each in self.products)
        (name, rows, gpus), count = found.most_common(1)[0]
        if count > 1:
            raise ValueError(f"products has {name} with {rows} rows {count} times for {gpus} GPUs")
        return self

    def most_links(self, weight_format: str) -> int:
        """Return the most links that were busy while products of this format were measured; 0 if none were."""
        return max((each.gpus for each in self.products if each.format == weight_format), default=0)


class DeviceProductRate(_ProfilePart):
    """Stored bytes of weights of one format that the device multiplies with `rows` tokens, and the seconds of a product beyond them."""

    format: WeightFormat
    rows: Count
    gb_per_s: Rate
    call_s: Seconds = 0.0


class DeviceAttentionTime(_ProfilePart):
    """Decode attention of one layer in device memory, replayed in a CUDA graph, over 16-bit keys and values with head_dim 128."""

    heads: Count  # query heads per key head
    key_heads: Count  # of all sequences
    positions: Count  # of each sequence
    seconds: Seconds


class LaunchOverhead(_ProfilePart):
    """Overhead of running any model, measured with small models."""

    operator_s: Seconds  # host time of a PyTorch operator
    module_s: Seconds = 0.0  # host time of a module call; in `operator_s` in older files
    step_s: Seconds  # host time of a decode step besides the model: sampling and preparing the next step
    graph_operator_s: Seconds | None = None  # device time of a small operator of a decoder layer in a CUDA graph
    attention: tuple[DeviceAttentionTime, ...] = Field(default=(), strict=False)
    # Instead, in older files: 16 sequences of 160 positions, beyond an operator's time.
    attention_gb_per_s: Rate | None = None


class LoadingRates(_ProfilePart):
    """Bytes of the model's dtype drawn at random or quantized on the device; `keep`: stored bytes copied into new host memory
    (page-locked with a GPU)."""

    draw_gb_per_s: Rate
    quantize_int8_gb_per_s: Rate
    quantize_int4_gb_per_s: Rate
    keep_gb_per_s: Rate


class EngineOverhead(_ProfilePart):
    """Time of an engine besides the model's work, measured with a model so thin that nothing else counts.

    A piece is what the engine fetches as a whole: a block, a parameter or a module's weights; with `kv_offload` (CPU attention by the
    stream engine, copies by the resident engine) a layer's keys and values; with `resident` (quantized weights on the device) a block.
    """

    engine: str
    quant_bits: Count
    kv_offload: bool = False
    resident: bool = False
    load_s: Seconds = 0.0  # of loading besides the weights themselves
    load_layer_s: Seconds = 0.0  # the same for each decoder layer
    start_s: Seconds  # from the call of generate to the first token, beyond a decode step
    step_piece_s: Seconds  # host time in a decode step for each piece
    prefill_piece_s: Seconds
    # Bytes of the computed dtype (on a GPU bfloat16) that the engine's own operator dequantizes and multiplies with one token.
    dequantized_gb_per_s: Rate | None = None
    dequantized_float16_gb_per_s: Rate | None = None


class HardwareProfile(_ProfilePart):
    """One machine, of one node."""

    schema_version: Literal[1] = 1
    source: Source
    measured_with: Count = 1  # `MEASURED_WITH` of the version that measured it
    name: str
    measured_at: str | None = None  # ISO 8601
    # CPU use of other programs during the measurement.
    others_cpu_share: Annotated[float, Field(ge=0, le=1)] | None = None
    versions: dict[str, str | None] = {}  # of the packages and drivers that rates depend on
    gpus: tuple[Gpu, ...] = Field(strict=False, max_length=1024)
    host_memory_bytes: Bytes  # available to a run
    disk_free_bytes: Bytes | None = None  # of the folder of `--disk`
    # Page-locked copies to one GPU, CPU idle; without a GPU copies inside host memory.
    link_gb_per_s: Rate | None = None
    all_links_gb_per_s: Rate | None = None  # the same to all GPUs at once, summed; None with one GPU
    pageable_link_gb_per_s: Rate | None = None
    # From a node's other GPUs beside the link; "link" if over the link.
    peers_gb_per_s: Rate | Literal["link"] | None = None
    device_gb_per_s: Rate | None = None  # copies inside device memory, read plus written bytes
    device_products: tuple[DeviceProductRate, ...] = Field(default=(), strict=False)
    matmul_tflops: dict[str, Rate] = {}  # of large matrices on the device, TFLOP/s (1e12) by dtype
    disk_gb_per_s: Rate | None = None  # direct reads, with the best of several settings:
    disk_read_bytes: Bytes | None = None  # of a request
    disk_queue_depth: Count | None = None  # requests at once
    cores: CpuProfile | None = None
    launches: LaunchOverhead | None = None
    engine_overheads: tuple[EngineOverhead, ...] = Field(default=(), strict=False)
    loading: LoadingRates | None = None
    # Host memory of a process with the libraries of a run and no model; with a GPU after generating.
    process_bytes: Bytes | None = None
    measuring_bytes: Bytes = 0  # the part of `process_bytes` that is only there while a run measures the machine
    library_bytes: dict[str, Bytes] = {}  # what an engine's own library adds, by engine

    def in_words(self) -> str:
        """Return name, source, GPUs and host memory on one line."""
        names = Counter(one_line(gpu.name) for gpu in self.gpus)
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
        when = f", {one_line(self.measured_at)[:10]}" if self.measured_at else ""
        assumed = " (assumed)" if self.source == "datasheet" else ""
        host = f"{format_bytes(self.host_memory_bytes)} of host memory{assumed}"
        return f"{one_line(self.name)} ({self.source}{when}): {gpus}, {host}"

    def caveat(self) -> str | None:
        """Return one line on why measured rates are less useful (a busy CPU, an older version); None if they are not."""
        share = self.others_cpu_share or 0.0
        if self.source != "measured":
            return None
        if share > BUSY_SHARE:
            return (
                f"rates were measured while other programs used {share:.0%} of the CPU and may be too low; "
                "zero-inference link --save measures again"
            )
        if self.measured_with < MEASURED_WITH:
            return "the hardware profile is from an older version; zero-inference link --save FILE on that machine measures more"
        return None


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Replace the file atomically. Raises OSError."""
    with write_atomically(path) as part:
        part.write_text(profile.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> HardwareProfile:
    """Read a file of `zero-inference link --save`. Raises UsageError: there is no such file, or a value is invalid; names the first such
    key."""
    try:
        return HardwareProfile.model_validate_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError:
        why = "not a text file"
    except ValidationError as error:
        why = describe_first(error)
    raise UsageError(f"--machine {path}: {why}; `zero-inference link --save FILE` writes one.")


def describe_first(error: ValidationError) -> str:
    """Return key, value and constraint of the first error."""
    found: Any = error.errors()[0]
    place = ".".join(map(str, found["loc"])) or "all of it"
    if found["type"] == "json_invalid":
        return f"not JSON ({found['msg'].removeprefix('Invalid JSON: ')})"
    if found["type"] == "extra_forbidden":
        return f"{place} is no key of this version"
    message = found["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(found["input"], (dict, list)) else f" {str(found['input'])[:60]}"
    return f"{place}{shown}: {message[:1].lower()}{message[1:]}"


def cached_profile() -> HardwareProfile | None:
    """Return the profile of this machine that `measure_and_cache` wrote; None without one, or if it is unreadable or outdated."""
    path = machine_path()
    try:
        return _read_current(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=1)  # plans ask for every candidate
def _read_current(path: Path, modified_ns: int) -> HardwareProfile | None:
    try:
        found = read_profile(path)
    except UsageError:
        return None
    return None if why_outdated(found) else found


def why_outdated(profile: HardwareProfile) -> str | None:
    """Return what has changed since the profile was measured; None if it is current."""
    if profile.measured_with < MEASURED_WITH:
        return "the profile is from an older version"
    now = describe_environment()
    for name, version in rate_versions(now).items():
        if profile.versions.get(name) != version:
            return f"{name.replace('_', ' ')} was {profile.versions.get(name)} and is {version}"
    if [gpu.name for gpu in profile.gpus] != [gpu["name"] for gpu in now["gpus"]]:
        return "its GPUs have changed"
    return None


COMPUTE_BOUND_ROWS = 2048  # tokens with which a GPU's products are bound by operations
CPU_BLOCK_BYTES = 128 << 20  # weights of a CPU call when CPU products are measured
ATTENTION_HEAD_DIM = 128  # of 16-bit keys and values when device attention is measured


@dataclass(frozen=True)
class CpuWorkload:
    """The weights and inputs that the CPU backend would multiply.

    Attributes:
        scheme: how the weights are quantized; None for weights of `dtype`.
        rows: tokens of a pass.
        columns: of the weights.
        heads: query heads per key head if the CPU might compute attention over keys and values of `dtype`; else 0.
    """

    dtype: torch.dtype
    scheme: GroupQuantization | None
    rows: int
    columns: int
    heads: int = 0

    @property
    def kv_format(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def weight_format(self) -> str:
        return f"int{self.scheme.bits}" if self.scheme else self.kv_format


class AttentionRates(NamedTuple):
    """Bytes of keys and values per second of CPU attention, while the link is busy and while it is idle."""

    beside_link_gb_per_s: float
    alone_gb_per_s: float


@dataclass(frozen=True)
class ConcurrentRates:
    """Rates of the CPU and the links of `gpus` GPUs while all are busy, for products of `rows` tokens; medians."""

    rows: int
    link_alone_gb_per_s: float  # page-locked copies to all `gpus` together while the CPU is idle
    link_gb_per_s: float  # of all links together
    cores_gb_per_s: float  # stored bytes multiplied in calls of `CPU_BLOCK_BYTES`
    cores_alone_gb_per_s: float  # the same while the links are idle
    read_gb_per_s: float  # host memory read by the CPU
    hand_off_s: float  # from the device's input to the CPU's output, for a feed-forward of hardly any width
    device_gb_per_s: float  # copies inside device memory, read plus written bytes; nothing else is busy
    attended: AttentionRates | None = None  # CPU attention; None if not measured
    call_s: float = 0.0  # of a CPU call beyond its bytes and a call of hardly any width
    expert_s: float = 0.0  # of a CPU call beyond that, for each expert that it reads
    gpus: int = 1

    def attention_gb_per_s(self, link_rests: bool) -> float:
        """Return the rate of CPU attention; if not measured, that of reads, which is higher."""
        if self.attended is None:
            return self.read_gb_per_s
        return self.attended.alone_gb_per_s if link_rests else self.attended.beside_link_gb_per_s

    def call_overhead_s(self, nbytes: float, experts: float = 0.0) -> float:
        """Return what a CPU call takes beyond `nbytes` at `cores_gb_per_s`; that rate includes the `call_s` of `CPU_BLOCK_BYTES`."""
        return self.hand_off_s + self.call_s * max(0.0, 1 - nbytes / CPU_BLOCK_BYTES) + self.expert_s * experts


def links_gb_per_s(profile: HardwareProfile, gpus: int) -> float | None:
    """Return GB/s of page-locked copies to `gpus` GPUs at once, summed, while the CPU is idle; None if unknown.

    Between one and all GPUs the time of a copy is interpolated. If all were not measured, each link is assumed to keep its rate, up to
    what host memory gives.
    """
    one, every = profile.link_gb_per_s, profile.all_links_gb_per_s
    if one is None or gpus == 1:
        return one
    if every is not None:
        return gpus / interpolate({1: 1 / one, len(profile.gpus): len(profile.gpus) / every}, gpus)
    return min(gpus * one, one + profile.cores.read_gb_per_s) if profile.cores else gpus * one


def link_shares(profile: HardwareProfile | None, gpus: int) -> tuple[float, ...]:
    """Return each GPU's share (0 to 1) of the rate of the first `gpus` links; equal shares where the rate of one is unknown."""
    rates = [gpu.link_gb_per_s for gpu in profile.gpus[:gpus]] if profile is not None else []
    known = [rate for rate in rates if rate is not None]
    if len(known) < gpus:
        return (1 / gpus,) * gpus
    return tuple(rate / sum(known) for rate in known)


def concurrent_rates(profile: HardwareProfile, work: CpuWorkload, gpus: int = 1) -> ConcurrentRates | str:
    """Return the rates for `work` beside the links of `gpus` GPUs, or a few words on why they are unknown.

    Between two measured numbers of links times are interpolated; if only one link was measured, see `_assume_more_links`.
    """
    cores, link_gb_per_s, device_gb_per_s = profile.cores, profile.link_gb_per_s, profile.device_gb_per_s
    if cores is None or link_gb_per_s is None or device_gb_per_s is None:
        known = {"the CPU": cores, "the link": link_gb_per_s, "device memory": device_gb_per_s}
        return f"the rate of {' and '.join(name for name, found in known.items() if found is None)} is not known"
    counts = sorted({each.gpus for each in cores.products if each.format == work.weight_format})
    if not counts:
        return f"the CPU's rate of {work.weight_format} products is not known"
    measured = {count: _measured_rates(profile, cores, work, count) for count in counts}
    if gpus in measured:
        found = measured[gpus]
    elif counts == [1]:
        found = _assume_more_links(measured[1], profile, gpus)
    else:
        link_s = interpolate({count: count / each.link_gb_per_s for count, each in measured.items()}, gpus)
        found = replace(
            measured[counts[0]],
            gpus=gpus,
            link_alone_gb_per_s=links_gb_per_s(profile, gpus),
            link_gb_per_s=gpus / link_s,
            cores_gb_per_s=_rate_at(measured, "cores_gb_per_s", gpus),
            hand_off_s=interpolate({count: each.hand_off_s for count, each in measured.items()}, gpus),
        )
    attention = {each.heads: each for each in cores.attention if each.format == work.kv_format} if work.heads else {}
    if not attention:
        return found
    # measured beside the fewest links: beside more it is assumed to lose as much as products
    share = min(1.0, found.cores_gb_per_s / measured[counts[0]].cores_gb_per_s)
    beside, alone = (_rate_at(attention, name, work.heads) for name in ("gb_per_s", "alone_gb_per_s"))
    return replace(found, attended=AttentionRates(share * beside, alone))


def _measured_rates(profile: HardwareProfile, cores: CpuProfile, work: CpuWorkload, gpus: int) -> ConcurrentRates:
    """Return the rates that were measured beside `gpus` busy links, interpolated between numbers of tokens; without attention."""
    there = [each for each in cores.products if each.gpus == gpus]
    points = {each.rows: each for each in there if each.format == work.weight_format}
    # a hand-off does not depend on the format: the median over formats
    hand_offs = {rows: statistics.median(each.hand_off_s for each in there if each.rows == rows) for rows in points}
    link_alone_gb_per_s, device_gb_per_s = links_gb_per_s(profile, gpus), profile.device_gb_per_s
    assert link_alone_gb_per_s is not None and device_gb_per_s is not None
    return ConcurrentRates(
        rows=work.rows,
        link_alone_gb_per_s=link_alone_gb_per_s,
        link_gb_per_s=_rate_at(points, "link_gb_per_s", work.rows),
        cores_gb_per_s=_rate_at(points, "cores_gb_per_s", work.rows),
        cores_alone_gb_per_s=_rate_at(points, "cores_alone_gb_per_s", work.rows),
        read_gb_per_s=cores.read_gb_per_s,
        hand_off_s=interpolate(hand_offs, work.rows),
        device_gb_per_s=device_gb_per_s,
        call_s=interpolate({rows: each.call_s for rows, each in points.items()}, work.rows),
        expert_s=interpolate({rows: each.expert_s for rows, each in points.items()}, work.rows),
        gpus=gpus,
    )


def _assume_more_links(one: ConcurrentRates, profile: HardwareProfile, gpus: int) -> ConcurrentRates:
    """Return the rates beside `gpus` busy links by those beside one.

    An assumption, not a measurement: beside the CPU, links keep the share of their rate that one keeps; and host memory gives no more
    than reads by the CPU and one link took of it, which links and CPU then divide in proportion to what they would take.
    """
    alone_gb_per_s = links_gb_per_s(profile, gpus)
    assert alone_gb_per_s is not None
    links, cores = one.link_gb_per_s * alone_gb_per_s / one.link_alone_gb_per_s, one.cores_gb_per_s
    host = max(one.read_gb_per_s + one.link_alone_gb_per_s, one.link_gb_per_s + cores, alone_gb_per_s)
    share = min(1.0, host / (links + cores))
    return replace(
        one,
        gpus=gpus,
        link_alone_gb_per_s=alone_gb_per_s,
        link_gb_per_s=share * links,
        cores_gb_per_s=share * cores,
    )


@dataclass(frozen=True)
class ProductTime:
    """A product with a weight takes `call_s` and its stored bytes at `gb_per_s`."""

    gb_per_s: float
    call_s: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> ProductTime:
        """Fit (bytes, seconds) of weights of one or two sizes, the smaller one first."""
        (least, least_s), (most, most_s) = points[0], points[-1]
        call_s = (least_s * most - most_s * least) / (most - least) if most > least else 0.0
        # with many tokens the line can be anything: operations bind, not bytes
        call_s = min(max(0.0, call_s), 0.9 * least_s, 0.9 * most_s)
        return cls(most / (most_s - call_s) / 1e9, call_s)


def product_time(profile: HardwareProfile, weight_format: str, rows: int) -> ProductTime | None:
    """Return the time of a product on the device with `rows` tokens; None if unknown.

    Beyond the measured numbers of tokens the slope of the last two points holds, on a GPU only if these are bound by operations.
    """
    points = {each.rows: each for each in profile.device_products if each.format == weight_format}
    most_rows = max(points, default=0)
    if not points or (rows > most_rows and most_rows < COMPUTE_BOUND_ROWS and profile.gpus):
        return None
    call_s = interpolate({count: each.call_s for count, each in points.items()}, rows)
    return ProductTime(_rate_at(points, "gb_per_s", rows), call_s)


def device_attention_s(
    profile: HardwareProfile, heads: int, key_heads: int, positions: int, row_bytes: float
) -> float | None:
    """Return the time of one layer's decode attention in device memory; None if not measured.

    Args:
        heads: query heads per key head.
        key_heads: of all sequences.
        positions: of each sequence.
        row_bytes: of the key, or the value, of one position and key head; a wider head counts as several.
    """
    found = {
        (each.heads, each.key_heads, each.positions): each.seconds
        for each in (profile.launches.attention if profile.launches else ())
    }
    all_heads, all_key_heads, all_positions = (sorted({point[axis] for point in found}) for axis in range(3))
    usual_heads = key_heads * row_bytes / (2 * ATTENTION_HEAD_DIM)  # 2 bytes: measured with 16 bits

    def with_heads(n: int) -> float:
        by_key_heads = {k: interpolate({p: found[n, k, p] for p in all_positions}, positions) for k in all_key_heads}
        return interpolate(by_key_heads, usual_heads)

    complete = [n for n in all_heads if all((n, k, p) in found for k in all_key_heads for p in all_positions)]
    return interpolate({n: with_heads(n) for n in complete}, heads) if complete else None


def find_engine_overhead(
    profile: HardwareProfile, engine: str, quant_bits: int = 16, *, kv_offload: bool = False, resident: bool = False
) -> EngineOverhead | None:
    """Return the overhead of an engine; with other quantized bits if only those were measured."""
    alike = [
        each
        for each in profile.engine_overheads
        if (each.engine, each.kv_offload, each.resident) == (engine, kv_offload, resident)
        and (each.quant_bits == 16) == (quant_bits == 16)
    ]
    return min(alike, key=lambda each: abs(each.quant_bits - quant_bits), default=None)


def dequantize_gb_per_s(overhead: EngineOverhead | None, dtype: str) -> float | None:
    """Return bytes of `dtype` per second that the engine's own operator dequantizes; of another dtype if only that was measured."""
    if overhead is None:
        return None
    of_float16 = overhead.dequantized_float16_gb_per_s if dtype == "float16" else None
    return of_float16 or overhead.dequantized_gb_per_s


def interpolate(points: Mapping[int, float], x: float) -> float:
    """Return y at `x` on straight lines through `points` (y by x): constant before the first point, and after the last one along the last
    line if that rises."""
    xs = sorted(points)
    if x <= xs[0] or len(xs) == 1:
        return points[xs[0]]
    upper = min(bisect.bisect_left(xs, x), len(xs) - 1)
    left, right = xs[upper - 1], xs[upper]
    slope = (points[right] - points[left]) / (right - left)
    if x > right:
        return points[right] + max(0.0, slope) * (x - right)
    return points[left] + slope * (x - left)


def _rate_at(points: Mapping[int, Any], name: str, x: float) -> float:
    """Return the rate `name` at `x`, of `points` by tokens or heads; times, not rates, lie on straight lines."""
    return 1 / interpolate({at: 1 / getattr(each, name) for at, each in points.items()}, x)
