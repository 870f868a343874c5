"""A checkpoint that holds both sides of a tie: equal tensors are stored once, different ones stay two. Either side alone is enough."""

from __future__ import annotations

import json

import pytest
from conftest import VOCAB, build_model, plain_ids
from safetensors.torch import load_file, save_file

from zero_inference.cli import main
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.prompts import random_ids


@pytest.mark.parametrize("held", ["equal", "different", "head"])
@pytest.mark.parametrize("engine", [["--engine", "resident"], ["--engine", "stream"], ["--cpu-offload"]], ids="-".join)
def test_the_sides_that_are_in_the_file(held, engine, tmp_path):
    model = build_model("opt")
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.decoder.embed_tokens.weight"]
    tensors["lm_head.weight"] = table.flip(0).contiguous() if held == "different" else table.clone()
    if held == "head":
        del tensors["model.decoder.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert (
        main(
            [
                "run_model.py",
                "--model",
                str(tmp_path / "model"),
                "--dtype",
                "float32",
                "--prompt-len",
                "9",
                "--gen-len",
                "6",
                "--loops",
                "1",
                "--warmup",
                "0",
                "--log-file",
                str(tmp_path / "run.log"),
                *engine,
            ]
        )
        == 0
    )
    record = json.loads((tmp_path / "run.jsonl").read_text())
    unique = sum(p.numel() for p in model.parameters()) + (table.numel() if held == "different" else 0)
    assert record["weight_bytes"] == 4 * unique
    assert record["output_ids_sha256"] == output_ids_sha256(
        plain_ids(tmp_path / "model", random_ids(0, 1, 9, VOCAB), 6)
    )
