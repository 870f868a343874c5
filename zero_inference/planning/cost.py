"""The range beside a predicted time: within it were 9 of 10 committed runs of its kind, all with a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from zero_inference.engines.base import EnginePlan
from zero_inference.engines.cost_terms import CpuWork
from zero_inference.hardware.rates import (
    dequantize_gb_per_s,
    device_attention_s,
    find_cpu_attention_overhead,
    find_dequantize_overhead,
    find_engine_overhead,
    find_kv_copy_overhead,
    product_time,
)
from zero_inference.kernels.indexed import pairs_together
from zero_inference.models.layers import COMPARED_BYTES, first_layer_bytes
from zero_inference.models.operators import Operator, Pass
from zero_inference.records.hardware import RATE_WORDS
from zero_inference.utils.format import format_seconds, significant

if TYPE_CHECKING:
    from zero_inference.hardware.profile import EngineOverhead, HardwareProfile, LoadingRates


class Range(NamedTuple):
    """From `low` to `high`: of a kind of predictions in multiples of them, of one prediction in its own unit."""

    low: float
    high: float

    def of(self, predicted: float) -> Range:
        """Return the range around `predicted`."""
        return Range(self.low * predicted, self.high * predicted)


# Measured over predicted time by kind. `python benchmarks/predictions.py --ranges` computes and prints them, and how many runs of each host
# are within the ranges that all other hosts make; a test does the same.
RANGES = {
    "load": Range(0.90, 1.80),
    "prefill": Range(0.90, 1.15),
    "step": Range(0.85, 1.15),
    "step with the CPU": Range(0.85, 1.30),
    "launched": Range(0.75, 1.60),
}
# A prefill counts as launched where the host takes more than `LAUNCHED_SHARE` of it to launch its operators; a step, where the device waits
# for that for more than `WAITED_SHARE`, and copies do not hide it: what is no copy is more than `LAUNCHED_SHARE`.
LAUNCHED_SHARE, WAITED_SHARE = 0.6, 0.1


def seconds_in_words(predicted_s: float, within_s: Range | None) -> str:
    """Return such as "0.123 s (0.11 to 0.14)"."""
    if within_s is None:
        return format_seconds(predicted_s)
    low, high = map(format_seconds, within_s)
    if low.endswith(" s") and high.endswith(" s"):
        low, high = low.removesuffix(" s"), high.removesuffix(" s")
    return f"{format_seconds(predicted_s)} ({low} to {high})"


def rate_in_words(predicted: float, within: Range | None) -> str:
    """Return such as "16.4 (15.1 to 18.9)"."""
    return significant(predicted) + (f" ({' to '.join(map(significant, within))})" if within else "")


def copies_of_step(plan: EnginePlan, description: HardwareProfile) -> dict[str, float | None]:
    """Seconds by key of `RATE_WORDS`, of a decode step of mean length."""
    beside = plan.cost_terms.link_beside_cpu_gb_per_s
    of_links = 1 if beside else plan.job.ranks.world_size  # beside the cores the rate is that of all links
    weights_s = _seconds(plan.fetched_bytes / of_links, beside if beside else _weights_gb_per_s(plan, description))
    kv_s = _seconds(plan.carried_kv_bytes / plan.job.ranks.world_size, _kv_gb_per_s(plan, description, beside))
    over_link_s, others_s = peers_s(plan, description, plan.fetched_bytes)
    link_s = None if weights_s is None or kv_s is None else weights_s + kv_s + over_link_s
    return {"link": link_s, "peers": others_s, "disk": _disk_s(plan, description)}


def copies_of_prefill(plan: EnginePlan, description: HardwareProfile) -> dict[str, float | None]:
    """The same of a prefill, whose keys and values are written to host memory while weights come."""
    job = plan.job
    written = job.kv_bytes(job.config.prompt_len) if job.on_gpu and job.config.kv_offload else 0
    rate = plan.cost_terms.prefill_link_gb_per_s or _weights_gb_per_s(plan, description)
    fetched_s = _seconds(plan.cost_terms.prefill_fetched_bytes / job.ranks.world_size, rate)
    written_s = _seconds(written, _kv_gb_per_s(plan, description))
    over_link_s, others_s = peers_s(plan, description, plan.cost_terms.prefill_fetched_bytes)
    link_s = None if fetched_s is None or written_s is None else max(fetched_s + over_link_s, written_s)
    return {"link": link_s, "peers": others_s, "disk": _disk_s(plan, description)}


def missing_rates(plan: EnginePlan, description: HardwareProfile) -> list[str]:
    """Those that such copies take and the machine lacks, by the names that `--assume` has for them."""
    job = plan.job
    pinned = []  # whether, of what crosses the link
    if plan.cost_terms.prefill_fetched_bytes and (job.on_gpu or plan.cost_terms.copies_within_host):
        pinned.append(_weights_locked(plan))
    if job.on_gpu and job.config.kv_offload:
        pinned.append(job.config.pin_kv_cache)
    link = "the link" if job.on_gpu else "copies in host memory"
    missing = {
        f"{link} (link=)": any(pinned) and description.link_gb_per_s is None,
        "pageable copies (pageable=)": not all(pinned) and description.pageable_link_gb_per_s is None,
        "the disk (disk=)": bool(plan.disk_bytes) and description.disk_gb_per_s is None,
    }
    return [name for name, lacks in missing.items() if lacks]


def lacks_peers(plan: EnginePlan, description: HardwareProfile) -> bool:
    """Whether GPUs send each other weights, and it is not known how fast."""
    return bool(plan.exchanged_bytes(plan.fetched_bytes)) and description.peers_gb_per_s is None


def peers_s(plan: EnginePlan, description: HardwareProfile, fetched_bytes: int) -> tuple[float, float]:
    """Seconds in which each GPU gets its weights from the others, in a pass that fetches so many bytes over all links: over its link, and
    by ways of their own. Nothing where the rate is not known."""
    peers, exchanged = description.peers_gb_per_s, plan.exchanged_bytes(fetched_bytes)
    if not plan.job.on_gpu or peers is None:
        return 0.0, 0.0
    if peers == "link":
        return _seconds(exchanged, description.link_gb_per_s) or 0.0, 0.0
    return 0.0, exchanged / (peers * 1e9)


def _weights_locked(plan: EnginePlan) -> bool:
    """Whether weights in host memory are page-locked, or there is no GPU for which that matters."""
    return plan.pinned or not plan.job.on_gpu


def _weights_gb_per_s(plan: EnginePlan, description: HardwareProfile) -> float | None:
    if not plan.job.on_gpu and not plan.cost_terms.copies_within_host:
        return float("inf")
    return description.link_gb_per_s if _weights_locked(plan) else description.pageable_link_gb_per_s


def _kv_gb_per_s(plan: EnginePlan, description: HardwareProfile, beside: float | None = None) -> float | None:
    """Of one link, for keys and values in host memory; `beside` has the rate of all of them beside the cores where these work, too."""
    if not plan.job.config.pin_kv_cache:
        return description.pageable_link_gb_per_s
    return beside / plan.job.ranks.world_size if beside else description.link_gb_per_s


def _disk_s(plan: EnginePlan, description: HardwareProfile) -> float | None:
    rate = description.disk_gb_per_s
    return _seconds(plan.disk_bytes, rate * plan.job.ranks.num_nodes if rate else None)


def _seconds(nbytes: float, gb_per_s: float | None) -> float | None:
    """None where there is something to move, and no rate."""
    if not nbytes:
        return 0.0
    return nbytes / (gb_per_s * 1e9) if gb_per_s else None


# Runs launch operators this many times as slowly as the small models of `link --save` do: the median of the committed runs that wait
# for the host (13B and 8B in 16 bits on an H100: 1.46 and 1.46; OPT-13B on seven H200 hosts: 0.96 to 2.0). Why is not known, and hosts
# differ from minute to minute.
LAUNCH_SLOWDOWN = 1.4


@dataclass(frozen=True)
class HostWork:
    """Of a pass.

    Attributes:
        launches, module_calls: operators that the host launches, and its calls of modules; none where the device repeats graphs.
        restored: operators that restore weights from codes.
        pieces: of weights that it sends for.
        starts: a generation begins with it.
    """

    launches: int = 0
    module_calls: int = 0
    restored: int = 0
    pieces: int = 0
    starts: bool = False


def host_work_s(plan: EnginePlan, description: HardwareProfile, host: HostWork) -> float:
    """Without selecting a token. The host of a machine that nobody measured is taken to be never late."""
    launches, config = description.launches, plan.job.config
    of_model_s = host.launches * launches.operator_s + host.module_calls * launches.module_s if launches else 0.0
    of_model_s *= 1 + host.restored / max(
        1, host.launches
    )  # one of these counts as the mean of the others, as in `prefill_piece_s`
    found = of_model_s * (LAUNCH_SLOWDOWN if plan.job.on_gpu else 1.0)
    found += host.pieces * piece_s(find_engine_overhead(description, config.engine, config.quant_bits), host)
    found += plan.cost_terms.cpu_attention_layers * piece_s(find_cpu_attention_overhead(description), host)
    found += plan.copied_layers * piece_s(find_kv_copy_overhead(description), host)
    if host.starts or not plan.cost_terms.graphs:
        found += plan.cost_terms.resident_quantized_blocks * piece_s(find_dequantize_overhead(description), host)
    return found


def piece_s(own: EngineOverhead | None, host: HostWork) -> float:
    """Of the host for a piece of weights, or a layer whose keys and values are in host memory."""
    if own is None:
        return 0.0
    return own.prefill_piece_s if host.starts else own.step_piece_s


DEQUANTIZED_ROWS = (
    128  # of hardware/bench_device.py's measurements of a CPU, tokens that are multiplied with restored weights
)


def weights_s_of(
    plan: EnginePlan, description: HardwareProfile, traced: Pass, tokens: int, cpu: CpuWork
) -> Callable[[Operator], float]:
    """Seconds in which the device brings the weights of an operator from its memory, without those that the cores multiply.

    Codes are multiplied as they are by an engine that can do so with so many tokens, or as it was measured with them; else the dtype that
    is multiplied is restored first: written once and read once. On a CPU that takes longer than the product, and all experts of a layer.
    """
    job, config = plan.job, plan.job.config
    number, chosen = job.spec.experts
    of_token = chosen / number if number else 0.0  # of the experts
    fused = config.quantized and tokens <= plan.cost_terms.fused_rows
    together = pairs_together(tokens * chosen, number) if number and fused else max(1, tokens)
    read = mean_reads(tokens, of_token, together)
    plain_head, stored_head = plan.cost_terms.head_plain_bytes, plan.cost_terms.head_stored_bytes
    in_layers = traced.total("layer_bytes") + traced.total("expert_bytes")
    if plan.cost_terms.quantizes_all:
        stored = plan.weight_bytes / max(1, job.sizes.parameter_bytes)
    else:
        others = job.sizes.parameter_bytes - in_layers - plain_head + stored_head
        stored = (plan.weight_bytes - others) / max(1, in_layers)
    memory = description.device_gb_per_s or float("inf")
    plain = job.spec.dtype_name
    kind = f"int{config.quant_bits}" if config.quantized else plain
    codes = config.quantized and job.on_gpu
    restored = dequantize_gb_per_s(find_engine_overhead(description, config.engine, config.quant_bits), plain)

    dequantizes = plan.cost_terms.dequantizes_on_cpu and not restored
    dequantized = dequantized_byte_ns(description, kind, plain, stored) if dequantizes else 0.0

    def of_plain(rows: int) -> tuple[float, float]:
        """1e-9 seconds for a byte, and seconds besides, of a weight that `rows` tokens use."""
        found = product_time(description, plain, rows)
        return (1 / memory, 0.0) if found is None else (1 / found.gb_per_s, found.call_s)

    def of_weight(rows: int) -> tuple[float, float]:
        """The same of one that is stored as the engine does, for bytes of the dtype that is multiplied."""
        product, call_s = of_plain(rows)
        if dequantizes:  # whatever is chosen, below
            return product, call_s
        if restored:  # with the product of one token
            return 1 / restored + max(0.0, product - of_plain(1)[0]), 0.0
        if (found := product_time(description, kind, rows)) and (plan.cost_terms.fused_rows or not codes):
            return stored / found.gb_per_s, found.call_s
        if not codes or rows <= plan.cost_terms.fused_rows:
            return stored / memory, 0.0
        return (stored + 1) / memory + product, call_s

    of_expert = max(1, round(tokens * of_token / read)) if number else tokens  # tokens that one expert gets at once
    if codes and not fused:  # all experts are restored first, however few tokens one gets
        of_expert = max(of_expert, plan.cost_terms.fused_rows + 1)
    of_layers, of_experts = of_weight(tokens), of_weight(of_expert)
    outside = of_layers if plan.cost_terms.quantizes_all else of_plain(tokens)

    def of_head() -> tuple[float, float]:
        """As `of_weight`, of a head that is quantized by itself, which multiplies the last token of each sequence."""
        rows, share = job.rank_batch, stored_head / plain_head
        if (found := product_time(description, "int8", rows)) and (plan.cost_terms.fused_rows or not codes):
            return share / found.gb_per_s, found.call_s
        restores = (1.0, of_plain(rows)[0]) if rows > plan.cost_terms.fused_rows and job.on_gpu else (0.0, 0.0)
        return (share + restores[0]) / memory + restores[1], 0.0

    head = of_head() if plain_head else outside

    def seconds(operator: Operator) -> float:
        calls = bool(operator.flops) and not (fused and operator.same_input)  # of a kernel of its own
        is_head = operator.flops > 0 and 0 < plain_head <= operator.outside_bytes
        parts = (
            (1.0, operator.outside_bytes, 1.0, head if is_head else outside),
            (1 - cpu.layer_share, operator.layer_bytes, 1.0, of_layers),
            (1 - cpu.expert_share, operator.expert_bytes, read, of_experts),  # by one kernel, whichever are chosen
        )
        products_s = sum(
            share * (used * nbytes * byte_ns / 1e9 + calls * call_s)
            for share, nbytes, used, (byte_ns, call_s) in parts
            if nbytes
        )
        return products_s + dequantized * (operator.layer_bytes + operator.expert_bytes) / 1e9

    return seconds


def dequantized_byte_ns(description: HardwareProfile, kind: str, plain: str, stored: float) -> float:
    """Return 1e-9 seconds in which a CPU dequantizes a byte of a weight in the dtype `plain`: what a product with codes takes longer than
    one with plain weights, of more tokens than are multiplied with codes; by bytes where that was not measured.

    Args:
        kind: "int8" or "int4".
        stored: bytes of codes and scales for a byte.
    """
    found = product_time(description, kind, DEQUANTIZED_ROWS)
    product = product_time(description, plain, DEQUANTIZED_ROWS)
    if found is None or product is None:
        return (stored + 1) / (description.device_gb_per_s or float("inf"))
    return max(0.0, stored / found.gb_per_s - 1 / product.gb_per_s)


def mean_reads(tokens: int, share: float, together: int) -> float:
    """How often a weight is read on average that each of `tokens` tokens uses with probability `share`, once for every `together` of those
    that do: the mean of ceil(k / together) for a binomial k."""
    if together >= tokens:
        return 1 - (1 - share) ** tokens
    return sum(
        math.comb(tokens, k) * share**k * (1 - share) ** (tokens - k) * math.ceil(k / together)
        for k in range(1, tokens + 1)
    )


# Copies of decoder layers in 16 bits from a GPU to new host memory, where they are kept to be compared, in huge pages that all threads
# fault in: 1.8 to 14 GB/s in 18 of 20 runs of the stream engine on an H100 (h100-readme), 0.8 to 1.45 before (h100-predicted).
COMPARED_GB_PER_S = 4.0


def predict_load_s(plan: EnginePlan, description: HardwareProfile) -> float | None:
    """Seconds from the first weight to the last of one rank; None where a rate is missing, as the disk's for a checkpoint, and where
    weights are written to a disk: how fast it writes is not measured.

    A checkpoint is taken to lie on the disk that was measured, and not in the system's cache. Quantizing takes what this package's own
    operator takes, whichever engine does it.
    """
    job, config, rates = plan.job, plan.job.config, description.loading
    source = _source_gb_per_s(plan, description)
    if rates is None or source is None or plan.footprint.disk:
        return None
    dense = job.sizes.parameter_bytes
    parts = [dense / source, plan.footprint.host / rates.keep_gb_per_s]
    if config.quantized:
        parts.append(dense / _quantize_gb_per_s(rates, config.quant_bits))
    own = find_engine_overhead(description, config.engine, config.quant_bits)
    layers = job.spec.text_config.num_hidden_layers
    return sum(parts) / 1e9 + compared_s(plan) + (own.load_s + layers * own.load_layer_s if own else 0.0)


def compared_s(plan: EnginePlan) -> float:
    """Return the seconds in which a GPU's copies of the decoder layers that are compared come to host memory."""
    job = plan.job
    layers = job.empty_model.cached("bytes of compared layers", lambda: first_layer_bytes(job.empty_model.model))
    return min(COMPARED_BYTES, sum(layers.values())) / (COMPARED_GB_PER_S * 1e9) if job.on_gpu else 0.0


