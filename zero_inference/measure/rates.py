"""Rates of the hardware, measured in the process of the run: of the link between the loops, of the rest before them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Timeline
from zero_inference.errors import RunError
from zero_inference.hardware.bench_copies import Rate, blocks_of, disk_read_gb_per_s, host_to_device_rounds, rate_of
from zero_inference.hardware.bench_device import device_copy_gb_per_s, matmul_tflops
from zero_inference.models.spec import ModelSpec
from zero_inference.models.weights import return_free_memory
from zero_inference.records.hardware import HOST_COPY, LinkUse, Rates
from zero_inference.records.schema import CpuBackendUse, MovedPerStep
from zero_inference.utils import timing
from zero_inference.utils.ranks import Ranks

MIN_BUSY_SHARE = 0.98  # of a link that limits the steps


class LinkRate:
    """The rate of the links of all ranks, measured at the same time, in rounds over the run.

    Rates drift: without any engine two GPUs copied at 55.0 and then at 53.6 GB/s each within a minute
    (benchmarks/results/h200-x2/gather_speed.txt), so one measurement before the loops may be too low or too high.

    Args:
        sources: page-locked tensors, uint8 [bytes], that the engine copies from: the rate depends on the location of the source.
    """

    def __init__(self, ranks: Ranks, sources: Sequence[torch.Tensor] = ()):
        self.ranks = ranks
        self.sources = blocks_of(sources, ranks.device)
        self.rounds: list[float] = []

    def measure(self, seconds: float) -> None:
        """Add rounds for about `seconds`. All ranks call it together.

        Raises:
            torch.OutOfMemoryError, RunError: the first measurement found no memory, or none that may be page-locked. Later ones, between
                loops, are skipped then.
        """
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)  # an engine may still be filling its buffers
        self.ranks.barrier()
        try:
            self.rounds += host_to_device_rounds(self.ranks.device, pinned=True, seconds=seconds, sources=self.sources)
        except (torch.OutOfMemoryError, RunError):
            if not self.rounds:
                raise

    def of_all(self) -> Rate:
        """Return the sum over the ranks, which call it together."""
        return Rate(*(_sum_over_ranks(self.ranks, value) for value in rate_of(self.rounds)))


class LoopMonitor:
    """Called before each measured loop and after the last: measures the link, and reads the rate of the loop's own copies and the peak of
    device memory, which the measurement must not raise.

    Attributes:
        peak_gpu_bytes: peak device memory of this rank during the loops; None without a GPU.
        uses: the use of this rank's link in each loop; empty for an engine without a timeline, and for loops of fewer than two decode
            steps.
    """

    def __init__(self, link: LinkRate, timeline: Timeline | None = None):
        self.link, self.device, self.timeline = link, link.ranks.device, timeline
        self.peak_gpu_bytes = 0 if self.device.type == "cuda" else None
        self.uses: list[LinkUse] = []
        self.in_loop = False

    def __call__(self) -> None:
        if self.in_loop:
            use = self.timeline.link_use() if self.timeline is not None else None
            if use is not None:
                self.uses.append(use)
            if self.peak_gpu_bytes is not None:
                self.peak_gpu_bytes = max(self.peak_gpu_bytes, torch.cuda.max_memory_allocated(self.device))
        self.in_loop = True
        if self.peak_gpu_bytes is not None:
            self.link.measure(seconds=0.2)
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def reached_gb_per_s(self) -> float:
        """GB/s of this rank's copies, the median over loops with a link busy for `MIN_BUSY_SHARE`; 0 without any.

        Ranks add up these rates: links that are idle part of the time do not run at once, and would add up to too much.
        """
        return _median([use.gb_per_s_while_busy or 0.0 for use in self.uses if use.busy_share > MIN_BUSY_SHARE])

    @property
    def while_busy_gb_per_s(self) -> float:
        """GB/s of the copies in all loops, while they ran."""
        return _median([use.gb_per_s_while_busy or 0.0 for use in self.uses])

    @property
    def ahead_bytes(self) -> int:
        """Bytes of a loop's decode steps that this rank had copied before the first of them."""
        return int(_median([use.ahead_bytes for use in self.uses]))

    @property
    def last_use(self) -> LinkUse | None:
        """The use of this rank's link in the last loop; None if unknown."""
        return self.uses[-1] if self.uses else None


