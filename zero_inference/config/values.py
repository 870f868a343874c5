"""Other spellings of a choice, and the one under which it is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from zero_inference.config.options import AUTO, DEFAULTS, DTYPES, QUANT_BITS
from zero_inference.errors import UsageError
from zero_inference.utils.format import parse_gib
from zero_inference.utils.suggestions import did_you_mean

_DTYPES = {
    **{name: name for name in DTYPES},
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
}
_BITS = {
    **{str(bits): bits for bits in QUANT_BITS},
    **{form.format(bits): bits for bits in QUANT_BITS for form in ("{}bit", "{}-bit", "{}bits", "{}-bits")},
    **{form.format(bits): bits for bits in (8, 4) for form in ("int{}", "uint{}", "q{}")},
    **dict.fromkeys(("fp16", "bf16", "float16", "bfloat16", "half", "none"), 16),
}
MOST_LISTED = 12  # choices, beside a near one
# Options of llama.cpp, vLLM, transformers, DeepSpeed and accelerate -> what to type here; of several the first that the command has.
# Dashes in front are left out. A value is part of a name where it decides.
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "n",
            "n-predict",
            "predict",
            "n-gen",
            "max-new-tokens",
            "max-tokens",
            "max-gen-len",
            "new-tokens",
            "output-len",
        ),
        ("--gen-len G",),
    ),
    **dict.fromkeys(("input-len", "n-prompt", "prompt-length", "prompt-tokens"), ("--prompt-len P",)),
    **dict.fromkeys(
        ("c", "ctx-size", "context-length", "max-length", "max-model-len", "max-seq-len", "seq-len"),
        ("--prompt-len P and --gen-len G, whose sum is the context",),
    ),
    **dict.fromkeys(("m", "hf", "hf-repo", "model-name-or-path", "model-name", "model-path"), ("--model NAME",)),
    **dict.fromkeys(
        ("ngl", "n-gpu-layers", "gpu-layers", "num-gpu-layers", "gpu-memory-utilization", "max-memory"),
        ("--gpu-memory GIB with --engine stream", "--max-gpu-memory GIB"),
    ),
    **dict.fromkeys(
        ("cmoe", "cpu-moe", "ncmoe", "n-cpu-moe"),
        ("--engine stream, whose experts in host memory are multiplied by the CPU",),
    ),
    **dict.fromkeys(("t", "threads", "num-threads", "n-threads"), ("--cpu-threads N",)),
    **dict.fromkeys(("b", "bs", "batch", "max-num-seqs", "num-prompts", "parallel", "np"), ("--batch-size B",)),
    "p": ("--prompt TEXT, or --prompt-len P",),
    **dict.fromkeys(("f", "file", "prompt-file", "dataset"), ("--prompts FILE",)),
    **dict.fromkeys(
        ("tp", "tensor-parallel-size", "pp", "pipeline-parallel-size", "gpus", "n-gpus", "num-devices"),
        ("--num-gpus N",),
    ),
    **dict.fromkeys(
        ("offload=cpu", "offload=host", "offload-device=cpu", "cpu-offload-gb", "swap-space"), ("--cpu-offload",)
    ),
    **dict.fromkeys(("offload=disk", "offload=nvme", "nvme-offload", "nvme"), ("--disk-offload",)),
    **dict.fromkeys(("offload", "offload-device"), ("--cpu-offload or --disk-offload",)),
    **dict.fromkeys(("nvme-path", "offload-folder", "disk-offload-dir", "swap-dir"), ("--offload-dir DIR",)),
    **dict.fromkeys(("nkvo", "kv-cache-offload", "offload-kv"), ("--kv-offload",)),
    **dict.fromkeys(
        ("ctk", "ctv", "cache-type-k", "cache-type-v", "kv-cache-dtype"),
        ("--kv-offload, which keeps keys and values in host memory; they have the dtype of --dtype",),
    ),
    **dict.fromkeys(
        ("q", "quantization", "quantize", "quant", "bits", "wbits", "w-bits", "awq", "gptq"), ("--quant-bits 8 or 4",)
    ),
    **dict.fromkeys(("load-in-4bit", "load-in-4-bit", "int4"), ("--quant-bits 4",)),
    **dict.fromkeys(("load-in-8bit", "load-in-8-bit", "int8"), ("--quant-bits 8",)),
    **dict.fromkeys(("fp16", "half", "float16"), ("--dtype float16",)),
    **dict.fromkeys(("bf16", "bfloat16"), ("--dtype bfloat16",)),
    **dict.fromkeys(("random-weights", "load-format"), ("--dummy",)),
    "enforce-eager": ("--decode-graph off",),
    "device-map": ("--engine accelerate", "--engine"),
    **dict.fromkeys(("deepspeed", "zero-stage", "zero"), ("--engine deepspeed, which is ZeRO-3",)),
    **dict.fromkeys(("mlock", "no-mmap"), ("--pin-memory 1, which page-locks weights in host memory",)),
    **dict.fromkeys(
        ("r", "iterations", "repetitions", "repeat", "num-iters", "iters", "num-runs"), ("--loops N", "--rounds N")
    ),
    **dict.fromkeys(("o", "output", "output-file", "output-json", "save-result"), ("--log-file FILE", "--plot FILE")),
    **dict.fromkeys(("v", "debug"), ("--verbose 2",)),
    **dict.fromkeys(("quiet", "silent"), ("--verbose 0",)),
    **dict.fromkeys(("tasks", "task", "eval"), ("--quality TASKS",)),
    "limit": ("--quality-limit N",),
    **dict.fromkeys(("gpu", "hardware"), ("--machine NAME",)),
    **dict.fromkeys(("d", "max-gpu-mem", "gpu-mem", "vram"), ("--gpu-memory GIB", "--max-gpu-memory GIB")),
}
# Options of other tools that no command has: what to say, instead of suggesting an option with a similar name.
NOT_DONE: dict[str, str] = {
    **dict.fromkeys(
        ("num-beams", "do-sample", "temp", "temperature", "top-k", "top-p", "min-p", "repetition-penalty"),
        "runs decode greedily; from Python `load` gives a model whose `generate` samples",
    ),
    **dict.fromkeys(("device", "dev", "main-gpu", "mg"), "CUDA_VISIBLE_DEVICES says which GPUs are used"),
    **dict.fromkeys(("hf-token", "token"), "HF_TOKEN in the environment has it"),
    **dict.fromkeys(
        ("tp", "tensor-parallel-size", "gpus", "n-gpus", "num-gpus"),
        "a launcher gives it GPUs: deepspeed --num_gpus N run_model.py ...",
    ),
    **dict.fromkeys(("pp", "pipeline-parallel-size"), "each GPU has a part of every layer"),
    **dict.fromkeys(("draft-model", "model-draft", "md"), "there is no speculative decoding"),
    **dict.fromkeys(("host-memory", "max-cpu-memory", "cpu-memory"), "weights may take all host memory that is free"),
    **dict.fromkeys(("ub", "ubatch-size", "chunked-prefill"), "a prompt is computed in one pass"),
    **dict.fromkeys(("fa", "flash-attn", "attn-implementation"), "attention is PyTorch's scaled_dot_product_attention"),
    "revision": "the newest commit is fetched; for another one give a local folder",
}
OTHER_COMMANDS = dict.fromkeys(("generate", "infer", "bench", "benchmark", "chat", "eval", "measure"), "run") | {
    "search": "plan",
    "estimate": "plan",
    "bandwidth": "link",
}
_STORED = {8: ("int8", "uint8", "8bit", "8-bit"), 4: ("int4", "uint4", "nf4", "fp4", "4bit", "4-bit")}


def dtype_name(said: Any) -> str:
    """auto, float16, bfloat16 or float32 for one of its spellings, such as fp16, half or torch.float16 (the text or the type itself).

    Raises:
        UsageError: it is none of them; one that stands for quantized weights is told about --quant-bits.
    """
    name = str(said).strip().lower().removeprefix("torch.")
    if name in _DTYPES:
        return _DTYPES[name]
    for bits, names in _STORED.items():
        if name in names:
            raise UsageError(
                f"--dtype {said}: this is the type that products are computed in. To store weights in {bits} bits, "
                f"use --quant-bits {bits}."
            )
    if name.startswith(("fp8", "float8", "e4m3", "e5m2")):
        raise UsageError(
            f"--dtype {said}: products are computed in float16, bfloat16 or float32. A checkpoint in fp8 is read as it is; "
            "to store weights in 8 bits, use --quant-bits 8."
        )
    raise UsageError(not_among("--dtype", said, DTYPES))


def bits_of(said: Any, allowed: tuple[Any, ...] = (*QUANT_BITS, AUTO)) -> Any:
    """One of `allowed` (16, 8, 4, auto) for one of its spellings, such as int4, 4bit or fp16.

    Raises:
        UsageError: it is none of them.
    """
    name = str(said).strip().lower()
    bits = AUTO if name == AUTO else _BITS.get(name)
    if bits not in allowed:
        raise UsageError(not_among("--quant-bits", said, allowed))
    return bits


def other_option(name: str, value: str, known: Iterable[str]) -> str | None:
    """Return what to do in place of an option that another tool has, in words for the end of a sentence; None for an unknown name.

    Args:
        name: without the dashes in front.
        value: what it was given, or "".
        known: the options that the command has.
    """
    known = set(known)
    for spelling in (f"{name}={value.lower()}", name):
        for advice in OTHER_OPTIONS.get(spelling, ()):
            if advice.partition(" ")[0].rstrip(",") in known:
                return f"use {advice}"
    return NOT_DONE.get(name)


def not_among(option: str, said: Any, allowed: tuple[Any, ...]) -> str:
    """The sentence for a value that is none of those allowed."""
    names = [str(each) for each in allowed if each is not None]
    near = did_you_mean(str(said), names)
    if near and len(names) > MOST_LISTED:
        return f"{option} {said}: {near}"
    return f"{option} {said}: choose one of {', '.join(names)}" + (f"; {near}" if near else ".")


SIZE = "SIZE"  # metavar of a size in memory
SIZES = "a plain number is in GiB; 10GiB and 10G are 10 x 2^30 bytes, 10GB is 10 x 10^9"


def default(name: str) -> str:
    """The end of a help text."""
    return f"(default: {DEFAULTS[name]})"


def names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError("names nothing")
    return found


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in names(text))
    except ValueError:
        raise argparse.ArgumentTypeError("not a list of whole numbers with commas between them") from None


def number_or_auto(text: str) -> int | str:
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError("not a whole number or auto") from None


def size(text: str) -> float:
    """GiB."""
    try:
        return parse_gib(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> Any:
    return _in_own_words(dtype_name, text)


def bits_or_auto(text: str) -> Any:
    return _in_own_words(bits_of, text)


def bits(text: str) -> Any:
    return _in_own_words(lambda said: bits_of(said, QUANT_BITS), text)


def _in_own_words(read: Callable[[Any], Any], text: str) -> Any:
    """Its errors begin with the option's name, and the parser leaves them so."""
    try:
        return read(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
