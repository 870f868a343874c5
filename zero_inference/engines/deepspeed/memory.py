"""What weights take where under ZeRO-3: as they wait, what is gathered of them, and while they are loaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from zero_inference.engines.base import Footprint, Job
from zero_inference.engines.deepspeed.config import Places
from zero_inference.engines.deepspeed.gathered import Moment, moments_of
from zero_inference.engines.deepspeed.quantization import QuantizationPlan, stored_numel
from zero_inference.models.layers import decoder_layers


def places_of_weights(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], pinned: bool
) -> tuple[dict[str, int], dict[str, int], int, tuple[Moment, ...], Footprint]:
    """What `_bytes_by_place` finds of stored weights, and of those that a step brings; how many these are, what is gathered of them while
    a pass runs, and what weights take where."""
    stored = _bytes_by_place(job, quantization, ds_config)
    brought = _bytes_by_place(job, quantization, ds_config, as_often_as_used=True)
    parameters = _brought_parameters(job, quantization, ds_config)
    moments = moments_of(job, quantization, ds_config, Places.of(ds_config, job.spec.dtype, job.ranks.world_size))
    gathered = max(moment.nbytes for moment in moments)
    return stored, brought, parameters, moments, _footprint(job, quantization, ds_config, pinned, stored, gathered)


def _bytes_by_place(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], as_often_as_used: bool = False
) -> dict[str, int]:
    """Stored bytes of all ranks' weights on the device, in host memory and on disk.

    Args:
        as_often_as_used: a weight that two modules share, such as embedding and head, counts twice: each brings it.
    """
    model, places = job.empty_model.model, Places.of(ds_config, job.spec.dtype, job.ranks.world_size)
    _, layers = decoder_layers(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    found = dict.fromkeys(("device", "host", "disk"), 0)
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=not as_often_as_used))
    for name, p in model.named_parameters():
        numel = stored_numel(quantization, name, p)
        found[places.place(p, numel, id(p) in inside)] += numel * p.element_size() * uses[id(p)]
    return found


def _brought_parameters(job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any]) -> int:
    """How many a step brings together for the modules that use them, those that two modules share twice: from where they are offloaded to,
    or, where they stay on the device, all that ZeRO-3 does not keep whole."""
    model, places = job.empty_model.model, Places.of(ds_config, job.spec.dtype, job.ranks.world_size)
    inside = {id(p) for layer in decoder_layers(model)[1] for p in layer.parameters()}
    named = model.named_parameters(remove_duplicate=False)

    def brought(name: str, parameter: torch.Tensor) -> bool:
        numel = stored_numel(quantization, name, parameter)
        if places.offload == "none":
            return numel > places.persistent_numel
        return places.place(parameter, numel, id(parameter) in inside) != "device"

    return sum(brought(name, parameter) for name, parameter in named)


def _footprint(
    job: Job,
    quantization: QuantizationPlan | None,
    ds_config: dict[str, Any],
    pinned: bool,
    stored: dict[str, int],
    gathered: int,
) -> Footprint:
    """What is gathered on the device and the partition of this rank where it waits, as the resolved configuration says.

    Args:
        stored: what `_bytes_by_place` found.
        gathered: most bytes that a rank holds for a moment of weights that wait elsewhere, or are quantized.
    """
    ranks = job.ranks.world_size
    places = Places.of(ds_config, job.spec.dtype, ranks)
    share = {place: nbytes // ranks for place, nbytes in stored.items()}
    buffers = 0
    if job.config.disk_offload:
        offload = ds_config["zero_optimization"]["offload_param"]
        buffers = offload["buffer_size"] * offload["buffer_count"] * job.spec.dtype.itemsize
    persistent = share["device"] if places.offload != "none" else 0  # DeepSpeed may keep fewer of the small ones there
    return Footprint(
        device=share["device"] + gathered,
        gathered=gathered + persistent,
        host=share["host"] + buffers,
        pinned=buffers + (share["host"] if pinned else 0),
        disk=share["disk"],
        loading=0 if job.on_gpu else _loading_bytes(job, quantization, places, buffers),
    )


def _loading_bytes(job: Job, quantization: QuantizationPlan | None, places: Places, buffers: int) -> int:
    """Most host memory of a rank without a GPU while it takes parameters over: those that it has, one as it came and as it is
    stored, and of a checkpoint the rest of its layer.

    Args:
        buffers: bytes that are there from the start.
    """
    model, ranks = job.empty_model.model, job.ranks.world_size
    _, layers = decoder_layers(model)
    layer_of = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
    waiting: Counter[int | None] = Counter()
    if not job.config.dummy:
        for p in model.parameters():
            waiting[layer_of.get(id(p))] += p.numel() * p.element_size()
    taken = most = buffers
    for name, p in model.named_parameters():
        numel, layer = stored_numel(quantization, name, p), layer_of.get(id(p))
        whole, kept = p.numel() * p.element_size(), -(-numel // ranks) * p.element_size()
        if places.place(p, numel, layer is not None) == "disk":
            kept = 0  # one of the buffers takes it
        beside = kept
        if quantization and name in quantization.names:
            # codes, and what is made of them: of 4 bits two more tensors while they change places, then all as one
            codes = p.numel() * job.config.quant_bits // 8
            beside = codes + max(kept, 2 * codes if job.config.quant_bits == 4 else 0)
        waiting[layer] -= whole if waiting[layer] else 0
        most = max(most, taken + waiting[layer] + whole + beside)
        taken += kept
    return most
