"""Work for the CPU backend that is timed: products and attention over memory that the caches do not hold, as runs store it.

Each workload has `one()`: do the next piece and return the bytes that it read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from zero_inference.cpu.attention import add_attention, run_attention
from zero_inference.cpu.experts import Expert, ExpertActivation, add_experts
from zero_inference.cpu.pool import CpuPool, Routing, Stage, Task, Weight
from zero_inference.cpu.products import Matrix
from zero_inference.hardware.bench_copies import random_bytes, uncached_block_bytes
from zero_inference.hardware.rates import ATTENTION_HEAD_DIM, CPU_BLOCK_BYTES
from zero_inference.kernels.quantization import GroupQuantization

WIDTH_STEP = 256  # of a feed-forward; a multiple of any group size
SHORT_BYTES = 16 << 20  # of a call whose overhead beyond its bytes shows
# Experts so small that the overhead of each shows; every row chooses CHOSEN of them.
EXPERTS, CHOSEN, EXPERT_WIDTH, EXPERT_COLUMNS = 16, 8, 256, 2048
NARROW_WIDTH = 16  # of a feed-forward that costs little but its hand-off
SEQUENCES, KEY_HEADS, BLOCKS, BLOCK_POSITIONS = 8, 8, 8, 64  # a layer has 16 MiB of keys and values
RANDOM_NUMBERS = 1 << 20  # drawn once and copied


class CpuProducts:
    """Gated feed-forwards of random weights in one format, to time the CPU with.

    Args:
        columns: hidden size.
        shared: products in another format, whose memory is used here, too: codes may be any bytes, and scales are set.

    Attributes:
        memory: uint8, all weights.
    """

    def __init__(
        self,
        pool: CpuPool,
        dtype: torch.dtype,
        scheme: GroupQuantization | None,
        columns: int,
        shared: CpuProducts | None = None,
    ):
        self.pool, self.dtype, self.scheme, self.columns = pool, dtype, scheme, columns
        if shared is None:
            block_bytes = 3 * self._width(CPU_BLOCK_BYTES) * self._row_bytes(columns)
            min_bytes = max(2 * uncached_block_bytes(), 3 * EXPERTS * EXPERT_WIDTH * self._row_bytes(EXPERT_COLUMNS))
            self.memory = random_bytes(-(-min_bytes // block_bytes) * block_bytes)
            if scheme is None:
                _fill_normal(self.memory.view(dtype))
        else:
            self.memory = shared.memory
        self.tasks = self._feed_forward_tasks(CPU_BLOCK_BYTES)

    def calls(self, rows: int, short: bool = False) -> CpuCalls:
        """Return calls with `rows` rows of about `CPU_BLOCK_BYTES`, or of `SHORT_BYTES`."""
        return CpuCalls(self.pool, self._short_tasks if short else self.tasks, self.memory, self.dtype, rows)

    def expert_calls(self, rows: int) -> CpuCalls:
        """Return calls in which each of `rows` rows is routed to the same `CHOSEN` experts."""
        expert_ids = torch.arange(0, EXPERTS, EXPERTS // CHOSEN).repeat(rows, 1)  # [rows, CHOSEN]
        routing = Routing(expert_ids, torch.full(expert_ids.shape, 1 / CHOSEN))
        nbytes = CHOSEN * 3 * EXPERT_WIDTH * self._row_bytes(EXPERT_COLUMNS)
        return CpuCalls(self.pool, self._expert_tasks, self.memory, self.dtype, rows, routing, nbytes)

    def _row_bytes(self, columns: int) -> int:
        return columns * self.dtype.itemsize if self.scheme is None else self.scheme.stored_bytes(columns, self.dtype)

    def _width(self, nbytes: int) -> int:
        """Return the intermediate size of a feed-forward of about `nbytes`."""
        return max(WIDTH_STEP, nbytes // (3 * self._row_bytes(self.columns)) // WIDTH_STEP * WIDTH_STEP)

    def _feed_forward_tasks(self, nbytes: int) -> list[Task]:
        """Return a task for each feed-forward, if `memory` is divided into feed-forwards of about `nbytes`."""
        return [
            self.pool.add_block([Stage([gate, up], "gated", "silu"), Stage([down])], self.dtype)
            for gate, up, down in self._feed_forwards(self._width(nbytes), self.columns)
        ]

    @functools.cached_property
    def _short_tasks(self) -> list[Task]:
        return self._feed_forward_tasks(SHORT_BYTES)

    @functools.cached_property
    def _expert_tasks(self) -> list[Task]:
        weights = self._feed_forwards(EXPERT_WIDTH, EXPERT_COLUMNS)
        experts = [Expert(*(weight.matrix for weight in each)) for each in weights]
        return [
            add_experts(self.pool, experts[first : first + EXPERTS], ExpertActivation("silu"), self.dtype)
            for first in range(0, len(experts) - EXPERTS + 1, EXPERTS)
        ]

    def _feed_forwards(self, width: int, columns: int) -> Iterator[tuple[Weight, Weight, Weight]]:
        """Yield (gate, up, down) of consecutive feed-forwards in `memory`, as many as fit."""
        matrix_bytes = width * self._row_bytes(columns)
        for block in self.memory.split(3 * matrix_bytes):
            if block.numel() < 3 * matrix_bytes:
                return
            gate, up = (self._weight(part, width, columns) for part in block.split(matrix_bytes)[:2])
            yield gate, up, self._weight(block[2 * matrix_bytes :], columns, width)

    def _weight(self, buffer: torch.Tensor, rows: int, columns: int) -> Weight:
        scheme = self.scheme
        if scheme is None:
            return Weight(Matrix.plain(buffer.view(self.dtype).view(rows, columns)), None, buffer.numel())
        packed_bytes = scheme.packed_bytes(rows * columns)
        groups = rows * columns // scheme.group_size
        codes, rest = buffer[:packed_bytes], buffer[packed_bytes:].view(self.dtype)
        scales, minima = rest[:groups].fill_(0.01), rest[groups : 2 * groups].fill_(-0.07)
        matrix = Matrix.groups(codes, scales, minima, scheme.bits, scheme.group_size, rows)
        return Weight(matrix, None, buffer.numel())


class CpuCalls:
    """The same rows multiplied with one task after the other.

    Args:
        memory: owner of the weights' memory, to be kept alive.
        routing: routing of the rows, for tasks with experts.
        nbytes: bytes that a call reads; None for all of a task.
    """

    def __init__(
        self,
        pool: CpuPool,
        tasks: list[Task],
        memory: object,
        dtype: torch.dtype,
        rows: int,
        routing: Routing | None = None,
        nbytes: int | None = None,
    ):
        self.pool, self.tasks, self.memory, self.routing, self.next = pool, tasks, memory, routing, 0
        self.nbytes = tasks[0].nbytes if nbytes is None else nbytes
        self.x = torch.randn(rows, tasks[0].columns).to(dtype)
        self.out = torch.empty(rows * tasks[0].widths[0], dtype=dtype)

    def one(self) -> int:
        task = self.tasks[self.next]
        self.next = (self.next + 1) % len(self.tasks)
        self.pool.run(task, self.x, self.out, self.routing)
        return self.nbytes


def narrow_feed_forward(pool: CpuPool, dtype: torch.dtype, columns: int) -> tuple[Task, tuple[torch.Tensor, ...]]:
    """Return a feed-forward of hardly any width from `columns` to `columns`, and its weights, which have to live as long as the task."""
    weights = torch.randn(NARROW_WIDTH, columns).to(dtype), torch.randn(columns, NARROW_WIDTH).to(dtype)
    first, last = (Weight(Matrix.plain(weight), None, 0) for weight in weights)
    return pool.add_block([Stage([first], "activation", "relu"), Stage([last])], dtype), weights


class CpuAttention:
    """Decode attention of `SEQUENCES` sequences, over one layer after the other.

    Args:
        heads: query heads per key head.
        memory: uint8, for the keys and values; None allocates `key_value_memory`.
    """

    def __init__(self, pool: CpuPool, dtype: torch.dtype, heads: int, memory: torch.Tensor | None = None):
        self.pool, self.next = pool, 0
        self.nbytes = layer_bytes(dtype)
        shape = BLOCKS, SEQUENCES, KEY_HEADS, BLOCK_POSITIONS, ATTENTION_HEAD_DIM
        memory = (key_value_memory(dtype) if memory is None else memory).view(dtype)
        _fill_normal(memory)
        layers = (layer.chunk(2) for layer in memory.split(self.nbytes // dtype.itemsize))
        scale = ATTENTION_HEAD_DIM**-0.5
        self.numbers = [add_attention(pool, k.view(shape), v.view(shape), heads * KEY_HEADS, scale) for k, v in layers]
        queries = SEQUENCES * heads * KEY_HEADS * ATTENTION_HEAD_DIM
        new_keys_and_values = 2 * SEQUENCES * KEY_HEADS * ATTENTION_HEAD_DIM
        self.packed = torch.randn(queries + new_keys_and_values).to(dtype)
        self.out = torch.empty(queries, dtype=dtype)

    def one(self) -> int:
        number = self.numbers[self.next]
        self.next = (self.next + 1) % len(self.numbers)
        run_attention(self.pool, number, self.packed, self.out, 1, BLOCKS * BLOCK_POSITIONS, 0)
        return self.nbytes


def layer_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a layer's keys and values."""
    return 2 * BLOCKS * SEQUENCES * KEY_HEADS * BLOCK_POSITIONS * ATTENTION_HEAD_DIM * dtype.itemsize


def key_value_memory(dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 memory for as many layers as the caches do not hold."""
    return random_bytes(max(2, -(-2 * uncached_block_bytes() // layer_bytes(dtype))) * layer_bytes(dtype))


def _fill_normal(memory: torch.Tensor) -> None:
    random = torch.randn(min(memory.numel(), RANDOM_NUMBERS)).to(memory.dtype)
    for part in memory.split(random.numel()):
        part.copy_(random[: part.numel()])
