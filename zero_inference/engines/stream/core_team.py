"""The host's cores at work in a run of the stream engine: their threads, how the model meets them, and the blocks that they multiply."""

from __future__ import annotations

import os

from torch import nn

from zero_inference.cpu.cores import SPIN_US, Cores, CoresOfFirstRank
from zero_inference.cpu.crossing import Crossing, HostCalls, HostSide, StreamSide
from zero_inference.cpu.meeting_place import Agreement, meeting_place
from zero_inference.engines.base import Job
from zero_inference.engines.stream.core_blocks import CoreBlock, Workers
from zero_inference.engines.stream.cores import CoresPlan, crossed_bytes
from zero_inference.engines.stream.expert_blocks import ExpertBlock
from zero_inference.engines.stream.expert_cache import ExpertCache
from zero_inference.engines.stream.residency import Residency
from zero_inference.engines.stream.store import BlockStore
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kv_cache.meetings import CoresMeeting, crossing_bytes
from zero_inference.utils.transfers import Transfers


class CoreTeam:
    """The threads of a run, and the blocks that they multiply. All ranks of a host have one together, with threads in the first of them."""

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
        self.most_rows = max(plan.few_rows, plan.prompt_rows)
        self.computable = residency.computed | residency.prompt_computed  # blocks that may be theirs at any time
        if plan.automatic:
            self.computable = self.computable.union(set(residency.computable) - set(residency.expert_blocks))
        self.python_cpus: set[int] | None = None  # where this thread could run before
        self.agreement: Agreement | None = None
        ranks, count = job.ranks, job.ranks.world_size
        self.experts: ExpertCache | None = None  # with one rank
        if residency.expert_slots or residency.quota:
            self.experts = ExpertCache(residency, store, scheme, ranks.device, transfers)
        if count == 1 and not job.on_gpu:
            self.cores = Cores(plan.cpus, spin_us=0)
            self.calls: HostCalls | Crossing = HostCalls(self.cores, transfers)
            return
        cpus = ranks.gather_objects(plan.cpus)[0]
        if job.on_gpu:
            self.python_cpus = _leave_cores(cpus)
        place = meeting_place(ranks, *self._crossed_bytes(job), pinned=job.on_gpu)
        spin_us = SPIN_US if job.on_gpu else 0
        self.cores = Cores(cpus, spin_us, place.flags, ranks=count) if ranks.is_first else CoresOfFirstRank(count)
        side = StreamSide(ranks.device) if job.on_gpu else HostSide()
        self.calls = Crossing(self.cores, side, place, transfers, ranks.rank)
        if count > 1:
            self.agreement = Agreement(ranks.rank, count, place)
            ranks.barrier()  # the first rank has lowered the flags

    def block(self, index: int, module: nn.Module) -> CoreBlock | ExpertBlock:
        """Block `index`, whose module in the model is `module`, with its task."""
        block, layout = self.residency.blocks[index], self.residency.layouts[index]
        workers = Workers(self.cores, self.calls, self.scheme, self.few_rows, self.most_rows)
        if block.experts is not None:
            on_device = None if self.experts is None else self.experts.slots.get(index)
            return ExpertBlock(block, layout, self.store.whole(index), workers, self.dtype, on_device)
        return CoreBlock(block, module, layout, self.store.whole(index), workers)

    def meeting(self) -> CoresMeeting:
        """Of the model's attention with these threads."""
        return CoresMeeting(self.calls, self.python_cpus)

    def all_few(self, tokens: int) -> bool:
        """Whether the cores may multiply in the pass that begins, of `tokens` tokens here: all ranks have as many, and few. All ranks call
        it in each pass; those that score texts have passes of different lengths."""
        found = [tokens] if self.agreement is None else self.agreement.of_all(tokens)
        return len(set(found)) == 1 and tokens <= self.few_rows

    def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        self.calls.close()
        if self.experts is not None:
            self.experts.close()
        if self.python_cpus is not None:
            os.sched_setaffinity(0, self.python_cpus)
            self.python_cpus = None

    def _crossed_bytes(self, job: Job) -> tuple[int, int]:
        """What a call of a rank brings and takes at most."""
        brought, taken = crossed_bytes(self.residency, self.most_rows, self.dtype.itemsize)
        attended = (0, 0)
        if self.plan.attends:
            attended = crossing_bytes(job.spec.config, self.few_rows, self.dtype.itemsize)
        return max(brought, attended[0]), max(taken, attended[1])


def _leave_cores(cpus: tuple[int, ...]) -> set[int] | None:
    """Keep this thread, which asks for everything, off the cores that multiply; where it could run before, None if it may go on."""
    before = os.sched_getaffinity(0)
    others = before - set(cpus)
    if not others:
        return None
    os.sched_setaffinity(0, others)
    return before
