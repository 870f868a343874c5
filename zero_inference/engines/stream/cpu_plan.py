"""Whether and how the host's cores take part: which blocks they multiply, decided by measured rates, and on which CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zero_inference.cpu.pool import FLAG_BYTES
from zero_inference.engines.base import Job
from zero_inference.engines.stream.expert_cache import multiplies_many
from zero_inference.engines.stream.overlap import FETCH_RATE, best_split, fetch_quota, overlapped_step_s, prompt_split
from zero_inference.engines.stream.placement import DEFAULT_RING_DEPTH, Placement
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import CpuWorkload
from zero_inference.hardware.rates import ConcurrentRates
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kv_cache.attention_patch import why_cpu_cannot_attend
from zero_inference.models.experts import FusedExperts
from zero_inference.records.schema import CpuBackendUse
from zero_inference.utils.format import three_digits
from zero_inference.utils.model_sizes import heads_of_key

WHY_NOT_ATTENDED = "why the cores cannot attend"  # of a model, known once
NO_LINK = "no GPU, so no weights cross PCIe"
# Two H100s, Llama-2-13B in 4 bits: batch 2 26.9 token/s without the CPU, 21.2 with it; batch 16 194 and 126 (`h100-x2`).
SEVERAL_GPUS = "several GPUs are faster without them; --cpu-compute SHARE uses them all the same"
# Short prompts: products are measured with up to `MEASURED_ROWS` rows of a weight, and their rate is taken to fall as 1 / rows above (int4,
# 15 threads: 62 GB/s with 32 rows, 37 with 64, 19 with 128). Some experts get several times the mean of rows: blocks are planned with
# `UNEVEN_ROWS` times it. Hidden states cross to the CPU and back at `CROSSED_GB_PER_S` beside a busy link (4.9 to 10 on four hosts:
# `crossing_s` by rows).
MEASURED_ROWS, MOST_PROMPT_ROWS, CROSSED_GB_PER_S, UNEVEN_ROWS = 32, 128, 5.0, 2.0
MOST_CROSSED_BYTES = 64 << 20  # of the page-locked memory for them, each way


@dataclass(frozen=True)
class CpuPlan:
    """
    Attributes:
        cpus: a thread of the host's first rank on each; -1 for one that is not bound to a core.
        share: of the bytes in host memory, that the cores are to multiply.
        few_rows: the most tokens of a decode step of a rank; in longer passes everything is fetched, except in short prompts.
        rates: what the share was computed from; None without a GPU.
        attends: whether the cores attend over keys and values in host memory.
        kv_bytes: those in host memory that a decode step reads, on average, of all ranks.
        kv_slowness: how many times as long the link takes for a byte of them as for one of page-locked memory.
        automatic: the share was found, not asked for.
        ranks: whose rows they multiply together.
        link_rests: nothing crosses the link but hidden states: no weights are in host memory.
        instructions: the instruction set of their products.
        prompt_rows: the most tokens of a prompt in which they multiply, too; 0 for none.
        prompt_share: of the bytes in host memory, that they multiply in such a prompt.
        prompt_rates: what `prompt_share` was computed from; None where it was not.
    """

    cpus: tuple[int, ...]
    share: float
    few_rows: int
    rates: ConcurrentRates | None
    attends: bool = False
    kv_bytes: int = 0
    kv_slowness: float = 1.0
    automatic: bool = False
    ranks: int = 1
    instructions: str = ""
    link_rests: bool = False
    prompt_rows: int = 0
    prompt_share: float = 0.0
    prompt_rates: ConcurrentRates | None = None

    @property
    def carried_bytes(self) -> float:
        """Of page-locked memory, that take the link as long as the keys and values that cross it."""
        return 0.0 if self.attends else self.kv_bytes * self.kv_slowness

    def attention_s(self, rates: ConcurrentRates) -> float:
        """Seconds of a decode step's attention by the cores."""
        return self.kv_bytes / (rates.attention_gb_per_s(self.link_rests) * 1e9) if self.attends else 0.0

    def waited_s(self, placement: Placement) -> float:
        """Seconds of a decode step in which the device waits for them: their work and the meetings for it; 0 without rates."""
        if self.rates is None:
            return 0.0
        meetings_s = placement.layers * self.rates.hand_off_s if self.attends else 0.0
        return sum(cpu_block_s(placement, self.rates).values()) + self.attention_s(self.rates) + meetings_s

    def facts(self, computed_bytes: int) -> CpuBackendUse:
        """For the record."""
        of_both = ("link_alone_gb_per_s", "link_gb_per_s", "cores_gb_per_s", "cores_alone_gb_per_s")
        names = (*of_both, "read_gb_per_s", "device_gb_per_s")
        return CpuBackendUse(
            threads=len(self.cpus),
            instructions=self.instructions,
            share=self.share,
            rows=self.few_rows,
            prompt_rows=self.prompt_rows,
            prompt_share=self.prompt_share,
            attends=self.attends,
            of_step_gb_per_s=self.of_step_gb_per_s(computed_bytes),
            attention_gb_per_s=self.rates.attention_gb_per_s(self.link_rests) if self.rates and self.attends else None,
            crossing_s=None if self.rates is None else self.rates.hand_off_s,
            **{name: None if self.rates is None else getattr(self.rates, name) for name in names},
        )

    def in_steps_gb_per_s(self, placement: Placement, busy_s: float) -> float:
        """GB/s of products as seen in steps that kept the cores busy for `busy_s` each; the plan's rate where experts leave open
        what was read.

        Raises:
            ValueError: there are no rates.
        """
        if self.rates is None:
            raise ValueError("no rates were measured")
        expected_s = placement.computed_bytes / (self.rates.cores_gb_per_s * 1e9)
        expected_s += self.attention_s(self.rates)
        if placement.expert_blocks or not busy_s or not expected_s:
            return self.rates.cores_gb_per_s
        return self.rates.cores_gb_per_s * expected_s / busy_s

    def of_step_gb_per_s(self, computed_bytes: int) -> float | None:
        """Of products, and of attention over keys and values, each with its part of the bytes."""
        rates, attended = self.rates, self.kv_bytes if self.attends else 0
        if rates is None or not computed_bytes + attended:
            return None
        products_s = computed_bytes / (rates.cores_gb_per_s * 1e9)
        return (computed_bytes + attended) / (products_s + self.attention_s(rates)) / 1e9


