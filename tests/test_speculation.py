"""Speculative decoding: greedy ids are those of plain transformers whatever a draft proposes, and what it took is in the record."""

from __future__ import annotations

import functools
import gc
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model, plain_ids
from transformers import AutoConfig

from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import resolve_machine
from zero_inference.measure.session import output_ids_sha256
from zero_inference.measure.speculation import NgramDraft, Speculation, generate_speculatively, make_draft
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.plan import build_job, draft_bytes, make_plan
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


def load(config: RunConfig) -> LoadedModel:
    plan = make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks()))
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
    options = f"--model {folder_of(family)} --dtype float32 --batch-size {BATCH} --prompt-len {PROMPT} --gen-len {GEN} --loops 2 --draft-len 8"
    draft = "self" if way.startswith("self") else "ngram"
    assert (
        main(["run_model.py", *f"{options} --speculate {draft} --log-file {tmp_path}/run.log {WAYS[way]}".split()]) == 0
    )
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert record["output_ids_sha256"] == output_ids_sha256(expected)
    use = record["speculation"]
    assert [len(loop["step_s"]) for loop in record["loops"]] == [use["passes"]] * 2
    assert use["tokens_per_pass"] == pytest.approx((GEN - 1) / use["passes"])
    assert len(use["acceptance"]) == 8
    assert draft == "ngram" or max(filter(None, use["acceptance"])) > 0
    assert 0 < use["draft_s"] + use["verify_s"] <= record["loops"][-1]["decode_s"]
    assert record["decode_throughput"] == pytest.approx(BATCH * (GEN - 1) / record["decode_latency_s"])


@pytest.mark.parametrize("draft", ["ngram", "self"])
def test_ranks_that_need_other_numbers_of_passes_go_on_together(draft, run_model, folder_of, reference):
    prompts, expected = reference("bloom")
    config = config_for(folder_of("bloom"), BATCH // 2, 8, engine="resident")
    loaded = load(config)
    halves = [generate(loaded, config, each, NgramDraft())[1].passes for each in prompts.chunk(2)]
    loaded.close()
    assert halves[0] != halves[1]
    options = f"--model {folder_of('bloom')} --dtype float32 --batch-size {BATCH} --prompt-len {PROMPT} --gen-len {GEN} --loops 1"
    more = f"--cpu-offload --speculate {draft} --draft-len 8".split()
    done = run_model(*options.split(), *more, launcher="by hand", ranks=2)
    assert done.code == 0, done.stderr
    assert done.record["world_size"] == 2
    assert done.record["output_ids_sha256"] == output_ids_sha256(expected)
    assert draft == "self" or done.record["speculation"]["passes"] == max(halves)


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


def test_nothing_grows_over_a_thousand_passes(folder_of, reference):
    prompts, expected = reference("llama")
    right = torch.cat([prompts, expected], 1).tolist()[:2]
    config = config_for(folder_of("llama"), 2, 4, engine="resident")
    loaded = load(config)
    draft, counts = ScriptedDraft(right, 1), []
    for _ in range(45):
        generate(loaded, config, prompts[:2], draft)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert sum(GEN - 1 for _ in counts) > 1000
    assert max(counts[5:]) <= counts[4] + 20
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
        (["opt-125m", "--engine", "stream", "--decode-graph", "on"], "several tokens in a pass"),
        (["opt-125m", "--draft-bits", "8"], "--draft-bits belongs to --speculate self or a model"),
        (["opt-125m", "--trace", "trace.json"], "traces no speculation"),
    ],
)
def test_options_that_exclude_speculation_are_refused(options, words, tmp_path, capfd):
    assert words in refusal(options, tmp_path, capfd)


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
    assert 1 < shared == placement.layers - placement.host_layers < 40  # which the draft reads in 8 bits
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
