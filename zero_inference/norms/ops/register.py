"""How an operator gets into `torch.ops.zero_inference`, and how it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from zero_inference.kernels.extension import operators_of

LIBRARY = operators_of(__name__)
OPS = torch.ops.zero_inference
_said: set[str] = set()


def register(
    name: str,
    schema: str,
    run: Callable,
    fake: Callable,
    gradient: Callable | None = None,
    keep: Callable | None = None,
) -> None:
    """Add operator `name`.

    Args:
        run: what runs where no kernel is registered, on tensors of any strides.
        fake: the same on shapes alone, for tracing. All results are contiguous.
        gradient, keep: backward function, and what it keeps of a call; None for an operator that is a gradient itself.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _without_kernel(name, run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"zero_inference::{name}", fake, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"zero_inference::{name}", gradient, setup_context=keep, lib=LIBRARY)


def call(name: str, *args):
    """The operator. Where no gradient is wanted the dispatcher is entered below autograd: register_autograd's layer, which is
    Python, would find the same out and cost the host 5 us a call."""
    operator = getattr(OPS, name).default
    wanted = torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in args
    )
    if wanted or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _without_kernel(name: str, run):
    """`run` for the dispatcher. A CUDA tensor that comes here first sends for the library, and then the call is made again."""

    def fallback(*args):
        x = next(argument for argument in args if isinstance(argument, Tensor))
        reason = "x is not on a CUDA device"
        if x.is_cuda:
            from zero_inference.kernels.extension import load_extension, why_unavailable

            if load_extension() and torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_inference::{name}", "CUDA"):
                return getattr(OPS, name)(*args)
            reason = why_unavailable() or "the compiled library has no norms"
        say_reference(reason)
        return run(*args)

    return fallback


def say_reference(reason: str) -> None:
    """One line on stderr that the reference is used, once a process and reason."""
    if reason not in _said:
        _said.add(reason)
        print(f"note: norms run as plain PyTorch ({reason})", file=sys.stderr, flush=True)


def like(tensor: Tensor) -> Tensor:
    """An empty contiguous tensor of its shape, dtype and device."""
    return tensor.new_empty(tensor.shape)
