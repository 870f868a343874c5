"""Routers of mixtures: one kernel chooses experts by the logits, where a trial gives the same.

A router of transformers returns its logits, the weights of the chosen experts and their numbers. Before loading, a copy of each router
with random weights is compared with the kernel; families are not listed. The product that makes the logits stays PyTorch's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_inference.kernels.extension import operators_of
from zero_inference.models.experts import chosen_of

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRIAL_TOKENS = 128
WIDE = 300.0  # times their hidden states: softmax over all experts makes zeros of most
ROUNDINGS = {torch.float32: 8}  # of weights, as sums of another order differ by; one of other dtypes

LIBRARY = operators_of(__name__)
LIBRARY.define(
    "choose_experts(Tensor logits, int k, bool softmax_first, bool normalized, bool in_float32) -> (Tensor, Tensor)"
)


def choose_experts_reference(
    logits: Tensor, k: int, softmax_first: bool, normalized: bool, in_float32: bool
) -> tuple[Tensor, Tensor]:
    """Return weights and numbers, both [tokens, k], of the experts that each token chooses by `logits` [tokens, experts].

    Args:
        softmax_first: over all experts; else over the chosen ones.
        normalized: with that, divide the weights by their sum.
        in_float32: return weights in float32; else in the dtype of the logits.
    """
    scores = logits.float()
    if softmax_first:
        weights, numbers = scores.softmax(-1).topk(k, -1)
        weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
    else:
        weights, numbers = scores.topk(k, -1)
        weights = weights.softmax(-1)
    return weights if in_float32 else weights.to(logits.dtype), numbers


LIBRARY.impl("choose_experts", choose_experts_reference, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class Routing:
    """Arguments of the kernel that make it compute what a router does.

    Attributes:
        dtype: of hidden states and the router's weight.
        logits_dtype: of the logits that it returns.
    """

    k: int
    softmax_first: bool
    normalized: bool
    in_float32: bool
    dtype: torch.dtype
    logits_dtype: torch.dtype

    def of(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the router does: logits, weights and numbers."""
        choice = (self.k, self.softmax_first, self.normalized, self.in_float32)
        return logits.to(self.logits_dtype), *torch.ops.zero_inference.choose_experts(logits, *choice)


def find_routers(model: nn.Module, device: torch.device) -> dict[str, Routing]:
    """Return the routers of `model`, which may be on the meta device, that compute what the kernel does on `device`; by name."""
    known: dict[Any, Routing | None] = {}  # layers of a kind are alike
    found = {}
    for name, module in model.named_modules():
        if _may_route(module):
            own = tuple(
                sorted((key, value) for key, value in vars(module).items() if type(value) in (int, float, bool))
            )
            shapes = tuple((key, tuple(p.shape), p.dtype) for key, p in module.named_parameters())
            key = type(module), own, shapes
            if key not in known:
                known[key] = _tried(module, device)
            if (routing := known[key]) is not None:
                found[name] = routing
    return found


def use_routing_kernel(model: nn.Module, found: dict[str, Routing]) -> None:
    """Let the routers `found` of a loaded model use the kernel; a router whose `forward` something else replaced stays as it is."""
    for name, routing in found.items():
        module = model.get_submodule(name)
        if "forward" not in vars(module):
            module.forward = MethodType(_forward_of(routing), module)


def _forward_of(routing: Routing) -> Any:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        weight = self.weight
        alike = hidden_states.dtype == weight.dtype == routing.dtype and hidden_states.device == weight.device
        wanted = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        if args or options or hidden_states.dim() != 2 or not alike or wanted:
            return type(self).forward(self, hidden_states, *args, **options)
        return routing.of(_logits(self, hidden_states))

    return forward


def _logits(router: Any, hidden_states: Tensor) -> Tensor:
    return functional.linear(hidden_states, router.weight, getattr(router, "bias", None))


def _may_route(module: nn.Module) -> bool:
    """Return whether `module` holds a matrix [experts, hidden], perhaps a bias, and a number of experts to choose."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    return (
        not type(module).__module__.startswith("torch.")
        and not isinstance(module, nn.Linear)  # the cores may multiply such a one, or an adapter wrap it
        and weight is not None
        and own.keys() <= {"weight", "bias"}
        and weight.dim() == 2
        and weight.dtype in DTYPES
        and weight.shape[0] <= MOST_EXPERTS
        and chosen_of(module, None, weight.shape[0]) <= min(MOST_CHOSEN, weight.shape[0] - 1)
    )


@torch.no_grad()
def _tried(module: nn.Module, device: torch.device) -> Routing | None:
    """Return what `module` computes: of the forms that choose the same experts the one whose weights differ least, if only by roundings."""
    router, draw = copy.copy(module), torch.Generator().manual_seed(0)
    vars(router)["_parameters"] = {
        name: nn.Parameter(
            torch.randn(p.shape, generator=draw).mul_(2 * p.shape[-1] ** -0.5).to(device, p.dtype), False
        )
        for name, p in module.named_parameters()
    }
    dtype, (experts, hidden) = router.weight.dtype, router.weight.shape
    k = chosen_of(module, None, experts)
    x = torch.randn(TRIAL_TOKENS, hidden, generator=draw).to(device, dtype)
    differing: dict[Routing, float] = {}
    try:
        (logits, own), (wide_logits, own_wide) = (
            (_logits(router, each), type(module).forward(router, each)) for each in (x, WIDE * x)
        )
        own_logits, own_weights, own_numbers = own
        if own_numbers.dtype != torch.int64 or not torch.equal(logits.to(own_logits.dtype), own_logits):
            return None
        rows, wide_rows = _without_equals(logits, k), _without_equals(wide_logits, k)
        in_float32 = own_weights.dtype == torch.float32
        for softmax_first, normalized in ((False, False), (True, True), (True, False)):
            routing = Routing(k, softmax_first, normalized, in_float32, dtype, own_logits.dtype)
            _, weights, numbers = routing.of(logits)
            same = weights.dtype == own_weights.dtype and torch.equal(numbers[rows], own_numbers[rows])
            if not softmax_first:  # which ranks experts whose softmax over all is 0
                same = same and torch.equal(routing.of(wide_logits)[2][wide_rows], own_wide[2][wide_rows])
            if same:
                of_rows, own_of_rows = weights[rows].double(), own_weights[rows].double()
                differing[routing] = float(((of_rows - own_of_rows) / own_of_rows).abs().max())
    except Exception:  # it runs the module's own code, which may do with its input whatever it likes
        return None
    best = min(differing, key=differing.__getitem__, default=None)
    allowed = ROUNDINGS.get(own_weights.dtype, 1) * torch.finfo(own_weights.dtype).eps
    return best if best is not None and differing[best] <= allowed else None


def _without_equals(logits: Tensor, k: int) -> Tensor:
    """Return the rows whose largest logits are all different: equal ones may come in any order. At least one in 16 is such."""
    rows = (logits.topk(k + 1, -1).values.diff(dim=-1) != 0).all(-1).nonzero().view(-1)
    if 16 * rows.numel() < logits.shape[0]:
        raise ValueError("too many equal logits")
    return rows
