"""Where blocks of decoder layers wait: each in one buffer, page-locked in host memory or, if resident, on the device.

Over several ranks each keeps its own share of every buffer that waits in host memory; a resident one is whole on each. What the host's
cores multiply is in memory that the ranks share: each fills and copies its own share there, and the cores read the whole.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from zero_inference.cpu.products import quantize
from zero_inference.engines.stream.layout import BlockLayout, Piece
from zero_inference.errors import RunError
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.shared_memory import SharedMemory

PAGE = 4096


class BlockStore:
    """Filled parameter by parameter while a checkpoint is read. Host memory is taken when a block's first one comes, or at once if it is
    shared; that of blocks on the device at once, so that it does not lie between what loading takes for a while, and which could not be
    given back then.

    Args:
        read_whole: blocks in host memory of which more than this rank's share is read here.

    Attributes:
        buffers: block -> uint8 [nbytes / ranks] in host memory, or [nbytes] on the device.

    Raises:
        RunError: no memory that ranks could share.
    """

    def __init__(
        self,
        layouts: list[BlockLayout],
        resident: set[int],
        ranks: Ranks,
        pinned: bool,
        read_whole: Collection[int] = (),
    ):
        self.layouts, self.resident, self.ranks, self.pinned = layouts, resident, ranks, pinned
        self.buffers = {
            block: torch.empty(layouts[block].nbytes, dtype=torch.uint8, device=ranks.device) for block in resident
        }
        self.shared: dict[int, torch.Tensor] = {}  # block -> uint8 [nbytes], the same memory in all ranks
        self.memory: SharedMemory | None = None
        if read_whole and ranks.world_size > 1:
            self._share(sorted(read_whole))

    def put(self, block: int, name: str, values: torch.Tensor, scheme: GroupQuantization | None) -> None:
        """Store parameter `name` of `block`, quantized on the device if its layout says so.

        Raises:
            RunError: host memory is exhausted or may not be page-locked, or `values` do not fill the place laid out for them.
        """
        stored = self.layouts[block][name]
        if stored.transposed:
            values = values.mT
        found, expected = (tuple(values.shape), values.dtype), (stored.plain.shape, stored.plain.dtype)
        if found != expected:
            raise RunError(
                f"block {block}: {name} is {found[1]} {list(found[0])}, expected is {expected[1]} "
                f"{list(expected[0])}; use weights that match the model's config.json."
            )
        tensors = (values,) if stored.packed is None else quantize(values.to(self.ranks.device), scheme)
        buffer = self._buffer(block)
        for piece, tensor in zip(stored.pieces, tensors):
            self._write(buffer, piece, tensor, whole=block in self.resident)

    def complete(self) -> None:
        """All ranks have put everything. Raises RunError where shared memory may not be page-locked."""
        if self.memory is not None:
            self.memory.settle(self.pinned)

    def whole(self, block: int) -> torch.Tensor:
        """A block that is `read_whole`, uint8 [nbytes]."""
        return self.buffers[block] if self.ranks.world_size == 1 else self.shared[block]

    def close(self) -> None:
        """Let go of the memory."""
        self.buffers.clear()
        self.shared.clear()
        self.memory = None

    def share_bytes(self, block: int) -> int:
        """Bytes of `block` that this rank keeps in host memory."""
        return 0 if block in self.resident else self.layouts[block].nbytes // self.ranks.world_size

    def _share(self, blocks: list[int]) -> None:
        starts = [0]
        for block in blocks:
            starts.append(starts[-1] + -(-self.layouts[block].nbytes // PAGE) * PAGE)
        self.memory = SharedMemory(starts[-1], self.ranks)
        for block, start in zip(blocks, starts):
            self.shared[block] = self.memory.bytes[start : start + self.layouts[block].nbytes]

    def _buffer(self, block: int) -> torch.Tensor:
        if block not in self.buffers:
            if block in self.shared:
                self.buffers[block] = self.shared[block][self.ranks.rank * self.share_bytes(block) :][
                    : self.share_bytes(block)
                ]
            else:
                self.buffers[block] = host_empty((self.share_bytes(block),), torch.uint8, self.pinned)
        return self.buffers[block]

    def _write(self, buffer: torch.Tensor, piece: Piece, tensor: torch.Tensor, whole: bool) -> None:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        first = 0 if whole else self.ranks.rank * buffer.numel()
        start, end = max(piece.offset, first), min(piece.offset + piece.nbytes, first + buffer.numel())
        if start < end:
            buffer[start - first : end - first].copy_(raw[start - piece.offset : end - piece.offset])
