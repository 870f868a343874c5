"""poly_norm: x [batch, sequence, hidden], weight [3], bias [1]."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, random_tensor
from common.peers import found

from zero_inference.norms import poly_norm, poly_norm_ref


class PolyCase(DiffCase):
    name = "poly"
    forward_tensors, backward_tensors = 2, 3

    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        torch.manual_seed(0)
        return {
            "x": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "weight": random_tensor(3, dtype=dtype, device=device),
            "bias": random_tensor(1, dtype=dtype, device=device),
            "eps": eps,
        }

    def make_naive(self, inputs):
        return poly_norm_ref

    def make_cuda(self, inputs):
        return poly_norm

    def make_peers(self, inputs):
        def with_liger():
            from liger_kernel.transformers.functional import liger_poly_norm

            # its gradient of the bias is a scalar
            return lambda x, weight, bias, eps: liger_poly_norm(x, weight, bias.view(()), eps, False)

        return found({"liger": with_liger})

    def forward(self, obj, inputs):
        return obj(inputs["x"], inputs["weight"], inputs["bias"], inputs["eps"])

    def grad_inputs(self, inputs):
        return [inputs["x"], inputs["weight"], inputs["bias"]]


CASE = PolyCase()
