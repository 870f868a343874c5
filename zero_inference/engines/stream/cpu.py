"""The CPU backend of the stream engine: its thread pool, and the blocks that it computes from host memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from zero_inference.cpu.experts import Expert, ExpertActivation, add_experts
from zero_inference.cpu.hand_off import DirectCalls, HandOff, Lane, StreamSide, allocate_buffers
from zero_inference.cpu.library import DTYPES
from zero_inference.cpu.pool import SPIN_US, CpuPool, Routing, Stage, Task, Weight
from zero_inference.cpu.products import Matrix
from zero_inference.engines.base import Job
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.cpu_plan import CpuPlan, hand_off_bytes
from zero_inference.engines.stream.expert_cache import ExpertCache, ExpertCaches, HostExperts
from zero_inference.engines.stream.layout import BlockLayout, BlockStore, StoredParameter
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import SharedInput, weight_of
from zero_inference.kv_cache.cpu_attention import CpuAttention, attention_hand_off_bytes
from zero_inference.models.mlp import FusedExperts
from zero_inference.utils.timing import Transfers

# Replaces `SPIN_US` where weights are on disk: between layers the CPU waits tens of milliseconds for reads, and spinning threads take CPUs
# from the threads that read.
DISK_SPIN_US = 200


class CpuBlock(SharedInput):
    """A CPU-computed block: its feed-forward as one task, or its linear modules, of which those with the same input are one task.

    Args:
        buffers: the block in host memory, or one for each slot of a ring buffer.

    Attributes:
        slot: number of that buffer.
        block_tasks: by buffer, the task of the whole block; empty where each linear module is computed when it is called.
        usable: False once a call has more rows than the pass has tokens, such as compressed keys of all positions.
    """

    usable = True

    def __init__(self, block: Block, module: nn.Module, buffers: Sequence[torch.Tensor], backend: CpuBackend):
        super().__init__()
        self.backend, self.slot = backend, 0
        linears = {name: module.get_submodule(name) for name in block.linears}
        self.weights = [
            {name: _weight(linear, name, block.layout, buffer) for name, linear in linears.items()}
            for buffer in buffers
        ]
        self.module_tasks: list[dict[tuple[str, ...], Task]] = [{} for _ in buffers]  # by buffer and modules
        stages = (self._feed_forward_stages(block, weights) for weights in self.weights)
        self.block_tasks = [self._add_task(each) for each in stages if each]

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for hidden states [..., columns]."""
        (out,) = self.backend.calls(self.block_tasks[self.slot], x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)

    def linear(self, name: str, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the output of module `name` for x [..., columns] in a pass of `tokens` tokens."""
        self.usable &= x.numel() // x.shape[-1] <= max(tokens, self.backend.decode_rows)
        return self.product(name, x)

    def alike(self, one: str, other: str) -> bool:  # the kernels prepare the same input for both weights
        weights = self.weights[0]
        return weights[one].matrix.format == weights[other].matrix.format

    def finish_observing(self) -> None:
        """Clear `usable` unless the first pass on the device called all modules: weights that are read otherwise must be on the device."""
        self.usable &= bool(self.block_tasks) or self.together.keys() == self.weights[0].keys()

    def products(self, names: tuple[str, ...], x: torch.Tensor) -> list[torch.Tensor]:
        tasks, weights = self.module_tasks[self.slot], self.weights[self.slot]
        if names not in tasks:
            tasks[names] = self._add_task([Stage([weights[name] for name in names])])
        outs = self.backend.calls(tasks[names], x.reshape(-1, x.shape[-1]))
        return [out.view(*x.shape[:-1], -1) for out in outs]

    def _feed_forward_stages(self, block: Block, named: Mapping[str, Weight]) -> list[Stage]:
        """Return the stages of the whole feed-forward; none if its form or its weights' formats do not allow one task."""
        mlp = block.feed_forward
        if mlp is None or len({weight.matrix.dtype for weight in named.values()}) > 1:
            return []
        weights = [named[name] for name in mlp.first]
        if len(mlp.first) == 2 and mlp.first[0] == mlp.first[1]:  # gate and up in one weight
            both = weights[0]
            halves = _gate_and_up(both.matrix, both.bias, 0, both.matrix.rows // 2, mlp.gate_is_second)
            weights = [Weight(matrix, bias, both.nbytes // 2) for matrix, bias in halves]
        if len({(each.matrix.rows, *each.matrix.format) for each in weights}) > 1:
            return []
        combine = "gated" if len(weights) == 2 else "activation"
        return [Stage(weights, combine, mlp.activation), Stage([named[mlp.last]])]

    def _add_task(self, stages: list[Stage]) -> Task:
        # one dtype in all stages; some families keep modules in float32: input and output have that dtype
        (number,) = {weight.matrix.dtype for stage in stages for weight in stage.weights}
        pool = self.backend.pool
        task = pool.add_block(stages, list(DTYPES)[number])
        pool.reserve(task, self.backend.max_rows)
        return task


def _gate_and_up(
    both: Matrix, bias: torch.Tensor | None, begin: int, rows: int, gate_is_second: bool
) -> list[tuple[Matrix, torch.Tensor | None]]:
    """Return (matrix, bias) of gate and of up, `rows` each, of which `both` has one after the other from row `begin` on."""
    biases = (None, None) if bias is None else bias.split(rows)
    halves = [(both.rows_view(begin + half * rows, rows), biases[half]) for half in (0, 1)]
    return halves[::-1] if gate_is_second else halves


def _stored_matrix(stored: StoredParameter, buffer: torch.Tensor) -> Matrix:
    """Return the matrix of a weight [..., columns] in `buffer`; all dimensions before the last are rows."""
    columns = stored.plain.shape[-1]
    rows = math.prod(stored.plain.shape[:-1])
    if stored.packed is None:
        return Matrix.plain(stored.plain.of(buffer).view(rows, columns))
    return Matrix.quantized(stored.packed.of(buffer), rows, columns, stored.plain.dtype)


def _weight(linear: nn.Module, name: str, layout: BlockLayout, buffer: torch.Tensor) -> Weight:
    stored = layout[weight_of(name)]
    matrix = _stored_matrix(stored, buffer)
    bias = None
    if linear.bias is not None:
        bias = layout[f"{name}.bias" if name else "bias"].plain.of(buffer)
    nbytes = sum(piece.nbytes for piece in stored.pieces) + (0 if bias is None else bias.nbytes)
    return Weight(matrix, bias, nbytes)


class CpuExperts(CpuBlock):
    """A CPU-computed block of experts as one task; the device multiplies those in the block's cache meanwhile, if there is one."""

    def __init__(
        self,
        block: Block,
        module: nn.Module,
        buffers: Sequence[torch.Tensor],
        backend: CpuBackend,
        cache: ExpertCache | None,
    ):
        super().__init__(block, module, buffers, backend)
        form, self.cache, self.device_fuses_experts = block.experts, cache, backend.placement.fuses_codes
        activation = ExpertActivation(form.activation, form.interleaved, form.limit, form.up_offset)
        self.slots_for: Callable[[list[int]], dict[int, int]] | None = None  # of experts that may be on disk
        counts = None if cache is None else cache.counts
        for buffer in buffers:
            experts = _experts(form, block.layout, buffer)
            self.block_tasks.append(add_experts(backend.pool, experts, activation, backend.dtype, counts))
            backend.pool.reserve(self.block_tasks[-1], backend.max_rows, form.top_k)

    def feed_forward(  # type: ignore[override]  # it is called with the arguments of the block's module
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' output for hidden states [..., hidden], expert ids [tokens, k] and their weights [tokens, k]."""
        weights = top_k_weights if top_k_weights.dtype in DTYPES else top_k_weights.float()
        backend, cache, task = self.backend, self.cache, self.block_tasks[self.slot]
        x = hidden_states.to(backend.dtype).reshape(-1, hidden_states.shape[-1])  # [tokens, hidden]
        expert_ids = top_k_index.to(torch.int64)
        is_prompt = cache is not None and len(expert_ids) > backend.decode_rows
        if is_prompt:
            cache.count_uses(expert_ids)
        if cache is None or (is_prompt and not self.device_fuses_experts):
            (out,) = backend.calls(task, x, Routing(self._on_host(expert_ids), weights))
        else:  # the device multiplies cached and fetched experts while the CPU multiplies the others
            try:
                dispatched = cache.dispatch(expert_ids)
                routing = Routing(self._on_host(dispatched.for_cpu), weights)
                (out,) = backend.calls(task, x, routing, lambda: cache.products(x, dispatched, weights))
            except BaseException:
                cache.invalidate()
                raise
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _on_host(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `ids` as the task takes them: where experts are on disk, those of slots in host memory, after reading what is missing.

        The device may still compute: the CPU has multiplied all earlier experts before it knows these ids, so their slots are free.
        """
        if self.slots_for is None:
            return ids
        found = ids.tolist()  # waits for the device
        slots = self.slots_for([expert for row in found for expert in row if expert >= 0])
        of_device = sorted({expert for row in found for expert in row if expert < 0})
        slots |= {
            expert: ~index for index, expert in enumerate(of_device)
        }  # the task counts them, by ids below its number of slots
        return torch.tensor([[slots[expert] for expert in row] for row in found], device=ids.device)


def _experts(experts: FusedExperts, layout: BlockLayout, buffer: torch.Tensor) -> list[Expert]:
    first, last = (_stored_matrix(layout[name], buffer) for name in (experts.gate_up, experts.down))
    first_bias, last_bias = (
        layout[name].plain.of(buffer) if name else [None] * experts.num_experts
        for name in (experts.gate_up_bias, experts.down_bias)
    )
    inner, hidden = last.columns, last.rows // experts.num_experts
    is_one_matrix = experts.interleaved or not experts.gated
    width = (1 + experts.interleaved) * inner
    result = []
    for expert in range(experts.num_experts):
        begin, bias = expert * (1 + experts.gated) * inner, first_bias[expert]
        down, down_bias = last.rows_view(expert * hidden, hidden), last_bias[expert]
        if is_one_matrix:
            result.append(Expert(first.rows_view(begin, width), None, down, bias, None, down_bias))
            continue
        (gate, gate_bias), (up, up_bias) = _gate_and_up(first, bias, begin, inner, experts.gate_is_second)
        result.append(Expert(gate, up, down, gate_bias, up_bias, down_bias))
    return result


class CpuBackend:
    """The thread pool of a run, which serves all of its devices, and the blocks that it computes."""

    def __init__(self, plan: CpuPlan, job: Job, placement: Placement, store: BlockStore, transfers: Transfers):
        self.plan, self.placement, self.store = plan, placement, store
        self.dtype, self.decode_rows = job.spec.dtype, plan.decode_rows
        self.rebalances = job.config.speculate is None and not placement.on_disk  # the disk is slower than both
        self.max_rows = max(plan.decode_rows, plan.prompt_rows)
        # blocks that may be CPU-computed at any time
        self.computable = placement.cpu_computed | placement.prompt_cpu_computed
        if plan.automatic:
            self.computable = self.computable.union(set(placement.computable) - set(placement.expert_blocks))
        self.python_cpus: set[int] | None = None  # affinity of this thread before
        self.experts: ExpertCaches | None = None
        if placement.expert_slots or placement.quota:
            self.experts = ExpertCaches(placement, store, job.devices, transfers)
        self.host_experts: HostExperts | None = None
        if placement.cached_on_host:
            self.host_experts = HostExperts(placement, store.disk, store.pinned, transfers)
        if not job.on_gpu:
            self.pool = CpuPool(plan.cpus, spin_us=0)
            self.calls: DirectCalls | HandOff = DirectCalls(self.pool, transfers)
            return
        nbytes = hand_off_bytes(placement, self.max_rows, self.dtype.itemsize)  # of inputs, and of outputs
        if plan.attends:
            of_attention = attention_hand_off_bytes(job.spec.config, self.decode_rows, self.dtype.itemsize)
            nbytes = max(nbytes[0], of_attention[0]), max(nbytes[1], of_attention[1])
        flags, buffers = allocate_buffers(*nbytes, pinned=True, devices=len(job.devices))
        self.pool = CpuPool(plan.cpus, DISK_SPIN_US if placement.on_disk else SPIN_US, flags)
        lanes = [Lane(StreamSide(device), each) for device, each in zip(job.devices, buffers, strict=True)]
        self.calls = HandOff(self.pool, lanes, transfers)
        self.python_cpus = _avoid_cpus(plan.cpus)  # after what may fail

    def block(self, index: int, module: nn.Module, slots: Sequence[torch.Tensor] = ()) -> CpuBlock:
        """Return the block as the CPU computes it, in host memory or in the `slots` of a ring buffer, uint8."""
        block, host = self.placement.blocks[index], self.host_experts
        cache = None if self.experts is None else self.experts.by_block.get(index)
        if host is not None and index in host.row_of:
            found = CpuExperts(host.block, module, [host.buffer], self, cache)
            found.slots_for = partial(host.slots_for, index)
            return found
        buffers = slots or [self.store.buffers[index]]
        if block.experts is None:
            return CpuBlock(block, module, buffers, self)
        return CpuExperts(block, module, buffers, self, cache)

    def attention(self) -> CpuAttention:
        return CpuAttention(self.calls, self.python_cpus)

    def may_compute(self, tokens: int) -> bool:
        """Return whether the CPU may compute in a pass of `tokens` tokens: it has few."""
        return tokens <= self.decode_rows

    def close(self) -> None:
        self.calls.close()
        if self.host_experts is not None:
            self.host_experts.close()
        if self.experts is not None:
            self.experts.close()
        if self.python_cpus is not None:
            os.sched_setaffinity(0, self.python_cpus)
            self.python_cpus = None


def _avoid_cpus(cpus: tuple[int, ...]) -> set[int] | None:
    """Keep this thread, which queues all GPU work, off the pool's `cpus`; return its affinity before, or None if it has no other CPU."""
    before = os.sched_getaffinity(0)
    others = before - set(cpus)
    if not others:
        return None
    os.sched_setaffinity(0, others)
    return before
