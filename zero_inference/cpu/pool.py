"""Which cores multiply: physical ones near the GPUs of the ranks, less one for the Python of each, of what this process may use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, best_instructions, require_library
from zero_inference.cpu.products import Matrix
from zero_inference.errors import RunError, UsageError
from zero_inference.utils import environment

CPUS = Path("sys/devices/system/cpu")


def choose_cpus(
    asked: int | None, numa_nodes: Sequence[int | None] = (None,), root: str = "/", allowed: set[int] | None = None
) -> list[int]:
    """Logical CPUs for the threads of a host, one of each physical core.

    Args:
        asked: threads; None takes all of the cores but one for the Python of each rank.
        numa_nodes: where the GPU of each rank is, None for one that is near no node: take the cores of these nodes only, if this
            process may use any of them.
        root: where the system's files are looked for.
        allowed: CPUs that the process may use; its affinity where not given.

    Raises:
        UsageError: more threads than cores were asked for.
    """
    cores = _cores_near(set(numa_nodes), root, allowed)
    of_python: list[int] = []
    for node in numa_nodes:
        free = [cpu for cpu in cores if cpu not in of_python]
        of_python += [cpu for cpu in free if node is None or _node_of(cpu, Path(root)) == node][:1] or free[:1]
    others = [cpu for cpu in cores if cpu not in of_python]
    if asked is None:
        return others or cores
    if asked > len(cores):
        raise UsageError(
            f"--cpu-threads {asked}: this process may use {len(cores)} physical cores; use {len(cores)} or fewer "
            "(hardware threads of one core would wait for each other)."
        )
    return (of_python + others)[-asked:]


def choose_rank_cpus(
    numa_node: int | None,
    local_rank: int,
    local_world_size: int,
    root: str = "/",
    allowed: set[int] | None = None,
) -> list[int]:
    """The same for the threads of one rank, where each of a host takes an equal share of the cores: all of it but one."""
    cores = _cores_near({numa_node}, root, allowed)
    count = len(cores) // local_world_size
    mine = cores[local_rank * count : (local_rank + 1) * count] or cores[:1]
    return mine[1:] or mine


def _cores_near(numa_nodes: set[int | None], root: str, allowed: set[int] | None) -> list[int]:
    """A logical CPU of each physical core of these nodes that this process may use, or of any where it may use none of them."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    near = {cpu for cpu in allowed if None in numa_nodes or _node_of(cpu, Path(root)) in numa_nodes}
    cores = _one_of_each_core(near or allowed, Path(root))
    granted = environment.cgroup_cores(root)
    return cores if granted is None else cores[: max(1, int(granted))]


