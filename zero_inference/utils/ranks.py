"""The ranks of a run, its process group, and the few collectives that it needs."""

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

from zero_inference.utils.launch import read_launch

# Timeout of a collective: a prefill can take long, and utils.watch detects dead ranks.
TIMEOUT = datetime.timedelta(minutes=30)
_variables_set: list[str] = []  # by `start_process_group` where no launcher did: DeepSpeed reads them in each pass
_group_users = 0  # of the process group besides a run: a loaded model, or the program that calls this package


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run, as set by its launcher (deepspeed, torchrun or none)."""

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
        """Return the element-wise maximum of `values` over all ranks."""
        return [max(each) for each in zip(*self.gather_objects(values))]

    def minimum(self, value: float) -> float:
        return min(self.gather_objects(value))

    def total(self, value: int) -> int:
        return sum(self.gather_objects(value))

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return equally shaped `rows` [b, n] of all ranks concatenated along dim 0, in rank order, on the host."""
        if self.world_size == 1:
            return rows.cpu()
        parts = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def detect_ranks(local_rank: int | None = None) -> Ranks:
    """Return the ranks as `read_launch` does, each with its GPU if there are any. Starts nothing. Raises UsageError."""
    launch = read_launch(local_rank)
    device = torch.device("cuda", launch.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return Ranks(**launch._asdict(), device=device)


def start_process_group(ranks: Ranks) -> None:
    """Initialize torch.distributed: NCCL on CUDA, gloo on CPU. A single rank needs no port and no launcher."""
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", ranks.local_rank), ("WORLD_SIZE", ranks.world_size)):
        if name not in os.environ:
            os.environ[name] = str(value)
            _variables_set.append(name)
    where: dict = {"backend": "gloo"}
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        where = {"backend": "nccl", "device_id": ranks.device}
    if dist.is_initialized():
        return
    if ranks.world_size == 1:
        hook = sys.excepthook
        dist.init_process_group(**where, store=dist.HashStore(), rank=0, world_size=1)
        sys.excepthook = hook  # torch's prefixes each line of later tracebacks with "[rank0]:"
    else:
        dist.init_process_group(**where, timeout=TIMEOUT)


def stop_process_group() -> None:
    """Destroy the process group, unless it has another user in this process, and unset the variables that were set for it."""
    if _group_users:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    while _variables_set:  # other libraries would take them for a launcher's
        os.environ.pop(_variables_set.pop(), None)


@contextlib.contextmanager
def keep_process_group() -> Iterator[None]:
    """Keep an existing process group, the caller's, from being stopped within the block."""
    global _group_users
    existing = int(dist.is_initialized())
    _group_users += existing
    try:
        yield
    finally:
        _group_users -= existing


def hold_process_group(ranks: Ranks) -> Callable[[], None]:
    """Start the process group, if there is none, for longer than one run; return a function that releases it once."""
    global _group_users
    if dist.is_initialized() and not _group_users:
        _group_users += 1  # the caller's, which stays
    start_process_group(ranks)
    releases = contextlib.ExitStack()  # its close does nothing when called again
    releases.callback(stop_process_group)
    releases.enter_context(keep_process_group())
    return releases.close
