"""Gives each block of a transformers model its weights when it is called, or lets the CPU compute it.

A pass begins with `begin_pass`, which tells the ring buffer which blocks the pass will stream. Hooks of each block then wait for its slot,
point the module's parameters at the bytes there, and give the slot back after the block; the ring at once copies the next block into it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_inference.engines.stream.cpu import CpuBackend, CpuBlock, CpuExpertBlock
from zero_inference.engines.stream.cpu_plan import CpuPlan, MeasuredStep, bytes_to_move
from zero_inference.engines.stream.expert_cache import ExpertCache
from zero_inference.engines.stream.layout import BlockStore, BlockViews, Packed, StoredParameter
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import BlockCodes, experts_in_groups, modules_from_codes
from zero_inference.engines.stream.ring import RingBuffer
from zero_inference.engines.stream.streams import ComputeStream, DeviceStreams, Timeline
from zero_inference.kernels.quantization import GroupQuantization, dequantize
from zero_inference.models.layers import decoder_layers
from zero_inference.utils.patching import Patches
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

# Consecutive decode passes that are measured, counted from 1; the first one, after a prefill or a change, is left out.
FIRST_PASS, LAST_PASS = 2, 7
MAX_MEASUREMENTS = 2
set_data = (
    torch.Tensor.data.__set__
)  # writes parameters that are frozen (`api.placed_model`) without a check of the caller


class Rebalancer:
    """Moves blocks between link and CPU by the times of decode passes `FIRST_PASS` to `LAST_PASS`, at most `MAX_MEASUREMENTS` times.

    Args:
        backend: None where nothing can move.
    """

    def __init__(self, backend: CpuBackend | None, timeline: Timeline):
        self.backend, self.timeline = backend, timeline
        self.passes = self.measurements = 0
        self.done = backend is None or not backend.plan.automatic  # a share given by the user stays
        self.has_decoded = False
        self.start = 0.0, 0.0  # clock and CPU busy time at the first measured pass, seconds
        self.first_pass = 1  # index of that pass in the timeline

    def steps_to_settle(self) -> int:
        """Return the decode steps after a prefill until it may rebalance; 0 if it will not, and before the first decode pass."""
        return 0 if self.done or not self.has_decoded else LAST_PASS

    def next_placement(self, placement: Placement, is_decode: bool, candidates: Collection[int]) -> Placement:
        """Return the placement for the next pass; `candidates` may become CPU-computed."""
        self.has_decoded |= is_decode
        if self.done or not is_decode or self.backend is None:
            self.passes = 0
            return placement
        self.passes += 1
        now = time.perf_counter(), self.backend.pool.busy_s()
        if self.passes == FIRST_PASS:
            self.start, self.first_pass = now, self.timeline.pass_index
        if self.passes != LAST_PASS:
            return placement
        step_s, busy_s = ((after - before) / (LAST_PASS - FIRST_PASS) for after, before in zip(now, self.start))
        nbytes = self._bytes_to_move(self.backend.plan, placement, step_s, busy_s)
        if nbytes is None:
            return placement
        changed = placement.rebalanced(nbytes, candidates) if nbytes else placement
        self.passes = 0
        self.measurements += 1
        self.done = changed is placement or self.measurements == MAX_MEASUREMENTS
        return changed

    def _bytes_to_move(self, plan: CpuPlan, placement: Placement, step_s: float, busy_s: float) -> int | None:
        """Return `bytes_to_move` for the measured passes; None if nothing crossed the link in them."""
        streamed_bytes = placement.nbytes_of(placement.streamed)
        if not streamed_bytes:
            return 0  # as planned
        use = self.timeline.link_use(self.first_pass)  # waits for the device
        if use is None or not use.gb_per_s_while_busy:
            return None
        waited_s = self.timeline.waited_for_link_s(self.first_pass) / (LAST_PASS - FIRST_PASS)
        link_s = streamed_bytes / (plan.ranks * use.gb_per_s_while_busy * 1e9)
        if not plan.attends and plan.rates is not None:  # keys and values cross the link at the same time
            both_bytes = streamed_bytes + plan.carried_bytes
            link_s = max(link_s, both_bytes / (plan.rates.link_alone_gb_per_s * 1e9))
        return bytes_to_move(plan, placement, MeasuredStep(step_s, link_s, busy_s, waited_s))


# Runs its argument, host work between two CUDA graphs of a step, now and in every replay
BetweenGraphs = Callable[[Callable[[], Any]], Any]


class PassKind(Enum):
    """Decides which blocks the CPU computes."""

    DECODE = auto()  # those of `Placement.cpu_computed`
    SHORT_PROMPT = auto()  # those of `Placement.prompt_cpu_computed`
    LONG = auto()  # none


class Prefetcher:
    """Hooks the blocks of a model to the ring buffer, the workspace and the CPU backend.

    Outside of its block's call a streamed parameter is empty: code that reads it then fails, where a slot or the workspace would give it
    another block's values. An assignment takes 0.3 us, and none in a graph that is replayed.

    Parameters that are not quantized stay in the slot or resident buffer. A quantized weight is dequantized into a workspace that all
    share, before its module computes, or before its block does where other code may read it. In a short pass linear modules and experts
    multiply with the codes, if the device has a kernel for that.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        store: BlockStore,
        scheme: GroupQuantization | None,
        ranks: Ranks,
        transfers: Transfers,
        group: Any = None,
        cpu: CpuBackend | None = None,
    ):
        streams = DeviceStreams(ranks.device)
        self.store, self.scheme, self.placement, self.transfers, self.cpu = store, scheme, placement, transfers, cpu
        self.layouts = placement.layouts
        names = [f"layer {block.layer} {block.module}".strip() for block in placement.blocks]
        self.timeline = Timeline(streams, names)
        self.workspace = torch.empty(placement.workspace_bytes, dtype=torch.uint8, device=ranks.device)
        self.caches: dict[int, ExpertCache] = {} if cpu is None or cpu.experts is None else cpu.experts.by_block
        self.gathered = {index: self.caches[index].gather for index in placement.gathered}
        self.ring = None
        if blocks := placement.in_host_memory:
            depth, timeline = placement.ring_depth, self.timeline
            self.ring = RingBuffer(store, blocks, depth, ranks, streams, transfers, timeline, group, self.gathered)
        self.views = BlockViews(self.layouts, store, [] if self.ring is None else self.ring.slots, self.workspace)
        self.rebalancer = Rebalancer(cpu if self.ring is not None else None, self.timeline)
        self.on_placement_changed: Callable[[Placement], None] = lambda placement: None

        # state of this pass
        self.kind: PassKind | None = None  # None before the first one
        self.tokens = 0
        self.cpu_computed: frozenset[int] = frozenset()
        self.packed: dict[int, dict[str, Packed]] = {}  # by block: its quantized weights in their slot
        self.has_begun = False  # `begin_pass` was called before the model
        self.next_kind = dict.fromkeys(PassKind, PassKind.DECODE)  # by kind: the kind that followed it last
        self.captured: tuple[int, PassKind | None] = 0, None  # tokens and kind of the captured pass
        self.between_graphs: BetweenGraphs | None = None  # during a capture

        # per block, by index
        self.modules: list[nn.Module] = []
        self.parameters: list[list[nn.Parameter]] = []  # those that are set for the block's call, as in its layout
        self.codes: dict[int, BlockCodes] = {}
        self.cpu_blocks: dict[int, CpuBlock | CpuExpertBlock] = {}  # blocks that the CPU computes, or could
        self.linears: dict[int, dict[str, nn.Module]] = {}  # linear modules of `cpu_blocks` by name, without wrappers
        self.observed: set[int] = set()  # blocks that the device has computed once, see `_after_block`

        self.patches = Patches()
        self.empty_values: dict[torch.dtype, torch.Tensor] = {}  # without elements, on the device
        self._install(model)
        for cache in self.caches.values():
            if cache.owns_slots:
                cache.load_first()
        if self.ring is not None:
            self.ring.prime()
        self.compute = ComputeStream(model, streams, host_waits=self.ring is not None and ranks.world_size > 1)

    def close(self) -> None:
        self.patches.close()
        self.compute.close()
        if self.ring is not None:
            self.ring.close()
        self.gathered.clear()
        self.cpu_blocks.clear()
        self.codes.clear()
        self.views.close()
        self.packed.clear()
        self.store.close()

    def _install(self, model: nn.Module) -> None:
        prefix, layers = decoder_layers(model)
        decoder = model.get_submodule(prefix.rpartition(".")[0])
        self.patches.add_hooks(decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True))
        for index, block in enumerate(self.placement.blocks):
            module = block.of(layers[block.layer])
            self.modules.append(module)
            parameters = dict(module.named_parameters())
            self.parameters.append([parameters[p.name] for p in self.layouts[index].parameters if not p.module_only])
            self._set_parameters(index, self.views.example_slots(index)[0])
            self._dequantize_in_calls(index, module)
            self._multiply_codes(index, module)
            if self.cpu is not None and index in self.cpu.computable:
                self.cpu_blocks[index] = self.cpu.block(index, module)
                self.linears[index] = {name: module.get_submodule(name) for name in block.linears}
                self._install_cpu(index, module)
            if not self._keeps_parameters(index):
                self._empty(self.parameters[index])
            self.patches.add_hooks(
                module.register_forward_pre_hook(self._before_block(index), with_kwargs=True),
                module.register_forward_hook(self._after_block(index)),
            )

    # Passes

    def _before_decoder(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (self.timeline.is_paused or self.has_begun):  # a capture repeats the pass before it
            inputs = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))  # [B, T], [B, T, H]
            tokens = (x.shape[0] * x.shape[1] for x in inputs if torch.is_tensor(x) and x.dim() >= 2)
            self.begin_pass(next(tokens, sys.maxsize))  # computing an unknown call as a long pass is always right
        self.has_begun = False

    def begin_pass(self, tokens: int) -> None:
        """Choose the kind of a pass of `tokens` tokens, and request the blocks that it streams; called before the model or a graph runs."""
        self.timeline.begin_pass(len(self.ring.pending) if self.ring is not None else 0)
        self.tokens = tokens
        if tokens != sys.maxsize:
            self.transfers.host_to_device_bytes += tokens * self.placement.row_bytes  # rows of the input embedding
        may_compute = self.cpu is not None and self.cpu.may_compute(tokens)
        cpu_decodes = may_compute and self._cpu_blocks_in(PassKind.DECODE) <= self.observed
        self._update_placement(cpu_decodes)
        before, self.kind = self.kind, PassKind.LONG
        if cpu_decodes and self.cpu_blocks:
            self.kind = PassKind.DECODE
        elif self.cpu is not None and self.cpu.decode_rows < tokens <= self.cpu.max_rows:
            on_cpu = self._cpu_blocks_in(PassKind.SHORT_PROMPT)
            self.kind = PassKind.SHORT_PROMPT if on_cpu and on_cpu <= self.observed else PassKind.LONG
        self.cpu_computed = self._cpu_blocks_in(self.kind)
        if before in (PassKind.SHORT_PROMPT, PassKind.LONG):
            self.next_kind[before] = self.kind
        if self.ring is not None:
            self.ring.begin_pass(self._streamed_in(self.kind), self._streamed_in(self.next_kind[self.kind]))

    def fix_slots(self) -> None:
        """Fix the slot of each block for passes like the latest one: a CUDA graph reads weights at fixed addresses."""
        self.captured = self.tokens, self.kind
        if self.ring is not None:
            self.ring.fix_slots()

    def begin_captured_pass(self) -> None:
        """Begin a replay of the pass for which `fix_slots` was called."""
        self.tokens, self.kind = self.captured
        self.cpu_computed = self._cpu_blocks_in(self.kind)
        if self.ring is not None:
            self.ring.begin_pass(self.ring.fixed_order, self.ring.fixed_order)

    def _cpu_blocks_in(self, kind: PassKind | None) -> frozenset[int]:
        if kind is PassKind.DECODE:
            return self.placement.cpu_computed.intersection(self.cpu_blocks)
        if kind is PassKind.SHORT_PROMPT:
            return self.placement.prompt_cpu_computed.intersection(self.cpu_blocks)
        return frozenset()

    def _streamed_in(self, kind: PassKind) -> list[int]:
        on_cpu = self._cpu_blocks_in(kind)
        return [block for block in self.placement.in_host_memory if block not in on_cpu]

    def _update_placement(self, cpu_decodes: bool) -> None:
        for index in [index for index, block in self.cpu_blocks.items() if not block.usable]:
            del self.cpu_blocks[index]
        placement = self.placement
        if not self.cpu_blocks.keys() >= placement.cpu_computed:
            placement = replace(placement, cpu_computed=placement.cpu_computed.intersection(self.cpu_blocks))
        candidates = self.cpu_blocks.keys() & self.observed
        placement = self.rebalancer.next_placement(placement, cpu_decodes, candidates)
        if placement is not self.placement:
            self.placement = placement
            self.on_placement_changed(placement)

    # Blocks

    def _before_block(self, index: int):
        """Return the hook that gives a block its weights: those in its slot, dequantized unless modules multiply their codes; none if the
        CPU computes it. An expert cache is refilled from the slot."""
        layout, resident = self.layouts[index], index in self.store.resident
        keeps_parameters = self._keeps_parameters(index)
        quantized = [p.name for p in layout.parameters if p.packed is not None and not p.module_only]

        def before(module, args, kwargs) -> None:
            if index in self.cpu_computed:
                if self.kind is PassKind.SHORT_PROMPT and index in self.gathered:
                    self._outside_graphs(self.caches[index].await_gathering)
                self.timeline.block_begins(index)
                return
            slot = None if resident else self._acquire(index)
            if resident:
                self.timeline.block_begins(index)
            cache = self.caches.get(index)
            if cache is not None and cache.owns_slots and slot is not None:
                chosen = args[1] if len(args) > 1 else kwargs.get("top_k_index")  # experts of each token
                cache.refill(chosen, self.ring.buffer_in(index, slot))
            if layout.workspace_bytes:
                self.packed[index] = self.views.packed(index, slot)
                for name in quantized:
                    if not self._multiplies_codes(index, name):
                        self._dequantize(index, name)
            if not keeps_parameters:
                self._set_parameters(index, slot)

        return before

    def _after_block(self, index: int):
        resident, keeps_parameters = index in self.store.resident, self._keeps_parameters(index)

        def after(module, args, output) -> None:
            on_cpu = index in self.cpu_computed
            self.timeline.block_ends()
            if not keeps_parameters and not on_cpu:
                self._empty(self.parameters[index])
            self.codes[index].end_block()
            if index in self.cpu_blocks:
                self.cpu_blocks[index].end_block()
            if not resident and not on_cpu:
                self._outside_graphs(self.ring.release)
            if not resident:
                self.packed.pop(index, None)  # its slot is another block's from now on
            if index not in self.observed:
                # exclude from codes and CPU the modules that the block's first call, with plain weights, did not call: the model reads
                # their weights itself, as Mamba does, so these have to be plain, and on the device, in every pass
                self.observed.add(index)
                self.codes[index].finish_observing()
                cpu_block = self.cpu_blocks.get(index)
                if isinstance(cpu_block, CpuBlock):
                    cpu_block.finish_observing()

        return after

    def _acquire(self, index: int) -> int:
        def acquire() -> int:
            reached = None if self.rebalancer.done else self.timeline.block_reached()
            slot = self.ring.acquire(index)
            if index in self.caches:
                self.caches[index].await_gathering()
            self.timeline.block_begins(index, reached)
            return slot

        return self._outside_graphs(acquire)

    def _outside_graphs(self, work: Callable[[], Any]) -> Any:
        """Call `work` now and, during a capture, at the same point of each replay."""
        return work() if self.between_graphs is None else self.between_graphs(work)

    # Parameters

    def _set_parameters(self, index: int, slot: int | None) -> None:
        for parameter, values in zip(self.parameters[index], self.views.plain(index, slot)):
            set_data(parameter, values)

    def _keeps_parameters(self, index: int) -> bool:
        """Return whether the block's parameters point at its resident buffer all the time."""
        return index in self.store.resident and not self.layouts[index].workspace_bytes

    def _empty(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.dtype not in self.empty_values:
                with torch.inference_mode(False):
                    self.empty_values[parameter.dtype] = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            set_data(parameter, self.empty_values[parameter.dtype])

    def _dequantize(self, index: int, name: str, part: int = 0) -> torch.Tensor:
        """Dequantize a weight of the block, or group `part` of its experts, into the workspace; return it there, not transposed."""
        codes, scales, minima, values = self.packed[index][name].parts[part]
        dequantize(codes, scales, minima, self.scheme.bits, self.scheme.group_size, values)
        return values

    def _dequantize_in_calls(self, index: int, module: nn.Module) -> None:
        mixtures = dict(self.placement.blocks[index].mixtures)
        modules: dict[str, list[StoredParameter]] = {}
        for stored in self.layouts[index].parameters:
            if stored.module_only:
                modules.setdefault(stored.module, []).append(stored)
        for name, weights in modules.items():
            called = module.get_submodule(name)
            if group := weights[0].group:
                dequantize_group = [partial(self._dequantize, index, w) for w in mixtures[name].weights_in(name)]
                forward = experts_in_groups(called, mixtures[name], group, *dequantize_group)
            else:
                parameters = {each.name: module.get_parameter(each.name) for each in weights}
                forward = self._dequantizing(index, parameters, called.forward)
            self.patches.set_attr(called, "forward", forward)

    def _dequantizing(self, index: int, parameters: dict[str, nn.Parameter], original: Callable) -> Callable:
        """Return a forward that dequantizes `parameters`, by their names in the block, around each call of `original`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in parameters.items():
                self._dequantize(index, name)
                set_data(parameter, self.packed[index][name].plain)
            try:
                return original(*args, **kwargs)
            finally:
                self._empty(parameters.values())

        return forward

    # Modules that multiply codes, and modules that the CPU computes

    def _multiply_codes(self, index: int, module: nn.Module) -> None:
        self.codes[index], layout = BlockCodes(), self.layouts[index]
        if not self.scheme or not layout.workspace_bytes:
            return
        examples = [self.views.packed(index, slot) for slot in self.views.example_slots(index)]
        mixtures = dict(self.placement.blocks[index].mixtures)
        self.codes[index] = modules_from_codes(
            module, layout, examples, self.scheme, lambda weight: self.packed[index][weight], mixtures
        )
        for found in self.codes[index].found:
            applies = partial(self._multiplies_codes, index, found.weights[0])
            self._replace_forward(found.module, found.forward, applies, partial(self.codes[index].observe, found))

    def _multiplies_codes(self, index: int, weight: str) -> bool:
        return index in self.observed and self.codes[index].multiplies(weight, self.tokens)

    def _install_cpu(self, index: int, module: nn.Module) -> None:
        """Let the CPU compute the block as a whole, or each of its linear modules, in passes in which it is CPU-computed."""
        cpu_block = self.cpu_blocks[index]
        if isinstance(cpu_block, CpuBlock) and cpu_block.task is None:
            return self._install_cpu_linears(index, cpu_block)

        def applies() -> bool:
            return index in self.cpu_computed and (isinstance(cpu_block, CpuExpertBlock) or cpu_block.task is not None)

        self._replace_forward(module, cpu_block.feed_forward, applies)

    def _install_cpu_linears(self, index: int, cpu_block: CpuBlock) -> None:
        for name, linear in self.linears[index].items():
            self._replace_forward(
                linear,
                lambda x, name=name: cpu_block.linear(name, x, self.tokens),
                lambda: index in self.cpu_computed,
                lambda x, name=name: cpu_block.observe(name, x),
            )

    def _replace_forward(
        self,
        module: nn.Module,
        replacement: Callable,
        applies: Callable[[], Any],
        observe: Callable = lambda *args: None,
    ) -> None:
        """Let `module` call `replacement` while `applies()`, else its own forward after `observe` with the same arguments."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if applies():
                return replacement(*args, **kwargs)
            observe(*args)
            return original(*args, **kwargs)

        self.patches.set_attr(module, "forward", forward)

    def modules_changed(self, modules: set[nn.Module]) -> None:
        """Stop computing as a whole, by the CPU, blocks with one of `modules`, to which adapters or hooks were added: every module is
        called from now on. The CPU still multiplies for linear modules."""
        for index, cpu_block in self.cpu_blocks.items():
            if modules.isdisjoint(self.modules[index].modules()):
                continue
            if isinstance(cpu_block, CpuExpertBlock):
                cpu_block.usable = False
            elif cpu_block.task is not None:
                cpu_block.task = None
                self._install_cpu_linears(index, cpu_block)
