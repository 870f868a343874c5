"""The device computes experts in slots: any form, stored in any way, against float64."""

from __future__ import annotations

import pytest
import torch

from zero_inference.cpu.experts import COUNTS
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.expert_cache import USE_DECAY, ExpertCache, FetchConfig
from zero_inference.engines.stream.layout import lay_out
from zero_inference.engines.stream.streams import DeviceStreams
from zero_inference.kernels.quantization import GroupQuantization, dequantize, quantize
from zero_inference.models.mlp import ACTIVATIONS, FusedExperts

NUMBER, HIDDEN, INNER, SLOTS = 7, 64, 96, 3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FORMS = [
    FusedExperts("first", "last", "relu_squared", NUMBER, False, top_k=2),
    FusedExperts("first", "last", "silu", NUMBER, True, top_k=2),
    FusedExperts("first", "last", "gelu", NUMBER, True, gate_is_second=True, top_k=2),
    FusedExperts(
        "first", "last", "gelu_sigmoid", NUMBER, True, top_k=2, transposed=True, interleaved=True,
        gate_up_bias="first_bias", down_bias="last_bias", limit=0.5, up_offset=1.0,
    ),
]  # fmt: skip


def stored(form: FusedExperts, dtype: torch.dtype, bits: int):
    """Return the cache of a block, the block in host memory, and its weights in float64 as they were stored."""
    torch.manual_seed(5)
    scheme = GroupQuantization(bits, 32) if bits else None
    weights = {
        form.gate_up: (torch.randn(NUMBER, (1 + form.gated) * INNER, HIDDEN) / 8).to(dtype),
        form.down: (torch.randn(NUMBER, HIDDEN, INNER) / 8).to(dtype),
    }
    for name, weight in zip(form.biases, list(weights.values())):
        weights[name] = torch.randn(NUMBER, weight.shape[1]).to(dtype)
    matrices = weights.keys() - form.biases
    formats = {} if scheme is None else {name: scheme.weight_format(dtype) for name in matrices}
    layout = lay_out(weights.items(), formats)
    buffer, exact = torch.zeros(layout.nbytes, dtype=torch.uint8), {}
    for name, weight in weights.items():
        parts = quantize(weight, scheme) if name in formats else (weight,)
        for piece, part in zip(layout[name].pieces, parts):
            piece.of(buffer).copy_(part.view(piece.shape))
        if name in formats:
            dequantize(scheme.as_weight(*parts), weight)
        exact[name] = weight.double()
    block = Block(0, "experts", tuple(weights), experts=form, layout=layout)
    rows = torch.full((NUMBER + 1,), -1), torch.zeros(NUMBER + 1), torch.zeros(COUNTS, dtype=torch.int64)
    streams = DeviceStreams(torch.device("cpu"))
    fetching = FetchConfig(torch.arange(NUMBER + 1).clamp(max=1), 1, streams, streams.stream())
    slots = ExpertCache(block, SLOTS, buffer, *rows, fetching)
    assert slots.nbytes == SLOTS * slots.expert_bytes
    return slots, buffer, exact


def expected(form: FusedExperts, exact, cached: set[int], x, numbers, weights) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for number, weight in zip(numbers[row].tolist(), weights[row].tolist()):
            if number in cached:
                product = exact[form.gate_up][number] @ x[row].double()
                if form.biases:
                    product += exact[form.gate_up_bias][number]
                halves = product.view(-1, 2).unbind(1) if form.interleaved else product.split(INNER)
                gate, *up = halves[::-1] if form.gate_is_second else halves
                if form.biases:
                    gate, up = gate.clamp(max=0.5), [up[0].clamp(-0.5, 0.5) + 1]
                hidden = ACTIVATIONS[form.activation](gate) * (up[0] if up else 1)
                result = exact[form.down][number] @ hidden
                out[row] += weight * (result + exact[form.down_bias][number] if form.biases else result)
    return out


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.activation)
@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 8), (torch.float32, 4)]
)
def test_experts_in_slots_and_no_others_are_computed(dtype, bits, form):
    slots, buffer, exact = stored(form, dtype, bits)
    slots.refill(torch.tensor([[6, 2], [6, 4], [4, 6], [2, 4], [4, 0]]), buffer)
    cached = {expert for expert in range(NUMBER) if slots.table[expert] >= 0}
    assert cached == {2, 4, 6}
    one_by_one = 2 * sum(USE_DECAY**passes for passes in range(5))  # of five tokens with two experts each
    shares = torch.tensor([1, 0, 2, 0, 4, 0, 3]) / 10
    assert torch.allclose(slots.uses[:NUMBER], one_by_one * shares)
    numbers = torch.stack([torch.randperm(NUMBER)[:4] for _ in range(9)])
    numbers[0] = torch.tensor([0, 3, 5, NUMBER])  # none of those in slots, and the number for no expert
    x, weights = torch.randn(9, HIDDEN).to(dtype), torch.rand(9, 4)
    rows = slots.multiply(x, slots.table[numbers])
    out = (weights[..., None] * rows.view(9, 4, -1)).sum(1)
    exact_out = expected(form, exact, cached, x, numbers, weights)
    assert rows.dtype == dtype and not out[0].count_nonzero()
    assert float((out.double() - exact_out).norm()) <= BOUNDS[dtype] * float(exact_out.norm())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.activation)
def test_a_fetched_expert_is_computed_in_the_pass_that_fetches_it_and_kept(form):
    slots, buffer, exact = stored(form, torch.float32, 8)
    slots.refill(torch.tensor([[6, 2], [6, 4], [4, 6], [2, 4], [4, 0]]), buffer)
    numbers = torch.tensor([[6, 1, 3], [1, 4, 5]])
    for cached, fetched in (({6, 4, 1}, 1), ({6, 4, 1}, None)):  # then those that are missed have no place to go to
        x, weights = torch.randn(2, HIDDEN), torch.rand(2, 3)
        division = slots.dispatch(numbers)
        assert division.fetched.tolist() == [-1 if fetched is None else fetched]
        found = slots.products(x, division, weights)
        out = sum((weights[..., None] * rows.view(2, 3, -1)).sum(1) for rows in found[1:])
        exact_out = expected(form, exact, cached, x, numbers, weights)
        assert float((out.double() - exact_out).norm()) <= BOUNDS[torch.float32] * float(exact_out.norm())
        assert {expert for expert in range(NUMBER) if slots.table[expert] >= 0} == cached