def _source_gb_per_s(plan: EnginePlan, description: HardwareProfile) -> float | None:
    """Of a weight that comes to where it is quantized."""
    job, rates = plan.job, description.loading
    if rates is None:
        return None
    if job.config.dummy:
        return rates.draw_gb_per_s
    if description.disk_gb_per_s is None:
        return None
    to_device = description.pageable_link_gb_per_s if job.on_gpu else None
    return 1 / (1 / description.disk_gb_per_s + (1 / to_device if to_device else 0.0))


def _quantize_gb_per_s(rates: LoadingRates, quant_bits: int) -> float:
    return rates.quantize_int8_gb_per_s if quant_bits == 8 else rates.quantize_int4_gb_per_s


# The device takes this many times as long for a mixture's prefill as its products and bytes would, one by one: sorting tokens by expert,
# gathering, grouped products of few rows and adding up run below these rates. Of 13 committed runs (h200-big-models, h200-together) that is
# the factor from which none is farther than 11%.
MOE_PREFILL_SLOWDOWN = 1.33


@dataclass(frozen=True)
class PassTime:
    """
    Attributes:
        seconds: of the pass.
        bound_by: what most of them are for, a key of `RATE_WORDS`.
        kind: a key of `RANGES`; None without a GPU, where no runs have been compared.
    """

    seconds: float
    bound_by: str
    kind: str | None = None


