"""One run, from a RunConfig to a log and a record; the command line and `zero_inference.run` both start it here."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging as transformers_logging

from zero_inference.config.option import ALL, hyphens
from zero_inference.config.options import LOG_PREFIX, OPTIONS, PATHS
from zero_inference.config.run_config import RunConfig, first_rank_alone, non_default_options, save_options
from zero_inference.engines.deepspeed.plan import read_ds_config
from zero_inference.engines.offload_folder import close_all
from zero_inference.engines.stream.engine import convert as convert_weights
from zero_inference.errors import ONLY_PLANNED, UsageError
from zero_inference.hardware.machine import Machine, resolve_machine
from zero_inference.kernels.build import compile_s
from zero_inference.measure import steadiness
from zero_inference.measure.session import (
    loaded_model,
    measure_baseline,
    measure_run,
    summarize_measurement,
    write_trace,
)
from zero_inference.models.built_in import find_preset
from zero_inference.models.checkpoint_files import find_shards
from zero_inference.models.prompts import eos_token_ids, prompt_excerpts, prompt_ids, with_prompt_length
from zero_inference.models.spec import ModelSpec, load_tokenizer, resolve_for_plan, resolve_model
from zero_inference.planning.changes import check_memory
from zero_inference.planning.make_plan import make_plan, plan_run, stream_plan, with_current_memory
from zero_inference.planning.output import print_plan
from zero_inference.planning.plan import Plan, build_job, check_launch, check_model, driven_devices
from zero_inference.planning.search import choose
from zero_inference.quality.data import find_task_file
from zero_inference.quality.evaluate import load_tasks, score_run
from zero_inference.records.failure import leave_process_group, record_failures
from zero_inference.records.hardware import Environment
from zero_inference.records.schema import AutoChoice, Quality, Request, Result
from zero_inference.records.write import RunLog, refuse_shared_files
from zero_inference.report.results import publish
from zero_inference.utils import get_filename, interpreter
from zero_inference.utils.environment import describe_environment, package_versions
from zero_inference.utils.launch import Launch, hide_launch, read_launch
from zero_inference.utils.processes import run_command
from zero_inference.utils.progress import Progress, use_progress
from zero_inference.utils.ranks import Ranks, detect_ranks, start_process_group, stop_process_group

# Paths may differ from node to node; the content of the files is compared where it matters.
NOT_COMPARED = (*PATHS, "verbose")
SAMPLE_BYTES = 1 << 16  # hashed at both ends of a file of weights
Questions = dict[str, list[dict]]  # items of --quality-data by task


class FinishedRun(NamedTuple):
    files: RunLog
    output_ids: Any  # int64 [batch, gen_len], of the last loop
    tokenizer: Any  # None where the model has none
    ends: frozenset[int]  # ids that end a text


@interpreter.reserve_stack
def run(
    config: RunConfig, argv: list[str], local_rank: int | None = None, publish: Callable[..., None] = publish
) -> FinishedRun | None:
    """Run `config`, write its log and record, and publish the results; with `--dry-run` print the plan and return None, and return None
    on ranks that the first one does not need.

    Args:
        publish: called by the first rank with the results, as `report.results.publish` is.

    Raises:
        UsageError: it cannot work; nothing was loaded or written.
        RunError: it failed; a record with status 'failed' was written.
    """
    config = config.validate()
    if config.verbose < 2:
        transformers_logging.set_verbosity_error()
    launch = read_launch(local_rank)
    alone = first_rank_alone(config, launch)
    if alone and launch.rank:
        return None
    with hide_launch() if alone else contextlib.nullcontext():
        machine = resolve_machine(config.machine, config.assume)
        ranks = machine.ranks_there(detect_ranks(None if alone else local_rank))
        with use_progress(Progress(enabled=ranks.is_first and config.verbose > 0)) as progress:
            if alone:
                config = _with_gpus_of(launch, config, ranks, machine, progress)
            return _run(config, argv, ranks, machine, progress, publish)


@interpreter.reserve_stack
def convert(config: RunConfig) -> Path:
    """Write a model's weights to a file of --offload-dir, from which later runs with the same weights read them; return the file.

    Args:
        config: of a run with all blocks on disk.

    Raises:
        UsageError: the model or the folder cannot be used, or runs read the checkpoint's own files.
        RunError: the weights cannot be read or written.
    """
    if config.verbose < 2:
        transformers_logging.set_verbosity_error()
    with use_progress(Progress(enabled=config.verbose > 0)) as progress:
        ranks = detect_ranks()
        spec = _find_model(config, ranks, progress)
        check_model(config, spec)
        if not spec.dummy:
            spec.checkpoint_folder()
        plan = stream_plan(make_plan(build_job(config, spec, ranks)))
        sources = {extent.path.suffix for extents in plan.in_place.values() for extent in extents}
        if sources == {".safetensors"} and plan.footprint.disk == 0:
            raise UsageError(f"{config.model}: runs read its own files as they are, so there is nothing to convert.")
        return convert_weights(plan, progress.loading(plan.job.sizes.parameter_bytes))


def _with_gpus_of(launch: Launch, config: RunConfig, ranks: Ranks, machine: Machine, progress: Progress) -> RunConfig:
    """Return `config` with a GPU for each rank that was started, of which this one drives all. Raises UsageError: there are fewer."""
    if ranks.device.type == "cpu":
        progress.say("one process computes: rank 0; the other ranks end")
        return config
    if config.num_gpus is None:
        if launch.world_size > machine.gpus():
            raise UsageError(f"{launch.world_size} ranks were started for {machine.gpus()} GPUs; start fewer ranks.")
        config = replace(config, num_gpus=launch.world_size)
    gpus = machine.gpus() if config.num_gpus == ALL else config.num_gpus
    driven = "one GPU" if gpus == 1 else f"the {gpus} GPUs"
    progress.say(f"one process drives {driven}: rank 0; the other ranks end")
    return config


def _run(
    config: RunConfig, argv: list[str], ranks: Ranks, machine: Machine, progress: Progress, publish: Callable[..., None]
) -> FinishedRun | None:
    compiled_before_s = compile_s()  # by an earlier run in this process
    check_launch(config, ranks, machine)
    unresolved, spec = config, _find_model(config, ranks, progress)
    config = with_prompt_length(config, spec)
    check_model(config, spec)
    config, chosen, empty_model = choose(config, spec, ranks, machine, progress.say)
    questions = load_tasks(config, spec.max_positions)
    if questions and load_tokenizer(spec) is None:
        raise UsageError(f"--quality reads text, and {spec.name} has no tokenizer: add its files, or drop --quality.")
    if config.dry_run:
        if config.save_config and ranks.is_first:
            command = run_command(["--config", config.save_config])
            save_options(config.save_config, non_default_options(unresolved), f"run with: {command}")
            print(f"options: {config.save_config}", file=sys.stderr, flush=True)
        if ranks.is_first:
            with contextlib.redirect_stdout(sys.stderr):  # libraries print there, and stdout is for the plan
                job = build_job(config, spec, ranks, machine=machine, empty_model=empty_model)
            print_plan(job, chosen.goal if chosen else None)
        return None
    request = build_request(config, spec, ranks, argv, chosen)
    num_gpus = ranks.world_size * len(driven_devices(config, ranks, machine))  # at most
    log = log_path(config, ranks, num_gpus)
    files = RunLog(log, request, Result(environment=Environment(**describe_environment())))
    data_files = [find_task_file(task, config.quality_data) for task in config.quality]
    refuse_shared_files(config, files, spec.snapshot.folder if spec.snapshot else spec.folder, data_files)
    files.check()
    with record_failures(config, ranks, files, release=close_all) as watch:
        start_process_group(ranks)
        refuse_differences(ranks, lambda: compared_options(config, spec, ranks, questions))
        plan = plan_run(config, spec, ranks, empty_model)
        output_ids, tokenizer, prompts = _measure(plan, files, progress, questions, compiled_before_s)
        progress.close()
        ranks.barrier()
    ends = eos_token_ids(spec, tokenizer)
    try:
        if ranks.is_first:
            publish(files, output_ids, tokenizer, before=watch.stop, ends=ends, prompts=prompts)
        watch.stop()
    except BaseException:
        leave_process_group(ranks)
        raise
    stop_process_group()
    return FinishedRun(files, output_ids, tokenizer, ends)


def _find_model(config: RunConfig, ranks: Ranks, progress: Progress) -> ModelSpec:
    try:
        return resolve_model(config, ranks.device.type)
    except UsageError as error:
        reads_text = config.prompt or config.prompts or config.chat or config.quality
        if not config.dry_run or reads_text or find_preset(config.model) is None:
            raise
        # a dry run needs only the configuration, which the built-in preset has
        progress.say(f"{ONLY_PLANNED} {error}")
        return resolve_for_plan(config, ranks.device.type)


def _measure(
    plan: Plan, files: RunLog, progress: Progress, questions: Questions, compiled_before_s: float
) -> tuple[Any, Any, list[str]]:
    """Load and measure; fill `files`. Return the generated ids (int64 [batch, gen_len]), the tokenizer, and the prompts in short."""
    config, spec, ranks = plan.job.config, plan.job.spec, plan.job.ranks
    _note_plan(plan, files)
    check_memory(plan)
    ids, tokenizer, note = prompt_ids(config, spec)
    if not spec.dummy:
        spec.checkpoint_folder()  # fetched now: time on the network is not time to load
    refuse_differences(ranks, lambda: compared_inputs(spec, ids))
    plan = with_current_memory(plan)  # fetching the weights may have taken an hour
    _note_plan(plan, files)
    check_memory(plan)
    interpreter.resume_collections()
    files.result.machine = steadiness.machine_load()  # before this run adds to it
    profile = plan.job.machine.profile()
    caveat = profile.caveat() if profile is not None else None
    warning = f"warning: this machine's {caveat}" if caveat else None
    for remark in filter(None, (warning, plan.job.conversion, note, steadiness.load_warning(files.result.machine))):
        progress.say(remark)
    with loaded_model(plan, progress) as (loaded, load_s, compare):
        session = measure_run(plan, loaded, ids, progress, compare)
        files.result.measured = summarize_measurement(session, load_s, compile_s() - compiled_before_s)
        if warning := steadiness.spread_warning(files.result.measured.spread):
            progress.say(warning)
        if config.trace:
            with files.noting("trace", config.trace):
                if (use := write_trace(session, Path(config.trace))) is not None:
                    files.result.measured = files.result.measured.model_copy(update={"link_use": use})
        files.result.quality = Quality(by_task=None)
        if questions:
            files.result.quality = score_run(plan.job, loaded, questions, tokenizer, files, progress)
        files.result.add_facts(loaded.facts)
    output_ids, measured = session.measurement.output_ids, files.result.measured
    if config.compare_baseline:
        del loaded, session  # its memory is for the other one
        baseline = measure_baseline(plan, measured, output_ids, ids)
        speculation = measured.speculation.model_copy(update={"baseline": baseline})
        files.result.measured = measured.model_copy(update={"speculation": speculation})
    return output_ids, tokenizer, prompt_excerpts(config, ids, tokenizer)


def _note_plan(plan: Plan, files: RunLog) -> None:
    """Note in the request where the weights will be and how many GPUs take part, and name the log after that. Raises UsageError."""
    job, engine_plan = plan.job, plan.engine_plan
    place = weights_place(job.config, job.ranks)
    if engine_plan.uses_disk:
        place = "disk"  # also without --disk-offload, where host memory is too small
    elif place == "disk":
        place = "cpu"  # each weight is smaller than what the engine writes to disk
    found = {"pin_memory": engine_plan.pinned, "num_gpus": job.num_gpus if job.on_gpu else 0, "weights_place": place}
    files.move(log_path(job.config, job.ranks, job.num_gpus, place), files.request.model_copy(update=found))


def build_request(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, argv: list[str], chosen: AutoChoice | None
) -> Request:
    """Return what is known of the request before the plan; `pin_memory` is as given until then, `num_gpus` unknown."""
    resolved = ("quant_bits", "quant_group_size", "dtype", "dummy_routing", "num_gpus")  # passed as resolved
    given = {name: getattr(config, name) for name in Request.model_fields if name in OPTIONS and name not in resolved}
    kept = spec.kept_format(config)
    return Request(
        **given,
        timestamp=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        argv=argv,
        quant_bits=config.bits_of_plain if kept is None else kept.bits,
        quant_group_size=config.group_size if kept is None else max(0, kept.group_size),
        stored_format=None if kept is None else kept.name,
        model_type=spec.config.model_type,
        dtype=spec.dtype_name,
        dummy_routing=spec.dummy_routing,
        world_size=ranks.world_size,
        num_nodes=ranks.num_nodes,
        options=non_default_options(config),
        chosen=chosen,
        weights_place=weights_place(config, ranks),
    )


def weights_place(config: RunConfig, ranks: Ranks) -> str:
    """Return 'cpu', 'disk' or 'gpu'; without an offload and without a GPU the device is host memory."""
    return "cpu" if config.offload == "gpu" and ranks.device.type == "cpu" else config.offload


def log_path(config: RunConfig, ranks: Ranks, num_gpus: int, place: str | None = None) -> Path:
    """Return --log-file, or a file of --log-dir named after the options and the GPUs of the run (or processes, without a GPU); `place` is
    where the weights are if that is not as asked."""
    if config.log_file:
        return Path(config.log_file)
    place = place or weights_place(config, ranks)
    nodes, prefix = (ranks.num_nodes, num_gpus // ranks.num_nodes), LOG_PREFIX.get(config.engine, config.engine)
    work = (config.batch_size, config.prompt_len, config.gen_len, place == "cpu", place == "disk")
    name = get_filename(config.model, *work, *nodes, config.kv_offload, config.quantized, prefix=prefix)
    return Path(config.log_dir) / f"{name}.log"


def refuse_differences(ranks: Ranks, compared: Callable[[], dict[str, Any]]) -> None:
    """Compare what `compared` returns on each rank: a collective. Raises UsageError on all ranks, where it differs."""
    if ranks.world_size == 1:
        return
    first, *others = ranks.gather_objects(compared())
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UsageError(
                    f"rank 0 has {name} {value!s:.60} and rank {rank} has {other.get(name)!s:.60}: the ranks of a run "
                    "must have the same options, model, prompts and versions."
                )


def compared_options(config: RunConfig, spec: ModelSpec, ranks: Ranks, questions: Questions) -> dict[str, Any]:
    """Return what the ranks must have in common before they plan: options, model, versions."""
    options = {name: value for name, value in config.as_dict().items() if name not in NOT_COMPARED}
    return {f"--{hyphens(name)}": value for name, value in options.items()} | {
        "--trace": bool(config.trace),
        "--speculate": config.speculate and Path(config.speculate).name,
        "--ds-config": read_ds_config(config.ds_config),
        "the device": ranks.device.type,
        "the dtype": str(spec.dtype),
        "the model's config": _digest(spec.config.to_dict() | {"_name_or_path": None}),
        "--quality-data": _digest(questions),
        **package_versions(),
    }


def compared_inputs(spec: ModelSpec, ids: torch.Tensor) -> dict[str, Any]:
    """Return digests of the prompts `ids` and of the files of the weights (names, sizes and samples)."""
    files = [] if spec.dummy else find_shards(spec.checkpoint_folder())[0]
    return {"the prompts": _digest(ids.tolist()), "the weights": _digest([_sample(file) for file in files])}


def _sample(path: Path) -> list:
    """Return name, size and a hash of both ends; the start of a safetensors file has its table of contents."""
    with open(path, "rb") as file:
        first = file.read(SAMPLE_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - SAMPLE_BYTES))
        return [path.name, size, hashlib.sha256(first + file.read()).hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
