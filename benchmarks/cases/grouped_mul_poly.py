"""fused_mul_grouped_poly_norm: rows of 48 experts, some of them empty, and padding rows at the end."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, random_tensor

from zero_inference.norms import fused_mul_grouped_poly_norm, fused_mul_grouped_poly_norm_ref

EXPERTS = 48


class GroupedMulPolyCase(DiffCase):
    name = "grouped_mul_poly"
    forward_tensors, backward_tensors = 3, 5
    compiles_cuda = True
    grouped = True

    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        """The tokens fall to the experts at random, none to every eighth; the last 1 in 64 rows are padding."""
        torch.manual_seed(0)
        rows = bs * sl
        shares = torch.rand(EXPERTS)
        shares[::8] = 0.0
        offsets = (shares.cumsum(0) / shares.sum() * (rows - rows // 64)).round().to(torch.int32)
        return {
            "x": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "mul": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "weight": random_tensor(EXPERTS, 3, dtype=dtype, device=device),
            "bias": random_tensor(EXPERTS, 1, dtype=dtype, device=device),
            "offsets": offsets.to(device),
            "eps": eps,
        }

    def make_naive(self, inputs):
        return fused_mul_grouped_poly_norm_ref

    def make_cuda(self, inputs):
        return fused_mul_grouped_poly_norm

    def forward(self, obj, inputs):
        return obj(inputs["x"], inputs["mul"], inputs["weight"], inputs["bias"], inputs["offsets"], inputs["eps"])

    def grad_inputs(self, inputs):
        return [inputs["x"], inputs["mul"], inputs["weight"], inputs["bias"]]


CASE = GroupedMulPolyCase()
