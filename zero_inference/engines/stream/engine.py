"""Our layer streaming: decoder layers wait in page-locked host memory and pass through a ring of device slots.

The model is transformers' own and stays whole; hooks before and after each decoder layer see to it that its parameters
point at the layer's bytes while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import EnginePlan, Footprint, Job, LoadedModel, Progress, group_size_refusal
from zero_inference.engines.stream.residency import Residency, decide_residency, lay_out_layers
from zero_inference.engines.stream.ring import LayerRing
from zero_inference.engines.stream.store import LayerStore
from zero_inference.engines.stream.streams import ComputeStream, DeviceStreams
from zero_inference.engines.stream.timeline import Timeline
from zero_inference.models.checkpoint import load_weights
from zero_inference.models.layers import decoder_layers
from zero_inference.quantization.groups import GroupQuantization, dequantize
from zero_inference.runtime.distributed import Ranks, new_group
from zero_inference.runtime.extension import load_extension
from zero_inference.runtime.transfers import Transfers

LEAST_COLUMNS = 32  # a matrix with fewer is no projection (the kernel of a convolution): it may stay as it is
RESERVE_BYTES = 1 << 30  # device memory left to cuBLAS, the allocator's rounding and the display

connect = new_group  # for the all-gathers, on which no other code issues collectives


@dataclass(frozen=True)
class StreamPlan(EnginePlan):
    """
    Attributes:
        scheme: None where weights keep 16 bits.
    """

    residency: Residency
    scheme: GroupQuantization | None


def plan(job: Job) -> StreamPlan:
    """Decide which layers stay on the device.

    Raises:
        UsageError: no decoder layers to stream, a group size that does not divide, or a device too small (DoesNotFit).
    """
    config, model = job.config, job.skeleton.model
    scheme = None
    if config.quantized:
        scheme = GroupQuantization(config.quant_bits, config.quant_group_size, job.spec.dtype)
        _check_groups(model, scheme)
    layouts, outside = lay_out_layers(model, scheme, job.ranks.world_size)
    budget = None
    if job.free_device_bytes is not None:
        budget = job.free_device_bytes - outside - job.kv_device_bytes - job.activation_bytes - RESERVE_BYTES
    residency = decide_residency(layouts, outside, budget, config.gpu_memory, config.ring_depth, job.ranks.world_size)
    host, pinned = residency.streamed_bytes // job.ranks.world_size, job.pin_weights
    footprint = Footprint(device=residency.device_bytes, host=host, pinned=host if pinned else 0)
    return StreamPlan(job, footprint, pinned, residency, scheme)


def check(plan: StreamPlan) -> None:
    """Nothing beyond what every engine needs."""


def load(plan: StreamPlan, progress: Progress = lambda done: None) -> LoadedModel:
    """Fill the layer store, place the rest on the device, and hook the ring into the model."""
    job, residency, scheme = plan.job, plan.residency, plan.scheme
    model, ranks = job.skeleton.model, job.ranks
    if scheme is not None and job.on_gpu:
        load_extension(None if ranks.is_first and job.config.verbose > 0 else lambda line: None)
    store = LayerStore(residency.layouts, set(residency.resident), ranks, plan.pinned)
    prefix, _ = decoder_layers(model)
    placed = _Placement(prefix, residency, store, scheme, ranks.device)
    load_weights(model, job.spec, job.config.seed, ranks.device, placed.adopt, progress)
    model.to(ranks.device)  # buffers
    feeder = LayerFeeder(model, residency, store, scheme, ranks, job.group)
    return LoadedModel(
        model=model,
        device=ranks.device,
        dtype=job.spec.dtype,
        weight_bytes=residency.stored_bytes,
        transfers=feeder.transfers,
        facts=_facts(plan, model),
        close=feeder.close,
        timeline=feeder.timeline,
        preallocated_cache=True,
        page_locked=[store.buffers[layer] for layer in residency.streamed] if plan.pinned else (),
    )


def _facts(plan: StreamPlan, model: nn.Module) -> dict[str, Any]:
    """What the record says of where the weights are."""
    residency = plan.residency
    facts: dict[str, Any] = {
        "stream": {
            "resident_layers": len(residency.resident),
            "streamed_layers": len(residency.streamed),
            "ring_depth": residency.depth,
            "slot_bytes": residency.slot_bytes,
            "resident_bytes": residency.resident_bytes,
            "workspace_bytes": residency.workspace_bytes,
        }
    }
    if plan.scheme is not None:
        quantized, skipped, total = _quantized_share(model, residency)
        facts |= {"quantized_fraction": quantized / total, "not_quantized": skipped}
    return facts


class _Placement:
    """Takes each parameter over as it is read: into the store, or onto the device where it is."""

    def __init__(
        self,
        prefix: str,
        residency: Residency,
        store: LayerStore,
        scheme: GroupQuantization | None,
        device: torch.device,
    ):
        self.store, self.scheme, self.device = store, scheme, device
        self.where = {
            f"{prefix}.{index}.{stored.name}": (index, stored.name)
            for index, layout in enumerate(residency.layouts)
            for stored in layout.parameters
        }

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        if name not in self.where:
            parameter.data = parameter.data.to(self.device)
            return
        layer, own_name = self.where[name]
        self.store.put(layer, own_name, parameter.data, self.scheme)
        parameter.data = torch.empty(
            0, dtype=parameter.dtype, device=self.device
        )  # until the feeder points it at a slot


class LayerFeeder:
    """Points the parameters of each decoder layer at its bytes before it computes, and frees its slot behind it.

    A layer that is not quantized is used where it lies, in its slot or resident buffer. A quantized one is dequantized into a
    workspace that all layers share, and its slot is free as soon as that is done.
    """

    def __init__(
        self,
        model: nn.Module,
        residency: Residency,
        store: LayerStore,
        scheme: GroupQuantization | None,
        ranks: Ranks,
        group: Any,
    ):
        streams = DeviceStreams(ranks.device)
        self.store, self.scheme, self.layouts = store, scheme, residency.layouts
        self.transfers, self.timeline = Transfers(), Timeline(streams)
        self.workspace = torch.empty(residency.workspace_bytes, dtype=torch.uint8, device=ranks.device)
        self.ring = None
        if residency.streamed:
            self.ring = LayerRing(
                store, residency.streamed, residency.depth, ranks, streams, self.transfers, self.timeline, group
            )
        self.views: dict[tuple[int, int | None], list[tuple[nn.Parameter, torch.Tensor]]] = {}
        self.packed: dict[tuple[int, int | None], list[tuple[torch.Tensor, ...]]] = {}
        self.hooks = []
        _, layers = decoder_layers(model)
        for index, layer in enumerate(layers):
            self._find_views(index, layer)
            self.hooks += [
                layer.register_forward_pre_hook(self._before(index)),
                layer.register_forward_hook(self._after(index)),
            ]
        if self.ring is not None:
            self.ring.prime()
        self.compute = ComputeStream(model, streams, host_waits=self.ring is not None and ranks.world_size > 1)

    def close(self) -> None:
        """Let go of the layers; the model cannot run any more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.compute.close()
        if self.ring is not None:
            self.ring.close()
        self.views.clear()
        self.packed.clear()
        self.store.buffers.clear()

    def _find_views(self, index: int, layer: nn.Module) -> None:
        """For every place that this layer's bytes can lie in: each of its parameters and the tensor there."""
        layout, parameters = self.layouts[index], dict(layer.named_parameters())
        buffers: dict[int | None, torch.Tensor]  # by slot
        if index in self.store.resident:
            buffers = {None: self.store.buffers[index]}
        else:
            buffers = {slot: self.ring.buffer_in(index, slot) for slot in range(len(self.ring.slots))}
        for slot, buffer in buffers.items():
            self.packed[index, slot] = [
                (*(piece.of(buffer) for piece in stored.packed), stored.plain.of(self.workspace))
                for stored in layout.parameters
                if stored.packed is not None
            ]
        places = {None: self.workspace} if layout.workspace_bytes else buffers
        for slot, buffer in places.items():
            self.views[index, slot] = [
                (parameters[stored.name], stored.plain.of(buffer)) for stored in layout.parameters
            ]
        for parameter, values in self.views[index, next(iter(places))]:
            parameter.data = values

    def _before(self, index: int):
        layout, resident = self.layouts[index], index in self.store.resident

        def begin(module, args) -> None:
            if index == 0:
                self.timeline.forward_begins(len(self.ring.pending) if self.ring is not None else 0)
            slot = None if resident else self.ring.acquire(index)
            self.timeline.layer_begins(index)
            if layout.workspace_bytes:
                buffer = self.store.buffers[index] if resident else self.ring.buffer_in(index, slot)
                self.workspace[: layout.plain_bytes].copy_(buffer[: layout.plain_bytes])
                for codes, scales, minima, values in self.packed[index, slot]:
                    dequantize(codes, scales, minima, self.scheme.bits, self.scheme.group_size, values)
                if not resident:
                    self.ring.release()
            elif not resident:
                for parameter, values in self.views[index, slot]:
                    parameter.data = values

        return begin

    def _after(self, index: int):
        holds_slot = index not in self.store.resident and not self.layouts[index].workspace_bytes

        def end(module, args, output) -> None:
            self.timeline.layer_ends()
            if holds_slot:
                self.ring.release()

        return end


def _check_groups(model: nn.Module, scheme: GroupQuantization) -> None:
    """Raises UsageError where the group size does not divide the last dimension of a decoder layer's matrix."""
    prefix, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            wide = parameter.dim() > 1 and parameter.shape[-1] >= LEAST_COLUMNS
            if wide and scheme.is_for(parameter) and not scheme.can_quantize(parameter):
                raise group_size_refusal(scheme.group_size, f"{prefix}.{index}.{name}", tuple(parameter.shape))


def _quantized_share(model: nn.Module, residency: Residency) -> tuple[int, list[str], int]:
    """Elements that are quantized, names of matrices that are not, and all elements."""
    prefix, _ = decoder_layers(model)
    packed = {
        f"{prefix}.{index}.{stored.name}": stored.plain
        for index, layout in enumerate(residency.layouts)
        for stored in layout.parameters
        if stored.packed is not None
    }
    quantized = sum(p.numel() for name, p in model.named_parameters() if name in packed)
    skipped = [name for name, p in model.named_parameters() if name not in packed and p.dim() > 1]
    return quantized, skipped, sum(p.numel() for p in model.parameters())
