"""All weights on the devices: the reference for tokens and, if the model fits, for speed."""

from __future__ import annotations

import torch

from zero_inference.engines.base import EnginePlan, Footprint, Job, LoadedModel, LoadProgress
from zero_inference.engines.stream.blocks import refuse_several_devices
from zero_inference.engines.stream.devices import LayerDevices, device_by_name, move_buffers
from zero_inference.engines.stream.placement import assign_layers
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.models.empty_model import parameter_bytes
from zero_inference.models.layers import find_layers
from zero_inference.models.weights import load_weights


def plan(job: Job) -> EnginePlan:
    """Plan the whole model on each rank, with its share of the batch, or consecutive layers on each device of one process."""
    total = job.sizes.parameter_bytes
    if len(job.devices) == 1:
        return EnginePlan(job, Footprint(device=total), pinned=False, weight_bytes=total)
    refuse_several_devices(job)
    layer_bytes = _layer_bytes(job)
    by_device = [0] * len(job.devices)
    by_device[0] = total - sum(layer_bytes)
    for nbytes, device in zip(layer_bytes, _layer_devices(job, layer_bytes)):
        by_device[device] += nbytes
    return EnginePlan(job, Footprint(device=max(by_device)), pinned=False, weight_bytes=total)


def _layer_bytes(job: Job) -> list[int]:
    layers = find_layers(job.empty_model.model)[1]
    return [sum(p.numel() for p in layer.parameters()) * job.spec.dtype.itemsize for layer in layers]


def _layer_devices(job: Job, layer_bytes: list[int]) -> tuple[int, ...]:
    """Return the device of each layer, in proportion to the devices' free memory, of which embedding and head take some on the first."""
    outside_bytes = job.sizes.parameter_bytes - sum(layer_bytes)
    first, *others = job.free_by_device or (0,) * len(job.devices)
    return assign_layers(layer_bytes, [max(0, first - outside_bytes), *others])


def check(plan: EnginePlan) -> None:
    """Check nothing."""


def load(plan: EnginePlan, progress: LoadProgress = lambda done: None) -> LoadedModel:
    """Copy each weight to its device as it is read."""
    job, model = plan.job, plan.job.empty_model.model
    first = job.devices[0]
    prefix, layers = find_layers(model)
    layer_devices = _layer_devices(job, _layer_bytes(job)) if len(job.devices) > 1 else (0,) * len(layers)
    device_of = device_by_name(prefix, [job.devices[each] for each in layer_devices], first)

    def adopt(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(device_of(name))

    load_weights(model, job.spec, job.config.seed, first, adopt, progress)
    move_buffers(model, device_of)
    loaded = LoadedModel(model, first, job.spec.dtype, weight_bytes=parameter_bytes(model), devices=job.devices)
    if len(job.devices) > 1:
        loaded.close = LayerDevices(model, layers, layer_devices, list(map(DeviceStreams, job.devices))).close
    return loaded
