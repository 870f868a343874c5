"""The CPU's part in a run of the stream engine: which blocks it computes, decided by measured rates, and on which CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.pool import FLAG_BYTES
from zero_inference.engines.base import Job
from zero_inference.engines.stream.placement import DEFAULT_RING_DEPTH, Placement
from zero_inference.engines.stream.ring import overlapped_step_s, prefill_bytes
from zero_inference.errors import UsageError
from zero_inference.hardware.profile import ConcurrentRates, CpuWorkload
from zero_inference.kernels.products import FUSED_ROWS
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.kv_cache.attention_patch import why_cpu_cannot_attend
from zero_inference.records.schema import CpuBackendUse
from zero_inference.utils.format import three_digits
from zero_inference.utils.model_sizes import query_heads_per_kv_head

CPU_ATTENTION_TRIAL = "why the CPU cannot attend"  # key of the empty model's cache
NO_LINK = "no GPU, so no weights cross PCIe"
# Short prompts: products are measured with up to so many rows, and their rate is assumed to fall as 1 / rows above (int4, 15 threads: 62
# GB/s with 32 rows, 37 with 64, 19 with 128).
MEASURED_ROWS, MAX_PROMPT_ROWS = 32, 128
UNEVEN_ROWS = 2.0  # some experts get several times the mean number of rows: blocks are planned with this multiple of it
HAND_OFF_GB_PER_S = 5.0  # of hidden states beside a busy link (4.9 to 10 on four hosts: `crossing_s` by rows)
MAX_HAND_OFF_BYTES = 64 << 20  # of page-locked buffers, each way
# Predicted speedup from which `auto` uses the CPU: less is within the spread of two measurements.
MIN_GAIN = 1.05
# While the CPU multiplies, kernels read page-locked memory at this share of the rate of copies (H100 hosts: 36 of 44 GB/s, 43 of 45, and
# 46 of 51 where they gather blocks for a prompt, h100-prompts/host2).
FETCH_RATE_RATIO = 0.9
FETCHED_PRODUCTS_S = 15e-6  # the product with the last weights that a pass fetches
MAX_FETCHES = 16  # experts that a pass fetches, which bounds their memory
# The device's time for a mixture's prompt, relative to writing and reading its weights (1.8 to 2.3 in predicted times of Qwen3-30B-A3B).
MIXTURE_SLOWNESS = 2.0


@dataclass(frozen=True)
class CpuPlan:
    cpus: tuple[int, ...]  # CPUs of the pool's threads; -1 for a thread that is not bound
    share: float  # of the bytes in host memory (without a GPU of all offloaded ones) that the CPU multiplies in a decode step
    decode_rows: int  # most tokens of a decode step; longer passes fetch everything, except short prompts
    rates: ConcurrentRates | None  # measured rates that gave the share; None without a GPU
    attends: bool = False  # whether the CPU attends over keys and values in host memory
    kv_bytes: int = 0  # keys and values in host memory that a decode step reads, on average
    kv_slowness: float = 1.0  # link seconds per byte of them, relative to page-locked memory
    automatic: bool = False  # the share was planned, not given by the user
    gpus: int = 1  # whose layers the CPU computes
    instructions: str = ""  # instruction set of the products
    link_rests: bool = False  # no weights are offloaded, so only hidden states cross the link
    disk_s: float = 0.0  # seconds in which a pass's blocks are read from disk; 0 where that is unknown
    prompt_rows: int = 0  # most tokens of a prompt in which the CPU multiplies, too; 0 for none
    prompt_share: float = 0.0  # as `share`, in such a prompt
    prompt_rates: ConcurrentRates | None = None

    @property
    def carried_bytes(self) -> float:
        """Bytes of page-locked memory that take the link as long as the keys and values that cross it."""
        return 0.0 if self.attends else self.kv_bytes * self.kv_slowness

    @property
    def attention_gb_per_s(self) -> float | None:
        return self.rates.attention_gb_per_s(self.link_rests) if self.rates and self.attends else None

    @property
    def attention_s(self) -> float:
        """Seconds of attention over keys and values in host memory, without hand-offs."""
        return self.kv_bytes / (self.attention_gb_per_s * 1e9) if self.attention_gb_per_s else 0.0

    def hand_offs_of_attention_s(self, placement: Placement) -> float:
        return placement.layers * self.rates.hand_off_s if self.attends else 0.0

    def cpu_wait_s(self, placement: Placement) -> float:
        """Return the seconds of a decode step in which the device waits for the CPU, hand-offs included; 0 without rates."""
        if self.rates is None:
            return 0.0
        blocks_s = sum(cpu_block_s(placement, self.rates).values())
        return blocks_s + self.attention_s + self.hand_offs_of_attention_s(placement)

    def facts(self, computed_bytes: int) -> CpuBackendUse:
        names = "link_alone link cores cores_alone read device"
        return CpuBackendUse(
            threads=len(self.cpus),
            instructions=self.instructions,
            share=self.share,
            rows=self.decode_rows,
            prompt_rows=self.prompt_rows,
            prompt_share=self.prompt_share,
            attends=self.attends,
            of_step_gb_per_s=self.of_step_gb_per_s(computed_bytes),
            attention_gb_per_s=self.attention_gb_per_s,
            crossing_s=None if self.rates is None else self.rates.hand_off_s,
            **{f"{name}_gb_per_s": getattr(self.rates, f"{name}_gb_per_s", None) for name in names.split()},
        )

    def of_step_gb_per_s(self, computed_bytes: int) -> float | None:
        """Return the mean GB/s of products and attention in a decode step."""
        rates, attention_bytes = self.rates, self.kv_bytes if self.attends else 0
        if rates is None or not computed_bytes + attention_bytes:
            return None
        products_s = computed_bytes / (rates.cores_gb_per_s * 1e9)
        return (computed_bytes + attention_bytes) / (products_s + self.attention_s) / 1e9


def why_no_cpu_compute(job: Job, experts_on_disk: bool = False) -> str | None:
    """Return why the CPU cannot compute in this run, in a few words; None where it can.

    Args:
        experts_on_disk: host memory caches experts, which the CPU multiplies on any machine.

    Raises:
        UsageError: --cpu-compute asks for it.
    """
    share = job.config.cpu_share
    if share == 0:
        return "--cpu-compute off"
    if share is None and not (job.on_gpu and job.machine.gpus()) and not (multiplies_codes(job) or experts_on_disk):
        return NO_LINK
    missing = job.machine.why_no_cpu_backend(job.on_gpu)
    if missing and share is not None:
        raise UsageError(
            f"--cpu-compute {job.config.cpu_compute}: its code could not be compiled: {missing.rstrip('.')}; or use --cpu-compute off."
        )
    return f"the CPU backend could not be compiled: {missing}" if missing else None


def why_no_cpu_attention(job: Job) -> str | None:
    if CPU_ATTENTION_TRIAL not in job.empty_model.facts and not job.empty_model.is_empty:
        return "it was not tried before the weights were loaded"
    reason = job.empty_model.cached(CPU_ATTENTION_TRIAL, lambda: why_cpu_cannot_attend(job.empty_model.model))
    return reason and f"{job.spec.text_config.model_type} {reason}"


def multiplies_codes(job: Job) -> bool:
    """Return whether the CPU multiplies codes as they are stored: without a GPU, unless --cpu-compute is given. Dequantizing them first
    takes longer than reading weights in 16 bits."""
    return not job.on_gpu and job.quantized and job.config.cpu_share is None


def _scheme_of_rates(job: Job, placement: Placement) -> GroupQuantization | None:
    """Return the quantization scheme to measure rates with. For formats of checkpoints this is our own with as many bits: their products
    read bytes nearly as fast, FP8 0.75 to 0.9 times as fast (results/h100-formats)."""
    form = placement.format
    if form is None:
        return None
    return GroupQuantization(form.bits, form.group_size if form.minima else GROUP_SIZES[form.bits], job.spec.dtype)


def plan_cpu(job: Job, placement: Placement, may_attend: bool = True) -> tuple[Placement, CpuPlan] | str:
    """Return `placement` with CPU-computed blocks, and the plan for them; or why the CPU would not help.

    Raises:
        UsageError: --cpu-compute SHARE for a model without a suitable block, or too many threads.
    """
    config = job.config
    cpus = job.machine.cpus(job.devices, config.cpu_threads)
    needs_cpu = bool(placement.cached_on_host)
    share = 1.0 if multiplies_codes(job) or (needs_cpu and not job.on_gpu) else config.cpu_share
    can_attend = may_attend and config.kv_offload and not multiplies_codes(job) and why_no_cpu_attention(job) is None
    if not placement.computable and not can_attend:
        if config.cpu_share is None:
            return "host memory has no weights that the CPU backend can multiply"
        if placement.on_disk and job.on_gpu:
            raise UsageError(
                f"--cpu-compute {config.cpu_compute}: all weights that the CPU could multiply are on disk; raise --host-memory, or use "
                "--cpu-compute off."
            )
        raise UsageError(
            f"--cpu-compute {config.cpu_compute}: {job.spec.name} has no block in host memory that the CPU can multiply "
            "(linear modules of a decoder layer's attention or feed-forward, or experts); use --cpu-compute off."
        )
    text = job.spec.text_config
    heads = query_heads_per_kv_head(text) if can_attend else 0
    work = CpuWorkload(job.spec.dtype, _scheme_of_rates(job, placement), job.step_tokens, text.hidden_size, heads)
    measured = job.machine.concurrent_rates(job.devices, cpus, work)  # or why there are none
    rates = measured if isinstance(measured, ConcurrentRates) else None
    placement = replace(placement, decode_tokens=job.step_tokens)
    kv_bytes, kv_slowness = job.mean_kv_bytes if config.kv_offload else 0, 1.0
    profile = job.machine.profile()
    disk_gb_per_s = None if profile is None else profile.disk_gb_per_s
    if rates is not None and not config.pin_kv_cache and profile is not None and profile.pageable_link_gb_per_s:
        kv_slowness = rates.link_alone_gb_per_s / profile.pageable_link_gb_per_s
    plan = CpuPlan(
        cpus,
        share=0.0,
        decode_rows=job.step_tokens,
        rates=rates,
        attends=can_attend,
        kv_bytes=kv_bytes,
        kv_slowness=kv_slowness,
        gpus=job.num_gpus,
        instructions=job.machine.instructions(),
        link_rests=not placement.offloaded,
        disk_s=placement.disk_step_bytes / (disk_gb_per_s * 1e9) if disk_gb_per_s else 0.0,
    )

    def with_fetched_experts(placed: Placement) -> Placement:
        if not job.pin_weights or rates is None or needs_cpu:
            return placed
        return placed.with_quota(fetch_quota(placed.with_budget_used(), rates), spare_slots(job, placed.ring_depth))

    if share is not None:
        placement = placement.with_even_cpu_share(share)
        if not placement.cpu_computed and not can_attend:
            raise UsageError(
                f"--cpu-compute {config.cpu_compute}: this share of {job.spec.name} is less than half a block, and blocks are not divided; "
                "use a larger share, or --cpu-compute off."
            )
        if placement.with_budget_used().expert_slots:  # they change only by fetching
            placement = with_fetched_experts(placement)
        return placement.with_budget_used(), replace(plan, share=share)
    if isinstance(measured, str):
        if not needs_cpu:
            return measured
        return placement.with_even_cpu_share(0.0).with_budget_used(), replace(plan, attends=False)
    best = best_split(placement.with_cpu_shares(1.0, 0.0), plan)
    if not (best.of_experts or best.of_others or best.attends or needs_cpu):
        cpu_rate, link_rate = three_digits(measured.cores_gb_per_s), three_digits(measured.link_gb_per_s)
        return f"it would hardly help ({cpu_rate} GB/s beside a link at {link_rate} GB/s)"
    plan = replace(plan, attends=best.attends, automatic=True)
    # large blocks of experts may arrive late although the link has time for them: compare with computing all on the CPU
    experts = sorted({best.of_experts, 1.0}) if best.of_experts else [best.of_experts]
    placed = [placement.with_cpu_shares(share, best.of_others) for share in experts]
    placed = [with_fetched_experts(each).with_budget_used() for each in placed]
    placement = min(placed, key=lambda each: decode_step_s(each, plan))
    multiplied = {*placement.in_host_memory, *placement.cached_on_host}
    share = placement.nbytes_of(placement.cpu_computed) / max(1, placement.nbytes_of(multiplied))
    return placement, replace(plan, share=share)


def plan_short_prompts(job: Job, placement: Placement, plan: CpuPlan) -> tuple[Placement, CpuPlan]:
    """Return both with the blocks that the CPU computes in prompts of up to the planned length; unchanged where there are none.

    Rates of quantized weights are measured with bfloat16 scales. Others are far slower, float16 because AMX then takes 8 rows at a time:
    128 tokens of Llama-2-13B took 0.31 s with a sixth of the weights on the CPU (benchmarks/LOG.md).
    """
    if not job.on_gpu or plan.rates is None or plan.attends:
        return placement, plan
    tokens, blocks = job.rank_batch * job.config.prompt_len, placement.prompt_candidates
    not_measured = placement.format is not None and job.spec.dtype != torch.bfloat16
    if not blocks or tokens <= plan.decode_rows or not_measured:
        return placement, plan
    experts = placement.blocks[blocks[0]].experts
    rows: float = tokens
    if experts is not None:
        rows = UNEVEN_ROWS * tokens * experts.top_k / (experts.num_experts * experts.share_read(tokens))
    if rows > MAX_PROMPT_ROWS or hand_off_bytes(placement, tokens, job.spec.dtype.itemsize)[0] > MAX_HAND_OFF_BYTES:
        return placement, plan
    measured = max(1, round(min(rows, MEASURED_ROWS)))
    width = job.spec.text_config.hidden_size
    work = CpuWorkload(job.spec.dtype, _scheme_of_rates(job, placement), measured, width)
    rates = job.machine.concurrent_rates(job.devices, plan.cpus, work)
    if isinstance(rates, str):
        return placement, plan
    slower, hidden_bytes = max(1.0, rows / measured), tokens * width * job.spec.dtype.itemsize
    rates = replace(
        rates,
        link_gb_per_s=rates.link_gb_per_s * (FETCH_RATE_RATIO if placement.gathered else 1.0),
        cores_gb_per_s=rates.cores_gb_per_s / slower,
        expert_s=rates.expert_s * slower,
        hand_off_s=plan.rates.hand_off_s + 2 * hidden_bytes / (HAND_OFF_GB_PER_S * 1e9),
    )
    asked = 1.0 if job.config.cpu_share is None else job.config.cpu_share
    most = min(1.0, asked * placement.host_bytes / placement.nbytes_of(blocks))
    found = prompt_split(placement, rates, tokens, most)
    if not found.prompt_cpu_computed:
        return placement, plan
    share = found.nbytes_of(found.prompt_cpu_computed) / found.host_bytes
    return found, replace(plan, prompt_rows=tokens, prompt_share=share, prompt_rates=rates)


def spare_slots(job: Job, depth: int) -> int | None:
    """Return how many slots of a ring buffer of `depth` may be given up, for `Placement.with_quota`."""
    if job.config.gpu_memory is not None:  # the budget of resident weights; the device may have more
        return None
    return 0 if job.config.ring_depth is not None else max(0, depth - DEFAULT_RING_DEPTH)


def cpu_block_s(placement: Placement, rates: ConcurrentRates) -> dict[int, float]:
    """Return the seconds of each CPU-computed block in a decode step, hand-offs included."""
    hand_offs_s, rate = _hand_offs_s(placement, rates), rates.cores_gb_per_s * 1e9
    return {block: seconds + placement.read_bytes(block) / rate for block, seconds in hand_offs_s.items()}


def _hand_offs_s(placement: Placement, rates: ConcurrentRates) -> dict[int, float]:
    """Return the seconds of hand-offs by CPU-computed block: one for a feed-forward or a layer's experts, two for attention, whose
    projections are before and after what the device computes."""
    found = {}
    for index in sorted(placement.cpu_computed):
        block, nbytes = placement.blocks[index], placement.read_bytes(index)
        experts = nbytes / block.layout.stored_bytes * block.experts.num_experts if block.experts else 0.0
        calls = 1 if block.feed_forward or block.experts else min(2, len(block.linears))
        found[index] = calls * rates.call_overhead_s(nbytes / max(1, calls), experts)
    return found


def decode_step_s(placement: Placement, plan: CpuPlan) -> float:
    """Return the seconds of a decode step in which link, CPU and the device's reads of resident blocks wait for each other."""
    rates = plan.rates
    assert rates is not None
    compute_s = plan.cpu_wait_s(placement) + placement.nbytes_of(placement.resident) / (rates.device_gb_per_s * 1e9)
    sent = placement.nbytes_of(placement.streamed) + placement.fetched_expert_bytes + plan.carried_bytes
    return overlapped_step_s(placement, cpu_block_s(placement, rates), sent / (rates.link_gb_per_s * 1e9), compute_s)


