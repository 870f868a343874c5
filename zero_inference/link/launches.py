"""What the host takes for a step of generation, whatever the model computes: found in models so small that nothing else counts."""

from __future__ import annotations

from typing import Any

import torch

from zero_inference.link.description import Launches
from zero_inference.link.in_graph import InGraph
from zero_inference.link.small_models import seconds_of, small_llama, small_opt
from zero_inference.models.greedy import greedy
from zero_inference.models.operators import trace_without_weights
from zero_inference.runtime.garbage import short_collections

LAYERS = 1, 16  # of two models of a kind: what these differ by are operators and modules
TOKENS = 16
ROUNDS = {"cuda": 2, "cpu": 3}  # of a visit


class Launching:
    """Small Llamas and OPTs of two sizes, of which a step takes `step_s`, `operator_s` for each operator and `module_s` for each call of a
    module: in a Llama's layer three of the one come with one of the other, in OPT's about as many.

    They take turns, and the fastest round of each counts: a host that others use may be half as fast for a second, and for a minute, so
    they are visited more than once. Measured one behind the other, they gave 3.7 ms a step on an H200's host, and a run took less than one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.models = [_Steps(make(layers), device) for make in (small_llama, small_opt) for layers in LAYERS]
        self.in_graph = InGraph.measured(device) if device.type == "cuda" else None

    @short_collections()
    def visit(self) -> None:
        """A second or two."""
        for _ in range(ROUNDS[self.device.type]):
            for model in self.models:
                model.measure()

    def found(self) -> Launches:
        """By all visits."""
        llama, more_llama, opt, more_opt = self.models
        operator_s, module_s = two_costs(more_llama.more_than(llama), more_opt.more_than(opt))
        return Launches(
            operator_s=operator_s,
            module_s=module_s,
            step_s=max(0.0, llama.step_s - llama.operators * operator_s - llama.module_calls * module_s),
            graph_operator_s=None if self.in_graph is None else self.in_graph.operator_s,
            attention_gb_per_s=None if self.in_graph is None else self.in_graph.attention_gb_per_s,
        )


def two_costs(one: tuple[int, int, float], other: tuple[int, int, float]) -> tuple[float, float]:
    """What an operator and a call of a module take, from numbers of both and seconds in `one` kind of model and in `other`; all of it is
    of operators where the two would not explain it."""
    operators, calls, seconds = one
    determinant = operators * other[1] - other[0] * calls
    if determinant:
        found = (
            (seconds * other[1] - other[2] * calls) / determinant,
            (operators * other[2] - other[0] * seconds) / determinant,
        )
        if min(found) >= 0:
            return found
    return max(0.0, seconds) / operators, 0.0


class _Steps:
    """Decode steps of a small model.

    Attributes:
        operators, module_calls: of a step.
        times_s: of generations, the fastest of each number of tokens.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device = device
        counted = trace_without_weights(model.eval(), 1, TOKENS)
        assert counted is not None, "such models run on the meta device"
        self.operators, self.module_calls = counted.launches, counted.module_calls
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
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

    def more_than(self, other: _Steps) -> tuple[int, int, float]:
        """Operators, calls of modules and seconds of a step that `other` has not."""
        return self.operators - other.operators, self.module_calls - other.module_calls, self.step_s - other.step_s

    def _generation_s(self, tokens: int) -> float:
        return seconds_of(
            self.device,
            lambda: self.model.generate(
                self.ids, generation_config=greedy(tokens), attention_mask=torch.ones_like(self.ids)
            ),
        )
