"""Modules that multiply with int8 and int4 codes as they are stored, so that a short pass need not dequantize their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_inference.models.experts import FusedExperts, chosen_of, read_experts
from zero_inference.models.feed_forward import ACTIVATIONS
from zero_inference.quantization.groups import GroupQuantization
from zero_inference.quantization.indexed import linear_groups_indexed
from zero_inference.quantization.products import ALIGNMENT, FUSED_ROWS, can_fuse, linear_groups, no_bias
from zero_inference.runtime.extension import load_extension

Packed = tuple[torch.Tensor, ...]  # codes, scales and minima of a weight, and what else its place has
Times = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # rows [pairs, columns] and slots [pairs] -> [pairs, rows]


@dataclass(frozen=True)
class FromCodes:
    """A module that can do without its plain weights.

    Attributes:
        weights: their names, relative to the block.
        most_tokens: of a pass in which it is worth it.
        forward: what it computes then, with the arguments of its own.
    """

    module: nn.Module
    weights: tuple[str, ...]
    most_tokens: int
    forward: Callable[..., torch.Tensor]


def modules_from_codes(
    block: nn.Module,
    places: Sequence[Mapping[str, Packed]],
    scheme: GroupQuantization,
    packed_now: Callable[[str], Packed],
    config: Any,
) -> Iterator[FromCodes]:
    """Linear modules where the device has a kernel for them, and modules of experts.

    Args:
        places: everywhere that the block can lie: by a weight's name its parts there, for those that are quantized.
        packed_now: the parts of a weight where it lies when the module is called.
        config: the transformers config.
    """
    for name, module in block.named_modules():
        if type(module) is nn.Linear:
            weight = f"{name}.weight" if name else "weight"
            if load_extension() and _can_fuse(module.weight, [weight], places, scheme):
                forward = linear_forward(module, scheme, partial(packed_now, weight))
                yield FromCodes(module, (weight,), FUSED_ROWS, forward)
        elif experts := read_experts(module):
            weights = tuple(f"{name}.{own}" if name else own for own in (experts.first, experts.last))
            if any(weight not in place for place in places for weight in weights):
                continue
            first, last = (getattr(module, own) for own in (experts.first, experts.last))
            most = FUSED_ROWS
            if not _can_fuse(
                first, weights, places, scheme
            ):  # without the kernel each pair of token and expert is dequantized
                mixture = block.get_submodule(name.rpartition(".")[0])
                most = min(most, experts.number // chosen_of(mixture, config.get_text_config(), experts.number))
            times = [
                partial(_times, like, scheme, partial(packed_now, own)) for like, own in zip((first, last), weights)
            ]
            yield FromCodes(module, weights, most, experts_forward(experts, times[0], times[1]))


def linear_forward(
    linear: nn.Linear, scheme: GroupQuantization, packed: Callable[[], Packed]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`linear_groups` for a module, without the questions that `can_fuse` has answered: asked each time, they would cost Python more than
    the product takes.

    Args:
        packed: gives codes, scales and minima where they lie now.
    """
    bits, group_size, rows = scheme.bits, scheme.group_size, linear.out_features
    bias = no_bias(linear.weight.device, linear.weight.dtype) if linear.bias is None else linear.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        codes, scales, minima, *_ = packed()
        flat = x.reshape(-1, linear.in_features).contiguous()
        if flat.shape[0] > FUSED_ROWS or flat.data_ptr() % ALIGNMENT:
            return linear_groups(x, codes, scales, minima, bits, group_size, rows, linear.bias)
        out = torch.ops.zero_inference.linear_groups(flat, codes, scales, minima, bits, group_size, rows, bias)
        return out.view(*x.shape[:-1], rows)

    return forward


def experts_forward(experts: FusedExperts, first: Times, last: Times) -> Callable[..., torch.Tensor]:
    """What a module of experts computes, of those alone that tokens chose."""

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = weighted_sum(experts, first, last, x, top_k_index.to(torch.int64), top_k_weights)
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    return forward


def weighted_sum(
    experts: FusedExperts, first: Times, last: Times, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The sum of each token's experts, float32 [tokens, hidden], added in the order of the choices.

    Args:
        first, last: rows times the weights in slots; zeros for a slot of -1.
        x: [tokens, hidden].
        slots: int64 [tokens, k], where the experts that each token chose are; -1 for those that do not count.
        weights: of them, [tokens, k].
    """
    tokens, k = slots.shape
    slot = slots.reshape(-1)
    pairs = x.unsqueeze(1).expand(-1, k, -1).reshape(tokens * k, -1)
    gate, *up = first(pairs, slot).float().chunk(1 + experts.gated, -1)
    if experts.gate_is_second:
        gate, up = up[0], [gate]
    hidden = ACTIVATIONS[experts.activation](gate)
    out = last(hidden * up[0] if up else hidden, slot)
    return (out.view(tokens, k, -1) * weights.float().unsqueeze(-1)).sum(1)  # products in float32


def _times(
    weight: torch.Tensor, scheme: GroupQuantization, packed: Callable[[], Packed], x: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """Rows times the experts of a fused parameter `weight` [experts, rows, columns], whose shape and dtype alone are looked at."""
    number, rows, _ = weight.shape
    codes, scales, minima = (part.view(number, -1) for part in packed()[:3])
    return linear_groups_indexed(x.to(weight.dtype), codes, scales, minima, scheme.bits, scheme.group_size, rows, slot)


def _can_fuse(
    weight: torch.Tensor, names: Sequence[str], places: Sequence[Mapping[str, Packed]], scheme: GroupQuantization
) -> bool:
    """Whether the device has a kernel for products with the weights `names`, wherever they lie; `weight` is like them."""
    x = torch.empty(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
    for place in places:
        for name in names:
            if name not in place:
                return False
            codes, scales, minima, *_ = place[name]
            if not can_fuse(x, codes, scales, minima, scheme.bits, scheme.group_size):
                return False
    return True
