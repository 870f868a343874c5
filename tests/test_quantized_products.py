"""Products with codes: what is taken when, and the kernel against float64 on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from kernel_cases import (
    BOUNDS,
    PUBLISHED,
    PackedWeights,
    SeenOperators,
    on_gpu,
    own,
    published,
    relative_error,
    whole_rows,
)
from torch.nn import functional

from zero_inference.kernels import products
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.kernels.products import FUSED_ROWS, format_can_fuse, pairs_together, quantized_linear
from zero_inference.kernels.quantization import operands

GROUPS = products.FUSED_GROUP_SIZES


class Case:
    """A random weight in groups, tokens for it, and the product in float64 of the weight as the reference restores it."""

    def __init__(self, tokens, rows, columns, form, dtype, bias=False, device="cpu", seed=1):
        packed = PackedWeights(1, rows, columns, form, dtype, device, seed)
        self.weight = QuantizedWeight(form, **{name: each[0] for name, each in packed.weight.tensors.items()})
        self.plain, self.exact = packed.plain[0], packed.exact[0]
        self.x = packed.normal(tokens, columns).to(dtype)
        self.bias = packed.normal(rows).to(dtype) if bias else None
        self.rows = rows

    @property
    def arguments(self):
        return self.x, self.weight, self.rows, self.bias

    def error(self, out: torch.Tensor) -> float:
        assert out.dtype == self.x.dtype and out.shape == (self.x.shape[0], self.rows)
        bias = None if self.bias is None else self.bias.double()
        return relative_error(out, functional.linear(self.x.double(), self.exact, bias))

    def fused(self, *launch: int) -> torch.Tensor:
        """The operator's answer in memory that held NaN before."""
        torch.full((self.x.shape[0], self.rows), float("nan"), dtype=self.x.dtype, device=self.x.device)
        return torch.ops.zero_inference.linear_groups(*self.operands, *launch)

    @property
    def operands(self):
        """The operator's arguments, which has an empty tensor for no bias."""
        bias = products.no_bias(self.x.device, self.x.dtype) if self.bias is None else self.bias
        return self.x, *operands(self.weight), self.rows, bias


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bits, group_size", [(4, 64), (4, 16), (8, 32), (8, 5)])
def test_on_a_cpu_it_is_the_product_with_the_plain_weight(bits, group_size, dtype):
    case = Case(3, 37, 4 * group_size, own(bits, group_size, dtype), dtype, bias=True)
    out = quantized_linear(*case.arguments)
    assert case.error(out) < BOUNDS[dtype]
    assert torch.equal(out, functional.linear(case.x, case.plain, case.bias))
    assert torch.equal(out, torch.ops.zero_inference.linear_groups(*case.operands))
    shaped = quantized_linear(case.x.view(1, 3, 1, -1), *case.arguments[1:])
    assert shaped.shape == (1, 3, 1, 37) and torch.equal(shaped.view(3, 37), out)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats_on_a_cpu(name, dtype):
    form = published(name, dtype)
    case = Case(3, whole_rows(37, form), 192, form, dtype, bias=True)
    out = quantized_linear(*case.arguments)
    assert case.error(out) < 2 * BOUNDS[dtype]  # dequantized weights are rounded, too
    assert torch.equal(out, torch.ops.zero_inference.linear_groups(*case.operands))


def test_formats_that_have_a_kernel():
    fused = {
        dtype: {name for name in PUBLISHED if format_can_fuse(published(name, dtype), dtype)}
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    integers = {"int4", "int8", "int4 with zero points"}
    assert fused[torch.float32] == set() and fused[torch.float16] == integers
    assert fused[torch.bfloat16] == PUBLISHED.keys() - {"int8 with zero points"}
    for form in (
        own(4, 256, torch.bfloat16),
        own(4, 32, torch.float16),
        WeightFormat(Codes.INT4, 16, scale_dtype=torch.bfloat16),  # a lane would need two zero points
        WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e8m0fnu),
        WeightFormat(Codes.E4M3, 32),
    ):
        assert not format_can_fuse(form, torch.bfloat16)


def test_gradients_go_through_the_plain_weight():
    case = Case(2, 5, 64, own(4, 32, torch.float32), torch.float32)
    case.x.requires_grad_()
    quantized_linear(*case.arguments).sum().backward()
    assert torch.allclose(case.x.grad, case.plain.sum(0).expand(2, -1))


