"""How often an LRU cache of a quarter of the experts would hit, by layer, with `--dummy-routing text` and by the size of the embeddings.

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

from zero_inference.models.dummy import draw_tokens, embedding_std, fill_dummy  # noqa: E402
from zero_inference.models.preset_table import find_preset  # noqa: E402
from zero_inference.models.prompts import random_ids  # noqa: E402

NARROWER, TOKENS, SKIPPED, VOCABULARY = 8, 320, 64, 8000


def main() -> None:
    torch.set_grad_enabled(False)
    config: Qwen3MoeConfig = find_preset("qwen3-30b-a3b").to_config()
    config._attn_implementation, config._experts_implementation = "sdpa", None
    stds = (1.0, embedding_std(config))
    config.moe_intermediate_size //= NARROWER
    tokens = draw_tokens(random_ids(0, 1, 16, VOCABULARY), TOKENS, VOCABULARY, 0)[0]
    embeddings = torch.randn(VOCABULARY, config.hidden_size, generator=torch.Generator().manual_seed(0))[tokens]
    x = torch.stack([embeddings * std for std in stds]).bfloat16()  # [stds, tokens, hidden]
    positions = Qwen3MoeRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    layer, chosen = Qwen3MoeDecoderLayer(config, 0).bfloat16().eval(), []
    layer.mlp.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    for index in range(config.num_hidden_layers):
        for name, parameter in layer.named_parameters():
            fill_dummy(parameter, f"{index}.{name}", 0)
        layer.mlp.experts.down_proj.mul_(NARROWER**0.5)
        x = layer(x, position_embeddings=positions, attention_mask=None)
        rates = [
            lru_hit_rate(each[SKIPPED:], config.num_experts // 4) for each in chosen.pop().view(len(stds), TOKENS, -1)
        ]
        said = (f"{rate:.1%} with embeddings of deviation {std:.1f}" for rate, std in zip(rates, stds))
        print(f"layer {index}: LRU hit rate {', '.join(said)}", flush=True)


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


if __name__ == "__main__":
    main()
