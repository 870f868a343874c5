"""The norms as modules. Parameters are named and initialised as in torch; `dim` is the size of the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero_inference.norms import ops


class _Norm(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(weight)
        if bias is not None:
            self.bias = nn.Parameter(bias)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class RMSNorm(_Norm):
    """`ops.rms_norm` with a weight [dim] of ones."""

    def __init__(self, dim: int, eps: float = 1e-6, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(torch.ones(dim, device=device, dtype=dtype), None, eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class FusedAddRMSNorm(RMSNorm):
    """`ops.fused_add_rms_norm`: normalizes x + residual and returns the sum too."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(_Norm):
    """`ops.layer_norm` with a weight [dim] of ones and a bias [dim] of zeros."""

    def __init__(self, dim: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None):
        weight = torch.ones(dim, device=device, dtype=dtype)
        super().__init__(weight, torch.zeros_like(weight), eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class FusedAddLayerNorm(LayerNorm):
    """`ops.fused_add_layer_norm`: normalizes x + residual and returns the sum too."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class PolyNorm(_Norm):
    """`ops.poly_norm` with a weight [3] of thirds and a bias [1] of zero; fits any last dimension."""

    def __init__(self, eps: float = 1e-6, device: Any = None, dtype: torch.dtype | None = None):
        weight = torch.ones(3, device=device, dtype=dtype) / 3
        super().__init__(weight, weight.new_zeros(1), eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.poly_norm(x, self.weight, self.bias, self.eps)


class FusedMulPolyNorm(PolyNorm):
    """`ops.fused_mul_poly_norm`: poly_norm(x) * mul, the gate of a feed-forward block."""

    def forward(self, x: Tensor, mul: Tensor) -> Tensor:
        return ops.fused_mul_poly_norm(x, mul, self.weight, self.bias, self.eps)