def why_no_cpu_compute(job: Job) -> str | None:
    """Why the cores take no part in this run, whatever they could do, in a few words; None where they may.

    Raises:
        UsageError: they were asked for, and cannot.
    """
    share, hosts = job.config.cpu_share, job.ranks.num_nodes
    if share == 0:
        return "--cpu-compute off"
    if hosts > 1 and share is not None:
        raise UsageError(
            f"--cpu-compute {job.config.cpu_compute}: the ranks are on {hosts} hosts, each with a part of every layer, and a host's cores "
            "multiply only what is in its own memory; use one host, or --cpu-compute off."
        )
    if hosts > 1:
        return "the ranks are on several hosts"
    if share is None and not (job.on_gpu and job.machine.gpus()) and not multiplies_codes(job):
        return NO_LINK
    if share is None and job.ranks.world_size > 1:
        return SEVERAL_GPUS
    missing = job.machine.missing_code(job.on_gpu)
    if not _is_alone(job):
        missing = next(filter(None, job.ranks.gather_objects(missing)), None)
    if missing and share is not None:
        raise UsageError(
            f"--cpu-compute {job.config.cpu_compute}: its code could not be compiled: {missing.rstrip('.')}; or use --cpu-compute off."
        )
    return f"their code could not be compiled: {missing}" if missing else None


def why_no_cpu_attention(job: Job) -> str | None:
    """Return why the cores cannot attend over keys and values in host memory, in a few words; None where they can."""
    if job.ranks.world_size > 1:
        return "each rank has its own"
    if not job.empty_model.is_empty and WHY_NOT_ATTENDED not in job.empty_model.cache:
        return "it was not tried before the weights were loaded"
    reason = job.empty_model.cached(WHY_NOT_ATTENDED, lambda: why_cpu_cannot_attend(job.empty_model.model))
    return reason and f"{job.spec.text_config.model_type} {reason}"


def multiplies_codes(job: Job) -> bool:
    """Return whether the CPU multiplies codes as they are stored: without a GPU, unless --cpu-compute is given. Dequantizing them first
    takes longer than reading weights in 16 bits."""
    return not job.on_gpu and job.config.quantized and job.config.cpu_share is None and job.ranks.world_size == 1


