"""What this machine allows a decode step to take: measured rates, counted bytes and operations, and the share reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_inference.config import RunConfig
from zero_inference.engines.base import Job
from zero_inference.engines.stream.timeline import LinkUse, Timeline
from zero_inference.errors import RunError
from zero_inference.link.compute import device_copy_gb_per_s, matmul_tflops
from zero_inference.link.copy import Rate, blocks_of, host_to_device_rounds, rate_of
from zero_inference.link.disk import disk_read_gb_per_s
from zero_inference.models.spec import ModelSpec
from zero_inference.runtime.distributed import Ranks


@dataclass(frozen=True)
class Rates:
    """Measured in this process. `link_gbps` adds up all ranks at once, `disk_gbps` all nodes; the others are one device's.

    GB/s of 1e9 bytes, TFLOP/s of 1e12; `device_copy_gbps` counts bytes read and bytes written. `link_from` says whether `link_gbps` is that
    of "rounds" of copies made for the purpose, or of the "loops"' own copies, which were faster then. `link_spread` is how far the
    rounds lay apart, as a share of `link_gbps` (see `link.copy.Rate`). None: does not apply, or the device had no memory left to
    measure it.
    """

    link_gbps: float
    link_spread: float
    link_kind: str
    device_copy_gbps: float | None
    matmul_tflops: float | None
    disk_gbps: float | None
    link_from: str = "rounds"


@dataclass(frozen=True)
class LeastWork:
    """What one device cannot avoid in a decode step: bytes of its memory, and floating-point operations."""

    device_bytes: int
    flops: int


LEAST_BUSY = 0.98  # of the time, for a link that is hardly ever idle


class LinkRate:
    """The links of all ranks, measured at the same time and as often as asked; all rounds together give the rate.

    A rate changes while nothing of this process does: without any engine two GPUs copied at 55.0 and then at 53.6 GB/s each within a
    minute (benchmarks/results/h200-x2/gather_speed.txt). From before the loops alone it can be one that they exceed or never had.
    It also depends on where the source lies; so `sources`, page-locked tensors (uint8 [bytes]) that the engine itself copies from,
    are what is copied, as far as there are any.
    """

    def __init__(self, ranks: Ranks, sources: Sequence[torch.Tensor] = ()):
        self.ranks = ranks
        self.sources = blocks_of(sources, ranks.device)
        self.rounds: list[float] = []

    def measure(self, seconds: float) -> None:
        """Add the rounds of about so many seconds. All ranks call it together.

        Raises:
            torch.OutOfMemoryError, RunError: the first measurement found no memory, or none that may be page-locked. Later ones,
                between loops that are measured already, are left out then.
        """
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)  # an engine may still be filling its buffers
        self.ranks.barrier()
        try:
            self.rounds += host_to_device_rounds(self.ranks.device, pinned=True, seconds=seconds, sources=self.sources)
        except (torch.OutOfMemoryError, RunError):  # no space left on the device, or none that may be page-locked
            if not self.rounds:
                raise

    def of_all(self) -> Rate:
        """The sum over the ranks, which call it together."""
        return Rate(*(self.ranks.total(int(value * 1e6)) / 1e6 for value in rate_of(self.rounds)))


class AroundLoops:
    """Called before each measured loop and behind the last: the link is measured there, in the minutes in which the loops run, the
    rate of the loop's own copies is read, and the peak of device memory, which that measurement must not raise.

    Attributes:
        peak_gpu_bytes: most device memory of this rank during the loops; None without a device.
        uses: what this rank's link did in each loop; empty for an engine that does not watch it, and for loops of fewer than two decode steps.
    """

    def __init__(self, link: LinkRate, timeline: Timeline | None = None):
        self.link, self.device, self.timeline = link, link.ranks.device, timeline
        self.on_gpu = self.device.type == "cuda"
        self.peak_gpu_bytes = 0 if self.on_gpu else None
        self.uses: list[LinkUse] = []
        self.begun = False

    def __call__(self) -> None:
        if self.begun:
            self._look_back()
        self.begun = True
        if self.on_gpu:
            self.link.measure(seconds=0.2)
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def reached_gb_per_s(self) -> float:
        """GB/s (1e9 bytes) of this rank's own copies, the median of the loops in which its link was hardly ever idle, as the links of all ranks
        have to be for their sum to be what all can do at once; 0 where there is none."""
        return statistics.median([use.gb_per_s_while_busy for use in self.uses if use.busy_share > LEAST_BUSY] or [0.0])

    @property
    def ahead_bytes(self) -> int:
        """What this rank had copied of a loop's decode steps before the first of them, the median of the loops."""
        return int(statistics.median([use.ahead_bytes for use in self.uses] or [0]))

    @property
    def last_use(self) -> dict[str, float] | None:
        """The record's `link_use`: what this rank's link did in the last loop; None where nobody watched."""
        return vars(self.uses[-1]) | {"gbps_while_busy": self.uses[-1].gb_per_s_while_busy} if self.uses else None

    def _look_back(self) -> None:
        use = self.timeline.link_use() if self.timeline is not None else None
        if use is not None:
            self.uses.append(use)
        if self.on_gpu:
            self.peak_gpu_bytes = max(self.peak_gpu_bytes, torch.cuda.max_memory_allocated(self.device))


