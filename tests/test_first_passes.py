"""A run whose logits hold NaN or infinity fails, and says in which decoder layer it begins; so does one whose layers compute something else
than without an engine."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
import transformers
from conftest import VOCAB, plain_ids
from safetensors.torch import load_file, save_file

from zero_inference import load
from zero_inference.cli import main
from zero_inference.errors import RunError
from zero_inference.measure.correctness import LogitsCheck, ReferenceLayers
from zero_inference.models.prompts import random_ids
from zero_inference.records.read import read_records
from zero_inference.utils.ranks import Ranks

PROMPT = 8
SHAPE = ["--batch-size", 2, "--prompt-len", PROMPT, "--gen-len", 3, "--loops", 1, "--dtype", "float32"]
DOWN, EMBED = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"


@pytest.fixture
def damaged(checkpoints, tmp_path):
    """damaged(key, value, row): a copy of a checkpoint with `value` in one row of tensor `key`."""

    def make(key: str, value: float, row: int = 0):
        folder = shutil.copytree(checkpoints("llama"), tmp_path / "model")
        shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][key]
        tensors = load_file(shard)
        tensors[key][row] = value
        save_file(tensors, shard, metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize(
    "key, value, options, words",
    [
        (DOWN, float("nan"), ["--engine", "resident"], "it begins in model.layers.1: check"),
        (DOWN, float("inf"), ["--engine", "stream", "--warmup", 0], "it begins in model.layers.1: check"),
        (DOWN, float("nan"), ["--cpu-offload", "--dtype", "bfloat16"], "it begins in model.layers.1: check"),
        (DOWN, float("nan"), ["--cpu-offload", "--kv-offload"], "it begins in model.layers.1: check"),
        (DOWN, float("nan"), ["--engine", "accelerate", "--cpu-offload"], "it begins in model.layers.1: check"),
        ("lm_head.weight", float("inf"), ["--engine", "resident"], "in the last norm or the head"),
    ],
    ids=["nan-resident", "inf-stream", "nan-deepspeed", "nan-kv", "nan-accelerate", "head"],
)
def test_a_run_with_logits_that_are_not_finite_fails(key, value, options, words, damaged, tmp_path, capfd):
    command = ["run_model.py", "--model", damaged(key, value), *SHAPE, *options, "--log-file", tmp_path / "run.log"]
    assert main([str(word) for word in command]) == 1
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and words in error[0]
    records = read_records(tmp_path / "run.jsonl")
    assert [record["status"] for record in records] == ["failed"] and records[0]["error"] in error[0]
    assert not (tmp_path / "run.log").exists()


@pytest.mark.parametrize("options", [["--engine", "resident"], ["--cpu-offload"]], ids=["resident", "deepspeed"])
def test_so_does_one_whose_logits_are_not_finite_behind_the_prefill(options, damaged, checkpoints, tmp_path, capfd):
    ids = random_ids(0, 2, PROMPT, VOCAB)
    first, second, _ = plain_ids(checkpoints("llama"), ids, 3).T.tolist()
    row = next(token for token in second if token not in first and token not in ids)  # its reader makes the third token
    folder = damaged(EMBED, float("nan"), row)
    command = ["run_model.py", "--model", folder, *SHAPE, *options, "--log-file", tmp_path / "run.log"]
    assert main([str(word) for word in command]) == 1
    said = "the logits of token 3 are not finite (NaN or infinity); the embeddings are already not finite"
    assert said in capfd.readouterr().err
    assert [record["status"] for record in read_records(tmp_path / "run.jsonl")] == ["failed"]


def test_an_overflow_of_float16_is_called_one(damaged):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(damaged(DOWN, 60000), dtype=torch.float16)
    logits, ids = LogitsCheck(model), random_ids(0, 1, PROMPT, VOCAB)
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    logits.require_finite(torch.float16, ranks, lambda tokens: model(ids))  # nothing was looked at yet
    model(ids)
    overflow = "it begins in model.layers.1: float16 overflows above 65504, use --dtype bfloat16"
    with pytest.raises(RunError, match=overflow):
        logits.require_finite(torch.float16, ranks, lambda tokens: model(ids))
    assert not model._forward_hooks and not any(layer._forward_hooks for layer in model.model.layers)


def test_logits_of_one_rank_end_all(damaged, run_model):
    first, second = random_ids(0, 2, PROMPT, VOCAB).tolist()
    row = next(token for token in second if token not in first)
    done = run_model(
        "--model", damaged(EMBED, float("nan"), row), *SHAPE, "--cpu-offload", launcher="by hand", ranks=2, on_cpu=True
    )
    assert done.code != 0 and done.record["status"] == "failed"
    assert "the embeddings are already not finite" in done.record["error"]


SMALL = dict(
    **dict(vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16),
    **dict(max_position_embeddings=256, initializer_range=0.15, pad_token_id=0, bos_token_id=1, eos_token_id=2),
)
OF_LONGCAT = dict(
    **dict(head_dim=8, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16),
    **dict(
        num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=48, moe_topk=2, n_routed_experts=4, zero_expert_num=2
    ),
)
OF_QWEN = dict(
    **dict(num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2),
    mlp_only_layers=[0],
)
CONFIGS = {  # a router that is read without being called, which accelerate has on the meta device then; a dense layer before mixtures
    "longcat": lambda: transformers.LongcatFlashConfig(**SMALL | OF_LONGCAT),
    "dense first": lambda: transformers.Qwen3MoeConfig(**SMALL | OF_QWEN),
}


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory):
    """made(name): a checkpoint of one of CONFIGS, or of the other tests' families."""

    @functools.cache
    def make(name: str):
        if name not in CONFIGS:
            return checkpoints(name)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        model.save_pretrained(folder := tmp_path_factory.mktemp("made"))
        return folder

    return make


