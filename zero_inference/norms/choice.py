"""--norm-kernels auto, cuda or off: decide whether a run uses our norm kernels, after a trial on a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.extension import load_extension, why_unavailable
from zero_inference.norms import ops, patch, reference
from zero_inference.utils.format import first_line

NO_DEVICE = "there is no CUDA device"
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over norm


def check_norm_kernels_option(asked: str, model_type: str) -> None:
    """Raise UsageError for `cuda` with a family that is not in the table, before anything is compiled or loaded."""
    reason = patch.family_refusal(model_type) if asked == "cuda" else None
    if reason is not None:
        raise _refusal(reason)


def prepare_norm_kernels(
    asked: str,
    model_type: str,
    device: torch.device,
    dtype: torch.dtype,
    columns: int,
    say: Callable[[str], None],
) -> str | None:
    """Compile or load the kernels and try them on `device`. Return why they are not used, or None.

    Args:
        columns: hidden size of the model.
        say: gets a line before a compilation that takes a minute, and a warning if the kernels are wrong.

    Raises:
        UsageError: `cuda` is set and not possible.
    """
    if asked == "off":
        return "--norm-kernels off"
    reason = patch.family_refusal(model_type) if device.type == "cuda" else NO_DEVICE
    if reason is None and not load_extension(say):
        reason = f"the CUDA kernels are not there: {why_unavailable()}"
    if reason is None:
        reason = find_fault(device, dtype, columns)
        if reason is not None and asked == "auto":
            say(f"warning: this package's norm kernels are not used: {reason}")
    if reason is not None and asked == "cuda":
        raise _refusal(reason)
    return reason


def apply_norm_kernels(
    asked: str, reason: str | None, model: nn.Module, say: Callable[[str], None], model_type: str | None = None
) -> dict[str, Any]:
    """Patch `model` unless there is a `reason` against it; return the record's fields about it.

    Args:
        model_type: as of `patch_norms`.

    Raises:
        RunError: `cuda` is set and this model has norms that are not in the table.
    """
    if reason is None:
        reason = patch.patch_refusal(model, model_type)
        if reason is not None and asked == "cuda":
            raise RunError(f"--norm-kernels cuda: {reason}; use auto or off.")
    if reason is None:
        return {"norm_modules_patched": patch.patch_norms(model, model_type), "norm_kernels_unused_because": None}
    if reason != NO_DEVICE and asked == "auto":
        say(f"norms use transformers' implementation: {reason}")
    return {"norm_modules_patched": 0, "norm_kernels_unused_because": reason}


def find_fault(device: torch.device, dtype: torch.dtype, columns: int) -> str | None:
    """Compare the operators that models use on `device` with the reference in float64 on a few random rows. Return the fault, or None."""
    generator = torch.Generator().manual_seed(5)
    x, residual, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((5, columns), (5, columns), columns, columns)
    )
    total = x + residual
    rms = reference.rms_norm_ref(total.double(), weight.double())
    layer = reference.layer_norm_ref(total.double(), weight.double(), bias.double())
    x, residual, weight, bias, sums = (tensor.to(device) for tensor in (x, residual, weight, bias, total))
    try:
        normed, added = ops.fused_add_rms_norm(x, residual, weight)
        found = {
            "rms_norm": (ops.rms_norm(sums, weight), rms),
            "fused_add_rms_norm": (normed, rms),
            "the sum of fused_add_rms_norm": (added, total.double()),
            "layer_norm": (ops.layer_norm(sums, weight, bias), layer),
            "fused_add_layer_norm": (ops.fused_add_layer_norm(x, residual, weight, bias)[0], layer),
        }
        for name, (result, expected) in found.items():
            error = float((result.cpu().double() - expected).norm() / expected.norm())
            if not error <= MAX_ERROR[dtype]:  # nan too
                return f"{name} is off by {error:.1e} on {device} ({dtype}, {columns} columns)"
    except RuntimeError as error:
        return f"they fail on {device}: {first_line(error)}"
    return None


def _refusal(reason: str) -> UsageError:
    return UsageError(f"--norm-kernels cuda: {reason}; use auto or off.")
