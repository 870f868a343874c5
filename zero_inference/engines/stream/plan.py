"""What a run of the stream engine places where: decided from its options, the empty model and measured rates, before a weight is read."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_inference.config.options import GROUP_SIZES, MIN_RING_DEPTH
from zero_inference.cpu.products import quantize
from zero_inference.engines.base import EnginePlan, Footprint, Job
from zero_inference.engines.cost_terms import CostTerms, CpuWork
from zero_inference.engines.stream.blocks import check_groups, lay_out_blocks
from zero_inference.engines.stream.cpu_plan import (
    CpuPlan,
    cpu_block_s,
    decode_step_s,
    plan_cpu,
    plan_short_prompts,
    spare_slots,
    why_no_cpu_attention,
    why_no_cpu_compute,
)
from zero_inference.engines.stream.cuda_graph import why_no_graph
from zero_inference.engines.stream.expert_cache import multiplies_many
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.overlap import FETCH_RATE, overlapped_step_s, prefill_bytes
from zero_inference.engines.stream.placement import DEFAULT_RING_DEPTH, Placement, plan_placement
from zero_inference.engines.stream.rebalance import MeasuredStep, bytes_to_move
from zero_inference.engines.stream.vocabulary import HEAD_BITS, EmbeddingTable, HeadWeight, find_head, table_for_host
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.hardware.rates import ConcurrentRates
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.groups import GroupQuantization, dequantize
from zero_inference.kernels.products import FUSED_DTYPES, FUSED_GROUP_SIZES, FUSED_ROWS
from zero_inference.models.layers import decoder_layers
from zero_inference.utils.format import format_bytes, three_digits

RESERVE_BYTES = 1 << 30  # device memory left to cuBLAS, the allocator's rounding, the graph of a step and the display
# Of the activations, an estimate of what the allocator holds in free blocks that are too small for what is asked for next: it keeps
# those of hidden states while a feed-forward takes larger ones. Llama-3.1-405B with 32 x 128 tokens ran with 2.68 GB set aside for both and
# not with 2.15 (docs/performance.md); this makes 2.77.
UNUSABLE_SHARE = 0.5
# Slots that are tried where the CPU multiplies beside the link, and how much shorter the step has to be predicted than with more slots.
RING_DEPTHS_WITH_CORES, SHORTER = (12, 8, 6, 5, 4), 0.98
SLOWER_ATTENTION = "a step in which they attend is predicted to take longer"  # why they stay out


@dataclass(frozen=True)
class StreamPlan(EnginePlan):
    """
    Attributes:
        scheme: None where weights keep 16 bits.
        cores: how the host's cores take part; None if they do not.
        cores_stay_out: why they do not, in a few words; None if they do, or if nothing is in host memory.
        no_graph: why decode steps are not CUDA graphs, in a few words; None if they may be.
        no_attention: why the cores do not attend over keys and values in host memory, in a few words; None if they do, or if there are
            none.
        head: the output head where it is quantized; None where it keeps its dtype.
    """

    placement: Placement
    scheme: GroupQuantization | None
    cores: CpuPlan | None = None
    cores_stay_out: str | None = None
    no_graph: str | None = None
    no_attention: str | None = None
    head: HeadWeight | None = None

    def prepare(self) -> None:
        """See `EnginePlan`."""
        job = self.job
        if (self.scheme is not None or self.cores is not None) and job.on_gpu:
            load_extension(None if job.ranks.is_first and job.config.verbose > 0 else lambda line: None)

    @property
    def least_free_device_bytes(self) -> int:
        """See `EnginePlan`."""
        activations = int((1 + UNUSABLE_SHARE) * self.job.activation_bytes)
        return self.footprint.device + self.job.cache_device_bytes + activations + RESERVE_BYTES

    def as_stored(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """See `EnginePlan`."""
        if name not in self._packed:
            return values
        scheme, transposed = self._packed[name]
        values = values.to(self.job.ranks.device)  # as the store does
        values = values.mT if transposed else values
        restored = torch.empty_like(values, memory_format=torch.contiguous_format)
        codes, scale, minimum = quantize(values, scheme)
        dequantize(codes, scale, minimum, scheme.bits, scheme.group_size, restored)
        return restored.mT if transposed else restored

    @functools.cached_property
    def _packed(self) -> dict[str, tuple[GroupQuantization, bool]]:
        """Return by name of each quantized matrix how it is stored, and whether it is transposed."""
        prefix, _ = decoder_layers(self.job.empty_model.model)
        found = {} if self.head is None else {self.head.name: (self.head.scheme, False)}
        return found | {
            block.full_name(prefix, stored.name): (self.scheme, stored.transposed)
            for block, layout in zip(self.placement.blocks, self.placement.layouts)
            for stored in layout.parameters
            if stored.packed is not None
        }

    @functools.cached_property
    def _in_prompt(self) -> tuple[Placement, ConcurrentRates] | None:
        """Return the placement in a short prompt, and its rates; None where the CPU multiplies none of it."""
        if self.cores is None or self.cores.prompt_rates is None:
            return None
        placed = self.placement.for_short_prompt(self.cores.prompt_rows, multiplies_many(self.scheme))
        return placed, self.cores.prompt_rates

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        """See `EnginePlan`."""
        job, found, cores = self.job, self.placement, self.cores
        rates = None if cores is None else cores.rates
        cpu_gb_per_s = None if cores is None else cores.of_step_gb_per_s(found.computed_bytes)
        beside = rates is not None and cpu_gb_per_s is not None
        described = job.machine.profile()
        link_gb_per_s = None if described is None else described.link_gb_per_s
        prefill_link_gb_per_s = FETCH_RATE * link_gb_per_s if link_gb_per_s is not None and found.gathered else None
        prefill_cpu = CpuWork()
        if self._in_prompt is not None:
            in_prompt, prompt_rates = self._in_prompt
            prefill_link_gb_per_s = prompt_rates.link_gb_per_s
            prefill_cpu = CpuWork(*self._cpu_shares(in_prompt), sum(cpu_block_s(*self._in_prompt).values()))
        fused = job.on_gpu and job.config.group_size in FUSED_GROUP_SIZES and job.spec.dtype in FUSED_DTYPES
        prompt_tokens = job.rank_batch * job.config.prompt_len
        return CostTerms(
            prefill_fetched_bytes=prefill_bytes(found, self.graphs) + prompt_tokens * found.row_bytes,
            chosen_expert_bytes=round(found.fetched_expert_bytes),
            prefill_link_gb_per_s=prefill_link_gb_per_s,
            link_beside_cpu_gb_per_s=rates.link_gb_per_s if rates is not None and beside else None,
            cpu_beside_link_gb_per_s=cpu_gb_per_s if beside else None,
            copies_within_host=True,
            fetches=len(found.in_host_memory),
            resident_quantized_blocks=0 if self.scheme is None else len(found.resident),
            graphs=self.graphs,
            fused_rows=FUSED_ROWS if fused else 0,
            head_plain_bytes=0 if self.head is None else self.head.plain_bytes,
            head_stored_bytes=0 if self.head is None else self.head.stored_bytes,
            dequantizes_on_cpu=job.config.quantized and not job.on_gpu and cores is None,
            step_cpu=CpuWork(*self._cpu_shares(found), 0.0 if cores is None else cores.waited_s(found)),
            prefill_cpu=prefill_cpu,
            cpu_attention_layers=len(job.sizes.kv_widths) if cores is not None and cores.attends else 0,
            cpu_alone_s=0.0 if rates is None else found.computed_bytes / (rates.cores_alone_gb_per_s * 1e9),
            cpu_rate_unknown=self._cpu_rate_unknown,
            depends_on_routing=any(block in found.cpu_computed for block in found.expert_blocks),
        )

    @property
    def _cpu_rate_unknown(self) -> bool:
        """See `EnginePlan`."""
        job = self.job
        if self.cores is not None or job.config.cpu_share is not None or not (job.on_gpu and self.placement.host_bytes):
            return False
        elsewhere = None if job.machine.is_here else job.machine.profile()
        several = job.ranks.world_size > 1 and job.ranks.num_nodes == 1
        return several or (elsewhere is not None and elsewhere.cores is None)

    def alternative(self) -> StreamPlan | None:
        """See `EnginePlan`. The cores were chosen to attend by bandwidth alone; this plan leaves attention on the device, in case what the
        host does for each layer costs more."""
        if self.cores is None or not (self.cores.attends and self.cores.automatic):
            return None
        try:
            found = plan(self.job, may_attend=False)
        except DoesNotFit:  # layers that are not divided need more memory
            return None
        if found.cores:
            return replace(found, no_attention=SLOWER_ATTENTION)
        return replace(found, cores_stay_out=SLOWER_ATTENTION, no_attention=SLOWER_ATTENTION)

    def without_short_prompts(self) -> StreamPlan | None:
        """See `EnginePlan`."""
        if self.cores is None or not self.cores.prompt_rows:
            return None
        cores = replace(self.cores, prompt_rows=0, prompt_share=0.0, prompt_rates=None)
        return replace(self, placement=replace(self.placement, prompt_cpu_computed=frozenset()), cores=cores)

    @property
    def why_whole_layers(self) -> str:
        """See `EnginePlan`."""
        blocks, _, _ = _laid_out(self.job, self.scheme, divided=True)
        if not any(block.experts is not None and block.computable for block in blocks or ()):
            return "the CPU does not multiply experts of this form"
        if self.cores:
            return "the CPU multiplies only a part of them"
        return (
            f"the CPU computes nothing: {self.cores_stay_out}" if self.job.on_gpu else "PyTorch computes whole layers"
        )

    @property
    def gpu_memory_bytes(self) -> int | None:
        """See `EnginePlan`."""
        return self.placement.reserved_bytes

    @property
    def ring_depth(self) -> int | None:
        """See `EnginePlan`."""
        return self.placement.ring_depth if self.placement.ring_depth >= MIN_RING_DEPTH else None

    @property
    def copies_own_memory(self) -> bool:
        """See `EnginePlan`."""
        return self.pinned and self.placement.host_bytes > 0

    @property
    def graphs(self) -> bool:
        """See `EnginePlan`."""
        return self.no_graph is None and self.job.on_gpu

    def _cpu_shares(self, found: Placement) -> tuple[float, float]:
        """Return the shares of layers without experts, and of experts, that the CPU multiplies for a GPU. Experts in device slots are the
        device's; without a GPU the CPU is the device, and its products with codes are measured as such."""
        if not self.job.on_gpu:
            return 0.0, 0.0
        experts = set(found.expert_blocks)
        every = [index for index, block in enumerate(found.blocks or ()) if block.experts is not None]
        others = found.nbytes_of(set(range(len(found.layouts))) - set(every))
        kept = found.expert_slot_bytes if found.cpu_computed & experts else 0
        return (
            found.nbytes_of(found.cpu_computed - experts) / max(1, others),
            max(0, found.nbytes_of(found.cpu_computed & experts) - kept) / max(1, found.nbytes_of(every)),
        )

    def rebalanced_s(self, link_s: float, others_s: float) -> tuple[float, float]:
        """See `EnginePlan`; what `Balance` does behind the first steps. Where the cores attend, their work grows from token to token, and
        in the steps that it looks at they do not yet have more of it than the link."""
        cores, found = self.cores, self.placement
        if cores is None or cores.rates is None or cores.attends or not cores.automatic or not found.streamed:
            return link_s, others_s
        link, multiplied = cores.rates.link_gb_per_s * 1e9, cores.rates.cores_gb_per_s * 1e9
        step = MeasuredStep(
            whole=max(link_s, others_s),
            link=link_s,
            cores=found.computed_bytes / multiplied,
            waited=max(0.0, link_s - others_s),
        )
        moved = found.rebalanced(bytes_to_move(cores, found, step), found.computable)
        nbytes = found.nbytes_of(found.cpu_computed) - found.nbytes_of(moved.cpu_computed)
        return link_s + nbytes / link, others_s - nbytes / multiplied

    def overlapped_s(self, link_s: float, others_s: float) -> float:
        """See `EnginePlan`."""
        of_cores = (
            {} if self.cores is None or self.cores.rates is None else cpu_block_s(self.placement, self.cores.rates)
        )
        return overlapped_step_s(self.placement, of_cores, link_s, others_s, self.graphs)

    def in_words(self) -> list[str]:
        """See `EnginePlan`."""
        found = self.placement
        who = "the host's cores are not used" if self.job.on_gpu else "PyTorch computes all layers"
        unused = f"{who}: {self.cores_stay_out}"
        crosses = []
        if self.no_attention not in (None, self.cores_stay_out) and self.job.ranks.world_size == 1:
            place = (
                "keys and values cross the link" if self.job.on_gpu else "the cores do not attend over keys and values"
            )
            crosses = [f"{place}: {self.no_attention}"]
        if not found.in_host_memory:
            kept_out = self.cores is None and self.cores_stay_out and self.job.config.kv_offload
            return [*([unused] if kept_out else []), *crosses]
        line = f"each decode step {self.fetched_in_words()}"
        if self.cores is None:
            return [
                line,
                *([unused] if self.cores_stay_out else []),
                *crosses,
                *self.dequantized_in_words(),
            ]
        copied = f"{line}; " if self.job.on_gpu or found.streamed else "in each decode step "
        lines = [f"{copied}{cores_in_words(self.cores, found)}", *rates_in_words(self.cores)]
        return lines + prompts_in_words(self.cores) + crosses + experts_in_words(found)

    def places_in_words(self) -> str:
        """See `EnginePlan`."""
        found = self.placement
        all_in_one = not (found.in_host_memory or found.embedding) or not self.job.on_gpu
        return super().places_in_words() if all_in_one else places_in_words(found)


