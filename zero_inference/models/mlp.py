"""Recognize MLPs, experts and routers of decoder layers by calling them or small copies of them, not by a list of families.

transformers stores the weights of all experts of a layer in two fused parameters, and their biases in two more. A small copy with random
weights is compared with each form that the CPU backend computes. A router returns logits, weights and ids of the chosen experts; one kernel
replaces all but the product that makes the logits.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_inference.kernels.extension import operator_library
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
# Scales of trial inputs: near 1 activations differ most; a limit of values shows only with large ones, a branch on the sign with both.
SCALES = (1.0, -1.0, 300.0)


@dataclass(frozen=True)
class Mlp:
    """`last(f(first(x)))`, or gated: `last(f(gate(x)) * up(x))`. Names are of linear modules, relative to the module."""

    first: tuple[str, ...]  # one; or gate and up; the same name twice is one linear with gate's rows, then up's
    activation: str  # f, a key of `ACTIVATIONS`
    last: str
    gate_is_second: bool = False  # in one linear for both, up's rows come first


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
    except Exception:  # it runs the module's code, and `_call_with_products` raises
        return None
    products, _ = trials[0]
    *first, last = products  # names in the order of the calls
    if len(first) == 2:
        orders = [(tuple(first), False), (tuple(first[::-1]), False)]
    else:
        orders = [(tuple(first), False), ((*first, *first), False), ((*first, *first), True)]
    forms = [Mlp(names, activation, last, second) for names, second in orders for activation in ACTIVATIONS]
    return next((form for form in forms if all(_explains(form, *trial) for trial in trials)), None)


def _call_with_products(
    module: nn.Module, linears: dict[str, nn.Module], scale: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Call `module` while its linear modules return random numbers; return these in the order of the calls, and the last one's input.

    Raises ValueError if it calls one twice, gives one but the last another input than its own, or returns another output than the last.
    """
    products: dict[str, Tensor] = {}
    calls: list[tuple[str, Tensor]] = []

    def forward(name: str, x: Tensor) -> Tensor:
        calls.append((name, x))
        return products[name].clone()

    with Patches() as patches:
        for name, linear in linears.items():
            width = linear.weight.shape[0 if weight_layout(linear) == ROWS else 1]
            products[name] = scale * torch.randn(1, 3, width, dtype=torch.float64)
            patches.set_attr(linear, "forward", partial(forward, name))
        x = torch.randn(1, 3, products[[*linears][-1]].shape[-1], dtype=torch.float64)
        out = module(x)
    names = [name for name, _ in calls]
    same_input = all(torch.equal(given, x) for _, given in calls[:-1])
    if sorted(names) != sorted(linears) or not same_input or not torch.equal(out, products[names[-1]]):
        raise ValueError("no MLP")
    return {name: products[name] for name in names}, calls[-1][1]


def _explains(form: Mlp, products: dict[str, Tensor], inner: Tensor) -> bool:
    """Return whether `inner` is the input of the last linear module if the outputs of the others are `products`."""
    gate, *up = [products[name] for name in form.first]
    if up and len({*form.first}) == 1:  # one linear for both
        gate, *up = gate.chunk(2, -1)[:: -1 if form.gate_is_second else 1]
    expected = ACTIVATIONS[form.activation](gate)
    return _is_close(inner, expected * up[0] if up else expected)


def _is_close(one: Any, other: Tensor) -> bool:
    same_shape = torch.is_tensor(one) and one.shape == other.shape
    return same_shape and float((one - other).norm()) <= TOLERANCE * float(other.norm())


