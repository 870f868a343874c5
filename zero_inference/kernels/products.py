"""Products of a few tokens with a weight in groups of codes, which is read as it is stored.

    out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n],   weight[n, k] = code * scale + minimum, in the weight's dtype

The fused operator (csrc/quantization/product.cu) never writes the weight. Up to `FUSED_ROWS` tokens it reads a quarter or a half of
the bytes that a product with the plain weight reads, which is what a decode step's time consists of; with more tokens the weight is
dequantized once and cuBLAS does the rest.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from zero_inference.kernels.extension import load_extension, operator_library
from zero_inference.kernels.quantization import dequantize, dequantize_reference

# Tokens up to which the fused operator is taken: all that it can do in one call. With 32 tokens it took 114 us for int4 weights of
# 28672 x 8192, where dequantizing first took 288 (h200-cores/quantized_products_bf16.tsv).
FUSED_ROWS = 32
FUSED_DTYPES = (torch.float16, torch.bfloat16)
FUSED_GROUP_SIZES = (16, 32, 64, 128)
ALIGNMENT = 16  # bytes: rows and tensors are read in vectors of this size
# Scales of groups of 16 take so much shared memory that a block of a device with 99 KB of it (8.6, 8.9, 12.0) cannot hold them.
GROUP_16_SHARED_BYTES = 132 << 10

LIBRARY = operator_library(__name__)
# The last three are for tests and benchmarks: the launch, where 0 leaves the choice to csrc/launch_sizes.cuh. Warps of a block
# that split the columns (1 to 8), blocks that do (1 to 8), steps between barriers (2 to 64), all powers of two.
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
    """`functional.linear` of `x` with a weight [rows, columns] in groups.

    On a CUDA device with the compiled extension, up to `FUSED_ROWS` tokens and what `can_fuse` says, one kernel on the current
    stream, with the same bits in every run; else the weight is dequantized into memory of this call.

    Args:
        x: float16, bfloat16 or float32 [..., columns]; columns is a multiple of the group size.
        codes: uint8 [rows * columns * bits / 8], row by row; 4 bits: the even element in the low nibble.
        scale, minimum: [rows * columns / group_size], in x's dtype.
        bits: of a code, 8 or 4.
        rows: of the weight.
        bias: [rows] in x's dtype, or None.

    Returns:
        [..., rows] in x's dtype, contiguous.

    Raises:
        ValueError: dtype, size, device or strides of an argument do not fit; says which were needed.
    """
    _check_sizes(codes, scale, minimum, bits, group_size, rows, x.shape[-1], bias)
    tokens = _tokens(x)
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
    """What `quantized_linear` has to give, with PyTorch alone on any device: the plain weight of `dequantize_reference`, then
    `functional.linear`. Arguments, result and errors as there."""
    weight = x.new_empty(rows, x.shape[-1])
    dequantize_reference(codes, scale, minimum, bits, group_size, weight)
    return functional.linear(x, weight, bias)


def can_fuse(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, bias: Tensor | None = None
) -> bool:
    """Whether the fused operator takes these arguments, however many tokens: a CUDA device of capability 8.0 or newer with the
    compiled extension, 16-bit dtypes, groups of 16, 32, 64 or 128, rows of codes and tensors that begin on 16 bytes."""
    columns = x.shape[-1]
    return (
        x.is_cuda
        and x.dtype in FUSED_DTYPES
        and group_size in FUSED_GROUP_SIZES
        and columns * bits % (8 * ALIGNMENT) == 0
        and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (codes, scale, minimum, bias) if tensor is not None)
        and _device_serves(x.device.index, group_size)
        and load_extension()
    )


@functools.cache
def no_bias(device: torch.device, dtype: torch.dtype) -> Tensor:
    """What the operator takes for a product without a bias: an empty tensor."""
    return torch.empty(0, device=device, dtype=dtype)


@functools.cache
def _device_serves(index: int, group_size: int) -> bool:
    properties = torch.cuda.get_device_properties(index)
    return properties.major >= 8 and (
        group_size > 16 or properties.shared_memory_per_block_optin >= GROUP_16_SHARED_BYTES
    )


def _tokens(x: Tensor) -> int:
    tokens = 1
    for size in x.shape[:-1]:
        tokens *= size
    return tokens


def _check_sizes(
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    columns: int,
    bias: Tensor | None,
) -> None:
    """What either way needs, in the same words."""
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    if columns % group_size:
        raise ValueError(f"the rows of the weight must be whole groups of {group_size}, not {columns} elements")
    groups = rows * (columns // group_size)
    for name, tensor, numel in (
        ("codes", codes, rows * columns * bits // 8),
        ("scale", scale, groups),
        ("minimum", minimum, groups),
        ("bias", bias, rows),
    ):
        if tensor is not None and (tensor.numel() != numel or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} must have {numel} elements, contiguous, for a weight of {rows} x {columns}; found "
                f"{list(tensor.shape)}, strides {tensor.stride()}"
            )


def _without_kernel(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor,
    column_warps: int = 0,
    splits: int = 0,
    chunk_steps: int = 0,
) -> Tensor:
    """What runs where no kernel is registered; a launch is nothing to it."""
    return quantized_linear_reference(x, codes, scale, minimum, bits, group_size, rows, bias if bias.numel() else None)


def _fake(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, *_
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


LIBRARY.define("linear_groups" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("linear_groups", _without_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("zero_inference::linear_groups", _fake, lib=LIBRARY)
