"""Ranks: who this process is among its peers, and the few collectives the measuring needs."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero_inference.errors import UsageError

MOST_RANKS = 1 << 20
HOW_TO_LAUNCH = "start with deepspeed or torchrun, or unset it to run one process"
TIMEOUT = datetime.timedelta(
    minutes=30
)  # of a collective: a prefill can take long, and a rank that is gone is noticed elsewhere
_variables: list[str] = []  # of the environment, that DeepSpeed reads in each pass, and that no launcher has set
_users = 0  # of the process group, that are no run: a loaded model, or the program that calls this package


@dataclass(frozen=True)
class Ranks:
    """This process among all of a run, as its launcher (deepspeed, torchrun or none) said."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    def maximum(self, values: list[float]) -> list[float]:
        """Element-wise maximum of `values` over all ranks."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def minimum(self, value: float) -> float:
        """The least `value` of all ranks."""
        return -self.maximum([-value])[0]

    def total(self, value: int) -> int:
        """Sum of `value` over all ranks."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor)
        return int(tensor.item())

    def free_device_bytes(self, agreed: bool = False) -> int | None:
        """Free memory of this rank's device, None where nothing limits it (a CPU).

        Args:
            agreed: the least of all ranks; a collective, for what all of them have to decide alike.
        """
        free = device_free_bytes(self.device)
        return int(self.minimum(free)) if agreed and free is not None else free

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Concatenate equally shaped `rows` [b, n] of all ranks along dim 0, in rank order, on the host."""
        if self.world_size == 1:
            return rows.cpu()
        parts = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. Anything that pickles."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def device_free_bytes(device: torch.device) -> int | None:
    """Bytes that CUDA says are free on `device`, None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def detect_ranks(local_rank: int | None = None) -> Ranks:
    """Read the launcher's environment. Starts nothing.

    Args:
        local_rank: what `--local_rank` said; the environment's LOCAL_RANK wins over it.

    Raises:
        UsageError: what it says cannot be.
    """
    world = _launched("WORLD_SIZE", 1, least=1, most=MOST_RANKS)
    # torchrun's name, then the deepspeed launcher's
    node = next(
        (_launched(name, world, 1, world) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in os.environ), world
    )
    rank = _launched("RANK", 0, 0, world - 1)
    if local_rank is not None and local_rank >= node:
        raise UsageError(
            f"--local_rank {local_rank}: there are {node} processes on this node; leave it to the launcher."
        )
    local = _launched("LOCAL_RANK", max(local_rank or 0, 0), 0, node - 1)
    if world > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UsageError(f"WORLD_SIZE is {world} and {name} is not set; {HOW_TO_LAUNCH}.")
        _launched("MASTER_PORT", 0, 1, 65535)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
    return Ranks(rank=rank, world_size=world, local_rank=local, local_world_size=node, device=device)


def _launched(name: str, default: int, least: int, most: int) -> int:
    """A number from the launcher's environment."""
    text = os.environ.get(name, str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not least <= value <= most:
        raise UsageError(
            f"the environment has {name}={text[:40]!r}, and it must be a number from {least} to {most}; "
            f"{HOW_TO_LAUNCH}."
        )
    return value


def start_process_group(ranks: Ranks) -> None:
    """Initialise torch.distributed: NCCL on CUDA, gloo on CPU. A single rank needs no port and no launcher."""
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", ranks.local_rank), ("WORLD_SIZE", ranks.world_size)):
        if name not in os.environ:
            os.environ[name] = str(value)
            _variables.append(name)
    where: dict = {"backend": "gloo"}
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        where = {"backend": "nccl", "device_id": ranks.device}
    if dist.is_initialized():
        return
    if ranks.world_size == 1:
        hook = sys.excepthook
        dist.init_process_group(**where, store=dist.HashStore(), rank=0, world_size=1)
        sys.excepthook = hook  # torch's says "[rank0]:" before each line of a traceback, for ever
    else:
        dist.init_process_group(**where, timeout=TIMEOUT)


def new_process_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """A process group of all ranks with its own communicator, whose order of calls is nobody else's; None for one rank.

    Both communicators are there when it returns, with the device memory that NCCL takes for them.
    """
    if ranks.world_size == 1:
        return None
    group = dist.new_group(timeout=TIMEOUT)
    for communicator in (None, group):
        dist.barrier(group=communicator)
    return group


def stop_process_group() -> None:
    """Leave the process group, unless somebody else in this process uses it. Variables that were set for it go with it: other libraries
    would take them for a launcher's."""
    if _users:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    while _variables:
        os.environ.pop(_variables.pop(), None)


@contextlib.contextmanager
def keep_process_group() -> Iterator[None]:
    """Within it a process group that is there already is not stopped: it is the caller's."""
    global _users
    kept = int(dist.is_initialized())
    _users += kept
    try:
        yield
    finally:
        _users -= kept


def hold_process_group(ranks: Ranks) -> Callable[[], None]:
    """Start the process group, if it is not there, for longer than one run; returns what lets go of it."""
    global _users
    if dist.is_initialized() and not _users:
        _users += 1  # the caller's own, which stays
    start_process_group(ranks)
    _users += 1
    held = [True]

    def release() -> None:
        global _users
        if held.pop() if held else False:
            _users -= 1
            stop_process_group()

    return release
