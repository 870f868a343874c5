"""Greedy generation selects the likeliest token at each step, whatever the checkpoint's own settings say."""

from __future__ import annotations

import torch
from conftest import VOCAB, build_model
from transformers import GenerationConfig

from zero_inference.models.prompts import greedy_config, reset_generation_config


def test_tokens_are_those_of_an_argmax_loop_and_exactly_as_many_as_asked_for():
    model = build_model("llama")
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    expected = ids
    with torch.no_grad():
        for _ in range(7):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    stop = int(expected[0, ids.shape[1]])  # the first token: generation must not end there
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=9.0, eos_token_id=stop, forced_bos_token_id=5, num_beams=3, repetition_penalty=5.0
    )
    reset_generation_config(model)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(7))
    assert torch.equal(output, expected)
