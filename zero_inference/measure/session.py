"""From a plan to a loaded model, its timed loops, and their summary for the record."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zero_inference.config.options import SELF, WITHOUT_SPECULATION
from zero_inference.engines.base import Job, LoadedModel
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.kv_cache.attention_patch import patch_attention
from zero_inference.measure import steadiness
from zero_inference.measure.correctness import ReferenceLayers, check_copies_between
from zero_inference.measure.hardware_rates import LinkMonitor, disks_gb_per_s, measure_rates, update_rates
from zero_inference.measure.loops import Measurement, generate_ids, measure_loops
from zero_inference.measure.sampling import Sampler
from zero_inference.measure.speculation import (
    Speculation,
    generate_speculatively,
    last_logits,
    layer_changes,
    make_speculation,
)
from zero_inference.models.checkpoint_files import shorten_names
from zero_inference.models.layers import decoder_layers
from zero_inference.models.mlp import detect_routers, install_routing_kernel
from zero_inference.models.prompts import prompt_ids
from zero_inference.models.weights import draw_tokens, return_free_memory
from zero_inference.norms.patch import apply_norm_kernels, prepare_norm_kernels, unpatch_norms
from zero_inference.planning import roofline
from zero_inference.planning.cost import seconds_in_words
from zero_inference.planning.make_plan import plan_run, skip_least_changes
from zero_inference.planning.memory import log_sizes
from zero_inference.planning.plan import Plan
from zero_inference.records.hardware import GpuUse, Rates, TracedLinkUse
from zero_inference.records.schema import BaselineUse, Measured, Result, TokenDifference
from zero_inference.utils.environment import peak_host_bytes
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import format_bytes, three_digits
from zero_inference.utils.patching import Patches
from zero_inference.utils.progress import Progress, current_progress
from zero_inference.utils.timing import synchronize

TRACED_TOKENS = 4


@contextlib.contextmanager
def loaded_model(
    plan: Plan, progress: Progress, compared: bool = True
) -> Iterator[tuple[LoadedModel, float, Callable[[], None]]]:
    """Load the model of `plan` with our kernels, and release it at the end of the block.

    Yields the model, the seconds that loading took without compiling, and `compare`: to be called before the model is used, it compares
    a decoder layer of each kind with transformers' implementation, unless `compared` is False.

    Raises UsageError (--norm-kernels cuda, and they cannot be used) or RunError (loading failed, copies between GPUs arrive changed, or a
    layer differs).
    """
    job, norm_kernels = plan.job, plan.job.config.norm_kernels
    unused_because = prepare_norm_kernels(norm_kernels, job.spec.config.model_type, job.ranks.device, progress.say)
    with_kernels = has_kernels(job, progress)
    routers = detect_routers(job.empty_model.model, job.ranks.device) if with_kernels else {}
    check_copies_between(job.devices)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints there, and stdout is for results
        plan.engine_plan.prepare()
    job.ranks.barrier()  # time in which another rank compiles or tries kernels is not loading
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        reference = ReferenceLayers(plan.engine_plan, compared)
        with reference.capture_weights():
            loaded = plan.load(progress.loading(job.sizes.parameter_bytes))
    with contextlib.ExitStack() as closing:
        closing.callback(loaded.close)
        job.ranks.barrier()
        load_s = time.perf_counter() - start
        progress.close()
        predicted, planned = plan.predicted, ""
        if predicted.load_s is not None and predicted.load_range_s is not None:
            planned = f"; planned: {seconds_in_words(predicted.load_s, predicted.load_range_s)}"
        progress.say(f"loaded {format_bytes(loaded.weight_bytes)} of weights in {three_digits(load_s)} s{planned}")
        for line in plan.engine_plan.in_words():
            progress.say(line)
        closing.callback(unpatch_norms, loaded.model)
        loaded.facts |= apply_norm_kernels(norm_kernels, unused_because, loaded.model, progress.say)
        Result().add_facts(loaded.facts)  # raises for facts that the record does not declare: now, not after the loops
        if names := loaded.facts.get("not_quantized"):
            progress.say(
                f"warning: {1 - loaded.facts['quantized_fraction']:.1%} of the weights are not quantized: "
                f"{shorten_names(names)}"
            )
        closing.enter_context(install_routing_kernel(loaded.model, routers))
        for device in loaded.devices if with_kernels else ():
            closing.enter_context(rotary_kernel(loaded.model, device, job.spec.dtype))
        if plan.draft is not None:
            loaded.draft = closing.enter_context(_loaded_draft(plan.draft, job, loaded, progress))
        yield loaded, load_s, lambda: reference.compare(loaded, progress.say)


@contextlib.contextmanager
def _loaded_draft(draft: Plan, job: Job, loaded: LoadedModel, progress: Progress) -> Iterator[LoadedModel]:
    """Load the draft of the model `loaded` of `job`, with our kernels, and release it at the end of the block."""
    spec, skips = draft.job.spec, ""
    if draft.job.skipped:
        first_prompt = prompt_ids(job.config, job.spec)[0][:1]  # alike on all ranks
        draft = skip_least_changes(draft, layer_changes(loaded, first_prompt))
        skips = f", without layers {', '.join(map(str, sorted(draft.job.skipped)))}"
    asked = "off" if job.config.norm_kernels == "off" else "auto"
    unused_because = prepare_norm_kernels(asked, spec.config.model_type, job.ranks.device, progress.say)
    progress.say(f"loading the draft: {draft.describe()}{skips}")
    with contextlib.ExitStack() as closing:
        with contextlib.redirect_stdout(sys.stderr):
            model = draft.load(target=loaded)
        closing.callback(model.close)
        closing.callback(unpatch_norms, model.model)
        apply_norm_kernels(asked, unused_because, model.model, lambda line: None)
        if has_kernels(job, progress):
            closing.enter_context(rotary_kernel(model.model, model.device, spec.dtype))
        if job.config.speculate == SELF and loaded.cpu_attention is not None:  # the cache of the target model
            closing.enter_context(patch_attention(model.model))
        yield model


def has_kernels(job: Job, progress: Progress) -> bool:
    """Return whether our CUDA kernels are available for the job's device."""
    return job.on_gpu and load_extension(progress.say)


