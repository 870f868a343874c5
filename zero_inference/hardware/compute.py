"""What the device itself can do: the rate of its memory and of its matrix units, measured in this process."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zero_inference.cpu import products as cores
from zero_inference.cpu.library import load_library
from zero_inference.hardware import caches, effort
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kernels.products import linear_groups

# L2 holds 50 MiB on an H200 and 126 MB on a B200: a few percent of the 2 GiB that are touched
CUDA_BLOCK_BYTES = 1 << 30
SECONDS = 0.2
WEIGHTS_BYTES = 128 << 20  # of the weights of a measurement on a CPU
WEIGHTS_S = 0.05  # of a measurement, at least
CPU_ROWS = (
    32  # tokens up to which a CPU multiplies codes as they are stored; a prefill has more, and restores the weights
)
# Before the first one: a GPU that rested raises its clocks, and int4 had 1114 GB/s in 0.05 s once, and 1260 else.
CLOCKS_S = 0.15
# Rows and columns. A GPU's products take some time besides their bytes, which two sizes show: int4 with one token has 870 GB/s with the
# first, 2220 with the second and 1390 with 8192 x 8192 (h200-kept/seventh_host/products.txt). With one and eight tokens the line through
# these two is within 10% of most others there and 24% of all from 5120 x 5120 on; that through 32768 x 8192, which suits the kernel, gave
# 57344 x 8192 up to 20% too little time.
SHAPES = {"cuda": ((4096, 4096), (57344, 8192)), "cpu": ((2048, 2048),)}


def device_copy_gb_per_s(device: torch.device, seconds: float = SECONDS) -> float:
    """Median GB/s (1e9 bytes) of copies inside the memory of `device`, bytes read and bytes written both counted.

    Caches hold little of the blocks: 1 GiB on CUDA (less where less than 4 GiB are free), and on a CPU what `link.caches` says.
    """
    if device.type == "cuda":
        nbytes = min(CUDA_BLOCK_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        nbytes = caches.block_bytes()
    source = torch.full((nbytes,), 3, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median_s(device, lambda: target.copy_(source), seconds) / 1e9


def matmul_tflops(
    device: torch.device,
    dtype: torch.dtype,
    size: int | None = None,
    seconds: float = SECONDS,
    rows: Sequence[int] = (),
) -> float:
    """Median TFLOP/s (1e12) of [size, size] x [size, size] in `dtype`, the second transposed as the weight of a linear module is;
    2 size^3 operations.

    Args:
        size: that of `link.effort` where not given: 8192 on CUDA, 1024 on a CPU.
        seconds: to measure for, for each number of rows.
        rows: other numbers of rows of the first matrix to try; the best of all is the rate.
    """
    size = size or effort.PRODUCT_SIZE[device.type]

    def of(count: int) -> float:
        # random values: zeros draw less power, and a GPU at its power limit then clocks higher than any model would see
        left, weight = (torch.randn(many, size, device=device).to(dtype) for many in (count, size))
        product = torch.empty(count, size, dtype=dtype, device=device)
        spent_s = median_s(device, lambda: torch.mm(left, weight.t(), out=product), seconds)
        return 2 * count * size**2 / spent_s / 1e12

    return max(of(count) for count in (size, *rows))


def as_graph(device: torch.device, action: Callable[[], object]) -> Callable[[], object]:
    """What repeats the kernels of `action`."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        action()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        action()
    return graph.replay


@dataclass(frozen=True)
class ProductTime:
    """A product with a weight takes `call_s`, and its stored bytes at `gb_per_s`."""

    gb_per_s: float
    call_s: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> ProductTime:
        """From bytes and seconds of weights of one or two sizes, the smaller one first."""
        (least, least_s), (most, most_s) = points[0], points[-1]
        call_s = (least_s * most - most_s * least) / (most - least) if most > least else 0.0
        # of many tokens it may be anything: operations count
        call_s = min(max(0.0, call_s), 0.9 * least_s, 0.9 * most_s)
        return cls(most / (most_s - call_s) / 1e9, call_s)


