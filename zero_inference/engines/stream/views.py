"""The tensors of a block wherever it lies: in its own buffer on the device, or in a slot of the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zero_inference.engines.stream.layout import BlockLayout, StoredParameter
from zero_inference.engines.stream.ring import BlockRing
from zero_inference.engines.stream.store import BlockStore
from zero_inference.kernels.products import ALIGNMENT


class Packed(NamedTuple):
    """A quantized weight as it is stored.

    Attributes:
        parts: what is dequantized at a time, a group of experts or the whole weight: codes, scales, minima, and the place in the workspace.
        plain: that place as the model reads the weight; of the first group if there are several.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    parts: tuple[tuple[torch.Tensor, ...], ...]
    plain: torch.Tensor


class BlockViews:
    """Views, which are found when a block first lies at a place, and are kept. Blocks of one layout share those in a slot: blocks times
    slots are thousands, and a slot's views are the same memory whichever block is in it.

    A place is a slot of the ring, or None: the block's own buffer.

    Args:
        ring: None where all blocks are on the device.
        workspace: uint8, into which weights are dequantized.
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
        """Its parameters as the model reads them, in the order of its layout: in the workspace if they are quantized. Without those that
        are dequantized for each call of their module."""
        key = self._key(block, slot)
        if key not in self.found_plain:
            packed = self.packed(block, slot)
            with torch.inference_mode(False):  # a view of inference mode could not be used outside it
                buffer = self.buffer(block, slot)
                self.found_plain[key] = [
                    stored.values(buffer) if stored.packed is None else packed[stored.name].plain
                    for stored in self.layouts[block].parameters
                    if not stored.module_only
                ]
        return self.found_plain[key]

    def packed(self, block: int, slot: int | None) -> dict[str, Packed]:
        """By name those parameters of it that are quantized."""
        key = self._key(block, slot)
        if key not in self.found_packed:
            with torch.inference_mode(False):
                buffer = self.buffer(block, slot)
                self.found_packed[key] = {
                    stored.name: self._packed(stored, buffer)
                    for stored in self.layouts[block].parameters
                    if stored.packed is not None
                }
        return self.found_packed[key]

    def _packed(self, stored: StoredParameter, buffer: torch.Tensor) -> Packed:
        codes, scales, minima = (piece.of(buffer) for piece in stored.packed)
        plain, parts = stored.plain, []
        number, group = (plain.shape[0], stored.group) if stored.group else (1, 1)
        for first in range(0, number, group):
            count = min(group, number - first)
            some = (each.view(number, -1)[first : first + count].view(-1) for each in (codes, scales, minima))
            shape = (count, *plain.shape[1:]) if stored.group else plain.shape
            parts.append((*some, replace(plain, shape=shape).of(self.workspace)))
        values = parts[0][-1]
        return Packed(codes, scales, minima, tuple(parts), values.mT if stored.transposed else values)

    def close(self) -> None:
        """Let go of the memory."""
        self.found_plain.clear()
        self.found_packed.clear()

    def _key(self, block: int, slot: int | None) -> tuple[int, int | None]:
        return (block, None) if slot is None else (self.first[block], slot)
