"""--norm-kernels auto, cuda or off: decide whether a run uses our norm kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.extension import load_extension, why_unavailable
from zero_inference.norms import patch

NO_DEVICE = "there is no CUDA device"


def check_norm_kernels_option(asked: str, model_type: str) -> None:
    """Raise UsageError for `cuda` with a family that is not in the table, before anything is compiled or loaded."""
    reason = patch.family_refusal(model_type) if asked == "cuda" else None
    if reason is not None:
        raise _refusal(reason)


def prepare_norm_kernels(asked: str, model_type: str, device: torch.device, say: Callable[[str], None]) -> str | None:
    """Compile or load the kernels. Return why they are not used, or None.

    Args:
        say: gets a line before a compilation that takes a minute.

    Raises:
        UsageError: `cuda` is set and not possible.
    """
    if asked == "off":
        return "--norm-kernels off"
    reason = patch.family_refusal(model_type) if device.type == "cuda" else NO_DEVICE
    if reason is None and not load_extension(say):
        reason = f"the CUDA kernels are not there: {why_unavailable()}"
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


def _refusal(reason: str) -> UsageError:
    return UsageError(f"--norm-kernels cuda: {reason}; use auto or off.")
