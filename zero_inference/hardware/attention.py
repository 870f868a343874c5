"""What the host's cores give where they attend over keys and values in host memory, beside a busy link and alone."""

from __future__ import annotations

import contextlib
import functools
import statistics
from dataclasses import dataclass

import torch

from zero_inference.cpu.attention import add_attention, run_attention
from zero_inference.cpu.pool import SPIN_US, CpuPool
from zero_inference.hardware.caches import block_bytes
from zero_inference.hardware.copies import Copies, random_bytes, rate_alone, rates_together

HEADS = (1, 4, 8)  # query heads that share a key head: other numbers lie between them
SEQUENCES, KEY_HEADS, BLOCKS, BLOCK_POSITIONS, HEAD_DIM = 8, 8, 8, 64, 128  # of a layer: 16 MiB of keys and values
ROUNDS, ALONE_S = 5, 0.1


@dataclass(frozen=True)
class Attended:
    """GB/s of 1e9 bytes of keys and values: while the link is busy, and while it rests."""

    beside_link_gb_per_s: float
    alone_gb_per_s: float


class Attention:
    """Attention of a token of each sequence over layers that the caches do not hold, as a cache in host memory stores them.

    Args:
        kept: uint8, where keys and values are to lie; None takes as much as the caches do not hold.
    """

    def __init__(self, cores: CpuPool, dtype: torch.dtype, heads: int, kept: torch.Tensor | None = None):
        self.pool = cores
        shape = BLOCKS, SEQUENCES, KEY_HEADS, BLOCK_POSITIONS, HEAD_DIM
        self.nbytes = layer_bytes(dtype)
        kept = (_keys_and_values(dtype) if kept is None else kept).view(dtype)
        random = torch.randn(min(kept.numel(), 1 << 20)).to(dtype)
        for part in kept.split(random.numel()):
            part.copy_(random[: part.numel()])
        layers = (layer.chunk(2) for layer in kept.split(self.nbytes // dtype.itemsize))
        scale = HEAD_DIM**-0.5
        self.numbers = [
            add_attention(self.pool, k.view(shape), v.view(shape), heads * KEY_HEADS, scale) for k, v in layers
        ]
        queries = SEQUENCES * heads * KEY_HEADS * HEAD_DIM
        self.packed = torch.randn(queries + 2 * SEQUENCES * KEY_HEADS * HEAD_DIM).to(dtype)  # with new keys and values
        self.out = torch.empty(queries, dtype=dtype)
        self.next = 0

    def one(self) -> int:
        """Attend in the next layer and return the bytes of its keys and values."""
        number = self.numbers[self.next]
        self.next = (self.next + 1) % len(self.numbers)
        run_attention(self.pool, number, self.packed, self.out, 1, BLOCKS * BLOCK_POSITIONS, 0)
        return self.nbytes


def layer_bytes(dtype: torch.dtype) -> int:
    """Of a layer's keys and values."""
    return 2 * BLOCKS * SEQUENCES * KEY_HEADS * BLOCK_POSITIONS * HEAD_DIM * dtype.itemsize


def _keys_and_values(dtype: torch.dtype) -> torch.Tensor:
    return random_bytes(max(2, -(-2 * block_bytes() // layer_bytes(dtype))) * layer_bytes(dtype))


class AttentionBench:
    """Threads on the CPUs `cpus` and the link of the CUDA device `device`: measures one kind of keys and values at a time.

    Args:
        dtype: as wide as those of the keys and values that will be measured.

    Raises:
        RunError, torch.OutOfMemoryError: no memory.
    """

    def __init__(self, device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
        self.device = device
        self.cores = CpuPool(cpus, SPIN_US)
        try:
            self.link, self.kept = Copies(device), _keys_and_values(dtype)
        except BaseException:
            self.close()
            raise

    def measured(self, dtype: torch.dtype, heads: int) -> Attended:
        """In a third of a second.

        Args:
            dtype: of keys and values.
            heads: query heads that share a key head.

        Raises:
            RunError: no host memory.
        """
        attention = Attention(self.cores, dtype, heads, self.kept)
        alone = rate_alone(attention, ALONE_S)
        beside = statistics.median(rates_together(attention, self.link)[1] for _ in range(ROUNDS))
        return Attended(min(alone, beside), alone)  # faster than alone is a host that others used meanwhile

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.cores.close()
        torch.cuda.empty_cache()  # the plan looks at the memory that is free


@functools.cache  # a plan is made for many options
def measure_attention(device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype, heads: int) -> Attended:
    """As `AttentionBench` measures, in about a second."""
    with contextlib.closing(AttentionBench(device, cpus, dtype)) as bench:
        return bench.measured(dtype, heads)
