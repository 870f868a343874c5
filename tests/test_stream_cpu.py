"""The stream engine with the CPU: the ids of plain transformers, whatever share of the blocks they multiply."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, VOCAB, plain_ids
from test_stream import BATCH, GEN, PROMPT, generate, load
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

import zero_inference
from zero_inference.engines.stream import cpu, engine
from zero_inference.engines.stream.blocks import find_blocks, lay_out_blocks
from zero_inference.engines.stream.prefetch import Prefetcher
from zero_inference.errors import RunError, UsageError
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.models.prompts import random_ids

SHARES = ("0.3", "0.7", "1")


@pytest.fixture(scope="module")
def expected(checkpoints):
    return functools.cache(lambda family: plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN))


@pytest.mark.parametrize("family", ["opt", "bloom", "llama", "qwen3", "gpt_neox"])
def test_any_share_gives_the_ids_of_transformers(family, checkpoints, expected):
    for share in SHARES:
        loaded, spec, ranks = load(checkpoints(family), cpu_compute=share)
        found = generate(loaded, spec, ranks)
        moved = found.loops[-1].moved
        loaded.close()
        assert torch.equal(found.output_ids, expected(family)), share
        assert moved.cores_bytes_per_step > 0 and moved.cores_busy_s_per_step > 0
        assert moved.cores_bytes_per_step == loaded.facts["stream"]["computed_bytes"]


@pytest.mark.parametrize(("dtype", "apart"), [("bfloat16", 3e-2), ("float16", 1e-2)])
@pytest.mark.parametrize("family", ["opt", "llama", "mixtral"])
def test_logits_are_as_near_to_the_exact_ones_as_the_resident_engines(family, dtype, apart, checkpoints, tmp_path):
    """Of decode steps, in which the CPU multiplies everything: sums have another order, and a feed-forward is not rounded in between."""
    ids = random_ids(3, BATCH, PROMPT + 3, VOCAB)
    rounded = AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=getattr(torch, dtype))
    rounded.save_pretrained(tmp_path)
    found = []
    for options in (
        {"engine": "resident", "dtype": "float32"},
        {"engine": "resident", "dtype": dtype},
        {"cpu_compute": "1", "dtype": dtype},
    ):
        loaded, spec, _ = load(tmp_path, **options)
        cache, logits = DeviceKVCache(spec.config, PROMPT + 3), []
        with torch.no_grad():
            for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)):
                logits.append(loaded.model(part.to(loaded.device), past_key_values=cache).logits[:, -1].float())
        found.append(torch.stack(logits[1:]))
        loaded.close()
    exact, resident, cores = found
    error, usual = (float((each - exact).norm() / exact.norm()) for each in (cores, resident))
    assert error < 1.3 * usual
    assert float((cores - resident).norm() / resident.norm()) < apart


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3", "mixtral"])
def test_codes_give_the_ids_of_the_dequantized_weights(family, bits, checkpoints, no_gpu):
    """Without a GPU the CPU multiplies all of them by default: dequantizing takes 2.5 times as long as 16 bits."""
    options, found = {"quant_bits": bits, "quant_group_size": 32}, {}
    for share in ("off", "0.5", "auto"):
        loaded, spec, ranks = load(checkpoints(family), cpu_compute=share, **options)
        found[share] = generate(loaded, spec, ranks).output_ids
        facts = loaded.facts["stream"]
        loaded.close()
        assert torch.equal(found[share], found["off"]), share
        assert bool(facts["computed_bytes"]) == (share != "off") and bool(facts["fetched_bytes"]) == (share != "auto")


def installed(loaded, kind: type = Prefetcher):
    """Return what the engine installed in the model, of class `kind`."""
    cells = [cell.cell_contents for cell in loaded.modules_changed.__closure__]
    return next(each for each in cells if isinstance(each, kind))


def chosen_by_plan(own):
    """Return `CpuBackend.__init__` as if no share had been given: the plan chose it, and rebalancing may change it."""

    def begin(self, plan, *args):
        own(self, replace(plan, automatic=True), *args)

    return begin


@pytest.mark.parametrize("bits, graph", [(16, "off"), (4, "on")])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_blocks_that_change_hands_while_tokens_are_generated(family, bits, graph, checkpoints, expected, monkeypatch):
    """As `balance` has it where a plan chose the share."""
    monkeypatch.setattr(cpu.CpuBackend, "__init__", chosen_by_plan(cpu.CpuBackend.__init__))
    codes = {} if bits == 16 else {"quant_bits": 4, "quant_group_size": 32}
    options = {"gen_len": 6 * GEN, "decode_graph": graph} | codes
    loaded, spec, ranks = load(checkpoints(family), cpu_compute="off", **options)
    ids = generate(loaded, spec, ranks, 6 * GEN).output_ids
    loaded.close()
    if bits == 16:
        assert torch.equal(ids[:, :GEN], expected(family))
    loaded, spec, ranks = load(checkpoints(family), cpu_compute="0.4", **options)
    prefetcher, placed = installed(loaded), []
    ahead = iter([0] * 12 + [-(10**9)] + [0] * 12 + [10**9] + [0] * 10**6)  # all to the CPU, and then all to the link

    def moved(placement, few, candidates):
        after = placement.rebalanced(next(ahead), candidates) if few else placement
        placed.append(len(after.cpu_computed))
        return after

    monkeypatch.setattr(prefetcher.rebalancer, "next_placement", moved)
    found = generate(loaded, spec, ranks, 6 * GEN)
    loaded.close()
    assert torch.equal(found.output_ids, ids)
    assert len(set(placed)) == 3 and max(placed) == len(prefetcher.placement.computable) and placed[-1] == 0


def test_a_fetched_block_that_is_never_called_keeps_no_other_from_the_cpu(checkpoints, monkeypatch):
    class Skipped(torch.nn.Module):
        def forward(self, hidden_states, **others):
            return torch.zeros_like(hidden_states), None

    monkeypatch.setattr(cpu.CpuBackend, "__init__", chosen_by_plan(cpu.CpuBackend.__init__))
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="0.4")
    prefetcher = installed(loaded)
    assert 0 not in prefetcher.placement.cpu_computed and 0 in prefetcher.computable
    loaded.model.model.layers[0].self_attn = Skipped()
    assert generate(loaded, spec, ranks).loops[-1].moved.cores_busy_s_per_step > 0
    assert 0 not in prefetcher.observed and prefetcher.observed >= prefetcher.placement.cpu_computed
    loaded.close()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (engine, "Prefetcher"),
        (cpu.CpuPool, "reserve"),  # while blocks are hooked
        (engine, "QuantizedHead"),
        (engine, "StepGraph"),
        (cpu.CpuBackend, "attention"),
        (engine, "patch_attention"),
    ],
)
def test_a_load_that_fails_leaves_nothing_behind(owner, name, checkpoints, monkeypatch):
    """Threads end; the model, the affinity and transformers' table of attentions are as they were."""
    pools, models, table = [], [], dict(ALL_ATTENTION_FUNCTIONS)
    affinity, own_load, own_init = os.sched_getaffinity(0), engine.load, cpu.CpuBackend.__init__

    class Pool(cpu.CpuPool):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            pools.append(self)

    def init(self, *args):  # as on a GPU
        own_init(self, *args)
        self.python_cpus = affinity
        os.sched_setaffinity(0, {min(affinity)})

    def watched_load(plan, *args):
        model = plan.job.empty_model.model
        models.append((model, state_of(model)))
        return own_load(plan, *args)

    def state_of(model):
        return [
            (len(each._forward_pre_hooks), len(each._forward_hooks), "forward" in vars(each))
            for each in model.modules()
        ]

    def fail(*args):
        raise RunError("no memory for it")

    monkeypatch.setattr(cpu, "CpuPool", Pool)
    monkeypatch.setattr(cpu.CpuBackend, "__init__", init)
    monkeypatch.setattr(engine, "load", watched_load)
    monkeypatch.setattr(owner if name != "reserve" else Pool, name, fail, raising=False)
    kind = {"decode_graph": "on"} if name == "StepGraph" else {"kv_offload": True}  # one excludes the other
    try:
        with pytest.raises(RunError, match="no memory for it"):
            load(checkpoints("llama"), cpu_compute="0.4", quant_bits=8, **kind)
        assert os.sched_getaffinity(0) == affinity
    finally:
        os.sched_setaffinity(0, affinity)
    ((model, before),) = models
    assert [pool.handle for pool in pools] == [None]
    assert state_of(model) == before and dict(ALL_ATTENTION_FUNCTIONS) == table


