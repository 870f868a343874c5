"""Options and commands of llama.cpp, vLLM, transformers, DeepSpeed and accelerate, and what to type here instead."""

from __future__ import annotations

from collections.abc import Iterable

# Our option -> their options without dashes; `option=value` where the value decides.
_THEIRS = {
    "--gen-len G": "n n-predict max-new-tokens max-tokens output-len",
    "--prompt-len P": "input-len n-prompt",
    "--prompt-len P and --gen-len G, whose sum is the context": "c ctx-size max-length max-model-len seq-len",
    "--prompt TEXT": "p",
    "--prompts FILE": "f file dataset",
    "--model NAME": "m hf-repo model-name-or-path model-path",
    "--gpu-memory GIB with --engine stream": "ngl n-gpu-layers gpu-memory-utilization max-memory vram",
    "--max-gpu-memory GIB": "ngl n-gpu-layers gpu-memory-utilization max-memory vram",
    "--engine stream, whose experts in host memory are multiplied by the CPU": "cpu-moe n-cpu-moe",
    "--cpu-threads N": "t threads num-threads",
    "--batch-size B": "b batch max-num-seqs parallel",
    "--num-gpus N": "tp tensor-parallel-size gpus",
    "--cpu-offload": "offload=cpu cpu-offload-gb swap-space",
    "--disk-offload": "offload=disk offload=nvme nvme",
    "--cpu-offload or --disk-offload": "offload offload-device",
    "--offload-dir DIR": "nvme-path offload-folder",
    "--kv-offload": "nkvo",
    "--quant-bits 8 or 4": "quantization quantize bits wbits",
    "--quant-bits 4": "load-in-4bit",
    "--quant-bits 8": "load-in-8bit",
    "--dtype float16": "fp16 half",
    "--dtype bfloat16": "bf16",
    "--dummy": "load-format",
    "--decode-graph off": "enforce-eager",
    "--engine accelerate": "device-map",
    "--loops N": "r repetitions num-iters",
    "--rounds N": "r repetitions num-iters",
    "--log-file FILE": "o output output-file output-json",
    "--verbose 2": "v debug",
    "--quality TASKS": "tasks",
    "--quality-limit N": "limit",
    "--machine NAME": "gpu hardware",
}
# Their option without dashes -> what to type here; of several the first that the command has.
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {}
for _advice, _names in _THEIRS.items():
    for _name in _names.split():
        OTHER_OPTIONS[_name] = (*OTHER_OPTIONS.get(_name, ()), _advice)

_NOT_DONE = {  # the answer -> options that no command has
    "runs decode greedily; from Python `load` gives a model whose `generate` samples": "temperature top-k top-p num-beams",
    "CUDA_VISIBLE_DEVICES says which GPUs are used": "device main-gpu",
    "HF_TOKEN in the environment has it": "hf-token token",
    "a launcher gives it GPUs: deepspeed --num_gpus N run_model.py ...": "tp tensor-parallel-size gpus num-gpus",
    "the newest commit is fetched; for another one give a local folder": "revision",
}
NOT_DONE = {name: answer for answer, names in _NOT_DONE.items() for name in names.split()}
OTHER_COMMANDS = {
    "generate": "run",
    "bench": "run",
    "benchmark": "run",
    "chat": "run",
    "search": "plan",
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
