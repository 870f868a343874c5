"""Weights as csrc/cpu/product.h reads them: products with them, and their quantization on the CPU.

    y[m][r] = sum_k x[m][k] * W[r][k] + bias[r]

W is read once, in the bytes that it is stored in. Sums are accumulated in float32 and rounded once, to x's dtype.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zero_inference.cpu.library import (
    DTYPES,
    INSTRUCTIONS,
    SCALE_DTYPES,
    best_instructions,
    fields,
    load_library,
    require_library,
)
from zero_inference.kernels import quantization
from zero_inference.kernels.formats import TENSORS, Codes, QuantizedWeight
from zero_inference.kernels.quantization import GroupQuantization, check_packed, describe

PLAIN = -1  # in place of a value of `Codes`
NO_OFFSETS, MINIMA, ZERO_POINTS = range(3)  # zero_inference::cpu::Offsets
COLUMNS_STEP = 128  # kStep in csrc/cpu/product_layout.h


class Matrix(ctypes.Structure):
    """zero_inference::cpu::Matrix. It holds addresses only: the caller keeps the tensors alive.

    Attributes:
        values: address of rows x columns elements or codes, row-major.
        scales, offsets, row_scales: addresses as in `QuantizedWeight`; None without.
        group: columns that share a scale, all where there are only row scales; 0 for a plain weight.
        group_rows: rows that share a scale.
        codes: a value of `Codes`, or PLAIN.
        scale_dtype: a value of `SCALE_DTYPES`.
        offset_kind: NO_OFFSETS, MINIMA or ZERO_POINTS.
        divides: whether row scales divide.
        dtype: a value of `DTYPES`: the model's, which plain elements have and values are rounded to.
    """

    _fields_ = [
        *fields(ctypes.c_void_p, "values scales offsets row_scales"),
        *fields(ctypes.c_int64, "rows columns group group_rows"),
        *fields(ctypes.c_int32, "codes scale_dtype offset_kind divides dtype"),
    ]

    @property
    def format(self) -> tuple[int | bool, ...]:
        """Return what weights that are multiplied with one prepared input have in common."""
        numbers = [getattr(self, each[0]) for each in self._fields_[5:]]  # from columns on
        return *numbers, self.row_scales is not None

    def rows_view(self, first: int, rows: int) -> Matrix:
        """Return `rows` rows from row `first` on, a multiple of `group_rows`, in the same memory."""
        if first % self.group_rows:
            raise ValueError(f"a view begins where {self.group_rows} rows with common scales do, not at row {first}")
        view = Matrix.from_buffer_copy(self)
        view.rows = rows
        bits = list(DTYPES)[self.dtype].itemsize * 8 if self.codes == PLAIN else Codes(self.codes).bits
        view.values += first * self.columns * bits // 8
        scale_bytes = list(SCALE_DTYPES)[self.scale_dtype].itemsize
        skipped = first // self.group_rows * -(-self.columns // self.group) if self.scales else 0
        if self.scales:
            view.scales += skipped * scale_bytes
        if self.offsets:
            view.offsets += skipped * (1 if self.offset_kind == ZERO_POINTS else scale_bytes)
        if self.row_scales:
            view.row_scales += first * torch.float32.itemsize
        return view

    @classmethod
    def plain(cls, weight: Tensor) -> Matrix:
        """Return the matrix of a weight [rows, columns] in float32, float16 or bfloat16, contiguous, on the CPU; else ValueError."""
        if weight.dim() != 2 or weight.dtype not in DTYPES or weight.is_cuda or not weight.is_contiguous():
            raise ValueError(
                f"a weight must be float32, float16 or bfloat16 [rows, columns], contiguous, on the CPU; found {describe(weight)}"
            )
        return cls(
            weight.data_ptr(), None, None, None, *weight.shape, 0, 1, PLAIN, 0, NO_OFFSETS, 0, DTYPES[weight.dtype]
        )

    @classmethod
    def quantized(cls, weight: QuantizedWeight, rows: int, columns: int, dtype: torch.dtype) -> Matrix:
        """Return the matrix of a weight [rows, columns] on the CPU, of a model in `dtype`: float32, float16 or bfloat16.

        Raises ValueError if sizes or dtypes do not match.
        """
        form = weight.format
        if form.codes != Codes.E4M3 and form.group_size and columns % form.group_size:
            raise ValueError(f"a weight of {rows} x {columns} has no whole groups of {form}")
        if dtype not in DTYPES or form.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"{form} in a model in {dtype} has no product on the CPU")
        check_packed(weight, rows, columns, torch.device("cpu"))
        tensors = (getattr(weight, name) for name in TENSORS)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return cls(
            *addresses,
            rows,
            columns,
            form.group_size or -(-columns // COLUMNS_STEP) * COLUMNS_STEP,
            form.group_rows,
            form.codes,
            SCALE_DTYPES[form.scale_dtype],
            MINIMA if form.minima else ZERO_POINTS if form.zero_points else NO_OFFSETS,
            form.divides,
            DTYPES[dtype],
        )


def linear_groups(x: Tensor, weight: QuantizedWeight, rows: int, bias: Tensor | None = None) -> Tensor:
    """Return x [..., columns] times a quantized weight [rows, columns] transposed, plus bias [rows]: [..., rows] in x's dtype.

    Raises:
        ValueError: sizes or dtypes do not match.
        RuntimeError: the library is not available.
        MemoryError: not enough memory.
    """
    # scales with minima have the model's dtype; activations may have another one
    dtype = weight.format.scale_dtype if weight.format.minima else x.dtype
    matrix = Matrix.quantized(weight, rows, x.shape[-1], dtype)
    flat = x.reshape(-1, matrix.columns).contiguous()
    out = torch.empty(len(flat), rows, dtype=torch.float32)
    multiply_rows(matrix, flat, 0, rows, out, threads=torch.get_num_threads())
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], rows)


def multiply_rows(
    matrix: Matrix, x: Tensor, first: int, last: int, out: Tensor, instructions: str = "auto", threads: int = 1
) -> None:
    """Write rows [first, last) of a weight times x to `out`.

    Args:
        x: float32, float16 or bfloat16 [count, matrix.columns] on the CPU, rows contiguous.
        out: float32 [count, last - first] on the CPU, rows contiguous.
        instructions: one of `INSTRUCTIONS`; "auto" is the best supported.

    Raises:
        ValueError: the processor lacks `instructions`.
        RuntimeError, MemoryError: as of `linear_groups`.
    """
    name = best_instructions() if instructions == "auto" else instructions
    result = require_library().zero_inference_product(
        ctypes.byref(matrix),
        len(x),
        INSTRUCTIONS.index(name),
        x.data_ptr(),
        DTYPES[x.dtype],
        x.stride(0),
        first,
        last,
        out.data_ptr(),
        out.stride(0),
        threads,
    )
    if result < 0:
        raise MemoryError("a product on the CPU: memory is missing")
    if result > 0:
        raise ValueError(f"instructions {instructions!r}: this processor has {best_instructions()!r} at best")


@torch.no_grad()
def quantize(
    weight: Tensor, scheme: GroupQuantization, divides: bool = False, instructions: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and minima as `kernels.quantization.quantize` does, on a CPU with csrc/cpu/quantize.cpp where that is available.

    `instructions`: as of `multiply_rows`. Raises MemoryError, and ValueError as there.
    """
    library = load_library() if weight.device.type == "cpu" else None
    if library is None:
        return quantization.quantize(weight, scheme, divides)
    rows, codes, scale, minimum = quantization.empty_groups(weight, scheme)
    result = library.zero_inference_quantize(
        rows.data_ptr(),
        DTYPES[weight.dtype],
        *rows.shape,
        scheme.bits,
        divides,
        *(part.data_ptr() for part in (codes, scale, minimum)),
        torch.get_num_threads(),
        -1 if instructions == "auto" else INSTRUCTIONS.index(instructions),
    )
    if result == -2:
        raise ValueError(f"this processor does not have {instructions}")
    if result < 0:
        raise MemoryError("quantizing a weight: memory is missing")
    quantization.refuse_range(result == 1, weight.dtype)
    return codes, scale, minimum
