"""Which decoder layers stay on the device and which stream through the ring, decided before a weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from zero_inference.errors import UsageError
from zero_inference.models.layers import decoder_layers
from zero_inference.models.skeleton import unique_parameter_names
from zero_inference.offload.layout import LayerLayout, lay_out
from zero_inference.offload.quantization import GroupQuantization

GIB = 1 << 30
# The copies that wait in the ring have to last while the host ends one token and prepares the next: 35 to 40 ms were seen
# with transformers' growing cache (docs/performance.md). 55 GB/s is a PCIe 5 x16 link; a slower one only needs less.
RING_COVERS_S = 0.05
RING_LINK_GBPS = 55.0
LEAST_DEPTH = 3


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


def decide_residency(layouts: list[LayerLayout], outside_bytes: int, room: int | None, gpu_memory_gib: float | None,
                     depth: int | None) -> Residency:
    """Keep as many layers on the device as the budget holds, spread evenly among the streamed ones.

    Args:
        room: device bytes that are left for layers, ring and workspace; None where nothing limits them (a CPU).
        gpu_memory_gib: budget of the resident layers; None takes what `room` leaves beside the ring, or 0 on a CPU.
        depth: slots of the ring; None takes as many as cover `RING_COVERS_S`.

    Raises:
        UsageError: the device does not hold what was asked for, or not two slots of the largest layer.
    """
    largest = max(layout.nbytes for layout in layouts)
    workspace = max(layout.workspace_bytes for layout in layouts)
    total = sum(layout.nbytes for layout in layouts)
    ring = (depth or max(LEAST_DEPTH, 1 + math.ceil(RING_COVERS_S * RING_LINK_GBPS * 1e9 / largest))) * largest
    left = None if room is None else room - workspace
    if left is not None and left < total and depth is None:
        ring = max(2, min(ring, left) // largest) * largest
    if gpu_memory_gib is not None:
        budget = int(gpu_memory_gib * GIB)
    elif left is None:
        budget = 0
    else:
        budget = total if left >= total else left - ring
    chosen = _spread(layouts, budget)
    streamed = [index for index in range(len(layouts)) if index not in chosen]
    slots = min(ring // largest, len(streamed))
    plan = Residency(layouts, sorted(chosen), streamed, slots, outside_bytes)
    needed = plan.resident_bytes + slots * plan.slot_bytes
    if left is not None and needed > left:
        if plan.resident_bytes and gpu_memory_gib is not None:
            raise UsageError(f"--gpu-memory {gpu_memory_gib:g}: the resident layers and {slots} slots of {largest / GIB:.2f} GiB need "
                             f"{needed / GIB:.2f} GiB, and the device has {max(left, 0) / GIB:.2f} GiB for them; use "
                             f"--gpu-memory {max(0.0, (left - ring) / GIB):.1f} or less.")
        raise UsageError(f"{slots} slots of the largest layer ({largest / GIB:.2f} GiB each) need {needed / GIB:.2f} GiB, and the "
                         f"device has {max(left, 0) / GIB:.2f} GiB for them; quantize the weights, use more --kv-offload, a smaller "
                         "--batch-size or --prompt-len, or a GPU with more memory.")
    return plan


def _spread(layouts: list[LayerLayout], budget: int) -> set[int]:
    """The largest number of layers whose bytes the budget holds, evenly spaced."""
    count = len(layouts)
    for kept in range(count, 0, -1):
        chosen = {int((index + 0.5) * count / kept) for index in range(kept)}
        if sum(layouts[index].nbytes for index in chosen) <= budget:
            return chosen
    return set()
