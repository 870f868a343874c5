"""Formats of quantized weights: codes, and scales to dequantize them.

    value = code * scale + minimum                      (our own int8 and int4, kernels/quantization.py)
    value = (number(code) - zero_point) * scale         (published checkpoints, models/checkpoint_formats)

A weight has the shape [..., N, K] (out, in). `QuantizedWeight` holds its tensors, `WeightFormat` describes them. The values of
published formats are exact: they are computed in float32 in the order of the format's definition, and rounded once to the model's dtype.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Codes(IntEnum):
    """Number formats of codes, with the values of `enum class Codes` in csrc/."""

    INT4 = 0  # 0 to 15; the even column of a pair has the low nibble
    INT8 = 1  # 0 to 255
    E2M1 = 2  # 4 bits: +-0, 0.5, 1, 1.5, 2, 3, 4, 6; nibbles as in INT4
    E4M3 = 3  # 8 bits: float8_e4m3fn, up to 448

    @property
    def bits(self) -> int:
        return 4 if self in (Codes.INT4, Codes.E2M1) else 8

    @property
    def center(self) -> int:
        """Return the zero point of symmetric codes: signed integers are stored with this added."""
        return {Codes.INT4: 8, Codes.INT8: 128}.get(self, 0)


TENSORS = "codes", "scales", "offsets", "row_scales"  # of a `QuantizedWeight`
CHUNK_NUMEL = 1 << 19  # elements dequantized at once, about 20 bytes each: fits a CPU's caches
CUDA_CHUNK_NUMEL = 1 << 22  # enough to hide kernel launches


@functools.cache  # a step that is captured as a CUDA graph may not copy from ordinary host memory
def _numbers_by_byte(codes: Codes, device: torch.device) -> Tensor:
    """Return the numbers of each byte of codes, float32 [256, codes in a byte]: a look-up is faster on a core than torch's conversions."""
    byte = torch.arange(256, dtype=torch.uint8)
    if codes.bits == 4:
        byte = torch.stack([byte & 15, byte >> 4], 1)
    if codes == Codes.E4M3:
        numbers = byte.view(torch.float8_e4m3fn).float()
    elif codes == Codes.E2M1:
        positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        numbers = torch.tensor([*positive, *(-float(each) for each in positive)])[byte.long()]
    else:
        numbers = byte.float()
    return numbers.view(256, -1).to(device)


