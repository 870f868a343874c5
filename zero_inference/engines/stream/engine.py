"""Our layer streaming: decoder layers wait in page-locked host memory and pass through a ring of device slots.

The model is transformers' own and stays whole; hooks before and after each decoder layer see to it that its parameters
point at the layer's bytes while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zero_inference.engines.base import EnginePlan, Footprint, Job, LoadedModel, Progress, group_size_refusal
from zero_inference.engines.stream.blocks import is_wide, lay_out_blocks
from zero_inference.engines.stream.core_team import CoreTeam
from zero_inference.engines.stream.cores import CoresPlan, place_on_cores, why_cores_stay_out
from zero_inference.engines.stream.feeder import BlockFeeder
from zero_inference.engines.stream.residency import USUAL_DEPTH, Residency, decide_residency
from zero_inference.engines.stream.step_graph import StepGraph, cuda_graph, repeated_call, why_no_graph
from zero_inference.engines.stream.store import BlockStore
from zero_inference.errors import UsageError
from zero_inference.kv_cache.diverted import divert_attention
from zero_inference.models.checkpoint import load_weights
from zero_inference.models.layers import decoder_layers
from zero_inference.quantization.groups import GroupQuantization
from zero_inference.records.schema import DecodeGraph
from zero_inference.runtime.distributed import new_group
from zero_inference.runtime.environment import available_host_bytes
from zero_inference.runtime.extension import load_extension
from zero_inference.runtime.transfers import Transfers

RESERVE_BYTES = 1 << 30  # device memory left to cuBLAS, the allocator's rounding and the display

TOO_SHORT = "no generation was long enough to try a graph"

connect = new_group  # for the all-gathers, on which no other code issues collectives


@dataclass(frozen=True)
class StreamPlan(EnginePlan):
    """
    Attributes:
        scheme: None where weights keep 16 bits.
        cores: how the host's cores take part; None if they do not.
        cores_stay_out: why they do not, in a few words; None if they do, or if nothing is in host memory.
        no_graph: why decode steps are not one CUDA graph, in a few words; None if they may be.
    """

    residency: Residency
    scheme: GroupQuantization | None
    cores: CoresPlan | None = None
    cores_stay_out: str | None = None
    no_graph: str | None = None

    def in_words(self) -> list[str]:
        """See `EnginePlan`."""
        if not self.residency.in_host_memory:
            return []
        fetched = sum(self.residency.layouts[block].nbytes for block in self.residency.fetched)
        line = f"a decode step fetches {fetched / 1e9:.3f} GB{' over the link' if self.job.on_gpu else ''}"
        if self.cores is None:
            return [line + (f" (the host's cores stay out: {self.cores_stay_out})" if self.cores_stay_out else "")]
        computed = self.residency.computed_bytes
        stored = sum(self.residency.layouts[block].stored_bytes for block in self.residency.computed)
        lines = [f"{line}, and {self.cores.in_words(computed, stored)}"]
        if slots := self.residency.expert_slots:
            of = sum(self.residency.blocks[block].experts.number for block in self.residency.expert_blocks)
            lines.append(
                f"device memory keeps {sum(slots.values())} of the {of} experts in host memory, those used most: "
                f"{self.residency.expert_slot_bytes / 1e9:.3f} GB"
            )
        return lines


def plan(job: Job) -> StreamPlan:
    """Decide what stays on the device, and what the cores multiply of the rest.

    Raises:
        UsageError: no decoder layers to stream, a group size that does not divide, a device too small (DoesNotFit), or cores that
            cannot do what was asked.
    """
    config, model = job.config, job.skeleton.model
    scheme = None
    if config.quantized:
        scheme = GroupQuantization(config.quant_bits, config.quant_group_size, job.spec.dtype)
        _check_groups(model, scheme)
    residency = _residency(job, scheme, divided=False)
    cores: CoresPlan | str | None = why_cores_stay_out(job)
    nothing = not residency.in_host_memory and not config.kv_offload
    if cores is None and nothing and config.cpu_share is not None:
        raise UsageError(
            f"--cpu-compute {config.cpu_compute}: all weights stay on the device, so none is in host memory for the cores; lower "
            "--gpu-memory, or drop --cpu-compute."
        )
    if cores is None and not nothing:
        divided, cores = place_on_cores(job, _residency(job, scheme, divided=True), scheme)
        if isinstance(cores, CoresPlan):
            divided = without_spare_slots(job, divided, scheme)
            needed = divided.host_bytes + job.kv_host_bytes
            if cores.automatic and divided.expert_slots and needed > available_host_bytes():
                cores = "host memory does not hold the experts that device memory keeps as well"
            else:
                residency = divided
    reason = cores if isinstance(cores, str) else None
    cores = cores if isinstance(cores, CoresPlan) else None
    host, pinned = residency.host_bytes // job.ranks.world_size, job.pin_weights
    footprint = Footprint(device=residency.device_bytes, host=host, pinned=host if pinned else 0)
    no_graph = why_no_graph(job, residency)
    return StreamPlan(job, footprint, pinned, residency, scheme, cores, reason, no_graph)


def without_spare_slots(job: Job, found: Residency, scheme: GroupQuantization | None) -> Residency:
    """`found`, planned anew with a ring of the usual depth where decode steps fetch nothing: more slots would only cover what the host does
    between these. Their memory holds experts instead, or stays free."""
    if found.fetched or job.config.ring_depth is not None or found.depth <= USUAL_DEPTH:
        return found
    placed = replace(_residency(job, scheme, divided=True, depth=USUAL_DEPTH), few_tokens=found.few_tokens)
    placed = placed.with_shares_computed(1.0, 1.0).with_budget_used()
    return found if placed.fetched else placed


def _residency(job: Job, scheme: GroupQuantization | None, divided: bool, depth: int | None = None) -> Residency:
    config, ranks = job.config, job.ranks.world_size
    blocks, layouts, outside = lay_out_blocks(job.skeleton.model, scheme, ranks, divided)
    budget = None
    if job.free_device_bytes is not None:
        budget = job.free_device_bytes - outside - job.kv_device_bytes - job.activation_bytes - RESERVE_BYTES
    return decide_residency(layouts, outside, budget, config.gpu_memory, depth or config.ring_depth, ranks, blocks)


def check(plan: StreamPlan) -> None:
    """Nothing beyond what every engine needs."""


def load(plan: StreamPlan, progress: Progress = lambda done: None) -> LoadedModel:
    """Fill the block store, place the rest on the device, and hook the ring and the cores into the model."""
    job, residency, scheme = plan.job, plan.residency, plan.scheme
    model, ranks = job.skeleton.model, job.ranks
    if (scheme is not None or plan.cores is not None) and job.on_gpu:
        load_extension(None if ranks.is_first and job.config.verbose > 0 else lambda line: None)
    store = BlockStore(residency.layouts, set(residency.resident), ranks, plan.pinned, residency.computed)
    prefix, _ = decoder_layers(model)
    placed = _Placement(prefix, residency, store, scheme, ranks.device)
    load_weights(model, job.spec, job.config.seed, ranks.device, placed.adopt, progress)
    store.complete()
    model.to(ranks.device)  # buffers
    transfers = Transfers()
    team = CoreTeam(plan.cores, job, residency, store, scheme, transfers) if plan.cores is not None else None
    feeder = BlockFeeder(model, residency, store, scheme, ranks, transfers, job.group, team)

    meeting = None
    if team is not None and team.plan.attends:
        divert_attention(model)
        meeting = team.meeting()

    facts = _facts(plan, model)
    feeder.changed = lambda residency: facts["stream"].update(_divided(residency))
    graph = _step_graph(plan, feeder, team, facts)

    def close() -> None:
        if graph is not None:
            graph.close()
        if team is not None:
            team.close()  # before what it reads goes
        feeder.close()

    return LoadedModel(
        model=model,
        device=ranks.device,
        dtype=job.spec.dtype,
        weight_bytes=residency.stored_bytes,
        transfers=transfers,
        facts=facts,
        close=close,
        timeline=feeder.timeline,
        preallocated_cache=True,
        cores=None if plan.cores is None else plan.cores.facts(residency.computed_bytes),
        meeting=meeting,
        page_locked=[store.buffers[block] for block in residency.in_host_memory] if plan.pinned else (),
    )


def _step_graph(
    plan: StreamPlan, feeder: BlockFeeder, team: CoreTeam | None, facts: dict[str, Any]
) -> StepGraph | None:
    job, calls = plan.job, None if team is None else team.calls
    if plan.no_graph is not None:
        return None

    def report(graph: DecodeGraph) -> None:
        facts["stream"]["decode_graph"] = graph

    record = cuda_graph if job.on_gpu else repeated_call
    always = job.config.decode_graph == "on"
    return StepGraph(job.skeleton.model, job.spec.dtype, record, feeder, calls, always, report)


def _divided(residency: Residency) -> dict[str, int]:
    """What goes each way in a decode step."""
    return {
        "fetched_bytes": sum(residency.layouts[block].nbytes for block in residency.fetched),
        "computed_bytes": residency.computed_bytes,
    }


def _kept_experts(residency: Residency) -> dict[str, Any]:
    """What device memory keeps of the experts that the cores multiply."""
    slots = residency.expert_slots
    mean = sum(slots.values()) / len(residency.computed.intersection(residency.expert_blocks)) if slots else None
    return {"expert_slots": mean, "expert_slot_bytes": residency.expert_slot_bytes or None}


def _facts(plan: StreamPlan, model: nn.Module) -> dict[str, Any]:
    """What the record says of where the weights are."""
    residency = plan.residency
    streamed = residency.layers_of(residency.in_host_memory)
    facts: dict[str, Any] = {
        "stream": {
            "resident_layers": residency.layers - len(streamed),
            "streamed_layers": len(streamed),
            "ring_depth": residency.depth,
            "slot_bytes": residency.slot_bytes,
            "resident_bytes": residency.resident_bytes,
            "workspace_bytes": residency.workspace_bytes,
            **_divided(residency),
            **_kept_experts(residency),
            "cores": None if plan.cores is None else plan.cores.facts(residency.computed_bytes),
            "decode_graph": None if plan.job.config.decode_graph == "off" else DecodeGraph(plan.no_graph or TOO_SHORT),
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
        store: BlockStore,
        scheme: GroupQuantization | None,
        device: torch.device,
    ):
        self.store, self.scheme, self.device = store, scheme, device
        self.where = {
            block.full_name(prefix, stored.name): (index, stored.name)
            for index, (block, layout) in enumerate(zip(residency.blocks, residency.layouts))
            for stored in layout.parameters
        }

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        if name not in self.where:
            parameter.data = parameter.data.to(self.device)
            return
        block, own_name = self.where[name]
        self.store.put(block, own_name, parameter.data, self.scheme)
        parameter.data = torch.empty(
            0, dtype=parameter.dtype, device=self.device
        )  # until the feeder points it at a slot


def _check_groups(model: nn.Module, scheme: GroupQuantization) -> None:
    """Raises UsageError where the group size does not divide the last dimension of a decoder layer's matrix."""
    prefix, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            wide = is_wide(parameter)  # others may stay as they are
            if wide and scheme.is_for(parameter) and not scheme.can_quantize(parameter):
                raise group_size_refusal(scheme.group_size, f"{prefix}.{index}.{name}", tuple(parameter.shape))


def _quantized_share(model: nn.Module, residency: Residency) -> tuple[int, list[str], int]:
    """Elements that are quantized, names of matrices that are not, and all elements."""
    prefix, _ = decoder_layers(model)
    packed = {
        block.full_name(prefix, stored.name): stored.plain
        for block, layout in zip(residency.blocks, residency.layouts)
        for stored in layout.parameters
        if stored.packed is not None
    }
    quantized = sum(p.numel() for name, p in model.named_parameters() if name in packed)
    skipped = [name for name, p in model.named_parameters() if name not in packed and p.dim() > 1]
    return quantized, skipped, sum(p.numel() for p in model.parameters())
