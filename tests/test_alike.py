"""A pass without weights, of which a few layers of each kind run, against the pass of all layers; and blocks that are found once a kind."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES
from test_kv_bytes import BY_HEADS, BY_THE_MODEL, MLA, SMALL, spec_of
from torch import nn

from zero_inference.config.run_config import parse_options
from zero_inference.engines.stream import blocks
from zero_inference.engines.stream.blocks import lay_out_blocks
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models import meta_pass
from zero_inference.models.empty_model import build_on_meta
from zero_inference.models.layers import LayerKinds, decoder_layers, layer_kinds
from zero_inference.models.operators import trace_pass, trace_reads
from zero_inference.models.sizes import count_sizes
from zero_inference.models.spec import ModelSpec, resolve_model

LAYERS, TOKENS, PAST = 12, 9, 21
HEADS = dict(SMALL, num_key_value_heads=2, head_dim=16, pad_token_id=0)
MIXED = {  # layers of several kinds
    "gemma2": dict(HEADS, model_type="gemma2"),
    "gemma3": dict(HEADS, model_type="gemma3_text"),
    "gpt_oss": dict(HEADS, model_type="gpt_oss"),
    "llama4": dict(HEADS, model_type="llama4_text"),
    "qwen3_next": dict(HEADS, model_type="qwen3_next"),
    "recurrent_gemma": dict(HEADS, model_type="recurrent_gemma"),
    "some-layers-dense": dict(MLA, model_type="deepseek_v3", first_k_dense_replace=2),
    "dense-layers-between": dict(
        HEADS, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0, 5, 6]
    ),
    "one-layer-shared": dict(HEADS, model_type="zamba"),
}
SMALL_ONES = {name: dict(fields, vocab_size=103) for name, fields in FAMILIES.items()} | BY_HEADS | BY_THE_MODEL | MIXED
PRESETS = ["opt-125m", "qwen3-30b-a3b", "gpt-oss-120b"]


def small_one(name: str) -> tuple[nn.Module, ModelSpec]:
    from transformers import AutoConfig

    fields = SMALL_ONES[name]
    config = AutoConfig.for_model(**fields | {"n_layer" if "n_layer" in fields else "num_hidden_layers": LAYERS})
    return build_on_meta(spec_of(config)), spec_of(config)


def preset(name: str) -> tuple[nn.Module, ModelSpec]:
    spec = resolve_model(parse_options(["--model", name, "--dummy", "--dtype", "bfloat16"]), "cpu")
    return build_on_meta(spec), spec


def counted(model: nn.Module, spec: ModelSpec) -> tuple:
    """All that is found by passes without weights."""
    return trace_pass(model, spec, 1, PAST), trace_pass(model, spec, TOKENS, 0), count_sizes(model, spec)


@pytest.fixture
def all_layers(monkeypatch):
    """Has every layer run."""

    def counted_with_all(model: nn.Module, spec: ModelSpec) -> tuple:
        with monkeypatch.context() as patch:
            patch.setattr(meta_pass, "layer_kinds", lambda model: LayerKinds(()))
            return counted(model, spec)

    return counted_with_all


@pytest.mark.parametrize("name", [*SMALL_ONES, *PRESETS])
def test_a_few_layers_give_what_all_give(name, all_layers):
    model, spec = small_one(name) if name in SMALL_ONES else preset(name)
    found, whole = counted(model, spec), all_layers(model, spec)
    assert found == whole and None not in whole


@pytest.mark.parametrize("name", ["mixtral", "gemma3", "qwen3_next", "some-layers-dense", "one-layer-shared"])
def test_the_first_layer_of_a_kind_is_read_by_the_calls_that_read_it_where_all_run(name, monkeypatch):
    model, _ = small_one(name)
    kinds, prefix = layer_kinds(model), decoder_layers(model)[0]
    few = trace_reads.__wrapped__(model)
    monkeypatch.setattr(meta_pass, "layer_kinds", lambda model: LayerKinds(()))
    whole = trace_reads.__wrapped__(model)
    assert few.inside.items() <= whole.inside.items()
    assert len(few.inside) < len(whole.inside) or not kinds.repeated, "a few have run"
    firsts = {f"{prefix}.{first}" for first in kinds.first.values()} or {f"{prefix}.{n}" for n in range(LAYERS)}
    for one, every in zip(few.calls, whole.calls):
        of_firsts = [name for name in every if any(f"{name}.".startswith(f"{first}.") for first in firsts)]
        assert [one[name] for name in of_firsts] == [every[name] for name in of_firsts]
        assert all(one[first] == 1 for first in firsts)
    layer = f"{prefix}.0"
    assert all(few.only_inside(each, layer) for each, _ in model.named_parameters() if each.startswith(f"{layer}."))


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("name", ["opt", "mixtral", "gemma3", "dense-layers-between", "one-layer-shared"])
def test_blocks_of_alike_layers_are_those_found_in_each(name, divided, monkeypatch):
    model, _ = small_one(name)
    scheme = GroupQuantization(4, 16)
    found = lay_out_blocks(model, scheme, 1, divided)
    monkeypatch.setattr(blocks, "layer_kinds", lambda model: LayerKinds(()))
    assert found == lay_out_blocks(model, scheme, 1, divided)
    assert [block.layer for block in found[0]] == sorted(block.layer for block in found[0])
    assert {block.layer for block in found[0]} == set(range(LAYERS))


@pytest.mark.parametrize("name, runs", [("llama-3.1-405b", 3), ("mixtral-8x7b-v0.1", 3), ("deepseek-v3", 3 + 3)])
def test_of_a_large_model_three_layers_of_a_kind_run(name, runs, monkeypatch):
    model, spec = preset(name)
    layer = type(decoder_layers(model)[1][0])
    calls, forward = [], layer.forward

    def counting(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", counting)
    assert None not in counted(model, spec) and len(calls) == 3 * runs


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: setattr(layers[1], "mlp", layers[0].mlp),
        lambda layers: setattr(layers[7].mlp.up_proj, "weight", layers[3].mlp.up_proj.weight),
        lambda layers: setattr(layers[3].mlp, "act_fn", type("FromACheckpoint", (nn.SiLU,), {})()),
    ],
    ids=["module", "parameter", "code"],
)
def test_layers_that_cannot_be_told_apart_all_run(change, all_layers):
    model, spec = small_one("llama")
    change(decoder_layers(model)[1])
    assert layer_kinds(model).positions == ()
    assert counted(model, spec) == all_layers(model, spec)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.mlp, "up_proj", nn.Linear(64, 200, bias=False, device="meta")),
        lambda layer: layer.input_layernorm.to(torch.float16),
        lambda layer: setattr(layer.self_attn, "is_causal", False),
        lambda layer: layer.mlp.register_forward_hook(lambda module, args, out: out + 1),
    ],
    ids=["width", "dtype", "attribute", "hook"],
)
def test_a_layer_that_differs_is_of_its_own_kind(change):
    model, _ = small_one("llama")
    change(decoder_layers(model)[1][5])
    assert layer_kinds(model).positions == ((*range(5), *range(6, LAYERS)), (5,))


def do_something_else(layer, out, cache) -> torch.Tensor:
    return out.sin() if layer.self_attn.layer_idx % 2 else out


def keep_something(layer, out, cache) -> torch.Tensor:
    cache.__dict__.setdefault("kept", []).append(out.exp())  # until the pass has ended
    return out


@pytest.mark.parametrize("change", [do_something_else, keep_something])
def test_layers_of_a_kind_that_do_different_things_all_run(change, all_layers, monkeypatch):
    """By code that is no attribute: every second layer has one operator more, or each keeps a tensor in the cache."""
    model, spec = small_one("llama")
    plain = counted(model, spec)
    layer = type(decoder_layers(model)[1][0])
    forward = layer.forward
    changed = lambda self, *args, **kwargs: change(self, forward(self, *args, **kwargs), kwargs["past_key_values"])  # noqa: E731
    monkeypatch.setattr(layer, "forward", changed)
    found = counted(model, spec)
    assert found == all_layers(model, spec)
    if change is keep_something:
        assert found[1].peak_bytes > plain[1].peak_bytes
    else:
        assert found[0].launches == plain[0].launches + LAYERS // 2
