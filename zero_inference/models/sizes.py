"""What a run of a model takes beside its weights, before any weight is read."""

from __future__ import annotations

import copy

import torch

from zero_inference.models.spec import ModelSpec


def kv_cache_bytes(spec: ModelSpec, batch: int, length: int) -> int:
    """Bytes of keys and values of `batch` sequences of `length` positions in all layers, in the model's dtype.

    Sliding windows are not taken off: the caches of this package keep all positions.
    """
    return batch * length * sum(spec.kv_widths) * spec.dtype.itemsize


def kv_layer_bytes(spec: ModelSpec, batch: int, length: int) -> int:
    """The same of the one layer that keeps most."""
    return batch * length * max(spec.kv_widths, default=0) * spec.dtype.itemsize


def kv_widths_of(model) -> list[int] | None:
    """Elements of keys and values of one position, of each layer that caches any, by one token through `model` on the meta device.

    None where the model cannot run there, because it looks at values.
    """
    from transformers import DynamicCache

    shapes = copy.deepcopy(model).to("meta", torch.bfloat16)  # grouped matrix products have no other dtype there
    try:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            shapes(input_ids=torch.zeros(1, 1, dtype=torch.int64, device="meta"), past_key_values=cache, use_cache=True)
    except Exception:  # whatever the model's own code raises
        return None
    return [
        layer.keys.numel() + layer.values.numel()
        for layer in cache.layers
        if torch.is_tensor(getattr(layer, "keys", None))
    ]


def activation_bytes(spec: ModelSpec, batch: int, prompt_len: int) -> int:
    """Estimate: six hidden states and three MLP inner states of the prompt, and two rows of float32 logits a sequence."""
    config = spec.text_config
    h = config.hidden_size
    inner = next(
        (v for k in ("intermediate_size", "ffn_dim", "n_inner") if isinstance(v := getattr(config, k, None), int)),
        4 * h,
    )
    return batch * prompt_len * (6 * h + 3 * inner) * spec.dtype.itemsize + 2 * batch * config.vocab_size * 4
