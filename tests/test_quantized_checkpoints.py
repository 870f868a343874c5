"""Checkpoints stored quantized: fp8 with block scales gives the tokens of the dequantized model, every other form is refused."""

from __future__ import annotations

import json
import shutil
from itertools import product

import pytest
import torch
from conftest import VOCAB, plain_ids
from safetensors.torch import load_file, save_file

from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.empty_model import parameter_bytes
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import plan_run
from zero_inference.records.read import read_records
from zero_inference.utils.ranks import detect_ranks

BATCH, PROMPT, GEN, BLOCK = 2, 8, 6, 128
SHAPE = f"--loops 1 --warmup 0 --dtype float32 --batch-size {BATCH} --prompt-len {PROMPT} --gen-len {GEN}".split()
COMMON = dict(
    hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    tie_word_embeddings=False, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "qwen3": dict(COMMON, model_type="qwen3", num_key_value_heads=2, head_dim=48),
    "deepseek_v3": dict(
        COMMON, model_type="deepseek_v3", num_key_value_heads=4, moe_intermediate_size=144, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=160,
        kv_lora_rank=136, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=40,
    ),
}  # fmt: skip
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
WAYS = {
    "resident": ["--engine", "resident"],
    "stream": ["--engine", "stream", "--gpu-memory", 0],
    "deepspeed": ["--cpu-offload"],
}


def in_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8 values of a matrix, scales of its blocks, and the matrix that they stand for, block by block."""
    rows, columns = values.shape
    stored, true = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty_like(values)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i, j in product(*map(range, scales.shape)):
        part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scales[i, j] = values[part].abs().max() / 448
        stored[part] = (values[part] / scales[i, j]).to(torch.float8_e4m3fn)
        true[part] = stored[part].float() * scales[i, j]
    return stored, scales, true


def write(folder, tensors: dict[str, torch.Tensor], config: dict) -> None:
    """Scales lie in another shard than their weights."""
    folder.mkdir()
    weight_map = {key: f"model-{2 if key.endswith('_scale_inv') else 1}.safetensors" for key in tensors}
    for name in set(weight_map.values()):
        held = {key: value for key, value in tensors.items() if weight_map[key] == name}
        save_file(held, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def run(folder, out, *options) -> int:
    """The exit code; log and record are `out`/run.*."""
    argv = ["run_model.py", "--model", folder, *SHAPE, *options, "--log-file", out / "run.log"]
    return main([str(word) for word in argv])


def load(folder, dtype: str):
    """The model of a resident run, and what it was planned to take."""
    config, ranks = RunConfig(model=str(folder), engine="resident", dtype=dtype).validate(), detect_ranks()
    plan = plan_run(config, resolve_model(config, ranks.device.type), ranks)
    planned = plan.engine_plan.footprint.device
    loaded = plan.load()
    assert planned == loaded.weight_bytes == parameter_bytes(loaded.model)
    assert loaded.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
    return loaded.model, planned


def change(folder, key: str, value: torch.Tensor | None) -> None:
    """Replace, add or take out one tensor of a checkpoint that `write` made."""
    shard = folder / f"model-{2 if key.endswith('_scale_inv') else 1}.safetensors"
    tensors = load_file(shard)
    tensors.pop(key, None)
    save_file(tensors | ({} if value is None else {key: value}), shard, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """family -> folder of an fp8 checkpoint, folder of the float32 one that it stands for, and the hash of that one's ids."""
    made = {}

    def get(family: str):
        if family in made:
            return made[family]
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        folder = tmp_path_factory.mktemp(family)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family]), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.05 if "embed" in name else 0.2)
        model.save_pretrained(folder / "source")
        config = json.loads((folder / "source" / "config.json").read_text())
        stored, true = {}, {}
        for key, value in load_file(folder / "source" / "model.safetensors").items():
            stored[key] = true[key] = value
            if key.endswith("proj.weight") or "_proj_with_mqa" in key or "q_a_" in key or "_b_proj" in key:
                if value.dim() == 2:
                    stored[key], stored[key + "_scale_inv"], true[key] = in_blocks(value)
        # of a layer that predicts further tokens, and of an older transformers: neither is part of the model
        extra, scales, _ = in_blocks(torch.randn(192, 384))
        stored |= {
            "model.layers.2.eh_proj.weight": extra,
            "model.layers.2.eh_proj.weight_scale_inv": scales,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        }
        write(folder / "fp8", stored, config | {"quantization_config": FP8, "dtype": "float8_e4m3fn"})
        write(folder / "plain", true, config)
        ids = plain_ids(folder / "plain", random_ids(0, BATCH, PROMPT, VOCAB), GEN)
        made[family] = folder / "fp8", folder / "plain", output_ids_sha256(ids)
        return made[family]

    return get