def plan(job: Job, may_attend: bool = True) -> StreamPlan:
    """Decide what stays on the device, and what the cores multiply of the rest.

    Args:
        may_attend: whether the cores may attend over keys and values in host memory.

    Raises:
        UsageError: no decoder layers to stream, a group size that does not divide, a device too small (DoesNotFit), or cores that
            cannot do what was asked.
    """
    config, model = job.config, job.empty_model.model
    scheme = None
    if config.quantized:
        scheme = GroupQuantization(config.quant_bits, config.group_size, job.spec.dtype)
        job.empty_model.cached(("groups", scheme), lambda: check_groups(model, scheme))
    no_graph, out = why_no_graph(job), why_no_cpu_compute(job)
    reason = out
    placement: Placement | None = None
    cores: CpuPlan | None = None
    if reason is None:
        placement, cores, reason = _with_cores(job, scheme, job.on_gpu and not no_graph, may_attend)
    if placement is None:
        placement = _residency(job, scheme, divided=False)
    if _reads_group_sizes(job, placement):
        no_graph = no_graph or why_no_graph(job, in_groups=True)
    host, pinned = placement.host_bytes // job.ranks.world_size + placement.embedding_bytes, job.pin_weights
    footprint = Footprint(device=placement.device_bytes, host=host, pinned=host if pinned else 0)
    attends = cores is not None and cores.attends
    no_attention = None
    if config.kv_offload and not attends:
        no_attention = out or why_no_cpu_attention(job) or reason or SLOWER_ATTENTION
    return StreamPlan(
        job,
        footprint,
        pinned,
        placement,
        scheme,
        cores,
        reason,
        no_graph,
        no_attention,
        _head(job, scheme, placement.layouts),
        weight_bytes=placement.stored_bytes,
        fetched_bytes=placement.nbytes_of(placement.streamed)
        + round(placement.fetched_expert_bytes)
        + job.rank_batch * placement.row_bytes,
        cores_bytes=0 if cores is None else placement.computed_bytes + (cores.kv_bytes if attends else 0),
        carries_kv=not attends,
        preallocated_cache="past_key_values" in inspect.signature(type(model).forward).parameters
        and not job.window_only_in_cache,
    )


