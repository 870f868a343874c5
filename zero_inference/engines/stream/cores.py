"""How the host's cores take part: which blocks they multiply, decided by measured rates, and the threads that do it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_inference.cores.cores import FLAG_BYTES, FLAGS, SPIN_US, Cores
from zero_inference.cores.crossing import Crossing, HostCalls
from zero_inference.cores.library import best_instructions, load_library, why_unavailable
from zero_inference.engines.base import Job
from zero_inference.engines.stream.core_blocks import CoreBlock, Workers
from zero_inference.engines.stream.expert_blocks import ExpertBlock, choice_bytes
from zero_inference.engines.stream.expert_cache import ExpertCache
from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.split import best_split
from zero_inference.engines.stream.store import BlockStore
from zero_inference.errors import RunError, UsageError
from zero_inference.kv_cache.diverted import why_not_attended
from zero_inference.kv_cache.meetings import CoresMeeting, crossing_bytes
from zero_inference.link.cores import BesideLink, cpus_of, measure_beside_link
from zero_inference.quantization.groups import GroupQuantization
from zero_inference.records.schema import CoresUse
from zero_inference.runtime import extension
from zero_inference.runtime.extension import load_extension
from zero_inference.runtime.host_memory import host_empty
from zero_inference.runtime.transfers import Transfers


@dataclass(frozen=True)
class CoresPlan:
    """
    Attributes:
        cpus: a thread on each; -1 for one that is not bound to a core.
        share: of the bytes in host memory, that the cores are to multiply.
        few_rows: the most tokens of a pass in which they do; in longer ones everything is fetched.
        rates: what the share was computed from; None without a GPU.
        attends: whether the cores attend over keys and values in host memory.
        kv_bytes: those that a decode step reads, on average.
        automatic: the share was found, not asked for.
    """

    cpus: tuple[int, ...]
    share: float
    few_rows: int
    rates: BesideLink | None
    attends: bool = False
    kv_bytes: int = 0
    automatic: bool = False

    def in_words(self, computed_bytes: int, stored_bytes: int) -> str:
        """What the cores do in a decode step: how many bytes of the `stored_bytes` of their blocks they are expected to read."""
        one = len(self.cpus) == 1
        chosen = (
            f" (of {stored_bytes / 1e9:.3f} GB, with the experts that tokens choose)"
            if stored_bytes > computed_bytes
            else ""
        )
        who = f"{len(self.cpus)} thread{'' if one else 's'} ({best_instructions()})"
        tasks = [f"multipl{'ies' if one else 'y'} {computed_bytes / 1e9:.3f} GB{chosen}"] if computed_bytes else []
        if self.attends:
            tasks.append(f"attend{'s' if one else ''} over {self.kv_bytes / 1e9:.3f} GB of keys and values")
        said = f"{who} {' and '.join(tasks)} in host memory"
        if self.rates is None:
            return said
        return (
            f"{said}; measured side by side: link {self.rates.link_gb_per_s:.1f} GB/s ({self.rates.link_alone_gb_per_s:.1f} alone), "
            f"cores {self.rates.cores_gb_per_s:.1f} GB/s ({self.rates.cores_alone_gb_per_s:.1f} alone) with {self.few_rows} "
            f"token{'s' if self.few_rows > 1 else ''} a pass"
        )

    def facts(self, computed_bytes: int) -> CoresUse:
        """For the record."""
        of_both = ("link_alone_gb_per_s", "link_gb_per_s", "cores_gb_per_s", "cores_alone_gb_per_s")
        names = (*of_both, "read_gb_per_s", "crossing_s")
        return CoresUse(
            threads=len(self.cpus),
            instructions=best_instructions(),
            share=self.share,
            rows=self.few_rows,
            attends=self.attends,
            of_step_gb_per_s=self._of_step_gb_per_s(computed_bytes),
            **{name: None if self.rates is None else getattr(self.rates, name) for name in names},
        )

    def _of_step_gb_per_s(self, computed_bytes: int) -> float | None:
        """Of products, and of reading keys and values, each with its part of the bytes."""
        rates, attended = self.rates, self.kv_bytes if self.attends else 0
        if rates is None or not computed_bytes + attended:
            return None
        return (computed_bytes + attended) / (computed_bytes / rates.cores_gb_per_s + attended / rates.read_gb_per_s)


def why_cores_stay_out(job: Job) -> str | None:
    """Why the cores take no part in this run, whatever they could do, in a few words; None where they may.

    Raises:
        UsageError: they were asked for, and cannot.
    """
    share, several = job.config.cpu_share, job.ranks.world_size > 1
    if share == 0:
        return "--cpu-compute off"
    if several and share is not None:
        raise UsageError(
            f"--cpu-compute {job.config.cpu_compute}: each of {job.ranks.world_size} ranks has a part of every layer, which its "
            "cores cannot multiply alone; use one process, or --cpu-compute off."
        )
    if several:
        return "there are several ranks"
    if share is None and (not job.on_gpu or not torch.cuda.is_available()):
        return "without a GPU there is no link to be faster than"
    missing = _missing_code(job)
    if missing and share is not None:
        raise UsageError(
            f"--cpu-compute {job.config.cpu_compute}: its code could not be compiled ({missing}); it takes a C++ compiler (g++ 10 or "
            "newer, or CXX); or use --cpu-compute off."
        )
    return f"their code could not be compiled: {missing}" if missing else None


def _missing_code(job: Job) -> str | None:
    """Why there is no code for the cores, or for a GPU to meet them; None where there is."""
    if load_library() is None:
        return why_unavailable()
    if job.on_gpu and not load_extension():
        return extension.why_unavailable()
    return None


def place_on_cores(
    job: Job, residency: Residency, scheme: GroupQuantization | None
) -> tuple[Residency, CoresPlan | str]:
    """The blocks of `residency` with those that the cores multiply, and how they do; or why they had better not.

    Raises:
        UsageError: a share was asked for of a model that has nothing for them, or more threads than cores.
    """
    config = job.config
    cpus = cpus_of(job.ranks, config.cpu_threads)
    can_attend = config.kv_offload and why_not_attended(job.skeleton.model) is None
    if not residency.computable and not can_attend:
        if config.cpu_share is None:
            return residency, "no block in host memory is work for them"
        raise UsageError(
            f"--cpu-compute {config.cpu_compute}: {job.spec.name} has no block in host memory that the cores can multiply "
            "(linear modules of a decoder layer's attention or feed-forward, or experts); use --cpu-compute off."
        )
    rates = _rates(job, scheme, cpus)
    residency = replace(residency, few_tokens=job.rank_batch)
    kv_bytes = job.kv_bytes(config.prompt_len + config.gen_len // 2) if config.kv_offload else 0
    if config.cpu_share is not None:
        residency = residency.with_share_computed(config.cpu_share)
        if not residency.computed and not can_attend:
            raise UsageError(
                f"--cpu-compute {config.cpu_compute}: less than half of a block of {job.spec.name}, and blocks are not divided; use a "
                "larger share, or --cpu-compute off."
            )
        plan = CoresPlan(cpus, config.cpu_share, job.rank_batch, rates, can_attend, kv_bytes)
        return residency.with_budget_used(), plan
    if rates is None:
        return residency, "there was no memory to measure them"
    best = best_split(residency.with_shares_computed(1.0, 0.0), rates, kv_bytes, can_attend)
    if not (best.of_experts or best.of_others or best.attends):
        return residency, (
            f"they would hardly help: {rates.cores_gb_per_s:.1f} GB/s beside a link at {rates.link_gb_per_s:.1f} GB/s"
        )
    residency = residency.with_shares_computed(best.of_experts, best.of_others).with_budget_used()
    share = residency.nbytes_of(residency.computed) / max(1, residency.host_bytes)
    return residency, CoresPlan(cpus, share, job.rank_batch, rates, best.attends, kv_bytes, automatic=True)


def _rates(job: Job, scheme: GroupQuantization | None, cpus: tuple[int, ...]) -> BesideLink | None:
    """None without a GPU, and where the gigabyte or two that the measurement takes is not there: weights go first."""
    if not job.on_gpu:
        return None
    columns = job.spec.text_config.hidden_size
    try:
        return measure_beside_link(job.ranks.device, cpus, job.spec.dtype, scheme, job.rank_batch, columns)
    except (RunError, torch.OutOfMemoryError):
        return None


class CoreTeam:
    """The threads of a run, and the blocks that they multiply."""

    def __init__(
        self,
        plan: CoresPlan,
        job: Job,
        residency: Residency,
        store: BlockStore,
        scheme: GroupQuantization | None,
        transfers: Transfers,
    ):
        self.plan, self.residency, self.store, self.scheme = plan, residency, store, scheme
        self.dtype, self.few_rows = job.spec.dtype, plan.few_rows
        self.python_cpus: set[int] | None = None  # where this thread could run before
        device = job.ranks.device
        self.experts = ExpertCache(residency, store, scheme, device, transfers) if residency.expert_slots else None
        if not job.on_gpu:
            self.cores = Cores(plan.cpus, spin_us=0)
            self.calls: HostCalls | Crossing = HostCalls(self.cores, transfers)
            return
        self.python_cpus = _leave_cores(plan.cpus)
        self.cores = Cores(plan.cpus, SPIN_US, host_empty((FLAGS * FLAG_BYTES,), torch.uint8, pinned=True).zero_())
        width = _widest(residency) * plan.few_rows * self.dtype.itemsize
        chosen = max(
            (choice_bytes(block.experts, plan.few_rows) for block in residency.blocks if block.experts), default=0
        )
        attended = (0, 0)
        if plan.attends:
            attended = crossing_bytes(job.spec.config, plan.few_rows, self.dtype.itemsize)
        self.calls = Crossing(self.cores, device, max(width + chosen, attended[0]), max(width, attended[1]), transfers)

    def block(self, index: int, module: nn.Module) -> CoreBlock | ExpertBlock:
        """Block `index`, whose module in the model is `module`, with its task."""
        block, layout = self.residency.blocks[index], self.residency.layouts[index]
        workers = Workers(self.cores, self.calls, self.scheme, self.few_rows)
        if block.experts is not None:
            slots = None if self.experts is None else self.experts.slots.get(index)
            return ExpertBlock(block, layout, self.store.buffers[index], workers, self.dtype, slots)
        return CoreBlock(block, module, layout, self.store.buffers[index], workers)

    def meeting(self) -> CoresMeeting:
        """Of the model's attention with these threads."""
        return CoresMeeting(self.calls, self.python_cpus)

    def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        self.calls.close()
        if self.experts is not None:
            self.experts.close()
        if self.python_cpus is not None:
            os.sched_setaffinity(0, self.python_cpus)
            self.python_cpus = None


def _leave_cores(cpus: tuple[int, ...]) -> set[int] | None:
    """Keep this thread, which asks for everything, off the cores that multiply; where it could run before, None if it may go on."""
    before = os.sched_getaffinity(0)
    others = before - set(cpus)
    if not others:
        return None
    os.sched_setaffinity(0, others)
    return before


def _widest(residency: Residency) -> int:
    """Elements of the widest input row, or of all output rows of a block together."""
    widths = [0]
    for index in residency.in_host_memory:
        shapes = [
            stored.plain.shape[-2:] for stored in residency.layouts[index].parameters if len(stored.plain.shape) >= 2
        ]
        widths += [sum(shape[0] for shape in shapes), *(shape[1] for shape in shapes)]
    return max(widths)
