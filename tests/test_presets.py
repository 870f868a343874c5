import json
import resource
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from zero_inference.config.run_config import RunConfig
from zero_inference.models import built_in
from zero_inference.models.empty_model import build_empty_model
from zero_inference.models.spec import ModelSpec, resolve_model
from zero_inference.models.stored_weights import stored_formats
from zero_inference.utils import model_sizes

# Parameters as the hub counts them in the published weights (tied ones once). OPT-30B, 66B and 175B are
# worked out from the paper's table: L (12 h^2 + 13 h) + (V + 2050) h + 2 h. DeepSeek-V3 (671B) is without its prediction layer,
# gpt-oss-120b (116.83B in its model card) without its mxfp4 scales, GLM-4.6 (357B) and MiniMax-M2 (230B) without their prediction layers,
# Kimi-K2 1.03T, Llama-4-Scout (109B) without the image encoder.
PARAMETERS = {
    "facebook/opt-125m": 125239296,
    "facebook/opt-1.3b": 1315758080,
    "facebook/opt-2.7b": 2651596800,
    "facebook/opt-6.7b": 6658473984,
    "facebook/opt-13b": 12853473280,
    "facebook/opt-30b": 48 * (12 * 7168**2 + 13 * 7168) + 52324 * 7168,
    "facebook/opt-66b": 64 * (12 * 9216**2 + 13 * 9216) + 52324 * 9216,
    "facebook/opt-175b": 96 * (12 * 12288**2 + 13 * 12288) + 52324 * 12288,
    "bigscience/bloom-560m": 559214592,
    "bigscience/bloom-7b1": 7069016064,
    "bigscience/bloom": 176247271424,
    "meta-llama/Llama-2-7b-hf": 6738415616,
    "meta-llama/Llama-2-13b-hf": 13015864320,
    "meta-llama/Llama-2-70b-hf": 68976648192,
    "meta-llama/Llama-3.1-8B": 8030261248,
    "meta-llama/Llama-3.1-70B": 70553706496,
    "meta-llama/Llama-3.1-405B": 405853388800,
    "meta-llama/Llama-3.2-1B": 1235814400,
    "mistralai/Mixtral-8x7B-v0.1": 46702792704,
    "mistralai/Mixtral-8x22B-v0.1": 140620634112,
    "deepseek-ai/DeepSeek-V3": 671026404352,
    "openai/gpt-oss-120b": 116829156672,
    "meta-llama/Llama-4-Scout-17B-16E": 107769861120,
    "Qwen/Qwen3-30B-A3B": 30532122624,
    "Qwen/Qwen3-235B-A22B": 235093634560,
    "Qwen/Qwen3-235B-A22B-FP8": 235093634560,
    "openai/gpt-oss-20b": 20914757184,
    "MiniMaxAI/MiniMax-M2": 228689748992,
    "moonshotai/Kimi-K2-Thinking": 1026408209408,
    "zai-org/GLM-4.6-FP8": 352797814784,
    "Qwen/Qwen3-8B": 8190735360,
    "Qwen/Qwen3-32B": 32762123264,
}

# Billions that a token goes through, as published. DeepSeek's and OpenAI's leave the embedding out and keep the head; the others
# count both.
ACTIVE = {
    "mistralai/Mixtral-8x7B-v0.1": (12.9, True),
    "mistralai/Mixtral-8x22B-v0.1": (39, True),
    "deepseek-ai/DeepSeek-V3": (36.6, False),
    "openai/gpt-oss-120b": (5.1, False),
    "Qwen/Qwen3-30B-A3B": (3.3, True),
    "Qwen/Qwen3-235B-A22B": (22, True),
    "openai/gpt-oss-20b": (3.6, False),
    "MiniMaxAI/MiniMax-M2": (10, False),
    "moonshotai/Kimi-K2-Thinking": (32, False),
    "zai-org/GLM-4.6-FP8": (32, False),
}
ROUNDED = ("MiniMaxAI/MiniMax-M2", "zai-org/GLM-4.6-FP8")  # published as 10 and 32


