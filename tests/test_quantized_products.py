"""Products with codes: the map from lanes to elements on a CPU, what is taken when, and the kernel against float64 on a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.nn import functional

from zero_inference.kernels import products
from zero_inference.kernels.experts import pairs_together
from zero_inference.kernels.extension import load_extension, why_unavailable
from zero_inference.kernels.products import FUSED_ROWS, quantized_linear, quantized_linear_reference
from zero_inference.kernels.quantization import GroupQuantization, dequantize_reference, quantize

BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}  # relative, of norms
GROUPS = products.FUSED_GROUP_SIZES
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on CUDA devices only")


class Case:
    """A random weight in groups, tokens for it, and the product in float64 of the weight as the reference restores it."""

    def __init__(self, tokens, rows, columns, bits, group_size, dtype, bias=False, device="cpu", seed=1):
        draw = torch.Generator(device).manual_seed(seed)
        groups = rows * columns // group_size
        self.codes = torch.randint(
            0, 256, (rows * columns * bits // 8,), dtype=torch.uint8, device=device, generator=draw
        )
        self.scale = (0.01 + 0.01 * torch.rand(groups, device=device, generator=draw)).to(dtype)
        self.minimum = (0.05 * torch.randn(groups, device=device, generator=draw) - 0.1).to(dtype)
        self.x = torch.randn(tokens, columns, device=device, generator=draw).to(dtype)
        self.bias = torch.randn(rows, device=device, generator=draw).to(dtype) if bias else None
        self.bits, self.group_size, self.rows = bits, group_size, rows
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        dequantize_reference(self.codes, self.scale, self.minimum, bits, group_size, self.weight)

    @property
    def arguments(self):
        return self.x, self.codes, self.scale, self.minimum, self.bits, self.group_size, self.rows, self.bias

    def exact(self) -> torch.Tensor:
        return functional.linear(
            self.x.double(), self.weight.double(), None if self.bias is None else self.bias.double()
        )

    def error(self, out: torch.Tensor) -> float:
        assert out.dtype == self.x.dtype and out.shape == (self.x.shape[0], self.rows)
        exact = self.exact()
        return float((out.double() - exact).norm() / exact.norm())

    def fused(self, *launch: int) -> torch.Tensor:
        """The operator's answer in memory that held NaN before."""
        torch.full((self.x.shape[0], self.rows), float("nan"), dtype=self.x.dtype, device=self.x.device)
        return torch.ops.zero_inference.linear_groups(*self.operands, *launch)

    @property
    def operands(self):
        """The operator's arguments, which has an empty tensor for no bias."""
        return *self.arguments[:-1], products.no_bias(self.x.device, self.x.dtype) if self.bias is None else self.bias


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bits, group_size", [(4, 64), (4, 16), (8, 32), (8, 5)])
def test_on_a_cpu_it_is_the_product_with_the_plain_weight(bits, group_size, dtype):
    case = Case(3, 37, 4 * group_size, bits, group_size, dtype, bias=True)
    out = quantized_linear(*case.arguments)
    assert case.error(out) < BOUNDS[dtype]
    assert torch.equal(out, functional.linear(case.x, case.weight, case.bias))
    assert torch.equal(out, quantized_linear_reference(*case.arguments))
    assert torch.equal(out, torch.ops.zero_inference.linear_groups(*case.operands))
    shaped = quantized_linear(case.x.view(1, 3, 1, -1), *case.arguments[1:])
    assert shaped.shape == (1, 3, 1, 37) and torch.equal(shaped.view(3, 37), out)


def test_a_weight_that_was_quantized_is_met_again():
    weight = torch.randn(33, 128, generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(3))
    out = quantized_linear(x, *quantize(weight, GroupQuantization(8, 32)), 8, 32, 33)
    assert float((out - x @ weight.t()).norm() / (x @ weight.t()).norm()) < 0.01


def test_gradients_go_through_the_plain_weight():
    case = Case(2, 5, 64, 4, 32, torch.float32)
    case.x.requires_grad_()
    quantized_linear(*case.arguments).sum().backward()
    assert torch.allclose(case.x.grad, case.weight.sum(0).expand(2, -1))


def test_up_to_so_many_tokens_the_operator_is_asked(monkeypatch):
    asked = []

    def reference(x, *rest):
        asked.append(x.shape)
        return quantized_linear_reference(x, *rest)

    monkeypatch.setattr(products, "quantized_linear_reference", reference)  # behind the operator on a CPU
    for allowed in (False, True):
        monkeypatch.setattr(products, "can_fuse", lambda *_, allowed=allowed: allowed)
        for tokens in (1, FUSED_ROWS, FUSED_ROWS + 1):
            case = Case(tokens, 7, 64, 4, 32, torch.bfloat16)
            assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.bfloat16]
    assert asked == [(1, 64), (FUSED_ROWS, 64)]
    text = (ROOT / "csrc" / "launch_sizes.cuh").read_text()
    assert int(re.search(r"kProductTokens = (\d+)", text)[1]) >= FUSED_ROWS
    assert "return 4 * pairs <= weights ? 1 : pairs <= 4 * weights ? 8 : 16;" in " ".join(text.split())
    assert [pairs_together(pairs, 8) for pairs in (2, 3, 32, 33)] == [1, 8, 8, 16]


