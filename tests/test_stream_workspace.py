"""The stream engine's workspace: a weight is plain for its module's call, or its block's where the model may read it itself."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, plain_ids
from test_machine import planned
from test_stream import BATCH, GEN, PROMPT, generate, load
from test_stream_cpu import installed
from test_stream_experts import a_model, ids_of_restored_weights
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from zero_inference.engines.stream import layout, products
from zero_inference.engines.stream.blocks import lay_out_blocks
from zero_inference.hardware.machine import resolve_machine
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models.prompts import random_ids

INT4 = {"quant_bits": 4, "quant_group_size": 32}


@pytest.fixture
def always_plain(monkeypatch):
    """No pass is short enough for codes."""
    monkeypatch.setattr(products, "FUSED_ROWS", 0)


def layouts_of(model: nn.Module, divided: bool) -> list[layout.BlockLayout]:
    return [block.layout for block in lay_out_blocks(model, GroupQuantization(4, 32, torch.float32), divided)[0]]


@pytest.mark.parametrize(("share", "gpu_memory"), [("off", 0), ("off", 1), ("0.5", 0)])
def test_it_holds_the_largest_matrix(share, gpu_memory, checkpoints, always_plain):
    folder = checkpoints("llama")
    loaded, spec, ranks = load(folder, cpu_compute=share, gpu_memory=gpu_memory, **INT4)
    prefetcher = installed(loaded)
    assert prefetcher.workspaces[0].numel() == prefetcher.placement.workspace_bytes == 64 * 192 * 4
    assert loaded.facts["stream"]["workspace_bytes"] == 64 * 192 * 4
    plain: list[dict[str, int]] = []
    for layer in loaded.model.model.layers:
        layer.mlp.act_fn.register_forward_hook(
            lambda *_, layer=layer: plain.append({name: p.numel() for name, p in layer.named_parameters()})
        )
    assert torch.equal(generate(loaded, spec, ranks).output_ids, ids_of_restored_weights(folder))
    loaded.close()
    assert plain and all(each["mlp.down_proj.weight"] == each["mlp.up_proj.weight"] == 0 for each in plain)


class ReadsDown(LlamaMLP):
    def forward(self, x):
        return nn.functional.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)


class CallsTwice(LlamaMLP):
    def forward(self, x):
        hidden = torch.cat([self.gate_proj(each) for each in x.split(1, -2)], -2)
        return self.down_proj(self.act_fn(hidden) * self.up_proj(x))


class NamesUp(LlamaMLP):
    def forward(self, x):
        if x.device.type == "a device with a kernel":
            return self.act_fn(self.gate_proj(x)) * nn.functional.linear(x, self.up_proj.weight)
        return super().forward(x)


@pytest.mark.parametrize("share", ["off", "1"])
@pytest.mark.parametrize(
    ("mlp", "own"),
    [(ReadsDown, "down_proj"), (CallsTwice, "gate_proj"), (NamesUp, "up_proj")],
    ids=lambda each: str(each),
)
def test_what_the_model_may_read_itself_is_plain_for_its_block(mlp, own, share, checkpoints, always_plain, monkeypatch):
    folder = checkpoints("llama")
    expected = ids_of_restored_weights(folder)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", mlp)
    loaded, spec, ranks = load(folder, cpu_compute=share, **INT4)
    prefetcher = installed(loaded)
    parameters = [stored for each in prefetcher.blocks for stored in each.layout.parameters if stored.packed]
    assert {stored.name.split(".")[-2] for stored in parameters if not stored.module_only} == {own}
    assert prefetcher.workspaces[0].numel() == 2 * 64 * 192 * 4, "that one, and the largest of the others"
    seen: list[bool] = []
    loaded.model.model.layers[1].self_attn.register_forward_hook(
        lambda *_: seen.append(loaded.model.model.layers[1].get_submodule(f"mlp.{own}").weight.numel() > 0)
    )
    assert torch.equal(generate(loaded, spec, ranks).output_ids, expected)
    loaded.close()
    if share == "off":
        assert all(seen)


class OfItsOwn(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.mixing = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size))

    def forward(self, x):
        return super().forward(x) @ self.mixing.mT


@pytest.mark.parametrize("share", ["off", "1"])
def test_a_weight_beside_child_modules_is_not_where_theirs_come(
    share, checkpoints, always_plain, monkeypatch, tmp_path
):
    folder = checkpoints("llama")
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", OfItsOwn)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.mixing, 0, 0.1)
    model.save_pretrained(tmp_path)
    expected = ids_of_restored_weights(tmp_path)
    loaded, spec, ranks = load(tmp_path, cpu_compute=share, **INT4)
    assert installed(loaded).workspaces[0].numel() == (64 + 192) * 64 * 4
    assert torch.equal(generate(loaded, spec, ranks).output_ids, expected)
    loaded.close()


def test_a_module_that_is_called_outside_of_its_block_fails(checkpoints, always_plain):
    """Its block's place in the ring may be another block's by then."""
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="off", **INT4)
    generate(loaded, spec, ranks, loops=1)
    with pytest.raises(KeyError):
        loaded.model.model.layers[0].mlp.up_proj(torch.ones(1, 64, device=ranks.device))
    loaded.close()


def test_a_module_that_is_not_known_has_all_its_weights_plain_in_its_calls():
    model = a_model("llama4_text", intermediate_size_mlp=96, interleave_moe_layer_step=1)
    experts = [p for name, p in model.model.layers[0].named_parameters() if ".experts." in name]
    for divided in (False, True):
        assert max(each.workspace_bytes for each in layouts_of(model, divided)) == sum(p.nbytes for p in experts)


def test_slots_are_held_until_their_block_ends(checkpoints, always_plain):
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="off", ring_depth=2, **INT4)
    ring, held = installed(loaded).rings[0], []
    for layer in loaded.model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda *_: held.append(bool(ring.held)))
    generate(loaded, spec, ranks, loops=1)
    loaded.close()
    assert held and all(held) and not ring.held


@pytest.mark.parametrize(
    ("batch", "said"), [(32, None), (33, "it dequantizes experts in groups, whose sizes the host reads")]
)
def test_steps_that_dequantize_experts_in_groups_are_planned_without_graphs(batch, said):
    machine = resolve_machine(None, "gpus=1x80GiB,host=256GiB")
    options = f"--dummy --engine stream --quant-bits 4 --gpu-memory 1 --batch-size {batch} --prompt-len 64 --gen-len 8"
    for model, reason in (("qwen3-235b-a22b", said), ("qwen3-30b-a3b", None)):  # 4 groups and 1
        assert planned(f"--model {model} {options}", machine).engine_plan.no_graph == reason


DEPTH = 7


@pytest.fixture
def viewed(monkeypatch) -> list[layout.TensorSpan]:
    """Each span that a view was made of."""
    made: list[layout.TensorSpan] = []
    own = layout.TensorSpan.of
    monkeypatch.setattr(layout.TensorSpan, "of", lambda piece, buffer: made.append(piece) or own(piece, buffer))
    return made


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_views_are_of_one_place_a_block_and_of_others_when_it_comes_there(family, bits, checkpoints, viewed):
    options = {} if bits == 16 else {"quant_bits": 4, "quant_group_size": 32}
    loaded, spec, ranks = load(checkpoints(family), ring_depth=DEPTH, cpu_compute="off", **options)
    blocks = installed(loaded).blocks
    layouts = {id(block.layout): block.layout for block in blocks}.values()
    with torch.inference_mode():
        found = generate(loaded, spec, ranks, loops=3).output_ids
    assert 0 < len(viewed) <= DEPTH * sum(len(_views_of(each)) for each in layouts), "once a layout and slot"
    assert not any(
        view.is_inference() for block in blocks for views in block.views.found.values() for view in views.plain
    )
    before = len(viewed)
    again = generate(loaded, spec, ranks, loops=1).output_ids
    loaded.close()
    assert len(viewed) == before and torch.equal(found, again)
    if bits == 16:
        assert torch.equal(found, plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN))


def _views_of(block_layout) -> list[layout.TensorSpan]:
    return [piece for each in block_layout.parameters for piece in (each.plain, *(each.pieces if each.packed else ()))]
