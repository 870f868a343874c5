"""KV caches in host memory, attended to by the device or by the CPU, against plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_inference.cpu.attention import attention_reference
from zero_inference.cpu.hand_off import DirectCalls, HandOff, Lane, StreamSide, allocate_buffers
from zero_inference.cpu.pool import CpuPool
from zero_inference.errors import RunError, UsageError
from zero_inference.kv_cache import attention_patch
from zero_inference.kv_cache.attention_patch import patch_attention, why_cpu_cannot_attend, window_only_in_cache
from zero_inference.kv_cache.cpu_attention import CpuAttention, CpuAttentionCache, attention_hand_off_bytes, window_of
from zero_inference.kv_cache.device import PreallocatedLayer, refuse_kv_offload
from zero_inference.kv_cache.host import HostKVCache
from zero_inference.models.empty_model import build_on_meta, cache_class
from zero_inference.models.prompts import greedy_config
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.timing import Transfers

SMALL = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=256)
SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64, mamba_chunk_size=8)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16)
INDEXER = dict(num_key_value_heads=4, index_head_dim=8, index_n_heads=2, index_topk=6)
HYBRIDS = {
    "qwen3_next": LINEAR | dict(layer_types=["linear_attention", "full_attention"] * 2, num_experts=0),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "falcon_h1": MAMBA,
    "minimax": dict(layer_types=["full_attention", "linear_attention"] * 2, block_size=8, num_local_experts=2),
    "deepseek_v32": LATENT | EXPERTS | INDEXER,
}
OWN = {
    "mistral": dict(num_hidden_layers=3, sliding_window=9),
    "gemma2": dict(
        query_pre_attn_scalar=40, attn_logit_softcapping=2.0, sliding_window=11, attn_implementation="eager"
    ),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=10),
    "gpt2": dict(n_embd=64, n_layer=3, n_head=4),
}


@pytest.fixture(autouse=True)
def functions_as_they_were():
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    yield
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)


def config_of(family: str, **changes):
    sizes = {} if family == "gpt2" else SIZES
    return AutoConfig.for_model(family, **SMALL | sizes | OWN.get(family, {}) | HYBRIDS.get(family, {}) | changes)


def small_model(family: str):
    if family in FAMILIES:
        return build_model(family)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    if family in OWN:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0.0, 0.05 if "embed" in name else 0.2)
    return model


@pytest.fixture
def make():
    """make(model, length) -> a cache whose attention two threads compute; or of the class HostKVCache."""
    pools = []

    def made(model, length: int, kind=CpuAttentionCache):
        given = model.config, length, False, False
        if kind is HostKVCache:
            return kind(*given, Transfers(), cache_class(model))
        calls = DirectCalls(CpuPool([-1, -1], spin_us=100), Transfers())
        pools.append(calls)
        patch_attention(model)
        return kind(*given, calls.transfers, CpuAttention(calls), cache_class(model))

    yield made
    for calls in pools:
        calls.close()


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def generated(model, ids: torch.Tensor, new_tokens: int, cache, mask=None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    settings = greedy_config(new_tokens)
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, generation_config=settings, past_key_values=cache)


def own_cache(model):
    return DynamicCache(config=model.config) if cache_class(model) is DynamicCache else None


@pytest.mark.parametrize("batch, length", [(1, 5), (3, 61)])
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_generated_ids_are_those_of_plain_transformers(family, batch, length, make):
    model, ids = small_model(family), prompts(batch, length)
    plain = generated(model, ids, 12, own_cache(model))
    assert len(plain[:, length:].unique()) > 1
    cache = make(model, length + 12)
    assert torch.equal(generated(model, ids, 12, cache), plain)
    cache.reset()
    assert torch.equal(generated(model, ids, 12, cache), plain)
    assert torch.equal(generated(model, ids, 12, own_cache(model)), plain)  # which stays as it was


@pytest.mark.parametrize("kind", [HostKVCache, CpuAttentionCache])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "gemma2", "gpt_oss"])
def test_logits_of_passes_of_any_length(family, kind, make):
    model, ids = small_model(family), prompts(2, 90)
    ours, theirs = make(model, 90, kind), own_cache(model)
    with torch.no_grad():
        for start, end in ((0, 60), (60, 61), (61, 70), (70, 71), (71, 90)):
            logits = [model(ids[:, start:end], past_key_values=cache).logits for cache in (ours, theirs)]
            torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-5)
    assert ours.get_seq_length() == 90


def test_memory_is_exact_and_kept_over_a_reset(make):
    model = build_model("llama")
    cache = make(model, 10, HostKVCache)
    ids = torch.arange(3, 9).reshape(2, 3)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        buffers = [layer.stored[0].data_ptr() for layer in cache.layers]
        cache.reset()
        again = model(ids, past_key_values=cache).logits
    assert torch.equal(first, again) and buffers == [layer.stored[0].data_ptr() for layer in cache.layers]
    assert cache.nbytes() == 3 * 2 * 10 * 2 * 2 * 8 * 4  # layers, K and V, positions, batch, kv heads, head_dim, bytes


@pytest.mark.parametrize("kind", [HostKVCache, CpuAttentionCache])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bloom", *HYBRIDS])
def test_padding_on_the_left_is_not_seen_and_hybrids_keep_their_other_state(family, kind, make):
    """In generations that follow each other, also of other numbers of sequences."""
    model, ids = small_model(family), prompts(3, 20)
    if kind is CpuAttentionCache and why_cpu_cannot_attend(empty(model.config)):
        assert family in HYBRIDS
        return
    cache = make(model, 26, kind)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[2, :15] = 0
    for start in (0, 4):
        cache.reset()
        given = dict(ids=ids[:, start:], new_tokens=6, mask=mask[:, start:])
        assert torch.equal(generated(model, **given, cache=cache), generated(model, **given, cache=own_cache(model)))
    with_keys = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer) and layer.stored]
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    assert len(with_keys) == sum("linear" not in each and each != "conv" for each in kinds)


@pytest.mark.parametrize(
    "config, why",
    [
        (dict(model_type="mamba", num_hidden_layers=1), "takes no past_key_values"),
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


@pytest.fixture
def hand_offs():
    """Calls in the order of the GPU's stream, of two threads: with buffers for a step and with hardly any, which makes them blocking."""
    from zero_inference.kernels.extension import load_extension, why_unavailable

    assert load_extension(), why_unavailable()
    made = []
    for nbytes in (1 << 20, 64):
        flags, (buffers,) = allocate_buffers(nbytes, nbytes, pinned=True)
        pool = CpuPool([-1, -1], 1000, flags)
        made.append(HandOff(pool, [Lane(StreamSide(torch.device("cuda")), buffers)], Transfers()))
    yield made
    for calls in made:
        calls.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("family", ["opt", "bloom", "llama", "mistral", "gemma2", "gpt_oss"])
