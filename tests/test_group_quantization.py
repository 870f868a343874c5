"""Quantization in groups: exact packing, a bound on the error, no worse than DeepSpeed's, and refusals that say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    PUBLISHED,
    PackedWeights,
    on_gpu,
    published,
    quantized,
    relative_error,
    skip_without,
    whole_rows,
)

from zero_inference.cpu.library import INSTRUCTIONS
from zero_inference.cpu.products import quantize as quantize_on_cpu
from zero_inference.kernels import formats, quantization
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.kernels.quantization import GroupQuantization, dequantize, quantize

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROUNDING = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
}  # relative, of a number to its dtype


def weights(*shape: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def restored(weight: torch.Tensor, scheme: GroupQuantization) -> torch.Tensor:
    return quantized(weight, scheme.bits, scheme.group_size)[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "bits, weight, codes, scale, minimum",
    [
        # the even element is in the low nibble: codes 0 15 2 7 and 15 1 0 3
        (4, [[-1.0, 6.5, 0.0, 2.5], [30.0, 2.0, 0.0, 6.0]], [0xF0, 0x72, 0x1F, 0x30], [0.5, 2.0], [-1.0, 0.0]),
        (
            8,
            [[0.0, 63.75, 0.25, 32.0], [-2.0, 253.0, 0.0, 126.0]],
            [0, 255, 1, 128, 0, 255, 2, 128],
            [0.25, 1],
            [0, -2],
        ),
    ],
)
def test_codes_by_hand(bits, weight, codes, scale, minimum, dtype):
    parts, out = quantized(torch.tensor(weight, dtype=dtype), bits, 4)
    assert [part.tolist() for part in parts] == [codes, scale, minimum] and out.tolist() == weight
    assert [part.dtype for part in parts] == [torch.uint8, dtype, dtype]


def test_the_sum_is_rounded_once_and_the_product_on_its_own():
    # 255 * 0.1 in float32 is 25.5 exactly after rounding, with a fused multiply-add it is not
    scale, minimum = torch.tensor([0.1]), torch.tensor([-25.5])
    out = torch.empty(1, 1)
    dequantize(GroupQuantization(8, 1).as_weight(torch.tensor([255], dtype=torch.uint8), scale, minimum), out)
    assert out.item() == 0.0 and 255 * scale.double().item() - 25.5 != 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, group_size", [(8, 64), (8, 5), (4, 64), (4, 6)])
def test_error_of_each_group_is_bounded(bits, group_size, dtype):
    """The extremes alone give every element half a step, or at the top what rounding the scale takes off `largest` steps; the
    fit may only lower a group's squared error. On top comes the rounding of the result."""
    scheme = GroupQuantization(bits, group_size)
    for offset in (0.0, 0.5):
        weight = weights(33, 2 * group_size, dtype=dtype) + offset
        groups = weight.double().view(-1, group_size)
        spread = groups.amax(1) - groups.amin(1)
        rounding = ROUNDING[dtype]
        step = torch.maximum(spread / ((1 << scheme.bits) - 1) * (1 + rounding) / 2, spread * rounding)
        bound = step + rounding * (groups.abs().amax(1) + step) + 1e-7
        error = restored(weight, scheme).double().view(-1, group_size) - groups
        assert bool((error.square().mean(1).sqrt() <= bound).all())
        assert offset or error.abs().max() > 0