def plan_cpu(
    job: Job, placement: Placement, scheme: GroupQuantization | None, graphs: bool, may_attend: bool = True
) -> tuple[Placement, CpuPlan | str]:
    """The blocks of `placement` with those that the cores multiply, and how they do; or why they had better not.

    Args:
        graphs: decode steps are CUDA graphs, whose blocks come into the same slots in every step.
        may_attend: over keys and values in host memory.

    Raises:
        UsageError: a share was asked for of a model that has nothing for them, or more threads than cores.
    """
    config, ranks = job.config, job.ranks.world_size
    cpus = job.machine.cpus(job.ranks, config.cpu_threads)
    share = 1.0 if multiplies_codes(job) else config.cpu_share
    can_attend = may_attend and config.kv_offload and not multiplies_codes(job) and why_no_cpu_attention(job) is None
    if not placement.computable and not can_attend:
        if config.cpu_share is None:
            return placement, "host memory has no weights that they can multiply"
        raise UsageError(
            f"--cpu-compute {config.cpu_compute}: {job.spec.name} has no block in host memory that the cores can multiply "
            "(linear modules of a decoder layer's attention or feed-forward, or experts); use --cpu-compute off."
        )
    found = _rates(job, scheme, cpus, can_attend)
    rates = found if isinstance(found, ConcurrentRates) else None
    placement = replace(placement, few_tokens=ranks * job.rank_batch)
    kv_bytes = ranks * job.mean_kv_bytes if config.kv_offload else 0
    plan = CpuPlan(
        cpus,
        0.0,
        job.rank_batch,
        rates,
        can_attend,
        kv_bytes,
        _kv_slowness(job, rates),
        ranks=ranks,
        instructions=job.machine.instructions(),
        link_rests=not placement.host_bytes,
    )

    def fetching(placed: Placement) -> Placement:
        if not job.pin_weights or rates is None:
            return placed
        return placed.with_quota(fetch_quota(placed.with_budget_used(), rates), spare_slots(job, placed.ring_depth))

    if share is not None:
        placement = placement.with_cpu_share(share)
        if not placement.cpu_computed and not can_attend:
            raise UsageError(
                f"--cpu-compute {config.cpu_compute}: this share of {job.spec.name} is less than half a block, and blocks are not divided; "
                "use a larger share, or --cpu-compute off."
            )
        if placement.with_budget_used().expert_slots:  # whose experts change by being fetched
            placement = fetching(placement)
        return placement.with_budget_used(), replace(plan, share=share)
    if isinstance(found, str):
        return placement, found
    carried = kv_bytes * plan.kv_slowness
    best = best_split(placement.with_cpu_shares(1.0, 0.0), found, kv_bytes, can_attend, carried)
    if not (best.of_experts or best.of_others or best.attends):
        rates_of_both = (
            f"{three_digits(found.cores_gb_per_s)} GB/s beside a link at {three_digits(found.link_gb_per_s)} GB/s"
        )
        return placement, f"they would hardly help ({rates_of_both})"
    plan = replace(plan, attends=best.attends, automatic=True)
    # blocks of experts are so large that they may come late, though the link has time for them
    experts = sorted({best.of_experts, 1.0}) if best.of_experts else [best.of_experts]
    placed = [placement.with_cpu_shares(share, best.of_others) for share in experts]
    placed = [fetching(each).with_budget_used() for each in placed]
    placement = min(placed, key=lambda each: decode_step_s(each, plan, graphs))
    share = placement.nbytes_of(placement.cpu_computed) / max(1, placement.host_bytes)
    return placement, replace(plan, share=share)


def plan_short_prompts(
    job: Job, placement: Placement, plan: CpuPlan, scheme: GroupQuantization | None, graphs: bool
) -> tuple[Placement, CpuPlan]:
    """Return both with the blocks that the CPU multiplies in prompts of up to the planned length; unchanged where there are none.

    Codes are measured with scales in bfloat16. With others they are far slower, in float16 because AMX takes 8 rows at a time: 128 tokens
    of Llama-2-13B took 0.31 s with a sixth of the weights on the CPU (docs/performance.md).

    Args:
        graphs: as of `plan_cpu`.
    """
    if not job.on_gpu or job.ranks.world_size > 1 or plan.rates is None or plan.attends:
        return placement, plan
    tokens, blocks = job.rank_batch * job.config.prompt_len, placement.prompt_candidates
    not_measured = scheme is not None and job.spec.dtype != torch.bfloat16
    if not blocks or tokens <= plan.few_rows or not_measured:
        return placement, plan
    experts = placement.blocks[blocks[0]].experts
    rows = UNEVEN_ROWS * tokens * experts.chosen / (experts.number * experts.share_read(tokens)) if experts else tokens
    if rows > MOST_PROMPT_ROWS or hand_off_bytes(placement, tokens, job.spec.dtype.itemsize)[0] > MOST_CROSSED_BYTES:
        return placement, plan
    measured = max(1, round(min(rows, MEASURED_ROWS)))
    width = job.spec.text_config.hidden_size
    rates = job.machine.concurrent_rates(job.ranks, plan.cpus, CpuWorkload(job.spec.dtype, scheme, measured, width))
    if isinstance(rates, str):
        return placement, plan
    slower, hidden_bytes = max(1.0, rows / measured), tokens * width * job.spec.dtype.itemsize
    rates = replace(
        rates,
        link_gb_per_s=rates.link_gb_per_s * (FETCH_RATE if placement.gathered else 1.0),
        cores_gb_per_s=rates.cores_gb_per_s / slower,
        expert_s=rates.expert_s * slower,
        hand_off_s=plan.rates.hand_off_s + 2 * hidden_bytes / (CROSSED_GB_PER_S * 1e9),
    )
    asked = 1.0 if job.config.cpu_share is None else job.config.cpu_share
    most = min(1.0, asked * placement.host_bytes / placement.nbytes_of(blocks))
    found = prompt_split(placement, rates, tokens, multiplies_many(scheme), most, graphs)
    if not found.prompt_cpu_computed:
        return placement, plan
    share = found.nbytes_of(found.prompt_cpu_computed) / found.host_bytes
    return found, replace(plan, prompt_rows=tokens, prompt_share=share, prompt_rates=rates)