def weight_layout(module: nn.Module) -> str | None:
    """Return how a linear module stores its weight: `ROWS` as `nn.Linear`, `COLUMNS` as transformers' Conv1D; None for other modules."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":  # multiplies, then adds the bias
        return ROWS
    return COLUMNS if type(module) is Conv1D else None


# Experts chosen by each row of the small copy's input; some are chosen by all, some by none.
CHOSEN_EXPERTS = ((0, 3), (3, 1), (3, 0), (1, 3), (3, 4))
# Attributes of routers and fields of configs with the number of experts that a token chooses.
TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class FusedExperts:
    """Experts of the form `down(f(gate(x)) * up(x))`, or `down(f(up(x)))`, in fused parameters. Each product may have a bias.

    With a limit, as gpt-oss has it: `down(f(min(gate(x), limit)) * (clamp(up(x), -limit, limit) + up_offset))`.
    """

    gate_up: str  # name of the parameter [num_experts, rows, hidden]; rows are gate's and then up's, or of one product
    down: str  # name of the parameter [num_experts, hidden, inner]
    activation: str  # f, a key of `ACTIVATIONS`
    num_experts: int
    gated: bool
    gate_is_second: bool = False  # up's rows come first
    top_k: int = 0  # experts of a token; `num_experts` if unknown
    transposed: bool = False  # the model has both parameters as [num_experts, in, out]
    interleaved: bool = False  # rows of gate and up alternate, gate's first
    gate_up_bias: str = ""  # names of the parameters [num_experts, rows]; empty without biases
    down_bias: str = ""
    limit: float = math.inf
    up_offset: float = 0.0

    @property
    def biases(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.gate_up_bias, self.down_bias)))

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.gate_up, self.down, *self.biases

    def weights_in(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{own}" if module else own for own in (self.gate_up, self.down))

    def combined(self, product: Tensor) -> Tensor:
        """Return the input of `down`, [..., inner], from the first product [..., 2 x inner or inner] with its bias."""
        if not self.gated:
            return ACTIVATIONS[self.activation](product)
        gate, up = (product[..., ::2], product[..., 1::2]) if self.interleaved else product.chunk(2, -1)
        if self.gate_is_second:
            gate, up = up, gate
        if self.limit < math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ACTIVATIONS[self.activation](gate) * (up + self.up_offset if self.up_offset else up)

    def share_read(self, tokens: int) -> float:
        """Return the expected share of experts that `tokens` tokens read if each chooses uniformly and independently."""
        return 1 - (1 - self.top_k / self.num_experts) ** tokens


@cache_per_module
def detect_experts(module: nn.Module) -> FusedExperts | None:
    """Return the form of `module`, which may be on the meta device, without `top_k`; None if it is no module of experts."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weights = [name for name, shape in shapes.items() if len(shape) == 3]
    biases = [name for name, shape in shapes.items() if len(shape) == 2] or ["", ""]
    if len(weights) != 2 or len(biases) != 2 or shapes.keys() != {*weights, *filter(None, biases)}:
        return None
    number, *sizes = shapes[weights[1]]
    for transposed, gated in itertools.product((False, True), (True, False)):
        hidden, inner = sizes[::-1] if transposed else sizes
        rows = (1 + gated) * inner
        expected = [(number, hidden, rows) if transposed else (number, rows, hidden), (number, rows), (number, hidden)]
        if any(shapes[name] != shape for name, shape in zip((weights[0], *biases), expected) if name):
            continue
        form = FusedExperts(weights[0], weights[1], "identity", number, gated, transposed=transposed)
        form = replace(form, gate_up_bias=biases[0], down_bias=biases[1])
        try:
            if (found := _match_form(module, form)) is not None:
                return found
        except Exception:  # it runs the module's code
            return None
    return None


def experts_per_token(module: nn.Module, config: Any, number: int) -> int:
    """Return how many of `number` experts a token chooses, by the mixture `module`, its router or the model's config."""
    for source in (module, *module.children(), config):
        for name in TOP_K:
            value = getattr(source, name, None)
            if type(value) is int and 1 <= value <= number:
                return value
    return number


