"""The norms as operators `torch.ops.zero_inference.*`: kernels on CUDA, the reference elsewhere, gradients, torch.compile.

Schemas are here and not in the compiled library, so that the operators exist without it. The library (csrc/norms) adds kernels for CUDA; it
is compiled at the first call with a CUDA tensor. Inputs are checked before: x [..., D] with weights [D], in one dtype of float16, bfloat16
and float32, on one device; else ValueError. Results are contiguous.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from zero_inference.kernels.extension import load_extension, operator_library, why_unavailable
from zero_inference.norms import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LIBRARY = operator_library(__name__)
OPS = torch.ops.zero_inference
_printed: set[str] = set()


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
        run: implementation without a kernel, for tensors of any strides.
        fake: returns empty outputs of the right shapes, for tracing.
        gradient, save: backward function, and its setup_context; None for an operator that is a gradient itself.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _without_kernel(name, run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"zero_inference::{name}", fake, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"zero_inference::{name}", gradient, setup_context=save, lib=LIBRARY)


def call(name: str, *args):
    """Call the operator, below autograd if no gradient is needed: register_autograd's Python layer costs the host 5 us a call."""
    operator = getattr(OPS, name).default
    needs_gradient = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in args)
    if needs_gradient or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _without_kernel(name: str, run: Callable) -> Callable:
    """Wrap `run` for the dispatcher. The first CUDA tensor that comes here loads the library, and the call is repeated."""

    def fallback(*args):
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

    return fallback


def _like(tensor: Tensor) -> Tensor:
    """Return an empty contiguous tensor of its shape, dtype and device."""
    return tensor.new_empty(tensor.shape)


def _check(x: Tensor, weights: dict[str, Tensor], like_x: dict[str, Tensor]) -> None:
    """Raise ValueError unless `weights` have the shape of x's last dimension and `like_x` that of x, all of its dtype and device."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension to normalize over, found shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, found {_name(x.dtype)} of shape {list(x.shape)}")
    for name, tensor in weights.items():
        if tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have shape {list(x.shape[-1:])} for x of shape {list(x.shape)}, "
                f"found {list(tensor.shape)}"
            )
    for name, tensor in like_x.items():
        if tensor.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {list(x.shape)}, found {list(tensor.shape)}")
    for name, tensor in (weights | like_x).items():
        _check_dtype_and_device(x, name, tensor)


def _check_poly(x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None) -> None:
    """Raise ValueError for shapes, dtypes and devices of `poly_norm` and its fused forms; values of offsets are not read."""
    _check(x, {}, {} if mul is None else {"mul": mul})
    rows, found = [], "found"
    if offsets is not None:
        if offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype != torch.int32:
            raise ValueError(
                f"offsets must be int32 of shape [experts], found {_name(offsets.dtype)} of shape {list(offsets.shape)}"
            )
        if offsets.device != x.device:
            raise ValueError(f"offsets must be on x's device {x.device}, found {offsets.device}")
        rows, found = [len(offsets)], f"for offsets of shape {list(offsets.shape)}, found"
    for name, tensor, shape in (("weight", weight, [*rows, 3]), ("bias", bias, [*rows, 1])):
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} {found} {list(tensor.shape)}")
        _check_dtype_and_device(x, name, tensor)


def _check_dtype_and_device(x: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} must have x's dtype {_name(x.dtype)}, found {_name(tensor.dtype)} "
            f"(shapes {list(x.shape)} and {list(tensor.shape)})"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, found {tensor.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_offsets(offsets: Tensor | None) -> None:
    """Raise ValueError for offsets that are negative or fall, on the host only: reading them from a device would wait for it."""
    if offsets is None or offsets.is_cuda:
        return
    falls = torch.nonzero(offsets < torch.cat([offsets.new_zeros(1), offsets[:-1]]))
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"offsets of shape {list(offsets.shape)} must not be negative or fall, found {int(offsets[at])} at expert {at} "
            f"after {int(offsets[at - 1]) if at else 0}"
        )


# RMSNorm. Gradients of all norms save what was normalized and no statistics: the backward pass reads the row anyway.


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, round_first: bool = False
) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last dimension.

    Args:
        x: [..., D]. weight: [D].
        weight_offset: 1 for Gemma, which stores its weights less 1.
        round_first: round the normalized value to x's dtype before it is multiplied with the weight, as transformers' Llama family
            does; otherwise the result is rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; see the message.
    """
    _check(x, {"weight": weight}, {})
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
    """Return (rms_norm(h), h) with h = x + residual rounded to its dtype; x and residual [..., D], weight [D]."""
    _check(x, {"weight": weight}, {"residual": residual})
    return call("add_rms_norm", x, residual, weight, eps, weight_offset, round_first)


