"""Checks across options, made before the model's config is loaded.

Each function raises UsageError with the request, the problem and the fix. Values of single options are checked by `Option.read`.
"""

from __future__ import annotations

import importlib.util
import os

from zero_inference.config.options import DEFAULTS, GROUP_SIZES, OPTIONS, Options
from zero_inference.errors import UsageError
from zero_inference.utils.files import check_output_file
from zero_inference.utils.suggestions import nearest_multiples

MAX_WINDOW = 1024  # tokens; perplexity without --perplexity-window


def check(config: Options) -> None:
    """Run all checks of this module. Raises UsageError."""
    check_model(config)
    check_numbers(config)
    check_engine(config)
    check_needs(config)
    check_offload(config)
    check_prompts(config)
    check_files(config)
    if config.quality:
        check_quality(config)


def check_model(config: Options) -> None:
    name = config.model
    if name.lower().endswith(".gguf"):
        raise UsageError(f"--model {name}: GGUF is not read; give the repository or folder in transformers' format.")
    if name.startswith(("https://huggingface.co/", "http://huggingface.co/")):
        repository = "/".join(name.split("/")[3:5])
        raise UsageError(f"--model {name}: an address; give the repository's name, {repository}.")
    if os.path.isfile(os.path.expanduser(name)):
        raise UsageError(f"--model {name} is a file; give the folder that holds config.json and the weights.")


def check_numbers(config: Options) -> None:
    if config.prompt_len < 1 and not config.prompt:
        raise UsageError(f"--prompt-len {config.prompt_len}: must be at least 1.")
    if config.quant_bits == 4 and config.group_size % 2:
        raise UsageError(f"--quant-group-size {config.group_size}: two 4-bit weights share a byte, so it must be even.")
    if config.warmup_spread is not None and config.warmup < 3:
        raise UsageError(
            f"--warmup-spread compares three warm-up loops and --warmup {config.warmup} is the most of them: raise --warmup, to 10 or so."
        )


def check_engine(config: Options) -> None:
    engine = config.engine
    for option in OPTIONS.values():
        value = getattr(config, option.name)
        if not option.engines or value is False or value == DEFAULTS[option.name]:
            continue
        one = option.engines[0]
        if "engine" in config.auto and len(option.engines) == 1:
            raise UsageError(f"{option.flag} belongs to --engine {one}: name that engine instead of auto, or drop it.")
        if engine not in option.engines:
            change = f"add --engine {one}" if engine == DEFAULTS["engine"] else "use that"
            raise UsageError(
                f"{option.flag} belongs to --engine {' or '.join(option.engines)}, not to --engine {engine}: {change}, "
                f"or drop {option.flag}."
            )
    if engine == "stream" and config.disk_offload:
        raise UsageError(
            "--engine stream keeps weights in host memory, not on disk: drop --disk-offload, or use --engine deepspeed."
        )
    if engine == "resident" and config.offload != "gpu":
        raise UsageError(
            "--engine resident keeps every weight on the device: drop the offload, or use --engine deepspeed."
        )
    if engine == "accelerate" and config.offload == "gpu":
        raise UsageError(
            "--engine accelerate is for offload: add --cpu-offload or --disk-offload, or use --engine resident."
        )
    if config.pin_memory and engine == "deepspeed" and config.offload == "gpu":
        raise UsageError("--pin-memory 1 is about weights in host memory: add --cpu-offload or --disk-offload.")
    if config.cpu_threads is not None and config.cpu_share == 0:
        raise UsageError("--cpu-threads has no effect with --cpu-compute off: drop one of the two.")


def check_needs(config: Options) -> None:
    """Refuse an option that has no effect without another one."""
    for option in OPTIONS.values():
        for need in option.needs:
            name, _, task = need.partition("=")
            found = getattr(config, name)
            _need(config, option.name, f"{OPTIONS[name].flag} {task}".strip(), task in found if task else bool(found))
    _need(config, "offload_dir", "--disk-offload", config.disk_offload or "engine" in config.auto)
    _need(config, "chat", "--prompt or --prompts", bool(config.prompt or config.prompts))
    quantized = config.quantized or config.quant_group_size == GROUP_SIZES[16]
    _need(config, "quant_group_size", "--quant-bits 8 or 4", quantized)
    if config.goal is not None and not config.auto:
        raise UsageError(
            f"--goal {config.goal} is for what the plan chooses: add --engine auto, --quant-bits auto or --batch-size auto."
        )


