"""Reading what a module computes, where that is the experts of a mixture: found by trying it, not listed by family.

transformers keeps the weights of all experts of a layer in two fused parameters, in a module that is called with hidden states and
what the router chose. A small copy of such a module is called with random weights, and its result compared with what the cores
would compute of them. Interleaved, transposed, biased or clamped experts come out as something else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_inference.models.feed_forward import ACTIVATIONS
from zero_inference.models.layers import remembered

AGREE = 1e-5  # relative: formulas of one activation differ by less, two activations by 1e-3 or more
# Of inputs: near 1 the activations differ most, and a bound that a family sets to what they may reach shows far from it.
SCALES = (1.0, 300.0)
# What each row of the small copy's input chooses; some experts are chosen by all, and some by none.
NUMBERS = ((0, 3), (3, 1), (3, 0), (1, 3), (3, 4))
SMALL_EXPERTS, SMALL_INNER, SMALL_HIDDEN = 6, 8, 24
# Attributes of routers and fields of configs that say how many experts a token chooses.
CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class FusedExperts:
    """Experts of the form `last(f(gate(x)) * up(x))`, or `last(f(first(x)))`, in fused parameters.

    Attributes:
        first: name of the parameter [number, 2 x inner or inner, hidden]: of each expert the rows of gate and then those of up, or
            those of one product.
        last: name of the parameter [number, hidden, inner].
        activation: f, a key of `ACTIVATIONS`.
        number: of experts.
        gated: whether there are gate and up.
        gate_is_second: up's rows come first.
        chosen: how many a token chooses; `number` where nothing says it.
    """

    first: str
    last: str
    activation: str
    number: int
    gated: bool
    gate_is_second: bool = False
    chosen: int = 0

    def share_read(self, tokens: int) -> float:
        """Of the experts, what a pass of `tokens` tokens is expected to read if each chooses uniformly and for itself."""
        return 1 - (1 - self.chosen / self.number) ** tokens


@remembered
def read_experts(module: nn.Module) -> FusedExperts | None:
    """What `module`, which may be on the meta device, computes; None where it is something else. `chosen` is not known yet."""
    named = list(module.named_parameters())
    if len(named) != 2 or any(parameter.dim() != 3 or "." in name for name, parameter in named):
        return None
    for (first, of_first), (last, of_last) in (named, named[::-1]):
        number, hidden, inner = of_last.shape
        for gated in (True, False):
            if tuple(of_first.shape) == (number, (1 + gated) * inner, hidden):
                try:
                    return _tried(module, first, last, gated)
                except Exception:  # it runs the module's own code, which may do with its input whatever it likes
                    return None
    return None


def chosen_of(module: nn.Module, config: Any, number: int) -> int:
    """How many of `number` experts a token chooses: as the mixture `module` or its router says, or else the model's config."""
    for source in (module, *module.children(), config):
        for name in CHOSEN:
            value = getattr(source, name, None)
            if type(value) is int and 1 <= value <= number:
                return value
    return number


def _tried(module: nn.Module, first: str, last: str, gated: bool) -> FusedExperts | None:
    forward = inspect.unwrap(type(module).forward)  # what the class says, without the kernels that may stand in for it
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = _small_copy(module, first, last, gated)
        numbers = torch.tensor(NUMBERS)
        weights = torch.rand(numbers.shape, dtype=torch.float64)
        inputs = [scale * torch.randn(len(NUMBERS), small[1].shape[1], dtype=torch.float64) for scale in SCALES]
        found = [forward(small[0], x, numbers, weights) for x in inputs]
        for activation in ACTIVATIONS:
            for gate_is_second in (False, True)[: 1 + gated]:
                experts = FusedExperts(first, last, activation, getattr(module, last).shape[0], gated, gate_is_second)
                computed = [_computed(experts, small[0], x, numbers, weights) for x in inputs]
                if all(_agree(one, other) for one, other in zip(found, computed)):
                    return experts
    return None


def _small_copy(module: nn.Module, first: str, last: str, gated: bool) -> tuple[nn.Module, torch.Tensor]:
    """A copy of `module` with few and small experts, with random weights in float64, and those of `last`.

    Its whole numbers that are a dimension of the weights become the small one; dimensions that are equal stay so.
    """
    number, hidden, inner = getattr(module, last).shape
    small_hidden = {inner: SMALL_INNER, 2 * inner: 2 * SMALL_INNER}.get(hidden, SMALL_HIDDEN)
    sizes = {number: SMALL_EXPERTS, 2 * inner: 2 * SMALL_INNER, inner: SMALL_INNER, hidden: small_hidden}
    weights = {
        first: torch.randn(sizes[number], (1 + gated) * SMALL_INNER, small_hidden, dtype=torch.float64),
        last: torch.randn(sizes[number], small_hidden, SMALL_INNER, dtype=torch.float64),
    }
    small = copy.copy(module)
    for name, value in list(vars(small).items()):
        if type(value) is int:
            vars(small)[name] = sizes.get(value, value)
    vars(small)["_parameters"] = {
        name: nn.Parameter(weights[name] / weights[name].shape[-1] ** 0.5, requires_grad=False)
        for name in module._parameters
        if name in weights
    }
    return small, getattr(small, last)


def _computed(
    experts: FusedExperts, module: nn.Module, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What the cores compute of `x` [rows, hidden] with the weights of `module`."""
    out = torch.zeros_like(x)
    for row, place, number in _pairs(numbers):
        hidden = getattr(module, experts.first)[number] @ x[row]
        gate, up = hidden, torch.ones_like(hidden)
        if experts.gated:
            gate, up = hidden.chunk(2)[:: -1 if experts.gate_is_second else 1]
        hidden = ACTIVATIONS[experts.activation](gate) * up
        out[row] += weights[row, place] * (getattr(module, experts.last)[number] @ hidden)
    return out


def _pairs(numbers: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    for row, chosen in enumerate(numbers.tolist()):
        for place, number in enumerate(chosen):
            yield row, place, number


def _agree(one: Any, other: torch.Tensor) -> bool:
    return (
        torch.is_tensor(one) and one.shape == other.shape and float((one - other).norm()) <= AGREE * float(other.norm())
    )
