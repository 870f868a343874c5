"""Quantized checkpoints of every format that is read: exactly the values that their own writers define, and the ids of those."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_writers import FORMATS, write_pair
from conftest import VOCAB, plain_ids
from safetensors.torch import load_file, save_file
from torch import nn

from zero_inference.cli import console_main, main
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import RunError, UsageError
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.checkpoint_files import Shards
from zero_inference.models.checkpoint_formats import checkpoint_format
from zero_inference.models.empty_model import build_empty_model
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.models.stored_weights import _first_rows, stored_formats
from zero_inference.records.read import read_records

BATCH, PROMPT, GEN = 2, 8, 6
SIZES = dict(
    hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=64, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = {
    "qwen3": SIZES | dict(model_type="qwen3"),
    "qwen3_moe": SIZES | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
    "gpt_oss": SIZES | dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}  # fmt: skip
MIXTURES = ("ct-int4-g32", "ct-nvfp4", "gptq-g32", "awq-g64", "fp8-blocks")  # experts stored one by one
CASES = [
    ("gpt_oss", "mxfp4"),
    *(("qwen3", each) for each in FORMATS if each not in ("mxfp4", "fp8-small-blocks")),
    *(("qwen3_moe", each) for each in MIXTURES),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(family, format) -> folders of a quantized checkpoint and of the float32 one that it stands for."""
    sources, made = {}, {}

    def source(family: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        if family not in sources:
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[family]), dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0.0, 0.05 if "embed" in name else 0.2)
            sources[family] = tmp_path_factory.mktemp(family) / "source"
            model.save_pretrained(sources[family])
        return sources[family]

    def quantizes(key: str) -> bool:
        return key.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj"))

    def get(family: str, name: str):
        if (family, name) not in made:

            def wanted(key: str) -> bool:
                return quantizes(key) and (name != "mxfp4" or "experts" in key)

            folder = tmp_path_factory.mktemp(f"{family}-{name}") / "pair"
            made[family, name] = write_pair(folder, source(family), FORMATS[name], wanted)
        return made[family, name]

    return get


def run(folder, out, *options) -> int:
    """Return the exit code; the record is `out`/run.jsonl."""
    shape = f"--loops 1 --warmup 0 --dtype float32 --batch-size {BATCH} --prompt-len {PROMPT} --gen-len {GEN}".split()
    return main(
        [str(each) for each in ("run_model.py", "--model", folder, *shape, *options, "--log-file", out / "run.log")]
    )


def read(folder, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the values of all weights of a checkpoint."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    shards = Shards(folder, checkpoint_format("it", config) if config else None, dtype)
    with shards.open([*shards.keys]) as tensors:
        return {key: tensor[...] for key, tensor in tensors.items()}


@pytest.mark.parametrize("family, name", CASES)
def test_values_are_those_of_the_writer_bit_for_bit(family, name, pair):
    quantized, plain = pair(family, name)
    found, expected = read(quantized), load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == torch.float32 and torch.equal(found[key], value), key
    rounded = read(quantized, torch.bfloat16)
    changed = [key for key in expected if rounded[key].dtype == torch.bfloat16]
    assert len(changed) == sum(key.endswith("_proj" if name == "mxfp4" else "_proj.weight") for key in expected)
    assert all(torch.equal(rounded[key], expected[key].bfloat16()) for key in changed)


def stored_bytes(folder) -> int:
    """Return the bytes of the tensors of a checkpoint that are weights."""
    symmetric = json.loads((folder / "config.json").read_text())["quantization_config"].get("sym")
    ignored = ("weight_shape", "g_idx", "input_scale", *(["qzeros"] if symmetric else []))
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.nbytes for key, tensor in tensors.items() if not key.endswith(ignored))