def spare_slots(job: Job, depth: int) -> int | None:
    """Return how many slots of a ring of `depth` may be given up, as `Placement.with_quota` takes it."""
    if job.config.gpu_memory is not None:  # the budget of what stays; the device may have more
        return None
    return 0 if job.config.ring_depth is not None else max(0, depth - DEFAULT_RING_DEPTH)


def cpu_block_s(placement: Placement, rates: ConcurrentRates) -> dict[int, float]:
    """Seconds in which the device waits for the cores' products of each block."""
    return {
        block: sum(
            each.nbytes / (rates.cores_gb_per_s * 1e9) + rates.call_overhead_s(each.nbytes, each.experts)
            for each in calls
        )
        for block, calls in placement.calls.items()
    }


def decode_step_s(placement: Placement, plan: CpuPlan, graphs: bool) -> float:
    """Return the seconds of a decode step whose link and cores wait for each other; of the device, what it reads of its own blocks.
    `plan.rates` are known."""
    rates = plan.rates
    assert rates is not None
    others_s = plan.waited_s(placement) + placement.nbytes_of(placement.resident) / (rates.device_gb_per_s * 1e9)
    sent = placement.nbytes_of(placement.streamed) + placement.fetched_expert_bytes + plan.carried_bytes
    return overlapped_step_s(
        placement, cpu_block_s(placement, rates), sent / (rates.link_gb_per_s * 1e9), others_s, graphs
    )


def hand_off_bytes(placement: Placement, rows: int, element_bytes: int) -> tuple[int, int]:
    """Return the most bytes that a call for a block's products with `rows` rows brings to the CPU, and takes back."""
    width = _widest(placement) * rows * element_bytes
    chosen = (choice_bytes(block.experts, rows) for block in placement.blocks or () if block.experts)
    return width + max(chosen, default=0), width


def _widest(placement: Placement) -> int:
    """Elements of the widest input row, or of all output rows of a block together."""
    widths = [0]
    for index in placement.in_host_memory:
        shapes = [
            stored.plain.shape[-2:] for stored in placement.layouts[index].parameters if len(stored.plain.shape) >= 2
        ]
        widths += [sum(shape[0] for shape in shapes), *(shape[1] for shape in shapes)]
    return max(widths)


def _kv_slowness(job: Job, rates: ConcurrentRates | None) -> float:
    """See `CpuPlan`; 1 where the rate of other memory is not known."""
    described = None if job.config.pin_kv_cache else job.machine.profile()
    if rates is None or described is None or not described.pageable_link_gb_per_s:
        return 1.0
    return rates.link_alone_gb_per_s / described.pageable_link_gb_per_s


def _is_alone(job: Job) -> bool:
    """Whether other ranks, of several, do not plan this too: for --dry-run, and for options that would fit."""
    return job.ranks.world_size > 1 and job.group is None


def _rates(
    job: Job, scheme: GroupQuantization | None, cpus: tuple[int, ...], can_attend: bool
) -> ConcurrentRates | str:
    """Or why they are not known."""
    if job.machine.is_here and _is_alone(job):
        return "their rates are only measured in a run, by all ranks together"
    config = job.spec.text_config
    heads = heads_of_key(config) if can_attend else 0
    work = CpuWorkload(job.spec.dtype, scheme, job.rank_batch, config.hidden_size, heads)
    return job.machine.concurrent_rates(job.ranks, cpus, work)


def choice_bytes(experts: FusedExperts, rows: int) -> int:
    """What a choice of `rows` rows takes behind their hidden states, each part from a cache line on."""
    return rows * experts.chosen * (torch.int64.itemsize + torch.float32.itemsize) + 3 * FLAG_BYTES
