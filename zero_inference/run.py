"""One run, from a RunConfig to a log and a record."""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from zero_inference.config import RunConfig
from zero_inference.engines import engine_module
from zero_inference.engines.base import LoadedModel, parameter_bytes
from zero_inference.engines.offload_folder import close_all
from zero_inference.errors import DoesNotFit, RunError, UsageError
from zero_inference.kv_cache.device import DeviceKVCache, check_layer_types, other_layer_types
from zero_inference.kv_cache.host import HostKVCache
from zero_inference.measure import generation, limits, steadiness
from zero_inference.measure.profiling import trace_generation
from zero_inference.models import prompts
from zero_inference.models.spec import ModelSpec, load_tokenizer, resolve_model
from zero_inference.norms.choice import apply_norm_kernels, prepare_norm_kernels, refuse_norm_kernels
from zero_inference.plan import memory as memory_plan
from zero_inference.plan.agreement import refuse_other_inputs, refuse_other_requests
from zero_inference.quality import evaluate as quality
from zero_inference.records.records import output_ids_sha256
from zero_inference.records.run_log import RunLog, refuse_shared_files
from zero_inference.runtime import garbage, signals
from zero_inference.runtime.distributed import Ranks, detect_ranks, start_process_group, stop_process_group
from zero_inference.runtime.divisors import batch_advice
from zero_inference.runtime.environment import describe_environment
from zero_inference.runtime.progress import Progress
from zero_inference.runtime.replace import replacing
from zero_inference.runtime.text import printable
from zero_inference.runtime.watch import STOPPED, PeerWatch, lost_connection
from zero_inference.utils import cache_bytes, get_filename, hidden_bytes, model_bytes

LOG_PREFIX = {"deepspeed": "ds"}
SHOWN_TEXTS = 3


def run(config: RunConfig, argv: list[str], local_rank: int | None = None) -> None:
    """Do what `config` asks: write the log and the record and print the results, or only the plan for `--dry-run`.

    Raises:
        UsageError: it cannot work; nothing was loaded or written.
        RunError: it failed on the way; a record with status 'failed' was written.
    """
    config = config.validate()
    _quiet_libraries(config.verbose)
    ranks = detect_ranks(local_rank)
    _check_launch(config, ranks)
    questions = quality.prepare(config)
    spec = resolve_model(config, ranks.device.type)
    _check_lengths(config, spec)
    refuse_norm_kernels(config.norm_kernels, spec.config.model_type)
    if config.kv_offload:
        check_layer_types(spec.config)
    quality.check_lengths(config, spec.max_positions)
    if questions and load_tokenizer(spec) is None:
        raise UsageError(
            f"--quality reads text, and {spec.name} has no tokenizer: add its tokenizer files, or drop --quality."
        )
    if config.dry_run:
        with contextlib.suppress(DoesNotFit):
            engine_module(config.engine).check(config, spec, ranks)
        _print_plan(config, spec, ranks)
        return
    files = RunLog.at(_log_path(config, ranks), _asked(config, spec, ranks, argv))
    refuse_shared_files(
        config, files, spec.snapshot.folder if spec.snapshot else spec.folder, quality.data_files(config)
    )
    files.check()

    def record_failure(reason: str) -> str:
        reason += f" (rank {ranks.rank} of {ranks.world_size})" if ranks.world_size > 1 else ""
        if watch.claims_failure():
            files.write_failure(reason)
        return "; ".join([reason, *files.unwritten])

    def last_words(reason: str) -> str:
        try:
            return record_failure(reason)
        finally:
            close_all()

    watch = PeerWatch(ranks, last_words)
    watch.start()
    signals.exit_on_stop()  # so that a stopped run leaves its record, and no files
    progress = Progress(enabled=ranks.is_first and config.verbose > 0)
    try:
        measurement, facts, tokenizer = _measured(config, spec, ranks, files, progress, questions)
        ranks.barrier()
    except UsageError:
        watch.stop(failed=True)
        _part(ranks)
        raise
    except BaseException as error:
        if ranks.world_size > 1:
            signals.ignore_stop()  # the launcher sends one while this is being said
        with signals.held():
            reason = watch.report(_explain(error, config))
            watch.stop(failed=True)
        _part(ranks)
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, SystemExit):
            print(printable(f"error: {reason}."), file=sys.stderr, flush=True)
            raise
        raise RunError(reason) from error
    finally:
        progress.close()
    try:
        if ranks.is_first:
            _publish(files, measurement, tokenizer, facts, watch)
        watch.stop()
    except BaseException:
        _part(ranks)
        raise
    stop_process_group()