def squared_errors(found: torch.Tensor, weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return (found.float() - weight.float()).view(-1, group_size).square().sum(1)


def extremes_and_one_fit(weight: torch.Tensor, scheme: GroupQuantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors of the extremes of each group, and of the least-squares fit to the codes that these give."""
    values = weight.float().view(-1, scheme.group_size)
    low, high = values.aminmax(dim=1, keepdim=True)
    step = ((high - low) / ((1 << scheme.bits) - 1)).to(weight.dtype).float()

    def restored_by(step, minimum):
        codes = ((values - minimum) / step).round().clamp(0, ((1 << scheme.bits) - 1))
        return codes, (codes * step + minimum).to(weight.dtype)

    codes, plain = restored_by(step, low)
    found = []
    for row, code in zip(values.double(), codes.double()):
        line = torch.linalg.lstsq(torch.stack([code, torch.ones_like(code)], 1), row[:, None]).solution.view(-1)
        found.append(line)
    scale = torch.stack(found)[:, :1].to(weight.dtype).float()
    offset = values.mean(1, keepdim=True) - scale * codes.mean(1, keepdim=True)
    fitted = restored_by(scale, offset.to(weight.dtype).float())[1]
    return squared_errors(plain, values, scheme.group_size), squared_errors(fitted, values, scheme.group_size)


@pytest.mark.parametrize(
    "bits, dtype", [(4, torch.bfloat16), (4, torch.float16), (8, torch.float32), (8, torch.bfloat16)]
)
def test_no_group_is_worse_than_with_its_extremes_or_one_fit_to_them(bits, dtype):
    weight = weights(40, 128, dtype=dtype)
    scheme = GroupQuantization(bits, 32)
    extremes, fitted = extremes_and_one_fit(weight, scheme)
    for way in (quantize, quantize_on_cpu):
        found = squared_errors(quantized(weight, bits, 32, way)[1], weight, 32)
        assert bool((found <= torch.minimum(extremes, fitted) * 1.0001).all())


@pytest.mark.parametrize("group_size, most, before", [(32, 0.0705, 0.0748), (64, 0.0820, 0.0868)])
def test_four_bits_are_nearly_as_good_as_any_scale_and_minimum_make_them(group_size, most, before):
    """Of random normal numbers 400 clipped ranges, each fitted twice, miss 6.94% in groups of 32 and 8.09% in groups of 64."""
    weight = weights(300, 256, dtype=torch.bfloat16)
    scheme = GroupQuantization(4, group_size)
    fitted = torch.minimum(*extremes_and_one_fit(weight, scheme)).sum().sqrt() / weight.float().norm()
    assert before < fitted, "what one fit gives is not what it is compared with"
    for way in (quantize, quantize_on_cpu):
        assert relative_error(quantized(weight, 4, group_size, way)[1], weight) < most


def test_weights_that_four_bits_hold_exactly_stay_exact():
    draw = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (64, 32), generator=draw)
    codes[:, 0], codes[:, 1] = 0, 15
    weight = (codes * 2.0 ** torch.randint(-8, 2, (64, 1), generator=draw) - 1.0).bfloat16()
    for way in (quantize, quantize_on_cpu):
        assert torch.equal(quantized(weight, 4, 32, way)[1], weight)


@pytest.mark.parametrize("instructions", INSTRUCTIONS[:3])
@pytest.mark.parametrize("bits, group_size", [(8, 64), (8, 5), (4, 32), (4, 6), (4, 256)])
def test_the_cpu_library_quantizes_as_well_as_pytorch(bits, group_size, instructions):
    """It adds in another order, so that of tries that are as good as each other another one may stay."""
    skip_without(instructions)
    scheme = GroupQuantization(bits, group_size)
    for dtype in DTYPES:
        weight = weights(53, 3 * group_size, dtype=dtype)
        weight[:5] = weight[:5, :1]  # groups of one value
        if dtype == torch.float16:
            weight[9:20] *= 2.0**-12  # scales below the normal numbers
        for divides in (False, True):
            expected = quantize(weight, scheme, divides)
            found = quantize_on_cpu(weight, scheme, divides, instructions)
            for new, old in zip(found, expected):  # of float32 the last bits differ
                assert new.dtype == old.dtype and new.shape == old.shape
                assert float(torch.isclose(new.float(), old.float(), rtol=1e-5, atol=1e-7).float().mean()) > 0.99
            if not divides:
                errors = []
                for parts in (found, expected):
                    out = torch.empty_like(weight)
                    dequantize(scheme.as_weight(*parts), out)
                    errors.append(squared_errors(out, weight, group_size))
                assert float(errors[0].sum()) <= 1.0001 * float(errors[1].sum())
                assert not float(errors[0][: 5 * 3].sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_constant_groups_are_exact(bits, dtype):
    weight = torch.tensor([0.0, -3.0, 0.1, 6e-8, 60000.0]).to(dtype)[:, None].repeat(1, 16)
    codes, scale, minimum = quantize(weight, GroupQuantization(bits, 8))
    assert not codes.any() and not scale.any() and torch.equal(minimum.view(5, 2)[:, 0], weight[:, 0])
    assert torch.equal(restored(weight, GroupQuantization(bits, 8)), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_range_below_the_steps_of_float16_scales_survives(bits):
    weight = (torch.arange(16)[None] * 2.0**-20).half()
    scheme = GroupQuantization(bits, 16)
    _, scale, _ = quantize(weight, scheme)
    assert float((restored(weight, scheme) - weight).abs().max()) <= float(scale.float().max()) / 2


@pytest.mark.parametrize("bits", [8, 4])
def test_chunks_change_nothing(bits, monkeypatch):
    weight = weights(7, 96, dtype=torch.float16)
    scheme = GroupQuantization(bits, 24)
    whole, out = quantize(weight, scheme), restored(weight, scheme)
    for chunk in (1, 50, 24 * 27):
        for module in (quantization, formats):
            monkeypatch.setattr(module, "CHUNK_NUMEL", chunk)
        assert all(torch.equal(*pair) for pair in zip(whole, quantize(weight, scheme)))
        assert torch.equal(restored(weight, scheme), out)


def test_fused_experts_and_strided_weights_are_quantized_as_they_read():
    experts = weights(3, 10, 64, dtype=torch.bfloat16)
    scheme = GroupQuantization(4, 32)
    assert scheme.can_quantize(experts)
    found = restored(experts, scheme)
    assert found.shape == experts.shape and restored(torch.empty(0, 64), scheme).shape == (0, 64)
    assert torch.equal(found[1], restored(experts[1], scheme))
    turned = experts.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(torch.equal(*pair) for pair in zip(quantize(turned, scheme), quantize(experts, scheme)))


def test_sizes():
    scheme = GroupQuantization(4, 32)
    codes, scale, minimum = quantize(weights(6, 64, dtype=torch.float16), scheme)
    assert scheme.packed_bytes(384) == codes.numel() == 192
    assert scheme.stored_bytes(384, torch.float16) == codes.nbytes + scale.nbytes + minimum.nbytes == 240
    assert GroupQuantization(8, 32).packed_bytes(384) == 384
    with pytest.raises(ValueError, match="100 elements .* groups of 32"):
        scheme.packed_bytes(100)


@pytest.mark.parametrize("bits, group_size", [(3, 32), (16, 32), (4, 7), (8, 0), (4, -2)])
def test_schemes_that_cannot_be(bits, group_size):
    with pytest.raises(ValueError, match=str(group_size if bits in (4, 8) else bits)):
        GroupQuantization(bits, group_size)


@pytest.mark.parametrize("way", [quantize, quantize_on_cpu])
def test_what_cannot_be_quantized(way):
    scheme = GroupQuantization(8, 32)
    kinds = torch.zeros(64), torch.zeros(4, 40), torch.zeros(4, 64).char(), torch.zeros(4, 64).double()
    for unfit in kinds:
        assert not scheme.can_quantize(unfit)
        with pytest.raises(ValueError, match="group size 32"):
            way(unfit, scheme)
    for value in (float("nan"), float("inf"), -float("inf")):
        for dtype in DTYPES:
            weight = weights(40, 64, dtype=dtype)
            weight[31, 5] = value
            with pytest.raises(ValueError, match="NaN"):
                way(weight, GroupQuantization(4, 32))
    with pytest.raises(ValueError, match="range"):
        way(torch.tensor([[3e38, -3e38] * 16]), scheme)
    with pytest.raises(ValueError, match="range"):  # 255 / scale, DeepSpeed's quotient, is infinite
        way(torch.tensor([[6e4, -6e4] * 16]).half(), scheme, divides=True)


def test_dequantizing_refuses_what_does_not_fit():
    scheme = GroupQuantization(8, 32)
    weight = scheme.as_weight(*quantize(weights(4, 64, dtype=torch.float16), scheme))
    out = torch.empty(4, 64, dtype=torch.float16)
    for change, into, message in (
        (dict(codes=weight.codes[:-1]), out, "codes .* 256 elements"),
        (dict(codes=weight.codes.view(torch.int8)), out, "uint8.*int8"),
        (dict(scales=weight.scales.float()), out, "scales .*float16.*float32"),
        (dict(offsets=weight.offsets.repeat(2)[::2]), out, "offsets .*contiguous"),
        (dict(offsets=None), out, "offsets are missing"),
        (dict(row_scales=torch.ones(4)), out, "row_scales have no place"),
        (dict(format=replace(weight.format, group_size=16)), out, "scales .* 16 elements"),
        (dict(format=replace(weight.format, group_rows=3)), out, "scales .* 4 elements"),
        ({}, out.t(), "out .*contiguous"),
        ({}, out.double(), "out .*float64"),
    ):
        with pytest.raises(ValueError, match=message):
            dequantize(replace(weight, **change), into)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [32, 64])
def test_no_group_is_worse_than_with_deepspeeds_quantizer(bits, group_size, dtype):
    from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer

    from zero_inference.engines.deepspeed.quantization import quantize_parameter

    settings = {"num_bits": bits, "group_size": group_size, "group_dim": 1, "symmetric": False}
    weight = weights(64, 256, dtype=dtype)
    weight[:3] = 0.25  # constant groups
    theirs = DeQuantizer(settings, dtype).dequantize(*Quantizer(settings).quantize(weight))
    parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
    quantize_parameter(parameter, settings)
    packed, scale, minimum = parameter.deconcat(parameter)
    assert parameter.numel() == (weight.numel() * bits // 8) // dtype.itemsize + 2 * weight.numel() // group_size
    as_deepspeed = parameter.dequantizer.dequantize(packed.view(torch.uint8), scale, minimum)
    ours = restored(weight, GroupQuantization(bits, group_size))
    before, after = (squared_errors(each, weight, group_size) for each in (theirs, as_deepspeed))
    assert bool((after <= before * 1.0001 + 1e-12).all()) and torch.equal(as_deepspeed[:3], weight[:3])
    assert relative_error(as_deepspeed, weight) <= relative_error(theirs, weight) * (0.95 if bits == 4 else 1.0)
    assert relative_error(ours, weight) <= relative_error(theirs, weight)
    assert relative_error(ours, weight) < {8: 0.008, 4: 0.085}[bits]


@on_gpu
def test_the_kernel_gives_the_bits_of_the_reference():
    from benchmarks.dequantize_speed import check

    checked, wrong = check()
    assert checked > 100 and not wrong, wrong[:5]


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_of_published_formats_are_those_of_their_definition(name):
    """Element by element, exactly: float32 holds each step of these."""
    form, columns = published(name, torch.float32), 80
    packed = PackedWeights(1, whole_rows(5, form), columns, form, torch.float32)
    weight = packed.weight
    if weight.row_scales is not None:
        weight.row_scales.fill_(0.25)  # a quotient or product that is exact
    out = torch.empty_like(packed.plain)
    dequantize(weight, out)
    size = form.group_size or columns
    for row, column in ((0, 0), (1, 31), (2, 33), (4, 79)):
        index = row // form.group_rows, column // size
        code = int(weight.codes[0, row, column * form.bits // 8])
        code = code >> 4 * (column % 2) & 15 if form.bits == 4 else code
        scale = float(weight.scales[0][index]) if weight.scales is not None else 1.0
        if form.row_scales:
            scale *= 4 if form.divides else 0.25
        if form.codes == Codes.E2M1:
            number = (-1) ** (code >> 3) * E2M1[code & 7]
        elif form.codes == Codes.E4M3:
            exponent, mantissa = code >> 3 & 15, code & 7
            number = (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
            number *= (-1) ** (code >> 7)
        else:
            number = code - (int(weight.offsets[0][index]) if form.zero_points else form.codes.center)
        assert out[0, row, column].item() == torch.tensor(number * scale).item(), (row, column)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_kernel_gives_the_bits_of_the_reference_for_published_formats(name, dtype):
    """Whole and partial groups, rows of whole vectors or not, and tensors that are not aligned."""
    for scale_dtype in (dtype, torch.bfloat16):
        form = published(name, scale_dtype)
        for rows, columns in ((1, 16), (5, 80), (33, 4112), (3, 130), (7, 12)):
            packed = PackedWeights(2, whole_rows(rows, form), columns, form, dtype, "cuda")
            for offset in (0, 1):
                memory = torch.full((packed.plain.numel() + 2,), 7.0, dtype=dtype, device="cuda")
                out = memory[offset : offset + packed.plain.numel()].view_as(packed.plain)
                dequantize(packed.weight, out)
                assert torch.equal(out, packed.plain) and int((memory == 7).sum()) - int((out == 7).sum()) == 2


@on_gpu
@pytest.mark.parametrize("codes", Codes)
def test_the_kernel_knows_every_code_and_scale(codes):
    """All 256 bytes, with each exponent and float of a byte as scale; NaN where the reference has it."""
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    columns = 256 * 8 // codes.bits
    for scale_dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        weight = QuantizedWeight(
            WeightFormat(codes, columns, scale_dtype=scale_dtype),
            every.repeat(256, 1),
            every[:, None].view(scale_dtype),
        )
        out, expected = torch.empty(2, 256, columns, device="cuda")
        dequantize(weight, out)
        formats.dequantize_reference(weight, expected)
        assert torch.equal(out.nan_to_num(12345.0), expected.nan_to_num(12345.0))


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, group_size", [(8, 64), (8, 5), (8, 300), (4, 32), (4, 64), (4, 6), (4, 128), (4, 2)])
def test_the_kernel_quantizes_as_well_as_the_reference(bits, group_size, dtype):
    scheme = GroupQuantization(bits, group_size)
    for offset in (0.0, 0.5):
        weight = weights(700, 4 * group_size, dtype=dtype).cuda() + offset
        weight[:9] = weight[:9, :1]  # groups of one value
        if dtype == torch.float16:
            weight[9:20] *= 2.0**-12  # scales below the normal numbers
        rows = weight.view(-1, group_size)
        expected = [part.cuda() for part in quantize(weight.cpu(), scheme)]
        found = quantize(weight, scheme)
        assert all(torch.isfinite(part).all() for part in found)
        for new, old in zip(found, expected):  # another try may be the best: errors are compared below
            assert float(torch.isclose(new.float(), old.float(), rtol=1e-5, atol=1e-7).float().mean()) > 0.9
        errors = []
        for parts in (found, expected):
            out, codes = torch.empty_like(weight), parts[0]
            dequantize(scheme.as_weight(*parts), out)
            errors.append((out.double() - weight.double()).view(-1, group_size).square().sum(1))
            assert torch.equal(out.view(-1, group_size)[: 9 * 4], rows[: 9 * 4])
            assert not codes[: 9 * 4 * group_size * bits // 8].any()
        # 98.86% on one H200 (4 bits, groups of 128, bfloat16): another try is the best where sums differ
        assert float((errors[0] <= 1.001 * errors[1] + 1e-12).float().mean()) > 0.98
        assert float(errors[0].sum()) <= 1.002 * float(errors[1].sum())
        as_deepspeed, expected = quantize(weight, scheme, True), quantize(weight.cpu(), scheme, True)
        for new, old in zip(as_deepspeed, expected):
            assert float(torch.isclose(new.float().cpu(), old.float(), rtol=1e-5, atol=1e-7).float().mean()) > 0.9


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_refuses_what_the_reference_refuses(dtype):
    for value in (float("nan"), float("inf"), -float("inf")):
        weight = weights(400, 64, dtype=dtype).cuda()
        weight[311, 5] = value
        with pytest.raises(ValueError, match="NaN"):
            quantize(weight, GroupQuantization(4, 32))
    largest = torch.finfo(dtype).max
    with pytest.raises(ValueError, match="range"):
        quantize(torch.tensor([[largest, -largest] * 16], dtype=dtype, device="cuda"), GroupQuantization(8, 32))


@on_gpu
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 ends the process where an operator of ours raises"
)
def test_dequantize_refuses_what_would_be_read_wrongly():
    weight = weights(4, 64, dtype=torch.float16).cuda()
    scheme = GroupQuantization(8, 32)
    packed = scheme.as_weight(*quantize(weight, scheme))
    for change in (
        dict(codes=packed.codes[:-1]),
        dict(scales=packed.scales.double()),
        dict(offsets=packed.offsets.cpu()),
    ):
        with pytest.raises(RuntimeError, match="does not fit"):
            dequantize(replace(packed, **change), torch.empty_like(weight))
