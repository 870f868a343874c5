"""Decoder layers that are identical, and blocks that are found once for each kind of layer."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES
from test_kv_bytes import MLA, SMALL, spec_of
from torch import nn
from transformers import AutoConfig

from zero_inference.engines.stream import blocks
from zero_inference.engines.stream.blocks import lay_out_blocks
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models.empty_model import build_on_meta
from zero_inference.models.layers import decoder_layers, first_of_kind

LAYERS = 12
HEADS = dict(SMALL, num_key_value_heads=2, head_dim=16, pad_token_id=0)
MODELS = {name: dict(FAMILIES[name], vocab_size=103) for name in ("llama", "opt", "mixtral")} | {
    "gemma3": dict(HEADS, model_type="gemma3_text"),
    "some-layers-dense": dict(MLA, model_type="deepseek_v3", first_k_dense_replace=2),
    "dense-layers-between": dict(
        HEADS, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0, 5, 6]
    ),
    "one-layer-shared": dict(HEADS, model_type="zamba"),
}


def small_model(name: str) -> nn.Module:
    return build_on_meta(spec_of(AutoConfig.for_model(**MODELS[name] | {"num_hidden_layers": LAYERS})))


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_alike_layers_are_those_found_in_each(name, divided, monkeypatch):
    model, scheme = small_model(name), GroupQuantization(4, 16)
    found = lay_out_blocks(model, scheme, divided)
    monkeypatch.setattr(blocks, "first_of_kind", lambda model: {})
    assert found == lay_out_blocks(model, scheme, divided)
    assert [block.layer for block in found[0]] == sorted(block.layer for block in found[0])
    assert {block.layer for block in found[0]} == set(range(LAYERS))


def test_kinds_of_layers():
    assert set(first_of_kind(small_model("llama")).values()) == {0}
    assert set(first_of_kind(small_model("gemma3")).values()) == {0, 5}, "attention over a window, and over all"
    assert set(first_of_kind(small_model("some-layers-dense")).values()) == {0, 2}
    assert first_of_kind(small_model("one-layer-shared")) == {}


@pytest.mark.parametrize(
    "change, of_its_own_kind",
    [
        (lambda layers: setattr(layers[5].mlp, "up_proj", nn.Linear(64, 200, bias=False, device="meta")), True),
        (lambda layers: layers[5].input_layernorm.to(torch.float16), True),
        (lambda layers: setattr(layers[5].self_attn, "is_causal", False), True),
        (lambda layers: layers[5].mlp.register_forward_hook(lambda module, args, out: out + 1), True),
        (lambda layers: setattr(layers[7].mlp.up_proj, "weight", layers[3].mlp.up_proj.weight), False),
        (lambda layers: setattr(layers[3].mlp, "act_fn", type("FromACheckpoint", (nn.SiLU,), {})()), False),
    ],
    ids=["width", "dtype", "attribute", "hook", "shared", "code"],
)
def test_a_layer_that_differs(change, of_its_own_kind):
    model = small_model("llama")
    change(decoder_layers(model)[1])
    expected = dict.fromkeys(range(LAYERS), 0) | {5: 5}
    assert first_of_kind(model) == (expected if of_its_own_kind else {})