def _with_cores(
    job: Job, scheme: GroupQuantization | None, graphs: bool, may_attend: bool
) -> tuple[Placement | None, CpuPlan | None, str | None]:
    """Layers divided into blocks, and what the cores do with them; or why they stay out, if there is something for them at all.

    Raises:
        UsageError: see `plan`.
    """
    config, divided = job.config, _residency(job, scheme, divided=True)
    if not divided.in_host_memory and not config.kv_offload:
        if config.cpu_share is not None:
            raise UsageError(
                f"--cpu-compute {config.cpu_compute}: all weights are on the device, so the cores have nothing to compute; lower "
                "--gpu-memory, or drop --cpu-compute."
            )
        return None, None, None
    placed, cores = plan_cpu(job, divided, scheme, graphs, may_attend)
    if isinstance(cores, str):
        return None, None, cores
    placed, cores = with_ring_for_cores(job, placed, cores, scheme, graphs, may_attend)
    placed = without_spare_slots(job, placed, scheme)
    needed = placed.host_bytes + placed.embedding_bytes + job.kv_host_bytes
    if cores.automatic and placed.expert_slots and needed > job.machine.available_host_bytes():
        return None, None, "host memory has no space for the experts that the device keeps as well"
    return *plan_short_prompts(job, placed, cores, scheme, graphs), None


