"""The stream engine with mixtures: the ids of plain transformers, whatever the CPU multiplies, and only the chosen experts read."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model, plain_ids
from test_families import with_stream_weights
from test_split import split_of
from test_stream import BATCH, GEN, PROMPT, generate, ids_of, load
from test_stream_cpu import installed
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from zero_inference.engines.stream import layout, prefetch, products
from zero_inference.engines.stream.blocks import find_blocks
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import experts_in_groups
from zero_inference.hardware.profile import ConcurrentRates
from zero_inference.kernels import quantization
from zero_inference.models.mlp import detect_experts
from zero_inference.models.prompts import greedy_config, random_ids, reset_generation_config
from zero_inference.utils.ranks import detect_ranks

SHARES = ("0.3", "0.7", "1")
SMALL = dict(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
MIXTURES = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": SMALL | dict(head_dim=16, num_experts=8, num_experts_per_tok=3, decoder_sparse_step=1),
    "qwen2_moe": SMALL
    | dict(num_experts=6, shared_expert_intermediate_size=160, decoder_sparse_step=2, num_hidden_layers=4),
    "deepseek_v3": SMALL | dict(
        num_key_value_heads=4, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16,
    ),
    # biases, rows of gate and up in turn, weights as [in, out], a limit
    "gpt_oss": SMALL | dict(head_dim=16, num_local_experts=8, num_experts_per_tok=3, swiglu_limit=0.6),
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """family -> (folder, ids of plain transformers)."""

    @functools.cache
    def get(family: str):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, family, {"model_type": family} | MIXTURES[family])
            model = build_model(family)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
        folder = tmp_path_factory.mktemp(family) / "model"
        model.save_pretrained(folder)
        return folder, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN)

    return get


@pytest.mark.parametrize("family", MIXTURES)
def test_any_share_gives_the_ids_of_transformers(family, mixtures):
    folder, expected = mixtures(family)
    for share in SHARES:
        assert torch.equal(ids_of(folder, cpu_compute=share), expected), share


def by_dequantizing(folder, **options):
    """Return the ids with weights that are dequantized in every pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "FUSED_ROWS", 0)
        loaded, spec, ranks = load(folder, cpu_compute="off", **options)
    found = generate(loaded, spec, ranks).output_ids
    loaded.close()
    return found


