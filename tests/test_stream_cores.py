"""The stream engine with the host's cores: the ids of plain transformers, whatever share of the blocks they multiply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, plain_ids
from test_stream import BATCH, GEN, PROMPT, generate, load
from transformers import AutoConfig, AutoModelForCausalLM

from zero_inference.engines.stream import core_team
from zero_inference.engines.stream.blocks import find_blocks
from zero_inference.engines.stream.feeder import BlockFeeder
from zero_inference.errors import UsageError
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.models.prompts import random_ids

SHARES = ("0.3", "0.7", "1")


@pytest.fixture(scope="module")
def expected(checkpoints):
    made = {}

    def get(family: str):
        if family not in made:
            made[family] = plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN)
        return made[family]

    return get


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
    """Of decode steps, in which the cores multiply everything: sums have another order, and a feed-forward is not rounded in between."""
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
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_codes_give_the_ids_of_the_dequantized_weights(family, bits, checkpoints):
    options = {"quant_bits": bits, "quant_group_size": 32}
    loaded, spec, ranks = load(checkpoints(family), cpu_compute="off", **options)
    by_device = generate(loaded, spec, ranks).output_ids
    loaded.close()
    for share in ("0.5", "1"):
        loaded, spec, ranks = load(checkpoints(family), cpu_compute=share, **options)
        assert torch.equal(generate(loaded, spec, ranks).output_ids, by_device), share
        loaded.close()


@pytest.mark.parametrize("depth", [2, 3, 7])
def test_passes_in_any_order_fetch_what_they_need_and_no_more(depth, checkpoints):
    folder = checkpoints("llama")
    loaded, _, ranks = load(folder, cpu_compute="0.5", ring_depth=depth)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    of_long = feeder_of(loaded).residency.host_bytes
    of_short = loaded.facts["stream"]["fetched_bytes"]
    few = torch.randint(0, VOCAB, (BATCH, 1), device=ranks.device)
    many = torch.randint(0, VOCAB, (BATCH, 12), device=ranks.device)
    with torch.no_grad():
        for order in ("mmmmm", "fffff", "mfmf", "fmmfff"):
            moved = []
            for kind in order:
                before = loaded.transfers.host_to_device_bytes
                ids = many if kind == "m" else few
                found = loaded.model(ids, use_cache=False).logits.cpu()
                moved.append(loaded.transfers.host_to_device_bytes - before)
                torch.testing.assert_close(found, plain(ids.cpu()).logits, atol=1e-4, rtol=1e-4)
            if len(set(order)) == 1 and ranks.device.type == "cpu":  # behind two of a kind the third is known
                assert set(moved[3:]) == {of_long if order[0] == "m" else of_short}
    loaded.close()


def feeder_of(loaded) -> BlockFeeder:
    """What the engine installed in the model."""
    cells = [cell.cell_contents for cell in loaded.close.__closure__]
    return next(each for each in cells if isinstance(each, BlockFeeder))


def chosen_by_plan(own):
    """`CoreTeam.__init__`, as if no share had been asked for."""

    def begin(self, plan, *args):
        own(self, replace(plan, automatic=True), *args)

    return begin


@pytest.mark.parametrize("bits, graph", [(16, "off"), (4, "on")])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_blocks_that_change_hands_while_tokens_are_generated(family, bits, graph, checkpoints, expected, monkeypatch):
    """As `balance` has it where a plan chose the share."""
    monkeypatch.setattr(core_team.CoreTeam, "__init__", chosen_by_plan(core_team.CoreTeam.__init__))
    options = {"gen_len": 6 * GEN, "decode_graph": graph} | (
        {} if bits == 16 else {"quant_bits": 4, "quant_group_size": 32}
    )
    loaded, spec, ranks = load(checkpoints(family), cpu_compute="off", **options)
    ids = generate(loaded, spec, ranks, 6 * GEN).output_ids
    loaded.close()
    if bits == 16:
        assert torch.equal(ids[:, :GEN], expected(family))
    loaded, spec, ranks = load(checkpoints(family), cpu_compute="0.4", **options)
    feeder, placed = feeder_of(loaded), []
    ahead = iter([0] * 12 + [-(10**9)] + [0] * 12 + [10**9] + [0] * 10**6)  # all to the cores, and then all to the link

    def moved(residency, few, candidates):
        after = residency.with_work_moved(next(ahead), candidates) if few else residency
        placed.append(len(after.computed))
        return after

    monkeypatch.setattr(feeder.balance, "of", moved)
    found = generate(loaded, spec, ranks, 6 * GEN)
    loaded.close()
    assert torch.equal(found.output_ids, ids)
    assert len(set(placed)) == 3 and max(placed) == len(feeder.residency.computable) and placed[-1] == 0


def test_a_fetched_block_that_is_never_called_keeps_no_other_from_the_cores(checkpoints, monkeypatch):
    class Skipped(torch.nn.Module):
        def forward(self, hidden_states, **others):
            return torch.zeros_like(hidden_states), None

    monkeypatch.setattr(core_team.CoreTeam, "__init__", chosen_by_plan(core_team.CoreTeam.__init__))
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="0.4")
    feeder = feeder_of(loaded)
    assert 0 not in feeder.residency.computed and 0 in feeder.core_blocks
    loaded.model.model.layers[0].self_attn = Skipped()
    assert generate(loaded, spec, ranks).loops[-1].moved.cores_busy_s_per_step > 0
    assert 0 not in feeder.known and feeder.known >= feeder.residency.computed
    loaded.close()


def test_a_pass_that_broke_off_leaves_the_next_one_right(checkpoints, expected):
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="0.4", ring_depth=3)
    layers = loaded.model.model.layers

    def broken(module, args):
        raise KeyboardInterrupt

    for module in (layers[1].self_attn, layers[1].mlp, layers[2]):
        hook = module.register_forward_pre_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            generate(loaded, spec, ranks)
        hook.remove()
        assert torch.equal(generate(loaded, spec, ranks).output_ids, expected("llama"))
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


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.77, 1.0])
def test_a_share_is_met_as_nearly_as_blocks_allow_and_spread_evenly(share, checkpoints):
    loaded, _, _ = load(checkpoints("llama"), cpu_compute="1")
    residency = feeder_of(loaded).residency.with_share_computed(share)
    sizes = [layout.nbytes for layout in residency.layouts]
    computed = sum(sizes[block] for block in residency.computed)
    assert abs(computed - share * sum(sizes)) <= max(sizes) / 2
    assert sorted({*residency.computed, *residency.fetched}) == residency.in_host_memory
    loaded.close()


@pytest.mark.parametrize("kv", [[], ["--kv-offload"]])
def test_record_and_output_say_what_the_cores_did(kv, checkpoints, run_model):
    options = ["--engine", "stream", "--cpu-compute", "0.5", "--cpu-threads", "2", "--gpu-memory", "0", *kv]
    lengths = ["--batch-size", "2", "--prompt-len", "9", "--gen-len", "4", "--loops", "1", "--dtype", "float32"]
    done = run_model("--model", checkpoints("llama"), *options, *lengths)
    assert done.code == 0, done.stderr
    assert "2 threads" in done.stderr and "in host memory" in done.stderr
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
    operations, of_all = (
        run.record["limit"]["floor_step_s"]["matmul"] * run.record["limit"]["matmul_tflops"] * 1e12
        for run in (done, plain)
    )
    of_cores = 2 * 2 * moved["cores_bytes_per_step"] // 4  # sequences; a product and a sum for each float32
    assert operations == pytest.approx(max(0, of_all - of_cores))


def test_what_a_mixture_reads_is_not_told_as_all_of_its_weights(checkpoints, run_model):
    options = ["--engine", "stream", "--cpu-compute", "1", "--cpu-threads", "1", "--gpu-memory", "0"]
    done = run_model("--model", checkpoints("mixtral"), *options, "--prompt-len", "9", "--gen-len", "4", "--loops", "1")
    assert done.code == 0, done.stderr
    assert 0 < done.record["transfers"]["cores_bytes_per_step"] < done.record["weight_bytes"]
    assert done.record["decode_throughput"] > 0 and done.record["decode_weights_gbps"] is None


@pytest.mark.parametrize("share", ["off", "0.5", "1"])
def test_weights_that_the_model_reads_without_calling_their_module_are_there(share, tmp_path):
    """Mamba multiplies with `dt_proj.weight` itself; with two slots, what is not fetched is another block's by then."""
    config = AutoConfig.for_model(
        "falcon_mamba", hidden_size=192, num_hidden_layers=5, state_size=8, vocab_size=VOCAB, time_step_rank=32
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path / "model")
    loaded, _, ranks = load(tmp_path / "model", cpu_compute=share, ring_depth=2)
    ids = torch.randint(0, VOCAB, (BATCH, 1))
    with torch.no_grad():
        for _ in range(3):
            found = loaded.model(ids.to(ranks.device), use_cache=False).logits.cpu()
            torch.testing.assert_close(found, plain(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    loaded.close()


def test_the_ring_is_whole_again_after_a_pass_that_broke_off(checkpoints):
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="off", ring_depth=2)
    ring = feeder_of(loaded).ring
    generate(loaded, spec, ranks, loops=1)
    before = [fetch.block for fetch in ring.pending]

    def broken(module, args):
        raise KeyboardInterrupt

    hook = loaded.model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        generate(loaded, spec, ranks)
    hook.remove()
    generate(loaded, spec, ranks, loops=1)
    assert [fetch.block for fetch in ring.pending] == before
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