def test_a_run_whose_layers_compute_something_else_fails(made, tmp_path, capfd, monkeypatch):
    longcat = made("longcat")
    monkeypatch.chdir(tmp_path)
    command = ["run_model.py", "--model", longcat, *SHAPE, "--engine", "accelerate", "--cpu-offload", "--log-dir", "."]
    assert main([str(word) for word in command]) == 1
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "under --engine accelerate, model.layers.0 computes something else" in error[0]
    with pytest.raises(RunError, match="longcat_flash does not work with this engine"):
        load(longcat, engine="accelerate", cpu_offload=True, max_length=16, dtype="float32", verbose=0)
    with load(longcat, engine="resident", max_length=16, dtype="float32", verbose=0) as model:
        ids = random_ids(0, 1, PROMPT, VOCAB)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4)
        assert torch.equal(found[:, PROMPT:].cpu(), plain_ids(longcat, ids, 4))


@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {"engine": "stream", "gpu_memory": 0, "cpu_compute": 1, "quant_bits": 4, "quant_group_size": 32}),
        ("llama", {"engine": "stream", "quant_bits": 8, "quant_group_size": 32, "dummy": True, "dtype": "bfloat16"}),
        ("llama", {"engine": "deepspeed", "cpu_offload": True, "quant_bits": 8, "quant_group_size": 32}),
        ("dense first", {"engine": "stream", "gpu_memory": 0, "cpu_compute": 1, "dtype": "bfloat16", "batch_size": 4}),
        ("dense first", {"engine": "deepspeed", "cpu_offload": True}),
    ],
)
def test_each_kind_of_layer_is_compared_as_it_is_stored(family, options, made, monkeypatch):
    """A dense layer and one of experts; quantized ones with the weights that their codes stand for. One other weight is found."""
    seen, own = [], ReferenceLayers._differs

    def differs(plain, position, placed, *call):
        found = own(plain, position, placed, *call)
        name, parameter = list(plain.references[position].named_parameters())[-3]
        module, _, leaf = name.rpartition(".")
        plain.references[position].get_submodule(module)._parameters[leaf] = torch.nn.Parameter(-parameter, False)
        seen.append((position, found, own(plain, position, placed, *call), dict(plain.skipped)))
        return found

    monkeypatch.setattr(ReferenceLayers, "_differs", differs)
    settings = {"dtype": "float32", "max_length": 16, "verbose": 0} | options
    load(made(family), **settings).unload()
    kinds = [0, 1] if family == "dense first" else [0]
    assert seen == [(position, False, True, {}) for position in kinds]


def test_a_layer_without_room_is_not_compared_and_a_line_says_so(made, tmp_path, capfd, monkeypatch):
    # between the bytes of the dense layer and of the others
    monkeypatch.setattr("zero_inference.measure.correctness.COMPARED_BYTES", 200_000)
    command = ["run_model.py", "--model", made("dense first"), *SHAPE, "--engine", "resident", "--log-dir", tmp_path]
    assert main([str(word) for word in command]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "not compared" in line]
    assert len(said) == 1 and "decoder layer 1: host memory has no room for it" in said[0]