def measure_rates(config: RunConfig, spec: ModelSpec, ranks: Ranks, link: LinkRate, weight_bytes: int) -> Rates:
    """About a second on a GPU, a quarter without one, and more for a disk.

    All ranks copy at the same time, as they do while they run; so do all nodes read, each a file as large as all weights
    if `disk_read_gb_per_s` takes one of that size.
    """
    on_gpu = ranks.device.type == "cuda"
    link.measure(seconds=0.4 if on_gpu else 0.1)
    rate = link.of_all()
    return Rates(
        link_gbps=rate.gb_per_s,
        link_spread=rate.spread_gb_per_s / rate.gb_per_s,
        link_kind="host to device, pinned" if on_gpu else "host memory copy",
        device_copy_gbps=(
            _if_there_is_room(lambda: device_copy_gb_per_s(ranks.device))
            if on_gpu
            else 2 * rate.gb_per_s / ranks.world_size
        ),
        matmul_tflops=_if_there_is_room(
            lambda: matmul_tflops(ranks.device, spec.dtype, seconds=0.1 if on_gpu else 0.05)
        ),
        disk_gbps=_disks_gbps(config, ranks, weight_bytes) if config.disk_offload else None,
    )


def with_link(rates: Rates, link: LinkRate, reached_gb_per_s: float = 0.0) -> Rates:
    """`rates` with the link's rate of all rounds so far. All ranks call it together.

    Args:
        reached_gb_per_s: that of this rank's own copies in the loops, 0 if it is not known. Where all ranks' together are more than that of the
            rounds, the link can do that: others may use the host in just the moments between the loops.
    """
    rate = link.of_all()
    unknown = link.ranks.maximum([float(not reached_gb_per_s)])[0]
    in_loops = 0.0 if unknown else link.ranks.total(int(reached_gb_per_s * 1e6)) / 1e6
    faster, came_from = max((rate.gb_per_s, "rounds"), (in_loops, "loops"))
    return replace(rates, link_gbps=faster, link_from=came_from, link_spread=rate.spread_gb_per_s / faster)


def _disks_gbps(config: RunConfig, ranks: Ranks, weight_bytes: int) -> float | None:
    """The disks of all nodes together, each measured by its node's first rank; None where one of them cannot be measured."""
    ranks.barrier()
    try:
        mine = disk_read_gb_per_s(config.offload_path, weight_bytes) if ranks.local_rank == 0 else 0.0
    except RunError:  # the run itself has what it needs
        mine = None
    unknown = ranks.maximum([float(mine is None)])[0]
    total = ranks.total(int((mine or 0.0) * 1e6)) / 1e6
    return None if unknown else total


