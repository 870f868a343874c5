"""Timing of an operation with torch.utils.benchmark, and the rates of this machine that results are compared with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.benchmark import Timer

from zero_inference.errors import UsageError
from zero_inference.hardware import bench_device
from zero_inference.hardware.spec import Card, find_card

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
    """Return the median seconds of one call of `action`, by `Timer.blocked_autorange`, synchronized with the device.

    Args:
        min_run_time: seconds to measure for, after the first, unmeasured calls.
    """
    # Timer uses one thread by default
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median


def once_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the approximate seconds of one call of `action`: the fastest of three, as the first may allocate memory and choose an
    algorithm; of fewer if a call is not cheap.

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


def predicted_s(time_once: Callable[[Size], float], work: Callable[[Size], float], sizes: Sequence[Size]) -> float:
    """Predict the seconds of a call at the last of `sizes`, so that an endless measurement is not begun.

    Times ascending sizes while the next call is expected to be cheap, and extrapolates from there in proportion to the work.

    Args:
        time_once: returns the seconds of a call at a size.
        work: returns the operations of a call at a size.
        sizes: ascending; the first is always timed.
    """
    at, spent = sizes[0], time_once(sizes[0])
    for size in sizes[1:]:
        expected = spent * work(size) / work(at)
        if expected > CHEAP_CALL_S:
            break
        at, spent = size, time_once(size)
    return spent * work(sizes[-1]) / work(at)


def too_long(seconds: float, longest_call_s: float, what: str) -> str | None:
    """Return why a size is skipped, if one call is expected to take longer than the user allows; else None."""
    if seconds <= longest_call_s:
        return None
    return f"{what} is expected to take {seconds:.1f} s, longer than --longest-call {longest_call_s:g}"


def choose_device(name: str | None) -> torch.device:
    """Return the device of `--device`; by default the GPU if there is one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; use --device cpu.")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from zero_inference.utils.environment import describe_environment

    return f"{describe_environment()['cpu_model']}, {torch.get_num_threads()} threads"


def card_of(device: torch.device) -> Card | None:
    return find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


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
    """Rates of this machine, measured at first use, and those of its datasheet, if there is one.

    Args:
        matmul_tflops, copy_gb_per_s: known rates, by kind of product, which are not measured.
        card: datasheet; that of `device` by default.
    """

    def __init__(
        self,
        device: torch.device,
        matmul_tflops: Mapping[str, float] | None = None,
        copy_gb_per_s: float | None = None,
        card: Card | None = None,
    ):
        self.device, self.card = device, card or card_of(device)
        self._best: dict[str, float] = {}
        self._probed = dict(matmul_tflops or {})
        self._copy = copy_gb_per_s

    def matmul_tflops(self, kind: str) -> float:
        """Return TFLOP/s (1e12) of the best of a few products (`PROBE_SIZES`), see `hardware.bench_device.matmul_tflops`."""
        if kind in self._probed:
            return self._probed[kind]
        best = 0.0
        with precision(kind):
            for size in PROBE_SIZES[self.device.type]:
                if best and 2 * size**3 / best / 1e12 > PROBE_CALL_S:
                    break
                best = max(best, bench_device.matmul_tflops(self.device, DTYPES[kind], size))
        self._probed[kind] = best
        return best

    def best_tflops(self, kind: str, seen: float = 0.0) -> float:
        """Return the best TFLOP/s (1e12) of this process: of the first products and every `seen` so far. So no share of it exceeds 1."""
        self._best[kind] = max(self._best.get(kind) or self.matmul_tflops(kind), seen)
        return self._best[kind]

    def copy_gb_per_s(self) -> float:
        """Return GB/s (1e9 bytes) of a copy inside the device's memory, see `hardware.bench_device.device_copy_gb_per_s`."""
        if self._copy is None:
            self._copy = bench_device.device_copy_gb_per_s(self.device)
        return self._copy

    def datasheet_tflops(self, kind: str) -> float | None:
        rate = self.card.tflops.get(kind) if self.card else None
        return rate.value if rate else None

    def datasheet_gb_per_s(self) -> float | None:
        return self.card.memory.value if self.card else None


def measure_row(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return `row` with the values of `measure`, or with an `error` if memory was not sufficient."""
    try:
        return row | measure()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return row | {"error": "out of memory"}


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch could not allocate, on the device or on the host (by the error's message)."""
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "not enough memory" in str(error)
        or "can't allocate memory" in str(error)
    )
