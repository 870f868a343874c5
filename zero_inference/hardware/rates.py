"""Rates of cores and link beside each other, by format and tokens, read off a machine's description."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zero_inference.kernels.groups import GroupQuantization

if TYPE_CHECKING:
    from zero_inference.hardware.profile import CpuProfile, EngineOverhead, HardwareProfile


MANY_ROWS = 2048  # that a GPU's products are bound by operations with


def format_of(dtype: torch.dtype, scheme: GroupQuantization | None) -> str:
    """What weights are called in a description."""
    return str(dtype).removeprefix("torch.") if scheme is None else f"int{scheme.bits}"


def concurrent_rates(description: HardwareProfile, what: str, rows: int) -> ConcurrentRates | str:
    """The rates for weights of the format `what` and passes of `rows` tokens; or why there are none, in a few words."""
    cores = description.cores
    known = {
        "the host's cores": cores,
        "the link": description.link_gb_per_s,
        "device memory": description.device_gb_per_s,
    }
    if missing := [name for name, found in known.items() if found is None]:
        return f"the rate of {' and '.join(missing)} is not known"
    assert cores is not None and description.link_gb_per_s is not None and description.device_gb_per_s is not None
    points = sorted((each for each in cores.products if each.format == what), key=lambda each: each.rows)
    if not points:
        return f"their rate of {what} products is not known"

    def at(name: str) -> float:
        return 1 / interpolate([each.rows for each in points], [1 / getattr(each, name) for each in points], rows)

    def seconds(name: str) -> float:
        return interpolate([each.rows for each in points], [getattr(each, name) for each in points], rows)

    return ConcurrentRates(
        rows=rows,
        link_alone_gb_per_s=description.link_gb_per_s,
        link_gb_per_s=at("link_gb_per_s"),
        cores_gb_per_s=at("cores_gb_per_s"),
        cores_alone_gb_per_s=at("cores_alone_gb_per_s"),
        read_gb_per_s=cores.read_gb_per_s,
        hand_off_s=interpolate(
            [each.rows for each in points], [_crossing_s(cores, each.rows) for each in points], rows
        ),
        device_gb_per_s=description.device_gb_per_s,
        call_s=seconds("call_s"),
        expert_s=seconds("expert_s"),
    )


def attended_gb_per_s(description: HardwareProfile, dtype: str, heads: int) -> AttentionRates | None:
    """Of keys and values of `dtype` in host memory, where `heads` query heads share a key head; None where that was not measured."""
    found = description.cores.attention if description.cores else ()
    points = sorted((each for each in found if each.format == dtype), key=lambda each: each.heads)
    if not points:
        return None
    places = [each.heads for each in points]
    return AttentionRates(
        beside_link_gb_per_s=1 / interpolate(places, [1 / each.gb_per_s for each in points], heads),
        alone_gb_per_s=1 / interpolate(places, [1 / each.alone_gb_per_s for each in points], heads),
    )


def device_attention_s(
    description: HardwareProfile, heads: int, key_heads: int, positions: int, row_bytes: float
) -> float | None:
    """Seconds of a layer's attention for one token of each sequence in device memory; None where that was not measured.

    Args:
        heads: query heads that share a key head.
        key_heads: of all sequences.
        positions: that each attends to.
        row_bytes: of a position of a key head; a head with more of them counts as more heads.
    """
    found = {
        (each.heads, each.key_heads, each.positions): each.seconds
        for each in (description.launches.attention if description.launches else ())
    }
    columns, rows = (sorted({place[axis] for place in found}) for axis in (1, 2))
    shared = [
        number
        for number in sorted({place[0] for place in found})
        if all((number, column, row) in found for column in columns for row in rows)
    ]
    if not shared:
        return None

    def of_shared(number: int) -> float:
        along = [interpolate(rows, [found[number, column, row] for row in rows], positions) for column in columns]
        return interpolate(columns, along, key_heads * row_bytes / (ATTENTION_HEAD_DIM * ATTENTION_DTYPE.itemsize))

    return interpolate(shared, [of_shared(number) for number in shared], heads)


def _crossing_s(cores: CpuProfile, rows: int) -> float:
    """The same whatever the weights' format is: so the median of what was measured beside all of them."""
    return statistics.median(each.hand_off_s for each in cores.products if each.rows == rows)


def product_time(description: HardwareProfile, what: str, rows: int) -> ProductTime | None:
    """Of weights of the format `what` that the device multiplies with `rows` tokens; None where that is not known.

    A GPU's products of more tokens than were measured take the slope of the last two points, if these are bound by operations.
    """
    points = sorted((each for each in description.device_products if each.format == what), key=lambda each: each.rows)
    if not points:
        return None
    if rows > points[-1].rows and points[-1].rows < MANY_ROWS and description.gpus:
        return None
    places = [each.rows for each in points]
    return ProductTime(
        gb_per_s=1 / interpolate(places, [1 / each.gb_per_s for each in points], rows),
        call_s=interpolate(places, [each.call_s for each in points], rows),
    )


