"""Products with quantized weights: linear layers, and the experts of a mixture.

    linear layer    out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]
    experts         out[p, n] = sum_k x[p // experts_per_token, k] * weight[slot[p], n, k] + bias[slot[p], n]

A row p of experts is a pair of a token and an expert; it is zeros where slot[p] is negative. Weights are `formats.QuantizedWeight`. The
fused operators (csrc/quantization/product.cu) multiply with codes directly and never write the weight: they read a quarter or a half of a
plain weight's bytes, which bound a decode step. That of experts reads no weight for negative slots, and each weight once for several rows
that share it (`pairs_together`). Otherwise weights are dequantized first, of experts those of a few rows.

Integers are rounded to x's dtype once, as weights. Floats are exact: MXFP4 from scales of 2^-62 to 2^64 (larger ones give infinity or NaN),
and e4m3 without its NaN, which counts as 480 in fused products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zero_inference.kernels.extension import load_extension, operator_library
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat, dequantize_reference
from zero_inference.kernels.quantization import OPERANDS, check_packed, dequantize, describe, operands, weight_of

# All tokens that the fused operator of linear layers can take in one call. With 32 it took 114 us for int4 weights of 28672 x 8192, where
# dequantizing first took 288 us (h200-cores/quantized_products_bf16.tsv).
FUSED_ROWS = 32
FUSED_DTYPES = (torch.float16, torch.bfloat16)
FUSED_GROUP_SIZES = (16, 32, 64, 128)
ALIGNMENT = 16  # bytes: rows and tensors are read in vectors of this size
# Shared memory of a block for scales and minima of groups of 16; devices with 99 KB (8.6, 8.9, 12.0) have less.
GROUP_16_SHARED_BYTES = 132 << 10
MAX_PAIRS = 65535  # in a call of the experts' operator: the second dimension of a grid
GATHERED_BYTES = 128 << 20  # at once: enough to fill a device, little beside the memory that a run keeps free
# Results of the experts' operator, as `Form` in csrc/quantization/product.cu: the product, f(product), or f(gate) * up with gate's rows
# first in the weight, up's rows first, or both interleaved.
PLAIN, ACTIVATED, GATE_FIRST, UP_FIRST, INTERLEAVED = range(5)

LIBRARY = operator_library(__name__)
WEIGHT = f"Tensor x, {OPERANDS}, int rows"
# The last three are launch sizes for tests and benchmarks, powers of two; 0 leaves them to csrc/launch_sizes.cuh: warps of a block that
# split the columns (1 to 8), blocks that do (1 to 8), steps between barriers (2 to 64).
LIBRARY.define(f"linear_groups({WEIGHT}, Tensor bias, int column_warps=0, int splits=0, int chunk_steps=0) -> Tensor")
# from `bias` on: see `quantized_expert_linear` and `Epilogue`
LIBRARY.define(
    f"linear_groups_indexed({WEIGHT}, Tensor slot, Tensor? bias=None, int form=0, int activation=0, float limit=0, "
    "float up_offset=0, int tokens=0) -> Tensor"
)


class Epilogue(NamedTuple):
    """Activation that is fused into the first product: f(product), or f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)."""

    form: int  # `ACTIVATED` to `INTERLEAVED`
    activation: int  # number of f in csrc/quantization/product.cu
    limit: float  # 0 for none
    up_offset: float
    reference: Callable[[Tensor], Tensor]  # the same with PyTorch, of float32 [pairs, rows]


def quantized_linear(x: Tensor, weight: QuantizedWeight, rows: int, bias: Tensor | None = None) -> Tensor:
    """Return `functional.linear` of `x` with a quantized weight [rows, columns].

    For up to `FUSED_ROWS` tokens and if `can_fuse`, this is one kernel on the current stream, bitwise reproducible; otherwise the weight is
    dequantized into temporary memory, once for cuBLAS.

    Args:
        x: float16, bfloat16 or float32 [..., columns].
        bias: [rows] in x's dtype.

    Returns:
        [..., rows] in x's dtype, contiguous.

    Raises:
        ValueError: dtype, size, device or strides of an argument do not match.
    """
    check_packed(weight, rows, x.shape[-1], x.device)
    if bias is not None and (bias.numel() != rows or not bias.is_contiguous()):
        raise ValueError(f"bias must have {rows} elements, contiguous; found {describe(bias)}")
    tokens = math.prod(x.shape[:-1])
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if tokens <= FUSED_ROWS and not needs_gradient and can_fuse(x, weight, bias):
        flat = x.reshape(tokens, x.shape[-1]).contiguous()
        if flat.data_ptr() % ALIGNMENT == 0:
            bias = no_bias(x.device, x.dtype) if bias is None else bias
            out = torch.ops.zero_inference.linear_groups(flat, *operands(weight), rows, bias)
            return out.view(*x.shape[:-1], rows)
    plain = x.new_empty(rows, x.shape[-1])
    dequantize(weight, plain)
    return functional.linear(x, plain, bias)


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
    _check_pairs(x, slot, weight.shape[0], weight.shape[-1])
    if weight.dim() != 3 or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [slots, rows, columns], found {weight.dtype} {list(weight.shape)}")
    weight_bytes = weight.shape[1] * weight.shape[2] * weight.element_size()
    product = _gathered_products(x, slot, weight_bytes, weight.shape[1], lambda slots: weight.index_select(0, slots))
    return _finish(product, slot, bias, epilogue)


def quantized_expert_linear(
    x: Tensor,
    weight: QuantizedWeight,
    rows: int,
    slot: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue | None = None,
    tokens: int = 0,
) -> Tensor:
    """Return `expert_linear` of quantized weights [rows, columns].

    If `can_fuse`, this is one kernel on the current stream, bitwise reproducible. It rounds only its result; PyTorch also rounds the
    product and the sum with the bias.

    Args:
        x: float16, bfloat16 or float32 [tokens, columns].
        weight: tensors [slots, ...], each slot a weight [rows, columns].
        tokens: upper bound of the pairs with the same weight: a token has none twice; 0 for the rows of x.
        others: as in `expert_linear`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not match.
    """
    slots = weight.codes.shape[0]
    _check_pairs(x, slot, slots, x.shape[-1])
    check_packed(weight, rows, x.shape[-1], x.device, slots)
    fits = 0 < slot.numel() <= MAX_PAIRS and can_fuse(x, weight, bias)
    if fits and (bias is None or bias.dtype == x.dtype):
        x, slot = x.contiguous(), slot.contiguous()
        if x.data_ptr() % ALIGNMENT == 0 and slot.data_ptr() % ALIGNMENT == 0:
            numbers = (PLAIN, 0, 0.0, 0.0) if epilogue is None else epilogue[:4]
            return torch.ops.zero_inference.linear_groups_indexed(
                x, *operands(weight), rows, slot, bias, *numbers, tokens
            )
    product = quantized_expert_linear_reference(x, weight, rows, slot)
    return _finish(product, slot, bias, epilogue)


def can_fuse(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> bool:
    """Return whether the fused operators take these arguments, for any number of tokens.

    They need a CUDA device of capability 8.0 or newer, the compiled extension, a format of `format_can_fuse`, rows of whole groups (e4m3
    may end in a part of one), and rows of codes and tensors aligned to 16 bytes.
    """
    form, columns, tensors = weight.format, x.shape[-1], weight.tensors.values()
    return (
        x.is_cuda
        and format_can_fuse(form, x.dtype)
        and columns * form.bits % (8 * ALIGNMENT) == 0
        and (form.codes == Codes.E4M3 or columns % form.group_size == 0)
        and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*tensors, bias) if tensor is not None)
        and _device_can_fuse(x.device.index, form.minima and form.group_size == 16)
        and load_extension()
    )


@functools.cache
def format_can_fuse(form: WeightFormat, dtype: torch.dtype) -> bool:
    """Return whether csrc/quantization/product.cu has a kernel for this format and x of `dtype`."""
    scales = form.group_size, form.scale_dtype
    if form.codes in (Codes.INT4, Codes.INT8):
        sizes = FUSED_GROUP_SIZES if form.minima or form.codes == Codes.INT8 else FUSED_GROUP_SIZES[1:]
        plain = form.group_rows == 1 and not form.row_scales and not (form.zero_points and form.codes == Codes.INT8)
        return dtype in FUSED_DTYPES and plain and form.scale_dtype == dtype and form.group_size in sizes
    if dtype != torch.bfloat16 or form.minima or form.zero_points:
        return False
    if form.codes == Codes.E2M1:
        return form.group_rows == 1 and scales in ((32, torch.float8_e8m0fnu), (16, torch.float8_e4m3fn))
    return form.group_size == 0 or scales in ((64, torch.float32), (128, torch.float32))


@functools.cache
def _device_can_fuse(index: int, needs_group_16: bool) -> bool:
    properties = torch.cuda.get_device_properties(index)
    enough = not needs_group_16 or properties.shared_memory_per_block_optin >= GROUP_16_SHARED_BYTES
    return properties.major >= 8 and enough


@functools.cache
def no_bias(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the operator's argument for no bias: an empty tensor."""
    return torch.empty(0, device=device, dtype=dtype)


