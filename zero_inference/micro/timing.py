"""One way to time an operation, for every micro-benchmark, and the rates of this machine that figures are held against."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.utils.benchmark import Timer

from zero_inference.errors import UsageError
from zero_inference.link import compute
from zero_inference.micro.cards import Card, find_card

# How a product is computed -> the dtype of its operands. tf32 is float32 in memory, rounded to 10 bits of mantissa in the tensor
# cores.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def median_s(action: Callable[[], object], min_run_time: float) -> float:
    """Median seconds of one call of `action`, by torch's `Timer.blocked_autorange`: synchronised with the device, with as many
    threads as torch uses, in blocks so long that the clock's own cost is below a thousandth.

    Args:
        min_run_time: seconds to go on for; the first, unmeasured calls come on top.
    """
    # Timer would time one thread where not told otherwise
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median


def choose_device(name: str | None) -> torch.device:
    """The device that `--device` names, or the GPU where there is one and the CPU where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; use --device cpu.")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from zero_inference.environment import describe_environment

    return f"{describe_environment()['cpu_model']}, {torch.get_num_threads()} threads"


def card_of(device: torch.device) -> Card | None:
    return find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@contextlib.contextmanager
def precision(kind: str) -> Iterator[None]:
    """float32 products as `kind` says: in tf32 on tensor cores, or exactly; put back at the end."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """The kinds of products that `device` has: tf32 is one of GPUs from compute capability 8.0 on, bf16 too on a GPU."""
    if device.type == "cpu":
        return tuple(kind for kind in DTYPES if kind != "tf32")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return ("fp32", "fp16")
    return tuple(DTYPES)


class MachineRates:
    """What this machine reaches, measured when first asked for, and what its datasheet says, where there is one."""

    def __init__(self, device: torch.device):
        self.device, self.card = device, card_of(device)

    @functools.cache
    def matmul_tflops(self, kind: str) -> float:
        """TFLOP/s (1e12) of one large product, see `link.compute.matmul_tflops`."""
        with precision(kind):
            return compute.matmul_tflops(self.device, DTYPES[kind])

    @functools.cache
    def copy_gbps(self) -> float:
        """GB/s (1e9 bytes) of a copy inside the device's memory, see `link.compute.device_copy_gbps`."""
        return compute.device_copy_gbps(self.device)

    def datasheet_tflops(self, kind: str) -> float | None:
        rate = self.card.tflops.get(kind) if self.card else None
        return rate.value if rate else None

    def datasheet_gbps(self) -> float | None:
        return self.card.memory.value if self.card else None


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate, on the device or on the host (where it says so in words alone)."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error) or "can't allocate memory" in str(error)
