"""A run whose logits hold NaN or infinity fails, and says in which decoder layer it begins."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import VOCAB, plain_ids
from safetensors.torch import load_file, save_file

from zero_inference.cli import main
from zero_inference.errors import RunError
from zero_inference.measure.finiteness import FirstLogits
from zero_inference.models.prompts import random_ids
from zero_inference.records.read import read_records
from zero_inference.runtime.distributed import Ranks

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
        (
            DOWN,
            float("inf"),
            ["--engine", "stream", "--gpu-memory", 0, "--warmup", 0],
            "it begins in model.layers.1: check",
        ),
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
    row = next(
        token for token in second if token not in first and token not in ids
    )  # what reads it makes the third token
    command = [
        "run_model.py",
        "--model",
        damaged(EMBED, float("nan"), row),
        *SHAPE,
        *options,
        "--log-file",
        tmp_path / "run.log",
    ]
    assert main([str(word) for word in command]) == 1
    assert (
        "the logits of token 3 are not finite (NaN or infinity); the embeddings are already not finite"
        in capfd.readouterr().err
    )
    assert [record["status"] for record in read_records(tmp_path / "run.jsonl")] == ["failed"]


def test_an_overflow_of_float16_is_called_one(damaged):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(damaged(DOWN, 60000), dtype=torch.float16)
    logits, ids = FirstLogits(model), random_ids(0, 1, PROMPT, VOCAB)
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    logits.require_finite(torch.float16, ranks, lambda tokens: model(ids))  # nothing was looked at yet
    model(ids)
    with pytest.raises(
        RunError, match="it begins in model.layers.1: float16 overflows above 65504, use --dtype bfloat16"
    ):
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
