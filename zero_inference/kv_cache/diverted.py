"""Attention of a transformers model, sent to the cores where keys come from an `AttendedCache`.

Most families call one of transformers' attention functions, found by the name that the configuration has; `divert_attention` puts
itself before that function. BLOOM and MPT compute attention with ALiBi in their own code: their modules get another `forward`, which
differs in passes that the cores attend. All other calls are as they were, also of other models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_inference.errors import RunError
from zero_inference.kv_cache.attended import AttendedCache, AttendedLayer, Logits, not_attended

FUNCTIONS = (
    "sdpa",
    "eager",
)  # what a model attends by unless it is told otherwise; others keep masks of their own kind


def why_not_attended(model: PreTrainedModel) -> str | None:
    """Why the cores cannot attend for `model`, in words that follow its name; None where they can. Its weights are not read."""
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", None):
        return "has layers that share keys and values"
    if getattr(text, "kv_lora_rank", None):
        return "keeps keys and values in a compressed form"
    if any(type(module).__name__ in OWN_FORWARDS for module in model.modules()):
        return None
    if not all(part._can_set_attn_implementation() for part in model.modules() if isinstance(part, PreTrainedModel)):
        return "does not attend by transformers' attention functions"
    if text._attn_implementation not in FUNCTIONS:
        return f"attends by {text._attn_implementation}, not by {' or '.join(FUNCTIONS)}"
    return None


def divert_attention(model: PreTrainedModel) -> None:
    """Have `model` attend on the cores wherever an `AttendedCache` holds its keys and values; safe to call twice.

    Raises:
        RunError: the model's attention cannot be diverted; `why_not_attended` says so before.
    """
    reason = why_not_attended(model)
    if reason is not None:
        raise RunError(f"{model.config.model_type} {reason}: the cores cannot attend for it; use --cpu-compute off.")
    own = [module for module in model.modules() if type(module).__name__ in OWN_FORWARDS]
    for module in own:
        if not isinstance(module.forward, _OwnForward):
            module.forward = _OwnForward(OWN_FORWARDS[type(module).__name__], module, module.forward)
    if not own:
        name = model.config.get_text_config(decoder=True)._attn_implementation
        before = ALL_ATTENTION_FUNCTIONS.get(name)
        if not isinstance(before, _Diverted):
            ALL_ATTENTION_FUNCTIONS[name] = _Diverted(before)


class _Diverted:
    """An attention function of transformers, and the cores for what is marked.

    Args:
        before: the function; None: the `eager_attention_forward` of each model's own file.
    """

    def __init__(self, before: Callable | None):
        self.before = before

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **options: Any,
    ):
        layer = AttendedLayer.take_waiting(key)
        if layer is None:
            before = self.before or sys.modules[type(module).__module__].eager_attention_forward
            return before(module, query, key, value, mask, *args, **options)
        if options.get("position_bias") is not None:
            raise not_attended(f"{type(module).__name__} adds a bias that the cores do not know")
        if layer.logits is None:
            scale, sinks = options.get("scaling"), options.get("s_aux")
            layer.logits = Logits(
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                softcap=options.get("softcap") or 0.0,
                sinks=None if sinks is None else sinks.detach().float().cpu().contiguous(),
            )
        return layer.attend(query, mask), None


def _attend_own(
    module: torch.nn.Module,
    cache: AttendedCache,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    slopes: Callable[[], torch.Tensor],
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [batch, new, heads x head_dim] of a family that adds ALiBi itself.

    Args:
        states: query, key and value of the new tokens, [batch, heads, new, head_dim].
        slopes: gives ALiBi's [heads], asked once a layer.
        mask: as `Masks.on_host` takes it.
    """
    query, key, value = states
    layer = AttendedLayer.take_waiting(cache.update(key, value, module.layer_idx)[0])
    if layer.logits is None:
        layer.logits = Logits(scale=scale, slopes=slopes().float().cpu().contiguous())
    return layer.attend(query, mask).flatten(2)


def _is_decode(cache: Any, module: torch.nn.Module) -> bool:
    return isinstance(cache, AttendedCache) and cache.get_seq_length(module.layer_idx) > 0


def _bloom_forward(
    module: torch.nn.Module,
    before: Callable,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    **options: Any,
):
    if not _is_decode(layer_past, module):
        return before(hidden_states, residual, alibi, attention_mask, layer_past=layer_past, **options)
    states = module._reshape(module.query_key_value(hidden_states))

    def slopes() -> torch.Tensor:  # by the bias of two positions; `alibi` is rounded to the model's dtype
        rule = sys.modules[type(module).__module__].build_alibi_tensor
        return rule(torch.ones((1, 2), dtype=torch.int64), module.num_heads, torch.float32)[:, 0, 1]

    out = _attend_own(module, layer_past, states, module.inv_norm_factor, slopes, attention_mask)
    return module.dense(out) + residual, None


def _mpt_forward(
    module: torch.nn.Module,
    before: Callable,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
):
    if not _is_decode(past_key_values, module):
        return before(hidden_states, position_bias, past_key_values, attention_mask, **options)
    packed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        packed = packed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    states = (part.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for part in packed.chunk(3, dim=2))
    mask = None if attention_mask is None else ~attention_mask  # here True is not seen

    def slopes() -> torch.Tensor:
        return position_bias[:, 0, -1] - position_bias[:, 0, -2]

    out = _attend_own(module, past_key_values, tuple(states), module.softmax_scale, slopes, mask)
    return module.out_proj(out), None


class _OwnForward(partial):
    """One of `OWN_FORWARDS` for a module, with the `forward` that the module had."""


OWN_FORWARDS: dict[str, Callable] = {"BloomAttention": _bloom_forward, "MptAttention": _mpt_forward}