def hand_off_bytes(placement: Placement, rows: int, element_bytes: int) -> tuple[int, int]:
    """Return the bytes of the largest input and output of a block's hand-off with `rows` rows."""
    widths = [0]  # elements of input rows, and of all output rows of a block together
    for index in placement.offloaded:
        parameters = placement.blocks[index].layout.parameters
        shapes = [each.plain.shape[-2:] for each in parameters if len(each.plain.shape) >= 2]
        widths += [sum(shape[0] for shape in shapes), *(shape[1] for shape in shapes)]
    hidden_bytes = max(widths) * rows * element_bytes
    top_k = max((block.experts.top_k for block in placement.blocks if block.experts), default=0)
    routing_bytes = rows * top_k * (torch.int64.itemsize + torch.float32.itemsize) + 3 * FLAG_BYTES if top_k else 0
    return hidden_bytes + routing_bytes, hidden_bytes  # each tensor of a `Routing` from a cache line on


@dataclass(frozen=True)
class Split:
    of_experts: float  # share of the bytes of experts in host memory that the CPU multiplies
    of_others: float  # the same of all other blocks
    attends: bool  # whether it attends over keys and values in host memory, which cross the link otherwise
    step_s: float  # seconds of link or CPU in a decode step, whichever are more


def best_split(placement: Placement, plan: CpuPlan) -> Split:
    """Return the split with which link and CPU end a step at the same time; nothing for the CPU where it would gain less than `MIN_GAIN`.

    Args:
        placement: with all experts CPU-computed.
        plan: its rates, and its keys and values, over which the CPU may attend if `plan.attends`.
    """
    rates, not_attending = plan.rates, replace(plan, attends=False)
    # without the CPU, resident layers use the memory of the expert cache
    sent = placement.nbytes_of(placement.offloaded) - sum(placement.expert_budgets) + not_attending.carried_bytes
    alone = Split(0.0, 0.0, False, max(plan.disk_s, sent / (rates.link_alone_gb_per_s * 1e9)))
    found = []
    for each in [not_attending, plan] if plan.attends else [plan]:
        hand_offs_s = sum(_hand_offs_s(placement.with_cpu_shares(1.0, 1.0), rates).values())
        for _ in range(2):  # fewer blocks have fewer hand-offs, which leaves the CPU more time
            split, hand_offs_s = _balanced(placement, each, hand_offs_s)
            found.append(split)
    best = min(found, key=lambda split: split.step_s)
    return best if alone.step_s >= MIN_GAIN * max(plan.disk_s, best.step_s) else alone


