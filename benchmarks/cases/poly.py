"""poly_norm: x [batch, sequence, hidden], weight [3], bias [1]."""

from __future__ import annotations

from common.diff_engine import DiffCase, installed

from zero_inference.norms import poly_norm, poly_norm_ref


class PolyCase(DiffCase):
    name = "poly"
    forward_tensors, backward_tensors = 2, 3

    def shapes(self, x):
        return {"x": x, "weight": (3,), "bias": (1,)}

    def make_naive(self, inputs):
        return poly_norm_ref

    def make_cuda(self, inputs):
        return poly_norm

    def make_peers(self, inputs):
        def with_liger():
            from liger_kernel.transformers.functional import liger_poly_norm

            # its gradient of the bias is a scalar
            return lambda x, weight, bias, eps: liger_poly_norm(x, weight, bias.view(()), eps, False)

        return installed({"liger": with_liger})


CASE = PolyCase()
