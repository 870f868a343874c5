"""The plan of a stream run: what is resident, streamed or CPU-computed, from options, the empty model and measured rates.

`plan` places blocks on device and host (`placement.plan_placement`), gives some to the CPU (`cpu_plan.plan_cpu`), and then tries rings of
fewer slots. No weight is read for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from zero_inference.config.options import GROUP_SIZES, MIN_RING_DEPTH
from zero_inference.cpu.products import quantize
from zero_inference.engines.base import CacheShare, CostTerms, CpuWork, EnginePlan, Footprint, Job
from zero_inference.engines.stream.blocks import Block, lay_out_blocks, refuse_several_devices
from zero_inference.engines.stream.cpu_plan import (
    FETCH_RATE_RATIO,
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
from zero_inference.engines.stream.devices import prefill_micro_batches, should_alternate
from zero_inference.engines.stream.disk_plan import CONVERTED_SUFFIX, blocks_in_files, host_budget
from zero_inference.engines.stream.layout import StoredParameter
from zero_inference.engines.stream.placement import (
    DEFAULT_RING_DEPTH,
    GIB,
    Placement,
    assign_layers,
    main_format,
    plan_placement,
)
from zero_inference.engines.stream.rebalance import rebalanced_s
from zero_inference.engines.stream.ring import overlapped_step_s, prefill_bytes, prefill_copies
from zero_inference.engines.stream.vocabulary import (
    HEAD_BITS,
    EmbeddingTable,
    HeadWeight,
    find_head,
    find_host_embedding,
)
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.hardware.profile import link_shares, links_gb_per_s
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.formats import WeightFormat
from zero_inference.kernels.products import FUSED_DTYPES, FUSED_ROWS, format_can_fuse
from zero_inference.kernels.quantization import GroupQuantization, dequantize
from zero_inference.kv_cache.device import takes_cache
from zero_inference.models.layers import decoder_layers
from zero_inference.utils.direct_io import Extent
from zero_inference.utils.format import format_bytes, three_digits

RESERVE_BYTES = 1 << 30  # device memory left to cuBLAS, the allocator's rounding, the graph of a step and the display
# Share of the activations that the allocator is estimated to hold in free blocks too small for the next request: it keeps those of hidden
# states while a feed-forward takes larger ones. Llama-3.1-405B with 32 x 128 tokens ran with 2.68 GB set aside for both and not with 2.15
# (benchmarks/LOG.md); this makes 2.77.
FRAGMENTED_SHARE = 0.5
RING_DEPTHS_WITH_CPU = 12, 8, 6, 5, 4  # numbers of ring slots that are tried where the CPU multiplies too
MAX_STEP_RATIO = 0.98  # fewer slots are taken if a step's predicted time falls at least to this share
NO_SPACE_FOR_EXPERTS = "host memory has no space for the experts in the GPU's cache as well"
SLOWER_ATTENTION = "a step with CPU attention is predicted to take longer"


@dataclass(frozen=True)
class StreamPlan(EnginePlan):
    placement: Placement
    cpu: CpuPlan | None = None  # None if the CPU computes nothing
    no_cpu: str | None = None  # why it computes nothing; None if it does, or if nothing is in host memory
    no_graph: str | None = None  # why decode steps are not CUDA graphs; None if they may be
    no_cpu_attention: str | None = None  # why keys and values in host memory cross the link; None if they do not
    head: HeadWeight | None = None  # the output head if it is quantized
    # blocks on disk that are read from files that exist: the checkpoint's, or a converted one
    in_place: Mapping[int, list[Extent]] = field(default_factory=dict)

    def prepare(self) -> None:
        job = self.job
        if (self.placement.format is not None or self.cpu is not None) and job.on_gpu:
            load_extension(None if job.config.verbose > 0 else lambda line: None)

    @property
    def layer_devices(self) -> Sequence[int]:
        return self.placement.layer_devices

    @property
    def uses_disk(self) -> bool:
        return bool(self.placement.on_disk)

    @property
    def prefill_micro_batches(self) -> int:
        return prefill_micro_batches(self.job, self.layer_devices) if self.placement.may_divide else 1

    def weight_bytes_on(self, device: int) -> int:
        shared_bytes, _ = _shared_bytes(self.job, self.placement)  # of a draft, which has one device
        return self.placement.device_bytes_on(device) - shared_bytes

    def fetched_bytes_on(self, device: int) -> int:
        placement, experts = self.placement, self.placement.cpu_experts
        share = len(placement.on(device, experts)) / max(1, len(experts))
        rows = self.job.step_tokens * placement.embedding_row_bytes if device == 0 else 0
        streamed = placement.nbytes_of(placement.on(device, placement.streamed))
        return streamed + round(share * placement.fetched_expert_bytes) + rows

    def min_free_bytes_on(self, device: int) -> int:
        if not self.peak_bytes_on(device):
            return 0
        activations = int((1 + FRAGMENTED_SHARE) * self.job.activation_bytes) + self.graph_bytes
        cache = self.job.cache_bytes_on(self.cache_share_on(device))
        return self.weight_bytes_on(device) + cache + activations + RESERVE_BYTES

    @property
    def graph_bytes(self) -> int:
        return self.job.pass_graph_bytes if self.placement.graphs else 0

    def quantize_dequantize(self, name: str, values: torch.Tensor) -> torch.Tensor:
        scheme, transposed = self.scheme, False
        if self.head is not None and name == self.head.name:
            scheme = self.head.scheme
        elif name in self.stored and self.stored[name][1].packed is not None:
            transposed = self.stored[name][1].transposed
        else:
            return values
        if scheme is None:
            return values  # of a weight that is kept as the checkpoint stores it
        values = values.to(self.job.devices[0])  # as the store does
        values = values.mT if transposed else values
        restored = torch.empty_like(values, memory_format=torch.contiguous_format)
        dequantize(scheme.as_weight(*quantize(values, scheme)), restored)
        return restored.mT if transposed else restored

    @property
    def shared_layers(self) -> int:
        return len({self.placement.blocks[block].layer for block in shared_blocks(self.job, self.placement.blocks)})

    @functools.cached_property
    def stored(self) -> dict[str, tuple[int, StoredParameter]]:
        """(index of the block, layout in it) of each parameter that a block holds, by its full name."""
        prefix, _ = decoder_layers(self.job.empty_model.model)
        return {
            block.full_name(prefix, stored.name): (index, stored)
            for index, block in enumerate(self.placement.blocks)
            for stored in block.layout.parameters
        }

    @property
    def scheme(self) -> GroupQuantization | None:
        """Scheme by which loading quantizes weights; None if it does not."""
        return _scheme(self.job)

    @functools.cached_property
    def quantized(self) -> set[str]:
        """Names of the parameters that are stored quantized."""
        head = set() if self.head is None else {self.head.name}
        return head | {name for name, (_, stored) in self.stored.items() if stored.packed is not None}

    @property
    def kept(self) -> dict[str, tuple[WeightFormat, bool]]:
        """Parameter -> (format, stored transposed) of the weights that are kept as the checkpoint stores them."""
        return {name: each for name, each in self.job.stored_formats.items() if name in self.quantized}

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        job, placement, cpu = self.job, self.placement, self.cpu
        rates = None if cpu is None else cpu.rates
        cpu_gb_per_s = None if cpu is None else cpu.of_step_gb_per_s(placement.computed_bytes)
        profile = job.machine.profile()
        prefill_link_gb_per_s, prefill_cpu = None, CpuWork()
        links = None if profile is None else links_gb_per_s(profile, job.num_gpus)
        if links is not None and placement.gathered:
            prefill_link_gb_per_s = FETCH_RATE_RATIO * links
        if cpu is not None and cpu.prompt_rates is not None:
            in_prompt = placement.for_short_prompt(cpu.prompt_rows)
            prefill_link_gb_per_s = cpu.prompt_rates.link_gb_per_s
            prefill_cpu_s = sum(cpu_block_s(in_prompt, cpu.prompt_rates).values())
            prefill_cpu = CpuWork(*self._cpu_shares(in_prompt), prefill_cpu_s)
        profile_lacks_cpu = not job.machine.is_here and profile is not None and profile.cores is None
        cpu_could_help = job.on_gpu and placement.host_bytes and cpu is None and job.config.cpu_share is None
        fused = job.on_gpu and placement.fuses_codes
        prompt_tokens = job.rank_batch * job.config.prompt_len
        return CostTerms(
            prefill_disk_bytes=placement.nbytes_of(prefill_copies(placement) & placement.on_disk),
            prefill_fetched_bytes=prefill_bytes(placement) + prompt_tokens * placement.embedding_row_bytes,
            chosen_expert_bytes=round(placement.fetched_expert_bytes),
            prefill_link_gb_per_s=prefill_link_gb_per_s,
            link_beside_cpu_gb_per_s=rates.link_gb_per_s if rates and cpu_gb_per_s else None,
            cpu_beside_link_gb_per_s=cpu_gb_per_s,
            copies_within_host=True,
            fetches=len(placement.offloaded),
            resident_quantized_blocks=0 if placement.format is None else len(placement.resident),
            graphs=placement.graphs,
            fused_rows=FUSED_ROWS if fused else 0,
            head_plain_bytes=0 if self.head is None else self.head.plain_bytes,
            head_stored_bytes=0 if self.head is None else self.head.stored_bytes,
            dequantizes_on_cpu=job.quantized and not job.on_gpu and cpu is None,
            step_cpu=CpuWork(*self._cpu_shares(placement), 0.0 if cpu is None else cpu.cpu_wait_s(placement)),
            prefill_cpu=prefill_cpu,
            cpu_attention_layers=len(job.sizes.kv_widths) if cpu is not None and cpu.attends else 0,
            cpu_alone_s=0.0 if rates is None else placement.computed_bytes / (rates.cores_alone_gb_per_s * 1e9),
            cpu_rate_unknown=bool(cpu_could_help and profile_lacks_cpu),
            depends_on_routing=bool(placement.cpu_experts),
        )

    def alternative(self) -> StreamPlan | None:
        """Return the plan without CPU attention: `plan` chose it by bandwidth alone, without the host's time for each layer."""
        if self.cpu is None or not (self.cpu.attends and self.cpu.automatic):
            return None
        try:
            other = plan(self.job, may_attend=False)
        except DoesNotFit:  # layers that are not divided need more memory
            return None
        return replace(other, no_cpu=other.no_cpu if other.cpu else SLOWER_ATTENTION, no_cpu_attention=SLOWER_ATTENTION)

    def without_short_prompts(self) -> StreamPlan | None:
        if self.cpu is None or not self.cpu.prompt_rows:
            return None
        cpu = replace(self.cpu, prompt_rows=0, prompt_share=0.0, prompt_rates=None)
        return replace(self, placement=replace(self.placement, prompt_cpu_computed=frozenset()), cpu=cpu)

    @property
    def why_whole_layers(self) -> str:
        blocks, _ = _laid_out(self.job, divided=True)
        if not any(block.experts is not None and block.computable for block in blocks):
            return "the CPU does not multiply experts of this form"
        if self.cpu:
            return "the CPU multiplies only a part of them"
        return f"the CPU computes nothing: {self.no_cpu}" if self.job.on_gpu else "PyTorch computes whole layers"

    @property
    def gpu_memory_bytes(self) -> int | None:
        return self.placement.reserved_bytes

    @property
    def ring_depth(self) -> int | None:
        return self.placement.ring_depth if self.placement.ring_depth >= MIN_RING_DEPTH else None

    @property
    def measures_link_with_weights(self) -> bool:
        return self.pinned and self.placement.host_bytes > 0

    def _cpu_shares(self, placement: Placement) -> tuple[float, float]:
        """Return the shares of blocks without experts, and of experts, that the CPU multiplies for a GPU, which multiplies cached experts
        itself. Zero without a GPU: the CPU is the device then, and its products with codes are measured as such."""
        if not self.job.on_gpu:
            return 0.0, 0.0
        nbytes, on_cpu = placement.nbytes_of, placement.cpu_experts
        experts_bytes = nbytes(index for index, block in enumerate(placement.blocks) if block.experts is not None)
        other_bytes = nbytes(range(len(placement.blocks))) - experts_bytes
        computed_bytes = max(0, nbytes(on_cpu) - (placement.expert_slot_bytes if on_cpu else 0))
        return nbytes(placement.cpu_computed - on_cpu) / max(1, other_bytes), computed_bytes / max(1, experts_bytes)

    def rebalanced_s(self, link_s: float, compute_s: float) -> tuple[float, float]:
        return (link_s, compute_s) if self.cpu is None else rebalanced_s(self.cpu, self.placement, link_s, compute_s)

    def overlapped_s(self, link_s: float, compute_s: float) -> float:
        cpu_s = {} if self.cpu is None or self.cpu.rates is None else cpu_block_s(self.placement, self.cpu.rates)
        return overlapped_step_s(self.placement, cpu_s, link_s, compute_s)

    def in_words(self) -> list[str]:
        placement, on_gpu, lines = self.placement, self.job.on_gpu, []
        if placement.offloaded and (on_gpu or self.fetched_bytes):
            lines.append(f"each decode step {self.describe_copies()}")
        if placement.on_disk:
            cached = f"; host memory caches {placement.host_expert_slots} experts" if placement.cached_on_host else ""
            lines.append(f"each decode step reads {format_bytes(self.disk_bytes)} from disk{cached}")
            lines.append(self._describe_files())
        if self.cpu is not None and placement.offloaded:
            lines += self._describe_cpu(self.cpu)
        elif self.no_cpu and (placement.offloaded or self.job.config.kv_offload):
            lines.append(f"{'the CPU computes nothing' if on_gpu else 'PyTorch computes all layers'}: {self.no_cpu}")
        form = placement.format
        if on_gpu and form and not placement.fuses_codes:
            fusing = [dtype for dtype in FUSED_DTYPES if format_can_fuse(form, dtype)]
            advice = [f": --dtype {str(dtype).removeprefix('torch.')} multiplies their codes" for dtype in fusing[:1]]
            lines.append("".join(["the device dequantizes weights in every step", *advice]))
        if self.no_cpu_attention not in (None, self.no_cpu):
            lines.append(f"the CPU backend does not compute attention: {self.no_cpu_attention}")
        if self.cpu is None and placement.offloaded:
            lines += self.dequantization_warning()
        if slots := placement.expert_slots:
            size = format_bytes(placement.expert_slot_bytes)
            lines.append(f"expert cache on the device: {sum(slots.values())} experts ({size})")
        if quota := placement.quota:
            lines.append(f"of {len(quota) - 1} missed experts of a layer, the device fetches {quota[-1]}")
        return lines

    def _describe_files(self) -> str:
        written, folder = self.footprint.disk, self.job.config.offload_path
        paths = dict.fromkeys(extent.path for extents in self.in_place.values() for extent in extents)
        if converted := [path for path in paths if path.suffix == CONVERTED_SUFFIX]:
            return f"weights on disk are read from {converted[0]}"
        in_place = ["are read from the checkpoint's files"] if paths else []
        if written:
            in_place.append(
                f"are written to {folder} while loading ({format_bytes(written)}; zero-inference convert keeps them)"
            )
        return f"weights on disk {', others '.join(in_place)}"

    def _describe_cpu(self, cpu: CpuPlan) -> list[str]:
        """Describe what the CPU computes in decode steps, at which rates, and in which prompts."""
        placement, rates, tasks = self.placement, cpu.rates, []
        if placement.cpu_computed:
            stored = format_bytes(sum(placement.blocks[block].layout.stored_bytes for block in placement.cpu_computed))
            chosen = f" (the chosen experts of {stored})" if placement.cpu_experts else ""
            tasks.append(f"multiplies {format_bytes(placement.computed_bytes)}{chosen}")
        if cpu.attends:
            tasks.append(f"attends over {format_bytes(cpu.kv_bytes)} of keys and values")
        threads = f" (threads: {len(cpu.cpus)}, {cpu.instructions})" if cpu.instructions else ""
        lines = [f"the CPU{threads} {' and '.join(tasks)} in host memory"]
        if rates is not None:
            link, link_alone = three_digits(rates.link_gb_per_s), three_digits(rates.link_alone_gb_per_s)
            beside, alone = three_digits(rates.cores_gb_per_s), three_digits(rates.cores_alone_gb_per_s)
            lines.append(
                f"side by side: link{'s' * (cpu.gpus > 1)} {link} GB/s (alone {link_alone}), CPU {beside} GB/s (alone {alone}), "
                f"tokens a pass: {cpu.decode_rows}"
            )
        if cpu.prompt_rows:
            share = f"{cpu.prompt_share:.0%} of the weights in host memory"
            lines.append(f"prompts of up to {cpu.prompt_rows} tokens: the CPU multiplies {share}")
        return lines

    def describe_location(self) -> str:
        placement = self.placement
        if not (placement.offloaded or placement.embedding) or not (self.job.on_gpu or placement.on_disk):
            return super().describe_location()
        embedding = f" and {format_bytes(placement.embedding_bytes)} of input embedding" if placement.embedding else ""
        offloaded = (placement.blocks[block] for block in placement.offloaded)
        only_experts = all(block.experts is not None for block in offloaded) and placement.offloaded
        layers = f"{'the experts of ' if only_experts else ''}{placement.offloaded_layers} of {placement.layers} layers"
        homes = [f"in host memory ({format_bytes(placement.host_bytes)}{embedding})"]
        if placement.on_disk:
            homes = homes * bool(placement.in_host_memory) + [f"on disk ({format_bytes(placement.disk_bytes)})"]
        return f"{layers} {' and '.join(homes)}" + ", everything else on the device" * self.job.on_gpu