def find_engine_overhead(description: HardwareProfile, engine: str, quant_bits: int) -> EngineOverhead | None:
    """What an engine takes besides the model's work; of other bits where only those were measured, as long as both are quantized, or
    neither is."""
    of_engine = [
        each
        for each in description.engine_overheads
        if each.engine == engine and not (each.kv_offload or each.resident)
    ]
    alike = [each for each in of_engine if (each.quant_bits == 16) == (quant_bits == 16)]
    return min(alike, key=lambda each: abs(each.quant_bits - quant_bits), default=None)


def dequantize_gb_per_s(own: EngineOverhead | None, dtype: str) -> float | None:
    """Of weights that become `dtype` by the engine's own operator; what was measured of another dtype where that alone was."""
    if own is None:
        return None
    of_float16 = own.restored_float16_gb_per_s if dtype == "float16" else None
    return of_float16 or own.restored_gb_per_s


def find_cpu_attention_overhead(description: HardwareProfile) -> EngineOverhead | None:
    """The same where the cores attend over keys and values in host memory, for each layer."""
    return next((each for each in description.engine_overheads if each.kv_offload and each.engine == "stream"), None)


def find_kv_copy_overhead(description: HardwareProfile) -> EngineOverhead | None:
    """The same where keys and values in host memory are copied to the device, for each layer."""
    return next((each for each in description.engine_overheads if each.kv_offload and each.engine == "resident"), None)


def find_dequantize_overhead(description: HardwareProfile) -> EngineOverhead | None:
    """The same where quantized blocks are on the device, for each block."""
    return next((each for each in description.engine_overheads if each.resident), None)


def interpolate(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """The value at `place` on straight lines through the points, whose `places` ascend: of times, which grow in steps that products add.
    Before the first as at the first; behind the last along the last line where that rises."""
    if place <= places[0] or len(places) == 1:
        return values[0]
    upper = next((i for i in range(1, len(places)) if place <= places[i]), len(places) - 1)
    lower = upper - 1
    slope = (values[upper] - values[lower]) / (places[upper] - places[lower])
    if place > places[upper]:
        return values[upper] + max(0.0, slope) * (place - places[upper])
    return values[lower] + slope * (place - places[lower])


CPU_BLOCK_BYTES = 128 << 20  # of a feed-forward


@dataclass(frozen=True)
class ConcurrentRates:
    """Rates in GB/s of 1e9 bytes; those of copies, and of both together, are medians of rounds.

    Attributes:
        rows: of the products.
        link_alone_gb_per_s: page-locked copies to the device while the cores rest.
        link_gb_per_s, cores_gb_per_s: copies, and stored bytes of weights multiplied in calls of `CPU_BLOCK_BYTES`, at the same time.
        cores_alone_gb_per_s: products while the link rests.
        read_gb_per_s: host memory read by the cores, while the link is busy.
        hand_off_s: from the moment when the device has an input for the cores to the one when it has their output, while the link is
            busy, for a feed-forward between as many columns as the weights have, and of hardly any width.
        device_gb_per_s: copies inside the memory of the device, read and written bytes both counted.
        attended: keys and values that the cores attend over; None where that was not measured.
        call_s: what a call of the cores takes besides its bytes and what one of hardly any width takes, while the link is busy.
        expert_s: what a call that reads experts takes besides, for each of them.
    """

    rows: int
    link_alone_gb_per_s: float
    link_gb_per_s: float
    cores_gb_per_s: float
    cores_alone_gb_per_s: float
    read_gb_per_s: float
    hand_off_s: float
    device_gb_per_s: float
    attended: AttentionRates | None = None
    call_s: float = 0.0
    expert_s: float = 0.0

    def attention_gb_per_s(self, link_rests: bool) -> float:
        """Of keys and values; where that was not measured, what the cores read, which is more."""
        if self.attended is None:
            return self.read_gb_per_s
        return self.attended.alone_gb_per_s if link_rests else self.attended.beside_link_gb_per_s

    def call_overhead_s(self, nbytes: float, experts: float = 0.0) -> float:
        """Seconds that a call for products of so many bytes, or of so many experts with them, takes besides these at `cores_gb_per_s`, in
        which a call of `CPU_BLOCK_BYTES` has its `call_s`."""
        return self.hand_off_s + self.call_s * max(0.0, 1 - nbytes / CPU_BLOCK_BYTES) + self.expert_s * experts


@dataclass(frozen=True)
class AttentionRates:
    """GB/s of 1e9 bytes of keys and values: while the link is busy, and while it rests."""

    beside_link_gb_per_s: float
    alone_gb_per_s: float


@dataclass(frozen=True)
class ProductTime:
    """A product with a weight takes `call_s`, and its stored bytes at `gb_per_s`."""

    gb_per_s: float
    call_s: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> ProductTime:
        """From bytes and seconds of weights of one or two sizes, the smaller one first."""
        (least, least_s), (most, most_s) = points[0], points[-1]
        call_s = (least_s * most - most_s * least) / (most - least) if most > least else 0.0
        # of many tokens it may be anything: operations count
        call_s = min(max(0.0, call_s), 0.9 * least_s, 0.9 * most_s)
        return cls(most / (most_s - call_s) / 1e9, call_s)


ATTENTION_HEAD_DIM, ATTENTION_DTYPE = 128, torch.bfloat16
