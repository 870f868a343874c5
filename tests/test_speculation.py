"""Speculative decoding: greedy ids are those of plain transformers whatever a draft proposes, and what it took is in the record."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model, plain_ids
from transformers import AutoConfig

from zero_inference.cli import main
from zero_inference.config.option import AUTO
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.engines.stream.cuda_graph import StepGraph
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import resolve_machine
from zero_inference.measure.loops import MAX_SETTLING, measure_loops
from zero_inference.measure.sampling import Sampler
from zero_inference.measure.session import first_differences, output_ids_sha256
from zero_inference.measure.speculation import (
    DraftLength,
    NgramDraft,
    Speculation,
    generate_speculatively,
    layer_changes,
    make_draft,
    make_speculation,
)
from zero_inference.models.layers import decoder_layers
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import make_plan, skip_least_changes
from zero_inference.planning.plan import build_job, draft_bytes
from zero_inference.utils.ranks import detect_ranks

BATCH, PROMPT, GEN = 8, 13, 24
OTHERS = ["gemma2", "gpt_oss", "mistral"]  # with windows shorter than a sequence


class ScriptedDraft:
    """Proposes `right` tokens, of [rows, prompt and generated tokens], with wrong ones among them: a share of `wrong`."""

    def __init__(self, right: list[list[int]], wrong: float):
        self.right, self.wrong, self.random = right, wrong, random.Random(0)

    def begin(self, texts, cache):
        assert len(texts) == len(self.right)

    def propose(self, texts, counts):
        proposals = []
        ends = {len(text) + count for text, count in zip(texts, counts) if count}
        assert len(ends) <= 1, "rows that are ahead propose up to the same position"
        for text, right, count in zip(texts, self.right, counts):
            assert text == right[: len(text)]
            following = right[len(text) : len(text) + count]
            proposals.append([(each + 1) % VOCAB if self.random.random() < self.wrong else each for each in following])
        return proposals


@pytest.fixture(scope="module")
def folder_of(checkpoints, tmp_path_factory):
    @functools.cache
    def folder(family: str) -> Path:
        if family in FAMILIES:
            return checkpoints(family)
        made = tmp_path_factory.mktemp(family)
        FAMILIES[family] = FAMILIES["llama"] | dict(model_type=family, sliding_window=16)
        if family == "gpt_oss":
            FAMILIES[family] |= dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8)
        try:
            build_model(family).save_pretrained(made)
        finally:
            del FAMILIES[family]
        return made

    return folder


@pytest.fixture(scope="module")
def reference(folder_of):
    """reference(family): prompts and greedy ids of plain transformers, int64 [BATCH, PROMPT] and [BATCH, GEN]."""

    @functools.cache
    def found(family: str) -> tuple[torch.Tensor, torch.Tensor]:
        prompts = random_ids(0, BATCH, PROMPT, VOCAB)
        ids = plain_ids(folder_of(family), prompts, GEN)
        assert len(set(ids.flatten().tolist())) > 3, "a reference of one repeated token would prove nothing"
        return prompts, ids

    return found


def config_for(folder: Path, batch: int, draft_len: int, **options) -> RunConfig:
    sizes = dict(batch_size=batch, prompt_len=PROMPT, gen_len=GEN, dtype="float32")
    return RunConfig(model=str(folder), **sizes, speculate="ngram", draft_len=draft_len, **options).validate()


def load(config: RunConfig, devices: int = 1) -> LoadedModel:
    """Load a model and its draft; where there is no GPU, as if the CPU were so many of them."""
    job = build_job(config, resolve_model(config, "cpu"), detect_ranks())
    plan = make_plan(job if job.on_gpu else replace(job, devices=job.devices * devices))
    loaded = plan.load()
    if plan.draft is not None:
        loaded.draft = plan.draft.load(target=loaded)
    return loaded


def generate(loaded: LoadedModel, config: RunConfig, prompts: torch.Tensor, draft) -> tuple[torch.Tensor, Speculation]:
    speculation, marks = Speculation(draft, config.draft_len), []

    def after_pass(tokens: int) -> bool:
        marks.append(tokens)
        return False

    cache = loaded.cache_factory(config)()
    ids = generate_speculatively(loaded, prompts, config.gen_len, cache, speculation, detect_ranks(), after_pass)
    assert marks == sorted(marks) and marks[0] == 1 and marks[-1] == config.gen_len
    assert len(marks) == speculation.passes + 1
    assert cache.get_seq_length() == PROMPT + config.gen_len - 1  # what plain generation has in its cache
    return ids.cpu(), speculation


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
@pytest.mark.parametrize("kv_offload", [False, True])
def test_ids_are_those_of_plain_transformers_whatever_is_proposed(family, kv_offload, folder_of, reference):
    prompts, expected = reference(family)
    texts = torch.cat([prompts, expected], 1).tolist()
    loaded = load(config_for(folder_of(family), BATCH, 12, engine="resident", kv_offload=kv_offload))
    for batch, draft_len in ((1, 1), (1, 5), (3, 12), (BATCH, 2), (BATCH, 7)):
        config = config_for(folder_of(family), batch, draft_len, engine="resident", kv_offload=kv_offload)
        passes = []
        for draft in (NgramDraft(), *(ScriptedDraft(texts[:batch], wrong) for wrong in (0, 0.3, 1))):
            ids, speculation = generate(loaded, config, prompts[:batch], draft)
            assert torch.equal(ids, expected[:batch]), (batch, draft_len, draft)
            passes.append(speculation.passes)
        _, all_right, some_wrong, all_wrong = passes
        assert all_right == -(-(GEN - 1) // (draft_len + 1)) and all_wrong == GEN - 1
        assert all_right <= some_wrong <= all_wrong
    loaded.close()


@pytest.fixture
def small_draft(folder_of, tmp_path, monkeypatch):
    """A model with other weights and fewer layers than the family's."""

    def made(family: str) -> Path:
        monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | {"n_layer": 2, "num_hidden_layers": 2})
        model = build_model(family)
        model.save_pretrained(tmp_path / "draft")
        return tmp_path / "draft"

    return made


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in ("llama", "bloom") else [pytest.mark.slow]) for each in FAMILIES]
)
@pytest.mark.parametrize(
    ("draft", "bits", "kv_offload"),
    [("self", 4, False), ("self", 16, True), ("self", 16, False), ("its own", 16, False), ("smaller", 4, True)],
)
def test_ids_are_those_of_plain_transformers_with_a_model_as_draft(
    draft, bits, kv_offload, family, folder_of, reference, small_draft
):
    prompts, expected = reference(family)
    name = {"self": "self", "its own": str(folder_of(family))}.get(draft) or str(small_draft(family))
    own, common = dict(speculate=name, draft_bits=bits), dict(engine="resident", kv_offload=kv_offload)
    loaded = load(replace(config_for(folder_of(family), BATCH, 12, **common), **own).validate())
    accepted = 0
    for batch, draft_len in ((1, 3), (3, 12), (BATCH, 4)):
        config = replace(config_for(folder_of(family), batch, draft_len, **common), **own)
        proposing = make_draft(loaded, config)
        for _ in range(2):  # the second generation in the same cache
            ids, speculation = generate(loaded, config, prompts[:batch], proposing)
            assert torch.equal(ids, expected[:batch])
            accepted += sum(speculation.accepted)
            if bits == 16 and draft != "smaller":  # it is right always, with a cache of its own, too
                assert speculation.passes == -(-(GEN - 1) // (draft_len + 1))
                assert speculation.accepted == speculation.proposed
    assert accepted or draft == "smaller"
    loaded.draft.close()
    loaded.close()


WAYS = {
    "deepspeed": "--cpu-offload",
    "deepspeed-kv": "--cpu-offload --kv-offload",
    "accelerate": "--engine accelerate --cpu-offload",
    "stream": "--engine stream --gpu-memory 0",
    "stream-half": "--engine stream --gpu-memory 0.0001",
    "stream-kv": "--engine stream --kv-offload",
    "stream-cpu": "--engine stream --gpu-memory 0 --cpu-compute 1",
    "self": "--engine stream --gpu-memory 0",
    "self-deepspeed": "--cpu-offload",
    "self-kv": "--engine stream --gpu-memory 0 --kv-offload --cpu-compute 1",
}


def sizes(folder: Path) -> str:
    return f"--model {folder} --dtype float32 --batch-size {BATCH} --prompt-len {PROMPT} --gen-len {GEN}"


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(
            family, way, marks=[] if family == "llama" or way in ("stream-cpu", "self") else [pytest.mark.slow]
        )
        for family in ("llama", "bloom", "mixtral")
        for way in WAYS
    ],
)
def test_runs_of_every_engine_give_the_ids_of_plain_transformers(family, way, folder_of, reference, tmp_path):
    _, expected = reference(family)
    options = f"{sizes(folder_of(family))} --loops 2 --draft-len 8 --log-file {tmp_path}/run.log {WAYS[way]}"
    draft = "self" if way.startswith("self") else "ngram"
    assert main(["run_model.py", *f"{options} --speculate {draft}".split()]) == 0
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert record["output_ids_sha256"] == output_ids_sha256(expected)
    use = record["speculation"]
    assert [len(loop["step_s"]) for loop in record["loops"]] == [use["passes"]] * 2
    assert use["tokens_per_pass"] == pytest.approx((GEN - 1) / use["passes"])
    assert len(use["acceptance"]) == 8
    assert draft == "ngram" or max(filter(None, use["acceptance"])) > 0
    assert 0 < use["draft_s"] + use["verify_s"] <= record["loops"][-1]["decode_s"]
    assert record["decode_throughput"] == pytest.approx(BATCH * (GEN - 1) / record["decode_latency_s"])


