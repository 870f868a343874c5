"""What the host takes for a step of generation, whatever the model computes: found in models so small that nothing else counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from zero_inference.link.description import Launches
from zero_inference.models.greedy import greedy
from zero_inference.models.operators import launches_of
from zero_inference.runtime.garbage import short_collections

LAYERS = 4, 16  # of the two models: what these differ by are operators
TOKENS = 32
ROUNDS = 5
GRAPH_KERNELS = 500
GRAPH_ELEMENTS = 1 << 12  # 8 KiB, a hidden state


@short_collections()
def measure_launches(device: torch.device) -> Launches:
    """About two seconds. A step of a small Llama takes `step_s` and `operator_s` for each operator; two sizes give both.

    The fastest of the rounds counts: two that followed each other on an H200's host gave 4.2 and 5.3 ms a step, and a run's median step
    is of more seconds than others disturb.
    """
    steps, operators = zip(*(_step_of(layers, device) for layers in LAYERS))
    operator_s = max(0.0, (steps[1] - steps[0]) / (operators[1] - operators[0]))
    step_s = max(0.0, steps[0] - operators[0] * operator_s)
    graph = _graph_operator_s(device) if device.type == "cuda" else None
    return Launches(operator_s=operator_s, step_s=step_s, graph_operator_s=graph)


def _step_of(layers: int, device: torch.device) -> tuple[float, int]:
    """Seconds of a decode step, and the operators that it launches."""
    model = _small_model(layers)
    operators = launches_of(model, 1, TOKENS)
    assert operators is not None, "a Llama runs on the meta device"
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def generate(tokens: int) -> None:
        model.generate(ids, generation_config=greedy(tokens), attention_mask=torch.ones_like(ids))

    few, many = (min(_times_s(device, lambda: generate(tokens), ROUNDS)) for tokens in (2, 2 + TOKENS))
    return (many - few) / TOKENS, operators


def _small_model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_hidden_layers=layers,
            vocab_size=256,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=None,
        )
    ).requires_grad_(False)


def _graph_operator_s(device: torch.device) -> float:
    """Of a chain of sums, each of which waits for the one before it, in a CUDA graph."""
    values = torch.randn(GRAPH_ELEMENTS, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_KERNELS):
            values.add_(1.0)
    return statistics.median(_times_s(device, graph.replay, ROUNDS)) / GRAPH_KERNELS


def _times_s(device: torch.device, action: Callable[[], object], rounds: int) -> list[float]:
    """Of `rounds`, behind one that is not counted."""
    times = []
    for _ in range(1 + rounds):
        _wait_for(device)
        start = time.perf_counter()
        action()
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
