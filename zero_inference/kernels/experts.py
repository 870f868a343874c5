"""Products of a mixture's experts: each pair of a token and an expert is one row.

    out[p, n] = sum_k x[p // experts_per_token, k] * weight[slot[p], n, k] + bias[slot[p], n],   zeros where slot[p] is negative

The fused operator (csrc/quantization/product.cu) reads no weight for negative slots, and each weight once for several rows that share it
(`pairs_together`). The PyTorch fallback gathers the weights of a few rows first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_inference.kernels.products import ALIGNMENT, LIBRARY, can_fuse
from zero_inference.kernels.quantization import check_packed, dequantize_reference

MAX_PAIRS = 65535  # in a call of the fused operator: the second dimension of a grid
GATHERED_BYTES = 128 << 20  # at once: enough to fill a device, little beside the memory that a run keeps free

# from `bias` on: see `quantized_expert_linear` and `Epilogue`
SCHEMA = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor minimum, int bits, int group_size, int rows, Tensor slot, "
    "Tensor? bias=None, int form=0, int activation=0, float limit=0, float up_offset=0, int tokens=0) -> Tensor"
)
# Results of the operator, as `Form` in csrc/quantization/product.cu: the product, f(product), or f(gate) * up with gate's rows first in
# the weight, up's rows first, or both interleaved.
PLAIN, ACTIVATED, GATE_FIRST, UP_FIRST, INTERLEAVED = range(5)


class Epilogue(NamedTuple):
    """Activation that is fused into the first product: f(product), or f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)."""

    form: int  # `ACTIVATED` to `INTERLEAVED`
    activation: int  # number of f in csrc/quantization/product.cu
    limit: float  # 0 for none
    up_offset: float
    reference: Callable[[Tensor], Tensor]  # the same with PyTorch, of float32 [pairs, rows]


@torch.no_grad()
def expert_linear(
    x: Tensor, weight: Tensor, slot: Tensor, bias: Tensor | None = None, epilogue: Epilogue | None = None
) -> Tensor:
    """Return the product of each (token, expert) pair, with PyTorch.

    Args:
        x: [tokens, columns] in the weights' dtype.
        weight: [slots, rows, columns].
        slot: int64 [pairs], index of a weight, or negative for none; the same number of pairs for each token, in order.
        bias: [slots, rows] in x's dtype.
        epilogue: applied to each product.

    Returns:
        [pairs, rows] in x's dtype ([pairs, rows / 2] for gate and up); zeros for negative slots.
    """
    _check(x, slot, weight.shape[0], weight.shape[-1])
    if weight.dim() != 3 or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [slots, rows, columns], found {weight.dtype} {list(weight.shape)}")
    weight_bytes = weight.shape[1] * weight.shape[2] * weight.element_size()
    product = _gathered_products(x, slot, weight_bytes, weight.shape[1], lambda some: weight.index_select(0, some))
    return _finish(product, slot, bias, epilogue)


def quantized_expert_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    slot: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue | None = None,
    tokens: int = 0,
) -> Tensor:
    """Return `expert_linear` of quantized weights [rows, columns].

    On a CUDA device, if `can_fuse`, this is one kernel on the current stream, bitwise reproducible. It rounds only its result; PyTorch also
    rounds the product and the sum with the bias.

    Args:
        x: float16, bfloat16 or float32 [tokens, columns].
        codes: uint8 [slots, rows * columns * bits / 8], each slot as `kernels.quantization.quantize` packs a weight.
        scale, minimum: [slots, rows * columns / group_size], in x's dtype.
        tokens: upper bound of the pairs with the same weight: a token has none twice; 0 for the rows of x.
        others: as in `expert_linear`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not match.
    """
    _check(x, slot, codes.shape[0], x.shape[-1])
    check_packed(codes, scale, minimum, bits, group_size, rows, x.shape[-1], x.dtype, x.device, codes.shape[0])
    fits = 0 < slot.numel() <= MAX_PAIRS and can_fuse(x, codes, scale, minimum, bits, group_size, bias)
    if fits and (bias is None or bias.dtype == x.dtype):
        x, slot = x.contiguous(), slot.contiguous()
        if x.data_ptr() % ALIGNMENT == 0 and slot.data_ptr() % ALIGNMENT == 0:
            numbers = (PLAIN, 0, 0.0, 0.0) if epilogue is None else epilogue[:4]
            return torch.ops.zero_inference.linear_groups_indexed(
                x, codes, scale, minimum, bits, group_size, rows, slot, bias, *numbers, tokens
            )
    product = quantized_expert_linear_reference(x, codes, scale, minimum, bits, group_size, rows, slot)
    return _finish(product, slot, bias, epilogue)


def pairs_together(pairs: int, weights: int) -> int:
    """Return the most rows that the kernel multiplies with a weight that it reads once, as `product_pairs` in csrc/launch_sizes.cuh."""
    return 1 if 4 * pairs <= weights else 8 if pairs <= 4 * weights else 16


@torch.no_grad()
def quantized_expert_linear_reference(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, slot: Tensor
) -> Tensor:
    """Return `quantized_expert_linear` without bias and epilogue, with PyTorch on any device: the weights of a few rows are gathered and
    dequantized at a time."""
    columns = x.shape[1]

    def weights(some: Tensor) -> Tensor:
        parts = (part.index_select(0, some).view(-1) for part in (codes, scale, minimum))
        plain = x.new_empty(some.numel(), rows, columns)
        dequantize_reference(*parts, bits, group_size, plain)
        return plain

    return _gathered_products(x, slot, rows * columns * x.element_size(), rows, weights)


def _gathered_products(
    x: Tensor, slot: Tensor, weight_bytes: int, rows: int, weights: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return [pairs, rows], a few pairs at a time; the host reads no value of `slot`, which it would have to wait for."""
    x = x.repeat_interleave(slot.numel() // max(1, x.shape[0]), 0)  # [pairs, columns]
    out = x.new_empty(x.shape[0], rows)
    step = max(1, GATHERED_BYTES // max(1, weight_bytes))
    for start in range(0, x.shape[0], step):
        some = slot[start : start + step]
        product = torch.bmm(weights(some.clamp(min=0)), x[start : start + step].unsqueeze(-1)).squeeze(-1)
        torch.where((some >= 0).unsqueeze(-1), product, torch.zeros_like(product), out=out[start : start + step])
    return out


def _finish(product: Tensor, slot: Tensor, bias: Tensor | None, epilogue: Epilogue | None) -> Tensor:
    """Add the bias to `product` [pairs, rows], except for negative slots, and apply the epilogue."""
    if bias is not None:
        product = product + torch.where((slot >= 0).unsqueeze(-1), bias[slot.clamp(min=0)], 0)
    return product if epilogue is None else epilogue.reference(product.float()).to(product.dtype)


def _check(x: Tensor, slot: Tensor, slots: int, columns: int) -> None:
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [tokens, {columns}], found {list(x.shape)}")
    tokens = x.shape[0]
    divides = slot.dim() == 1 and (slot.numel() % tokens == 0 if tokens else slot.numel() == 0)
    if slot.dtype != torch.int64 or not divides or slot.device != x.device:
        raise ValueError(
            f"slot must be int64 [{tokens} x k] on {x.device}, found {slot.dtype} {list(slot.shape)} on {slot.device}"
        )
    if slots < 1:
        raise ValueError("at least one weight is needed")


def _without_kernel(x: Tensor, *weight_and_slot: Any) -> Tensor:
    """Compute the plain operator with PyTorch; only the CUDA kernel adds a bias and computes an epilogue."""
    return quantized_expert_linear_reference(x, *weight_and_slot)


LIBRARY.define("linear_groups_indexed" + SCHEMA)
LIBRARY.impl("linear_groups_indexed", _without_kernel, "CompositeExplicitAutograd")
