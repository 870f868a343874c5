"""The CPU backend of the stream engine: its thread pool, and the blocks that it computes from host memory."""

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
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.kv_cache.cpu_attention import PooledCpuAttention, attention_hand_off_bytes
from zero_inference.models.experts import FusedExperts
from zero_inference.utils.transfers import Transfers


@dataclass(frozen=True)
class CpuBlockContext:
    """Settings of all CPU-computed blocks.

    Attributes:
        calls: calls of the pool by the model.
        scheme: quantization of weights; None for 16 bits.
        decode_rows, rows: most tokens of a decode step, and of any pass with the CPU.
    """

    pool: CpuPool
    calls: DirectCalls | HandOff
    scheme: GroupQuantization | None
    decode_rows: int
    rows: int


class CpuBlock:
    """A CPU-computed block: its feed-forward as one task, or its linear modules, of which those with the same input are one task.

    Args:
        buffer: uint8, the block in host memory.
    """

    def __init__(
        self,
        block: Block,
        module: nn.Module,
        layout: BlockLayout,
        buffer: torch.Tensor,
        context: CpuBlockContext,
    ):
        self.context = context
        self.weights = {
            name: _weight(module.get_submodule(name), name, layout, buffer, context.scheme) for name in block.linears
        }
        self.tasks: dict[tuple[str, ...], Task] = {}
        self.shared_input = SharedInput()
        self.task = self._feed_forward_task(block)
        self.usable = (
            True  # False once a call has more rows than the pass has tokens, such as compressed keys of all positions
        )

    def call_linears(self) -> None:
        """Stop computing the block as one task: compute each linear module when it is called."""
        self.task = None

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for hidden states [..., columns]."""
        (out,) = self.context.calls(self.task, x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)

    def linear(self, name: str, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the output of module `name` for x [..., columns]; modules with the same input are computed together.

        Args:
            tokens: of the pass.
        """
        self.usable &= x.numel() // x.shape[-1] <= max(tokens, self.context.decode_rows)
        return self.shared_input.product(name, x, self._products)

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Note that the device computed module `name` for `x`, to learn which modules have the same input."""
        self.shared_input.observe(name, x, self._alike)

    def finish_observing(self) -> None:
        """Clear `usable` unless the first pass on the device called all modules: weights that are read otherwise must be on the device."""
        self.usable &= self.task is not None or self.shared_input.together.keys() == self.weights.keys()

    def end_block(self) -> None:
        """Release the input, after the block's last module."""
        self.shared_input.end_block()

    def _products(self, names: tuple[str, ...], x: torch.Tensor) -> list[torch.Tensor]:
        outs = self.context.calls(self._task_of(names), x.reshape(-1, x.shape[-1]))
        return [out.view(*x.shape[:-1], -1) for out in outs]

    def _alike(self, one: str, other: str) -> bool:
        """Return whether the kernels prepare the same input for both weights."""
        a, b = self.weights[one].matrix, self.weights[other].matrix
        return (a.bits, a.group, a.dtype, a.columns) == (b.bits, b.group, b.dtype, b.columns)

    def _task_of(self, names: tuple[str, ...]) -> Task:
        if names not in self.tasks:
            self.tasks[names] = self._add_block([Stage([self.weights[name] for name in names])])
        return self.tasks[names]

    def _feed_forward_task(self, block: Block) -> Task | None:
        """Return a task for the whole feed-forward; None if its form or its weights' formats do not allow one."""
        mlp = block.feed_forward
        if mlp is None:
            return None
        weights = [self.weights[name] for name in mlp.first]
        if len(mlp.first) == 2 and mlp.first[0] == mlp.first[1]:  # gate and up in one weight
            weights = _halves(weights[0])[:: -1 if mlp.gate_is_second else 1]
        if len({weight.matrix.dtype for weight in self.weights.values()}) > 1:
            return None
        if len(weights) == 2 and not _same_form(weights[0].matrix, weights[1].matrix):
            return None
        combine = "gated" if len(weights) == 2 else "activation"
        return self._add_block([Stage(weights, combine, mlp.activation), Stage([self.weights[mlp.last]])])

    def _add_block(self, stages: list[Stage]) -> Task:
        # one dtype in all stages; some families keep modules in float32: input and output have that dtype
        (code,) = {weight.matrix.dtype for stage in stages for weight in stage.weights}
        task = self.context.pool.add_block(stages, next(dtype for dtype, known in DTYPES.items() if known == code))
        self.context.pool.reserve(task, self.context.rows)
        return task


