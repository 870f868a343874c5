"""Options and commands of llama.cpp, vLLM, transformers, DeepSpeed and accelerate, and what to type here instead."""

from __future__ import annotations

from collections.abc import Iterable

# Their option without the dashes -> what to type here; of several the first that the command has. `option=value` where the value decides.
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
# Options that no command has: the answer, instead of an option with a similar name.
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


def other_option(name: str, value: str, known: Iterable[str]) -> str | None:
    """Return what to type instead of an option of another tool, as the end of a sentence; None for an unknown name.

    Args:
        name: without the dashes.
        value: its value, or "".
        known: the options of the command, with their dashes.
    """
    known = set(known)
    for spelling in (f"{name}={value.lower()}", name):
        for advice in OTHER_OPTIONS.get(spelling, ()):
            if advice.partition(" ")[0].rstrip(",") in known:
                return f"use {advice}"
    return NOT_DONE.get(name)
