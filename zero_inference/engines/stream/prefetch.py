"""Gives each block of a transformers model what it needs when it is called: its weights on the device, or the cores' products."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_inference.engines.stream.blocks import names_of
from zero_inference.engines.stream.cpu import CpuBackend, CpuBlock, CpuExpertBlock
from zero_inference.engines.stream.layout import BlockStore, BlockViews, Packed, StoredParameter
from zero_inference.engines.stream.placement import Placement
from zero_inference.engines.stream.products import BlockCodes, experts_in_groups, modules_from_codes
from zero_inference.engines.stream.rebalance import Rebalancer
from zero_inference.engines.stream.ring import RingBuffer
from zero_inference.engines.stream.streams import ComputeStream, DeviceStreams
from zero_inference.engines.stream.trace import Timeline
from zero_inference.kernels.groups import GroupQuantization, dequantize
from zero_inference.models.frozen import set_data
from zero_inference.models.layers import decoder_layers
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers


# Runs its argument, which is the host's work between two CUDA graphs of a step, now and in every replay
BetweenGraphs = Callable[[Callable[[], Any]], Any]


class PassKind(Enum):
    """The kind of a pass, by its number of tokens, which decides what blocks the CPU multiplies."""

    DECODE = auto()  # a decode step: `Placement.cpu_computed`
    SHORT_PROMPT = auto()  # a short prompt: `Placement.prompt_cpu_computed`
    LONG = auto()  # none


class Prefetcher:
    """Points the parameters of each block at its bytes before it computes, and frees its slot behind it.

    Outside of its block's call a parameter that comes with it is empty: code that reads it then fails, where a slot or the workspace
    would give it another block's values. An assignment takes 0.3 us, and none in a graph that is replayed.

    Parameters that are not quantized stay in the slot or resident buffer. A quantized weight is dequantized into a workspace that all
    share, before its module computes, or before its block does where other code may read it. In a short pass linear modules and experts
    multiply with the codes, if the device can. In a pass of few tokens, or of a short prompt, the blocks that the CPU computes stay in host
    memory.

    Args:
        team: the cores that multiply; None where they do not.
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
        team: CpuBackend | None = None,
    ):
        streams = DeviceStreams(ranks.device)
        self.store, self.scheme, self.placement, self.transfers = store, scheme, placement, transfers
        self.layouts = placement.layouts
        self.timeline = Timeline(streams, names_of(placement.blocks))
        self.workspace = torch.empty(placement.workspace_bytes, dtype=torch.uint8, device=ranks.device)
        self.team = team
        self.experts = None if team is None else team.experts
        self.gathered = {} if self.experts is None else self.experts.gathered()
        self.ring = None
        if placement.in_host_memory:
            self.ring = RingBuffer(
                store,
                placement.in_host_memory,
                placement.ring_depth,
                ranks,
                streams,
                transfers,
                self.timeline,
                group,
                self.gathered,
            )
        self.kind: PassKind | None = None  # of this pass; None before the first one
        self.cpu_computed: frozenset[int] = frozenset()  # blocks that the cores multiply in it
        self.after = dict.fromkeys(PassKind, PassKind.DECODE)  # by kind of pass: the kind that followed it last
        self.views = BlockViews(self.layouts, store, [] if self.ring is None else self.ring.slots, self.workspace)
        self.no_values: dict[torch.dtype, torch.Tensor] = {}  # by dtype, without elements, on the device
        # by block, in the order of its layout, without those that are dequantized for each call of their module
        self.parameters: list[list[nn.Parameter]] = []
        self.tokens, self.has_begun = 0, False  # of this pass; before the model was called
        self.recorded: tuple[int, PassKind | None] = 0, None  # tokens and kind of the pass that graphs repeat
        self.codes: dict[int, BlockCodes] = {}  # by block
        self.known: set[int] = set()  # blocks that the device has computed once with plain weights
        self.packed: dict[int, dict[str, Packed]] = {}  # by block: its quantized weights where they lie in this pass
        self.balance = Rebalancer(team if self.ring is not None else None, self.timeline)
        self.between: BetweenGraphs | None = (
            None  # while a pass is recorded: does what the host does between two graphs
        )
        self.changed: Callable[[Placement], None] = lambda placement: None  # told what is fetched from now on
        self.core_blocks: dict[int, CpuBlock | CpuExpertBlock] = {}  # that the cores multiply, or could
        self.hooks: list[Any] = []
        self.replaced: list[nn.Module] = []  # modules whose forward is not their class's
        self.modules: list[nn.Module] = []  # by block
        self.linears: dict[
            int, dict[str, nn.Module]
        ] = {}  # by block of the cores, and name in it: before anything wrapped them
        self._install(model, team)
        if self.experts is not None:
            self.experts.load_first()
        if self.ring is not None:
            self.ring.prime()
        self.compute = ComputeStream(model, streams, host_waits=self.ring is not None and ranks.world_size > 1)

    def close(self) -> None:
        """Let go of the blocks; the model cannot run any more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for module in self.replaced:
            module.__dict__.pop("forward", None)
        self.replaced.clear()
        self.compute.close()
        if self.ring is not None:
            self.ring.close()
        self.gathered.clear()
        self.core_blocks.clear()
        self.codes.clear()
        self.views.close()
        self.packed.clear()
        self.store.close()

    def _install(self, model: nn.Module, team: CpuBackend | None) -> None:
        prefix, layers = decoder_layers(model)
        decoder = model.get_submodule(prefix.rpartition(".")[0])
        self.hooks.append(decoder.register_forward_pre_hook(self._pass_begins, with_kwargs=True))
        for index, block in enumerate(self.placement.blocks):
            module = block.of(layers[block.layer])
            self.modules.append(module)
            own = dict(module.named_parameters())
            self.parameters.append([own[each.name] for each in self.layouts[index].parameters if not each.module_only])
            self._point(index, self.views.places(index)[0])
            self._dequantize_in_calls(index, module)
            self._use_codes(index, module)
            if team is not None and index in team.computable:
                self.core_blocks[index] = team.block(index, module)
                self.linears[index] = {name: module.get_submodule(name) for name in block.linears}
                self._divert(index, module)
            if not self._stays(index):
                self._empty(self.parameters[index])
            self.hooks += [
                module.register_forward_pre_hook(self._before(index), with_kwargs=True),
                module.register_forward_hook(self._after(index)),
            ]

    def _dequantize_in_calls(self, index: int, module: nn.Module) -> None:
        """Let each module that alone reads its weights dequantize them when it is called, and leave them empty afterwards."""
        mixtures = dict(self.placement.blocks[index].mixtures)
        modules: dict[str, list[StoredParameter]] = {}
        for stored in self.layouts[index].parameters:
            if stored.module_only:
                modules.setdefault(stored.module, []).append(stored)
        for name, weights in modules.items():
            called = module.get_submodule(name)
            self.replaced.append(called)
            if group := weights[0].group:
                times = [partial(self._dequantize, index, weight) for weight in mixtures[name].weights_in(name)]
                called.forward = experts_in_groups(called, mixtures[name], group, *times)
            else:
                parameters = {each.name: module.get_parameter(each.name) for each in weights}
                called.forward = self._dequantizing(index, parameters, called.forward)

    def _dequantizing(self, index: int, parameters: dict[str, nn.Parameter], own: Callable) -> Callable:
        """Return the forward `own` of a module with `parameters`, by their names in the block, which it dequantizes for each call."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in parameters.items():
                self._dequantize(index, name)
                set_data(parameter, self.packed[index][name].plain)
            try:
                return own(*args, **kwargs)
            finally:
                self._empty(parameters.values())

        return forward

    def _dequantize(self, index: int, name: str, part: int = 0) -> torch.Tensor:
        """Dequantize a weight of the block, or a group of experts, and return it as it is stored."""
        codes, scales, minima, values = self.packed[index][name].parts[part]
        dequantize(codes, scales, minima, self.scheme.bits, self.scheme.group_size, values)
        return values

    def _use_codes(self, index: int, module: nn.Module) -> None:
        """Let modules multiply with codes in short passes, where they can."""
        self.codes[index], layout = BlockCodes(), self.layouts[index]
        if not self.scheme or not layout.workspace_bytes:
            return
        places = [self.views.packed(index, slot) for slot in self.views.places(index)]
        packed_now, mixtures = partial(self._packed_now, index), dict(self.placement.blocks[index].mixtures)
        self.codes[index] = modules_from_codes(module, layout, places, self.scheme, packed_now, mixtures)
        for found in self.codes[index].found:
            self.replaced.append(found.module)
            applies = partial(self._does_without, index, found.weights[0])
            replace_forward(found.module, found.forward, applies, partial(self.codes[index].saw, found))

    def _packed_now(self, index: int, weight: str) -> Packed:
        return self.packed[index][weight]

    def _point(self, index: int, slot: int | None) -> None:
        """Point the block's parameters at their values, with the block in `slot`."""
        for parameter, values in zip(self.parameters[index], self.views.plain(index, slot)):
            set_data(parameter, values)

    def _stays(self, index: int) -> bool:
        """Return whether the block is resident and unquantized, so that its parameters keep their place."""
        return index in self.store.resident and not self.layouts[index].workspace_bytes

    def _empty(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave parameters without values."""
        for parameter in parameters:
            if parameter.dtype not in self.no_values:
                with torch.inference_mode(False):
                    self.no_values[parameter.dtype] = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            set_data(parameter, self.no_values[parameter.dtype])

    def modules_changed(self, modules: set[nn.Module]) -> None:
        """Call every module of the blocks that hold one of `modules`: something was wrapped around one of them, or hooked to it. Their
        products are made where they were."""
        for index, core_block in self.core_blocks.items():
            if modules.isdisjoint(self.modules[index].modules()):
                continue
            if isinstance(core_block, CpuExpertBlock):
                core_block.suits = False
            elif core_block.task is not None:
                core_block.call_linears()
                self._divert_linears(index, core_block)

    def _divert(self, index: int, module: nn.Module) -> None:
        """Let the cores compute in passes in which the block is theirs: all of it, or each of its linear modules."""
        core_block = self.core_blocks[index]
        if isinstance(core_block, CpuBlock) and core_block.task is None:
            return self._divert_linears(index, core_block)
        self.replaced.append(module)

        def whole() -> bool:
            return self._by_cores(index) and (isinstance(core_block, CpuExpertBlock) or core_block.task is not None)

        replace_forward(module, core_block.feed_forward, whole)

    def _divert_linears(self, index: int, core_block: CpuBlock) -> None:
        for name, linear in self.linears[index].items():
            self.replaced.append(linear)
            replace_forward(
                linear,
                lambda x, name=name: core_block.linear(name, x, self.tokens),
                lambda: self._by_cores(index),
                lambda x, name=name: core_block.saw(name, x),
            )

    def _pass_begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (self.timeline.is_paused or self.has_begun):  # a pass that is recorded is like the one before
            self.begin_pass(tokens_of(args, kwargs))
        self.has_begun = False

    def begin_pass(self, tokens: int) -> None:
        """A pass of so many tokens begins: by a call of the model, or by a graph of one."""
        self.timeline.begin_pass(len(self.ring.pending) if self.ring is not None else 0)
        self.tokens = tokens
        if tokens != sys.maxsize:
            self.transfers.host_to_device_bytes += tokens * self.placement.row_bytes
        few = self.team is not None and self.team.all_few(tokens) and self._computed_in(PassKind.DECODE) <= self.known
        self._place_anew(few)
        before, self.kind = self.kind, self._kind_of(tokens, few)
        self.cpu_computed = self._computed_in(self.kind)
        if before in (PassKind.SHORT_PROMPT, PassKind.LONG):
            self.after[before] = self.kind
        if self.ring is not None:
            self.ring.begin_pass(self._fetched_in(self.kind), self._fetched_in(self.after[self.kind]))

    @property
    def is_decode(self) -> bool:
        """Return whether this pass is of few tokens."""
        return self.kind is PassKind.DECODE

    def _kind_of(self, tokens: int, few: bool) -> PassKind:
        if few and self.core_blocks:
            return PassKind.DECODE
        of_prompt = self._computed_in(PassKind.SHORT_PROMPT)
        short = self.team is not None and self.team.few_rows < tokens <= self.team.most_rows
        return PassKind.SHORT_PROMPT if short and of_prompt and of_prompt <= self.known else PassKind.LONG

    def _computed_in(self, kind: PassKind) -> frozenset[int]:
        """Return the blocks that the CPU multiplies in passes of a kind."""
        placed = {
            PassKind.DECODE: self.placement.cpu_computed,
            PassKind.SHORT_PROMPT: self.placement.prompt_cpu_computed,
        }
        return placed.get(kind, frozenset()).intersection(self.core_blocks)

    def _fetched_in(self, kind: PassKind) -> list[int]:
        """Return the blocks that cross the link in passes of a kind, in order."""
        computed = self._computed_in(kind)
        return [block for block in self.placement.in_host_memory if block not in computed]

    def fix_slots(self) -> None:
        """Let each block come into the same slot in all passes like the one before, as graphs of them need it."""
        self.recorded = self.tokens, self.kind
        if self.ring is not None:
            self.ring.fix_slots()

    def begin_again(self) -> None:
        """Such a pass begins, whatever was before it."""
        self.tokens, self.kind = self.recorded
        self.cpu_computed = self._computed_in(self.kind)
        if self.ring is not None:
            self.ring.begin_fixed_pass()

    def _before(self, index: int):
        layout, resident, stays = self.layouts[index], index in self.store.resident, self._stays(index)
        whole = [stored.name for stored in layout.parameters if stored.packed is not None and not stored.module_only]

        def begin(module, args, kwargs) -> None:
            if self._by_cores(index):
                if self.kind is PassKind.SHORT_PROMPT and self.experts is not None and index in self.gathered:
                    self._outside_of_graphs(partial(self.experts.await_gathering, index))
                self.timeline.block_begins(index)
                return
            slot = None if resident else self._acquire(index)
            if resident:
                self.timeline.block_begins(index)
            if self.experts is not None and slot is not None:
                self.experts.seen(index, chosen_of(args, kwargs), self.ring.buffer_in(index, slot))
            if layout.workspace_bytes:
                self.packed[index] = self.views.packed(index, slot)
                for name in whole:
                    if not self._does_without(index, name):
                        self._dequantize(index, name)
            if not stays:
                self._point(index, slot)

        return begin

    def _after(self, index: int):
        resident, stays = index in self.store.resident, self._stays(index)

        def end(module, args, output) -> None:
            self.timeline.block_ends()
            if not stays and not self._by_cores(index):
                self._empty(self.parameters[index])
            self.codes[index].ends()
            if index in self.core_blocks:
                self.core_blocks[index].ends()
            if not resident and not self._by_cores(index):
                self._outside_of_graphs(self.ring.release)
            if not resident:
                self.packed.pop(index, None)  # its slot is another block's from now on
            if index not in self.known:
                self._learn(index)

        return end

    def _acquire(self, index: int) -> int:
        def acquire() -> int:
            reached = None if self.balance.done else self.timeline.block_reached()
            slot = self.ring.acquire(index)
            if self.experts is not None:
                self.experts.await_gathering(index)
            self.timeline.block_begins(index, reached)
            return slot

        return self._outside_of_graphs(acquire)

    def _outside_of_graphs(self, work: Callable[[], Any]) -> Any:
        """Do `work` now, and where a pass is recorded, in each of its repetitions."""
        return work() if self.between is None else self.between(work)

    def _learn(self, index: int) -> None:
        """The block was computed with plain weights for the first time. Modules that were not called have weights that the model reads
        itself, as Mamba's does: these have to be plain, and on the device, in every pass."""
        self.known.add(index)
        self.codes[index].learned()
        core_block = self.core_blocks.get(index)
        if isinstance(core_block, CpuBlock):
            core_block.learned()

    def _does_without(self, index: int, weight: str) -> bool:
        """Whether a weight of this block is not dequantized in this pass: its module multiplies with the codes."""
        return index in self.known and self.codes[index].serve(weight, self.tokens)

    def _by_cores(self, index: int) -> bool:
        """Whether the cores multiply this block in this pass."""
        return index in self.cpu_computed

    def _place_anew(self, few: bool) -> None:
        """For this pass, which has few tokens or not, and those behind: blocks that do not suit the cores are fetched, others may move."""
        for index in [index for index, block in self.core_blocks.items() if not block.suits]:
            del self.core_blocks[index]
        placed = self.placement
        if not self.core_blocks.keys() >= placed.cpu_computed:
            placed = replace(placed, cpu_computed=placed.cpu_computed.intersection(self.core_blocks))
        placed = self.balance.of(placed, few, self.core_blocks.keys() & self.known)
        if placed is not self.placement:
            self.placement = placed
            self.changed(placed)


def tokens_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """Of all sequences, in a call of the decoder: ids [batch, tokens] or embeddings [batch, tokens, width]."""
    for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if torch.is_tensor(value) and value.dim() >= 2:
            return value.shape[0] * value.shape[1]
    return sys.maxsize  # called in a way that is not known: computed as a long pass is, which is always right


def chosen_of(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The numbers of the experts that tokens chose, in a call of a module of experts; None where they are not found."""
    return args[1] if len(args) > 1 else kwargs.get("top_k_index")


def replace_forward(
    module: nn.Module, other: Callable, applies: Callable[[], Any], seen: Callable = lambda *args: None
) -> None:
    """Let `module` compute `other` in passes in which it `applies`; what it computes itself is shown to `seen`."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if applies():
            return other(*args, **kwargs)
        seen(*args)
        return own(*args, **kwargs)

    module.forward = forward
