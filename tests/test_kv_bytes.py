"""The bytes of the KV cache, against what a real model of each family puts into its cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zero_inference import utils
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Job
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.kv_cache.host import SLOTS
from zero_inference.models.spec import ModelSpec
from zero_inference.models.tracing import tensors_in
from zero_inference.planning.plan import build_job
from zero_inference.utils.ranks import detect_ranks

BATCH, LENGTH = 3, 5
SMALL = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=103, max_position_embeddings=64
)  # fmt: skip
MLA = dict(
    SMALL, moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
)  # fmt: skip
BY_HEADS = {  # the log's formula is exact
    "opt": dict(SMALL, model_type="opt", word_embed_proj_dim=48),
    "bloom": dict(model_type="bloom", hidden_size=48, n_layer=3, n_head=4, vocab_size=103),
    "llama": dict(SMALL, model_type="llama", num_key_value_heads=2),
    "llama-narrow-heads": dict(SMALL, model_type="llama", num_key_value_heads=4, head_dim=10),
    "qwen3-wide-heads": dict(SMALL, model_type="qwen3", num_key_value_heads=2, head_dim=32),
    "gpt_neox": dict(SMALL, model_type="gpt_neox"),
    "mixtral": dict(SMALL, model_type="mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "falcon-one-kv-head": dict(SMALL, model_type="falcon", multi_query=True, new_decoder_architecture=False),
    "falcon-grouped": dict(SMALL, model_type="falcon", new_decoder_architecture=True, num_kv_heads=2),
    "gpt_bigcode": dict(SMALL, model_type="gpt_bigcode", multi_query=True),
}
OTHERS = {  # only the model knows
    "deepseek_v3": dict(MLA, model_type="deepseek_v3"),
    "deepseek_v2": dict(MLA, model_type="deepseek_v2"),
    "layers-that-share": dict(
        SMALL, model_type="gemma3n_text", num_hidden_layers=10, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=5,
        vocab_size_per_layer_input=103,
    ),
    "layers-of-two-widths": dict(SMALL, model_type="mimo_v2_flash", num_key_value_heads=2, head_dim=16, v_head_dim=8),
    "no-keys-and-values": dict(model_type="mamba", hidden_size=48, num_hidden_layers=2, vocab_size=103),
    "some-layers-without": dict(
        SMALL, model_type="qwen3_next", num_hidden_layers=4, num_key_value_heads=2, head_dim=16, num_experts=0,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip


def spec_of(config) -> ModelSpec:
    return ModelSpec(name="small", config=config, folder=None, snapshot=None, dtype=torch.float32, dummy=True)


def job_of(config, **options) -> Job:
    """What a run with `LENGTH` positions, 2 of them generated, would have to keep."""
    asked = RunConfig(model="small", batch_size=BATCH, prompt_len=LENGTH - 2, gen_len=2, **options)
    return build_job(asked, spec_of(config), detect_ranks())


def cached_layers(config) -> list[int]:
    """Bytes of keys and values of each layer after a real forward in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    with torch.no_grad():
        if config.model_type == "mamba":
            layers = model(ids, use_cache=True).cache_params.layers
        else:
            layers = model(ids, past_key_values=DeviceKVCache(config, LENGTH), use_cache=True).past_key_values.layers
    return [layer.nbytes() if hasattr(layer, "nbytes") else 0 for layer in layers]


@pytest.mark.parametrize("name", [*BY_HEADS, *OTHERS])
def test_kv_bytes_are_those_of_a_real_cache(name, no_gpu):
    from transformers import AutoConfig

    config = AutoConfig.for_model(**(BY_HEADS | OTHERS)[name])
    layers = cached_layers(config)
    job = job_of(config)
    assert (sum(layers) > 0) == (name != "no-keys-and-values")
    assert job.kv_bytes() == job.kv_device_bytes == sum(layers) and job.kv_host_bytes == 0
    offloaded = job_of(config, kv_offload=True)
    assert (offloaded.kv_device_bytes, offloaded.kv_host_bytes) == (0, sum(layers)), "a CPU reads them where they lie"
    on_gpu = replace(offloaded, ranks=replace(offloaded.ranks, device=torch.device("cuda", 0)))
    assert (on_gpu.kv_device_bytes, on_gpu.kv_host_bytes) == (SLOTS * max(layers), sum(layers))
    if name in BY_HEADS:
        assert utils.cache_bytes(config, BATCH, LENGTH) == sum(layers) // 2, "the log counts 2 bytes an element"


RECURRENT = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64, mamba_chunk_size=8,
    block_size=8, num_local_experts=2, num_experts=2, index_head_dim=8, index_n_heads=2, index_topk=6, head_dim=16,
)  # fmt: skip
STATES = {  # names of what their caches keep beside keys and values
    "mamba": "conv_states recurrent_states",
    "falcon_h1": "conv_states recurrent_states",
    "qwen3_next": "conv_states recurrent_states",
    "lfm2": "conv_states",
    "minimax": "linear_cache",
    "deepseek_v32": "indexer_keys",
}


@pytest.mark.parametrize("family", STATES)
def test_other_state_is_counted_on_the_device(family, no_gpu):
    from transformers import AutoConfig, AutoModelForCausalLM

    other = "linear_attention" if family != "lfm2" else "conv"
    kinds = {} if family in ("mamba", "falcon_h1", "deepseek_v32") else dict(layer_types=["full_attention", other] * 2)
    config = AutoConfig.for_model(family, **SMALL | MLA | RECURRENT | dict(num_hidden_layers=4) | kinds)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.arange(BATCH * LENGTH).view(BATCH, LENGTH), use_cache=True)
    cache = out.cache_params if family == "mamba" else out.past_key_values
    found = [getattr(holder, name, None) for holder in (cache, *cache.layers) for name in STATES[family].split()]
    expected = sum(tensor.nbytes for tensor in tensors_in(found))
    job = job_of(config, kv_offload=family != "mamba")
    assert job.state_bytes() == job.cache_device_bytes == expected > 0 == job.kv_device_bytes


def test_a_device_has_the_cache_of_its_own_layers(no_gpu):
    """Where layers take turns, as those of a hybrid model do, one device may have all keys and values, and the other all state."""
    from transformers import AutoConfig

    kinds = ["full_attention", "linear_attention"] * 2
    fields = SMALL | MLA | RECURRENT | dict(num_hidden_layers=4, layer_types=kinds)
    hybrid = job_of(AutoConfig.for_model("qwen3_next", **fields))
    assert hybrid.cache_bytes_on(hybrid.cache_share_on(0, (0, 1, 0, 1))) == hybrid.kv_bytes() > 0
    assert hybrid.cache_bytes_on(hybrid.cache_share_on(1, (0, 1, 0, 1))) == hybrid.state_bytes() > 0
    assert hybrid.cache_bytes_on(hybrid.cache_share_on(1, (0, 0, 1, 1))) == hybrid.cache_device_bytes // 2
    assert hybrid.cache_bytes_on(hybrid.cache_share_on(0, ())) == hybrid.cache_device_bytes
    plain = job_of(AutoConfig.for_model(**BY_HEADS["llama"]))
    layers = plain.spec.config.num_hidden_layers
    share = plain.cache_share_on(0, (0,) + (1,) * (layers - 1))
    assert plain.cache_bytes_on(share) == pytest.approx(plain.cache_device_bytes / layers, abs=1)