def test_up_to_so_many_tokens_the_operator_is_asked(monkeypatch):
    asked = []

    for allowed in (False, True):
        monkeypatch.setattr(products, "can_fuse", lambda *_, allowed=allowed: allowed)
        for tokens in (1, FUSED_ROWS, FUSED_ROWS + 1):
            case = Case(tokens, 7, 64, own(4, 32, torch.bfloat16), torch.bfloat16)
            with SeenOperators() as seen:
                assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.bfloat16]
            asked += [args[0].shape for name, args in seen.calls if "linear_groups" in name]
    assert asked == [(1, 64), (FUSED_ROWS, 64)]
    text = (ROOT / "csrc" / "launch_sizes.cuh").read_text()
    assert int(re.search(r"kProductTokens = (\d+)", text)[1]) >= FUSED_ROWS
    assert "return 4 * pairs <= weights ? 1 : pairs <= 4 * weights ? 8 : 16;" in " ".join(text.split())
    assert [pairs_together(pairs, 8) for pairs in (2, 3, 32, 33)] == [1, 8, 8, 16]


def test_what_does_not_fit_is_a_value_error_either_way(monkeypatch):
    case = Case(2, 6, 64, own(8, 32, torch.float16), torch.float16)
    for fused in (False, True):
        monkeypatch.setattr(products, "can_fuse", lambda *_, fused=fused: fused)
        for change, message in (
            (dict(rows=7), "codes .*448"),
            (dict(weight=replace(case.weight, scales=case.weight.scales.view(-1)[:-1])), "scales .*12 elements"),
            (dict(weight=replace(case.weight, offsets=None)), "offsets are missing"),
        ):
            names = ("x", "weight", "rows", "bias")
            with pytest.raises(ValueError, match=message):
                quantized_linear(**(dict(zip(names, case.arguments)) | change))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUPS)
