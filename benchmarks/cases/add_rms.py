"""fused_add_rms_norm: x and residual [batch, sequence, hidden], weight [hidden]; two outputs, both with gradients."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, installed

from zero_inference.norms import fused_add_rms_norm, fused_add_rms_norm_ref


class AddRMSCase(DiffCase):
    name = "add_rms"
    forward_tensors, backward_tensors = 4, 4

    def shapes(self, x):
        return {"x": x, "residual": x, "weight": x[-1:]}

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

        return installed({"torch": with_torch, "liger": with_liger, "quack": with_quack})


CASE = AddRMSCase()
