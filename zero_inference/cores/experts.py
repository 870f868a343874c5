"""The experts of a mixture as a task for the cores: of each row of the input they read only those that it chose."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_inference.cores.cores import ACTIVATION_NUMBERS, Cores, Task
from zero_inference.cores.matrix import DTYPES, INSTRUCTIONS, Matrix


@dataclass(frozen=True)
class Expert:
    """down(f(gate(x)) x up(x)), or down(f(gate(x))) without `up`."""

    gate: Matrix
    up: Matrix | None
    down: Matrix


# In the counts of a task: choices, those of experts that the device computed, the experts that no call had to read for that (one
# counts once a call), and from FIRST_USE on the choices of each expert.
CHOICES, HITS, UNREAD, FIRST_USE = range(4)


def elsewhere(experts: torch.Tensor) -> torch.Tensor:
    """As which numbers a choice names `experts` that something else computes: the cores count them, and read nothing."""
    return ~experts


class _Expert(ctypes.Structure):
    _fields_ = [("gate", Matrix), ("up", Matrix), ("down", Matrix)]


def add_experts(
    cores: Cores, experts: Sequence[Expert], activation: str, dtype: torch.dtype, use: torch.Tensor | None = None
) -> Task:
    """A task of csrc/cpu/experts.h, which is called with a `Choice`.

    Args:
        experts: all of one form; whoever adds them keeps their memory.
        activation: a key of `ACTIVATION_NUMBERS`.
        dtype: of input and output.
        use: int64 [FIRST_USE + experts] in host memory, in which the cores count what was chosen; zeros at first.

    Raises:
        ValueError: their shapes or formats differ or do not fit each other.
    """
    _check(experts)
    if use is not None:
        cores.kept.append(use)
    filled = (_Expert * len(experts))()
    for to, expert in zip(filled, experts):
        to.gate, to.down = expert.gate, expert.down
        if expert.up is not None:
            to.up = expert.up
    number = cores.library.zero_inference_cores_add_experts(
        cores.handle,
        filled,
        len(experts),
        ACTIVATION_NUMBERS[activation],
        DTYPES[dtype],
        INSTRUCTIONS.index(cores.instructions),
        None if use is None else use.data_ptr(),
    )
    return Task(number, experts[0].gate.columns, (experts[0].down.rows,), 0)


def _check(experts: Sequence[Expert]) -> None:
    gates = {_form(matrix) for expert in experts for matrix in (expert.gate, expert.up) if matrix is not None}
    downs = {_form(expert.down) for expert in experts}
    gated = {expert.up is None for expert in experts}
    if len(gates) != 1 or len(downs) != 1 or len(gated) != 1 or experts[0].down.columns != experts[0].gate.rows:
        raise ValueError(
            f"experts must be of one form, and down's columns as many as gate's rows; found (rows, columns, group, bits, dtype) "
            f"{sorted(gates)} for gate and up and {sorted(downs)} for down"
        )


def _form(matrix: Matrix) -> tuple[int, ...]:
    return matrix.rows, matrix.columns, matrix.group, matrix.bits, matrix.dtype
