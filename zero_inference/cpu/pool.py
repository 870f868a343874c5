"""The CPU backend's thread pool: which CPUs its threads run on, and calls of the tasks that csrc/cpu/cpu_pool.cpp runs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero_inference.cpu.library import DTYPES, INSTRUCTIONS, best_instructions, fields, require_library
from zero_inference.cpu.products import Matrix
from zero_inference.errors import RunError, UsageError
from zero_inference.utils import environment

CPUS = Path("sys/devices/system/cpu")


def choose_cpus(
    threads: int | None, numa_nodes: Sequence[int | None] = (None,), root: str = "/", allowed: set[int] | None = None
) -> list[int]:
    """Return logical CPUs for the pool's threads, one per physical core, preferably near the GPUs.

    Args:
        threads: how many; None takes all cores except one for the Python thread, near the first GPU.
        numa_nodes: NUMA node of each GPU, None for unknown. Other nodes are used only if none of these may be.
        root: root of the file system with /sys and /proc.
        allowed: CPUs that the process may use; None: its affinity.

    Raises:
        UsageError: more threads than physical cores.
    """
    cores = _physical_cores(set(numa_nodes), root, allowed)
    near_first = (cpu for cpu in cores if numa_nodes[0] is None or _node_of(cpu, Path(root)) == numa_nodes[0])
    python_core = next(near_first, cores[0])
    others = [cpu for cpu in cores if cpu != python_core]
    if threads is None:
        return others or cores
    if threads > len(cores):
        raise UsageError(
            f"--cpu-threads {threads}: this process may use {len(cores)} physical cores; use {len(cores)} or fewer "
            "(hardware threads of one core would wait for each other)."
        )
    return [python_core, *others][-threads:]  # Python's only where the others do not suffice


def _physical_cores(numa_nodes: set[int | None], root: str, allowed: set[int] | None) -> list[int]:
    """Return one allowed logical CPU per physical core of these nodes (of all nodes if none is allowed), within the cgroup's limit."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    near = {cpu for cpu in allowed if None in numa_nodes or _node_of(cpu, Path(root)) in numa_nodes}
    found: dict[tuple[str, str], int] = {}
    for cpu in sorted(near or allowed):
        topology = Path(root) / CPUS / f"cpu{cpu}" / "topology"
        core = _text(topology / "physical_package_id"), _text(topology / "core_id") or f"cpu{cpu}"
        found.setdefault(core, cpu)
    cores = list(found.values())
    limit = environment.cgroup_cores(root)
    return cores if limit is None else cores[: max(1, int(limit))]