def plan(job: Job, may_attend: bool = True) -> StreamPlan:
    """Plan a run; `may_attend`: the CPU may compute attention over keys and values in host memory.

    Raises:
        UsageError: no decoder layers to stream, a group size that does not divide, a device too small (DoesNotFit), or a share for the CPU
            that it cannot compute.
    """
    refuse_several_devices(job)
    no_cpu_at_all = why_no_cpu_compute(job, not job.on_gpu and bool(_place(job, divided=True).cached_on_host))
    with_cpu = no_cpu_at_all or _plan_with_cpu(job, may_attend)  # or why not; None if all is on the device
    no_cpu = with_cpu if isinstance(with_cpu, str) else None
    placement, cpu = with_cpu if isinstance(with_cpu, tuple) else (_place(job, _target_is_divided(job)), None)
    # smaller blocks, whose layout does not depend on what the CPU computes
    if cpu is None and placement.on_disk:
        placement = _place(job, divided=True, caches_experts=False).with_budget_used()
    if job.config.disk_offload and not placement.on_disk:
        raise UsageError(
            "--disk-offload: all weights fit on the device and in --host-memory, so none are on disk; drop it, or lower "
            f"{'--gpu-memory or ' * job.on_gpu}--host-memory."
        )
    on_disk, experts = bool(placement.on_disk), bool(placement.cached_on_host)
    no_graph = why_no_graph(job, _reads_group_sizes(job, placement), on_disk, experts)
    placement = replace(placement, graphs=job.on_gpu and no_graph is None)
    shared_device, shared_host = _shared_bytes(job, placement)
    host = placement.host_bytes + placement.host_expert_bytes + placement.disk_slots_bytes
    host += placement.embedding_bytes - shared_host
    pinned, in_place = job.pin_weights, {}
    if placement.on_disk:
        possible = blocks_in_files(job, placement.blocks)
        in_place = {block: extents for block, extents in possible.items() if block in placement.on_disk}
    written = sum(slot_bytes for block, slot_bytes in placement.disk_file.items() if block not in in_place)
    attends = cpu is not None and cpu.attends
    no_cpu_attention = None
    if job.config.kv_offload and not attends:
        no_cpu_attention = no_cpu_at_all or why_no_cpu_attention(job) or no_cpu or SLOWER_ATTENTION
    return StreamPlan(
        job,
        Footprint(device=placement.device_bytes - shared_device, host=host, pinned=host if pinned else 0, disk=written),
        pinned,
        placement,
        cpu=cpu,
        no_cpu=no_cpu,
        no_graph=no_graph,
        no_cpu_attention=no_cpu_attention,
        head=_head(job, placement.blocks),
        in_place=in_place,
        weight_bytes=placement.stored_bytes,
        fetched_bytes=placement.nbytes_of(placement.streamed)
        + round(placement.fetched_expert_bytes)
        + job.step_tokens * placement.embedding_row_bytes,
        disk_bytes=placement.disk_step_bytes,
        cpu_bytes=0 if cpu is None else placement.computed_bytes + (cpu.kv_bytes if attends else 0),
        copies_kv=not attends,
        preallocated_cache=takes_cache(job.empty_model.model) and not job.window_only_in_cache,
    )


