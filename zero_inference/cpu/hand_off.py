"""The hand-off: device to CPU and back within a step, through host memory and flags.

`HandOff` calls the CPU pool in the order of a CUDA stream: a kernel writes the inputs to page-locked memory and raises a flag, pool
threads that watch it multiply, and another kernel waits for their flag, reads the output and adds what the device has computed of the
same sum. Python only queues all of it and waits for nothing. The ranks of a host use it on a CPU too: each brings its rows and takes its
part of the output. Calls that belong to a CUDA graph are recorded when it is captured, and submitted again at each replay. `DirectCalls`
makes synchronous calls, for a model of one rank on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_inference.cpu.experts import WeightedRows
from zero_inference.cpu.library import require_library
from zero_inference.cpu.pool import ARRIVED, DONE, FLAG_BYTES, STOP, CpuPool, Routing, Task, flag_bytes
from zero_inference.errors import RunError
from zero_inference.utils.host_memory import SharedMemory, host_empty
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.timing import Transfers

SIGNAL_CHECK_US = 100_000  # while a rank waits, Python handles signals this often

DeviceWork = Callable[[], WeightedRows | None]  # queues work on the device; returns what is added to the CPU's output


@dataclass(frozen=True)
class HandOffBuffers:
    """Host memory of a hand-off, uint8."""

    flags: Tensor  # [`flag_bytes(ranks)`], zeros
    words: Tensor  # [ranks x 2 x 64], zeros; for a `RankExchange`
    input: Tensor  # of a call, of all ranks together
    output: Tensor


def allocate_buffers(ranks: Ranks, input_bytes: int, output_bytes: int, pinned: bool) -> HandOffBuffers:
    """Allocate buffers that all ranks share, for calls of up to so many bytes per rank; all ranks call it together. Raises RunError."""
    if ranks.world_size == 1:
        return allocate_local_buffers(input_bytes, output_bytes, pinned)
    sizes = _buffer_sizes(ranks.world_size, input_bytes, output_bytes)
    memory = SharedMemory(sum(sizes), ranks)
    memory.settle(pinned)
    return HandOffBuffers(*memory.bytes.split(sizes))


def allocate_local_buffers(input_bytes: int, output_bytes: int, pinned: bool, ranks: int = 1) -> HandOffBuffers:
    """Allocate buffers of this process alone; `ranks` simulated in it."""
    sizes = _buffer_sizes(ranks, input_bytes, output_bytes)
    return HandOffBuffers(*(host_empty((nbytes,), torch.uint8, pinned).zero_() for nbytes in sizes))


def _buffer_sizes(ranks: int, input_bytes: int, output_bytes: int) -> list[int]:
    """Return the bytes of each buffer, multiples of a cache line."""
    lines = (-(-nbytes // FLAG_BYTES) for nbytes in (2 * FLAG_BYTES, input_bytes, output_bytes))
    return [flag_bytes(ranks), *(ranks * count * FLAG_BYTES for count in lines)]


class RankExchange:
    """All-gather of one number over the ranks of a host; all ranks call it equally often, in the same order.

    A rank has two cache lines that it writes alternately: it overwrites one only after all ranks have written the other, and so have
    read the first.
    """

    def __init__(self, rank: int, ranks: int, buffers: HandOffBuffers):
        self.rank, self.ranks, self.words = rank, ranks, buffers.words
        self.stop = buffers.flags.data_ptr() + STOP * FLAG_BYTES
        self.round = 0

    def all_gather(self, value: int) -> list[int]:
        """Return the `value` (64 bits) of each rank. Raises RunError where a rank has ended."""
        self.round += 1
        number = self.round & 0xFFFFFFFF
        first = self.words.data_ptr() + self.round % 2 * FLAG_BYTES
        lines = [first + 2 * rank * FLAG_BYTES for rank in range(self.ranks)]
        ctypes.c_int64.from_address(lines[self.rank] + 8).value = value
        require_library().zero_inference_raise_flag(lines[self.rank], number)
        values = []
        for line in lines:
            await_flag(line, number, self.stop)
            values.append(ctypes.c_int64.from_address(line + 8).value)
        return values


def await_flag(flag: int, number: int, stop: int) -> None:
    """Wait until the flag at address `flag` reaches `number`. Raises RunError if the flag at `stop` is raised first."""
    library = require_library()
    while not (state := library.zero_inference_await_flag(flag, stop, number, SIGNAL_CHECK_US)):
        pass  # a signal handler may raise an exception here
    if state < 0:
        raise RunError("another rank ended while this one waited for it; its output says why")


@dataclass
class CapturedCalls:
    """Calls of a CUDA graph."""

    submits: list[Callable[[int], None]] = field(default_factory=list)  # submit a call to the pool, given its number
    counted: Transfers = field(default_factory=Transfers)  # bytes of all calls together


class DirectCalls:
    """Synchronous calls of `pool`, for a model on the CPU."""

    def __init__(self, pool: CpuPool, transfers: Transfers):
        self.pool, self.transfers = pool, transfers
        transfers.cpu_counted_bytes, transfers.cpu_busy_s = pool.chosen_bytes, pool.busy_s

    def __call__(
        self, task: Task, x: Tensor, routing: Routing | None = None, device_work: DeviceWork = lambda: None
    ) -> list[Tensor]:
        """Return the task's outputs [rows, width] for `x` [rows, columns], plus the sum that `device_work` returns, as `HandOff` does."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0] * sum(task.widths))
        self.pool.run(task, x, out, routing and Routing(*(tensor.contiguous() for tensor in routing)))
        self.transfers.cpu_bytes += task.nbytes
        of_device = device_work()
        outputs = _split_outputs(out, x.shape[0], task.widths)
        return outputs if of_device is None else [of_device.added_to(output) for output in outputs]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[CapturedCalls]:
        """Do nothing: on the CPU a repeated step makes its calls itself."""
        yield CapturedCalls()

    def replay(self, calls: CapturedCalls) -> None:
        """Do nothing, see `capturing`."""

    def close(self) -> None:
        self.transfers.keep_cpu_counts()
        self.pool.close()