@pytest.mark.parametrize(("draft", "draft_len"), [("ngram", 8), ("self", "auto")])
def test_ranks_that_need_other_numbers_of_passes_go_on_together(draft, draft_len, run_model, folder_of, reference):
    prompts, expected = reference("bloom")
    config = config_for(folder_of("bloom"), BATCH // 2, 8, engine="resident")
    loaded = load(config)
    halves = [generate(loaded, config, each, NgramDraft())[1].passes for each in prompts.chunk(2)]
    loaded.close()
    assert halves[0] != halves[1]
    options = f"{sizes(folder_of('bloom'))} --loops 1 --cpu-offload --speculate {draft} --draft-len {draft_len}"
    done = run_model(*options.split(), launcher="by hand", ranks=2)
    assert done.code == 0, done.stderr
    assert done.record["world_size"] == 2
    assert done.record["output_ids_sha256"] == output_ids_sha256(expected)
    assert draft == "self" or done.record["speculation"]["passes"] == max(halves)


@pytest.mark.parametrize("engine", ["resident", "stream"])
@pytest.mark.parametrize(("draft", "batch"), [("ngram", 3), ("self", 1), ("self", 3)])
def test_ids_are_the_same_with_a_length_that_adapts_itself(draft, batch, engine, folder_of, reference):
    prompts, expected = reference("llama")
    config = replace(config_for(folder_of("llama"), batch, "auto", engine=engine), speculate=draft)
    loaded = load(config)
    speculation = make_speculation(loaded, config)
    for _ in range(3):
        cache = loaded.cache_factory(config)()
        ids = generate_speculatively(
            loaded, prompts[:batch], GEN, cache, speculation, detect_ranks(), lambda tokens: False
        )
        assert torch.equal(ids.cpu(), expected[:batch])
    assert not speculation.length.untried
    if loaded.draft is not None:
        loaded.draft.close()
    loaded.close()


@pytest.mark.parametrize(
    ("family", "devices", "options"),
    [
        ("llama", 1, {"gpu_memory": 0, "cpu_compute": "off", "ring_depth": 2}),
        ("llama", 2, {"gpu_memory": 0, "cpu_compute": "0.5", "ring_depth": 3}),
        ("opt", 1, {"gpu_memory": 1}),
        ("mixtral", 1, {"gpu_memory": 0, "cpu_compute": "1"}),
        ("mistral", 2, {"gpu_memory": 0, "cpu_compute": "off"}),
        ("gpt_oss", 1, {"gpu_memory": 0, "cpu_compute": "1"}),  # its experts in float32 cannot be captured on a GPU
    ],
    ids=str,
)
def test_passes_are_replayed_with_the_ids_of_plain_transformers(
    family, devices, options, folder_of, reference, monkeypatch
):
    """Passes of fewer tokens are padded, also at the end of the cache; one order of blocks has one set of slots."""
    prompts, expected = reference(family)
    texts, replayed, own = torch.cat([prompts, expected], 1).tolist(), [], StepGraph._replay

    def replay(self, call):
        replayed.append((self.tokens, call["input_ids"].shape[1]))
        return own(self, call)

    monkeypatch.setattr(StepGraph, "_replay", replay)
    for batch, draft_len in ((1, 5), (3, AUTO), (BATCH, 3)):
        config = config_for(folder_of(family), batch, draft_len, engine="stream", decode_graph="on", **options)
        loaded = load(config, devices)
        assert len(loaded.devices) in (devices, torch.cuda.device_count())
        speculation = Speculation(ScriptedDraft(texts[:batch], 0.3), config.most_proposals)
        if draft_len == AUTO:
            speculation.length = DraftLength(config.most_proposals)
        replayed.clear()
        for _ in range(3):
            cache = loaded.cache_factory(config)()
            ids = generate_speculatively(
                loaded, prompts[:batch], GEN, cache, speculation, detect_ranks(), lambda _: False
            )
            assert torch.equal(ids.cpu(), expected[:batch])
        widths = {new for tokens, new in replayed if tokens == range(2, config.most_proposals + 2)}
        assert len(widths) > 2 and max(widths) == config.most_proposals + 1
        used = [loaded.facts["stream"]["pass_graph"]]
        if draft_len == AUTO:
            assert (range(1, 2), 1) in replayed
            used.append(loaded.facts["stream"]["decode_graph"])
        assert all(graph.unused_because is None and graph.difference < 1e-5 for graph in used)
        loaded.close()


def simulated(length: DraftLength, acceptance: float, draft_s: float, passes: int = 60, **times) -> list[int]:
    """Return the lengths that are chosen where a pass takes `first_s`, and `more_s` for each further token."""
    chosen, generator = [], random.Random(0)
    for _ in range(passes):
        count = length.next()
        accepted = 0
        while accepted < count and generator.random() < acceptance:
            accepted += 1
        pass_s = times["first_s"] + count * times["more_s"]
        length.observe(count, count, accepted + 1, count + 1, count * draft_s, pass_s)
        chosen.append(count)
    return chosen


@pytest.mark.parametrize(
    ("acceptance", "draft_s", "more_s", "expected"),
    [
        (0.97, 0.005, 0.001, (14, 16)),  # offloaded weights and a good draft: the longest
        (0.7, 0.005, 0.001, (3, 9)),
        (0.7, 0.05, 0.001, (1, 3)),  # a slow draft
        (0.9, 0.2, 0.001, (0, 0)),  # a draft slower than the model
        (0.02, 0.005, 0.001, (0, 0)),  # one that is always wrong
        (0.9, 0.005, 0.2, (0, 0)),  # each token takes as long as a pass
    ],
)
def test_the_draft_length_is_the_fastest(acceptance, draft_s, more_s, expected):
    length = DraftLength(16)
    chosen = simulated(length, acceptance, draft_s, first_s=0.18, more_s=more_s)
    assert chosen[:6] == [16, 16, 4, 4, 0, 0]
    assert expected[0] <= statistics.median(chosen[30:]) <= expected[1]
    assert length.ended == (expected == (0, 0)) and (not length.ended or set(chosen[30:]) == {0})


@pytest.mark.parametrize("draft", ["ngram", "self"])
def test_nothing_is_tried_while_it_is_timed(draft, folder_of, reference, monkeypatch):
    """After a warm-up that is too short, generations follow until lengths are tried and graphs verified, if they have such passes."""
    config = replace(config_for(folder_of("llama"), 1, AUTO, engine="stream", decode_graph="on"), speculate=draft)
    loaded, prompts = load(config), reference("llama")[0][:1]
    speculation, timed, tried, own = make_speculation(loaded, config), [], [], StepGraph._verify
    monkeypatch.setattr(StepGraph, "_verify", lambda self, call: tried.append(len(timed)) or own(self, call))
    make_cache, between = loaded.cache_factory(config), lambda: timed.append(len(speculation.length.untried))
    found = measure_loops(
        loaded, prompts, GEN, 2, 1, detect_ranks(), make_cache, between_loops=between, speculation=speculation
    )
    if loaded.draft is not None:
        loaded.draft.close()
    loaded.close()
    assert torch.equal(found.output_ids, reference("llama")[1][:1])
    assert set(tried) == {0} and len(tried) == 2 + (draft == "self") and timed == [0] * 3
    assert 0 < len(found.settling_s) <= MAX_SETTLING


@pytest.mark.parametrize(("gen_len", "without_match"), [(20, 0), (32, 0), (64, 0), (128, 0), (128, 12)])
def test_a_draft_that_is_right_gets_the_longest_passes(gen_len, without_match):
    """Passes in which a graph is captured or verified take long, and no other one may be as long before the text ends."""
    length, settling, number = DraftLength(16), {True: 3, False: 3}, 0
    for _ in range(8):
        left, chosen = gen_len - 1, []
        while left:
            count, number = length.next(), number + 1
            proposed = min(count, left - 1) if number > without_match else 0
            settles = settling[proposed > 0] > 0
            settling[proposed > 0] -= 1
            length.observe(
                count, proposed, proposed + 1, proposed + 1, proposed * 1e-4, 0.2 if settles else 0.004, not settles
            )
            chosen.append(count)
            left -= proposed + 1
    assert set(chosen) == {16} and max(map(max, length.pass_s.values())) == 0.004


def test_a_draft_that_proposes_nothing_yet_is_asked_again():
    length = DraftLength(8)
    for _ in range(40):
        length.observe(length.next(), proposed=0, gained=1, width=1, draft_s=0.0, pass_s=0.1)
    assert length.next() == 8 and not length.ended


@pytest.mark.parametrize("bits", [16, 8])
def test_a_draft_shares_what_its_model_has_on_the_device(bits, folder_of, reference):
    prompts, expected = reference("llama")
    given = dict(engine="stream", gpu_memory={16: 0.0002, 8: 0.0001}[bits], quant_bits=bits, cpu_compute="off")
    config = replace(config_for(folder_of("llama"), 3, 4, **given), speculate="self").validate()
    plan = make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks()))
    resident = set(plan.engine_plan.placement.resident)
    assert 0 < len(resident) < len(plan.engine_plan.placement.blocks)
    assert plan.draft.job.shared == (resident if bits == 8 else set())
    loaded = plan.load()
    loaded.draft = plan.draft.load(target=loaded)
    own, theirs = (each.weights.store.buffers for each in (loaded.draft, loaded))
    same = {block for block in own if own[block].data_ptr() == theirs[block].data_ptr()}
    assert same == plan.draft.job.shared
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for name in names if bits == 16 else names[:2]:
        assert loaded.draft.model.get_parameter(name).data_ptr() == loaded.model.get_parameter(name).data_ptr(), name
    ids, speculation = generate(loaded, config, prompts[:3], make_draft(loaded, config))
    if bits == 16:
        assert torch.equal(ids, expected[:3])
    assert sum(speculation.accepted)
    loaded.draft.close()
    found = loaded.model(input_ids=prompts.to(loaded.device)).logits
    assert torch.equal(found.argmax(-1)[:3, -1].cpu(), ids[:, 0])  # its own weights are as before
    loaded.close()


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2", "opt", "gpt_neox"])
def test_a_draft_that_does_not_fit_skips_the_layers_that_change_least(family, folder_of, reference):
    prompts, expected = reference(family)
    config = config_for(folder_of(family), 3, 4, engine="stream", gpu_memory=0.0)
    config = replace(config, speculate="self", draft_bits=16)
    whole = make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks())).draft
    placement, layers = whole.engine_plan.placement, whole.engine_plan.placement.layers
    nbytes = draft_bytes(whole, config) - placement.layer_bytes / 2
    config = replace(config, draft_memory=nbytes / 2**30).validate()
    plan = make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks()))
    assert draft_bytes(plan.draft, config) <= config.draft_memory * 2**30 and len(plan.draft.job.skipped) == 1
    loaded = plan.load()
    changes = layer_changes(loaded, prompts[:3])
    on_device = prompts[:3].to(loaded.device)
    hidden = loaded.model(input_ids=on_device, output_hidden_states=True).hidden_states[: layers + 1]
    similar = [torch.nn.functional.cosine_similarity(*pair, dim=-1).mean() for pair in itertools.pairwise(hidden)]
    assert changes[:-1] == pytest.approx(
        [1 - float(each) for each in similar[:-1]], abs=1e-5
    )  # the last is normed there
    draft = skip_least_changes(plan.draft, changes)
    assert draft.job.skipped == {min(range(1, layers), key=changes.__getitem__)}
    loaded.draft = draft.load(target=loaded)
    for batch in (1, 3):
        one = replace(config, batch_size=batch)
        ids, speculation = generate(loaded, one, prompts[:batch], make_draft(loaded, one))
        assert torch.equal(ids, expected[:batch])
    (skipped,) = draft.job.skipped
    layer = decoder_layers(loaded.model)[1][skipped]
    layer.register_forward_hook(
        lambda module, args, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
    )
    without = loaded.model(input_ids=on_device).logits
    assert torch.allclose(loaded.draft.model(input_ids=on_device).logits, without, atol=1e-4)
    loaded.draft.close()
    loaded.close()


