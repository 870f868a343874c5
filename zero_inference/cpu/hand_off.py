"""The host memory in which the streams of one rank, or of all ranks of a host, meet the cores; and what those ranks tell each other."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero_inference.cpu.experts import WeightedRows
from zero_inference.cpu.library import require_library
from zero_inference.cpu.pool import ARRIVED, DONE, FLAG_BYTES, STOP, CpuPool, Routing, Task, flag_bytes
from zero_inference.errors import RunError
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.shared_memory import SharedMemory
from zero_inference.utils.transfers import Transfers

PATIENCE_US = 100_000  # in which Python handles no signal


@dataclass(frozen=True)
class HandOffBuffers:
    """
    Attributes:
        flags: uint8 [`flag_bytes(ranks)`], zeros.
        words: uint8 [ranks x 2 x 64], zeros; of an `RankExchange`.
        input, output: uint8, what calls bring and take: those of all ranks together.
    """

    flags: torch.Tensor
    words: torch.Tensor
    input: torch.Tensor
    output: torch.Tensor


def allocate_buffers(ranks: Ranks, input_bytes: int, output_bytes: int, pinned: bool) -> HandOffBuffers:
    """The place for calls that bring and take as many bytes of each rank at most; made by all ranks together.

    Args:
        pinned: page-lock it.

    Raises:
        RunError: the memory is not there, or may not be page-locked.
    """
    if ranks.world_size == 1:
        return allocate_local_buffers(input_bytes, output_bytes, pinned)
    sizes = _sizes(ranks.world_size, input_bytes, output_bytes)
    memory = SharedMemory(sum(sizes), ranks)
    memory.settle(pinned)
    return HandOffBuffers(*memory.bytes.split(sizes))


def allocate_local_buffers(input_bytes: int, output_bytes: int, pinned: bool, ranks: int = 1) -> HandOffBuffers:
    """The same in memory of this process alone, for as many `ranks` as it plays."""
    sizes = _sizes(ranks, input_bytes, output_bytes)
    return HandOffBuffers(*(host_empty((nbytes,), torch.uint8, pinned).zero_() for nbytes in sizes))


def _sizes(ranks: int, input_bytes: int, output_bytes: int) -> list[int]:
    """Of the parts, each from a cache line on."""
    lines = (-(-nbytes // FLAG_BYTES) for nbytes in (2 * FLAG_BYTES, input_bytes, output_bytes))
    return [flag_bytes(ranks), *(ranks * count * FLAG_BYTES for count in lines)]


class RankExchange:
    """Numbers that the ranks of a host tell each other: all of them as often, and in the same order.

    A rank has two lines for its numbers, in turns: it writes to one again when all ranks have come to the other, and have read it by then.
    """

    def __init__(self, rank: int, ranks: int, place: HandOffBuffers):
        self.rank, self.ranks, self.words = rank, ranks, place.words
        self.stop = place.flags.data_ptr() + STOP * FLAG_BYTES
        self.turn = 0

    def of_all(self, value: int) -> list[int]:
        """The `value` (64 bits) of each rank, when all have come here. Raises RunError where a rank has ended."""
        self.turn += 1
        number = self.turn & 0xFFFFFFFF
        mine = self._line(self.rank)
        ctypes.c_int64.from_address(mine + 8).value = value
        require_library().zero_inference_raise_flag(mine, number)
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
    library = require_library()
    while not (state := library.zero_inference_await_flag(flag, stop, number, PATIENCE_US)):
        pass  # a signal's handler may have raised an exception here
    if state < 0:
        raise RunError("another rank ended while this one waited for it; its output says why")


Meanwhile = Callable[[], WeightedRows | None]  # asks the device for work, and returns what to add to the output


@dataclass
class CapturedCalls:
    """Calls of a graph.

    Attributes:
        submits: ask the cores for each of them, given its number.
        host_to_device_bytes, device_to_host_bytes, cores_bytes: of all of them.
    """

    submits: list[Callable[[int], None]] = field(default_factory=list)
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    cores_bytes: int = 0


class DirectCalls:
    """Calls of `cores` for a model on the CPU."""

    def __init__(self, cores: CpuPool, transfers: Transfers):
        self.cores, self.transfers = cores, transfers
        transfers.cores_counts, transfers.cores_busy_s = cores.chosen_bytes, cores.busy_s

    def __call__(
        self, task: Task, x: torch.Tensor, choice: Routing | None = None, meanwhile: Meanwhile = lambda: None
    ) -> list[torch.Tensor]:
        """Return the task's outputs [rows, width] for `x` [rows, columns]. What `meanwhile` returns is added to the
        output, of which there is one then."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0] * sum(task.widths))
        self.cores.run(task, x, out, choice and Routing(*(tensor.contiguous() for tensor in choice)))
        self.transfers.cores_bytes += task.nbytes
        of_device = meanwhile()
        parts = _split(out, x.shape[0], task.widths)
        return parts if of_device is None else [of_device.added_to(part) for part in parts]

    @contextlib.contextmanager
    def recording(self) -> Iterator[CapturedCalls]:
        """Of no effect: a step that is repeated on the CPU makes its calls itself."""
        yield CapturedCalls()

    def ask_again(self, calls: CapturedCalls) -> None:
        """See `recording`."""

    def close(self) -> None:
        self.transfers.settle()
        self.cores.close()