class StreamSide:
    """The device's operations in a hand-off, on its current stream (csrc/hand_off). It counts the calls. Addresses are of host memory."""

    def __init__(self, device: torch.device):
        self.scratch = torch.zeros(
            3, dtype=torch.int32, device=device
        )  # counters of the kernels, among them the call's number

    def push(self, tensors: Sequence[Tensor], targets: Sequence[int], flag: int) -> None:
        """Write up to four contiguous `tensors` to `targets`, start the next call and raise `flag` to its number."""
        torch.ops.zero_inference.hand_off_push(tensors, targets, flag, self.scratch)

    def pull(self, out: Tensor, source: int, flag: int, stop: int, of_device: WeightedRows | None) -> None:
        """Wait until `flag` reaches the call's number or `stop` is raised, copy `source` to the contiguous `out`, and add the weighted
        sum `of_device`."""
        rows = () if of_device is None else of_device
        torch.ops.zero_inference.hand_off_pull(out, source, flag, stop, self.scratch, *rows)

    def wait(self) -> None:
        """Wait for the queued operations."""
        torch.cuda.current_stream(self.scratch.device).synchronize()

    def end(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.scratch.device)


class HostSide:
    """`StreamSide` with a CPU as the device: operations are done when they return."""

    def __init__(self) -> None:
        self.number = 0  # of the current call

    def push(self, tensors: Sequence[Tensor], targets: Sequence[int], flag: int) -> None:
        for tensor, target in zip(tensors, targets):
            ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
        self.number = (self.number + 1) & 0xFFFFFFFF
        require_library().zero_inference_raise_flag(flag, self.number)

    def pull(self, out: Tensor, source: int, flag: int, stop: int, of_device: WeightedRows | None) -> None:
        await_flag(flag, self.number, stop)
        ctypes.memmove(out.data_ptr(), source, out.nbytes)
        if of_device is not None:
            out.copy_(of_device.added_to(out.view(len(of_device.weights), -1)).view(out.shape))

    def wait(self) -> None:
        pass

    def end(self) -> None:
        pass