def test_products_are_those_of_float64(bits, group_size, dtype):
    unit = max(group_size, 128 // bits)
    shapes = ((1, unit), (37, 3 * unit), (130, 8 * unit), (1027, 2048 + unit))
    for seed, (rows, columns) in enumerate(shapes):
        for tokens in range(1, FUSED_ROWS + 1):
            case = Case(tokens, rows, columns, own(bits, group_size, dtype), dtype, tokens % 2 == 0, "cuda", seed)
            first = case.fused()
            assert case.error(first) < BOUNDS[dtype], (rows, columns, tokens)
            assert torch.equal(first, case.fused()), (rows, columns, tokens)
            assert torch.equal(first, quantized_linear(*case.arguments))
        case = Case(FUSED_ROWS + 1, rows, columns, own(bits, group_size, dtype), dtype, True, "cuda", seed)
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[dtype]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_products_of_published_formats_are_those_of_float64(name, dtype):
    """Columns of one and many steps, whose last is whole or not; rows of bytes of scales that begin anywhere in a word."""
    form = published(name, dtype)
    unit = 128 // form.bits if form.codes == Codes.E4M3 else max(form.group_size, 128 // form.bits)
    fuses = format_can_fuse(form, dtype)
    launches = ((1, 1, 2), (2, 1, 2), (4, 1, 4)) if fuses else ()
    bound = BOUNDS[dtype] if fuses else 2 * BOUNDS[dtype]  # dequantized weights are rounded, too
    for seed, (rows, columns) in enumerate(((1, unit), (37, 3 * unit), (130, 37 * unit), (1027, 2048 + unit))):
        for tokens in (1, 2, 8, 13, 32):
            case = Case(tokens, whole_rows(rows, form), columns, form, dtype, tokens % 2 == 0, "cuda", seed)
            first = quantized_linear(*case.arguments)
            assert products.can_fuse(*case.arguments[:2]) == fuses
            assert case.error(first) < bound, (rows, columns, tokens)
            assert torch.equal(first, quantized_linear(*case.arguments)), (rows, columns, tokens)
            for launch in launches if tokens <= 8 else ():
                assert case.error(case.fused(*launch)) < BOUNDS[dtype], (rows, columns, tokens, launch)
        case = Case(FUSED_ROWS + 1, whole_rows(rows, form), columns, form, dtype, True, "cuda", seed)
        assert case.error(quantized_linear(*case.arguments)) < 2 * BOUNDS[dtype]


@on_gpu
def test_a_row_beside_scales_that_are_not_numbers_stays_finite():
    """After a row's last group, within its last step, lie scales of the next row."""
    case = Case(2, 4, 160, published("mxfp4", torch.bfloat16), torch.bfloat16, False, "cuda")
    expected = case.fused()
    case.weight.scales.view(torch.uint8)[1::2] = 255
    out = case.fused()
    assert torch.equal(out[:, ::2], expected[:, ::2]) and bool(out[:, 1::2].isnan().all())


@on_gpu
@pytest.mark.parametrize("bits, columns", [(4, 13824), (4, 5120), (8, 5120), (8, 8192)])
def test_products_of_large_weights(bits, columns):
    for tokens in (1, 4, 8, 16, 32):
        case = Case(tokens, 5120, columns, own(bits, 64, torch.bfloat16), torch.bfloat16, True, "cuda", tokens)
        first = case.fused()
        assert case.error(first) < BOUNDS[torch.bfloat16], tokens
        assert all(torch.equal(first, case.fused()) for _ in range(20)), "the same bits in every run"


@on_gpu
@pytest.mark.parametrize("bits, group_size", [(4, 16), (4, 64), (8, 128)])
def test_every_launch_gives_the_same_product(bits, group_size):
    splits = (1, 2, 4, 8) if torch.cuda.get_device_capability()[0] >= 9 else (1,)
    limit = torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin
    if limit < products.GROUP_16_SHARED_BYTES:
        pytest.skip(f"{limit} bytes of shared memory are too few for all of them")
    for tokens in (1, 7, 13, 29):
        case = Case(
            tokens, 331, 9 * 128 * 8 // bits, own(bits, group_size, torch.float16), torch.float16, True, "cuda", tokens
        )
        # many tokens in few columns a warp take more shared memory than a block can have; the table does not choose that
        for column_warps in (1, 2, 4, 8) if tokens <= 16 else (1, 2):
            for split in splits:
                for chunk in (2, 4):
                    out = case.fused(column_warps, split, chunk)
                    assert case.error(out) < BOUNDS[torch.float16], (tokens, column_warps, split, chunk)


@on_gpu
def test_on_another_stream_and_in_a_graph():
    case = Case(5, 515, 1024, own(4, 64, torch.bfloat16), torch.bfloat16, True, "cuda")
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
def test_a_token_that_is_not_a_number_stays_alone():
    for tokens in (2, 12, 25):
        case = Case(tokens, 70, 512, own(4, 32, torch.float16), torch.float16, False, "cuda")
        expected = case.fused()
        case.x[1] = float("nan")
        out = case.fused()
        others = [token for token in range(tokens) if token != 1]
        assert bool(out[1].isnan().all()) and torch.equal(out[others], expected[others])


@on_gpu
def test_what_the_kernel_cannot_take_is_dequantized():
    def moved(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        memory[1:] = tensor.flatten()
        return memory[1:].view(tensor.shape)

    for bits, group_size, columns in ((4, 48, 96), (8, 24, 48), (4, 16, 48), (4, 256, 512)):
        case = Case(3, 11, columns, own(bits, group_size, torch.float16), torch.float16, False, "cuda")
        assert not products.can_fuse(*case.arguments[:2])
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.float16]
    case = Case(3, 11, 128, own(4, 32, torch.float16), torch.float16, True, "cuda")
    assert products.can_fuse(*case.arguments[:2])
    weight = case.weight
    for name in weight.tensors:
        case.weight = replace(weight, **{name: moved(getattr(weight, name))})
        assert not products.can_fuse(*case.arguments[:2])
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.float16]
    case.weight = weight
    for name in ("x", "bias"):
        before = getattr(case, name)
        setattr(case, name, moved(before))
        assert case.error(quantized_linear(*case.arguments)) < BOUNDS[torch.float16]
        setattr(case, name, before)
    plain = Case(3, 11, 128, own(4, 32, torch.float32), torch.float32, True, "cuda")
    assert plain.error(quantized_linear(*plain.arguments)) < 1e-2  # TF32 where it is allowed


@on_gpu
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 with CUDA ended the process where this operator raised; `quantized_linear` refuses before it is called",
)
def test_the_operator_refuses_what_would_be_read_wrongly():
    case = Case(4, 8, 256, own(4, 64, torch.bfloat16), torch.bfloat16, False, "cuda")
    weight, rows = case.weight, 8
    for change, message in (
        (dict(codes=weight.codes.view(-1)[:-16]), "codes must be"),
        (dict(scales=weight.scales.half()), "no such format"),
        (dict(offsets=weight.offsets.cpu()), "offset must be on CUDA"),
        (dict(format=replace(weight.format, group_size=96)), "no such format"),
        (dict(format=replace(weight.format, codes=Codes.E4M3)), "no such format"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.zero_inference.linear_groups(case.x, *operands(replace(weight, **change)), rows, case.x[:0, 0])
    for x, launch, message in (
        (case.x.float(), (), "Half or BFloat16"),
        (case.x.repeat(9, 1), (), "tokens at most"),
        (case.x, (3,), "no such launch"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.zero_inference.linear_groups(x, *operands(weight), rows, case.x[:0, 0], *launch)
