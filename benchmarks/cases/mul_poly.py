"""fused_mul_poly_norm: x and mul [batch, sequence, hidden], weight [3], bias [1]."""

from __future__ import annotations

from common.diff_engine import DiffCase, installed

from zero_inference.norms import fused_mul_poly_norm, fused_mul_poly_norm_ref


class MulPolyCase(DiffCase):
    name = "mul_poly"
    forward_tensors, backward_tensors = 3, 5

    def shapes(self, x):
        return {"x": x, "mul": x, "weight": (3,), "bias": (1,)}

    def make_naive(self, inputs):
        return fused_mul_poly_norm_ref

    def make_cuda(self, inputs):
        return fused_mul_poly_norm

    def make_peers(self, inputs):
        def with_liger():
            from liger_kernel.transformers.functional import liger_poly_norm

            # its gradient of the bias is a scalar
            return lambda x, mul, weight, bias, eps: liger_poly_norm(x, weight, bias.view(()), eps, False) * mul

        return installed({"liger": with_liger})


CASE = MulPolyCase()
