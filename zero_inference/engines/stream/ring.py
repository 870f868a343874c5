"""A ring buffer of device slots, into which the blocks of decoder layers are prefetched. Each device has one, for its own layers and link.

The order is circular: the first blocks of the next pass follow the last ones of this pass, so the link does not wait for a token to end.
A copy into a slot is queued after the event of the slot's last use, the computation after that of the copy; the host waits for neither. It
waits only for a block that is computed next and is not read from disk yet (disk.py).

`simulate_passes` predicts the time of this schedule: a large block can only be prefetched when a slot is free, which is as many blocks
earlier as there are slots, so link and device may both have time for all that they do and still wait for each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch

from zero_inference.engines.stream.disk import DiskReader
from zero_inference.engines.stream.layout import BlockStore
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.streams import Copy, DeviceTimeline
from zero_inference.utils.timing import Transfers

SIMULATED_PASSES = 4  # in a row, of which the last counts: the first ones begin with an empty ring


@dataclass
class _Fetch:
    block: int
    slot: int
    arrived: Any = None  # event after the copy; None while a block on disk is not read yet
    copied: int = 0  # bytes of a block on disk whose copies are queued
    copies: int = 0  # that are queued


class RingBuffer:
    """Copies blocks into `depth` slots, in the order of the passes.

    Args:
        blocks: indices of all blocks that may be streamed; a slot is as large as the largest of them.
        refills_after_layers: released slots are filled when `refill` is called, at the end of a layer; else at once.
        gathered: by block, for blocks with an expert cache: a function (buffer on the device) -> bytes that crossed the link, which
            assembles the block on the current stream from cached experts and host memory.
    """

    def __init__(
        self,
        store: BlockStore,
        blocks: Sequence[int],
        depth: int,
        timeline: DeviceTimeline,
        transfers: Transfers,
        refills_after_layers: bool = False,
        gathered: Mapping[int, Callable[[torch.Tensor], int]] | None = None,
    ):
        self.store, self.timeline, self.transfers = store, timeline, transfers
        self.on_disk = frozenset(blocks) & (store.disk.extents.keys() if store.disk is not None else set())
        self.disk: DiskReader | None = None
        if store.disk is not None and self.on_disk:
            self.disk = DiskReader(self.on_disk, store.disk, store.pinned, transfers)
        self.refills_after_layers = refills_after_layers
        self.streams, self.gathered = timeline.streams, dict(gathered or {})
        slot_bytes = max(store.layouts[block].nbytes for block in blocks)
        device = self.streams.device
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(depth)]
        self.last_use: list[Any] = [None] * depth  # by slot: the event after it
        self.last_span: list[Any] = [None] * depth  # by slot: the computation that used it, for the timeline
        self.empty: deque[int] = deque(range(depth))  # slots for which nothing was requested
        self.copy_stream = self.streams.stream()
        self.released: list[int] = []  # slots that wait for `refill`
        self.pending: deque[_Fetch] = deque()  # requested, not acquired yet
        self.held: dict[int, _Fetch] = {}  # by block: acquired, not released yet
        # the copies run ahead of the computation, so they may already be in the next pass
        self.pass_order = tuple(blocks)  # blocks of the pass that computes
        self.copy_order = self.next_copy_order = self.pass_order  # of the pass that is copied, and of those after it
        self.position = 0  # in `copy_order`, of the next block to request
        self.requested_early: set[int] = set()  # blocks of `copy_order` after `position` that are pending already
        # blocks of a captured pass -> block -> its slot: a graph reads fixed addresses
        self.fixed_slots: dict[tuple[int, ...], dict[int, int]] = {}
        self.captures: Counter[tuple[int, ...]] = Counter()  # by order: captured graphs that use these slots

    def prime(self) -> None:
        """Start to fill the slots; the store has to be complete."""
        self.streams.synchronize()
        self._read_ahead()
        self._request_all()

    def fix_slots(self) -> Callable[[], None]:
        """Assign a slot to each block of the pass that has begun, for it and all later passes with the same blocks. Return a function that
        ends this."""
        order = self.pass_order
        slots = slots_in_use(len(order), len(self.slots))
        self.fixed_slots[order] = {block: index % slots for index, block in enumerate(order)}
        self.captures[order] += 1
        self.begin_pass(order, self.next_copy_order)  # drops copies into other slots

        def free() -> None:
            self.captures[order] -= 1
            if not self.captures[order]:
                del self.fixed_slots[order], self.captures[order]

        return free

    def begin_pass(self, order: Sequence[int], next_order: Sequence[int]) -> None:
        """Begin a pass that calls the blocks `order`, followed by passes that call `next_order`.

        Pending copies are used where these passes need the same blocks, and dropped otherwise.
        """
        self.refill()  # after a pass that failed
        order, next_order = tuple(order or next_order), tuple(next_order)
        pending = [fetch.block for fetch in self.pending]
        in_their_slots = all(
            self._is_in_its_slot(fetch, order if index < len(order) else next_order)
            for index, fetch in enumerate(self.pending)
        )
        expected = list(islice(chain(order, cycle(next_order)), len(pending)))
        self.pass_order, self.copy_order, self.next_copy_order = order, order, next_order
        if not self.held and in_their_slots and pending == expected:
            self.position = len(pending)
            while self.copy_order and self.position >= len(self.copy_order):
                self.position -= len(self.copy_order)
                self.copy_order = next_order
            self.requested_early.clear()
        else:
            fixed = self.fixed_slots.get(order)
            depth = len(self.slots) if fixed is None else len(set(fixed.values()))
            self._drop(all_but=set(order[:depth]))
            self.position = 0
            self.requested_early = {fetch.block for fetch in self.pending}
        self._read_ahead()
        self._request_all()

    @property
    def pending_copies(self) -> int:
        return sum(fetch.copies for fetch in self.pending)

    def buffer_in(self, block: int, slot: int) -> torch.Tensor:
        return self.slots[slot][: self.store.layouts[block].nbytes]

    def acquire(self, block: int) -> int:
        """Make the current stream wait for the copy of `block`, and return its slot, which is not overwritten until `release`."""
        if block in self.held:
            self._drop()
        fetches = (fetch for fetch in self.pending if fetch.block == block)
        fetch = next((fetch for fetch in fetches if self._is_in_its_slot(fetch, self.pass_order)), None)
        if fetch is None:
            fetch = self._jump_to(block)
        else:
            if fetch.arrived is None:
                self._copy_from_disk(until=fetch)
            self.pending.remove(fetch)
        self.held[block] = fetch
        self.streams.current().wait_event(fetch.arrived)
        return fetch.slot

    def release(self, block: int) -> None:
        """Free the slot of an acquired block once the work queued so far is done, or that up to `refill`."""
        slot = self.held.pop(block).slot
        self.last_span[slot] = self.timeline.spans[-1] if self.timeline.spans else None
        self.released.append(slot)
        if not self.refills_after_layers:
            self.refill()

    def refill(self) -> None:
        """Request blocks for the released slots, to be copied when the work queued so far is done."""
        if self.released:
            event = self.streams.record_event(self.streams.current())
            for slot in self.released:
                self.last_use[slot] = event
            self.empty += self.released
            self.released.clear()
            self._request_all()

    def close(self) -> None:
        self.streams.synchronize()
        if self.disk is not None:
            self.disk.close()
        self.pending.clear()
        self.slots.clear()
        self.gathered.clear()

    def _jump_to(self, block: int) -> _Fetch:
        """Request `block`, which was not expected, and those after it: the model was called again after a call that failed midway."""
        self._drop()
        self.requested_early.clear()
        if block in self.pass_order:
            self.copy_order = self.pass_order
        if block not in self.copy_order:
            self.copy_order = self.next_copy_order = tuple(sorted({*self.copy_order, *self.next_copy_order, block}))
        self.position = self.copy_order.index(block)
        self._read_ahead()
        self._request_all()
        fetch = self.pending[0]
        if fetch.arrived is None:
            self._copy_from_disk(until=fetch)
        return self.pending.popleft()

    def _drop(self, all_but: Collection[int] = ()) -> None:
        """Free held and released slots and those of pending copies, except the first pending copy of each block in `all_but`."""
        remaining: deque[_Fetch] = deque()
        for fetch in self.pending:
            wanted = fetch.block in all_but and self._is_in_its_slot(fetch, self.pass_order)
            if wanted and all(fetch.block != other.block for other in remaining):
                remaining.append(fetch)
            else:
                self.last_use[fetch.slot] = fetch.arrived or self.last_use[fetch.slot]
                self.empty.append(fetch.slot)
        self.pending = remaining
        for slot in (*self.released, *(fetch.slot for fetch in self.held.values())):
            self.last_use[slot] = self.streams.record_event(self.streams.current())
            self.empty.append(slot)
        self.released.clear()
        self.held.clear()

    def _request_all(self) -> None:
        while self.empty and self._request_next():
            pass
        if self.disk is not None:
            self._copy_from_disk()

    def _read_ahead(self) -> None:
        """Let the disk be read in the order of pending and later copies."""
        if self.disk is None:
            return
        pending = [fetch for fetch in self.pending if fetch.arrived is None]
        later = [block for block in self.copy_order[self.position :] if block not in self.requested_early]
        blocks = [*(fetch.block for fetch in pending), *(block for block in later if block in self.on_disk)]
        next_pass = [block for block in self.next_copy_order if block in self.on_disk]
        self.disk.follow(chain(blocks, cycle(next_pass)), pending[0].copied if pending else 0)

    def _copy_from_disk(self, until: _Fetch | None = None) -> None:
        """Queue the copies of blocks that have been read from disk, in order, and wait for the reads up to that of `until`."""
        for fetch in self.pending:
            while fetch.arrived is None:
                if until is None and not self.disk.is_read():
                    return
                slot, memory, piece = self.disk.take(fetch.block)
                event = self._queue_copy(fetch, [(memory, piece.begin)])
                copied = self.streams.blocking_event()
                copied.record(self.copy_stream)
                self.disk.release(slot, copied.synchronize)
                fetch.copied = piece.end
                if piece.end == self.store.disk.block_bytes(fetch.block):
                    fetch.arrived = event
            if fetch is until:
                until = None

    def _next_block(self) -> int | None:
        """Return the next block to request and advance `position`; None if this pass and the next ones stream nothing."""
        while self.copy_order or self.next_copy_order:
            if self.position >= len(self.copy_order):
                self.copy_order, self.position = self.next_copy_order, 0
                continue
            block = self.copy_order[self.position]
            self.position += 1
            if block not in self.requested_early:
                return block
            self.requested_early.remove(block)
        return None

    def _is_in_its_slot(self, fetch: _Fetch, order: tuple[int, ...]) -> bool:
        """Return whether a pass with the blocks `order` can use `fetch`: in a captured pass each block has a fixed slot."""
        return self.fixed_slots.get(order, {}).get(fetch.block, fetch.slot) == fetch.slot

    def _request_next(self) -> bool:
        """Queue the copy of the next block; return False if there is none, or no slot for it."""
        block = self._next_block()
        if block is None:
            return False
        fixed = self.fixed_slots.get(self.copy_order)
        slot = self.empty[0] if fixed is None else fixed[block]
        if slot not in self.empty:  # its fixed slot is in use
            self.position -= 1
            return False
        self.empty.remove(slot)
        fetch = _Fetch(block, slot)
        if block not in self.on_disk:
            fetch.arrived = self._queue_copy(fetch, [(self.store.buffers[block], 0)])
        self.pending.append(fetch)
        return True

    def _queue_copy(self, fetch: _Fetch, sources: Sequence[tuple[torch.Tensor, int]]) -> Any:
        """Queue the copy of `sources`, (uint8 in host memory, offset in the block), into the slot; return the event after it."""
        slot = fetch.slot
        buffer, assemble = self.buffer_in(fetch.block, slot), self.gathered.get(fetch.block)
        if self.last_use[slot] is not None:
            self.copy_stream.wait_event(self.last_use[slot])
        if assemble is not None:
            self.copy_stream.wait_event(self.streams.record_event(self.streams.current()))
        start, link_bytes = self.streams.record_event(self.copy_stream), sum(source.numel() for source, _ in sources)
        with self.streams.on(self.copy_stream):
            if assemble is not None:
                link_bytes = assemble(buffer)
            else:
                for source, offset in sources:
                    buffer[offset : offset + source.numel()].copy_(source, non_blocking=True)
        arrived = self.streams.record_event(self.copy_stream)
        self.transfers.host_to_device_bytes += link_bytes
        free, freed_by = self.last_use[slot], self.last_span[slot]
        fetch.copies += 1
        self.timeline.record_copy(Copy(fetch.block, link_bytes, free, freed_by, start, arrived))
        return arrived


def slots_in_use(blocks: int, slots: int) -> int:
    """Return how many of `slots` a captured pass of `blocks` blocks uses, each block with a fixed slot.

    The first block of the next pass reuses the slot of the first block in the last round, so it is prefetched only as many blocks ahead
    as that round has: the count with the fullest last round is best.
    """
    fewest = max(2, slots // 2)
    return max(range(min(fewest, slots), slots + 1), key=lambda count: (blocks % count or count, count))


class BlockTimes(NamedTuple):
    copy_s: float | None  # seconds of the link; None for a block that is not streamed
    work_s: float  # seconds of device and CPU
    device: int = 0


def overlapped_step_s(placement: Placement, cpu_s: Mapping[int, float], link_s: float, compute_s: float) -> float:
    """Return the seconds of a decode step, given those of the links and those of devices and CPU.

    Args:
        cpu_s: CPU seconds by block; the rest of `compute_s` is spread evenly over all blocks.
        link_s: of all links at the same time, if each has its share of the bytes.
    """
    streamed = set(placement.streamed)
    if not streamed or not link_s or not compute_s:
        return max(link_s, compute_s)
    number, shares = len(placement.blocks), placement.link_shares
    byte_s = link_s / placement.nbytes_of(streamed)  # of all links together
    device_s = max(0.0, compute_s - sum(cpu_s.values())) / number  # of each block
    work_s = [device_s + cpu_s.get(block, 0.0) for block in range(number)]
    scale = compute_s / sum(work_s)  # after rebalancing, `cpu_s` may exceed `compute_s`
    blocks = [
        BlockTimes(
            byte_s / shares[placement.device_of(block)] * placement.blocks[block].layout.nbytes
            if block in streamed
            else None,
            scale * seconds,
            placement.device_of(block),
        )
        for block, seconds in enumerate(work_s)
    ]
    return simulate_passes(blocks, [slots_in_steps(placement, each) for each in placement.devices], placement.graphs)


def slots_in_steps(placement: Placement, device: int) -> int:
    """Return the slots of the ring buffer of `device` that decode steps use."""
    depth, streamed = placement.slots_on(device), len(placement.on(device, placement.streamed))
    return slots_in_use(streamed, depth) if placement.graphs and streamed else depth


def prefill_bytes(placement: Placement) -> int:
    """Return the bytes of blocks that cross the links in a prefill.

    The ring buffers still hold the first blocks of a decode step, from the previous generation; those that the prefill does not need soon
    are dropped. Cached experts do not cross again.
    """
    return placement.nbytes_of(prefill_copies(placement)) - placement.gathered_bytes


def prefill_copies(placement: Placement) -> set[int]:
    """Return the blocks of `prefill_bytes`."""
    order = [block for block in placement.offloaded if block not in placement.prompt_cpu_computed]
    prefetched: set[int] = set()
    for device in placement.devices:
        held = placement.on(device, placement.streamed)[: slots_in_steps(placement, device)]
        prefetched |= set(held).intersection(placement.on(device, order)[: placement.slots_on(device)])
    return set(order) - prefetched


def simulate_passes(blocks: list[BlockTimes], slots: Sequence[int], fixed_slots: bool) -> float:
    """Return the seconds of one of many passes through `blocks`, in order. `slots` are those of each device.

    A copy begins when the previous one of its link has ended and its slot is free, the work on a streamed block when its copy has ended.
    After the last block of a pass come the first ones of the next.
    """
    free_s = [[0.0] * max(1, count) for count in slots]  # by device and slot
    copied_s = [0.0 for _ in slots]
    counts = [0 for _ in slots]
    now_s = began_s = 0.0
    for _ in range(SIMULATED_PASSES):
        began_s = now_s
        counts = [0 if fixed_slots else count for count in counts]
        for copy_s, work_s, device in blocks:
            slot = counts[device] % len(free_s[device])
            if copy_s is not None:
                copied_s[device] = max(copied_s[device], free_s[device][slot]) + copy_s
                now_s = max(now_s, copied_s[device])
            now_s += work_s
            if copy_s is not None:
                free_s[device][slot] = now_s
                counts[device] += 1
    return now_s - began_s
