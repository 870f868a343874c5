"""RMSNorm: `x * rsqrt(mean(x^2) + eps) * weight`, alone or of a sum that is returned too."""

from __future__ import annotations

from torch import Tensor

from zero_inference.norms import reference
from zero_inference.norms.ops.checks import check
from zero_inference.norms.ops.register import OPS, call, like, register


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, round_first: bool = False
) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last dimension.

    Args:
        x: [..., D]. weight: [D].
        weight_offset: 1 for Gemma, which stores its weights less 1.
        round_first: round the normalized value to x's dtype before it meets the weight, as transformers' Llama family does;
            otherwise the result is rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; see the message.
    """
    check(x, {"weight": weight}, {})
    return call("rms_norm", x, weight, eps, weight_offset, round_first)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual rounded to its dtype; x and residual [..., D], weight [D]."""
    check(x, {"weight": weight}, {"residual": residual})
    return call("add_rms_norm", x, residual, weight, eps, weight_offset, round_first)


def _rms_norm(x, weight, eps, weight_offset, round_first):
    return reference.rms_norm_ref(x, weight, eps, weight_offset, round_first).contiguous()


def _add_rms_norm(x, residual, weight, eps, weight_offset, round_first):
    total = (x + residual).contiguous()
    return reference.rms_norm_ref(total, weight, eps, weight_offset, round_first), total


def _rms_norm_backward(grad, grad_sum, x, weight, eps, weight_offset):
    grad_x, grad_weight = reference.rms_norm_backward_ref(grad, grad_sum, x, weight, eps, weight_offset)
    return grad_x.contiguous(), grad_weight


# Gradients. What was normalized is kept, statistics are not: the backward pass reads the row anyway.


def _keep_rms(ctx, inputs, output):
    x, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _rms_gradient(ctx, grad):
    grad_x, grad_weight = OPS.rms_norm_backward(grad, None, *ctx.saved_tensors, ctx.eps, ctx.weight_offset)
    return grad_x, grad_weight, None, None, None


def _keep_add_rms(ctx, inputs, output):
    _, _, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _add_rms_gradient(ctx, grad, grad_sum):
    total, weight = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None, None, None
    grad_x, grad_weight = OPS.rms_norm_backward(grad, grad_sum, total, weight, ctx.eps, ctx.weight_offset)
    return grad_x, grad_x, grad_weight, None, None, None


register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, float weight_offset, bool round_first) -> Tensor",
    _rms_norm,
    lambda x, *rest: like(x),
    gradient=_rms_gradient,
    keep=_keep_rms,
)
register(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset, bool round_first) -> (Tensor, Tensor)",
    _add_rms_norm,
    lambda x, *rest: (like(x), like(x)),
    gradient=_add_rms_gradient,
    keep=_keep_add_rms,
)
register(
    "rms_norm_backward",
    "(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, float eps, float weight_offset) -> (Tensor, Tensor)",
    _rms_norm_backward,
    lambda grad, grad_sum, x, weight, *rest: (like(x), like(weight)),
)
