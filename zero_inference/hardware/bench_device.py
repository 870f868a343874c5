"""Measure the device: memory bandwidth, matrix products, attention, what loading weights needs, and launch overhead with models so small
that nothing else takes time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu import products as cpu_products
from zero_inference.cpu.library import load_library
from zero_inference.cpu.products import quantize
from zero_inference.hardware.bench_copies import uncached_block_bytes
from zero_inference.hardware.profile import (
    ATTENTION_HEAD_DIM,
    DeviceAttentionTime,
    LaunchOverhead,
    LoadingRates,
    ProductTime,
)
from zero_inference.kernels.decode_attention import attend, using_decode_attention
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.formats import QuantizedWeight
from zero_inference.kernels.products import quantized_linear
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.models.prompts import disable_cudnn_attention, greedy_config
from zero_inference.models.tracing import trace_pass
from zero_inference.models.weights import fill_dummy
from zero_inference.norms.patch import patch_norms
from zero_inference.utils import timing
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.interpreter import freeze_existing_objects
from zero_inference.utils.timing import capture_graph, measure_median_s, time_wall_s

CUDA_BLOCK_BYTES = 1 << 30  # L2 (50 MiB on an H200, 126 MB on a B200) is a few percent of the 2 GiB that a copy touches
COPY_S = 0.2
WEIGHTS_BYTES = 128 << 20  # of all weights of a benchmark on a CPU
WEIGHTS_S = 0.05
CPU_FUSED_ROWS = 32  # tokens up to which a CPU multiplies codes as stored; a prefill has more and dequantizes first
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
        first = self.matrices[0]
        tensors = [first] if isinstance(first, torch.Tensor) else first.tensors.values()
        self.nbytes = sum(each.nbytes for each in tensors)

    def _draw(self, elements: int) -> torch.Tensor | QuantizedWeight:
        if self.scheme is None:
            return torch.randn(self.shape, device=self.device, dtype=self.dtype)
        codes = torch.randint(256, (elements * self.scheme.bits // 8,), dtype=torch.uint8, device=self.device)
        scale, minimum = torch.rand(2, elements // self.scheme.group_size, device=self.device).to(self.dtype)
        return self.scheme.as_weight(codes, scale, minimum)

    def product_s(self, tokens: int, seconds: float = WEIGHTS_S) -> float:
        """Return the median time of a product of `tokens` tokens with one matrix (`nbytes` as stored), of several in a row."""
        x = torch.randn(tokens, self.shape[1], device=self.device, dtype=self.dtype)
        action: Callable[[], object] = functools.partial(self._multiply, x)
        if self.device.type == "cuda":
            # launched one by one, int4 took 30 us a matrix from one host and 38 from a slower one
            action = capture_graph(self.device, action)
        return measure_median_s(self.device, action, seconds) / len(self.matrices)

    def _multiply(self, x: torch.Tensor) -> None:
        # as runs of the stream engine do in decode steps
        on_cpu = self.device.type == "cpu" and len(x) <= CPU_FUSED_ROWS and load_library() is not None
        for matrix in self.matrices:
            if isinstance(matrix, torch.Tensor):
                torch.nn.functional.linear(x, matrix)
            elif on_cpu:
                cpu_products.linear_groups(x, matrix, self.shape[0])
            else:
                quantized_linear(x, matrix, self.shape[0])


def product_times(
    device: torch.device, dtype: torch.dtype, scheme: GroupQuantization | None, tokens: Sequence[int]
) -> dict[int, ProductTime]:
    """Return the time of a product by number of tokens, without those whose activations do not fit. Raises torch.OutOfMemoryError: the
    weights do not fit."""
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
ATTENTION_DTYPE = torch.bfloat16
CACHES_BYTES, MAX_LAYERS = 256 << 20, 64  # layers have this many bytes in all, unless that takes more layers
ATTENTION_S = 0.05


def measure_device_attention(device: torch.device) -> tuple[DeviceAttentionTime, ...]:
    """Measure decode attention, except where keys and values do not fit in device memory."""
    found = []
    attention_s(device, ATTENTION_HEADS[0], ATTENTION_KEY_HEADS[0], ATTENTION_POSITIONS[0], seconds=CLOCKS_S)
    for heads, key_heads, positions in itertools.product(ATTENTION_HEADS, ATTENTION_KEY_HEADS, ATTENTION_POSITIONS):
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds = attention_s(device, heads, key_heads, positions)
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
    options: dict[str, Any] = {"device": device, "dtype": ATTENTION_DTYPE}
    sequences = key_heads // key_heads_per_sequence
    shape = sequences, key_heads_per_sequence, positions, ATTENTION_HEAD_DIM
    layer_bytes = 2 * math.prod(shape) * ATTENTION_DTYPE.itemsize
    count = layers or min(MAX_LAYERS, 1 + CACHES_BYTES // layer_bytes)
    kept = [torch.randn(2, *shape, **options) for _ in range(count)]
    query = torch.randn(sequences, heads * key_heads_per_sequence, 1, ATTENTION_HEAD_DIM, **options)
    mask = torch.zeros(sequences, 1, 1, positions, **options)

    def step() -> None:
        for keys, values in kept:
            attend(_plain, torch.nn.Identity(), query, keys, values, mask)

    action = capture_graph(device, step) if device.type == "cuda" else step
    return measure_median_s(device, action, seconds) / count


def _plain(module, query, key, value, mask, **_) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), None


LAYERS = 1, 16  # of two models of a family, whose difference in operators and module calls is measured
TOKENS = 16  # decode steps of a measured generation
ROUNDS = 3  # measurements of each model in a visit
GRAPH_WIDTH = 4096  # hidden size at which small kernels take as long as those of usual models
GRAPH_S = 0.05  # for which a graph is replayed
POSITIONS = 160  # of the small models


def small_model(family: str, layers: int, width: int = 64, heads: int = 4) -> Any:
    """Return a "llama" or "opt" with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "llama": dict(intermediate_size=2 * width, num_key_value_heads=heads),
        "opt": dict(ffn_dim=2 * width, word_embed_proj_dim=width),
    }
    config = AutoConfig.for_model(
        family,
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        vocab_size=256,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=None,
        **sizes[family],
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


class LaunchBench:
    """Times decode steps of small Llamas and OPTs of two sizes, to solve for the time of an operator, a module call and a step.

    A Llama's layer has three operators for each module call, OPT's about one. Models alternate, in several visits, and the median counts,
    because a shared host may be half as fast for a second or a minute: measured one after the other they gave 3.7 ms a step on an H200's
    host, where a run took less than one.
    """

    def __init__(self, device: torch.device):
        disable_cudnn_attention()
        self.device = device
        self.models = [
            _SmallModel(small_model(family, layers), device) for family in ("llama", "opt") for layers in LAYERS
        ]
        self.attention = measure_device_attention(device) if device.type == "cuda" else ()
        self.graph_operator_s = measure_graph_operator(device) if device.type == "cuda" else None

    @freeze_existing_objects()
    def visit(self) -> None:
        """Measure each model `ROUNDS` times, in a second or two."""
        for _ in range(ROUNDS):
            for model in self.models:
                model.measure()

    def result(self) -> LaunchOverhead:
        """Return the launch overhead by the medians of all visits; least squares of two equations, without negative costs."""
        import numpy as np
        from scipy.optimize import nnls

        steps = [(each.operators, each.module_calls, statistics.median(each.rounds_s)) for each in self.models]
        llama, large_llama, opt, large_opt = np.array(steps)
        equations = np.stack([large_llama - llama, large_opt - opt])
        (operator_s, module_s), _ = nnls(equations[:, :2], equations[:, 2])
        operators, module_calls, step_s = steps[0]
        return LaunchOverhead(
            operator_s=float(operator_s),
            module_s=float(module_s),
            step_s=max(0.0, float(step_s - operators * operator_s - module_calls * module_s)),
            graph_operator_s=self.graph_operator_s,
            attention=self.attention,
        )


class _SmallModel:
    """A small model whose decode steps are timed, with our norm and rotary kernels as in a run on a GPU.

    `operators` and `module_calls` of a step are counted with transformers' own code, as by a plan; `rounds_s` has the seconds of a step.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device = device
        counted = trace_pass(model, None, 1, TOKENS)
        assert counted is not None, "OPT and Llama run on the meta device"
        self.operators, self.module_calls = counted.launches, counted.module_calls
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device, self.dtype)
        self.ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
        self.fuses = device.type == "cuda" and load_extension()
        if self.fuses:
            patch_norms(self.model)
        self._generation_s(2)  # loads kernels
        self.rounds_s: list[float] = []

    def measure(self) -> None:
        few_s, many_s = self._generation_s(2), self._generation_s(2 + TOKENS)
        self.rounds_s.append((many_s - few_s) / TOKENS)

    def _generation_s(self, tokens: int) -> float:
        options = {"generation_config": greedy_config(tokens), "attention_mask": torch.ones_like(self.ids)}
        with rotary_kernel(self.model, self.device, self.dtype) if self.fuses else contextlib.nullcontext():
            return time_wall_s(self.device, lambda: self.model.generate(self.ids, **options))


def measure_graph_operator(device: torch.device) -> float:
    """Return the device time of an operator of a decoder layer in a CUDA graph, without products and attention.

    A Llama's layer with 40 heads took 43 us on an H200 besides its products; a chain of sums of 4096 elements instead took 0.96 us an
    operator (h200-kept/seventh_host: resident.txt, machine.json). Our norm and rotary kernels count as many operators as transformers'
    own code has.
    """
    (few, small_s), (many, large_s) = (_step_without_products(layers, device) for layers in LAYERS)
    layers = LAYERS[1] - LAYERS[0]
    heads = GRAPH_WIDTH // ATTENTION_HEAD_DIM
    layer_attention_s = attention_s(device, 1, heads, POSITIONS, key_heads_per_sequence=heads, layers=LAYERS[1])
    layer_s = max(0.0, large_s - small_s) / layers
    return max(0.0, layer_s - layer_attention_s) / ((many - few) / layers - 1)  # one of a layer's is attention


class _NoProduct(torch.nn.Module):
    """Replaces a linear module: returns the same zeros for any input."""

    def __init__(self, like: torch.nn.Linear):
        super().__init__()
        self.register_buffer("out", torch.zeros(1, 1, like.out_features, device=like.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, columns] -> [1, 1, rows]."""
        return self.out


@torch.no_grad()
def _step_without_products(layers: int, device: torch.device) -> tuple[int, float]:
    """Return operators and seconds of a decode step of a Llama without matrix products, on CUDA of its graph."""
    disable_cudnn_attention()
    with torch.device("meta"):
        model = small_model("llama", layers, GRAPH_WIDTH, GRAPH_WIDTH // ATTENTION_HEAD_DIM)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, _NoProduct(module))
    counted = trace_pass(model, None, 1, POSITIONS - 1)
    assert counted is not None, "a Llama runs on the meta device"
    rotary = type(model.model.rotary_emb)(model.config).to(device)
    model = model.to_empty(device=device).to(torch.bfloat16)
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        parameter.fill_(1.0)
    if load_extension():
        patch_norms(model)
    cache = DeviceKVCache(model.config, POSITIONS)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    position = ids.new_zeros(1)
    mask = torch.zeros(1, 1, 1, POSITIONS, dtype=torch.bfloat16, device=device)
    model(input_ids=ids, past_key_values=cache)  # allocates the cache

    def step() -> None:
        with cache.writing_at({position.device: position}), using_decode_attention(model):
            model(input_ids=ids, position_ids=ids, attention_mask=mask, past_key_values=cache)

    action: Callable[[], object] = step
    if device.type == "cuda":
        with rotary_kernel(model, device, torch.bfloat16) if load_extension() else contextlib.nullcontext():
            action = capture_graph(device, step)
    return counted.launches, measure_median_s(device, action, GRAPH_S)
