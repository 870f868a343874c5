"""Short prompts in the stream engine, of which the CPU multiplies a share: the ids of plain transformers, and what the plan chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import ROOT, VOCAB, plain_ids
from test_expert_cache import FORMS, cache_of, cached, fetching  # noqa: F401  (fixtures)
from test_machine import planned
from test_stream import BATCH, GEN, PROMPT, generate, ids_of, load
from test_stream_cpu import installed
from test_stream_experts import mixtures  # noqa: F401  (a fixture)
from transformers import AutoModelForCausalLM

import zero_inference
from benchmarks.predictions import without_short_prompts
from zero_inference.engines.stream import plan as stream_plan
from zero_inference.engines.stream.cpu_plan import MAX_PROMPT_ROWS
from zero_inference.engines.stream.expert_cache import ExpertCache
from zero_inference.engines.stream.prefetch import PassKind
from zero_inference.hardware.machine import Machine
from zero_inference.hardware.profile import read_profile
from zero_inference.models.prompts import random_ids

TOKENS = BATCH * PROMPT


@pytest.fixture
def short(monkeypatch):
    """short(share, rows): plans have the CPU multiply this share in prompts of up to `rows` tokens, as a machine with a GPU may."""

    def set_share(share: float, rows: int) -> None:
        def placed(job, placement, plan):
            return placement.with_prompt_share(share), replace(plan, prompt_rows=rows, prompt_share=share)

        monkeypatch.setattr(stream_plan, "plan_short_prompts", placed)

    return set_share


def kinds_of(loaded) -> list[PassKind]:
    """Return a list that gets the kind of each pass from now on."""
    prefetcher, found = installed(loaded), []
    begin = prefetcher.begin_pass

    def noted(tokens: int) -> None:
        begin(tokens)
        found.append(prefetcher.kind)

    prefetcher.begin_pass = noted
    return found


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "bloom"])
def test_any_share_of_a_prompt_gives_the_ids_of_transformers(family, bits, checkpoints, short):
    expected = ids_of(checkpoints(family), cpu_compute="off", **FORMS[bits])
    if bits == 16:
        assert torch.equal(expected, plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    for of_prompt, rows, of_steps in ((0.4, TOKENS, "0.3"), (1.0, TOKENS + 5, "1"), (1.0, TOKENS - 1, "0.5")):
        short(of_prompt, rows)
        loaded, spec, ranks = load(checkpoints(family), cpu_compute=of_steps, **FORMS[bits])
        kinds = kinds_of(loaded)
        found = generate(loaded, spec, ranks, loops=3)
        loaded.close()
        assert torch.equal(found.output_ids, expected), (of_prompt, rows)
        prompt = PassKind.SHORT_PROMPT if rows >= TOKENS else PassKind.LONG
        steps = [PassKind.DECODE] * (GEN - 1)
        graph = loaded.facts["stream"]["decode_graph"]
        tried = [PassKind.DECODE] * (graph.difference is not None)  # the step on trial is also computed with a mask
        assert kinds == [PassKind.LONG, *steps, *tried, *2 * [prompt, *steps]]


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_of_a_prompt_give_the_ids_of_transformers(family, bits, mixtures, short):  # noqa: F811
    folder, expected = mixtures(family)
    if bits == 4:
        expected = ids_of(folder, cpu_compute="off", **FORMS[bits])
    for share, of_steps in ((0.4, "1"), (1.0, "0.5")):
        short(share, TOKENS)
        loaded, spec, ranks = load(folder, cpu_compute=of_steps, **FORMS[bits])
        placement, kinds = installed(loaded).placement, kinds_of(loaded)
        assert set() < placement.prompt_cpu_computed <= set(placement.expert_blocks)
        assert torch.equal(generate(loaded, spec, ranks, loops=3).output_ids, expected), share
        assert kinds.count(PassKind.SHORT_PROMPT) == 2
        loaded.close()


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("many", [True, False])
def test_a_prompt_divides_cached_experts_and_counts_choices(bits, many, mixtures, cached, fetching, short, monkeypatch):  # noqa: F811
    monkeypatch.setattr("zero_inference.engines.stream.plan.format_can_fuse", lambda form, dtype: many)
    expected = ids_of(mixtures("qwen3_moe")[0], cpu_compute="off", **FORMS[bits])
    fetching(0.5, 2)
    short(1.0, TOKENS)
    loaded, spec, ranks = cached("qwen3_moe", 3, bits)
    counted = []
    for slots in cache_of(loaded).by_block.values():
        own = slots.count_uses
        slots.count_uses = lambda chosen, own=own: counted.append(len(chosen)) or own(chosen)
    assert torch.equal(generate(loaded, spec, ranks, loops=3).output_ids, expected)
    assert counted == [TOKENS] * 3 * len(cache_of(loaded).by_block), "also in the first prompt, which fills the slots"


@pytest.mark.parametrize("kind", [PassKind.SHORT_PROMPT, PassKind.LONG])
def test_steps_of_larger_batches_wait_for_slots_between_graphs(kind, mixtures, cached, fetching, short, monkeypatch):  # noqa: F811
    """A graph cannot hold a wait for what was asked before it was recorded."""
    folder, expected = mixtures("qwen3_moe")
    fetching(0.5, 2)
    if kind is PassKind.SHORT_PROMPT:
        short(1.0, TOKENS)
    loaded, spec, ranks = cached("qwen3_moe", 3, decode_graph="on")
    prefetcher, inside, waits = installed(loaded), [False], []
    prefetcher.cpu.decode_rows = 0  # as a plan for one sequence would have it of two
    outside, own = prefetcher.outside_graphs, ExpertCache.await_gathering

    def outside_of_graphs(work):
        def noted():
            inside[0] = True
            found = work()
            inside[0] = False
            return found

        return outside(noted)

    monkeypatch.setattr(prefetcher, "outside_graphs", outside_of_graphs)
    monkeypatch.setattr(ExpertCache, "await_gathering", lambda self: waits.append(inside[0]) or own(self))
    kinds = kinds_of(loaded)
    assert torch.equal(generate(loaded, spec, ranks, loops=2).output_ids, expected)
    assert kind is kinds[-1] and all(waits) and len(waits) >= len(kinds) * len(cache_of(loaded).by_block)
    assert loaded.facts["stream"]["decode_graph"].unused_because is None


@pytest.mark.parametrize("depth", [2, 3, 7])
def test_passes_of_all_kinds_in_any_order_fetch_what_they_need_and_no_more(depth, checkpoints, short):
    short(0.4, 12)
    folder = checkpoints("llama")
    loaded, _, ranks = load(folder, cpu_compute="0.7", ring_depth=depth)
    prefetcher, placement = installed(loaded), installed(loaded).placement
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lengths = {"f": 1, "p": 6, "m": 7}
    assert placement.prompt_cpu_computed and placement.prompt_cpu_computed != placement.cpu_computed
    needed = {
        "f": placement.nbytes_of(placement.streamed),
        "p": placement.host_bytes - placement.nbytes_of(placement.prompt_cpu_computed),
        "m": placement.host_bytes,
    }
    with torch.no_grad():
        loaded.model(torch.zeros(BATCH, 7, dtype=torch.int64, device=ranks.device), use_cache=False)
        for order in ("mmmmm", "fffff", "ppppp", "mpmp", "pfpfpf", "fmppffmpf", "pfffffpmmf"):
            moved = []
            for kind in order:
                before = loaded.transfers.host_to_device_bytes
                ids = torch.randint(0, VOCAB, (BATCH, lengths[kind]), device=ranks.device)
                found = loaded.model(ids, use_cache=False).logits.cpu()
                assert prefetcher.kind is {"f": PassKind.DECODE, "p": PassKind.SHORT_PROMPT, "m": PassKind.LONG}[kind]
                embedding_bytes = ids.numel() * placement.embedding_row_bytes
                moved.append(loaded.transfers.host_to_device_bytes - before - embedding_bytes)
                torch.testing.assert_close(found, plain(ids.cpu()).logits, atol=1e-4, rtol=1e-4)
            if len(set(order)) == 1 and ranks.device.type == "cpu":  # after two of a kind the third is known
                assert set(moved[3:]) == {needed[order[0]]}
    loaded.close()


def test_the_ring_follows_a_prompt_with_what_came_behind_the_last_one(checkpoints, short):
    """Generations of one kind fetch no block that is not used: after a prompt come those of a step."""
    short(0.4, TOKENS)
    loaded, spec, ranks = load(checkpoints("llama"), cpu_compute="0.7", ring_depth=2)
    prefetcher, called = installed(loaded), []
    begin_pass = prefetcher.rings[0].begin_pass
    prefetcher.rings[0].begin_pass = lambda *orders: called.append(tuple(map(list, orders))) or begin_pass(*orders)
    generate(loaded, spec, ranks, loops=1)
    placement = prefetcher.placement
    assert called[0] == (placement.in_host_memory, placement.streamed)
    called.clear()  # on a GPU a graph was tried, too
    generate(loaded, spec, ranks, loops=1)
    of_prompt = [block for block in placement.in_host_memory if block not in placement.prompt_cpu_computed]
    assert called[0] == (of_prompt, placement.streamed) and called[-1] == (placement.streamed, placement.streamed)
    before = loaded.transfers.host_to_device_bytes
    generate(loaded, spec, ranks, loops=1)
    embedding_bytes = (TOKENS + BATCH * (GEN - 1)) * placement.embedding_row_bytes
    moved = loaded.transfers.host_to_device_bytes - before - embedding_bytes
    ahead = placement.nbytes_of(set(placement.streamed[:2]).intersection(of_prompt[:2]))
    if ranks.device.type == "cpu":
        needed = placement.nbytes_of(of_prompt) + GEN * placement.nbytes_of(placement.streamed)
        assert moved <= needed - ahead, "one step's first blocks stay for the next generation"
    loaded.close()


@pytest.mark.parametrize("graph", ["off", "on"])
def test_a_model_of_the_api_takes_prompts_of_all_lengths(graph, checkpoints, short):
    short(0.6, 8)
    folder = checkpoints("llama")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"engine": "stream", "dtype": "float32", "gpu_memory": 0, "cpu_compute": "0.5", "decode_graph": graph}
    with zero_inference.load(folder, batch_size=1, **options) as model:
        prefetcher = installed(model._state.loaded)
        kinds = kinds_of(model._state.loaded)
        for length in (5, 3, 12, 8, 1, 9, 7, 2):
            ids = random_ids(length, 1, length, VOCAB)
            chosen = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            expected = plain.generate(ids, **chosen)
            found = model.generate(ids.to(model.device), **chosen | {"attention_mask": torch.ones_like(ids)})
            assert torch.equal(found.cpu(), expected), length
        assert set(kinds) == set(PassKind) and kinds.count(PassKind.SHORT_PROMPT) == 5
        assert prefetcher.next_kind[PassKind.SHORT_PROMPT] is prefetcher.next_kind[PassKind.LONG] is PassKind.DECODE


MACHINES = ("h100-big-models", "h100-predicted")
QWEN = "--model qwen3-30b-a3b --dummy --engine stream --quant-bits 4 --gpu-memory 2 --gen-len 8"


def machine_at(name: str) -> Machine:
    return Machine(read_profile(ROOT / "benchmarks" / "results" / name / "machine.json"))


@pytest.mark.parametrize("name", MACHINES)
def test_link_and_cpu_end_a_prompt_of_a_mixture_together(name):
    shares = {}
    for tokens in (16, 128, 512):
        plan = planned(f"{QWEN} --prompt-len {tokens}", machine_at(name))
        weights, cores = plan.engine_plan, plan.engine_plan.cpu
        shares[tokens] = cores.prompt_share
        assert cores.prompt_rows == tokens
        assert weights.placement.prompt_cpu_computed < set(weights.placement.expert_blocks)
        link_s = weights.cost_terms.prefill_fetched_bytes / (weights.cost_terms.prefill_link_gb_per_s * 1e9)
        assert 0.6 < weights.cost_terms.prefill_cpu.wait_s / link_s < 1.1
        before = without_short_prompts(plan).times.prefill
        assert plan.times.prefill.seconds < before.seconds / 1.1 and before.bound_by == "link"
    assert 0.8 > shares[16] > shares[128] > shares[512] > 0.1


def test_a_dense_model_shares_prompts_of_a_few_tokens_and_no_long_ones():
    options = "--model llama-3.1-70b --dummy --engine stream --quant-bits 4 --gpu-memory 17.4 --gen-len 8"
    few = planned(f"{options} --prompt-len 16", machine_at("h100-predicted"))
    found = few.engine_plan.placement
    assert 0.2 < few.engine_plan.cpu.prompt_share < 0.6
    assert all(found.blocks[block].feed_forward for block in found.prompt_cpu_computed)
    assert few.times.prefill.seconds < without_short_prompts(few).times.prefill.seconds / 1.2
    for tokens in (MAX_PROMPT_ROWS + 1, 512):
        long = planned(f"{options} --prompt-len {tokens}", machine_at("h100-predicted"))
        assert long.engine_plan.cpu.prompt_rows == 0 and not long.engine_plan.placement.prompt_cpu_computed


def test_codes_with_scales_in_other_dtypes_than_bfloat16_cross_the_link_in_prompts():
    """The rates of codes are measured with scales in bfloat16."""
    for dtype, rows in (("float16", 0), ("float32", 0), ("bfloat16", 128)):
        plan = planned(f"{QWEN} --prompt-len 128 --dtype {dtype}", machine_at(MACHINES[0]))
        assert plan.engine_plan.cpu.prompt_rows == rows


def test_weights_that_are_not_page_locked_come_whole():
    """A kernel cannot read them."""
    options = QWEN.replace("--gpu-memory 2", "--gpu-memory 12")
    options, machine = f"{options} --prompt-len 4096 --pin-memory", machine_at(MACHINES[0])
    locked, plain = (planned(f"{options} {pinned}", machine).engine_plan for pinned in (1, 0))
    assert locked.placement.gathered_bytes > 0 == plain.placement.gathered_bytes
    assert plain.placement.expert_slots
    not_early = plain.placement.host_bytes - plain.placement.nbytes_of(plain.placement.streamed)
    assert plain.cost_terms.prefill_fetched_bytes >= not_early


def test_a_share_that_was_given_bounds_that_of_prompts():
    asked, auto = (
        planned(f"{QWEN} --prompt-len 16 --cpu-compute {share}", machine_at(MACHINES[0])) for share in ("0.4", "auto")
    )
    assert 0.3 < asked.engine_plan.cpu.prompt_share <= 0.42 < auto.engine_plan.cpu.prompt_share
    off = planned(f"{QWEN} --prompt-len 128 --cpu-compute off", machine_at(MACHINES[0]))
    assert off.engine_plan.cpu is None and not off.engine_plan.placement.prompt_cpu_computed
