"""The rates of links, devices and disks around the loops of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.stream.streams import Timeline
from zero_inference.errors import RunError
from zero_inference.hardware.bench_copies import Rate, blocks_of, disk_read_rate, host_to_device_rounds, rate_of
from zero_inference.hardware.bench_device import device_copy_gb_per_s, matmul_tflops
from zero_inference.models.spec import ModelSpec
from zero_inference.models.weights import return_free_memory
from zero_inference.records.hardware import HOST_COPY, LinkUse, Rates
from zero_inference.records.schema import CpuBackendUse, MovedPerStep
from zero_inference.utils import timing
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.timing import synchronize

MIN_BUSY_SHARE = 0.98  # of a link that limits the steps


class LinkMonitor:
    """Measures the links of all GPUs at the same time, in rounds over the run, and what the loops show of this rank's links and devices.

    Rates drift: without any engine two GPUs copied at 55.0 and then at 53.6 GB/s each within a minute
    (benchmarks/results/h200-x2/gather_speed.txt), so one measurement before the loops may be too low or too high.

    Args:
        sources: page-locked tensors, uint8 [bytes], that the engine copies from: the rate depends on the location of the source.
        devices: those that this rank drives; empty for `ranks.device` alone.

    Attributes:
        rounds: GB/s of this rank's rounds of copies, the sum over its links.
        uses: the use of the links in each loop; empty for an engine without a timeline, and for loops of fewer than two decode steps.
        used_links: this rank's links that copied in the last loop; a GPU with all of its layers has an idle one.
        peak_bytes: peak memory of each device during the loops; empty without a GPU.
    """

    def __init__(
        self,
        ranks: Ranks,
        sources: Sequence[torch.Tensor] = (),
        timeline: Timeline | None = None,
        devices: Sequence[torch.device] = (),
    ):
        self.ranks, self.timeline, self.devices = ranks, timeline, tuple(devices) or (ranks.device,)
        self.on_gpu = ranks.device.type == "cuda"
        self.sources = blocks_of(sources, ranks.device)
        self.rounds: list[float] = []
        self.uses: list[LinkUse] = []
        self.used_links = len(self.devices)
        self.peak_bytes = [0] * len(self.devices) if self.on_gpu else []
        self.in_loop = False

    @property
    def peak_gpu_bytes(self) -> int | None:
        """Peak device memory of this rank during the loops, on the device with the most; None without a GPU."""
        return max(self.peak_bytes, default=None)

    def measure(self, seconds: float) -> None:
        """Add rounds for about `seconds`. All ranks call it together.

        Raises torch.OutOfMemoryError or RunError if the first measurement finds no memory, or none that may be page-locked. Later ones,
        between loops, are skipped then.
        """
        synchronize(self.devices)  # an engine may still be filling its buffers
        self.ranks.barrier()
        try:
            self.rounds += host_to_device_rounds(self.devices, seconds, self.sources)
        except (torch.OutOfMemoryError, RunError):
            if not self.rounds:
                raise

    def rate(self) -> Rate:
        """Return the rate of the rounds, the sum over all links. All ranks call it together."""
        return Rate(*(_sum_over_ranks(self.ranks, value) for value in rate_of(self.rounds)))

    def between_loops(self) -> None:
        """Take the last loop's use of links and memory, and measure; called before each loop and after the last. `peak_bytes` leaves the
        measurement out."""
        if self.in_loop:
            if self.timeline is not None and (use := self.timeline.link_use()) is not None:
                self.uses.append(use)
                self.used_links = sum(each is not None for each in self.timeline.by_device())
            for index, peak_bytes in enumerate(self.peak_bytes):
                self.peak_bytes[index] = max(peak_bytes, torch.cuda.max_memory_allocated(self.devices[index]))
        self.in_loop = True
        if self.on_gpu:
            self.measure(seconds=0.2)
            for device in self.devices:
                torch.cuda.reset_peak_memory_stats(device)

    def copied_gb_per_s(self, min_busy_share: float = 0.0) -> float:
        """Return the GB/s of this rank's copies while they ran, the sum over its links: the median over the loops with links so busy; 0
        without any."""
        one_link = _median([use.gb_per_s_while_busy or 0.0 for use in self.uses if use.busy_share >= min_busy_share])
        return one_link * self.used_links

    def ahead_bytes(self) -> int:
        """Return the bytes of a loop's decode steps that this rank had copied before the first of them."""
        return int(_median([use.ahead_bytes for use in self.uses]))