def _plan_with_cpu(job: Job, may_attend: bool) -> tuple[Placement, CpuPlan] | str | None:
    """Return a placement of divided layers and what the CPU computes of it; or why it computes nothing; None if all is on the device."""
    config, divided = job.config, _place(job, divided=True)
    if not divided.offloaded and not config.kv_offload:
        if config.cpu_share is not None:
            raise UsageError(
                f"--cpu-compute {config.cpu_compute}: all weights are on the device, so the CPU has nothing to compute; lower "
                "--gpu-memory, or drop --cpu-compute."
            )
        return None
    if divided.on_disk and not _place(job, divided=False).on_disk:
        return NO_SPACE_FOR_EXPERTS
    found = plan_cpu(job, divided, may_attend)
    if isinstance(found, str):
        return found
    placed, cpu = found
    if config.ring_depth is None:
        placed, cpu = _with_fewer_slots(job, placed, cpu, may_attend)
    needed = placed.host_bytes + placed.embedding_bytes + job.kv_host_bytes
    if cpu.automatic and placed.expert_slots and needed > job.machine.available_host_bytes():
        return NO_SPACE_FOR_EXPERTS
    return plan_short_prompts(job, placed, cpu)


def _with_fewer_slots(job: Job, placed: Placement, cpu: CpuPlan, may_attend: bool) -> tuple[Placement, CpuPlan]:
    """Return both planned again with fewer ring slots where their memory shortens decode steps more; unchanged otherwise."""
    if job.on_gpu and job.config.gpu_memory is None and cpu.automatic and cpu.rates is not None:
        # where the CPU multiplies most of host memory's weights, no step waits for the link: resident layers gain more than ring slots
        slots, best_s = placed.ring_depth, decode_step_s(placed, cpu)
        for depth in (each for each in RING_DEPTHS_WITH_CPU if each < slots):
            found = plan_cpu(job, _place(job, divided=True, depth=depth), may_attend)
            if not isinstance(found, str) and (step_s := decode_step_s(*found)) < MAX_STEP_RATIO * best_s:
                (placed, cpu), best_s = found, step_s
    if not placed.streamed and placed.ring_depth > DEFAULT_RING_DEPTH:
        # all is CPU-computed: more slots would not make decode steps faster, and their memory can hold experts
        other = replace(_place(job, divided=True, depth=DEFAULT_RING_DEPTH), decode_tokens=placed.decode_tokens)
        other = other.with_cpu_shares(1.0, 1.0).with_quota(placed.quota, spare_slots(job, other.ring_depth))
        other = other.with_budget_used()
        placed = placed if other.streamed else other
    return placed, cpu


