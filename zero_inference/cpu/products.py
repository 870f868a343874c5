"""Linear layers of a few rows on the host's cores: operators `torch.ops.zero_inference.cpu_linear` and `cpu_linear_groups`.

    y[m][r] = sum_k x[m][k] * W[r][k] + bias[r]

W is read once, in the bytes that it is stored in. Sums are kept in float32 and rounded once, to x's dtype. x is multiplied in the
precision of the weight (csrc/cpu/product.h). Where there is no compiler, RuntimeError says so; the `*_reference` functions are what the
kernels are compared with.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, best_instructions, load_library, require_library
from zero_inference.kernels import groups
from zero_inference.kernels.groups import GroupQuantization, dequantize_reference

ITEM_BYTES = (4, 2, 2)  # of an element, by the values of DTYPES


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


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, instructions: str = "auto", threads: int = 0
) -> Tensor:
    """x [..., columns] times weight [rows, columns] transposed, plus bias [rows]: [..., rows] in x's dtype.

    Args:
        x, weight: float32, float16 or bfloat16, not necessarily the same, on the CPU; the weight contiguous.
        instructions: "portable", "avx2", "avx512" or "amx"; "auto" is the best that is there.
        threads: 0 is torch's number.

    Raises:
        ValueError: shapes, dtypes, devices or instructions do not fit.
        RuntimeError: there is no library.
    """
    return torch.ops.zero_inference.cpu_linear(x, weight, bias, instructions, threads)


def linear_groups(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor | None = None,
    instructions: str = "auto",
    threads: int = 0,
) -> Tensor:
    """`linear` with a weight of `rows` rows in groups, as zero_inference/kernels/groups.py packs them.

    Args:
        codes: uint8 [rows * columns * bits / 8].
        scale, minimum: float32, float16 or bfloat16 [rows * columns / group_size].
    """
    return torch.ops.zero_inference.cpu_linear_groups(
        x, codes, scale, minimum, bits, group_size, rows, bias, instructions, threads
    )


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, precision: torch.dtype = torch.float64
) -> Tensor:
    """`linear` in plain PyTorch, computed and returned in `precision`."""
    product = x.to(precision) @ weight.to(precision).T
    return product if bias is None else product + bias.to(precision)


def linear_groups_reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor | None = None,
    precision: torch.dtype = torch.float64,
) -> Tensor:
    """`linear_reference` with the weight that `dequantize_reference` restores, rounded to the dtype of its scales."""
    weight = torch.empty(rows, scale.numel() // rows * group_size, dtype=scale.dtype)
    dequantize_reference(codes, scale, minimum, bits, group_size, weight)
    return linear_reference(x, weight, bias, precision)


def multiply_rows(
    matrix: Matrix, x: Tensor, first: int, last: int, out: Tensor, instructions: str = "auto", threads: int = 1
) -> None:
    """Rows [first, last) of a weight times all rows of x into `out`: the call that the kernels have.

    Args:
        matrix: whose tensors the caller keeps alive.
        x: float32, float16 or bfloat16 [count, matrix.columns], its rows of any stride, each contiguous.
        out: float32 [count, last - first], each row contiguous; overwritten.

    Raises:
        ValueError: shapes, dtypes, devices or instructions do not fit.
        RuntimeError: there is no library.
        MemoryError: memory is missing.
    """
    library = require_library()
    _check_input(x, matrix.columns)
    if x.dim() != 2 or (x.numel() and x.stride(1) != 1):
        raise ValueError(
            f"x must be [count, {matrix.columns}] with contiguous rows, found {list(x.shape)}, strides {x.stride()}"
        )
    if not 0 <= first <= last <= matrix.rows:
        raise ValueError(f"rows {first} to {last} are not in a weight of {matrix.rows} rows")
    shape = [len(x), last - first]
    if out.dtype != torch.float32 or out.is_cuda or list(out.shape) != shape or (out.numel() and out.stride(1) != 1):
        raise ValueError(
            f"out must be float32 {shape} on the CPU with contiguous rows, found {out.dtype} {list(out.shape)}, "
            f"strides {out.stride()}, on {out.device}"
        )
    failed = library.zero_inference_product(
        ctypes.byref(matrix),
        len(x),
        instructions_index(instructions),
        x.data_ptr(),
        DTYPES[x.dtype],
        x.stride(0),
        first,
        last,
        out.data_ptr(),
        out.stride(0),
        threads,
    )
    if failed < 0:
        raise MemoryError("a product on the CPU: memory is missing")
    if failed:
        raise ValueError(f"instructions {instructions!r}: this processor has {best_instructions()!r} at best")


def instructions_index(name: str) -> int:
    """Of `name` in INSTRUCTIONS, or of the best that are here for "auto". Raises ValueError for other names."""
    if name != "auto" and name not in INSTRUCTIONS:
        raise ValueError(f"instructions must be auto, {', '.join(INSTRUCTIONS)}, found {name!r}")
    return INSTRUCTIONS.index(best_instructions() if name == "auto" else name)


@torch.library.custom_op("zero_inference::cpu_linear", mutates_args=())
def _cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, instructions: str, threads: int) -> Tensor:
    return _product(x, Matrix.plain(weight), bias, instructions, threads)


@_cpu_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, instructions: str, threads: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("zero_inference::cpu_linear_groups", mutates_args=())
def _cpu_linear_groups(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    bits: int,
    group_size: int,
    rows: int,
    bias: Tensor | None,
    instructions: str,
    threads: int,
) -> Tensor:
    return _product(x, Matrix.groups(codes, scale, minimum, bits, group_size, rows), bias, instructions, threads)


@_cpu_linear_groups.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, group_size: int, rows: int, *others: object
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _product(x: Tensor, matrix: Matrix, bias: Tensor | None, instructions: str, threads: int) -> Tensor:
    _check_input(x, matrix.columns)
    if bias is not None and (list(bias.shape) != [matrix.rows] or bias.is_cuda):
        raise ValueError(f"bias must be [{matrix.rows}] on the CPU, found {list(bias.shape)} on {bias.device}")
    flat = x.reshape(-1, matrix.columns)
    if flat.numel() and flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(len(flat), matrix.rows, dtype=torch.float32)
    multiply_rows(matrix, flat, 0, matrix.rows, out, instructions, threads or torch.get_num_threads())
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], matrix.rows)


def _check_input(x: Tensor, columns: int) -> None:
    if x.dtype not in DTYPES or x.is_cuda or x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(
            f"x must be float32, float16 or bfloat16 [..., {columns}] on the CPU, "
            f"found {x.dtype} {list(x.shape)} on {x.device}"
        )


@torch.no_grad()
def quantize(
    weight: torch.Tensor, scheme: GroupQuantization, divides: bool = False, instructions: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `groups.quantize` returns, on a CPU with the compiled library; without a compiler, or on another device, call that.

    Args:
        instructions: one of `INSTRUCTIONS`; None: the best that the processor has.

    Raises:
        ValueError: see there.
        MemoryError: memory is missing.
    """
    library = load_library() if weight.device.type == "cpu" else None
    if library is None:
        return groups.quantize(weight, scheme, divides)
    rows, codes, scale, minimum = groups.empty_groups(weight, scheme)
    result = library.zero_inference_quantize(
        rows.data_ptr(),
        DTYPES[weight.dtype],
        *rows.shape,
        scheme.bits,
        divides,
        *(part.data_ptr() for part in (codes, scale, minimum)),
        torch.get_num_threads(),
        -1 if instructions is None else INSTRUCTIONS.index(instructions),
    )
    if result == -2:
        raise ValueError(f"this processor does not have {instructions}")
    if result < 0:
        raise MemoryError("quantizing a weight: memory is missing")
    groups.refuse_range(result == 1, weight.dtype)
    return codes, scale, minimum
