"""The host memory in which the streams of one rank, or of all ranks of a host, meet the cores; and what those ranks tell each other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from zero_inference.cpu.cores import FLAG_BYTES, STOP, flag_bytes
from zero_inference.cpu.library import needed_library
from zero_inference.errors import RunError
from zero_inference.utils.distributed import Ranks
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.shared_memory import SharedMemory

PATIENCE_US = 100_000  # in which Python handles no signal


@dataclass(frozen=True)
class MeetingPlace:
    """
    Attributes:
        flags: uint8 [`flag_bytes(ranks)`], zeros.
        words: uint8 [ranks x 2 x 64], zeros; of an `Agreement`.
        input, output: uint8, what calls bring and take: those of all ranks together.
    """

    flags: torch.Tensor
    words: torch.Tensor
    input: torch.Tensor
    output: torch.Tensor


def meeting_place(ranks: Ranks, input_bytes: int, output_bytes: int, pinned: bool) -> MeetingPlace:
    """The place for calls that bring and take as many bytes of each rank at most; made by all ranks together.

    Args:
        pinned: page-lock it.

    Raises:
        RunError: the memory is not there, or may not be page-locked.
    """
    if ranks.world_size == 1:
        return own_place(input_bytes, output_bytes, pinned)
    sizes = _sizes(ranks.world_size, input_bytes, output_bytes)
    memory = SharedMemory(sum(sizes), ranks)
    memory.settle(pinned)
    return MeetingPlace(*memory.bytes.split(sizes))


def own_place(input_bytes: int, output_bytes: int, pinned: bool, ranks: int = 1) -> MeetingPlace:
    """The same in memory of this process alone, for as many `ranks` as it plays."""
    sizes = _sizes(ranks, input_bytes, output_bytes)
    return MeetingPlace(*(host_empty((nbytes,), torch.uint8, pinned).zero_() for nbytes in sizes))


def _sizes(ranks: int, input_bytes: int, output_bytes: int) -> list[int]:
    """Of the parts, each from a cache line on."""
    lines = (-(-nbytes // FLAG_BYTES) for nbytes in (2 * FLAG_BYTES, input_bytes, output_bytes))
    return [flag_bytes(ranks), *(ranks * count * FLAG_BYTES for count in lines)]


class Agreement:
    """Numbers that the ranks of a host tell each other: all of them as often, and in the same order.

    A rank has two lines for its numbers, in turns: it writes to one again when all ranks have come to the other, and have read it by then.
    """

    def __init__(self, rank: int, ranks: int, place: MeetingPlace):
        self.rank, self.ranks, self.words = rank, ranks, place.words
        self.stop = place.flags.data_ptr() + STOP * FLAG_BYTES
        self.turn = 0

    def of_all(self, value: int) -> list[int]:
        """The `value` (64 bits) of each rank, when all have come here. Raises RunError where a rank has ended."""
        self.turn += 1
        number = self.turn & 0xFFFFFFFF
        mine = self._line(self.rank)
        ctypes.c_int64.from_address(mine + 8).value = value
        needed_library().zero_inference_raise_flag(mine, number)
        values = []
        for rank in range(self.ranks):
            line = self._line(rank)
            await_flag(line, number, self.stop)
            values.append(ctypes.c_int64.from_address(line + 8).value)
        return values

    def _line(self, rank: int) -> int:
        return self.words.data_ptr() + (2 * rank + self.turn % 2) * FLAG_BYTES


def await_flag(flag: int, number: int, stop: int) -> None:
    """Return when the flag at the address `flag` has come to `number`. Raises RunError where the one at `stop` is raised before."""
    library = needed_library()
    while not (state := library.zero_inference_await_flag(flag, stop, number, PATIENCE_US)):
        pass  # a signal's handler may have raised an exception here
    if state < 0:
        raise RunError("another rank ended while this one waited for it; its output says why")