@pytest.fixture
def broken(pair, tmp_path, capfd):
    """broken(change of the folder, code) -> the message of a run of a changed copy of the fp8 checkpoint of qwen3."""

    def start(edit, code: int = 1) -> str:
        folder = shutil.copytree(pair("qwen3")[0], tmp_path / "model")
        edit(folder)
        assert run(folder, tmp_path, "--cpu-offload") == code
        error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(error) == 1 and "Traceback" not in error[0]
        records = read_records(tmp_path / "run.jsonl") if code == 1 else []
        assert [record["status"] for record in records] == ["failed"] * len(records)
        return error[0]

    return start


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_blocks_give_the_ids_of_the_dequantized_checkpoint(family, way, pair, tmp_path):
    fp8, plain, expected = pair(family)
    assert run(fp8, tmp_path, *WAYS[way]) == 0
    record = read_records(tmp_path / "run.jsonl")[-1]
    assert record["output_ids_sha256"] == expected
    read = load_file(plain / "model-1.safetensors")
    if (
        way == "stream"
    ):  # codes as they are stored; scales too, but rows of experts that no block divides have their own
        shards = [load_file(fp8 / f"model-{number}.safetensors") for number in (1, 2)]
        read = {key: value for shard in shards for key, value in shard.items() if "eh_proj" not in key}
    nbytes = sum(read[key].nbytes for key in read if "e_score_correction" not in key)
    assert record["weight_bytes"] == pytest.approx(nbytes, rel=0.02 if way == "stream" else 0)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_the_plan_are_those_of_the_dequantized_checkpoint(family, dtype, pair, no_gpu):
    (found, planned), (expected, planned_plain) = (load(folder, dtype) for folder in pair(family)[:2])
    found, expected = found.state_dict(), expected.state_dict()
    assert planned == planned_plain and found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_the_dtype_of_a_run_is_never_float8(pair, tmp_path):
    folder = shutil.copytree(pair("qwen3")[0], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for stored, expected in (("float8_e4m3fn", torch.bfloat16), ("float16", torch.float16)):
        (folder / "config.json").write_text(json.dumps(config | {"dtype": stored}))
        assert resolve_model(RunConfig(model=str(folder), engine="resident").validate(), "cuda").dtype == expected


def test_a_tied_head_stored_in_fp8_stays_tied(tmp_path, pair):
    fp8, plain, _ = pair("qwen3")
    tensors = {key: value for shard in fp8.glob("*.safetensors") for key, value in load_file(shard).items()}
    true = load_file(plain / "model-1.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        values, scales, true[key] = in_blocks(true["lm_head.weight"].clone())
        tensors |= {key: values, key + "_scale_inv": scales}
    config = json.loads((fp8 / "config.json").read_text()) | {"tie_word_embeddings": True}
    write(tmp_path / "tied", tensors, config)
    model, _ = load(tmp_path / "tied", "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight.cpu(), true["lm_head.weight"])


PROJ, ATTN = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    "key, value, words",
    [
        (PROJ + "_scale_inv", None, ["has no " + PROJ + "_scale_inv"]),
        (PROJ, None, [PROJ + " is missing", PROJ + "_scale_inv belongs to"]),
        (PROJ, torch.ones(192, 320), [PROJ + " is F32", "must be F8_E4M3"]),
        (PROJ + "_scale_inv", torch.ones(2, 2), ["shape [2, 2]", "[2, 3]"]),
        (PROJ + "_scale_inv", torch.ones(2, 3, dtype=torch.int32), ["I32", "must be F16 or BF16 or F32"]),
        ("lm_head.weight", torch.zeros(VOCAB, 192, dtype=torch.int8), ["lm_head.weight", "I8", "bfloat16"]),
        (ATTN + "SCB", torch.ones(192), [ATTN + "SCB", "no place", "--quant-bits"]),
    ],
    ids=["no scale", "no weight", "weight not fp8", "scale shape", "scale dtype", "int8", "unexpected"],
)
def test_tensors_that_do_not_belong_together_fail_the_run(key, value, words, broken):
    message = broken(lambda folder: change(folder, key, value))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "said, words",
    [
        ({"load_in_8bit": True}, ["bitsandbytes"]),
        ({"quant_method": "hqq"}, ["hqq"]),
        (FP8 | {"expert_dtype": "fp4"}, ["expert_dtype 'fp4'", "'fp8'"]),
        (FP8 | {"fmt": "e5m2"}, ["fmt 'e5m2'", "'e4m3'"]),
        (FP8 | {"weight_block_size": [128]}, ["weight_block_size [128]", "blocks"]),
    ],
    ids=lambda value: value.get("quant_method", "old") if isinstance(value, dict) else "",
)
def test_other_forms_are_refused_before_anything_is_read(said, words, broken):
    def edit(folder) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        for shard in folder.glob("*.safetensors"):
            shard.unlink()  # not even looked for

    message = broken(edit, code=2)
    assert all(word in message for word in [*words, "bfloat16", "--quant-bits"]), message
