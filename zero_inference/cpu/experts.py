"""The experts of a mixture as one task of the CPU pool: each row of the input reads only the experts that it is routed to."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, fields
from zero_inference.cpu.pool import ACTIVATION_NUMBERS, CpuPool, Task
from zero_inference.cpu.products import Matrix
from zero_inference.kernels.extension import load_extension


@dataclass(frozen=True)
class Expert:
    """down(f(gate(x)) * up(x)), or down(f(gate(x))) without `up`; biases on the CPU, [rows] each, or None.

    Where gate and up have interleaved rows (`ExpertActivation.interleaved`), `gate` and `gate_bias` hold both.
    """

    gate: Matrix
    up: Matrix | None
    down: Matrix
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertActivation:
    """The input of an expert's down projection: f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset).

    Attributes:
        activation: f, a key of `ACTIVATION_NUMBERS`.
        interleaved: rows of gate and up alternate in one matrix, gate's first.
    """

    activation: str
    interleaved: bool = False
    limit: float = math.inf
    up_offset: float = 0.0


# `ExpertCounts` of csrc/cpu/experts.cpp, the totals of a task: token-expert pairs, pairs whose expert was in the device's cache, experts
# that a call did not read because of that, and experts that the device fetched for a call.
COUNTS = 4
CHOICES, HITS, SAVED, FETCHED = range(COUNTS)


class _Expert(ctypes.Structure):
    _fields_ = fields(Matrix, "gate up down") + fields(ctypes.c_void_p, "gate_bias up_bias down_bias")


class _Activation(ctypes.Structure):
    _fields_ = fields(ctypes.c_int32, "activation bias_dtype interleaved") + fields(ctypes.c_float, "limit up_offset")


def add_experts(
    pool: CpuPool,
    experts: Sequence[Expert],
    activation: ExpertActivation,
    dtype: torch.dtype,
    counts: Tensor | None = None,
) -> Task:
    """Add a task of csrc/cpu/experts.cpp, to be called with a `Routing`.

    Args:
        experts: all of one shape and format; the caller keeps their weights alive.
        dtype: of input and output.
        counts: int64 [COUNTS] on the CPU, zeros, incremented by each call.

    Raises:
        ValueError: shapes or formats of the experts differ or do not match.
    """
    gates = {(m.rows, *m.format) for expert in experts for m in (expert.gate, expert.up) if m is not None}
    downs = {(expert.down.rows, *expert.down.format) for expert in experts}
    has_up = {expert.up is not None for expert in experts}
    inner = experts[0].gate.rows // (1 + activation.interleaved)
    if len(gates) != 1 or len(downs) != 1 or len(has_up) != 1 or experts[0].down.columns != inner:
        raise ValueError(
            f"experts must be of one form, and down's columns as many as gate's rows; found (rows, columns, group, rows of a group, "
            f"codes, scales, offsets, divides, dtype, row scales) {sorted(gates)} for gate and up and {sorted(downs)} for down"
        )
    biases, filled = [], (_Expert * len(experts))()
    for to, expert in zip(filled, experts):
        to.gate, to.down = expert.gate, expert.down
        if expert.up is not None:
            to.up = expert.up
        for name in ("gate_bias", "up_bias", "down_bias"):
            if (bias := getattr(expert, name)) is not None:
                setattr(to, name, bias.data_ptr())
                biases.append(bias)
    pool.references += biases if counts is None else [*biases, counts]
    described = _Activation(
        ACTIVATION_NUMBERS[activation.activation],
        DTYPES[biases[0].dtype if biases else dtype],
        activation.interleaved,
        activation.limit,
        activation.up_offset,
    )
    number = pool.library.zero_inference_cpu_pool_add_experts(
        pool.handle,
        filled,
        len(experts),
        ctypes.byref(described),
        DTYPES[dtype],
        INSTRUCTIONS.index(pool.instructions),
        None if counts is None else counts.data_ptr(),
    )
    return Task(number, experts[0].gate.columns, (experts[0].down.rows,), 0)


class WeightedRows(NamedTuple):
    """Outputs of a token's experts before they are weighted and summed, contiguous."""

    weights: Tensor  # [tokens, k]
    rows: Tensor  # [tokens * k, width], zeros for an expert that is not among these
    more: Tensor | None = None  # outputs of other experts, same shape

    def total(self) -> Tensor:
        """Return the weighted sum of each token [tokens, width], accumulated in float32 in the order of routing."""
        if self.rows.is_cuda and {self.rows.dtype, self.weights.dtype} <= DTYPES.keys() and load_extension():
            return torch.ops.zero_inference.weighted_rows(*self)
        return self._by_pytorch()

    def added_to(self, out: Tensor) -> Tensor:
        """Return `out` [tokens, width] plus the weighted sum of each token, by PyTorch, rounded once to out's dtype."""
        return self._by_pytorch().add_(out).to(out.dtype)

    def _by_pytorch(self) -> Tensor:
        tokens, k = self.weights.shape
        weights = self.weights.float().unsqueeze(-1)  # [tokens, k, 1]
        sums = [(rows.view(tokens, k, -1) * weights).sum(1) for rows in (self.rows, self.more) if rows is not None]
        return sums[0] if len(sums) == 1 else sums[0].add_(sums[1])