def fetch_quota(placement: Placement, rates: ConcurrentRates) -> tuple[int, ...]:
    """Return how many of a layer's missed experts the device fetches so that link and CPU end together, by the number of missed ones.

    The link of the layer's device also copies streamed blocks, equally many bytes for each of its layers, first while other devices compute
    theirs. Empty where fetching gains nothing.
    """
    blocks = placement.cpu_experts
    if not blocks:
        return ()
    size = sum(map(placement.expert_bytes, blocks)) / len(blocks)
    forms = [placement.blocks[block].experts for block in blocks]
    cpu, one_link = rates.cores_gb_per_s * 1e9, rates.link_gb_per_s / len(placement.devices) * 1e9
    copies_s = placement.nbytes_of(placement.streamed) / placement.layers / one_link

    def seconds(missed: int, fetched: int) -> float:
        left = missed - fetched
        cpu_s = rates.call_overhead_s(left * size, left) + left * size / cpu
        if not fetched:
            return cpu_s
        ahead_s = max(0.0, copies_s - (len(placement.devices) - 1) * cpu_s)
        return max(cpu_s, ahead_s + fetched * size / (FETCH_RATE_RATIO * one_link) + FETCHED_PRODUCTS_S)

    most = max(min(form.num_experts, placement.decode_tokens * form.top_k) for form in forms)
    quota = tuple(
        min(range(min(missed, MAX_FETCHES) + 1), key=lambda fetched: seconds(missed, fetched))
        for missed in range(most + 1)
    )
    return quota if any(quota) else ()


