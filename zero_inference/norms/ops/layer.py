"""LayerNorm as torch has it, alone or of a sum that is returned too."""

from __future__ import annotations

from torch import Tensor

from zero_inference.norms import reference
from zero_inference.norms.ops.checks import check
from zero_inference.norms.ops.register import OPS, call, like, register


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """torch's layer norm over the last dimension; x [..., D], weight and bias [D]. Raises ValueError as rms_norm does."""
    check(x, {"weight": weight, "bias": bias}, {})
    return call("layer_norm", x, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = x + residual rounded to its dtype; x and residual [..., D], weight and bias [D]."""
    check(x, {"weight": weight, "bias": bias}, {"residual": residual})
    return call("add_layer_norm", x, residual, weight, bias, eps)


def _layer_norm(x, weight, bias, eps):
    return reference.layer_norm_ref(x, weight, bias, eps).contiguous()


def _add_layer_norm(x, residual, weight, bias, eps):
    total = (x + residual).contiguous()
    return reference.layer_norm_ref(total, weight, bias, eps), total


def _layer_norm_backward(grad, grad_sum, x, weight, eps):
    grad_x, grad_weight, grad_bias = reference.layer_norm_backward_ref(grad, grad_sum, x, weight, eps)
    return grad_x.contiguous(), grad_weight, grad_bias


# Gradients. What was normalized is kept, statistics are not: the backward pass reads the row anyway.


def _keep_layer(ctx, inputs, output):
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _layer_gradient(ctx, grad):
    return *OPS.layer_norm_backward(grad, None, *ctx.saved_tensors, ctx.eps), None


def _keep_add_layer(ctx, inputs, output):
    _, _, weight, _, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _add_layer_gradient(ctx, grad, grad_sum):
    total, weight = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None, None
    grad_x, grad_weight, grad_bias = OPS.layer_norm_backward(grad, grad_sum, total, weight, ctx.eps)
    return grad_x, grad_x, grad_weight, grad_bias, None


register(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    _layer_norm,
    lambda x, *rest: like(x),
    gradient=_layer_gradient,
    keep=_keep_layer,
)
register(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
    _add_layer_norm,
    lambda x, *rest: (like(x), like(x)),
    gradient=_add_layer_gradient,
    keep=_keep_add_layer,
)
register(
    "layer_norm_backward",
    "(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward,
    lambda grad, grad_sum, x, weight, *rest: (like(x), like(weight), like(weight)),
)
