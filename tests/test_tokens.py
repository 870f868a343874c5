"""The tokens are right: every engine and offload gives the ids of plain transformers in float32."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model, plain_ids
from transformers import AutoConfig, AutoModelForMultimodalLM

from zero_inference import load
from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.empty_model import build_empty_model
from zero_inference.models.prompts import TEXT, encode_prompts, greedy_config, random_ids, reset_generation_config
from zero_inference.models.spec import load_tokenizer, resolve_model
from zero_inference.utils.model_sizes import exact_parameter_bytes

BATCH, PROMPT, GEN = 3, 13, 9
WAYS = {
    "deepspeed": [],
    "deepspeed-cpu": ["--cpu-offload"],
    "deepspeed-disk": ["--disk-offload"],
    "deepspeed-cpu-kv": ["--cpu-offload", "--kv-offload"],
    "deepspeed-disk-kv": ["--disk-offload", "--kv-offload"],
    "accelerate-cpu": ["--engine", "accelerate", "--cpu-offload"],
    "accelerate-disk-kv": ["--engine", "accelerate", "--disk-offload", "--kv-offload"],
    "resident": ["--engine", "resident"],
    "resident-kv": ["--engine", "resident", "--kv-offload"],
    "stream": ["--engine", "stream"],
    "stream-kv": ["--engine", "stream", "--kv-offload"],
}
# Of the other families than these two, one way an engine.
ALL_WAYS, ONE_EACH = ("llama", "opt"), ("deepspeed-cpu-kv", "accelerate-disk-kv", "resident", "stream-kv")


@pytest.fixture(scope="module")
def reference():
    """reference(folder): the ids int64 [BATCH, GEN] of plain transformers."""

    @functools.cache
    def ids(folder: Path) -> torch.Tensor:
        found = plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN)
        assert len(set(found.flatten().tolist())) > 3, "a reference of one repeated token would prove nothing"
        return found

    return ids


def run(folder: Path, options: list[str], tmp_path: Path) -> dict:
    """Return the record of a run in `tmp_path`."""
    sizes = f"--dtype float32 --batch-size {BATCH} --prompt-len {PROMPT} --gen-len {GEN} --loops 2".split()
    where = ["--offload-dir", str(tmp_path / "offload"), "--log-file", str(tmp_path / "run.log")]
    if "--disk-offload" not in options:
        where = where[2:]
    assert main(["run_model.py", "--model", str(folder), *sizes, *options, *where]) == 0
    return json.loads((tmp_path / "run.jsonl").read_text())


@pytest.mark.parametrize(
    "family, way", [(family, way) for family in FAMILIES for way in WAYS if family in ALL_WAYS or way in ONE_EACH]
)
def test_ids_equal_plain_transformers(family, way, checkpoints, reference, tmp_path, capfd):
    folder = checkpoints(family)
    record = run(folder, WAYS[way], tmp_path)
    assert record["output_ids_sha256"] == output_ids_sha256(reference(folder))
    assert record["weight_bytes"] == 2 * exact_parameter_bytes(AutoConfig.from_pretrained(folder))
    assert len(record["loops"]) == 2 and all(len(loop["step_s"]) == GEN - 1 for loop in record["loops"])
    if "--disk-offload" in WAYS[way]:
        assert not list((tmp_path / "offload").iterdir()), "offload files must not outlive the run"
        too_small = "--engine" not in WAYS[way]
        assert ("the least that DeepSpeed writes to disk" in capfd.readouterr().err) == too_small
        assert record["weights_place"] == ("cpu" if too_small else "disk")


@pytest.fixture(scope="module")
def large_matrices(tmp_path_factory):
    """large_matrices(family): a checkpoint whose matrices DeepSpeed does write to disk; it leaves those under 1 MiB in memory."""

    @functools.cache
    def folder(family: str) -> Path:
        made = tmp_path_factory.mktemp("large")
        build_model(family, hidden_size=256, intermediate_size=1088, num_hidden_layers=2).save_pretrained(made)
        return made

    return folder


@pytest.mark.parametrize("kv", [[], ["--kv-offload"]], ids=["", "kv"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_ids_of_weights_that_are_read_from_disk(family, kv, large_matrices, reference, tmp_path):
    folder = large_matrices(family)
    record = run(folder, ["--disk-offload", *kv], tmp_path)
    assert record["output_ids_sha256"] == output_ids_sha256(reference(folder))
    assert record["transfers"]["disk_read_bytes_per_step"] > 0


LANGUAGE = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
TOWER = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, image_size=32, patch_size=16)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
# each with a tower of more layers than the language model has
WRAPPERS = {
    "mistral3": dict(
        text_config=dict(LANGUAGE, model_type="mistral"), vision_config=dict(TOWER, num_hidden_layers=3, head_dim=16)
    ),
    "qwen3_vl": dict(
        text_config=dict(LANGUAGE, rope_parameters=ROPE),
        vision_config=dict(
            hidden_size=32, intermediate_size=32, depth=3, num_heads=2, out_hidden_size=64, deepstack_visual_indexes=[0]
        ),
    ),
    "llava": dict(
        text_config=dict(LANGUAGE, model_type="llama", tie_word_embeddings=True),
        vision_config=dict(TOWER, num_hidden_layers=3, projection_dim=32),
        tie_word_embeddings=True,
    ),
    "llama4": dict(
        text_config=dict(LANGUAGE, intermediate_size_mlp=96, num_local_experts=2),
        vision_config=dict(
            TOWER, num_hidden_layers=3, vision_output_dim=64, projector_input_dim=32, projector_output_dim=64
        ),
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_language_model_of_a_wrapper(name, tmp_path, caplog):
    """`save_pretrained` writes the names that the hub has, which are not those of the modules."""
    fields = WRAPPERS[name]
    text = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields["text_config"])
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(name, **{**fields, "text_config": text})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.05 if "embed" in key else 0.2)
    model.save_pretrained(tmp_path)
    reset_generation_config(model)
    ids = random_ids(0, 2, PROMPT, VOCAB)
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(GEN))
    assert len(set(wanted[0, PROMPT:].tolist())) > 3
    for options in (
        {"engine": "resident"},
        {"engine": "stream", "gpu_memory": 0, "cpu_compute": 1},
        {"engine": "deepspeed", "cpu_offload": True},
    ):
        with load(tmp_path, dtype="float32", batch_size=2, max_length=PROMPT + GEN, verbose=0, **options) as loaded:
            found = loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(GEN))
        assert torch.equal(found, wanted), options
    assert "warning" not in caplog.text, "config.json announces the vision tower"


SMALL_AUDIO = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16, vocab_size=8
)
CPMANT = dict(hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96, num_hidden_layers=2, prompt_length=32)


@pytest.mark.parametrize(
    "name, fields, why",
    [
        ("t5", {}, "is an encoder-decoder"),
        ("qwen2_5_omni", {}, "is a multimodal model"),
        ("voxtral_realtime", dict(text_config=LANGUAGE, audio_config=SMALL_AUDIO), "needs audio"),
        ("cpmant", CPMANT, "puts 32 positions of its own before each sequence"),
    ],
)
def test_other_models_than_causal_language_models_are_refused_before_loading(name, fields, why, tmp_path, capfd):
    AutoConfig.for_model(name, **fields).save_pretrained(tmp_path)
    for engine in (["--engine", "stream"], ["--cpu-offload"]):
        assert main(["run_model.py", "--model", str(tmp_path), *engine]) == 2
        assert f"{name} {why}" in capfd.readouterr().err


def test_a_cache_that_cannot_be_made_is_not_called_a_refusal_of_text(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("no such layer type")

    AutoConfig.for_model("llava", **{**WRAPPERS["llava"], "text_config": LANGUAGE}).save_pretrained(tmp_path)
    monkeypatch.setattr("zero_inference.models.empty_model.new_cache", refuse)
    sizes = build_empty_model(resolve_model(RunConfig(model=str(tmp_path)), "cpu")).sizes
    assert sizes.refuses_text is None and sizes.kv_widths, "the config has the heads"


def test_smollm2_writes_the_same_text_under_each_engine(smollm2_folder, tmp_path, capfd):
    tokenizer = load_tokenizer(resolve_model(RunConfig(model="smollm2-135m"), "cpu"))
    expected = plain_ids(smollm2_folder, encode_prompts(tokenizer, [TEXT[-1], TEXT[-2]], 40), 12)
    sizes = "--model smollm2-135m --dtype float32 --batch-size 2 --prompt-len 40 --gen-len 12 --loops 1 --warmup 0"
    for way in ("--cpu-offload --kv-offload", "--engine stream", "--engine stream --cpu-compute 0.6 --kv-offload"):
        assert main(["run_model.py", *sizes.split(), *way.split(), "--log-file", str(tmp_path / "run.log")]) == 0
        record = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
        assert record["output_ids_sha256"] == output_ids_sha256(expected), way
    assert tokenizer.decode(expected[0], skip_special_tokens=True).strip() in capfd.readouterr().out


@pytest.mark.parametrize(
    "launcher, options",
    [
        ("by hand", ["--cpu-offload"]),
        pytest.param("deepspeed", ["--disk-offload"], marks=pytest.mark.slow),
        ("torchrun", ["--cpu-offload", "--kv-offload"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_two_ranks_give_the_ids_of_one(launcher, options, checkpoints, large_matrices, run_model, tmp_path, request):
    """What torchrun starts for Python are copies; runs that it really starts are in test_faults.py."""
    if launcher == "torchrun":
        request.getfixturevalue("copied_runs")
    on_disk = "--disk-offload" in options
    folder = (large_matrices if on_disk else checkpoints)("mixtral")
    sizes = f"--dtype float32 --batch-size 4 --prompt-len {PROMPT} --gen-len {GEN} --loops 1".split()
    where = ["--offload-dir", str(tmp_path / "offload")] if on_disk else []
    done = run_model("--model", folder, *sizes, *options, *where, launcher=launcher, ranks=2)
    assert done.code == 0, done.stderr
    assert done.record["world_size"] == 2 and done.record["num_nodes"] == 1
    assert (done.record["transfers"]["disk_read_bytes_per_step"] > 0) == on_disk
    expected = plain_ids(folder, random_ids(0, 4, PROMPT, VOCAB), GEN)
    assert done.record["output_ids_sha256"] == output_ids_sha256(expected)
    if launcher == "deepspeed":
        port = re.search(r"--master_port=(\d+)", done.stdout + done.stderr)[1]
        assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