def _part(ranks: Ranks) -> None:
    """Leave the process group of a run that failed. Several ranks part without a word, which could wait for a rank that is gone."""
    if ranks.world_size == 1:
        stop_process_group()


def _measured(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    files: RunLog,
    progress: Progress,
    questions: dict[str, list[dict]],
):
    """All that may fail on the way: (measurement, the engine's facts, tokenizer)."""
    start_process_group(ranks)
    refuse_other_requests(config, spec, ranks, questions)
    engine_module(config.engine).check(config, spec, ranks)
    memory_plan.refuse_hopeless(config, spec, ranks)
    ids, tokenizer, note = _prompt_ids(config, spec)
    if not spec.dummy:
        spec.checkpoint_folder()  # fetched now: time on the network is not time to load
    refuse_other_inputs(spec, ranks, ids)
    if note:
        progress.say(note)
    return *_load_and_measure(config, spec, ranks, files, ids, progress, questions, tokenizer), tokenizer


def _publish(
    files: RunLog, measurement: generation.Measurement, tokenizer, facts: dict[str, Any], watch: PeerWatch
) -> None:
    """Print and write the results. On the screen first: it is what stays where the files cannot be written."""
    unprinted: BaseException | None = None
    try:
        watch.stop()
        _print_results(measurement, tokenizer, files.block(), files.measured, facts)
    except BaseException as error:  # a reader that is gone, or a signal: the files come first
        unprinted = error
    with signals.held():
        files.write(facts)
    if files.unwritten:
        raise RunError("; ".join(files.unwritten) + ("." if unprinted else ", but what was measured is on stdout."))
    if isinstance(unprinted, OSError) and not isinstance(unprinted, BrokenPipeError):
        raise RunError(
            f"the results could not be printed ({unprinted.strerror}); they are in {files.log} and {files.record}."
        )
    if unprinted:
        raise unprinted
    print(printable(f"log: {files.log}\nrecord: {files.record}"), flush=True)


