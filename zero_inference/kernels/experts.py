"""Products of pairs of a row and a weight out of several that lie one after the other: a mixture's experts.

    out[p, n] = sum_k x[p // pairs_of_row, k] * weight[slot[p], n, k] + bias[slot[p], n],   and zeros where slot[p] is negative

Nothing is read for a row without a weight, as far as the fused operator (csrc/quantization/product.cu) goes. It reads a weight
once for several rows that have it (`pairs_together`); what else does the work here gathers the weights of some rows first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zero_inference.kernels.products import ALIGNMENT, LIBRARY, can_fuse
from zero_inference.kernels.quantization import dequantize_reference

MOST_PAIRS = 65535  # of a call of the fused operator: the second dimension of a grid
# Of weights that are gathered at once: enough to fill a device, and little beside the memory that a run keeps free.
GATHERED_BYTES = 128 << 20

TRIAL_ROWS, TRIAL_COLUMNS = 200, 1024
TRIAL_DIFFERENCE = 1e-2  # relative; a result in bfloat16 is rounded by up to 0.4%

# `bias` and what follows it: see `quantized_expert_linear` and `ExpertActivation`.
SCHEMA = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor minimum, int bits, int group_size, int rows, Tensor slot, "
    "Tensor? bias=None, int form=0, int activation=0, float limit=0, float up_offset=0, int tokens=0) -> Tensor"
)
# Outputs of the operator, as `Form` in csrc/quantization/product.cu: the product, f(product), or f(gate) * up with gate's rows first in
# the weight, up's first, or in turn.
PLAIN, ACTIVATED, GATE_FIRST, UP_FIRST, INTERLEAVED = range(5)


class ExpertActivation(NamedTuple):
    """Compute hidden states from the first product: f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), or f(product).

    Attributes:
        form: `ACTIVATED` to `INTERLEAVED`.
        activation: f, a number as in csrc/quantization/product.cu.
        limit: 0 for none.
        computed: the same with PyTorch, of float32 [pairs, rows].
    """

    form: int
    activation: int
    limit: float
    up_offset: float
    computed: Callable[[Tensor], Tensor]


@torch.no_grad()
def expert_linear(
    x: Tensor, weight: Tensor, slot: Tensor, bias: Tensor | None = None, combination: ExpertActivation | None = None
) -> Tensor:
    """Return the product of each pair of a row of `x` and one of the weights, with PyTorch alone.

    Args:
        x: [tokens, columns] in the weights' dtype.
        weight: [slots, rows, columns].
        slot: int64 [pairs], which weight; negative for none. As many for each row of x, one after the other.
        bias: [slots, rows] in x's dtype.
        combination: of the product's rows, which is returned in their place.

    Returns:
        [pairs, rows] in x's dtype, with a combination of two factors half as many; zeros where there is no weight.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _check(x, slot, weight.shape[0], weight.shape[-1])
    if weight.dim() != 3 or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [slots, rows, columns], found {weight.dtype} {list(weight.shape)}")
    one = weight.shape[1] * weight.shape[2] * weight.element_size()
    product = _gathered(x, slot, one, weight.shape[1], lambda which: weight.index_select(0, which))
    return _finished(product, slot, bias, combination)


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
    combination: ExpertActivation | None = None,
    tokens: int = 0,
) -> Tensor:
    """`expert_linear` with weights [rows, columns] in groups.

    On a CUDA device, where `can_fuse` allows it, one kernel on the current stream, with the same bits in every run. It rounds once, what
    it stores; PyTorch rounds product, sum with the bias and combination each for itself.

    Args:
        x: float16, bfloat16 or float32 [tokens, columns]; columns is a multiple of the group size.
        codes: uint8 [slots, rows * columns * bits / 8], each row of it as `zero_inference.kernels.quantization` packs a weight.
        scale, minimum: [slots, rows * columns / group_size], in x's dtype.
        bits: of a code, 8 or 4.
        rows: of each weight.
        slot, bias, combination: as of `expert_linear`.
        tokens: that the pairs belong to, each with no weight twice, so that no more pairs have one weight; 0 for the rows of x.

    Returns:
        As `expert_linear`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit each other.
    """
    _check_groups(x, codes, scale, minimum, bits, group_size, rows, slot)
    fits = 0 < slot.numel() <= MOST_PAIRS and can_fuse(x, codes, scale, minimum, bits, group_size, bias)
    if fits and (bias is None or bias.dtype == x.dtype) and kernel_agrees(x.device, x.dtype, bits, group_size):
        x, slot = x.contiguous(), slot.contiguous()
        if x.data_ptr() % ALIGNMENT == 0 and slot.data_ptr() % ALIGNMENT == 0:
            how = (PLAIN, 0, 0.0, 0.0) if combination is None else combination[:4]
            return torch.ops.zero_inference.linear_groups_indexed(
                x, codes, scale, minimum, bits, group_size, rows, slot, bias, *how, tokens
            )
    product = quantized_expert_linear_reference(x, codes, scale, minimum, bits, group_size, rows, slot)
    return _finished(product, slot, bias, combination)


def pairs_together(pairs: int, weights: int) -> int:
    """How many rows with the same one of `weights` weights the kernel multiplies at once, at most: it reads that weight once for them.
    As `product_pairs` in csrc/launch_sizes.cuh."""
    return 1 if 4 * pairs <= weights else 8 if pairs <= 4 * weights else 16


