"""Measure the device: memory bandwidth, matrix products, attention, and what loading weights needs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu import products as cpu_products
from zero_inference.cpu.library import load_library
from zero_inference.cpu.products import quantize
from zero_inference.hardware.bench_copies import uncached_block_bytes
from zero_inference.hardware.profile import DeviceAttentionTime, LoadingRates
from zero_inference.hardware.rates import ATTENTION_DTYPE, ATTENTION_HEAD_DIM, ProductTime
from zero_inference.kernels.decode_attention import attend
from zero_inference.kernels.products import quantized_linear
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models.prompts import disable_cudnn_attention
from zero_inference.models.weights import fill_dummy
from zero_inference.utils import timing
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import capture_graph, measure_median_s

CUDA_BLOCK_BYTES = 1 << 30  # L2 (50 MiB on an H200, 126 MB on a B200) is a few percent of the 2 GiB that a copy touches
COPY_S = 0.2
WEIGHTS_BYTES = 128 << 20  # of all weights of a benchmark on a CPU
WEIGHTS_S = 0.05
CPU_ROWS = 32  # tokens up to which a CPU multiplies codes as stored; a prefill has more and dequantizes first
# Warm-up before the first product: an idle GPU raises its clocks, and int4 once had 1114 GB/s in the first 0.05 s, then 1260.
CLOCKS_S = 0.15
# Rows and columns. A GPU's products take some time beyond their bytes, which two sizes show: int4 with one token has 870 GB/s with the
# first, 2220 with the second and 1390 with 8192 x 8192 (h200-kept/seventh_host/products.txt). With one and eight tokens the line through
# these two is within 10% of most others there and 24% of all from 5120 x 5120 on; the line through 32768 x 8192, which suits the kernel,
# gave 57344 x 8192 up to 20% too little time.
SHAPES = {"cuda": ((4096, 4096), (57344, 8192)), "cpu": ((2048, 2048),)}


def device_copy_gb_per_s(device: torch.device, seconds: float = COPY_S) -> float:
    """Return median GB/s (1e9 bytes) of copies inside device memory, read plus written bytes, in blocks that the caches do not hold
    (1 GiB on CUDA, less if less than 4 GiB are free)."""
    if device.type == "cuda":
        nbytes = min(CUDA_BLOCK_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        nbytes = uncached_block_bytes()
    source = torch.full((nbytes,), 3, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / measure_median_s(device, lambda: target.copy_(source), seconds) / 1e9


def matmul_tflops(
    device: torch.device, dtype: torch.dtype, size: int | None = None, seconds: float = COPY_S, rows: Sequence[int] = ()
) -> float:
    """Return median TFLOP/s (1e12) of [size, size] x [size, size], 2 size^3 operations; the second is transposed as in a linear module.

    Args:
        size: None for `timing.PRODUCT_SIZE`.
        seconds: to measure each number of rows.
        rows: other numbers of rows of the first matrix to try; the best of all counts.
    """
    size = size or timing.PRODUCT_SIZE[device.type]

    def tflops(count: int) -> float:
        # random values: zeros draw less power, and a GPU at its power limit then clocks higher than with any model
        left, weight = (torch.randn(many, size, device=device).to(dtype) for many in (count, size))
        product = torch.empty(count, size, dtype=dtype, device=device)
        spent_s = measure_median_s(device, lambda: torch.mm(left, weight.t(), out=product), seconds)
        return 2 * count * size**2 / spent_s / 1e12

    return max(tflops(count) for count in (size, *rows))


class DeviceWeights:
    """Random matrices of `shape` (rows, columns) on `device`, so many that caches hold few of them; `scheme` None for plain weights."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, scheme: GroupQuantization | None, shape: tuple[int, int]
    ):
        self.device, self.dtype, self.scheme, self.shape = device, dtype, scheme, shape
        elements = math.prod(shape)
        bits = scheme.bits if scheme else 8 * dtype.itemsize
        count = -(-(CUDA_BLOCK_BYTES if device.type == "cuda" else WEIGHTS_BYTES) * 8 // (bits * elements))
        self.matrices = [self._draw(elements) for _ in range(count)]
        self.nbytes = sum(part.nbytes for part in self.matrices[0])

    def _draw(self, elements: int) -> tuple[torch.Tensor, ...]:
        """Return a matrix, or its codes, scales and minima."""
        if self.scheme is None:
            return (torch.randn(self.shape, device=self.device, dtype=self.dtype),)
        codes = torch.randint(256, (elements * self.scheme.bits // 8,), dtype=torch.uint8, device=self.device)
        return codes, *torch.rand(2, elements // self.scheme.group_size, device=self.device).to(self.dtype)

    def product_s(self, tokens: int, seconds: float = WEIGHTS_S) -> float:
        """Return the median time of a product of `tokens` tokens with one matrix (`nbytes` as stored), of several in a row."""
        x = torch.randn(tokens, self.shape[1], device=self.device, dtype=self.dtype)
        action: Callable[[], object] = functools.partial(self._multiply, x)
        if self.device.type == "cuda":
            # launched one by one, int4 took 30 us a matrix from one host and 38 from a slower one
            action = capture_graph(self.device, action)
        return measure_median_s(self.device, action, seconds) / len(self.matrices)

    def _multiply(self, x: torch.Tensor) -> None:
        multiply: Callable[..., object] = quantized_linear
        if self.device.type == "cpu" and len(x) <= CPU_ROWS and load_library() is not None:
            multiply = cpu_products.linear_groups  # as runs of the stream engine do in decode steps
        for parts in self.matrices:
            if self.scheme is None:
                torch.nn.functional.linear(x, *parts)
            else:
                multiply(x, *parts, self.scheme.bits, self.scheme.group_size, self.shape[0], None)


def product_times(
    device: torch.device, dtype: torch.dtype, scheme: GroupQuantization | None, tokens: Sequence[int]
) -> dict[int, ProductTime]:
    """Return the time of a product by number of tokens, without those whose activations do not fit.

    Raises:
        torch.OutOfMemoryError: the weights do not fit.
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
        del weights  # before others are allocated
    return {count: ProductTime.through(each) for count, each in points.items()}


LOADING_SIZE = {"cuda": 8192, "cpu": 2048}  # of a square weight
LOADING_S = 0.1  # of each measurement


def measure_loading(device: torch.device) -> LoadingRates:
    """Measure for about a second. Raises RunError: no host memory may be page-locked."""
    size = LOADING_SIZE[device.type]
    weight = torch.empty(size, size, dtype=torch.bfloat16, device=device)
    kept: list[torch.Tensor] = []  # new memory each time

    def keep() -> None:
        kept.append(host_empty(weight.shape, weight.dtype, pinned=device.type == "cuda"))
        kept[-1].copy_(weight)

    def rate(action: Callable[[], object]) -> float:
        return weight.nbytes / measure_median_s(device, action, LOADING_S) / 1e9

    return LoadingRates(
        draw_gb_per_s=rate(lambda: fill_dummy(weight, "weight", 0)),
        quantize_int8_gb_per_s=rate(lambda: quantize(weight, GroupQuantization(8, GROUP_SIZES[8]))),
        quantize_int4_gb_per_s=rate(lambda: quantize(weight, GroupQuantization(4, GROUP_SIZES[4]))),
        keep_gb_per_s=rate(keep),
    )


# Query heads per key head; key heads of all sequences; positions of each. Others are interpolated: few heads keep little of a GPU busy,
# and few positions take less than the launch of a kernel. Kernels are those of runs, so not cuDNN's, which are not repeatable.
ATTENTION_HEADS, ATTENTION_KEY_HEADS, ATTENTION_POSITIONS = (1, 8), (32, 512), (160, 2048)
CACHES_BYTES, MAX_LAYERS = 256 << 20, 64  # layers have this many bytes in all, unless that takes more layers
ATTENTION_S = 0.05


def measure_device_attention(device: torch.device) -> tuple[DeviceAttentionTime, ...]:
    """Measure decode attention, except where keys and values do not fit in device memory."""
    found = []
    attention_s(device, ATTENTION_HEADS[0], ATTENTION_KEY_HEADS[0], ATTENTION_POSITIONS[0], seconds=CLOCKS_S)
    for heads, key_heads, positions in itertools.product(ATTENTION_HEADS, ATTENTION_KEY_HEADS, ATTENTION_POSITIONS):
        try:
            seconds = attention_s(device, heads, key_heads, positions)
        except torch.OutOfMemoryError:
            continue
        found.append(DeviceAttentionTime(heads=heads, key_heads=key_heads, positions=positions, seconds=seconds))
    return tuple(found)


def attention_s(
    device: torch.device,
    heads: int,
    key_heads: int,
    positions: int,
    key_heads_per_sequence: int = 8,
    layers: int | None = None,
    seconds: float = ATTENTION_S,
) -> float:
    """Return the median time of a layer's decode attention with `heads` query heads per key head and `key_heads` of all sequences.

    Args:
        positions: of each sequence.
        layers: of a graph; None for as many as caches do not hold.
    """
    disable_cudnn_attention()
    shape = key_heads // key_heads_per_sequence, key_heads_per_sequence, positions, ATTENTION_HEAD_DIM
    layer_bytes = 2 * torch.Size(shape).numel() * ATTENTION_DTYPE.itemsize
    count = layers or min(MAX_LAYERS, 1 + CACHES_BYTES // layer_bytes)
    kept = [torch.randn(2, *shape, device=device, dtype=ATTENTION_DTYPE) for _ in range(count)]
    query = torch.randn(
        shape[0], heads * key_heads_per_sequence, 1, ATTENTION_HEAD_DIM, device=device, dtype=ATTENTION_DTYPE
    )
    mask = torch.zeros(shape[0], 1, 1, positions, device=device, dtype=ATTENTION_DTYPE)

    def step() -> None:
        for keys, values in kept:
            attend(_plain, torch.nn.Identity(), query, keys, values, mask)

    action = capture_graph(device, step) if device.type == "cuda" else step
    return measure_median_s(device, action, seconds) / count


def _plain(module, query, key, value, mask, **_) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), None