def prompt_split(placement: Placement, rates: ConcurrentRates, tokens: int, most: float) -> Placement:
    """Return `placement` with the blocks that the CPU computes in short prompts, so that link and CPU end together; unchanged where that
    is predicted to gain less than `MIN_GAIN`.

    Args:
        rates: for as many rows as a weight gets in such a prompt.
        most: share of the bytes of `Placement.prompt_candidates` that the CPU may multiply.
    """
    slowness = MIXTURE_SLOWNESS if placement.expert_blocks else 1.0
    times_plain = 0 if tokens <= FUSED_ROWS else 2  # the device writes and reads dequantized weights

    def times(found: Placement) -> tuple[float, float]:
        """Return the seconds of the link, and of device and CPU."""
        now = found.for_short_prompt(tokens)
        by_device = [each.layout for block, each in enumerate(found.blocks) if block not in found.prompt_cpu_computed]
        device_bytes = sum(each.stored_bytes + times_plain * each.dequantized_bytes for each in by_device)
        device_s = slowness * device_bytes / (rates.device_gb_per_s * 1e9)
        cpu_s = sum(cpu_block_s(now, rates).values())
        return prefill_bytes(found) / (rates.link_gb_per_s * 1e9), device_s + cpu_s

    link_s, device_s = times(placement)
    all_link_s, all_compute_s = times(placement.with_prompt_share(1.0))
    share = _balancing_share(link_s - device_s, link_s - all_link_s + all_compute_s - device_s, most)
    found = placement.with_prompt_share(share)
    without_s = max(link_s * rates.link_gb_per_s / rates.link_alone_gb_per_s, device_s)
    return found if without_s >= MIN_GAIN * max(times(found)) else placement


