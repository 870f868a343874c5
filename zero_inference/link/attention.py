"""What the host's cores give where they attend over keys and values in host memory, beside a busy link and alone."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import torch

from zero_inference.cores.attention_tasks import AttentionTasks
from zero_inference.cores.cores import SPIN_US, Cores
from zero_inference.link.caches import block_bytes
from zero_inference.link.copies import Copies, random_bytes, rate_alone, rates_together

HEADS = (1, 4, 8)  # query heads that share a key head: other numbers lie between them
SEQUENCES, KEY_HEADS, BLOCKS, BLOCK_POSITIONS, HEAD_DIM = 8, 8, 8, 64, 128  # of a layer: 16 MiB of keys and values
ROUNDS, ALONE_S = 5, 0.1


@dataclass(frozen=True)
class Attended:
    """GB/s of 1e9 bytes of keys and values: while the link is busy, and while it rests."""

    beside_link_gb_per_s: float
    alone_gb_per_s: float


class Attention:
    """Attention of a token of each sequence over layers that the caches do not hold, as a cache in host memory stores them."""

    def __init__(self, cores: Cores, dtype: torch.dtype, heads: int):
        self.tasks = AttentionTasks(cores)
        shape = BLOCKS, SEQUENCES, KEY_HEADS, BLOCK_POSITIONS, HEAD_DIM
        self.nbytes = 2 * torch.Size(shape).numel() * dtype.itemsize
        kept = random_bytes(max(2, -(-2 * block_bytes() // self.nbytes)) * self.nbytes).view(dtype)
        random = torch.randn(min(kept.numel(), 1 << 20)).to(dtype)
        for part in kept.split(random.numel()):
            part.copy_(random[: part.numel()])
        layers = (layer.chunk(2) for layer in kept.split(self.nbytes // dtype.itemsize))
        scale = HEAD_DIM**-0.5
        self.numbers = [self.tasks.add(k.view(shape), v.view(shape), heads * KEY_HEADS, scale) for k, v in layers]
        queries = SEQUENCES * heads * KEY_HEADS * HEAD_DIM
        self.packed = torch.randn(queries + 2 * SEQUENCES * KEY_HEADS * HEAD_DIM).to(dtype)  # with new keys and values
        self.out = torch.empty(queries, dtype=dtype)
        self.next = 0

    def one(self) -> int:
        """Attend in the next layer and return the bytes of its keys and values."""
        number = self.numbers[self.next]
        self.next = (self.next + 1) % len(self.numbers)
        self.tasks.run(number, self.packed, self.out, 1, BLOCKS * BLOCK_POSITIONS, 0)
        return self.nbytes


@functools.cache  # a plan is made for many options
def measure_attention(device: torch.device, cpus: tuple[int, ...], dtype: torch.dtype, heads: int) -> Attended:
    """Measure on the CUDA device `device` and the CPUs `cpus`, in about half a second.

    Args:
        dtype: of keys and values.
        heads: query heads that share a key head.

    Raises:
        RunError: no host memory.
    """
    cores = Cores(cpus, SPIN_US)
    try:
        attention, link = Attention(cores, dtype, heads), Copies(device)
        alone = rate_alone(attention, ALONE_S)
        beside = statistics.median(rates_together(attention, link)[1] for _ in range(ROUNDS))
        return Attended(min(alone, beside), alone)  # faster than alone is a host that others used meanwhile
    finally:
        torch.cuda.synchronize(device)
        cores.close()
        torch.cuda.empty_cache()  # the plan looks at the memory that is free
