"""Memory of weights under ZeRO-3: where partitions are stored, what is gathered on the device in a pass, and the peak while loading.

All follows from the model's shapes and the resolved configuration; no weights are needed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_inference.engines.base import Footprint, Job
from zero_inference.engines.deepspeed.config import swappable
from zero_inference.engines.deepspeed.quantization import QuantizationPlan, stored_numel
from zero_inference.models.layers import decoder_layers


@dataclass(frozen=True)
class PartitionRules:
    """Where ZeRO-3 stores the partition of a parameter between uses.

    Attributes:
        persistent_numel: parameters of up to so many elements stay on the device, unless their partitions are written to NVMe.
    """

    offload: str  # device that the resolved configuration offloads parameters to: "none", "cpu" or "nvme"
    persistent_numel: int
    min_disk_bytes: int  # smaller partitions are never written to NVMe
    dtype: torch.dtype  # the model's
    world_size: int

    @classmethod
    def of(cls, ds_config: dict[str, Any], job: Job) -> PartitionRules:
        """Return the rules of a resolved configuration."""
        from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES

        zero = ds_config["zero_optimization"]
        offload = zero.get("offload_param", {}).get("device", "none")
        min_bytes = max(MIN_AIO_BYTES, ds_config["aio"]["block_size"]) if offload == "nvme" else 0
        persistent_numel = zero["stage3_param_persistence_threshold"]
        return cls(offload, persistent_numel, min_bytes, job.spec.dtype, job.ranks.world_size)

    def location(self, parameter: torch.Tensor, numel: int, in_layer: bool) -> str:
        """Return "device", "host" or "disk".

        NVMe buffers hold one parameter each and are all as large as the largest. Parameters outside layers, such as an embedding, would
        multiply their size, so they stay in host memory.

        Args:
            numel: elements as stored.
            in_layer: the parameter belongs to a decoder layer.
        """
        if self.offload == "nvme":
            if not swappable(parameter, self.dtype):
                return "host"
            if -(-numel // self.world_size) * parameter.element_size() >= self.min_disk_bytes:
                return "disk" if in_layer else "host"
        if numel <= self.persistent_numel or self.offload == "none":
            return "device"
        return "host"


class StoredWeight(NamedTuple):
    """A parameter as ZeRO-3 stores it."""

    parameter: nn.Parameter
    numel: int  # elements as stored, over all ranks
    quantized: bool
    location: str  # of its partitions, from `PartitionRules.location`
    layer: int | None  # index of its decoder layer, or None
    uses: int  # modules that share it, such as embedding and head

    @property
    def nbytes(self) -> int:
        return self.numel * self.parameter.element_size()


class ModulePeak(NamedTuple):
    """Device memory while one module of a pass computes: gathered and prefetched weights, and one that is dequantized."""

    layers: int  # decoder layers that have begun
    nbytes: int


@dataclass(frozen=True)
class WeightMemory:
    """
    Attributes:
        fetched_parameters: parameters that a step gathers, counted once for each use: offloaded ones, or without offload those that are
            sharded.
    """

    stored_bytes: int  # all ranks' weights
    fetched_bytes: dict[str, int]  # by location, counted once for each module that uses a weight
    fetched_parameters: int
    peaks: tuple[ModulePeak, ...]  # for each module of a pass, in order
    footprint: Footprint


def measure_weights(
    job: Job, quantization: QuantizationPlan | None, ds_config: dict[str, Any], pinned: bool
) -> WeightMemory:
    """Return the memory that the weights of `job` take with the resolved `ds_config`."""
    rules = PartitionRules.of(ds_config, job)
    weights = stored_weights(job, quantization, rules)
    stored, fetched = (dict.fromkeys(("device", "host", "disk"), 0) for _ in range(2))
    fetched_parameters = 0
    for weight in weights:
        stored[weight.location] += weight.nbytes
        fetched[weight.location] += weight.nbytes * weight.uses
        sharded = weight.numel > rules.persistent_numel if rules.offload == "none" else weight.location != "device"
        fetched_parameters += sharded * weight.uses
    peaks = module_peaks(job, ds_config, rules, weights)

    gathered = max(peak.nbytes for peak in peaks)
    share = {location: nbytes // rules.world_size for location, nbytes in stored.items()}
    persistent = share["device"] if rules.offload != "none" else 0  # an upper bound: DeepSpeed may keep fewer
    buffers = 0
    if job.config.disk_offload:
        offload = ds_config["zero_optimization"]["offload_param"]
        buffers = offload["buffer_size"] * offload["buffer_count"] * job.spec.dtype.itemsize
    footprint = Footprint(
        device=share["device"] + gathered,
        gathered=gathered + persistent,
        host=share["host"] + buffers,
        pinned=buffers + (share["host"] if pinned else 0),
        disk=share["disk"],
        loading=0 if job.on_gpu else _loading_bytes(job, weights, buffers),
    )
    return WeightMemory(sum(stored.values()), fetched, fetched_parameters, peaks, footprint)


def stored_weights(job: Job, quantization: QuantizationPlan | None, rules: PartitionRules) -> list[StoredWeight]:
    """Return the model's parameters in the order in which they are loaded."""
    model = job.empty_model.model
    layer_of = {id(p): index for index, layer in enumerate(decoder_layers(model)[1]) for p in layer.parameters()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = []
    for name, p in model.named_parameters():
        numel, layer = stored_numel(quantization, name, p), layer_of.get(id(p))
        quantized = quantization is not None and name in quantization.names
        found.append(StoredWeight(p, numel, quantized, rules.location(p, numel, layer is not None), layer, uses[id(p)]))
    return found


def _loading_bytes(job: Job, weights: list[StoredWeight], buffers: int) -> int:
    """Return the peak host memory of a rank without a GPU while `weights` are partitioned one by one.

    It holds `buffers`, the partitions so far, one parameter as read and as stored, and of a checkpoint the rest of its layer.
    """
    unpartitioned: Counter[int | None] = Counter()
    if not job.config.dummy:
        for weight in weights:
            unpartitioned[weight.layer] += weight.parameter.nbytes
    partitioned = peak = buffers
    for weight in weights:
        whole = weight.parameter.nbytes
        share = -(-weight.numel // job.ranks.world_size) * weight.parameter.element_size()
        if weight.location == "disk":
            share = 0  # it is in one of the buffers
        as_stored = share
        if weight.quantized:
            # codes, plus two more tensors while nibbles of 4 bits are swapped, then plus all in one tensor
            codes = weight.parameter.numel() * job.config.quant_bits // 8
            as_stored = codes + max(share, 2 * codes if job.config.quant_bits == 4 else 0)
        unpartitioned[weight.layer] -= whole if unpartitioned[weight.layer] else 0
        peak = max(peak, partitioned + unpartitioned[weight.layer] + whole + as_stored)
        partitioned += share
    return peak


def module_peaks(
    job: Job, ds_config: dict[str, Any], rules: PartitionRules, weights: list[StoredWeight]
) -> tuple[ModulePeak, ...]:
    """Return the peaks of a pass over the modules that DeepSpeed's hooks gather parameters for, in the order in which they were
    registered, as models call them.

    A single rank without a GPU gathers nothing, because ZeRO-3 points a parameter at its partition or at the buffer that it was read into;
    nor does a single rank whose weights stay on its GPU.
    """
    model = job.empty_model.model
    by_id = {id(weight.parameter): weight for weight in weights}
    layers = list(decoder_layers(model)[1])
    inside_layers = {part for layer in layers for part in layer.modules()} - set(layers)
    # DeepSpeed's float16 kernel writes only the result; its Python code first unpacks 4 bits to bytes (on a CPU only of a few rows)
    unpacked = job.config.quant_bits == 4 and job.on_gpu and job.spec.dtype != torch.float16
    is_layer, fetched, dequantized_bytes = [], [], []
    for module in model.modules():
        if module in inside_layers:
            continue
        is_layer.append(module in layers)
        own = [by_id[id(p)] for p in module.parameters(recurse=is_layer[-1])]
        fetched.append([weight for weight in own if weight.numel > rules.persistent_numel])
        # an embedding dequantizes only the rows that it reads
        linears = [each.weight for each in (module.modules() if is_layer[-1] else (module,)) if type(each) is nn.Linear]
        sizes = [p.numel() * (p.element_size() + unpacked) for p in linears if by_id[id(p)].quantized]
        dequantized_bytes.append(max(sizes, default=0))
    if not job.on_gpu:  # a CPU keeps one buffer for dequantized weights, see `patch_functionals`
        dequantized_bytes = [max(dequantized_bytes)] * len(fetched)
    gathered_bytes = simulate_fetches(fetched, ds_config["zero_optimization"])
    if rules.world_size == 1 and (rules.offload == "none" or not job.on_gpu):
        gathered_bytes = [0] * len(fetched)
    else:
        persistent = sum(
            weight.nbytes  # beside the partition, except for a single rank's on the device
            for weight in weights
            if weight.numel <= rules.persistent_numel and (rules.world_size > 1 or weight.location != "device")
        )
        gathered_bytes = [persistent + nbytes for nbytes in gathered_bytes]
    peak_bytes = map(sum, zip(gathered_bytes, dequantized_bytes))
    return tuple(map(ModulePeak, accumulate(map(int, is_layer)), peak_bytes))


def simulate_fetches(modules: list[list[StoredWeight]], zero: dict[str, Any]) -> list[int]:
    """Return the gathered bytes while each module computes, by the rules of `fetch_sub_module` of ZeRO-3's coordinator.

    A module's parameters are gathered, then those of the next modules up to the prefetch bucket while fewer than
    `stage3_max_live_parameters` elements are live. The limit is tested before a parameter is taken, so it is exceeded by up to one: by a
    whole output head. After the module its own parameters are released, even if a stream still uses them.

    Args:
        modules: the parameters of each module in turn, without persistent ones.
    """
    queue = deque((index, weight) for index, module in enumerate(modules) for weight in module)
    live_bytes: dict[int, int] = {}  # by id of the parameter
    last_use: dict[int, int] = {}  # index of the last module that a parameter was prefetched for
    live_numel, found = 0, []

    def gather(weight: StoredWeight) -> int:
        """Return the elements that become live."""
        if id(weight.parameter) in live_bytes:
            return 0
        live_bytes[id(weight.parameter)] = weight.nbytes
        return weight.numel

    for index, module in enumerate(modules):
        live_numel += sum(gather(weight) for weight in module)
        while queue and queue[0][0] <= index:
            queue.popleft()
        limit = min(zero["stage3_max_live_parameters"] - live_numel, zero["stage3_prefetch_bucket_size"])
        prefetched = 0
        while queue and prefetched < limit:
            used_at, weight = queue.popleft()
            last_use[id(weight.parameter)] = used_at
            prefetched += gather(weight)
        live_numel += prefetched
        found.append(sum(live_bytes.values()))
        for weight in module:
            key = id(weight.parameter)
            if last_use.get(key, index) <= index and live_bytes.pop(key, None) is not None:
                live_numel -= weight.numel
    return found
