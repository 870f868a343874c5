"""Rates of cores and link beside each other, by format and tokens, read off a machine's description."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zero_inference.hardware.attention import Attended
from zero_inference.hardware.compute import ProductTime
from zero_inference.hardware.cores import BesideLink
from zero_inference.hardware.device_attention import DTYPE, HEAD_DIM
from zero_inference.kernels.groups import GroupQuantization

if TYPE_CHECKING:
    from zero_inference.hardware.description import Cores, Description, OwnWork


MANY_ROWS = 2048  # that a GPU's products are bound by operations with


def format_of(dtype: torch.dtype, scheme: GroupQuantization | None) -> str:
    """What weights are called in a description."""
    return str(dtype).removeprefix("torch.") if scheme is None else f"int{scheme.bits}"


def beside_link(description: Description, what: str, rows: int) -> BesideLink | str:
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
        return 1 / between([each.rows for each in points], [1 / getattr(each, name) for each in points], rows)

    def seconds(name: str) -> float:
        return between([each.rows for each in points], [getattr(each, name) for each in points], rows)

    return BesideLink(
        rows=rows,
        link_alone_gb_per_s=description.link_gb_per_s,
        link_gb_per_s=at("link_gb_per_s"),
        cores_gb_per_s=at("cores_gb_per_s"),
        cores_alone_gb_per_s=at("cores_alone_gb_per_s"),
        read_gb_per_s=cores.read_gb_per_s,
        crossing_s=between([each.rows for each in points], [_crossing_s(cores, each.rows) for each in points], rows),
        device_gb_per_s=description.device_gb_per_s,
        call_s=seconds("call_s"),
        expert_s=seconds("expert_s"),
    )


def attended_gb_per_s(description: Description, dtype: str, heads: int) -> Attended | None:
    """Of keys and values of `dtype` in host memory, where `heads` query heads share a key head; None where that was not measured."""
    found = description.cores.attention if description.cores else ()
    points = sorted((each for each in found if each.format == dtype), key=lambda each: each.heads)
    if not points:
        return None
    places = [each.heads for each in points]
    return Attended(
        beside_link_gb_per_s=1 / between(places, [1 / each.gb_per_s for each in points], heads),
        alone_gb_per_s=1 / between(places, [1 / each.alone_gb_per_s for each in points], heads),
    )


def device_attention_s(
    description: Description, heads: int, key_heads: int, positions: int, row_bytes: float
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
        along = [between(rows, [found[number, column, row] for row in rows], positions) for column in columns]
        return between(columns, along, key_heads * row_bytes / (HEAD_DIM * DTYPE.itemsize))

    return between(shared, [of_shared(number) for number in shared], heads)


def _crossing_s(cores: Cores, rows: int) -> float:
    """The same whatever the weights' format is: so the median of what was measured beside all of them."""
    return statistics.median(each.crossing_s for each in cores.products if each.rows == rows)


def product_time(description: Description, what: str, rows: int) -> ProductTime | None:
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
        gb_per_s=1 / between(places, [1 / each.gb_per_s for each in points], rows),
        call_s=between(places, [each.call_s for each in points], rows),
    )


def own_work(description: Description, engine: str, quant_bits: int) -> OwnWork | None:
    """What an engine takes besides the model's work; of other bits where only those were measured, as long as both are quantized, or
    neither is."""
    of_engine = [
        each for each in description.own_work if each.engine == engine and not (each.kv_offload or each.resident)
    ]
    alike = [each for each in of_engine if (each.quant_bits == 16) == (quant_bits == 16)]
    return min(alike, key=lambda each: abs(each.quant_bits - quant_bits), default=None)


def restored_gb_per_s(own: OwnWork | None, dtype: str) -> float | None:
    """Of weights that become `dtype` by the engine's own operator; what was measured of another dtype where that alone was."""
    if own is None:
        return None
    of_float16 = own.restored_float16_gb_per_s if dtype == "float16" else None
    return of_float16 or own.restored_gb_per_s


def attending(description: Description) -> OwnWork | None:
    """The same where the cores attend over keys and values in host memory, for each layer."""
    return next((each for each in description.own_work if each.kv_offload and each.engine == "stream"), None)


def copying(description: Description) -> OwnWork | None:
    """The same where keys and values in host memory are copied to the device, for each layer."""
    return next((each for each in description.own_work if each.kv_offload and each.engine == "resident"), None)


def restoring(description: Description) -> OwnWork | None:
    """The same where quantized blocks are on the device, for each block."""
    return next((each for each in description.own_work if each.resident), None)


def between(places: Sequence[int], values: Sequence[float], place: float) -> float:
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
