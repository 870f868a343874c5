"""fused_add_layer_norm: x and residual [batch, sequence, hidden]; two outputs. Naive adds, then calls torch's layer norm."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, random_tensor
from common.peers import found

from zero_inference.norms import fused_add_layer_norm


def add_then_norm(x, residual, weight, bias, eps):
    total = x + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, eps), total


class AddLayerCase(DiffCase):
    name = "add_layer"
    forward_tensors, backward_tensors = 4, 4

    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        torch.manual_seed(0)
        return {
            "x": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "residual": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "weight": random_tensor(hidden, dtype=dtype, device=device),
            "bias": random_tensor(hidden, dtype=dtype, device=device),
            "eps": eps,
        }

    def make_naive(self, inputs):
        return add_then_norm

    def make_cuda(self, inputs):
        return fused_add_layer_norm

    def make_peers(self, inputs):
        def with_liger():
            from liger_kernel.transformers.functional import liger_layer_norm

            def run(x, residual, weight, bias, eps):
                total = x + residual
                return liger_layer_norm(total, weight, bias, eps), total

            return run

        return found({"liger": with_liger})

    def forward(self, obj, inputs):
        return obj(inputs["x"], inputs["residual"], inputs["weight"], inputs["bias"], inputs["eps"])

    def grad_inputs(self, inputs):
        return [inputs["x"], inputs["residual"], inputs["weight"], inputs["bias"]]


CASE = AddLayerCase()
