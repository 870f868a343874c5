"""layer_norm: x [batch, sequence, hidden], weight and bias [hidden]. Naive is torch's own layer norm."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, random_tensor
from common.peers import found

from zero_inference.norms import layer_norm


class LayerCase(DiffCase):
    name = "layer"
    forward_tensors, backward_tensors = 2, 3

    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        torch.manual_seed(0)
        return {
            "x": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "weight": random_tensor(hidden, dtype=dtype, device=device),
            "bias": random_tensor(hidden, dtype=dtype, device=device),
            "eps": eps,
        }

    def make_naive(self, inputs):
        return lambda x, weight, bias, eps: torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def make_cuda(self, inputs):
        return layer_norm

    def make_peers(self, inputs):
        def with_liger():
            from liger_kernel.transformers.functional import liger_layer_norm

            return liger_layer_norm

        return found({"liger": with_liger})

    def forward(self, obj, inputs):
        return obj(inputs["x"], inputs["weight"], inputs["bias"], inputs["eps"])

    def grad_inputs(self, inputs):
        return [inputs["x"], inputs["weight"], inputs["bias"]]


CASE = LayerCase()
