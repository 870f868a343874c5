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

LAYERS = 1, 16  # of the two models: what these differ by are operators
TOKENS = 32
ROUNDS = {"cuda": 5, "cpu": 3}  # of a visit
GRAPH_KERNELS = 500
GRAPH_ELEMENTS = 1 << 12  # 8 KiB, a hidden state


class Launching:
    """Two small Llamas, of which a step takes `step_s` and `operator_s` for each operator: two sizes give both.

    They take turns, and the fastest round of each counts: a host that others use may be half as fast for a second, and for a minute, so
    they are visited more than once. Measured one behind the other, they gave 3.7 ms a step on an H200's host, and a run took less than one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.models = [_Steps(layers, device) for layers in LAYERS]
        self.graph_operator_s = _graph_operator_s(device) if device.type == "cuda" else None

    @short_collections()
    def visit(self) -> None:
        """About three seconds."""
        for _ in range(ROUNDS[self.device.type]):
            for model in self.models:
                model.measure()

    def found(self) -> Launches:
        """By all visits."""
        least, most = (model.step_s for model in self.models)
        operator_s = max(0.0, (most - least) / (self.models[1].operators - self.models[0].operators))
        step_s = max(0.0, least - self.models[0].operators * operator_s)
        return Launches(operator_s=operator_s, step_s=step_s, graph_operator_s=self.graph_operator_s)


class _Steps:
    """Decode steps of a small model.

    Attributes:
        operators: that a step launches.
        times_s: of generations, the fastest of each number of tokens.
    """

    def __init__(self, layers: int, device: torch.device):
        self.device = device
        model = _small_model(layers)
        operators = launches_of(model, 1, TOKENS)
        assert operators is not None, "a Llama runs on the meta device"
        self.operators = operators
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
        self.ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
        self._generation_s(2)  # loads kernels
        self.times_s = dict.fromkeys((2, 2 + TOKENS), float("inf"))

    def measure(self) -> None:
        for tokens, fastest_s in self.times_s.items():
            self.times_s[tokens] = min(fastest_s, self._generation_s(tokens))

    @property
    def step_s(self) -> float:
        """What a long generation takes more than a short one, for each token."""
        few_s, many_s = self.times_s.values()
        return (many_s - few_s) / TOKENS

    def _generation_s(self, tokens: int) -> float:
        return seconds_of(
            self.device,
            lambda: self.model.generate(
                self.ids, generation_config=greedy(tokens), attention_mask=torch.ones_like(self.ids)
            ),
        )


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
    return statistics.median(seconds_of(device, graph.replay) for _ in range(8)) / GRAPH_KERNELS


def seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Of one action, until the device has done it."""
    _wait_for(device)
    start = time.perf_counter()
    action()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