def _scheme(job: Job) -> GroupQuantization | None:
    config = job.config
    return GroupQuantization(config.bits_of_plain, config.group_size, job.spec.dtype) if config.quantized else None


def _laid_out(job: Job, divided: bool) -> tuple[list[Block], int]:
    """Return blocks and the bytes of all other parameters, as `lay_out_blocks` (cached), with the head as it is stored."""
    scheme, stored = _scheme(job), job.stored_formats
    blocks, outside_bytes = job.empty_model.cached(
        ("blocks", scheme, bool(stored) and job.spec.weights_are_here, bool(stored), divided),
        lambda: lay_out_blocks(job.empty_model.model, scheme, divided, stored),
    )
    if job.target is not None:
        placed, shared = job.target.placement, shared_blocks(job, blocks)
        own = (placed.blocks[shared[index]] if index in shared else each for index, each in enumerate(blocks))
        blocks = [block for block in own if block.layer not in job.skipped]
        return blocks, placed.outside_bytes + placed.embedding_bytes
    head = _head(job, blocks)
    return blocks, outside_bytes if head is None else outside_bytes - head.plain_bytes + head.stored_bytes


def _target_is_divided(job: Job) -> bool:
    return job.target is not None and any(block.module for block in job.target.placement.blocks)


def _shared_bytes(job: Job, placement: Placement) -> tuple[int, int]:
    """Return the bytes on the device and in host memory that a draft shares with its target model: blocks that are resident there, and
    everything outside of blocks."""
    if job.target is None:
        return 0, 0
    shared, resident = shared_blocks(job, placement.blocks).keys(), set(placement.resident)
    on_device = placement.nbytes_of(shared & resident) + placement.outside_bytes
    return on_device, placement.nbytes_of(shared - resident) + placement.embedding_bytes


