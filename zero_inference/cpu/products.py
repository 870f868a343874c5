"""Weights as csrc/cpu/product.h reads them: products with them, and their quantization on the CPU.

    y[m][r] = sum_k x[m][k] * W[r][k] + bias[r]

W is read once, in the bytes that it is stored in. Sums are accumulated in float32 and rounded once, to x's dtype.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, best_instructions, fields, load_library, require_library
from zero_inference.kernels import quantization
from zero_inference.kernels.quantization import GroupQuantization, check_packed, describe


class Matrix(ctypes.Structure):
    """zero_inference::cpu::Matrix. It holds addresses only: the caller keeps the tensors alive.

    Attributes:
        values: address of rows x columns elements or codes, row-major.
        scales, minima: addresses of rows x columns / group elements; None for a plain weight.
        group: columns that share a scale and a minimum; 0 for a plain weight.
        bits: of a code, 8 or 4; 0 for a plain weight.
        dtype: a value of `DTYPES`: of the plain weight, or of scales and minima.
    """

    _fields_ = [
        *fields(ctypes.c_void_p, "values scales minima"),
        *fields(ctypes.c_int64, "rows columns group"),
        *fields(ctypes.c_int32, "bits dtype"),
    ]

    def rows_view(self, first: int, rows: int) -> Matrix:
        """Return `rows` rows from row `first` on, in the same memory."""
        skipped = first * self.columns  # values or codes before the view
        item_bytes = list(DTYPES)[self.dtype].itemsize
        if self.bits == 0:
            return Matrix(self.values + skipped * item_bytes, None, None, rows, self.columns, 0, 0, self.dtype)
        codes, offset = self.values + skipped * self.bits // 8, skipped // self.group * item_bytes
        scales, minima = self.scales + offset, self.minima + offset
        return Matrix(codes, scales, minima, rows, self.columns, self.group, self.bits, self.dtype)

    @classmethod
    def plain(cls, weight: Tensor) -> Matrix:
        """Return the matrix of a weight [rows, columns] in float32, float16 or bfloat16, contiguous, on the CPU; else ValueError."""
        if weight.dim() != 2 or weight.dtype not in DTYPES or weight.is_cuda or not weight.is_contiguous():
            raise ValueError(
                f"a weight must be float32, float16 or bfloat16 [rows, columns], contiguous, on the CPU; found {describe(weight)}"
            )
        return cls(weight.data_ptr(), None, None, *weight.shape, 0, 0, DTYPES[weight.dtype])

    @classmethod
    def groups(cls, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int) -> Matrix:
        """Return the matrix of codes, scales and minima on the CPU, as `kernels.quantization.quantize` packs a weight of `rows` rows.

        Raises ValueError if sizes or dtypes do not match.
        """
        if rows < 1 or scale.numel() % rows or scale.dtype not in DTYPES:
            raise ValueError(
                f"scale must be float32, float16 or bfloat16, the same number in each of {rows} rows; found {describe(scale)}"
            )
        columns = scale.numel() // rows * group_size
        weight = GroupQuantization(bits, group_size).as_weight(codes, scale, minimum)
        check_packed(weight, rows, columns, torch.device("cpu"))
        pointers = codes.data_ptr(), scale.data_ptr(), minimum.data_ptr()
        return cls(*pointers, rows, columns, group_size, bits, DTYPES[scale.dtype])


def linear_groups(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Return x [..., columns] times a quantized weight [rows, columns] transposed, plus bias [rows]: [..., rows] in x's dtype.

    Raises:
        ValueError: sizes or dtypes do not match.
        RuntimeError: the library is not available.
        MemoryError: not enough memory.
    """
    matrix = Matrix.groups(codes, scale, minimum, bits, group_size, rows)
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