@dataclass
class Session:
    """A measured model."""

    plan: Plan
    loaded: LoadedModel
    ids: torch.Tensor  # this rank's prompts, int64 [batch / ranks, prompt_len]
    make_cache: Callable[[], Any] | None  # returns the KV cache of a loop; None leaves it to transformers
    forced_tokens: torch.Tensor | None  # see `measure_loops`
    sampler: Sampler | None  # None: greedy
    measurement: Measurement
    rates: Rates
    link: LinkMonitor
    speculation: Speculation | None


def measure_run(
    plan: Plan, loaded: LoadedModel, ids: torch.Tensor, progress: Progress, compare: Callable[[], None]
) -> Session:
    """Time the loops of the prompts `ids` int64 [batch, prompt_len], and measure the hardware before and between them.

    Args:
        compare: of `loaded_model`; called after the first measurement of the hardware, before a pass takes memory.
    """
    job, config, ranks = plan.job, plan.job.config, plan.job.ranks
    link = LinkMonitor(ranks, loaded.pinned_memory, loaded.timeline, loaded.devices)
    measure_disk: Callable[[], float | None] | None = None
    if plan.engine_plan.uses_disk:
        measure_disk = loaded.measure_disk or partial(disks_gb_per_s, config, ranks, loaded.weight_bytes)
    rates = measure_rates(config, job.spec, link, loaded.cpu_backend)
    disk_rounds: list[float | None] = []

    def between_loops() -> None:
        link.between_loops()
        if measure_disk is not None:
            disk_rounds.append(measure_disk())

    compare()
    return_free_memory()  # of the measurement
    own = ids[ranks.rank * len(ids) // ranks.world_size : (ranks.rank + 1) * len(ids) // ranks.world_size]
    make_cache = loaded.cache_factory(config)
    forced_tokens = None
    if job.spec.dummy_routing == "text":
        forced_tokens = draw_tokens(own, config.gen_len, job.spec.text_config.vocab_size, config.seed)
    sampler = Sampler.of_rank(config, ranks, job.spec.text_config.vocab_size)
    speculation = make_speculation(loaded, config, sampler) if config.speculate else None
    with progress.task("generating", (config.warmup + config.loops) * config.gen_len) as task:
        measurement = measure_loops(
            loaded,
            own,
            config.gen_len,
            config.loops,
            config.warmup,
            ranks,
            make_cache,
            forced_tokens,
            between_loops=between_loops,
            progress=task.at,
            warmup_spread=config.warmup_spread,
            speculation=speculation,
            sampler=sampler,
        )
    if measurement.warmed_up is False:
        progress.say(
            f"warning: not settled: after {config.warmup} warm-up loops the last ones still differ by more than "
            f"{config.warmup_spread:.0%}"
        )
    disk_loops = []
    if loaded.measure_disk is not None:  # other engines' loops may read from the page cache
        read = ((loop, loop.moved.disk_read_bytes_per_step) for loop in measurement.loops)
        disk_loops = [len(loop.step_s) * nbytes / loop.decode_s / 1e9 for loop, nbytes in read if nbytes]
    rates = update_rates(rates, link, measurement.loops[-1].moved, disk_rounds, disk_loops)
    return Session(plan, loaded, own, make_cache, forced_tokens, sampler, measurement, rates, link, speculation)


def measure_baseline(plan: Plan, speculating: Measured, output_ids: torch.Tensor, ids: torch.Tensor) -> BaselineUse:
    """Load and time the run of `plan` without speculation, whose model was released. All ranks call it.

    Args:
        speculating, output_ids: of the run with speculation; int64 [batch, gen_len].
        ids: prompts, int64 [batch, prompt_len].

    Raises UsageError or RunError: it cannot be loaded.
    """
    job, progress = plan.job, current_progress()
    baseline = plan_run(replace(job.config, **WITHOUT_SPECULATION), job.spec, job.ranks)
    progress.say(f"the same without speculation: {baseline.describe()}")
    with loaded_model(baseline, progress, compared=False) as (loaded, _, compare):
        session = measure_run(baseline, loaded, ids, progress, compare)
        differences = first_differences(session, output_ids)
    decode_s = statistics.median(loop.decode_s for loop in session.measurement.loops)
    tokens, before = job.config.gen_len - 1, {each.sequence: each.token - 1 for each in differences}
    agreeing = sum(before.get(sequence, tokens + 1) for sequence in range(1, job.config.batch_size + 1))
    return BaselineUse(
        decode_latency_s=decode_s,
        decode_throughput=job.config.batch_size * tokens / decode_s if tokens else None,
        gain=decode_s / speculating.decode_latency_s if tokens else None,
        agreement=agreeing / output_ids.numel(),
        differences=differences,
    )


@torch.no_grad()
def first_differences(session: Session, output_ids: torch.Tensor) -> list[TokenDifference]:
    """Return the first token of each sequence of all ranks in which `output_ids` int64 [batch, gen_len] differ from those of `session`."""
    loaded, ranks, rows = session.loaded, session.plan.job.ranks, len(session.ids)
    own = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    alone, other = session.measurement.output_ids[own], output_ids[own]
    places = [(row, int(found[0])) for row, each in enumerate(alone != other) if len(found := each.nonzero())]
    differences = []
    # ranks whose sequences agree repeat the first one's pass with the others, which gather weights with them
    for index in range(int(ranks.maximum([float(len(places))])[0])):
        row, place = places[index] if index < len(places) else (0, 0)
        text = torch.cat([session.ids[row], alone[row, :place]])[None].to(loaded.device)
        scores = last_logits(loaded, text).float()
        spacing = torch.finfo(loaded.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(float(scores.max())), 1e-30)))
        if (sampler := session.sampler) is not None:  # its noise differs by row
            scores, spacing = (
                sampler.noisy(scores.expand(rows, -1), text.shape[1])[row, None],
                spacing / sampler.temperature,
            )
        if index < len(places):
            margin = float(scores.max() - min(scores[0, alone[row, place]], scores[0, other[row, place]]))
            number = ranks.rank * rows + row + 1
            differences.append(TokenDifference(sequence=number, token=place + 1, margin=margin, spacing=spacing))
    return sum(ranks.gather_objects(differences), [])


