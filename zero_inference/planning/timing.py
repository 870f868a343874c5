"""How long a prefill and a decode step will take: the roofline of each operator, with what a plan places where and what the host takes to
launch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan
from zero_inference.hardware.rates import device_attention_s, own_work
from zero_inference.models.operators import Operator, Pass
from zero_inference.planning.copies_time import copies_of_prefill, copies_of_step, lacks_peers, missing_rates
from zero_inference.planning.host_time import HostWork, host_work_s, piece_s
from zero_inference.planning.ranges import (
    LAUNCHED_SHARE,
    RANGES,
    WAITED_SHARE,
    Range,
    rate_in_words,
    seconds_in_words,
)
from zero_inference.planning.weights_time import weights_s_of
from zero_inference.records.limit import RATE_WORDS
from zero_inference.utils.format import format_seconds

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description

# The device takes this many times as long for a mixture's prefill as its products and bytes would, one by one: sorting tokens by expert,
# gathering, grouped products of few rows and adding up run below these rates. Of 13 committed runs (h200-big-models, h200-together) that is
# the factor from which none is farther than 11%.
MIXTURE_SLOWNESS = 1.33


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


def why_unknown(plan: EnginePlan, description: Description) -> str:
    """Why `predicted_times` gives none, in a few words."""
    if names := unknown_rates(plan, description):
        return unknown_in_words(names, plan.job.machine.is_here)
    if _lacks_dequantizing(plan, description):
        return f"how long {plan.job.config.engine} takes to dequantize on a CPU was not measured (zero-inference link --save does)"
    return "the model cannot be traced without its weights"


def unknown_rates(plan: EnginePlan, description: Description) -> list[str]:
    """Return the names of the rates that `predicted_times` lacks."""
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


def predicted_times(plan: EnginePlan, description: Description) -> Times | None:
    """None where a rate is missing that the plan takes, or where the model cannot run without weights. To be asked for before `load`."""
    job, config = plan.job, plan.job.config
    if _lacks_dequantizing(plan, description):
        return None  # it takes the most time there
    one = job.skeleton.traced_pass(job.spec, 1, config.prompt_len + config.gen_len // 2)
    prompt = job.skeleton.traced_pass(job.spec, config.prompt_len, 0)
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
        without_cores=plan.lacks_cores,
        without_own_work=_lacks_own_work(plan, description),
    )


def _why_bounds(plan: EnginePlan, description: Description) -> tuple[str, ...]:
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


def _lacks_own_work(plan: EnginePlan, description: Description) -> bool:
    config = plan.job.config
    return not plan.own_work_known and own_work(description, config.engine, config.quant_bits) is None


def _lacks_dequantizing(plan: EnginePlan, description: Description) -> bool:
    return plan.job.config.quantized and not plan.job.on_gpu and _lacks_own_work(plan, description)


def decode_step(plan: EnginePlan, description: Description, traced: Pass) -> PassTime | None:
    """Of mean length; None where a rate is missing that it takes.

    Args:
        traced: of one token behind as many others as a step has on average.
    """
    tokens = plan.job.rank_batch
    weights_s = weights_s_of(plan, description, traced, tokens, plan.share_on_cores())
    return _together(
        plan,
        description,
        traced,
        weights_s,
        copies=copies_of_step(plan, description),
        host=HostWork() if plan.graphs else HostWork(traced.launches, traced.module_calls, pieces=plan.pieces),
    )


def prefill(plan: EnginePlan, description: Description, traced: Pass) -> PassTime | None:
    """Of the prompts; None as of `decode_step`.

    Args:
        traced: of a prompt.
    """
    job = plan.job
    tokens = job.rank_batch * job.config.prompt_len
    weights_s = weights_s_of(plan, description, traced, tokens, plan.prefill_share_on_cores())
    restored = traced.products_in_layers if job.config.quantized and 0 < plan.fused_rows < tokens else 0
    host = HostWork(traced.launches, traced.module_calls, restored, plan.pieces, starts=True)
    return _together(plan, description, traced, weights_s, copies=copies_of_prefill(plan, description), host=host)


def _together(
    plan: EnginePlan,
    description: Description,
    traced: Pass,
    weights_s: Callable[[Operator], float],
    *,
    copies: dict[str, float | None],
    host: HostWork,
) -> PassTime | None:
    """What the parts take beside or behind each other. The device computes while blocks are copied, and waits for the cores."""
    launches, rate = description.launches, description.device_gb_per_s
    copied = {name: format_seconds for name, format_seconds in copies.items() if format_seconds is not None}
    if rate is None or len(copied) < len(copies):
        return None
    flop_rate = description.matmul_tflops.get(plan.job.spec.dtype_name)
    least_s = (plan.job.on_gpu and launches and launches.graph_operator_s) or 0.0  # of one that moves little
    cores_attend = plan.attending_layers > 0  # which `plan.cores_s` counts

    def of_memory(operator: Operator) -> float:
        nbytes = operator.nbytes * plan.job.rank_batch
        if operator.attends and not host.starts:
            return least_s if cores_attend else _attention_s(plan, description, operator, least_s)
        return nbytes / (rate * 1e9) + weights_s(operator)

    def of_products(operator: Operator) -> float:
        return operator.flops * plan.job.rank_batch / (flop_rate * 1e12) if flop_rate else 0.0

    work_s = _total(traced, lambda each: max(of_memory(each), of_products(each), least_s))
    if host.starts and plan.job.spec.experts[0] and plan.job.on_gpu:
        work_s *= MIXTURE_SLOWNESS
    memory = "device_memory" if plan.job.on_gpu else "host_memory"
    bound = "matmul" if _total(traced, of_products) > work_s / 2 else memory
    own = own_work(description, plan.job.config.engine, plan.job.config.quant_bits)
    host_s = host_work_s(plan, description, host)
    begin_s = own.start_s if own and host.starts else 0.0  # nothing is asked for until then, but what is on its way
    waited_s = plan.prefill_cores_s() if host.starts else plan.cores_s()
    # a GPU computes, and waits for the cores, while the host launches what follows
    launched_s = max(0.0, host_s - work_s - waited_s) if plan.job.on_gpu else host_s
    computing = {
        bound: work_s,
        "launches": launched_s + (launches.step_s if launches else 0.0) + begin_s,
        "cores": waited_s,
    }
    asked_s = begin_s
    if plan.copies_wait_for_host:  # for hooks, without dequantizing
        asked_s += host.pieces * piece_s(own_work(description, plan.job.config.engine, 16), host)
    copied["link"] += asked_s if copied["link"] else 0.0
    others_s = sum(computing.values())
    if not plan.job.on_gpu or not plan.copies_overlap:  # without a GPU they share its memory and its cores
        parts, whole_s = computing | copied, others_s + sum(copied.values())
    else:
        parts = {**copied, max(computing, key=lambda each: computing[each]): others_s}
        whole_s = max(parts.values())
    bound_by = max(parts, key=lambda each: parts[each])
    if plan.job.on_gpu and plan.copies_overlap and not host.starts:
        copied["link"], others_s = plan.leveled(copied["link"], others_s)
        whole_s = max(*copied.values(), plan.paced_s(copied["link"], others_s))
    if not plan.job.on_gpu:
        return PassTime(whole_s, bound_by)
    if host.starts:
        # prompts with the CPU have too few runs for a range of their own
        kind = "step with the CPU" if waited_s else "prefill"
        return PassTime(whole_s, bound_by, "launched" if host_s > LAUNCHED_SHARE * whole_s else kind)
    waits = launched_s > WAITED_SHARE * whole_s and others_s > LAUNCHED_SHARE * whole_s
    kind = "launched" if waits else "step"
    return PassTime(whole_s, bound_by, "step with the CPU" if waited_s else kind)


def _attention_s(plan: EnginePlan, description: Description, operator: Operator, least_s: float) -> float:
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