class DeviceWeights:
    """Matrices with random values on `device`, so many that caches hold few of them.

    Args:
        scheme: how they are stored; None for plain ones of `dtype`.
        shape: rows and columns.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, scheme: GroupQuantization | None, shape: tuple[int, int]
    ):
        self.device, self.dtype, self.scheme, self.shape = device, dtype, scheme, shape
        elements, on_gpu = math.prod(shape), device.type == "cuda"
        bits = scheme.bits if scheme else 8 * dtype.itemsize
        count = -(-(CUDA_BLOCK_BYTES if on_gpu else WEIGHTS_BYTES) * 8 // (bits * elements))
        if scheme is None:
            self.plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(count)]
            self.nbytes = elements * dtype.itemsize
            return
        groups = elements // scheme.group_size
        codes = elements * scheme.bits // 8
        self.packed = [
            (
                torch.randint(256, (codes,), dtype=torch.uint8, device=device),
                *torch.rand(2, groups, device=device).to(dtype),
            )
            for _ in range(count)
        ]
        self.nbytes = sum(part.nbytes for part in self.packed[0])

    def product_s(self, tokens: int, seconds: float = WEIGHTS_S) -> float:
        """Median seconds in which `tokens` tokens are multiplied with one matrix, `nbytes` as it is stored, of several that follow."""
        x = torch.randn(tokens, self.shape[1], device=self.device, dtype=self.dtype)
        count = len(self.plain if self.scheme is None else self.packed)
        action: Callable[[], object] = functools.partial(self._multiply, x)
        if self.device.type == "cuda":
            # launched one by one, int4 took 30 us a matrix from one host, and 38 from a slower one
            action = as_graph(self.device, action)
        return median_s(self.device, action, seconds) / count

    def _multiply(self, x: torch.Tensor) -> None:
        if self.scheme is None:
            for weight in self.plain:
                torch.nn.functional.linear(x, weight)
            return
        how = self.scheme.bits, self.scheme.group_size, self.shape[0]
        multiply = linear_groups
        if self.device.type == "cpu" and len(x) <= CPU_ROWS and load_library() is not None:
            multiply = cores.linear_groups  # as runs of the stream engine do in decode steps
        for codes, scale, minimum in self.packed:
            multiply(x, codes, scale, minimum, *how, None)


def product_times(
    device: torch.device, dtype: torch.dtype, scheme: GroupQuantization | None, tokens: Sequence[int]
) -> dict[int, ProductTime]:
    """By number of tokens, with weights as `DeviceWeights` has them; without those whose activations do not fit.

    Raises:
        torch.OutOfMemoryError: the weights do not fit beside what is on the device.
    """
    points: dict[int, list[tuple[int, float]]] = {count: [] for count in tokens}
    for shape in SHAPES[device.type]:
        weights = DeviceWeights(device, dtype, scheme, shape)
        if device.type == "cuda":
            weights.product_s(1, CLOCKS_S)
        for count in list(points):
            try:
                points[count].append((weights.nbytes, weights.product_s(count)))
            except torch.OutOfMemoryError:
                del points[count]
        del weights  # before there are others
    return {count: ProductTime.through(each) for count, each in points.items()}


def median_s(device: torch.device, action: Callable[[], object], seconds: float) -> float:
    """Median duration of `action` in seconds, of at least three; two before them are not counted, or one that took as long as all may."""
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds
    if timed(device, action) < seconds:
        timed(device, action)
    spent: list[float] = []
    stop = time.perf_counter() + seconds
    while len(spent) < 3 or time.perf_counter() < stop:
        spent.append(timed(device, action))
    return statistics.median(spent)


def _cuda_seconds(device: torch.device, action: Callable[[], object]) -> float:
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def _host_seconds(device: torch.device, action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
