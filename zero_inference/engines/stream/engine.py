"""The stream engine: weights in page-locked host memory are streamed through a ring buffer of device slots, or computed by the CPU.

The path of a weight from a checkpoint to a product:

1. `plan` (plan.py) decides with `placement.plan_placement` which blocks are resident, streamed or CPU-computed, and how many ring slots
   there are (`placement.default_ring_depth`). blocks.py divides layers into blocks, layout.py lays each out as one buffer.
2. `load` reads the shards parameter by parameter. `_WeightLoader` quantizes each and writes it into its block's buffer (layout.BlockStore),
   in host memory or on the device; vocabulary.py has the input embedding and the output head.
3. `Prefetcher` (prefetch.py) hooks the blocks of transformers' own model. In each pass the ring buffer (ring.py) copies streamed blocks
   into slots ahead of use; before a block computes, its parameters are pointed at its slot, or dequantized into a workspace, or products.py
   multiplies the codes. A CPU-computed block becomes a task of the CPU backend instead (cpu.py, expert_cache.py), which multiplies the
   bytes of its buffer in host memory: `cpu.products.Matrix` points at a weight there, `CpuPool.add_block` (cpu/pool.py) adds the task,
   or `cpu.experts.add_experts` that of a mixture, pool threads run it (csrc/cpu/block.cpp, experts.cpp), and product.cpp multiplies,
   with the kernels of an instruction set (amx.cpp, for one).
   Blocks on NVMe have no buffer: disk_plan.py decides which these are, disk.py reads them into slots of host memory ahead of the ring
   buffer's copies, and `expert_cache.HostExperts` single experts that tokens choose.
4. After the first decode steps `Rebalancer` (rebalance.py) moves blocks between link and CPU, and `StepGraph` (cuda_graph.py) captures a
   step as CUDA graphs and replays it. streams.py keeps the times of copies and blocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import Job, LoadedModel, LoadProgress
from zero_inference.engines.offload_folder import check_offload_folder
from zero_inference.engines.stream.cpu import CpuBackend
from zero_inference.engines.stream.cuda_graph import StepGraph, replayed_tokens
from zero_inference.engines.stream.devices import device_by_name, move_buffers
from zero_inference.engines.stream.disk import DiskBlocks
from zero_inference.engines.stream.disk_plan import converted_file
from zero_inference.engines.stream.layout import BlockStore
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.plan import StreamPlan, plan, shared_blocks
from zero_inference.engines.stream.prefetch import Prefetcher
from zero_inference.engines.stream.vocabulary import HostEmbedding, QuantizedHead
from zero_inference.kernels.formats import QuantizedWeight
from zero_inference.kv_cache.attention_patch import patch_attention
from zero_inference.kv_cache.device import PreallocatedCache
from zero_inference.models.layers import decoder_layers
from zero_inference.models.weights import Keep, load_weights
from zero_inference.records.schema import DecodeGraph
from zero_inference.utils.direct_io import DirectIO
from zero_inference.utils.host_memory import host_copy
from zero_inference.utils.patching import Patches
from zero_inference.utils.timing import Transfers

TOO_FEW_STEPS = "too few steps to capture and verify a graph"

__all__ = ["check", "load", "plan"]  # the engine protocol of engines/base.py


def check(plan: StreamPlan) -> None:
    """Raise UsageError if the offload folder cannot be used or has too little space."""
    if plan.footprint.disk and not plan.job.config.dry_run:  # a dry run prints the space instead
        check_offload_folder(plan.job.config.offload_path, plan.footprint.disk)


def load(
    plan: StreamPlan, progress: LoadProgress = lambda done: None, target: LoadedModel | None = None
) -> LoadedModel:
    """Load the model; `target`: that of `plan.job.target`, whose weights it shares."""
    job, placement = plan.job, plan.placement
    model, first = job.empty_model.model, job.devices[0]
    layouts = [block.layout for block in placement.blocks]
    devices = [job.devices[placement.device_of(index)] for index in range(len(layouts))]
    shared = None if target is None else target.weights
    same = shared_blocks(job, placement.blocks)
    buffers = {} if shared is None else {own: shared.store.buffers[theirs] for own, theirs in same.items()}
    prefix, layers = decoder_layers(model)
    with contextlib.ExitStack() as closing:  # runs in reverse order, when the model is unloaded or a line below fails
        disk = None
        if placement.on_disk:
            sizes = {block: layouts[block].nbytes for block in sorted(placement.on_disk - plan.in_place.keys())}
            disk = DiskBlocks(job.config.offload_path, plan.in_place, sizes, _direct_io(job))
            closing.callback(disk.close)
        store = BlockStore(layouts, devices, placement.resident, plan.pinned, buffers, disk)
        weights = _WeightLoader(plan, store, shared)
        closing.callback(weights.close)
        keep = Keep(plan.kept, weights.adopt_stored)
        in_place = [name for name, (block, _) in plan.stored.items() if block in plan.in_place]
        load_weights(model, job.spec, job.config.seed, first, weights.adopt, progress, keep, in_place)
        if disk is not None:
            disk.finish()
        # more than was planned where a checkpoint unties what config.json ties
        outside = (p.nbytes for name, p in model.named_parameters() if name not in plan.stored)
        if shared is None:
            placement.outside_bytes = sum(outside) + plan.cost_terms.head_stored_bytes
        move_buffers(model, weights.device_of)
        if job.on_gpu:
            torch.cuda.empty_cache()  # else ring and workspace are carved out of what quantizing took, and the rest stays unusable
        transfers = Transfers()
        cpu = None if plan.cpu is None else CpuBackend(plan.cpu, job, placement, store, transfers)
        with contextlib.ExitStack() as closing_cpu:
            if cpu is not None:
                closing_cpu.callback(cpu.close)
            prefetcher = Prefetcher(model, placement, store, job.devices, transfers, cpu, job.layer_parameters)
            closing.callback(prefetcher.close)
            closing.enter_context(closing_cpu.pop_all())  # the CPU backend ends first: it reads the prefetcher's memory
        if plan.head is not None and weights.packed_head is not None:
            module = model.get_submodule(plan.head.module)
            closing.callback(QuantizedHead(module, plan.head, weights.packed_head, prefetcher.workspaces[0]).close)

        facts = _facts(plan, model)
        prefetcher.on_placement_changed = lambda placement: facts["stream"].update(_bytes_per_step(placement))
        graphs: list[StepGraph] = []
        for name, tokens in replayed_tokens(job).items() if plan.no_graph is None else ():
            graphs.append(StepGraph(job, prefetcher, tokens, partial(facts["stream"].__setitem__, name)))
            closing.callback(graphs[-1].close)
        cpu_attention = None
        if cpu is not None and cpu.plan.attends:
            cpu_attention = cpu.attention()
            closing.enter_context(patch_attention(model))
        closing.enter_context(skip_layers(layers, job.skipped))
        close = closing.pop_all().close  # nothing fails afterwards

    def steps_to_settle() -> int:
        if not all(graph.is_settled for graph in graphs):
            return 1  # the next one is captured or verified
        return prefetcher.rebalancer.steps_to_settle()  # which follows the verification of a graph

    def modules_changed(modules: set[nn.Module]) -> None:
        prefetcher.modules_changed(modules)
        for graph in graphs:
            graph.modules_changed()

    return LoadedModel(
        model=model,
        device=first,
        devices=job.devices,
        dtype=job.spec.dtype,
        weight_bytes=placement.stored_bytes,
        transfers=transfers,
        facts=facts,
        close=close,
        timeline=prefetcher.timeline,
        preallocated_cache=plan.preallocated_cache,
        cpu_backend=None if plan.cpu is None else plan.cpu.facts(placement.computed_bytes),
        cpu_attention=cpu_attention,
        pinned_memory=[store.buffers[block] for block in placement.in_host_memory] if plan.pinned else (),
        steps_to_settle=steps_to_settle,
        settling_steps=lambda: prefetcher.rebalancer.measurements + sum(graph.settling_steps for graph in graphs),
        modules_changed=modules_changed,
        measure_disk=prefetcher.disk_readers[0].measure_gb_per_s if disk is not None else None,
        weights=weights,
        writable=[p for name, p in layers.named_parameters(prefix) if name not in plan.stored],
    )


def convert(plan: StreamPlan, progress: LoadProgress = lambda done: None) -> Path:
    """Write all blocks of a plan that has them on disk to its `converted_file`, and return that. A file that is there already is replaced.

    Raises:
        UsageError: the folder cannot be used or has too little space.
        RunError: the weights cannot be read, or not written.
    """
    job, placement = plan.job, plan.placement
    path, model = converted_file(job, placement.blocks), job.empty_model.model
    assert path is not None and len(placement.on_disk) == len(placement.blocks)
    check_offload_folder(path.parent, sum(placement.disk_file.values()))
    layouts = [block.layout for block in placement.blocks]
    devices = [job.devices[placement.device_of(index)] for index in range(len(layouts))]
    sizes = {index: layout.nbytes for index, layout in enumerate(layouts)}
    with contextlib.closing(DiskBlocks(path.parent, {}, sizes, DirectIO())) as disk:
        weights = _WeightLoader(replace(plan, in_place={}), BlockStore(layouts, devices, (), False, {}, disk))
        keep = Keep(plan.kept, weights.adopt_stored)
        load_weights(model, job.spec, job.config.seed, job.devices[0], weights.adopt, progress, keep)
        weights.close()
        disk.finish()
        disk.path.replace(path)
    return path


def _direct_io(job: Job) -> DirectIO:
    """Return threads that read as the disk was measured to be fastest, if it was."""
    profile = job.machine.profile()
    if profile is None or profile.disk_read_bytes is None or profile.disk_queue_depth is None:
        return DirectIO()
    return DirectIO(profile.disk_read_bytes, profile.disk_queue_depth)


class SkippedLayer(nn.Module):
    """Returns its input in the place of a decoder layer, with the layer's plain attributes.

    Args:
        first: the model's first layer, which is not skipped: where it returns a tuple, so does this one.
    """

    def __init__(self, index: int, layer: nn.Module, first: nn.Module):
        super().__init__()
        self.__dict__ |= {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        self.index, self.returns_tuple = index, False
        self.hook = first.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        self.returns_tuple = isinstance(output, tuple)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for cache in (each for each in (*args, *kwargs.values()) if isinstance(each, PreallocatedCache)):
            cache.advance_layer(self.index, hidden_states.shape[1])
        return (hidden_states,) if self.returns_tuple else hidden_states


def skip_layers(layers: nn.ModuleList, skipped: Collection[int]) -> Patches:
    """Replace the `skipped` ones until the result is closed."""
    patches, first = Patches(), layers[0]
    for index in skipped:
        layer, skipping = layers[index], SkippedLayer(index, layers[index], first)
        layers[index] = skipping
        patches.add_hooks(skipping.hook)
        patches.callback(layers.__setitem__, index, layer)
    return patches


def _bytes_per_step(placement: Placement) -> dict[str, int]:
    return {
        "fetched_bytes": placement.nbytes_of(placement.streamed) + round(placement.fetched_expert_bytes),
        "computed_bytes": placement.computed_bytes,
    }


def _by_gpu(placement: Placement) -> dict[str, list[int]]:
    return {
        "layers_by_gpu": [list(placement.layer_devices).count(device) for device in placement.devices],
        "resident_bytes_by_gpu": [placement.resident_bytes_on(device) for device in placement.devices],
    }


def _facts(plan: StreamPlan, model: nn.Module) -> dict[str, Any]:
    placement, slots = plan.placement, plan.placement.expert_slots
    facts: dict[str, Any] = {
        "stream": {
            "resident_layers": placement.layers - placement.offloaded_layers,
            "streamed_layers": placement.offloaded_layers,
            "ring_depth": placement.ring_depth,
            "slot_bytes": placement.slot_bytes,
            "resident_bytes": placement.resident_bytes,
            **(_by_gpu(placement) if len(placement.devices) > 1 else {}),
            "embedding_on_host": placement.embedding is not None,
            "workspace_bytes": placement.workspace_bytes,
            **_bytes_per_step(placement),
            "expert_slots": sum(slots.values()) / len(placement.cpu_experts) if slots else None,
            "expert_slot_bytes": placement.expert_slot_bytes or None,
            "cores": None if plan.cpu is None else plan.cpu.facts(placement.computed_bytes),
            "no_attention_because": plan.no_cpu_attention,
            "head_bits": None if plan.head is None else plan.head.scheme.bits,
        }
    }
    if plan.job.config.decode_graph != "off":
        outcome = DecodeGraph(unused_because=plan.no_graph or TOO_FEW_STEPS)
        facts["stream"] |= dict.fromkeys(replayed_tokens(plan.job), outcome)
    return facts if placement.format is None else facts | _quantized_share(plan, model)


class _WeightLoader:
    """Stores each parameter as it is read: in its block, the embedding in host memory, the head's codes, or as it is on the device."""

    def __init__(self, plan: StreamPlan, store: BlockStore, shared: _WeightLoader | None = None):
        self.plan, self.store, self.shared = plan, store, shared
        devices, (prefix, layers) = plan.job.devices, decoder_layers(plan.job.empty_model.model)
        of_layers = plan.placement.layer_devices or (0,) * len(layers)
        self.device_of = device_by_name(prefix, [devices[each] for each in of_layers], devices[0])
        self.packed_head: QuantizedWeight | None = None
        self.embedding: HostEmbedding | None = None

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        plan, device, table, shared = self.plan, self.device_of(name), self.plan.placement.embedding, self.shared
        if plan.head is not None and name == plan.head.name:
            self.packed_head = plan.head.packed(parameter.data, device) if shared is None else shared.packed_head
        elif table is not None and name == table.weight:
            module = plan.job.empty_model.model.get_submodule(table.module)
            values = host_copy(parameter.data, self.store.pinned) if shared is None else shared.embedding.table
            self.embedding = HostEmbedding(module, values)
        elif name in plan.stored:
            block = plan.stored[name][0]
            if block not in self.store.shared and block not in plan.in_place:
                self.store.put(*plan.stored[name], parameter.data, plan.scheme)
        elif shared is not None:
            parameter.data = shared.plan.job.empty_model.model.get_parameter(name).data
            return
        else:
            parameter.data = parameter.data.to(device)
            return
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)  # until its block is called

    def adopt_stored(self, name: str, weight: QuantizedWeight) -> None:
        if self.plan.stored[name][0] not in self.plan.in_place:
            self.store.put_stored(*self.plan.stored[name], weight)

    def close(self) -> None:
        if self.embedding is not None:
            self.embedding.close()


def _quantized_share(plan: StreamPlan, model: nn.Module) -> dict[str, Any]:
    """Return the quantized share of all elements, and the names of matrices that are not quantized, as fields of the record."""
    embedding = plan.placement.embedding
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # parameters of blocks are empty until their block is called
    shapes |= {name: stored.plain.shape for name, (_, stored) in plan.stored.items()}
    if embedding is not None:
        module = model.get_submodule(embedding.module)
        shapes[embedding.weight] = module.num_embeddings, module.embedding_dim
    if plan.head is not None:
        shapes[plan.head.name] = plan.head.shape
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    packed = plan.quantized
    skipped = [name for name, shape in shapes.items() if name not in packed and len(shape) > 1]
    share = sum(sizes[name] for name in packed) / sum(sizes.values())
    return {"quantized_fraction": share, "not_quantized": skipped}
