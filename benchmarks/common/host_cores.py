"""Weights in the formats of a run, a link that is busy, and builds of the kernels: what benchmarks of the host's cores have in common."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
import threading
import time
from collections.abc import Iterator

import torch

from zero_inference.cpu.library import DTYPES, find_or_build, open_library
from zero_inference.cpu.products import Matrix

GROUP = 32
FORMATS = {"bf16": (torch.bfloat16, 0), "fp16": (torch.float16, 0), "fp32": (torch.float32, 0)}
FORMATS |= {"int8": (torch.bfloat16, 8), "int4": (torch.bfloat16, 4)}
FORMATS |= {"int8-fp16": (torch.float16, 8), "int4-fp16": (torch.float16, 4)}
LINK_BLOCK_BYTES = 256 << 20


def library_of(flags: str) -> ctypes.CDLL:
    """The kernels compiled with `flags` behind the usual ones, once on a machine; they may use AMX from now on."""
    library = open_library(find_or_build(lambda line: print(line, file=sys.stderr), flags.split()))
    library.zero_inference_best_instructions()  # asks the system for it
    return library


def processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def fill(memory: torch.Tensor, name: str, height: int, width: int) -> ctypes.Array:
    """Weights of a format one behind the other in `memory`: copies of one block of random values for all."""
    dtype, bits = FORMATS[name]
    code_bytes = height * width * bits // 8
    scales = height * width // GROUP
    size = code_bytes + 2 * scales * dtype.itemsize if bits else height * width * dtype.itemsize
    block = torch.empty(size, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    if bits:
        block[:code_bytes].random_(0, 256, generator=generator)
        block[code_bytes:].view(dtype).copy_(torch.rand(2 * scales, generator=generator) * 0.01)
    else:
        block.view(dtype).copy_(
            torch.randn(1 << 20, generator=generator).mul_(0.02).repeat((height * width >> 20) + 1)[: height * width]
        )
    number = len(memory) // size
    if number == 0:
        raise SystemExit(f"--set-gb holds {len(memory)} bytes, a weight of {name} has {size}: give more")
    memory[: number * size].view(number, size).copy_(block)
    matrices = (Matrix * number)()
    for index in range(number):
        at = memory.data_ptr() + index * size
        if bits:
            minima = at + code_bytes + scales * dtype.itemsize
            matrices[index] = Matrix(at, at + code_bytes, minima, height, width, GROUP, bits, DTYPES[dtype])
        else:
            matrices[index] = Matrix(at, None, None, height, width, 0, 0, DTYPES[dtype])
    return matrices


class Link:
    """Copies to the GPU that go on until `stop`, and then their rate."""

    def __init__(self) -> None:
        self.stop, self.gb_per_s = False, 0.0
        self.source = torch.empty(2, LINK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.target = torch.empty(2, LINK_BLOCK_BYTES, dtype=torch.uint8, device="cuda")

    def run(self) -> None:
        done, start, turn = [torch.cuda.Event(blocking=True) for _ in range(2)], time.perf_counter(), 0
        while not self.stop:
            if turn >= 2:  # one copy runs and one waits
                done[turn % 2].synchronize()
            self.target[turn % 2].copy_(self.source[turn % 2], non_blocking=True)
            done[turn % 2].record()
            turn += 1
        torch.cuda.synchronize()
        self.gb_per_s = turn * LINK_BLOCK_BYTES / (time.perf_counter() - start) / 1e9


@contextlib.contextmanager
def busy_link() -> Iterator[Link]:
    if not torch.cuda.is_available():
        raise SystemExit("--busy-link needs a CUDA device, and there is none")
    link = Link()
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        yield link
    finally:
        link.stop = True
        thread.join()
