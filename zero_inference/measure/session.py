"""From a plan to a loaded model, its timed loops, and their summary for the record."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zero_inference.engines.base import Job, LoadedModel
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.measure import steadiness
from zero_inference.measure.correctness import ReferenceLayers
from zero_inference.measure.loops import Measurement, generate_ids, measure_loops
from zero_inference.measure.rates import LinkRate, LoopMonitor, measure_rates, update_cpu_rate, update_link_rate
from zero_inference.models.checkpoint_files import shorten_names
from zero_inference.models.layers import decoder_layers
from zero_inference.models.mlp import detect_routers, install_routing_kernel
from zero_inference.models.weights import draw_tokens, return_free_memory
from zero_inference.norms.patch import apply_norm_kernels, prepare_norm_kernels, unpatch_norms
from zero_inference.planning import roofline
from zero_inference.planning.cost import Range, seconds_in_words
from zero_inference.planning.memory import log_sizes
from zero_inference.planning.plan import Plan
from zero_inference.records.hardware import Rates, TracedLinkUse
from zero_inference.records.schema import Measured, Result
from zero_inference.utils.environment import peak_host_bytes
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import format_bytes, three_digits
from zero_inference.utils.patching import Patches
from zero_inference.utils.progress import Progress

TRACED_TOKENS = 4


@contextlib.contextmanager
def loaded_model(
    plan: Plan, progress: Progress, compared: bool = True
) -> Iterator[tuple[LoadedModel, float, Callable[[], None]]]:
    """Load the model of `plan` with our kernels, and release it at the end of the block.

    Args:
        compared: keep reference layers in host memory, for `compare`.

    Yields:
        the model, the seconds that loading took without compiling, and `compare`: to be called before the model is used, it compares
        a decoder layer of each kind with transformers' implementation.

    Raises:
        UsageError: --norm-kernels cuda, and they cannot be used.
        RunError: loading failed, or a layer differs.
    """
    job, norm_kernels = plan.job, plan.job.config.norm_kernels
    unused_because = prepare_norm_kernels(norm_kernels, job.spec.config.model_type, job.ranks.device, progress.say)
    fuses = has_kernels(job, progress)
    routers = detect_routers(job.empty_model.model, job.ranks.device) if fuses else {}
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints there, and stdout is for results
        plan.weights.prepare()
    job.ranks.barrier()  # time in which another rank compiles or tries kernels is not loading
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        reference = ReferenceLayers(plan.weights, compared)
        with reference.capture_weights():
            loaded = plan.load(progress.loading(job.sizes.parameter_bytes))
    with contextlib.ExitStack() as closing:
        closing.callback(loaded.close)
        job.ranks.barrier()
        load_s = time.perf_counter() - start
        progress.close()
        predicted, planned = plan.predicted, ""
        if predicted.load_s is not None and predicted.load_range_s is not None:
            planned = f"; planned: {seconds_in_words(predicted.load_s, Range(*predicted.load_range_s))}"
        progress.say(f"loaded {format_bytes(loaded.weight_bytes)} of weights in {three_digits(load_s)} s{planned}")
        for line in plan.weights.in_words():
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
        if fuses:
            closing.enter_context(rotary_kernel(loaded.model, job.ranks.device, job.spec.dtype))
        yield loaded, load_s, lambda: reference.compare(loaded, progress.say)


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
    measurement: Measurement
    rates: Rates
    monitor: LoopMonitor


def measure_run(
    plan: Plan, loaded: LoadedModel, ids: torch.Tensor, progress: Progress, compare: Callable[[], None]
) -> Session:
    """Time the loops of the prompts `ids` int64 [batch, prompt_len], and measure the hardware before and between them.

    Args:
        compare: of `loaded_model`; called after the first measurement of the hardware, before a pass takes memory.
    """
    job, config, ranks = plan.job, plan.job.config, plan.job.ranks
    link = LinkRate(ranks, loaded.pinned_memory)
    rates = measure_rates(config, job.spec, ranks, link, loaded.weight_bytes, loaded.cpu_backend)
    compare()
    return_free_memory()  # of the measurement
    monitor = LoopMonitor(link, loaded.timeline)
    own = ids[ranks.rank * len(ids) // ranks.world_size : (ranks.rank + 1) * len(ids) // ranks.world_size]
    make_cache = loaded.cache_factory(config)
    forced_tokens = None
    if job.spec.dummy_routing == "text":
        forced_tokens = draw_tokens(own, config.gen_len, job.spec.text_config.vocab_size, config.seed)
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
            between_loops=monitor,
            progress=task.at,
            warmup_spread=config.warmup_spread,
        )
    if measurement.warmed_up is False:
        progress.say(
            f"warning: not settled: after {config.warmup} warm-up loops the last ones still differ by more than "
            f"{config.warmup_spread:.0%}"
        )
    rates = update_link_rate(rates, link, monitor.reached_gb_per_s)
    if job.on_gpu:
        rates = update_cpu_rate(rates, ranks, measurement.loops[-1].moved, monitor.while_busy_gb_per_s)
    return Session(plan, loaded, own, make_cache, forced_tokens, measurement, rates, monitor)


def write_trace(session: Session, path: Path) -> TracedLinkUse | None:
    """Write a Chrome trace to `path`, on the first rank. All ranks call it.

    An engine with a timeline writes that of the last loop. For others up to `TRACED_TOKENS` tokens are generated under PyTorch's profiler,
    which slows the host down: Kineto records the copies of any engine, and spans around the decoder layers show which layer they belong to.

    Returns:
        `link_use_in` of that generation; None with a timeline.

    Raises:
        OSError: it cannot be written.
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
        tokens = min(job.config.gen_len, TRACED_TOKENS)
        generate_ids(loaded, session.ids, tokens, session.make_cache, session.forced_tokens)
        if job.on_gpu:
            torch.cuda.synchronize(loaded.device)
    if not job.ranks.is_first:
        return None
    with write_atomically(path) as part:
        profiler.export_chrome_trace(str(part))
        try:
            return link_use_in(json.loads(part.read_text())["traceEvents"])
        except ValueError as error:  # Kineto does not report a full disk
            raise OSError(errno.EIO, "it is not whole; is the disk full?", str(path)) from error


