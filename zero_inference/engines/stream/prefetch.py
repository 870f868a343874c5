"""Gives each block of a transformers model its weights when it is called, or lets the CPU compute it.

A pass begins with `begin_pass`, which tells the ring buffer which blocks the pass will stream. Hooks of each block then wait for its slot,
point the module's parameters at the bytes there, and give the slot back after the block; the ring copies the next block into it, at once
or when the device has computed the layer (`Placement.refills_after_layers`).

With several devices each has a ring; devices.py copies hidden states between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_inference.engines.stream.cpu import CpuBackend, CpuBlock
from zero_inference.engines.stream.devices import LayerDevices
from zero_inference.engines.stream.disk import DiskReader
from zero_inference.engines.stream.expert_cache import ExpertCache
from zero_inference.engines.stream.layout import BlockStore, BlockViews, Packed, StoredParameter
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import CodesModule, SharedInput, experts_in_groups, modules_from_codes
from zero_inference.engines.stream.rebalance import Rebalancer
from zero_inference.engines.stream.ring import RingBuffer
from zero_inference.engines.stream.streams import DeviceStreams, Timeline
from zero_inference.kernels.quantization import dequantize
from zero_inference.models.layers import decoder_layers
from zero_inference.utils.patching import Patches
from zero_inference.utils.timing import Transfers

# writes parameters that are frozen (`api.placed_model`) without a check of the caller
set_data = torch.Tensor.data.__set__


# Runs its argument, host work between two CUDA graphs of a step, now and in every replay
BetweenGraphs = Callable[[Callable[[], Any]], Any]


class PassKind(Enum):
    """Decides which blocks the CPU computes."""

    DECODE = auto()  # those of `Placement.cpu_computed`
    SHORT_PROMPT = auto()  # those of `Placement.prompt_cpu_computed`
    LONG = auto()  # none


class Prefetcher:
    """Hooks the blocks of a model to the ring buffer, the workspace and the CPU backend, and begins each pass."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        store: BlockStore,
        devices: Sequence[torch.device],
        transfers: Transfers,
        cpu: CpuBackend | None,
        layer_parameters: float,
    ):
        streams = [DeviceStreams(device) for device in devices]
        self.store, self.placement, self.transfers, self.cpu = store, placement, transfers, cpu
        self.devices = tuple(devices)
        self.timeline = Timeline(streams, [f"layer {each.layer} {each.module}".strip() for each in placement.blocks])
        nbytes = placement.workspace_bytes
        self.workspaces = [torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices]
        caches: dict[int, ExpertCache] = {} if cpu is None or cpu.experts is None else cpu.experts.by_block
        self.rings: dict[int, RingBuffer] = {}  # by device
        for device, timeline in enumerate(self.timeline.devices):
            if blocks := placement.on(device, placement.offloaded):
                gathered = {index: caches[index].gather for index in placement.on(device, placement.gathered)}
                depth = placement.slots_on(device)
                after_layers = placement.refills_after_layers
                self.rings[device] = RingBuffer(store, blocks, depth, timeline, transfers, after_layers, gathered)
        # with speculation, the time between passes is also that of drafts
        self.rebalancer = Rebalancer(cpu if self.rings and cpu and cpu.rebalances else None, self.timeline)
        self.on_placement_changed: Callable[[Placement], None] = lambda placement: None

        # state of this pass
        self.kind: PassKind | None = None  # None before the first one
        self.tokens = 0
        self.cpu_computed: frozenset[int] = frozenset()
        self.next_kind = dict.fromkeys(PassKind, PassKind.DECODE)  # by kind: the kind that followed it last
        self.between_graphs: BetweenGraphs | None = None  # during a capture

        self.patches = Patches()
        self.blocks: list[HookedBlock] = []
        self.layers = LayerDevices(
            model,
            placement.layer_devices,
            streams,
            layer_parameters if placement.may_divide else 0.0,
            self.outside_graphs,
            leave_layer=lambda device: self.rings[device].refill() if device in self.rings else None,
        )
        self.compute = self.layers.compute
        try:
            before_decoder = self.layers.decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)
            self.patches.add_hooks(before_decoder)
            self._hook_blocks(decoder_layers(model)[1], caches)
            for index, cache in caches.items():
                if cache.owns_slots and index not in placement.on_disk:
                    cache.load_first()
            for ring in self.rings.values():
                ring.prime()
        except BaseException:  # no memory for the CPU's tasks, or a file that cannot be read, for two
            self.patches.close()
            self.layers.close()
            for ring in self.rings.values():
                ring.close()
            raise
        # blocks that the CPU can compute; `_update_placement` removes those that turn out not to be `usable`
        self.computable = {block.index for block in self.blocks if block.cpu is not None}
        self.observed: set[int] = set()  # blocks that the device has computed once, see `HookedBlock.finish_observing`

    @property
    def disk_readers(self) -> list[DiskReader]:
        return [ring.disk for ring in self.rings.values() if ring.disk is not None]

    def _hook_blocks(self, layers: nn.ModuleList, caches: Mapping[int, ExpertCache]) -> None:
        shared_views: dict[tuple[int, int], BlockViews] = {}  # by layout and device, of a ring's slots
        for index, block in enumerate(self.placement.blocks):
            layout, device = block.layout, self.placement.device_of(index)
            workspace = self.workspaces[device]
            if index in self.store.resident:
                views = BlockViews(layout, [self.store.buffers[index]], workspace)
            else:
                of_ring = BlockViews(layout, self.rings[device].slots, workspace)
                views = shared_views.setdefault((id(layout), device), of_ring)
            module = block.module_in(layers[block.layer])
            self.blocks.append(HookedBlock(self, index, module, views, caches.get(index)))

    def close(self) -> None:
        self.patches.close()
        self.layers.close()
        for ring in self.rings.values():
            ring.close()
        self.blocks.clear()
        self.computable.clear()
        self.store.close()

    def _before_decoder(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))  # [B, T], [B, T, H]
        shape = next((x.shape[:2] for x in inputs if torch.is_tensor(x) and x.dim() >= 2), None)
        if not self.timeline.is_paused:  # else it is captured, and has begun
            # computing an unknown call as a long pass is always right
            self.begin_pass(sys.maxsize if shape is None else shape.numel())
        if self.kind is PassKind.LONG:
            self.layers.begin_pass(kwargs)

    def begin_pass(self, tokens: int) -> None:
        """Choose the kind of a pass of `tokens` tokens, and request the blocks that it streams; called before the model or a graph runs."""
        for device, timeline in enumerate(self.timeline.devices):
            timeline.begin_pass(self.rings[device].pending_copies if device in self.rings else 0)
        self.tokens = tokens
        if tokens != sys.maxsize:
            self.transfers.host_to_device_bytes += tokens * self.placement.embedding_row_bytes
        may_compute = self.cpu is not None and self.cpu.may_compute(tokens)
        cpu_decodes = may_compute and self._cpu_blocks_in(PassKind.DECODE) <= self.observed
        self._update_placement(cpu_decodes)
        before, self.kind = self.kind, PassKind.LONG
        if cpu_decodes and self.computable:
            self.kind = PassKind.DECODE
        elif self.cpu is not None and self.cpu.decode_rows < tokens <= self.cpu.max_rows:
            on_cpu = self._cpu_blocks_in(PassKind.SHORT_PROMPT)
            self.kind = PassKind.SHORT_PROMPT if on_cpu and on_cpu <= self.observed else PassKind.LONG
        self.cpu_computed = self._cpu_blocks_in(self.kind)
        if before in (PassKind.SHORT_PROMPT, PassKind.LONG):
            self.next_kind[before] = self.kind
        order, next_order = self._streamed_in(self.kind), self._streamed_in(self.next_kind[self.kind])
        for device, ring in self.rings.items():
            ring.begin_pass(self.placement.on(device, order), self.placement.on(device, next_order))

    def fix_slots(self) -> Callable[[], None]:
        """Fix the slot of each block for passes like the one that has begun: a CUDA graph reads weights at fixed addresses. Return a
        function that ends this."""
        fixed = ExitStack()
        for ring in self.rings.values():
            fixed.callback(ring.fix_slots())
        return fixed.close

    def _cpu_blocks_in(self, kind: PassKind | None) -> frozenset[int]:
        if kind is PassKind.DECODE:
            return self.placement.cpu_computed.intersection(self.computable)
        if kind is PassKind.SHORT_PROMPT:
            return self.placement.prompt_cpu_computed.intersection(self.computable)
        return frozenset()

    def _streamed_in(self, kind: PassKind) -> list[int]:
        never_copied = self._cpu_blocks_in(kind) - self.placement.computed_in_slots
        return [block for block in self.placement.offloaded if block not in never_copied]

    def _update_placement(self, cpu_decodes: bool) -> None:
        self.computable -= {index for index in self.computable if not self.blocks[index].cpu.usable}
        placement = self.placement
        if not placement.cpu_computed <= self.computable:
            placement = replace(placement, cpu_computed=placement.cpu_computed.intersection(self.computable))
        placement = self.rebalancer.next_placement(placement, cpu_decodes, self.computable & self.observed)
        if placement is not self.placement:
            self.placement = placement
            self.on_placement_changed(placement)

    def outside_graphs(self, work: Callable[[], Any]) -> Any:
        """Call `work` now and, during a capture, at the same point of each replay."""
        return work() if self.between_graphs is None else self.between_graphs(work)

    def modules_changed(self, modules: set[nn.Module]) -> None:
        """Call each module, from now on, of the blocks that contain one of `modules`, to which adapters or hooks were added."""
        self.layers.stop_dividing()
        for index in self.computable:
            if not modules.isdisjoint(self.blocks[index].module.modules()):
                self.blocks[index].call_each_module()


