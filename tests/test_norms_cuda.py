"""The CUDA kernels, where there is a device: against float64, bitwise repeatable, under torch.compile, and in models."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, build_model
from kernel_cases import ON_GPU
from norm_cases import NAMES, arguments, check_against_float64, norm_error, operator, plain, run

from zero_inference.models.prompts import greedy_config, reset_generation_config
from zero_inference.norms import patch_norms

pytestmark = [ON_GPU, pytest.mark.usefixtures("cuda_kernels")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = (1, 7, 255, 512, 1280, 2048, 4096, 5120, 8191, 13824, 65536)


def in_rows_of(raw: torch.Tensor) -> torch.Tensor:
    """The same values one element into their memory."""
    moved = torch.empty(raw.numel() + 1, dtype=raw.dtype, device=raw.device)[1:].view_as(raw)
    return moved.copy_(raw.detach()).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, dim, dtype):
    for rows in (0, 1, 7, 83, 2048):
        if rows * dim <= 1 << 25:
            check_against_float64(name, arguments(name, rows, dim, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [7, 1280])
def test_many_rows(name, dim, dtype):
    check_against_float64(name, arguments(name, 65536, dim, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_misaligned_and_strided_sanitized(name, dtype):
    for dim in (64, 255, 4096):
        values = arguments(name, 9, dim, dtype, "cuda")
        moved = [in_rows_of(each) if torch.is_tensor(each) and each.is_floating_point() else each for each in values]
        check_against_float64(name, moved)
        wide = torch.zeros(9, 2 * dim, dtype=dtype, device="cuda")
        wide[:, ::2] = values[0].detach()
        outputs, _, _ = run(operator(name), [wide[:, ::2].requires_grad_(), *values[1:]])
        expected, _, _ = run(operator(name), values)
        assert all(torch.equal(*pair) for pair in zip(outputs, expected))


@pytest.mark.parametrize("offsets", ["all in one", "all padding", "no padding"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_sanitized(offsets, dtype):
    for rows, dim in ((1, 7), (83, 1280), (2048, 256)):
        check_against_float64(
            "fused_mul_grouped_poly_norm",
            arguments("fused_mul_grouped_poly_norm", rows, dim, dtype, "cuda", offsets=offsets),
        )


def test_padding_rows_are_zero_whatever_they_hold():
    x, mul, weight, bias, _, eps = arguments("fused_mul_grouped_poly_norm", 6, 512, torch.float16, "cuda")
    ends = torch.tensor([1, 2, 2, 4, 4], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        x[4:], mul[5] = torch.nan, torch.inf
    outputs, gradients, _ = run(operator("fused_mul_grouped_poly_norm"), [x, mul, weight, bias, ends, eps])
    assert not outputs[0][4:].any() and not gradients[0][4:].any() and not gradients[1][4:].any()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("dim", [255, 1280])  # the kernel that reads rows twice, and the one that keeps them
@pytest.mark.parametrize(
    "ends",
    [[-5, -1, 40, 60, 83], [-(2**31), 10, -7, 200, 2**31 - 1], [60, 20, 80, 5, 83], [83, 0, -83, 0, 83]],
    ids=str,
)
def test_negative_and_falling_ends_read_no_other_memory(ends, dim):
    """Memory that was freed just before holds nan, so that a sum which strays is not finite."""
    x, mul, weight, bias, _, eps = arguments("fused_mul_grouped_poly_norm", 83, dim, torch.float32, "cuda")
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    poison = [torch.full((83 * 4 * 8,), torch.nan, device="cuda") for _ in range(64)]
    del poison
    outputs, gradients, grads = run(operator("fused_mul_grouped_poly_norm"), [x, mul, weight, bias, offsets, eps])
    torch.cuda.synchronize()
    assert all(bool(tensor.isfinite().all()) for tensor in outputs + gradients)
    # each row was given the weights of one expert or none
    alone = [plain("fused_mul_poly_norm")(x, mul, weight[expert], bias[expert], eps) for expert in range(5)]
    alone.append(torch.zeros_like(x))
    nearest = torch.stack([(outputs[0] - one).abs().amax(-1) for one in alone]).amin(0)
    assert float(nearest.max()) < 1e-3
    # the gradient of a bias is the sum of grad * mul over the expert's rows, cut to those that there are
    of_rows = (grads[0] * mul).sum(-1).detach()
    for expert, end in enumerate(ends):
        begin = min(max(ends[expert - 1], 0), 83) if expert else 0
        expected = of_rows[begin : max(begin, min(end, 83))].sum()
        assert float(gradients[3][expert]) == pytest.approx(float(expected), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_values_to_1e4_in_float16(name):
    values = arguments(name, 83, 4096, torch.float16, "cuda", scale=3000.0)
    with torch.no_grad():
        values[0].clamp_(-1e4, 1e4)
    outputs, gradients, grads = run(operator(name), values)
    assert all(bool(tensor.isfinite().all()) for tensor in outputs + gradients)
    check_against_float64(name, values)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_repeat_bit_for_bit(name):
    for rows, dim in ((2048, 4096), (2048, 200), (83, 8191)):
        values = arguments(name, rows, dim, torch.bfloat16, "cuda")
        _, first, grads = run(operator(name), values)
        for _ in range(3):
            assert all(torch.equal(*pair) for pair in zip(first, run(operator(name), values, grads)[1]))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_and_one_graph(name):
    from test_norms_ops import RAW, RAW_NAMES

    values = arguments(name, 6, 264, torch.bfloat16, "cuda")
    torch.library.opcheck(getattr(torch.ops.zero_inference, RAW_NAMES.get(name, name)).default, RAW[name](*values))
    torch._dynamo.reset()
    _, expected, grads = run(operator(name), values)
    _, found, _ = run(torch.compile(operator(name), fullgraph=True), values, grads)
    assert all(torch.equal(*pair) for pair in zip(found, expected))


def test_in_a_cuda_graph():
    x, weight, eps = arguments("rms_norm", 83, 4096, torch.bfloat16, "cuda")
    with torch.no_grad():
        expected = operator("rms_norm")(x, weight, eps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = operator("rms_norm")(x, weight, eps)
        graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llamas_rounding(dtype):
    x, weight, eps = arguments("rms_norm", 83, 4096, dtype, "cuda")
    found = operator("rms_norm")(x, weight, eps, round_first=True)
    expected = plain("rms_norm")(x, weight, eps, round_first=True)
    if dtype == torch.float32:  # which rounds nothing first: what is left is the order of sums
        assert norm_error(found, expected) < 1e-6
    else:
        assert float((found != expected).float().mean()) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["opt", "bloom", "llama", "mixtral", "qwen3", "gpt_neox"])
def test_patched_models_give_the_same_tokens(family, dtype):
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    assert_same_tokens(build_model(family, dtype).cuda(), ids)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smollm2_writes_the_same_text(dtype, smollm2_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=getattr(torch, dtype)).cuda().eval()
    assert_same_tokens(model, torch.randint(3, 40000, (2, 40), generator=torch.Generator().manual_seed(1)))


def assert_same_tokens(model, ids):
    reset_generation_config(model)
    ids = ids.cuda()
    how = {"attention_mask": torch.ones_like(ids), "generation_config": greedy_config(64)}
    with torch.no_grad():
        expected = model.generate(ids, **how)
        assert patch_norms(model) > 0
        assert torch.equal(model.generate(ids, **how), expected)
