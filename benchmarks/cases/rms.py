"""rms_norm: x [batch, sequence, hidden], weight [hidden]."""

from __future__ import annotations

import torch
from common.diff_engine import DiffCase, installed

from zero_inference.norms import rms_norm, rms_norm_ref


class RMSCase(DiffCase):
    name = "rms"
    forward_tensors, backward_tensors = 2, 3

    def shapes(self, x):
        return {"x": x, "weight": x[-1:]}

    def make_naive(self, inputs):
        return rms_norm_ref

    def make_cuda(self, inputs):
        return rms_norm

    def make_peers(self, inputs):
        def with_torch():
            return lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

        def with_liger():
            from liger_kernel.transformers.functional import liger_rms_norm

            return lambda x, weight, eps: liger_rms_norm(x, weight, eps, in_place=False)

        def with_quack():
            from quack import rmsnorm

            return lambda x, weight, eps: rmsnorm(x, weight, eps=eps)

        return installed({"torch": with_torch, "liger": with_liger, "quack": with_quack})


CASE = RMSCase()
