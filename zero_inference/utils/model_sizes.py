"""Sizes of a model by its config: bytes of parameters, KV cache and hidden states; its text decoder and heads.

Importing this module loads neither torch nor transformers; `exact_parameter_bytes` and `auto_class` do, when called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

# The families whose published sizes come from the closed formula for a classical block.
CLASSICAL_MODEL_TYPES = ("opt", "bloom")
# Entries of a config's `layer_types` that keep no keys and values.
LAYER_TYPES_WITHOUT_KV = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp", "dummy"}


def model_bytes(config: Any, *, parameters: int | None = None) -> int:
    """Return the bytes of all parameters at 2 bytes each.

    An object without a `model_type`, OPT and BLOOM follow the closed formula of FlexGen (Sheng et al. 2023), which leaves positions
    out: 0.03% below the exact count of opt-66b. Every other config is counted exactly; `parameters` is that count, if known already.
    """
    if getattr(config, "model_type", None) and config.model_type not in CLASSICAL_MODEL_TYPES:
        return exact_parameter_bytes(config) if parameters is None else 2 * parameters
    h = config.hidden_size
    layer = h * (3 * h + 1) + h * (h + 1) + h * (4 * h + 1) + 4 * h * (h + 1) + 4 * h  # attention, MLP, norms
    return 2 * (config.num_hidden_layers * layer + config.vocab_size * (h + 1))


def exact_parameter_bytes(config: Any) -> int:
    """Return 2 bytes times the parameters of the model that `auto_class` builds from `config`; tied weights count once.

    Built on the meta device: 0.4 s for Llama-3.1-405B, imports apart.
    """
    import torch

    config = copy.deepcopy(config)  # from_config writes the dtype and attention it chose into it
    # A config class from a downloaded module is there only if its code was trusted before.
    trusted = type(config).__module__.startswith("transformers_modules")
    with _without_zero3(), torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trusted)
    model.tie_weights()
    return 2 * sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """Hide a live HfDeepSpeedConfig: under it from_config partitions parameters, and each has 0 elements."""
    from transformers.integrations import deepspeed as integration

    reference = integration._hf_deepspeed_config_weak_ref
    integration._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = reference


def auto_class(config: Any) -> Any:
    """Return AutoModelForCausalLM, or AutoModelForMultimodalLM for a language model that is wrapped with encoders of images or sound.

    Raises:
        ValueError: transformers cannot generate text with it; the message is the kind of model, such as "an encoder-decoder".
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, GenerationMixin

    if type(config) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in getattr(config, "auto_map", ()):
        return AutoModelForCausalLM
    if text_config(config).is_encoder_decoder or config.is_encoder_decoder:
        raise ValueError("an encoder-decoder")
    wrappers = AutoModelForMultimodalLM._model_mapping
    kind = "a multimodal model" if type(config) in wrappers or is_wrapper(config) else "no causal language model"
    if type(config) not in wrappers:
        raise ValueError(kind)
    if getattr(wrappers[type(config)], "generate", None) is not GenerationMixin.generate:
        raise ValueError(f"{kind} with its own `generate`")
    return AutoModelForMultimodalLM


def is_wrapper(config: Any) -> bool:
    """Return whether `config` is of a language model with an encoder of images or sound."""
    return hasattr(config, "vision_config") or hasattr(config, "audio_config")


def text_config(config: Any) -> Any:
    """Return the config of the text decoder: the nested one of a multimodal config, else `config` itself."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if callable(get) else config


def cache_bytes(config: Any, batch_size: int, seq_len: int) -> int:
    """Return the bytes of the KV cache at 2 bytes an element: K and V of [batch_size, seq_len, kv_width] per layer.

    This is the log's figure; `Job.kv_bytes` has the bytes that a model caches (latent attention, layers that share a cache).
    """
    config = text_config(config)
    return 2 * batch_size * seq_len * config.num_hidden_layers * kv_width(config) * 2


def hidden_bytes(config: Any, batch_size: int, seq_len: int) -> int:
    """Return the bytes of the hidden states [batch_size, seq_len, h] at 2 bytes an element."""
    return batch_size * seq_len * text_config(config).hidden_size * 2


def kv_layers(config: Any) -> int:
    """Return how many layers of a text config have keys and values: not those of a hybrid with other state or none."""
    kinds = getattr(config, "layer_types", None)
    count: int = config.num_hidden_layers
    return sum(kind not in LAYER_TYPES_WITHOUT_KV for kind in kinds[:count]) if kinds else count


def kv_width(config: Any) -> int:
    """Return the elements of K (and of V) of one position in one layer: h for a text config that does not name its heads."""
    heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // (heads or 1)
    return _kv_heads(config, heads) * head_dim if heads else config.hidden_size


def query_heads_per_kv_head(config: Any) -> int:
    """Return how many query heads share a key head; 1 for a config that does not name its heads."""
    heads = getattr(config, "num_attention_heads", None) or 1
    return max(1, heads // max(1, _kv_heads(config, heads)))


def _kv_heads(config: Any, heads: int) -> int:
    kv_heads: int | None = getattr(config, "num_key_value_heads", None)
    if kv_heads is not None:
        return kv_heads
    # Falcon-7B and StarCoder set a flag instead. Falcon's newer layout repeats K and V to all attention heads before it caches them.
    one_for_all = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    return 1 if one_for_all else heads
