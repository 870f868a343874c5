"""Our layer streaming: decoder layers wait in page-locked host memory and pass through a ring of device slots.

The model is transformers' own and stays whole; hooks before and after each decoder layer see to it that its parameters
point at the layer's bytes while it computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import LoadedModel, Progress
from zero_inference.engines.stream.cpu import CpuBackend
from zero_inference.engines.stream.cuda_graph import StepGraph, capture_calls, capture_cuda_graphs
from zero_inference.engines.stream.layout import BlockStore
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.plan import StreamPlan, plan
from zero_inference.engines.stream.prefetch import Prefetcher
from zero_inference.engines.stream.vocabulary import HeadWeight, HostEmbedding, QuantizedHead
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kv_cache.attention_patch import patch_attention
from zero_inference.models.layers import decoder_layers
from zero_inference.models.weights import load_weights
from zero_inference.records.schema import DecodeGraph
from zero_inference.utils.ranks import new_process_group
from zero_inference.utils.transfers import Transfers

TOO_SHORT = "no generation was long enough to try a graph"

connect = new_process_group  # for the all-gathers, on which no other code issues collectives
__all__ = ["check", "connect", "load", "plan"]  # as engines/base.py says


def check(plan: StreamPlan) -> None:
    """Nothing beyond what every engine needs."""


def load(plan: StreamPlan, progress: Progress = lambda done: None) -> LoadedModel:
    """Fill the block store, place the rest on the device, and hook the ring and the cores into the model."""
    job, placement, scheme = plan.job, plan.placement, plan.scheme
    model, ranks = job.empty_model.model, job.ranks
    store = BlockStore(placement.layouts, set(placement.resident), ranks, plan.pinned, placement.cpu_computed)
    prefix, layers = decoder_layers(model)
    placed = _WeightLoader(model, prefix, placement, store, scheme, ranks.device, plan.head)
    load_weights(model, job.spec, job.config.seed, ranks.device, placed.adopt, progress)
    store.complete()
    # more than was planned where a checkpoint unties what config.json ties
    placement.outside_bytes = sum(p.nbytes for name, p in model.named_parameters() if name not in placed.where)
    placement.outside_bytes += plan.cost_terms.head_stored_bytes
    model.to(ranks.device)  # buffers
    if job.on_gpu:
        torch.cuda.empty_cache()  # else ring and workspace are carved out of what quantizing took, and the remainders stay unusable
    transfers = Transfers()
    team = CpuBackend(plan.cores, job, placement, store, scheme, transfers) if plan.cores is not None else None
    prefetcher = Prefetcher(model, placement, store, scheme, ranks, transfers, job.group, team)
    head = None
    if plan.head is not None:
        head = QuantizedHead(model.get_submodule(plan.head.module), plan.head, placed.packed_head, prefetcher.workspace)

    cpu_attention = None
    if team is not None and team.plan.attends:
        patch_attention(model)
        cpu_attention = team.attention()

    facts = _facts(plan, model)
    prefetcher.changed = lambda placement: facts["stream"].update(_divided(placement))
    graph = _step_graph(plan, prefetcher, team, facts)

    def steps_to_settle() -> int:  # the division is looked at behind the trial of a graph
        of_graph = 0 if graph is None else graph.steps_to_settle()
        return of_graph or prefetcher.balance.steps_to_settle()

    def modules_changed(modules: set[nn.Module]) -> None:
        prefetcher.modules_changed(modules)
        if graph is not None:
            graph.modules_changed()

    def close() -> None:
        if graph is not None:
            graph.close()
        if head is not None:
            head.close()
        if team is not None:
            team.close()  # before what it reads goes
        prefetcher.close()
        if placed.embedding is not None:
            placed.embedding.close()

    return LoadedModel(
        model=model,
        device=ranks.device,
        dtype=job.spec.dtype,
        weight_bytes=placement.stored_bytes,
        transfers=transfers,
        facts=facts,
        close=close,
        timeline=prefetcher.timeline,
        preallocated_cache=plan.preallocated_cache,
        cores=None if plan.cores is None else plan.cores.facts(placement.computed_bytes),
        cpu_attention=cpu_attention,
        page_locked=[store.buffers[block] for block in placement.in_host_memory] if plan.pinned else (),
        steps_to_settle=steps_to_settle,
        modules_changed=modules_changed,
        writable=[p for name, p in layers.named_parameters(prefix) if name not in placed.where],
    )


def _step_graph(
    plan: StreamPlan, prefetcher: Prefetcher, team: CpuBackend | None, facts: dict[str, Any]
) -> StepGraph | None:
    job, calls = plan.job, None if team is None else team.calls
    if plan.no_graph is not None:
        return None

    def report(graph: DecodeGraph) -> None:
        facts["stream"]["decode_graph"] = graph

    record = capture_cuda_graphs if job.on_gpu else capture_calls
    always = job.config.decode_graph == "on"
    return StepGraph(job.empty_model.model, job.spec.dtype, record, prefetcher, calls, always, report)


def _divided(placement: Placement) -> dict[str, int]:
    """What goes each way in a decode step."""
    return {
        "fetched_bytes": placement.nbytes_of(placement.streamed) + round(placement.fetched_expert_bytes),
        "computed_bytes": placement.computed_bytes,
    }


def _kept_experts(placement: Placement) -> dict[str, Any]:
    """What device memory keeps of the experts that the cores multiply."""
    slots = placement.expert_slots
    mean = sum(slots.values()) / len(placement.cpu_computed.intersection(placement.expert_blocks)) if slots else None
    return {"expert_slots": mean, "expert_slot_bytes": placement.expert_slot_bytes or None}


def _facts(plan: StreamPlan, model: nn.Module) -> dict[str, Any]:
    """What the record says of where the weights are."""
    placement = plan.placement
    streamed = placement.layers_of(placement.in_host_memory)
    facts: dict[str, Any] = {
        "stream": {
            "resident_layers": placement.layers - len(streamed),
            "streamed_layers": len(streamed),
            "ring_depth": placement.ring_depth,
            "slot_bytes": placement.slot_bytes,
            "resident_bytes": placement.resident_bytes,
            "embedding_on_host": placement.embedding is not None,
            "workspace_bytes": placement.workspace_bytes,
            **_divided(placement),
            **_kept_experts(placement),
            "cores": None if plan.cores is None else plan.cores.facts(placement.computed_bytes),
            "no_attention_because": plan.no_attention,
            "head_bits": None if plan.head is None else plan.head.scheme.bits,
            "decode_graph": None
            if plan.job.config.decode_graph == "off"
            else DecodeGraph(unused_because=plan.no_graph or TOO_SHORT),
        }
    }
    if plan.scheme is not None:
        quantized, skipped, total = _quantized_share(model, placement, plan.head)
        facts |= {"quantized_fraction": quantized / total, "not_quantized": skipped}
    return facts


class _WeightLoader:
    """Takes each parameter over as it is read: into the store, the embedding's host memory, the head's codes, or onto the device."""

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        placement: Placement,
        store: BlockStore,
        scheme: GroupQuantization | None,
        device: torch.device,
        head: HeadWeight | None,
    ):
        self.store, self.scheme, self.device, self.head = store, scheme, device, head
        self.packed_head: tuple[torch.Tensor, ...] = ()
        self.model, self.table = model, placement.embedding
        self.embedding: HostEmbedding | None = None
        self.where = {
            block.full_name(prefix, stored.name): (index, stored.name)
            for index, (block, layout) in enumerate(zip(placement.blocks, placement.layouts))
            for stored in layout.parameters
        }

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        if self.head is not None and name == self.head.name:
            self.packed_head = self.head.packed(parameter.data, self.device)
        elif self.table is not None and name == self.table.weight:
            module = self.model.get_submodule(self.table.module)
            self.embedding = HostEmbedding(module, parameter.data, self.store.pinned)
        elif name not in self.where:
            parameter.data = parameter.data.to(self.device)
            return
        else:
            block, own_name = self.where[name]
            self.store.put(block, own_name, parameter.data, self.scheme)
        parameter.data = torch.empty(
            0, dtype=parameter.dtype, device=self.device
        )  # until the prefetcher points it at a slot


def _quantized_share(model: nn.Module, placement: Placement, head: HeadWeight | None) -> tuple[int, list[str], int]:
    """Elements that are quantized, names of matrices that are not, and all elements."""
    prefix, _ = decoder_layers(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if placement.embedding is not None:
        embedding = model.get_submodule(placement.embedding.module)
        shapes[placement.embedding.weight] = embedding.num_embeddings, embedding.embedding_dim
    packed = set()
    if head is not None:
        shapes[head.name] = head.shape
        packed.add(head.name)
    for block, layout in zip(placement.blocks, placement.layouts):
        for stored in layout.parameters:
            name = block.full_name(prefix, stored.name)
            shapes[name] = stored.plain.shape  # the parameter is empty until its block is called
            if stored.packed is not None:
                packed.add(name)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    skipped = [name for name, shape in shapes.items() if name not in packed and len(shape) > 1]
    return sum(sizes[name] for name in packed), skipped, sum(sizes.values())
