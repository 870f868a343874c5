"""The host KV cache against transformers' DynamicCache."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, build_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from zero_inference.engines.base import Transfers
from zero_inference.errors import UsageError
from zero_inference.kv_cache.device import PreallocatedLayer, refuse_kv_offload
from zero_inference.kv_cache.host import HostKVCache
from zero_inference.models.empty_model import cache_class


def make(config, length):
    return HostKVCache(config, length, pinned=False, asynchronous=False, transfers=Transfers())


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_those_of_a_dynamic_cache(family):
    model = build_model(family)
    ours, theirs = make(model.config, 11), DynamicCache()
    ids = torch.randint(3, 300, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for start, end in ((0, 7), (7, 8), (8, 9), (9, 11)):
            logits = [model(ids[:, start:end], past_key_values=cache).logits for cache in (ours, theirs)]
            torch.testing.assert_close(*logits)
    assert ours.get_seq_length() == 11
    for layer, other in zip(ours.layers, theirs.layers):
        torch.testing.assert_close(layer.stored[0], other.keys)
        torch.testing.assert_close(layer.stored[1], other.values)


def test_memory_is_exact_and_kept_over_a_reset():
    model = build_model("llama")
    cache = make(model.config, 10)
    ids = torch.arange(3, 9).reshape(2, 3)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        place = [layer.stored[0].data_ptr() for layer in cache.layers]
        cache.reset()
        again = model(ids, past_key_values=cache).logits
    assert torch.equal(first, again) and place == [layer.stored[0].data_ptr() for layer in cache.layers]
    assert cache.nbytes() == 3 * 2 * 10 * 2 * 2 * 8 * 4  # layers, K and V, positions, batch, kv heads, head_dim, bytes


def test_a_sliding_window_is_honoured():
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "mistral",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        sliding_window=4,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 100, (1, 14))
    ours, theirs = make(config, 14), DynamicCache(config=config)
    with torch.no_grad():
        for start, end in [(0, 9), *((i, i + 1) for i in range(9, 14))]:
            torch.testing.assert_close(
                model(ids[:, start:end], past_key_values=ours).logits,
                model(ids[:, start:end], past_key_values=theirs).logits,
            )


SMALL = dict(
    vocab_size=103, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64, mamba_chunk_size=8)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16)
HYBRIDS = {  # with the number of layers that keep keys and values
    "qwen3_next": (LINEAR | dict(layer_types=["linear_attention", "full_attention"] * 2, num_experts=0), 2),
    "lfm2": (dict(layer_types=["conv", "full_attention"] * 2), 2),
    "falcon_h1": (MAMBA, 4),
    "minimax": (dict(layer_types=["full_attention", "linear_attention"] * 2, block_size=8, num_local_experts=2), 2),
    "deepseek_v32": (
        LATENT | EXPERTS | dict(num_key_value_heads=4, index_head_dim=8, index_n_heads=2, index_topk=6),
        4,
    ),
}


def hybrid(family):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | HYBRIDS[family][0])).eval()


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_keep_their_other_state_beside_it(family):
    """Of sequences that are padded on the left, in generations that follow each other, also of other numbers of sequences."""
    model = hybrid(family)
    ids = torch.randint(3, 100, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    cache = HostKVCache(model.config, 16, False, False, Transfers(), cache_class(model))
    for start in (0, 3):
        cache.reset()
        given = dict(inputs=ids[:, start:], attention_mask=mask[:, start:], **options)
        assert torch.equal(model.generate(**given, past_key_values=cache), model.generate(**given))
    kept = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer) and layer.stored]
    assert len(kept) == HYBRIDS[family][1] and cache.nbytes() == sum(layer.nbytes() for layer in kept)


@pytest.mark.parametrize(
    "config, why",
    [
        (dict(model_type="mamba", num_hidden_layers=1), "takes no past_key_values"),
        (dict(model_type="openai-gpt", n_layer=1), "takes no past_key_values"),
        (dict(model_type="xlnet", n_layer=1), "takes no past_key_values"),
        (dict(model_type="deepseek_v4", num_hidden_layers=1, **EXPERTS), "form of its own"),
        (
            dict(model_type="qwen3_next", num_hidden_layers=1, layer_types=["linear_attention"]),
            "has no layers that keep",
        ),
    ],
)
def test_models_without_such_keys_and_values_are_refused(config, why):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with pytest.raises(UsageError, match=f"^--kv-offload keeps keys and values in host memory, and .* {why}.*: drop"):
        refuse_kv_offload(model)
