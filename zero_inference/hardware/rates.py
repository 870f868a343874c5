"""Rates that a plan needs, looked up in a hardware profile and interpolated between the measured numbers of tokens and heads.

GB/s are 1e9 bytes a second. Rates are interpolated by their inverse: times grow along lines, in the steps that products add.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zero_inference.hardware.profile import EngineOverhead, HardwareProfile
from zero_inference.kernels.quantization import GroupQuantization

COMPUTE_BOUND_ROWS = 2048  # tokens with which a GPU's products are bound by operations
CPU_BLOCK_BYTES = 128 << 20  # weights of a CPU call when CPU products are measured
ATTENTION_HEAD_DIM, ATTENTION_DTYPE = 128, torch.bfloat16  # of keys and values when device attention is measured


class AttentionRates(NamedTuple):
    """Bytes of keys and values per second of CPU attention, while the link is busy and while it is idle."""

    beside_link_gb_per_s: float
    alone_gb_per_s: float


@dataclass(frozen=True)
class ConcurrentRates:
    """Rates of CPU and link while both are busy, for products of `rows` tokens; medians."""

    rows: int
    link_alone_gb_per_s: float  # page-locked copies to the device while the CPU is idle
    link_gb_per_s: float
    cores_gb_per_s: float  # stored bytes multiplied in calls of `CPU_BLOCK_BYTES`
    cores_alone_gb_per_s: float  # the same while the link is idle
    read_gb_per_s: float  # host memory read by the CPU
    hand_off_s: float  # from the device's input to the CPU's output, for a feed-forward of hardly any width
    device_gb_per_s: float  # copies inside device memory, read plus written bytes; nothing else is busy
    attended: AttentionRates | None = None  # CPU attention; None if not measured
    call_s: float = 0.0  # of a CPU call beyond its bytes and a call of hardly any width
    expert_s: float = 0.0  # of a CPU call beyond that, for each expert that it reads

    def attention_gb_per_s(self, link_rests: bool) -> float:
        """Return the rate of CPU attention; if not measured, that of reads, which is higher."""
        if self.attended is None:
            return self.read_gb_per_s
        return self.attended.alone_gb_per_s if link_rests else self.attended.beside_link_gb_per_s

    def call_overhead_s(self, nbytes: float, experts: float = 0.0) -> float:
        """Return what a CPU call takes beyond `nbytes` at `cores_gb_per_s`; that rate includes the `call_s` of `CPU_BLOCK_BYTES`."""
        return self.hand_off_s + self.call_s * max(0.0, 1 - nbytes / CPU_BLOCK_BYTES) + self.expert_s * experts


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


def format_of(dtype: torch.dtype, scheme: GroupQuantization | None) -> str:
    """Return the name of a weight format in a profile."""
    return str(dtype).removeprefix("torch.") if scheme is None else f"int{scheme.bits}"


def concurrent_rates(profile: HardwareProfile, weight_format: str, rows: int) -> ConcurrentRates | str:
    """Return the rates for weights of `weight_format` and passes of `rows` tokens, or a few words on why they are unknown."""
    cores, link_gb_per_s, device_gb_per_s = profile.cores, profile.link_gb_per_s, profile.device_gb_per_s
    if cores is None or link_gb_per_s is None or device_gb_per_s is None:
        known = {"the CPU": cores, "the link": link_gb_per_s, "device memory": device_gb_per_s}
        return f"the rate of {' and '.join(name for name, found in known.items() if found is None)} is not known"
    points = [each for each in cores.products if each.format == weight_format]
    if not points:
        return f"the CPU's rate of {weight_format} products is not known"
    # a hand-off does not depend on the format: the median over formats
    hand_offs = {
        each.rows: statistics.median(other.hand_off_s for other in cores.products if other.rows == each.rows)
        for each in points
    }
    return ConcurrentRates(
        rows=rows,
        link_alone_gb_per_s=link_gb_per_s,
        link_gb_per_s=_rate_at(points, "rows", "link_gb_per_s", rows),
        cores_gb_per_s=_rate_at(points, "rows", "cores_gb_per_s", rows),
        cores_alone_gb_per_s=_rate_at(points, "rows", "cores_alone_gb_per_s", rows),
        read_gb_per_s=cores.read_gb_per_s,
        hand_off_s=interpolate(hand_offs, rows),
        device_gb_per_s=device_gb_per_s,
        call_s=interpolate({each.rows: each.call_s for each in points}, rows),
        expert_s=interpolate({each.rows: each.expert_s for each in points}, rows),
    )


def attended_gb_per_s(profile: HardwareProfile, dtype: str, heads: int) -> AttentionRates | None:
    """Return the rates of CPU attention with `heads` query heads per key head; None if not measured."""
    points = [each for each in (profile.cores.attention if profile.cores else ()) if each.format == dtype]
    if not points:
        return None
    return AttentionRates(*(_rate_at(points, "heads", name, heads) for name in ("gb_per_s", "alone_gb_per_s")))


def device_attention_s(
    profile: HardwareProfile, heads: int, key_heads: int, positions: int, row_bytes: float
) -> float | None:
    """Return the time of one layer's decode attention in device memory; None if not measured.

    Args:
        heads: query heads per key head.
        key_heads: of all sequences.
        positions: of each sequence.
        row_bytes: of one position of a key head; a larger head counts as more heads.
    """
    found = {
        (each.heads, each.key_heads, each.positions): each.seconds
        for each in (profile.launches.attention if profile.launches else ())
    }
    all_heads, all_key_heads, all_positions = (sorted({point[axis] for point in found}) for axis in range(3))
    complete = [n for n in all_heads if all((n, k, p) in found for k in all_key_heads for p in all_positions)]
    if not complete:
        return None
    usual_heads = key_heads * row_bytes / (ATTENTION_HEAD_DIM * ATTENTION_DTYPE.itemsize)

    def with_heads(n: int) -> float:
        by_key_heads = {k: interpolate({p: found[n, k, p] for p in all_positions}, positions) for k in all_key_heads}
        return interpolate(by_key_heads, usual_heads)

    return interpolate({n: with_heads(n) for n in complete}, heads)


def product_time(profile: HardwareProfile, weight_format: str, rows: int) -> ProductTime | None:
    """Return the time of a product on the device with `rows` tokens; None if unknown.

    Beyond the measured numbers of tokens the slope of the last two points holds, on a GPU only if these are bound by operations.
    """
    points = [each for each in profile.device_products if each.format == weight_format]
    most_rows = max((each.rows for each in points), default=0)
    if not points or (rows > most_rows and most_rows < COMPUTE_BOUND_ROWS and profile.gpus):
        return None
    call_s = interpolate({each.rows: each.call_s for each in points}, rows)
    return ProductTime(_rate_at(points, "rows", "gb_per_s", rows), call_s)


def find_engine_overhead(profile: HardwareProfile, engine: str, quant_bits: int) -> EngineOverhead | None:
    """Return the overhead of an engine; with other quantized bits if only those were measured."""
    alike = [
        each
        for each in profile.engine_overheads
        if each.engine == engine
        and not (each.kv_offload or each.resident)
        and (each.quant_bits == 16) == (quant_bits == 16)
    ]
    return min(alike, key=lambda each: abs(each.quant_bits - quant_bits), default=None)


def find_cpu_attention_overhead(profile: HardwareProfile) -> EngineOverhead | None:
    """Return the overhead of CPU attention, a piece a layer."""
    return next((each for each in profile.engine_overheads if each.kv_offload and each.engine == "stream"), None)


def find_kv_copy_overhead(profile: HardwareProfile) -> EngineOverhead | None:
    """Return the overhead of copying keys and values from host memory to the device, a piece a layer."""
    return next((each for each in profile.engine_overheads if each.kv_offload and each.engine == "resident"), None)


def find_dequantize_overhead(profile: HardwareProfile) -> EngineOverhead | None:
    """Return the overhead of quantized blocks that are resident on the device, a piece a block."""
    return next((each for each in profile.engine_overheads if each.resident), None)


def dequantize_gb_per_s(overhead: EngineOverhead | None, dtype: str) -> float | None:
    """Return bytes of `dtype` per second that the engine's own operator dequantizes; of another dtype if only that was measured."""
    if overhead is None:
        return None
    of_float16 = overhead.restored_float16_gb_per_s if dtype == "float16" else None
    return of_float16 or overhead.restored_gb_per_s


def interpolate(points: Mapping[int, float], x: float) -> float:
    """Return y at `x` on straight lines through `points` (y by x): constant before the first point, and after the last one along the last
    line if that rises."""
    xs = sorted(points)
    if x <= xs[0] or len(xs) == 1:
        return points[xs[0]]
    upper = next((i for i in range(1, len(xs)) if x <= xs[i]), len(xs) - 1)
    left, right = xs[upper - 1], xs[upper]
    slope = (points[right] - points[left]) / (right - left)
    if x > right:
        return points[right] + max(0.0, slope) * (x - right)
    return points[left] + slope * (x - left)


def _rate_at(points: Sequence[Any], axis: str, name: str, x: float) -> float:
    """Return the rate `name` of `points` at `x` of `axis`; times, not rates, lie on straight lines."""
    return 1 / interpolate({getattr(each, axis): 1 / getattr(each, name) for each in points}, x)