def with_ring_for_cores(
    job: Job,
    found: Placement,
    cores: CpuPlan,
    scheme: GroupQuantization | None,
    graphs: bool,
    may_attend: bool,
) -> tuple[Placement, CpuPlan]:
    """Return `found` and `cores`, or those of the ring of fewer slots whose decode step is shortest: where the CPU multiplies most of what
    is in host memory, the link is not what a step waits for, and memory of slots is worth more as resident layers."""
    config = job.config
    chosen = config.ring_depth is not None or config.gpu_memory is not None
    if (
        chosen
        or job.free_device_bytes is None
        or job.ranks.world_size > 1
        or not cores.automatic
        or cores.rates is None
    ):
        return found, cores
    best, best_s = (found, cores), decode_step_s(found, cores, graphs)
    for depth in (each for each in RING_DEPTHS_WITH_CORES if each < found.ring_depth):
        placed, plan = plan_cpu(job, _residency(job, scheme, divided=True, depth=depth), scheme, graphs, may_attend)
        if not isinstance(plan, str) and (found_s := decode_step_s(placed, plan, graphs)) < SHORTER * best_s:
            best, best_s = (placed, plan), found_s
    return best


def without_spare_slots(job: Job, found: Placement, scheme: GroupQuantization | None) -> Placement:
    """`found`, planned anew with a ring of the usual depth where decode steps fetch nothing: more slots would only cover what the host does
    between these. Their memory holds experts instead, or stays free."""
    if found.streamed or job.config.ring_depth is not None or found.ring_depth <= DEFAULT_RING_DEPTH:
        return found
    placed = replace(_residency(job, scheme, divided=True, depth=DEFAULT_RING_DEPTH), few_tokens=found.few_tokens)
    placed = (
        placed.with_cpu_shares(1.0, 1.0).with_quota(found.quota, spare_slots(job, placed.ring_depth)).with_budget_used()
    )
    return found if placed.streamed else placed