def test_a_pass_that_broke_off_leaves_the_next_one_right(checkpoints, expected):
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="0.4", ring_depth=3)
    layers, ring = loaded.model.model.layers, installed(loaded).rings[0]
    generate(loaded, spec, ranks, loops=1)
    before = [fetch.block for fetch in ring.pending]

    def broken(module, args):
        raise KeyboardInterrupt

    for module in (layers[1].self_attn, layers[1].mlp, layers[2]):
        hook = module.register_forward_pre_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            generate(loaded, spec, ranks)
        hook.remove()
        assert torch.equal(generate(loaded, spec, ranks).output_ids, expected("llama"))
        assert [fetch.block for fetch in ring.pending] == before
    loaded.close()


@pytest.mark.parametrize("kept", [1, 2])
def test_resident_fetched_and_computed_blocks_side_by_side(kept, checkpoints, expected):
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="0.5", gpu_memory=kept * 190 * 1024 / 2**30)
    facts = loaded.facts["stream"]
    assert facts["resident_layers"] == kept and facts["fetched_bytes"] and facts["computed_bytes"]
    assert torch.equal(generate(loaded, spec, ranks).output_ids, expected("llama"))
    loaded.close()


def test_a_layer_without_linear_modules_is_one_block_and_conv1d_is_linear():
    def parts(model_type: str, **fields) -> list:
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **fields)
            model = AutoModelForCausalLM.from_config(config)
        blocks = find_blocks(model, set(), divided=True)
        return [(block.layer, block.module, block.linears, block.transposed) for block in blocks]

    jetmoe = parts("jetmoe", hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16)
    assert jetmoe == [(0, "", (), ()), (1, "", (), ())]
    weights = ("c_attn.weight", "c_proj.weight"), ("c_fc.weight", "c_proj.weight")
    assert parts("gpt2", n_embd=64, n_layer=1, n_head=4) == [
        (0, "attn", ("c_attn", "c_proj"), weights[0]),
        (0, "mlp", ("c_fc", "c_proj"), weights[1]),
    ]


