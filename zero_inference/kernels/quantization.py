"""Quantization of weights to int8 and int4 in groups, and dequantization.

A group is `group_size` consecutive elements of the flattened weight, stored as unsigned codes with a scale and a minimum in the weight's
dtype. Element i is `code[i] * scale + minimum`, computed in float32 and rounded once. Codes are chosen for scale and minimum as stored, so
that rounding those costs little accuracy.

Scale and minimum are those with the least squared error of several tries, without calibration data: the group's extremes; a least-squares
fit to the codes that these give; for 4 bits also the best of nine fits to a range clipped at both ends, refitted `REFITS` times. Random
normal weights in groups of 32 then have a relative error of 6.99%; extremes alone have 7.85%, fitted once 7.50%, and 400 clipped ranges
6.93% (benchmarks/results/cpu/int4_quality.md). csrc/cpu/quantize_lanes.h and csrc/quantization/quantize.cu compute the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_inference.errors import UsageError
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.formats import (
    CHUNK_NUMEL,
    CUDA_CHUNK_NUMEL,
    Codes,
    QuantizedWeight,
    WeightFormat,
    dequantize_reference,
)
from zero_inference.utils.format import nearest_divisor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# narrower matrices keep their dtype: low ranks and convolution kernels, not large projections
MIN_QUANTIZED_COLUMNS = 32
CLIPPED = (0.0, 0.03, 0.06)  # shares of a group's range to clip at either end, in all pairs; a step of 4 bits is 0.067
NEIGHBOURS = {4: 1, 8: 2}  # by bits: neighbouring codes to try where DeepSpeed rounds quotients
REFITS = 2  # of the best try; a third lowers the error by less than 0.1%
# Arguments of operators that read a weight: its tensors and format. The dtype of `offset` says whether these are minima or zero points.
OPERANDS = "Tensor codes, Tensor? scale, Tensor? offset, Tensor? row_scale, int codes_kind, int group_size, int group_rows, bool divides"


@dataclass(frozen=True)
class GroupQuantization:
    """Scheme of asymmetric quantization in groups.

    Attributes:
        bits: 8 or 4.
        group_size: elements that share a scale and a minimum; even for 4 bits.
        dtype: dtype of the weights to quantize, None for any. The model's own dtype skips weights that its family keeps in float32.
    """

    bits: int
    group_size: int
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_scheme(self.bits, self.group_size)

    def can_quantize(self, weight: Tensor) -> bool:
        """Return whether `weight` is a matrix (or fused experts, 3-D) of a dtype to quantize, with rows of whole groups."""
        return self.is_for(weight) and weight.dim() >= 2 and weight.shape[-1] % self.group_size == 0

    def is_for(self, weight: Tensor) -> bool:
        """Return whether `weight` has `dtype`, or float16, bfloat16 or float32 if that is None."""
        return weight.dtype in (DTYPES if self.dtype is None else (self.dtype,))

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of `numel` elements; raise ValueError unless these are whole groups."""
        if numel % self.group_size:
            raise ValueError(f"{numel} elements are not whole groups of {self.group_size}")
        return numel * self.bits // 8

    def stored_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of codes, scales and minima of a weight of `numel` elements in `dtype`."""
        return self.packed_bytes(numel) + 2 * (numel // self.group_size) * dtype.itemsize

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """Return the format of a quantized weight of `dtype`."""
        codes = Codes.INT4 if self.bits == 4 else Codes.INT8
        return WeightFormat(codes, self.group_size, scale_dtype=dtype, minima=True)

    def as_weight(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> QuantizedWeight:
        """Return the result of `quantize` as one weight."""
        return QuantizedWeight(self.weight_format(scale.dtype), codes, scale, minimum)


@torch.no_grad()
def quantize(weight: Tensor, scheme: GroupQuantization, divides: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `weight` on its device, with less than 256 MiB of temporary memory, and a copy if it is not contiguous.

    With the compiled extension a CUDA device uses one kernel (csrc/quantization/quantize.cu). It sums in another order, so among equally
    good tries it may choose another. On a CPU, `zero_inference.cpu.products.quantize` is several times as fast.

    Args:
        weight: float16, bfloat16 or float32, at least 2-D, its last dimension a multiple of the group size.
        divides: store the divisor of codes instead of the scale, as DeepSpeed does: code / stored + minimum, each rounded to the weight's
            dtype. Infinite if a group is constant.

    Returns:
        codes uint8 [numel * bits / 8] (4 bits: element 2i in the low nibble, 2i+1 in the high), scale and minimum [numel / group_size] in
        the weight's dtype. A constant group has scale 0 and is exact.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, or a range that the dtype cannot hold.
    """
    rows, codes, scale, minimum = empty_groups(weight, scheme)
    if weight.is_cuda and load_extension():
        refused = torch.zeros(1, dtype=torch.int32, device=weight.device)
        torch.ops.zero_inference.quantize_groups(
            rows, scheme.bits, scheme.group_size, divides, codes, scale, minimum, refused
        )
        refuse_range(bool(refused), weight.dtype)
        return codes, scale, minimum
    size = scheme.group_size
    for start, stop in _chunks(rows.shape[0], size, rows.device):
        chunk = _quantize_rows(rows[start:stop], scheme.bits, divides)
        codes[scheme.packed_bytes(start * size) : scheme.packed_bytes(stop * size)] = _pack(chunk.codes, scheme.bits)
        scale[start:stop], minimum[start:stop] = chunk.scale.view(-1), chunk.minimum.view(-1)
    return codes, scale, minimum


