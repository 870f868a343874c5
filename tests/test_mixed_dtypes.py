"""What a family keeps in float32, and in buffers, reaches every engine: the same experts and tokens as transformers."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from conftest import VOCAB, too_few_gpus
from safetensors.torch import load_file, save_file

from zero_inference.config.run_config import RunConfig
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.empty_model import build_empty_model, parameter_bytes
from zero_inference.models.prompts import disable_cudnn_attention, greedy_config, random_ids, reset_generation_config
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import plan_run
from zero_inference.utils.ranks import detect_ranks, start_process_group

BATCH, PROMPT, GEN, EXPERTS = 2, 9, 8, 8
COMMON = dict(
    hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=128, tie_word_embeddings=False, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {  # a buffer, parameters, and norms that only float16 keeps
    "deepseek_v3": dict(
        COMMON, model_type="deepseek_v3", num_key_value_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=20,
    ),
    "ernie4_5_moe": dict(
        COMMON, model_type="ernie4_5_moe", num_key_value_heads=2, moe_num_experts=EXPERTS, moe_k=2, moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "gpt_oss": dict(
        COMMON, model_type="gpt_oss", num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2
    ),
}  # fmt: skip
KEPT = {
    "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
    "ernie4_5_moe": "model.layers.1.mlp.gate.weight",
    "gpt_oss": "model.layers.1.input_layernorm.weight",
}
WAYS = {
    "resident": {"engine": "resident"},
    "stream": {"engine": "stream", "gpu_memory": 0},
    "stream-resident": {"engine": "stream", "gpu_memory": 1},
    "accelerate-cpu": {"engine": "accelerate", "cpu_offload": True},
    "accelerate-disk": {"engine": "accelerate", "disk_offload": True},
    "deepspeed": {},
    "deepspeed-cpu": {"cpu_offload": True},
    "deepspeed-disk": {"disk_offload": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """family -> folder of a float32 checkpoint whose experts are chosen by differences that 16 bits round away."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}

    def get(family: str):
        if family not in made:
            torch.manual_seed(5)
            config = AutoConfig.for_model(**FAMILIES[family])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    if "e_score_correction_bias" in name:
                        tensor.copy_(14 + 0.03 * torch.rand_like(tensor))
                    elif "gate.weight" in name:
                        tensor.normal_(0.0, 0.001)
                    elif tensor.dim() > 1:
                        tensor.normal_(0.0, 0.05 if "embed" in name else 0.2)
            made[family] = tmp_path_factory.mktemp(family) / "model"
            model.save_pretrained(made[family], max_shard_size="200KB")
        return made[family]

    return get


def load(folder, **options):
    shape = {"model": str(folder), "batch_size": BATCH, "prompt_len": PROMPT, "gen_len": GEN}
    config, ranks = RunConfig(**shape | options).validate(), detect_ranks()
    spec = resolve_model(config, "cpu")
    start_process_group(ranks)
    return plan_run(config, spec, ranks).load(), spec


def choices(model) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The experts that each router chose for each token, in order of the calls, and the greedy ids of `model`, all on the CPU."""
    disable_cudnn_attention()
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: chosen.append(output[-1].sort(-1).values.cpu()))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    output = generate(model, inputs(BATCH))
    for hook in hooks:
        hook.remove()
    assert len(chosen) == 2 * GEN
    return chosen, output


def generate(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the greedy tokens after `ids`."""
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(GEN))
    return out[:, PROMPT:].cpu()


def inputs(batch: int) -> torch.Tensor:
    """Random ids [batch, PROMPT] where engines compute."""
    return random_ids(0, batch, PROMPT, VOCAB).to(detect_ranks().device)


def plain(folder, dtype: torch.dtype, device="cpu"):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    reset_generation_config(model)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_experts_and_tokens_are_those_of_from_pretrained(family, dtype, way, checkpoint, tmp_path):
    folder = checkpoint(family)
    model = plain(folder, getattr(torch, dtype), detect_ranks().device)  # a GPU rounds otherwise than a CPU
    experts, ids = choices(model)
    disk = {"offload_dir": str(tmp_path)} if "disk" in way else {}
    loaded, spec = load(folder, dtype=dtype, **WAYS[way], **disk)
    found_experts, found_ids = choices(loaded.model)
    assert all(map(torch.equal, found_experts, experts)) and torch.equal(found_ids, ids)
    assert loaded.weight_bytes == parameter_bytes(model) == build_empty_model(spec).sizes.parameter_bytes
    loaded.close()
    if dtype == "bfloat16":
        for tensor in model.state_dict().values():
            if tensor.dtype == torch.float32:
                tensor.copy_(tensor.bfloat16())
        assert not all(map(torch.equal, choices(model)[0], experts)), (
            "a checkpoint whose rounding changes nothing would prove nothing"
        )


