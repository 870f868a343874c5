"""fused_add_layer_norm: x and residual [batch, sequence, hidden]; two outputs. Naive adds, then calls torch's layer norm."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, installed

from zero_inference.norms import fused_add_layer_norm


def add_then_norm(x, residual, weight, bias, eps):
    total = x + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, eps), total


class AddLayerCase(DiffCase):
    name = "add_layer"
    forward_tensors, backward_tensors = 4, 4

    def shapes(self, x):
        return {"x": x, "residual": x, "weight": x[-1:], "bias": x[-1:]}

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

        return installed({"liger": with_liger})


CASE = AddLayerCase()
