"""How often a cache of experts would hit: one with LRU of a quarter of them by layer, with `--dummy-routing text` and by the size of the
embeddings; and the engine's, by its slots and by how many missed experts it fetches a token, also with tokens drawn independently of each
other (Zipf), where recency means nothing.

    python benchmarks/expert_reuse.py | tee expert_reuse.txt

Decoder layers of Qwen3-30B-A3B's dimensions with dummy weights, one after the other in the same memory, on a CPU. Experts have an eighth of
their inner width, and their last weights are sqrt(8) times as large, so that what they add is of the usual size.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRotaryEmbedding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zero_inference.engines.stream.expert_cache import dispatch  # noqa: E402
from zero_inference.models.preset_table import find_preset  # noqa: E402
from zero_inference.models.prompts import random_ids  # noqa: E402
from zero_inference.models.weights import draw_tokens, embedding_std, fill_dummy  # noqa: E402

NARROWER, TOKENS, SKIPPED, VOCABULARY = 8, 320, 64, 8000
SLOTS, FETCHES = (16, 32, 64), (0, 1, 2, 3)  # of 128 experts; a token


def main() -> None:
    torch.set_grad_enabled(False)
    config: Qwen3MoeConfig = find_preset("qwen3-30b-a3b").to_config()
    config._attn_implementation, config._experts_implementation = "sdpa", None
    stds = (1.0, embedding_std(config))
    config.moe_intermediate_size //= NARROWER
    text = draw_tokens(random_ids(0, 1, 16, VOCABULARY), TOKENS, VOCABULARY, 0)[0]
    popularity = 1 / torch.arange(1, VOCABULARY + 1)
    zipf = popularity.multinomial(TOKENS, True, generator=torch.Generator().manual_seed(0))
    embeddings = torch.randn(VOCABULARY, config.hidden_size, generator=torch.Generator().manual_seed(0))
    x = torch.stack([*(embeddings[text] * std for std in stds), embeddings[zipf] * stds[-1]])
    x = x.bfloat16()  # [stds and one more, tokens, hidden]
    positions = Qwen3MoeRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    layer, chosen = Qwen3MoeDecoderLayer(config, 0).bfloat16().eval(), []
    layer.mlp.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    kept: dict[tuple[str, str, int], list[float]] = {}
    for index in range(config.num_hidden_layers):
        for name, parameter in layer.named_parameters():
            fill_dummy(parameter, f"{index}.{name}", 0)
        layer.mlp.experts.down_proj.mul_(NARROWER**0.5)
        x = layer(x, position_embeddings=positions, attention_mask=None)
        choices = chosen.pop().view(len(x), TOKENS, -1)
        rates = [lru_hit_rate(each[SKIPPED:], config.num_experts // 4) for each in choices]
        said = (f"{rate:.1%} with embeddings of deviation {std:.1f}" for rate, std in zip(rates, stds))
        print(f"layer {index}: LRU hit rate {', '.join(said)}", flush=True)
        for drawn, each in zip(("text", "Zipf"), choices[1:]):
            for slots in SLOTS:
                found = {f"{count} fetched": kept_hit_rate(each, config.num_experts, slots, count) for count in FETCHES}
                for cache, rate in {**found, "LRU": lru_hit_rate(each[SKIPPED:], slots)}.items():
                    kept.setdefault((drawn, cache, slots), []).append(rate)
    for drawn in ("text", "Zipf"):
        for cache in dict.fromkeys(name for _, name, _ in kept):
            rates = (kept[drawn, cache, slots] for slots in SLOTS)
            said = (f"{sum(each) / len(each):.1%} with {slots}" for slots, each in zip(SLOTS, rates))
            print(f"{drawn}, {cache}: {', '.join(said)} of {config.num_experts} experts kept")


def lru_hit_rate(choices: torch.Tensor, slots: int) -> float:
    """Return the share of `choices` [tokens, k] that an LRU cache of `slots` experts holds when they come."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in choices.flatten().tolist():
        hits += expert in kept
        kept[expert] = None
        kept.move_to_end(expert)
        if len(kept) > slots:
            kept.popitem(last=False)
    return hits / choices.numel()


def kept_hit_rate(choices: torch.Tensor, experts: int, slots: int, fetches: int) -> float:
    """Return the share of `choices` [tokens, k] after `SKIPPED` tokens that the engine's cache holds. Those tokens fill it, with as many
    fetched as missed."""
    table, uses = torch.full((experts + 1,), -1), torch.zeros(experts + 1)
    table[:slots] = torch.arange(slots)
    hits = 0
    for turn, token in enumerate(choices):
        most = fetches if turn >= SKIPPED else token.numel()
        quota = torch.arange(experts + 1).clamp(max=most)
        hits += int((dispatch(token[None], table, uses, experts, quota, most).slot >= 0).sum()) * (turn >= SKIPPED)
    return hits / choices[SKIPPED:].numel()


if __name__ == "__main__":
    main()
