"""The cost model: predicted seconds of a prefill, of a decode step and of loading, from a plan and the rates of a machine.

    device_s  = sum over operators of max(other bytes / memory rate + weights (`weight_times`), flops / matmul rate, launch_floor)
    launch_s  = max(0, host_s - device_s - cpu_s) + selecting a token      the host launches while device and CPU work
    compute_s = device_s + cpu_s + launch_s                                device_s includes hops between GPUs
    pass_s    = max(compute_s, link_s, peers_s, disk_s)                    with a GPU and overlapping copies; their sum otherwise

The rates are a run's own: `zero-inference link --save` measures them. The constants of this file name the runs that they come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from zero_inference.engines.base import CpuWork, EnginePlan, Job
from zero_inference.engines.stream.devices import HOP_HOST_S, HOP_S, count_hops
from zero_inference.hardware.profile import (
    dequantize_gb_per_s,
    device_attention_s,
    find_engine_overhead,
    links_gb_per_s,
    product_time,
)
from zero_inference.kernels.products import pairs_together
from zero_inference.models.layers import COMPARED_BYTES, first_layer_bytes
from zero_inference.models.tracing import Operator, Pass
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils.format import format_seconds, significant

if TYPE_CHECKING:
    from zero_inference.config.run_config import RunConfig
    from zero_inference.hardware.profile import EngineOverhead, HardwareProfile

# The host launches operators this many times as slowly in a run as in the small models of `link --save`: the median of the committed runs
# that wait for the host (13B and 8B in 16 bits on an H100: 1.46 and 1.46; OPT-13B on seven H200 hosts: 0.96 to 2.0). The cause is unknown.
LAUNCH_SLOWDOWN = 1.4
# The device takes this many times as long for the prefill of a mixture as its products and bytes alone: sorting tokens by expert, gathering
# and grouped products of few rows. None of 13 committed runs (h200-big-models, h200-together) is farther than 11% from it.
MOE_PREFILL_SLOWDOWN = 1.33
# Copies of decoder layers in 16 bits from a GPU to new host memory in huge pages, to be compared later: 1.8 to 14 GB/s in 18 of 20 runs of
# the stream engine on an H100 (h100-readme), 0.8 to 1.45 before (h100-predicted).
COMPARED_GB_PER_S = 4.0
# Tokens of the CPU measurement (hardware/bench_device.py) that multiplies with dequantized weights.
CPU_DEQUANTIZED_ROWS = 128


class Range(NamedTuple):
    """Low and high end of a prediction, or these as multiples of it."""

    low: float
    high: float

    def of(self, predicted: float) -> Range:
        return Range(self.low * predicted, self.high * predicted)


# Measured over predicted time by kind of pass, with a GPU; 9 of 10 committed runs were within. `python benchmarks/predictions.py --ranges`
# computes the table, and how many runs of each host are within the ranges of all other hosts; a test does the same.
RANGES = {
    "load": Range(0.90, 1.80),
    "prefill": Range(0.90, 1.15),
    "step": Range(0.85, 1.15),
    "step with the CPU": Range(0.85, 1.30),
    "launched": Range(0.75, 1.60),
}
# "launched": a prefill whose host time is more than LAUNCHED_SHARE of it; a step in which the device waits for the host for more than
# WAITED_SHARE while computing is more than LAUNCHED_SHARE.
LAUNCHED_SHARE, WAITED_SHARE = 0.6, 0.1


@dataclass(frozen=True)
class PassTime:
    seconds: float
    bound_by: str  # the largest part, a key of `RATE_WORDS`
    kind: str | None = None  # a key of `RANGES`; None for bounds, and but for one GPU, where no runs have been compared

    @property
    def range_s(self) -> Range | None:
        return RANGES[self.kind].of(self.seconds) if self.kind else None


@dataclass(frozen=True)
class Times:
    """Predicted times of a generation that is not the first one after loading."""

    batch_size: int
    prefill: PassTime  # until the first token
    step: PassTime  # a decode step at the mean length
    bounds_because: tuple[str, ...]  # reasons why the times are lower bounds; empty where they are not
    with_host: bool  # the times include kernel launches
    without_cores: bool  # a run may use the CPU backend, whose rate is unknown, and be faster
    lacks_overhead: bool  # the engine's overhead is large and was not measured, so a run is slower

    def generation_s(self, gen_len: int) -> float:
        """Return the seconds of a generation of `gen_len` tokens."""
        return self.prefill.seconds + (gen_len - 1) * self.step.seconds

    @property
    def left_out(self) -> list[str]:
        """Parts of a run that the times leave out, a few words each."""
        launches = [] if self.with_host else ["kernel launches (the host's time for them is not known)"]
        cpu = (
            "the CPU backend, which may be faster (its rate is not known: add cores=60GB/s, or what it is, to --assume)"
        )
        return [*launches, cpu] if self.without_cores else launches

    @property
    def is_bound(self) -> bool:
        """True if a run is at most as fast; not where the CPU backend, whose rate is unknown, may make it faster."""
        return bool(self.bounds_because) and not self.without_cores

    @property
    def tokens_per_s(self) -> float:  # of decoding
        return self.batch_size / self.step.seconds

    @property
    def tokens_per_s_range(self) -> Range | None:
        step = self.step.range_s
        return None if step is None else Range(self.batch_size / step.high, self.batch_size / step.low)

    def in_words(self) -> str:
        """Return token/s, decode step and first token on one line."""
        least, most = ("at least ", "at most ") if self.is_bound else ("", "")
        rates = self.tokens_per_s_range
        within = f" ({' to '.join(map(significant, rates))})" if rates else ""
        return (
            f"{most}{significant(self.tokens_per_s)}{within} token/s "
            f"(decode step {least}{format_seconds(self.step.seconds)}, bound by {RATE_WORDS[self.step.bound_by]}), "
            f"first token {least}{seconds_in_words(self.prefill.seconds, self.prefill.range_s)}"
        )


# Share of proposals of the model's own copy in 4 bits that are accepted, if those before them were. SubSpec (arXiv 2509.18344) reports 3.7
# of 4, 6.9 of 8, 12.2 of 16 and 19.5 of 32 accepted proposals; this makes 3.7, 6.9, 12.2 and 19.3.
SELF_ACCEPTANCE = 0.967
SKIPPED_ACCEPTANCE = 0.85  # less for the share of its layers that it skips (cpu/speculation_simulation/skip_layers.txt)


@dataclass(frozen=True)
class SpeculationTimes:
    """Predicted times of decoding with a draft."""

    acceptance: float  # that is assumed
    proposals: int  # of a pass
    draft_s: float  # to make them
    pass_s: float  # to verify them
    tokens_per_pass: float  # of a sequence
    tokens_per_s: float
    is_bound: bool  # as of `Times`

    def in_words(self) -> str:
        most = "at most " if self.is_bound else ""
        return (
            f"{most}{significant(self.tokens_per_s)} token/s, if {self.acceptance:.1%} of the proposals are accepted (assumed): "
            f"{self.tokens_per_pass:.1f} tokens a pass, {self.proposals} proposals {format_seconds(self.draft_s)}, "
            f"pass {format_seconds(self.pass_s)}"
        )


def predict_speculation(
    config: RunConfig, rank_batch: int, draft: Times, target: Times, skipped: float
) -> SpeculationTimes:
    """Return the times of decoding with a draft of the same model that skips a share of its layers. All sequences of a batch are assumed
    to gain as many tokens in a pass as the one with the fewest accepted proposals."""
    acceptance = SELF_ACCEPTANCE - SKIPPED_ACCEPTANCE * skipped
    step_s, pass_s, most = draft.step.seconds, target.step.seconds, config.most_proposals
    found, expected = [], expected_tokens(acceptance**rank_batch, most)
    for count in [most] if config.draft_len == most else range(1, most + 1):
        tokens_per_s = config.batch_size * expected[count] / (count * step_s + pass_s)
        found.append(
            SpeculationTimes(
                acceptance,
                count,
                count * step_s,
                pass_s,
                expected[count],
                tokens_per_s,
                draft.is_bound or target.is_bound,
            )
        )
    return max(found, key=lambda each: each.tokens_per_s)


def expected_tokens(acceptance: float, most: int) -> list[float]:
    """Return the expected tokens of a pass with 0 to `most` proposals, each accepted with this probability if those before it were."""
    return list(accumulate(acceptance**accepted for accepted in range(most + 1)))


def seconds_in_words(seconds: float, range_s: Sequence[float] | None) -> str:
    """Return a text such as "0.123 s (0.11 s to 0.14 s)"."""
    return format_seconds(seconds) + (f" ({' to '.join(map(format_seconds, range_s))})" if range_s else "")


class NotPredictable(Exception):
    """Times cannot be predicted; the message says why."""


def predict_times(plan: EnginePlan, machine: HardwareProfile) -> Times:
    """Return the times of prefill and decode step. Call it before the weights are loaded: it traces the empty model.
    Raises NotPredictable: a rate is missing, or the model cannot be traced without weights."""
    job, config = plan.job, plan.job.config
    lacks_overhead = not plan.cost_terms.overhead_negligible and _overhead(plan, machine) is None
    if lacks_overhead and job.quantized and not job.on_gpu:  # dequantizing takes the most time there
        raise NotPredictable(f"how long {config.engine} takes to dequantize on a CPU was not measured")
    positions = job.step_tokens // job.rank_batch  # of a sequence in a decode pass
    decode = job.empty_model.traced_pass(job.spec, positions, config.prompt_len + config.gen_len // 2)
    prompt = job.empty_model.traced_pass(job.spec, config.prompt_len, 0)
    if decode is None or prompt is None:
        raise NotPredictable("the model cannot be traced without its weights")
    prefill = pass_time(plan, machine, prompt, prefill=True)
    step = pass_time(plan, machine, decode, prefill=False)
    dtype = job.spec.dtype_name
    fetches_by_several = job.num_gpus > 1 and bool(plan.moved_per_step().host_to_device_bytes_per_step)
    lacks_peers = bool(plan.exchanged_bytes(plan.fetched_bytes)) and machine.peers_gb_per_s is None
    reasons = {
        "rates are from datasheets, which no run reaches": machine.source == "datasheet",
        f"the rate of {dtype} matrix products is not known": machine.matmul_tflops.get(dtype) is None,
        f"the overhead of {config.engine} was not measured": lacks_overhead,
        "how fast the GPUs exchange weights is not known (--assume peers=)": lacks_peers,
        "the links of several GPUs may slow each other down": fetches_by_several and machine.all_links_gb_per_s is None,
    }
    bounds_because = tuple(reason for reason, holds in reasons.items() if holds)
    if bounds_because or job.num_gpus > 1:
        prefill, step = replace(prefill, kind=None), replace(step, kind=None)
    with_host, without_cores = machine.launches is not None, plan.cost_terms.cpu_rate_unknown
    return Times(config.batch_size, prefill, step, bounds_because, with_host, without_cores, lacks_overhead)


def _overhead(plan: EnginePlan, machine: HardwareProfile) -> EngineOverhead | None:
    return find_engine_overhead(machine, plan.job.config.engine, plan.job.quant_bits)


def pass_time(plan: EnginePlan, machine: HardwareProfile, traced: Pass, prefill: bool) -> PassTime:
    """Return the time of a prefill, or of a decode step at the mean length. Raises NotPredictable: a rate is missing.

    Args:
        traced: the pass of one sequence: its prompt, or the tokens of a decode step, which follow as many others as on average.
    """
    job, terms, launches = plan.job, plan.cost_terms, machine.launches
    memory_name = "device_memory" if job.on_gpu else "host_memory"
    memory_gb_per_s, tflops = machine.device_gb_per_s, machine.matmul_tflops.get(job.spec.dtype_name)
    _seconds(1, memory_gb_per_s, f"{memory_name.replace('_', ' ')} (memory=)")  # refuses an unknown rate
    copy_s = copy_times(plan, machine, prefill)
    cpu = terms.prefill_cpu if prefill else terms.step_cpu
    tokens = job.rank_batch * job.config.prompt_len if prefill else job.step_tokens
    weights_s = weight_times(plan, machine, traced, tokens, cpu)
    launch_floor_s = (job.on_gpu and launches and launches.graph_operator_s) or 0.0  # an operator that moves little

    def memory_s(operator: Operator) -> float:
        if operator.attends and not prefill:
            if terms.cpu_attention_layers:  # part of `cpu.wait_s`
                return launch_floor_s
            return _decode_attention_s(plan, machine, operator, launch_floor_s)
        return operator.nbytes * job.rank_batch / (memory_gb_per_s * 1e9) + weights_s(operator)

    def matmul_s(operator: Operator) -> float:
        return operator.flops * job.rank_batch / (tflops * 1e12) if tflops else 0.0

    def total_s(seconds: Callable[[Operator], float]) -> float:
        return sum(seconds(operator) * count for operator, count in traced.operators.items())

    device_s = total_s(lambda each: max(memory_s(each), matmul_s(each), launch_floor_s))
    if prefill and job.spec.experts[0] and job.on_gpu:
        device_s *= MOE_PREFILL_SLOWDOWN
    if prefill and plan.prefill_micro_batches > 1:
        device_s *= overlapped_share(plan.layer_devices, plan.prefill_micro_batches)
    device_s += HOP_S * count_hops(plan.layer_devices)
    overhead, host_s = _overhead(plan, machine), host_time_s(plan, machine, traced, prefill)
    start_s = overhead.start_s if overhead and prefill else 0.0
    late_s = max(0.0, host_s - device_s - cpu.wait_s) if job.on_gpu else host_s  # device and CPU wait for the host
    compute_parts = {
        "matmul" if total_s(matmul_s) > device_s / 2 else memory_name: device_s,
        "launches": late_s + (launches.step_s if launches else 0.0) + start_s,
        "cores": cpu.wait_s,
    }
    if copy_s["link"]:
        copy_s["link"] += start_s  # only the ring's prefetch is copied earlier
        if terms.copies_wait_for_host:  # for hooks, measured without quantization: dequantizing delays no copies
            fetches = terms.fetches if prefill or not terms.graphs else 0
            copy_s["link"] += fetches * _piece_s(find_engine_overhead(machine, job.config.engine), prefill)
    compute_s = sum(compute_parts.values())
    if not job.on_gpu or not terms.copies_overlap:  # without a GPU all share the memory and the CPU
        parts, pass_s = compute_parts | copy_s, compute_s + sum(copy_s.values())
    else:
        parts = {**copy_s, _largest(compute_parts): compute_s}
        pass_s = max(parts.values())
    bound_by = _largest(parts)
    if not job.on_gpu:
        return PassTime(pass_s, bound_by)
    if terms.copies_overlap and not prefill:
        copy_s["link"], compute_s = plan.rebalanced_s(copy_s["link"], compute_s)
        pass_s = max(*copy_s.values(), plan.overlapped_s(copy_s["link"], compute_s))
    if prefill:
        launched = host_s > LAUNCHED_SHARE * pass_s
        # prefills with the CPU have too few runs for a range of their own
        return PassTime(pass_s, bound_by, "launched" if launched else "step with the CPU" if cpu.wait_s else "prefill")
    launched = late_s > WAITED_SHARE * pass_s and compute_s > LAUNCHED_SHARE * pass_s
    return PassTime(pass_s, bound_by, "step with the CPU" if cpu.wait_s else "launched" if launched else "step")


def overlapped_share(layer_devices: Sequence[int], parts: int) -> float:
    """Return the time of a pass of `parts` micro-batches over layers on several devices, as a share of that on one device.

    A layer computes them one after the other. The next one begins with the first, at the same time if it is on another device.
    """
    free, arrived = [0.0] * (1 + max(layer_devices)), [0.0] * parts  # of each device, of each micro-batch
    for device in layer_devices:
        for part in range(parts):
            free[device] = arrived[part] = max(free[device], arrived[part]) + 1 / (parts * len(layer_devices))
    return max(arrived)


def _largest(parts: dict[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def _decode_attention_s(plan: EnginePlan, machine: HardwareProfile, operator: Operator, launch_floor_s: float) -> float:
    """Return the seconds of an attention operator over keys and values in device memory; from its bytes where it was not measured."""
    job, launches, shape = plan.job, machine.launches, operator.attention
    if shape is not None:
        key_heads, row_bytes = job.rank_batch * shape.key_heads, shape.head_dim * job.spec.dtype.itemsize
        found = device_attention_s(machine, shape.heads // shape.key_heads, key_heads, shape.positions, row_bytes)
        if found is not None:
            return found
    nbytes = operator.nbytes * job.rank_batch
    if launches is not None and launches.attention_gb_per_s:
        return launch_floor_s + nbytes / (launches.attention_gb_per_s * 1e9)
    return nbytes / ((machine.device_gb_per_s or float("inf")) * 1e9)


def host_time_s(plan: EnginePlan, machine: HardwareProfile, traced: Pass, prefill: bool) -> float:
    """Return the seconds in which the host launches operators, calls modules and requests copies, without selecting a token. Where
    launches were not measured, the host is assumed to be never late."""
    job, terms, launches = plan.job, plan.cost_terms, machine.launches
    host_s = terms.cpu_attention_layers * _piece_s(find_engine_overhead(machine, "stream", kv_offload=True), prefill)
    host_s += plan.copied_kv_layers * _piece_s(find_engine_overhead(machine, "resident", kv_offload=True), prefill)
    if terms.graphs and not prefill:
        return host_s
    host_s += HOP_HOST_S * count_hops(plan.layer_devices) + terms.fetches * _piece_s(_overhead(plan, machine), prefill)
    host_s += terms.resident_quantized_blocks * _piece_s(
        find_engine_overhead(machine, "stream", 4, resident=True), prefill
    )
    if launches:
        model_s = traced.launches * launches.operator_s + traced.module_calls * launches.module_s
        if prefill and job.quantized and 0 < terms.fused_rows < job.rank_batch * job.config.prompt_len:
            # an operator that dequantizes counts as the mean of the others, as in `EngineOverhead.prefill_piece_s`
            model_s *= 1 + traced.products_in_layers / max(1, traced.launches)
        if prefill:
            model_s *= plan.prefill_micro_batches
        host_s += model_s * (LAUNCH_SLOWDOWN if job.on_gpu else 1.0)
    return host_s


def _piece_s(overhead: EngineOverhead | None, prefill: bool) -> float:
    """Return the host's seconds for one copy of weights, one quantized block, or one layer whose KV cache is in host memory."""
    return 0.0 if overhead is None else overhead.prefill_piece_s if prefill else overhead.step_piece_s


