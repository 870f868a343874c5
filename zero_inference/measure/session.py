"""A loaded model and its measurement: from a plan to loops and the rates beside them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.engines.base import Job, LoadedModel
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.kv_cache.choose import cache_factory
from zero_inference.measure import loops
from zero_inference.measure.correctness import ReferenceLayers
from zero_inference.measure.rates import LinkRate, LoopMonitor, measure_rates, update_cpu_rate, update_link_rate
from zero_inference.measure.trace import trace_generation
from zero_inference.models.checkpoint_files import shorten_names
from zero_inference.models.experts import detect_routers, install_routing_kernel
from zero_inference.models.weights import draw_tokens, return_free_memory
from zero_inference.norms.choice import apply_norm_kernels, prepare_norm_kernels
from zero_inference.planning.cost import Range, seconds_in_words
from zero_inference.planning.plan import Plan
from zero_inference.records.hardware import Rates, TracedLinkUse
from zero_inference.records.schema import Result
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import format_bytes, three_digits
from zero_inference.utils.progress import Progress


@contextlib.contextmanager
def loaded_model(
    plan: Plan, progress: Progress, compared: bool = True
) -> Iterator[tuple[LoadedModel, float, Callable[[], None]]]:
    """Yield the model of `plan` with our kernels, the seconds that loading took without compiling, and a function to call before the
    model is used: it compares a decoder layer of each kind with transformers' own. Release the model at the end.

    Args:
        compared: keep layers in host memory for that; else the function does nothing.

    Raises:
        UsageError: --norm-kernels cuda, and they cannot be used.
        RunError: loading went wrong.
    """
    job, asked = plan.job, plan.job.config.norm_kernels
    unused_because = prepare_norm_kernels(
        asked,
        job.spec.config.model_type,
        job.ranks.device,
        job.spec.dtype,
        job.spec.text_config.hidden_size,
        progress.say,
    )
    fuses = has_kernels(job, progress)
    routers = detect_routers(job.empty_model.model, job.ranks.device) if fuses else {}
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints there, and stdout is for results
        plan.weights.prepare()
    job.ranks.barrier()  # that a rank compiled kernels, or tried them, is not loading for the others either
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        plain = ReferenceLayers(plan.weights) if compared else None
        with contextlib.nullcontext() if plain is None else plain.filled():
            loaded = plan.load(progress.loading(job.sizes.parameter_bytes))
    try:
        job.ranks.barrier()
        load_s = time.perf_counter() - start
        progress.clear()
        progress.say(
            f"loaded {format_bytes(loaded.weight_bytes)} of weights in {three_digits(load_s)} s{_planned(plan)}"
        )
        for line in plan.weights.in_words():
            progress.say(line)
        loaded.facts |= apply_norm_kernels(asked, unused_because, loaded.model, progress.say)
        Result().add_facts(loaded.facts)  # refuses what the record does not declare: now, not after the loops
        if names := loaded.facts.get("not_quantized"):
            progress.say(
                f"warning: {1 - loaded.facts['quantized_fraction']:.1%} of the weights are not quantized: "
                f"{', '.join(names[:3])}"
                + (f" and {len(names) - 3} more (all in the record)" if len(names) > 3 else "")
            )
        install_routing_kernel(loaded.model, routers)
        rotary = rotary_kernel(loaded.model, job.ranks.device, job.spec.dtype) if fuses else contextlib.nullcontext()
        with rotary:
            yield loaded, load_s, lambda: None if plain is None else _compare(plain, plan, loaded, progress)
    finally:
        loaded.close()


def has_kernels(job: Job, progress: Progress) -> bool:
    """Return whether there are compiled kernels for the job's device."""
    return job.on_gpu and load_extension(progress.say)


def _planned(plan: Plan) -> str:
    """Return such as "; planned: 1.29 s (1.16 to 2)"; empty where it was not known."""
    said = plan.predicted
    if said.load_s is None or said.load_range_s is None:
        return ""
    return f"; planned: {seconds_in_words(said.load_s, Range(*said.load_range_s))}"


def _compare(plain: ReferenceLayers, plan: Plan, loaded: LoadedModel, progress: Progress) -> None:
    job = plan.job
    plain.compare(loaded, job.config.engine, job.spec.text_config.vocab_size, job.ranks)
    for reason in dict.fromkeys(plain.left_out.values()):
        which = shorten_names([f"layer {position}" for position, why in plain.left_out.items() if why == reason])
        progress.say(f"not compared with transformers' own code: decoder {which}: {reason}")
    return_free_memory()


@dataclass
class Session:
    """A measured model.

    Attributes:
        ids: this rank's prompts, int64 [batch / ranks, prompt_len].
        make_cache: gives a loop its KV cache; None leaves it to transformers.
        fed: tokens that loops feed, see `generation.measure`.
    """

    plan: Plan
    loaded: LoadedModel
    ids: torch.Tensor
    make_cache: Callable[[], Any] | None
    fed: torch.Tensor | None
    measurement: loops.Measurement
    rates: Rates
    around: LoopMonitor


def measure_run(
    plan: Plan, loaded: LoadedModel, ids: torch.Tensor, progress: Progress, compare: Callable[[], None]
) -> Session:
    """Time the loops of the prompts `ids` int64 [batch, prompt_len], and measure the machine between them.

    Args:
        compare: of `loaded_model`; called once the machine has been measured, before a pass takes memory of its own.
    """
    job, config, ranks = plan.job, plan.job.config, plan.job.ranks
    link = LinkRate(ranks, loaded.page_locked)
    rates = measure_rates(config, job.spec, ranks, link, loaded.weight_bytes, loaded.cores)
    compare()
    return_free_memory()  # that measuring took
    around = LoopMonitor(link, loaded.timeline)
    own = ids[ranks.rank * len(ids) // ranks.world_size : (ranks.rank + 1) * len(ids) // ranks.world_size]
    make_cache = cache_factory(config, loaded.model, loaded.preallocated_cache, loaded.transfers, loaded.cpu_attention)
    fed = None
    if job.spec.dummy_routing == "text":
        fed = draw_tokens(own, config.gen_len, job.spec.text_config.vocab_size, config.seed)
    with progress.task("generating") as task:
        measurement = loops.measure_loops(
            loaded,
            own,
            config.gen_len,
            config.loops,
            config.warmup,
            ranks,
            make_cache,
            fed,
            around_loops=around,
            progress=lambda words, left_s: task.at(words, left_s=left_s),
            warmup_spread=config.warmup_spread,
        )
    if measurement.warmed_up is False:
        progress.say(
            f"warning: not settled: after {config.warmup} warm-up loops the last ones still differ by more than "
            f"{config.warmup_spread:.0%}"
        )
    rates = update_link_rate(rates, link, around.reached_gb_per_s)
    if job.on_gpu:
        rates = update_cpu_rate(rates, ranks, measurement.loops[-1].moved, around.while_busy_gb_per_s)
    return Session(plan, loaded, own, make_cache, fed, measurement, rates, around)


def write_trace(session: Session, path: Path) -> TracedLinkUse | None:
    """The last loop of an engine that watches itself; else a short generation more, under a profiler. All ranks call it.

    Returns what the link did there, where it was traced anew. Raises OSError where the first rank cannot write `path`.
    """
    job, loaded = session.plan.job, session.loaded
    written = path if job.ranks.is_first else None
    if loaded.timeline is None:
        return trace_generation(loaded, session.ids, job.config.gen_len, session.make_cache, session.fed, written)
    if written is not None:
        with write_atomically(written) as part:
            loaded.timeline.write_chrome_trace(part)
    return None
