"""For benchmarks of the CPU backend: random weights as they are stored, a build of its library, and copies that keep the link busy."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_inference.cpu.library import find_or_build, open_library
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat, dequantize_reference
from zero_inference.utils.environment import describe_environment

LINK_BLOCK_BYTES = 256 << 20


class Format(NamedTuple):
    """How a weight is stored: plain in `dtype`, or quantized, of a model in `dtype`."""

    dtype: torch.dtype
    quantized: WeightFormat | None = None

    @classmethod
    def own(cls, dtype: torch.dtype, bits: int, group_size: int) -> Format:
        """Return our own format of codes with scales and minima."""
        codes = Codes.INT4 if bits == 4 else Codes.INT8
        return cls(dtype, WeightFormat(codes, group_size, scale_dtype=dtype, minima=True))

    def weight_bytes(self, rows: int, columns: int) -> int:
        form = self.quantized
        return rows * columns * self.dtype.itemsize if form is None else form.stored_bytes((rows, columns))

    def weight(self, memory: torch.Tensor, rows: int, columns: int) -> QuantizedWeight:
        """Return a quantized weight in `memory`, uint8 [weight_bytes]."""
        at, tensors = 0, {}
        for name, (shape, dtype) in self.quantized.tensors((rows, columns)).items():
            size = math.prod(shape) * dtype.itemsize
            tensors[name] = memory[at : at + size].view(dtype).view(shape)
            at += size
        return QuantizedWeight(self.quantized, **tensors)

    def fill(self, memory: torch.Tensor, rows: int, columns: int) -> None:
        """Write a random weight to `memory`. Its numbers repeat after 2^20: drawing all would take seconds."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(1 << 20, generator=generator) * 0.02

        def repeat(values: torch.Tensor, to: torch.Tensor) -> None:
            to.view(-1).copy_(values.repeat(to.numel() // len(values) + 1)[: to.numel()])

        if self.quantized is None:
            return repeat(numbers.to(self.dtype), memory.view(self.dtype))
        is_e4m3 = self.quantized.codes == Codes.E4M3
        for name, tensor in self.weight(memory, rows, columns).tensors.items():
            if name == "codes":
                tensor.random_(0, 127 if is_e4m3 else 256, generator=generator)  # 127 is not a number
            elif tensor.dtype.itemsize > 1:
                repeat(numbers.abs().to(tensor.dtype), tensor)
            else:  # exponents around 1, numbers from 0.06 to 0.2, or zero points
                least, most = {torch.float8_e8m0fnu: (118, 126), torch.float8_e4m3fn: (24, 36)}.get(
                    tensor.dtype, (0, 16)
                )
                tensor.view(torch.uint8).random_(least, most, generator=generator)

    def matrix(self, memory: torch.Tensor, rows: int, columns: int) -> Matrix:
        """Return the weight in `memory` as the CPU backend takes it; it holds no reference to the memory."""
        if self.quantized is None:
            return Matrix.plain(memory.view(self.dtype).view(rows, columns))
        return Matrix.quantized(self.weight(memory, rows, columns), rows, columns, self.dtype)

    def values(self, memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return the weight in `memory` in float64."""
        if self.quantized is None:
            return memory.view(self.dtype).view(rows, columns).double()
        out = torch.empty(rows, columns)
        dequantize_reference(self.weight(memory, rows, columns), out)
        return out.double()


def build_library(flags: str) -> ctypes.CDLL:
    """Return the CPU backend compiled with `flags` after the usual ones, once on a machine; it may use AMX from now on."""
    library = open_library(find_or_build(lambda line: print(line, file=sys.stderr), flags.split()))
    library.zero_inference_best_instructions()  # requests permission for AMX
    return library


def cpu_model() -> str:
    return describe_environment()["cpu_model"]


class LinkTraffic:
    """Copies of page-locked memory to the GPU, on a thread that calls `run`, until `stop` is set; then `gb_per_s` is their rate."""

    def __init__(self) -> None:
        self.stop, self.gb_per_s = False, 0.0
        self.source = torch.empty(2, LINK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.target = torch.empty(2, LINK_BLOCK_BYTES, dtype=torch.uint8, device="cuda")

    def run(self) -> None:
        done, start, copies = [torch.cuda.Event(blocking=True) for _ in range(2)], time.perf_counter(), 0
        while not self.stop:
            if copies >= 2:  # one copy runs and one waits
                done[copies % 2].synchronize()
            self.target[copies % 2].copy_(self.source[copies % 2], non_blocking=True)
            done[copies % 2].record()
            copies += 1
        torch.cuda.synchronize()
        self.gb_per_s = copies * LINK_BLOCK_BYTES / (time.perf_counter() - start) / 1e9


@contextlib.contextmanager
def busy_link() -> Iterator[LinkTraffic]:
    """Keep the link to the GPU busy within the block."""
    if not torch.cuda.is_available():
        raise SystemExit("--busy-link needs a CUDA device, and there is none")
    traffic = LinkTraffic()
    thread = threading.Thread(target=traffic.run)
    thread.start()
    try:
        yield traffic
    finally:
        traffic.stop = True
        thread.join()
