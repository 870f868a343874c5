"""Sampling: tokens follow the model's distribution, and are those of the same seed whatever a draft proposes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, VOCAB, build_model
from scipy import stats
from test_speculation import config_for, load
from transformers import TopPLogitsWarper

from zero_inference.cli import main
from zero_inference.config.run_config import parse_options
from zero_inference.errors import UsageError
from zero_inference.measure.loops import generate_ids
from zero_inference.measure.sampling import Sampler
from zero_inference.measure.speculation import NgramDraft, Speculation, generate_speculatively, make_draft
from zero_inference.models.prompts import random_ids
from zero_inference.utils.ranks import detect_ranks

FEW = 12  # tokens of a small vocabulary
DRAWS = 20_000
RUN = "--dtype float32 --prompt-len 13 --gen-len 24 --loops 2 --engine resident --batch-size 2"
SAMPLED = f"{RUN} --temperature 0.8 --top-p 0.9"


def p_value(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Return the p-value of the hypothesis that `tokens` follow `p` [V]; none may have probability 0."""
    counts = torch.bincount(tokens.flatten(), minlength=len(p)).double()
    assert not counts[p == 0].any()
    return stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue


def probabilities(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return float64 [V] for `logits` [V], by the definition of top-p: the likeliest tokens, until their sum reaches it."""
    p = (logits.double() / temperature).softmax(0)
    order = p.argsort(descending=True)
    kept = order[: 1 + int((p[order].cumsum(0) < top_p).sum())]
    truncated = torch.zeros_like(p)
    truncated[kept] = p[kept] / p[kept].sum()
    return truncated


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.8), (0.8, 0.5)])
def test_tokens_follow_the_distribution_over_rows_positions_and_seeds(temperature, top_p):
    logits = torch.randn(FEW, generator=torch.Generator().manual_seed(3))
    expected = probabilities(logits, temperature, top_p)
    kept = torch.isfinite(TopPLogitsWarper(top_p)(None, logits[None] / temperature))[0]
    assert torch.equal(kept, expected > 0) and (top_p == 1 or not kept.all())
    rows = Sampler(temperature, top_p, 0, FEW, DRAWS).select(logits.expand(DRAWS, 1, FEW), 5)
    positions = Sampler(temperature, top_p, 0, FEW, 1).select(logits.expand(1, DRAWS, FEW), 0)
    seeds = torch.cat(
        [Sampler(temperature, top_p, seed, FEW, 1).select(logits.expand(1, 1, FEW), 5) for seed in range(DRAWS // 5)]
    )
    for tokens in (rows, positions, seeds):
        assert p_value(tokens, expected) > 0.001


def test_noise_is_that_of_position_row_and_token_however_it_is_drawn():
    logits = torch.randn(4, 6, FEW, generator=torch.Generator().manual_seed(3))
    whole = Sampler(0.9, 0.9, 7, FEW, 4)
    tokens = whole.select(logits, 10)
    for first, last in ((0, 1), (2, 4), (5, 6)):
        assert torch.equal(whole.select(logits[:, first:last], 10 + first), tokens[:, first:last])
    second_rank = Sampler(0.9, 0.9, 7, FEW, 4, first_row=2)
    assert torch.equal(second_rank.select(logits[2:], 10), tokens[2:])
    of_generate = whole(torch.zeros(4, 12, dtype=torch.int64), logits[:, 2]).argmax(-1)
    assert torch.equal(of_generate, tokens[:, 2])
    cut = logits.masked_fill(torch.arange(FEW) >= 9, -torch.inf)
    assert torch.equal(whole.select(logits[..., :9], 10), whole.select(cut, 10))
    assert torch.isfinite(whole._noise(0, logits.device)).all()
    assert torch.equal(Sampler(1e-6, 0.9, 7, FEW, 4).select(logits, 10), logits.argmax(-1))
    assert not torch.equal(Sampler(0.9, 0.9, 8, FEW, 4).select(logits, 10), tokens)
    assert not torch.equal(whole.select(logits, 30), tokens)


def test_emitted_tokens_follow_the_target_whatever_the_draft_proposes():
    logits, of_draft = torch.randn(2, FEW, generator=torch.Generator().manual_seed(4))
    sampler, speculation = Sampler(0.9, 0.95, 0, FEW, DRAWS), Speculation(NgramDraft(), 1)
    speculation.restart([[]], None)
    predicted = sampler.select(logits.expand(DRAWS, 2, FEW), 3)
    proposed = sampler.select(of_draft.expand(DRAWS, 1, FEW), 3)
    emitted = [speculation.accept(*each) for each in zip(proposed.tolist(), predicted.tolist())]
    p, q = (probabilities(each, 0.9, 0.95) for each in (logits, of_draft))
    assert p_value(torch.tensor([each[0] for each in emitted]), p) > 0.001
    assert p_value(proposed, q) > 0.001
    following = [each[1] for each in emitted if len(each) > 1]  # independent of the token before
    assert p_value(torch.tensor(following), p) > 0.001
    distance = float((p - q).abs().sum() / 2)
    accepted = speculation.accepted[0] / DRAWS
    assert (1 - distance) / (1 + distance) - 0.02 < accepted < 1 - distance + 0.02
    assert 0.1 < distance < 0.9


@pytest.fixture
def drafts(checkpoints, tmp_path, monkeypatch):
    """drafts(family): options of each draft by name."""

    def made(family: str) -> dict[str, dict]:
        monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | {"n_layer": 2, "num_hidden_layers": 2})
        build_model(family).save_pretrained(tmp_path / "draft")
        smaller = str(tmp_path / "draft")
        return {
            "ngram": dict(speculate="ngram"),
            "self in 4 bits": dict(speculate="self", draft_bits=4),
            "self": dict(speculate="self", draft_bits=16),
            "smaller": dict(speculate=smaller, draft_bits=16),
            "itself": dict(speculate=str(checkpoints(family)), draft_bits=16),
        }

    return made


class WrongDraft(NgramDraft):
    def propose(self, texts, counts):
        return [[VOCAB - 1] * count for count in counts]


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("kv_offload", [False, True])
def test_ids_of_a_seed_are_those_without_a_draft(family, kv_offload, checkpoints, drafts):
    expected, greedy, passes = {}, {}, {}
    for name, own in drafts(family).items():
        common = dict(engine="resident", kv_offload=kv_offload, temperature=0.9, top_p=0.95, seed=5)
        config = replace(config_for(checkpoints(family), 3, 5, **common), **own).validate()
        loaded = load(config)
        for batch in (1, 3):
            sized = replace(config, batch_size=batch)
            sampler = Sampler.of_rank(sized, detect_ranks(), VOCAB)
            prompts, make_cache = random_ids(0, batch, config.prompt_len, VOCAB), loaded.cache_factory(sized)

            def plain(sampler):
                return generate_ids(loaded, prompts, config.gen_len, make_cache, None, sampler=sampler)

            if batch not in expected:
                expected[batch], greedy[batch] = plain(sampler), plain(None)
            proposing = {name: make_draft(loaded, sized, sampler)} | (
                {"wrong": WrongDraft()} if name == "ngram" else {}
            )
            for label, draft in proposing.items():
                speculation = Speculation(draft, config.draft_len)
                after = (make_cache(), speculation, detect_ranks(), lambda tokens: False)
                ids = generate_speculatively(loaded, prompts, config.gen_len, *after, sampler=sampler)
                assert torch.equal(ids, expected[batch]), (label, batch)
                passes[label, batch] = speculation.passes
        if loaded.draft is not None:
            loaded.draft.close()
        loaded.close()
    for batch in (1, 3):
        assert not torch.equal(expected[batch], greedy[batch])
        assert passes["self", batch] == passes["itself", batch] == -(-(config.gen_len - 1) // 6)  # all accepted
        assert passes["wrong", batch] == config.gen_len - 1 > passes["self in 4 bits", batch]
    assert not torch.equal(expected[3][0], expected[3][1])


def sha(words: str, tmp_path) -> str:
    assert main(["run_model.py", *f"{words} --log-file {tmp_path}/run.log".split()]) == 0
    record = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert (record.get("speculation") is not None) == ("--speculate" in words)
    expected = (0.8, 0.9) if "--top-p" in words else (None, None)
    assert (record["options"].get("temperature"), record["options"].get("top-p")) == expected
    return record["output_ids_sha256"]


def test_runs_with_the_same_seed_give_the_same_ids_with_any_draft_and_engine(checkpoints, tmp_path):
    model = f"--model {checkpoints('llama')}"
    ways = (
        "",
        "--speculate ngram",
        "--speculate self",
        "--engine stream",
        "--engine stream --kv-offload --speculate self",
    )
    found = [sha(f"{model} {SAMPLED} {way}", tmp_path) for way in ways]
    assert len(set(found)) == 1
    others = [sha(f"{model} {SAMPLED} --seed 1", tmp_path), sha(f"{model} {RUN}", tmp_path)]
    assert len({found[0], *others}) == 3


def test_ranks_give_the_ids_of_one_process(run_model, checkpoints, tmp_path):
    run = f"--model {checkpoints('llama')} {SAMPLED}"
    done = run_model(*run.split(), launcher="by hand", ranks=2)
    assert done.code == 0, done.stderr
    assert done.record["world_size"] == 2 and done.record["output_ids_sha256"] == sha(run, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-p 0.9", "--top-p belongs to --temperature"),
        ("--temperature 0", "must be a number above 0"),
        ("--temperature -1", "must be a number above 0"),
        ("--temperature 1e-9", "must be at least 1e-06"),
        ("--temperature 1 --top-p 0", "must be a number above 0"),
        ("--temperature 1 --top-p 1.1", "must be at most 1"),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        parse_options(["opt-125m", "--dummy", *options.split()])
