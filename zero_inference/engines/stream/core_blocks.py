"""A block in host memory that the cores multiply where it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from zero_inference.cpu.cores import Cores, Stage, Task, Weight
from zero_inference.cpu.crossing import Crossing, HostCalls
from zero_inference.cpu.matrix import DTYPES, Matrix
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.layout import BlockLayout, StoredParameter
from zero_inference.engines.stream.same_input import SameInput
from zero_inference.kernels.groups import GroupQuantization


@dataclass(frozen=True)
class Workers:
    """What blocks on the cores work with.

    Attributes:
        calls: how the model calls the cores.
        scheme: how weights are stored; None where they keep 16 bits.
        few_rows, rows: most tokens of a decode step, and of any pass that this is for.
    """

    cores: Cores
    calls: HostCalls | Crossing
    scheme: GroupQuantization | None
    few_rows: int
    rows: int


class CoreBlock:
    """The products of a block on the cores: of its feed-forward as one task, or of its linear modules.

    Linear modules that take the same input become one task.

    Args:
        buffer: uint8, the block as it waits in host memory.
    """

    def __init__(
        self,
        block: Block,
        module: nn.Module,
        layout: BlockLayout,
        buffer: torch.Tensor,
        workers: Workers,
    ):
        self.workers = workers
        self.weights = {
            name: _weight(module.get_submodule(name), name, layout, buffer, workers.scheme) for name in block.linears
        }
        self.tasks: dict[tuple[str, ...], Task] = {}
        self.same_input = SameInput()
        self.task = self._feed_forward_task(block)
        self.suits = True  # until it is given more rows than the pass has tokens: compressed keys and values of all positions, say

    def call_linears(self) -> None:
        """Multiply each linear module when it is called, from now on, and never the block as a whole."""
        self.task = None

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of the block, for hidden states [..., columns]."""
        (out,) = self.workers.calls(self.task, x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)

    def linear(self, name: str, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """The product of module `name` with x [..., columns]; those of the others with the same input are made with it.

        Args:
            tokens: of the pass.
        """
        self.suits &= x.numel() // x.shape[-1] <= max(tokens, self.workers.few_rows)
        return self.same_input.product(name, x, self._products)

    def saw(self, name: str, x: torch.Tensor) -> None:
        """Module `name` was called with `x`, and the device computed it."""
        self.same_input.saw(name, x, self._alike)

    def learned(self) -> None:
        """The device has computed the block once. If the model reads a weight without calling its module, that has to be on the device."""
        self.suits &= self.task is not None or self.same_input.together.keys() == self.weights.keys()

    def ends(self) -> None:
        """The block was called to its end: its input may go."""
        self.same_input.ends()

    def _products(self, names: tuple[str, ...], x: torch.Tensor) -> list[torch.Tensor]:
        outs = self.workers.calls(self._task_of(names), x.reshape(-1, x.shape[-1]))
        return [out.view(*x.shape[:-1], -1) for out in outs]

    def _alike(self, one: str, other: str) -> bool:
        """Whether one prepared input serves both weights."""
        a, b = self.weights[one].matrix, self.weights[other].matrix
        return (a.bits, a.group, a.dtype, a.columns) == (b.bits, b.group, b.dtype, b.columns)

    def _task_of(self, names: tuple[str, ...]) -> Task:
        if names not in self.tasks:
            self.tasks[names] = self._reserved([Stage([self.weights[name] for name in names])])
        return self.tasks[names]

    def _feed_forward_task(self, block: Block) -> Task | None:
        found = block.feed_forward
        if found is None:
            return None
        weights = [self.weights[name] for name in found.first]
        if len(found.first) == 2 and found.first[0] == found.first[1]:
            weights = _halves(weights[0])[:: -1 if found.gate_is_second else 1]
        if len({weight.matrix.dtype for weight in self.weights.values()}) > 1:
            return None
        if len(weights) == 2 and not _same_form(weights[0].matrix, weights[1].matrix):
            return None
        combine = "gated" if len(weights) == 2 else "activation"
        return self._reserved([Stage(weights, combine, found.activation), Stage([self.weights[found.last]])])

    def _reserved(self, stages: list[Stage]) -> Task:
        numbers = {weight.matrix.dtype for stage in stages for weight in stage.weights}
        (number,) = numbers  # a family may keep some modules in float32: input and output are of their weights' dtype
        task = self.workers.cores.add_block(stages, next(dtype for dtype, known in DTYPES.items() if known == number))
        self.workers.cores.reserve(task, self.workers.rows)
        return task


def _same_form(one: Matrix, other: Matrix) -> bool:
    return (one.bits, one.group, one.dtype, one.rows) == (other.bits, other.group, other.dtype, other.rows)


def stored_matrix(stored: StoredParameter, buffer: torch.Tensor, scheme: GroupQuantization | None) -> Matrix:
    """A weight [..., columns] where it lies in `buffer`; all dimensions before the last are rows."""
    columns = stored.plain.shape[-1]
    rows = math.prod(stored.plain.shape[:-1])
    tensors = [piece.of(buffer) for piece in stored.pieces]
    if stored.packed is None or scheme is None:
        return Matrix.plain(tensors[0].view(rows, columns))
    codes, scales, minima = tensors
    return Matrix.groups(codes, scales, minima, scheme.bits, scheme.group_size, rows)


def _weight(
    linear: nn.Module, name: str, layout: BlockLayout, buffer: torch.Tensor, scheme: GroupQuantization | None
) -> Weight:
    stored = layout[f"{name}.weight" if name else "weight"]
    matrix = stored_matrix(stored, buffer, scheme)
    bias = None
    if linear.bias is not None:
        bias = layout[f"{name}.bias" if name else "bias"].plain.of(buffer)
    nbytes = sum(piece.nbytes for piece in stored.pieces) + (0 if bias is None else bias.nbytes)
    return Weight(matrix, bias, nbytes)


def _halves(weight: Weight) -> list[Weight]:
    """The first and the second half of the rows."""
    matrix, halves = weight.matrix, []
    rows = matrix.rows // 2
    for half in range(2):
        bias = None if weight.bias is None else weight.bias[half * rows : (half + 1) * rows]
        halves.append(Weight(matrix.part(half * rows, rows), bias, weight.nbytes // 2))
    return halves
