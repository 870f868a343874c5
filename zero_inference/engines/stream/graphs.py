"""A step of a model as CUDA graphs: one, or where weights are fetched, one up to each time that the host has to do something between.

The host asks the ring for a block before it is used, and gives its slot back behind that. Both order streams by events, and asking for a
block also queues copies, which a graph cannot hold because each step's copies run into the next step. So a recording ends
there, the ring is asked, and another recording begins; the same happens when the graphs are launched.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.engines.stream.feeder import BlockFeeder
from zero_inference.engines.stream.ring import Between
from zero_inference.errors import RunError

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Recording:
    """A step that can be repeated.

    Attributes:
        output: of the step; each repetition overwrites it.
        repeat: does the step once more.
        graphs: that it is made of.
    """

    output: torch.Tensor
    repeat: Callable[[], None]
    graphs: int


Record = Callable[[Step, BlockFeeder], Recording]


def cuda_graphs(step: Step, feeder: BlockFeeder) -> Recording:
    """Record `step` without running it; the ring does its part, as it would in the step.

    Raises:
        RuntimeError: it does something that cannot be recorded, such as waiting for the device. The next step can be computed as usual.
    """
    recorder = _Recorder()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the memory of graphs is not taken from there
    with feeder.compute.entered(), _asking(feeder, recorder.between):
        recorder.begin()
        try:
            output = step()
            recorder.end()
        except BaseException:
            recorder.abandon()
            raise
    parts = recorder.parts

    def repeat() -> None:
        with feeder.compute.entered():
            for part in parts:
                part()

    return Recording(output, repeat, recorder.graphs)


def repeated_call(step: Step, feeder: BlockFeeder) -> Recording:
    """What stands for graphs on a CPU: the same step, called again, with blocks in the same slots."""
    recorder = _Calls()
    with _asking(feeder, recorder.between):
        output = step()

    def repeat() -> None:
        recorder.place = 0
        with _asking(feeder, recorder.between):
            output.copy_(step())

    return Recording(output, repeat, len(recorder.found) + 1)


class _Calls:
    """What the ring answered in the first call of a step, and has to answer in all others."""

    def __init__(self) -> None:
        self.found: list[int | None] = []
        self.place = 0

    def between(self, call: Callable[[], Any]) -> Any:
        slot = call()
        if self.place == len(self.found):
            self.found.append(slot)
        _as_before(slot, self.found[self.place])
        self.place += 1
        return slot


class _Recorder:
    """Graphs one behind the other, which share their memory, and what the host does between them."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.graph: torch.cuda.CUDAGraph | None = None  # that is recorded
        self.parts: list[Callable[[], Any]] = []
        self.graphs = 0

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        assert self.graph is not None
        graph, self.graph = self.graph, None
        with warnings.catch_warnings():  # where the ring is asked twice in a row, there is nothing between
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self.parts.append(graph.replay)
        self.graphs += 1

    def abandon(self) -> None:
        """After an error. PyTorch, before 2.12, goes on to take a recording to be under way: `empty_cache` and random numbers fail then."""
        device, ended = torch.cuda.current_device(), self.graph is None
        with contextlib.suppress(RuntimeError):  # it is invalid
            if self.graph is not None:
                self.graph.capture_end()
                ended = True
        with contextlib.suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(device, self.pool)
        if not ended:
            with contextlib.suppress(RuntimeError):  # else its part of the pool is never given back
                torch._C._cuda_releasePool(device, self.pool)
        with contextlib.suppress(RuntimeError):
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(generator.clone_state())  # a copy is not in a recording

    def between(self, call: Callable[[], Any]) -> Any:
        self.end()
        found = call()
        self.parts.append(lambda: _as_before(call(), found))
        self.begin()
        return found


@contextlib.contextmanager
def _asking(feeder: BlockFeeder, between: Between) -> Iterator[None]:
    """Within it what the feeder asks of its ring is done by `between`."""
    feeder.between = between
    try:
        yield
    finally:
        feeder.between = None


def _as_before(slot: int | None, recorded: int | None) -> None:
    if slot != recorded:
        raise RunError(f"a block is in slot {slot}, but its graph reads slot {recorded}; use --decode-graph off.")