def numa_node_of_gpu(domain: int, bus: int, device: int, root: str = "/") -> int | None:
    """The NUMA node of a PCI device; None where the system does not say."""
    try:
        text = (Path(root) / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _one_of_each_core(cpus: set[int], root: Path) -> list[int]:
    found: dict[tuple[str, str], int] = {}
    for cpu in sorted(cpus):
        topology = root / CPUS / f"cpu{cpu}" / "topology"
        core = (_text(topology / "physical_package_id"), _text(topology / "core_id") or f"cpu{cpu}")
        found.setdefault(core, cpu)
    return list(found.values())


def _node_of(cpu: int, root: Path) -> int | None:
    for folder in (root / CPUS / f"cpu{cpu}").glob("node[0-9]*"):
        return int(folder.name.removeprefix("node"))
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class Routing(NamedTuple):
    """What each row of an input chose of a task with experts (csrc/cpu/experts.h).

    Attributes:
        experts: their numbers, int64 [rows, k]; ~e for one that the device has and ~(e + experts) for one that it
            fetches, which the CPU counts and does not read.
        weights: of them, [rows, k] in float32, float16 or bfloat16.
    """

    experts: torch.Tensor
    weights: torch.Tensor

    def extra(self, experts: int, weights: int) -> tuple[int, ...]:
        """For a call that finds both at these addresses."""
        return self.experts.shape[-1], experts, weights, DTYPES[self.weights.dtype]


MOST_PRODUCTS = 8  # of a stage: kMostProducts in csrc/cpu/block.h
# Of csrc/cpu/block.h, as zero_inference.models.mlp names them.
ACTIVATION_NUMBERS = {
    "relu": 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu_squared": 4,
    "gelu_sigmoid": 5,
    "identity": 6,
}
COMBINATIONS = {"none": 0, "activation": 1, "gated": 2}
FLAG_BYTES = 64  # a cache line for each
DONE, STOP, ARRIVED, FLAGS = 0, 1, 2, 3  # of one rank; further ones have their ARRIVED behind it
# How long the threads watch for the next call before they sleep. Between two layers a device takes less than a millisecond, between
# two tokens Python a few; waking takes a twentieth of one.
SPIN_US = 20_000
TOO_MANY_THREADS = (
    "{} CPU threads could not be started: the limit of processes (ulimit -u, a container's pids.max) or of memory allows fewer; raise "
    "it, or lower --cpu-threads."
)


class _Stage(ctypes.Structure):
    _fields_ = [
        ("matrices", Matrix * MOST_PRODUCTS),
        ("biases", ctypes.c_void_p * MOST_PRODUCTS),
        ("products", ctypes.c_int32),
        ("combine", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("task", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("extra", ctypes.c_int64 * 4),
    ]


class _Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("calls", "busy_ns", "late_ns", "chosen_bytes")]


@dataclass(frozen=True)
class Weight:
    """A weight in host memory as the cores read it.

    Attributes:
        matrix: where it lies.
        bias: in host memory, [rows], in the model's dtype; or None.
        nbytes: of what is read for a product.
    """

    matrix: Matrix
    bias: torch.Tensor | None
    nbytes: int


@dataclass(frozen=True)
class Stage:
    """Products of one input, and what is made of them: outputs ("none"), f(first) ("activation") or f(first) x second ("gated")."""

    weights: Sequence[Weight]
    combine: str = "none"
    activation: str = "identity"


@dataclass(frozen=True)
class Task:
    """A block that the cores know.

    Attributes:
        columns: of an input row.
        widths: columns of each output.
        nbytes: of the weights that a call reads; 0 where its input decides that, and the cores count them (`Cores.chosen_bytes`).
    """

    number: int
    columns: int
    widths: tuple[int, ...]
    nbytes: int


class CpuPool:
    """Threads on `cpus`, one each, that work together.

    Args:
        cpus: numbers of logical CPUs; -1 leaves a thread where the system puts it.
        spin_us: microseconds that threads watch for the next call before they sleep.
        flags: uint8 [`flag_bytes(ranks)`], page-locked, for calls in the order of a stream; None for calls at once.
        instructions: one of `INSTRUCTIONS`, or "auto" for the best that the CPU has.
        ranks: that a call in the order of streams is made for: of each as many rows, one behind the other.
        library: another build of the kernels, to compare them.

    Raises:
        RuntimeError: the library is not there.
        RunError: the system allows fewer threads.
    """

    def __init__(
        self,
        cpus: Sequence[int],
        spin_us: int,
        flags: torch.Tensor | None = None,
        instructions: str = "auto",
        ranks: int = 1,
        library: ctypes.CDLL | None = None,
    ):
        self.library = library or require_library()
        self.threads = len(cpus)
        self.instructions = best_instructions() if instructions == "auto" else instructions
        self.flags, self.ranks = flags, ranks
        self.handle = self.library.zero_inference_cores_new(
            (ctypes.c_int32 * len(cpus))(*cpus), len(cpus), spin_us, None if flags is None else flags.data_ptr(), ranks
        )
        if not self.handle:
            raise RunError(TOO_MANY_THREADS.format(self.threads))
        self.kept: list[torch.Tensor] = []  # memory that tasks point to

    def add_block(self, stages: Sequence[Stage], dtype: torch.dtype) -> Task:
        """A block of products; the last stage makes the outputs.

        Args:
            dtype: of input and outputs.
        """
        filled = (_Stage * len(stages))()
        for to, stage in zip(filled, stages):
            for index, weight in enumerate(stage.weights):
                to.matrices[index] = weight.matrix
                if weight.bias is not None:
                    to.biases[index] = weight.bias.data_ptr()
                    to.bias_dtype = DTYPES[weight.bias.dtype]
                    self.kept.append(weight.bias)
            to.products = len(stage.weights)
            to.combine = COMBINATIONS[stage.combine]
            to.activation = ACTIVATION_NUMBERS[stage.activation]
        number = self.library.zero_inference_cores_add_block(
            self.handle, filled, len(stages), DTYPES[dtype], INSTRUCTIONS.index(self.instructions)
        )
        return Task(
            number,
            stages[0].weights[0].matrix.columns,
            tuple(weight.matrix.rows for weight in stages[-1].weights),
            sum(weight.nbytes for stage in stages for weight in stage.weights),
        )

    def reserve(self, task: Task, rows: int, chosen: int = 0) -> None:
        """Take the memory that calls of `rows` rows of each rank need, each of which chooses `chosen` experts. Raises RunError where
        there is none."""
        call = Call(task.number, rows * self.ranks, None, None, (chosen,))
        if self.library.zero_inference_cores_reserve(self.handle, ctypes.byref(call)):
            raise RunError(f"not enough host memory for {rows} rows on the cores; use --cpu-compute off.")

    def run(self, task: Task, x: torch.Tensor, out: torch.Tensor, choice: Routing | None = None) -> None:
        """At once: `x` [rows, columns], `out` and `choice`, contiguous, in host memory. Raises RunError without memory."""
        extra = () if choice is None else choice.extra(*(tensor.data_ptr() for tensor in choice))
        call = Call(task.number, x.shape[0], x.data_ptr(), out.data_ptr(), extra)
        if self.library.zero_inference_cores_run(self.handle, ctypes.byref(call)):
            raise RunError(f"not enough host memory for {x.shape[0]} rows on the cores; use --cpu-compute off.")

    def submit(self, task: Task, rows: int, source: int, target: int, number: int, extra: tuple[int, ...] = ()) -> None:
        """For the moment when the flag `ARRIVED` of each rank has `number`; `rows` are those of one. `source`, `target` and those of
        `extra` are addresses in host memory."""
        call = Call(task.number, rows * self.ranks, source, target, extra)
        self.library.zero_inference_cores_submit(self.handle, ctypes.byref(call), number)

    def busy_s(self) -> float:
        """Seconds that the threads have worked so far."""
        return self._statistics().busy_ns / 1e9

    def chosen_bytes(self) -> int:
        """Bytes of weights that were read so far by calls with a `Routing`."""
        return self._statistics().chosen_bytes

    def _statistics(self) -> _Statistics:
        found = _Statistics()
        self.library.zero_inference_cores_statistics(self.handle, ctypes.byref(found))
        return found

    def close(self) -> None:
        """End the threads; safe to call twice."""
        if self.handle is not None:
            self.library.zero_inference_cores_delete(self.handle)
            self.handle = None
            self.kept.clear()


class CpuPoolProxy(CpuPool):
    """What the other ranks of a host have in place of the `CpuPool` of its first one: tasks with the same numbers, and no threads.
    Each adds the same tasks and makes the same calls; that the first rank asks for them is enough."""

    def __init__(self, ranks: int):
        super().__init__((-1,), 0, ranks=ranks)

    def reserve(self, task: Task, rows: int, chosen: int = 0) -> None:
        """Nothing: no call is made here."""

    def submit(self, task: Task, rows: int, source: int, target: int, number: int, extra: tuple[int, ...] = ()) -> None:
        """Nothing: the first rank does."""


def flag_bytes(ranks: int) -> int:
    """Of the flags of so many ranks."""
    return (ARRIVED + ranks) * FLAG_BYTES
