"""One run, from a RunConfig to a log and a record."""

from __future__ import annotations

import contextlib
import datetime
import resource
import sys
from pathlib import Path
from typing import Any

from zero_inference.config import RunConfig
from zero_inference.engines.offload_folder import close_all
from zero_inference.errors import DoesNotFit, RunError, UsageError
from zero_inference.measure import generation, limits, steadiness
from zero_inference.measure.session import Session, loaded_model, measure_run, write_trace
from zero_inference.models.prompts import prompt_ids
from zero_inference.models.spec import ModelSpec, load_tokenizer, resolve_model
from zero_inference.plan.agreement import refuse_other_inputs, refuse_other_requests
from zero_inference.plan.changes import refuse_hopeless
from zero_inference.plan.checks import check_launch, check_model
from zero_inference.plan.log_sizes import log_sizes
from zero_inference.plan.plan import Plan, describe_job, make_plan, plan_run
from zero_inference.plan.show import print_plan
from zero_inference.quality import evaluate as quality
from zero_inference.quality.of_run import score_run
from zero_inference.records.failure import leaving_a_record, part
from zero_inference.records.records import output_ids_sha256
from zero_inference.records.run_log import RunLog, refuse_shared_files
from zero_inference.runtime import garbage, signals
from zero_inference.runtime.distributed import Ranks, detect_ranks, start_process_group, stop_process_group
from zero_inference.runtime.environment import describe_environment
from zero_inference.runtime.progress import Progress
from zero_inference.runtime.text import printable
from zero_inference.runtime.watch import PeerWatch
from zero_inference.utils import get_filename

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
    check_launch(config, ranks)
    questions = quality.prepare(config)
    spec = resolve_model(config, ranks.device.type)
    check_model(config, spec)
    quality.check_lengths(config, spec.max_positions)
    if questions and load_tokenizer(spec) is None:
        raise UsageError(
            f"--quality reads text, and {spec.name} has no tokenizer: add its tokenizer files, or drop --quality."
        )
    if config.dry_run:
        _dry_run(config, spec, ranks)
        return
    files = RunLog.at(_log_path(config, ranks), _asked(config, spec, ranks, argv))
    refuse_shared_files(
        config, files, spec.snapshot.folder if spec.snapshot else spec.folder, quality.data_files(config)
    )
    files.check()
    progress = Progress(enabled=ranks.is_first and config.verbose > 0)
    with leaving_a_record(config, ranks, files, release=close_all) as watch, contextlib.closing(progress):
        measurement, facts, tokenizer = _measured(config, spec, ranks, files, progress, questions)
        ranks.barrier()
    try:
        if ranks.is_first:
            _publish(files, measurement, tokenizer, facts, watch)
        watch.stop()
    except BaseException:
        part(ranks)
        raise
    stop_process_group()


def _dry_run(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> None:
    job = describe_job(config, spec, ranks)
    plan: Plan | DoesNotFit
    try:
        plan = make_plan(job)
        plan.check()
    except DoesNotFit as error:
        plan = error
    if ranks.is_first:
        print_plan(job, plan)


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
    plan = plan_run(config, spec, ranks)
    refuse_hopeless(plan)
    ids, tokenizer, note = prompt_ids(config, spec)
    if not spec.dummy:
        spec.checkpoint_folder()  # fetched now: time on the network is not time to load
    refuse_other_inputs(spec, ranks, ids)
    if note:
        progress.say(note)
    garbage.look_from_here()
    files.measured.update(load := steadiness.machine_load())  # before there is any of our own
    if warning := steadiness.load_warning(load):
        progress.say(warning)
    with loaded_model(plan, progress) as (loaded, load_s):
        session = measure_run(plan, loaded, ids, progress)
        files.measured.update(_results(session), load_s=load_s)
        if warning := steadiness.warning_of(files.measured):
            progress.say(warning)
        if config.trace:
            with files.noting("trace", config.trace):
                files.measured["link_use"] = write_trace(session, Path(config.trace)) or files.measured["link_use"]
        files.measured["quality"] = (
            score_run(plan.job, loaded, questions, tokenizer, files, progress) if questions else None
        )
        return session.measurement, dict(loaded.facts), tokenizer


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


def _results(session: Session) -> dict[str, Any]:
    job, loaded, measurement, around = session.plan.job, session.loaded, session.measurement, session.around
    config, ranks = job.config, job.ranks
    batch, steps = config.batch_size, config.gen_len - 1
    prefill_s, decode_s, total_s = (measurement.median(name) for name in ("prefill_s", "decode_s", "total_s"))
    last = measurement.loops[-1]
    moved = {
        name: None if getattr(last, name) is None else ranks.total(int(getattr(last, name)))
        for name in ("host_to_device_bytes_per_step", "device_to_host_bytes_per_step", "disk_read_bytes_per_step")
    }
    work = limits.least_work(job, loaded.weight_bytes)
    ahead = ranks.total(around.ahead_bytes)
    peaks = ranks.maximum(
        [float(around.peak_gpu_bytes or 0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]
    )
    return {
        **vars(log_sizes(job)),
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
        "limit": limits.decode_limits(session.rates, moved, ahead, work, ranks.device.type == "cuda", steps, decode_s),
        "link_use": around.last_use,
        "device": str(ranks.device.type),
    }


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


def _quiet_libraries(verbose: int) -> None:
    from transformers.utils import logging as transformers_logging

    if verbose < 2:
        transformers_logging.set_verbosity_error()
