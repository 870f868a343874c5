"""Recognize the MLP of a decoder layer by calling it, not by a list of families."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_inference.models.layers import cache_per_module
from zero_inference.utils.patching import Patches

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "identity": lambda x: x,
}
ROWS, COLUMNS = "rows", "columns"  # how a linear module stores its weight: [out, in] or [in, out]
TOLERANCE = 1e-5  # relative: formulas of one activation differ by less, two activations by 1e-3 or more
# Of trial inputs: near 1 activations differ most; a limit of values shows only with large ones, a branch on the sign with both.
SCALES = (1.0, -1.0, 300.0)


@dataclass(frozen=True)
class Mlp:
    """`last(f(first(x)))`, or gated: `last(f(gate(x)) * up(x))`. Names are of linear modules, relative to the module.

    Attributes:
        first: one name; or, gated, those of gate and up. The same name twice is one linear with the rows of gate, then those of up.
        activation: f, a key of `ACTIVATIONS`.
        gate_is_second: in one linear for both, up's rows come first.
    """

    first: tuple[str, ...]
    activation: str
    last: str
    gate_is_second: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.first, self.last)))


@cache_per_module
def detect_mlp(module: nn.Module) -> Mlp | None:
    """Return the form of `module`, which may be on the meta device; None if it is no MLP.

    Its linear modules return random numbers meanwhile; the input of the last one shows what is computed between them.
    """
    linears = {name: part for name, part in module.named_modules() if weight_layout(part) is not None}
    others = {id(p) for p in module.parameters()} - {id(p) for part in linears.values() for p in part.parameters()}
    if len(linears) not in (2, 3) or others or len(inspect.signature(module.forward).parameters) != 1:
        return None
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            trials = [_call_with_products(module, linears, scale) for scale in SCALES]
    except Exception:  # it runs the module's code
        return None
    if None in trials:
        return None
    *first, last = trials[0][0]
    pairs = (first, first[::-1]) if len(first) == 2 else ()
    forms = [Mlp(tuple(pair), name, last) for pair in pairs or (first,) for name in ACTIVATIONS]
    if not pairs:
        forms += [Mlp((*first, *first), name, last, second) for second in (False, True) for name in ACTIVATIONS]
    return next((form for form in forms if all(_explains(form, *trial) for trial in trials)), None)


def _call_with_products(
    module: nn.Module, linears: dict[str, nn.Module], scale: float
) -> tuple[dict[str, Tensor], Tensor] | None:
    """Call `module` while its linear modules return random numbers.

    Returns:
        these numbers in the order of the calls, and the input of the last one; None if it calls one twice, gives one but the last another
        input than its own, or returns anything but the output of the last one.
    """
    products: dict[str, Tensor] = {}
    calls: list[tuple[str, Tensor]] = []

    def forward_of(name: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            calls.append((name, x))
            return products[name].clone()

        return forward

    with Patches() as patches:
        for name, linear in linears.items():
            width = linear.weight.shape[0 if weight_layout(linear) == ROWS else 1]
            products[name] = scale * torch.randn(1, 3, width, dtype=torch.float64)
            patches.set_attr(linear, "forward", forward_of(name))
        x = torch.randn(1, 3, products[[*linears][-1]].shape[-1], dtype=torch.float64)
        out = module(x)
    names = [name for name, _ in calls]
    is_chain = (
        sorted(names) == sorted(linears)
        and all(torch.equal(given, x) for _, given in calls[:-1])
        and torch.equal(out, products[names[-1]])
    )
    return ({name: products[name] for name in names}, calls[-1][1]) if is_chain else None


def _explains(form: Mlp, products: dict[str, Tensor], inner: Tensor) -> bool:
    """Return whether `inner` is the input of the last linear module if the outputs of the others are `products`."""
    first = [products[name] for name in form.first]
    if len(set(form.first)) < len(form.first):
        first = list(first[0].chunk(2, -1))[:: -1 if form.gate_is_second else 1]
    expected = ACTIVATIONS[form.activation](first[0])
    return is_close(inner, expected * first[1] if len(first) == 2 else expected)


def is_close(one: Any, other: Tensor) -> bool:
    return (
        torch.is_tensor(one)
        and one.shape == other.shape
        and float((one - other).norm()) <= TOLERANCE * float(other.norm())
    )


def weight_layout(module: nn.Module) -> str | None:
    """Return how a linear module stores its weight: `ROWS` as `nn.Linear`, `COLUMNS` as transformers' Conv1D; None for other modules."""
    from transformers.pytorch_utils import Conv1D

    if (
        type(module) is nn.Linear or type(module).__name__ == "FalconLinear"
    ):  # which only multiplies before it adds the bias
        return ROWS
    return COLUMNS if type(module) is Conv1D else None