def _match_form(module: nn.Module, form: FusedExperts) -> FusedExperts | None:
    """Return `form` with the activation, order and limits that give the outputs of a small copy of `module`; None if none does."""
    forward = inspect.unwrap(type(module).forward)  # without kernels that may replace it
    last = getattr(module, form.down)
    number, hidden, inner = (last.mT if form.transposed else last).shape
    small_hidden = {inner: 8, 2 * inner: 16}.get(hidden, 24)  # equal sizes stay equal
    sizes = {number: 6, 2 * inner: 16, inner: 8, hidden: small_hidden}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = copy.copy(module)  # each dimension, and each integer attribute equal to one, is replaced by `sizes`
        vars(small).update(
            {name: sizes.get(value, value) for name, value in vars(module).items() if type(value) is int}
        )
        vars(small)["_parameters"] = {}
        for name, p in module._parameters.items():
            values = torch.randn([sizes[size] for size in p.shape], dtype=torch.float64) / sizes[p.shape[-1]] ** 0.5
            small.register_parameter(name, nn.Parameter(values, requires_grad=False))
        expert_ids = torch.tensor(CHOSEN_EXPERTS)
        weights = torch.rand(expert_ids.shape, dtype=torch.float64)
        inputs = [scale * torch.randn(len(CHOSEN_EXPERTS), small_hidden, dtype=torch.float64) for scale in SCALES]
        found = [forward(small, x, expert_ids, weights) for x in inputs]
        orders, limits, offsets = [(False, False)], [math.inf], [0.0]
        if form.gated:
            orders += [(True, False), (False, True)]
            limits += sorted({float(each) for each in vars(module).values() if type(each) in (int, float) and each > 0})
            offsets += [1.0]
        for limit, offset, activation, (second, alternate) in itertools.product(limits, offsets, ACTIVATIONS, orders):
            tried = replace(form, activation=activation, limit=limit, up_offset=offset)
            tried = replace(tried, gate_is_second=second, interleaved=alternate)
            if all(_is_close(y, _compute_experts(tried, small, x, expert_ids, weights)) for y, x in zip(found, inputs)):
                return tried
    return None