def empty_groups(weight: Tensor, scheme: GroupQuantization) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `weight` as [groups, group_size], with empty codes, scale and minimum; raise ValueError if it cannot be quantized."""
    if not scheme.can_quantize(weight):
        raise ValueError(
            f"a weight of {weight.dtype} {list(weight.shape)} cannot be quantized: needed is float16, bfloat16 or "
            f"float32 with at least 2 dimensions, the last a multiple of group size {scheme.group_size}"
        )
    rows = weight.detach().contiguous().view(-1, scheme.group_size)
    codes = torch.empty(scheme.packed_bytes(weight.numel()), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows.shape[0], dtype=weight.dtype, device=weight.device)
    return rows, codes, scale, torch.empty_like(scale)


@torch.no_grad()
def dequantize(weight: QuantizedWeight, out: Tensor) -> None:
    """Write the values of `weight` to `out` [..., N, K], contiguous, float16, bfloat16 or float32.

    This is one kernel on the current stream of a CUDA device with the compiled extension, otherwise `formats.dequantize_reference`, which
    gives the same bits. Raises ValueError if tensors do not match; the kernel RuntimeError.
    """
    if out.is_cuda and load_extension():
        torch.ops.zero_inference.dequantize_groups(*operands(weight), out)
        return
    if out.dtype not in DTYPES or not out.is_contiguous():
        raise ValueError(f"out must be float16, bfloat16 or float32, contiguous; found {describe(out)}")
    check_packed(weight, math.prod(out.shape[:-1]), out.shape[-1], out.device)
    if out.numel():
        dequantize_reference(weight, out)


def operands(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Return `weight` as the arguments of our CUDA operators, `OPERANDS`."""
    form = weight.format
    tensors = weight.codes, weight.scales, weight.offsets, weight.row_scales
    return *tensors, int(form.codes), form.group_size, form.group_rows, form.divides


def weight_of(
    codes: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    row_scale: Tensor | None,
    codes_kind: int,
    group_size: int,
    group_rows: int,
    divides: bool,
) -> QuantizedWeight:
    """Return the weight whose `operands` the arguments are."""
    form = WeightFormat(
        Codes(codes_kind),
        group_size,
        group_rows,
        torch.float32 if scale is None else scale.dtype,
        minima=offset is not None and offset.dtype != torch.uint8,
        zero_points=offset is not None and offset.dtype == torch.uint8,
        row_scales=row_scale is not None,
        divides=divides,
    )
    return QuantizedWeight(form, codes, scale, offset, row_scale)


class _Groups(NamedTuple):
    codes: Tensor  # float32 [groups, group_size], whole numbers
    scale: Tensor  # weight's dtype [groups, 1]
    minimum: Tensor  # weight's dtype [groups, 1]
    error: Tensor  # float32 [groups, 1], squared error of the dequantized weight


