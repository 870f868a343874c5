"""The stream engine's input embedding in host memory: the tokens of plain transformers, and no embedding that other code reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model, plain_ids
from test_machine import planned
from test_stream import BATCH, GEN, PROMPT, generate, load
from test_timing import FAST
from transformers import AutoConfig, AutoModelForCausalLM

import zero_inference
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.stream import vocabulary
from zero_inference.engines.stream.vocabulary import HostEmbedding, find_table
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.kernels.extension import load_extension
from zero_inference.models.empty_model import build_on_meta
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import build_job
from zero_inference.utils.format import format_bytes
from zero_inference.utils.host_memory import host_copy
from zero_inference.utils.ranks import detect_ranks

on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and load_extension()), reason="needs a GPU and the kernels"
)


@pytest.fixture
def on_host(monkeypatch):
    """Plans of a device without a GPU, too, leave the embedding in host memory."""
    monkeypatch.setattr(vocabulary, "device_reads_rows", lambda job: True)


@pytest.fixture
def untied(tmp_path, checkpoints):
    def get(family: str):
        if family != "opt":
            return checkpoints(family)
        build_model(family, tie_word_embeddings=False).save_pretrained(tmp_path / family)
        return tmp_path / family

    return get


BY_LINK = {"cpu_compute": "off"}
AS_GRAPH = {"gpu_memory": 1.0, "decode_graph": "on", "cpu_compute": "off"}
CODES = {"quant_bits": 4, "quant_group_size": 32, "cpu_compute": "1"}


@pytest.mark.parametrize(
    "family, options",
    [("llama", BY_LINK), ("llama", AS_GRAPH), ("llama", CODES), ("opt", BY_LINK), ("opt", AS_GRAPH)],
)
def test_tokens_are_those_of_transformers_and_rows_are_counted(family, options, untied, on_host):
    folder = untied(family)
    everything = options.get("gpu_memory")
    if everything:  # all but the last layer
        whole, _, _ = load(folder, **options)
        assert whole.facts["stream"]["embedding_on_host"] is False, "all layers are on the device"
        resident = whole.facts["stream"]["resident_bytes"]
        whole.close()
        options = options | {"gpu_memory": 0.7 * resident / 2**30}
    loaded, spec, ranks = load(folder, **options)
    facts, weight = loaded.facts["stream"], loaded.model.get_input_embeddings().weight
    assert facts["embedding_on_host"] is True and weight.numel() == 0
    found = generate(loaded, spec, ranks)
    moved = found.loops[-1].moved.host_to_device_bytes_per_step
    results = 0
    if loaded.device.type == "cuda" and options["cpu_compute"] == "1":  # of queries, keys, values, and both blocks
        results = 3 * BATCH * (64 + 16 + 16 + 64 + 64) * 4
    assert moved == facts["fetched_bytes"] + results + BATCH * 64 * 4, "a row of 64 elements for each sequence"
    if everything:
        assert facts["decode_graph"].unused_because is None
    loaded.close()
    if "quant_bits" not in options:
        assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    else:
        assert loaded.facts["not_quantized"] == ["model.embed_tokens.weight"]
        assert 0.5 < loaded.facts["quantized_fraction"] < 1
    assert "forward" not in vars(loaded.model.get_input_embeddings())


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_table_is_counted_where_it_is(family, untied, monkeypatch):
    folder, plans = untied(family), []
    for there in (False, True):
        monkeypatch.setattr(vocabulary, "device_reads_rows", lambda job, there=there: there)
        options = {"engine": "stream", "dtype": "float32", "gpu_memory": 0, "cpu_compute": "off"}
        config = RunConfig(model=str(folder), **options).validate()
        plans.append(make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks())).engine_plan)
        loaded, _, _ = load(folder, cpu_compute="off")
        assert loaded.weight_bytes == plans[-1].weight_bytes
        loaded.close()
    before, after = plans
    table = VOCAB * 64 * 4
    assert before.weight_bytes == after.weight_bytes
    assert before.footprint.device - after.footprint.device == table == after.footprint.host - before.footprint.host
    assert after.fetched_bytes == before.fetched_bytes + 64 * 4


def test_memory_of_the_table_holds_layers(monkeypatch):
    machine = replace(Machine(FAST), device_limit_bytes=8 << 30)
    options = "--model llama-3.1-8b --engine stream --quant-bits 8 --dummy --prompt-len 128 --gen-len 32"
    found = planned(options, machine)
    monkeypatch.setattr(vocabulary, "device_reads_rows", lambda job: False)
    before = planned(options, machine)
    of_layer, table = before.engine_plan.placement.slot_bytes, 128256 * 4096 * 2
    after, without = found.engine_plan.placement, before.engine_plan.placement
    kept, host = after.resident_bytes - without.resident_bytes, after.host_bytes - without.host_bytes
    assert abs(kept - table) < of_layer and host == -kept, "whole layers"
    assert found.engine_plan.device_peak_bytes <= 8 << 30
    assert f"and {format_bytes(table)} of input embedding)" in found.engine_plan.describe_location()
    whole = planned(options, Machine(FAST))
    assert whole.engine_plan.footprint.host == 0 and whole.engine_plan.describe_location() == "on the device"


def test_layers_that_fit_beside_no_table_are_all_on_the_device():
    options = "--model llama-3.1-8b --engine stream --dummy --prompt-len 128 --gen-len 32"
    whole = planned(options, Machine(FAST)).engine_plan
    machine = replace(Machine(FAST), device_limit_bytes=whole.min_free_bytes_on(0) - 1)
    found = planned(options, machine).engine_plan
    assert not found.placement.in_host_memory and found.footprint.host == 128256 * 4096 * 2
    assert f"and {format_bytes(found.footprint.host)} of input embedding)" in found.describe_location()


@pytest.mark.parametrize(
    "changes, taken",
    [
        (dict(model_type="llama", tie_word_embeddings=False), "model.embed_tokens"),
        (dict(model_type="opt", tie_word_embeddings=False), "model.decoder.embed_tokens"),  # positions have their own
        (dict(model_type="gpt2", tie_word_embeddings=False), "transformer.wte"),
        (dict(model_type="llama", tie_word_embeddings=True), None),
        (dict(model_type="opt", tie_word_embeddings=True), None),
        (dict(model_type="gemma3_text", tie_word_embeddings=False), None),  # scales what it reads
    ],
    ids=str,
)
def test_only_a_table_that_nothing_else_reads_is_taken(changes, taken, tmp_path):
    small = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, pad_token_id=0)
    AutoConfig.for_model(**changes | small).save_pretrained(tmp_path)
    config = RunConfig(model=str(tmp_path), dummy=True, engine="stream").validate()
    model = build_on_meta(resolve_model(config, "cpu"))
    found = find_table(model)
    assert (found and found.module) == taken
    if taken:
        weight = model.get_input_embeddings().weight
        assert (found.nbytes, found.row_bytes) == (weight.nbytes, weight[0].nbytes)


def test_a_table_that_other_code_reads_stays(tmp_path):
    AutoConfig.for_model(**FAMILIES["llama"] | {"vocab_size": 64}).save_pretrained(tmp_path)
    model = build_on_meta(resolve_model(RunConfig(model=str(tmp_path), dummy=True).validate(), "cpu"))
    norm = model.model.norm
    norm.others = [model.get_input_embeddings()]  # in a list, it is no module of the norm
    norm.register_forward_hook(lambda module, args, output: output + module.others[0].weight.mean())
    assert find_table(model) is None


def test_a_loaded_model_takes_adapters_and_no_changes(checkpoints, on_host):
    folder = checkpoints("llama")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids(0, 2, 7, VOCAB)

    def adapted(model):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        settings = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
        return get_peft_model(model, settings).eval()

    with (
        torch.no_grad(),
        zero_inference.load(folder, dtype="float32", max_length=16, verbose=0, engine="stream", gpu_memory=0) as model,
    ):
        torch.testing.assert_close(model(ids).logits.cpu(), plain(ids).logits, rtol=1e-4, atol=1e-4)
        for change in (
            lambda: model.model.embed_tokens.weight.data.zero_(),
            lambda: model.resize_token_embeddings(400),
            lambda: model.load_state_dict({"model.embed_tokens.weight": torch.zeros(VOCAB, 64)}, strict=False),
        ):
            with pytest.raises(UsageError, match="cannot be"):
                change()
        expected = adapted(plain)(ids).logits
        torch.testing.assert_close(adapted(model)(ids).logits.cpu(), expected, rtol=1e-4, atol=1e-4)
        model.model.embed_tokens.base_layer.weight.add_(1)
        with pytest.raises(UsageError, match="cannot be"):
            model(ids)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [64, 33, 4096])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 1000), (0, 4)], ids=str)
def test_the_kernel_reads_the_rows_of_the_ids(dtype, columns, shape):
    torch.manual_seed(0)
    values, ids = torch.randn(1000, columns).to(dtype), torch.randint(1000, shape)
    module = torch.nn.Embedding(1000, columns, device="meta")
    held = HostEmbedding(module, host_copy(values, pinned=True))
    for given in (ids, ids.int(), ids.mT.contiguous().mT):
        assert torch.equal(module(given.cuda()).cpu(), torch.nn.functional.embedding(ids, values))
    held.close()


@on_a_gpu
def test_a_graph_reads_the_rows_of_the_ids_that_are_there_when_it_is_replayed():
    values, ids = torch.randn(500, 256).bfloat16(), torch.zeros(4, 1, dtype=torch.int64, device="cuda")
    module = torch.nn.Embedding(500, 256, device="meta")
    held = HostEmbedding(module, host_copy(values, pinned=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = module(ids)
    for seed in range(3):
        chosen = torch.randint(500, (4, 1), generator=torch.Generator().manual_seed(seed))
        ids.copy_(chosen)
        graph.replay()
        assert torch.equal(rows.cpu(), values[chosen])
    held.close()