def _if_there_is_room(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except torch.OutOfMemoryError:  # what was measured for the model itself still stands
        return None


def least_work(job: Job, weight_bytes: int) -> LeastWork:
    """Each active weight read once as stored, keys and values read once at their mean length; 2 operations a weight and sequence.

    Of experts only as many count as one token uses; an embedding table that is not the head counts as nothing. What is idle is
    taken off at its unquantized size, which an engine may not exceed: the bound errs to the low side.
    """
    sizes, config = job.sizes, job.config
    active = sizes.parameters - sizes.idle_parameters
    kv = job.kv_bytes(config.prompt_len + config.gen_len // 2)
    return LeastWork(device_bytes=max(0, weight_bytes - sizes.idle_bytes) + kv, flops=2 * active * job.rank_batch)


def decode_limits(
    rates: Rates,
    moved: dict[str, int | None],
    ahead_bytes: int,
    work: LeastWork,
    on_gpu: bool,
    steps: int,
    decode_s: float,
) -> dict[str, Any]:
    """The record's `limit`: the rates, the least time of a step by each of them, which one binds, and the share reached.

    Args:
        moved: bytes that crossed link and disk in a step, counted over all ranks.
        ahead_bytes: those of the decode's bytes that had crossed before its first step, over all ranks. The link does not owe them.
    """
    floors = {}
    if rates.device_copy_gbps:
        floors["device_memory"] = work.device_bytes / (rates.device_copy_gbps * 1e9)
    if rates.matmul_tflops:
        floors["matmul"] = work.flops / (rates.matmul_tflops * 1e12)
    if on_gpu and moved["host_to_device_bytes_per_step"]:
        floors["link"] = moved["host_to_device_bytes_per_step"] / (rates.link_gbps * 1e9)
    if rates.disk_gbps and moved["disk_read_bytes_per_step"]:
        floors["disk"] = moved["disk_read_bytes_per_step"] / (rates.disk_gbps * 1e9)
    in_all = {name: step_s * steps for name, step_s in floors.items()}
    if "link" in in_all:
        in_all["link"] = max(0.0, in_all["link"] - ahead_bytes / (rates.link_gbps * 1e9))
    bound_by = max(in_all, key=in_all.get, default=None)
    floor = in_all.get(bound_by) or None
    return vars(rates) | {
        "link_ahead_bytes": ahead_bytes,
        "floor_step_s": floors,
        "bound_by": bound_by if floor else None,
        "floor_decode_s": floor,
        "fraction_of_limit": floor / decode_s if floor else None,
    }


def in_words(limit: dict[str, Any], moved: dict[str, int | None], on_gpu: bool) -> str:
    """One line: what bounds a decode step here, and how near the run came."""
    memory = "device memory" if on_gpu else "this machine's memory"
    spread = " in the loops themselves" if limit["link_from"] == "loops" else f" +- {limit['link_spread'] / 2:.1%}"
    what = {
        "link": lambda: (
            f"moves {moved['host_to_device_bytes_per_step'] / 1e9:.3f} GB to the device a step ({limit['link_kind']}: "
            f"{limit['link_gbps']:.1f} GB/s{spread})"
        ),
        "disk": lambda: (
            f"reads {moved['disk_read_bytes_per_step'] / 1e9:.3f} GB a step from disk ({limit['disk_gbps']:.2f} GB/s)"
        ),
        "device_memory": lambda: f"is bound by {memory} (copies at {limit['device_copy_gbps']:.1f} GB/s)",
        "matmul": lambda: f"is bound by matrix products ({limit['matmul_tflops']:.2f} TFLOP/s)",
    }[limit["bound_by"]]()
    return f"decode {what} and runs at {limit['fraction_of_limit']:.1%} of that limit"


def idle_in_words(link_use: dict[str, float]) -> str | None:
    """Where the rest of the link's time went, or None if there is hardly any."""
    if "idle_s" in link_use:
        total = link_use["busy_s"] + link_use["idle_s"]
        return f"in the trace the link stood idle {link_use['idle_s'] / total:.1%} of the time" if total else None
    causes = {
        "slot_wait_s": "waiting for a free slot: the device computes longer than a layer copies",
        "step_start_s": "at the start of a step, while the host prepares it: a larger --ring-depth bridges that",
        "host_late_s": "host late: it asked too late for the next layer",
    }
    total = link_use["busy_s"] + sum(link_use[name] for name in causes)
    worst = max(causes, key=lambda name: link_use[name])
    if not total or link_use[worst] < 0.02 * total:
        return None
    return f"the link stood idle {1 - link_use['busy_s'] / total:.1%} of the time, mostly {causes[worst]}"
