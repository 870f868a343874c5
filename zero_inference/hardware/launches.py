"""What the host takes for a step of generation, whatever the model computes: found in models so small that nothing else counts."""

from __future__ import annotations

import contextlib
import operator
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from zero_inference.hardware.description import Launches
from zero_inference.hardware.device_attention import measure_device_attention
from zero_inference.hardware.in_graph import measure_graph_operator
from zero_inference.hardware.small_models import seconds_of, small_llama, small_opt
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.models.operators import trace_without_weights
from zero_inference.models.prompts import disable_cudnn_attention, greedy_config
from zero_inference.norms.patch import patch_norms
from zero_inference.utils.garbage import freeze_existing_objects

LAYERS = 1, 16  # of two models of a kind: what these differ by are operators and modules
TOKENS = 16
ROUNDS = 3  # of a visit


class Launching:
    """Small Llamas and OPTs of two sizes, of which a step takes `step_s`, `operator_s` for each operator and `module_s` for each call of a
    module: in a Llama's layer three of the one come with one of the other, in OPT's about as many.

    They take turns, and the median round of each counts, as that of a run's steps does: a host that others use may be half as fast for a
    second, and for a minute, so they are visited more than once. Measured one behind the other, they gave 3.7 ms a step on an H200's host,
    and a run took less than one.
    """

    def __init__(self, device: torch.device):
        disable_cudnn_attention()
        self.device = device
        self.models = [_Steps(make(layers), device) for make in (small_llama, small_opt) for layers in LAYERS]
        self.attention = measure_device_attention(device) if device.type == "cuda" else ()
        self.graph_operator_s = measure_graph_operator(device) if device.type == "cuda" else None

    @freeze_existing_objects()
    def visit(self) -> None:
        """A second or two."""
        for _ in range(ROUNDS):
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
            graph_operator_s=self.graph_operator_s,
            attention=self.attention,
        )


def two_costs(one: tuple[int, int, float], other: tuple[int, int, float]) -> tuple[float, float]:
    """What an operator and a call of a module take, from numbers of both and seconds in `one` kind of model and in `other`; where
    one cost would be negative it is zero, and the other is fitted by least squares."""
    operators, calls, seconds = zip(one, other)
    determinant = operators[0] * calls[1] - operators[1] * calls[0]
    if determinant:
        operator_s = (seconds[0] * calls[1] - seconds[1] * calls[0]) / determinant
        module_s = (operators[0] * seconds[1] - operators[1] * seconds[0]) / determinant
        if min(operator_s, module_s) >= 0:
            return operator_s, module_s
        if operator_s < 0:
            return 0.0, _of_each(calls, seconds)
    return _of_each(operators, seconds), 0.0


def _of_each(counts: Sequence[float], seconds: Sequence[float]) -> float:
    return max(0.0, sum(map(operator.mul, counts, seconds)) / sum(count * count for count in counts))


class _Steps:
    """Decode steps of a small model, with our kernels of norms and rotary embedding where a run has them.

    Attributes:
        operators, module_calls: of a step with transformers' own code, as a plan counts them.
        rounds_s: of a step, what a long generation takes more than a short one for each token, in each round.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device = device
        counted = trace_without_weights(model.eval(), 1, TOKENS)
        assert counted is not None, "such models run on the meta device"
        self.operators, self.module_calls = counted.launches, counted.module_calls
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device, self.dtype)
        self.ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
        self.fuses = device.type == "cuda" and load_extension()
        if self.fuses:
            patch_norms(self.model)
        self._generation_s(2)  # loads kernels
        self.rounds_s: list[float] = []

    def measure(self) -> None:
        few_s, many_s = self._generation_s(2), self._generation_s(2 + TOKENS)
        self.rounds_s.append((many_s - few_s) / TOKENS)

    @property
    def step_s(self) -> float:
        return statistics.median(self.rounds_s)

    def more_than(self, other: _Steps) -> tuple[int, int, float]:
        """Operators, calls of modules and seconds of a step that `other` has not."""
        return self.operators - other.operators, self.module_calls - other.module_calls, self.step_s - other.step_s

    def _generation_s(self, tokens: int) -> float:
        with rotary_kernel(self.model, self.device, self.dtype) if self.fuses else contextlib.nullcontext():
            return seconds_of(
                self.device,
                lambda: self.model.generate(
                    self.ids, generation_config=greedy_config(tokens), attention_mask=torch.ones_like(self.ids)
                ),
            )