def write_trace(session: Session, path: Path) -> TracedLinkUse | None:
    """Write a Chrome trace to `path`, on the first rank. All ranks call it.

    An engine with a timeline writes that of the last loop. For others up to `TRACED_TOKENS` passes are made under PyTorch's profiler, which
    slows the host down: Kineto records the copies of any engine, and spans around the decoder layers show which layer they belong to.
    Returns `link_use_in` of that generation; None with a timeline. Raises OSError: it cannot be written.
    """
    job, loaded = session.plan.job, session.loaded
    if loaded.timeline is not None:
        if job.ranks.is_first:
            with write_atomically(path) as part:
                loaded.timeline.write_chrome_trace(part)
        return None
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if job.on_gpu else [])
    with Patches() as hooks, profile(activities=activities) as profiler:
        spans: list[record_function] = []

        def begin(name: str) -> None:
            spans.append(record_function(name))
            spans[-1].__enter__()

        for index, layer in enumerate(decoder_layers(loaded.model)[1]):
            hooks.add_hooks(
                layer.register_forward_pre_hook(lambda *_, name=f"layer {index}": begin(name)),
                layer.register_forward_hook(lambda *_: spans.pop().__exit__(None, None, None)),
            )
        tokens, speculation = min(job.config.gen_len, TRACED_TOKENS), session.speculation
        if speculation is None:
            generate_ids(
                loaded, session.ids, tokens, session.make_cache, session.forced_tokens, sampler=session.sampler
            )
        else:
            generate_speculatively(
                loaded,
                session.ids,
                job.config.gen_len,
                session.make_cache(),
                speculation,
                job.ranks,
                after_pass=lambda _: speculation.passes == TRACED_TOKENS - 1,
                sampler=session.sampler,
            )
        synchronize(loaded.devices)
    if not job.ranks.is_first:
        return None
    with write_atomically(path) as part:
        profiler.export_chrome_trace(str(part))
        try:
            return link_use_in(json.loads(part.read_text())["traceEvents"])
        except ValueError as error:  # Kineto does not report a full disk
            raise OSError(errno.EIO, "it is not whole; is the disk full?", str(path)) from error


