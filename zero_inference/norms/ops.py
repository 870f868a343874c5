"""The norms over the last dimension: `torch.ops.zero_inference.*` with CUDA kernels, and the same in plain PyTorch (`*_ref`).

Schemas are here and not in the compiled library (csrc/norms), so that the operators exist without it; it is loaded at the first call with a
CUDA tensor. Operators check their inputs: x [..., D] with weights [D], in one dtype of float16, bfloat16 and float32, on one device; else
ValueError. Results are contiguous. References compute in float32 (float64 for float64) and round once at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_inference.kernels.extension import load_extension, operator_library, why_unavailable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LIBRARY = operator_library(__name__)
OPS = torch.ops.zero_inference
_printed: set[str] = set()


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, round_first: bool = False
) -> Tensor:
    """Return `rms_norm` with plain PyTorch."""
    wide = _wide(x)
    values = x.to(wide)
    normalized = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normalized = normalized.to(x.dtype).to(wide)
    return (normalized * (weight.to(wide) + weight_offset)).to(x.dtype)


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return `layer_norm` with plain PyTorch."""
    wide = _wide(x)
    return torch.nn.functional.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)


def _after_add(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function (x, residual, ...) -> (norm(h, ...), h) with h = x + residual, rounded to its dtype."""

    def fused(x: Tensor, residual: Tensor, *others, **options) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *others, **options), total

    return fused


fused_add_rms_norm_ref = _after_add(rms_norm_ref)
fused_add_layer_norm_ref = _after_add(layer_norm_ref)


def poly_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `poly_norm` with plain PyTorch."""
    return any_poly_norm_ref(x, None, weight, bias, None, eps)


def fused_mul_poly_norm_ref(x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `fused_mul_poly_norm` with plain PyTorch."""
    return any_poly_norm_ref(x, mul, weight, bias, None, eps)


def fused_mul_grouped_poly_norm_ref(
    x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor, eps: float = 1e-6
) -> Tensor:
    """Return `fused_mul_grouped_poly_norm` with plain PyTorch."""
    return any_poly_norm_ref(x, mul, weight, bias, offsets, eps)


def any_poly_norm_ref(
    x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None, eps: float
) -> Tensor:
    """Return `poly_norm`, or a fused form with `mul` and `offsets`."""
    wide = _wide(x)
    values = x.reshape(-1, x.shape[-1]).to(wide)  # [rows, D]
    factors = values.new_ones(1, 1) if mul is None else mul.reshape(values.shape).to(wide)
    weight, bias = weight.to(wide).reshape(-1, 3), bias.to(wide).reshape(-1, 1)  # [experts or 1, ...]
    if offsets is not None:
        rows = torch.arange(len(values), dtype=offsets.dtype, device=offsets.device)
        expert = torch.searchsorted(offsets, rows, right=True)
        inside = (expert < len(offsets))[:, None]
        # padding rows are replaced, not only masked: their gradient must be zero even for NaN or inf, there or in the result's gradient
        values, factors = torch.where(inside, values, 1.0), torch.where(inside, factors, 0.0)
        expert = expert.clamp(max=len(offsets) - 1)
        weight, bias = weight[expert], bias[expert]

    def normalized(z: Tensor) -> Tensor:
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)

    cube, square, linear = weight.split(1, -1)
    poly = cube * normalized(values**3) + square * normalized(values**2) + linear * normalized(values) + bias
    product = poly * factors if offsets is None else torch.where(inside, poly * factors, 0.0)
    return product.to(x.dtype).reshape(x.shape)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, round_first: bool = False
) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last dimension; x [..., D], weight [D].

    Args:
        weight_offset: 1 for Gemma, which stores its weights less 1.
        round_first: round the normalized value to x's dtype before it is multiplied with the weight, as transformers' Llama family
            does; otherwise the result is rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check(x, weight=(weight, x.shape[-1:]))
    return _call("rms_norm", x, weight, eps, weight_offset, round_first)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(h), h) with h = x + residual rounded to its dtype; x and residual [..., D], weight [D]."""
    _check(x, weight=(weight, x.shape[-1:]), residual=(residual, x.shape))
    return _call("add_rms_norm", x, residual, weight, eps, weight_offset, round_first)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return torch's layer norm over the last dimension; x [..., D], weight and bias [D]. Raises ValueError as rms_norm does."""
    _check(x, weight=(weight, x.shape[-1:]), bias=(bias, x.shape[-1:]))
    return _call("layer_norm", x, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(h), h) with h = x + residual rounded to its dtype; x and residual [..., D], weight and bias [D]."""
    _check(x, weight=(weight, x.shape[-1:]), bias=(bias, x.shape[-1:]), residual=(residual, x.shape))
    return _call("add_layer_norm", x, residual, weight, bias, eps)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `w0 N(x^3) + w1 N(x^2) + w2 N(x) + b`, `N(z) = z * rsqrt(mean(z^2) + eps)`; x [..., D], weight [3], bias [1]."""
    _check(x, weight=(weight, (3,)), bias=(bias, (1,)))
    return _call("poly_norm", x, None, weight, bias, None, eps)


def fused_mul_poly_norm(x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `poly_norm(x) * mul`, multiplied in float32; x and mul [..., D], weight [3], bias [1]."""
    _check(x, mul=(mul, x.shape), weight=(weight, (3,)), bias=(bias, (1,)))
    return _call("poly_norm", x, mul, weight, bias, None, eps)


def fused_mul_grouped_poly_norm(
    x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor, eps: float = 1e-6
) -> Tensor:
    """Return fused_mul_poly_norm with the weights of each row's expert, for rows sorted by expert.

    Args:
        x, mul: [..., D], taken as rows of D elements. weight: [E, 3]. bias: [E, 1].
        offsets: int32 [E], non-decreasing inclusive ends: row r uses the first expert with `r < offsets[e]`. Rows at or past
            `offsets[-1]` give zero and get zero gradient.

    Raises:
        ValueError: as rms_norm does, and for offsets that fall or are negative. On CUDA their values are not checked, because the
            host would have to wait for them. Whatever they hold, only memory of these tensors is read: a row gets the weights of
            some expert or zero, and ends outside [0, rows] count as the nearer of the two in the gradients of the weights.
    """
    if offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype != torch.int32 or offsets.device != x.device:
        raise ValueError(
            f"offsets must be int32 [experts] on {x.device}, found {offsets.dtype} {list(offsets.shape)} on {offsets.device}"
        )
    _check(x, mul=(mul, x.shape), weight=(weight, (len(offsets), 3)), bias=(bias, (len(offsets), 1)))
    return _call("poly_norm", x, mul, weight, bias, offsets, eps)


def _check(x: Tensor, **others: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raise ValueError unless x can be normalized and each other tensor has its shape, and x's dtype and device."""
    if x.dim() == 0 or x.shape[-1] == 0 or x.dtype not in DTYPES:
        raise ValueError(
            f"x must be float16, bfloat16 or float32 with a last dimension, found {x.dtype} {list(x.shape)}"
        )
    for name, (tensor, shape) in others.items():
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} must be {x.dtype} {list(shape)} on {x.device} for x of shape {list(x.shape)}, "
                f"found {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


def _call(name: str, *args):
    """Call the operator, below autograd if no gradient is needed: register_autograd's Python layer costs the host 5 us a call."""
    operator = getattr(OPS, name).default
    needs_gradient = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in args)
    if needs_gradient or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def register(
    name: str,
    schema: str,
    run: Callable,
    fake: Callable,
    gradient: Callable | None = None,
    save: Callable | None = None,
) -> None:
    """Add operator `name`.

    Args:
        schema: arguments and results, as `(Tensor x, float eps) -> Tensor`.
        run: implementation without a kernel.
        fake: returns empty outputs of the right shapes, for tracing.
        gradient, save: backward function and its setup_context.
    """

    def without_kernel(*args):
        """Load the library at the first CUDA tensor, and call the operator again."""
        x = next(argument for argument in args if isinstance(argument, Tensor))
        reason = "x is not on a CUDA device"
        if x.is_cuda:
            if load_extension() and torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_inference::{name}", "CUDA"):
                return getattr(OPS, name)(*args)
            reason = why_unavailable() or "the compiled library has no norms"
        if reason not in _printed:
            _printed.add(reason)
            print(f"note: norms run as plain PyTorch ({reason})", file=sys.stderr, flush=True)
        results = run(*args)
        return results.contiguous() if isinstance(results, Tensor) else tuple(each.contiguous() for each in results)

    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, without_kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zero_inference::{name}", fake, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"zero_inference::{name}", gradient, setup_context=save, lib=LIBRARY)


def register_norm(name: str, weights: str, options: str, norm: Callable[..., Tensor]) -> None:
    """Add operator `name`, `add_NAME` that normalizes x + residual and returns the sum too, and the gradient of both.

    `weights` and `options` are parts of the schema: "Tensor weight, Tensor bias" and "float eps". Gradients save what was normalized and no
    statistics: the backward pass reads the row anyway. They do not depend on the bias, nor on options after the second.
    """
    weights_count = weights.count("Tensor")
    backward_options = ", ".join(options.split(", ")[:2])

    def register_form(adds: bool) -> None:
        def save(ctx, inputs, output):
            ctx.options = inputs[1 + adds + weights_count :]
            ctx.save_for_backward(output[1] if adds else inputs[0], inputs[1 + adds])
            ctx.set_materialize_grads(False)

        def gradient(ctx, grad, grad_of_sum=None):
            no_more = [None for _ in ctx.options]
            if grad is None:  # only the sum is used
                return grad_of_sum, grad_of_sum, *(None,) * weights_count, *no_more
            grad_x, *grads = getattr(OPS, f"{name}_backward")(grad, grad_of_sum, *ctx.saved_tensors, *ctx.options[:2])
            return *(grad_x,) * (1 + adds), *grads, *no_more

        inputs, output = ("Tensor x, Tensor residual", "(Tensor, Tensor)") if adds else ("Tensor x", "Tensor")
        register(
            f"add_{name}" if adds else name,
            f"({inputs}, {weights}, {options}) -> {output}",
            _after_add(norm) if adds else norm,
            lambda x, *rest: (_like(x), _like(x)) if adds else _like(x),
            gradient,
            save,
        )

    def backward(grad, grad_of_sum, x, weight, *options):
        tensors = [x, weight, torch.zeros_like(weight)][: 1 + weights_count]
        grad_x, *grads = _gradients(lambda *in_float64: norm(*in_float64, *options), tensors, grad)
        grad_x = grad_x if grad_of_sum is None else grad_x + grad_of_sum
        return tuple(each.to(x.dtype) for each in (grad_x, *grads))

    register_form(adds=False)
    register_form(adds=True)
    register(
        f"{name}_backward",
        f"(Tensor grad, Tensor? grad_of_sum, Tensor x, Tensor weight, {backward_options}) -> "
        f"({', '.join(['Tensor'] * (1 + weights_count))})",
        backward,
        lambda grad, grad_of_sum, x, weight, *rest: (_like(x), *(_like(weight) for _ in range(weights_count))),
    )


def _like(tensor: Tensor) -> Tensor:
    """Return an empty contiguous tensor with the shape, dtype and device of `tensor`."""
    return tensor.new_empty(tensor.shape)


def _gradients(norm: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `tensors` in float64, which rows of one element need: theirs is a difference of nearly equal numbers."""
    # operators run below autograd, which is let in again
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        in_float64 = [each.detach().double().requires_grad_() for each in tensors]
        return torch.autograd.grad(norm(*in_float64), in_float64, grad.double())


register_norm("rms_norm", "Tensor weight", "float eps, float weight_offset, bool round_first", rms_norm_ref)
register_norm("layer_norm", "Tensor weight, Tensor bias", "float eps", layer_norm_ref)


# PolyNorm, alone, times a gate, and with weights of each row's expert: one operator with optional arguments


def _poly_norm(x, mul, weight, bias, offsets, eps):
    if offsets is not None and not offsets.is_cuda and (offsets.diff(prepend=offsets.new_zeros(1)) < 0).any():
        raise ValueError(f"offsets must not be negative or fall, found {offsets.tolist()}")
    return any_poly_norm_ref(x, mul, weight, bias, offsets, eps)


def _poly_norm_backward(grad, x, mul, weight, bias, offsets, eps):
    def norm(x, weight, bias, mul=None):
        return any_poly_norm_ref(x, mul, weight, bias, offsets, eps)

    tensors = [x, weight, bias] if mul is None else [x, weight, bias, mul]
    grad_x, grad_weight, grad_bias, *grad_mul = (each.to(x.dtype) for each in _gradients(norm, tensors, grad))
    return grad_x, grad_mul[0] if grad_mul else x.new_empty(0), grad_weight, grad_bias  # an operator cannot return None


def _save_poly(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _poly_gradient(ctx, grad):
    grad_x, grad_mul, grad_weight, grad_bias = OPS.poly_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
    return grad_x, None if ctx.saved_tensors[1] is None else grad_mul, grad_weight, grad_bias, None, None


def _fake_backward(grad, x, mul, weight, bias, *rest):
    return _like(x), x.new_empty(0) if mul is None else _like(x), _like(weight), _like(bias)


POLY_INPUTS = "Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor? offsets, float eps"
register("poly_norm", f"({POLY_INPUTS}) -> Tensor", _poly_norm, lambda x, *rest: _like(x), _poly_gradient, _save_poly)
register(
    "poly_norm_backward",
    f"(Tensor grad, {POLY_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _poly_norm_backward,
    _fake_backward,
)