def measure_rates(
    config: RunConfig,
    spec: ModelSpec,
    ranks: Ranks,
    link: LinkRate,
    weight_bytes: int,
    cores: CpuBackendUse | None = None,
) -> Rates:
    """Measure the rates, in about a second on a GPU, a quarter without one, and longer for a disk. Those of the CPU are the plan's.

    All ranks copy at the same time, as in a run, and all nodes read, each a file as large as all weights if `disk_read_gb_per_s` takes
    one of that size.
    """
    kind = ranks.device.type
    link.measure(seconds=timing.LINK_S[kind])
    rate = link.of_all()
    # a CPU may multiply the few rows of a step faster than many, as it does in float16
    rows = () if kind == "cuda" else (config.batch_size // ranks.world_size,)
    copy_gb_per_s: float | None = 2 * rate.gb_per_s / ranks.world_size
    if kind == "cuda":
        copy_gb_per_s = _unless_out_of_memory(lambda: device_copy_gb_per_s(ranks.device))
    return Rates(
        link_gb_per_s=rate.gb_per_s,
        link_spread=rate.spread_gb_per_s / rate.gb_per_s,
        link_kind="host to device, pinned" if kind == "cuda" else HOST_COPY,
        device_copy_gb_per_s=copy_gb_per_s,
        matmul_tflops=_unless_out_of_memory(
            lambda: matmul_tflops(ranks.device, spec.dtype, seconds=timing.PRODUCT_S[kind], rows=rows)
        ),
        disk_gb_per_s=_disks_gb_per_s(config, ranks, weight_bytes) if config.disk_offload else None,
        link_beside_cores_gb_per_s=None if cores is None else cores.link_gb_per_s,
        cores_gb_per_s=None if cores is None else cores.of_step_gb_per_s,
    )


def update_link_rate(rates: Rates, link: LinkRate, reached_gb_per_s: float = 0.0) -> Rates:
    """Return `rates` with the link rate (sum of all ranks) of `link`'s rounds or of the loops, whichever is faster: other programs may
    use the host just between the loops. All ranks call it together.

    Args:
        reached_gb_per_s: `LoopMonitor.reached_gb_per_s` of this rank; if it is 0 on any rank, the rounds alone count.
    """
    rate = link.of_all()
    unknown_on_any = link.ranks.maximum([float(not reached_gb_per_s)])[0]
    loops_gb_per_s = 0.0 if unknown_on_any else _sum_over_ranks(link.ranks, reached_gb_per_s)
    link_gb_per_s, source = max((rate.gb_per_s, "rounds"), (loops_gb_per_s, "loops"))
    spread = rate.spread_gb_per_s / link_gb_per_s
    return rates.model_copy(update={"link_gb_per_s": link_gb_per_s, "link_from": source, "link_spread": spread})


def update_cpu_rate(rates: Rates, ranks: Ranks, moved: MovedPerStep, link_gb_per_s: float) -> Rates:
    """Return `rates` with those of link and CPU together in the loops, where they exceed those measured for the plan: the CPU prefetches
    while it waits, and other programs' use of memory changes within minutes. All ranks call it together.

    Args:
        moved: of a step of this rank.
        link_gb_per_s: rate of this rank's copies in the loops, 0 if unknown.
    """
    if rates.cores_gb_per_s is None or rates.link_beside_cores_gb_per_s is None:
        return rates
    links_gb_per_s, cpu_bytes = _sum_over_ranks(ranks, link_gb_per_s), ranks.total(int(moved.cores_bytes_per_step or 0))
    cpu_gb_per_s = cpu_bytes / moved.cores_busy_s_per_step / 1e9 if moved.cores_busy_s_per_step else 0.0
    return rates.model_copy(
        update={
            "cores_gb_per_s": max(rates.cores_gb_per_s, cpu_gb_per_s),
            "link_beside_cores_gb_per_s": max(rates.link_beside_cores_gb_per_s, links_gb_per_s),
        }
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _sum_over_ranks(ranks: Ranks, gb_per_s: float) -> float:
    """Return the sum of all ranks' rates; it crosses as whole kB/s."""
    return ranks.total(int(gb_per_s * 1e6)) / 1e6


def _disks_gb_per_s(config: RunConfig, ranks: Ranks, weight_bytes: int) -> float | None:
    """Return the sum of all nodes' disks, each measured by its node's first rank; None if one cannot be measured."""
    ranks.barrier()
    return_free_memory()  # of the link's measurement, before this one takes more
    try:
        gb_per_s = disk_read_gb_per_s(config.offload_path, weight_bytes) if ranks.local_rank == 0 else 0.0
    except RunError:  # the run does not need the rate
        gb_per_s = None
    unknown_on_any = ranks.maximum([float(gb_per_s is None)])[0]
    total_gb_per_s = _sum_over_ranks(ranks, gb_per_s or 0.0)
    return None if unknown_on_any else total_gb_per_s


def _unless_out_of_memory(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except torch.OutOfMemoryError:  # the measurements of the model stay valid
        return None