def test_blocks_are_found_and_what_belongs_to_none_stays_on_the_device(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("qwen3"), dtype=torch.float32)
    blocks = find_blocks(model, set(), divided=True)
    assert [block.module for block in blocks[:2]] == ["self_attn", "mlp"]
    assert blocks[0].linears == ("q_proj", "k_proj", "v_proj", "o_proj") and blocks[0].feed_forward is None
    assert all(name.partition(".")[0] in blocks[0].linears for name in blocks[0].parameters), "not the norms of q and k"
    assert blocks[1].feed_forward is not None
    undivided = find_blocks(model, set(), divided=False)
    assert [block.module for block in undivided] == [""] * 3 and len(undivided[0].parameters) == 11


@pytest.mark.parametrize("kv", [[], ["--kv-offload"]])
def test_record_and_output_say_what_the_cpu_did(kv, checkpoints, run_model):
    options = ["--engine", "stream", "--cpu-compute", "0.5", "--cpu-threads", "2", "--gpu-memory", "0", *kv]
    lengths = ["--batch-size", "2", "--prompt-len", "9", "--gen-len", "4", "--loops", "1", "--dtype", "float32"]
    done = run_model("--model", checkpoints("llama"), *options, *lengths)
    assert done.code == 0, done.stderr
    assert "threads: 2" in done.stderr and "in host memory" in done.stderr
    stream, moved = done.record["stream"], done.record["transfers"]
    assert stream["cores"]["threads"] == 2 and stream["cores"]["share"] == 0.5 and stream["cores"]["rows"] == 2
    assert stream["cores"]["attends"] == bool(kv)
    keys_and_values = 3 * 2 * 2 * 2 * 8 * 4  # layers, both, sequences, heads, their width, bytes: of a position
    attended = keys_and_values * (10 + 11 + 12) / 3 if kv else 0
    assert moved["cores_bytes_per_step"] == stream["computed_bytes"] + attended
    assert moved["host_to_device_bytes_per_step"] >= stream["fetched_bytes"] > 0
    assert done.record["decode_weights_gbps"] > 0
    plain = run_model("--model", checkpoints("llama"), "--engine", "resident", *lengths)
    assert done.record["output_ids_sha256"] == plain.record["output_ids_sha256"]
    limits = [run.record["limit"] for run in (done, plain)]
    operations, of_all = (each["floor_step_s"]["matmul"] * each["matmul_tflops"] * 1e12 for each in limits)
    of_cpu = 2 * 2 * moved["cores_bytes_per_step"] // 4  # sequences; a product and a sum for each float32
    assert operations == pytest.approx(max(0, of_all - of_cpu))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a plan for a machine without a GPU")
