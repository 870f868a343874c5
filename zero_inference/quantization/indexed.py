"""Products of single rows, each with a weight of its own out of several that lie one behind the other: a mixture's experts.

    out[p, n] = sum_k x[p, k] * weight[slot[p], n, k],   and zeros where slot[p] is negative

Nothing is read for a row without a weight, as far as the fused operator (csrc/quantization/product.cu) goes. It reads a weight
once for several rows that have it (`pairs_together`); what else does the work here gathers the weights of some rows first.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from zero_inference.quantization.groups import dequantize_reference
from zero_inference.quantization.products import ALIGNMENT, LIBRARY, can_fuse

MOST_PAIRS = 65535  # of a call of the fused operator: the second dimension of a grid
# Of weights that are gathered at once: enough to fill a device, and little beside the memory that a run keeps free.
GATHERED_BYTES = 128 << 20

TRIAL_ROWS, TRIAL_COLUMNS = 200, 1024
TRIAL_DIFFERENCE = 1e-2  # relative; a result in bfloat16 is rounded by up to 0.4%

SCHEMA = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor minimum, int bits, int group_size, int rows, Tensor slot) -> Tensor"
)


@torch.no_grad()
def linear_indexed(x: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
    """Each row of `x` times one of the weights, with PyTorch alone.

    Args:
        x: [pairs, columns] in the weights' dtype.
        weight: [slots, rows, columns].
        slot: int64 [pairs], which weight; negative for none.

    Returns:
        [pairs, rows] in x's dtype; zeros where there is no weight.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _check(x, slot, weight.shape[0], weight.shape[-1])
    if weight.dim() != 3 or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [slots, rows, columns], found {weight.dtype} {list(weight.shape)}")
    one = weight.shape[1] * weight.shape[2] * weight.element_size()
    return _gathered(x, slot, one, weight.shape[1], lambda which: weight.index_select(0, which))


def linear_groups_indexed(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, slot: Tensor
) -> Tensor:
    """`linear_indexed` with weights [rows, columns] in groups.

    On a CUDA device, where `can_fuse` allows it, one kernel on the current stream, with the same bits in every run.

    Args:
        x: float16, bfloat16 or float32 [pairs, columns]; columns is a multiple of the group size.
        codes: uint8 [slots, rows * columns * bits / 8], each row of it as `zero_inference.quantization.groups` packs a weight.
        scale, minimum: [slots, rows * columns / group_size], in x's dtype.
        bits: of a code, 8 or 4.
        rows: of each weight.
        slot: int64 [pairs], which weight; negative for none.

    Returns:
        [pairs, rows] in x's dtype; zeros where there is no weight.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit each other.
    """
    _check_groups(x, codes, scale, minimum, bits, group_size, rows, slot)
    fits = 0 < x.shape[0] <= MOST_PAIRS and can_fuse(x, codes, scale, minimum, bits, group_size)
    if fits and kernel_agrees(x.device, x.dtype, bits, group_size):
        x, slot = x.contiguous(), slot.contiguous()
        if x.data_ptr() % ALIGNMENT == 0 and slot.data_ptr() % ALIGNMENT == 0:
            return torch.ops.zero_inference.linear_groups_indexed(
                x, codes, scale, minimum, bits, group_size, rows, slot
            )
    return linear_groups_indexed_reference(x, codes, scale, minimum, bits, group_size, rows, slot)


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
        for product in (torch.ops.zero_inference.linear_groups_indexed, linear_groups_indexed_reference)
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
def linear_groups_indexed_reference(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, slot: Tensor
) -> Tensor:
    """What `linear_groups_indexed` has to give, with PyTorch alone on any device: the weights of some rows are gathered and
    dequantized at a time. Arguments, result and errors as there."""
    _check_groups(x, codes, scale, minimum, bits, group_size, rows, slot)
    columns = x.shape[1]

    def weights(which: Tensor) -> Tensor:
        parts = (part.index_select(0, which).view(-1) for part in (codes, scale, minimum))
        plain = x.new_empty(which.numel(), rows, columns)
        dequantize_reference(*parts, bits, group_size, plain)
        return plain

    return _gathered(x, slot, rows * columns * x.element_size(), rows, weights)


def _gathered(x: Tensor, slot: Tensor, weight_bytes: int, rows: int, weights) -> Tensor:
    """A few rows at a time; no value of `slot` is read by the host, which would have to wait for it."""
    out = x.new_empty(x.shape[0], rows)
    step = max(1, GATHERED_BYTES // max(1, weight_bytes))
    for first in range(0, x.shape[0], step):
        which = slot[first : first + step]
        product = torch.bmm(weights(which.clamp(min=0)), x[first : first + step].unsqueeze(-1)).squeeze(-1)
        torch.where((which >= 0).unsqueeze(-1), product, torch.zeros_like(product), out=out[first : first + step])
    return out


def _check(x: Tensor, slot: Tensor, slots: int, columns: int) -> None:
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [pairs, {columns}], found {list(x.shape)}")
    if slot.dtype != torch.int64 or list(slot.shape) != [x.shape[0]] or slot.device != x.device:
        raise ValueError(
            f"slot must be int64 [{x.shape[0]}] on {x.device}, found {slot.dtype} {list(slot.shape)} on {slot.device}"
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


def _fake(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, slot: Tensor
) -> Tensor:
    return x.new_empty(x.shape[0], rows)


LIBRARY.define("linear_groups_indexed" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("linear_groups_indexed", linear_groups_indexed_reference, "CompositeExplicitAutograd")
torch.library.register_fake("zero_inference::linear_groups_indexed", _fake, lib=LIBRARY)