class ByteCost(NamedTuple):
    """Cost of a product by bytes of its weight in the model's dtype: `nbytes * ns_per_byte / 1e9 + call_s`."""

    ns_per_byte: float
    call_s: float = 0.0


def weight_times(
    plan: EnginePlan, machine: HardwareProfile, traced: Pass, tokens: int, cpu: CpuWork
) -> Callable[[Operator], float]:
    """Return a function of an operator: seconds in which the device reads its weights as they are stored, dequantizes them and multiplies
    with them, without those that the CPU backend multiplies.

    For b bytes of weights in the model's dtype, stored as `ratio` * b bytes, and n `tokens` of all sequences of a rank. M is the memory
    rate; P(n), C(n) and R are measured: products with plain weights, with codes, and the engine's dequantization with one token's product.

        plain                      b / P(n)
        codes, multiplied as such  ratio b / C(n)                up to `fused_rows` tokens, or as measured
        codes, dequantized first   (ratio + 1) b / M + b / P(n)  written once and read once
        by the engine's operator   b / R + b / P(n) - b / P(1)
    """
    job, terms, dtype = plan.job, plan.cost_terms, plan.job.spec.dtype_name
    layer_format = f"int{job.quant_bits}" if job.quantized else dtype
    memory_gb_per_s = machine.device_gb_per_s or math.inf
    device_codes, fused = job.quantized and job.on_gpu, job.quantized and tokens <= terms.fused_rows
    if terms.quantizes_all:
        ratio = plan.weight_bytes / max(1, job.sizes.parameter_bytes)
    else:
        layer_bytes = traced.total("layer_bytes") + traced.total("expert_bytes")
        other_bytes = job.sizes.parameter_bytes - layer_bytes - terms.head_plain_bytes + terms.head_stored_bytes
        ratio = (plan.weight_bytes - other_bytes) / max(1, layer_bytes)
    dequantized_gb_per_s = dequantize_gb_per_s(_overhead(plan, machine), dtype)
    on_cpu = terms.dequantizes_on_cpu and not dequantized_gb_per_s

    def plain(rows: int) -> ByteCost:
        """Return the cost of a weight in the model's dtype that `rows` tokens use."""
        found = product_time(machine, dtype, rows)
        return ByteCost(1 / memory_gb_per_s) if found is None else ByteCost(1 / found.gb_per_s, found.call_s)

    def codes(rows: int, weight_format: str, stored_ratio: float) -> ByteCost:
        """Return the cost of a weight stored as codes, `stored_ratio` bytes for each in the model's dtype."""
        found = product_time(machine, weight_format, rows)
        if found and (terms.fused_rows or not device_codes):
            return ByteCost(stored_ratio / found.gb_per_s, found.call_s)
        if not device_codes or rows <= terms.fused_rows:
            return ByteCost(stored_ratio / memory_gb_per_s)
        product_ns, call_s = plain(rows)
        return ByteCost((stored_ratio + 1) / memory_gb_per_s + product_ns, call_s)

    def as_stored(rows: int) -> ByteCost:
        """Return the cost of a weight that is stored as the engine stores layers."""
        if on_cpu:
            return plain(rows)
        if dequantized_gb_per_s:  # b / R + b / P(n) - b / P(1)
            return ByteCost(1 / dequantized_gb_per_s + max(0.0, plain(rows).ns_per_byte - plain(1).ns_per_byte))
        return codes(rows, layer_format, ratio)

    number, chosen = job.spec.experts
    chosen_share = chosen / number if number else 0.0
    together = pairs_together(tokens * chosen, number) if number and fused else max(1, tokens)
    expert_reads = mean_reads(tokens, chosen_share, together)
    expert_tokens = max(1, round(tokens * chosen_share / expert_reads)) if number else tokens  # of one read
    if device_codes and not fused:  # all experts are dequantized first, however few tokens one has
        expert_tokens = max(expert_tokens, terms.fused_rows + 1)
    layers, experts = as_stored(tokens), as_stored(expert_tokens)
    head = outside = layers if terms.quantizes_all else plain(tokens)
    if (
        terms.head_plain_bytes
    ):  # quantized on its own, and multiplies the last token of each sequence, or all that a pass verifies
        head = codes(job.step_tokens, "int8", terms.head_stored_bytes / terms.head_plain_bytes)
    dequantize_ns = 0.0  # per byte of all weights, chosen or not
    if on_cpu:  # what a product with codes takes longer where there are too many tokens to multiply with codes
        dequantize_ns = (ratio + 1) / memory_gb_per_s
        coded, uncoded = (product_time(machine, each, CPU_DEQUANTIZED_ROWS) for each in (layer_format, dtype))
        if coded is not None and uncoded is not None:
            dequantize_ns = max(0.0, ratio / coded.gb_per_s - 1 / uncoded.gb_per_s)

    def seconds(operator: Operator) -> float:
        own_kernel = bool(operator.flops) and not (fused and operator.same_input)
        is_head = operator.flops > 0 and 0 < terms.head_plain_bytes <= operator.outside_bytes
        parts = (  # the device's share, bytes, reads of them, cost
            (1.0, operator.outside_bytes, 1.0, head if is_head else outside),
            (1 - cpu.layer_share, operator.layer_bytes, 1.0, layers),
            (1 - cpu.expert_share, operator.expert_bytes, expert_reads, experts),  # one kernel for all experts
        )
        products_s = sum(
            share * (reads * nbytes * cost.ns_per_byte / 1e9 + own_kernel * cost.call_s)
            for share, nbytes, reads, cost in parts
            if nbytes
        )
        return products_s + dequantize_ns * (operator.layer_bytes + operator.expert_bytes) / 1e9

    return seconds


