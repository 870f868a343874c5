"""Trace a forward pass on the meta device: the operators that it runs, and the module calls that read each parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from zero_inference.models.layers import cache_per_module, decoder_layers
from zero_inference.models.meta_pass import PassObserver, observe_pass, storage_of, tensors_in
from zero_inference.models.sizes import expert_parameters

aten = torch.ops.aten
# They move nothing, although PyTorch does not call them views.
WITHOUT_WORK = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_strided,
    aten.detach,
    aten.alias,
    aten._unsafe_view,
    aten.sym_size,
}


class AttentionShape(NamedTuple):
    """Attention of one sequence; `head_dim` is the mean width of keys and values, `positions` are those of keys."""

    heads: int
    key_heads: int
    head_dim: float
    positions: int


@dataclass(frozen=True)
class Operator:
    """One kernel of a pass.

    Attributes:
        flops: of one sequence; a multiply-add is 2.
        nbytes: of one sequence, read and written without weights, but with keys and values.
        outside_bytes, layer_bytes, expert_bytes: of the weights that it reads, in the dtype that it computes in: outside the decoder
            layers, in them, and in all of their experts.
        same_input: the product before it has the same input, as keys and values have that of the queries.
        attention: set for PyTorch's attention.
    """

    flops: int
    nbytes: int
    outside_bytes: int = 0
    layer_bytes: int = 0
    expert_bytes: int = 0
    same_input: bool = False
    attention: AttentionShape | None = None

    @property
    def weights(self) -> tuple[int, int, int]:
        return self.outside_bytes, self.layer_bytes, self.expert_bytes

    @property
    def attends(self) -> bool:
        """True if it multiplies activations with each other, as attention does."""
        return self.flops > 0 and not any(self.weights)


@dataclass(frozen=True)
class Pass:
    """A forward pass of one sequence.

    Attributes:
        operators: each with its number of calls.
        module_calls: calls of modules, nested ones included.
    """

    operators: dict[Operator, int]
    module_calls: int

    @property
    def launches(self) -> int:
        """Number of kernels."""
        return sum(self.operators.values())

    @property
    def products_in_layers(self) -> int:
        """Number of kernels that multiply weights of decoder layers."""
        return sum(
            count for each, count in self.operators.items() if each.flops and (each.layer_bytes or each.expert_bytes)
        )

    def total(self, name: str) -> int:
        """Return the sum of an attribute of `Operator` over all calls."""
        return sum(getattr(operator, name) * count for operator, count in self.operators.items())


def trace_pass(model: Any, spec: Any, tokens: int, past: int) -> Pass | None:
    """Trace the pass of `tokens` tokens of one sequence after `past` others.

    None if the model cannot run on the meta device, or loops over positions.

    Args:
        model: without weights, as `empty_model.build_on_meta` builds it; it is not changed.
        spec: a `models.spec.ModelSpec`.
    """
    for dtype in dict.fromkeys((spec.dtype, torch.bfloat16)):  # grouped matrix products have no other dtype there
        counts = observe_pass(model, dtype, tokens, past, lambda copied: _OperatorCounter(_weight_kinds(copied, spec)))
        if counts is not None:
            return Pass(_scale_bytes(counts.operators, spec.dtype.itemsize / dtype.itemsize), counts.module_calls)
    return None


def _scale_bytes(operators: Counter[Operator], times: float) -> dict[Operator, int]:
    if times == 1:
        return dict(operators)
    sizes = ("nbytes", "outside_bytes", "layer_bytes", "expert_bytes")
    return {
        replace(each, **{name: round(times * getattr(each, name)) for name in sizes}): count
        for each, count in operators.items()
    }


def trace_without_weights(model: Any, tokens: int, past: int) -> Pass | None:
    """Trace a pass of any model; its operators count weights as activations. See `trace_pass`."""
    counts = observe_pass(model, torch.bfloat16, tokens, past, lambda copied: _OperatorCounter({}))
    return None if counts is None else Pass(dict(counts.operators), counts.module_calls)


def _weight_kinds(model: Any, spec: Any) -> dict[int, str]:
    """Return by the storage of each parameter the attribute of `Operator` that counts its bytes."""
    kinds = {storage_of(parameter): "outside_bytes" for parameter in model.parameters()}
    for layer in decoder_layers(model)[1]:
        kinds |= {storage_of(parameter): "layer_bytes" for parameter in layer.parameters()}
    return kinds | {storage_of(parameter): "expert_bytes" for parameter in expert_parameters(model, spec)}


_Counts = tuple[Counter[Operator], int, int]  # operators that do work, calls of modules, number of all operators


class _OperatorCounter(PassObserver):
    """Counts the operators that move or compute something."""

    def __init__(self, kinds: dict[int, str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.operators: Counter[Operator] = Counter()
        self.module_calls = 0
        self.last_input: torch.Tensor | None = (
            None  # of a product with a weight; referenced, so that its storage id stays unique
        )

    def on_operator(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `PassObserver`."""
        name = function._overloadpacket
        if function.is_view or name in WITHOUT_WORK:
            return
        read: Counter[str] = Counter()
        computed = []  # activations
        for tensor in tensors_in((args, kwargs)):
            kind = self.kinds.get(storage_of(tensor))
            if kind is None:
                computed.append(tensor)
            elif name is not aten.embedding:  # it reads one row a token
                read[kind] += tensor.nbytes
        nbytes = sum(tensor.nbytes for tensor in (*computed, *tensors_in(out)))
        flops = _flops(name, args, kwargs, out)
        same = False
        if flops and read and computed:
            same = self.last_input is not None and storage_of(self.last_input) == storage_of(computed[0])
            self.last_input = computed[0]
        weights = read["outside_bytes"], read["layer_bytes"], read["expert_bytes"]
        self.operators[Operator(flops, nbytes, *weights, same_input=same)] += 1

    def on_module_call(self, module: Any) -> None:
        """See `PassObserver`."""
        self.module_calls += 1

    def begin_call(self) -> _Counts:
        """See `LayerObserver`."""
        return self.operators.copy(), self.module_calls, self.operators_seen

    def end_call(self, start: _Counts, position: int, made: set[int]) -> _Counts:
        """See `LayerObserver`."""
        return self.operators - start[0], self.module_calls - start[1], self.operators_seen - start[2]

    def repeat_call(self, position: int, counts: _Counts, made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        operators, module_calls, operators_seen = counts
        self.operators += operators
        self.module_calls += module_calls
        self.count(operators_seen)

    def on_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `PassObserver`. Products for scores and output; causal, so a prompt's tokens attend to half of each other."""
        batch, heads, length, width = query.shape
        pairs = length * key.shape[2] - length * (length - 1) // 2
        flops = 2 * batch * heads * pairs * (width + value.shape[-1])
        nbytes = sum(each.nbytes for each in (query, key, value, out))
        shape = AttentionShape(heads, key.shape[1], (width + value.shape[-1]) / 2, key.shape[2])
        self.operators[Operator(flops, nbytes, attention=shape)] += 1


@dataclass(frozen=True)
class Reads:
    """Calls of modules that read each parameter, by names in the model.

    Attributes:
        inside: parameter -> the modules whose calls contain every operator that reads it; no entry if none does.
        calls: of a prefill and of a decode step: module -> number of calls.
    """

    inside: dict[str, frozenset[str]]
    calls: tuple[Counter[str], ...]

    def only_inside(self, parameter: str, module: str) -> bool:
        """Return whether only calls of `module` read `parameter`."""
        return module in self.inside.get(parameter, (module,))

    def once_a_call(self, module: str, of: str) -> bool:
        """Return whether `module` is called at most once in each call of module `of`."""
        return all(calls[module] <= calls[of] for calls in self.calls)


@cache_per_module
def trace_reads(model: Any) -> Reads | None:
    """Trace a prefill and a decode step of `model`; None if it cannot run on the meta device.

    Only the first of identical layers (`models.layers`) has entries.
    """
    inside: dict[str, frozenset[str]] = {}
    calls = []
    for tokens, past in ((2, 0), (1, 2)):
        tried = ((dtype, length) for length in (past, None) for dtype in (torch.bfloat16, torch.float32))
        passes = (observe_pass(model, dtype, tokens, length, _ReadObserver) for dtype, length in tried)
        found = next((each for each in passes if each is not None), None)
        if found is None:
            return None
        _intersect(inside, found.inside)
        calls.append(found.calls)
    return Reads(inside, tuple(calls))


def _intersect(inside: dict[str, frozenset[str]], more: dict[str, frozenset[str]]) -> None:
    for name, modules in more.items():
        inside[name] = inside.get(name, modules) & modules


class _ReadObserver(PassObserver):
    """Notes which modules are being called when a parameter is read.

    If the model reads values, such as which experts were chosen, all elements are nonzero and all numbers are 0.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = decoder_layers(model)[0]
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, list[str]] = {}  # by storage
        for name, module in model.named_modules():  # identical layers share modules: the first name
            self.modules[id(module)] = name
            for own, parameter in module.named_parameters(name, recurse=False):
                self.parameters.setdefault(storage_of(parameter), []).append(own)
        self.stack: list[str] = []
        self.inside: dict[str, frozenset[str]] = {}
        self.calls: Counter[str] = Counter()

    def on_operator(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `PassObserver`."""
        for storage in given & self.parameters.keys():
            now = frozenset(self.stack)
            _intersect(self.inside, dict.fromkeys(self.parameters[storage], now))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is aten._local_scalar_dense.default:
            return 0
        if function is aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def on_module_call(self, module: Any) -> None:
        """See `PassObserver`."""
        self.stack.append(self.modules.get(id(module), ""))
        self.calls[self.stack[-1]] += 1

    def on_module_return(self) -> None:
        """See `PassObserver`."""
        self.stack.pop()

    def begin_call(self) -> tuple[dict[str, frozenset[str]], Counter[str]]:
        """See `LayerObserver`."""
        before = self.inside, self.calls
        self.inside, self.calls = {}, Counter()
        return before

    def end_call(self, start: tuple[dict[str, frozenset[str]], Counter[str]], position: int, made: set[int]) -> tuple:
        """See `LayerObserver`."""
        inside, calls = self.inside, self.calls
        self.inside, self.calls = start
        _intersect(self.inside, inside)
        self.calls += calls
        own = f"{self.layers}.{position}."

        def relative(name: str) -> str:
            return f"{name}.".removeprefix(own)

        relative_inside = {relative(name): frozenset(map(relative, modules)) for name, modules in inside.items()}
        return relative_inside, {relative(name): count for name, count in calls.items()}

    def repeat_call(self, position: int, counts: tuple, made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        self.calls[self.stack[-1]] -= 1  # the call of the traced layer was counted


def _flops(name: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the FLOPs of a product; other operators are bound by memory traffic."""
    if name in flop_registry:
        return int(flop_registry[name](*args, **kwargs, out_val=out))
    if "grouped_mm" in str(name):  # rows sorted by expert, times the weights of each
        return 2 * out.numel() * args[0].shape[-1]
    return 0