def test_the_run_without_speculation_is_in_the_record(folder_of, reference, tmp_path, capfd):
    _, expected = reference("llama")
    options = f"{sizes(folder_of('llama'))} --loops 1 --draft-len 4 --log-file {tmp_path}/run.log --speculate ngram --engine stream"
    assert main(["run_model.py", *options.split(), "--compare-baseline", "--trace", f"{tmp_path}/trace.json"]) == 0
    record = json.loads((tmp_path / "run.jsonl").read_text())
    baseline = record["speculation"]["baseline"]
    assert baseline["agreement"] == 1 and baseline["differences"] == []
    assert baseline["decode_throughput"] == pytest.approx(BATCH * (GEN - 1) / baseline["decode_latency_s"])
    assert baseline["gain"] == pytest.approx(record["decode_throughput"] / baseline["decode_throughput"])
    assert record["output_ids_sha256"] == output_ids_sha256(expected)
    assert "without speculation" in capfd.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [
        event["name"].split()[0] for event in events if event["ph"] == "X" and event["name"][:4] in ("draf", "pass")
    ]
    assert spans == ["draft", "pass"] * record["speculation"]["passes"]


def test_a_trace_of_any_engine_shows_drafts(folder_of, tmp_path):
    options = f"{sizes(folder_of('llama'))} --loops 1 --warmup 0 --engine resident --speculate ngram --draft-len 4"
    traced = f"--trace {tmp_path}/trace.json --log-file {tmp_path}/run.log"
    assert main(["run_model.py", *options.split(), *traced.split()]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"draft of 4", "layer 0"} <= names and any(name.startswith("pass of ") for name in names)


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_a_first_difference_has_the_margin_of_its_tokens(temperature, folder_of, reference):
    prompts, expected = reference("llama")
    config = replace(config_for(folder_of("llama"), BATCH, 4, engine="resident"), speculate=None, draft_len="auto")
    plan = make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks()))
    loaded = plan.load()
    alone = SimpleNamespace(output_ids=expected)
    sampler = None if temperature is None else Sampler(temperature, 0.3, 0, VOCAB, BATCH)
    session = SimpleNamespace(loaded=loaded, plan=plan, ids=prompts, measurement=alone, sampler=sampler)
    assert first_differences(session, expected) == []
    other = expected.clone()
    other[2, 5:] = (expected[2, 5:] + 1) % VOCAB
    (found,) = first_differences(session, other)
    text = torch.cat([prompts[2], expected[2, :5]])[None]
    logits = loaded.model(input_ids=text.to(loaded.device)).logits[0, -1].cpu()
    if sampler is not None:  # the difference may be of a token that top-p leaves out
        logits = sampler.noisy(logits.to(loaded.device).expand(BATCH, -1), PROMPT + 5)[2].cpu()
    assert (found.sequence, found.token) == (3, 6)
    assert found.margin == pytest.approx(float(logits.max() - logits[other[2, 5]]), rel=1e-4)
    assert 0 < found.spacing < 1e-6 < found.margin
    loaded.close()


