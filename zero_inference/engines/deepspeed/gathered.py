"""What ZeRO-3 holds on the device while each module of a pass computes: the rules of its coordinator's `fetch_sub_module`, without weights.

A module's parameters are fetched, then those of the next modules up to the prefetch bucket, as long as fewer elements than
`stage3_max_live_parameters` are there. That is asked before a parameter is taken, so the limit is passed by up to one: by a whole head,
where that is next. Behind the module its own are let go. Only the order matters: what was let go no longer counts as allocated, though
a stream may still use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import Job
from zero_inference.engines.deepspeed.config import Places
from zero_inference.engines.deepspeed.quantization import QuantizationPlan, stored_numel
from zero_inference.models.layers import decoder_layers


@dataclass(frozen=True)
class Moment:
    """While a module computes.

    Attributes:
        layers: decoder layers that have begun, this one included.
        nbytes: of gathered weights, its own and those fetched ahead, and of one of its own that is dequantized.
    """

    layers: int
    nbytes: int


@dataclass(frozen=True)
class Step:
    """A module that DeepSpeed's hooks see. Small parameters, which stay, are not in `parameters`."""

    is_layer: bool
    parameters: list[torch.Tensor]
    restored: int


def moments_of(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], places: Places
) -> tuple[Moment, ...]:
    """Those of a pass, in the order in which modules were registered, as models call them.

    A single rank without a GPU gathers nothing, because ZeRO-3 points a parameter at its partition, or at the buffer that it was read into;
    nor does one whose weights stay on its GPU.
    """
    model = job.empty_model.model
    numel = {id(p): stored_numel(quantization, name, p) for name, p in model.named_parameters()}
    steps = steps_of(job, quantization, lambda p: numel[id(p)] > places.persistent_numel)
    kept = 0 if job.on_gpu else max(step.restored for step in steps)  # see `QuantizedFunctionals`
    alone = places.world_size == 1
    if alone and (places.offload == "none" or not job.on_gpu):
        held = [0] * len(steps)
    else:
        small = _small_bytes(model, places, numel)
        held = [small + nbytes for nbytes in fetched_bytes(steps, ds_config["zero_optimization"], numel)]
    found, layers = [], 0
    for step, nbytes in zip(steps, held):
        layers += step.is_layer
        found.append(Moment(layers, nbytes + (kept or step.restored)))
    return tuple(found)


def steps_of(job: Job, quantization: QuantizationPlan | None, large: Callable[[torch.Tensor], bool]) -> list[Step]:
    model = job.empty_model.model
    layers = {id(layer) for layer in decoder_layers(model)[1]}
    hidden = {id(part) for layer in decoder_layers(model)[1] for part in layer.modules()} - layers
    names = {id(p): name for name, p in model.named_parameters()}
    chosen = quantization.names if quantization else set()

    def restored(modules: list[nn.Module]) -> int:
        """Of the largest of their weights that is dequantized whole; an embedding's rows alone are."""
        weights = [module.weight for module in modules if type(module) is nn.Linear]
        return max((_restored_bytes(job, p) for p in weights if names[id(p)] in chosen), default=0)

    steps = []
    for module in model.modules():
        if id(module) not in hidden:
            is_layer = id(module) in layers
            parameters = [p for p in module.parameters(recurse=is_layer) if large(p)]
            steps.append(Step(is_layer, parameters, restored(list(module.modules()) if is_layer else [module])))
    return steps


def _restored_bytes(job: Job, weight: torch.Tensor) -> int:
    """Of a weight while it is dequantized: DeepSpeed's kernel for float16 writes nothing else; its Python code unpacks 4 bits to bytes
    first, on a CPU of a few rows."""
    unpacked = job.config.quant_bits == 4 and job.on_gpu and job.spec.dtype != torch.float16
    return weight.numel() * (weight.element_size() + (1 if unpacked else 0))


def _small_bytes(model: nn.Module, places: Places, numel: dict[int, int]) -> int:
    """Of parameters that stay once they were gathered, beside their partitions: a single rank's on the device is the parameter itself."""
    inside = {id(p) for layer in decoder_layers(model)[1] for p in layer.parameters()}
    small = [p for p in model.parameters() if numel[id(p)] <= places.persistent_numel]
    return sum(
        numel[id(p)] * p.element_size()
        for p in small
        if places.world_size > 1 or places.place(p, numel[id(p)], id(p) in inside) != "device"
    )


def fetched_bytes(steps: list[Step], zero: dict[str, Any], numel: dict[int, int]) -> list[int]:
    """Bytes that are there while each of `steps` computes."""
    queue = deque((place, p) for place, step in enumerate(steps) for p in step.parameters)
    there: dict[int, int] = {}  # bytes, by parameter
    last_use: dict[int, int] = {}  # of those that were fetched ahead, or would have been
    live, found = 0, []
    for place, step in enumerate(steps):
        for p in step.parameters:
            if id(p) not in there:
                there[id(p)] = numel[id(p)] * p.element_size()
                live += numel[id(p)]
        while queue and queue[0][0] <= place:
            queue.popleft()
        room, ahead = min(zero["stage3_max_live_parameters"] - live, zero["stage3_prefetch_bucket_size"]), 0
        while queue and ahead < room:
            used_at, p = queue.popleft()
            last_use[id(p)] = used_at
            if id(p) not in there:
                there[id(p)] = numel[id(p)] * p.element_size()
                ahead += numel[id(p)]
        live += ahead
        found.append(sum(there.values()))
        for p in step.parameters:
            if last_use.get(id(p), place) <= place and there.pop(id(p), None) is not None:
                live -= numel[id(p)]
    return found