@pytest.mark.parametrize("family, name", CASES)
def test_the_stream_engine_keeps_them_and_generates_the_ids_of_the_expanded_checkpoint(family, name, pair, tmp_path):
    quantized, plain = pair(family, name)
    expected = output_ids_sha256(plain_ids(plain, random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    for share in ("off", "0.5", "1"):
        assert run(quantized, tmp_path, "--engine", "stream", "--gpu-memory", 0, "--cpu-compute", share) == 0
        record = read_records(tmp_path / "run.jsonl")[-1]
        assert record["output_ids_sha256"] == expected, share
        assert record["stored_format"] == checkpoint_format("it", FORMATS[name].config).name
    reordered = name == "gptq-desc-act"  # expanded
    # scales of whole rows are repeated for groups of 128, zero points take a byte, and those of FP8 tensors are one for each row
    allowed = {"ct-int4-channel": 1.1, "ct-int4-channel-zeros": 1.1, "ct-int8-channel": 1.05, "gptq-column": 1.1}.get(
        name, 1.03
    )
    if not reordered:
        assert stored_bytes(quantized) <= record["weight_bytes"] <= allowed * stored_bytes(quantized)


@pytest.mark.parametrize(
    "family, name, in_place",
    [
        ("gpt_oss", "mxfp4", True),
        ("qwen3", "fp8-blocks", True),
        ("qwen3_moe", "fp8-small-blocks", True),
        ("qwen3", "ct-fp8-channel", False),
        ("qwen3_moe", "ct-nvfp4", False),
    ],
)
def test_they_are_read_from_disk_in_place_where_their_bytes_are_those_of_the_engine(
    family, name, in_place, pair, tmp_path, capfd
):
    quantized, plain = pair(family, name)
    expected = output_ids_sha256(plain_ids(plain, random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    assert run(quantized, tmp_path, "--engine", "stream", "--disk-offload", "--gpu-memory", 0) == 0
    assert read_records(tmp_path / "run.jsonl")[-1]["output_ids_sha256"] == expected
    assert ("weights on disk are read from the checkpoint's files\n" in capfd.readouterr().err) == in_place


def of_parameter(change):
    """Return where the rows of a [2, 4, 3] parameter are by its two sources [4, 3], which a converter stacks after `change`."""
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(2, 4, 3, device="meta"), requires_grad=False)

    def convert(tensors: dict) -> None:
        found = torch.stack([change(each) for each in tensors.values()])
        if found.shape != model.w.shape:
            raise RunError("another shape")
        model.w = nn.Parameter(found, requires_grad=False)

    return _first_rows(model, "w", (2, 4, 3), {"a": (4, 3), "b": (4, 3)}, convert)


def test_rows_are_read_in_place_only_where_they_stay_together_and_as_they_are():
    assert of_parameter(lambda rows: rows) == [0, 4]
    assert of_parameter(lambda rows: rows[[0, 2, 1, 3]]) == [], "interleaved"
    assert of_parameter(lambda rows: rows + 1) == of_parameter(lambda rows: rows * 2) == []
    assert of_parameter(lambda rows: rows.T) == [], "transposed"


@pytest.mark.parametrize(
    "engine, name",
    [("resident", "ct-int4-g32"), ("accelerate --cpu-offload", "modelopt-fp8"), ("deepspeed --cpu-offload", "awq-g64")],
)
def test_other_engines_expand_them_and_say_so(engine, name, pair, tmp_path, capfd):
    quantized, plain = pair("qwen3", name)
    expected = output_ids_sha256(plain_ids(plain, random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    assert run(quantized, tmp_path, "--engine", *engine.split()) == 0
    record = read_records(tmp_path / "run.jsonl")[-1]
    assert record["output_ids_sha256"] == expected and record["stored_format"] is None and record["quant_bits"] == 16
    assert "weights are expanded to float32; --engine stream keeps them" in capfd.readouterr().err


def test_quantizing_once_more_is_said_to_round_twice(pair, tmp_path, capfd):
    quantized, _ = pair("qwen3", "ct-fp8-channel")
    assert run(quantized, tmp_path, "--engine", "stream", "--gpu-memory", 0, "--quant-bits", 4) == 0
    assert "FP8 (compressed-tensors) weights are rounded a second time, to int4" in capfd.readouterr().err


def test_keeping_weights_is_refused_where_it_is_not_possible(pair, tmp_path, capfd):
    quantized, plain = pair("qwen3", "ct-int4-g32")
    assert run(plain, tmp_path, "--engine", "stream", "--quant-bits", "stored") == 2
    assert "are not quantized" in capfd.readouterr().err
    assert run(quantized, tmp_path, "--cpu-offload", "--quant-bits", "stored") == 2
    assert "--engine deepspeed converts the weights" in capfd.readouterr().err


@pytest.mark.parametrize(
    "family, name", [("gpt_oss", "mxfp4"), ("qwen3", "ct-int4-g32"), ("qwen3", "ct-nvfp4"), ("qwen3", "ct-fp8-channel")]
)
def test_transformers_expands_them_to_the_same_values(family, name, pair):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config

    quantized, _ = pair(family, name)
    expand = Mxfp4Config(dequantize=True) if name == "mxfp4" else CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, quantization_config=expand)
    found, state = read(quantized, torch.float32), model.state_dict()
    for key in [each for each in found if each.endswith(("_proj.weight", "_proj"))]:
        assert torch.equal(state[key].to(torch.bfloat16), found[key].to(torch.bfloat16)), key


@pytest.mark.parametrize("place", ["text_config", "hf_quant_config.json"])
def test_the_quantization_config_is_found_where_publishers_put_it(place, pair, tmp_path):
    """Kimi-K2.5 has it in `text_config`, ModelOpt's exports in a file of their own."""
    quantized, _ = pair("qwen3", "modelopt-nvfp4")
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    said = config.pop("quantization_config")
    if place == "text_config":
        config = {"model_type": "gemma3", "text_config": {"quantization_config": said}}
    else:
        inner = {"quant_algo": said["quant_algo"], "group_size": 16, "exclude_modules": ["lm_head"]}
        (folder / place).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve(folder).checkpoint_format.name == "NVFP4 (ModelOpt)"


def resolve(folder, **options):
    return resolve_model(RunConfig(model=str(folder), engine="stream", **options).validate(), "cpu")


def test_zeros_that_gptq_wrote_for_missing_biases_are_ignored(pair, tmp_path, capfd):
    quantized, plain = pair("qwen3", "gptq-g32")
    expected = output_ids_sha256(plain_ids(plain, random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    tensors = load_file(quantized / "model.safetensors")
    (tmp_path / "config.json").write_text((quantized / "config.json").read_text())
    for bias in (0.0, 0.5):
        biases = {DOWN + "bias": torch.full((SIZES["hidden_size"],), bias)}
        save_file(tensors | biases, tmp_path / "model.safetensors", metadata={"format": "pt"})
        for bits in ("stored", "16"):
            code = run(tmp_path, tmp_path, "--engine", "stream", "--gpu-memory", 0, "--quant-bits", bits)
            assert code == (0 if bias == 0 else 1)
            if code:
                assert f"{DOWN}bias is part of a decoder layer" in capfd.readouterr().err
            else:
                assert read_records(tmp_path / "run.jsonl")[-1]["output_ids_sha256"] == expected


def test_kimi_k2_is_read_without_its_code(tmp_path):
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, n_routed_experts=8, vocab_size=VOCAB)
    own = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    said = {"quantization_config": FORMATS["ct-int4-g32"].config}
    (tmp_path / "config.json").write_text(json.dumps(sizes | own | said))
    spec = resolve(tmp_path)
    assert (spec.config.model_type, spec.config.n_routed_experts) == ("deepseek_v3", 8)
    assert spec.checkpoint_format.name == "int4 (compressed-tensors)"


def test_experts_that_are_modules_are_all_kept(pair):
    quantized, _ = pair("qwen3_moe", "ct-int4-g32")
    spec = resolve(quantized)
    model = build_empty_model(spec).model
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Module() for _ in range(4))
        for expert in layer.mlp.experts:
            for name in ("gate_proj", "up_proj", "down_proj"):
                expert.add_module(name, nn.Linear(128, 128, bias=False, device="meta"))
    kept = stored_formats(model, spec)
    assert {name for name in kept if "experts" in name} == {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        for layer in range(2) for expert in range(4) for name in ("gate", "up", "down")
    }  # fmt: skip


def test_formats_that_only_files_or_model_configs_show_are_refused(pair, tmp_path):
    """Llama-4's stacked experts of ModelOpt; DeepSeek-V4 says beside its quantization config that experts are of another dtype."""
    quantized, _ = pair("qwen3", "modelopt-nvfp4")
    (tmp_path / "config.json").write_text((quantized / "config.json").read_text())
    tensors = {
        "experts.gate_up_proj": torch.zeros(2, 16, 64, dtype=torch.uint8),
        "experts.gate_up_proj_weight_scale": torch.ones(()),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="experts.gate_up_proj are experts in one tensor"):
        read(tmp_path)
    config = {"model_type": "qwen3", "expert_dtype": "fp4", "quantization_config": FORMATS["fp8-blocks"].config}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    with pytest.raises(UsageError, match="fp8 with expert_dtype 'fp4'"):
        resolve(tmp_path)
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    assert resolve(tmp_path, dummy=True).checkpoint_format is None
    with pytest.raises(UsageError, match="aqlm"):
        resolve(tmp_path, dummy=True, quant_bits="stored")


def test_a_plan_keeps_weights_only_of_a_quantized_checkpoint(pair, capfd):
    """Also where it is asked for by name: a run refuses the commands that it would list."""
    quantized, plain = pair("qwen3", "ct-int4-g32")
    words = "--machine rtx4090 --engine stream --quant-bits stored 16 --prompt-len 16 --gen-len 4 --json"
    assert console_main(["zero-inference", "plan", str(plain), *words.split()]) == 2
    assert "are not quantized" in capfd.readouterr().err
    assert console_main(["zero-inference", "plan", str(quantized), *words.split()]) == 0
    assert {row["quant_bits"] for row in json.loads(capfd.readouterr().out)["configurations"]} == {4, 16}


def test_what_does_not_fit_in_16_bits_is_advised_to_keep_its_format(capfd):
    command = "gpt-oss-20b --dummy --engine stream --gpu-memory 4 --quant-bits 16 --prompt-len 16 --gen-len 4"
    assert (
        console_main(
            ["zero-inference", "run", *command.split(), "--dry-run", "--machine", "rtx4090", "--assume", "host=32GiB"]
        )
        == 2
    )
    assert "It would fit with --quant-bits stored" in capfd.readouterr().out


DOWN = "model.layers.1.mlp.down_proj."
DAMAGES = {
    ("ct-int4-g32", "weight_scale", None): ["weight_scale is missing"],
    ("ct-int4-g32", "weight_packed", None): ["weight_packed is missing"],
    ("ct-int4-g32", "weight_scale", torch.ones(128, 5)): ["[128, 5]", "[128, 6]"],
    ("ct-int4-g32", "weight_shape", torch.tensor([128, 160])): ["weight_shape", "[128, 160]"],
    ("ct-int4-g32-zeros", "weight_zero_point", None): ["weight_zero_point is missing"],
    ("ct-nvfp4", "weight_global_scale", None): ["weight_global_scale is missing"],
    ("ct-mxfp4", "weight_scale", torch.ones(128, 6)): ["weight_scale is F32", "U8"],
    ("gptq-g32", "g_idx", torch.zeros(192, dtype=torch.int32)): ["g_idx", "32 columns"],
    ("gptq-g32", "scales", torch.ones(7, 128)): ["scales", "[6, 128]"],
    ("gptq-symmetric", "qzeros", torch.zeros(3, 32, dtype=torch.int32)): ["other than 128", "sym is true"],
    ("awq-g64", "qzeros", torch.zeros(3, 15, dtype=torch.int32)): ["qzeros", "[3, 16]"],
    ("modelopt-nvfp4", "weight_scale_2", None): ["weight_scale_2 is missing"],
    ("modelopt-fp8", "weight_scale", torch.ones(3)): ["weight_scale", "[3]"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, part, value, words",
    [(*key, words) for key, words in DAMAGES.items()],
    ids=[f"{a}-{b}" for a, b, _ in DAMAGES],
)
def test_tensors_that_do_not_fit_are_named(name, part, value, words, pair, tmp_path):
    quantized, _ = pair("qwen3", name)
    tensors = load_file(quantized / "model.safetensors")
    tensors.pop(DOWN + part)
    save_file(
        tensors | ({} if value is None else {DOWN + part: value}),
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text((quantized / "config.json").read_text())
    with pytest.raises(RunError) as error:
        read(tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_a_group_that_does_not_divide_is_refused(pair, tmp_path):
    quantized, _ = pair("qwen3", "gptq-g32")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["group_size"] = 80
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(quantized / "model.safetensors")
    with pytest.raises(RunError, match="not whole groups of 80"):
        read(tmp_path)


CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up": {"bits": 8}}}, "dynamic settings"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq version 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with W4A8_AWQ"),
        (CT | {"config_groups": {"a": {"weights": {"num_bits": 2, "type": "int"}}}}, "pack-quantized with int2"),
        (CT | {"format": "mxfp6-pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 6, "type": "float"}}}}, "mxfp6"),
        (CT | {"config_groups": {}}, "without config_groups"),
        (CT | {"config_groups": {"a": {"weights": {"num_bits": 4}}}, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quant_method": "aqlm"}, "aqlm"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config, words):
    with pytest.raises(UsageError, match=words):
        checkpoint_format("it", config)