def link_use_in(events: list[dict]) -> TracedLinkUse | None:
    """Return how long copies to the devices ran and how long none did, over the decode steps of a Kineto trace, summed over the links; None
    without any.

    The decode steps are the time from the second pass through the first decoder layer on the host to the last copy. Overlapping
    copies to a device count once.
    """
    begins = sorted(
        event["ts"] for event in events if event.get("name") == "layer 0" and event.get("cat") == "user_annotation"
    )
    copies: dict[int, list[tuple[float, float, int]]] = {}  # by device: (begin in us, end in us, bytes)
    for event in events:
        if event.get("cat") == "gpu_memcpy" and event.get("name", "").startswith("Memcpy HtoD"):
            if len(begins) > 1 and event["ts"] >= begins[1]:
                given = event.get("args", {})
                span = event["ts"], event["ts"] + event["dur"], given.get("bytes", 0)
                copies.setdefault(given.get("device", 0), []).append(span)
    if not copies:
        return None
    busy_us = idle_us = 0.0
    for of_device in map(sorted, copies.values()):
        end_us = of_device[0][0]
        for copy_begin_us, copy_end_us, _ in of_device:
            busy_us += max(0.0, copy_end_us - max(copy_begin_us, end_us))
            idle_us += max(0.0, copy_begin_us - end_us)
            end_us = max(end_us, copy_end_us)
    copied_bytes = sum(nbytes for of_device in copies.values() for _, _, nbytes in of_device)
    return TracedLinkUse(
        busy_s=busy_us / 1e6,
        idle_s=idle_us / 1e6,
        copied_bytes=copied_bytes,
        gb_per_s_while_busy=copied_bytes / (busy_us / 1e6) / 1e9 if busy_us else None,
    )


