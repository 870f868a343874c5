"""The hand-off: device to CPU and back within a step, through host memory and flags.

`HandOff` calls the CPU pool in the order of a CUDA stream: a kernel writes the inputs to page-locked memory and raises a flag, pool
threads that watch it multiply, and another kernel waits for their flag, reads the output and adds what the device has computed of the
same sum. Python only queues all of it and waits for nothing. Several devices share the pool: each has a `Lane` of its own, and calls run
in the order in which Python queued them. Calls that belong to a CUDA graph are recorded when it is captured, and submitted again at each
replay. `DirectCalls` makes synchronous calls, for a model on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_inference.cpu.experts import WeightedRows
from zero_inference.cpu.pool import ARRIVED, DEVICE_FLAG_BYTES, DONE, FLAG_BYTES, STOP, CpuPool, Routing, Task
from zero_inference.errors import RunError
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.timing import Transfers

DeviceWork = Callable[[], WeightedRows | None]  # queues work on the device; returns what is added to the CPU's output


@dataclass(frozen=True)
class HandOffBuffers:
    """Host memory of one device's hand-offs, uint8."""

    input: Tensor  # of a call
    output: Tensor


def allocate_buffers(
    input_bytes: int, output_bytes: int, pinned: bool, devices: int = 1
) -> tuple[Tensor, list[HandOffBuffers]]:
    """Return the flags of a `CpuPool`, and each device's buffers for calls of up to so many bytes. Raises RunError."""

    def allocate(nbytes: int) -> Tensor:
        return host_empty((-(-nbytes // FLAG_BYTES) * FLAG_BYTES,), torch.uint8, pinned).zero_()

    buffers = [HandOffBuffers(allocate(input_bytes), allocate(output_bytes)) for _ in range(devices)]
    return allocate(devices * DEVICE_FLAG_BYTES), buffers


@dataclass
class CapturedCalls:
    """Calls of a step's CUDA graphs, in the order of the step."""

    submits: list[Callable[[], None]] = field(default_factory=list)  # each submits one call to the pool
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

    def replay(self, calls: CapturedCalls) -> contextlib.AbstractContextManager[None]:
        """Do nothing, see `capturing`."""
        return contextlib.nullcontext()

    def close(self) -> None:
        self.transfers.keep_cpu_counts()
        self.pool.close()


class StreamSide:
    """The device's operations in a hand-off, on its current stream (csrc/hand_off). It counts the calls. Addresses are of host memory."""

    def __init__(self, device: torch.device):
        # counters of the kernels, among them the call's number
        self.scratch = torch.zeros(3, dtype=torch.int32, device=device)
        self.device = self.scratch.device  # with an index

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
        torch.cuda.current_stream(self.device).synchronize()

    def end(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)


class Lane:
    """One device's way to the pool and back: its operations, buffers, flags and call number.

    No buffer is overwritten too early: the pool writes an output only when the device has written the input, and the device writes an
    input only after it has read the previous output, which was complete only when the pool had read its input.

    Attributes:
        arrived, done, stop: addresses of the device's flags.
        number: of the latest call; the device counts them as well.
    """

    def __init__(self, side: StreamSide, buffers: HandOffBuffers):
        self.side, self.input, self.output = side, buffers.input, buffers.output
        self.number = 0

    def use_flags(self, flags: Tensor, index: int) -> None:
        """Use the flags of the pool's device `index`. Raises ValueError if they have been used: they count the calls."""
        self.index = index
        own = flags[index * DEVICE_FLAG_BYTES :][:DEVICE_FLAG_BYTES].view(3, FLAG_BYTES)
        if own[ARRIVED].any():
            raise ValueError("these hand-off flags have been used: they would not match the first call's number")
        self.arrived, self.done, self.stop = (own[flag].data_ptr() for flag in (ARRIVED, DONE, STOP))

    def push(self, tensors: Sequence[Tensor]) -> list[int]:
        """Queue writing `tensors` to the input buffer and raising the flag; return the address of each."""
        addresses, end = [], self.input.data_ptr()
        limit = end + self.input.numel()
        for tensor in tensors:
            if end + tensor.nbytes > limit:
                raise ValueError(f"an input of {tensor.nbytes} bytes does not fit into the {limit - end} left")
            addresses.append(end)
            end += -(-tensor.nbytes // FLAG_BYTES) * FLAG_BYTES
        self.side.push([tensor.contiguous() for tensor in tensors], addresses, self.arrived)
        return addresses

    def pull(self, out: Tensor, of_device: WeightedRows | None) -> None:
        """Queue waiting for the output and copying it to `out`, plus the weighted sum `of_device`."""
        self.side.pull(out, self.output.data_ptr(), self.done, self.stop, of_device)

    def next_number(self) -> int:
        self.number += 1
        return self.number & 0xFFFFFFFF


class HandOff:
    """Calls of `pool` in the order of each device's current stream.

    Args:
        lanes: one for each device, in the order of the pool's flags. A call takes the lane of the device that its input is on; a single
            lane serves any tensor.
    """

    def __init__(self, pool: CpuPool, lanes: Sequence[Lane], transfers: Transfers):
        if pool.flags is None or pool.devices != len(lanes):
            raise ValueError(f"a pool with flags of {pool.devices} devices, and {len(lanes)} lanes")
        self.pool, self.lanes, self.transfers = pool, tuple(lanes), transfers
        for index, lane in enumerate(lanes):
            lane.use_flags(pool.flags, index)
        self._lane_of = {lane.side.device: lane for lane in lanes}
        self.captured: CapturedCalls | None = None
        self.was_routed = False  # whether a call had a routing
        self.is_broken = False  # whether calls were submitted whose input will never come
        transfers.cpu_counted_bytes = self._chosen_bytes
        transfers.cpu_busy_s = pool.busy_s

    def lane_of(self, x: Tensor) -> Lane:
        """Return the lane of the device that `x` is on."""
        return self.lanes[0] if len(self.lanes) == 1 else self._lane_of[x.device]

    def __call__(
        self, task: Task, x: Tensor, routing: Routing | None = None, device_work: DeviceWork = lambda: None
    ) -> list[Tensor]:
        """Queue a call and return the task's outputs [rows, width] for `x` [rows, columns], valid in stream order.

        `device_work` goes with a routing. Raises ValueError for a routing of more rows than the buffers hold.
        """
        lane = self.lane_of(x)
        input_rows = lane.input.numel() // (task.columns * x.element_size())
        output_rows = lane.output.numel() // (max(1, sum(task.widths)) * x.element_size())
        max_rows = max(1, min(input_rows, output_rows))
        if x.shape[0] > max_rows and routing is None:  # in parts, each of which reads the weights again
            parts = [self(task, part) for part in x.split(max_rows)]
            return [torch.cat(outputs) for outputs in zip(*parts)]
        out = x.new_empty(x.shape[0] * sum(task.widths))
        if out.nbytes > lane.output.nbytes:
            raise ValueError(f"an output of {out.nbytes} bytes, where there is memory for {lane.output.nbytes}")

        def submit(addresses: list[int], number: int) -> None:
            source, *routed = addresses
            extra = () if routing is None else routing.extra(*routed)
            self.pool.submit(task, x.shape[0], source, lane.output.data_ptr(), number, extra, lane.index)

        self.run([x, *(routing or ())], out, submit, device_work)
        self.was_routed |= routing is not None
        self._counters().cpu_bytes += task.nbytes
        return _split_outputs(out, x.shape[0], task.widths)

    def run(
        self,
        inputs: Sequence[Tensor],
        out: Tensor,
        submit: Callable[[list[int], int], None],
        device_work: DeviceWork = lambda: None,
    ) -> None:
        """Queue a call that takes `inputs` to host memory and its output to `out`, all on one device.

        `submit` submits it to the pool, given the addresses of the inputs in host memory and the call's number, with the output in that
        of the lane.
        """
        self._check()
        lane, counters = self.lane_of(inputs[0]), self._counters()
        addresses = lane.push(inputs)

        def submit_next() -> None:
            submit(addresses, lane.next_number())

        if self.captured is None:
            submit_next()
        else:
            self.captured.submits.append(submit_next)
        lane.pull(out, device_work())
        counters.device_to_host_bytes += sum(tensor.nbytes for tensor in inputs)
        counters.host_to_device_bytes += out.nbytes

    @contextlib.contextmanager
    def capturing(self) -> Iterator[CapturedCalls]:
        """Within it CUDA graphs are captured: calls are recorded for `replay`, not submitted."""
        self.captured = CapturedCalls()
        try:
            yield self.captured
        finally:
            self.captured = None

    @contextlib.contextmanager
    def replay(self, calls: CapturedCalls) -> Iterator[None]:
        """Submit the calls of the graphs that are launched within it. If not all are launched, no later call works: the pool would compute
        from its input what these calls have to compute."""
        self._check()
        self.is_broken = True  # if an exception ends it, such as KeyboardInterrupt
        for submit in calls.submits:
            submit()
        yield
        self.is_broken = False
        self.transfers.host_to_device_bytes += calls.counted.host_to_device_bytes
        self.transfers.device_to_host_bytes += calls.counted.device_to_host_bytes
        self.transfers.cpu_bytes += calls.counted.cpu_bytes

    def _check(self) -> None:
        if self.is_broken:
            raise RunError("a decode step was interrupted while the CPU computed for it; load the model again.")

    def _counters(self) -> Transfers:
        return self.transfers if self.captured is None else self.captured.counted

    def _chosen_bytes(self) -> int:
        """Return the bytes that routed calls have read, after waiting for the streams: calls still queued are not counted yet."""
        if not self.was_routed:
            return 0
        for lane in self.lanes:
            lane.side.wait()
        return self.pool.chosen_bytes()

    def close(self) -> None:
        """Wait for the queued calls, and end the threads."""
        for lane in self.lanes:
            lane.side.end()
        self.transfers.keep_cpu_counts()
        self.pool.close()


def _split_outputs(out: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    sizes = [rows * width for width in widths]
    return [part.view(rows, width) for part, width in zip(out.split(sizes), widths)]
