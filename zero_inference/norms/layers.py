"""The norms as modules. Parameters are named and initialised as in torch; `dim` is the size of the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero_inference.norms import ops


class RMSNorm(nn.Module):
    """`ops.rms_norm` with a weight [dim] of ones."""

    def __init__(self, dim: int, eps: float = 1e-6, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class FusedAddRMSNorm(RMSNorm):
    """`ops.fused_add_rms_norm`: normalizes x + residual and returns the sum too."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [..., dim] -> (normalized sum, sum)."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """`ops.layer_norm` with a weight [dim] of ones and a bias [dim] of zeros."""

    def __init__(self, dim: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class FusedAddLayerNorm(LayerNorm):
    """`ops.fused_add_layer_norm`: normalizes x + residual and returns the sum too."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [..., dim] -> (normalized sum, sum)."""
        return ops.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class PolyNorm(nn.Module):
    """`ops.poly_norm` with a weight [3] of thirds and a bias [1] of zero; fits any last dimension."""

    def __init__(self, eps: float = 1e-6, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype) / 3)
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return ops.poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class FusedMulPolyNorm(PolyNorm):
    """`ops.fused_mul_poly_norm`: poly_norm(x) * mul, the gate of a feed-forward block."""

    def forward(self, x: Tensor, mul: Tensor) -> Tensor:
        """x and mul [..., D] -> [..., D]."""
        return ops.fused_mul_poly_norm(x, mul, self.weight, self.bias, self.eps)
