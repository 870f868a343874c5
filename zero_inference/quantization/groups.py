"""int8 and int4 weights in groups: the packed form that crosses the link, and the way back to a plain weight.

A group is `group_size` consecutive elements of the flattened weight. It is stored as unsigned codes with a scale and a
minimum in the weight's own dtype, and element i becomes `code[i] * scale + minimum`, computed in float32 and rounded once.
Codes are chosen against scale and minimum as stored, so that rounding those costs no accuracy that other codes could save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero_inference.runtime.extension import load_extension

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHUNK_NUMEL = 1 << 19  # elements worked on at once, about 40 bytes each: near the caches on a CPU,
CUDA_CHUNK_NUMEL = 1 << 22  # and on a device enough to hide the launches


@dataclass(frozen=True)
class GroupQuantization:
    """Asymmetric quantization in groups.

    Attributes:
        bits: of a code, 8 or 4.
        group_size: elements with one scale and minimum; even for 4 bits.
        dtype: of the weights that are quantized, None for any. A model's own dtype here leaves alone what its family keeps in
            float32, which is what 16 bits are too few for.
    """

    bits: int
    group_size: int
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_scheme(self.bits, self.group_size)

    @property
    def largest_code(self) -> int:
        return (1 << self.bits) - 1

    def can_quantize(self, weight: torch.Tensor) -> bool:
        """Whether `weight` is a matrix (or fused experts, 3-D) of a dtype to quantize, with rows of whole groups."""
        return self.is_for(weight) and weight.dim() >= 2 and weight.shape[-1] % self.group_size == 0

    def is_for(self, weight: torch.Tensor) -> bool:
        """Whether `weight` has a dtype to quantize: `dtype`, or float16, bfloat16 or float32 where that is None."""
        return weight.dtype in (DTYPES if self.dtype is None else (self.dtype,))

    def packed_bytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` elements.

        Raises:
            ValueError: `numel` is not a multiple of the group size.
        """
        if numel % self.group_size:
            raise ValueError(f"{numel} elements are not whole groups of {self.group_size}")
        return numel * self.bits // 8

    def stored_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of codes, scales and minima of a weight of `numel` elements in `dtype`: what crosses the link."""
        return self.packed_bytes(numel) + 2 * (numel // self.group_size) * dtype.itemsize


@torch.no_grad()
def quantize(weight: torch.Tensor, scheme: GroupQuantization) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack `weight`, on its device, with less than 256 MiB of memory beside weight and result.

    Each group is tried twice, with scale and minimum from its extremes and from a least-squares fit to the codes that those
    gave, and keeps the try with the smaller squared error. A weight that is not contiguous is copied first. With the compiled
    extension a CUDA device does it in one kernel (csrc/quantization/quantize.cu), which adds in another order: where both tries
    are as good as each other, it may keep the other one.

    Args:
        weight: float16, bfloat16 or float32, at least 2-D, its last dimension a multiple of the group size.

    Returns:
        codes uint8 [numel * bits / 8] (4 bits: element 2i in the low nibble, 2i+1 in the high), then scale and minimum
        [numel / group_size] in the weight's dtype. A constant group has scale 0 and is kept exactly.

    Raises:
        ValueError: the weight cannot be quantized so, or holds NaN, an infinity, or values whose range its dtype cannot hold.
    """
    if not scheme.can_quantize(weight):
        raise ValueError(
            f"a weight of {weight.dtype} {list(weight.shape)} cannot be quantized: needed is float16, bfloat16 or "
            f"float32 with at least 2 dimensions, the last a multiple of group size {scheme.group_size}"
        )
    size = scheme.group_size
    rows = weight.detach().contiguous().view(-1, size)
    codes = torch.empty(scheme.packed_bytes(weight.numel()), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows.shape[0], dtype=weight.dtype, device=weight.device)
    minimum = torch.empty_like(scale)
    if weight.is_cuda and load_extension():
        refused = torch.zeros(1, dtype=torch.int32, device=weight.device)
        torch.ops.zero_inference.quantize_groups(rows, scheme.bits, size, codes, scale, minimum, refused)
        _refuse(bool(refused), weight.dtype)
    else:
        _quantize_in_chunks(rows, scheme, codes, scale, minimum)
    return codes, scale, minimum


def _quantize_in_chunks(
    rows: torch.Tensor, scheme: GroupQuantization, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
) -> None:
    """Rows are groups; fills what `quantize` returns, with PyTorch, on any device."""
    size = scheme.group_size
    for start, stop in _chunks(rows.shape[0], size, rows.device):
        chunk = _quantize_rows(rows[start:stop], scheme.largest_code)
        codes[scheme.packed_bytes(start * size) : scheme.packed_bytes(stop * size)] = _pack(chunk.codes, scheme.bits)
        scale[start:stop] = chunk.scale.view(-1)
        minimum[start:stop] = chunk.minimum.view(-1)


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int, group_size: int, out: torch.Tensor
) -> None:
    """Restore the weight in `out`: one kernel on the current stream where a CUDA device and the compiled extension are there, else
    `dequantize_reference`, which gives the same bits; arguments are as there."""
    if out.is_cuda and load_extension():
        torch.ops.zero_inference.dequantize_groups(codes, scale, minimum, bits, group_size, out)
        return
    dequantize_reference(codes, scale, minimum, bits, group_size, out)


