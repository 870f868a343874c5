"""fused_mul_grouped_poly_norm: rows of 48 experts, some of them empty, and padding rows at the end."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase

from zero_inference.norms import fused_mul_grouped_poly_norm, fused_mul_grouped_poly_norm_ref

EXPERTS = 48


class GroupedMulPolyCase(DiffCase):
    name = "grouped_mul_poly"
    forward_tensors, backward_tensors = 3, 5
    compiles_cuda = True
    grouped = True

    def shapes(self, x):
        return {"x": x, "mul": x, "weight": (EXPERTS, 3), "bias": (EXPERTS, 1)}

    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        """The tokens fall to the experts at random, none to every eighth; the last 1 in 64 rows are padding."""
        inputs, rows = super().build_inputs(hidden, bs, sl, dtype, eps, device), bs * sl
        shares = torch.rand(EXPERTS)
        shares[::8] = 0.0
        offsets = (shares.cumsum(0) / shares.sum() * (rows - rows // 64)).round().to(torch.int32)
        eps = inputs.pop("eps")
        return {**inputs, "offsets": offsets.to(device), "eps": eps}

    def make_naive(self, inputs):
        return fused_mul_grouped_poly_norm_ref

    def make_cuda(self, inputs):
        return fused_mul_grouped_poly_norm


CASE = GroupedMulPolyCase()