def test_logits_on_a_gpu_by_hand_off_and_blocking(family, asynchronous, hand_offs):
    model, ids = small_model(family).cuda(), prompts(3, 120).cuda()
    patch_attention(model)
    caches = [
        CpuAttentionCache(model.config, 120, True, asynchronous, calls.transfers, CpuAttention(calls))
        for calls in hand_offs
    ]
    for turn in range(2):
        theirs = DynamicCache(config=model.config)
        with torch.no_grad():
            for start, end in ((0, 100 - turn), *((i, i + 1) for i in range(100 - turn, 115)), (115, 119)):
                logits = [model(ids[:, start:end], past_key_values=cache).logits for cache in (*caches, theirs)]
                torch.testing.assert_close(logits[0], logits[2], atol=5e-4, rtol=5e-4)
                torch.testing.assert_close(logits[1], logits[2], atol=5e-4, rtol=5e-4)
        for cache in caches:
            cache.reset()
    by_hand_off, blocking = (calls.transfers for calls in hand_offs)
    assert by_hand_off.cpu_bytes == blocking.cpu_bytes > 0
    assert by_hand_off.host_to_device_bytes == blocking.host_to_device_bytes > 0


@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_memory_for_a_crossing_is_what_a_pass_of_one_token_takes(family, monkeypatch, make):
    model, ids = small_model(family), prompts(3, 5)
    taken = set()
    attend = CpuAttention.__call__

    def watched(self, layer, query, window, mask):
        out = attend(self, layer, query, window, mask)
        taken.add((query.nbytes + sum(new.nbytes for new in layer.new_states), out.nbytes))  # before they are let go
        return out

    monkeypatch.setattr(CpuAttention, "__call__", watched)
    generated(model, ids, 3, make(model, 8))
    assert taken == {attention_hand_off_bytes(model.config, 3, 4)}


