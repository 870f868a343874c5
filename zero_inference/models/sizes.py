"""What a run of a model takes beside its weights, from its config alone."""

from __future__ import annotations

from zero_inference.models.spec import ModelSpec
from zero_inference.utils import cache_bytes


def kv_cache_bytes(spec: ModelSpec, batch: int, length: int) -> int:
    """Bytes of keys and values of `batch` sequences of `length` positions, in the model's dtype."""
    return cache_bytes(spec.config, batch, length) // 2 * spec.dtype.itemsize


def activation_bytes(spec: ModelSpec, batch: int, prompt_len: int) -> int:
    """Estimate: six hidden states and three MLP inner states of the prompt, and two rows of float32 logits a sequence."""
    config = spec.text_config
    h = config.hidden_size
    inner = next((v for k in ("intermediate_size", "ffn_dim", "n_inner") if isinstance(v := getattr(config, k, None), int)), 4 * h)
    return batch * prompt_len * (6 * h + 3 * inner) * spec.dtype.itemsize + 2 * batch * config.vocab_size * 4
