"""What can be seen to be wrong with the choices of a run before the model's config is loaded: one function a subject.

Each raises UsageError with what was asked, what was found, and what to change.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from zero_inference.config.options import (
    CPU_COMPUTE,
    DECODE_GRAPH,
    DEFAULTS,
    DTYPES,
    DUMMY_ROUTING,
    ENGINES,
    GOALS,
    GROUP_SIZES,
    LONGEST_PROMPT,
    LONGEST_WINDOW,
    MIN_RING_DEPTH,
    MOST,
    MOST_GIB,
    NORM_KERNELS,
    PAGE_LOCKING_ENGINES,
    PATHS,
    QUALITY_COMPANIONS,
    QUALITY_TASKS,
    QUANT_BITS,
    QUANTIZING_ENGINES,
    STREAM_OPTIONS,
    WHOLE_NUMBERS,
    Options,
)
from zero_inference.config.values import not_among
from zero_inference.errors import UsageError
from zero_inference.utils.files import check_output_file
from zero_inference.utils.suggestions import did_you_mean, nearest_multiples


def check_paths(choices: Options) -> None:
    for name in PATHS:
        path = getattr(choices, name)
        if path == "":  # an unset variable of a script: the run would do something else than was meant
            raise UsageError(f"{_flag(name)} is empty: give it a name, or drop it.")
        if name == "offload_dir":
            path = os.path.expanduser(path) if choices.disk_offload else None
        if name == "machine":
            path = path and os.path.expanduser(path)
        # a folder called ~ is one that people remove with their home
        if path and path.startswith("~") and name != "model":
            raise UsageError(
                f"{_flag(name)} {path}: which home folder ~ stands for is not known here; write it out, or ./{path}."
            )


def check_model(choices: Options) -> None:
    """Raises UsageError for a model that is given as a GGUF file, another file or an address of the hub."""
    name = choices.model
    if name.lower().endswith(".gguf"):
        raise UsageError(f"--model {name}: GGUF is not read; give the repository or folder in transformers' format.")
    if name.startswith(("https://huggingface.co/", "http://huggingface.co/")):
        repository = "/".join(name.split("/")[3:5])
        raise UsageError(f"--model {name}: an address; give the repository's name, {repository}.")
    if os.path.isfile(os.path.expanduser(name)):
        raise UsageError(f"--model {name} is a file; give the folder that holds config.json and the weights.")


def check_values(choices: Options) -> None:
    for name, allowed in (
        ("engine", ENGINES),
        ("dtype", DTYPES),
        ("norm_kernels", NORM_KERNELS),
        ("quant_bits", QUANT_BITS),
        ("decode_graph", DECODE_GRAPH),
        ("dummy_routing", DUMMY_ROUTING),
        ("goal", (None, *GOALS)),
    ):
        value = getattr(choices, name)
        if value not in allowed:
            raise UsageError(not_among(_flag(name), value, allowed))
    for name, (least, most) in WHOLE_NUMBERS.items():
        value = getattr(choices, name)
        if name == "prompt_len" and choices.prompt:
            least = LONGEST_PROMPT
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UsageError(f"{_flag(name)} {value}: must be {bound}.")
    if choices.quant_bits == 4 and choices.group_size % 2:
        raise UsageError(
            f"--quant-group-size {choices.quant_group_size}: two weights of 4 bits share a byte, so it must be even."
        )
    if choices.warmup_spread is not None:
        if not 0 < choices.warmup_spread < 1:
            raise UsageError(f"--warmup-spread {choices.warmup_spread}: give a share between 0 and 1, such as 0.05.")
        if choices.warmup < 3:
            raise UsageError(
                f"--warmup-spread compares three warm-up loops and --warmup {choices.warmup} is the most of them: "
                "raise --warmup, to 10 or so."
            )
    if choices.cpu_compute not in CPU_COMPUTE:
        try:
            share = float(choices.cpu_compute)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UsageError(
                f"--cpu-compute {choices.cpu_compute or repr('')}: choose auto, off, or a share of the weights between 0 and 1, "
                "such as 0.5."
            )
    if choices.gpu_memory is not None and not 0 <= choices.gpu_memory <= MOST_GIB:
        raise UsageError(f"--gpu-memory {choices.gpu_memory}: must be 0 or more GiB, at most {MOST_GIB}.")


def check_engine(choices: Options) -> None:
    if choices.ring_depth is not None and not MIN_RING_DEPTH <= choices.ring_depth <= MOST:
        raise UsageError(
            f"--ring-depth {choices.ring_depth}: a layer has to compute while the next one comes: use {MIN_RING_DEPTH} or more, "
            "and no more than there are layers."
        )
    for name in STREAM_OPTIONS:
        if getattr(choices, name) != DEFAULTS[name] and choices.engine != "stream":
            change = "add --engine stream" if choices.engine == DEFAULTS["engine"] else "use that"
            raise UsageError(
                f"{_flag(name)} belongs to --engine stream, not to --engine {choices.engine}: {change}, or drop {_flag(name)}."
            )
    if choices.ds_config is not None and choices.engine != "deepspeed":
        raise UsageError(f"--ds-config configures DeepSpeed, but --engine is {choices.engine}: drop one of the two.")
    if choices.engine == "stream" and choices.disk_offload:
        raise UsageError(
            "--engine stream keeps weights in host memory, not on disk: drop --disk-offload, or use --engine deepspeed."
        )
    if choices.engine == "resident" and (choices.cpu_offload or choices.disk_offload):
        raise UsageError(
            "--engine resident keeps every weight on the device: drop the offload, or use --engine deepspeed."
        )
    for option, given, engines in (
        (f"--quant-bits {choices.quant_bits}", choices.quantized, QUANTIZING_ENGINES),
        ("--pin-memory 1", choices.pin_memory, PAGE_LOCKING_ENGINES),
    ):
        if given and choices.engine not in engines:
            raise UsageError(f"{option} is not done by --engine {choices.engine}: use --engine {' or '.join(engines)}.")
    if choices.use_gds and choices.engine != "deepspeed":
        raise UsageError(f"--use-gds is not done by --engine {choices.engine}: use --engine deepspeed.")
    if choices.pin_memory and choices.engine == "deepspeed" and choices.offload == "gpu":
        raise UsageError("--pin-memory 1 is about weights in host memory: add --cpu-offload or --disk-offload.")
    if choices.engine == "accelerate" and choices.offload == "gpu":
        raise UsageError(
            "--engine accelerate is here for its offload: add --cpu-offload or --disk-offload, "
            "or use --engine resident."
        )


def check_offload(choices: Options) -> None:
    if choices.cpu_offload and choices.disk_offload:
        raise UsageError(
            "--cpu-offload and --disk-offload were both given, but weights live in one place: keep one of the two."
        )
    if choices.use_gds and not choices.disk_offload:
        raise UsageError(
            "--use-gds reads weights from NVMe, but --disk-offload was not given: add it or drop --use-gds."
        )


def check_companions(choices: Options) -> None:
    """An option that does nothing without another one is an error where that is not given."""
    for name, other, other_given in (
        ("pin_kv_cache", "--kv-offload", choices.kv_offload),
        ("async_kv_offload", "--kv-offload", choices.kv_offload),
        ("offload_dir", "--disk-offload", choices.disk_offload or "engine" in choices.auto),
        ("quant_group_size", "--quant-bits 8 or 4", choices.quantized or choices.quant_group_size == GROUP_SIZES[16]),
        ("json", "--dry-run", choices.dry_run),
        ("dummy_routing", "--dummy", choices.dummy),
    ):
        if getattr(choices, name) != DEFAULTS[name] and not other_given:
            raise UsageError(f"{_flag(name)} belongs to {other}, which was not given: add that or drop {_flag(name)}.")
    if choices.goal is not None and not choices.auto:
        raise UsageError(
            f"--goal {choices.goal} is for what the plan is to find: add --engine auto, --quant-bits auto or --batch-size auto."
        )
    if choices.cpu_threads is not None and choices.cpu_share == 0:
        raise UsageError("--cpu-threads has no effect with --cpu-compute off: drop one of the two.")
    if choices.log_file and choices.log_dir != DEFAULTS["log_dir"]:
        raise UsageError(
            f"--log-file {choices.log_file} says where the log goes, and so does --log-dir {choices.log_dir}: keep one of the two."
        )
    for name in ("machine", "assume"):
        if getattr(choices, name) is not None and not choices.dry_run:
            raise UsageError(
                f"{_flag(name)} is about another machine than this one, where nothing can be run: add --dry-run."
            )
    if choices.save_config and not choices.dry_run:
        raise UsageError("--save-config writes the options of a --dry-run: add --dry-run.")
    if choices.async_kv_offload and not choices.pin_kv_cache:
        raise UsageError("--async-kv-offload needs page-locked memory to copy into: add --pin-kv-cache.")


def check_prompts(choices: Options) -> None:
    for option, given in (("--prompt", choices.prompt), ("--prompts", choices.prompts)):
        if given and choices.dummy:
            raise UsageError(f"{option} needs a tokenizer and --dummy runs on random token ids: keep one of the two.")
    if choices.prompt and choices.prompts:
        raise UsageError(f"--prompt and --prompts {choices.prompts} both say what is read: keep one of the two.")
    if choices.chat and not (choices.prompt or choices.prompts):
        raise UsageError("--chat belongs to --prompt or --prompts, and neither was given: add one, or drop --chat.")
    if any(not text.strip() for text in choices.prompt):
        raise UsageError("--prompt is empty: give it a text, or drop it.")
    count = len(choices.prompt)
    if count > 1 and "batch_size" in choices.auto:
        raise UsageError(f"--batch-size auto: {count} prompts were given, so the batch is known: drop --batch-size.")
    if count > choices.batch_size and "batch_size" not in choices.auto:
        raise UsageError(
            f"--batch-size {choices.batch_size}: {count} prompts were given; use {count} or more, or drop it."
        )


def check_files(choices: Options) -> None:
    if choices.prompts and not Path(choices.prompts).is_file():
        raise UsageError(f"--prompts {choices.prompts}: no such file; give a text file with one prompt a line.")
    for name in ("trace", "save_config"):
        if path := getattr(choices, name):
            check_output_file(_flag(name), path)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def batch_advice(batch: int, parts: int, over: str) -> str:
    """Return why a batch cannot be split over ranks or GPUs, and what to ask for instead."""
    values = " or ".join(map(str, nearest_multiples(batch, parts)))
    fewer = max(count for count in range(1, parts) if batch % count == 0)
    gpus = f"{fewer} GPU{'s' * (fewer > 1)}"
    return f"--batch-size {batch} does not divide over {over}; use {values}, a multiple of {parts}, or {gpus}"


def check_quality(choices: Options) -> None:
    for task in choices.quality:
        if task not in QUALITY_TASKS:
            near = did_you_mean(task, QUALITY_TASKS)
            known = f"choose from {', '.join(QUALITY_TASKS)}"
            raise UsageError(f"--quality {task}: no such task; {known}{'; ' + near if near else '.'}")
    if len(set(choices.quality)) < len(choices.quality):
        raise UsageError(f"--quality {','.join(choices.quality)}: a task is named twice; name each once.")
    for other, names in QUALITY_COMPANIONS.items():
        task = other.removeprefix("--quality").strip()
        for name in names:
            if getattr(choices, name) != DEFAULTS[name] and not (task in choices.quality if task else choices.quality):
                raise UsageError(
                    f"--{name.replace('_', '-')} belongs to {other}, which was not given: add that or drop --{name.replace('_', '-')}."
                )
    if not choices.quality:
        return
    if choices.dummy:
        raise UsageError(
            "--quality needs a tokenizer and trained weights, and --dummy has neither: keep one of the two."
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--quality works through lm-evaluation-harness, which is not installed: pip install 'lm-eval>=0.4.13'."
        )
    _check_quality_numbers(choices)
    _check_quality_paths(choices)


def _check_quality_numbers(choices: Options) -> None:
    if not 0 < choices.humaneval_temperature < float("inf"):
        raise UsageError(
            f"--humaneval-temperature {choices.humaneval_temperature}: must be a number above 0; "
            "one sample (--humaneval-samples 1) is greedy."
        )
    if choices.humaneval_samples == 1 and choices.humaneval_temperature != Options.humaneval_temperature:
        raise UsageError(
            "--humaneval-temperature: a single sample is greedy and has none; add --humaneval-samples or drop it."
        )
    for k in choices.pass_at_k:
        if not 1 <= k <= choices.humaneval_samples:
            raise UsageError(
                f"--pass-at-k {k}: k has to be 1 to the number of samples, which is {choices.humaneval_samples}; "
                f"lower k or use --humaneval-samples {max(k, 1)}."
            )
    if choices.perplexity_window is not None:
        perplexity_window(choices.perplexity_window, choices.perplexity_stride, None)
    if "humaneval" in choices.quality and not choices.allow_code_execution:
        raise UsageError(
            "--quality humaneval runs code that the model wrote: allow it with --allow-code-execution "
            "(it runs isolated, see the README), or leave humaneval out."
        )


def _check_quality_paths(choices: Options) -> None:
    needing = [task for task in choices.quality if task != "humaneval"]
    if needing and choices.quality_data is None:
        raise UsageError(
            f"--quality {','.join(choices.quality)}: no data for {', '.join(needing)}; "
            "add --quality-data with a file or folder."
        )
    if choices.quality_data is not None:
        if not os.path.exists(choices.quality_data):
            raise UsageError(f"--quality-data {choices.quality_data}: no such file or folder.")
        if os.path.isfile(choices.quality_data) and len(choices.quality) > 1:
            raise UsageError(
                f"--quality-data {choices.quality_data} is one file and --quality names {len(choices.quality)} tasks; "
                "give a folder with a file named after each."
            )
    if choices.quality_items:
        check_output_file("--quality-items", choices.quality_items)


def perplexity_window(window: int | None, stride: int | None, positions: int | None) -> tuple[int, int]:
    """The window and the stride of perplexity in tokens, for a model of `positions`; None where there is no such limit.

    Raises:
        UsageError: the window is longer than the model's context, or the stride than the window.
    """
    window = window or min(LONGEST_WINDOW, positions or LONGEST_WINDOW)
    if positions is not None and window > positions:
        raise UsageError(f"--perplexity-window {window}: the model has {positions} positions; use at most that.")
    stride = stride or max(1, window // 2)
    if stride > window:
        raise UsageError(
            f"--perplexity-stride {stride}: longer than the window of {window} tokens, so text would be left out; "
            "use at most the window."
        )
    return window, stride
