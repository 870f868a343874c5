"""Checks across options, made before the model's config is loaded. Values of single options are checked by `Option.read`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from zero_inference.config.option import STORED
from zero_inference.config.options import DEFAULTS, GROUP_SIZES, NGRAM, OPTIONS, SELF, Options
from zero_inference.errors import UsageError
from zero_inference.utils.files import check_output_file

MAX_WINDOW = 1024  # tokens; perplexity without --perplexity-window


def check(config: Options) -> None:
    """Raise UsageError with the first contradiction: the request, the problem and the fix."""
    for contradictions in (_in_model_and_work, _in_engine, _in_needs, _in_prompts, _in_outputs, _in_quality):
        for message in contradictions(config):
            raise UsageError(message)
    for name in ("trace", "save_config", "quality_items"):
        if path := getattr(config, name):
            check_output_file(OPTIONS[name].flag, path)


def _in_model_and_work(config: Options) -> Iterator[str]:
    name = config.model
    if name.lower().endswith(".gguf"):
        yield f"--model {name}: GGUF is not read; give the repository or folder in transformers' format."
    if name.startswith(("https://huggingface.co/", "http://huggingface.co/")):
        yield f"--model {name}: an address; give the repository's name, {'/'.join(name.split('/')[3:5])}."
    if os.path.isfile(os.path.expanduser(name)):
        yield f"--model {name} is a file; give the folder that holds config.json and the weights."
    if config.prompt_len < 1 and not config.prompt:
        yield f"--prompt-len {config.prompt_len}: must be at least 1."
    if config.quant_bits == 4 and config.group_size % 2:
        yield f"--quant-group-size {config.group_size}: two 4-bit weights share a byte, so it must be even."
    if config.quant_bits == STORED and config.engine != "stream" and "engine" not in config.auto:
        yield (
            f"--quant-bits {STORED}: --engine {config.engine} converts the weights of a quantized checkpoint; use --engine stream, or "
            "--quant-bits 16."
        )
    if config.warmup_spread is not None and config.warmup < 3:
        yield f"--warmup-spread compares three warm-up loops and --warmup is {config.warmup}: raise it, to 10 or so."


def _in_engine(config: Options) -> Iterator[str]:
    asked, by_plan = ("auto", True) if "engine" in config.auto else (config.engine, False)
    if config.num_gpus is not None and config.engine == "deepspeed":
        yield (
            f"--num-gpus {config.num_gpus}: --engine deepspeed has a process for each GPU, which a launcher starts: "
            "deepspeed --num_gpus N run_model.py ...; or use --engine stream."
        )
    for option in OPTIONS.values():
        value, engines = getattr(config, option.name), option.engines
        in_16_bits = option.kind == "bits" and value == 16  # as every engine stores weights
        if not engines or value is False or value == DEFAULTS[option.name] or in_16_bits:
            continue
        if config.engine not in engines or (by_plan and len(engines) == 1):
            yield (
                f"{option.flag} belongs to --engine {' or '.join(engines)}, not to --engine {asked}: "
                f"use --engine {engines[0]}, or drop {option.flag}."
            )
    engine = config.engine
    if config.cpu_offload and config.disk_offload:
        yield "--cpu-offload and --disk-offload were both given; weights are in one place: keep one of the two."
    if engine == "resident" and config.offload != "gpu":
        yield "--engine resident keeps every weight on the device: drop the offload, or use --engine deepspeed."
    if engine == "accelerate" and config.offload == "gpu":
        yield "--engine accelerate is for offload: add --cpu-offload or --disk-offload, or use --engine resident."
    if config.pin_memory and engine == "deepspeed" and config.offload == "gpu":
        yield "--pin-memory 1 page-locks weights in host memory for copies to a GPU: add --cpu-offload or --disk-offload."
    if config.cpu_threads is not None and config.cpu_share == 0:
        yield "--cpu-threads has no effect with --cpu-compute off: drop one of the two."


def _in_needs(config: Options) -> Iterator[str]:
    """Options that have no effect without another one."""
    quantized = config.quantized or config.quant_group_size == GROUP_SIZES[16]
    needs = []  # option, what it belongs to, and whether that was given
    for option in OPTIONS.values():
        for other, _, task in (need.partition("=") for need in option.needs):
            found = getattr(config, other)
            given = task in found if task else found or other in config.auto
            needs.append((option.name, f"{OPTIONS[other].flag} {task}".strip(), given))
    model_draft = config.speculate not in (None, NGRAM) or "speculate" in config.auto
    needs += [
        ("draft_bits", f"--speculate {SELF} or a model", model_draft),
        ("draft_memory", f"--speculate {SELF} or a model", model_draft),
        ("offload_dir", "--disk-offload", config.disk_offload or "engine" in config.auto or config.engine == "stream"),
        ("chat", "--prompt or --prompts", config.prompt or config.prompts),
        ("quant_group_size", "--quant-bits 8 or 4", quantized),
        ("goal", "--engine auto, --quant-bits auto or --batch-size auto", config.auto),
    ]
    for name, other, given in needs:
        if getattr(config, name) != DEFAULTS[name] and not given:
            flag = OPTIONS[name].flag
            yield f"{flag} belongs to {other}, which was not given: add that or drop {flag}."


def _in_prompts(config: Options) -> Iterator[str]:
    for flag, given in (("--prompt", config.prompt), ("--prompts", config.prompts)):
        if given and config.dummy:
            yield f"{flag} needs a tokenizer and --dummy runs on random token ids: keep one of the two."
    if config.prompt and config.prompts:
        yield f"--prompt and --prompts {config.prompts} both give the prompts: keep one of the two."
    if any(not text.strip() for text in config.prompt):
        yield "--prompt is empty: give it a text, or drop it."
    count = len(config.prompt)
    if count > 1 and "batch_size" in config.auto:
        yield f"--batch-size auto: {count} prompts were given, so the batch is known: drop --batch-size."
    if count > config.batch_size and "batch_size" not in config.auto:
        yield f"--batch-size {config.batch_size}: {count} prompts were given; use {count} or more, or drop it."
    if config.prompts and not os.path.isfile(config.prompts):
        yield f"--prompts {config.prompts}: no such file; give a text file with one prompt a line."


def _in_outputs(config: Options) -> Iterator[str]:
    if config.log_file and config.log_dir != DEFAULTS["log_dir"]:
        yield f"--log-file {config.log_file} and --log-dir {config.log_dir} both name the log: keep one of the two."


def _in_quality(config: Options) -> Iterator[str]:
    if not config.quality:
        return
    tasks, data = ",".join(config.quality), config.quality_data
    if len(set(config.quality)) < len(config.quality):
        yield f"--quality {tasks}: a task is named twice; name each once."
    if config.dummy:
        yield "--quality needs a tokenizer and trained weights, and --dummy has neither: keep one of the two."
    if importlib.util.find_spec("lm_eval") is None:
        yield "--quality needs lm-evaluation-harness, which is not installed: pip install 'lm-eval>=0.4.13'."
    samples = config.humaneval_samples
    if samples == 1 and config.humaneval_temperature != DEFAULTS["humaneval_temperature"]:
        yield "--humaneval-temperature: a single sample is greedy; add --humaneval-samples or drop it."
    for k in config.pass_at_k:
        if not 1 <= k <= samples:
            yield f"--pass-at-k {k}: must be 1 to {samples}, the number of samples; lower it or raise --humaneval-samples."
    perplexity_window(config.perplexity_window, config.perplexity_stride, None)
    if "humaneval" in config.quality and not config.allow_code_execution:
        yield (
            "--quality humaneval runs code that the model wrote: allow it with --allow-code-execution (it runs isolated, "
            "see docs/quality.md), or leave humaneval out."
        )
    needing = [task for task in config.quality if task != "humaneval"]
    if needing and data is None:
        yield f"--quality {tasks}: no data for {', '.join(needing)}; add --quality-data with a file or folder."
    if data is not None and not os.path.exists(data):
        yield f"--quality-data {data}: no such file or folder."
    if data is not None and os.path.isfile(data) and len(config.quality) > 1:
        yield f"--quality-data {data} is one file for {len(config.quality)} tasks; give a folder with a file for each."


def perplexity_window(window: int | None, stride: int | None, positions: int | None) -> tuple[int, int]:
    """Return window and stride of perplexity in tokens.

    Args:
        positions: the model's context length; None where it has no limit, or none is known yet.

    Raises:
        UsageError: the window is longer than the context, or the stride than the window.
    """
    window = window or min(MAX_WINDOW, positions or MAX_WINDOW)
    if positions is not None and window > positions:
        raise UsageError(f"--perplexity-window {window}: the model has {positions} positions; use at most that.")
    stride = stride or max(1, window // 2)
    if stride > window:
        raise UsageError(f"--perplexity-stride {stride}: longer than the window of {window} tokens; use at most that.")
    return window, stride


def batch_advice(batch: int, parts: int, over: str) -> str:
    """Return why a batch cannot be split over ranks or GPUs, and what to use instead."""
    multiples = " or ".join(str(each) for each in (batch // parts * parts, -(-batch // parts) * parts) if each)
    fewer = max(count for count in range(1, parts) if batch % count == 0)
    return f"--batch-size {batch} does not divide over {over}; use {multiples}, or {fewer} of the GPUs"
