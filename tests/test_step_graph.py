"""A decode step that is captured once and replayed gives what the model gives, and is not used where it would not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import FAMILIES, ROOT, VOCAB, build_model, plain_ids
from test_stream import BATCH, GEN, PROMPT, generate, load
from test_stream_cpu import chosen_by_plan, installed
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import zero_inference
from zero_inference.config.run_config import RunConfig
from zero_inference.engines import base
from zero_inference.engines.stream import cpu, cuda_graph, plan
from zero_inference.engines.stream.cuda_graph import StepInputs, is_decode_step
from zero_inference.engines.stream.rebalance import LAST_PASS, MAX_MEASUREMENTS
from zero_inference.errors import RunError, UsageError
from zero_inference.kernels import decode_attention
from zero_inference.kv_cache import attention_patch
from zero_inference.kv_cache.attention_patch import takes_step_masks
from zero_inference.kv_cache.device import DeviceKVCache, StepMasks, sees_all_positions, windows_of_layers
from zero_inference.models.empty_model import build_on_meta
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import ModelSpec
from zero_inference.records.schema import DecodeGraph
from zero_inference.utils.format import three_digits

ALL = 1.0  # GiB on the device: more than these models have
LONG = 2 * GEN
STEP = range(1, 2)  # tokens of a plain step


def load_captured(folder, **options):
    return load(folder, gpu_memory=ALL, decode_graph="on", gen_len=LONG, **options)


def run_long(folder, **options):
    """Return the closed engine, what it generated, and what came of its graph."""
    loaded, spec, ranks = load(folder, gen_len=LONG, **options)
    found = generate(loaded, spec, ranks, LONG)
    loaded.close()
    return loaded, found, loaded.facts["stream"].get("decode_graph")


def used_with_right_ids(folder, **options) -> DecodeGraph:
    """Return what came of the graph of a run that gave the ids of plain transformers."""
    _, found, used = run_long(folder, **{"gpu_memory": ALL, "decode_graph": "on"} | options)
    assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), LONG))
    return used


@pytest.fixture
def steps(monkeypatch):
    """Counts captures and replays of a step."""
    counted = {"captured": 0, "replayed": 0}

    def counting(own):
        def capture(step, prefetcher):
            counted["captured"] += 1
            found = own(step, prefetcher)

            def replay():
                counted["replayed"] += 1
                found.replay()

            return cuda_graph.CapturedStep(found.output, replay, found.graphs)

        return capture

    for name in ("capture_cuda_graphs", "capture_calls"):
        monkeypatch.setattr(cuda_graph, name, counting(getattr(cuda_graph, name)))
    return counted


@pytest.mark.parametrize(
    "family, bits",
    [("llama", 16), ("opt", 16), ("gpt_neox", 16), ("qwen3", 16), ("mixtral", 16), ("llama", 4), ("mixtral", 4)],
)
def test_a_repeated_step_gives_the_ids_of_plain_transformers(family, bits, checkpoints, steps):
    folder = checkpoints(family)
    quantized = {} if bits == 16 else {"quant_bits": bits, "quant_group_size": 32}
    loaded, found, used = run_long(folder, gpu_memory=ALL, decode_graph="on", **quantized)
    expected = plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), LONG)
    if bits != 16:
        expected = run_long(folder, gpu_memory=ALL, decode_graph="off", **quantized)[1].output_ids
    assert torch.equal(found.output_ids, expected)
    assert used.unused_because is None and used.difference < 1e-5
    # two generations of one prefill and LONG - 1 steps, of which the second is captured and the third verified
    assert steps == {"captured": 1, "replayed": 2 * (LONG - 1) - 3 + cuda_graph.REPLAYS}
    assert "forward" not in vars(loaded.model)


SLIDING = {  # of every other layer, or of all
    "gpt_oss": dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "gemma3_text": dict(model_type="gemma3_text", head_dim=16, layer_types=["sliding_attention", "full_attention"] * 2),
    "mistral": dict(model_type="mistral"),
}


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """Give a function (family, window) -> checkpoint folder."""
    made = {}

    def get(family: str, window: int):
        if (family, window) not in made:
            made[family, window] = folder = tmp_path_factory.mktemp("sliding") / family
            model = build_model("llama", **SLIDING[family], num_hidden_layers=4, sliding_window=window)
            model.save_pretrained(folder)
        return made[family, window]

    return get


@pytest.mark.parametrize(
    "window, placed",
    [
        (PROMPT - 4, {"gpu_memory": ALL}),
        # the length passes it after the graph was verified
        (PROMPT + 7, {"gpu_memory": 0, "cpu_compute": "1"}),
    ],
)
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_windows_and_sinks_give_the_ids_of_plain_transformers(family, placed, window, sliding, steps):
    folder = sliding(family, window)
    loaded, found, used = run_long(folder, decode_graph="on", **placed)
    expected = plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), LONG)
    assert torch.equal(found.output_ids, expected) and len(expected.unique()) > 4
    assert used.unused_because is None and used.difference < 1e-5
    assert steps["captured"] == 1 and steps["replayed"] > LONG
    assert torch.equal(run_long(folder, decode_graph="off", **placed)[1].output_ids, expected)


@pytest.mark.parametrize("share", ["off", "1"])
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_windows_with_keys_in_host_memory(family, share, sliding):
    folder = sliding(family, PROMPT - 4)
    loaded, spec, ranks = load(folder, gen_len=LONG, kv_offload=True, cpu_compute=share)
    make = loaded.cache_factory(RunConfig(model=str(folder), prompt_len=PROMPT, gen_len=LONG, kv_offload=True))
    ids = random_ids(0, BATCH, PROMPT, VOCAB)
    options = {"max_new_tokens": LONG, "do_sample": False, "attention_mask": torch.ones_like(ids).to(loaded.device)}
    found = loaded.model.generate(ids.to(loaded.device), past_key_values=make(), **options)
    loaded.close()
    assert torch.equal(found[:, PROMPT:].cpu(), plain_ids(folder, ids, LONG))


@pytest.mark.parametrize("family", SLIDING)
def test_padded_prompts_with_sliding_windows(family, sliding, steps):
    folder = sliding(family, PROMPT - 4)
    ids, mask = random_ids(0, BATCH, PROMPT, VOCAB), torch.ones(BATCH, PROMPT, dtype=torch.int64)
    mask[0, :6] = 0
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": LONG, "min_new_tokens": LONG, "do_sample": False}
    expected = plain.generate(ids, attention_mask=mask, **options)
    loaded, spec, _ = load_captured(folder)
    ids, mask = ids.to(loaded.device), mask.to(loaded.device)
    cache = DeviceKVCache(spec.config, PROMPT + LONG)
    found = loaded.model.generate(ids, past_key_values=cache, attention_mask=mask, **options)
    loaded.close()
    assert torch.equal(found.cpu(), expected) and steps["replayed"] > 5


@pytest.mark.parametrize("family", SLIDING)
def test_a_trial_finds_masks_and_sinks_that_a_model_does_not_take(family, sliding, monkeypatch):
    config = AutoConfig.from_pretrained(sliding(family, PROMPT - 4))
    spec = ModelSpec("small", config, folder=None, snapshot=None, dtype=torch.float32, dummy=True)
    assert takes_step_masks(build_on_meta(spec))
    own = StepMasks.fill
    with monkeypatch.context() as patched:
        patched.setattr(StepMasks, "fill", lambda self, cached, given: own(self, cached, None))
        assert not takes_step_masks(build_on_meta(spec)), "padding"
        all_seen = dict.fromkeys(windows_of_layers(spec.config, PROMPT + 1), 0)
        patched.undo()
        patched.setattr(attention_patch, "windows_of_layers", lambda config, length: all_seen)
        assert not takes_step_masks(build_on_meta(spec)), "a window"
    if family == "gpt_oss":
        attend = attention_patch.attend
        monkeypatch.setattr(
            attention_patch, "attend", lambda *args, s_aux, **more: attend(*args, s_aux=s_aux + 1, **more)
        )
        assert not takes_step_masks(build_on_meta(spec)), "sinks"


def test_windows_of_layers():
    def config(**fields):
        return AutoConfig.for_model("gemma3_text", num_hidden_layers=2, **fields)

    kinds = ["sliding_attention", "full_attention"]
    mixed = config(sliding_window=8, layer_types=kinds)
    assert windows_of_layers(mixed, 9) == {"sliding_attention": 8, "full_attention": 0}
    assert windows_of_layers(mixed, 8) == dict.fromkeys(kinds, 0) and sees_all_positions(mixed, 8)
    assert windows_of_layers(AutoConfig.for_model("mistral", sliding_window=8), 9) == {"sliding_attention": 8}
    assert windows_of_layers(AutoConfig.for_model("llama"), 10**6) == {"full_attention": 0}
    chunks = AutoConfig.for_model("llama4_text", num_hidden_layers=4, attention_chunk_size=8)
    assert windows_of_layers(chunks, 9) is None and sees_all_positions(chunks, 8)


@pytest.mark.parametrize("cached", [1, 4, 7])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_masks_of_several_tokens(cached, window):
    length, tokens = 8, 3  # of the cache, whose end some tokens pass
    masks = StepMasks.like(torch.zeros(2, tokens), length, torch.float32, {"full_attention": window})
    given = torch.ones(2, min(length, cached + tokens))
    given[0, :2] = 0
    for mask, hidden in ((given, 2), (None, 0)):
        masks.fill(cached, mask)
        for row, first in enumerate((hidden, 0)):
            for token, seen in enumerate(masks.argument[row, 0] == 0):
                own = cached + token
                start = max(first, own - window + 1 if window else 0)
                assert seen.tolist() == [start <= position <= own for position in range(length)]


@pytest.mark.parametrize("heads, key_heads", [(4, 2), (6, 3), (8, 2)])
@pytest.mark.parametrize("kind", ["added", "boolean", "of one sequence", "of each head", "none"])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_with_shared_keys_is_transformers_own(heads, key_heads, kind, queries):
    """Also where it is left to that: with more queries, a mask for each head, or none."""
    made = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    query, key, value = (
        torch.randn(2, number, length, width, generator=made)
        for number, length, width in ((heads, queries, 8), (key_heads, 5, 8), (key_heads, 5, 6))
    )
    sequences, of_heads = 1 if kind == "of one sequence" else 2, heads if kind == "of each head" else 1
    mask = torch.randn(sequences, of_heads, 1, 5, generator=made)
    mask = (mask > -0.5) | (torch.arange(5) == 0) if kind == "boolean" else mask
    mask = None if kind == "none" else mask.expand(-1, -1, queries, -1)
    own, asked = sdpa_attention_forward, []

    def seen(*args, **more):
        asked.append(args)
        return own(*args, **more)

    options = {"scaling": 0.3, "is_causal": False}
    found = decode_attention.attend(seen, module, query, key, value, mask, **options)
    expected = own(module, query, key, value, mask, **options)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] is None and found[0].shape == (2, queries, heads, 6)
    assert bool(asked) == (queries > 1 or kind in ("of each head", "none"))


@pytest.mark.parametrize(
    ("family", "placed"),
    [
        ("llama", {"cpu_compute": "off"}),
        ("llama", {"cpu_compute": "1"}),
        ("mixtral", {"cpu_compute": "1"}),
        ("llama", {"cpu_compute": "off", "ring_depth": 2, "quant_bits": 4, "quant_group_size": 32}),
        ("llama", {"cpu_compute": "0.5", "ring_depth": 3}),
        ("opt", {"cpu_compute": "0.5", "quant_bits": 8, "quant_group_size": 32}),
        ("mixtral", {"cpu_compute": "0.7", "ring_depth": 2}),
    ],
    ids=str,
)
def test_with_what_is_streamed_and_what_the_cpu_computes(family, placed, checkpoints, steps):
    """A block comes into the slot from which its graph reads it, in whatever order passes came before."""
    folder, gen_len = checkpoints(family), LONG
    _, expected, _ = run_long(folder, decode_graph="off", **placed)
    loaded, spec, ranks = load(folder, gpu_memory=0, decode_graph="on", gen_len=gen_len, **placed)
    prefetcher, slots = installed(loaded), {}
    own = prefetcher.rings[0].acquire

    def acquire(block):
        slot = own(block)
        if steps["replayed"] > 0:
            slots.setdefault((block, prefetcher.tokens == BATCH), set()).add(slot)
        return slot

    prefetcher.rings[0].acquire = acquire
    found = generate(loaded, spec, ranks, gen_len, loops=3)
    used = loaded.facts["stream"]["decode_graph"]
    fetched = prefetcher.placement.streamed
    loaded.close()
    assert torch.equal(found.output_ids, expected.output_ids)
    if "quant_bits" not in placed:
        assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), gen_len))
    assert used.unused_because is None and used.difference < 1e-5 and steps["captured"] == 1
    assert (placed["cpu_compute"] == "1") == (not fetched) and all(len(slots[block, True]) == 1 for block in fetched)
    one, other = found.loops[-1].moved, expected.loops[-1].moved
    assert one.cores_bytes_per_step == other.cores_bytes_per_step
    assert one.host_to_device_bytes_per_step == pytest.approx(other.host_to_device_bytes_per_step, rel=0.1)


@pytest.mark.parametrize("share", ["0.5", "1"])
def test_verification_right_after_a_prefill(share, checkpoints, steps):
    """The only step of a generation is captured, and verified in the next one, each after a prefill."""
    folder, gen_len = checkpoints("llama"), 2
    placed = {"gpu_memory": 0, "cpu_compute": share, "ring_depth": 3, "decode_graph": "on", "gen_len": gen_len}
    loaded, spec, ranks = load(folder, **placed)
    found = generate(loaded, spec, ranks, gen_len, loops=4)
    used = loaded.facts["stream"]["decode_graph"]
    loaded.close()
    assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), gen_len))
    assert used.unused_because is None and steps["captured"] == 1 and steps["replayed"] == 1 + cuda_graph.REPLAYS


@pytest.mark.parametrize(
    ("gen_len", "warmup"), [(12, 1), (12, 0), (10, 1), (9, 1), (LAST_PASS + 1, 1), (3, 1), (2, 1), (LAST_PASS, 1)]
)
def test_nothing_is_tried_while_it_is_timed(gen_len, warmup, checkpoints, monkeypatch):
    """After a warm-up that is too short for it, the engine settles: graph, correction, graph, correction and graph."""
    monkeypatch.setattr(cpu.CpuBackend, "__init__", chosen_by_plan(cpu.CpuBackend.__init__))
    folder = checkpoints("llama")
    placed = {"gpu_memory": 0, "cpu_compute": "0.4", "decode_graph": "on", "gen_len": gen_len}
    loaded, spec, ranks = load(folder, **placed)
    found_ahead = iter([-(10**9), 10**9])  # bytes: all for the CPU, and then all for the link
    prefetcher, timed, tried = installed(loaded), [], []
    monkeypatch.setattr(type(prefetcher.rebalancer), "_bytes_to_move", lambda *_: next(found_ahead))
    own = cuda_graph.StepGraph._verify
    monkeypatch.setattr(cuda_graph.StepGraph, "_verify", lambda self, call: tried.append(len(timed)) or own(self, call))
    assert loaded.steps_to_settle() == 0, "nothing is known of decode steps yet"
    options = {"warmup": warmup, "between_loops": lambda: timed.append(prefetcher.placement)}
    found = generate(loaded, spec, ranks, gen_len, **options)
    left = loaded.steps_to_settle()
    loaded.close()
    assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), gen_len))
    assert len(found.warmup_s) == warmup and all(len(loop.step_s) == gen_len - 1 for loop in found.loops)
    if not warmup:
        assert tried == [1, 2, 2] and not found.settling_s, "without a warm-up it settles while it is timed"
    elif gen_len > LAST_PASS:
        assert tried == [0] * (1 + MAX_MEASUREMENTS) and len(found.settling_s) == {12: 1, 10: 2, 9: 3}.get(gen_len, 4)
        assert left == 0 and timed[0] is timed[-1]
    else:  # too short for a correction, so that none comes later
        assert (
            tried == [0]
            and len(found.settling_s) == {3: 1, 2: 2}.get(gen_len, 0)
            and left == LAST_PASS
            and timed[0] is timed[-1]
        )


def test_more_sequences_than_the_cpu_expects(checkpoints, steps):
    """Such steps fetch all that is in host memory, and their graphs have to."""
    folder, ids = checkpoints("llama"), random_ids(0, BATCH + 1, PROMPT, VOCAB)
    placed = {"gpu_memory": 0, "cpu_compute": "0.5", "ring_depth": 3, "decode_graph": "on"}
    loaded, spec, _ = load(folder, gen_len=LONG, **placed)
    for _ in range(2):
        cache = DeviceKVCache(spec.config, PROMPT + LONG)
        found = loaded.model.generate(
            ids.to(loaded.device), past_key_values=cache, max_new_tokens=LONG, do_sample=False
        )
        assert torch.equal(found[:, PROMPT:].cpu(), plain_ids(folder, ids, LONG))
    assert loaded.facts["stream"]["decode_graph"].unused_because is None and steps["replayed"] > LONG
    loaded.close()


def test_without_memory_for_a_trial_the_run_goes_on(checkpoints, monkeypatch):
    def exhausted(call, dtype, windows):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(cuda_graph, "visible_positions", exhausted)
    used = used_with_right_ids(checkpoints("llama"))
    assert used.tried and used.unused_because == "it could not be verified (CUDA out of memory.)"


def test_padded_prompts(checkpoints, steps):
    folder = checkpoints("llama")
    ids, mask = random_ids(0, BATCH, PROMPT, VOCAB), torch.ones(BATCH, PROMPT, dtype=torch.int64)
    mask[0, :4] = 0
    loaded, spec, _ = load(folder, gpu_memory=ALL)
    ids, mask = ids.to(loaded.device), mask.to(loaded.device)
    options = {"max_new_tokens": LONG, "do_sample": False, "attention_mask": mask}
    expected = loaded.model.generate(ids, **options)
    loaded.close()
    loaded, spec, _ = load_captured(folder)
    cache = DeviceKVCache(spec.config, PROMPT + LONG)
    assert torch.equal(loaded.model.generate(ids, past_key_values=cache, **options), expected)
    loaded.close()
    assert steps["replayed"] > 5


def test_which_calls_are_decode_steps(checkpoints):
    folder = checkpoints("llama")
    loaded, spec, _ = load(folder, gpu_memory=ALL)
    cache = DeviceKVCache(spec.config, PROMPT + 2)
    ids = random_ids(0, BATCH, PROMPT + 1, VOCAB).to(loaded.device)
    last, place = ids[:, -1:], torch.tensor([PROMPT], device=loaded.device)
    call = {"input_ids": last, "past_key_values": cache, "position_ids": place.expand(BATCH, 1), "use_cache": True}
    assert not is_decode_step(call, STEP)  # nothing is cached yet
    with torch.no_grad():
        loaded.model(input_ids=ids[:, :-1], past_key_values=cache)
    assert is_decode_step(call, STEP)
    mask = torch.ones(BATCH, PROMPT + 1, device=loaded.device)
    whole = call | {"cache_position": place, "attention_mask": mask, "logits_to_keep": 1, "labels": None}
    assert is_decode_step(whole, STEP)
    for other in (
        {"position_ids": None},
        {"input_ids": ids, "position_ids": ids},
        {"labels": last},
        {"output_attentions": True},
        {"logits_to_keep": 2},
        {"cache_position": torch.arange(2)},
        {"attention_mask": mask[:, 1:]},
        {"past_key_values": DynamicCache()},
    ):
        assert not is_decode_step(call | other, STEP), other
    several = call | {"input_ids": ids[:, -2:], "position_ids": torch.arange(2, device=loaded.device).expand(BATCH, 2)}
    for tokens, which in ((range(1, 3), True), (range(2, 3), True), (STEP, False), (range(1, 4), False)):
        assert is_decode_step(several, tokens) == which, "keys of added tokens need a position after those of its own"
    assert is_decode_step(call, range(1, 4)) and not is_decode_step(call, range(2, 4))
    assert not is_decode_step(call | {"logits_to_keep": 1}, range(1, 4))
    loaded.close()


def test_another_cache_or_batch_is_captured_anew(checkpoints, steps):
    folder = checkpoints("llama")
    loaded, spec, _ = load_captured(folder)
    for number, batch in enumerate((BATCH, BATCH, BATCH + 1), 1):
        ids = random_ids(number, batch, PROMPT, VOCAB).to(loaded.device)
        cache = DeviceKVCache(spec.config, PROMPT + LONG)
        found = loaded.model.generate(ids, past_key_values=cache, max_new_tokens=LONG, do_sample=False)
        assert torch.equal(found[:, PROMPT:].cpu(), plain_ids(folder, ids.cpu(), LONG))
        assert steps["captured"] == number
        transformers_own = loaded.model.generate(ids, max_new_tokens=LONG, do_sample=False)
        assert torch.equal(transformers_own, found) and steps["captured"] == number
    loaded.close()


def test_a_step_that_cannot_be_captured(checkpoints, monkeypatch):
    def refuses(step, prefetcher):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graph, "capture_calls", refuses)
    monkeypatch.setattr(cuda_graph, "capture_cuda_graphs", refuses)
    folder = checkpoints("llama")
    used = used_with_right_ids(folder)
    assert used.unused_because == "the capture failed (operation not permitted when stream is capturing)"
    loaded, spec, ranks = load(folder, gen_len=LONG, decode_graph="on", cpu_compute="off")
    generate(loaded, spec, ranks, LONG)
    assert not installed(loaded).rings[0].fixed_slots, "passes use all slots again"
    loaded.close()


def test_a_model_that_waits_for_the_device(checkpoints):
    """A GPU cannot capture that, and the run goes on as usual."""
    folder = checkpoints("llama")
    loaded, spec, ranks = load_captured(folder)
    loaded.model.lm_head.register_forward_pre_hook(lambda module, args: args if float(args[0].sum()) else None)
    found = generate(loaded, spec, ranks, LONG)
    reason = loaded.facts["stream"]["decode_graph"].unused_because
    assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), LONG))
    assert (reason or "").startswith("the capture failed") == (loaded.device.type == "cuda")
    loaded.close()
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()  # an allocator that still captures would refuse,
        torch.rand(1, device=loaded.device)  # and a generator, too


@pytest.mark.parametrize("frozen", ["cache_positions", "positions", "masks", "ids"])
def test_a_step_that_keeps_what_should_change_is_found_out(frozen, checkpoints, monkeypatch):
    fill, found_out = StepInputs.fill, cuda_graph.MIXTURE_FACTOR * max(cuda_graph.MAX_DIFFERENCE.values())

    def fill_some(self, call):
        kept = self.masks.by_window if frozen == "masks" else getattr(self, frozen)
        kept = list(kept.values()) if frozen in ("cache_positions", "masks") else [kept]
        before = [each.clone() for each in kept]
        fill(self, call)
        if vars(self).setdefault("filled", 0):
            for each, old in zip(kept, before):
                each.copy_(old)
        self.filled += 1

    monkeypatch.setattr(StepInputs, "fill", fill_some)
    used = used_with_right_ids(checkpoints("llama"))
    assert used.unused_because.startswith("a graph's results differ by") and used.difference > found_out


@pytest.mark.parametrize("family, dtype", [("llama", "bfloat16"), ("mixtral", "bfloat16"), ("mixtral", "float32")])
def test_rounding_may_change_more_in_a_mixture_whose_routers_choose_by_it(family, dtype, checkpoints, monkeypatch):
    differs = 1.8 * cuda_graph.MAX_DIFFERENCE[getattr(torch, dtype)]
    monkeypatch.setattr(cuda_graph, "_difference", lambda one, other: torch.tensor(differs))
    used = run_long(checkpoints(family), gpu_memory=ALL, decode_graph="on", dtype=dtype)[-1]
    allowed = (family, dtype) == ("mixtral", "bfloat16")
    assert used.unused_because == (None if allowed else f"a graph's results differ by {differs:.1e}")


def test_more_sequences_than_planned_leave_a_shorter_cache_with_the_same_masks(sliding):
    """13 positions for 3 sequences in the memory of 40, with a window of 15."""
    folder = sliding("gemma3_text", 15)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = dict(engine="stream", dtype="float32", batch_size=1, max_length=40, decode_graph="on", verbose=0)
    with zero_inference.load(folder, **options) as model:
        for batch in (3, 1):
            ids = random_ids(batch, batch, 4, VOCAB)
            mask = torch.ones_like(ids)
            expected = plain.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
            found = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
            assert torch.equal(found.cpu(), expected)
            assert model._state.loaded.facts["stream"]["decode_graph"].unused_because is None, batch


@pytest.mark.parametrize("engine", ["stream", "resident"])
def test_prompts_that_attend_otherwise_are_refused_when_the_model_is_loaded(engine, sliding, monkeypatch):
    own = decode_attention._attend_with_sinks
    monkeypatch.setattr(decode_attention, "_attend_with_sinks", lambda *args: own(*args[:-1], args[-1] + 5))
    monkeypatch.setattr(decode_attention, "_has_kernel", lambda *args: False)  # few tokens are compared
    with pytest.raises(RunError, match="computes something else than transformers' own layer"):
        zero_inference.load(sliding("gpt_oss", 5), engine=engine, dtype="float32", max_length=40, verbose=0)


def test_where_it_is_not_possible(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "takes_step_masks", lambda model: False)
    config = AutoConfig.for_model(**{**FAMILIES["llama"], "model_type": "mistral", "sliding_window": PROMPT})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mistral")
    assert sees_all_positions(config, PROMPT) and not sees_all_positions(config, PROMPT + 1)
    for folder, options, reason in (
        (checkpoints("llama"), {"gpu_memory": ALL, "kv_offload": True}, "keys and values are in host memory"),
        (checkpoints("llama"), {"gpu_memory": ALL, "trace": "trace.json"}, "--trace shows each layer"),
        (tmp_path / "mistral", {"gpu_memory": ALL}, cuda_graph.TRIAL_DIFFERS),
        (checkpoints("bloom"), {"gpu_memory": ALL}, cuda_graph.NOT_REPLACED),
    ):
        with pytest.raises(UsageError, match=f"--decode-graph on: {reason}"):
            load(folder, decode_graph="on", **options)
        loaded, *_ = load(folder, decode_graph="auto", **options)
        if loaded.device.type == "cpu" and reason in (cuda_graph.TRIAL_DIFFERS, cuda_graph.NOT_REPLACED):
            reason = "there is no GPU"  # no trial is needed
        assert loaded.facts["stream"]["decode_graph"].unused_because == reason
        loaded.close()


def test_one_that_is_slower_is_used_only_if_asked_for(checkpoints, monkeypatch):
    times = iter([9.0, 2.0, 3.0, 1.0, 1.5])

    def timed(work, streams):
        return next(times), work()

    monkeypatch.setattr(cuda_graph, "_timed", timed)
    monkeypatch.setattr(plan, "why_no_graph", lambda *_: None)
    _, _, used = run_long(checkpoints("llama"), gpu_memory=ALL, decode_graph="auto")
    assert used.unused_because == "a graph is slower" and (used.graph_s, used.launched_s) == (2.0, 1.0)


def test_the_record_says_how_it_compared(checkpoints, copied_runs, tmp_path):
    command = [sys.executable, str(ROOT / "run_model.py"), "--model", str(checkpoints("llama")), "--engine", "stream"]
    command += ["--gpu-memory", "1", "--decode-graph", "on", "--gen-len", "8", "--prompt-len", "8", "--loops", "1"]
    done = subprocess.run([*command, "--log-file", str(tmp_path / "a.log")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    graph = json.loads((tmp_path / "a.jsonl").read_text())["stream"]["decode_graph"]
    assert graph["unused_because"] is None and graph["graph_s"] > 0 and graph["launched_s"] > 0
    for seconds in (graph["graph_s"], graph["launched_s"]):
        assert f"{three_digits(1e3 * seconds)} ms" in done.stdout
