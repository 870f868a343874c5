"""A block in host memory that the cores multiply where it lies."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import nn

from zero_inference.cpu.experts import Expert, ExpertActivation, add_experts
from zero_inference.cpu.hand_off import DirectCalls, HandOff, HostSide, RankExchange, StreamSide, allocate_buffers
from zero_inference.cpu.library import DTYPES
from zero_inference.cpu.pool import SPIN_US, CpuPool, CpuPoolProxy, Routing, Stage, Task, Weight
from zero_inference.cpu.products import Matrix
from zero_inference.engines.base import Job
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.cpu_plan import CpuPlan, hand_off_bytes
from zero_inference.engines.stream.expert_cache import ExpertCache, ExpertCaches, multiplies_many
from zero_inference.engines.stream.layout import BlockLayout, BlockStore, StoredParameter
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import SharedInput
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kv_cache.cpu_attention import PooledCpuAttention, attention_hand_off_bytes
from zero_inference.models.experts import FusedExperts
from zero_inference.utils.transfers import Transfers


@dataclass(frozen=True)
class CpuBlockContext:
    """What blocks on the cores work with.

    Attributes:
        calls: how the model calls the cores.
        scheme: how weights are stored; None where they keep 16 bits.
        few_rows, rows: most tokens of a decode step, and of any pass that this is for.
    """

    cores: CpuPool
    calls: DirectCalls | HandOff
    scheme: GroupQuantization | None
    few_rows: int
    rows: int


class CpuBlock:
    """The products of a block on the cores: of its feed-forward as one task, or of its linear modules.

    Linear modules that take the same input become one task.

    Args:
        buffer: uint8, the block as it waits in host memory.
    """

    def __init__(
        self,
        block: Block,
        module: nn.Module,
        layout: BlockLayout,
        buffer: torch.Tensor,
        workers: CpuBlockContext,
    ):
        self.workers = workers
        self.weights = {
            name: _weight(module.get_submodule(name), name, layout, buffer, workers.scheme) for name in block.linears
        }
        self.tasks: dict[tuple[str, ...], Task] = {}
        self.shared_input = SharedInput()
        self.task = self._feed_forward_task(block)
        self.suits = True  # until it is given more rows than the pass has tokens: compressed keys and values of all positions, say

    def call_linears(self) -> None:
        """Multiply each linear module when it is called, from now on, and never the block as a whole."""
        self.task = None

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of the block, for hidden states [..., columns]."""
        (out,) = self.workers.calls(self.task, x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)

    def linear(self, name: str, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """The product of module `name` with x [..., columns]; those of the others with the same input are made with it.

        Args:
            tokens: of the pass.
        """
        self.suits &= x.numel() // x.shape[-1] <= max(tokens, self.workers.few_rows)
        return self.shared_input.product(name, x, self._products)

    def saw(self, name: str, x: torch.Tensor) -> None:
        """Module `name` was called with `x`, and the device computed it."""
        self.shared_input.observe(name, x, self._alike)

    def learned(self) -> None:
        """The device has computed the block once. If the model reads a weight without calling its module, that has to be on the device."""
        self.suits &= self.task is not None or self.shared_input.together.keys() == self.weights.keys()

    def ends(self) -> None:
        """The block was called to its end: its input may go."""
        self.shared_input.end_block()

    def _products(self, names: tuple[str, ...], x: torch.Tensor) -> list[torch.Tensor]:
        outs = self.workers.calls(self._task_of(names), x.reshape(-1, x.shape[-1]))
        return [out.view(*x.shape[:-1], -1) for out in outs]

    def _alike(self, one: str, other: str) -> bool:
        """Whether one prepared input serves both weights."""
        a, b = self.weights[one].matrix, self.weights[other].matrix
        return (a.bits, a.group, a.dtype, a.columns) == (b.bits, b.group, b.dtype, b.columns)

    def _task_of(self, names: tuple[str, ...]) -> Task:
        if names not in self.tasks:
            self.tasks[names] = self._reserved([Stage([self.weights[name] for name in names])])
        return self.tasks[names]

    def _feed_forward_task(self, block: Block) -> Task | None:
        found = block.feed_forward
        if found is None:
            return None
        weights = [self.weights[name] for name in found.first]
        if len(found.first) == 2 and found.first[0] == found.first[1]:
            weights = _halves(weights[0])[:: -1 if found.gate_is_second else 1]
        if len({weight.matrix.dtype for weight in self.weights.values()}) > 1:
            return None
        if len(weights) == 2 and not _same_form(weights[0].matrix, weights[1].matrix):
            return None
        combine = "gated" if len(weights) == 2 else "activation"
        return self._reserved([Stage(weights, combine, found.activation), Stage([self.weights[found.last]])])

    def _reserved(self, stages: list[Stage]) -> Task:
        numbers = {weight.matrix.dtype for stage in stages for weight in stage.weights}
        (number,) = numbers  # a family may keep some modules in float32: input and output are of their weights' dtype
        task = self.workers.cores.add_block(stages, next(dtype for dtype, known in DTYPES.items() if known == number))
        self.workers.cores.reserve(task, self.workers.rows)
        return task


def _same_form(one: Matrix, other: Matrix) -> bool:
    return (one.bits, one.group, one.dtype, one.rows) == (other.bits, other.group, other.dtype, other.rows)


def stored_matrix(stored: StoredParameter, buffer: torch.Tensor, scheme: GroupQuantization | None) -> Matrix:
    """A weight [..., columns] where it lies in `buffer`; all dimensions before the last are rows."""
    columns = stored.plain.shape[-1]
    rows = math.prod(stored.plain.shape[:-1])
    tensors = [piece.of(buffer) for piece in stored.pieces]
    if stored.packed is None or scheme is None:
        return Matrix.plain(tensors[0].view(rows, columns))
    codes, scales, minima = tensors
    return Matrix.groups(codes, scales, minima, scheme.bits, scheme.group_size, rows)


def _weight(
    linear: nn.Module, name: str, layout: BlockLayout, buffer: torch.Tensor, scheme: GroupQuantization | None
) -> Weight:
    stored = layout[f"{name}.weight" if name else "weight"]
    matrix = stored_matrix(stored, buffer, scheme)
    bias = None
    if linear.bias is not None:
        bias = layout[f"{name}.bias" if name else "bias"].plain.of(buffer)
    nbytes = sum(piece.nbytes for piece in stored.pieces) + (0 if bias is None else bias.nbytes)
    return Weight(matrix, bias, nbytes)


def _halves(weight: Weight) -> list[Weight]:
    """The first and the second half of the rows."""
    matrix, halves = weight.matrix, []
    rows = matrix.rows // 2
    for half in range(2):
        bias = None if weight.bias is None else weight.bias[half * rows : (half + 1) * rows]
        halves.append(Weight(matrix.part(half * rows, rows), bias, weight.nbytes // 2))
    return halves


class CpuExpertBlock:
    """A block of experts as one task of the cores; arguments as of `CoreBlock`.

    transformers calls the module of experts with hidden states [tokens, hidden] and what the router chose for each token.

    Args:
        on_device: the experts that the device multiplies while the CPU multiplies the others; None for none.
    """

    suits = True  # as a `CoreBlock` has it

    def __init__(
        self,
        block: Block,
        layout: BlockLayout,
        buffer: torch.Tensor,
        workers: CpuBlockContext,
        dtype: torch.dtype,
        on_device: ExpertCache | None = None,
    ):
        assert block.experts is not None
        self.calls, self.dtype, self.on_device = workers.calls, dtype, on_device
        use = None if on_device is None else on_device.use
        self.few_rows, self.device_multiplies_many = workers.few_rows, multiplies_many(workers.scheme)
        form = block.experts
        between = ExpertActivation(form.activation, form.interleaved, form.limit, form.up_offset)
        self.task = add_experts(workers.cores, _experts(form, layout, buffer, workers.scheme), between, dtype, use)
        workers.cores.reserve(self.task, workers.rows, block.experts.chosen)

    def feed_forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the module computes: for hidden states [..., hidden], the numbers of the experts of each [tokens, k], and their
        weights [tokens, k]."""
        weights = top_k_weights if top_k_weights.dtype in DTYPES else top_k_weights.float()
        x = hidden_states.to(self.dtype).reshape(-1, hidden_states.shape[-1])
        numbers = top_k_index.to(torch.int64)
        is_prompt = self.on_device is not None and len(numbers) > self.few_rows
        if is_prompt:
            self.on_device.count(numbers)
        if self.on_device is None or (is_prompt and not self.device_multiplies_many):
            (out,) = self.calls(self.task, x, Routing(numbers, weights))
        else:
            out = self._beside_device(self.on_device, x, numbers, weights)
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _beside_device(
        self, on_device: ExpertCache, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of all experts: of those in slots and fetched ones by the device, while the CPU multiplies the others."""
        try:
            division = on_device.divide(numbers)
            choice = Routing(division.for_cpu, weights)
            (out,) = self.calls(self.task, x, choice, lambda: on_device.products(x, division, weights))
        except BaseException:
            on_device.forget()
            raise
        return out

    def ends(self) -> None:
        """The block was called to its end; nothing is kept from call to call."""


def _experts(
    experts: FusedExperts, layout: BlockLayout, buffer: torch.Tensor, scheme: GroupQuantization | None
) -> list[Expert]:
    first, last = (stored_matrix(layout[name], buffer, scheme) for name in (experts.first, experts.last))
    first_bias, last_bias = (
        layout[name].plain.of(buffer) if name else [None] * experts.number
        for name in (experts.first_bias, experts.last_bias)
    )
    inner, hidden = last.columns, last.rows // experts.number
    together = experts.interleaved or not experts.gated  # of one product
    width = (1 + experts.interleaved) * inner
    made = []
    for number in range(experts.number):
        begin, bias = number * (1 + experts.gated) * inner, first_bias[number]
        down, down_bias = last.part(number * hidden, hidden), last_bias[number]
        if together:
            made.append(Expert(first.part(begin, width), None, down, bias, None, down_bias))
            continue
        products = [
            (first.part(begin + half * inner, inner), None if bias is None else bias[half * inner :][:inner])
            for half in range(2)
        ]
        (gate, gate_bias), (up, up_bias) = products[::-1] if experts.gate_is_second else products
        made.append(Expert(gate, up, down, gate_bias, up_bias, down_bias))
    return made


class CpuBackend:
    """The threads of a run, and the blocks that they multiply. All ranks of a host have one together, with threads in the first of them."""

    def __init__(
        self,
        plan: CpuPlan,
        job: Job,
        placement: Placement,
        store: BlockStore,
        scheme: GroupQuantization | None,
        transfers: Transfers,
    ):
        self.plan, self.placement, self.store, self.scheme = plan, placement, store, scheme
        self.dtype, self.few_rows = job.spec.dtype, plan.few_rows
        self.most_rows = max(plan.few_rows, plan.prompt_rows)
        self.computable = (
            placement.cpu_computed | placement.prompt_cpu_computed
        )  # blocks that may be theirs at any time
        if plan.automatic:
            self.computable = self.computable.union(set(placement.computable) - set(placement.expert_blocks))
        self.python_cpus: set[int] | None = None  # where this thread could run before
        self.agreement: RankExchange | None = None
        ranks, count = job.ranks, job.ranks.world_size
        self.experts: ExpertCaches | None = None  # with one rank
        if placement.expert_slots or placement.quota:
            self.experts = ExpertCaches(placement, store, scheme, ranks.device, transfers)
        if count == 1 and not job.on_gpu:
            self.cores = CpuPool(plan.cpus, spin_us=0)
            self.calls: DirectCalls | HandOff = DirectCalls(self.cores, transfers)
            return
        cpus = ranks.gather_objects(plan.cpus)[0]
        if job.on_gpu:
            self.python_cpus = _leave_cores(cpus)
        place = allocate_buffers(ranks, *self._crossed_bytes(job), pinned=job.on_gpu)
        spin_us = SPIN_US if job.on_gpu else 0
        self.cores = CpuPool(cpus, spin_us, place.flags, ranks=count) if ranks.is_first else CpuPoolProxy(count)
        side = StreamSide(ranks.device) if job.on_gpu else HostSide()
        self.calls = HandOff(self.cores, side, place, transfers, ranks.rank)
        if count > 1:
            self.agreement = RankExchange(ranks.rank, count, place)
            ranks.barrier()  # the first rank has lowered the flags

    def block(self, index: int, module: nn.Module) -> CpuBlock | CpuExpertBlock:
        """Block `index`, whose module in the model is `module`, with its task."""
        block, layout = self.placement.blocks[index], self.placement.layouts[index]
        workers = CpuBlockContext(self.cores, self.calls, self.scheme, self.few_rows, self.most_rows)
        if block.experts is not None:
            on_device = None if self.experts is None else self.experts.slots.get(index)
            return CpuExpertBlock(block, layout, self.store.whole(index), workers, self.dtype, on_device)
        return CpuBlock(block, module, layout, self.store.whole(index), workers)

    def attention(self) -> PooledCpuAttention:
        """Of the model's attention with these threads."""
        return PooledCpuAttention(self.calls, self.python_cpus)

    def all_few(self, tokens: int) -> bool:
        """Whether the cores may multiply in the pass that begins, of `tokens` tokens here: all ranks have as many, and few. All ranks call
        it in each pass; those that score texts have passes of different lengths."""
        found = [tokens] if self.agreement is None else self.agreement.all_gather(tokens)
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
        brought, taken = hand_off_bytes(self.placement, self.most_rows, self.dtype.itemsize)
        attended = (0, 0)
        if self.plan.attends:
            attended = attention_hand_off_bytes(job.spec.config, self.few_rows, self.dtype.itemsize)
        return max(brought, attended[0]), max(taken, attended[1])


def _leave_cores(cpus: tuple[int, ...]) -> set[int] | None:
    """Keep this thread, which asks for everything, off the cores that multiply; where it could run before, None if it may go on."""
    before = os.sched_getaffinity(0)
    others = before - set(cpus)
    if not others:
        return None
    os.sched_setaffinity(0, others)
    return before