def _compute_experts(form: FusedExperts, module: nn.Module, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    first, last = (
        getattr(module, name).mT if form.transposed else getattr(module, name) for name in form.parameters[:2]
    )
    first_bias, last_bias = [getattr(module, name) for name in form.biases] or [x.new_zeros(len(first), 1)] * 2
    products = torch.einsum("tkoi,ti->tko", first[expert_ids], x)
    hidden = form.combined(products + first_bias[expert_ids])
    out = torch.einsum("tkoi,tki->tko", last[expert_ids], hidden) + last_bias[expert_ids]
    return (weights.unsqueeze(-1) * out).sum(1)


MAX_EXPERTS, MAX_CHOSEN = 1024, 32  # limits of the kernel
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRIAL_TOKENS = 128
LARGE = 300.0  # factor of hidden states with which the softmax over all experts is 0 for most
ROUNDINGS = {torch.float32: 8}  # roundings by which weights may differ, for sums in another order; 1 for other dtypes

LIBRARY = operator_library(__name__)
LIBRARY.define(
    "choose_experts(Tensor logits, int k, bool softmax_first, bool normalized, bool in_float32) -> (Tensor, Tensor)"
)


def choose_experts_reference(
    logits: Tensor, k: int, softmax_first: bool, normalized: bool, in_float32: bool
) -> tuple[Tensor, Tensor]:
    """Return weights and ids, both [tokens, k], of the experts that each token is routed to by `logits` [tokens, experts]."""
    scores = logits.float()
    if softmax_first:  # over all experts, then perhaps normalized to a sum of 1; else over the chosen ones
        weights, ids = scores.softmax(-1).topk(k, -1)
        weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
    else:
        weights, ids = scores.topk(k, -1)
        weights = weights.softmax(-1)
    return weights if in_float32 else weights.to(logits.dtype), ids


LIBRARY.impl("choose_experts", choose_experts_reference, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class RouterForm:
    """Arguments with which `choose_experts` computes what a router does; dtypes of its weight and of the logits that it returns."""

    k: int
    softmax_first: bool
    normalized: bool
    in_float32: bool
    dtype: torch.dtype
    logits_dtype: torch.dtype

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a router's output for `logits` [tokens, experts]: logits, weights [tokens, k] and expert ids [tokens, k]."""
        choice = (self.k, self.softmax_first, self.normalized, self.in_float32)
        return logits.to(self.logits_dtype), *torch.ops.zero_inference.choose_experts(logits, *choice)


def detect_routers(model: nn.Module, device: torch.device) -> dict[str, RouterForm]:
    """Return by name the routers of `model` (may be on the meta device) that the `choose_experts` kernel can replace on `device`."""
    matched: dict[Any, RouterForm | None] = {}  # by type, attributes and shapes
    routers = {}
    for name, module in model.named_modules():
        if _may_route(module):
            plain = [(name, value) for name, value in vars(module).items() if type(value) in (int, float, bool)]
            key = type(module), *plain, *((name, p.shape, p.dtype) for name, p in module.named_parameters())
            if key not in matched:
                matched[key] = _match_router(module, device)
            if matched[key] is not None:
                routers[name] = matched[key]
    return routers


def install_routing_kernel(model: nn.Module, routers: dict[str, RouterForm]) -> Patches:
    """Let `routers` of a loaded model use the kernel until the result is closed, except those whose `forward` is replaced."""

    def forward(form: RouterForm, self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        weight = self.weight
        fits = hidden_states.dtype == weight.dtype == form.dtype and hidden_states.device == weight.device
        needs_gradient = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        if args or options or hidden_states.dim() != 2 or not fits or needs_gradient:
            return type(self).forward(self, hidden_states, *args, **options)
        return form.route(_logits(self, hidden_states))

    patches = Patches()
    for name, form in routers.items():
        module = model.get_submodule(name)
        if "forward" not in vars(module):
            patches.set_attr(module, "forward", partial(forward, form, module))
    return patches


def _logits(router: Any, hidden_states: Tensor) -> Tensor:
    return functional.linear(hidden_states, router.weight, getattr(router, "bias", None))


def _may_route(module: nn.Module) -> bool:
    """Return whether `module` holds a matrix [experts, hidden], perhaps a bias, and a number of experts to choose."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        not type(module).__module__.startswith("torch.")
        and not isinstance(module, nn.Linear)  # the CPU may compute such a one, or an adapter wrap it
        and weight is not None
        and parameters.keys() <= {"weight", "bias"}
        and weight.dim() == 2
        and weight.dtype in DTYPES
        and weight.shape[0] <= MAX_EXPERTS
        and experts_per_token(module, None, weight.shape[0]) <= min(MAX_CHOSEN, weight.shape[0] - 1)
    )


@torch.no_grad()
def _match_router(module: nn.Module, device: torch.device) -> RouterForm | None:
    """Return the form that routes random hidden states to the same experts, with the closest weights; None if these differ too much."""
    router, generator = copy.copy(module), torch.Generator().manual_seed(0)
    vars(router)["_parameters"] = {}
    for name, p in module.named_parameters():
        values = torch.randn(p.shape, generator=generator).mul_(2 * p.shape[-1] ** -0.5)
        router.register_parameter(name, nn.Parameter(values.to(device, p.dtype), requires_grad=False))
    dtype, (experts, hidden) = router.weight.dtype, router.weight.shape
    k = experts_per_token(module, None, experts)
    x = torch.randn(TRIAL_TOKENS, hidden, generator=generator).to(device, dtype)
    errors: dict[RouterForm, float] = {}  # largest relative difference of the weights
    try:
        (logits, output), (large_logits, large_output) = (
            (_logits(router, each), type(module).forward(router, each)) for each in (x, LARGE * x)
        )
        expected_logits, expected_weights, expected_ids = output
        if expected_ids.dtype != torch.int64 or not torch.equal(logits.to(expected_logits.dtype), expected_logits):
            return None
        rows, large_rows = _rows_without_ties(logits, k), _rows_without_ties(large_logits, k)
        in_float32 = expected_weights.dtype == torch.float32
        for softmax_first, normalized in ((False, False), (True, True), (True, False)):
            form = RouterForm(k, softmax_first, normalized, in_float32, dtype, expected_logits.dtype)
            _, weights, ids = form.route(logits)
            same = weights.dtype == expected_weights.dtype and torch.equal(ids[rows], expected_ids[rows])
            if not softmax_first:  # this form also ranks experts whose softmax over all is 0
                same = same and torch.equal(form.route(large_logits)[2][large_rows], large_output[2][large_rows])
            if same:
                actual, expected = weights[rows].double(), expected_weights[rows].double()
                errors[form] = float(((actual - expected) / expected).abs().max())
    except Exception:  # it runs the module's code
        return None
    best = min(errors, key=errors.__getitem__, default=None)
    allowed = ROUNDINGS.get(expected_weights.dtype, 1) * torch.finfo(expected_weights.dtype).eps
    return best if best is not None and errors[best] <= allowed else None


def _rows_without_ties(logits: Tensor, k: int) -> Tensor:
    """Return the rows whose k + 1 largest logits all differ: equal ones may be chosen in any order. Raises ValueError if these are few."""
    rows = (logits.topk(k + 1, -1).values.diff(dim=-1) != 0).all(-1).nonzero().view(-1)
    if 16 * rows.numel() < logits.shape[0]:
        raise ValueError("too many equal logits")
    return rows
