"""int8 and int4 under ZeRO-3: the error is small, the checkpoint's dtype does not matter, nothing stays patched."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILIES, VOCAB, need_smollm2
from kernel_cases import relative_error

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.deepspeed import quantization
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import plan_run
from zero_inference.utils.ranks import detect_ranks, start_process_group

BOUND = {8: 0.02, 4: 0.15}
# Rounding to 4 bits costs each random matrix 5.5% at groups of 8, 6.5% at 16 and 7.9% at 32, and the errors of embedding,
# layers and head add up; q_norm and k_norm lift those of a random Qwen3. smollm2's weights came rounded in groups of 32.
GROUP = {"llama": 16, "mixtral": 16, "qwen3": 8, "gpt_neox": 16}


def logits_of(config: RunConfig, ids: torch.Tensor) -> tuple[torch.Tensor, dict]:
    ranks = detect_ranks()
    spec = resolve_model(config, "cpu")
    start_process_group(ranks)
    loaded = plan_run(config, spec, ranks).load()
    try:
        with torch.no_grad():
            logits = loaded.model(ids.to(loaded.device)).logits.float().cpu()
        return logits, loaded.facts | {"weight_bytes": loaded.weight_bytes}
    finally:
        loaded.close()


@functools.cache
def exact_logits(model: str) -> torch.Tensor:
    ids = random_ids(5, 2, 24, VOCAB)
    return logits_of(RunConfig(model=model, engine="resident", dtype="float32"), ids)[0]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", [*FAMILIES, "smollm2"])
def test_logits_stay_close(family, bits, checkpoints):
    if family == "smollm2":
        need_smollm2()
    model = "smollm2-135m" if family == "smollm2" else str(checkpoints(family, lively=False))
    ids, exact = random_ids(5, 2, 24, VOCAB), exact_logits(model)
    scheme = dict(quant_bits=bits, quant_group_size=GROUP.get(family, 32))
    config = RunConfig(model=model, dtype="float32", cpu_offload=True, **scheme)
    found, facts = logits_of(config, ids)
    error = relative_error(found, exact)
    assert 0 < error < BOUND[bits], error
    streamed, stream_facts = logits_of(replace(config, engine="stream").validate(), ids)
    assert 0 < relative_error(streamed, exact) < BOUND[bits]
    assert not any("experts" in name for name in stream_facts["not_quantized"])
    if family == "mixtral":
        assert facts["quantized_fraction"] < 0.5 and any("experts" in name for name in facts["not_quantized"])
    else:
        assert facts["quantized_fraction"] > 0.9 and not any("proj" in name for name in facts["not_quantized"])


def test_a_matrix_that_is_too_narrow_for_groups_keeps_its_dtype_under_both_engines(tmp_path):
    """The low ranks of DeepSeek's attention, 24 and 16 columns."""
    from transformers import DeepseekV3Config

    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    ranks = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, head_dim=8)
    DeepseekV3Config(**sizes, **ranks, num_key_value_heads=4, first_k_dense_replace=2).save_pretrained(tmp_path)
    config = RunConfig(model=str(tmp_path), dummy=True, dtype="float32", cpu_offload=True)
    ids = random_ids(5, 1, 8, VOCAB)
    exact, _ = logits_of(config, ids)
    for engine in ("deepspeed", "stream"):
        asked = replace(config, engine=engine, quant_bits=8, quant_group_size=32).validate()
        found, facts = logits_of(asked, ids)
        assert relative_error(found, exact) < BOUND[8]
        kept = {name.rpartition("self_attn.")[2] for name in facts["not_quantized"] if "self_attn" in name}
        assert kept == {"q_b_proj.weight", "kv_b_proj.weight"}, engine


@pytest.mark.parametrize("bits", [8, 4])
def test_a_float16_checkpoint_in_bfloat16_is_not_garbage(bits, checkpoints):
    folder = str(checkpoints("llama", "float16", lively=False))
    ids = random_ids(6, 2, 24, VOCAB)
    exact, _ = logits_of(RunConfig(model=folder, engine="resident", dtype="float32"), ids)
    scheme = dict(quant_bits=bits, quant_group_size=16)
    found, _ = logits_of(RunConfig(model=folder, dtype="bfloat16", cpu_offload=True, **scheme), ids)
    assert relative_error(found, exact) < BOUND[bits] + 0.02


def test_stored_bytes_are_those_of_the_packed_format(checkpoints):
    scheme = dict(quant_bits=4, quant_group_size=32)
    config = RunConfig(model=str(checkpoints("llama")), dtype="float32", cpu_offload=True, **scheme)
    _, facts = logits_of(config, random_ids(5, 1, 4, VOCAB))
    hidden, inner, kv, layers = 64, 192, 16, 3
    matrices = 2 * VOCAB * hidden + layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    vectors = (2 * layers + 1) * hidden
    assert facts["weight_bytes"] == matrices // 2 + 2 * 4 * matrices // 32 + 4 * vectors


@pytest.mark.parametrize("bits", [8, 4])
def test_a_cpu_dequantizes_row_by_row_what_deepspeed_does_at_once(bits, monkeypatch):
    monkeypatch.setattr(quantization, "BLOCK_NUMEL", 100)  # three rows of 32
    settings = quantization.quantization_settings(RunConfig(quant_bits=bits, quant_group_size=16))
    torch.manual_seed(bits)
    small, large = (torch.nn.Parameter(torch.randn(rows, 32).bfloat16(), requires_grad=False) for rows in (7, 11))
    for weight in (small, large):
        quantization.quantize_parameter(weight, settings)
    plain_linear, plain_embedding = F.linear, F.embedding
    functionals, of_another_model = quantization.patch_functionals(), quantization.patch_functionals()
    of_another_model.close()
    try:
        for weight in (small, large, small):
            packed, scale, minimum = weight.deconcat(weight)
            expected = weight.dequantizer.dequantize(packed.view(torch.uint8), scale, minimum)
            x = torch.randn(2, 32).bfloat16()
            assert torch.equal(F.linear(x, weight), plain_linear(x, expected))
        buffer = F.linear._buffer
        F.linear(x, large)
        assert F.linear._buffer is buffer and buffer.numel() == 11 * 32, "one piece of memory, of the largest weight"
    finally:
        functionals.close()
    assert F.linear is plain_linear and F.embedding is plain_embedding


def test_quantized_weights_on_disk_give_the_logits_of_those_in_host_memory(tmp_path):
    """Of opt-125m, whose small matrices DeepSpeed does not write to the disk when they have 8 bits."""
    config = RunConfig(model="opt-125m", dummy=True, dtype="float32", quant_bits=8).validate()
    ids = random_ids(5, 2, 24, 1000)
    in_memory, _ = logits_of(replace(config, cpu_offload=True), ids)
    on_disk, _ = logits_of(replace(config, disk_offload=True, offload_dir=str(tmp_path)), ids)
    assert torch.equal(in_memory, on_disk)
