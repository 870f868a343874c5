"""The experts of a mixture on the CPU: against float64, for every form of weights and any choice of the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import quantized, random_weight, relative_error, skip_without

from zero_inference.cpu.experts import CHOICES, COUNTS, FETCHED, HITS, SAVED, Expert, ExpertActivation, add_experts
from zero_inference.cpu.hand_off import DirectCalls
from zero_inference.cpu.library import INSTRUCTIONS
from zero_inference.cpu.pool import CpuPool, Routing
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.formats import Codes, WeightFormat, dequantize_reference
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models.mlp import ACTIVATIONS
from zero_inference.utils.timing import Transfers

EXPERTS, HIDDEN, INNER = 6, 96, 160
# of the result's norm; 16 bits round what goes in and out
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PUBLISHED = {
    "MXFP4": WeightFormat(Codes.E2M1, 32, scale_dtype=torch.float8_e8m0fnu),
    "NVFP4": WeightFormat(Codes.E2M1, 16, scale_dtype=torch.float8_e4m3fn, row_scales=True, divides=True),
    "zero points": WeightFormat(Codes.INT4, 32, scale_dtype=torch.float16, zero_points=True),
    "FP8 blocks": WeightFormat(Codes.E4M3, 64, group_rows=32),
    "FP8 rows": WeightFormat(Codes.E4M3, row_scales=True),
}
# dtype, and bits of our own formats (0: plain) or one of PUBLISHED
FORMATS = [*((dtype, 0) for dtype in ERROR), (torch.float32, 4), (torch.bfloat16, 8), (torch.bfloat16, 4)]
FORMATS += [(torch.bfloat16, name) for name in PUBLISHED]


@dataclass
class Mixture:
    """Fused weights as the CPU reads them, and their values in float64."""

    first: torch.Tensor  # [experts, 2 x inner or inner, hidden]
    last: torch.Tensor  # [experts, hidden, inner]
    experts: list[Expert]
    expert_bytes: int
    tensors: list  # that `matrices` point to
    matrices: list[Matrix]
    biases: tuple[torch.Tensor, ...] = ()  # [experts, rows] of first and last
    between: ExpertActivation | None = None

    @classmethod
    def biased(cls, dtype: torch.dtype, bits: int | str, between: ExpertActivation) -> Mixture:
        """Return a mixture with biases and the `ExpertActivation` `between`, as in gpt-oss."""
        mixture = cls.random(dtype, bits)
        biases = tuple(torch.randn(EXPERTS, rows).to(dtype) for rows in (2 * INNER, HIDDEN))
        made = []
        for number, (expert, first, last) in enumerate(zip(mixture.experts, *biases)):
            if between.interleaved:
                first_matrix = mixture.matrices[0].rows_view(2 * number * INNER, 2 * INNER)
                made.append(Expert(first_matrix, None, expert.down, first, None, last))
            else:
                made.append(Expert(expert.gate, expert.up, expert.down, first[:INNER], first[INNER:], last))
        return replace(mixture, experts=made, biases=biases, between=between)

    @classmethod
    def random(cls, dtype: torch.dtype, bits: int | str, gated: bool = True) -> Mixture:
        torch.manual_seed(3)
        first, last = torch.randn(EXPERTS, (1 + gated) * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
        tensors, restored, matrices, nbytes = [], [], [], 0
        for fused in (first, last):
            weight = (fused * fused.shape[-1] ** -0.5).to(dtype)
            rows = weight.shape[0] * weight.shape[1]
            if isinstance(bits, str):
                form, size = PUBLISHED[bits], (rows, weight.shape[-1])
                made = random_weight(form, *size)
                for tensor in (made.scales, made.row_scales):  # so that results are about 1
                    if tensor is not None and tensor.dtype.itemsize > 1:
                        tensor *= 8 if form.divides else 0.1
                parts, weight = tuple(made.tensors.values()), torch.empty(weight.shape)
                dequantize_reference(made, weight)
                matrices.append(Matrix.quantized(made, *size, dtype))
            elif bits:
                parts, weight = quantized(weight, bits, 32)
                matrices.append(
                    Matrix.quantized(GroupQuantization(bits, 32).as_weight(*parts), rows, weight.shape[-1], dtype)
                )
            else:
                parts = (weight.view(rows, -1),)
                matrices.append(Matrix.plain(*parts))
            tensors.append(parts)
            restored.append(weight.double())
            nbytes += sum(part.numel() * part.element_size() for part in parts) // EXPERTS
        experts = [
            Expert(
                matrices[0].rows_view(e * (1 + gated) * INNER, INNER),
                matrices[0].rows_view((2 * e + 1) * INNER, INNER) if gated else None,
                matrices[1].rows_view(e * HIDDEN, HIDDEN),
            )
            for e in range(EXPERTS)
        ]
        return cls(*restored, experts, nbytes, tensors, matrices)

    def expected(self, x: torch.Tensor, choice: Routing, activation: str = "silu") -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for row, (numbers, weights) in enumerate(zip(choice.experts.tolist(), choice.weights.double().tolist())):
            for number, weight in zip(numbers, weights):
                if not 0 <= number < EXPERTS:
                    continue
                product = self.first[number] @ x[row].double()
                if self.between is None:
                    gate, *up = product.split(INNER)
                    hidden = ACTIVATIONS[activation](gate)
                    out[row] += weight * (self.last[number] @ (hidden * up[0] if up else hidden))
                    continue
                product += self.biases[0][number]
                gate, up = product.view(-1, 2).unbind(1) if self.between.interleaved else product.split(INNER)
                gate, up = gate.clamp(max=self.between.limit), up.clamp(-self.between.limit, self.between.limit)
                hidden = ACTIVATIONS[self.between.activation](gate) * (up + self.between.up_offset)
                out[row] += weight * (self.last[number] @ hidden + self.biases[1][number])
        return out


def a_choice(rows: int, k: int, dtype: torch.dtype = torch.float32) -> Routing:
    """Return a routing to different experts for each row, never to the last one."""
    numbers = torch.stack([torch.randperm(EXPERTS - 1)[:k] for _ in range(rows)])
    return Routing(numbers, torch.rand(rows, k).to(dtype))


def check(mixture, dtype, x, choice, instructions="auto", threads=2, activation="silu") -> torch.Tensor:
    transfers = Transfers()
    calls = DirectCalls(CpuPool([-1] * threads, 0, instructions=instructions), transfers)
    task = add_experts(calls.pool, mixture.experts, mixture.between or ExpertActivation(activation), dtype)
    calls.pool.reserve(task, len(x), choice.experts.shape[1])
    try:
        (out,) = calls(task, x, choice)
        expected = mixture.expected(x, choice, activation)
        assert out.dtype == dtype
        assert torch.equal(out.double(), expected) or relative_error(out, expected) <= ERROR[dtype], len(x)
        numbers = {number for number in choice.experts.flatten().tolist() if 0 <= number < EXPERTS}
        assert transfers.snapshot()[-1] == len(numbers) * mixture.expert_bytes
    finally:
        calls.close()
    return out


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(("dtype", "bits"), FORMATS, ids=str)
def test_any_rows_and_experts_agree_with_float64(dtype, bits, instructions):
    skip_without(instructions)
    mixture = Mixture.random(dtype, bits)
    for rows in (1, 2, 3, 5, 9):
        for k in (1, 2, 4):
            weights = (torch.float32, dtype)[rows % 2]
            check(mixture, dtype, torch.randn(rows, HIDDEN).to(dtype), a_choice(rows, k, weights), instructions)


@pytest.mark.parametrize(("dtype", "bits"), FORMATS, ids=str)
@pytest.mark.parametrize(
    "between",
    [ExpertActivation("gelu_sigmoid", True, 0.7, 1.0), ExpertActivation("silu", False, 0.4), ExpertActivation("silu")],
    ids=str,
)
def test_biases_and_limits_and_rows_of_gate_and_up_in_turn(between, dtype, bits):
    mixture = Mixture.biased(dtype, bits, between)
    for rows in (1, 4, 9):
        for instructions in ("auto", "portable"):
            check(mixture, dtype, torch.randn(rows, HIDDEN).to(dtype), a_choice(rows, 3), instructions)


@pytest.mark.parametrize("rows", [1, 4, 9, 40])
def test_all_rows_may_choose_one_expert_or_none(rows):
    mixture, x = Mixture.random(torch.bfloat16, 4), torch.randn(rows, HIDDEN).bfloat16()
    weights = torch.rand(rows, 2)
    check(mixture, x.dtype, x, Routing(torch.full((rows, 2), 3), weights))  # and it twice
    beside = torch.tensor([EXPERTS, -1]).repeat(rows, 1)
    assert check(mixture, x.dtype, x, Routing(beside, weights)).count_nonzero() == 0
    beside[:, 1] = torch.arange(rows) % EXPERTS
    check(mixture, x.dtype, x, Routing(beside, weights))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu_squared"])
def test_experts_without_a_second_product_and_other_activations(activation):
    for gated in (False, True):
        mixture, x = Mixture.random(torch.float32, 0, gated), torch.randn(5, HIDDEN)
        check(mixture, x.dtype, x, a_choice(5, 3), activation=activation)


def test_what_is_computed_elsewhere_is_counted_and_not_read():
    mixture, counts = Mixture.random(torch.bfloat16, 4), torch.zeros(COUNTS, dtype=torch.int64)
    calls = DirectCalls(CpuPool([-1] * 2, 0), Transfers())
    task = add_experts(calls.pool, mixture.experts, ExpertActivation("silu"), torch.bfloat16, counts)
    calls.pool.reserve(task, 5, 3)
    expected, steps = torch.zeros_like(counts), []
    for rows in (1, 5, 2):
        x, choice = torch.randn(rows, HIDDEN).bfloat16(), a_choice(rows, 3)
        there = choice.experts % 3 == 0  # the device has these,
        fetched = choice.experts % 3 == 1  # and fetches these
        numbers = torch.where(there, ~choice.experts, choice.experts)
        numbers = torch.where(fetched, ~(choice.experts + EXPERTS), numbers)
        (out,) = calls(task, x, Routing(numbers, choice.weights), lambda: steps.append("between"))
        weights = choice.weights.masked_fill(there | fetched, 0)
        exact = mixture.expected(x, Routing(choice.experts, weights))
        assert float((out.double() - exact).norm()) <= ERROR[torch.bfloat16] * float(exact.norm()) + 1e-12
        expected[CHOICES] += 3 * rows
        expected[HITS] += int(there.sum())
        expected[SAVED] += len(choice.experts[there].unique())
        expected[FETCHED] += len(choice.experts[fetched].unique())
        assert torch.equal(counts, expected) and 0 < expected[HITS] < expected[CHOICES]
    assert len(steps) == 3
    calls.close()
