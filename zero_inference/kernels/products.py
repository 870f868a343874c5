"""Linear layers with quantized weights.

    out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n],   weight[n, k] = code * scale + minimum, in the weight's dtype

For up to `FUSED_ROWS` tokens the fused operator (csrc/quantization/product.cu) multiplies with codes directly and never writes the weight:
it reads a quarter or a half of a plain weight's bytes, which bound a decode step. For more tokens the weight is dequantized once for
cuBLAS.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zero_inference.kernels.extension import load_extension, operator_library
from zero_inference.kernels.quantization import check_packed, dequantize, dequantize_reference, describe

# All tokens that the fused operator can take in one call. With 32 it took 114 us for int4 weights of 28672 x 8192, where dequantizing first
# took 288 us (h200-cores/quantized_products_bf16.tsv).
FUSED_ROWS = 32
FUSED_DTYPES = (torch.float16, torch.bfloat16)
FUSED_GROUP_SIZES = (16, 32, 64, 128)
ALIGNMENT = 16  # bytes: rows and tensors are read in vectors of this size
# Shared memory of a block for the scales of groups of 16; devices with 99 KB (8.6, 8.9, 12.0) have less.
GROUP_16_SHARED_BYTES = 132 << 10

LIBRARY = operator_library(__name__)
# The last three are launch sizes for tests and benchmarks, powers of two; 0 leaves them to csrc/launch_sizes.cuh: warps of a block that
# split the columns (1 to 8), blocks that do (1 to 8), steps between barriers (2 to 64).
SCHEMA = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor minimum, int bits, int group_size, int rows, Tensor bias, "
    "int column_warps=0, int splits=0, int chunk_steps=0) -> Tensor"
)


def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `functional.linear` of `x` with a quantized weight [rows, columns].

    On a CUDA device, for up to `FUSED_ROWS` tokens and if `can_fuse`, this is one kernel on the current stream, bitwise reproducible;
    otherwise the weight is dequantized into temporary memory.

    Args:
        x: float16, bfloat16 or float32 [..., columns].
        codes, scale, minimum, bits, group_size: of the weight, as `kernels.quantization.quantize` packs it, in x's dtype.
        bias: [rows] in x's dtype.

    Returns:
        [..., rows] in x's dtype, contiguous.

    Raises:
        ValueError: dtype, size, device or strides of an argument do not match.
    """
    check_packed(codes, scale, minimum, bits, group_size, rows, x.shape[-1], x.dtype, x.device)
    if bias is not None and (bias.numel() != rows or not bias.is_contiguous()):
        raise ValueError(f"bias must have {rows} elements, contiguous; found {describe(bias)}")
    tokens = math.prod(x.shape[:-1])
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if tokens <= FUSED_ROWS and not needs_gradient and can_fuse(x, codes, scale, minimum, bits, group_size, bias):
        flat = x.reshape(tokens, x.shape[-1]).contiguous()
        if flat.data_ptr() % ALIGNMENT == 0:
            bias = no_bias(x.device, x.dtype) if bias is None else bias
            out = torch.ops.zero_inference.linear_groups(flat, codes, scale, minimum, bits, group_size, rows, bias)
            return out.view(*x.shape[:-1], rows)
    weight = x.new_empty(rows, x.shape[-1])
    dequantize(codes, scale, minimum, bits, group_size, weight)
    return functional.linear(x, weight, bias)


@torch.no_grad()
def quantized_linear_reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `quantized_linear` with PyTorch on any device: `dequantize_reference`, then `functional.linear`."""
    weight = x.new_empty(rows, x.shape[-1])
    dequantize_reference(codes, scale, minimum, bits, group_size, weight)
    return functional.linear(x, weight, bias)


def can_fuse(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, bias: Tensor | None = None
) -> bool:
    """Return whether the fused operator takes these arguments, for any number of tokens.

    It needs a CUDA device of capability 8.0 or newer, the compiled extension, 16-bit dtypes, groups of 16, 32, 64 or 128, and rows of codes
    and tensors aligned to 16 bytes.
    """
    columns = x.shape[-1]
    return (
        x.is_cuda
        and x.dtype in FUSED_DTYPES
        and group_size in FUSED_GROUP_SIZES
        and columns * bits % (8 * ALIGNMENT) == 0
        and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (codes, scale, minimum, bias) if tensor is not None)
        and _device_can_fuse(x.device.index, group_size)
        and load_extension()
    )


@functools.cache
def no_bias(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the operator's argument for no bias: an empty tensor."""
    return torch.empty(0, device=device, dtype=dtype)


@functools.cache
def _device_can_fuse(index: int, group_size: int) -> bool:
    properties = torch.cuda.get_device_properties(index)
    enough = group_size > 16 or properties.shared_memory_per_block_optin >= GROUP_16_SHARED_BYTES
    return properties.major >= 8 and enough


def _without_kernel(x: Tensor, *others: Any) -> Tensor:
    *weight, bias = others[:7]  # without launch sizes
    return quantized_linear_reference(x, *weight, bias if bias.numel() else None)


LIBRARY.define("linear_groups" + SCHEMA)
LIBRARY.impl("linear_groups", _without_kernel, "CompositeExplicitAutograd")
