"""Options and commands of llama.cpp, vLLM, transformers, DeepSpeed and accelerate, and what to type here instead."""

from __future__ import annotations

from collections.abc import Iterable

# What to type here -> their options without dashes; `option=value` where the value decides.
_THEIRS = {
    "--gen-len G": "n n-predict predict n-gen max-new-tokens max-tokens output-len",
    "--prompt-len P": "input-len n-prompt prompt-length",
    "--prompt-len P and --gen-len G, whose sum is the context": "c ctx-size max-length max-model-len max-seq-len seq-len",
    "--prompt TEXT": "p",
    "--prompts FILE": "f file prompt-file dataset",
    "--model NAME": "m hf hf-repo model-name-or-path model-name model-path",
    "--gpu-memory GIB with --engine stream": "ngl n-gpu-layers gpu-layers gpu-memory-utilization max-memory vram",
    "--max-gpu-memory GIB": "ngl n-gpu-layers gpu-layers gpu-memory-utilization max-memory vram",
    "--engine stream, whose experts in host memory are multiplied by the CPU": "cmoe cpu-moe ncmoe n-cpu-moe",
    "--cpu-threads N": "t threads num-threads n-threads",
    "--batch-size B": "b bs batch max-num-seqs num-prompts parallel np",
    "--num-gpus N": "tp tensor-parallel-size pp pipeline-parallel-size gpus n-gpus num-devices",
    "--cpu-offload": "offload=cpu offload=host offload-device=cpu cpu-offload-gb swap-space",
    "--disk-offload": "offload=disk offload=nvme offload-device=nvme nvme-offload nvme",
    "--cpu-offload or --disk-offload": "offload offload-device",
    "--offload-dir DIR": "nvme-path offload-folder disk-offload-dir swap-dir",
    "--kv-offload": "nkvo kv-cache-offload offload-kv",
    "--quant-bits 8 or 4": "q quantization quantize quant bits wbits awq gptq",
    "--quant-bits 4": "load-in-4bit int4",
    "--quant-bits 8": "load-in-8bit int8",
    "--dtype float16": "fp16 half float16",
    "--dtype bfloat16": "bf16 bfloat16",
    "--dummy": "random-weights load-format",
    "--decode-graph off": "enforce-eager",
    "--engine accelerate": "device-map",
    "--engine deepspeed, which is ZeRO-3": "deepspeed zero-stage zero",
    "--pin-memory 1": "mlock no-mmap",
    "--loops N": "r iterations repetitions repeat num-iters iters num-runs",
    "--rounds N": "r iterations repetitions repeat num-iters iters num-runs",
    "--log-file FILE": "o output output-file output-json save-result",
    "--plot FILE": "o output output-file",
    "--verbose 2": "v debug",
    "--verbose 0": "quiet silent",
    "--quality TASKS": "tasks task eval",
    "--quality-limit N": "limit",
    "--machine NAME": "gpu hardware",
}
# Their option without dashes -> what to type here; of several the first that the command has.
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {}
for _advice, _names in _THEIRS.items():
    for _name in _names.split():
        OTHER_OPTIONS[_name] = (*OTHER_OPTIONS.get(_name, ()), _advice)

_NOT_DONE = {  # the answer -> options that no command has
    "runs decode greedily; from Python `load` gives a model whose `generate` samples": "num-beams do-sample temp "
    "temperature top-k top-p min-p repetition-penalty",
    "CUDA_VISIBLE_DEVICES says which GPUs are used": "device dev main-gpu mg",
    "HF_TOKEN in the environment has it": "hf-token token",
    "a launcher gives it GPUs: deepspeed --num_gpus N run_model.py ...": "tp tensor-parallel-size gpus n-gpus num-gpus",
    "there is no speculative decoding": "draft-model model-draft md",
    "a prompt is computed in one pass": "ub ubatch-size chunked-prefill",
    "attention is PyTorch's scaled_dot_product_attention": "fa flash-attn attn-implementation",
    "the newest commit is fetched; for another one give a local folder": "revision",
}
NOT_DONE = {name: answer for answer, names in _NOT_DONE.items() for name in names.split()}
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
