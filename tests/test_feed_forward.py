"""What a module computes is read in its graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from zero_inference.models.mlp import COLUMNS, ROWS, Mlp, detect_mlp, weight_layout

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}


def block_of(model_type: str, name: str) -> nn.Module:
    config = AutoConfig.for_model(model_type, **SMALL, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    return next(module for path, module in model.named_modules() if path.endswith("layers.0." + name))


@pytest.mark.parametrize(
    "model_type, name, expected",
    [
        ("llama", "mlp", Mlp(("gate_proj", "up_proj"), "silu", "down_proj")),
        ("gemma2", "mlp", Mlp(("gate_proj", "up_proj"), "gelu_tanh", "down_proj")),
        ("gpt_neox", "mlp", Mlp(("dense_h_to_4h",), "gelu", "dense_4h_to_h")),
        ("phi3", "mlp", Mlp(("gate_up_proj", "gate_up_proj"), "silu", "down_proj")),
        ("llama", "self_attn", None),
        ("mixtral", "mlp", None),
    ],
)
def test_families(model_type, name, expected):
    assert detect_mlp(block_of(model_type, name)) == expected


def test_linear_modules_of_both_layouts():
    from transformers.models.falcon.modeling_falcon import FalconLinear
    from transformers.pytorch_utils import Conv1D

    x = torch.randn(3, 40)
    for module in (nn.Linear(40, 72), FalconLinear(40, 72), Conv1D(72, 40)):
        weight = module.weight if weight_layout(module) == ROWS else module.weight.T
        assert torch.allclose(functional.linear(x, weight, module.bias), module(x), atol=1e-5)
    assert weight_layout(Conv1D(72, 40)) == COLUMNS
    assert weight_layout(type("Other", (nn.Linear,), {})(40, 72)) is weight_layout(nn.Embedding(72, 40)) is None
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=1, n_head=4, vocab_size=99)
    mlp = AutoModelForCausalLM.from_config(config).eval().transformer.h[0].mlp
    assert detect_mlp(mlp) == Mlp(("c_fc",), "gelu_tanh", "c_proj")


class Odd(nn.Module):
    """`kind` says how it differs from a feed-forward."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        if kind in ("sum", "deep"):
            self.second = nn.Linear(8, 8)
        if kind == "learned":
            self.shape = nn.PReLU(init=1.0)

    def forward(self, x):
        hidden = self.first(x)
        if self.kind == "branches" and hidden.sum() > 0:
            hidden = -hidden
        if self.kind == "learned":
            return self.last(self.shape(hidden))
        if self.kind == "sum":
            return self.last(functional.relu(hidden) + self.second(x))
        if self.kind == "residual":
            return x + self.last(functional.relu(hidden))
        if self.kind == "deep":
            return self.last(functional.relu(self.second(functional.relu(hidden))))
        if self.kind == "unknown":
            return self.last(torch.sin(hidden))
        if self.kind == "slices":
            return self.last(torch.cat((functional.relu(hidden[..., :4]), hidden[..., 4:]), -1))
        return self.last(functional.dropout(functional.relu(hidden), 0.1, self.training))


@pytest.mark.parametrize("kind", ["branches", "learned", "sum", "residual", "deep", "unknown", "slices", "dropout"])
def test_another_computation_is_not_taken_for_one(kind):
    assert detect_mlp(Odd(kind).eval()) == (Mlp(("first",), "relu", "last") if kind == "dropout" else None)