def pairs_together(pairs: int, weights: int) -> int:
    """Return the most rows that the kernel multiplies with a weight that it reads once, as `product_pairs` in csrc/launch_sizes.cuh."""
    return 1 if 4 * pairs <= weights else 8 if pairs <= 4 * weights else 16


def _check_pairs(x: Tensor, slot: Tensor, slots: int, columns: int) -> None:
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


def _gathered_products(
    x: Tensor, slot: Tensor, weight_bytes: int, rows: int, gather_weights: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return [pairs, rows], a few pairs at a time; the host reads no value of `slot`, which it would have to wait for."""
    x = x.repeat_interleave(slot.numel() // max(1, x.shape[0]), 0)  # [pairs, columns]
    out = x.new_empty(x.shape[0], rows)
    step = max(1, GATHERED_BYTES // max(1, weight_bytes))
    for start in range(0, x.shape[0], step):
        slots = slot[start : start + step]
        product = torch.bmm(gather_weights(slots.clamp(min=0)), x[start : start + step].unsqueeze(-1)).squeeze(-1)
        torch.where((slots >= 0).unsqueeze(-1), product, torch.zeros_like(product), out=out[start : start + step])
    return out


def _finish(product: Tensor, slot: Tensor, bias: Tensor | None, epilogue: Epilogue | None) -> Tensor:
    """Add the bias to `product` [pairs, rows], except for negative slots, and apply the epilogue."""
    if bias is not None:
        product = product + torch.where((slot >= 0).unsqueeze(-1), bias[slot.clamp(min=0)], 0)
    return product if epilogue is None else epilogue.reference(product.float()).to(product.dtype)


@torch.no_grad()
def quantized_linear_reference(x: Tensor, weight: QuantizedWeight, rows: int, bias: Tensor | None = None) -> Tensor:
    """Compute the operator of linear layers with PyTorch on any device."""
    plain = x.new_empty(rows, x.shape[-1])
    dequantize_reference(weight, plain)
    return functional.linear(x, plain, bias)


@torch.no_grad()
def quantized_expert_linear_reference(x: Tensor, weight: QuantizedWeight, rows: int, slot: Tensor) -> Tensor:
    """Compute the experts' operator with PyTorch on any device; only the CUDA kernel adds a bias and computes an epilogue."""
    columns = x.shape[1]

    def gather_weights(slots: Tensor) -> Tensor:
        gathered = {name: tensor.index_select(0, slots) for name, tensor in weight.tensors.items()}
        plain = x.new_empty(slots.numel(), rows, columns)
        dequantize_reference(QuantizedWeight(weight.format, **gathered), plain)
        return plain

    return _gathered_products(x, slot, rows * columns * x.element_size(), rows, gather_weights)


def _linear_groups(x: Tensor, *arguments: Any) -> Tensor:
    weight, (rows, bias, *_) = weight_of(*arguments[:8]), arguments[8:]
    return quantized_linear_reference(x, weight, rows, bias if bias.numel() else None)


def _linear_groups_indexed(x: Tensor, *arguments: Any) -> Tensor:
    return quantized_expert_linear_reference(x, weight_of(*arguments[:8]), *arguments[8:10])


LIBRARY.impl("linear_groups", _linear_groups, "CompositeExplicitAutograd")
LIBRARY.impl("linear_groups_indexed", _linear_groups_indexed, "CompositeExplicitAutograd")
