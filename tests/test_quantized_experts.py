"""Single rows, each with one of several weights: against float64 in plain PyTorch, and the kernel against that on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import BOUNDS, ON_GPU, PUBLISHED, PackedWeights, on_gpu, own, published, relative_error, whole_rows

from zero_inference.engines.stream.layout import Packed
from zero_inference.engines.stream.products import epilogue_of, experts_forward
from zero_inference.kernels import products
from zero_inference.kernels.products import (
    can_fuse,
    expert_linear,
    format_can_fuse,
    quantized_expert_linear,
    quantized_expert_linear_reference,
)
from zero_inference.kernels.quantization import operands
from zero_inference.models.mlp import FusedExperts


class Case(PackedWeights):
    """Random weights in groups, one behind the other, a row for each of `slots`, and the products in float64."""

    def __init__(self, slots, weights, rows, columns, form, dtype, device="cpu", seed=1):
        super().__init__(weights, rows, columns, form, dtype, device, seed)
        self.x = self.normal(len(slots), columns).to(dtype)
        self.slot = torch.tensor(slots, device=device, dtype=torch.int64)

    @property
    def arguments(self):
        return self.x, self.weight, self.rows, self.slot

    def fused(self) -> torch.Tensor:
        x, weight, *others = self.arguments
        return torch.ops.zero_inference.linear_groups_indexed(x, *operands(weight), *others)

    def check(self, out: torch.Tensor) -> None:
        assert out.dtype == self.x.dtype and out.shape == (len(self.slot), self.rows)
        for pair, slot in enumerate(self.slot.tolist()):
            if not 0 <= slot < len(self.plain):
                assert not out[pair].count_nonzero(), pair
                continue
            exact = self.exact[slot] @ self.x[pair].double()
            assert relative_error(out[pair], exact) <= BOUNDS[self.x.dtype], (pair, slot)


GATED = FusedExperts("first", "last", "silu", 5, True)
EXPERTS = {  # each activation, each order of gate and up, and limits
    "silu": GATED,
    "gelu, up first": replace(GATED, activation="gelu", gate_is_second=True),
    "gpt-oss": replace(GATED, activation="gelu_sigmoid", interleaved=True, limit=0.5, up_offset=1.0),
    "gelu_tanh": replace(GATED, activation="gelu_tanh", limit=0.25),
    "relu_squared, one product": replace(GATED, activation="relu_squared", gated=False),
    "relu, one product": replace(GATED, activation="relu", gated=False),
    "identity": replace(GATED, activation="identity", interleaved=True),
}


def check_experts(experts, case, k, bias, bound, out) -> None:
    """`out` is what `experts` make of the case's products, in float64; row i of x has the k slots from i * k on."""
    inner = case.rows // 2 if experts.gated else case.rows
    assert out.dtype == case.x.dtype and out.shape == (len(case.slot), inner)
    exact = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for pair, slot in enumerate(case.slot.tolist()):
        if 0 <= slot < len(case.plain):
            product = case.exact[slot] @ case.x[pair // k].double()
            exact[pair] = experts.combined(product if bias is None else product + bias[slot].double())
        else:
            assert not out[pair].count_nonzero(), pair
    kind = torch.finfo(out.dtype)
    subnormal = kind.tiny * kind.eps * out.numel() ** 0.5  # a step between the smallest numbers, for each
    assert float((out.double() - exact).norm()) <= bound * float(exact.norm()) + subnormal


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", EXPERTS)
def test_experts_combine_their_first_product(form, biased, dtype):
    """Where PyTorch does it, which rounds three times."""
    experts, slots = EXPERTS[form], [2, -1, 0, 1, 1, 4]
    case = Case(slots, 5, 34, 128, own(8, 32, dtype), dtype)
    torch.manual_seed(0)
    bias = torch.randn(5, 34).to(dtype) if biased else None
    for k in (1, 2, 3):
        case.x = torch.randn(6 // k, 128).to(dtype)
        for out in (
            quantized_expert_linear(*case.arguments, bias, epilogue_of(experts)),
            expert_linear(case.x, case.plain, case.slot, bias, epilogue_of(experts)),
        ):
            check_experts(experts, case, k, bias, 5 * BOUNDS[dtype], out)


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
        pytest.param("cuda", torch.float16, marks=ON_GPU),
    ],
)
@pytest.mark.parametrize("form", EXPERTS)
def test_a_module_of_experts_computes_the_weighted_sum(form, device, dtype):
    """From codes, of one token and of several, with biases where the family has them; weights of whatever dtype a router gives."""
    experts, inner, hidden = replace(EXPERTS[form], num_experts=5), 96, 160
    rows = 2 * inner if experts.gated else inner
    first = Case([], 5, rows, hidden, own(4, 32, dtype), dtype, device, seed=2)
    last = Case([], 5, hidden, inner, own(4, 32, dtype), dtype, device, seed=3)
    draw = torch.Generator(device).manual_seed(4)
    biases = [None, None]
    if form == "gpt-oss":
        experts = replace(experts, gate_up_bias="first_bias", down_bias="last_bias")
        biases = [torch.randn(5, n, device=device, generator=draw).to(dtype) for n in (rows, hidden)]
    cases = {"first": first, "last": last}
    module = SimpleNamespace(first_bias=biases[0], last_bias=biases[1])
    forward = experts_forward(
        module,
        experts,
        {name: case.rows for name, case in cases.items()},
        lambda name: Packed(cases[name].weight, (), cases[name].plain),
    )
    for tokens, k, of_weights in ((1, 4, dtype), (1, 2, torch.float64), (3, 3, torch.float32), (17, 2, torch.float32)):
        x = torch.randn(tokens, hidden, device=device, generator=draw).to(dtype)
        chosen = torch.stack([torch.randperm(5, device=device, generator=draw)[:k] for _ in range(tokens)])
        weights = torch.rand(tokens, k, device=device, generator=draw).to(of_weights)
        exact = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
        for token, place in torch.cartesian_prod(torch.arange(tokens), torch.arange(k)).tolist():
            e = chosen[token, place]
            product = first.exact[e] @ x[token].double()
            between = experts.combined(product if biases[0] is None else product + biases[0][e].double())
            product = last.exact[e] @ between
            product = product if biases[1] is None else product + biases[1][e].double()
            exact[token] += weights[token, place].double() * product
        out = forward(x, chosen, weights)
        assert out.dtype == dtype and out.shape == x.shape
        assert relative_error(out, exact) <= 3 * BOUNDS[dtype], (tokens, k)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bits, group_size", [(4, 64), (4, 16), (8, 32), (8, 5)])