class HookedBlock:
    """A block of the model that gets its weights for its call, or is computed by the CPU.

    Outside of the call a streamed parameter is empty: code that reads it then fails, where a slot or the workspace would give it another
    block's values. An assignment takes 0.3 us, and none in a graph that is replayed.

    Parameters that are not quantized stay in the slot or resident buffer. A quantized weight is dequantized into a workspace that all
    blocks share, before its module computes, or before its block does where other code may read it. In a short pass linear modules and
    experts multiply with the codes, if the device has a kernel for that.

    Attributes:
        views: its tensors in each slot of the ring; of a resident block in its own buffer, as slot 0.
        packed: its quantized weights by name, in the slot that it is in now.
        cpu: None if the CPU cannot compute it.
    """

    def __init__(
        self, prefetcher: Prefetcher, index: int, module: nn.Module, views: BlockViews, cache: ExpertCache | None
    ):
        self.prefetcher, self.index, self.module, self.views, self.cache = prefetcher, index, module, views, cache
        self.block = prefetcher.placement.blocks[index]
        self.layout = self.block.layout
        self.slot = 0  # of the ring, in this pass
        self.is_resident = index in prefetcher.store.resident
        self.in_slots = index in prefetcher.placement.computed_in_slots  # the CPU multiplies it there
        device = prefetcher.placement.device_of(index)
        self.ring, self.timeline = prefetcher.rings.get(device), prefetcher.timeline.devices[device]
        self.packed: Mapping[str, Packed] = {}
        self.max_tokens: dict[str, int] = {}  # by weight: the tokens of the longest pass that multiplies its codes
        self.shared_inputs: list[SharedInput] = []
        self._dequantize_in_calls()
        codes_modules = self._multiply_codes()
        self.cpu: CpuBlock | None = None
        if prefetcher.cpu is not None and index in prefetcher.cpu.computable:
            slots = [self.ring.buffer_in(index, slot) for slot in range(len(self.ring.slots))] if self.in_slots else []
            self.cpu = prefetcher.cpu.block(index, module, slots)
            self.shared_inputs.append(self.cpu)
            self.linears = {name: module.get_submodule(name) for name in self.block.linears}  # without wrappers
            self._install_cpu(self.cpu)
        self._add_hooks(codes_modules)

    def _add_hooks(self, codes_modules: Sequence[CodesModule]) -> None:
        prefetcher, index, layout, is_resident = self.prefetcher, self.index, self.layout, self.is_resident
        ring, timeline, layers, is_layer = self.ring, self.timeline, prefetcher.layers, not self.block.module
        views, cache, shared_inputs = self.views, self.cache, self.shared_inputs
        is_gathered = index in prefetcher.placement.gathered
        named = dict(self.module.named_parameters())
        of_block = [stored for stored in layout.parameters if not stored.module_only]
        parameters = [named[stored.name] for stored in of_block]
        quantized = [stored.name for stored in of_block if stored.packed]
        empty = empty_values(parameters)
        keeps_parameters = is_resident and not layout.workspace_bytes  # they point at its buffer all the time
        if keeps_parameters:
            set_values(parameters, views[0].plain)

        def acquire() -> int:
            reached = None if prefetcher.rebalancer.done else timeline.block_reached()
            slot = ring.acquire(index)
            if cache is not None:
                cache.await_gathering()
            timeline.block_begins(index, reached)
            return slot

        def before(module, args, kwargs) -> None:
            on_cpu = index in prefetcher.cpu_computed
            if on_cpu and not self.in_slots:
                if is_gathered and prefetcher.kind is PassKind.SHORT_PROMPT:
                    prefetcher.outside_graphs(cache.await_gathering)
                timeline.block_begins(index)
                return
            if is_resident:
                slot = 0
                timeline.block_begins(index)
            else:
                if is_layer or layers.micro_batch == 0:
                    self.slot = prefetcher.outside_graphs(acquire)
                else:  # a later micro-batch
                    timeline.block_begins(index)
                slot = self.slot
                if cache is not None and cache.owns_slots:
                    chosen = args[1] if len(args) > 1 else kwargs.get("top_k_index")  # experts of each token
                    if layers.is_last_micro_batch:
                        cache.refill(chosen, ring.buffer_in(index, slot))
                    elif chosen is not None:
                        cache.count_uses(chosen)
            if on_cpu:
                self.cpu.slot = slot
                return
            if keeps_parameters:
                return
            plain, self.packed = views[slot]
            for name in quantized:
                if not self.multiplies_codes(name):
                    self.dequantize(name)
            set_values(parameters, plain)

        def after(module, args, output) -> None:
            on_cpu = index in prefetcher.cpu_computed
            timeline.block_ends()
            if not (keeps_parameters or on_cpu):
                set_values(parameters, empty)
            for shared in shared_inputs:
                shared.end_block()
            if not is_resident and (is_layer or layers.is_last_micro_batch):
                if not on_cpu or self.in_slots:
                    prefetcher.outside_graphs(partial(ring.release, index))
                self.packed = {}  # its slot is another block's from now on
            if index not in prefetcher.observed:
                self.finish_observing(codes_modules)

        self.prefetcher.patches.add_hooks(
            self.module.register_forward_pre_hook(before, with_kwargs=True),
            self.module.register_forward_hook(after),
        )

    def finish_observing(self, codes_modules: Sequence[CodesModule]) -> None:
        """Exclude from codes and CPU the modules that the block's first call, with plain weights, did not call: the model reads their
        weights itself, as Mamba does, so these have to be plain, and on the device, in every pass."""
        self.prefetcher.observed.add(self.index)
        called = [each for each in codes_modules if each.was_called]
        self.max_tokens = {weight: each.max_tokens for each in called for weight in each.weights}
        if self.cpu is not None:
            self.cpu.finish_observing()

    def multiplies_codes(self, weight: str) -> bool:
        return self.prefetcher.tokens <= self.max_tokens.get(weight, 0)

    def dequantize(self, name: str, part: int = 0) -> torch.Tensor:
        """Dequantize a weight, or group `part` of its experts, into the workspace; return it there, not transposed."""
        weight, values = self.packed[name].parts[part]
        dequantize(weight, values)
        return values

    def _dequantize_in_calls(self) -> None:
        mixtures = dict(self.block.mixtures)
        modules: dict[str, list[StoredParameter]] = {}
        for stored in self.layout.parameters:
            if stored.module_only:
                modules.setdefault(stored.module, []).append(stored)
        for name, weights in modules.items():
            called = self.module.get_submodule(name)
            if group := weights[0].expert_group:
                dequantize_group = [partial(self.dequantize, weight) for weight in mixtures[name].weights_in(name)]
                forward = experts_in_groups(called, mixtures[name], group, *dequantize_group)
            else:
                forward = self._dequantizing([each.name for each in weights], called.forward)
            self.prefetcher.patches.set_attr(called, "forward", forward)

    def _dequantizing(self, weights: list[str], original: Callable) -> Callable:
        """Return a forward that dequantizes `weights` around each call of `original`."""
        parameters = [self.module.get_parameter(name) for name in weights]
        empty = empty_values(parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in zip(weights, parameters):
                self.dequantize(name)
                set_data(parameter, self.packed[name].plain)
            try:
                return original(*args, **kwargs)
            finally:
                set_values(parameters, empty)

        return forward

    def _multiply_codes(self) -> list[CodesModule]:
        """Let modules multiply codes in short passes; return those that can."""
        if not self.layout.workspace_bytes:
            return []
        examples = [views.packed for views in self.views.of_each_alignment()]
        mixtures = dict(self.block.mixtures)
        found, shared_input = modules_from_codes(
            self.module, self.layout, examples, lambda weight: self.packed[weight], mixtures
        )
        self.shared_inputs.append(shared_input)
        for each in found:
            self._replace_forward(
                each.module, each.forward, partial(self.multiplies_codes, each.weights[0]), each.note_call
            )
        return found

    def _install_cpu(self, cpu: CpuBlock) -> None:
        """Let the CPU compute the block as a whole, or each of its linear modules, in passes in which it is CPU-computed."""
        prefetcher, index = self.prefetcher, self.index
        if cpu.block_tasks:
            self._replace_forward(
                self.module, cpu.feed_forward, lambda: index in prefetcher.cpu_computed and bool(cpu.block_tasks)
            )
            return
        for name, linear in self.linears.items():
            self._replace_forward(
                linear,
                lambda x, name=name: cpu.linear(name, x, prefetcher.tokens),
                lambda: index in prefetcher.cpu_computed,
                partial(cpu.observe, name),
            )

    def call_each_module(self) -> None:
        """Stop computing the block as a whole by the CPU, which still multiplies for linear modules; experts have none."""
        if self.cpu.block_tasks:
            self.cpu.block_tasks, self.cpu.usable = [], bool(self.linears)
            self._install_cpu(self.cpu)

    def _replace_forward(
        self,
        module: nn.Module,
        replacement: Callable,
        applies: Callable[[], bool],
        observe: Callable = lambda *args: None,
    ) -> None:
        """Let `module` call `replacement` while `applies()`, else its own forward after `observe` with the same arguments."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if applies():
                return replacement(*args, **kwargs)
            observe(*args)
            return original(*args, **kwargs)

        self.prefetcher.patches.set_attr(module, "forward", forward)


def set_values(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, each in zip(parameters, values):
        set_data(parameter, each)


def empty_values(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    with torch.inference_mode(False):  # a tensor of inference mode could not be used outside it
        return [torch.empty(0, dtype=each.dtype, device=each.device) for each in parameters]