def _balanced(placement: Placement, plan: CpuPlan, hand_offs_s: float) -> tuple[Split, float]:
    """Return the split that balances T = max(S / B_link, R / B_cpu + D / B_device + h), and the seconds of its hand-offs.

    S are the bytes sent, R those that the CPU reads, D those of resident blocks, which the device reads while the CPU waits (its reads of
    streamed blocks are short), and h the time of the hand-offs, in which the CPU cannot work. Of experts the CPU reads only a part of what
    would be sent, so they come first: other blocks are CPU-computed only where the link is still later with all experts on the CPU. With an
    expert cache the CPU reads less than R, which assumes evenly used experts; then experts are streamed only where that gains `MIN_GAIN`.
    """
    rates = plan.rates
    link, cpu = rates.link_gb_per_s * 1e9, rates.cores_gb_per_s * 1e9
    experts = placement.expert_blocks
    experts_bytes, experts_read_bytes = placement.nbytes_of(experts), sum(map(placement.read_bytes, experts))
    others = set(placement.in_host_memory).difference(experts)
    others_bytes = placement.nbytes_of(others)
    most_of_others = placement.nbytes_of(others.intersection(placement.computable)) / max(1, others_bytes)
    sent_s = (placement.nbytes_of(placement.offloaded) + plan.carried_bytes) / link  # if the CPU computes nothing
    resident_bytes = sum(map(placement.read_bytes, placement.resident))
    cpu_s = hand_offs_s + resident_bytes / (rates.device_gb_per_s * 1e9)
    cpu_s += plan.attention_s + plan.hand_offs_of_attention_s(placement)
    of_experts = of_others = 0.0  # shares for the CPU
    if experts:
        of_experts = _balancing_share(sent_s - cpu_s, experts_bytes / link + experts_read_bytes / cpu, 1.0)
        all_s, some_s = (cpu_s + share * experts_read_bytes / cpu for share in (1.0, of_experts))
        if placement.expert_slots and all_s < MIN_GAIN * some_s:
            of_experts = 1.0
        sent_s, cpu_s = sent_s - of_experts * experts_bytes / link, cpu_s + of_experts * experts_read_bytes / cpu
    if others_bytes and of_experts == (1.0 if experts else 0.0):
        of_others = _balancing_share(sent_s - cpu_s, others_bytes / link + others_bytes / cpu, most_of_others)
        sent_s, cpu_s = sent_s - of_others * others_bytes / link, cpu_s + of_others * others_bytes / cpu
    needed_s = sum(_hand_offs_s(placement.with_cpu_shares(of_experts, of_others), rates).values())
    cpu_s += needed_s - hand_offs_s
    return Split(of_experts, of_others, plan.attends, max(sent_s, cpu_s)), needed_s


def _balancing_share(ahead_s: float, all_s: float, most: float) -> float:
    """Return the share of some work, up to `most`, with which two sides end together: without it they end `ahead_s` apart, and all of it
    takes `all_s` off the one plus onto the other."""
    return min(max(ahead_s / all_s, 0.0), most)
