"""Random weights for runs that need no checkpoint: seeded by name, so that order, rank and engine do not matter.

A mixture of experts with random weights of one size, fed its own greedy tokens, chooses the same few experts in every step: the
residual stream is soon dominated by what all tokens have in common. Text does not: an LRU cache of a quarter of the experts hits
two thirds of the choices, a fixed set of an eighth a tenth of them (llama.cpp #27861). `--dummy-routing text` gives
such choices: embeddings are large enough (`embedding_std`) that the token decides what the routers choose in every layer, and
tokens are drawn by `draw_tokens`, which repeats recent ones. Scaling a router's weights would change none of its choices.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

REPEATED = 0.6  # share of drawn tokens that repeat one of the last `RECENT` of their sequence
RECENT = 6
WEIGHT_STD = 0.02  # the init of GPT-2, OPT and Llama; keeps 16-bit activations finite through every preset


def fill_dummy(tensor: torch.Tensor, name: str, seed: int, std: float = WEIGHT_STD) -> torch.Tensor:
    """Fill `tensor` in place where it lies and return it.

    Matrices are N(0, std^2), norm weights 1 + N(0, 0.02^2), biases N(0, 0.02^2). The values depend on `seed`, `name`,
    shape, dtype, `std` and the kind of device alone.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    tensor.normal_(0.0, std if tensor.dim() > 1 else WEIGHT_STD, generator=generator)
    if tensor.dim() == 1 and not name.endswith("bias"):
        tensor.add_(1.0)
    return tensor


def embedding_std(text_config: Any) -> float:
    """Return the standard deviation of a mixture's embeddings with `--dummy-routing text`, 1 or more.

    Attention averages over tokens, which keeps the component that all of them share. With weights of `WEIGHT_STD` a layer amplifies it
    by g = WEIGHT_STD^2 sqrt(hidden x heads x head_dim) and adds it to a residual stream of deviation s, so its square grows by
    g^2 / s^2 a layer; s^2 = L g^2 bounds the growth over L layers by a factor of e. The result is 8 for Qwen3-30B-A3B, where an LRU
    cache of a quarter of the experts then hits 60 to 64% in all 48 layers (benchmarks/expert_reuse.py).
    """
    heads = text_config.num_attention_heads
    widths = (getattr(text_config, name, None) for name in ("v_head_dim", "head_dim"))
    head_dim = next(filter(None, widths), text_config.hidden_size // heads)
    gain = WEIGHT_STD**2 * math.sqrt(text_config.hidden_size * heads * head_dim)
    return max(1.0, gain * math.sqrt(text_config.num_hidden_layers))


def draw_tokens(prompts: torch.Tensor, count: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Return the tokens int64 [B, count] to feed after `prompts` int64 [B, P]; a row depends on its prompt and `seed` alone.

    Each repeats one of the last `RECENT` tokens of its row with probability `REPEATED`, and is uniform over the vocabulary otherwise.
    """
    rows = []
    for prompt in prompts.cpu():
        digest = hashlib.sha256(seed.to_bytes(8, "little") + prompt.numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        repeats = (torch.rand(count, generator=generator) < REPEATED).tolist()
        fresh = torch.randint(vocab_size, (count,), generator=generator).tolist()
        back = torch.randint(RECENT, (count,), generator=generator).tolist()
        row = prompt.tolist()
        for repeat, new, distance in zip(repeats, fresh, back):
            row.append(row[-1 - min(distance, len(row) - 1)] if repeat else new)
        rows.append(row[len(prompt) :])
    return torch.tensor(rows, dtype=torch.int64)
