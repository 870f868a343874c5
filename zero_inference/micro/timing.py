"""Timing of an operation with torch.utils.benchmark, and the rates of this machine that results are compared with."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.utils.benchmark import Timer

from zero_inference.errors import UsageError
from zero_inference.hardware import bench_device
from zero_inference.hardware.spec import find_card

# Kind of product -> dtype of its operands. tf32 is float32 in memory, rounded to 10 bits of mantissa in the tensor cores.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Sizes of the products that give the matrix rate. A CPU is often fastest with matrices that fit its cache; a size is skipped if one
# product is expected to take longer than PROBE_CALL_S.
PROBE_SIZES = {"cuda": (2048, 8192), "cpu": (256, 512, 1024, 2048)}
PROBE_CALL_S = 0.2
# A call that is expected to be shorter is timed; a longer one is only predicted.
CHEAP_CALL_S = 0.5
Size = TypeVar("Size")


def median_s(action: Callable[[], object], min_run_time: float) -> float:
    """Return the median seconds of one call of `action`, by `Timer.blocked_autorange`, synchronized with the device."""
    # Timer uses one thread by default
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median


def once_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the approximate seconds of one call: the fastest of three, of fewer if a call is not cheap.

    On a GPU a further call comes first: the first of a process loads libraries, which took a second where the call took a millisecond.
    """
    if device.type == "cuda":
        action()
        torch.cuda.synchronize(device)
    calls: list[float] = []
    while len(calls) < 3 and sum(calls) < CHEAP_CALL_S:
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        calls.append(time.perf_counter() - start)
    return min(calls)


def predict_s(time_once: Callable[[Size], float], work: Callable[[Size], float], sizes: Sequence[Size]) -> float:
    """Predict the seconds of a call at the last of the ascending `sizes`: time smaller ones while they are cheap, and extrapolate in
    proportion to the `work`."""
    seconds = time_once(sizes[0])
    for smaller, size in itertools.pairwise(sizes):
        seconds *= work(size) / work(smaller)
        if seconds <= CHEAP_CALL_S:
            seconds = time_once(size)
    return seconds


@contextlib.contextmanager
def precision(kind: str) -> Iterator[None]:
    """Compute float32 products in tf32 on tensor cores, or exactly, by `kind`; restored at the end of the block."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """Return the kinds of products that `device` supports; on a GPU tf32 and bf16 need compute capability 8.0."""
    if device.type == "cpu":
        return tuple(kind for kind in DTYPES if kind != "tf32")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return ("fp32", "fp16")
    return tuple(DTYPES)


class MachineRates:
    """Rates of this machine, measured at first use, and its datasheet (`card`; None for a CPU or an unknown GPU).

    Args:
        device: of `--device`; None for the GPU if there is one, else the CPU.

    Attributes:
        best: best TFLOP/s (1e12) of this process so far by kind of product.
    """

    def __init__(self, device: str | None):
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no GPU here; use --device cpu.")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.card = find_card(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        self.best: dict[str, float] = {}

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        from zero_inference.utils.environment import describe_environment

        return f"{describe_environment()['cpu_model']}, {torch.get_num_threads()} threads"

    def best_tflops(self, kind: str, seen: float = 0.0) -> float:
        """Return `best` of the kind, `seen` and a few products of PROBE_SIZES included. So no share of it exceeds 1."""
        if kind not in self.best:
            best = 0.0
            with precision(kind):
                for size in PROBE_SIZES[self.device.type]:
                    if best and 2 * size**3 / best / 1e12 > PROBE_CALL_S:
                        break
                    best = max(best, bench_device.matmul_tflops(self.device, DTYPES[kind], size))
            self.best[kind] = best
        self.best[kind] = max(self.best[kind], seen)
        return self.best[kind]

    @functools.cached_property
    def copy_gb_per_s(self) -> float:
        """GB/s (1e9 bytes) of a copy inside the device's memory."""
        return bench_device.device_copy_gb_per_s(self.device)

    def datasheet_tflops(self, kind: str) -> float | None:
        rate = self.card.tflops.get(kind) if self.card else None
        return rate.value if rate else None
