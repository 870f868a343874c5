"""The cases of beyond_link.py: what is run, and how long that takes on an H200 with 16 cores and a link of 55 GB/s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COMMON = "--dummy --dtype bfloat16 --prompt-len 128 --gen-len 32 --loops 3 --warmup 1"
START_S = 15  # imports, the CUDA context and the measurement of the link


@dataclass(frozen=True)
class Case:
    """A run, with what it is estimated by.

    Attributes:
        options: for run_model.py after COMMON, the later ones hold; for benchmarks/peers/llama_cpp.py where `peer`.
        load_s: seconds until the weights are where they belong.
        step_s: seconds of a decode step over the link alone; a loop of 32 tokens is about 32 of them.
        steps: of all loops, the warm-up included.
    """

    options: str
    load_s: float
    step_s: float
    steps: int = 4 * 32
    peer: bool = False

    @property
    def estimate_s(self) -> float:
        return START_S + self.load_s + self.steps * self.step_s


def with_and_without(name: str, options: str, load_s: float, step_s: float, **more: Any) -> dict[str, Case]:
    """A case with the link alone, and one where the engine chooses what the cores multiply."""
    return {
        f"{name}-{compute}": Case(f"--engine stream {options} --cpu-compute {compute}", load_s, step_s, **more)
        for compute in ("off", "auto")
    }


def with_and_without_graph(name: str, options: str, load_s: float, step_s: float) -> dict[str, Case]:
    """A case as it is by default, and one whose decode steps are launched kernel by kernel."""
    run = f"--engine stream {options}"
    return {
        name: Case(run, load_s, step_s),
        f"{name}-launched": Case(f"{run} --decode-graph off", load_s, step_s),
    }


def all_cases() -> dict[str, Case]:
    """By name, in the order in which they are run: the shorter and more telling ones first."""
    thirteen, seventy = "--model llama-2-13b", "--model llama-3.1-70b --gpu-memory 20 --quant-bits 4"
    # a step of 405B takes 1.9 s; what the engine tries ends with the 24th
    short = "--gen-len 26 --loops 1"
    large = f"--model llama-3.1-405b --quant-bits 4 {short}"
    kv = "--kv-offload --pin-kv-cache --async-kv-offload --batch-size 64 --prompt-len 512"
    cases = {}
    for batch in (1, 8, 32):
        options = f"{thirteen} --gpu-memory 0 --quant-bits 4 --batch-size {batch}"
        cases |= with_and_without(f"llama13b-int4-bs{batch}", options, 2, 0.13)
    cases |= with_and_without("llama13b-int8-bs1", f"{thirteen} --gpu-memory 0 --quant-bits 8", 2, 0.24)
    for threads in (1, 2):  # a machine whose cores hardly help is not to be slower than without them
        options = f"--engine stream {thirteen} --gpu-memory 0 --quant-bits 4 --cpu-threads {threads}"
        cases[f"llama13b-int4-bs1-auto-{threads}core{'s' * (threads > 1)}"] = Case(options, 2, 0.13)
    options = f"{thirteen} --quant-bits 4"
    cases |= with_and_without("llama13b-int4-half", f"{options} --gpu-memory 3.4", 2, 0.07)
    cases |= with_and_without_graph("llama13b-int4-resident", f"{options} --gpu-memory 16", 4, 0.02)
    for name, model in (
        ("llama13b", "llama-2-13b"),
        ("llama8b", "llama-3.1-8b"),
    ):  # long prompts, keys of one head and of four
        long = f"--engine stream --model {model} --quant-bits 4 --gpu-memory 16 --batch-size 8 --prompt-len 2048"
        cases[f"{name}-int4-resident-2k"] = Case(long, 4, 0.1)
    cases["llamacpp-llama13b"] = Case("--model llama-2-13b", 120, 0.3, 3 * 32, peer=True)  # the first one is built
    cases["deepspeed13b-int4"] = Case(f"--engine deepspeed --cpu-offload {options}", 4, 0.2)
    for batch in (1, 8, 32):
        options = f"{thirteen} --gpu-memory 0 --batch-size {batch}"
        cases |= with_and_without(f"llama13b-bf16-bs{batch}", options, 3, 0.47)
    cases["deepspeed13b-bf16"] = Case(f"--engine deepspeed --cpu-offload {thirteen}", 4, 0.5)
    for name, model, load_s, step_s in (("qwen30b", "qwen3-30b-a3b", 7, 0.31), ("mixtral", "mixtral-8x7b", 6, 0.47)):
        options = f"--model {model} --gpu-memory 0 --quant-bits 4"
        cases |= with_and_without(f"{name}-int4", options, load_s, step_s)
        some = f"--model {model} --gpu-memory 6 --quant-bits 4"  # attention, and some of the experts
        cases |= with_and_without_graph(f"{name}-int4-6gib", some, load_s, step_s)
        cases[f"llamacpp-{name}"] = Case(f"--model {model}", 60, 0.3, 3 * 32, peer=True)
    for batch in (1, 8):
        cases |= with_and_without(f"llama70b-int4-20gib-bs{batch}", f"{seventy} --batch-size {batch}", 5, 0.4)
    cases["llamacpp-llama70b"] = Case("--model llama-3.1-70b", 120, 1.0, 3 * 32, peer=True)
    kv_options = f"--model opt-13b --dtype float16 --gpu-memory 0 {kv}"
    cases |= with_and_without("opt13b-kv", kv_options, 5, 0.95)
    kv_resident = "--kv-offload --pin-kv-cache --async-kv-offload --batch-size 8 --quant-bits 4 --gpu-memory 15.51"
    cases["opt30b-int4-kv"] = Case(f"--engine stream --model opt-30b {kv_resident}", 2, 0.05)
    for batch in (1, 32):
        options = f"{large} --batch-size {batch}"
        cases |= with_and_without(f"llama405b-int4-bs{batch}", options, 20, 1.9, steps=2 * 26)
    return cases


CASES = all_cases()