@dataclass(frozen=True)
class Times:
    """Of a run that is not the first after loading.

    Attributes:
        step: a decode step of mean length.
        bounds_because: why they are lower bounds, a few words for each reason; empty where they are not.
        with_host: what the host takes to launch operators is known, and in them.
        without_cores: the host's cores may take part in a run, and what they do is not known: it may be faster.
        without_own_work: what the engine does besides the model's work takes long, and was not measured: a run is slower.
    """

    prefill: PassTime
    step: PassTime
    bounds_because: tuple[str, ...] = ()
    with_host: bool = True
    without_cores: bool = False
    without_own_work: bool = False

    @property
    def at_least(self) -> bool:
        """Whether they are lower bounds."""
        return bool(self.bounds_because)

    def tokens_per_s(self, batch_size: int) -> float:
        """Of decoding."""
        return batch_size / self.step.seconds

    @property
    def step_range_s(self) -> Range | None:
        """Return the range of a decode step; None where times are bounds, and without a GPU."""
        return self._range_s(self.step)

    @property
    def prefill_range_s(self) -> Range | None:
        """Return the range of the first token; None as of a step."""
        return self._range_s(self.prefill)

    def _range_s(self, of: PassTime) -> Range | None:
        return None if self.at_least or of.kind is None else RANGES[of.kind].of(of.seconds)

    def tokens_per_s_range(self, batch_size: int) -> Range | None:
        """Return the range of `tokens_per_s`; None as of a step."""
        step = self.step_range_s
        return None if step is None else Range(batch_size / step.high, batch_size / step.low)

    def in_words(self, batch_size: int) -> str:
        """On one line, without what `left_out` says."""
        least, most = ("at least ", "at most ") if self.at_least else ("", "")
        rate = rate_in_words(self.tokens_per_s(batch_size), self.tokens_per_s_range(batch_size))
        return (
            f"{most}{rate} token/s (decode step {least}{format_seconds(self.step.seconds)}, "
            f"bound by {RATE_WORDS[self.step.bound_by]}), "
            f"first token {least}{seconds_in_words(self.prefill.seconds, self.prefill_range_s)}"
        )

    def left_out(self) -> list[str]:
        """What the times do not count, a few words for each."""
        return [
            *([] if self.with_host else ["kernel launches (the host's time for them is not known)"]),
            *(["the host's cores (their rate is not known; a run may be faster)"] if self.without_cores else []),
        ]


