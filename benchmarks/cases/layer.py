"""layer_norm: x [batch, sequence, hidden], weight and bias [hidden]. Naive is torch's own layer norm."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, installed

from zero_inference.norms import layer_norm


class LayerCase(DiffCase):
    name = "layer"
    forward_tensors, backward_tensors = 2, 3

    def shapes(self, x):
        return {"x": x, "weight": x[-1:], "bias": x[-1:]}

    def make_naive(self, inputs):
        return lambda x, weight, bias, eps: torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def make_cuda(self, inputs):
        return layer_norm

    def make_peers(self, inputs):
        def with_liger():
            from liger_kernel.transformers.functional import liger_layer_norm

            return liger_layer_norm

        return installed({"liger": with_liger})


CASE = LayerCase()
