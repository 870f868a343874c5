"""The tensors of a block wherever it lies: in its own buffer on the device, or in a slot of the ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.ring import BlockRing
from zero_inference.engines.stream.store import BlockStore
from zero_inference.quantization.products import ALIGNMENT

Packed = tuple[
    torch.Tensor, ...
]  # codes, scales and minima of a weight, and its place in the workspace, as they are stored


class BlockViews:
    """Views, which are found when a block first lies at a place, and are kept. Blocks of one layout share those in a slot: blocks times
    slots are thousands, and a slot's views are the same memory whichever block is in it.

    A place is a slot of the ring, or None: the block's own buffer.

    Args:
        ring: None where all blocks are on the device.
        workspace: uint8, into which quantized blocks are dequantized.
    """

    def __init__(
        self, layouts: Sequence[BlockLayout], store: BlockStore, ring: BlockRing | None, workspace: torch.Tensor
    ):
        self.layouts, self.store, self.ring, self.workspace = layouts, store, ring, workspace
        first: dict[int, int] = {}
        self.first = [first.setdefault(id(layout), index) for index, layout in enumerate(layouts)]  # of its layout
        self.found_plain: dict[tuple[int, int | None], list[torch.Tensor]] = {}  # by block and place, as `_key` says
        self.found_packed: dict[tuple[int, int | None], dict[str, Packed]] = {}
        unlike: dict[
            int, int
        ] = {}  # by what `can_fuse` asks of an address: torch aligns memory by more, so one is found
        for slot, memory in enumerate(() if ring is None else ring.slots):
            unlike.setdefault(memory.data_ptr() % ALIGNMENT, slot)
        self.unlike_slots = list(unlike.values())

    def buffer(self, block: int, slot: int | None) -> torch.Tensor:
        """Of `block`, uint8 [nbytes]."""
        return self.store.buffers[block] if slot is None else self.ring.buffer_in(block, slot)

    def places(self, block: int) -> Sequence[int | None]:
        """Some of those where `block` can lie: kernels that take its codes there take them at all places."""
        return (None,) if block in self.store.resident else self.unlike_slots

    def plain(self, block: int, slot: int | None) -> list[torch.Tensor]:
        """Its parameters as the model reads them, in the order of its layout: in the workspace if the block is quantized."""
        layout = self.layouts[block]
        key = (self.first[block], None) if layout.workspace_bytes else self._key(block, slot)
        if key not in self.found_plain:
            with torch.inference_mode(False):  # a view of inference mode could not be used outside it
                memory = self.workspace if layout.workspace_bytes else self.buffer(block, slot)
                self.found_plain[key] = [stored.values(memory) for stored in layout.parameters]
        return self.found_plain[key]

    def packed(self, block: int, slot: int | None) -> dict[str, Packed]:
        """By name those parameters of it that are quantized."""
        key = self._key(block, slot)
        if key not in self.found_packed:
            with torch.inference_mode(False):
                buffer = self.buffer(block, slot)
                self.found_packed[key] = {
                    stored.name: (
                        *(piece.of(buffer) for piece in stored.packed),
                        values.mT if stored.transposed else values,
                    )
                    for stored, values in zip(self.layouts[block].parameters, self.plain(block, slot))
                    if stored.packed is not None
                }
        return self.found_packed[key]

    def close(self) -> None:
        """Let go of the memory."""
        self.found_plain.clear()
        self.found_packed.clear()

    def _key(self, block: int, slot: int | None) -> tuple[int, int | None]:
        return (block, None) if slot is None else (self.first[block], slot)
