"""--norm-kernels auto, cuda or off: decide whether a run uses our norm kernels, after a trial of them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.extension import load_extension, trial_mark, why_unavailable
from zero_inference.norms import ops, patch, reference
from zero_inference.utils.format import first_line
from zero_inference.utils.processes import isolated_python

NO_DEVICE = "there is no CUDA device"
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over norm
_CHECK_ROWS = 5
_TRIAL_S = 300
# program of the trial: its arguments are device, dtype and columns; it prints their fault after "fault:"
TRIAL = """
import sys, torch
from zero_inference.kernels.extension import load_extension
from zero_inference.norms.choice import find_fault
load_extension(lambda line: None)
print("fault:", find_fault(torch.device(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])) or "")
"""


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
    trial: str = TRIAL,
) -> str | None:
    """Compile or load the kernels and try them on `device`. Return why they are not used, or None.

    Args:
        columns: hidden size of the model.
        say: gets a line before a compilation that takes a minute, and a warning if the kernels are wrong.
        trial: as of `try_in_child`.

    Raises:
        UsageError: `cuda` is set and not possible.
    """
    if asked == "off":
        return "--norm-kernels off"
    if device.type != "cuda":
        reason = NO_DEVICE
    else:
        reason = patch.family_refusal(model_type)
    if reason is None and not load_extension(say):
        reason = f"the CUDA kernels are not there: {why_unavailable()}"
    if reason is None:
        reason = try_in_child(device, dtype, columns, trial)
        if reason is not None and asked == "auto":
            say(f"warning: this package's norm kernels are not used: {reason}")
    if reason is not None and asked == "cuda":
        raise _refusal(reason)
    return reason


def try_in_child(device: torch.device, dtype: torch.dtype, columns: int, trial: str = TRIAL) -> str | None:
    """Run `find_fault` in a child process, which an illegal memory access of a kernel would end; cache a success.

    Args:
        trial: the program to run, see `TRIAL`.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind = str(dtype).removeprefix("torch.")
    mark = trial_mark(name, kind, str(columns))
    if mark.exists():
        return None
    try:
        done = subprocess.run(
            isolated_python(trial, str(device), kind, str(columns)), capture_output=True, text=True, timeout=_TRIAL_S
        )
    except subprocess.TimeoutExpired:
        return f"their trial did not end within {_TRIAL_S} s"
    if done.returncode != 0:
        return f"their trial failed: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1][:200]}"
    fault = done.stdout.rpartition("fault:")[2].strip()
    if not fault:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run a trial
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return fault or None


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

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, residual, weight, bias = rows(_CHECK_ROWS, columns), rows(_CHECK_ROWS, columns), rows(columns), rows(columns)
    total = x + residual
    on_device = [tensor.to(device) for tensor in (x, residual, weight, bias)]
    total_on_device = total.to(device)
    wide, wide_weight, wide_bias = total.double(), weight.double(), bias.double()
    try:
        rms = reference.rms_norm_ref(wide, wide_weight)
        layer = reference.layer_norm_ref(wide, wide_weight, wide_bias)
        found = {
            "rms_norm": (ops.rms_norm(total_on_device, on_device[2]), rms),
            "fused_add_rms_norm": (ops.fused_add_rms_norm(*on_device[:3])[0], rms),
            "the sum of fused_add_rms_norm": (ops.fused_add_rms_norm(*on_device[:3])[1], wide),
            "layer_norm": (ops.layer_norm(total_on_device, *on_device[2:]), layer),
            "fused_add_layer_norm": (ops.fused_add_layer_norm(*on_device)[0], layer),
        }
        for name, (result, expected) in found.items():
            error = float((result.cpu().double() - expected).norm() / expected.norm())
            if not error <= MAX_ERROR[dtype]:  # nan too
                return (
                    f"{name} is off by {error:.1e} on {device} ({str(dtype).removeprefix('torch.')}, {columns} columns)"
                )
    except RuntimeError as error:
        return f"they fail on {device}: {first_line(error)}"
    return None


def _refusal(reason: str) -> UsageError:
    return UsageError(f"--norm-kernels cuda: {reason}; use auto or off.")
