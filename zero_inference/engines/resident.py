"""All weights on the devices: the reference for tokens and, if the model fits, for speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zero_inference.engines.base import (
    MATMUL_WORKSPACE_BYTES,
    CacheShare,
    EnginePlan,
    Footprint,
    Job,
    LoadedModel,
    LoadProgress,
)
from zero_inference.engines.stream.blocks import refuse_several_devices
from zero_inference.engines.stream.devices import (
    LayerDevices,
    cache_has_rows,
    device_by_name,
    move_buffers,
    prefill_micro_batches,
    should_alternate,
)
from zero_inference.engines.stream.placement import assign_layers
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.models.empty_model import parameter_bytes
from zero_inference.models.layers import find_layers
from zero_inference.models.weights import load_weights


@dataclass(frozen=True)
class ResidentPlan(EnginePlan):
    by_device: Sequence[int] = field(default=(), kw_only=True)  # bytes of weights
    placed_layers: Sequence[int] = field(default=(), kw_only=True)  # `layer_devices`

    @property
    def layer_devices(self) -> Sequence[int]:
        return self.placed_layers

    @property
    def prefill_micro_batches(self) -> int:
        return prefill_micro_batches(self.job, self.layer_devices)

    def weight_bytes_on(self, device: int) -> int:
        return self.by_device[device]


def plan(job: Job) -> ResidentPlan:
    """Plan the whole model on each rank, with its share of the batch, or some layers on each device of one process.

    Raises UsageError: a model that needs one device has several.
    """
    refuse_several_devices(job)
    total, layers = job.sizes.parameter_bytes, find_layers(job.empty_model.model)[1]
    layer_devices: tuple[int, ...] = (0,) * len(layers)
    by_device = [total]
    if len(job.devices) > 1:
        sizes = [sum(p.numel() for p in layer.parameters()) * job.spec.dtype.itemsize for layer in layers]
        first, *others = job.free_by_device or (0,) * len(job.devices)
        taken = job.activation_bytes + MATMUL_WORKSPACE_BYTES
        capacities = [max(0, free - taken) for free in (first - total + sum(sizes), *others)]
        cache = job.cache_bytes_on(CacheShare()) // len(layers)
        layer_devices = assign_layers([size + cache for size in sizes], capacities, alternate=should_alternate(job))
        by_device = [0] * len(job.devices)
        by_device[0] = total - sum(sizes)  # embedding and head
        for nbytes, device in zip(sizes, layer_devices):
            by_device[device] += nbytes
    return ResidentPlan(
        job,
        Footprint(device=max(by_device)),
        pinned=False,
        weight_bytes=total,
        by_device=by_device,
        placed_layers=layer_devices,
        preallocated_cache=len(job.devices) > 1 and cache_has_rows(job),
    )


def check(plan: ResidentPlan) -> None:
    """Check nothing."""


def load(plan: ResidentPlan, progress: LoadProgress = lambda done: None) -> LoadedModel:
    """Copy each weight to its device as it is read."""
    job, model, devices = plan.job, plan.job.empty_model.model, plan.job.devices
    prefix, _ = find_layers(model)
    device_of = device_by_name(prefix, [devices[each] for each in plan.layer_devices], devices[0])

    def adopt(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(device_of(name))

    load_weights(model, job.spec, job.config.seed, devices[0], adopt, progress)
    move_buffers(model, device_of)
    loaded = LoadedModel(model, devices[0], job.spec.dtype, weight_bytes=parameter_bytes(model), devices=devices)
    if len(devices) > 1:
        streams = list(map(DeviceStreams, devices))
        layer_devices = LayerDevices(model, plan.layer_devices, streams, job.layer_parameters)
        layer_devices.divide_passes()
        loaded.close, loaded.modules_changed = layer_devices.close, lambda modules: layer_devices.stop_dividing()
        loaded.preallocated_cache = plan.preallocated_cache
    return loaded
