"""Trace a forward pass on the meta device: what it computes, operator by operator, and which calls read a weight."""

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
# They move nothing, though they are no views for PyTorch.
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
    """Of one sequence: query heads, heads of keys and values, columns of one of these (the mean of keys and values), and the positions of
    these."""

    heads: int
    key_heads: int
    head_dim: float
    positions: int


@dataclass(frozen=True)
class Operator:
    """One kernel of a pass.

    Attributes:
        flops: of one sequence, 2 for a multiplication with its addition.
        nbytes: of one sequence: read and written without weights; keys and values are among them.
        outside_bytes, layer_bytes, expert_bytes: of the weights that it reads, in the dtype that it computes in: of modules outside
            the decoder layers, of these, and of their experts, all of which count.
        same_input: the product before it has the same input, as keys and values have that of the queries.
        attention: of PyTorch's attention; None of other operators.
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
        """Whether it is a product of what was computed, such as attention."""
        return self.flops > 0 and not any(self.weights)


@dataclass(frozen=True)
class Pass:
    """A forward pass of one sequence.

    Attributes:
        operators: each with the number of times that it is called.
        module_calls: calls of modules, one within another.
    """

    operators: dict[Operator, int]
    module_calls: int

    @property
    def launches(self) -> int:
        """Kernels."""
        return sum(self.operators.values())

    @property
    def products_in_layers(self) -> int:
        """Kernels that multiply weights of decoder layers."""
        return sum(
            count for each, count in self.operators.items() if each.flops and (each.layer_bytes or each.expert_bytes)
        )

    def total(self, name: str) -> int:
        """Of an attribute of `Operator`, over all of them."""
        return sum(getattr(operator, name) * count for operator, count in self.operators.items())


def trace_pass(model: Any, spec: Any, tokens: int, past: int) -> Pass | None:
    """The pass of `tokens` tokens of one sequence that follow `past` others; None where the model cannot run on the meta device, or loops
    over positions.

    Args:
        model: without weights, as `empty_model.build_on_meta` makes it; it is left as it is.
        spec: a `models.spec.ModelSpec`.
    """
    for dtype in dict.fromkeys((spec.dtype, torch.bfloat16)):  # grouped matrix products have no other dtype there
        counts = observe_pass(model, dtype, tokens, past, lambda shapes: _Counting(_kinds_of_weights(shapes, spec)))
        if counts is not None:
            return Pass(_of_width(counts.operators, spec.dtype.itemsize / dtype.itemsize), counts.module_calls)
    return None


def _of_width(operators: Counter[Operator], times: float) -> dict[Operator, int]:
    """With bytes of a dtype that is so many times as wide."""
    if times == 1:
        return dict(operators)
    sizes = ("nbytes", "outside_bytes", "layer_bytes", "expert_bytes")
    return {
        replace(each, **{name: round(times * getattr(each, name)) for name in sizes}): count
        for each, count in operators.items()
    }


def trace_without_weights(model: Any, tokens: int, past: int) -> Pass | None:
    """Such a pass of any model without experts, whose operators say nothing of weights; see `trace_pass`."""
    counts = observe_pass(model, torch.bfloat16, tokens, past, lambda shapes: _Counting({}))
    return None if counts is None else Pass(dict(counts.operators), counts.module_calls)


def _kinds_of_weights(shapes: Any, spec: Any) -> dict[int, str]:
    """By the storage of each parameter the attribute of `Operator` that its bytes belong to."""
    kinds = {storage_of(parameter): "outside_bytes" for parameter in shapes.parameters()}
    for layer in decoder_layers(shapes)[1]:
        kinds |= {storage_of(parameter): "layer_bytes" for parameter in layer.parameters()}
    return kinds | {storage_of(parameter): "expert_bytes" for parameter in expert_parameters(shapes, spec)}


_Counts = tuple[Counter[Operator], int, int]  # operators that do something, calls of modules, and all operators


class _Counting(PassObserver):
    """Counts the operators that move or compute something."""

    def __init__(self, kinds: dict[int, str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.operators: Counter[Operator] = Counter()
        self.module_calls = 0
        # by a weight, last; as long as it is here, no other has its storage
        self.multiplied: torch.Tensor | None = None

    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `PassObserver`."""
        name = function._overloadpacket
        if function.is_view or name in WITHOUT_WORK:
            return
        read: Counter[str] = Counter()
        computed = []  # by operators before it
        for tensor in tensors_in((args, kwargs)):
            kind = self.kinds.get(storage_of(tensor))
            if kind is None:
                computed.append(tensor)
            elif name is not aten.embedding:  # which reads a row a token
                read[kind] += tensor.nbytes
        nbytes = sum(tensor.nbytes for tensor in (*computed, *tensors_in(out)))
        flops = _flops(name, args, kwargs, out)
        same = False
        if flops and read and computed:
            same = self.multiplied is not None and storage_of(self.multiplied) == storage_of(computed[0])
            self.multiplied = computed[0]
        weights = read["outside_bytes"], read["layer_bytes"], read["expert_bytes"]
        self.operators[Operator(flops, nbytes, *weights, same_input=same)] += 1

    def saw_module(self, module: Any) -> None:
        """See `PassObserver`."""
        self.module_calls += 1

    def start(self) -> _Counts:
        """See `LayerObserver`."""
        return self.operators.copy(), self.module_calls, self.operators_seen

    def seen(self, start: _Counts, position: int, made: set[int]) -> _Counts:
        """See `LayerObserver`."""
        return self.operators - start[0], self.module_calls - start[1], self.operators_seen - start[2]

    def repeat(self, position: int, seen: _Counts, made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        self.operators += seen[0]
        self.module_calls += seen[1]
        self.count(seen[2])

    def saw_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `PassObserver`. Scores and what they weigh; a prompt's tokens look at half of each other."""
        batch, heads, length, width = query.shape
        pairs = length * key.shape[2] - length * (length - 1) // 2
        flops = 2 * batch * heads * pairs * (width + value.shape[-1])
        nbytes = sum(each.nbytes for each in (query, key, value, out))
        shape = AttentionShape(heads, key.shape[1], (width + value.shape[-1]) / 2, key.shape[2])
        self.operators[Operator(flops, nbytes, attention=shape)] += 1


@dataclass(frozen=True)
class Reads:
    """Which calls of modules read each parameter; names are those in the model.

    Attributes:
        inside: by parameter, the modules whose calls contain every operator that reads it; no entry if none does.
        calls: of a prefill and of a decode step, by module.
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
    """Trace a prefill and a decode step of `model`; None where it cannot run on the meta device. Of layers of one kind in `models.layers`
    the first has entries."""
    inside: dict[str, frozenset[str]] = {}
    calls = []
    for tokens, past in ((2, 0), (1, 2)):
        tried = ((dtype, behind) for behind in (past, None) for dtype in (torch.bfloat16, torch.float32))
        passes = (observe_pass(model, dtype, tokens, behind, _Reading) for dtype, behind in tried)
        found = next((each for each in passes if each is not None), None)
        if found is None:
            return None
        _narrow(inside, found.inside)
        calls.append(found.calls)
    return Reads(inside, tuple(calls))


def _narrow(inside: dict[str, frozenset[str]], more: dict[str, frozenset[str]]) -> None:
    for name, modules in more.items():
        inside[name] = inside.get(name, modules) & modules


class _Reading(PassObserver):
    """Notes which modules are being called when a parameter is read.

    Where a model looks at values, such as which experts were chosen, each element is not zero and each number is 0.
    """

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.layers = decoder_layers(shapes)[0]
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, list[str]] = {}  # by storage
        for name, module in shapes.named_modules():  # layers that are traced once share modules: the first name
            self.modules[id(module)] = name
            for own, parameter in module.named_parameters(name, recurse=False):
                self.parameters.setdefault(storage_of(parameter), []).append(own)
        self.stack: list[str] = []
        self.inside: dict[str, frozenset[str]] = {}
        self.calls: Counter[str] = Counter()

    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `PassObserver`."""
        for storage in given & self.parameters.keys():
            now = frozenset(self.stack)
            _narrow(self.inside, dict.fromkeys(self.parameters[storage], now))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is aten._local_scalar_dense.default:
            return 0
        if function is aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def saw_module(self, module: Any) -> None:
        """See `PassObserver`."""
        self.stack.append(self.modules.get(id(module), ""))
        self.calls[self.stack[-1]] += 1

    def left_module(self) -> None:
        """See `PassObserver`."""
        self.stack.pop()

    def start(self) -> tuple[dict[str, frozenset[str]], Counter[str]]:
        """See `LayerObserver`."""
        before = self.inside, self.calls
        self.inside, self.calls = {}, Counter()
        return before

    def seen(self, start: tuple[dict[str, frozenset[str]], Counter[str]], position: int, made: set[int]) -> tuple:
        """See `LayerObserver`."""
        inside, calls = self.inside, self.calls
        self.inside, self.calls = start
        _narrow(self.inside, inside)
        self.calls += calls
        own = f"{self.layers}.{position}."

        def relative(name: str) -> str:
            return f"{name}.".removeprefix(own)

        of_parameters = {relative(name): frozenset(map(relative, modules)) for name, modules in inside.items()}
        return of_parameters, {relative(name): count for name, count in calls.items()}

    def repeat(self, position: int, seen: tuple, made: list[torch.Tensor]) -> None:
        """See `LayerObserver`."""
        self.calls[self.stack[-1]] -= 1  # its traced twin was counted


def _flops(name: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Of products; all else is bound by what it moves."""
    if name in flop_registry:
        return int(flop_registry[name](*args, **kwargs, out_val=out))
    if "grouped_mm" in str(name):  # rows, sorted by expert, times the weights of each
        return 2 * out.numel() * args[0].shape[-1]
    return 0
