"""The operators and modules on a CPU: right, differentiable, traceable; and their refusals."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, start_python
from forks import LIBRARIES
from norm_cases import ERROR, NAMES, arguments, check_against_float64, operator, plain, run

from zero_inference.norms import fused_add_rms_norm, fused_mul_grouped_poly_norm, layers, ops, poly_norm, rms_norm

RAW = {
    "rms_norm": lambda x, w, eps: (x, w, eps, 1.0, True),
    "fused_add_rms_norm": lambda x, r, w, eps: (x, r, w, eps, 0.0, False),
    "layer_norm": lambda *values: values,
    "fused_add_layer_norm": lambda *values: values,
    "poly_norm": lambda x, w, b, eps: (x, None, w, b, None, eps),
    "fused_mul_poly_norm": lambda x, m, w, b, eps: (x, m, w, b, None, eps),
    "fused_mul_grouped_poly_norm": lambda *values: values,
}
RAW_NAMES = {name: name.removeprefix("fused_") if "add" in name else "poly_norm" for name in NAMES if "fused" in name}


REIMPORTED = """
import sys
sys.path.insert(0, {root!r})
import torch
for _ in range(2):
    import zero_inference.norms.layers, zero_inference.kernels.products, zero_inference.cpu.products
    from zero_inference.norms import rms_norm
    x = torch.randn(3, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-6).sum().backward()
    assert x.grad is not None and torch.ops.zero_inference.linear_groups.default
    for name in [name for name in sys.modules if name.split(".")[0] == "zero_inference"]:
        del sys.modules[name]
