"""Checkpoints that are damaged, or say what is not so: refused in one line, or read as what they are; never garbage."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import VOCAB, build_model, plain_ids
from safetensors.torch import load_file, save_file

from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.empty_model import build_on_meta
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.records.read import read_records

PROMPT, TOKENS = 8, 3
SHAPE = [*"--engine resident --gen-len 3 --loops 1 --warmup 0 --dtype float32 --prompt-len".split(), PROMPT]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(checkpoints, tmp_path) -> Path:
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


@pytest.fixture
def run(folder, tmp_path, capfd):
    """run(*options) -> exit code, stderr, and the hash of the ids of a run of `folder`."""

    def start(*options):
        command = ["run_model.py", "--model", folder, *SHAPE, "--log-file", tmp_path / "run.log", *options]
        code = main([str(word) for word in command])
        error = capfd.readouterr().err
        assert "Traceback" not in error and sum(line.startswith("error: ") for line in error.splitlines()) == (
            code != 0
        ), error
        records = read_records(tmp_path / "run.jsonl") if (tmp_path / "run.jsonl").exists() else []
        assert [record["status"] for record in records] == {0: ["ok"], 1: ["failed"], 2: []}[code]
        return code, error, records[0]["output_ids_sha256"] if code == 0 else None

    return start


@pytest.fixture
def expected(checkpoints) -> str:
    return output_ids_sha256(plain_ids(checkpoints("llama"), random_ids(0, 1, PROMPT, VOCAB), TOKENS))


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for shard in folder.glob("*.safetensors") for key, tensor in load_file(shard).items()}


def as_bin(folder: Path, state, **options) -> None:
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    torch.save(state, folder / "pytorch_model.bin", **options)


DAMAGED = {
    "empty": b"{}",
    "lists": b'{"weight_map": {"a": ["x"]}}',
    "none": b'{"weight_map": {}}',
    "deep": b"[" * 100_000,
    "bytes": b"\xff\xfe\x80",
    "long": b'{"weight_map": {"a": "%s"}}' % (b"x" * 5000),
    "up": b'{"weight_map": {"a": "../model/x"}}',
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_index_is_called_one(run, folder, how):
    (folder / INDEX).write_bytes(DAMAGED[how])
    code, error, _ = run()
    assert code == 1 and f"{INDEX}: " in error and "fetch it again" in error


@pytest.mark.parametrize("is_in_index", [True, False])
def test_of_two_tensors_of_one_name_the_indexed_one_is_read(run, folder, expected, is_in_index):
    key = "model.layers.0.mlp.up_proj.weight"
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"][key] if is_in_index else index["weight_map"].pop(key)
    other = max(name for name in index["weight_map"].values() if name != shard)
    (folder / INDEX).write_text(json.dumps(index))
    save_file(load_file(folder / other) | {key: torch.randn(192, 64)}, folder / other)
    code, error, found = run()
    assert (code, found) == (0, expected) if is_in_index else code == 1 and f"{key} is in " in error


def test_one_file_comes_before_an_index_that_was_left_behind(run, folder, expected):
    """As in transformers; save_pretrained leaves the index where it replaces shards by one file."""
    tensors = all_tensors(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    save_file(tensors, folder / "model.safetensors")
    assert run()[::2] == (0, expected)


def test_whole_numbers_are_no_weights(run, folder):
    key = "model.layers.1.post_attention_layernorm.weight"
    tensors = all_tensors(folder) | {key: torch.ones(64, dtype=torch.int8)}
    save_file(tensors, folder / "model.safetensors")
    code, error, _ = run()
    assert code == 1 and key in error and "--quant-bits" in error


@pytest.mark.parametrize(
    "error, word",
    [
        (MemoryError(), "out of memory at 1 x ("),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory at 1 x ("),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be read (Permission denied)"),
    ],
    ids=["python", "torch", "permission"],
)
def test_what_is_no_damage_is_not_called_so(run, monkeypatch, error, word):
    monkeypatch.setattr("safetensors.safe_open", Mock(side_effect=error))
    code, said, _ = run()
    assert code == 1 and word in said and "damaged" not in said and "fetch it again" not in said


@pytest.mark.parametrize("is_list", [True, False])
def test_a_bin_file_that_holds_something_else(run, folder, is_list):
    as_bin(folder, [1] if is_list else {"state_dict": all_tensors(folder)})
    code, error, _ = run()
    assert code == 1 and ("damaged" if is_list else "state_dict is not a named tensor") in error


def test_a_bin_file_of_old_torch_is_read(run, folder, expected):
    as_bin(folder, all_tensors(folder), _use_new_zipfile_serialization=False)
    assert run()[::2] == (0, expected)


def test_an_adapter_is_not_passed_over(run, folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    code, error, _ = run()
    assert code == 2 and "adapter" in error and "merge" in error


def test_layers_that_the_config_does_not_count_are_told(run, folder, caplog):
    change_config(folder, num_hidden_layers=2)
    assert run()[0] == 0 and "warning: " in caplog.text and "no parameter for model.layers.2." in caplog.text


@pytest.mark.parametrize("engine", ["resident", "stream"])
def test_a_model_without_a_limit_of_positions_or_a_cache_of_the_usual_form(run, folder, engine):
    """XLNet's config says -1, and it remembers hidden states."""
    from transformers import AutoModelForCausalLM, XLNetConfig

    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=VOCAB, d_model=64, n_layer=2, n_head=4, d_inner=96, initializer_range=0.3)
    shutil.rmtree(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    wanted = output_ids_sha256(plain_ids(folder, random_ids(0, 1, PROMPT, VOCAB), TOKENS))
    assert run("--engine", engine)[::2] == (0, wanted)


@pytest.mark.parametrize("where", ["top", "nested", "labels"])
def test_sizes_are_checked_before_lists_are_made_of_them(run, folder, where):
    """They took all of the memory."""
    name = "num_labels" if where == "labels" else "num_hidden_layers"
    change_config(
        folder, **{"text_config": {name: 10**9}} if where == "nested" else {name: 10**9, "model_type": "qwen3"}
    )
    code, error, _ = run()
    assert code == 2 and name in error and "must be between" in error


def test_a_config_chooses_neither_kernels_nor_what_a_forward_returns(run, folder, expected):
    change_config(folder, attn_implementation="someone/kernels", return_dict=False)
    spec = resolve_model(RunConfig(model=str(folder)), "cpu")
    config = build_on_meta(spec).config
    assert config._attn_implementation == "sdpa" and config.return_dict
    assert run()[::2] == (0, expected)


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
    shape = "--dtype float32 --prompt-len 9 --gen-len 6 --loops 1 --warmup 0 --log-file".split()
    assert main(["run_model.py", str(tmp_path / "model"), *shape, str(tmp_path / "run.log"), *engine]) == 0
    record = json.loads((tmp_path / "run.jsonl").read_text())
    unique = sum(p.numel() for p in model.parameters()) + (table.numel() if held == "different" else 0)
    assert record["weight_bytes"] == 4 * unique
    expected = plain_ids(tmp_path / "model", random_ids(0, 1, 9, VOCAB), 6)
    assert record["output_ids_sha256"] == output_ids_sha256(expected)
