"""The norms as operators `torch.ops.zero_inference.*`: kernels on CUDA, the reference elsewhere, gradients, torch.compile.

A module a family (`rms`, `layer`, `poly`) holds its public functions and, for each operator, the schema, what runs without a kernel,
the shapes for tracing and the gradient. The schemas are here and not in the compiled library, so that operators are there without it.
The library (csrc/norms) adds kernels for CUDA; it is compiled at the first call with a CUDA tensor (`register`).

Shapes: x [..., D] with weights [D], in one dtype of float16, bfloat16 and float32, on one device; results are contiguous. Wrong ones
raise ValueError (`checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from zero_inference.kernels.extension import load_extension, operators_of, why_unavailable
from zero_inference.norms import reference

LIBRARY = operators_of(__name__)
OPS = torch.ops.zero_inference
_said: set[str] = set()


def register(
    name: str,
    schema: str,
    run: Callable,
    fake: Callable,
    gradient: Callable | None = None,
    keep: Callable | None = None,
) -> None:
    """Add operator `name`.

    Args:
        run: what runs where no kernel is registered, on tensors of any strides.
        fake: the same on shapes alone, for tracing. All results are contiguous.
        gradient, keep: backward function, and what it keeps of a call; None for an operator that is a gradient itself.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _without_kernel(name, run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"zero_inference::{name}", fake, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"zero_inference::{name}", gradient, setup_context=keep, lib=LIBRARY)


def call(name: str, *args):
    """The operator. Where no gradient is wanted the dispatcher is entered below autograd: register_autograd's layer, which is
    Python, would find the same out and cost the host 5 us a call."""
    operator = getattr(OPS, name).default
    wanted = torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in args
    )
    if wanted or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _without_kernel(name: str, run):
    """`run` for the dispatcher. A CUDA tensor that comes here first sends for the library, and then the call is made again."""

    def fallback(*args):
        x = next(argument for argument in args if isinstance(argument, Tensor))
        reason = "x is not on a CUDA device"
        if x.is_cuda:
            if load_extension() and torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_inference::{name}", "CUDA"):
                return getattr(OPS, name)(*args)
            reason = why_unavailable() or "the compiled library has no norms"
        say_reference(reason)
        return run(*args)

    return fallback


def say_reference(reason: str) -> None:
    """One line on stderr that the reference is used, once a process and reason."""
    if reason not in _said:
        _said.add(reason)
        print(f"note: norms run as plain PyTorch ({reason})", file=sys.stderr, flush=True)


def like(tensor: Tensor) -> Tensor:
    """An empty contiguous tensor of its shape, dtype and device."""
    return tensor.new_empty(tensor.shape)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(x: Tensor, weights: dict[str, Tensor], like_x: dict[str, Tensor]) -> None:
    """Raises ValueError unless `weights` have the shape of x's last dimension and `like_x` that of x, all of its dtype and device."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension to normalize over, found shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, found {_short(x.dtype)} of shape {list(x.shape)}")
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
        _check_kind(x, name, tensor)


def check_poly(x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None) -> None:
    """Raises ValueError for shapes, dtypes and devices of `poly_norm` and its kin; the values of offsets are not looked at."""
    check(x, {}, {} if mul is None else {"mul": mul})
    if offsets is None:
        shapes = ("weight", weight, [3]), ("bias", bias, [1])
        of = "found"
    else:
        if offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype != torch.int32:
            raise ValueError(
                "offsets must be int32 of shape [experts], "
                f"found {_short(offsets.dtype)} of shape {list(offsets.shape)}"
            )
        if offsets.device != x.device:
            raise ValueError(f"offsets must be on x's device {x.device}, found {offsets.device}")
        shapes = ("weight", weight, [len(offsets), 3]), ("bias", bias, [len(offsets), 1])
        of = f"for offsets of shape {list(offsets.shape)}, found"
    for name, tensor, shape in shapes:
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} {of} {list(tensor.shape)}")
        _check_kind(x, name, tensor)


def _check_kind(x: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} must have x's dtype {_short(x.dtype)}, found {_short(tensor.dtype)} "
            f"(shapes {list(x.shape)} and {list(tensor.shape)})"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, found {tensor.device}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_offsets(offsets: Tensor | None) -> None:
    """Raises ValueError for ends that are negative or fall, on the host alone: a device would have to be waited for."""
    if offsets is None or offsets.is_cuda:
        return
    falls = torch.nonzero(offsets < torch.cat([offsets.new_zeros(1), offsets[:-1]]))
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"offsets of shape {list(offsets.shape)} must not be negative or fall, found {int(offsets[at])} at expert {at} "
            f"behind {int(offsets[at - 1]) if at else 0}"
        )


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