"""


def test_a_second_import_after_the_modules_were_removed(fork_server, tmp_path):
    program, said = tmp_path / "reimported.py", tmp_path / "said"
    program.write_text(REIMPORTED.format(root=str(ROOT)))
    process = start_python(fork_server(LIBRARIES), [program], tmp_path, said, said, dict(os.environ))
    assert process.wait(60) == 0, said.read_text()


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows, dim", [(0, 7), (1, 1), (7, 255), (83, 8)])
def test_outputs_and_gradients(name, rows, dim, dtype):
    check_against_float64(name, arguments(name, rows, dim, dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(name, dtype):
    raw = getattr(torch.ops.zero_inference, RAW_NAMES.get(name, name)).default
    torch.library.opcheck(raw, RAW[name](*arguments(name, 6, 9, dtype)))
    strided = arguments(name, 6, 9, dtype)
    strided[0] = strided[0].detach().t().contiguous().t().requires_grad_()
    torch.library.opcheck(raw, RAW[name](*strided))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    values = arguments(name, 6, 9)
    compiled = torch.compile(operator(name), fullgraph=True, backend="aot_eager")
    expected, expected_gradients, grads = run(operator(name), values)
    outputs, gradients, _ = run(compiled, values, grads)
    torch.testing.assert_close(outputs + gradients, expected + expected_gradients)


@pytest.mark.parametrize("name", NAMES)
def test_any_leading_shape_and_stride(name):
    values = arguments(name, 12, 10)
    tensors = 2 if name.startswith("fused") else 1
    shaped = [each.detach().view(3, 4, 10).transpose(0, 1).contiguous().transpose(0, 1) for each in values[:tensors]]
    (found, *_), (expected, *_) = run(operator(name), shaped + values[tensors:]), run(operator(name), values)
    for here, there in zip(found, expected):
        assert here.is_contiguous() and torch.equal(here.view(12, 10), there)


def test_only_the_sum_or_only_the_norm_may_be_used():
    x, residual, weight, eps = arguments("fused_add_rms_norm", 4, 8)
    out, total = fused_add_rms_norm(x, residual, weight, eps)
    grads = torch.autograd.grad(total.sum(), [x, residual, weight], allow_unused=True)
    assert bool(grads[0].eq(1).all()) and bool(grads[1].eq(1).all()) and grads[2] is None
    out, _ = fused_add_rms_norm(x, residual, weight, eps)
    grads = torch.autograd.grad(out.sum(), [x, residual, weight])
    assert torch.equal(grads[0], grads[1]) and bool(grads[2].any())


X, W = torch.zeros(2, 3, 8), torch.ones(8)
ENDS = torch.tensor([1, 3, 6], dtype=torch.int32)


def grouped(**changed):
    values = dict(weight=torch.ones(3, 3), bias=torch.ones(3, 1), offsets=ENDS) | changed
    return fused_mul_grouped_poly_norm(X, X, *values.values())


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: rms_norm(X, torch.ones(7)), ["weight", "[8]", "[2, 3, 8]", "[7]"]),
        (lambda: rms_norm(torch.tensor(1.0), torch.ones(1)), ["last dimension", "[]"]),
        (lambda: rms_norm(X.double(), W.double()), ["float16, bfloat16 or float32", "float64"]),
        (lambda: rms_norm(X, W.half()), ["weight", "float32", "float16", "[2, 3, 8]"]),
        (lambda: rms_norm(X, W.to("meta")), ["weight", "cpu", "meta"]),
        (lambda: fused_add_rms_norm(X, X[:1], W), ["residual", "[2, 3, 8]", "[1, 3, 8]"]),
        (lambda: ops.layer_norm(X, W, torch.ones(4)), ["bias", "[8]", "[4]"]),
        (lambda: ops.fused_add_layer_norm(X, X[..., :4], W, W), ["residual", "[2, 3, 8]", "[2, 3, 4]"]),
        (lambda: poly_norm(X, torch.ones(4), torch.ones(1)), ["weight", "[3]", "[4]"]),
        (lambda: ops.fused_mul_poly_norm(X, X[0], torch.ones(3), torch.ones(1)), ["mul", "[2, 3, 8]", "[3, 8]"]),
        (lambda: grouped(weight=torch.ones(2, 3)), ["weight", "[3, 3]", "[2, 3]"]),
        (lambda: grouped(bias=torch.ones(3)), ["bias", "[3, 1]", "[3]"]),
        (lambda: grouped(offsets=ENDS.long()), ["int32", "int64", "[3]"]),
        (lambda: grouped(offsets=ENDS[:0]), ["offsets", "[0]"]),
        (lambda: grouped(offsets=ENDS.flip(0)), ["negative or fall", "[6, 3, 1]"]),
        (lambda: grouped(offsets=ENDS - 2), ["negative or fall", "[-1, 1, 4]"]),
        (lambda: grouped(offsets=ENDS.to("meta")), ["offsets", "cpu", "meta"]),
    ],
)
def test_refusals_say_both_sides(call, words):
    with pytest.raises(ValueError) as refused:
        call()
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "made, name, inputs",
    [
        (lambda: layers.RMSNorm(10), "rms_norm", 1),
        (lambda: layers.FusedAddRMSNorm(10), "fused_add_rms_norm", 2),
        (lambda: layers.LayerNorm(10), "layer_norm", 1),
        (lambda: layers.FusedAddLayerNorm(10), "fused_add_layer_norm", 2),
        (lambda: layers.PolyNorm(), "poly_norm", 1),
        (lambda: layers.FusedMulPolyNorm(), "fused_mul_poly_norm", 2),
    ],
)
def test_modules(made, name, inputs):
    module = made()
    values = arguments(name, 6, 10)[:inputs]
    found, expected = module(*values), plain(name)(*values, *module.parameters(), module.eps)
    torch.testing.assert_close(found, expected)
    (found if isinstance(found, torch.Tensor) else found[0]).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert "eps" in repr(module)
    if name == "poly_norm":
        assert layers.PolyNorm().weight.tolist() == pytest.approx([1 / 3] * 3) and module.eps == 1e-6


def test_importing_the_package_needs_no_torch_and_the_reference_is_told_once():
    code = "import sys, zero_inference.norms; assert 'torch' not in sys.modules; import torch; x = torch.ones(2, 4)\n"
    code += "for _ in range(2): zero_inference.norms.rms_norm(x, x[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr.count("plain PyTorch") == 1, done.stderr
