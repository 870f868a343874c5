"""How the copies of a decode step and its other work follow each other: what each of the two waits for the other.

Both may have time for all that they do and still be late: a large block can only be sent for when a slot of the ring is free, which is as
many blocks before it as there are slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.ring import slots_in_turn

PASSES = 4  # in a row, of which the last counts: the first ones begin with an empty ring


@dataclass(frozen=True)
class BlockTimes:
    """Of a block in a pass, in seconds.

    Attributes:
        copy_s: of the link; None where it is not fetched.
        work_s: of device and cores.
    """

    copy_s: float | None
    work_s: float


def paced_s(
    found: Residency, of_cores: Mapping[int, float], link_s: float, others_s: float, keeps_places: bool
) -> float:
    """Seconds of a decode step that takes the link, and device and cores, as long as this.

    Args:
        of_cores: seconds of the cores in each block that they multiply; the rest of `others_s` is spread evenly over all blocks.
        keeps_places: as of `paced_step_s`.
    """
    fetched = set(found.fetched)
    if not fetched or not link_s or not others_s:
        return max(link_s, others_s)
    number, of_byte = len(found.layouts), link_s / found.nbytes_of(fetched)
    of_device = max(0.0, others_s - sum(of_cores.values())) / number
    work_s = [of_device + of_cores.get(block, 0.0) for block in range(number)]
    scale = others_s / sum(work_s)  # blocks that changed hands took their time with them
    blocks = [
        BlockTimes(of_byte * found.layouts[block].nbytes if block in fetched else None, scale * seconds)
        for block, seconds in enumerate(work_s)
    ]
    return paced_step_s(blocks, slots_in_steps(found, keeps_places), keeps_places)


def slots_in_steps(found: Residency, keeps_places: bool) -> int:
    """Of the ring, that decode steps go round in."""
    return slots_in_turn(len(found.fetched), found.depth) if keeps_places and found.fetched else found.depth


def prefill_bytes(found: Residency, keeps_places: bool) -> int:
    """Return the bytes of blocks that cross the link in a prefill. When it begins, the ring is full of what a decode step fetches first: it
    follows another generation. What the prefill does not need soon is dropped then. Experts that the device keeps do not come again."""
    order = [block for block in found.in_host_memory if block not in found.prompt_computed]
    ahead = set(found.fetched[: slots_in_steps(found, keeps_places)]).intersection(order[: found.depth])
    return found.nbytes_of(order) - found.gathered_bytes - found.nbytes_of(ahead)


def paced_step_s(blocks: list[BlockTimes], slots: int, keeps_places: bool) -> float:
    """Seconds of one of many passes through `blocks`, in order.

    A copy begins when the one before it has ended and its slot is free, and the work on a fetched block when it is there. The order is
    circular: behind the last block of a pass come the first ones of the next.

    Args:
        slots: of the ring.
        keeps_places: each block comes into the same slot in every pass.
    """
    free_s = [0.0] * max(1, slots)
    copied_s = now_s = began_s = 0.0
    count = 0
    for _ in range(PASSES):
        began_s = now_s
        count = 0 if keeps_places else count
        for block in blocks:
            slot = count % len(free_s)
            if block.copy_s is not None:
                copied_s = max(copied_s, free_s[slot]) + block.copy_s
                now_s = max(now_s, copied_s)
            now_s += block.work_s
            if block.copy_s is not None:
                free_s[slot] = now_s
                count += 1
    return now_s - began_s
