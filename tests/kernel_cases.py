"""Packed weights and errors for tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_inference.cpu.library import INSTRUCTIONS, best_instructions
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.kernels.quantization import GroupQuantization, dequantize_reference, quantize

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
    parts = quantize(weight, GroupQuantization(bits, group_size))
    restored = torch.full_like(weight, float("nan"))
    dequantize_reference(*parts, bits, group_size, restored)
    return parts, restored


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


class PackedWeights:
    """Random weights [rows, columns] as codes, in the dtype of scales, and what these stand for: `plain` [count, rows, columns]."""

    def __init__(self, count, rows, columns, bits, group_size, dtype, device="cpu", seed=1):
        self.draw = torch.Generator(device).manual_seed(seed)
        self.bits, self.group_size, self.rows, self.columns = bits, group_size, rows, columns
        self.dtype, self.device = dtype, device
        bytes_of, groups = rows * columns * bits // 8, rows * columns // group_size
        self.codes = torch.randint(0, 256, (count, bytes_of), dtype=torch.uint8, device=device, generator=self.draw)
        self.scale = (0.01 + 0.01 * torch.rand(count, groups, device=device, generator=self.draw)).to(dtype)
        self.minimum = (0.05 * self.normal(count, groups) - 0.1).to(dtype)
        self.plain = torch.empty(count, rows, columns, dtype=dtype, device=device)
        for parts in zip(self.codes, self.scale, self.minimum, self.plain):
            dequantize_reference(*parts[:3], bits, group_size, parts[3])

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.draw)