def test_a_window_on_the_host_is_recognised():
    seen = torch.ones((3, 1, 1, 20), dtype=torch.bool)
    seen[..., :8] = False
    added = torch.zeros((3, 1, 1, 20)).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert window_of(seen) == window_of(added) == 12
    seen[1, ..., 8] = False
    assert window_of(seen) == window_of(added + 0.5) == 0
    assert window_of(torch.ones((1, 1, 2, 20), dtype=torch.bool)) == 0


def empty(config):
    return build_on_meta(ModelSpec("small", config, folder=None, snapshot=None, dtype=torch.bfloat16, dummy=True))


UNLIKE = {
    "diffllama": {},  # the difference of two softmaxes over the same keys
    "doge": {},  # a mask made of the values of all positions
    "jetmoe": dict(kv_channels=16, num_local_experts=2),  # keys are repeated for experts of attention
}


@pytest.mark.parametrize("family", UNLIKE)
def test_attention_of_another_kind_is_found_by_a_trial(family):
    assert "has an attention of its own" in why_cpu_cannot_attend(empty(config_of(family, **UNLIKE[family])))


class LooksAtWeights(MistralForCausalLM):
    """Code that a trial without weights cannot run."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        self.lm_head.weight.sum().item()
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize(
    "family, changes, kind, expected",
    [
        ("mistral", {}, None, False),
        ("mistral", dict(vocab_size=4096, sliding_window=None), LooksAtWeights, False),
        ("mistral", dict(vocab_size=4096), LooksAtWeights, True),
        ("mistral", dict(rms_norm_eps=float("nan")), None, True),
        ("moshi", dict(ffn_dim=128, audio_vocab_size=32, num_key_value_heads=4, sliding_window=8), None, True),
    ],
    ids=["of the masks", "no window", "not tried", "not finite", "of the cache"],
)
def test_a_window_that_may_be_of_the_cache_alone_leaves_keys_in_it(family, changes, kind, expected):
    model = empty(config_of(family, **changes))
    if kind is not None:
        model.__class__ = kind
    assert window_only_in_cache(model) is expected
    if expected:
        with pytest.raises(UsageError, match="sliding window that may be in transformers' cache alone: drop"):
            refuse_kv_offload(model, expected)


@pytest.mark.parametrize(
    "family, wrong",
    [
        ("llama", {"scale": 0.9}),
        ("gemma2", {"softcap": 0.0}),
        ("gpt_oss", {"sinks": None}),
        ("bloom", {"slopes": None}),
        ("mistral", {"mask": None}),
    ],
)
def test_a_trial_finds_attention_that_is_wrong_in_one_option(family, wrong, monkeypatch):
    def attention(query, keys, values, logits, **options):
        if "mask" in wrong:
            return attention_reference(query, keys, values, logits, **options | wrong)
        return attention_reference(query, keys, values, replace(logits, **wrong), **options)

    model = empty(small_model(family).config)
    assert why_cpu_cannot_attend(model) is None
    monkeypatch.setattr(attention_patch, "attention_reference", attention)
    assert "computes something else" in why_cpu_cannot_attend(model)


def test_attention_that_passes_the_functions_by_is_an_error(make):
    fields = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, new_decoder_architecture=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **SMALL, **fields)).eval()
    with pytest.raises(RunError, match="use --cpu-compute off"):
        generated(model, prompts(1, 5), 4, make(model, 20))


def test_keys_that_are_changed_behind_the_cache_are_an_error(make):
    class Changed(CpuAttentionCache):
        def update(self, *args, **options):
            keys, values = super().update(*args, **options)
            return keys * 2, values

    model = small_model("llama")
    with pytest.raises(RunError, match="changed its keys"):
        generated(model, prompts(1, 5), 4, make(model, 20, Changed))
