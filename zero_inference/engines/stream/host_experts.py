"""Experts of blocks on disk, cached in host memory for decode passes, in which the CPU multiplies them.

All such blocks share the slots of one buffer, which is laid out like a block of as many experts. So a slot is an expert to the CPU backend,
and the ids of chosen experts become those of slots. In a pass the host waits for the ids, reads the experts that are missing, and evicts
those that were used least, by counts that halve every `HALF_LIFE_PASSES` as those of the device's cache do.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import replace

import numpy as np
import torch

from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.disk import DiskBlocks
from zero_inference.engines.stream.expert_cache import USE_DECAY
from zero_inference.engines.stream.layout import lay_out_experts
from zero_inference.engines.stream.placement import Placement
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import ExpertCounts, Transfers


class HostExperts:
    """Reads experts into slots, and counts their use.

    Attributes:
        block: of as many experts as there are slots; `buffer`: its bytes.
    """

    def __init__(self, placement: Placement, disk: DiskBlocks, pinned: bool, transfers: Transfers):
        self.disk, self.transfers = disk, transfers
        self.blocks = sorted(placement.cached_on_host)
        first, slots = placement.blocks[self.blocks[0]], placement.host_expert_slots
        self.experts = first.experts.num_experts
        layout = lay_out_experts(first.layout, slots)
        self.block: Block = replace(first, experts=replace(first.experts, num_experts=slots), layout=layout)
        self.buffer = host_empty((layout.nbytes,), torch.uint8, pinned)
        # (offset in a block, offset in the buffer, bytes of one expert) of each tensor of experts
        pieces = zip(
            (piece for stored in first.layout.parameters for piece in stored.pieces),
            (piece for stored in layout.parameters for piece in stored.pieces),
        )
        self.pieces = [(of_block.offset, own.offset, own.nbytes // slots) for of_block, own in pieces]
        rows = len(self.blocks)
        self.row_of = {block: row for row, block in enumerate(self.blocks)}
        self.uses = np.zeros((rows, self.experts))
        self.slot_of = np.full((rows, self.experts), -1)
        self.owner = np.full((slots, 2), -1)  # row and expert in each slot
        self.choices = self.hits = 0  # (token, expert) pairs, and those whose expert was in host memory
        self.counts_of_device = transfers.expert_counts or ExpertCounts
        transfers.expert_counts = self.counts

    def counts(self) -> ExpertCounts:
        counts = self.counts_of_device()
        choices = counts.choices or self.choices  # no device cache counts them
        return counts._replace(choices=choices, host_choices=self.choices, host_hits=self.hits)

    def slots_for(self, block: int, chosen: list[int]) -> dict[int, int]:
        """Return the slots of experts that the tokens of a pass have chosen, once those that were missing are read.

        Args:
            chosen: one for each token and expert.

        Raises:
            RunError: the disk cannot be read.
        """
        row, needed = self.row_of[block], sorted(set(chosen))
        assert len(needed) <= len(self.owner), "the plan has slots for the experts of a decode pass"
        self.choices += len(chosen)
        self.hits += sum(self.slot_of[row, expert] >= 0 for expert in chosen)
        self.uses[row] *= USE_DECAY
        self.uses[row, needed] += 1
        missing = [expert for expert in needed if self.slot_of[row, expert] < 0]
        slots = self._evict(row, needed, len(missing))
        parts: list[Future[int]] = []
        try:
            for expert, slot in zip(missing, slots):
                parts += self._read(block, expert, slot)
            self.transfers.disk_read_bytes += self.disk.finish_read(block, parts)
        except BaseException:
            wait(parts)
            raise
        self.owner[slots] = [(row, expert) for expert in missing] or np.empty((0, 2), int)
        self.slot_of[row, missing] = slots
        return {expert: int(self.slot_of[row, expert]) for expert in needed}

    def close(self) -> None:
        self.transfers.expert_counts = None if self.counts_of_device is ExpertCounts else self.counts_of_device

    def _evict(self, row: int, needed: list[int], count: int) -> list[int]:
        """Return `count` slots to fill: empty ones first, then those of the least used experts that this pass does not need."""
        if not count:
            return []
        rows, experts = self.owner.T
        use = np.where(rows >= 0, self.uses[rows, experts], -1.0)
        use[self.slot_of[row, needed][self.slot_of[row, needed] >= 0]] = np.inf
        slots = np.argsort(use, kind="stable")[:count]
        for slot in slots[rows[slots] >= 0]:
            self.slot_of[tuple(self.owner[slot])] = -1
        self.owner[slots] = -1
        return slots.tolist()

    def _read(self, block: int, expert: int, slot: int) -> list[Future[int]]:
        parts: list[Future[int]] = []
        for in_block, own, nbytes in self.pieces:
            memory = self.buffer[own + slot * nbytes : own + (slot + 1) * nbytes]
            parts += self.disk.read(block, memory, in_block + expert * nbytes)
        return parts