def mean_reads(tokens: int, share: float, together: int) -> float:
    """Return how often a weight is read on average: E[ceil(k / together)] for k ~ Binomial(`tokens`, `share`), where a token uses it with
    probability `share` and one read serves `together` tokens."""
    if together >= tokens:
        return 1 - (1 - share) ** tokens
    return sum(
        math.comb(tokens, k) * share**k * (1 - share) ** (tokens - k) * math.ceil(k / together)
        for k in range(1, tokens + 1)
    )


def copy_times(plan: EnginePlan, machine: HardwareProfile, prefill: bool) -> dict[str, float]:
    """Return the seconds of a pass's copies by key of `RATE_WORDS`. Raises NotPredictable where a rate is missing."""
    job, config, terms, ranks = plan.job, plan.job.config, plan.cost_terms, plan.job.ranks.world_size
    fetched_bytes = terms.prefill_fetched_bytes if prefill else plan.fetched_bytes
    beside_cpu_gb_per_s = terms.prefill_link_gb_per_s if prefill else terms.link_beside_cpu_gb_per_s
    kv_bytes = plan.copied_kv_bytes
    if prefill:
        kv_bytes = ranks * job.kv_bytes(config.prompt_len) if job.on_gpu and config.kv_offload else 0

    def link_s(nbytes: float, pinned: bool, gb_per_s: float | None = None) -> float:
        """Return the seconds in which `nbytes` cross all links, by their rate together."""
        if not pinned:  # the host copies them itself: a process to one GPU at a time
            return _seconds(nbytes / ranks, gb_per_s or machine.pageable_link_gb_per_s, "pageable copies (pageable=)")
        name = "the link (link=)" if job.on_gpu else "copies in host memory (link=)"
        return _seconds(nbytes, gb_per_s or run_links_gb_per_s(job, machine), name)

    weights_s = 0.0
    if job.on_gpu or terms.copies_within_host:
        weights_s = link_s(fetched_bytes, plan.pinned or not job.on_gpu, beside_cpu_gb_per_s)
    kv_s = link_s(kv_bytes, config.pin_kv_cache, beside_cpu_gb_per_s if config.pin_kv_cache and not prefill else None)
    peers_on_link_s, peers_s = exchange_s(plan, machine, fetched_bytes)
    weights_s += peers_on_link_s
    disk_gb_per_s = machine.disk_gb_per_s and machine.disk_gb_per_s * job.ranks.num_nodes
    disk_bytes = terms.prefill_disk_bytes if prefill and terms.prefill_disk_bytes is not None else plan.disk_bytes
    return {
        # a prefill writes keys and values while weights arrive
        "link": max(weights_s, kv_s) if prefill else weights_s + kv_s,
        "peers": peers_s,
        "disk": _seconds(disk_bytes, disk_gb_per_s, "the disk (disk=)"),
    }