def shared_blocks(job: Job, blocks: Sequence[Block]) -> dict[int, int]:
    """Return which of the `blocks` of a draft share the weights of which block of the target model."""
    if job.target is None:
        return {}
    names = {(each.layer, each.module): index for index, each in enumerate(job.target.placement.blocks)}
    found = {index: names.get((each.layer, each.module)) for index, each in enumerate(blocks)}
    return {index: theirs for index, theirs in found.items() if theirs in job.shared}


def _head(job: Job, blocks: Sequence[Block]) -> HeadWeight | None:
    """Return the output head if it is to be quantized: with layers whose workspace holds rows of it."""
    if job.target is not None:
        return job.target.head
    if not job.config.quantized:
        return None
    given, default = job.config.quant_group_size, GROUP_SIZES[HEAD_BITS]
    sizes = default if given is None else given, default
    head = job.empty_model.cached(
        ("head", job.spec.dtype, sizes), lambda: find_head(job.empty_model.model, job.spec.dtype, sizes)
    )
    fits = head is not None and head.row_bytes <= max(block.layout.workspace_bytes for block in blocks)
    return head if fits else None


def _reads_group_sizes(job: Job, placement: Placement) -> bool:
    """Return whether the host has to read row counts in a decode step, because experts are dequantized in several groups."""
    on_device = (block for index, block in enumerate(placement.blocks) if index not in placement.cpu_computed)
    stored = (each for block in on_device for each in block.layout.parameters)
    in_groups = (0 < each.expert_group < each.plain.shape[0] for each in stored)
    return job.on_gpu and job.step_tokens > FUSED_ROWS and any(in_groups)


