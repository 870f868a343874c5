"""Which decoder layers stay on the device and which stream through the ring, decided before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from zero_inference.config.choices import LEAST_RING_DEPTH
from zero_inference.engines.stream.layout import LayerLayout, lay_out
from zero_inference.errors import DoesNotFit
from zero_inference.models.layers import decoder_layers
from zero_inference.models.skeleton import unique_parameter_names
from zero_inference.quantization.groups import GroupQuantization

GIB = 1 << 30
# The copies that wait in the ring have to last while the host ends one token and prepares the next; this is a choice on the
# safe side, to be set by traces (docs/performance.md). 55 GB/s is a PCIe 5 x16 link; a slower one only needs less.
RING_COVERS_S = 0.05
RING_LINK_GB_PER_S = 55.0
USUAL_DEPTH = 3  # or more; down to LEAST_RING_DEPTH where there is less memory


@dataclass
class Residency:
    """Where each decoder layer lives.

    Attributes:
        layouts: of every decoder layer.
        resident, streamed: indices of layers, in order; together all of them.
        depth: slots of the ring, 0 if nothing streams.
        outside_bytes: parameters that are not in a decoder layer, or tied to one that is not; on the device.
    """

    layouts: list[LayerLayout]
    resident: list[int]
    streamed: list[int]
    depth: int
    outside_bytes: int

    @property
    def slot_bytes(self) -> int:
        return max((self.layouts[layer].nbytes for layer in self.streamed), default=0)

    @property
    def workspace_bytes(self) -> int:
        return max(layout.workspace_bytes for layout in self.layouts)

    @property
    def resident_bytes(self) -> int:
        return sum(self.layouts[layer].nbytes for layer in self.resident)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the streamed layers over all ranks."""
        return sum(self.layouts[layer].nbytes for layer in self.streamed)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights as stored, gaps not counted."""
        return self.outside_bytes + sum(layout.stored_bytes for layout in self.layouts)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights, slots and workspace on the device of each rank."""
        return self.outside_bytes + self.resident_bytes + self.workspace_bytes + self.depth * self.slot_bytes


def lay_out_layers(model: nn.Module, scheme: GroupQuantization | None, ranks: int) -> tuple[list[LayerLayout], int]:
    """Layouts of the decoder layers of a meta model, and the bytes of the parameters outside of them.

    Raises:
        UsageError: the model has no list of decoder layers.
    """
    _, layers = decoder_layers(model)
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    names = unique_parameter_names(model)
    inside = sum((list(layer.named_parameters(remove_duplicate=False)) for layer in layers), [])
    uses: dict[int, int] = {}
    for _, parameter in inside:
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    shared = {key for key, where in owners.items() if len(where) > 1 or len(names[key]) > uses[key]}
    layouts = [lay_out(layer, shared, scheme, ranks) for layer in layers]
    outside = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in owners or id(p) in shared)
    return layouts, outside


def decide_residency(
    layouts: list[LayerLayout],
    outside_bytes: int,
    free_bytes: int | None,
    gpu_memory_gib: float | None,
    depth: int | None,
    ranks: int = 1,
) -> Residency:
    """Keep as many layers on the device as the budget holds, spread evenly among the streamed ones.

    Args:
        free_bytes: device bytes that are left for layers, ring and workspace; None where nothing limits them (a CPU).
        gpu_memory_gib: budget of the resident layers; None takes what `free_bytes` leaves beside the ring, or 0 on a CPU.
        depth: slots of the ring; None takes as many as cover `RING_COVERS_S`, or at least `LEAST_RING_DEPTH` where there is less memory.
        ranks: each copies its share of a layer over a link of its own, so a slot covers that much less time.

    Raises:
        DoesNotFit: the device does not hold what was asked for, or not two slots of the largest layer.
    """
    left = None if free_bytes is None else max(0, free_bytes - max(layout.workspace_bytes for layout in layouts))

    def plan_for(gib: float | None, slots: int | None) -> Residency:
        return _plan(layouts, outside_bytes, left, gib, slots, ranks)

    plan = plan_for(gpu_memory_gib, depth)
    if not _fits(plan, left):
        raise DoesNotFit(
            f"{plan.resident_bytes / GIB:.2f} GiB of resident layers and {plan.depth} slots of {plan.slot_bytes / GIB:.2f} GiB do not fit "
            f"into the {left / GIB:.2f} GiB of device memory left for them: {_advice(plan_for, gpu_memory_gib, depth, plan, left)}."
        )
    return plan


def _plan(
    layouts: list[LayerLayout], outside_bytes: int, left: int | None, gib: float | None, depth: int | None, ranks: int
) -> Residency:
    largest = max(layout.nbytes for layout in layouts)
    total = sum(layout.nbytes for layout in layouts)
    slots = depth or max(USUAL_DEPTH, 1 + math.ceil(RING_COVERS_S * RING_LINK_GB_PER_S * 1e9 * ranks / largest))
    if gib is not None:
        budget = int(gib * GIB)
    elif left is None:
        budget = 0
    elif left >= total:
        budget = total
    else:
        slots = depth or max(LEAST_RING_DEPTH, min(slots, left // largest))
        budget = left - slots * largest
    chosen = _spread(layouts, budget)
    plan = Residency(
        layouts, sorted(chosen), [index for index in range(len(layouts)) if index not in chosen], 0, outside_bytes
    )
    plan.depth = min(slots, len(plan.streamed))
    if left is not None and depth is None and plan.depth > LEAST_RING_DEPTH:
        plan.depth = max(LEAST_RING_DEPTH, min(plan.depth, (left - plan.resident_bytes) // plan.slot_bytes))
    return plan


def _fits(plan: Residency, left: int | None) -> bool:
    return left is None or plan.resident_bytes + plan.depth * plan.slot_bytes <= left


def _advice(
    plan_for: Callable[[float | None, int | None], Residency],
    gib: float | None,
    depth: int | None,
    plan: Residency,
    left: int,
) -> str:
    """The least change that fits, each tried."""
    for slots in range((depth or LEAST_RING_DEPTH) - 1, LEAST_RING_DEPTH - 1, -1):
        if _fits(plan_for(gib, slots), left):
            return f"use --ring-depth {slots} or less"
    for slots in dict.fromkeys((depth, LEAST_RING_DEPTH)):
        for tenths in range(int(plan.resident_bytes * 10 / GIB), -1, -1):
            if _fits(plan_for(tenths / 10, slots), left):
                return f"use --gpu-memory {tenths / 10:g} or less" + (
                    f" with --ring-depth {slots}" if slots != depth else ""
                )
    return "fewer of them do not fit either; see with --dry-run which other options would"


def _spread(layouts: list[LayerLayout], budget: int) -> set[int]:
    """The largest number of layers whose bytes the budget holds, evenly spaced."""
    count = len(layouts)
    for kept in range(count, 0, -1):
        chosen = {int((index + 0.5) * count / kept) for index in range(kept)}
        if sum(layouts[index].nbytes for index in chosen) <= budget:
            return chosen
    return set()
