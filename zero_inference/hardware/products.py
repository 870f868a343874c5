"""Products of weights in host memory by the host's cores: what is measured of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zero_inference.cpu.experts import Expert, ExpertActivation, add_experts
from zero_inference.cpu.pool import CpuPool, Routing, Stage, Task, Weight
from zero_inference.cpu.products import Matrix
from zero_inference.hardware.caches import block_bytes
from zero_inference.hardware.copies import RANDOM_BYTES, random_bytes
from zero_inference.kernels.groups import GroupQuantization

BLOCK_BYTES, WIDTH_STEP = 128 << 20, 256  # of a feed-forward; groups of any size divide its width
SHORT_BYTES = 16 << 20  # of one that shows what a call takes besides its bytes
# Of a task with experts so small that what each takes besides its bytes shows, and those that each row chooses.
EXPERTS, CHOSEN, EXPERT_WIDTH, EXPERT_COLUMNS = 16, 8, 256, 2048


class Products:
    """Gated feed-forwards that the caches do not hold, their weights in the form that a run stores them: what a run gives the cores first.

    Args:
        shared: weights in another form, in whose memory these lie, too: any bytes do, and only scales have to be of a usual size.

    Attributes:
        kept: uint8, the weights.
    """

    def __init__(
        self,
        cores: CpuPool,
        dtype: torch.dtype,
        scheme: GroupQuantization | None,
        columns: int,
        shared: Products | None = None,
    ):
        self.cores, self.dtype, self.scheme, self.columns = cores, dtype, scheme, columns
        self.of_row = self.stored_bytes_of(columns)
        if shared is None:
            long = 3 * self._width(BLOCK_BYTES) * self.of_row
            least = max(2 * block_bytes(), 3 * EXPERTS * EXPERT_WIDTH * self.stored_bytes_of(EXPERT_COLUMNS))
            self.kept = random_bytes(-(-least // long) * long)
            if scheme is None:
                _fill(self.kept.view(dtype))
        else:
            self.kept = shared.kept
        self.tasks = self._blocks(BLOCK_BYTES)
        self.short_tasks: list[Task] = []
        self.expert_tasks: list[Task] = []

    def calls(self, rows: int, short: bool = False) -> Calls:
        """Products with `rows` rows, of about `BLOCK_BYTES` or `SHORT_BYTES` each; of one of them at a time."""
        if short and not self.short_tasks:
            self.short_tasks = self._blocks(SHORT_BYTES)
        return Calls(self.cores, self.short_tasks if short else self.tasks, self.kept, self.dtype, rows)

    def expert_calls(self, rows: int) -> Calls:
        """The same with experts of a task, of which all rows choose `CHOSEN`."""
        if not self.expert_tasks:
            self.expert_tasks = self._experts()
        numbers = torch.arange(0, EXPERTS, EXPERTS // CHOSEN).repeat(rows, 1)
        choice = Routing(numbers, torch.full(numbers.shape, 1 / CHOSEN))
        nbytes = CHOSEN * 3 * EXPERT_WIDTH * self.stored_bytes_of(EXPERT_COLUMNS)
        return Calls(self.cores, self.expert_tasks, self.kept, self.dtype, rows, choice, nbytes)

    def stored_bytes_of(self, columns: int) -> int:
        """Of a row of so many columns."""
        return columns * self.dtype.itemsize if self.scheme is None else self.scheme.stored_bytes(columns, self.dtype)

    def _width(self, nbytes: int) -> int:
        """Of gate, up and down, in blocks of about so many bytes."""
        return max(WIDTH_STEP, nbytes // (3 * self.of_row) // WIDTH_STEP * WIDTH_STEP)

    def _blocks(self, nbytes: int) -> list[Task]:
        return [
            self.cores.add_block([Stage([gate, up], "gated", "silu"), Stage([down])], self.dtype)
            for gate, up, down in self._feed_forwards(self._width(nbytes), self.columns)
        ]

    def _experts(self) -> list[Task]:
        every = self._feed_forwards(EXPERT_WIDTH, EXPERT_COLUMNS)
        experts = [Expert(*(weight.matrix for weight in each)) for each in every]
        whole = range(0, len(experts) - EXPERTS + 1, EXPERTS)
        return [
            add_experts(self.cores, experts[first : first + EXPERTS], ExpertActivation("silu"), self.dtype)
            for first in whole
        ]

    def _feed_forwards(self, width: int, columns: int) -> Iterator[tuple[Weight, Weight, Weight]]:
        """Gate, up and down, one behind the other in `kept`."""
        matrix_bytes = width * self.stored_bytes_of(columns)
        for block in self.kept.split(3 * matrix_bytes):
            if block.numel() < 3 * matrix_bytes:
                return
            gate, up = (self._weight(part, width, columns) for part in block.split(matrix_bytes)[:2])
            yield gate, up, self._weight(block[2 * matrix_bytes :], columns, width)

    def _weight(self, buffer: torch.Tensor, rows: int, columns: int) -> Weight:
        """In random bytes; scales and minima are made numbers of the usual size."""
        scheme = self.scheme
        if scheme is None:
            return Weight(Matrix.plain(buffer.view(self.dtype).view(rows, columns)), None, buffer.numel())
        codes, rest = buffer[: scheme.packed_bytes(rows * columns)], buffer[scheme.packed_bytes(rows * columns) :]
        groups = rows * columns // scheme.group_size
        scales, minima = (
            rest.view(self.dtype)[:groups].fill_(0.01),
            rest.view(self.dtype)[groups : 2 * groups].fill_(-0.07),
        )
        matrix = Matrix.groups(codes, scales, minima, scheme.bits, scheme.group_size, rows)
        return Weight(matrix, None, buffer.numel())


class Calls:
    """The same number of rows multiplied with one task after the other.

    Args:
        kept: memory of the weights.
        choice: what the rows choose, of tasks with experts.
        nbytes: that a call reads, where tasks leave that to the choice.
    """

    def __init__(
        self,
        cores: CpuPool,
        tasks: list[Task],
        kept: object,
        dtype: torch.dtype,
        rows: int,
        choice: Routing | None = None,
        nbytes: int | None = None,
    ):
        self.cores, self.tasks, self.kept, self.choice, self.next = cores, tasks, kept, choice, 0
        self.nbytes = tasks[0].nbytes if nbytes is None else nbytes
        self.x = torch.randn(rows, tasks[0].columns).to(dtype)
        self.out = torch.empty(rows * tasks[0].widths[0], dtype=dtype)

    def one(self) -> int:
        """Multiply with the next task and return its bytes."""
        task = self.tasks[self.next]
        self.next = (self.next + 1) % len(self.tasks)
        self.cores.run(task, self.x, self.out, self.choice)
        return self.nbytes


def _fill(weights: torch.Tensor) -> None:
    """With numbers of the usual size."""
    random = torch.randn(min(weights.numel(), RANDOM_BYTES // 4)).to(weights.dtype)
    for part in weights.split(random.numel()):
        part.copy_(random[: part.numel()])
