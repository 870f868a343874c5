"""The norms in plain PyTorch: float32 (float64 for float64 inputs) inside, one downcast at the end.

Kernels are checked against `*_ref`, with autograd for gradients. `*_backward_ref` are the closed formulas of the gradients, which the
operators use without a kernel. All reductions run over the last dimension, of D elements.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, round_first: bool = False
) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)` for x [..., D] and weight [D], in x's dtype.

    `round_first` rounds the normalized value to x's dtype before it is multiplied with the weight, as transformers' Llama family does.
    """
    wide = _wide(x)
    values = x.to(wide)
    normalized = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normalized = normalized.to(x.dtype).to(wide)
    return (normalized * (weight.to(wide) + weight_offset)).to(x.dtype)


def fused_add_rms_norm_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(h), h) with h = x + residual, rounded to its dtype."""
    total = x + residual
    return rms_norm_ref(total, weight, eps, weight_offset, round_first), total


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return torch's layer norm over the last dimension: x [..., D], weight and bias [D]."""
    wide = _wide(x)
    return torch.nn.functional.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)


def fused_add_layer_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(h), h) with h = x + residual, rounded to its dtype."""
    total = x + residual
    return layer_norm_ref(total, weight, bias, eps), total


def poly_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `w0 N(x^3) + w1 N(x^2) + w2 N(x) + b` with `N(z) = z * rsqrt(mean(z^2) + eps)`; weight [3], bias [1]."""
    return any_poly_norm_ref(x, None, weight, bias, None, eps)


def fused_mul_poly_norm_ref(x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `poly_norm(x) * mul`, multiplied before the downcast; mul has the shape of x."""
    return any_poly_norm_ref(x, mul, weight, bias, None, eps)


def fused_mul_grouped_poly_norm_ref(
    x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor, eps: float = 1e-6
) -> Tensor:
    """Return fused_mul_poly_norm with the weights of each row's expert: weight [E, 3], bias [E, 1], offsets int32 [E].

    Row r (of x flattened to [rows, D]) uses the first expert with `r < offsets[e]`; rows past the last give zero.
    """
    return any_poly_norm_ref(x, mul, weight, bias, offsets, eps)


def any_poly_norm_ref(
    x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None, eps: float
) -> Tensor:
    """Return `poly_norm`, or a fused form with `mul` and `offsets`."""
    values, factors, row_weight, row_bias = _poly_rows(x, mul, weight, bias, offsets)
    return (_poly(values, row_weight, row_bias, eps) * factors).to(x.dtype).reshape(x.shape)


def rms_norm_backward_ref(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight). With n = x s, s = rsqrt(mean(x^2) + eps), m = grad (weight + offset): dx = s (m - n mean(m n)).

    `grad_sum` is the gradient of a fused sum h = x + residual, which is added to dx.
    """
    wide = _wide(x)
    values, grads = x.to(wide), grad.to(wide)
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    normalized = values * scale
    m = grads * (weight.to(wide) + weight_offset)
    if x.shape[-1] == 1:  # 1 - n^2 = eps s^2; their difference would be all rounding error
        grad_x = m * eps * scale**3
    else:
        grad_x = scale * (m - normalized * (m * normalized).mean(-1, keepdim=True))
    return _add(grad_x, grad_sum).to(x.dtype), _sum_rows(grads * normalized).to(weight.dtype)


def layer_norm_backward_ref(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias). With n the normalized x, s its scale, m = grad weight: dx = s (m - mean(m) - n mean(m n))."""
    wide = _wide(x)
    grads = grad.to(wide)
    centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    normalized = centred * scale
    m = grads * weight.to(wide)
    grad_x = scale * (m - m.mean(-1, keepdim=True) - normalized * (m * normalized).mean(-1, keepdim=True))
    return (
        _add(grad_x, grad_sum).to(x.dtype),
        _sum_rows(grads * normalized).to(weight.dtype),
        _sum_rows(grads).to(weight.dtype),
    )


def poly_norm_backward_ref(
    grad: Tensor, x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return (dx, dmul, dweight, dbias) of poly_norm and its fused forms; dmul is None without mul.

    With c_p the weight of power p, r_p = rsqrt(mean(x^2p) + eps), h = grad mul, S_p = sum_i h_i x_i^p of a row:
    dx = sum_p c_p r_p p x^(p-1) (h - x^p r_p^2 S_p / D), dmul = grad poly, dc_p = sum over rows of r_p S_p, db = sum of h.
    """
    columns = x.shape[-1]
    values, factors, row_weight, row_bias = _poly_rows(x, mul, weight, bias, offsets)
    grads = grad.reshape(values.shape).to(values.dtype)
    if offsets is not None:
        grads = torch.where(_expert_of_row(offsets, len(values))[:, None] < len(offsets), grads, 0.0)
    h = grads * factors
    grad_x, sums = torch.zeros_like(values), []
    for place, power in enumerate((3, 2, 1)):
        raised = values**power
        scale = torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + eps)
        total = (h * raised).sum(-1, keepdim=True)
        coefficient = row_weight[:, place : place + 1] * scale * power
        inner = h * eps * scale.pow(2) if columns == 1 else h - raised * scale.pow(2) * total / columns
        grad_x += coefficient * values ** (power - 1) * inner
        sums.append(scale * total)
    sums.append(h.sum(-1, keepdim=True))
    grad_mul = None if mul is None else (grads * _poly(values, row_weight, row_bias, eps)).to(x.dtype).reshape(x.shape)
    by_expert = _sum_by_expert(torch.cat(sums, -1), offsets)
    return (
        grad_x.to(x.dtype).reshape(x.shape),
        grad_mul,
        by_expert[:, :3].to(weight.dtype).reshape(weight.shape),
        by_expert[:, 3].to(bias.dtype).reshape(bias.shape),
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _poly(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    def normalized(z: Tensor) -> Tensor:
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)

    cube, square, line = weight.split(1, -1)
    return cube * normalized(x**3) + square * normalized(x**2) + line * normalized(x) + bias


def _poly_rows(
    x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x [rows, D], factors [rows, D] or [1, 1], and weight [rows or 1, 3] and bias [rows or 1, 1] of each row."""
    wide = _wide(x)
    values = x.reshape(-1, x.shape[-1]).to(wide)
    factors = values.new_ones(1, 1) if mul is None else mul.reshape(values.shape).to(wide)
    if offsets is None:
        return values, factors, weight.to(wide).reshape(1, 3), bias.to(wide).reshape(1, 1)
    expert = _expert_of_row(offsets, len(values))
    inside = (expert < len(offsets))[:, None]
    # padding rows are replaced, not only masked: their gradient must be zero even for NaN or inf
    values, factors = torch.where(inside, values, 1.0), torch.where(inside, factors, 0.0)
    expert = expert.clamp(max=len(offsets) - 1)
    return values, factors, weight.to(wide)[expert], bias.to(wide).reshape(-1, 1)[expert]


def _expert_of_row(offsets: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype, device=offsets.device), right=True)


def _sum_by_expert(sums: Tensor, offsets: Tensor | None) -> Tensor:
    if offsets is None:
        return sums.sum(0, keepdim=True)
    totals = sums.new_zeros(len(offsets) + 1, sums.shape[-1])
    return totals.index_add_(0, _expert_of_row(offsets, len(sums)), sums)[:-1]


def _sum_rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)


def _add(grad: Tensor, other: Tensor | None) -> Tensor:
    return grad if other is None else grad + other.to(grad.dtype)
