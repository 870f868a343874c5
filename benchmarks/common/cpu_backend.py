"""For benchmarks of the CPU backend: random weights as they are stored, a build of its library, and copies that keep the link busy."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_inference.cpu.library import find_or_build, open_library
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.utils.environment import describe_environment

LINK_BLOCK_BYTES = 256 << 20


class Format(NamedTuple):
    """How a weight is stored: plain, or as codes in groups with scales and minima."""

    dtype: torch.dtype  # of a plain weight, or of scales and minima
    bits: int = 0  # of a code; 0 for a plain weight
    group_size: int = 0

    def weight_bytes(self, elements: int) -> int:
        if not self.bits:
            return elements * self.dtype.itemsize
        return GroupQuantization(self.bits, self.group_size).stored_bytes(elements, self.dtype)

    def parts(self, memory: torch.Tensor, elements: int) -> list[torch.Tensor]:
        """Return views of a weight in `memory`, uint8 [weight_bytes]: its values; or codes uint8, scales and minima."""
        if not self.bits:
            return [memory.view(self.dtype)]
        code_bytes = elements * self.bits // 8
        return [memory[:code_bytes], *memory[code_bytes:].view(self.dtype).chunk(2)]

    def fill(self, memory: torch.Tensor, elements: int) -> None:
        """Write a random weight to `memory`. Its numbers repeat after 2^20: drawing all would take seconds."""
        generator = torch.Generator().manual_seed(0)
        values = (torch.randn(1 << 20, generator=generator) * 0.02).to(self.dtype)
        parts = self.parts(memory, elements)
        if self.bits:
            parts.pop(0).random_(0, 256, generator=generator)
            values = values.abs()
        for part in parts:
            part.copy_(values.repeat(len(part) // len(values) + 1)[: len(part)])

    def matrix(self, memory: torch.Tensor, rows: int, columns: int) -> Matrix:
        """Return the weight in `memory` as the CPU backend takes it; it holds no reference to the memory."""
        parts = self.parts(memory, rows * columns)
        if not self.bits:
            return Matrix.plain(parts[0].view(rows, columns))
        return Matrix.groups(*parts, self.bits, self.group_size, rows)


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