def summarize_measurement(session: Session, load_s: float, compile_s: float) -> Measured:
    """Return the measured part of the record, as sums and maxima over all ranks; they call it together."""
    job, loaded, measurement, link = session.plan.job, session.loaded, session.measurement, session.link
    config, ranks = job.config, job.ranks
    batch, tokens = config.batch_size, config.gen_len - 1  # decoded by each sequence
    steps = len(measurement.loops[-1].step_s)  # fewer with speculation
    prefill_s, decode_s, total_s = (
        statistics.median(getattr(loop, name) for loop in measurement.loops)
        for name in ("prefill_s", "decode_s", "total_s")
    )
    moved = measurement.loops[-1].moved
    totals = {
        name: ranks.total(int(nbytes))
        for name, nbytes in moved
        if name.endswith("bytes_per_step") and nbytes is not None
    }
    moved = moved.model_copy(update=totals)
    all_read = steps and not job.sizes.chooses_experts
    work = roofline.step_work(job, loaded.weight_bytes, moved.cores_bytes_per_step or 0)
    ahead_bytes = ranks.total(link.ahead_bytes())
    limit = roofline.decode_roofline(session.rates, moved, ahead_bytes, work, job.on_gpu, steps, decode_s)
    peak_gpu_bytes, host_bytes, compile_s = ranks.maximum(
        [float(link.peak_gpu_bytes or 0), float(peak_host_bytes()), compile_s]
    )
    return Measured(
        **log_sizes(job),
        weight_bytes=loaded.weight_bytes,
        load_s=load_s,
        compile_s=compile_s,
        cold_total_s=measurement.warmup_s[0] if measurement.warmup_s else None,
        warmup_total_s=measurement.warmup_s,
        warmed_up=measurement.warmed_up,
        settling_s=measurement.settling_s,
        loops=measurement.loops,
        spread=steadiness.decode_spread(measurement.loops),
        prefill_latency_s=prefill_s,
        prefill_throughput=batch * config.prompt_len / prefill_s,
        decode_latency_s=decode_s,
        decode_throughput=batch * tokens / decode_s if tokens else None,
        total_latency_s=total_s,
        total_throughput=batch * config.gen_len / total_s,
        peak_gpu_bytes=int(peak_gpu_bytes) if link.peak_gpu_bytes is not None else None,
        peak_host_bytes=int(host_bytes),
        output_ids_sha256=output_ids_sha256(measurement.output_ids),
        transfers=moved,
        decode_weights_gb_per_s=loaded.weight_bytes * steps / decode_s / 1e9 if all_read else None,
        limit=limit,
        link_use=link.uses[-1] if link.uses else None,
        gpus=_gpu_uses(loaded, link),
        device=str(ranks.device.type),
        experts=measurement.loops[-1].experts,
        speculation=measurement.loops[-1].speculation,
        predicted=session.plan.predicted,
    )


def _gpu_uses(loaded: LoadedModel, link: LinkMonitor) -> list[GpuUse] | None:
    """Return each GPU's part in the last loop; None for a process that drives one device."""
    devices = loaded.devices
    if len(devices) == 1:
        return None
    unknown: list[Any] = [None] * len(devices)
    weight_bytes = loaded.facts.get("stream", {}).get("resident_bytes_by_gpu") or unknown
    uses = unknown if loaded.timeline is None else loaded.timeline.by_device()
    return [
        GpuUse(
            index=device.index or 0,
            name=torch.cuda.get_device_name(device) if link.on_gpu else None,
            peak_bytes=peak_bytes,
            weight_bytes=weights,
            host_to_device_bytes_per_step=None if use is None else use.copied_bytes / use.steps,
            link_busy_share=None if use is None else use.busy_share,
            link_gb_per_s_while_busy=None if use is None else use.gb_per_s_while_busy,
        )
        for device, peak_bytes, weights, use in zip(devices, link.peak_bytes or unknown, weight_bytes, uses)
    ]


def output_ids_sha256(ids: Any) -> str:
    """Return the SHA-256, in hex, of generated ids [B, G] as int64 little-endian, row by row.

    `ids` is a torch tensor of any device, a numpy array or nested lists. Raises ValueError unless it has two dimensions and integers.
    """
    import numpy as np

    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.ndim != 2 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"ids must be integers [B, G], got {array.dtype} of shape {list(array.shape)}")
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()