def _laid_out(job: Job, scheme: GroupQuantization | None, divided: bool) -> Any:
    """Return the result of `lay_out_blocks`, which is called once, with the bytes that a quantized head takes."""
    ranks = job.ranks.world_size
    blocks, layouts, outside = job.empty_model.cached(
        ("blocks", scheme, ranks, divided), lambda: lay_out_blocks(job.empty_model.model, scheme, ranks, divided)
    )
    head = _head(job, scheme, layouts)
    return blocks, layouts, outside if head is None else outside - head.plain_bytes + head.stored_bytes


def _head(job: Job, scheme: GroupQuantization | None, layouts: Sequence[BlockLayout]) -> HeadWeight | None:
    """Return the output head if it is to be quantized: with layers whose workspace holds rows of it."""
    if scheme is None:
        return None
    asked = job.config.quant_group_size
    sizes = GROUP_SIZES[HEAD_BITS] if asked is None else asked, GROUP_SIZES[HEAD_BITS]
    found = job.empty_model.cached(
        ("head", job.spec.dtype, sizes), lambda: find_head(job.empty_model.model, job.spec.dtype, sizes)
    )
    fits = found is not None and found.row_bytes <= max(layout.workspace_bytes for layout in layouts)
    return found if fits else None


def _reads_group_sizes(job: Job, placement: Placement) -> bool:
    """Return whether the host reads in a decode step how many rows each group of experts has: they are dequantized in several."""
    layouts = (layout for block, layout in enumerate(placement.layouts) if block not in placement.cpu_computed)
    stored = (each for layout in layouts for each in layout.parameters)
    return job.on_gpu and job.rank_batch > FUSED_ROWS and any(0 < each.group < each.plain.shape[0] for each in stored)


def _residency(job: Job, scheme: GroupQuantization | None, divided: bool, depth: int | None = None) -> Placement:
    config, ranks = job.config, job.ranks.world_size
    blocks, layouts, all_outside = _laid_out(job, scheme, divided)
    slots = depth or config.ring_depth

    def decided(on_host: EmbeddingTable | None) -> Placement:
        outside = all_outside - (0 if on_host is None else on_host.nbytes)
        budget, others = None, ""
        if job.free_device_bytes is not None:
            activations = int((1 + UNUSABLE_SHARE) * job.activation_bytes)
            budget = job.free_device_bytes - outside - job.cache_device_bytes - activations - RESERVE_BYTES
            others = others_in_words(job, outside, activations, RESERVE_BYTES, on_host is None)
        found = plan_placement(layouts, outside, budget, config.gpu_memory, slots, ranks, blocks, others)
        return replace(found, embedding=on_host, gathers=job.pin_weights or not job.on_gpu)

    embedding = table_for_host(job)
    if embedding is None:
        return decided(None)
    with contextlib.suppress(DoesNotFit):  # it may without the embedding
        found = decided(None)
        if not found.in_host_memory:
            return found
    return decided(embedding)


