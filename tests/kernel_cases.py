"""Packed weights and errors for tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_inference.cpu.library import INSTRUCTIONS, best_instructions
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat, dequantize_reference
from zero_inference.kernels.quantization import GroupQuantization, dequantize, quantize

BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}  # of `relative_error`
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on CUDA devices only")


def on_gpu(test: Callable) -> Callable:
    """Run a test on a CUDA device, with the compiled library."""
    return ON_GPU(pytest.mark.usefixtures("cuda_kernels")(test))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().double().norm())


class SeenOperators(TorchDispatchMode):
    """Records name and arguments of the operators that are called within it."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))


def skip_without(instructions: str) -> None:
    """Skip the test where the processor lacks `instructions`."""
    best = best_instructions()
    if INSTRUCTIONS.index(instructions) > INSTRUCTIONS.index(best):
        pytest.skip(f"this processor has {best} at best")


def quantized(weight: torch.Tensor, bits: int, group_size: int, quantize: Callable = quantize) -> tuple:
    """Return (codes, scale, minimum) of `weight`, and what they stand for."""
    scheme = GroupQuantization(bits, group_size)
    parts = quantize(weight, scheme)
    restored = torch.full_like(weight, float("nan"))
    dequantize(scheme.as_weight(*parts), restored)
    return parts, restored


def own(bits: int, group_size: int, dtype: torch.dtype) -> WeightFormat:
    """Return the format of `quantized`."""
    return GroupQuantization(bits, group_size).weight_format(dtype)


def random_weight(form: WeightFormat, *shape: int) -> QuantizedWeight:
    """Return random codes, scales and offsets of a weight [..., rows, columns], whose values are about 1."""
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (size, dtype) in form.tensors(shape).items():
        if name == "codes" or dtype == torch.uint8:
            tensors[name] = torch.randint(
                0, 256 if form.bits == 8 or name == "codes" else 16, size, generator=draw
            ).byte()
            if form.codes == Codes.E4M3:
                tensors[name][(tensors[name] & 127) == 127] = 9  # is not a number
        elif dtype == torch.float8_e8m0fnu:
            tensors[name] = torch.randint(123, 127, size, generator=draw).byte().view(dtype)
        else:
            number = {Codes.INT4: 1 / 8, Codes.INT8: 1 / 128, Codes.E4M3: 1 / 128}.get(form.codes, 1)
            least = 1 if name == "row_scales" and form.group_size else number
            tensors[name] = (least * (0.2 + torch.rand(size, generator=draw))).to(dtype)
    return QuantizedWeight(form, **tensors)


PUBLISHED = {  # formats of checkpoints; scales of integers are in x's dtype
    "int4": WeightFormat(Codes.INT4, 32),
    "int8": WeightFormat(Codes.INT8, 128),
    "int4 with zero points": WeightFormat(Codes.INT4, 64, zero_points=True),
    "int8 with zero points": WeightFormat(Codes.INT8, 64, zero_points=True),
    "mxfp4": WeightFormat(Codes.E2M1, 32, scale_dtype=torch.float8_e8m0fnu),
    "nvfp4": WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True),
    "nvfp4 divided": WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True, divides=True),
    "fp8 in blocks": WeightFormat(Codes.E4M3, 128, 128),
    "fp8 in groups": WeightFormat(Codes.E4M3, 64, row_scales=True, divides=True),
    "fp8 by channel": WeightFormat(Codes.E4M3, row_scales=True),
}


def published(name: str, dtype: torch.dtype) -> WeightFormat:
    form = PUBLISHED[name]
    return replace(form, scale_dtype=dtype) if form.codes in (Codes.INT4, Codes.INT8) else form


def whole_rows(rows: int, form: WeightFormat) -> int:
    """Return `rows`, rounded up to whole groups."""
    return -(-rows // form.group_rows) * form.group_rows


class PackedWeights:
    """Random weights [rows, columns] in a format, and what they stand for.

    Attributes:
        weight: tensors [count, ...].
        plain: values in `dtype`, [count, rows, columns].
        exact: in float64 as a product takes them: integers are rounded to `dtype` once, others are exact.
    """

    def __init__(self, count, rows, columns, form: WeightFormat, dtype, device="cpu", seed=1):
        self.draw = torch.Generator(device).manual_seed(seed)
        self.rows, self.columns, self.dtype, self.device = rows, columns, dtype, device
        tensors = {name: self._tensor(name, form, *each) for name, each in form.tensors((count, rows, columns)).items()}
        self.weight = QuantizedWeight(form, **tensors)
        single = torch.empty(count, rows, columns, device=device)
        self.plain = single.to(dtype)
        for values in (single, self.plain):
            dequantize_reference(self.weight, values)
        self.exact = (self.plain if form.codes in (Codes.INT4, Codes.INT8) else single).double()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.draw)

    def _tensor(self, name: str, form: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        def integers(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.draw)

        if name == "codes":
            codes = integers(0, 256)
            return codes.masked_fill_((codes & 127) == 127, 5) if form.codes == Codes.E4M3 else codes  # without NaN
        if dtype == torch.uint8:
            return integers(0, 1 << form.bits)
        if dtype == torch.float8_e8m0fnu:
            return integers(115, 125).view(dtype)
        if name == "offsets":
            return (0.05 * self.normal(*shape) - 0.1).to(dtype)
        uniform = 1 + torch.rand(shape, device=self.device, generator=self.draw)
        if dtype == torch.float8_e4m3fn or (
            name == "row_scales" and form.scale_dtype == torch.float8_e4m3fn and form.divides
        ):
            return (100 * uniform).to(dtype)
        if name == "row_scales" and form.divides:
            return uniform
        return ((0.1 if form.codes == Codes.E4M3 else 0.01) * uniform).to(dtype)  # normal numbers of float16, too
