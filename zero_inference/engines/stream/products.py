"""Modules that multiply with int8 and int4 codes as they are stored, so that a short pass does not dequantize their weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_inference.cpu.experts import WeightedRows
from zero_inference.cpu.library import DTYPES
from zero_inference.cpu.pool import ACTIVATION_NUMBERS
from zero_inference.engines.stream.layout import BlockLayout, Packed
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.formats import QuantizedWeight
from zero_inference.kernels.products import (
    ACTIVATED,
    ALIGNMENT,
    FUSED_ROWS,
    GATE_FIRST,
    INTERLEAVED,
    UP_FIRST,
    Epilogue,
    can_fuse,
    no_bias,
    quantized_expert_linear,
    quantized_linear,
)
from zero_inference.kernels.quantization import operands
from zero_inference.models.mlp import FusedExperts


@dataclass
class CodesModule:
    """A module that can compute without its plain weights."""

    module: nn.Module
    weights: tuple[str, ...]  # names, relative to the block
    max_tokens: int  # of the longest pass in which multiplying codes is faster than dequantizing
    forward: Callable[..., torch.Tensor]  # computes the module from codes
    observe: Callable[..., None] = lambda *args: None  # takes the arguments of a call with plain weights
    was_called: bool = False

    def note_call(self, *args: Any) -> None:
        """Note that the module was called with `args` and computed from plain weights."""
        self.was_called = True
        self.observe(*args)


def modules_from_codes(
    block: nn.Module,
    layout: BlockLayout,
    examples: Sequence[Mapping[str, Packed]],
    packed_now: Callable[[str], Packed],
    mixtures: Mapping[str, FusedExperts],
) -> tuple[list[CodesModule], SharedInput]:
    """Return the modules of a block that short passes compute from codes, and the `SharedInput` of the linear ones.

    These are experts, and linear modules if the device has a kernel for them.

    Args:
        examples: the quantized weights of the block by name, in one slot of each alignment.
        packed_now: returns a weight in the slot that holds the block in this pass.
    """
    found: list[CodesModule] = []
    linears = Linears(block, packed_now)
    for name, module in block.named_modules():
        if type(module) is nn.Linear:
            weight = weight_of(name)
            if load_extension() and _can_fuse(layout, [weight], examples):
                product, observe = partial(linears.product, name), partial(linears.observe, name)
                found.append(CodesModule(module, (weight,), FUSED_ROWS, product, observe))
        elif name in mixtures:
            experts = mixtures[name]
            weights = experts.weights_in(name)
            if any(weight not in example for example in examples for weight in weights):
                continue
            # Without the kernel an expert is dequantized again for each token that chose it, so with more pairs than experts dequantizing
            # all of them once is faster. Not in several groups, which a graph cannot contain.
            in_groups = layout[weights[0]].expert_group not in (0, experts.num_experts)
            fuses = in_groups or _can_fuse(layout, weights, examples)
            max_tokens = FUSED_ROWS if fuses else min(FUSED_ROWS, experts.num_experts // experts.top_k)
            rows = {weight: layout[weight].plain.shape[1] for weight in weights}
            forward = experts_forward(module, experts, rows, packed_now)
            found.append(CodesModule(module, weights, max_tokens, forward))
    return found, linears


def weight_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


class SharedInput(ABC):
    """Finds the modules of a block that are called with the same tensor; from then on the call of the first computes all of them."""

    def __init__(self) -> None:
        self.together: dict[str, tuple[str, ...]] = {}  # module -> the modules with its input, in order of their calls
        self.input: torch.Tensor | None = None  # of the latest call
        self.group: list[str] = []  # while observing: modules that were called with `input`
        self.ready: dict[str, torch.Tensor] = {}  # products with `input` of modules that are still to be called

    @abstractmethod
    def products(self, names: tuple[str, ...], x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the products of modules `names` with x [..., columns], [..., rows] each."""

    @abstractmethod
    def alike(self, one: str, other: str) -> bool:
        """Return whether the products of two modules with one input can be computed together."""

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Note that module `name` was called with `x` and computed alone."""
        if name in self.together:
            return
        if x is self.input and self.group and self.alike(name, self.group[0]):
            self.group.append(name)
        else:
            self.input, self.group = x, [name]
        self.together |= dict.fromkeys(self.group, tuple(self.group))

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if x is not self.input or name not in self.ready:
            names = self.together.get(name, (name,))
            self.input, self.group, self.ready = x, [], dict(zip(names, self.products(names, x)))
        return self.ready.pop(name)

    def end_block(self) -> None:
        self.input, self.group, self.ready = None, [], {}


class JoinedWeights(NamedTuple):
    names: list[str]  # of modules, in the order of memory
    rows: list[int]  # of each
    operands: tuple[Any, ...]  # as of `kernels.quantization.operands`, for all of them
    bias: torch.Tensor


class Linears(SharedInput):
    """Computes a block's linear modules as `quantized_linear` does, without its checks, which take Python longer than the product.

    Adjacent weights with the same input, as those of queries, keys and values, are multiplied as one.
    """

    def __init__(self, block: nn.Module, packed_now: Callable[[str], Packed]):
        super().__init__()
        self.linears = {name: module for name, module in block.named_modules() if type(module) is nn.Linear}
        self.packed_now = packed_now
        self.joined: dict[tuple[tuple[str, ...], int], JoinedWeights | None] = {}  # by names and address of the first

    def alike(self, one: str, other: str) -> bool:
        a, b = self.linears[one], self.linears[other]
        return a.in_features == b.in_features and (a.bias is None) == (b.bias is None)

    def products(self, names: tuple[str, ...], x: torch.Tensor) -> Sequence[torch.Tensor]:
        flat = x.reshape(-1, x.shape[-1]).contiguous()  # [tokens, columns]
        joined = self._joined_weights(names)
        if joined is None or flat.shape[0] > FUSED_ROWS or flat.data_ptr() % ALIGNMENT:
            return [self._product(name, x) for name in names]
        out = torch.ops.zero_inference.linear_groups(flat, *joined.operands, sum(joined.rows), joined.bias)
        by_name = dict(zip(joined.names, out.view(*x.shape[:-1], -1).split(joined.rows, -1)))
        return [by_name[name].contiguous() for name in names]

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = self.linears[name]
        return quantized_linear(x, self.packed_now(weight_of(name)).weight, module.out_features, module.bias)

    def _joined_weights(self, names: tuple[str, ...]) -> JoinedWeights | None:
        """Return the weights of all `names` as one; None unless they follow each other in memory."""
        first = self.packed_now(weight_of(names[0]))
        key = names, first.weight.codes.data_ptr()
        if key not in self.joined:
            weights = {name: self.packed_now(weight_of(name)).weight for name in names}
            ordered = sorted(names, key=lambda name: weights[name].codes.data_ptr())
            rows = [self.linears[name].out_features for name in ordered]
            weight = _join_weights([weights[name] for name in ordered], rows)
            biases = [self.linears[name].bias for name in ordered]
            if biases[0] is None:
                biases = [no_bias(first.plain.device, first.plain.dtype)]
            bias = _join_adjacent(biases)
            found = weight is not None and bias is not None
            self.joined[key] = JoinedWeights(ordered, rows, operands(weight), bias) if found else None
        return self.joined[key]


def _join_weights(weights: Sequence[QuantizedWeight], rows: Sequence[int]) -> QuantizedWeight | None:
    """Return adjacent weights of one format, with so many rows each, as one; None if they are not."""
    form = weights[0].format
    # scales of the rows of one weight may not be those of the next
    if any(each.format != form for each in weights) or any(each % form.group_rows for each in rows[:-1]):
        return None
    joined = {name: _join_adjacent([each.tensors[name] for each in weights]) for name in form.tensors((0, 0))}
    return None if None in joined.values() else QuantizedWeight(form, **joined)


def _join_adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat view of all tensors; None unless each begins where the one before ends."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def experts_forward(
    module: nn.Module,
    experts: FusedExperts,
    rows: Mapping[str, int],
    packed_now: Callable[[str], Packed],
) -> Callable[..., torch.Tensor]:
    """Return a forward for a module of experts that computes the experts that each token is routed to, and no others.

    Args:
        rows: of an expert's weight of gate and up, then of that of down, by the names that `packed_now` takes.
    """
    gate_up, down = rows
    gate_up_epilogue = epilogue_of(experts)

    def product(
        weight: str, bias: str, x: torch.Tensor, slot: torch.Tensor, epilogue: Epilogue | None, tokens: int
    ) -> torch.Tensor:  # [pairs, rows]
        packed, added = packed_now(weight), getattr(module, bias) if bias else None
        x = x.to(packed.plain.dtype)
        return quantized_expert_linear(x, packed.weight, rows[weight], slot, added, epilogue, tokens)

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # [tokens, H]
        slot = top_k_index.to(torch.int64).reshape(-1)  # [tokens * k]: each expert is in the slot of its index
        weights = top_k_weights if top_k_weights.dtype in DTYPES else top_k_weights.float()  # [tokens, k]
        inner = product(gate_up, experts.gate_up_bias, x, slot, gate_up_epilogue, len(x))
        outer = product(down, experts.down_bias, inner, slot, None, len(x))  # [tokens * k, H]
        out = WeightedRows(weights.contiguous(), outer).total()
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    return forward


def experts_in_groups(
    module: nn.Module,
    experts: FusedExperts,
    group: int,
    gate_up: Callable[[int], torch.Tensor],
    down: Callable[[int], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return a forward for a module of experts that dequantizes `group` of them at a time.

    It runs the operators of transformers' grouped products in the same order. With several groups the host reads how many rows each has.

    Args:
        gate_up, down: return the weights of a group by its index, [experts, rows, columns], valid until the next call of either.
    """
    from transformers.integrations.moe import _grouped_mm

    several = group < experts.num_experts

    def product(
        x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: str, ids: torch.Tensor
    ) -> torch.Tensor:
        out = _grouped_mm(x, weight.mT, ends)
        return out.add_(getattr(module, bias)[ids]) if bias else out

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        x, weights = hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_weights.reshape(-1, 1)
        expert_ids, order = top_k_index.reshape(-1).sort()  # [pairs], token-expert pairs by expert
        every = torch.arange(experts.num_experts, dtype=expert_ids.dtype, device=expert_ids.device)
        ends = torch.searchsorted(expert_ids, every, right=True).to(torch.int32)  # [experts], after the pairs of each
        bounds = [0, *ends[group - 1 : -1 : group].tolist(), len(order)] if several else [0, len(order)]  # of groups
        dtype = torch.promote_types(x.dtype, weights.dtype)
        rows = torch.empty(len(order), x.shape[1], dtype=dtype, device=x.device)  # [pairs, H]
        for index, (begin, end) in enumerate(pairwise(bounds)):
            if begin == end:
                continue
            pairs, ids = order[begin:end], expert_ids[begin:end]
            group_ends = ends[index * group :][:group] - begin
            inner = product(x[pairs // top_k_index.shape[-1]], gate_up(index), group_ends, experts.gate_up_bias, ids)
            outer = product(experts.combined(inner), down(index), group_ends, experts.down_bias, ids)
            rows[pairs] = outer * weights[pairs]
        return rows.view(len(x), -1, x.shape[1]).sum(1).view(hidden_states.shape).to(hidden_states.dtype)

    return forward


def epilogue_of(experts: FusedExperts) -> Epilogue:
    gated = INTERLEAVED if experts.interleaved else UP_FIRST if experts.gate_is_second else GATE_FIRST
    return Epilogue(
        gated if experts.gated else ACTIVATED,
        ACTIVATION_NUMBERS[experts.activation],
        experts.limit if experts.limit < math.inf else 0.0,
        experts.up_offset,
        experts.combined,
    )


def _can_fuse(layout: BlockLayout, names: Sequence[str], examples: Sequence[Mapping[str, Packed]]) -> bool:
    """Return whether the device has a kernel for products with the weights `names` in all `examples`."""

    def fuses(name: str, packed: Packed) -> bool:
        return can_fuse(packed.plain.new_empty(1, layout[name].plain.shape[-1]), packed.weight)

    return all(name in example and fuses(name, example[name]) for example in examples for name in names)
