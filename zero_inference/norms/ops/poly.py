"""PolyNorm, alone, times a gate, and with weights of each row's expert: one operator with optional arguments."""

from __future__ import annotations

from torch import Tensor

from zero_inference.norms import reference
from zero_inference.norms.ops.checks import check_offsets, check_poly
from zero_inference.norms.ops.register import OPS, call, like, register


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """`w0 N(x^3) + w1 N(x^2) + w2 N(x) + b`, `N(z) = z * rsqrt(mean(z^2) + eps)`; x [..., D], weight [3], bias [1]."""
    check_poly(x, None, weight, bias, None)
    return call("poly_norm", x, None, weight, bias, None, eps)


def fused_mul_poly_norm(x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """`poly_norm(x) * mul`, multiplied in float32; x and mul [..., D], weight [3], bias [1]."""
    check_poly(x, mul, weight, bias, None)
    return call("poly_norm", x, mul, weight, bias, None, eps)


def fused_mul_grouped_poly_norm(
    x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor, eps: float = 1e-6
) -> Tensor:
    """fused_mul_poly_norm with weights of each row's expert, for rows sorted by expert.

    Args:
        x, mul: [..., D], taken as rows of D elements. weight: [E, 3]. bias: [E, 1].
        offsets: int32 [E], inclusive ends that do not fall: row r uses the first expert with `r < offsets[e]`. Rows at or past
            `offsets[-1]` give zero and get zero gradient.

    Raises:
        ValueError: as rms_norm does, and for offsets that fall or are negative. On CUDA their values are not checked, because the
            host would have to wait for them. Whatever they hold, only memory of these tensors is read: a row gets the weights of
            some expert or zero, and ends outside [0, rows] count as the nearer of the two in the gradients of the weights.
    """
    check_poly(x, mul, weight, bias, offsets)
    return call("poly_norm", x, mul, weight, bias, offsets, eps)


def _poly_norm(x, mul, weight, bias, offsets, eps):
    check_offsets(offsets)
    if mul is None:
        return reference.poly_norm_ref(x, weight, bias, eps).contiguous()
    if offsets is None:
        return reference.fused_mul_poly_norm_ref(x, mul, weight, bias, eps).contiguous()
    return reference.fused_mul_grouped_poly_norm_ref(x, mul, weight, bias, offsets, eps).contiguous()


def _poly_norm_backward(grad, x, mul, weight, bias, offsets, eps):
    grad_x, grad_mul, grad_weight, grad_bias = reference.poly_norm_backward_ref(
        grad, x, mul, weight, bias, offsets, eps
    )
    return grad_x.contiguous(), x.new_empty(0) if grad_mul is None else grad_mul.contiguous(), grad_weight, grad_bias


# Gradients. What was normalized is kept, statistics are not: the backward pass reads the row anyway.


def _keep_poly(ctx, inputs, output):
    x, mul, weight, bias, offsets, ctx.eps = inputs
    ctx.save_for_backward(x, mul, weight, bias, offsets)


def _poly_gradient(ctx, grad):
    x, mul, weight, bias, offsets = ctx.saved_tensors
    grad_x, grad_mul, grad_weight, grad_bias = OPS.poly_norm_backward(grad, x, mul, weight, bias, offsets, ctx.eps)
    return grad_x, None if mul is None else grad_mul, grad_weight, grad_bias, None, None


register(
    "poly_norm",
    "(Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor? offsets, float eps) -> Tensor",
    _poly_norm,
    lambda x, *rest: like(x),
    gradient=_poly_gradient,
    keep=_keep_poly,
)
register(
    "poly_norm_backward",
    "(Tensor grad, Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor? offsets, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _poly_norm_backward,
    lambda grad, x, mul, weight, bias, *rest: (
        like(x),
        x.new_empty(0) if mul is None else like(x),
        like(weight),
        like(bias),
    ),
)
