"""How a model calls the host's cores (cores.py).

`HostCalls` makes a call at once, for a model that computes on the CPU. `Crossing` makes it in the order of a GPU's stream:
a kernel writes the input into page-locked memory and raises a flag, threads that watch it multiply, and another kernel waits for
theirs and reads the output. Python only asks for all of it, and waits for nothing. Calls that belong to a CUDA graph are kept when it is
recorded, and asked for again whenever it is launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zero_inference.cores.choice import Choice
from zero_inference.cores.cores import ARRIVED, DONE, FLAG_BYTES, STOP, Cores, Task
from zero_inference.runtime.host_memory import host_empty
from zero_inference.runtime.transfers import Transfers


@dataclass
class RecordedCalls:
    """Calls of a graph.

    Attributes:
        submits: ask the cores for each of them, given its number.
        host_to_device_bytes, device_to_host_bytes, cores_bytes: of all of them.
    """

    submits: list[Callable[[int], None]] = field(default_factory=list)
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    cores_bytes: int = 0


class HostCalls:
    """Calls of `cores` for a model on the CPU."""

    def __init__(self, cores: Cores, transfers: Transfers):
        self.cores, self.transfers = cores, transfers
        transfers.cores_counts = cores.chosen_bytes

    def __call__(
        self, task: Task, x: torch.Tensor, choice: Choice | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """The outputs [rows, width] for `x` [rows, columns], one for each of the task's; then `meanwhile`."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0] * sum(task.widths))
        self.cores.run(task, x, out, choice and Choice(*(tensor.contiguous() for tensor in choice)))
        self.transfers.cores_bytes += task.nbytes
        meanwhile()
        return _split(out, x.shape[0], task.widths)

    @contextlib.contextmanager
    def recording(self) -> Iterator[RecordedCalls]:
        """Of no effect: a step that is repeated on the CPU makes its calls itself."""
        yield RecordedCalls()

    def ask_again(self, calls: RecordedCalls) -> None:
        """See `recording`."""

    def close(self) -> None:
        self.transfers.settle()
        self.cores.close()


class Crossing:
    """Calls of `cores` in the order of the current stream of a CUDA device.

    Args:
        input_bytes, output_bytes: the most that a call brings and takes.
    """

    def __init__(self, cores: Cores, device: torch.device, input_bytes: int, output_bytes: int, transfers: Transfers):
        self.cores, self.transfers = cores, transfers
        self.input = host_empty((input_bytes,), torch.uint8, pinned=True)
        self.output = host_empty((output_bytes,), torch.uint8, pinned=True)
        self.scratch = torch.zeros(3, dtype=torch.int32, device=device)
        self.number = 0  # of the latest call; the device counts them as well
        self.recorded: RecordedCalls | None = None
        self.chose = False  # whether a call had a choice
        transfers.cores_counts = self._chosen_bytes
        if cores.flags is None:
            raise ValueError("these cores have no flags to meet a device with")
        flags = cores.flags.data_ptr()
        self.arrived, self.done, self.stop = (flags + flag * FLAG_BYTES for flag in (ARRIVED, DONE, STOP))

    def __call__(
        self, task: Task, x: torch.Tensor, choice: Choice | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """The outputs [rows, width] for `x` [rows, columns], one for each of the task's; on the device, when its stream comes there.

        Args:
            meanwhile: asks the device for what it computes while the cores multiply; only with a choice.

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
        if out.nbytes > self.output.nbytes:
            raise ValueError(f"an output of {out.nbytes} bytes, where there is memory for {self.output.nbytes}")

        def submit(addresses: list[int], number: int) -> None:
            source, *chosen = addresses
            extra = () if choice is None else choice.extra(*chosen)
            self.cores.submit(task, x.shape[0], source, self.output.data_ptr(), number, extra)

        self.meet([x, *(choice or ())], out, submit, meanwhile)
        self.chose |= choice is not None
        self._count().cores_bytes += task.nbytes
        return _split(out, x.shape[0], task.widths)

    def meet(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        submit: Callable[[list[int], int], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring `inputs` to the cores and their output to `out`, in the order of the stream.

        Args:
            submit: asks the cores for the call, given the addresses of the inputs in host memory and the call's number; its output
                goes to `output`.
            meanwhile: asks the device for what stands between input and output in its stream.
        """
        addresses = self._push(inputs)
        if self.recorded is None:
            self._ask(lambda number: submit(addresses, number))
        else:
            self.recorded.submits.append(lambda number: submit(addresses, number))
        meanwhile()
        torch.ops.zero_inference.crossing_pull(out, self.output.data_ptr(), self.done, self.stop, self.scratch)
        self._count().host_to_device_bytes += out.nbytes

    @contextlib.contextmanager
    def recording(self) -> Iterator[RecordedCalls]:
        """Within it a CUDA graph is recorded: calls are kept, for `ask_again`."""
        self.recorded = RecordedCalls()
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def ask_again(self, calls: RecordedCalls) -> None:
        """Ask the cores for the calls of a graph that is launched next."""
        for submit in calls.submits:
            self._ask(submit)
        self.transfers.host_to_device_bytes += calls.host_to_device_bytes
        self.transfers.device_to_host_bytes += calls.device_to_host_bytes
        self.transfers.cores_bytes += calls.cores_bytes

    def _ask(self, submit: Callable[[int], None]) -> None:
        self.number += 1
        submit(self.number & 0xFFFFFFFF)

    def _count(self) -> Transfers | RecordedCalls:
        """What is raised by a call now."""
        return self.transfers if self.recorded is None else self.recorded

    def _most_rows(self, task: Task, element_bytes: int) -> int:
        """Rows of a call for which there is memory, at least 1."""
        of_input = self.input.numel() // (task.columns * element_bytes)
        return max(1, min(of_input, self.output.numel() // (max(1, sum(task.widths)) * element_bytes)))

    def _push(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Bring them into host memory one behind the other, the last with the flag, and return their addresses."""
        addresses, end = [], self.input.data_ptr()
        most = end + self.input.numel()
        for place, tensor in enumerate(tensors, 1):
            nbytes = tensor.numel() * tensor.element_size()
            if end + nbytes > most:
                raise ValueError(
                    f"an input of {nbytes} bytes at {most - end} bytes from the end of the place for inputs"
                )
            flag = self.arrived if place == len(tensors) else 0
            torch.ops.zero_inference.crossing_push(tensor.contiguous(), end, flag, self.scratch)
            addresses.append(end)
            end += -(-nbytes // FLAG_BYTES) * FLAG_BYTES
            self._count().device_to_host_bytes += nbytes
        return addresses

    def _chosen_bytes(self) -> int:
        """Of all calls that were asked for: the stream is waited for, as calls that it has not come to are not counted yet."""
        if not self.chose:
            return 0
        torch.cuda.current_stream(self.scratch.device).synchronize()
        return self.cores.chosen_bytes()

    def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        torch.cuda.synchronize(self.scratch.device)
        self.transfers.settle()
        self.cores.close()


def _split(out: torch.Tensor, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
    parts, start = [], 0
    for width in widths:
        parts.append(out[start : start + rows * width].view(rows, width))
        start += rows * width
    return parts