def _need(config: Options, name: str, other: str, given: bool) -> None:
    if getattr(config, name) != DEFAULTS[name] and not given:
        flag = OPTIONS[name].flag
        raise UsageError(f"{flag} belongs to {other}, which was not given: add that or drop {flag}.")


def check_offload(config: Options) -> None:
    if config.cpu_offload and config.disk_offload:
        raise UsageError(
            "--cpu-offload and --disk-offload were both given; weights are in one place: keep one of the two."
        )


def check_prompts(config: Options) -> None:
    for flag, given in (("--prompt", config.prompt), ("--prompts", config.prompts)):
        if given and config.dummy:
            raise UsageError(f"{flag} needs a tokenizer and --dummy runs on random token ids: keep one of the two.")
    if config.prompt and config.prompts:
        raise UsageError(f"--prompt and --prompts {config.prompts} both give the prompts: keep one of the two.")
    if any(not text.strip() for text in config.prompt):
        raise UsageError("--prompt is empty: give it a text, or drop it.")
    count = len(config.prompt)
    if count > 1 and "batch_size" in config.auto:
        raise UsageError(f"--batch-size auto: {count} prompts were given, so the batch is known: drop --batch-size.")
    if count > config.batch_size and "batch_size" not in config.auto:
        raise UsageError(
            f"--batch-size {config.batch_size}: {count} prompts were given; use {count} or more, or drop it."
        )


def check_files(config: Options) -> None:
    if config.log_file and config.log_dir != DEFAULTS["log_dir"]:
        raise UsageError(
            f"--log-file {config.log_file} and --log-dir {config.log_dir} both say where the log goes: keep one of the two."
        )
    if config.prompts and not os.path.isfile(config.prompts):
        raise UsageError(f"--prompts {config.prompts}: no such file; give a text file with one prompt a line.")
    for name in ("trace", "save_config", "quality_items"):
        if path := getattr(config, name):
            check_output_file(OPTIONS[name].flag, path)


def check_quality(config: Options) -> None:
    tasks = ",".join(config.quality)
    if len(set(config.quality)) < len(config.quality):
        raise UsageError(f"--quality {tasks}: a task is named twice; name each once.")
    if config.dummy:
        raise UsageError(
            "--quality needs a tokenizer and trained weights, and --dummy has neither: keep one of the two."
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--quality needs lm-evaluation-harness, which is not installed: pip install 'lm-eval>=0.4.13'."
        )
    if config.humaneval_samples == 1 and config.humaneval_temperature != DEFAULTS["humaneval_temperature"]:
        raise UsageError("--humaneval-temperature: a single sample is greedy; add --humaneval-samples or drop it.")
    for k in config.pass_at_k:
        if not 1 <= k <= config.humaneval_samples:
            raise UsageError(
                f"--pass-at-k {k}: k has to be 1 to the number of samples, which is {config.humaneval_samples}; lower k or use "
                f"--humaneval-samples {max(k, 1)}."
            )
    perplexity_window(config.perplexity_window, config.perplexity_stride, None)
    if "humaneval" in config.quality and not config.allow_code_execution:
        raise UsageError(
            "--quality humaneval runs code that the model wrote: allow it with --allow-code-execution (it runs isolated, "
            "see docs/quality.md), or leave humaneval out."
        )
    needing = [task for task in config.quality if task != "humaneval"]
    if needing and config.quality_data is None:
        raise UsageError(
            f"--quality {tasks}: no data for {', '.join(needing)}; add --quality-data with a file or folder."
        )
    if config.quality_data is not None and not os.path.exists(config.quality_data):
        raise UsageError(f"--quality-data {config.quality_data}: no such file or folder.")
    if config.quality_data is not None and os.path.isfile(config.quality_data) and len(config.quality) > 1:
        raise UsageError(
            f"--quality-data {config.quality_data} is one file and --quality names {len(config.quality)} tasks; give a folder with a file "
            "named after each."
        )


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
        raise UsageError(
            f"--perplexity-stride {stride}: longer than the window of {window} tokens, so text would be left out; use at most the window."
        )
    return window, stride


def batch_advice(batch: int, parts: int, over: str) -> str:
    """Return why a batch cannot be split over ranks or GPUs, and what to use instead."""
    multiples = " or ".join(map(str, nearest_multiples(batch, parts)))
    fewer = max(count for count in range(1, parts) if batch % count == 0)
    gpus = f"{fewer} GPU{'s' * (fewer > 1)}"
    return f"--batch-size {batch} does not divide over {over}; use {multiples}, a multiple of {parts}, or {gpus}"
