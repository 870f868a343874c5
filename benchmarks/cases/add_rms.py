"""fused_add_rms_norm: x and residual [batch, sequence, hidden], weight [hidden]; two outputs, both with gradients."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, random_tensor
from common.peers import found

from zero_inference.norms import fused_add_rms_norm, fused_add_rms_norm_ref


class AddRMSCase(DiffCase):
    name = "add_rms"
    forward_tensors, backward_tensors = 4, 4

    def build_inputs(self, hidden, bs, sl, dtype, eps, device="cuda"):
        torch.manual_seed(0)
        return {
            "x": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "residual": random_tensor(bs, sl, hidden, dtype=dtype, device=device),
            "weight": random_tensor(hidden, dtype=dtype, device=device),
            "eps": eps,
        }

    def make_naive(self, inputs):
        return fused_add_rms_norm_ref

    def make_cuda(self, inputs):
        return fused_add_rms_norm

    def make_peers(self, inputs):
        def with_torch():
            def run(x, residual, weight, eps):
                total = x + residual
                return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total

            return run

        def with_liger():
            from liger_kernel.transformers.functional import liger_fused_add_rms_norm

            return lambda x, residual, weight, eps: liger_fused_add_rms_norm(x, residual, weight, eps, in_place=False)

        def with_quack():
            from quack import rmsnorm

            return lambda x, residual, weight, eps: rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)

        return found({"torch": with_torch, "liger": with_liger, "quack": with_quack})

    def forward(self, obj, inputs):
        return obj(inputs["x"], inputs["residual"], inputs["weight"], inputs["eps"])

    def grad_inputs(self, inputs):
        return [inputs["x"], inputs["residual"], inputs["weight"]]


CASE = AddRMSCase()
