"""A weight as the kernels of csrc/cpu/product.h take it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # zero_inference::cpu::Dtype
ITEM_BYTES = (4, 2, 2)  # of an element, by the values of DTYPES
INSTRUCTIONS = ("portable", "avx2", "avx512", "amx")  # zero_inference::cpu::Instructions, ascending


class Matrix(ctypes.Structure):
    """zero_inference::cpu::Matrix. It holds pointers only: whoever uses one keeps its tensors alive.

    Attributes:
        values: address of rows x columns elements or codes, row-major.
        scales, minima: addresses of rows x columns / group elements; None for a plain weight.
        rows, columns: of the weight, which maps `columns` inputs to `rows` outputs.
        group: columns with one scale and minimum; 0 for a plain weight.
        bits: of a code, 8 or 4; 0 for a plain weight.
        dtype: a value of `DTYPES`: of the plain weight, or of scales and minima.
    """

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]

    def part(self, first: int, rows: int) -> Matrix:
        """`rows` rows from row `first` on, where they lie."""
        item = ITEM_BYTES[self.dtype]
        elements = first * self.columns
        if self.bits == 0:
            return Matrix(self.values + elements * item, None, None, rows, self.columns, 0, 0, self.dtype)
        in_groups = elements // self.group * item
        return Matrix(
            self.values + elements * self.bits // 8,
            self.scales + in_groups,
            self.minima + in_groups,
            rows,
            self.columns,
            self.group,
            self.bits,
            self.dtype,
        )

    @classmethod
    def plain(cls, weight: Tensor) -> Matrix:
        """Of a weight [rows, columns] in float32, float16 or bfloat16 on the CPU, contiguous.

        Raises ValueError for any other.
        """
        if weight.dim() != 2 or weight.dtype not in DTYPES or weight.is_cuda or not weight.is_contiguous():
            raise ValueError(
                f"a weight must be float32, float16 or bfloat16 [rows, columns], contiguous, on the CPU; found {_words(weight)}"
            )
        rows, columns = weight.shape
        return cls(weight.data_ptr(), None, None, rows, columns, 0, 0, DTYPES[weight.dtype])

    @classmethod
    def groups(cls, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int) -> Matrix:
        """Of codes as zero_inference/kernels/groups.py packs them, on the CPU.

        Args:
            codes: uint8 [rows * columns * bits / 8].
            scale, minimum: float32, float16 or bfloat16 [rows * columns / group_size].
            rows: of the weight; its columns follow from the number of scales.

        Raises:
            ValueError: sizes or dtypes do not fit each other.
        """
        if bits not in (8, 4) or group_size < 1 or (bits == 4 and group_size % 2):
            raise ValueError(
                f"bits must be 8, or 4 with an even group size; found {bits} bits, group size {group_size}"
            )
        if rows < 1 or scale.numel() % rows or codes.numel() * 8 != scale.numel() * group_size * bits:
            raise ValueError(
                f"{codes.numel()} bytes of codes and {scale.numel()} scales are not {rows} rows of whole groups of {group_size} "
                f"codes of {bits} bits"
            )
        for name, tensor, dtype in (
            ("codes", codes, torch.uint8),
            ("scale", scale, scale.dtype),
            ("minimum", minimum, scale.dtype),
        ):
            if tensor.dtype != dtype or tensor.is_cuda or not tensor.is_contiguous():
                raise ValueError(f"{name} must be {dtype}, contiguous, on the CPU; found {_words(tensor)}")
        if scale.dtype not in DTYPES or minimum.numel() != scale.numel():
            raise ValueError(
                f"scale and minimum must be float32, float16 or bfloat16 of one size; found {_words(scale)} and {_words(minimum)}"
            )
        columns = scale.numel() // rows * group_size
        pointers = codes.data_ptr(), scale.data_ptr(), minimum.data_ptr()
        return cls(*pointers, rows, columns, group_size, bits, DTYPES[scale.dtype])


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
