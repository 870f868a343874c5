"""Patched models on a CPU: the same tokens, the same parameters, hooks that fire, and no trace when it is undone."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model
from kernel_cases import SeenOperators
from torch import nn

from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig
from zero_inference.models.prompts import greedy_config, random_ids, reset_generation_config
from zero_inference.models.spec import resolve_model
from zero_inference.norms import patch, patch_norms, unpatch_norms
from zero_inference.planning.make_plan import plan_run
from zero_inference.utils.ranks import detect_ranks, start_process_group, stop_process_group

SMALL = dict(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
MORE = {
    name: dict(model_type=name, **SMALL)
    for name in ("mistral", "qwen2", "smollm3", "gemma", "gemma2", "gemma3_text", "phi3")
}
MORE["qwen3_moe"] = dict(
    model_type="qwen3_moe", moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, **SMALL
)
MORE["gpt_oss"] = dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, **SMALL)
MORE["gpt_neox in sequence"] = dict(FAMILIES["gpt_neox"], use_parallel_residual=False)
# norms of three layers and the last one; of most families three decoder layers have addition and norm in one kernel
NORMS = dict.fromkeys(
    ("gpt_neox", "gpt_neox in sequence", "llama", "mistral", "mixtral", "qwen2", "smollm3", "gemma", "gpt_oss"), 7
)
NORMS |= {"opt": 7, "bloom": 8, "qwen3": 13, "qwen3_moe": 13, "gemma2": 13, "gemma3_text": 19}
IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def more_families(monkeypatch):
    for name, values in MORE.items():
        monkeypatch.setitem(FAMILIES, name, values)


def tokens(model, ids=IDS, count=64):
    reset_generation_config(model)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(count))


def replaced(model) -> list[nn.Module]:
    return [module for module in model.modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NORMS)
def test_the_same_tokens_and_undone_without_a_trace(family, dtype):
    model = build_model(family, dtype)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    attributes = [set(module.__dict__) for module in model.modules()]
    expected = tokens(model)
    norms, pairs = NORMS[family], 0 if family in ("opt", "bloom") else 3
    assert patch_norms(model) == norms == patch_norms(model)
    assert len(replaced(model)) == norms + pairs
    assert torch.equal(tokens(model), expected)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    unpatch_norms(model)
    unpatch_norms(model)
    assert not replaced(model) and [set(module.__dict__) for module in model.modules()] == attributes


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_hooks_fire_and_each_norm_runs_once(family):
    model = build_model(family)
    count = patch_norms(model)
    calls = []
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_pre_hook(lambda *_: calls.append("before"))
            module.register_forward_hook(lambda *_: calls.append("behind"))
    with torch.no_grad():
        model(IDS)
    assert calls.count("before") == calls.count("behind") == count


def test_the_fused_pair_is_one_operator():
    model = build_model("llama")
    patch_norms(model)
    with torch.no_grad(), SeenOperators() as seen:
        model(IDS)
    names = [name for name, _ in seen.calls]
    assert names.count("zero_inference.add_rms_norm.default") == 3
    assert names.count("zero_inference.rms_norm.default") == 4


def test_training_and_copies():
    model = build_model("llama").train()
    expected = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
    patch_norms(model)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in 5.x
    found = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
    torch.testing.assert_close(found, expected)
    copied = copy.deepcopy(model.eval())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert bool(copied(IDS).logits.any()), "a copy uses its own weights"
    unpatch_norms(copied)
    assert not replaced(copied) and replaced(model)


def test_compiles_as_one_graph():
    torch._dynamo.reset()
    model = build_model("llama")
    patch_norms(model)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected)


def test_an_unknown_family_is_left_alone_and_reported():
    model = build_model("phi3")
    with pytest.warns(UserWarning, match="phi3.*not in the table"):
        assert patch_norms(model) == 0
    assert not replaced(model)


def test_nothing_is_patched_by_half():
    model = build_model("llama")
    model.model.norm = nn.RMSNorm(64)
    with pytest.warns(UserWarning, match="RMSNorm is not in the table"):
        assert patch_norms(model) == 0
    model = build_model("opt")
    model.model.decoder.layers[1].final_layer_norm = nn.LayerNorm(64, bias=False)
    assert "without weight or bias" in patch.patch_refusal(model) and not replaced(model)
    assert "not in the table" in patch.patch_refusal(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "options",
    [
        dict(engine="resident"),
        dict(engine="stream"),
        dict(engine="stream", quant_bits=8, quant_group_size=32),
        dict(engine="deepspeed", cpu_offload=True),
        dict(engine="accelerate", cpu_offload=True),
    ],
    ids=str,
)
def test_every_engine_generates_the_same(options, checkpoints):
    shape = dict(dtype="float32", batch_size=2, prompt_len=9, gen_len=12)
    config = RunConfig(model=str(checkpoints("llama")), **shape, **options).validate()
    ranks = detect_ranks(None)
    start_process_group(ranks)
    try:
        loaded = plan_run(config, resolve_model(config, "cpu"), ranks).load()
        ids = random_ids(0, 2, 9, VOCAB).to(loaded.device)
        expected = tokens(loaded.model, ids, 12)
        assert patch_norms(loaded.model) == 7
        assert torch.equal(tokens(loaded.model, ids, 12), expected)
        unpatch_norms(loaded.model)
        assert torch.equal(tokens(loaded.model, ids, 12), expected)
        loaded.close()
    finally:
        stop_process_group()


SHORT = "--engine resident --dtype float32 --prompt-len 5 --gen-len 4 --loops 1 --warmup 0".split()


def record_of(tmp_path, checkpoints):
    log = ["--log-file", str(tmp_path / "run.log")]
    assert main(["run_model.py", "--model", str(checkpoints("llama")), *SHORT, *log]) == 0
    return json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])


def test_on_a_cpu_auto_leaves_norms_alone(checkpoints, run_model):
    done = run_model("--model", checkpoints("llama"), *SHORT, on_cpu=True)
    assert done.code == 0, done.stderr
    assert done.record["norm_modules_patched"] == 0 and done.record["norm_kernels_unused_because"] == patch.NO_DEVICE
    assert "norms run as" not in done.stderr


def test_the_record_says_how_many(tmp_path, checkpoints, monkeypatch):
    ids = record_of(tmp_path, checkpoints)["output_ids_sha256"]
    monkeypatch.setattr("zero_inference.measure.session.prepare_norm_kernels", lambda *_: None)
    record = record_of(tmp_path, checkpoints)
    assert record["norm_modules_patched"] == 7 and record["norm_kernels_unused_because"] is None
    assert record["output_ids_sha256"] == ids


def test_what_cuda_needs(monkeypatch):
    for device, family, words in (
        (torch.device("cpu"), "llama", "no CUDA device"),
        (torch.device("cuda"), "phi3", "phi3"),
        (torch.device("cuda"), "llama", "not there: no nvcc"),
    ):
        monkeypatch.setattr(patch, "load_extension", lambda say: False)
        monkeypatch.setattr(patch, "why_unavailable", lambda: "no nvcc")
        with pytest.raises(patch.UsageError, match=f"--norm-kernels cuda: .*{words}.*auto or off"):
            patch.prepare_norm_kernels("cuda", family, device, print)
        assert words in patch.prepare_norm_kernels("auto", family, device, print)
    with pytest.raises(patch.UsageError, match="phi3"):
        patch.check_norm_kernels_option("cuda", "phi3")