def _load_and_measure(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    files: RunLog,
    ids: torch.Tensor,
    progress: Progress,
    questions: dict[str, list[dict]],
    tokenizer,
):
    """Load, time and score; fills `files.measured` on the way."""
    garbage.look_from_here()
    measured = files.measured
    measured.update(load := steadiness.machine_load())  # before there is any of our own
    if warning := steadiness.load_warning(load):
        progress.say(warning)
    start = time.perf_counter()
    full_bytes = model_bytes(spec.config)
    no_kernels = prepare_norm_kernels(
        config.norm_kernels,
        spec.config.model_type,
        ranks.device,
        spec.dtype,
        spec.text_config.hidden_size,
        progress.say,
    )
    advance = progress.loading(parameter_bytes(spec.outline))
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints there, and stdout is for results
        loaded = engine_module(config.engine).load(config, spec, ranks, advance)
    try:
        ranks.barrier()
        load_s = time.perf_counter() - start
        progress.say(f"loaded {loaded.weight_bytes / 1e9:.2f} GB of weights in {load_s:.1f} s")
        loaded.facts |= apply_norm_kernels(config.norm_kernels, no_kernels, loaded.model, progress.say)
        if loaded.facts.get("not_quantized"):
            _warn_not_quantized(loaded, progress)
        link = limits.LinkRate(ranks, loaded.page_locked)
        rates = limits.measure_rates(config, spec, ranks, link, loaded.weight_bytes)
        around = limits.AroundLoops(link, loaded.timeline)
        share = slice(ranks.rank * len(ids) // ranks.world_size, (ranks.rank + 1) * len(ids) // ranks.world_size)
        caches = _cache_maker(config, spec, loaded)
        measurement = generation.measure(
            loaded,
            ids[share],
            config.gen_len,
            config.loops,
            config.warmup,
            ranks,
            caches,
            around_loops=around,
            progress=progress.update,
            warmup_spread=config.warmup_spread,
        )
        if measurement.warmed_up is False:
            progress.say(
                f"not settled: {config.warmup} warm-up loops, and the last ones still differ by more than "
                f"{config.warmup_spread:.0%}"
            )
        rates = limits.with_link(rates, link, around.reached_gb_per_s)
        measured.update(
            _results(config, spec, ranks, loaded, measurement, rates, around), model_bytes=full_bytes, load_s=load_s
        )
        if warning := steadiness.warning_of(measured):
            progress.say(warning)
        if config.trace:
            with files.noting("trace", config.trace):
                measured["link_use"] = _write_trace(config, loaded, ids[share], ranks, caches) or measured["link_use"]
        measured["quality"] = (
            _quality(config, loaded, ranks, files, progress, questions, tokenizer) if questions else None
        )
        return measurement, dict(loaded.facts)
    finally:
        loaded.close()


def _quality(
    config: RunConfig,
    loaded: LoadedModel,
    ranks: Ranks,
    files: RunLog,
    progress: Progress,
    questions: dict[str, list[dict]],
    tokenizer,
) -> dict[str, dict]:
    evaluation = quality.evaluate(
        questions, loaded.model, tokenizer, loaded.device, ranks, quality.settings_of(config, ranks), progress.update
    )
    for task, scores in evaluation.scores.items():
        if scores["truncated"]:
            progress.say(
                f"warning: {task}: {scores['truncated']} sequences were longer than the model's context "
                "and lost their beginning"
            )
    if config.quality_items and ranks.is_first:
        with files.noting("items", config.quality_items):
            quality.write_items(config.quality_items, evaluation.items)
    return evaluation.scores


def _results(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    loaded: LoadedModel,
    measurement: generation.Measurement,
    rates: limits.Rates,
    around: limits.AroundLoops,
) -> dict[str, Any]:
    batch, steps = config.batch_size, config.gen_len - 1
    prefill_s, decode_s, total_s = (measurement.median(name) for name in ("prefill_s", "decode_s", "total_s"))
    last = measurement.loops[-1]
    moved = {
        name: None if getattr(last, name) is None else ranks.total(int(getattr(last, name)))
        for name in ("host_to_device_bytes_per_step", "device_to_host_bytes_per_step", "disk_read_bytes_per_step")
    }
    work = limits.least_work(config, spec, ranks, loaded.weight_bytes)
    ahead = ranks.total(around.ahead_bytes)
    peaks = ranks.maximum(
        [float(around.peak_gpu_bytes or 0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]
    )
    return {
        "cache_bytes": cache_bytes(spec.config, batch, config.prompt_len + config.gen_len),
        "hidden_bytes": hidden_bytes(spec.config, batch, config.prompt_len + config.gen_len),
        "weight_bytes": loaded.weight_bytes,
        "cold_total_s": measurement.cold_total_s,
        "warmup_total_s": measurement.warmup_s,
        "warmed_up": measurement.warmed_up,
        "loops": [
            {"prefill_s": loop.prefill_s, "decode_s": loop.decode_s, "total_s": loop.total_s, "step_s": loop.step_s}
            for loop in measurement.loops
        ],
        **steadiness.decode_evenness(measurement.loops),
        "prefill_latency_s": prefill_s,
        "prefill_throughput": batch * config.prompt_len / prefill_s,
        "decode_latency_s": decode_s,
        "decode_throughput": batch * steps / decode_s if steps else None,
        "total_latency_s": total_s,
        "total_throughput": batch * config.gen_len / total_s,
        "peak_gpu_bytes": int(peaks[0]) if around.peak_gpu_bytes is not None else None,
        "peak_host_bytes": int(peaks[1]),
        "output_ids_sha256": output_ids_sha256(measurement.output_ids),
        "transfers": moved,
        "decode_weights_gbps": loaded.weight_bytes * steps / decode_s / 1e9 if steps else None,
        "limit": limits.decode_limits(rates, moved, ahead, work, ranks.device.type == "cuda", steps, decode_s),
        "link_use": around.last_use,
        "device": str(ranks.device.type),
    }


def _write_trace(
    config: RunConfig, loaded: LoadedModel, ids: torch.Tensor, ranks: Ranks, make_cache
) -> dict[str, float] | None:
    """The last loop of an engine that watches itself; else a short generation more, under a profiler."""
    path = Path(config.trace) if ranks.is_first else None
    if loaded.timeline is None:
        return trace_generation(loaded, ids, config.gen_len, make_cache, path)
    if path is not None:
        with replacing(path) as part:
            loaded.timeline.write_chrome_trace(part)
    return None


def _cache_maker(config: RunConfig, spec: ModelSpec, loaded: LoadedModel):
    length = config.prompt_len + config.gen_len
    if config.kv_offload:
        cache = HostKVCache(spec.config, length, config.pin_kv_cache, config.async_kv_offload, loaded.transfers)
    elif loaded.preallocated_cache and not other_layer_types(spec.config):
        cache = DeviceKVCache(spec.config, length)
    else:
        return None

    def make():
        cache.reset()
        return cache

    return make


def _prompt_ids(config: RunConfig, spec: ModelSpec) -> tuple[torch.Tensor, Any, str | None]:
    tokenizer = load_tokenizer(spec)
    if tokenizer is not None:
        lines = prompts.read_prompts(config.prompts, config.batch_size)
        return (
            prompts.readable_ids(spec.name, tokenizer, lines, config.prompt_len, spec.text_config.vocab_size),
            tokenizer,
            None,
        )
    if config.prompts:
        raise UsageError(f"--prompts {config.prompts}: {spec.name} has no tokenizer to read it with; drop --prompts.")
    note = None if spec.dummy else f"{spec.name} has no tokenizer: running on random token ids (seed {config.seed})"
    ids = prompts.random_ids(config.seed, config.batch_size, config.prompt_len, spec.text_config.vocab_size)
    return ids, None, note


def _check_launch(config: RunConfig, ranks: Ranks) -> None:
    if config.batch_size % ranks.world_size:
        raise UsageError(f"{batch_advice(config.batch_size, ranks.world_size, f'{ranks.world_size} ranks')}.")
    if ranks.device.type == "cpu":
        for flag, given in (("--pin-memory 1", config.pin_memory), ("--pin-kv-cache", config.pin_kv_cache)):
            if given:
                raise UsageError(f"{flag} locks memory for a GPU's copies, and there is no GPU here; drop it.")
        if config.norm_kernels == "cuda":
            raise UsageError("--norm-kernels cuda: there is no CUDA device here; use auto or off.")
    elif ranks.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {ranks.local_rank} has no GPU: {torch.cuda.device_count()} are visible; start fewer processes."
        )


def _check_lengths(config: RunConfig, spec: ModelSpec) -> None:
    positions = spec.max_positions
    wanted = config.prompt_len + config.gen_len
    if positions is not None and wanted > positions:
        raise UsageError(
            f"--prompt-len {config.prompt_len} and --gen-len {config.gen_len} need {wanted} positions; "
            f"{spec.name} has {positions}: shorten one of them."
        )


def _asked(config: RunConfig, spec: ModelSpec, ranks: Ranks, argv: list[str]) -> dict[str, Any]:
    """The part of the record that describes the request."""
    same = (
        "engine",
        "model",
        "batch_size",
        "prompt_len",
        "gen_len",
        "quant_bits",
        "quant_group_size",
        "cpu_offload",
        "disk_offload",
        "kv_offload",
        "norm_kernels",
        "dummy",
        "pin_kv_cache",
        "async_kv_offload",
        "seed",
    )
    return {name: getattr(config, name) for name in same} | {
        "status": "ok",
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "argv": argv,
        "model_type": spec.config.model_type,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "world_size": ranks.world_size,
        "num_nodes": ranks.num_nodes,
        "ds_config": None,
        "environment": describe_environment(),
        "pin_memory": _pinned(config, ranks),
        "weights_place": _weights_place(config, ranks),
        "norm_modules_patched": 0,
    }


def _pinned(config: RunConfig, ranks: Ranks) -> bool:
    if config.engine not in ("deepspeed", "stream") or config.offload == "gpu":
        return False
    return ranks.device.type == "cuda" if config.pin_memory is None else config.pin_memory


def _weights_place(config: RunConfig, ranks: Ranks) -> str:
    """'cpu', 'disk' or 'gpu': without an offload they are on the device, which is host memory where there is no GPU."""
    return "cpu" if config.offload == "gpu" and ranks.device.type == "cpu" else config.offload


def _log_path(config: RunConfig, ranks: Ranks) -> Path:
    if config.log_file:
        return Path(config.log_file)
    place = _weights_place(config, ranks)
    name = get_filename(
        config.model,
        config.batch_size,
        config.prompt_len,
        config.gen_len,
        place == "cpu",
        place == "disk",
        ranks.num_nodes,
        ranks.local_world_size,
        config.kv_offload,
        config.quantized,
        prefix=LOG_PREFIX.get(config.engine, config.engine),
    )
    return Path(config.log_dir) / f"{name}.log"


def _print_results(measurement: generation.Measurement, tokenizer, block: str, measured: dict, facts: dict) -> None:
    if tokenizer is not None:
        for number, row in enumerate(measurement.output_ids[:SHOWN_TEXTS]):
            text = tokenizer.decode(row, skip_special_tokens=True).strip()
            print(f"[{number}] {printable(text)}")
        hidden = len(measurement.output_ids) - SHOWN_TEXTS
        print(f"(and {hidden} more)\n" if hidden > 0 else "", flush=True)
    print(block)
    if line := steadiness.in_words(measured, len(measurement.loops)):
        print(line)
    limit, moved = measured["limit"], measured["transfers"]
    if limit["bound_by"]:
        print(limits.in_words(limit, moved, measured["device"] == "cuda"))
    if measured["device"] == "cuda" and measured["link_use"]:
        print(limits.idle_in_words(measured["link_use"]) or "the link was hardly ever idle")
    elif measured["device"] == "cpu" and moved["host_to_device_bytes_per_step"]:
        print(
            f"decode fetches {moved['host_to_device_bytes_per_step'] / 1e9:.3f} GB a step; without a GPU there is no link to cross"
        )
    if "quantized_fraction" in facts:
        print(
            f"quantized: {facts['quantized_fraction']:.1%} of the weights, {measured['weight_bytes'] / 2**30:.3f} GB stored"
        )
    for task, scores in (measured["quality"] or {}).items():
        print(quality.in_words(task, scores))
    sys.stdout.flush()


def _print_plan(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> None:
    """Raises DoesNotFit behind the plan of a run that does not, for its exit code."""
    if not ranks.is_first:
        return
    resolved = config.as_dict() | {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "model_type": spec.config.model_type,
        "world_size": ranks.world_size,
        "pin_memory": _pinned(config, ranks),
    }
    print(json.dumps(resolved, indent=2))
    total = config.prompt_len + config.gen_len
    for name, size in (
        ("model", model_bytes(spec.config)),
        ("cache", cache_bytes(spec.config, config.batch_size, total)),
        ("hidden", hidden_bytes(spec.config, config.batch_size, total)),
    ):
        print(f"{name} size: {size / 2**30:.3f} GB")
    try:
        needs = memory_plan.plan_memory(config, spec, ranks)
        print(memory_plan.describe(needs))
        fits = all(need.fits for need in needs)
    except DoesNotFit as error:
        print(error)
        fits = False
    if fits:
        print("It fits.", flush=True)
        return
    changes = memory_plan.changes_that_fit(config, spec, ranks)
    print(
        "It does not fit. "
        + (
            f"It would with one of: {'; '.join(changes)}."
            if changes
            else "No change makes it fit, nor do two together: use more GPUs, nodes or memory."
        ),
        flush=True,
    )
    raise DoesNotFit(f"--dry-run: {spec.name} does not fit as asked; the plan says where, and what would.")


def _explain(error: BaseException, config: RunConfig) -> str:
    """What went wrong in one or two lines."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "stopped by the user" if isinstance(error, KeyboardInterrupt) else STOPPED
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"the device is out of memory ({text[:120]}); lower --batch-size or --prompt-len, add --kv-offload, "
            "or see what fits with --dry-run."
        )
    if isinstance(error, MemoryError) or "allocate memory" in text or "not enough memory" in text:
        return (
            f"memory is out at {config.batch_size} x ({config.prompt_len} + {config.gen_len}) tokens ({text[:120]}); "
            "lower --batch-size, or see what fits with --dry-run."
        )
    if lost := lost_connection(error):
        return lost
    return text[:400] if isinstance(error, RunError) else f"{type(error).__name__}: {text[:400]}"


def _warn_not_quantized(loaded: LoadedModel, progress: Progress) -> None:
    names = loaded.facts["not_quantized"]
    progress.say(
        f"warning: {1 - loaded.facts['quantized_fraction']:.1%} of the weights are not quantized: {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more (all in the record)" if len(names) > 3 else "")
    )


def _quiet_libraries(verbose: int) -> None:
    from transformers.utils import logging as transformers_logging

    if verbose < 2:
        transformers_logging.set_verbosity_error()