def measure_rates(
    config: RunConfig,
    spec: ModelSpec,
    link: LinkMonitor,
    cpu_backend: CpuBackendUse | None = None,
) -> Rates:
    """Measure the rates but the disk's, in about a second on a GPU, a quarter without one. Those of the CPU are the plan's.

    All links copy at the same time, as in a run.
    """
    ranks, kind = link.ranks, link.ranks.device.type
    link.measure(seconds=timing.LINK_S[kind])
    rate = link.rate()
    # a CPU may multiply the few rows of a step faster than many, as it does in float16
    rows = () if kind == "cuda" else (config.batch_size // ranks.world_size,)
    copy_gb_per_s: float | None = 2 * rate.gb_per_s / (ranks.world_size * len(link.devices))
    if kind == "cuda":
        copy_gb_per_s = _of_fastest(link.devices, device_copy_gb_per_s)
    return Rates(
        link_gb_per_s=rate.gb_per_s,
        link_spread=rate.spread_gb_per_s / rate.gb_per_s,
        link_kind="host to device, pinned" if kind == "cuda" else HOST_COPY,
        device_copy_gb_per_s=copy_gb_per_s,
        matmul_tflops=_of_fastest(
            link.devices, lambda device: matmul_tflops(device, spec.dtype, seconds=timing.PRODUCT_S[kind], rows=rows)
        ),
        link_beside_cores_gb_per_s=None if cpu_backend is None else cpu_backend.link_gb_per_s,
        cores_gb_per_s=None if cpu_backend is None else cpu_backend.of_step_gb_per_s,
    )


def update_rates(
    rates: Rates,
    link: LinkMonitor,
    moved: MovedPerStep,
    disk_rounds: Sequence[float | None] = (),
    disk_loops: Sequence[float] = (),
) -> Rates:
    """Update `rates` by the rates that the loops measured, and return them. All ranks call it together.

    The link's rate is that of the rounds or of the loops, whichever is faster: other programs may use the host just between the loops. The
    rates of link and CPU side by side are those of the plan or of the loops, whichever are faster: the CPU prefetches while it waits, and
    other programs' use of memory changes within minutes.

    Args:
        moved: bytes of a decode step of this rank.
        disk_rounds: GB/s of the disk before each loop and after the last; None where it could not be measured. Its rate is the mean,
            because a disk's changes within seconds, or that of the fastest loop if it is higher.
        disk_loops: GB/s of direct reads in each loop.
    """
    ranks, rate = link.ranks, link.rate()
    # links that are idle part of the time do not run at once, and would add up to too much
    own_gb_per_s = link.copied_gb_per_s(MIN_BUSY_SHARE)
    unknown_on_any = ranks.maximum([float(not own_gb_per_s)])[0]
    loops_gb_per_s = 0.0 if unknown_on_any else _sum_over_ranks(ranks, own_gb_per_s)
    link_gb_per_s, source = max((rate.gb_per_s, "rounds"), (loops_gb_per_s, "loops"))
    updated = {
        "link_gb_per_s": link_gb_per_s,
        "link_from": source,
        "link_spread": rate.spread_gb_per_s / link_gb_per_s,
    }
    if measured := [each for each in disk_rounds if each is not None]:
        alone = statistics.fmean(measured)
        updated |= {"disk_alone_gb_per_s": alone, "disk_gb_per_s": max([alone, *disk_loops])}
    if rates.cores_gb_per_s is not None and rates.link_beside_cores_gb_per_s is not None:
        links_gb_per_s = _sum_over_ranks(ranks, link.copied_gb_per_s())
        cpu_bytes = ranks.total(int(moved.cores_bytes_per_step or 0))
        cpu_gb_per_s = cpu_bytes / moved.cores_busy_s_per_step / 1e9 if moved.cores_busy_s_per_step else 0.0
        updated["cores_gb_per_s"] = max(rates.cores_gb_per_s, cpu_gb_per_s)
        updated["link_beside_cores_gb_per_s"] = max(rates.link_beside_cores_gb_per_s, links_gb_per_s)
    return rates.model_copy(update=updated)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _sum_over_ranks(ranks: Ranks, gb_per_s: float) -> float:
    """Return the sum of all ranks' rates; it crosses as whole kB/s."""
    return ranks.total(int(gb_per_s * 1e6)) / 1e6


def disks_gb_per_s(config: RunConfig, ranks: Ranks, weight_bytes: int) -> float | None:
    """Return the sum of all nodes' disks, each measured by its node's first rank with a file as large as all weights, if
    `disk_read_rate` takes one of that size; None if one cannot be measured."""
    ranks.barrier()
    return_free_memory()  # of the link's measurement, before this one takes more
    try:
        gb_per_s = disk_read_rate(config.offload_path, weight_bytes).gb_per_s if ranks.local_rank == 0 else 0.0
    except RunError:  # the run does not need the rate
        gb_per_s = None
    unknown_on_any = ranks.maximum([float(gb_per_s is None)])[0]
    total_gb_per_s = _sum_over_ranks(ranks, gb_per_s or 0.0)
    return None if unknown_on_any else total_gb_per_s


def _of_fastest(devices: Sequence[torch.device], measure: Callable[[torch.device], float]) -> float | None:
    """Return the rate of the fastest device: layers run on one after the other, and a bound must hold for each. Of equal GPUs the first is
    measured. None without memory for it."""
    different = {torch.cuda.get_device_name(each) if each.type == "cuda" else "": each for each in reversed(devices)}
    try:
        return max(map(measure, different.values()))
    except torch.OutOfMemoryError:  # the measurements of the model stay valid
        return None
