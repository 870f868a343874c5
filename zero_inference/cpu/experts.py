"""The experts of a mixture as a task for the cores: of each row of the input they read only those that it chose."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS
from zero_inference.cpu.pool import ACTIVATION_NUMBERS, CpuPool, Task
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.extension import load_extension


@dataclass(frozen=True)
class Expert:
    """down(f(gate(x)) x up(x)), or down(f(gate(x))) without `up`; biases in host memory, [rows] each, or None.

    Where rows of gate and up alternate (`Between.interleaved`), `gate` and `gate_bias` have those of both.
    """

    gate: Matrix
    up: Matrix | None
    down: Matrix
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def biases(self) -> tuple[torch.Tensor | None, ...]:
        return self.gate_bias, self.up_bias, self.down_bias


@dataclass(frozen=True)
class ExpertActivation:
    """The input of an expert's last product: f(min(gate, limit)) x (clamp(up, -limit, limit) + up_offset).

    Attributes:
        activation: f, a key of `ACTIVATION_NUMBERS`.
        interleaved: rows of gate and up alternate in one matrix, gate's first.
    """

    activation: str
    interleaved: bool = False
    limit: float = math.inf
    up_offset: float = 0.0


# In the counts of a task: choices, those of experts that the device had, the experts that no call had to read for that (one
# counts once a call), and those that the device fetched (likewise).
COUNTS = 4
CHOICES, HITS, UNREAD, FETCHED = range(COUNTS)


class _Expert(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_bias", "up_bias", "down_bias")),
    ]


class _Between(ctypes.Structure):
    _fields_ = [
        ("activation", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("up_offset", ctypes.c_float),
    ]


def add_experts(
    cores: CpuPool,
    experts: Sequence[Expert],
    between: ExpertActivation,
    dtype: torch.dtype,
    use: torch.Tensor | None = None,
) -> Task:
    """A task of csrc/cpu/experts.h, which is called with a `Choice`.

    Args:
        experts: all of one form; whoever adds them keeps their memory.
        dtype: of input and output.
        use: int64 [COUNTS] in host memory, in which the cores count what was chosen; zeros at first.

    Raises:
        ValueError: their shapes or formats differ or do not fit each other.
    """
    _check(experts, between.interleaved)
    biases = [bias for expert in experts for bias in expert.biases if bias is not None]
    cores.kept += biases
    if use is not None:
        cores.kept.append(use)
    filled = (_Expert * len(experts))()
    for to, expert in zip(filled, experts):
        to.gate, to.down = expert.gate, expert.down
        if expert.up is not None:
            to.up = expert.up
        for name, bias in zip(("gate_bias", "up_bias", "down_bias"), expert.biases):
            if bias is not None:
                setattr(to, name, bias.data_ptr())
    number = cores.library.zero_inference_cores_add_experts(
        cores.handle,
        filled,
        len(experts),
        ctypes.byref(
            _Between(
                ACTIVATION_NUMBERS[between.activation],
                DTYPES[biases[0].dtype if biases else dtype],
                between.interleaved,
                between.limit,
                between.up_offset,
            )
        ),
        DTYPES[dtype],
        INSTRUCTIONS.index(cores.instructions),
        None if use is None else use.data_ptr(),
    )
    return Task(number, experts[0].gate.columns, (experts[0].down.rows,), 0)


def _check(experts: Sequence[Expert], interleaved: bool) -> None:
    gates = {_form(matrix) for expert in experts for matrix in (expert.gate, expert.up) if matrix is not None}
    downs = {_form(expert.down) for expert in experts}
    gated = {expert.up is None for expert in experts}
    if (
        len(gates) != 1
        or len(downs) != 1
        or len(gated) != 1
        or experts[0].down.columns != experts[0].gate.rows // (1 + interleaved)
    ):
        raise ValueError(
            f"experts must be of one form, and down's columns as many as gate's rows; found (rows, columns, group, bits, dtype) "
            f"{sorted(gates)} for gate and up and {sorted(downs)} for down"
        )


def _form(matrix: Matrix) -> tuple[int, ...]:
    return matrix.rows, matrix.columns, matrix.group, matrix.bits, matrix.dtype


class WeightedRows(NamedTuple):
    """The weighted sum of what a token's experts computed, before it is added up.

    Attributes:
        weights: [tokens, k]; contiguous.
        rows: [tokens * k, width], zeros for an expert that is not among these; contiguous.
        more: the same of other experts, or None.
    """

    weights: torch.Tensor
    rows: torch.Tensor
    more: torch.Tensor | None = None

    @property
    def has_kernel(self) -> bool:
        """Return whether the kernel of csrc/crossing computes the sum."""
        return self.rows.is_cuda and {self.rows.dtype, self.weights.dtype} <= DTYPES.keys() and load_extension()

    def total(self) -> torch.Tensor:
        """Return the sum of each token [tokens, width], added in float32 in the order of the choices."""
        return torch.ops.zero_inference.weighted_rows(*self) if self.has_kernel else self._by_pytorch()

    def added_to(self, out: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token and `out` [tokens, width], rounded once to out's dtype; with PyTorch alone."""
        return self._by_pytorch().add_(out).to(out.dtype)

    def _by_pytorch(self) -> torch.Tensor:
        """In float32."""
        tokens, k = self.weights.shape
        weights = self.weights.float().unsqueeze(-1)
        sums = [(rows.view(tokens, k, -1) * weights).sum(1) for rows in (self.rows, self.more) if rows is not None]
        return sums[0] if len(sums) == 1 else sums[0].add_(sums[1])
