"""Decode attention by the CPU backend over keys and values in host memory, against plain transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_inference.cpu.attention import attention_reference
from zero_inference.cpu.hand_off import DirectCalls, HandOff, StreamSide, allocate_local_buffers
from zero_inference.cpu.pool import CpuPool
from zero_inference.errors import RunError, UsageError
from zero_inference.kv_cache import attention_patch
from zero_inference.kv_cache.attention_patch import patch_attention, why_cpu_cannot_attend, window_only_in_cache
from zero_inference.kv_cache.cpu_attention import (
    CpuAttention,
    CpuAttentionCache,
    attention_hand_off_bytes,
    window_of,
)
from zero_inference.kv_cache.device import refuse_kv_offload
from zero_inference.models.empty_model import build_on_meta
from zero_inference.models.prompts import greedy_config
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.transfers import Transfers

SMALL = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=256)
SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
OWN = {
    "mistral": SIZES | dict(num_hidden_layers=3, sliding_window=9),
    "gemma2": SIZES
    | dict(query_pre_attn_scalar=40, attn_logit_softcapping=2.0, sliding_window=11, attn_implementation="eager"),
    "gpt_oss": SIZES | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=10),
    "gpt2": dict(n_embd=64, n_layer=3, n_head=4),
}


@pytest.fixture(autouse=True)
def functions_as_they_were():
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    yield
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)


def small_model(family: str):
    if family in FAMILIES:
        return build_model(family)
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SMALL, **OWN[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.05 if "embed" in name else 0.2)
    return model


@pytest.fixture
def make():
    """make(model, length) -> a cache whose attention two threads compute."""
    pools = []

    def made(model, length: int, kind=CpuAttentionCache) -> CpuAttentionCache:
        calls = DirectCalls(CpuPool([-1, -1], spin_us=100), Transfers())
        pools.append(calls)
        return kind(model.config, length, False, False, calls.transfers, CpuAttention(calls))

    yield made
    for calls in pools:
        calls.close()


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def generated(model, ids: torch.Tensor, new_tokens: int, cache) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(new_tokens), past_key_values=cache
        )


@pytest.mark.parametrize("batch, length", [(1, 5), (3, 61)])
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_generated_ids_are_those_of_plain_transformers(family, batch, length, make):
    model, ids = small_model(family), prompts(batch, length)
    plain = generated(model, ids, 12, DynamicCache(config=model.config))
    assert len(plain[:, length:].unique()) > 1
    patch_attention(model)
    cache = make(model, length + 12)
    assert torch.equal(generated(model, ids, 12, cache), plain)
    cache.reset()
    assert torch.equal(generated(model, ids, 12, cache), plain)
    assert torch.equal(generated(model, ids, 12, DynamicCache(config=model.config)), plain)  # which stays as it was


@pytest.fixture
def crossings():
    """Calls in the order of the GPU's stream, of two threads: with buffers for a step and with hardly any, which leaves blocking ones."""
    from zero_inference.kernels.extension import load_extension, why_unavailable

    assert load_extension(), why_unavailable()
    made = []
    for nbytes in (1 << 20, 64):
        place = allocate_local_buffers(nbytes, nbytes, pinned=True)
        pool = CpuPool([-1, -1], 1000, place.flags)
        made.append(HandOff(pool, StreamSide(torch.device("cuda")), place, Transfers()))
    yield made
    for calls in made:
        calls.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("family", ["opt", "bloom", "llama", "mistral", "gemma2", "gpt_oss"])
def test_logits_on_a_gpu_by_both_ways_to_the_cores(family, asynchronous, crossings):
    model, ids = small_model(family).cuda(), prompts(3, 120).cuda()
    patch_attention(model)
    caches = [
        CpuAttentionCache(model.config, 120, True, asynchronous, calls.transfers, CpuAttention(calls))
        for calls in crossings
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
    by_hand_off, blocking = (calls.transfers for calls in crossings)
    assert by_hand_off.cpu_bytes == blocking.cpu_bytes > 0
    assert by_hand_off.host_to_device_bytes == blocking.host_to_device_bytes > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "bloom"])
def test_logits_of_passes_of_any_length(family, make):
    model, ids = small_model(family), prompts(2, 90)
    patch_attention(model)
    ours, theirs = make(model, 90), DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in ((0, 60), (60, 61), (61, 70), (70, 71), (71, 90)):
            logits = [model(ids[:, start:end], past_key_values=cache).logits for cache in (ours, theirs)]
            torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bloom"])