def test_two_ranks_gather_both_dtypes(checkpoint, run_model):
    folder = checkpoint("ernie4_5_moe")
    shape = ["--batch-size", BATCH, "--prompt-len", PROMPT, "--gen-len", GEN, "--loops", 1, "--dtype", "bfloat16"]
    done = run_model("--model", folder, *shape, "--cpu-offload", launcher="by hand", ranks=2)
    assert done.code == 0, done.stderr
    device = torch.device("cpu" if too_few_gpus(2) else "cuda")
    model = plain(folder, torch.bfloat16, device)
    disable_cudnn_attention()
    # a rank computes its share of the batch, and 16 bits round by shape
    rows = random_ids(0, BATCH, PROMPT, VOCAB).to(device).split(1)
    expected = torch.cat([generate(model, row) for row in rows])
    assert done.record["output_ids_sha256"] == output_ids_sha256(expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_has_the_dtype_and_bits_of_from_pretrained(family, dtype, checkpoint):
    expected = plain(checkpoint(family), getattr(torch, dtype)).state_dict()
    loaded, spec = load(checkpoint(family), engine="resident", dtype=dtype)
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    dtypes = {name: tensor.dtype for name, tensor in expected.items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == dtypes
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in found)
    kept = dtype == "float16" or family != "gpt_oss" or dtype == "float32"
    assert found[KEPT[family]].dtype == (torch.float32 if kept else torch.bfloat16)
    drawn = load(checkpoint(family), engine="resident", dtype=dtype, dummy=True)[0].model.state_dict()
    assert {name: tensor.dtype for name, tensor in drawn.items()} == dtypes


def test_a_buffer_that_the_checkpoint_lacks_keeps_its_initial_value_and_is_named(checkpoint, tmp_path, caplog):
    name, folder = KEPT["deepseek_v3"], shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop(name)
    save_file({key: value for key, value in load_file(shard).items() if key != name}, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING, "zero_inference"):
        loaded, _ = load(folder, engine="resident", dtype="float32")
    assert torch.equal(loaded.model.get_buffer(name).cpu(), plain(folder, torch.float32).get_buffer(name))
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("zero_inference")]
    assert len(warnings) == 1 and name in warnings[0] and "initial values" in warnings[0]


@pytest.mark.parametrize("way", ["stream", "deepspeed-cpu"])
def test_a_matrix_that_is_kept_in_float32_is_not_quantized(way, checkpoint):
    loaded, _ = load(checkpoint("ernie4_5_moe"), dtype="bfloat16", quant_bits=8, quant_group_size=32, **WAYS[way])
    assert KEPT["ernie4_5_moe"] in loaded.facts["not_quantized"]
    # DeepSpeed leaves fused experts as they are
    assert loaded.facts["quantized_fraction"] > (0.75 if way == "stream" else 0.3)
    gate = loaded.model.get_parameter(KEPT["ernie4_5_moe"])
    assert gate.dtype == torch.float32
    with torch.no_grad():
        assert loaded.model(inputs(BATCH)).logits.isfinite().all()
    loaded.close()


def test_a_large_matrix_in_float32_waits_in_host_memory_while_its_layer_is_on_nvme(tmp_path):
    """DeepSpeed's NVMe buffers have one dtype; this router is large enough to be swapped (1 MiB)."""
    from transformers import AutoConfig

    wide = dict(hidden_size=1024, moe_num_experts=528, moe_intermediate_size=8, num_hidden_layers=2)
    AutoConfig.for_model(**FAMILIES["ernie4_5_moe"] | wide).save_pretrained(tmp_path / "model")
    disable_cudnn_attention()
    ids = inputs(1)
    logits = []
    for options in ({"engine": "resident"}, {"disk_offload": True, "offload_dir": str(tmp_path / "offload")}):
        loaded, spec = load(tmp_path / "model", dtype="bfloat16", dummy=True, **options)
        with torch.no_grad():
            logits.append(loaded.model(ids).logits)
        if "disk_offload" in options:
            router = loaded.model.get_parameter(KEPT["ernie4_5_moe"])
            assert router.dtype == router.ds_tensor.dtype == torch.float32 and router.ds_tensor.final_location is None
            expert = loaded.model.get_parameter("model.layers.1.mlp.experts.down_proj")
            assert expert.ds_tensor.final_location is not None
        loaded.close()
    assert torch.equal(*logits)
