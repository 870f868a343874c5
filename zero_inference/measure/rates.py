"""How fast the hardware of a run is, measured in its process: the link in the minutes in which the loops run, the rest before them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Timeline
from zero_inference.errors import RunError
from zero_inference.hardware.bench_copies import Rate, blocks_of, host_to_device_rounds, rate_of
from zero_inference.hardware.bench_device import device_copy_gb_per_s, matmul_tflops
from zero_inference.hardware.bench_disk import disk_read_gb_per_s
from zero_inference.models.spec import ModelSpec
from zero_inference.models.weights import return_free_memory
from zero_inference.records.hardware import HOST_COPY, LinkUse, Rates
from zero_inference.records.schema import CpuBackendUse, MovedPerStep
from zero_inference.utils.ranks import Ranks

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


class LoopMonitor:
    """Called before each measured loop and behind the last: the link is measured there, in the minutes in which the loops run, the
    rate of the loop's own copies is read, and the peak of device memory, which that measurement must not raise.

    Attributes:
        peak_gpu_bytes: most device memory of this rank during the loops; None without a device.
        uses: what this rank's link did in each loop; empty for an engine that does not watch it, and for loops of fewer than two
            decode steps.
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
        """GB/s (1e9 bytes) of this rank's own copies: the median of the loops in which its link was hardly ever idle, 0 without any.

        Rates of idle links would not add up to what all links can do at once.
        """
        return statistics.median(
            [use.gb_per_s_while_busy or 0.0 for use in self.uses if use.busy_share > LEAST_BUSY] or [0.0]
        )

    @property
    def while_busy_gb_per_s(self) -> float:
        """The same of all loops, however long the link was idle. No step can have taken less than its bytes at this rate."""
        return statistics.median([use.gb_per_s_while_busy or 0.0 for use in self.uses] or [0.0])

    @property
    def ahead_bytes(self) -> int:
        """What this rank had copied of a loop's decode steps before the first of them, the median of the loops."""
        return int(statistics.median([use.ahead_bytes for use in self.uses] or [0]))

    @property
    def last_use(self) -> LinkUse | None:
        """What this rank's link did in the last loop; None where nobody watched."""
        return self.uses[-1] if self.uses else None

    def _look_back(self) -> None:
        use = self.timeline.link_use() if self.timeline is not None else None
        if use is not None:
            self.uses.append(use)
        if self.on_gpu:
            self.peak_gpu_bytes = max(self.peak_gpu_bytes or 0, torch.cuda.max_memory_allocated(self.device))


def measure_rates(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    link: LinkRate,
    weight_bytes: int,
    cores: CpuBackendUse | None = None,
) -> Rates:
    """About a second on a GPU, a quarter without one, and more for a disk. What the cores give was measured for the plan.

    All ranks copy at the same time, as they do while they run; so do all nodes read, each a file as large as all weights
    if `disk_read_gb_per_s` takes one of that size.
    """
    on_gpu = ranks.device.type == "cuda"
    link.measure(seconds=LINK_S[ranks.device.type])
    rate = link.of_all()
    # a CPU may multiply the few rows of a step faster than many, as it does in float16
    rows = () if on_gpu else (config.batch_size // ranks.world_size,)
    return Rates(
        link_gb_per_s=rate.gb_per_s,
        link_spread=rate.spread_gb_per_s / rate.gb_per_s,
        link_kind="host to device, pinned" if on_gpu else HOST_COPY,
        device_copy_gb_per_s=(
            _unless_out_of_memory(lambda: device_copy_gb_per_s(ranks.device))
            if on_gpu
            else 2 * rate.gb_per_s / ranks.world_size
        ),
        matmul_tflops=_unless_out_of_memory(
            lambda: matmul_tflops(ranks.device, spec.dtype, seconds=PRODUCT_S[ranks.device.type], rows=rows)
        ),
        disk_gb_per_s=_disks_gb_per_s(config, ranks, weight_bytes) if config.disk_offload else None,
        link_beside_cores_gb_per_s=None if cores is None else cores.link_gb_per_s,
        cores_gb_per_s=None if cores is None else cores.of_step_gb_per_s,
    )


def update_link_rate(rates: Rates, link: LinkRate, reached_gb_per_s: float = 0.0) -> Rates:
    """`rates` with the link's rate of all rounds so far. All ranks call it together.

    Args:
        reached_gb_per_s: that of this rank's own copies in the loops, 0 if it is not known. Where all ranks' together are more than
            that of the rounds, the link can do that: others may use the host in just the moments between the loops.
    """
    rate = link.of_all()
    unknown = link.ranks.maximum([float(not reached_gb_per_s)])[0]
    in_loops = 0.0 if unknown else link.ranks.total(int(reached_gb_per_s * 1e6)) / 1e6
    faster, came_from = max((rate.gb_per_s, "rounds"), (in_loops, "loops"))
    return rates.model_copy(
        update={"link_gb_per_s": faster, "link_from": came_from, "link_spread": rate.spread_gb_per_s / faster}
    )


def update_cpu_rate(rates: Rates, ranks: Ranks, moved: MovedPerStep, link_gb_per_s: float) -> Rates:
    """`rates` with what link and cores gave beside each other in the loops, where that is more than was measured for the plan: the cores
    read ahead while they wait, and a host whose memory others use is not the same for minutes. All ranks call it together.

    Args:
        moved: in a step of this rank.
        link_gb_per_s: that of this rank's own copies in the loops, 0 if it is not known.
    """
    if rates.cores_gb_per_s is None or rates.link_beside_cores_gb_per_s is None:
        return rates
    links, read = ranks.total(int(link_gb_per_s * 1e6)) / 1e6, ranks.total(int(moved.cores_bytes_per_step or 0))
    in_loops = read / moved.cores_busy_s_per_step / 1e9 if moved.cores_busy_s_per_step else 0.0
    return rates.model_copy(
        update={
            "cores_gb_per_s": max(rates.cores_gb_per_s, in_loops),
            "link_beside_cores_gb_per_s": max(rates.link_beside_cores_gb_per_s, links),
        }
    )


def _disks_gb_per_s(config: RunConfig, ranks: Ranks, weight_bytes: int) -> float | None:
    """The disks of all nodes together, each measured by its node's first rank; None where one of them cannot be measured."""
    ranks.barrier()
    return_free_memory()  # that the link's measurement took, before this one takes more
    try:
        mine = disk_read_gb_per_s(config.offload_path, weight_bytes) if ranks.local_rank == 0 else 0.0
    except RunError:  # the run itself has what it needs
        mine = None
    unknown = ranks.maximum([float(mine is None)])[0]
    total = ranks.total(int((mine or 0.0) * 1e6)) / 1e6
    return None if unknown else total


def _unless_out_of_memory(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except torch.OutOfMemoryError:  # what was measured for the model itself still stands
        return None


LINK_S = {"cuda": 0.4, "cpu": 0.1}  # of copies behind the loops


PRODUCT_S = {"cuda": 0.1, "cpu": 0.05}  # of matrix products
