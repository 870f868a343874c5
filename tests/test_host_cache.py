"""The host KV cache against transformers' DynamicCache."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, build_model
from transformers import AutoConfig, DynamicCache

from zero_inference.engines.base import Transfers
from zero_inference.errors import RunError, UsageError
from zero_inference.kv_cache.host import HostKVCache


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
        torch.testing.assert_close(layer.kept[0], other.keys)
        torch.testing.assert_close(layer.kept[1], other.values)


def test_memory_is_exact_and_kept_over_a_reset():
    model = build_model("llama")
    cache = make(model.config, 10)
    ids = torch.arange(3, 9).reshape(2, 3)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        place = [layer.kept[0].data_ptr() for layer in cache.layers]
        cache.reset()
        again = model(ids, past_key_values=cache).logits
    assert torch.equal(first, again) and place == [layer.kept[0].data_ptr() for layer in cache.layers]
    assert cache.nbytes() == 3 * 2 * 10 * 2 * 2 * 8 * 4  # layers, K and V, positions, batch, kv heads, head_dim, bytes


def test_a_sliding_window_is_honoured():
    from transformers import AutoModelForCausalLM

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


def test_one_token_too_many_is_an_error():
    model = build_model("opt")
    with pytest.raises(RunError, match="has 4 positions"), torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=make(model.config, 4))


def test_state_space_layers_are_refused():
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(UsageError, match="linear_attention"):
        make(config, 4)
