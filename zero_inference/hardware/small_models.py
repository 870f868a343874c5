"""Small models whose time says what running any model takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

POSITIONS = 160


def small_opt(layers: int) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            hidden_size=64,
            ffn_dim=128,
            num_attention_heads=4,
            num_hidden_layers=layers,
            word_embed_proj_dim=64,
            vocab_size=256,
            max_position_embeddings=POSITIONS,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=None,
        )
    ).requires_grad_(False)


def small_llama(layers: int, width: int = 64, heads: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_hidden_layers=layers,
            vocab_size=256,
            max_position_embeddings=POSITIONS,
            bos_token_id=0,
            eos_token_id=None,
        )
    ).requires_grad_(False)


def seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Of one action, until the device has done it."""
    _wait_for(device)
    start = time.perf_counter()
    action()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