def test_padding_on_the_left_is_not_seen(family, make):
    model, ids = small_model(family), prompts(3, 20)
    patch_attention(model)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[2, :15] = 0
    found = []
    for cache in (make(model, 26), DynamicCache(config=model.config)):
        with torch.no_grad():
            found.append(
                model.generate(ids, attention_mask=mask, generation_config=greedy_config(6), past_key_values=cache)
            )
    assert torch.equal(*found)


@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_memory_for_a_crossing_is_what_a_pass_of_one_token_takes(family, monkeypatch, make):
    model, ids = small_model(family), prompts(3, 5)
    patch_attention(model)
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


def falcon():
    fields = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, new_decoder_architecture=False)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **SMALL, **fields)).eval()


def empty(config):
    return build_on_meta(ModelSpec("small", config, folder=None, snapshot=None, dtype=torch.bfloat16, dummy=True))


UNLIKE = {
    "diffllama": {},  # the difference of two softmaxes over the same keys
    "doge": {},  # a mask made of the values of all positions
    "jetmoe": dict(kv_channels=16, num_local_experts=2),  # keys are repeated for experts of attention
}


@pytest.mark.parametrize("family", UNLIKE)
def test_attention_of_another_kind_is_found_by_a_trial(family):
    assert "has an attention of its own" in why_cpu_cannot_attend(
        empty(AutoConfig.for_model(family, **SMALL | SIZES | UNLIKE[family]))
    )


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
    model = empty(AutoConfig.for_model(family, **SMALL | SIZES | dict(sliding_window=9) | changes))
    if kind is not None:
        model.__class__ = kind
    assert window_only_in_cache(model) is expected
    if expected:
        with pytest.raises(
            UsageError, match="sliding window that may be in transformers' cache alone: drop --kv-offload"
        ):
            refuse_kv_offload(model, expected)


def with_one_wrong(wrong, query, keys, values, logits, **how):
    if "mask" in wrong:
        return attention_reference(query, keys, values, logits, **how | wrong)
    return attention_reference(query, keys, values, replace(logits, **wrong), **how)


def test_a_trial_finds_what_the_cores_are_not_told(monkeypatch):
    """Logits that are scaled, capped, or share their softmax with sinks: with the trial's attention wrong by one of these at a time."""
    families = {"scale": "llama", "softcap": "gemma2", "sinks": "gpt_oss", "slopes": "bloom", "mask": "mistral"}
    for told, family in families.items():
        model = empty(small_model(family).config)
        assert why_cpu_cannot_attend(model) is None
        with monkeypatch.context() as patched:
            wrong = {"scale": 0.9, "softcap": 0.0}.get(told)
            of_trial = partial(with_one_wrong, {told: wrong})
            patched.setattr(attention_patch, "attention_reference", of_trial)
            assert "computes something else" in why_cpu_cannot_attend(model), told


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_the_cores_attend_for_layers_of_hybrids(family, make):
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
    mamba = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64, mamba_chunk_size=8)
    kinds = dict(layer_types=["linear_attention", "full_attention"] * 2, num_experts=0)
    config = AutoConfig.for_model(family, **SMALL | SIZES | (mamba if family == "falcon_h1" else linear | kinds))
    assert why_cpu_cannot_attend(empty(config)) is None
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), prompts(2, 70)
    patch_attention(model)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    found = []
    ours = make(model, 76)
    for cache in (ours, ours, DynamicCache(config=model.config)):
        if isinstance(cache, CpuAttentionCache):
            cache.reset()
        with torch.no_grad():
            found.append(
                model.generate(ids, attention_mask=mask, generation_config=greedy_config(6), past_key_values=cache)
            )
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


def test_attention_that_passes_the_functions_by_is_an_error(make):
    model, ids = falcon(), prompts(1, 5)
    with pytest.raises(RunError, match="use --cpu-compute off"):
        generated(model, ids, 4, make(model, 20))


def test_keys_that_are_changed_behind_the_cache_are_an_error(make):
    model, ids = small_model("llama"), prompts(1, 5)
    patch_attention(model)

    class Changed(CpuAttentionCache):
        def update(self, *args, **options):
            keys, values = super().update(*args, **options)
            return keys * 2, values

    with pytest.raises(RunError, match="changed its keys"):
        generated(model, ids, 4, make(model, 20, Changed))
