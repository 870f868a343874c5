"""The references: against torch's and transformers' norms and hand computations, and their gradients by gradcheck."""

from __future__ import annotations

import pytest
import torch
from norm_cases import EPS, NAMES, OFFSETS, arguments, operator, plain, run, widened

from zero_inference.norms.ops import (
    fused_mul_grouped_poly_norm_ref,
    fused_mul_poly_norm_ref,
    layer_norm_ref,
    poly_norm_ref,
    rms_norm_ref,
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [1, 7])
def test_gradcheck(name, dim):
    values = widened(arguments(name, 6, dim))
    assert torch.autograd.gradcheck(lambda *tensors: plain(name)(*tensors), values, atol=1e-6)


def test_torchs_own_norms_agree():
    x, weight, bias, _ = widened(arguments("layer_norm", 11, 48))
    torch.testing.assert_close(rms_norm_ref(x, weight, EPS), torch.nn.functional.rms_norm(x, (48,), weight, EPS))
    torch.testing.assert_close(
        layer_norm_ref(x, weight, bias, EPS), torch.nn.functional.layer_norm(x, (48,), weight, bias, EPS)
    )


def test_poly_norm_by_hand():
    # x = (1, -2): means of x^6, x^4, x^2 are 32.5, 8.5, 2.5
    found = poly_norm_ref(torch.tensor([[1.0, -2.0]]), torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0.5]), eps=0.0)
    by_hand = [
        2 / 32.5**0.5 + 3 / 8.5**0.5 + 5 / 2.5**0.5 + 0.5,
        2 * -8 / 32.5**0.5 + 3 * 4 / 8.5**0.5 + 5 * -2 / 2.5**0.5 + 0.5,
    ]
    torch.testing.assert_close(found, torch.tensor([by_hand]))


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("rows", [0, 1, 29])
def test_groups_are_their_experts_one_by_one(offsets, rows):
    x, mul, weight, bias, ends, eps = (
        value.detach() if isinstance(value, torch.Tensor) else value
        for value in arguments("fused_mul_grouped_poly_norm", rows, 16, offsets=offsets)
    )
    found = fused_mul_grouped_poly_norm_ref(x, mul, weight, bias, ends, eps)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        alone = fused_mul_poly_norm_ref(x[start:end], mul[start:end], weight[expert], bias[expert], eps)
        torch.testing.assert_close(found[start:end], alone)
        start = end
    assert not found[start:].any()


def test_padding_rows_are_zero_whatever_they_hold():
    x, mul, weight, bias, _, eps = arguments("fused_mul_grouped_poly_norm", 6, 8)
    ends = torch.tensor([1, 2, 2, 4, 4], dtype=torch.int32)
    with torch.no_grad():
        x[4:], mul[5] = torch.nan, torch.inf
    grads = torch.ones_like(x)
    grads[4:] = torch.nan
    (out,), gradients, _ = run(operator("fused_mul_grouped_poly_norm"), [x, mul, weight, bias, ends, eps], [grads])
    assert not out[4:].any() and not gradients[0][4:].any() and not gradients[1][4:].any()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert not gradients[2][2].any() and not gradients[3][4].any(), "experts without rows"


def test_llamas_and_gemmas_norms_bit_for_bit():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight = (value.detach() for value in arguments("rms_norm", 7, 96, dtype)[:2])
        for made, how in (
            (LlamaRMSNorm(96, EPS), {"round_first": True}),
            (GemmaRMSNorm(96, EPS), {"weight_offset": 1.0}),
        ):
            made.to(dtype).load_state_dict({"weight": weight})
            assert torch.equal(made(x), rms_norm_ref(x, weight, EPS, **how))