def run_links_gb_per_s(job: Job, machine: HardwareProfile) -> float | None:
    """Return the rate of plain copies over all links of a run together; None if unknown."""
    nodes = job.ranks.num_nodes
    of_node = links_gb_per_s(machine, job.num_gpus // nodes) if job.on_gpu else machine.link_gb_per_s
    return of_node and of_node * (nodes if job.on_gpu else job.ranks.world_size)


def exchange_s(plan: EnginePlan, machine: HardwareProfile, fetched_bytes: int) -> tuple[float, float]:
    """Return the seconds in which each GPU gets weights from the others: over its link, and over NVLink. Zero where the rate is unknown.
    `fetched_bytes` cross all links in the pass."""
    exchanged_bytes, peers = plan.exchanged_bytes(fetched_bytes), machine.peers_gb_per_s
    if not plan.job.on_gpu or peers is None:
        return 0.0, 0.0
    if peers == "link":
        return (exchanged_bytes / (machine.link_gb_per_s * 1e9) if machine.link_gb_per_s else 0.0), 0.0
    return 0.0, exchanged_bytes / (peers * 1e9)


def _seconds(nbytes: float, gb_per_s: float | None, name: str) -> float:
    if nbytes and not gb_per_s:
        raise NotPredictable(f"the rate of {name} is not known")
    return nbytes / (gb_per_s * 1e9) if nbytes else 0.0


def predict_load_s(plan: EnginePlan, machine: HardwareProfile) -> float | None:
    """Return the seconds of loading the weights of one rank, which are b bytes in the model's dtype: b / source rate + stored bytes / rate
    into host memory + b / quantize rate + compared layers + the engine's overhead.

    None where a rate is missing, and where weights are written to a disk, whose write rate is not measured. A checkpoint is assumed to be
    on the measured disk and not in the page cache; quantizing takes what this package's operator takes, for every engine.
    """
    job, config, rates = plan.job, plan.job.config, machine.loading
    if rates is None or plan.footprint.disk:
        return None
    if config.dummy:
        source_gb_per_s = rates.draw_gb_per_s
    elif machine.disk_gb_per_s is None:
        return None
    else:
        to_device = machine.pageable_link_gb_per_s if job.on_gpu else None
        source_gb_per_s = 1 / (1 / machine.disk_gb_per_s + (1 / to_device if to_device else 0.0))
    parameter_bytes = job.sizes.parameter_bytes
    source_bytes = plan.weight_bytes if job.spec.kept_format(config) else parameter_bytes
    parts = [source_bytes / source_gb_per_s, plan.footprint.host / rates.keep_gb_per_s]
    if config.quantized:
        int8 = config.quant_bits == 8
        parts.append(parameter_bytes / (rates.quantize_int8_gb_per_s if int8 else rates.quantize_int4_gb_per_s))
    overhead, layers = _overhead(plan, machine), job.spec.text_config.num_hidden_layers
    overhead_s = overhead.load_s + layers * overhead.load_layer_s if overhead else 0.0
    return sum(parts) / 1e9 + compared_s(plan) + overhead_s


def compared_s(plan: EnginePlan) -> float:
    """Return the seconds in which decoder layers are copied from a GPU to host memory, to be compared after loading."""
    job = plan.job
    layers = job.empty_model.cached("bytes of compared layers", lambda: first_layer_bytes(job.empty_model.model))
    return min(COMPARED_BYTES, sum(layers.values())) / (COMPARED_GB_PER_S * 1e9) if job.on_gpu else 0.0