class DeviceSide(Protocol):
    """What a device does at a crossing, in the order in which it is asked. It counts the calls. Addresses are of host memory."""

    def push(self, tensors: Sequence[torch.Tensor], targets: Sequence[int], flag: int) -> None:
        """Write the contiguous `tensors`, four at most, to `targets`, begin the next call and raise `flag` to its number."""

    def pull(self, out: torch.Tensor, source: int, flag: int, stop: int, of_device: WeightedRows | None) -> None:
        """Wait until `flag` has come to the number of the call, or `stop` is raised, read the contiguous `out` from `source`, and add
        the weighted sum `of_device`."""

    def wait(self) -> None:
        """Return when all that was asked here is done."""

    def end(self) -> None:
        """Return when the device does nothing any more."""


class StreamSide:
    """The current stream of a CUDA device (csrc/crossing)."""

    def __init__(self, device: torch.device):
        self.scratch = torch.zeros(3, dtype=torch.int32, device=device)

    def push(self, tensors: Sequence[torch.Tensor], targets: Sequence[int], flag: int) -> None:
        torch.ops.zero_inference.crossing_push(tensors, targets, flag, self.scratch)

    def pull(self, out: torch.Tensor, source: int, flag: int, stop: int, of_device: WeightedRows | None) -> None:
        rows = () if of_device is None else of_device
        torch.ops.zero_inference.crossing_pull(out, source, flag, stop, self.scratch, *rows)

    def wait(self) -> None:
        torch.cuda.current_stream(self.scratch.device).synchronize()

    def end(self) -> None:
        torch.cuda.synchronize(self.scratch.device)


class HostSide:
    """A CPU, which has done what it was asked when it returns."""

    def __init__(self) -> None:
        self.number = 0  # of the call under way

    def push(self, tensors: Sequence[torch.Tensor], targets: Sequence[int], flag: int) -> None:
        for tensor, target in zip(tensors, targets):
            ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
        self.number = (self.number + 1) & 0xFFFFFFFF
        require_library().zero_inference_raise_flag(flag, self.number)

    def pull(self, out: torch.Tensor, source: int, flag: int, stop: int, of_device: WeightedRows | None) -> None:
        await_flag(flag, self.number, stop)
        ctypes.memmove(out.data_ptr(), source, out.nbytes)
        if of_device is not None:
            out.copy_(of_device.added_to(out.view(len(of_device.weights), -1)).view(out.shape))

    def wait(self) -> None:
        """Nothing to wait for."""

    def end(self) -> None:
        """Nothing to wait for."""