@dataclass(frozen=True)
class WeightFormat:
    """Format of a quantized weight [..., N, K].

    Attributes:
        codes: numbers of the codes.
        group_size: columns that share a scale; 0 where there are only `row_scales`. The last group of a row may be smaller.
        group_rows: rows that share a scale; in a stack of matrices it divides N, in one the last group may have fewer.
        scale_dtype: dtype of scales: float16, bfloat16 or float32, float8_e8m0fnu, float8_e4m3fn.
        minima: scales have minima of `scale_dtype`; otherwise symmetric codes have their center as zero point.
        zero_points: scales have zero points, uint8.
        row_scales: rows have a factor in float32, which multiplies the scales; with `divides` it divides them.
    """

    codes: Codes
    group_size: int = 0
    group_rows: int = 1
    scale_dtype: torch.dtype = torch.float32
    minima: bool = False
    zero_points: bool = False
    row_scales: bool = False
    divides: bool = False

    @property
    def bits(self) -> int:
        return self.codes.bits

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return [..., groups of rows, groups of a row] of a weight of `shape`; (0,) without scales."""
        if not self.group_size:
            return (0,)
        return *shape[:-2], -(-shape[-2] // self.group_rows), -(-shape[-1] // self.group_size)

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor of `QuantizedWeight` that a weight of `shape` has."""
        found = {"codes": ((*shape[:-1], shape[-1] * self.bits // 8), torch.uint8)}
        if self.group_size:
            found["scales"] = self.scale_shape(shape), self.scale_dtype
        if self.minima or self.zero_points:
            found["offsets"] = self.scale_shape(shape), self.scale_dtype if self.minima else torch.uint8
        if self.row_scales:
            found["row_scales"] = shape[:-1], torch.float32
        return found

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of all tensors of a weight of `shape`."""
        return sum(math.prod(each) * dtype.itemsize for each, dtype in self.tensors(shape).values())


@dataclass(frozen=True)
class QuantizedWeight:
    """The tensors of a weight [..., N, K], contiguous; flat views of them are taken as well where K is known otherwise.

    Attributes:
        codes: uint8 [..., N, K * bits / 8].
        scales: `format.scale_dtype` [..., groups of rows, groups of a row]; None without groups.
        offsets: minima in `format.scale_dtype` or zero points in uint8, as many as scales; None without.
        row_scales: float32 [..., N]; None without.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    row_scales: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by the names in `WeightFormat.tensors`."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def converted(self, form: WeightFormat, shape: tuple[int, ...]) -> QuantizedWeight:
        """Return the same values in another format: scales repeated for smaller groups, or in another dtype that holds them.

        Args:
            shape: of the weight, [..., N, K].

        Raises:
            ValueError: the format cannot hold the same values.
        """
        own = self.format
        if form == own:
            return self
        alike = ("codes", "minima", "zero_points", "row_scales", "divides")
        rows_fit = form.group_rows in (1, own.group_rows)
        columns_fit = own.group_size == form.group_size or (
            form.group_size > 0 and own.group_size % form.group_size == 0
        )
        if any(getattr(own, name) != getattr(form, name) for name in alike) or not (rows_fit and columns_fit):
            raise ValueError(f"{own} cannot be stored as {form}")

        def repeated(tensor: Tensor) -> Tensor:
            tensor = tensor.view(own.scale_shape(shape))
            if form.group_rows != own.group_rows:
                tensor = tensor.repeat_interleave(own.group_rows, -2)[..., : shape[-2], :]
            if form.group_size != own.group_size:
                groups = form.scale_shape(shape)[-1]
                tensor = tensor.repeat_interleave(own.group_size // form.group_size, -1)[..., :groups]
            return tensor.contiguous()

        def cast(tensor: Tensor) -> Tensor:
            found = repeated(tensor).to(form.scale_dtype)
            if not torch.equal(found.float(), repeated(tensor).float()):
                raise ValueError(f"{form.scale_dtype} cannot hold scales of {own.scale_dtype}")
            return found

        offsets = self.offsets
        if offsets is not None:
            offsets = cast(offsets) if form.minima else repeated(offsets)
        return QuantizedWeight(
            form, self.codes, None if self.scales is None else cast(self.scales), offsets, self.row_scales
        )


@torch.no_grad()
def dequantize_reference(weight: QuantizedWeight, out: Tensor) -> None:
    """Write the values of `weight` to `out` [..., N, K], contiguous, float32, float16 or bfloat16, with PyTorch on any device.

    Each step is rounded to float32 in turn, the last one once to `out.dtype`, as in csrc/quantization/dequantize.cu.
    """
    form, columns = weight.format, out.shape[-1]
    rows = out.view(-1, columns)
    codes = weight.codes.view(len(rows), -1)
    numbers = _numbers_by_byte(form.codes, out.device)
    groups = -(-columns // form.group_size) if form.group_size else 1
    of_chunk = (CUDA_CHUNK_NUMEL if out.is_cuda else CHUNK_NUMEL) // columns
    step = max(1, of_chunk // form.group_rows) * form.group_rows

    def by_column(tensor: Tensor, chunk: slice) -> Tensor:
        """Return scales or offsets of the rows `chunk` in float32: [rows, K], or [rows, groups, 1] where groups are whole."""
        of_rows = slice(chunk.start // form.group_rows, -(-chunk.stop // form.group_rows))
        of_groups = tensor.view(-1, groups)[of_rows].float().repeat_interleave(form.group_rows, 0)
        of_groups = of_groups[: chunk.stop - chunk.start]
        if columns % form.group_size == 0:
            return of_groups.unsqueeze(-1)
        return of_groups.repeat_interleave(form.group_size, -1)[:, :columns]

    for start in range(0, len(rows), step):
        chunk = slice(start, min(len(rows), start + step))
        values = numbers.index_select(0, codes[chunk].reshape(-1).int()).view(-1, columns)
        if form.group_size and columns % form.group_size == 0:
            values = values.view(-1, groups, form.group_size)
        if form.zero_points:
            values -= by_column(weight.offsets, chunk)
        elif not form.minima and form.codes.center:
            values -= form.codes.center
        scale = by_column(weight.scales, chunk) if form.group_size else values.new_ones(1)
        if form.row_scales:
            of_row = weight.row_scales.view(-1)[chunk].view(-1, *[1] * (values.dim() - 1))
            scale = scale / of_row if form.divides else scale * of_row
        values *= scale
        if form.minima:
            values += by_column(weight.offsets, chunk)
        rows[chunk] = values.view(-1, columns)