def test_each_row_meets_its_weight(bits, group_size, dtype, monkeypatch):
    case = Case([2, -1, 0, 2, 1, -7, 0], 3, 37, 4 * group_size, own(bits, group_size, dtype), dtype)
    out = quantized_expert_linear(*case.arguments)
    case.check(out)
    assert torch.equal(out, expert_linear(case.x, case.plain, case.slot))
    assert torch.equal(out, case.fused())
    monkeypatch.setattr(products, "GATHERED_BYTES", 2 * 37 * 4 * group_size * dtype.itemsize)  # two rows at a time
    case.x.requires_grad_()  # nothing here has a gradient; a caller may not have said so
    case.check(quantized_expert_linear(*case.arguments))
    case.check(expert_linear(case.x, case.plain, case.slot))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_row_meets_its_weight_of_a_published_format(name, dtype):
    form = published(name, dtype)
    case = Case([2, -1, 0, 2, 1], 3, whole_rows(74, form), 128, form, dtype)
    out = quantized_expert_linear(*case.arguments)
    case.check(out)
    assert torch.equal(out, case.fused())


def test_what_does_not_fit_is_a_value_error():
    case = Case([1, 0], 2, 6, 64, own(8, 32, torch.float16), torch.float16)
    names = ("x", "weight", "rows", "slot")
    for change, message in (
        (dict(rows=7), r"codes must be torch.uint8 \[2, 448\]"),
        (dict(weight=replace(case.weight, format=replace(case.weight.format, group_size=16))), "scales must be"),
        (dict(weight=replace(case.weight, scales=case.weight.scales.float())), "scales must be torch.float16"),
        (dict(weight=replace(case.weight, offsets=case.weight.offsets[:1])), "offsets must be"),
        (dict(weight=replace(case.weight, offsets=None)), "offsets are missing"),
        (dict(slot=case.slot.int()), "slot must be int64"),
        (dict(slot=case.slot[:1]), "slot must be int64"),
        (dict(slot=torch.tensor([0, 1, 0])), r"slot must be int64 \[2 x k\]"),
        (dict(x=case.x[0]), "x must be"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_expert_linear(**(dict(zip(names, case.arguments)) | change))
    with pytest.raises(ValueError, match="weight must be torch.float16"):
        expert_linear(case.x, case.plain.float(), case.slot)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_the_kernel_gives_the_products_of_float64(bits, group_size, dtype):
    unit = max(group_size, 128 // bits)
    for seed, (rows, columns) in enumerate(((1, unit), (37, 3 * unit), (130, 8 * unit), (1027, 2048 + unit))):
        for slots in ([0], [-1], [4, -1, 0, 4, 3], [1, 9, 2, -5], [i % 7 - 1 for i in range(40)]):
            case = Case(slots, 5, rows, columns, own(bits, group_size, dtype), dtype, "cuda", seed)
            assert can_fuse(*case.arguments[:2])
            torch.full((len(slots), rows), float("nan"), dtype=dtype, device="cuda")  # memory that held NaN before
            case.slot.clamp_(max=5)  # 5 is no weight either; the operator may be given it, the reference not
            out = case.fused()
            case.check(out)
            assert torch.equal(out, case.fused())
            case.slot[case.slot > 4] = -1
            reference = quantized_expert_linear_reference(*case.arguments)
            assert relative_error(out, reference.double()) <= 2 * BOUNDS[dtype] or not reference.any()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_kernel_multiplies_published_formats(name, dtype):
    """Pairs alone and together; each weight's scales begin where the one before ends, gate and up in halves and interleaved."""
    form = published(name, dtype)
    unit = max(64, form.group_size)
    for seed, (rows, columns) in enumerate(((2, unit), (74, 3 * unit), (130, 9 * unit), (1030, 2048 + unit))):
        rows = whole_rows(rows, form)
        for slots, k in (([0], 1), ([4, -1, 0, 3], 4), ([1, 9, 2, -5, 2, 1], 3), ([i % 7 - 1 for i in range(40)], 2)):
            case = Case(slots, 5, rows, columns, form, dtype, "cuda", seed)
            case.slot[case.slot > 4] = -1
            assert can_fuse(*case.arguments[:2]) == format_can_fuse(form, dtype)
            if not format_can_fuse(form, dtype):
                case.exact = case.plain.double()  # dequantized weights are rounded
            out = quantized_expert_linear(*case.arguments)
            case.check(out)
            assert torch.equal(out, quantized_expert_linear(*case.arguments))
            if not format_can_fuse(form, dtype):
                continue
            case.x = case.x[: len(slots) // k] / 16  # gate times up within float16
            for experts in (EXPERTS["silu"], EXPERTS["gpt-oss"]):
                bias = torch.randn(5, rows, device="cuda").to(dtype) if seed % 2 else None
                out = quantized_expert_linear(*case.arguments, bias, epilogue_of(experts))
                check_experts(experts, case, k, bias, BOUNDS[dtype], out)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits, group_size", [(4, 16), (4, 32), (4, 64), (4, 128), (8, 32), (8, 128)])
@pytest.mark.parametrize("form", EXPERTS)
def test_the_kernel_combines_the_first_product_of_experts(form, bits, group_size, dtype):
    """With one block's rows and with many, columns in one block and split, pairs alone and together; rounded once."""
    experts, unit = EXPERTS[form], max(group_size, 128 // bits)
    for seed, (rows, columns) in enumerate(((2, unit), (74, 3 * unit), (130, 8 * unit), (1030, 2048 + unit))):
        for slots, k in (([4, -1, 0, 3], 4), ([1, 9, 2, -5, 2, 1], 3), ([i % 7 - 1 for i in range(40)], 2), ([0], 1)):
            case = Case(slots, 5, rows, columns, own(bits, group_size, dtype), dtype, "cuda", seed)
            case.x = case.x[: len(slots) // k] / 16  # gate times up, or a square, within float16
            bias = torch.randn(5, rows, device="cuda").to(dtype) if seed % 2 else None
            inner = rows // 2 if experts.gated else rows
            torch.full((len(slots), inner), float("nan"), dtype=dtype, device="cuda")  # memory that held NaN before
            out = quantized_expert_linear(*case.arguments, bias, epilogue_of(experts))
            check_experts(experts, case, k, bias, BOUNDS[dtype], out)
            assert torch.equal(out, quantized_expert_linear(*case.arguments, bias, epilogue_of(experts)))


@on_gpu
def test_pairs_of_one_token_give_the_same_bits_as_pairs_of_many():
    """`tokens` decides whether a block looks for others with its weight, and nothing else."""
    case = Case([3, 1, -1, 0, 4, 2], 5, 260, 768, own(4, 32, torch.bfloat16), torch.bfloat16, "cuda")
    expected = quantized_expert_linear(*case.arguments)
    case.check(expected)
    for tokens in (1, 2, 3):
        assert torch.equal(quantized_expert_linear(*case.arguments, tokens=tokens), expected)


@on_gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_with_experts_of_real_models(bits):
    """Rows and columns of Qwen3-30B-A3B and of Mixtral 8x7B."""
    for rows, columns in ((1536, 2048), (2048, 768), (28672, 4096), (4096, 14336)):
        case = Case([2, -1, 0, 2, 1, -1, 0, 1], 3, rows, columns, own(bits, 64, torch.bfloat16), torch.bfloat16, "cuda")
        out = quantized_expert_linear(*case.arguments)
        case.check(out)
        assert all(torch.equal(out, quantized_expert_linear(*case.arguments)) for _ in range(10)), "the same bits"


@on_gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_with_the_same_weight_are_multiplied_together(bits):
    """Up to eight or sixteen of them, in whatever order they come, and each as if it were alone."""
    draw = torch.Generator().manual_seed(3)
    for pairs, weights in ((5, 2), (16, 8), (64, 8), (100, 3), (256, 128), (1030, 2), (2500, 700)):
        slots = torch.randint(-1, weights, (pairs,), generator=draw).tolist()
        case = Case(slots, weights, 70, 256, own(bits, 64, torch.bfloat16), torch.bfloat16, "cuda")
        out = quantized_expert_linear(*case.arguments)
        case.check(out)
        assert torch.equal(out, quantized_expert_linear(*case.arguments))
        order = torch.randperm(pairs, generator=draw).cuda()
        case.x, case.slot = case.x[order].contiguous(), case.slot[order].contiguous()
        assert torch.equal(quantized_expert_linear(*case.arguments), out[order]), "the others change nothing"


@on_gpu
@pytest.mark.parametrize("slots", [[1, 0, 1], [1, 1, 1, 1]])
def test_rows_that_are_not_numbers_stay_alone(slots):
    case = Case(slots, 2, 70, 512, own(4, 32, torch.float16), torch.float16, "cuda")
    expected = quantized_expert_linear(*case.arguments)
    case.x[1] = float("nan")
    out = quantized_expert_linear(*case.arguments)
    assert bool(out[1].isnan().all()) and torch.equal(out[[0, 2]], expected[[0, 2]])