# Of a block, bytes: RTX 3090 to 5090 and L4 (99 KB), A100 (163 KB), H100 (227 KB), less what product.cu keeps for indexed weights.
SHARED_BYTES = (99 << 10, 163 << 10, 227 << 10)


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("tokens", [1, 8, 13, 14, 16, 17, FUSED_ROWS])
@pytest.mark.parametrize("bits, group_size", [(bits, size) for bits in (4, 8) for size in (16, 32, 64, 128)])
def test_every_device_has_the_shared_memory_of_a_launch(bits, group_size, tokens, shared_bytes):
    """The arithmetic of `Task::shared_bytes` and `choose` in product.cu, of a matrix with many columns."""
    table = (ROOT / "csrc" / "launch_sizes.cuh").read_text()
    product = (ROOT / "csrc" / "quantization" / "product.cu").read_text()
    threads, tiles, stages = (
        int(re.search(rf"kProduct{name} = (\d+)", table)[1]) for name in ("Threads", "Tiles", "Stages")
    )
    warps, step, vector, least_chunk = threads // 32, 64 * 8 // bits, 16, stages - 1

    def taken(column_warps: int) -> int:
        columns, rows = column_warps * least_chunk * step, warps // column_warps * tiles * 16
        stride = (columns // group_size * 2 + vector - 1) // vector * vector | vector
        return warps * stages * tiles * 2 * 32 * vector + 2 * (tokens * columns * 2 + 2 * rows * stride)

    usual = 2 if tokens <= 16 else 1
    assert "return tokens <= 16 ? 2 : 1;" in table and "if (least.shared_bytes(step) > device.shared_bytes)" in product
    room = shared_bytes - int(re.search(r"kFoundBytes = (\d+)", product)[1])
    refused = group_size == 16 and shared_bytes < products.GROUP_16_SHARED_BYTES
    assert refused or taken(usual if taken(usual) <= room else 1) <= room


def test_what_does_not_fit_is_a_value_error_either_way(monkeypatch):
    case = Case(2, 6, 64, 8, 32, torch.float16)
    for fused in (False, True):
        monkeypatch.setattr(products, "can_fuse", lambda *_, fused=fused: fused)
        for change, message in (
            (dict(rows=7), "codes .*448"),
            (dict(group_size=48), "groups of 48, not 64"),
            (dict(scale=case.scale[:-1]), "scale .*12 elements"),
            (dict(bits=5), "bits"),
        ):
            names = ("x", "codes", "scale", "minimum", "bits", "group_size", "rows", "bias")
            with pytest.raises(ValueError, match=message):
                quantized_linear(**(dict(zip(names, case.arguments)) | change))


def test_shapes_can_be_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, codes, groups = torch.empty(3, 64), torch.empty(5 * 32, dtype=torch.uint8), torch.empty(10)
        assert torch.ops.zero_inference.linear_groups(x, codes, groups, groups, 4, 32, 5, groups[:0]).shape == (3, 5)


# --- The map of product.cuh, lane by lane, with numbers small enough to be exact ---

ROW_LANES, STEP_BYTES = 4, 64


def numbers_of(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """uint16 bit patterns as numbers."""
    if dtype == torch.float16:
        return values.astype(np.uint16).view(np.float16).astype(np.float64)
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def halves(words: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """uint32 [...] as the numbers of its two halves [..., 2]."""
    return numbers_of(np.stack([words & 0xFFFF, words >> 16], -1), dtype)


def pairs_of_codes(word: np.ndarray, bits: int, dtype: torch.dtype) -> list[np.ndarray]:
    """A word of codes as pairs of numbers, by the instructions of Codes<T, bits>."""
    word = word.astype(np.uint32)
    if bits == 4 and dtype == torch.float16:
        found = []
        for shifted in (word, word >> 8):
            found.append(halves((shifted & 0x000F000F) | 0x64006400, dtype) - 1024)
            found.append(halves((shifted & 0x00F000F0) | 0x64006400, dtype) / 16 - 64)
        return found
    if bits == 4:
        return [halves(((word >> 4 * i) & 0x000F000F) | 0x43004300, dtype) - 128 for i in range(4)]
    spread = [(word & 0xFF) | (word & 0xFF00) << 8, (word >> 16 & 0xFF) | (word >> 8 & 0xFF0000)]
    if dtype == torch.float16:
        return [halves(pair | 0x64006400, dtype) - 1024 for pair in spread]
    return [
        halves((pair & 0x007F007F) | 0x43004300, dtype) + halves((~pair & 0x00800080) * 0x186, dtype) for pair in spread
    ]


def pairs_of_input(x: np.ndarray, bits: int) -> list[np.ndarray]:
    """Eight neighbouring elements of x [..., 8] as the pairs that meet those of the codes."""
    order = ((0, 4), (1, 5), (2, 6), (3, 7)) if bits == 4 else ((0, 1), (2, 3), (4, 5), (6, 7))
    return [x[..., list(pair)] for pair in order]


def tensor_core(weight: list[np.ndarray], x: list[np.ndarray]) -> np.ndarray:
    """m16n8k16 from what 32 lanes hold ([32, 2] a register) to what they get [32, 4], as PTX defines it."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        for register, (more_rows, more_columns) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            left[row + more_rows, column + more_columns : column + more_columns + 2] = weight[register][lane]
        for register, more in enumerate((0, 8)):
            right[column + more : column + more + 2, row] = x[register][lane]
    result = left @ right
    lanes = np.arange(32)
    corners = [(lanes // 4 + 8 * (i // 2), lanes % 4 * 2 + i % 2) for i in range(4)]
    return np.stack([result[corner] for corner in corners], 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_lanes_hold_the_elements_that_the_tensor_cores_multiply(bits, dtype):
    draw = np.random.default_rng(4)
    elements = STEP_BYTES * 8 // bits
    of_lane = elements // ROW_LANES
    codes = draw.integers(0, 1 << bits, (16, elements))
    x = draw.integers(-8, 9, (8, elements)).astype(np.float64)
    packed = (codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    words = packed.view("<u4").reshape(16, ROW_LANES, 4)
    lanes = np.arange(32)
    rows, columns = lanes // ROW_LANES, lanes % ROW_LANES
    sums = np.zeros((32, 4))
    inputs = of_lane // 8
    for part in range(inputs):
        vector = x.reshape(8, ROW_LANES, inputs, 8)[rows, columns, part]
        tokens = pairs_of_input(vector, bits)
        held = []
        for half in (0, 8):
            in_part = range(part * 4 // inputs, (part + 1) * 4 // inputs)
            held.append([p for word in in_part for p in pairs_of_codes(words[rows + half, columns, word], bits, dtype)])
        upper, lower = held
        assert len(upper) == len(tokens) == 4
        for first in (0, 2):
            weight = [upper[first], lower[first], upper[first + 1], lower[first + 1]]
            sums += tensor_core(weight, tokens[first : first + 2])
    exact = codes @ x.T
    for i in range(4):
        assert np.array_equal(sums[:, i], exact[rows + 8 * (i // 2), columns * 2 + i % 2])
    for code in range(1 << bits):
        word = np.array([code * (0x11111111 if bits == 4 else 0x01010101)], np.uint32)
        assert all((pair == code).all() for pair in pairs_of_codes(word, bits, dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 3, 8, 19])
def test_staged_tokens_lie_where_lanes_look_for_them(bits, tokens):
    elements, steps = STEP_BYTES * 8 // bits, 3
    of_lane, inputs, step_vectors = elements // ROW_LANES, elements // ROW_LANES // 8, elements // 8
    staged = {}
    for token in range(tokens):
        for vector in range(steps * step_vectors):
            of_step = vector % step_vectors
            part = vector // step_vectors * inputs + of_step % inputs
            staged[(part * tokens + token) * ROW_LANES + of_step // inputs] = token, vector * 8
    assert sorted(staged) == list(range(tokens * steps * step_vectors))
    for step in range(steps):
        for part in range(inputs):
            for token in range(tokens):
                for lane in range(ROW_LANES):
                    at = step * inputs * tokens * ROW_LANES + lane + (part * tokens + token) * ROW_LANES
                    assert staged[at] == (token, step * elements + lane * of_lane + part * 8)


# --- The kernel ---


@pytest.fixture(scope="module")
def library():
    assert load_extension(), why_unavailable()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUPS)
def test_products_are_those_of_float64(bits, group_size, dtype, library):
    unit = max(group_size, 128 // bits)
    shapes = ((1, unit), (37, 3 * unit), (130, 8 * unit), (1027, 2048 + unit))
    for seed, (rows, columns) in enumerate(shapes):
        for tokens in range(1, FUSED_ROWS + 1):
            case = Case(tokens, rows, columns, bits, group_size, dtype, tokens % 2 == 0, "cuda", seed)
            first = case.fused()
            assert case.error(first) < BOUNDS[dtype], (rows, columns, tokens)
            assert torch.equal(first, case.fused()), (rows, columns, tokens)
            assert torch.equal(first, quantized_linear(*case.arguments))
        case = Case(FUSED_ROWS + 1, rows, columns, bits, group_size, dtype, True, "cuda", seed)
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[dtype]


@on_gpu
@pytest.mark.parametrize("bits, columns", [(4, 13824), (4, 5120), (8, 5120), (8, 8192)])
def test_products_of_large_weights(bits, columns, library):
    for tokens in (1, 4, 8, 16, 32):
        case = Case(tokens, 5120, columns, bits, 64, torch.bfloat16, True, "cuda", tokens)
        first = case.fused()
        assert case.error(first) < BOUNDS[torch.bfloat16], tokens
        assert all(torch.equal(first, case.fused()) for _ in range(20)), "the same bits in every run"


@on_gpu
@pytest.mark.parametrize("bits, group_size", [(4, 16), (4, 64), (8, 128)])
def test_every_launch_gives_the_same_product(bits, group_size, library):
    splits = (1, 2, 4, 8) if torch.cuda.get_device_capability()[0] >= 9 else (1,)
    limit = torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin
    if limit < products.GROUP_16_SHARED_BYTES:
        pytest.skip(f"{limit} bytes of shared memory are too few for all of them")
    for tokens in (1, 7, 13, 29):
        case = Case(tokens, 331, 9 * 128 * 8 // bits, bits, group_size, torch.float16, True, "cuda", tokens)
        # many tokens in few columns a warp take more shared memory than a block can have; the table does not choose that
        for column_warps in (1, 2, 4, 8) if tokens <= 16 else (1, 2):
            for split in splits:
                for chunk in (2, 4):
                    out = case.fused(column_warps, split, chunk)
                    assert case.error(out) < BOUNDS[torch.float16], (tokens, column_warps, split, chunk)


@on_gpu
def test_on_another_stream_and_in_a_graph(library):
    case = Case(5, 515, 1024, 4, 64, torch.bfloat16, True, "cuda")
    expected = case.fused()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = quantized_linear(*case.arguments)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized_linear(*case.arguments)
    captured.fill_(float("nan"))
    case.x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert case.error(captured) < BOUNDS[torch.bfloat16]


@on_gpu
def test_a_token_that_is_not_a_number_stays_alone(library):
    for tokens in (2, 12, 25):
        case = Case(tokens, 70, 512, 4, 32, torch.float16, False, "cuda")
        expected = case.fused()
        case.x[1] = float("nan")
        out = case.fused()
        others = [token for token in range(tokens) if token != 1]
        assert bool(out[1].isnan().all()) and torch.equal(out[others], expected[others])


@on_gpu
def test_what_the_kernel_cannot_take_is_dequantized(library):
    def moved(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        memory[1:] = tensor.flatten()
        return memory[1:].view(tensor.shape)

    for bits, group_size, columns in ((4, 48, 96), (8, 24, 48), (4, 16, 48), (4, 256, 512)):
        case = Case(3, 11, columns, bits, group_size, torch.float16, False, "cuda")
        assert not products.can_fuse(*case.arguments[:6])
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.float16]
    case = Case(3, 11, 128, 4, 32, torch.float16, True, "cuda")
    assert products.can_fuse(*case.arguments[:6])
    for name in ("x", "codes", "scale", "minimum", "bias"):
        before = getattr(case, name)
        setattr(case, name, moved(before))
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.float16]
        setattr(case, name, before)
    plain = Case(3, 11, 128, 4, 32, torch.float32, True, "cuda")
    assert plain.error(quantized_linear(*plain.arguments)) < 1e-2  # TF32 where it is allowed


@on_gpu
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 with CUDA ended the process where this operator raised; `quantized_linear` refuses before it is called",
)
def test_the_operator_refuses_what_would_be_read_wrongly(library):
    case = Case(4, 8, 256, 4, 64, torch.bfloat16, False, "cuda")
    x, codes, scale, minimum, *_ = case.arguments
    for arguments, message in (
        ((x, codes[:-16], scale, minimum, 4, 64, 8), "codes must be"),
        ((x, codes, scale.half(), minimum, 4, 64, 8), "scale must be"),
        ((x, codes, scale, minimum.cpu(), 4, 64, 8), "minimum must be on CUDA"),
        ((x.float(), codes, scale, minimum, 4, 64, 8), "Half or BFloat16"),
        ((x, codes, scale, minimum, 3, 64, 8), "bits"),
        ((x, codes, scale, minimum, 4, 96, 8), "group_size"),
        ((x.repeat(9, 1), codes, scale, minimum, 4, 64, 8), "tokens at most"),
        ((x, codes, scale, minimum, 4, 64, 8, None, 3), "no such launch"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.zero_inference.linear_groups(*arguments[:7], x[:0, 0], *arguments[8:])
