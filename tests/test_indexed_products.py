"""Single rows, each with one of several weights: against float64 in plain PyTorch, and the kernel against that on a GPU."""

from __future__ import annotations

import pytest
import torch
from test_quantized_products import BOUNDS, on_gpu

from zero_inference.quantization import indexed
from zero_inference.quantization.groups import dequantize_reference
from zero_inference.quantization.indexed import (
    linear_groups_indexed,
    linear_groups_indexed_reference,
    linear_indexed,
)
from zero_inference.quantization.products import can_fuse
from zero_inference.runtime.extension import load_extension, why_unavailable


class Case:
    """Random weights in groups, one behind the other, a row for each of `slots`, and the products in float64."""

    def __init__(self, slots, weights, rows, columns, bits, group_size, dtype, device="cpu", seed=1):
        draw = torch.Generator(device).manual_seed(seed)
        groups, bytes_of = rows * columns // group_size, rows * columns * bits // 8
        self.codes = torch.randint(0, 256, (weights, bytes_of), dtype=torch.uint8, device=device, generator=draw)
        self.scale = (0.01 + 0.01 * torch.rand(weights, groups, device=device, generator=draw)).to(dtype)
        self.minimum = (0.05 * torch.randn(weights, groups, device=device, generator=draw) - 0.1).to(dtype)
        self.x = torch.randn(len(slots), columns, device=device, generator=draw).to(dtype)
        self.slot = torch.tensor(slots, device=device, dtype=torch.int64)
        self.bits, self.group_size, self.rows = bits, group_size, rows
        self.plain = torch.empty(weights, rows, columns, dtype=dtype, device=device)
        for each in range(weights):
            parts = (self.codes[each], self.scale[each], self.minimum[each])
            dequantize_reference(*parts, bits, group_size, self.plain[each])

    @property
    def arguments(self):
        return self.x, self.codes, self.scale, self.minimum, self.bits, self.group_size, self.rows, self.slot

    def check(self, out: torch.Tensor) -> None:
        assert out.dtype == self.x.dtype and out.shape == (len(self.slot), self.rows)
        for pair, slot in enumerate(self.slot.tolist()):
            if not 0 <= slot < len(self.plain):
                assert not out[pair].count_nonzero(), pair
                continue
            exact = self.plain[slot].double() @ self.x[pair].double()
            assert float((out[pair].double() - exact).norm()) <= BOUNDS[self.x.dtype] * float(exact.norm()), (
                pair,
                slot,
            )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bits, group_size", [(4, 64), (4, 16), (8, 32), (8, 5)])
def test_each_row_meets_its_weight(bits, group_size, dtype, monkeypatch):
    case = Case([2, -1, 0, 2, 1, -7, 0], 3, 37, 4 * group_size, bits, group_size, dtype)
    out = linear_groups_indexed(*case.arguments)
    case.check(out)
    assert torch.equal(out, linear_indexed(case.x, case.plain, case.slot))
    assert torch.equal(out, torch.ops.zero_inference.linear_groups_indexed(*case.arguments))
    monkeypatch.setattr(indexed, "GATHERED_BYTES", 2 * 37 * 4 * group_size * dtype.itemsize)  # two rows at a time
    case.x.requires_grad_()  # nothing here has a gradient; a caller may not have said so
    case.check(linear_groups_indexed(*case.arguments))
    case.check(linear_indexed(case.x, case.plain, case.slot))


def test_no_rows_and_rows_without_a_weight():
    for slots in ([], [-1, -1]):
        case = Case(slots, 2, 5, 64, 4, 32, torch.bfloat16)
        case.check(linear_groups_indexed(*case.arguments))
        case.check(linear_indexed(case.x, case.plain, case.slot))