def _same_form(one: Matrix, other: Matrix) -> bool:
    return (one.bits, one.group, one.dtype, one.rows) == (other.bits, other.group, other.dtype, other.rows)


def _stored_matrix(stored: StoredParameter, buffer: torch.Tensor, scheme: GroupQuantization | None) -> Matrix:
    """Return the matrix of a weight [..., columns] in `buffer`; all dimensions before the last are rows."""
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
    matrix = _stored_matrix(stored, buffer, scheme)
    bias = None
    if linear.bias is not None:
        bias = layout[f"{name}.bias" if name else "bias"].plain.of(buffer)
    nbytes = sum(piece.nbytes for piece in stored.pieces) + (0 if bias is None else bias.nbytes)
    return Weight(matrix, bias, nbytes)


def _halves(weight: Weight) -> list[Weight]:
    """Return views of the first and the second half of the rows."""
    rows = weight.matrix.rows // 2
    biases = (None, None) if weight.bias is None else weight.bias.split(rows)
    return [
        Weight(weight.matrix.rows_view(half * rows, rows), bias, weight.nbytes // 2) for half, bias in enumerate(biases)
    ]


class CpuExpertBlock:
    """A CPU-computed block of experts as one task; arguments as of `CpuBlock`.

    Args:
        cache: the experts that the device multiplies meanwhile; None for none.
    """

    usable = True  # see `CpuBlock`

    def __init__(
        self,
        block: Block,
        layout: BlockLayout,
        buffer: torch.Tensor,
        context: CpuBlockContext,
        dtype: torch.dtype,
        cache: ExpertCache | None = None,
    ):
        assert block.experts is not None
        self.calls, self.dtype, self.cache = context.calls, dtype, cache
        self.decode_rows, self.device_multiplies_many = context.decode_rows, multiplies_many(context.scheme)
        form = block.experts
        activation = ExpertActivation(form.activation, form.interleaved, form.limit, form.up_offset)
        experts = _experts(form, layout, buffer, context.scheme)
        self.task = add_experts(context.pool, experts, activation, dtype, None if cache is None else cache.counters)
        context.pool.reserve(self.task, context.rows, form.top_k)

    def feed_forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' output for hidden states [..., hidden], expert ids [tokens, k] and their weights [tokens, k]."""
        weights = top_k_weights if top_k_weights.dtype in DTYPES else top_k_weights.float()
        x = hidden_states.to(self.dtype).reshape(-1, hidden_states.shape[-1])  # [tokens, hidden]
        expert_ids = top_k_index.to(torch.int64)
        is_prompt = self.cache is not None and len(expert_ids) > self.decode_rows
        if is_prompt:
            self.cache.count_uses(expert_ids)
        if self.cache is None or (is_prompt and not self.device_multiplies_many):
            (out,) = self.calls(self.task, x, Routing(expert_ids, weights))
        else:
            out = self._with_device(self.cache, x, expert_ids, weights)
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _with_device(
        self, cache: ExpertCache, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of all experts: the device multiplies cached and fetched ones while the CPU multiplies the others."""
        try:
            dispatched = cache.dispatch(expert_ids)
            routing = Routing(dispatched.for_cpu, weights)
            (out,) = self.calls(self.task, x, routing, lambda: cache.products(x, dispatched, weights))
        except BaseException:
            cache.invalidate()
            raise
        return out

    def end_block(self) -> None:
        """Do nothing, see `CpuBlock.end_block`."""


def _experts(
    experts: FusedExperts, layout: BlockLayout, buffer: torch.Tensor, scheme: GroupQuantization | None
) -> list[Expert]:
    """Return the weights of each expert as views of a block's `buffer` in host memory."""
    first, last = (_stored_matrix(layout[name], buffer, scheme) for name in (experts.gate_up, experts.down))
    first_bias, last_bias = (
        layout[name].plain.of(buffer) if name else [None] * experts.num_experts
        for name in (experts.gate_up_bias, experts.down_bias)
    )
    inner, hidden = last.columns, last.rows // experts.num_experts
    is_one_product = experts.interleaved or not experts.gated
    width = (1 + experts.interleaved) * inner
    result = []
    for expert in range(experts.num_experts):
        begin, bias = expert * (1 + experts.gated) * inner, first_bias[expert]
        down, down_bias = last.rows_view(expert * hidden, hidden), last_bias[expert]
        if is_one_product:
            result.append(Expert(first.rows_view(begin, width), None, down, bias, None, down_bias))
            continue
        halves = [first.rows_view(begin + half * inner, inner) for half in range(2)]
        biases = (None, None) if bias is None else bias.split(inner)
        (gate, gate_bias), (up, up_bias) = list(zip(halves, biases))[:: -1 if experts.gate_is_second else 1]
        result.append(Expert(gate, up, down, gate_bias, up_bias, down_bias))
    return result


class CpuBackend:
    """The thread pool of a run, and the blocks that it computes. All ranks of a host share it; the first rank has the threads."""

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
        self.dtype, self.decode_rows = job.spec.dtype, plan.decode_rows
        self.max_rows = max(plan.decode_rows, plan.prompt_rows)
        # blocks that may be CPU-computed at any time
        self.computable = placement.cpu_computed | placement.prompt_cpu_computed
        if plan.automatic:
            self.computable = self.computable.union(set(placement.computable) - set(placement.expert_blocks))
        self.python_cpus: set[int] | None = None  # affinity of this thread before
        self.exchange: RankExchange | None = None
        ranks, count = job.ranks, job.ranks.world_size
        self.experts: ExpertCaches | None = None  # with one rank
        if placement.expert_slots or placement.quota:
            self.experts = ExpertCaches(placement, store, scheme, ranks.device, transfers)
        if count == 1 and not job.on_gpu:
            self.pool = CpuPool(plan.cpus, spin_us=0)
            self.calls: DirectCalls | HandOff = DirectCalls(self.pool, transfers)
            return
        cpus = ranks.gather_objects(plan.cpus)[0]
        buffers = allocate_buffers(ranks, *self._hand_off_bytes(job), pinned=job.on_gpu)
        spin_us = SPIN_US if job.on_gpu else 0
        self.pool = CpuPool(cpus, spin_us, buffers.flags, ranks=count) if ranks.is_first else CpuPoolProxy(count)
        side = StreamSide(ranks.device) if job.on_gpu else HostSide()
        self.calls = HandOff(self.pool, side, buffers, transfers, ranks.rank)
        if job.on_gpu:
            self.python_cpus = _avoid_cpus(cpus)  # after what may fail
        if count > 1:
            self.exchange = RankExchange(ranks.rank, count, buffers)
            ranks.barrier()  # until the first rank has cleared the flags

    def block(self, index: int, module: nn.Module) -> CpuBlock | CpuExpertBlock:
        """Return block `index`, whose module in the model is `module`, with its task."""
        block, layout = self.placement.blocks[index], self.placement.layouts[index]
        context = CpuBlockContext(self.pool, self.calls, self.scheme, self.decode_rows, self.max_rows)
        if block.experts is not None:
            cache = None if self.experts is None else self.experts.by_block.get(index)
            return CpuExpertBlock(block, layout, self.store.whole(index), context, self.dtype, cache)
        return CpuBlock(block, module, layout, self.store.whole(index), context)

    def attention(self) -> PooledCpuAttention:
        return PooledCpuAttention(self.calls, self.python_cpus)

    def may_compute(self, tokens: int) -> bool:
        """Return whether the CPU may compute in the next pass, of `tokens` tokens in this rank: all ranks have equally many, and few.

        All ranks call it in each pass; when they score texts, their passes have different lengths.
        """
        found = [tokens] if self.exchange is None else self.exchange.all_gather(tokens)
        return len(set(found)) == 1 and tokens <= self.decode_rows

    def close(self) -> None:
        """Wait for the calls in flight, and end the threads."""
        self.calls.close()
        if self.experts is not None:
            self.experts.close()
        if self.python_cpus is not None:
            os.sched_setaffinity(0, self.python_cpus)
            self.python_cpus = None

    def _hand_off_bytes(self, job: Job) -> tuple[int, int]:
        """Return the bytes of the largest input and the largest output of one rank's call: of weights or of attention."""
        inputs, outputs = hand_off_bytes(self.placement, self.max_rows, self.dtype.itemsize)
        if not self.plan.attends:
            return inputs, outputs
        attention_inputs, attention_outputs = attention_hand_off_bytes(
            job.spec.config, self.decode_rows, self.dtype.itemsize
        )
        return max(inputs, attention_inputs), max(outputs, attention_outputs)


def _avoid_cpus(cpus: tuple[int, ...]) -> set[int] | None:
    """Keep this thread, which queues all GPU work, off the pool's `cpus`; return its affinity before, or None if it has no other CPU."""
    before = os.sched_getaffinity(0)
    others = before - set(cpus)
    if not others:
        return None
    os.sched_setaffinity(0, others)
    return before