def link_use_in(events: list[dict]) -> TracedLinkUse | None:
    """Return how long copies to the device ran and how long none did, over the decode steps of a Kineto trace; None without any.

    The decode steps are the time from the second pass through the first decoder layer on the host to the last copy. Overlapping
    copies count once.
    """
    begins = sorted(
        event["ts"] for event in events if event.get("name") == "layer 0" and event.get("cat") == "user_annotation"
    )
    copies = sorted(
        (event["ts"], event["ts"] + event["dur"], event.get("args", {}).get("bytes", 0))
        for event in events
        if event.get("cat") == "gpu_memcpy" and event.get("name", "").startswith("Memcpy HtoD")
    )
    copies = [copy for copy in copies if len(begins) > 1 and copy[0] >= begins[1]]
    if not copies:
        return None
    busy, reached = 0.0, copies[0][0]
    for start, end, _ in copies:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    copied = sum(nbytes for _, _, nbytes in copies)
    return TracedLinkUse(
        busy_s=busy / 1e6,
        idle_s=(reached - copies[0][0] - busy) / 1e6,
        copied_bytes=copied,
        gb_per_s_while_busy=copied / (busy / 1e6) / 1e9 if busy else None,
    )


def summarize_measurement(session: Session, load_s: float, compile_s: float) -> Measured:
    """Return the measured part of the record, as sums and maxima over all ranks; they call it together."""
    job, loaded, measurement, monitor = session.plan.job, session.loaded, session.measurement, session.monitor
    config, ranks = job.config, job.ranks
    batch, steps = config.batch_size, config.gen_len - 1
    prefill_s, decode_s, total_s = (
        statistics.median(getattr(loop, name) for loop in measurement.loops)
        for name in ("prefill_s", "decode_s", "total_s")
    )
    mine = measurement.loops[-1].moved
    moved = mine.model_copy(
        update={
            name: ranks.total(int(nbytes))
            for name, nbytes in mine
            if name.endswith("bytes_per_step") and nbytes is not None
        }
    )
    all_read = steps and not job.sizes.chooses_experts
    work = roofline.step_work(job, loaded.weight_bytes, moved.cores_bytes_per_step or 0)
    ahead_bytes = ranks.total(monitor.ahead_bytes)
    limit = roofline.decode_roofline(session.rates, moved, ahead_bytes, work, job.on_gpu, steps, decode_s)
    peak_gpu_bytes, host_bytes, compile_s = ranks.maximum(
        [float(monitor.peak_gpu_bytes or 0), float(peak_host_bytes()), compile_s]
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
        evenness=steadiness.decode_spread(measurement.loops),
        prefill_latency_s=prefill_s,
        prefill_throughput=batch * config.prompt_len / prefill_s,
        decode_latency_s=decode_s,
        decode_throughput=batch * steps / decode_s if steps else None,
        total_latency_s=total_s,
        total_throughput=batch * config.gen_len / total_s,
        peak_gpu_bytes=int(peak_gpu_bytes) if monitor.peak_gpu_bytes is not None else None,
        peak_host_bytes=int(host_bytes),
        output_ids_sha256=output_ids_sha256(measurement.output_ids),
        transfers=moved,
        decode_weights_gb_per_s=loaded.weight_bytes * steps / decode_s / 1e9 if all_read else None,
        limit=limit,
        link_use=monitor.last_use,
        device=str(ranks.device.type),
        experts=measurement.loops[-1].experts,
        predicted=session.plan.predicted,
    )


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