def _save_rms(ctx, inputs, output):
    x, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _rms_gradient(ctx, grad):
    grad_x, grad_weight = OPS.rms_norm_backward(grad, None, *ctx.saved_tensors, ctx.eps, ctx.weight_offset)
    return grad_x, grad_weight, None, None, None


def _save_add_rms(ctx, inputs, output):
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
    reference.rms_norm_ref,
    lambda x, *rest: _like(x),
    _rms_gradient,
    _save_rms,
)
register(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset, bool round_first) -> (Tensor, Tensor)",
    reference.fused_add_rms_norm_ref,
    lambda x, *rest: (_like(x), _like(x)),
    _add_rms_gradient,
    _save_add_rms,
)
register(
    "rms_norm_backward",
    "(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, float eps, float weight_offset) -> (Tensor, Tensor)",
    reference.rms_norm_backward_ref,
    lambda grad, grad_sum, x, weight, *rest: (_like(x), _like(weight)),
)


# LayerNorm


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return torch's layer norm over the last dimension; x [..., D], weight and bias [D]. Raises ValueError as rms_norm does."""
    _check(x, {"weight": weight, "bias": bias}, {})
    return call("layer_norm", x, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(h), h) with h = x + residual rounded to its dtype; x and residual [..., D], weight and bias [D]."""
    _check(x, {"weight": weight, "bias": bias}, {"residual": residual})
    return call("add_layer_norm", x, residual, weight, bias, eps)


def _save_layer(ctx, inputs, output):
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _layer_gradient(ctx, grad):
    return *OPS.layer_norm_backward(grad, None, *ctx.saved_tensors, ctx.eps), None


def _save_add_layer(ctx, inputs, output):
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
    reference.layer_norm_ref,
    lambda x, *rest: _like(x),
    _layer_gradient,
    _save_layer,
)
register(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
    reference.fused_add_layer_norm_ref,
    lambda x, *rest: (_like(x), _like(x)),
    _add_layer_gradient,
    _save_add_layer,
)
register(
    "layer_norm_backward",
    "(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    reference.layer_norm_backward_ref,
    lambda grad, grad_sum, x, weight, *rest: (_like(x), _like(weight), _like(weight)),
)


# PolyNorm, alone, times a gate, and with weights of each row's expert: one operator with optional arguments


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `w0 N(x^3) + w1 N(x^2) + w2 N(x) + b`, `N(z) = z * rsqrt(mean(z^2) + eps)`; x [..., D], weight [3], bias [1]."""
    _check_poly(x, None, weight, bias, None)
    return call("poly_norm", x, None, weight, bias, None, eps)


def fused_mul_poly_norm(x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `poly_norm(x) * mul`, multiplied in float32; x and mul [..., D], weight [3], bias [1]."""
    _check_poly(x, mul, weight, bias, None)
    return call("poly_norm", x, mul, weight, bias, None, eps)


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
    _check_poly(x, mul, weight, bias, offsets)
    return call("poly_norm", x, mul, weight, bias, offsets, eps)


def _poly_norm(x, mul, weight, bias, offsets, eps):
    """Call the reference of `poly_norm`, `fused_mul_poly_norm` or its grouped form, by which of `mul` and `offsets` is None."""
    _check_offsets(offsets)
    if mul is None:
        return reference.poly_norm_ref(x, weight, bias, eps)
    if offsets is None:
        return reference.fused_mul_poly_norm_ref(x, mul, weight, bias, eps)
    return reference.fused_mul_grouped_poly_norm_ref(x, mul, weight, bias, offsets, eps)


def _poly_norm_backward(grad, x, mul, weight, bias, offsets, eps):
    """Return the gradients of x, mul, weight and bias; an operator cannot return None, so that of a missing mul is empty."""
    gradients = reference.poly_norm_backward_ref(grad, x, mul, weight, bias, offsets, eps)
    return tuple(x.new_empty(0) if each is None else each for each in gradients)


def _save_poly(ctx, inputs, output):
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
    lambda x, *rest: _like(x),
    _poly_gradient,
    _save_poly,
)
register(
    "poly_norm_backward",
    "(Tensor grad, Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor? offsets, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _poly_norm_backward,
    lambda grad, x, mul, weight, bias, *rest: (
        _like(x),
        x.new_empty(0) if mul is None else _like(x),
        _like(weight),
        _like(bias),
    ),
)