def ids_of_restored_weights(folder) -> torch.Tensor:
    """Return greedy ids of transformers on the CPU with the weights that the engine's codes restore."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = with_stream_weights(model, detect_ranks().device)
    reset_generation_config(model)
    ids = random_ids(0, BATCH, PROMPT, VOCAB)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(GEN))
    return found[:, PROMPT:]


@pytest.fixture
def restored(monkeypatch) -> list[torch.Size]:
    """Shapes of the weights that were dequantized since."""
    shapes: list[torch.Size] = []

    def dequantize(*args):
        shapes.append(args[-1].shape)
        return quantization.dequantize(*args)

    monkeypatch.setattr(prefetch, "dequantize", dequantize)
    return shapes


def modules_of_experts(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if detect_experts(module) is not None]


@pytest.mark.parametrize("bits, gpu_memory", [(8, 0), (4, 1)])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_on_the_device_are_not_dequantized_in_short_passes(family, bits, gpu_memory, mixtures, restored):
    """Fetched or resident: where tokens choose no more experts than there are, only those are restored."""
    folder, _ = mixtures(family)
    options = {"quant_bits": bits, "quant_group_size": 32, "gpu_memory": gpu_memory}
    expected = by_dequantizing(folder, **options)
    restored.clear()
    assert torch.equal(ids_of(folder, cpu_compute="off", **options), expected)
    mixed = len(modules_of_experts(AutoModelForCausalLM.from_pretrained(folder)))
    of_experts = [shape for shape in restored if len(shape) == 3]
    assert len(of_experts) == 2 * 2 * mixed  # in the prefill of each of two generations, both weights of each layer
    assert len(restored) > GEN * mixed  # linear modules have no kernel here


@pytest.mark.parametrize("family", MIXTURES)
def test_codes_give_the_ids_of_the_dequantized_weights(family, mixtures):
    folder, _ = mixtures(family)
    options = {"quant_bits": 4, "quant_group_size": 32}
    by_device = by_dequantizing(folder, **options)
    for share in SHARES:
        assert torch.equal(ids_of(folder, cpu_compute=share, **options), by_device), share


@pytest.mark.parametrize("experts_at_once", [1, 3])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_groups_give_the_same_logits_in_less_memory(family, experts_at_once, mixtures, monkeypatch):
    monkeypatch.setattr(products, "FUSED_ROWS", 0)
    folder, _ = mixtures(family)
    ids, logits = random_ids(3, BATCH, PROMPT, VOCAB), []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module = model.get_submodule(modules_of_experts(model)[0])
    experts = detect_experts(module)
    one = max(p.nbytes for p in module.parameters()) // experts.num_experts
    for at_once in (experts.num_experts, experts_at_once):
        monkeypatch.setattr(layout, "EXPERT_GROUP_BYTES", at_once * one + one // 2)
        loaded, spec, ranks = load(folder, cpu_compute="off", ring_depth=2, quant_bits=4, quant_group_size=32)
        prefetcher = installed(loaded)
        quantized = [stored for each in prefetcher.blocks for stored in each.layout.parameters if stored.packed]
        assert {each.expert_group for each in quantized} == {0, at_once}
        others = [each.plain.nbytes for each in quantized if not each.expert_group]
        assert prefetcher.workspaces[0].numel() == max(at_once * one, *others)
        with torch.inference_mode():
            logits.append(loaded.model(ids.to(loaded.device)).logits)
            output = generate(loaded, spec, ranks).output_ids
        loaded.close()
        assert torch.equal(output, ids_of_restored_weights(folder))
    tolerance = 1e-4 if logits[0].is_cuda else 0  # a GPU takes other kernels for groups of other sizes
    torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("share", ["off", "0.5"])
def test_a_short_pass_dequantizes_no_experts_that_are_in_groups(share, mixtures, restored, monkeypatch):
    """Where it takes no kernel either: its steps may be graphs, which cannot wait for the sizes of groups."""
    monkeypatch.setattr(layout, "EXPERT_GROUP_BYTES", 1)
    folder, _ = mixtures("mixtral")
    loaded, spec, ranks = load(folder, cpu_compute=share, decode_graph="on", quant_bits=4, quant_group_size=32)
    found = generate(loaded, spec, ranks).output_ids
    assert loaded.facts["stream"]["decode_graph"].unused_because is None
    loaded.close()
    assert torch.equal(found, ids_of_restored_weights(folder))
    of_experts = [shape for shape in restored if len(shape) == 3]
    assert {shape[0] for shape in of_experts} == {1} and len(of_experts) <= 3 * 2 * 4, "in one pass, of 3 layers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MIXTURES)
def test_groups_have_the_bits_of_the_module_itself(family, dtype, mixtures):
    model = AutoModelForCausalLM.from_pretrained(mixtures(family)[0], dtype=dtype)
    module = next(each for each in model.modules() if detect_experts(each) is not None)
    experts = detect_experts(module)
    first, last = (getattr(module, name).data for name in (experts.gate_up, experts.down))
    if experts.transposed:
        first, last = first.mT.contiguous(), last.mT.contiguous()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(21, last.shape[1], generator=draw).to(dtype)
    scores = torch.rand(21, experts.num_experts, generator=draw)
    scores[:, 1] = 0  # no token chooses it
    weights, numbers = scores.topk(3)
    with torch.no_grad():
        for of_dtype in (weights, weights.to(dtype)):
            expected = module(x, numbers, of_dtype)
            for group in range(1, experts.num_experts + 1):
                parts = [lambda place, each=each: each[place * group :][:group] for each in (first, last)]
                assert torch.equal(experts_in_groups(module, experts, group, *parts)(x, numbers, of_dtype), expected)


def test_products_of_all_positions_are_not_left_to_the_cpu(mixtures):
    """Where keys and values are cached compressed, a weight restores those of all positions in each step: no work for few rows."""
    folder, expected = mixtures("deepseek_v3")
    loaded, spec, ranks = load(folder, cpu_compute="1")
    assert torch.equal(generate(loaded, spec, ranks).output_ids, expected)
    prefetcher = installed(loaded)
    restores = [name for name, _ in loaded.model.named_modules() if name.endswith("kv_b_proj")]
    assert restores, "the test is about this module"
    seen: list[int] = []
    module = loaded.model.get_submodule(restores[0])
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel() // args[0].shape[-1]))
    generate(loaded, spec, ranks, loops=1)
    attention = {i for i, block in enumerate(prefetcher.placement.blocks) if block.module == "self_attn"}
    compressed = max(seen[1:]) > BATCH  # not so in all versions of transformers
    assert attention & prefetcher.placement.cpu_computed == (set() if compressed else attention)
    loaded.close()


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", [family for family in MIXTURES if family not in ("deepseek_v3", "gpt_oss")])
def test_a_pass_reads_the_chosen_experts_and_nothing_of_the_others(family, bits, mixtures):
    folder, _ = mixtures(family)
    options = {} if bits == 16 else {"quant_bits": bits, "quant_group_size": 32}
    loaded, spec, ranks = load(folder, cpu_compute="1", decode_graph="off", **options)  # a graph calls no hooks
    chosen: list[set[int]] = []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in modules_of_experts(model):
        module = loaded.model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: chosen.append(set(args[1].flatten().tolist())))
    found = generate(loaded, spec, ranks, loops=1)
    rows = BATCH * installed(loaded).placement.embedding_row_bytes  # of the embedding
    loaded.close()
    others = results = 0
    for name, p in model.get_submodule("model.layers").named_parameters():
        if p.dim() == 2 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            others += p.shape[0] * row_bytes(p.shape[1], bits)
            results += BATCH * p.shape[0] * p.element_size()
        elif name.endswith("proj.bias"):
            others += p.numel() * 4
    first, last = next(m for m in model.modules() if detect_experts(m) is not None).parameters()
    one = sum(p.shape[1] * row_bytes(p.shape[2], bits) for p in (first, last))
    distinct = sum(map(len, chosen[len(chosen) // GEN :]))  # after the prefill's
    assert found.loops[0].moved.cores_bytes_per_step == pytest.approx(others + one * distinct / (GEN - 1), abs=0.01)
    hidden, blocks = model.config.hidden_size, model.config.num_hidden_layers
    results += blocks * BATCH * hidden * 4  # of experts
    to_device = found.loops[0].moved.host_to_device_bytes_per_step
    assert to_device <= rows + (results if loaded.device.type == "cuda" else 0), "no weights, only the CPU's results"


def row_bytes(columns: int, bits: int) -> int:
    """Return the bytes of a row of float32, or of codes with a scale and a minimum for each 32."""
    return columns * 4 if bits == 16 else columns // 2 + columns // 32 * 8


def a_model(model_type: str, **fields) -> nn.Module:
    experts = {"num_experts": 6, "num_local_experts": 6, "ffn_hidden_size": 32}
    fields = SMALL | {"vocab_size": VOCAB} | experts | fields
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))


def test_a_mixture_is_divided_into_experts_and_a_shared_expert_and_keeps_its_routers():
    model = a_model("qwen2_moe", **MIXTURES["qwen2_moe"])
    blocks = {block.module: block for block in find_blocks(model, set(), divided=True) if block.layer == 1}
    assert set(blocks) == {"self_attn", "mlp.experts", "mlp.shared_expert"}
    assert blocks["mlp.experts"].experts.top_k == 2 and blocks["mlp.experts"].experts.num_experts == 6
    assert blocks["mlp.shared_expert"].feed_forward is not None
    whole = find_blocks(model, set(), divided=False)[1]
    assert set(whole.exact) == {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}


@pytest.mark.parametrize(
    ("family", "activation", "fields"),
    [
        ("mixtral", "silu", {}),
        ("olmoe", "silu", {"intermediate_size": 64}),
        ("phimoe", "silu", {}),
        ("mixtral", "gelu_tanh", {"hidden_act": "gelu_pytorch_tanh"}),
        ("mixtral", "gelu", {"hidden_act": "gelu"}),
        ("nemotron_h", "relu_squared", {"layers_block_type": ["moe", "attention", "moe"], "n_routed_experts": 6}),
        ("gpt_oss", "gelu_sigmoid", {}),
        ("deepseek_v4", "silu", {"n_routed_experts": 6}),
        ("llama4_text", None, {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1}),
    ],
    ids=str,
)
def test_what_experts_compute_is_read_from_them(family, activation, fields):
    model = a_model(family, **fields)
    experts = [detect_experts(m) for m in model.modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))]
    assert any(each is not None for each in experts) == (activation is not None)
    assert {each.activation for each in experts if each is not None} == ({activation} if activation else set())
    limits = {"gpt_oss": 7.0, "deepseek_v4": 10.0}
    for each in filter(None, experts):
        is_gpt_oss = family == "gpt_oss"
        assert (each.transposed, each.interleaved, bool(each.biases), each.up_offset == 1) == (is_gpt_oss,) * 4
        assert each.limit == limits.get(family, math.inf)


def test_layers_of_one_model_may_have_experts_that_compute_different_things():
    model = a_model("mixtral")
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()
    experts = [block.experts for block in find_blocks(model, set(), divided=True) if block.experts is not None]
    assert [each.activation for each in experts] == ["silu", "gelu", "silu"]


class Clamped(nn.Module):
    """Fused experts with a bound that weights of a usual size do not reach."""

    def __init__(self, limit: float | None, swapped: bool):
        super().__init__()
        self.limit, self.swapped = limit, swapped
        self.gate_up_proj = nn.Parameter(torch.empty(7, 2 * 40, 56, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(7, 56, 40, device="meta"))

    def forward(self, x, numbers, weights):
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for number, weight in zip(numbers[row], weights[row]):
                one, two = (self.gate_up_proj[number] @ x[row]).chunk(2)
                gate, up = (two, one) if self.swapped else (one, two)
                gate = gate if self.limit is None else gate.clamp(max=self.limit)
                out[row] += weight * (self.down_proj[number] @ (nn.functional.silu(gate) * up))
        return out


def test_a_bound_far_from_usual_values_and_the_order_of_gate_and_up_are_found():
    assert detect_experts(Clamped(10.0, False)) is None
    assert detect_experts(Clamped(None, False)).gate_is_second is False
    assert detect_experts(Clamped(None, True)).gate_is_second is True


def test_the_cpu_gets_experts_first_and_then_what_the_link_would_be_late_with():
    """Of a model with 2 GB of experts, of which a pass of one token reads an eighth, and other blocks."""
    rates = ConcurrentRates(1, 50.0, 50.0, 100.0, 120.0, 100.0, 0.0, 4000.0)
    experts = replace(detect_experts(Clamped(None, False)), num_experts=8, top_k=1)

    def placement(of_others: int) -> Placement:
        model = a_model("mixtral", num_hidden_layers=1, num_experts_per_tok=1)
        attention, mixture = find_blocks(model, set(), divided=True)
        layouts = [BlockLayout([], size, size) for size in (of_others, 2 * 10**9)]
        blocks = [replace(attention, layout=layouts[0]), replace(mixture, experts=experts, layout=layouts[1])]
        return Placement(blocks, [], [0, 1], 2, 0)

    assert placement(10**9).read_bytes(1) == pytest.approx(2 * 10**9 / 8)
    # the CPU reads 0.25 GB of experts in 2.5 ms, the link the 1 GB of the others in 20: of those the CPU takes so much that both end
    split = split_of(placement(10**9), rates)
    assert split.of_experts == 1 and split.of_others == pytest.approx((20 - 2.5) / (20 + 10))
    # 0.05 GB take the link 1 ms: it also sends some of the experts, all of which it would send in 40
    split = split_of(placement(5 * 10**7), rates)
    assert split.of_experts == pytest.approx((1 + 40) / (40 + 2.5)) and split.of_others == 0