@pytest.mark.parametrize(
    "options, says",
    [
        ("--engine stream", "multipl"),
        ("--engine stream --cpu-compute off", "weights are dequantized in every step: slower than 16 bits"),
        ("--engine deepspeed --cpu-offload", "slower than 16 bits; --engine stream multiplies them as stored"),
    ],
)
def test_a_plan_without_a_gpu_says_who_multiplies_quantized_weights(options, says, checkpoints, run_model):
    lengths = "--quant-bits 4 --prompt-len 9 --gen-len 4 --dry-run".split()
    done = run_model("--model", checkpoints("llama"), *options.split(), *lengths)
    assert done.code == 0 and says in done.stdout + done.stderr
    assert ("slower than 16 bits" in done.stdout + done.stderr) == (says != "multipl")


HEADS = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
READ_OTHERWISE = {
    # multiplies with `dt_proj.weight` itself
    "falcon_mamba": dict(hidden_size=192, num_hidden_layers=5, state_size=8, time_step_rank=32),
    # calls `altup.predict()` and `altup.correct()`, not `altup()`
    "gemma3n_text": dict(
        HEADS, num_hidden_layers=4, intermediate_size=[96] * 4, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, laurel_rank=32, altup_num_inputs=4, hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB, activation_sparsity_pattern=[0.0] * 4, initializer_range=0.5,
    ),
    # heads of two widths: its configuration raises where `head_dim` is read
    "gemma4_text": dict(
        HEADS, num_hidden_layers=2, global_head_dim=32, intermediate_size=96,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
    ),
    # the model divides weights of layers in place when it is first called; nothing is left for the CPU
    "rwkv": dict(hidden_size=64, num_hidden_layers=4, rescale_every=1),
    # layers share a transformer block
    "zamba2": dict(
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, layer_types=["mamba", "hybrid"] * 2,
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, attention_hidden_size=128, attention_head_dim=32,
        intermediate_size=96, hybrid_layer_ids=[1, 3], mamba_d_state=16, mamba_ngroups=1, n_mamba_heads=4,
        mamba_headdim=32, num_mem_blocks=1, adapter_rank=32, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def read_otherwise(tmp_path_factory):
    @functools.cache
    def get(family: str):
        tokens = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **tokens, **READ_OTHERWISE[family])
        ).eval()
        folder = tmp_path_factory.mktemp(family) / "model"
        plain.save_pretrained(folder)
        ids = torch.randint(3, VOCAB, (BATCH, 1))
        with torch.no_grad():
            return folder, ids, plain(ids, use_cache=False).logits

    return get


@pytest.mark.parametrize("family", READ_OTHERWISE)
@pytest.mark.parametrize("kept", [0, 0.4])
def test_weights_that_are_read_otherwise_than_by_calling_their_module_are_there(family, kept, read_otherwise):
    """With two slots, what is not fetched would be another block's."""
    folder, ids, expected = read_otherwise(family)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for share in ("off",) if family == "rwkv" else ("off", "0.5", "1"):
        loaded, spec, ranks = load(folder, cpu_compute=share, ring_depth=2, gpu_memory=kept * total / 2**30)
        with torch.no_grad():
            for _ in range(3):
                found = loaded.model(ids.to(ranks.device), use_cache=False).logits.cpu()
                torch.testing.assert_close(found, expected, atol=1e-3 * expected.std().item(), rtol=1e-3)
        if family == "gemma3n_text":
            ids_of_plain = plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN)
            assert torch.equal(generate(loaded, spec, ranks).output_ids, ids_of_plain)
        assert share == "off" or loaded.facts["stream"]["computed_bytes"]
        loaded.close()