@functools.cache
@torch.no_grad()
def kernel_agrees(device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> bool:
    """Whether the fused operator gives what PyTorch does on this device, in a trial of some small weights; the host waits for it once."""
    rows, columns, draw = TRIAL_ROWS, TRIAL_COLUMNS, torch.Generator(device).manual_seed(0)
    codes = torch.randint(0, 256, (2, rows * columns * bits // 8), dtype=torch.uint8, device=device, generator=draw)
    scale, minimum = (
        torch.rand(2, rows * columns // group_size, device=device, generator=draw).sub_(0.5).to(dtype) for _ in range(2)
    )
    x = torch.randn(5, columns, device=device, generator=draw).to(dtype)
    slot = torch.tensor([1, -1, 0, 1, 1], device=device)  # three that are multiplied together
    found, expected = (
        product(x, codes, scale, minimum, bits, group_size, rows, slot).float()
        for product in (torch.ops.zero_inference.linear_groups_indexed, quantized_expert_linear_reference)
    )
    difference = (found - expected).norm(dim=1)
    agrees = bool((difference <= TRIAL_DIFFERENCE * expected.norm(dim=1)).all())
    if not agrees:
        warnings.warn(
            f"the kernel of experts' products differs from PyTorch on {device} ({bits} bits, groups of {group_size}, {dtype}): experts are "
            "multiplied without it, which is slower",
            stacklevel=2,
        )
    return agrees


@torch.no_grad()
def quantized_expert_linear_reference(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, slot: Tensor
) -> Tensor:
    """What `quantized_expert_linear` has to give without bias and combination, with PyTorch alone on any device: the weights of some
    rows are gathered and dequantized at a time. Arguments, result and errors as there."""
    _check_groups(x, codes, scale, minimum, bits, group_size, rows, slot)
    columns = x.shape[1]

    def weights(which: Tensor) -> Tensor:
        parts = (part.index_select(0, which).view(-1) for part in (codes, scale, minimum))
        plain = x.new_empty(which.numel(), rows, columns)
        dequantize_reference(*parts, bits, group_size, plain)
        return plain

    return _gathered(x, slot, rows * columns * x.element_size(), rows, weights)


def _gathered(x: Tensor, slot: Tensor, weight_bytes: int, rows: int, weights) -> Tensor:
    """A few pairs at a time; no value of `slot` is read by the host, which would have to wait for it."""
    x = x.repeat_interleave(slot.numel() // max(1, x.shape[0]), 0)
    out = x.new_empty(x.shape[0], rows)
    step = max(1, GATHERED_BYTES // max(1, weight_bytes))
    for first in range(0, x.shape[0], step):
        which = slot[first : first + step]
        product = torch.bmm(weights(which.clamp(min=0)), x[first : first + step].unsqueeze(-1)).squeeze(-1)
        torch.where((which >= 0).unsqueeze(-1), product, torch.zeros_like(product), out=out[first : first + step])
    return out


def _finished(product: Tensor, slot: Tensor, bias: Tensor | None, combination: ExpertActivation | None) -> Tensor:
    """Return what is made of `product` [pairs, rows], where a slot of -1 has no bias."""
    if bias is not None:
        product = product + torch.where((slot >= 0).unsqueeze(-1), bias[slot.clamp(min=0)], 0)
    return product if combination is None else combination.computed(product.float()).to(product.dtype)


def _check(x: Tensor, slot: Tensor, slots: int, columns: int) -> None:
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [tokens, {columns}], found {list(x.shape)}")
    tokens = x.shape[0]
    whole = slot.dim() == 1 and (slot.numel() % tokens == 0 if tokens else slot.numel() == 0)
    if slot.dtype != torch.int64 or not whole or slot.device != x.device:
        raise ValueError(
            f"slot must be int64 [{tokens} x k] on {x.device}, found {slot.dtype} {list(slot.shape)} on {slot.device}"
        )
    if slots < 1:
        raise ValueError("there must be one weight at least")


def _check_groups(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, slot: Tensor
) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    columns = x.shape[-1]
    if columns % group_size:
        raise ValueError(f"the rows of the weights must be whole groups of {group_size}, not {columns} elements")
    _check(x, slot, codes.shape[0], columns)
    groups = rows * (columns // group_size)
    for name, tensor, dtype, numel in (
        ("codes", codes, torch.uint8, rows * columns * bits // 8),
        ("scale", scale, x.dtype, groups),
        ("minimum", minimum, x.dtype, groups),
    ):
        shape = [codes.shape[0], numel]
        if (
            tensor.dtype != dtype
            or list(tensor.shape) != shape
            or tensor.device != x.device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be {dtype} {shape}, contiguous, on {x.device}, for weights of {rows} x {columns}; found "
                f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            )


def _without_kernel(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    slot: Tensor,
    bias: Tensor | None = None,
    form: int = PLAIN,
    *_: float,
) -> Tensor:
    """Compute the operator in PyTorch, where no kernel is registered."""
    if form != PLAIN:
        raise NotImplementedError("a combination is computed by a CUDA device alone: use linear_groups_indexed")
    product = quantized_expert_linear_reference(x, codes, scale, minimum, bits, group_size, rows, slot)
    return _finished(product, slot, bias, None)


def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    slot: Tensor,
    bias: Tensor | None = None,
    form: int = PLAIN,
    *_: float,
) -> Tensor:
    return x.new_empty(slot.shape[0], rows // 2 if form >= GATE_FIRST else rows)


LIBRARY.define("linear_groups_indexed" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("linear_groups_indexed", _without_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("zero_inference::linear_groups_indexed", _fake, lib=LIBRARY)
