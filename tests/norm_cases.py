"""The norms as a table for tests: operator, reference, and random arguments."""

from __future__ import annotations

import torch

from zero_inference import norms
from zero_inference.norms import ops

EPS = 1e-5
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over norm
NAMES = tuple(name for name in norms.__all__ if not name.endswith(("_ref", "_norms")))
OFFSETS = {
    "mixed": lambda rows: [rows // 4, rows // 4, rows // 2, rows - rows // 8, rows - rows // 8],  # empty ones, padding
    "all in one": lambda rows: [0, 0, rows, rows, rows],
    "all padding": lambda rows: [0] * 5,
    "no padding": lambda rows: [rows // 3, rows // 2, rows // 2, rows, rows],
}


def operator(name: str):
    return getattr(ops, name)


def plain(name: str):
    return getattr(ops, f"{name}_ref")


def arguments(
    name: str,
    rows: int,
    dim: int,
    dtype=torch.float32,
    device="cpu",
    scale: float = 1.0,
    offsets: str = "mixed",
    seed: int = 0,
) -> list:
    """Random tensors that require gradients, offsets, and eps, in the order of `name`'s signature; x is [rows, dim]."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(dtype).to(device).requires_grad_()

    x, second = random(rows, dim, scale=scale), random(rows, dim)
    if "grouped" in name:
        ends = torch.tensor(OFFSETS[offsets](rows), dtype=torch.int32, device=device)
        return [x, second, random(5, 3), random(5, 1), ends, EPS]
    tensors = [x] if not name.startswith("fused") else [x, second]
    tensors += [random(3), random(1)] if "poly" in name else [random(dim)] + ([random(dim)] if "layer" in name else [])
    return [*tensors, EPS]


def widened(values: list) -> list:
    def wide(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().double().cpu().requires_grad_() if value.is_floating_point() else value.cpu()

    return [wide(value) for value in values]


def run(function, values: list, grads: list[torch.Tensor] | None = None, seed: int = 1):
    """(outputs, gradients of all inputs, gradients that went in)."""
    outputs = function(*values)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if grads is None:
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    wanted = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    return outputs, list(torch.autograd.grad(outputs, wanted, grads)), grads


def norm_error(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Norm of the difference over norm (`least`, if that is more), less what the smallest steps of found's dtype cannot say.

    Where the true value is nothing but rounding (LayerNorm over one element) it is the difference.
    """
    limits = torch.finfo(found.dtype)
    difference = float((found.detach().double().cpu() - expected.detach().double().cpu()).norm())
    difference = max(0.0, difference - found.numel() ** 0.5 * limits.smallest_normal * limits.eps)
    size = max(least, float(expected.detach().double().norm()))
    return difference / size if size > 1e-9 else difference


def check_against_float64(name: str, values: list, function=None) -> None:
    """Outputs and every gradient of the operator (or `function`) against the reference in float64."""
    dtype = values[0].dtype
    outputs, gradients, grads = run(function or operator(name), values)
    expected, expected_gradients, _ = run(plain(name), widened(values), [grad.double().cpu() for grad in grads])
    for index, (found, true) in enumerate(zip(outputs + gradients, expected + expected_gradients)):
        assert found.dtype == dtype and found.shape == true.shape
        # a sum over all of x that happens to come out near zero is not more exact than its parts
        least = 0.02 * values[0].numel() ** 0.5 if found.shape != values[0].shape else 0.0
        error = norm_error(found, true, least)
        assert error < ERROR[dtype], (name, index, error)