def test_a_model_may_write_what_stays_on_the_device(read_otherwise):
    folder, ids, expected = read_otherwise("rwkv")
    with zero_inference.load(folder, engine="stream", dtype="float32", batch_size=BATCH, gpu_memory=0) as model:
        with torch.no_grad():
            found = model(ids.to(model.device), use_cache=False).logits.cpu()
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        with pytest.raises(UsageError, match="cannot be changed"), torch.no_grad():
            model.rwkv.blocks[0].attention.key.weight.mul_(2)
            model(ids.to(model.device), use_cache=False)


class Twice(LlamaDecoderLayer):
    """Calls its feed-forward twice."""

    def forward(self, hidden_states, **others):
        return self.mlp(self.mlp(super().forward(hidden_states, **others)))


class ByAttribute(LlamaDecoderLayer):
    """Reads a weight of its feed-forward itself."""

    def forward(self, hidden_states, **others):
        return super().forward(torch.nn.functional.linear(hidden_states, self.mlp.gate_proj.weight[:64]), **others)


class ByMethod(LlamaDecoderLayer):
    """Calls another method of its feed-forward, not the module."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mlp.compute, self.mlp.forward = self.mlp.forward, None
        self.mlp.__class__ = type("Mlp", (torch.nn.Module,), {"__call__": lambda mlp, x: mlp.compute(x)})


def a_llama(layer_class: type) -> torch.nn.Module:
    config = AutoConfig.for_model(vocab_size=VOCAB, **FAMILIES["llama"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        for index in range(len(model.model.layers)):
            model.model.layers[index] = layer_class(config, index)
    return model.eval()


@pytest.mark.parametrize("layer_class", [Twice, ByAttribute, ByMethod])
def test_a_layer_is_divided_only_where_weights_come_with_the_calls_of_their_blocks(layer_class):
    usual = find_blocks(a_llama(LlamaDecoderLayer), set(), divided=True)
    assert [block.module for block in usual[:2]] == ["self_attn", "mlp"]
    assert [block.module for block in find_blocks(a_llama(layer_class), set(), divided=True)] == [""] * 3


def test_what_is_read_outside_of_its_layer_is_in_no_block():
    class Model(LlamaModel):
        def forward(self, input_ids=None, **others):
            found = super().forward(input_ids, **others)
            found.last_hidden_state = found.last_hidden_state * self.layers[1].post_attention_layernorm.weight
            return found

    model = a_llama(LlamaDecoderLayer)
    model.model.__class__ = Model
    blocks, outside = lay_out_blocks(model, None, divided=False)
    held = {(block.layer, stored.name) for block in blocks for stored in block.layout.parameters}
    names = [name for name, _ in model.model.layers[0].named_parameters()]
    missing = {(layer, name) for layer in range(3) for name in names} - held
    assert missing == {(1, "post_attention_layernorm.weight")}


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("share", ["off", "0.5"])
def test_weights_that_are_not_fetched_cannot_be_used(share, bits, checkpoints):
    codes = {} if bits == 16 else {"quant_bits": 4, "quant_group_size": 32}
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute=share, **codes)
    prefetcher, (before, layer, _) = installed(loaded), loaded.model.model.layers
    blocks = [block.module.get_parameter(p.name) for block in prefetcher.blocks for p in block.layout.parameters]
    blocks += [p for name, p in loaded.model.named_parameters() if name.endswith("_proj.weight")]
    during = []
    before.mlp.register_forward_hook(lambda *_: during.append(layer.mlp.down_proj.weight.numel()))
    for _ in range(2):
        assert all(parameter.numel() == 0 for parameter in blocks)
        with pytest.raises(RuntimeError, match="size|shape|dimension"):
            torch.nn.functional.linear(torch.ones(1, 192, device=ranks.device), layer.mlp.down_proj.weight)
        generate(loaded, spec, ranks, loops=1)
    assert set(during) == {0}
    loaded.close()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"cpu_compute": "0.001"}, "--cpu-compute 0.001: this share of .* is less than half a block"),
        ({"cpu_compute": "0.5", "gpu_memory": 1}, "--cpu-compute 0.5: all weights are on the device"),
    ],
)
def test_a_share_that_would_do_nothing_is_refused(options, said, checkpoints):
    with pytest.raises(UsageError, match=said):
        load(checkpoints("llama"), **options)