def why_unknown(plan: EnginePlan, description: HardwareProfile) -> str:
    """Why `predict_times` gives none, in a few words."""
    if names := unknown_rates(plan, description):
        return unknown_in_words(names, plan.job.machine.is_here)
    if _lacks_dequantizing(plan, description):
        return f"how long {plan.job.config.engine} takes to dequantize on a CPU was not measured (zero-inference link --save does)"
    return "the model cannot be traced without its weights"


def unknown_rates(plan: EnginePlan, description: HardwareProfile) -> list[str]:
    """Return the names of the rates that `predict_times` lacks."""
    device = "device memory" if plan.job.on_gpu else "host memory"
    memory = [f"{device} (memory=)"] if description.device_gb_per_s is None else []
    return memory + missing_rates(plan, description)


def unknown_in_words(names: Sequence[str], is_here: bool) -> str:
    """Return `unknown_rates` in a few words."""
    remedy = ""
    if is_here and any("disk=" in name for name in names):
        remedy = " (measure it with zero-inference link --save --disk DIR)"
    several = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"the rate{'s' * (len(names) > 1)} of {several} {'are' if len(names) > 1 else 'is'} not known{remedy}"


def predict_times(plan: EnginePlan, description: HardwareProfile) -> Times | None:
    """None where a rate is missing that the plan takes, or where the model cannot run without weights. To be asked for before `load`."""
    job, config = plan.job, plan.job.config
    if _lacks_dequantizing(plan, description):
        return None  # it takes the most time there
    one = job.empty_model.traced_pass(job.spec, 1, config.prompt_len + config.gen_len // 2)
    prompt = job.empty_model.traced_pass(job.spec, config.prompt_len, 0)
    if one is None or prompt is None:
        return None
    of_prompt, of_step = prefill(plan, description, prompt), decode_step(plan, description, one)
    if of_prompt is None or of_step is None:
        return None
    return Times(
        of_prompt,
        of_step,
        bounds_because=_why_bounds(plan, description),
        with_host=description.launches is not None,
        without_cores=plan.cost_terms.cpu_rate_unknown,
        without_own_work=_lacks_own_work(plan, description),
    )


def _why_bounds(plan: EnginePlan, description: HardwareProfile) -> tuple[str, ...]:
    """What part of the time is not known, or taken from rates that no machine reaches. Of several GPUs that is what they send each
    other, and how far their links share what host memory gives."""
    config, dtype = plan.job.config, plan.job.spec.dtype_name
    links = plan.job.ranks.world_size > 1 and bool(plan.moved_per_step().host_to_device_bytes_per_step)
    reasons = {
        "rates are from datasheets, which no run reaches": description.source == "datasheet",
        f"the rate of {dtype} matrix products is not known": description.matmul_tflops.get(dtype) is None,
        f"the overhead of {config.engine} was not measured": _lacks_own_work(plan, description),
        "how fast the GPUs exchange weights is not known (--assume peers=)": lacks_peers(plan, description),
        "the links of several GPUs may slow each other down": links,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def _lacks_own_work(plan: EnginePlan, description: HardwareProfile) -> bool:
    config = plan.job.config
    return (
        not plan.cost_terms.overhead_negligible
        and find_engine_overhead(description, config.engine, config.quant_bits) is None
    )


def _lacks_dequantizing(plan: EnginePlan, description: HardwareProfile) -> bool:
    return plan.job.config.quantized and not plan.job.on_gpu and _lacks_own_work(plan, description)


def decode_step(plan: EnginePlan, description: HardwareProfile, traced: Pass) -> PassTime | None:
    """Of mean length; None where a rate is missing that it takes.

    Args:
        traced: of one token behind as many others as a step has on average.
    """
    tokens = plan.job.rank_batch
    weights_s = weights_s_of(plan, description, traced, tokens, plan.cost_terms.step_cpu)
    return _together(
        plan,
        description,
        traced,
        weights_s,
        copies=copies_of_step(plan, description),
        host=HostWork()
        if plan.cost_terms.graphs
        else HostWork(traced.launches, traced.module_calls, pieces=plan.cost_terms.fetches),
    )


def prefill(plan: EnginePlan, description: HardwareProfile, traced: Pass) -> PassTime | None:
    """Of the prompts; None as of `decode_step`.

    Args:
        traced: of a prompt.
    """
    job = plan.job
    tokens = job.rank_batch * job.config.prompt_len
    weights_s = weights_s_of(plan, description, traced, tokens, plan.cost_terms.prefill_cpu)
    restored = traced.products_in_layers if job.config.quantized and 0 < plan.cost_terms.fused_rows < tokens else 0
    host = HostWork(traced.launches, traced.module_calls, restored, plan.cost_terms.fetches, starts=True)
    return _together(plan, description, traced, weights_s, copies=copies_of_prefill(plan, description), host=host)


def _together(
    plan: EnginePlan,
    description: HardwareProfile,
    traced: Pass,
    weights_s: Callable[[Operator], float],
    *,
    copies: dict[str, float | None],
    host: HostWork,
) -> PassTime | None:
    """What the parts take beside or behind each other. The device computes while blocks are copied, and waits for the cores."""
    launches, rate = description.launches, description.device_gb_per_s
    copied = {name: seconds for name, seconds in copies.items() if seconds is not None}
    if rate is None or len(copied) < len(copies):
        return None
    flop_rate = description.matmul_tflops.get(plan.job.spec.dtype_name)
    least_s = (plan.job.on_gpu and launches and launches.graph_operator_s) or 0.0  # of one that moves little
    cores_attend = plan.cost_terms.cpu_attention_layers > 0  # which `CpuWork.wait_s` counts

    def of_memory(operator: Operator) -> float:
        nbytes = operator.nbytes * plan.job.rank_batch
        if operator.attends and not host.starts:
            return least_s if cores_attend else _attention_s(plan, description, operator, least_s)
        return nbytes / (rate * 1e9) + weights_s(operator)

    def of_products(operator: Operator) -> float:
        return operator.flops * plan.job.rank_batch / (flop_rate * 1e12) if flop_rate else 0.0

    work_s = _total(traced, lambda each: max(of_memory(each), of_products(each), least_s))
    if host.starts and plan.job.spec.experts[0] and plan.job.on_gpu:
        work_s *= MOE_PREFILL_SLOWDOWN
    memory = "device_memory" if plan.job.on_gpu else "host_memory"
    bound = "matmul" if _total(traced, of_products) > work_s / 2 else memory
    own = find_engine_overhead(description, plan.job.config.engine, plan.job.config.quant_bits)
    host_s = host_work_s(plan, description, host)
    begin_s = own.start_s if own and host.starts else 0.0  # nothing is asked for until then, but what is on its way
    waited_s = (plan.cost_terms.prefill_cpu if host.starts else plan.cost_terms.step_cpu).wait_s
    # a GPU computes, and waits for the cores, while the host launches what follows
    launched_s = max(0.0, host_s - work_s - waited_s) if plan.job.on_gpu else host_s
    computing = {
        bound: work_s,
        "launches": launched_s + (launches.step_s if launches else 0.0) + begin_s,
        "cores": waited_s,
    }
    asked_s = begin_s
    if plan.cost_terms.copies_wait_for_host:  # for hooks, without dequantizing
        asked_s += host.pieces * piece_s(find_engine_overhead(description, plan.job.config.engine, 16), host)
    copied["link"] += asked_s if copied["link"] else 0.0
    others_s = sum(computing.values())
    if not plan.job.on_gpu or not plan.cost_terms.copies_overlap:  # without a GPU they share its memory and its cores
        parts, whole_s = computing | copied, others_s + sum(copied.values())
    else:
        parts = {**copied, max(computing, key=lambda each: computing[each]): others_s}
        whole_s = max(parts.values())
    bound_by = max(parts, key=lambda each: parts[each])
    if plan.job.on_gpu and plan.cost_terms.copies_overlap and not host.starts:
        copied["link"], others_s = plan.rebalanced_s(copied["link"], others_s)
        whole_s = max(*copied.values(), plan.overlapped_s(copied["link"], others_s))
    if not plan.job.on_gpu:
        return PassTime(whole_s, bound_by)
    if host.starts:
        # prompts with the CPU have too few runs for a range of their own
        kind = "step with the CPU" if waited_s else "prefill"
        return PassTime(whole_s, bound_by, "launched" if host_s > LAUNCHED_SHARE * whole_s else kind)
    waits = launched_s > WAITED_SHARE * whole_s and others_s > LAUNCHED_SHARE * whole_s
    kind = "launched" if waits else "step"
    return PassTime(whole_s, bound_by, "step with the CPU" if waited_s else kind)


def _attention_s(plan: EnginePlan, description: HardwareProfile, operator: Operator, least_s: float) -> float:
    """Seconds of an operator of attention in a decode step of mean length, over keys and values in device memory; by its bytes where that
    was not measured."""
    job, launches, shape = plan.job, description.launches, operator.attention
    nbytes = operator.nbytes * job.rank_batch
    found = None
    if shape is not None:
        key_heads, row_bytes = job.rank_batch * shape.key_heads, shape.head_dim * job.spec.dtype.itemsize
        found = device_attention_s(description, shape.heads // shape.key_heads, key_heads, shape.positions, row_bytes)
    if found is not None:
        return found
    if launches is not None and launches.attention_gb_per_s:
        return least_s + nbytes / (launches.attention_gb_per_s * 1e9)
    return nbytes / ((description.device_gb_per_s or float("inf")) * 1e9)


def _total(traced: Pass, seconds: Callable[[Operator], float]) -> float:
    return sum(seconds(operator) * count for operator, count in traced.operators.items())