def _place(job: Job, divided: bool, depth: int | None = None, caches_experts: bool = True) -> Placement:
    """Place whole layers, or blocks of layers if `divided`. The input embedding is in host memory unless everything fits on the devices.

    Args:
        caches_experts: host memory may cache experts of blocks on disk, which the CPU multiplies.
    """
    config = job.config
    graphs = job.on_gpu and why_no_graph(job) is None
    blocks, all_outside_bytes = _laid_out(job, divided)
    layer_bytes = [0] * len(decoder_layers(job.empty_model.model)[1])
    for block in blocks:
        layer_bytes[block.layer] += block.layout.nbytes
    workspace_bytes = max(block.layout.workspace_bytes for block in blocks)
    links = link_shares(job.machine.profile(), len(job.devices))

    def place(embedding: EmbeddingTable | None) -> Placement:
        outside_bytes = all_outside_bytes - (0 if embedding is None else embedding.nbytes)
        activations = int((1 + FRAGMENTED_SHARE) * job.activation_bytes) + (job.pass_graph_bytes if graphs else 0)
        devices = range(len(job.devices))

        def left_bytes(device: int, cache_share: CacheShare) -> int | None:
            """Return the bytes for layers, ring and workspace on a device that has a share of the cache."""
            if not job.free_by_device:
                return None
            free = job.free_by_device[device]
            outside = outside_bytes if device == 0 else 0
            return free - outside - job.cache_bytes_on(cache_share) - activations - RESERVE_BYTES

        def capacity(device: int) -> int | None:
            left = left_bytes(device, CacheShare(1 / len(devices), 1 / len(devices)))
            budget = None if config.gpu_memory is None else int(config.gpu_memory * GIB)
            if left is None:
                return budget or 0
            return min(max(0, left - workspace_bytes), left if budget is None else budget)

        layer_devices: tuple[int, ...] = ()
        if len(devices) > 1:
            capacities = [capacity(device) for device in devices]
            layer_devices = assign_layers(layer_bytes, capacities, links, should_alternate(job))
        shares = [job.cache_share_on(device, layer_devices) for device in devices]

        def taken_by(device: int) -> str:
            if not job.free_by_device:
                return ""
            head = (
                f"{'embedding and head' if embedding is None else 'the output head'} ({format_bytes(outside_bytes)}), "
            )
            return (
                f" by {head if device == 0 else ''}KV cache ({format_bytes(job.cache_bytes_on(shares[device]))}), activations "
                f"({format_bytes(activations)}) and a reserve ({format_bytes(RESERVE_BYTES)}), of "
                f"{format_bytes(job.free_by_device[device])} free{f' on GPU {device}' if len(devices) > 1 else ''}"
            )

        placement = plan_placement(
            blocks,
            outside_bytes,
            [left_bytes(device, share) for device, share in enumerate(shares)],
            config.gpu_memory,
            depth or config.ring_depth,
            layer_devices,
            taken_by,
        )
        gathers, form = job.pin_weights or not job.on_gpu, main_format(blocks)
        fuses = form is not None and format_can_fuse(form, job.spec.dtype)
        placed = replace(placement, embedding=embedding, gathers=gathers, graphs=graphs, link_shares=links)
        placed = replace(placed, format=form, fuses_codes=fuses, ring_in_host_memory=not job.on_gpu)
        budget = host_budget(job, placed)
        if budget is None:
            return placed
        return placed.with_host_budget(budget, job.step_tokens if caches_experts and config.cpu_share != 0 else 0)

    if job.target is not None:
        return place(job.target.placement.embedding)
    embedding = find_host_embedding(job)
    if embedding is None:
        return place(None)
    with contextlib.suppress(DoesNotFit):  # it may fit without the embedding
        placement = place(None)
        if not placement.offloaded:
            return placement
    return place(embedding)