class _Fit(NamedTuple):
    """Least-squares step and offset for given codes, float32 [groups, 1].

    gain: by how much they reduce the sum of squares of the centered values; 0 if all codes of a group are equal.
    """

    step: Tensor
    mean_code: Tensor
    gain: Tensor


def _quantize_rows(rows: Tensor, bits: int, divides: bool) -> _Groups:
    """Quantize rows [groups, group_size] of the weight's dtype."""
    values, dtype, largest = rows.float(), rows.dtype, (1 << bits) - 1
    low, high = values.aminmax(dim=1, keepdim=True)
    extent = high - low
    mean = values.mean(dim=1, keepdim=True)
    centered = values - mean

    def encode(scale: Tensor, minimum: Tensor, neighbours: int = 0) -> _Groups:
        return _encode(values, scale, minimum, largest, divides, neighbours)

    def encode_fit(fit: _Fit) -> _Groups:
        scale = _stored_scale(fit.step, dtype, divides)
        offset = fit.mean_code / scale.float() if divides else fit.mean_code * scale.float()
        return encode(scale, (mean - offset).to(dtype))

    if divides:  # DeepSpeed's formula, in the weight's dtype
        scale = _finite_factor((1 / extent.to(dtype)) * largest, extent)
    else:
        scale = _stored_scale(extent / largest, dtype, divides)
    neighbours = NEIGHBOURS[bits] if divides else 0
    best = encode(scale, low.to(dtype), neighbours)
    # DeepSpeed's largest quotient, or the largest dequantized value
    top = extent.to(dtype) if divides else (best.scale.float() * largest + best.minimum.float()).to(dtype)
    refuse_range(not bool(torch.isfinite(top).all()), dtype)
    fit = _fit(centered, best.codes)
    best = _better(best, encode_fit(fit))
    if bits == 4:
        for below, above in product(CLIPPED, CLIPPED):
            if below or above:
                inverse = largest / (extent * (1 - below - above))
                fit = _refit(fit, centered, inverse, (mean - low - extent * below) * inverse, largest)
        for _ in range(REFITS):
            fit = _refit(fit, centered, 1 / fit.step, fit.mean_code, largest)
        best = _better(best, encode_fit(fit))
    return encode(best.scale, best.minimum, neighbours) if neighbours else best


def refuse_range(refused: bool, dtype: torch.dtype) -> None:
    """Raise ValueError if `refused`."""
    if refused:
        raise ValueError(f"the weight holds NaN, an infinity, or a group whose range {dtype} cannot hold")


def _stored_scale(step: Tensor, dtype: torch.dtype, divides: bool) -> Tensor:
    """Return `step` rounded to `dtype`, or for `divides` its inverse, finite unless the step is 0.

    Below float16's normal numbers steps are rounded up: rounding to nearest could halve a step or make it 0.
    """
    if divides:
        return _finite_factor((1 / step).to(dtype), step)
    if dtype == torch.float16:
        step = torch.where(step < 2.0**-14, (step * 2.0**24).ceil() * 2.0**-24, step)
    return step.to(dtype)


def _finite_factor(factor: Tensor, extent: Tensor) -> Tensor:
    return torch.where((extent > 0) & factor.isinf(), torch.finfo(factor.dtype).max, factor)


def _encode(values: Tensor, scale: Tensor, minimum: Tensor, largest: int, divides: bool, neighbours: int) -> _Groups:
    """Return the nearest codes for a stored scale and minimum, with their error."""
    scale32, minimum32 = scale.float(), minimum.float()
    shifted = values - minimum32

    def differences(codes: Tensor) -> Tensor:
        restored = (codes / scale32).to(scale.dtype).float() if divides else codes * scale32
        return restored.add_(minimum32).to(scale.dtype).float().sub_(values)

    if divides:
        codes = shifted.mul_(scale32).nan_to_num_(0.0).round_().clamp_(0, largest)  # 0 * inf in constant groups
    else:
        codes = shifted.div_(torch.where(scale32 == 0, 1, scale32)).round_().clamp_(0, largest)
    difference = differences(codes)
    error = difference.square()
    for _ in range(neighbours):  # the rounded quotient may be nearer for a neighbour
        other = (codes + torch.where(difference < 0, 1, -1)).clamp_(0, largest)
        difference = differences(other)
        better = difference.square() < error
        codes, error = torch.where(better, other, codes), torch.where(better, difference.square(), error)
    return _Groups(codes, scale, minimum, error.sum(dim=1, keepdim=True))