OWN_OPTIONS = "--draft-len 12 --draft-bits 8 --draft-memory 16 --compare-baseline"


@pytest.mark.parametrize(
    ("model", "chosen", "words"),
    [
        ("llama-2-13b", "self", "of the proposals are accepted (assumed)"),
        (f"llama-2-13b {OWN_OPTIONS}", "self", "of the proposals are accepted (assumed)"),
        (f"llama-2-7b {OWN_OPTIONS}", None, "off: all weights stay on the device"),
        ("mixtral-8x7b", None, "off: a mixture of experts reads more experts"),
        ("opt-66b", None, "GiB: make that free, or use ngram"),  # 4 bits are too large
        ("llama-2-13b --batch-size 32", None, "are predicted with self"),  # a pass gives what the worst row accepts
        ("llama-2-13b --goal memory", None, "predicted"),
        ("llama-2-13b --engine accelerate --cpu-offload", None, "off: "),  # whose speed there is unknown
    ],
)
def test_auto_speculates_where_it_is_predicted_to_be_faster(model, chosen, words, capfd):
    options = f"{'' if 'engine' in model else '--engine stream'} --dummy --speculate auto --machine rtx4090"
    command = f"{model} {options} --assume host=256GiB,cores=60GB/s --dry-run --json"
    assert main(["run_model.py", *command.split()]) == 0
    output = capfd.readouterr()
    plan = json.loads(output.out)
    assert plan["config"]["speculate"] == chosen and words in output.err
    if chosen:
        predicted, alone = plan["draft"]["predicted"], plan["draft"]["decode_throughput_without"]
        assert plan["predicted"]["decode_throughput"] == predicted["tokens_per_s"] > 1.2 * alone
        expected = predicted["tokens_per_pass"] / (predicted["draft_s"] + predicted["pass_s"])
        assert predicted["tokens_per_s"] == pytest.approx(expected)
        assert (plan["config"]["draft_bits"], plan["config"]["draft_len"]) == (
            (8, 12) if "bits" in model else (4, "auto")
        )
    else:
        assert plan["draft"] is None and not plan["config"]["compare_baseline"]


