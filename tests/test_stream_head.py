"""The output head in 8 bits under the stream engine: its products, which models have it, and its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, build_model
from test_machine import MACHINE, planned
from torch import nn
from transformers import LlamaForCausalLM

from zero_inference.config.run_config import RunConfig
from zero_inference.cpu.products import quantize
from zero_inference.engines.stream import vocabulary
from zero_inference.engines.stream.vocabulary import HeadWeight, QuantizedHead, find_head
from zero_inference.hardware.machine import Machine
from zero_inference.kernels.quantization import GroupQuantization, dequantize
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.cost import pass_time
from zero_inference.planning.make_plan import plan_run
from zero_inference.utils.ranks import detect_ranks, start_process_group

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # relative, of norms
GROUP = 32


def restored(weight: torch.Tensor, scheme: GroupQuantization) -> torch.Tensor:
    out = torch.empty_like(weight)
    dequantize(scheme.as_weight(*quantize(weight, scheme)), out)
    return out


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bias", [False, True])
def test_few_and_many_rows_equal_a_product_with_the_whole_head(bias, dtype, monkeypatch):
    """33 rows and more take parts of 256 rows of the head, the last one smaller; or of 3, where there is less memory. It is quantized in
    parts of 64 rows."""
    monkeypatch.setattr(vocabulary, "HEAD_CHUNK_BYTES", 64 * 128 * dtype.itemsize)
    device, rows, columns = detect_ranks().device, 700, 128
    torch.manual_seed(1)
    head = nn.Linear(columns, rows, bias, device=device, dtype=dtype).requires_grad_(False)
    weight = HeadWeight("lm_head.weight", (rows, columns), GroupQuantization(8, 64, dtype))
    whole = restored(head.weight, weight.scheme).double()
    packed = weight.packed(head.weight.cpu(), device)
    assert sum(part.nbytes for part in packed.tensors.values()) == weight.stored_bytes
    for held in (300, 3):
        workspace = torch.full((held * weight.row_bytes,), 255, dtype=torch.uint8, device=device)
        quantized = QuantizedHead(head, weight, packed, workspace)
        for shape in ((1, 1), (2, 16), (3, 11), (1, 100)):
            x = torch.randn(*shape, columns, device=device).to(dtype)
            exact = nn.functional.linear(x.double(), whole, None if head.bias is None else head.bias.double())
            found = head(x)
            assert found.dtype == dtype and found.shape == exact.shape
            assert (found.double() - exact).norm() / exact.norm() < BOUNDS[dtype], (held, shape)
        quantized.close()
    assert head.forward.__func__ is nn.Linear.forward


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ReadsItsHead(LlamaForCausalLM):
    def forward(self, *args, **call):
        out = super().forward(*args, **call)
        out.logits = out.logits + self.lm_head.weight.sum()
        return out


def test_which_heads_are_quantized():
    def found(model, *sizes):
        return find_head(model, torch.float32, sizes or (GROUP,))

    llama = build_model("llama")
    assert found(llama) == HeadWeight("lm_head.weight", (VOCAB, 64), GroupQuantization(8, GROUP, torch.float32))
    assert found(llama, 48, 64).scheme.group_size == 64 and found(llama, 48) is None
    assert find_head(llama, torch.bfloat16, (GROUP,)) is None, "a head that is kept in float32"
    assert found(build_model("opt")) is None, "tied"
    llama.lm_head = Doubling(64, VOCAB, bias=False)
    assert found(llama) is None, "a forward of its own"
    assert found(ReadsItsHead(build_model("llama").config)) is None, "read elsewhere"


def loaded_model(folder, **options):
    config = RunConfig(model=str(folder), engine="stream", dtype="float32", **options).validate()
    ranks = detect_ranks()
    start_process_group(ranks)
    plan = plan_run(config, resolve_model(config, ranks.device.type), ranks)
    return plan, plan.load()


@pytest.mark.parametrize("bits", [8, 4])
def test_an_untied_head_is_stored_and_scores_as_planned(bits, tmp_path):
    vocabulary, hidden, inner, kv, layers = 3000, 64, 192, 16, 3
    model = build_model("llama", vocab_size=vocabulary)
    model.save_pretrained(tmp_path)
    plan, loaded = loaded_model(tmp_path, quant_bits=bits, quant_group_size=GROUP)
    try:
        numel = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
        stored = numel * bits // 8 + 2 * 4 * numel // GROUP + 4 * ((2 * layers + 1) * hidden + vocabulary * hidden)
        stored += vocabulary * hidden + 2 * 4 * vocabulary * hidden // GROUP
        assert loaded.weight_bytes == plan.engine_plan.weight_bytes == stored
        assert loaded.facts["stream"]["head_bits"] == 8
        assert loaded.facts["not_quantized"] == ["model.embed_tokens.weight"]
        share = (numel + vocabulary * hidden) / sum(p.numel() for p in model.parameters())
        assert loaded.facts["quantized_fraction"] == pytest.approx(share)
        ids = random_ids(3, 2, 40, VOCAB).to(loaded.device)
        with torch.no_grad():
            hidden_states = loaded.model.model(input_ids=ids).last_hidden_state
            scored, last = (loaded.model(input_ids=ids, logits_to_keep=keep).logits for keep in (0, 1))
        weight = restored(model.lm_head.weight.detach().to(loaded.device), GroupQuantization(8, GROUP))
        expected = hidden_states @ weight.T
        assert (scored - expected).norm() / expected.norm() < 1e-5
        assert (last[:, 0] - expected[:, -1]).norm() / expected[:, -1].norm() < 1e-5
    finally:
        loaded.close()


@pytest.mark.parametrize("family, options", [("opt", {"quant_bits": 8}), ("llama", {})])
def test_tied_heads_and_those_of_16_bits_stay_as_they_are(family, options, checkpoints):
    plan, loaded = loaded_model(checkpoints(family), **options)
    try:
        assert plan.engine_plan.head is None and loaded.facts["stream"]["head_bits"] is None
        assert loaded.model.lm_head.weight.shape == (VOCAB, 64)
    finally:
        loaded.close()


def test_a_step_and_device_memory_count_the_bytes_that_are_stored():
    machine = MACHINE.model_copy(update={"cores": None, "device_products": ()})
    plan = planned("--model llama-2-13b --engine stream --quant-bits 4 --dummy", Machine(machine))
    plain, stored = plan.engine_plan.cost_terms.head_plain_bytes, plan.engine_plan.cost_terms.head_stored_bytes
    assert plain == 2 * 32000 * 5120 and stored == plain * 8.5 / 16
    sizes = plan.job.sizes
    layers = sizes.parameters - 2 * 32000 * 5120 - 81 * 5120
    assert plan.engine_plan.weight_bytes == layers * 5 // 8 + stored + plain + 2 * 81 * 5120
    assert plan.engine_plan.footprint.device >= plan.engine_plan.weight_bytes

    def step_s(weights):
        traced = plan.job.empty_model.traced_pass(plan.job.spec, 1, 144)
        return pass_time(weights, machine, traced, prefill=False).seconds

    as_before = replace(plan.engine_plan, head=None, weight_bytes=plan.engine_plan.weight_bytes + plain - stored)
    saved_s = (plain - stored) / (machine.device_gb_per_s * 1e9)
    assert step_s(as_before) - step_s(plan.engine_plan) == pytest.approx(saved_s, rel=1e-3)