@torch.no_grad()
def dequantize_reference(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int, group_size: int, out: torch.Tensor
) -> None:
    """Restore the weight in `out` with PyTorch, on any device, in chunks.

    Product and sum are rounded to float32 one after the other, then the sum once to `out.dtype`, as in
    csrc/quantization/dequantize.cu.

    Args:
        codes: uint8 [out.numel() * bits / 8].
        scale, minimum: [out.numel() / group_size], in `out.dtype`.
        out: float16, bfloat16 or float32, any shape, contiguous; overwritten.

    Raises:
        ValueError: dtype, size, device or strides of an argument do not fit; says which were needed.
    """
    _check_dequantize(codes, scale, minimum, bits, group_size, out)
    rows = out.detach().view(-1, group_size)
    packed = codes.view(-1, group_size * bits // 8)
    for start, stop in _chunks(rows.shape[0], group_size, out.device):
        values = _codes_of(packed[start:stop], bits)
        values.mul_(scale[start:stop, None].float()).add_(minimum[start:stop, None].float())
        rows[start:stop] = values


class _Groups(NamedTuple):
    codes: torch.Tensor  # float32 [groups, group_size], whole numbers
    scale: torch.Tensor  # stored dtype [groups, 1]
    minimum: torch.Tensor  # stored dtype [groups, 1]
    error: torch.Tensor  # float32 [groups, 1], squared, of the weight as it will be restored


def _quantize_rows(rows: torch.Tensor, largest: int) -> _Groups:
    """Groups as rows [groups, group_size] of the stored dtype."""
    values = rows.float()
    low, high = values.aminmax(dim=1, keepdim=True)
    extremes = _encode(values, _stored_scale((high - low) / largest, rows.dtype), low.to(rows.dtype), largest)
    top = (extremes.scale.float() * largest + extremes.minimum.float()).to(rows.dtype)
    _refuse(not bool(torch.isfinite(top).all()), rows.dtype)
    fitted = _encode(values, *_fit(values, extremes.codes, rows.dtype), largest)
    better = fitted.error < extremes.error  # false for NaN
    return _Groups(*(torch.where(better, new, old) for new, old in zip(fitted, extremes)))


def _refuse(refused: bool, dtype: torch.dtype) -> None:
    if refused:
        raise ValueError(f"the weight holds NaN, an infinity, or a group whose range {dtype} cannot hold")


def _stored_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to `dtype`; below float16's normal numbers rounded up, where nearest could halve a scale or make it 0."""
    if dtype == torch.float16:
        scale = torch.where(scale < 2.0**-14, (scale * 2.0**24).ceil() * 2.0**-24, scale)
    return scale.to(dtype)


def _encode(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, largest: int) -> _Groups:
    """Nearest codes for a stored scale and minimum, and what they cost."""
    scale32, minimum32 = scale.float(), minimum.float()
    codes = (values - minimum32).div_(torch.where(scale32 == 0, 1, scale32)).round_().clamp_(0, largest)
    restored = (codes * scale32).add_(minimum32).to(scale.dtype).float()
    return _Groups(codes, scale, minimum, restored.sub_(values).square_().sum(dim=1, keepdim=True))


def _fit(values: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares scale and minimum for given codes; the minimum is fitted to the scale as rounded. NaN where codes agree."""
    mean_code, mean_value = codes.mean(dim=1, keepdim=True), values.mean(dim=1, keepdim=True)
    centered = codes - mean_code
    covariance = (centered * (values - mean_value)).sum(dim=1, keepdim=True)
    scale = _stored_scale(covariance / centered.square_().sum(dim=1, keepdim=True), dtype)
    return scale, (mean_value - scale.float() * mean_code).to(dtype)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers in float32 [groups, group_size] to bytes [groups * group_size * bits / 8]."""
    codes = codes.to(torch.uint8)
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes.reshape(-1)


def _codes_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [groups, group_size * bits / 8] to whole numbers in float32 [groups, group_size]."""
    if bits == 8:
        return packed.float()
    values = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float32, device=packed.device)
    values[:, 0::2] = packed & 15
    values[:, 1::2] = packed >> 4
    return values


def _chunks(groups: int, group_size: int, device: torch.device):
    """(start, stop) of consecutive groups, as many at a time as suit `device`."""
    step = max(1, (CUDA_CHUNK_NUMEL if device.type == "cuda" else CHUNK_NUMEL) // group_size)
    for start in range(0, groups, step):
        yield start, min(groups, start + step)


def _check_scheme(bits: int, group_size: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    if group_size < 1 or (bits == 4 and group_size % 2):
        raise ValueError(f"the group size must be positive, and even for 4 bits, not {group_size} for {bits} bits")


def _check_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int, group_size: int, out: torch.Tensor
) -> None:
    _check_scheme(bits, group_size)
    if out.dtype not in DTYPES:
        raise ValueError(f"out must be float16, bfloat16 or float32, not {out.dtype}")
    if out.numel() % group_size:
        raise ValueError(f"out must hold whole groups of {group_size}, not {out.numel()} elements")
    groups = out.numel() // group_size
    for name, tensor, dtype, numel in (
        ("out", out, out.dtype, out.numel()),
        ("codes", codes, torch.uint8, out.numel() * bits // 8),
        ("scale", scale, out.dtype, groups),
        ("minimum", minimum, out.dtype, groups),
    ):
        if (
            tensor.dtype != dtype
            or tensor.numel() != numel
            or tensor.device != out.device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be {dtype}, {numel} elements, contiguous, on {out.device}; found {tensor.dtype}, "
                f"{list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            )