def places_in_words(found: Placement) -> str:
    """Where the weights are, of a model that has some in host memory, beside a GPU."""
    hosted = found.layers_of(found.in_host_memory)
    embedding = f"{format_bytes(found.embedding_bytes)} of input embedding"
    if not hosted:
        return f"all layers on the device, {embedding} in host memory"
    host = f"in host memory ({format_bytes(found.host_bytes)}{f' and {embedding}' if found.embedding else ''})"
    if set(found.expert_blocks).issuperset(found.in_host_memory):
        return f"the experts of {len(hosted)} of {found.layers} layers {host}, everything else on the device"
    if len(hosted) == found.layers:
        return f"all {found.layers} layers {host}"
    return f"{found.layers - len(hosted)} of {found.layers} layers on the device, {len(hosted)} {host}"


def others_in_words(job: Job, outside_bytes: int, activations: int, reserve: int, embeds: bool) -> str:
    """Return what takes the device memory that layers do not get; `embeds`: the input embedding is on the device."""
    outside = "embedding and head" if embeds else "the output head"
    return (
        f" by {outside} ({format_bytes(outside_bytes)}), KV cache ({format_bytes(job.cache_device_bytes)}), "
        f"activations ({format_bytes(activations)}) and a reserve ({format_bytes(reserve)}), "
        f"of {format_bytes(job.free_device_bytes or 0)} free"
    )


def experts_in_words(found: Placement) -> list[str]:
    """Return lines about the experts in host memory that the device keeps, and fetches."""
    lines = []
    if slots := found.expert_slots:
        number = sum(found.blocks[block].experts.number for block in found.expert_blocks)
        lines.append(
            f"the device also keeps the {sum(slots.values())} most used of the {number} experts in host memory: "
            f"{format_bytes(found.expert_slot_bytes)}"
        )
    if found.quota:
        lines.append(
            f"of {len(found.quota) - 1} chosen experts that the device does not keep, it fetches {found.quota[-1]} itself, and "
            "the CPU multiplies the others"
        )
    return lines


def cores_in_words(cores: CpuPlan, found: Placement) -> str:
    """What the host's cores do in a decode step."""
    threads = len(cores.cpus)
    who = f"{threads} thread{'s' * (threads > 1)} ({cores.instructions})" if cores.instructions else "the host's cores"
    one = bool(cores.instructions) and threads == 1
    tasks = [f"multipl{'ies' if one else 'y'} {_products_in_words(found)}"] if found.cpu_computed else []
    if cores.attends:
        tasks.append(f"attend{'s' * one} over {format_bytes(cores.kv_bytes)} of keys and values")
    for_ranks = f" for {cores.ranks} ranks" if cores.ranks > 1 else ""
    line = f"{who} {' and '.join(tasks)} in host memory{for_ranks}"
    if cores.kv_bytes and cores.ranks > 1:
        line += "; keys and values cross the link, because each rank has its own"
    return line


def prompts_in_words(cores: CpuPlan) -> list[str]:
    """Return a line about the prompts in which the CPU multiplies a share, if there are any."""
    if not cores.prompt_rows:
        return []
    share = f"{cores.prompt_share:.0%} of the weights in host memory"
    return [f"prompts of up to {cores.prompt_rows} tokens: the CPU multiplies {share}, the rest crosses the link"]


def _products_in_words(found: Placement) -> str:
    """Of the cores; of experts, as many as tokens are expected to choose."""
    stored = sum(found.layouts[block].stored_bytes for block in found.cpu_computed)
    chosen = f" (the experts that tokens choose, of {format_bytes(stored)})" if stored > found.computed_bytes else ""
    return f"{format_bytes(found.computed_bytes)}{chosen}"


def rates_in_words(cores: CpuPlan) -> list[str]:
    """A line about the rates that the plan is made with, where they are known."""
    if cores.rates is None:
        return []
    rates, tokens = cores.rates, cores.few_rows * cores.ranks
    link, link_alone, found, alone = map(
        three_digits,
        (rates.link_gb_per_s, rates.link_alone_gb_per_s, rates.cores_gb_per_s, rates.cores_alone_gb_per_s),
    )
    return [
        f"working side by side: link{'s' * (cores.ranks > 1)} {link} GB/s (alone {link_alone}), "
        f"cores {found} GB/s (alone {alone}) with {tokens} token{'s' * (tokens > 1)} a pass"
    ]
