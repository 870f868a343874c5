"""A case of the kernel benchmark: inputs, providers that compute the same thing, and the check that they do."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Provider = Callable[..., Any]

# Bound of a difference, absolute and relative, by dtype; 1e-2 is the loosest that a 16-bit type may have.
LARGEST_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class WrongResult(Exception):
    """A provider computes something else than the reference."""


class DiffCase(ABC):
    """One kernel to check and to time. Providers take the inputs in their order.

    Attributes:
        name: of the case, on the command line and in file names.
        forward_tensors, backward_tensors: tensors as large as x that each pass has to read or write, for GB/s.
        compiles_cuda: also time torch.compile of the CUDA operator.
        grouped: sizes are tokens of experts, not batches.
    """

    name: str
    forward_tensors: int
    backward_tensors: int
    compiles_cuda = False
    grouped = False

    @abstractmethod
    def shapes(self, x: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs that get gradients, by name; `x` is [bs, sl, hidden]."""

    def build_inputs(
        self, hidden: int, bs: int, sl: int, dtype: torch.dtype, eps: float, device: str = "cuda"
    ) -> Inputs:
        """Return random inputs and weights, all of which require gradients, and `eps`."""
        torch.manual_seed(0)
        shapes = self.shapes((bs, sl, hidden))
        tensors = {name: torch.randn(*shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        return {name: tensor.requires_grad_() for name, tensor in tensors.items()} | {"eps": eps}

    @abstractmethod
    def make_naive(self, inputs: Inputs) -> Provider:
        """Return plain PyTorch; with float64 inputs it is the reference."""

    @abstractmethod
    def make_cuda(self, inputs: Inputs) -> Provider:
        """Return our operator."""

    def make_peers(self, inputs: Inputs) -> dict[str, Provider]:
        """Return other libraries' functions by name, of those that are installed."""
        return {}

    def forward(self, obj: Provider, inputs: Inputs) -> Tensor | tuple[Tensor, ...]:
        """Call a provider."""
        return obj(*inputs.values())

    def grad_inputs(self, inputs: Inputs) -> list[Tensor]:
        """Return the tensors that get gradients: activations, weights and biases."""
        return [each for each in inputs.values() if isinstance(each, Tensor) and each.requires_grad]


def installed(makers: dict[str, Callable[[], Provider]]) -> dict[str, Provider]:
    """Return the peers of `makers` (which import what they need) that can be made here."""
    peers = {}
    for name, make in makers.items():
        with contextlib.suppress(ImportError):
            peers[name] = make()
    return peers


def calculate_diff(
    case: DiffCase,
    *,
    bs: int,
    sl: int,
    hidden_size: int,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-6,
    device: str = "cuda",
    provider: Callable[[Inputs], Provider] | None = None,
) -> dict[str, float]:
    """Compare outputs and all gradients of `provider` (default: the CUDA operator) with the naive one in float64.

    LARGEST_ERROR of the dtype bounds a difference relative to the largest value of the reference plus the value there.

    Returns:
        The largest difference over the largest value, by the name of the output or gradient.

    Raises:
        WrongResult: an output or gradient is off.
    """
    inputs = case.build_inputs(hidden_size, bs, sl, dtype, eps, device)
    wide = {name: _as_float64(value) for name, value in inputs.items()}
    found = as_tuple(case.forward((provider or case.make_cuda)(inputs), inputs))
    expected = as_tuple(case.forward(case.make_naive(wide), wide))
    torch.manual_seed(1)
    grads = [torch.randn_like(output) for output in found]
    names = [name for name, value in inputs.items() if any(value is one for one in case.grad_inputs(inputs))]
    found_grads = torch.autograd.grad(found, case.grad_inputs(inputs), grads)
    expected_grads = torch.autograd.grad(expected, case.grad_inputs(wide), [grad.double() for grad in grads])
    errors = {}
    pairs = [(f"output {index}", *pair) for index, pair in enumerate(zip(found, expected))]
    pairs += [(f"gradient of {name}", *pair) for name, *pair in zip(names, found_grads, expected_grads)]
    for name, value, reference in pairs:
        value, reference = value.detach(), reference.detach()
        difference = (value.double() - reference).abs()
        scale = reference.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        errors[name] = float(difference.max() / scale)
        allowed = LARGEST_ERROR[dtype]
        if not bool((difference <= allowed * (scale + reference.abs())).all()):  # nan too
            where = f"batch {bs}, sequence {sl}, hidden {hidden_size}, {dtype_name(dtype)}"
            raise WrongResult(
                f"{case.name}: {name} is off by {errors[name]:.1e} of its largest value ({where}; allowed {allowed:.0e})"
            )
    return errors


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _as_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