def test_what_does_not_fit_is_a_value_error():
    case = Case([1, 0], 2, 6, 64, 8, 32, torch.float16)
    names = ("x", "codes", "scale", "minimum", "bits", "group_size", "rows", "slot")
    for change, message in (
        (dict(rows=7), r"codes must be torch.uint8 \[2, 448\]"),
        (dict(group_size=48), "groups of 48, not 64"),
        (dict(scale=case.scale.float()), "scale must be torch.float16"),
        (dict(minimum=case.minimum[:1]), "minimum must be"),
        (dict(bits=5), "bits"),
        (dict(slot=case.slot.int()), "slot must be int64"),
        (dict(slot=case.slot[:1]), "slot must be int64"),
        (dict(x=case.x[0]), "x must be"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_groups_indexed(**(dict(zip(names, case.arguments)) | change))
    with pytest.raises(ValueError, match="weight must be torch.float16"):
        linear_indexed(case.x, case.plain.float(), case.slot)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("bits, group_size", [(4, 64), (4, 16), (8, 32), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_kernel_that_is_wrong_is_found_out(dtype, bits, group_size, device, monkeypatch):
    right = torch.ops.zero_inference.linear_groups_indexed
    tried = indexed.kernel_agrees.__wrapped__
    assert tried(torch.device(device), dtype, bits, group_size)
    for wrong in (
        lambda x, *others: right(x, *others[:-1], others[-1].clamp(min=0)),  # a weight where there is none
        lambda x, *others: right(x, *others[:-1], others[-1].clamp(max=0)),  # the first weight for all
        lambda x, codes, *others: right(x, codes ^ 0x88, *others),
        lambda *arguments: torch.full_like(right(*arguments), float("nan")),
    ):
        monkeypatch.setattr(torch.ops.zero_inference, "linear_groups_indexed", wrong)
        with pytest.warns(UserWarning, match="experts are multiplied without it"):
            assert not tried(torch.device(device), dtype, bits, group_size)


def test_shapes_can_be_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, codes, groups = torch.empty(3, 64), torch.empty(2, 5 * 32, dtype=torch.uint8), torch.empty(2, 10)
        slot = torch.empty(3, dtype=torch.int64)
        found = torch.ops.zero_inference.linear_groups_indexed(x, codes, groups, groups, 4, 32, 5, slot)
        assert found.shape == (3, 5)


# --- The kernel ---


@pytest.fixture(scope="module")
def library():
    assert load_extension(), why_unavailable()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_the_kernel_gives_the_products_of_float64(bits, group_size, dtype, library):
    unit = max(group_size, 128 // bits)
    for seed, (rows, columns) in enumerate(((1, unit), (37, 3 * unit), (130, 8 * unit), (1027, 2048 + unit))):
        for slots in ([0], [-1], [4, -1, 0, 4, 3], [1, 9, 2, -5], [i % 7 - 1 for i in range(40)]):
            case = Case(slots, 5, rows, columns, bits, group_size, dtype, "cuda", seed)
            assert can_fuse(*case.arguments[:6])
            torch.full((len(slots), rows), float("nan"), dtype=dtype, device="cuda")  # memory that held NaN before
            case.slot.clamp_(max=5)  # 5 is no weight either; the operator may be given it, the reference not
            out = torch.ops.zero_inference.linear_groups_indexed(*case.arguments)
            case.check(out)
            assert torch.equal(out, torch.ops.zero_inference.linear_groups_indexed(*case.arguments))
            case.slot[case.slot > 4] = -1
            reference = linear_groups_indexed_reference(*case.arguments)
            assert float((out - reference).float().norm()) <= 2 * BOUNDS[dtype] * float(reference.float().norm())


@on_gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_with_experts_of_real_models(bits, library):
    """Rows and columns of Qwen3-30B-A3B and of Mixtral 8x7B."""
    for rows, columns in ((1536, 2048), (2048, 768), (28672, 4096), (4096, 14336)):
        case = Case([2, -1, 0, 2, 1, -1, 0, 1], 3, rows, columns, bits, 64, torch.bfloat16, "cuda")
        out = linear_groups_indexed(*case.arguments)
        case.check(out)
        assert all(torch.equal(out, linear_groups_indexed(*case.arguments)) for _ in range(10)), "the same bits"


@on_gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_with_the_same_weight_are_multiplied_together(bits, library):
    """Up to eight or sixteen of them, in whatever order they come, and each as if it were alone."""
    draw = torch.Generator().manual_seed(3)
    for pairs, weights in ((5, 2), (16, 8), (64, 8), (100, 3), (256, 128), (1030, 2), (2500, 700)):
        slots = torch.randint(-1, weights, (pairs,), generator=draw).tolist()
        case = Case(slots, weights, 70, 256, bits, 64, torch.bfloat16, "cuda")
        out = linear_groups_indexed(*case.arguments)
        case.check(out)
        assert torch.equal(out, linear_groups_indexed(*case.arguments))
        order = torch.randperm(pairs, generator=draw).cuda()
        case.x, case.slot = case.x[order].contiguous(), case.slot[order].contiguous()
        assert torch.equal(linear_groups_indexed(*case.arguments), out[order]), "the others change nothing"


@on_gpu
@pytest.mark.parametrize("slots", [[1, 0, 1], [1, 1, 1, 1]])
def test_rows_that_are_not_numbers_stay_alone(slots, library):
    case = Case(slots, 2, 70, 512, 4, 32, torch.float16, "cuda")
    expected = linear_groups_indexed(*case.arguments)
    case.x[1] = float("nan")
    out = linear_groups_indexed(*case.arguments)
    assert bool(out[1].isnan().all()) and torch.equal(out[[0, 2]], expected[[0, 2]])