def numa_node_of_gpu(domain: int, bus: int, device: int, root: str = "/") -> int | None:
    """Return the NUMA node of a PCI device; None where the system does not know it."""
    text = _text(Path(root) / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node")
    return int(text) if text.isdecimal() else None  # -1: unknown


def _node_of(cpu: int, root: Path) -> int | None:
    folders = (root / CPUS / f"cpu{cpu}").glob("node[0-9]*")
    return next((int(folder.name.removeprefix("node")) for folder in folders), None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


MAX_PRODUCTS = 8  # of a stage: kMaxProducts in csrc/cpu/block.cpp
# The numbers of csrc/cpu/elementwise.h and block.cpp for the names of zero_inference.models.mlp.
_ACTIVATIONS = "relu", "silu", "gelu", "gelu_tanh", "relu_squared", "gelu_sigmoid", "identity"
ACTIVATION_NUMBERS = {name: number for number, name in enumerate(_ACTIVATIONS)}
COMBINATIONS = {"none": 0, "activation": 1, "gated": 2}
FLAG_BYTES = 64  # one cache line each
DONE, STOP, ARRIVED = 0, 1, 2  # flags of a device: DeviceFlags in csrc/cpu/cpu_pool.cpp
DEVICE_FLAG_BYTES = 3 * FLAG_BYTES
# Idle threads spin this long before they sleep. A device takes less than 1 ms between two layers, Python a few ms between two tokens;
# waking a thread takes 0.05 ms.
SPIN_US = 20_000
TOO_MANY_THREADS = (
    "{} CPU threads could not be started: the limit of processes (ulimit -u, a container's pids.max) or of memory allows fewer; raise it, "
    "or lower --cpu-threads."
)


class _Stage(ctypes.Structure):
    _fields_ = [
        ("matrices", Matrix * MAX_PRODUCTS),
        ("biases", ctypes.c_void_p * MAX_PRODUCTS),
        *fields(ctypes.c_int32, "products combine activation bias_dtype"),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "task count"),
        *fields(ctypes.c_void_p, "input output"),
        ("extra", ctypes.c_int64 * 4),  # `Routing.extra`, or new tokens, positions and window of attention
    ]


class _Statistics(ctypes.Structure):
    _fields_ = fields(ctypes.c_int64, "calls busy_ns late_ns chosen_bytes")


class Routing(NamedTuple):
    """MoE routing: expert ids and weights per token (csrc/cpu/experts.cpp).

    Attributes:
        experts: int64 [tokens, k]; ~e for an expert in the device's cache and ~(e + number of experts) for one that the device
            fetches: the CPU counts these and does not read them.
        weights: [tokens, k] in float32, float16 or bfloat16.
    """

    experts: Tensor
    weights: Tensor

    def extra(self, experts_address: int, weights_address: int) -> tuple[int, ...]:
        """Return `Call.extra` for both, at these addresses in host memory."""
        return self.experts.shape[-1], experts_address, weights_address, DTYPES[self.weights.dtype]


@dataclass(frozen=True)
class Weight:
    """A weight in host memory."""

    matrix: Matrix
    bias: Tensor | None  # [rows], in the model's dtype
    nbytes: int  # that a product reads


@dataclass(frozen=True)
class Stage:
    """Products of one input, combined to outputs ("none"), f(first) ("activation") or f(first) * second ("gated")."""

    weights: Sequence[Weight]
    combine: str = "none"
    activation: str = "identity"


@dataclass(frozen=True)
class Task:
    """A block that the pool can compute."""

    number: int
    columns: int  # of the input
    widths: tuple[int, ...]  # of each output
    nbytes: int  # that a call reads; 0 where routing decides, which `CpuPool.chosen_bytes` counts


class CpuPool:
    """Threads that multiply weights in host memory.

    Args:
        cpus: a logical CPU for each thread; -1 does not bind it.
        spin_us: microseconds that idle threads spin before they sleep.
        flags: uint8 [devices * `DEVICE_FLAG_BYTES`], page-locked, for calls in the order of CUDA streams; None for synchronous calls.
        instructions: one of `INSTRUCTIONS`, or "auto" for the best supported.

    Raises RuntimeError without the library, RunError if the system allows fewer threads.
    """

    def __init__(self, cpus: Sequence[int], spin_us: int, flags: Tensor | None = None, instructions: str = "auto"):
        self.library = require_library()
        self.threads = len(cpus)
        self.instructions = best_instructions() if instructions == "auto" else instructions
        self.flags, self.devices = flags, 0 if flags is None else flags.numel() // DEVICE_FLAG_BYTES
        self.handle = self.library.zero_inference_cpu_pool_new(
            (ctypes.c_int32 * len(cpus))(*cpus),
            len(cpus),
            spin_us,
            None if flags is None else flags.data_ptr(),
            self.devices,
        )
        if not self.handle:
            raise RunError(TOO_MANY_THREADS.format(self.threads))
        self.references: list[Tensor] = []  # memory that tasks point to

    def add_block(self, stages: Sequence[Stage], dtype: torch.dtype) -> Task:
        """Add a block of products whose last stage gives the outputs; `dtype` is that of input and outputs."""
        filled = (_Stage * len(stages))()
        for to, stage in zip(filled, stages):
            for index, weight in enumerate(stage.weights):
                to.matrices[index] = weight.matrix
                if weight.bias is not None:
                    to.biases[index] = weight.bias.data_ptr()
                    to.bias_dtype = DTYPES[weight.bias.dtype]
                    self.references.append(weight.bias)
            to.products = len(stage.weights)
            to.combine = COMBINATIONS[stage.combine]
            to.activation = ACTIVATION_NUMBERS[stage.activation]
        number = self.library.zero_inference_cpu_pool_add_block(
            self.handle, filled, len(stages), DTYPES[dtype], INSTRUCTIONS.index(self.instructions)
        )
        return Task(
            number,
            stages[0].weights[0].matrix.columns,
            tuple(weight.matrix.rows for weight in stages[-1].weights),
            sum(weight.nbytes for stage in stages for weight in stage.weights),
        )

    def reserve(self, task: Task, rows: int, chosen: int = 0) -> None:
        """Allocate scratch memory for calls of `rows` rows with `chosen` experts per row, after all submitted calls. Raises RunError
        without memory."""
        call = Call(task.number, rows, None, None, (chosen,))
        if self.library.zero_inference_cpu_pool_reserve(self.handle, ctypes.byref(call)):
            raise _no_memory(rows)

    def run(self, task: Task, x: Tensor, out: Tensor, routing: Routing | None = None) -> None:
        """Compute `out` from `x` [rows, columns] synchronously; all contiguous on the CPU. Raises RunError without memory."""
        extra = () if routing is None else routing.extra(*(tensor.data_ptr() for tensor in routing))
        call = Call(task.number, x.shape[0], x.data_ptr(), out.data_ptr(), extra)
        if self.library.zero_inference_cpu_pool_run(self.handle, ctypes.byref(call)):
            raise _no_memory(x.shape[0])

    def submit(
        self,
        task: Task,
        rows: int,
        source: int,
        target: int,
        number: int,
        extra: tuple[int, ...] = (),
        device: int = 0,
    ) -> None:
        """Queue a call of `rows` rows after all earlier ones; it starts when the flag `ARRIVED` of `device` reaches `number`.

        `source` and `target` are addresses in host memory, `extra` is `Call.extra`.
        """
        self.submit_call(Call(task.number, rows, source, target, extra), number, device)

    def submit_call(self, call: Call, number: int, device: int) -> None:
        self.library.zero_inference_cpu_pool_submit(self.handle, ctypes.byref(call), device, number)

    def busy_s(self) -> float:
        return self._statistics().busy_ns / 1e9

    def chosen_bytes(self) -> int:
        """Return the bytes of weights that calls with a `Routing` have read so far."""
        return self._statistics().chosen_bytes

    def _statistics(self) -> _Statistics:
        found = _Statistics()
        self.library.zero_inference_cpu_pool_statistics(self.handle, ctypes.byref(found))
        return found

    def close(self) -> None:
        """End the threads; safe to call twice."""
        if self.handle is not None:
            self.library.zero_inference_cpu_pool_delete(self.handle)
            self.handle = None
            self.references.clear()


def _no_memory(rows: int) -> RunError:
    return RunError(f"not enough host memory for {rows} rows in CPU products; use --cpu-compute off.")
