"""What weights take where under ZeRO-3: as they wait, what is gathered of them, and while they are loaded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import Footprint, Job
from zero_inference.engines.deepspeed.config import swappable
from zero_inference.engines.deepspeed.quantization import QuantizationPlan, stored_numel
from zero_inference.models.layers import decoder_layers


@dataclass(frozen=True)
class ModulePeak:
    """While a module computes.

    Attributes:
        layers: decoder layers that have begun, this one included.
        nbytes: of gathered weights, its own and those fetched ahead, and of one of its own that is dequantized.
    """

    layers: int
    nbytes: int


@dataclass(frozen=True)
class PassModule:
    """A module that DeepSpeed's hooks see. Small parameters, which stay, are not in `parameters`."""

    is_layer: bool
    parameters: list[torch.Tensor]
    restored: int


def module_peaks(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], places: PartitionRules
) -> tuple[ModulePeak, ...]:
    """Those of a pass, in the order in which modules were registered, as models call them.

    A single rank without a GPU gathers nothing, because ZeRO-3 points a parameter at its partition, or at the buffer that it was read into;
    nor does one whose weights stay on its GPU.
    """
    model = job.empty_model.model
    numel = {id(p): stored_numel(quantization, name, p) for name, p in model.named_parameters()}
    steps = pass_modules(job, quantization, lambda p: numel[id(p)] > places.persistent_numel)
    kept = 0 if job.on_gpu else max(step.restored for step in steps)  # see `QuantizedFunctionals`
    alone = places.world_size == 1
    if alone and (places.offload == "none" or not job.on_gpu):
        held = [0] * len(steps)
    else:
        small = _small_bytes(model, places, numel)
        held = [small + nbytes for nbytes in simulate_fetches(steps, ds_config["zero_optimization"], numel)]
    found, layers = [], 0
    for step, nbytes in zip(steps, held):
        layers += step.is_layer
        found.append(ModulePeak(layers, nbytes + (kept or step.restored)))
    return tuple(found)


def pass_modules(
    job: Job, quantization: QuantizationPlan | None, large: Callable[[torch.Tensor], bool]
) -> list[PassModule]:
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
            steps.append(PassModule(is_layer, parameters, restored(list(module.modules()) if is_layer else [module])))
    return steps


def _restored_bytes(job: Job, weight: torch.Tensor) -> int:
    """Of a weight while it is dequantized: DeepSpeed's kernel for float16 writes nothing else; its Python code unpacks 4 bits to bytes
    first, on a CPU of a few rows."""
    unpacked = job.config.quant_bits == 4 and job.on_gpu and job.spec.dtype != torch.float16
    return weight.numel() * (weight.element_size() + (1 if unpacked else 0))


def _small_bytes(model: nn.Module, places: PartitionRules, numel: dict[int, int]) -> int:
    """Of parameters that stay once they were gathered, beside their partitions: a single rank's on the device is the parameter itself."""
    inside = {id(p) for layer in decoder_layers(model)[1] for p in layer.parameters()}
    small = [p for p in model.parameters() if numel[id(p)] <= places.persistent_numel]
    return sum(
        numel[id(p)] * p.element_size()
        for p in small
        if places.world_size > 1 or places.place(p, numel[id(p)], id(p) in inside) != "device"
    )


def simulate_fetches(steps: list[PassModule], zero: dict[str, Any], numel: dict[int, int]) -> list[int]:
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


def places_of_weights(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], pinned: bool
) -> tuple[dict[str, int], dict[str, int], int, tuple[ModulePeak, ...], Footprint]:
    """What `_bytes_by_place` finds of stored weights, and of those that a step brings; how many these are, what is gathered of them while
    a pass runs, and what weights take where."""
    stored = _bytes_by_place(job, quantization, ds_config)
    brought = _bytes_by_place(job, quantization, ds_config, as_often_as_used=True)
    parameters = _brought_parameters(job, quantization, ds_config)
    moments = module_peaks(
        job, quantization, ds_config, PartitionRules.of(ds_config, job.spec.dtype, job.ranks.world_size)
    )
    gathered = max(moment.nbytes for moment in moments)
    return stored, brought, parameters, moments, _footprint(job, quantization, ds_config, pinned, stored, gathered)


def _bytes_by_place(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], as_often_as_used: bool = False
) -> dict[str, int]:
    """Stored bytes of all ranks' weights on the device, in host memory and on disk.

    Args:
        as_often_as_used: a weight that two modules share, such as embedding and head, counts twice: each brings it.
    """
    model, places = job.empty_model.model, PartitionRules.of(ds_config, job.spec.dtype, job.ranks.world_size)
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
    model, places = job.empty_model.model, PartitionRules.of(ds_config, job.spec.dtype, job.ranks.world_size)
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
    places = PartitionRules.of(ds_config, job.spec.dtype, ranks)
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


def _loading_bytes(job: Job, quantization: QuantizationPlan | None, places: PartitionRules, buffers: int) -> int:
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


@dataclass(frozen=True)
class PartitionRules:
    """Where ZeRO-3 keeps the partition of a parameter between uses.

    Attributes:
        offload: what the resolved configuration offloads parameters to: "none", "cpu" or "nvme".
        persistent_numel: parameters of up to so many elements stay on the device, unless their partitions are written to NVMe.
        least_disk_bytes: a smaller partition is never written to NVMe.
        dtype: the model's.
    """

    offload: str
    persistent_numel: int
    least_disk_bytes: int
    dtype: torch.dtype
    world_size: int

    @classmethod
    def of(cls, ds_config: dict[str, Any], dtype: torch.dtype, world_size: int) -> PartitionRules:
        """Those of the resolved configuration."""
        from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES

        zero = ds_config["zero_optimization"]
        offload = zero.get("offload_param", {}).get("device", "none")
        least = max(MIN_AIO_BYTES, ds_config["aio"]["block_size"]) if offload == "nvme" else 0
        return cls(offload, zero["stage3_param_persistence_threshold"], least, dtype, world_size)

    def place(self, parameter: torch.Tensor, numel: int, in_layer: bool) -> str:
        """One of "device", "host" and "disk".

        An NVMe buffer holds one parameter and all are as large as the largest: what is outside the layers, as an embedding, would
        multiply them, and waits in host memory.

        Args:
            numel: elements as stored.
            in_layer: whether it belongs to a decoder layer.
        """
        if self.offload == "nvme":
            if not swappable(parameter, self.dtype):
                return "host"
            if -(-numel // self.world_size) * parameter.element_size() >= self.least_disk_bytes:
                return "disk" if in_layer else "host"
        if numel <= self.persistent_numel or self.offload == "none":
            return "device"
        return "host"