def _better(old: _Groups, new: _Groups) -> _Groups:
    better = new.error < old.error  # false for NaN
    return _Groups(*(torch.where(better, *pair) for pair in zip(new, old)))


def _fit(centered: Tensor, codes: Tensor) -> _Fit:
    """Regress the values minus their mean, [groups, group_size], on their codes."""
    mean_code = codes.mean(dim=1, keepdim=True)
    covariance = (codes * centered).sum(dim=1, keepdim=True)
    variance = codes.square().sum(dim=1, keepdim=True) - codes.sum(dim=1, keepdim=True) * mean_code
    step = covariance / variance
    return _Fit(step, mean_code, torch.where(variance > 0, covariance * step, 0))


def _refit(best: _Fit, centered: Tensor, inverse: Tensor, shift: Tensor, largest: int) -> _Fit:
    """Return, for each group, the better of `best` and the fit to the rounded codes `inverse * centered + shift`."""
    codes = (centered * inverse).add_(shift).nan_to_num_(0.0).round_().clamp_(0, largest)
    found = _fit(centered, codes)
    better = found.gain > best.gain
    return _Fit(*(torch.where(better, *pair) for pair in zip(found, best)))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack float32 codes [groups, group_size] into uint8 [groups * group_size * bits / 8]."""
    codes = codes.to(torch.uint8)
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes.reshape(-1)


def _chunks(groups: int, group_size: int, device: torch.device):
    """Yield (start, stop) of consecutive groups, as many as `device` should process at once."""
    step = max(1, (CUDA_CHUNK_NUMEL if device.type == "cuda" else CHUNK_NUMEL) // group_size)
    for start in range(0, groups, step):
        yield start, min(groups, start + step)


def _check_scheme(bits: int, group_size: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    if group_size < 1 or (bits == 4 and group_size % 2):
        raise ValueError(f"the group size must be positive, and even for 4 bits, not {group_size} for {bits} bits")


def check_packed(
    weight: QuantizedWeight, rows: int, columns: int, device: torch.device, weights: int | None = None
) -> None:
    """Raise ValueError unless the tensors of `weight` are those of a weight [rows, columns], contiguous, on `device`.

    Args:
        weights: number of such weights, the first dimension of the tensors; None: one weight, in tensors of any shape.
    """
    form, found = weight.format, weight.tensors
    if columns * form.bits % 8 or (weights is not None and rows % form.group_rows):
        raise ValueError(f"a weight of {rows} x {columns} is not whole bytes of codes and whole {form.group_rows} rows")
    expected = form.tensors((rows, columns))
    for name in expected | found:
        if name not in found or name not in expected:
            raise ValueError(f"{name} {'are missing' if name in expected else 'have no place'} in a weight of {form}")
        tensor, (shape, dtype) = found[name], expected[name]
        numel = math.prod(shape) * (1 if weights is None else weights)
        fits = tensor.numel() == numel and (weights is None or tensor.shape[:1] == (weights,))
        if tensor.dtype != dtype or not fits or tensor.device != device or not tensor.is_contiguous():
            size = f", {numel} elements" if weights is None else f" {[weights, math.prod(shape)]}"
            raise ValueError(
                f"{name} must be {dtype}{size}, contiguous, on {device}, for a weight of {rows} x {columns}; found {describe(tensor)}"
            )


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"


def group_size_refusal(group_size: int, name: str, shape: tuple[int, ...], packs: int = 1) -> UsageError:
    """Return the error for a group size that does not divide the last dimension of weight `name`.

    Args:
        packs: elements that share a word; if it does not divide the last dimension, no group size is suggested.
    """
    last = shape[-1]
    fitting = nearest_divisor(group_size, last, (256, 128, 64, 32, 16, 8), packs)
    change = (
        f"use --quant-group-size {fitting} or another divisor"
        if fitting
        else "no group size fits this model, drop --quant-bits"
    )
    return UsageError(
        f"--quant-group-size {group_size}: does not divide {name} of shape {list(shape)} along its last dimension; {change}."
    )