def test_every_preset_is_counted():
    files = (ROOT / "zero_inference" / "models" / "presets").glob("*.json")
    assert {json.loads(file.read_text())["name"] for file in files} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_has_the_published_number_of_parameters(name):
    config = built_in.find_preset(name).to_config()
    assert model_sizes.exact_parameter_bytes(config) == 2 * PARAMETERS[name]


def empty_model_of(name):
    config = built_in.find_preset(name).to_config()
    return build_empty_model(ModelSpec(name, config, None, None, torch.bfloat16, dummy=True))


@pytest.mark.parametrize("name", ACTIVE)
def test_experts_that_were_not_chosen_are_idle(name):
    empty_model = empty_model_of(name)
    billions, embedding_counts = ACTIVE[name]
    embedding = empty_model.model.get_input_embeddings().weight.numel()
    active = empty_model.sizes.parameters - empty_model.sizes.idle_parameters + embedding_counts * embedding
    assert active / 1e9 == pytest.approx(billions, rel=0.05 if name in ROUNDED else 0.02), "published rounded"
    assert empty_model.sizes.idle_bytes == 2 * empty_model.sizes.idle_parameters
    assert empty_model.sizes.chooses_experts


def test_no_expert_of_llama_4_is_idle_because_its_module_multiplies_all():
    empty_model = empty_model_of("llama-4-scout")
    assert empty_model.sizes.idle_parameters == empty_model.model.get_input_embeddings().weight.numel()


def test_models_that_are_built_and_dropped_leave_no_large_heap():
    """Neither addresses, so that this process can fork, nor written memory: Llama-4 makes its experts with `torch.zeros`."""

    def used_bytes() -> list[int]:  # addresses and memory
        return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2]]

    before = used_bytes()
    for name in ("meta-llama/Llama-2-70b-hf", "deepseek-ai/DeepSeek-V3", "llama-4-scout"):
        empty_model_of(name)
    assert all(after - start < 1 << 30 for after, start in zip(used_bytes(), before))


def test_alias_finds_the_preset_in_any_case_and_an_unknown_name_its_neighbours():
    assert built_in.find_preset(" FACEBOOK/OPT-66B").name == "facebook/opt-66b"
    assert built_in.find_preset("bloom-176b").name == "bigscience/bloom"
    assert built_in.find_preset("opt-67b") is None
    near = built_in.similar_presets("OPT-67b")
    assert set(near[:2]) == {"opt-6.7b", "opt-66b"} and len(near) == 3
    assert built_in.similar_presets("meta-llama/llama-3.1-8")[0] == "meta-llama/Llama-3.1-8B"
    assert built_in.similar_presets("0123456789") == []


# Bytes of the files on the hub, in GB.
PUBLISHED_GB = {
    "gpt-oss-20b": 13.8, "gpt-oss-120b": 65.2, "kimi-k2-thinking": 594, "qwen3-235b-a22b-fp8": 236.4, "minimax-m2": 230, "glm-4.6-fp8": 355,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_random_weights_have_the_bytes_of_the_published_checkpoint(name):
    """Beside prediction layers of the published ones, which transformers leaves out."""
    spec = resolve_model(RunConfig(model=name, dummy=True, engine="stream").validate(), "cuda")
    model = build_empty_model(spec).model
    formats, parameters = stored_formats(model, spec), dict(model.named_parameters())
    kept = 0
    for name, (form, transposed) in formats.items():
        parameter = parameters.pop(name)
        kept += form.stored_bytes(tuple(parameter.mT.shape if transposed else parameter.shape))
    plain = sum(parameter.nbytes for parameter in parameters.values())
    assert (kept + plain) / 1e9 == pytest.approx(PUBLISHED_GB[spec.name.split("/")[-1]], rel=0.02)
