"""load, run and unload on a GPU: the tokens and logits of plain transformers, and no device memory left behind."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import plain_ids

from zero_inference import load, run
from zero_inference.models.prompts import random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WAYS = {
    "resident": {"engine": "resident"},
    "stream": {"engine": "stream", "gpu_memory": 0},
    "stream, keys in host memory": {"engine": "stream", "gpu_memory": 0, "kv_offload": True},
    "stream, repeated steps": {"engine": "stream", "decode_graph": "on"},
    "accelerate": {"engine": "accelerate", "cpu_offload": True},
    "deepspeed": {"engine": "deepspeed", "cpu_offload": True},
}
VOCABULARY = 320


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_model_is_one_of_transformers(way, checkpoints):
    from transformers import AutoModelForCausalLM

    folder = checkpoints("llama")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    with load(folder, dtype="float32", batch_size=3, max_length=24, verbose=0, **WAYS[way]) as model, torch.no_grad():
        assert model.device.type == "cuda"
        for seed, (rows, tokens) in enumerate([(3, 9), (2, 13), (3, 9)]):
            ids = random_ids(seed, rows, tokens, VOCABULARY).cuda()
            settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
            assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_an_unloaded_model_leaves_no_device_memory(way, checkpoints):
    """Even where the program keeps the empty model."""

    def use():
        model = load(checkpoints("llama"), dtype="bfloat16", batch_size=2, max_length=24, verbose=0, **WAYS[way])
        ids = random_ids(0, 2, 9, VOCABULARY).cuda()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        model.unload()
        return model

    def allocated() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    before = allocated()
    kept = [use(), use()]
    assert allocated() <= before + (1 << 20), "cuBLAS and the engine keep nothing"
    assert len(kept) == 2


def test_runs_follow_each_other_in_one_process(checkpoints):
    folder = checkpoints("llama")
    expected = plain_ids(folder, random_ids(0, 2, 8, VOCABULARY), 5)
    for way in ("resident", "deepspeed", "stream", "deepspeed"):
        shape = {"prompt_len": 8, "gen_len": 5, "batch_size": 2, "loops": 1, "warmup": 0, "dtype": "float32"}
        result = run(folder, log=False, verbose=0, **shape, **WAYS[way])
        assert torch.equal(result.output_ids, expected), way
    assert not torch.distributed.is_initialized()


def test_graphs_of_a_model_outlive_another_one(checkpoints):
    options = dict(dtype="bfloat16", batch_size=2, max_length=24, verbose=0, **WAYS["stream, repeated steps"])
    ids = random_ids(0, 2, 9, VOCABULARY).cuda()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    with load(checkpoints("llama"), **options) as model:
        first = model.generate(ids, **settings)
        with load(checkpoints("opt"), **options) as other:
            other.generate(ids, **settings)
        torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda")  # takes memory that was given back
        assert torch.equal(model.generate(ids, **settings), first)