class HandOff:
    """Calls of `cores` in the order of the current stream of a device.

    With several ranks all make the same calls, with as many rows, and one call of the cores is made for all of them: an input
    lies behind that of the rank before, so that together they are one. Nothing is overwritten too early: the cores write an output only
    when all ranks have brought the input, and a rank brings one behind its reading of the output before; that was there when the
    cores had read its input.

    Args:
        place: where they meet; one that no other has used, for its flags count the calls.
        rank: this one's number among the `cores.ranks` of the host; the first one has the threads, and counts what they read.

    Raises:
        ValueError: another has used the place.
    """

    def __init__(self, cores: CpuPool, side: DeviceSide, place: HandOffBuffers, transfers: Transfers, rank: int = 0):
        self.cores, self.side, self.transfers, self.rank = cores, side, transfers, rank
        if place.flags[FLAG_BYTES * (ARRIVED + rank) :][:FLAG_BYTES].any():
            raise ValueError("this place has been used: cores and device would not wait for each other")
        self.input, self.output = place.input, place.output
        self.number = 0  # of the latest call; the device counts them as well
        self.recorded: CapturedCalls | None = None
        self.chose = False  # whether a call had a choice
        transfers.cores_counts = self._chosen_bytes
        transfers.cores_busy_s = cores.busy_s if rank == 0 else None
        flags = place.flags.data_ptr()
        self.arrived, self.done, self.stop = (flags + flag * FLAG_BYTES for flag in (ARRIVED + rank, DONE, STOP))

    def __call__(
        self, task: Task, x: torch.Tensor, choice: Routing | None = None, meanwhile: Meanwhile = lambda: None
    ) -> list[torch.Tensor]:
        """The outputs [rows, width] for `x` [rows, columns], one for each of the task's; on the device, when its stream comes there.

        Args:
            meanwhile: asks the device for what it computes while the cores multiply; only with a choice, and one output.

        Raises:
            ValueError: a choice for more rows than there is memory for.
        """
        most = self._most_rows(task, x.element_size())
        if (
            x.shape[0] > most and choice is None
        ):  # more than was expected: in parts, each of which reads the weights again
            parts = [self(task, part) for part in x.split(most)]
            return [torch.cat(outputs) for outputs in zip(*parts)]
        out = x.new_empty(x.shape[0] * sum(task.widths))
        if self.cores.ranks * out.nbytes > self.output.nbytes:
            raise ValueError(
                f"{self.cores.ranks} outputs of {out.nbytes} bytes, where there is memory for {self.output.nbytes}"
            )
        parts = _split(out, x.shape[0], task.widths)

        def submit(addresses: list[int], number: int) -> None:
            source, *chosen = addresses
            extra = () if choice is None else choice.extra(*chosen)
            self.cores.submit(task, x.shape[0], source, self.output.data_ptr(), number, extra)

        self.meet([x, *(choice or ())], [out] if self.cores.ranks == 1 else parts, submit, meanwhile)
        self.chose |= choice is not None
        self._count().cores_bytes += task.nbytes if self.rank == 0 else 0
        return parts

    def meet(
        self,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        submit: Callable[[list[int], int], None],
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Bring `inputs` to the cores and their outputs to `outs`, in the order of the stream.

        Args:
            submit: asks the cores for the call, given the addresses of the inputs in host memory and the call's number; its outputs
                go to `output`, one behind the other, each of all ranks.
            meanwhile: asks the device for what stands between input and output in its stream, and returns what is added to an output.
        """
        addresses = self._push(inputs)
        if self.recorded is None:
            self._ask(lambda number: submit(addresses, number))
        else:
            self.recorded.submits.append(lambda number: submit(addresses, number))
        of_device = meanwhile()
        source = self.output.data_ptr()
        for out in outs:
            self.side.pull(out, source + self.rank * out.nbytes, self.done, self.stop, of_device)
            self._count().host_to_device_bytes += out.nbytes
            source += self.cores.ranks * out.nbytes

    @contextlib.contextmanager
    def recording(self) -> Iterator[CapturedCalls]:
        """Within it a CUDA graph is recorded: calls are kept, for `ask_again`."""
        self.recorded = CapturedCalls()
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def ask_again(self, calls: CapturedCalls) -> None:
        """Ask the cores for the calls of a graph that is launched next."""
        for submit in calls.submits:
            self._ask(submit)
        self.transfers.host_to_device_bytes += calls.host_to_device_bytes
        self.transfers.device_to_host_bytes += calls.device_to_host_bytes
        self.transfers.cores_bytes += calls.cores_bytes

    def _ask(self, submit: Callable[[int], None]) -> None:
        self.number += 1
        submit(self.number & 0xFFFFFFFF)

    def _count(self) -> Transfers | CapturedCalls:
        """What is raised by a call now."""
        return self.transfers if self.recorded is None else self.recorded

    def _most_rows(self, task: Task, element_bytes: int) -> int:
        """Rows of a call for which there is memory, at least 1."""
        of_input = self.input.numel() // (task.columns * element_bytes * self.cores.ranks)
        of_output = self.output.numel() // (max(1, sum(task.widths)) * element_bytes * self.cores.ranks)
        return max(1, min(of_input, of_output))

    def _push(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Bring them into host memory one after the other, raise the flag, and return the addresses of the first rank's."""
        addresses, end = [], self.input.data_ptr()
        most = end + self.input.numel()
        for tensor in tensors:
            of_all = self.cores.ranks * tensor.nbytes
            if end + of_all > most:
                raise ValueError(
                    f"an input of {of_all} bytes at {most - end} bytes from the end of the place for inputs"
                )
            addresses.append(end)
            end += -(-of_all // FLAG_BYTES) * FLAG_BYTES
            self._count().device_to_host_bytes += tensor.nbytes
        targets = [address + self.rank * tensor.nbytes for address, tensor in zip(addresses, tensors)]
        self.side.push([tensor.contiguous() for tensor in tensors], targets, self.arrived)
        return addresses

    def _chosen_bytes(self) -> int:
        """Of all calls that were asked for: the stream is waited for, as calls that it has not come to are not counted yet."""
        if not self.chose:
            return 0
        self.side.wait()
        return self.cores.chosen_bytes()

    def close(self) -> None:
        """Wait for the calls under way, and end the threads. With several ranks, one that waits for this one is told not to."""
        if self.cores.ranks > 1:
            require_library().zero_inference_raise_flag(self.stop, 1)
        self.side.end()
        self.transfers.settle()
        self.cores.close()


def _split(out: torch.Tensor, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
    parts, start = [], 0
    for width in widths:
        parts.append(out[start : start + rows * width].view(rows, width))
        start += rows * width
    return parts