def test_a_dry_run_with_an_unknown_acceptance_predicts_a_pass(capfd):
    command = "llama-2-13b --engine stream --dummy --speculate ngram --dry-run --machine rtx4090 --assume cores=60GB/s"
    assert main(["run_model.py", *command.split()]) == 0
    shown = capfd.readouterr().out
    assert "a pass of up to 17 tokens takes at least" in shown and "token/s depend on how many proposals" in shown
    assert "passes/s, each of several tokens, by the rate of the link alone" in shown
    assert main(["run_model.py", *command.split(), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["predicted"]["decode_throughput"] is None


def test_acceptance_is_counted_by_position(folder_of, reference, tmp_path):
    prompts, expected = reference("llama")
    config = config_for(folder_of("llama"), 1, 3, engine="resident")
    loaded = load(config)

    class SecondIsWrong(ScriptedDraft):
        def propose(self, texts, counts):
            proposals = super().propose(texts, counts)
            return [[*each[:1], *((token + 1) % VOCAB for token in each[1:2]), *each[2:]] for each in proposals]

    right = torch.cat([prompts, expected], 1).tolist()[:1]
    _, speculation = generate(loaded, config, prompts[:1], SecondIsWrong(right, 0))
    use = speculation.use(detect_ranks(), GEN - 1)
    assert use.acceptance == [1, 0, 0] and use.passes == 12  # two tokens in each, and one in the last
    assert use.tokens_per_pass == pytest.approx(23 / 12)
    loaded.close()


@pytest.mark.parametrize("options", [{"engine": "resident"}, {"engine": "stream", "decode_graph": "on"}], ids=str)
def test_nothing_grows_over_a_thousand_passes(options, folder_of, reference):
    prompts, expected = reference("llama")
    right = torch.cat([prompts, expected], 1).tolist()[:2]
    config = config_for(folder_of("llama"), 2, 4, **options)
    loaded = load(config)
    draft, counts, passes = ScriptedDraft(right, 1), [], 0
    for number in range(45):
        if loaded.timeline is not None:
            loaded.timeline.restart()  # as `measure_loops` does
        passes += generate(loaded, config, prompts[:2], draft)[1].passes
        if number % 8 == 4:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert passes > 1000
    assert max(counts) <= counts[0] + 20
    loaded.close()


def test_ngrams_continue_the_longest_and_latest_match():
    draft = NgramDraft()
    draft.begin([[]] * 3, None)
    texts = [[7, 1, 2, 3, 9, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4], [5, 6, 5, 6, 5]]
    assert draft.propose(texts, [3, 3, 6]) == [[9, 2, 3], [], [6, 5, 6, 5, 6, 5]]
    texts[0] += [4, 8, 3]
    texts[1] += [2]
    assert draft.propose(texts, [2, 2, 1]) == [[4, 8], [3, 4], [6]]


def refusal(options: list[str], tmp_path: Path, capfd) -> str:
    """Return the error of a run that is refused before it writes anything."""
    command = ["run_model.py", *options, "--dummy", "--speculate", "ngram", "--log-dir", str(tmp_path / "logs")]
    assert main(command) == 2
    assert not list(tmp_path.glob("logs/*"))
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["mixtral-8x7b"], "add --dummy-routing greedy"),
        (["opt-125m", "--draft-bits", "8"], "--draft-bits belongs to --speculate self or a model"),
    ],
)
def test_options_that_exclude_speculation_are_refused(options, words, tmp_path, capfd):
    assert words in refusal(options, tmp_path, capfd)