class HandOff:
    """Calls of `pool` in the order of a device's current stream.

    With several ranks all make the same calls with equally many rows, and the pool computes them as one: each rank's input follows the
    previous rank's. No buffer is overwritten too early: the pool writes an output only when all ranks have written the input, a rank
    writes an input only after it has read the previous output, and that was complete only when the pool had read its input.

    Args:
        buffers: unused so far, because its flags count the calls; else ValueError.
        rank: of this process among the `pool.ranks` of the host; the first one has the threads, and counts the bytes that they read.
    """

    def __init__(
        self, pool: CpuPool, side: StreamSide | HostSide, buffers: HandOffBuffers, transfers: Transfers, rank: int = 0
    ):
        self.pool, self.side, self.transfers, self.rank = pool, side, transfers, rank
        if buffers.flags[FLAG_BYTES * (ARRIVED + rank) :][:FLAG_BYTES].any():
            raise ValueError("these hand-off buffers have been used: their flags would not match")
        self.input, self.output = buffers.input, buffers.output
        self.number = 0  # of the latest call; the device counts them as well
        self.captured: CapturedCalls | None = None
        self.was_routed = False  # whether a call had a routing
        transfers.cpu_counted_bytes = self._chosen_bytes
        transfers.cpu_busy_s = pool.busy_s if rank == 0 else None
        flags = buffers.flags.data_ptr()
        self.arrived, self.done, self.stop = (flags + flag * FLAG_BYTES for flag in (ARRIVED + rank, DONE, STOP))

    def __call__(
        self, task: Task, x: Tensor, routing: Routing | None = None, device_work: DeviceWork = lambda: None
    ) -> list[Tensor]:
        """Queue a call and return the task's outputs [rows, width] for `x` [rows, columns], valid in stream order.

        `device_work` goes with a routing. Raises ValueError for a routing of more rows than the buffers hold.
        """
        element_bytes = x.element_size() * self.pool.ranks
        input_rows = self.input.numel() // (task.columns * element_bytes)
        output_rows = self.output.numel() // (max(1, sum(task.widths)) * element_bytes)
        max_rows = max(1, min(input_rows, output_rows))
        if x.shape[0] > max_rows and routing is None:  # in parts, each of which reads the weights again
            parts = [self(task, part) for part in x.split(max_rows)]
            return [torch.cat(outputs) for outputs in zip(*parts)]
        out = x.new_empty(x.shape[0] * sum(task.widths))
        if self.pool.ranks * out.nbytes > self.output.nbytes:
            raise ValueError(
                f"{self.pool.ranks} outputs of {out.nbytes} bytes, where there is memory for {self.output.nbytes}"
            )
        outputs = _split_outputs(out, x.shape[0], task.widths)

        def submit(addresses: list[int], number: int) -> None:
            source, *routed = addresses
            extra = () if routing is None else routing.extra(*routed)
            self.pool.submit(task, x.shape[0], source, self.output.data_ptr(), number, extra)

        self.run([x, *(routing or ())], [out] if self.pool.ranks == 1 else outputs, submit, device_work)
        self.was_routed |= routing is not None
        self._counters().cpu_bytes += task.nbytes if self.rank == 0 else 0
        return outputs

    def run(
        self,
        inputs: Sequence[Tensor],
        outs: Sequence[Tensor],
        submit: Callable[[list[int], int], None],
        device_work: DeviceWork = lambda: None,
    ) -> None:
        """Queue a call that takes `inputs` to host memory and its outputs to `outs`.

        `submit` submits it to the pool, given the addresses of the inputs in host memory and the call's number; its outputs go to
        `output`, one after the other, each of all ranks.
        """
        addresses = self._push(inputs)
        if self.captured is None:
            self._submit(lambda number: submit(addresses, number))
        else:
            self.captured.submits.append(lambda number: submit(addresses, number))
        of_device = device_work()
        source = self.output.data_ptr()
        for out in outs:
            self.side.pull(out, source + self.rank * out.nbytes, self.done, self.stop, of_device)
            self._counters().host_to_device_bytes += out.nbytes
            source += self.pool.ranks * out.nbytes

    @contextlib.contextmanager
    def capturing(self) -> Iterator[CapturedCalls]:
        """Within it a CUDA graph is captured: calls are recorded for `replay`, not submitted."""
        self.captured = CapturedCalls()
        try:
            yield self.captured
        finally:
            self.captured = None

    def replay(self, calls: CapturedCalls) -> None:
        """Submit the calls of a graph that is launched next."""
        for submit in calls.submits:
            self._submit(submit)
        self.transfers.host_to_device_bytes += calls.counted.host_to_device_bytes
        self.transfers.device_to_host_bytes += calls.counted.device_to_host_bytes
        self.transfers.cpu_bytes += calls.counted.cpu_bytes

    def _submit(self, submit: Callable[[int], None]) -> None:
        self.number += 1
        submit(self.number & 0xFFFFFFFF)

    def _counters(self) -> Transfers:
        return self.transfers if self.captured is None else self.captured.counted

    def _push(self, tensors: Sequence[Tensor]) -> list[int]:
        """Queue writing `tensors` to the input buffer and raising the flag; return the address of each, of the first rank's."""
        addresses, end = [], self.input.data_ptr()
        limit = end + self.input.numel()
        for tensor in tensors:
            of_all = self.pool.ranks * tensor.nbytes
            if end + of_all > limit:
                raise ValueError(
                    f"an input of {of_all} bytes does not fit into the {limit - end} bytes left of the buffer"
                )
            addresses.append(end)
            end += -(-of_all // FLAG_BYTES) * FLAG_BYTES
            self._counters().device_to_host_bytes += tensor.nbytes
        targets = [address + self.rank * tensor.nbytes for address, tensor in zip(addresses, tensors)]
        self.side.push([tensor.contiguous() for tensor in tensors], targets, self.arrived)
        return addresses

    def _chosen_bytes(self) -> int:
        """Return the bytes that routed calls have read, after waiting for the stream: calls still queued are not counted yet."""
        if not self.was_routed:
            return 0
        self.side.wait()
        return self.pool.chosen_bytes()

    def close(self) -> None:
        """Wait for the queued calls, and end the threads. With several ranks, stop those that wait for this one."""
        if self.pool.ranks > 1:
            require_library().zero_inference_raise_flag(self.stop, 1)
        self.side.end()
        self.transfers.keep_cpu_counts()
        self.pool.close()


def _split_outputs(out: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    sizes = [rows * width for width in widths]
    return [part.view(rows, width) for part, width in zip(out.split(sizes), widths)]
