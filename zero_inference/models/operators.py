"""Trace a forward pass on the meta device: its operators, its memory, and the module calls that read each parameter."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zero_inference.models.layers import LayerKinds, cache_per_module, decoder_layers
from zero_inference.models.meta_pass import (
    TooManyOperators,
    call_model,
    repeat_layers,
    run_on_meta,
    storage_of,
    tensors_in,
)
from zero_inference.models.sizes import expert_parameters
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.patching import Patches

aten = torch.ops.aten
# they move nothing, although PyTorch does not call them views
WITHOUT_WORK = {
    getattr(aten, name)
    for name in "empty empty_like new_empty new_empty_strided empty_strided detach alias _unsafe_view sym_size".split()
}
# More than any model has that computes its positions in parallel; recurrent ones that loop over them are estimated.
MAX_OPERATORS = 40_000
ALLOCATION_BYTES = 512  # PyTorch's CUDA allocator rounds up to a multiple of this
SIZES = ("nbytes", "outside_bytes", "layer_bytes", "expert_bytes")  # of an operator


class AttentionShape(NamedTuple):
    """Attention of one sequence; `head_dim` is the mean width of keys and values, `positions` are those of keys."""

    heads: int
    key_heads: int
    head_dim: float
    positions: int


@dataclass(frozen=True)
class Operator:
    """One kernel of a pass of one sequence. Weights that it reads count in the dtype that it computes in."""

    flops: int  # a multiply-add is 2
    nbytes: int  # read and written without weights, but with keys and values
    outside_bytes: int = 0  # of weights outside the decoder layers
    layer_bytes: int = 0  # of weights in them
    expert_bytes: int = 0  # of weights of all of their experts
    same_input: bool = False  # as the product before it, as keys and values have that of the queries
    attention: AttentionShape | None = None  # set for PyTorch's attention

    @property
    def attends(self) -> bool:
        """True if it multiplies activations with each other, as attention does."""
        return self.flops > 0 and not (self.outside_bytes or self.layer_bytes or self.expert_bytes)


@dataclass(frozen=True)
class Pass:
    """A forward pass of one sequence."""

    operators: dict[Operator, int]  # with the number of calls
    module_calls: int  # nested ones included
    peak_bytes: int  # of tensors alive at the same time, without weights, keys and values of the cache

    @property
    def launches(self) -> int:
        return sum(self.operators.values())

    @property
    def products_in_layers(self) -> int:
        """Number of kernels that multiply weights of decoder layers."""
        return sum(n for each, n in self.operators.items() if each.flops and (each.layer_bytes or each.expert_bytes))

    def total(self, name: str) -> int:
        """Return the sum of an attribute of `Operator` over all calls."""
        return sum(getattr(operator, name) * count for operator, count in self.operators.items())


def trace_pass(model: Any, spec: ModelSpec | None, tokens: int, past: int) -> Pass | None:
    """Trace the pass of `tokens` tokens of one sequence after `past` others; None if the model cannot run on the meta device.

    PyTorch's attention counts as one operator that stores no scores. Without `spec` weights count as activations, in bfloat16.
    """
    asked = spec.dtype if spec else torch.bfloat16
    # on the meta device, grouped matrix products exist in bfloat16 alone
    for dtype in dict.fromkeys((asked, torch.bfloat16)):
        found = _record_pass(model, spec, dtype, tokens, past)
        if found is not None:
            times = asked.itemsize / dtype.itemsize
            operators = {
                replace(each, **{name: round(times * getattr(each, name)) for name in SIZES}): count
                for each, count in found.operators.items()
            }
            return Pass(operators, found.module_calls, found.peak * asked.itemsize // dtype.itemsize)
    return None


@dataclass(frozen=True)
class Reads:
    """Calls of modules that read each parameter, by names in the model."""

    inside: dict[str, frozenset[str]]  # parameter -> the modules whose calls contain every operator that reads it
    calls: tuple[Counter[str], ...]  # of a prefill and of a decode step: module -> number of calls

    def only_inside(self, parameter: str, module: str) -> bool:
        """Return whether only calls of `module` read `parameter`."""
        return module in self.inside.get(parameter, (module,))

    def once_a_call(self, module: str, of: str) -> bool:
        """Return whether `module` is called at most once in each call of module `of`."""
        return all(calls[module] <= calls[of] for calls in self.calls)


@cache_per_module
def trace_reads(model: Any) -> Reads | None:
    """Trace a prefill and a decode step of `model`; None if it cannot run on the meta device. Identical layers have one entry."""
    passes = []
    for tokens, past in ((2, 0), (1, 2)):
        tried = ((dtype, length) for length in (past, None) for dtype in (torch.bfloat16, torch.float32))
        found = (_record_pass(model, None, dtype, tokens, length, has_values=True) for dtype, length in tried)
        passes.append(next((each for each in found if each is not None), None))
        if passes[-1] is None:
            return None
    inside: dict[str, frozenset[str]] = {}
    for each in passes:
        _intersect(inside, each.inside)
    return Reads(inside, tuple(each.calls for each in passes))


def _intersect(inside: dict[str, frozenset[str]], more: dict[str, frozenset[str]]) -> None:
    for name, modules in more.items():
        inside[name] = inside.get(name, modules) & modules


def _record_pass(
    model: Any, spec: ModelSpec | None, dtype: torch.dtype, tokens: int, past: int | None, has_values: bool = False
) -> PassRecorder | None:
    """Run a pass on the meta device, or return None if that fails; `has_values`: reading a value gives zero instead of failing."""

    def run(copied: nn.Module, layers: dict[int, nn.Module], kinds: LayerKinds) -> PassRecorder:
        recorder = PassRecorder(copied, spec, has_values)
        repeat_layers(layers, kinds, recorder)
        call_model(copied, tokens, past, recorder)
        return recorder

    return run_on_meta(model, dtype, run)


class PassRecorder(TorchDispatchMode):
    """Records the operators of a pass on the meta device, except in calls of layers that are repeated; `inside` and `calls` as `Reads`."""

    def __init__(self, model: nn.Module, spec: ModelSpec | None, has_values: bool) -> None:
        super().__init__()
        self.has_values = has_values
        self.operators: Counter[Operator] = Counter()
        self.operators_seen = self.module_calls = 0
        self.now = self.peak = 0  # bytes of tensors that operators made
        self.inside: dict[str, frozenset[str]] = {}
        self.calls: Counter[str] = Counter()
        self._alive: dict[int, int] = {}  # storage -> its number, because ids of freed storages are used again
        self._storages_made = 0
        self._last_input: tuple[int, int | None] | None = None  # storage and number, of a product with a weight
        self._weight_kinds = _weight_kinds(model, spec) if spec else {}
        self._names: dict[nn.Module, str] = {}
        self._parameters: dict[int, list[str]] = {}  # names by storage
        for name, module in model.named_modules():  # identical layers share modules: the first name
            self._names[module] = name
            for own, parameter in module.named_parameters(name, recurse=False):
                self._parameters.setdefault(storage_of(parameter), []).append(own)
        self._stack: list[str] = []  # modules that are being called

    def module_hooks(self) -> Patches:
        def before(module: nn.Module, args: tuple) -> None:
            self._stack.append(self._names.get(module, ""))
            self.calls[self._stack[-1]] += 1
            self.module_calls += 1

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self._stack.pop()

        hooks, patches = torch.nn.modules.module, Patches()
        after_hook = hooks.register_module_forward_hook(after, always_call=True)
        patches.add_hooks(hooks.register_module_forward_pre_hook(before), after_hook)
        return patches

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.has_values and function is aten._local_scalar_dense.default:  # a model that reads values reads zeros
            return 0
        if self.has_values and function is aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        kwargs = kwargs or {}
        self._count_seen(1)
        inputs = tensors_in((args, kwargs))
        given = {storage_of(tensor) for tensor in inputs}
        outputs = tensors_in(out := function(*args, **kwargs))
        for storage in given & self._parameters.keys():
            _intersect(self.inside, dict.fromkeys(self._parameters[storage], frozenset(self._stack)))
        for tensor in outputs:
            if storage_of(tensor) not in given:
                self._add_storage(tensor.untyped_storage())
        name, flops = function._overloadpacket, 0  # what is no product is bound by memory traffic
        if name in flop_registry:
            flops = int(flop_registry[name](*args, **kwargs, out_val=out))
        elif "grouped_mm" in str(name):  # rows sorted by expert, times the weights of each
            flops = 2 * out.numel() * args[0].shape[-1]
        if not function.is_view and name not in WITHOUT_WORK:
            self._count_operator(flops, inputs, outputs, looks_up=name is aten.embedding)
        return out

    def _count_seen(self, operators: int) -> None:
        self.operators_seen += operators
        if self.operators_seen > MAX_OPERATORS:
            raise TooManyOperators

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, _allocated_bytes(storage)
        if key not in self._alive:
            self._storages_made += 1
            self._alive[key] = self._storages_made
            self.now += nbytes
            self.peak = max(self.peak, self.now)

            def remove() -> None:
                del self._alive[key]
                self.now -= nbytes

            weakref.finalize(storage, remove)

    def _count_operator(
        self, flops: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor], looks_up: bool
    ) -> None:
        read: Counter[str] = Counter()  # bytes of weights
        computed = []  # activations
        for tensor in inputs:
            kind = self._weight_kinds.get(storage_of(tensor))
            if kind is None:
                computed.append(tensor)
            elif not looks_up:  # an embedding reads one row a token
                read[kind] += tensor.nbytes
        same_input = False
        if flops and read and computed:
            key = storage_of(computed[0])
            same_input = self._last_input == (key, self._alive.get(key))
            self._last_input = key, self._alive.get(key)
        nbytes = sum(tensor.nbytes for tensor in (*computed, *outputs))
        weights = read["outside_bytes"], read["layer_bytes"], read["expert_bytes"]
        self.operators[Operator(flops, nbytes, *weights, same_input=same_input)] += 1

    def count_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the output of attention. It is causal, so a prompt's tokens attend to half of each other."""
        batch, heads, length, width = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        pairs = length * key.shape[2] - length * (length - 1) // 2
        flops = 2 * batch * heads * pairs * (width + value.shape[-1])
        nbytes = sum(each.nbytes for each in (query, key, value, out))
        shape = AttentionShape(heads, key.shape[1], (width + value.shape[-1]) / 2, key.shape[2])
        self.operators[Operator(flops, nbytes, attention=shape)] += 1
        return out

    def begin_call(self) -> tuple:
        peak, self.peak = self.peak, self.now
        return self.operators.copy(), self.module_calls, self.operators_seen, self.now, peak

    def end_call(self, start: tuple, new_outputs: list[torch.Tensor]) -> tuple:
        """Return the counts of a decoder layer's call since `begin_call`, equal for calls that did the same."""
        operators, module_calls, operators_seen, now, peak = start
        output_bytes = sum(_allocated_bytes(each.untyped_storage()) for each in new_outputs)
        kept_bytes = self.now - now - output_bytes  # what the call left in a cache
        added_bytes, self.peak = self.peak - now, max(self.peak, peak)
        calls, seen = self.module_calls - module_calls, self.operators_seen - operators_seen
        return self.operators - operators, calls, seen, added_bytes, kept_bytes

    def repeat_call(self, counts: tuple) -> None:
        """Add the counts of an `end_call` once more."""
        operators, module_calls, operators_seen, added_bytes, kept_bytes = counts
        self.operators += operators
        self.module_calls += module_calls
        self._count_seen(operators_seen)
        self.peak = max(self.peak, self.now + added_bytes)
        self.now += kept_bytes
        self.calls[self._stack[-1]] -= 1  # only the call of the traced layer counts


def _allocated_bytes(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES


def _weight_kinds(model: Any, spec: ModelSpec) -> dict[int, str]:
    """Return by the storage of each parameter the attribute of `Operator` that counts its bytes."""
    kinds = {storage_of(parameter): "outside_bytes" for parameter in model.parameters()}
    for layer in decoder_layers(model)[1]:
        kinds |= {storage_of(parameter): "layer_bytes" for parameter in layer.parameters()}
    return kinds | {storage_of(parameter): "expert_bytes" for parameter in expert_parameters(model, spec)}