def test_a_real_model_gives_the_ids_of_plain_transformers(smollm2_folder):
    ids = random_ids(0, 3, PROMPT, VOCAB)
    expected = plain_ids(smollm2_folder, ids, GEN)
    config = replace(config_for(smollm2_folder, 3, AUTO, engine="stream"), speculate="self").validate()
    loaded = load(config)
    cache, speculation = loaded.cache_factory(config)(), make_speculation(loaded, config)
    found = generate_speculatively(loaded, ids, GEN, cache, speculation, detect_ranks(), lambda tokens: False)
    assert torch.equal(found.cpu(), expected)
    assert speculation.passes < GEN - 1
    loaded.draft.close()
    loaded.close()


def test_a_draft_with_another_tokenizer_is_refused(smollm2_folder, folder_of, tmp_path, capfd):
    command = ["run_model.py", str(smollm2_folder), "--speculate", str(folder_of("llama")), "--log-dir", str(tmp_path)]
    assert main(command) == 2
    assert "its tokenizer has other tokens" in capfd.readouterr().err


def test_a_plan_leaves_device_memory_for_the_draft_and_counts_the_tokens_of_a_pass(presets_built_once):
    machine, found = resolve_machine("rtx4090", None), {}
    for draft in (None, "ngram", "self"):
        given = dict(speculate=draft, draft_len=15) if draft else {}
        config = RunConfig(model="llama-2-13b", dummy=True, engine="stream", **given).validate()
        ranks = machine.ranks_there(detect_ranks())
        found[draft] = make_plan(build_job(config, resolve_model(config, "cuda"), ranks, machine=machine))
    alone, ngram, own = found.values()
    assert alone.job.step_tokens == 1 and ngram.job.step_tokens == own.job.step_tokens == 16
    taken = draft_bytes(own.draft, own.job.config)
    assert 7 << 30 < taken < 8 << 30 and own.draft.keeps_all_weights  # without embedding and head, which are shared
    assert not own.draft.engine_plan.shared_layers
    assert own.engine_plan.footprint.device == pytest.approx(alone.engine_plan.footprint.device - taken, rel=0.1)
    device = {name: plan.needs[0] for name, plan in found.items()}
    assert device["self"].available_bytes == device[None].available_bytes and device["self"].fits
    assert make_plan(own.job).engine_plan.footprint == own.engine_plan.footprint  # the draft is subtracted once
    in_8_bits = make_plan(replace(own.job, config=replace(own.job.config, quant_bits=8), free_by_device=(14 << 30,)))
    placement, shared = in_8_bits.engine_plan.placement, in_8_bits.draft.engine_plan.shared_layers
    assert 1 < shared == placement.layers - placement.offloaded_layers < 40  # which the draft reads in 8 bits
    assert draft_bytes(in_8_bits.draft, in_8_bits.job.config) == pytest.approx((1 - shared / 40) * taken, rel=0.05)
    assert in_8_bits.needs[0].fits
    too_large = replace(own.job.config, model="llama-2-70b")
    job = build_job(too_large, resolve_model(too_large, "cuda"), own.job.ranks, machine=machine)
    with pytest.raises(DoesNotFit, match="use ngram or a smaller model|device memory"):
        make_plan(job)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mamba", "takes no past_key_values"),
        ("falcon_h1", "has state besides keys and values"),
        ("moshi", "a sliding window that may be in transformers' cache alone"),
    ],
)
def test_models_whose_cache_cannot_forget_tokens_are_refused(family, words, tmp_path, capfd):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "sliding_window": 16,
    }
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path / family)
    assert words in refusal([str(tmp_path / family), "--prompt-len", "30"], tmp_path, capfd)
