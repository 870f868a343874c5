"""Recognize the MLP of a decoder layer by tracing it, not by a list of families."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from zero_inference.models.layers import cache_per_module

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "identity": lambda x: x,
}
DROPOUTS = (nn.Dropout, nn.Identity)
ROWS, COLUMNS = "rows", "columns"  # how a linear module stores its weight: [out, in] or [in, out]


@dataclass(frozen=True)
class Mlp:
    """`last(f(first(x)))`, or gated: `last(f(gate(x)) * up(x))`. Names are of linear modules, relative to the module.

    Attributes:
        first: one name; or, gated, those of gate and up. The same name twice is one linear with the rows of gate, then those of up.
        activation: f, a key of `ACTIVATIONS`.
        gate_is_second: in one linear for both, up's rows come first.
    """

    first: tuple[str, ...]
    activation: str
    last: str
    gate_is_second: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.first, self.last)))


@cache_per_module
def detect_mlp(module: nn.Module) -> Mlp | None:
    """Return the form of `module`, which may be on the meta device; None if it is no MLP."""
    # before tracing, as it calls them
    linears = {part for part in module.modules() if weight_layout(part) is not None}
    try:
        graph = _Tracer(linears).trace(module)
        if sum(node.op == "placeholder" for node in graph.nodes) != 1:
            return None
        output = next(node for node in graph.nodes if node.op == "output").args[0]
        return _GraphReader(module).mlp(output)
    except Exception:  # tracing runs the module's code, which may fail on proxies
        return None


@cache_per_module
def weight_layout(module: nn.Module) -> str | None:
    """Return how a linear module stores its weight: `ROWS` as `nn.Linear`, `COLUMNS` as transformers' Conv1D; None for other modules.

    Found by calling a small copy in float64.
    """
    if type(module) is nn.Linear:
        return ROWS
    own = {name: parameter.dim() for name, parameter in module.named_parameters()}
    if own not in ({"weight": 2}, {"weight": 2, "bias": 1}) or any(True for _ in module.buffers()):
        return None
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return _try_layouts(module)
    except Exception:  # it runs the module's code
        return None


def _try_layouts(module: nn.Module) -> str | None:
    """Return the layout with which a small copy of `module` returns the product with its weight; None if neither does."""
    rows, columns = module.weight.shape
    sizes = {rows: 24, columns: 24 if rows == columns else 8}
    small = copy.copy(module)
    for name, value in list(vars(small).items()):
        if type(value) is int:
            vars(small)[name] = sizes.get(value, value)
    vars(small)["_parameters"] = {
        name: p
        if p is None
        else nn.Parameter(torch.randn([sizes[size] for size in p.shape], dtype=torch.float64), False)
        for name, p in module._parameters.items()
    }
    for layout, weight in ((ROWS, small.weight), (COLUMNS, small.weight.T)):
        x = torch.randn(3, weight.shape[1], dtype=torch.float64)
        try:
            out = inspect.unwrap(type(module).forward)(small, x)
        except (RuntimeError, ValueError):  # x has the columns of the other layout
            continue
        if torch.is_tensor(out) and out.dtype == x.dtype and out.shape == (3, len(weight)):
            expected = functional.linear(x, weight, getattr(small, "bias", None))
            if torch.allclose(out, expected, rtol=1e-10, atol=1e-10):
                return layout
    return None


def name_activation(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """Return the key of `ACTIVATIONS` with the same values as `function`; None for another function."""
    with torch.device("cpu"):
        x = torch.linspace(-9, 9, 1001)
        values = function(x)
    if not torch.is_tensor(values) or values.shape != x.shape:
        return None
    return next((name for name, known in ACTIVATIONS.items() if torch.allclose(known(x), values, atol=2e-6)), None)


class _Tracer(fx.Tracer):
    """Traces into modules with linear ones in them; these, and modules without any, are single nodes."""

    def __init__(self, linears: set[nn.Module]):
        super().__init__()
        self.linears = linears

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module in self.linears or self.linears.isdisjoint(module.modules())


class _NoMlp(Exception):
    """The graph has another form than `Mlp`."""


@dataclass(frozen=True)
class _Product:
    """A linear module's output for the MLP's input, or one of `parts` equal parts of it."""

    name: str
    part: int = 0
    parts: int = 1


class _GraphReader:
    """Reads the graph of a traced module from its output to its input; raises `_NoMlp` if it has another form than `Mlp`."""

    def __init__(self, module: nn.Module):
        self.module = module

    def mlp(self, output: Any) -> Mlp:
        node = self._without_dropout(output)
        last = self._linear(node)
        if last is None:
            raise _NoMlp
        node = self._without_dropout(node.args[0])
        activation = self._activation(node)
        if activation is not None:
            return Mlp((self._undivided_product(activation[1]).name,), activation[0], last)
        if node.target not in (operator.mul, torch.mul, "mul") or len(node.args) != 2:
            raise _NoMlp
        for gate, up in (node.args, node.args[::-1]):
            activation = self._activation(self._without_dropout(gate))
            if activation is not None:
                return self._gated(activation[0], self._product(activation[1]), self._product(up), last)
        return self._gated("identity", self._product(node.args[0]), self._product(node.args[1]), last)

    def _gated(self, activation: str, gate: _Product, up: _Product, last: str) -> Mlp:
        if gate.name != up.name and gate.parts == up.parts == 1:
            return Mlp((gate.name, up.name), activation, last)
        if gate.name == up.name and gate.parts == up.parts == 2 and gate.part != up.part:
            return Mlp((gate.name, up.name), activation, last, gate_is_second=gate.part == 1)
        raise _NoMlp

    def _undivided_product(self, node: Any) -> _Product:
        """Return the linear module of which `node` is the whole output; raises `_NoMlp` if it is half of one, or anything else."""
        product = self._product(node)
        if product.parts != 1:
            raise _NoMlp
        return product

    def _product(self, node: Any) -> _Product:
        """Return the linear module of the MLP's input of which `node` is the output, or a half of it; raises `_NoMlp` if there is none."""
        node = self._without_dropout(node)
        name = self._linear(node)
        if name is not None:
            if node.args[0].op != "placeholder":
                raise _NoMlp
            return _Product(name)
        if node.target is operator.getitem and node.args[0].target in ("chunk", torch.chunk):
            cut, part = node.args[0], node.args[1]
            arguments = dict(zip(("chunks", "dim"), cut.args[1:])) | dict(cut.kwargs)
            if arguments.get("chunks") == 2 and arguments.get("dim") == -1:
                return _Product(self._undivided_product(cut.args[0]).name, part, 2)
        raise _NoMlp

    def _linear(self, node: fx.Node) -> str | None:
        """Return the name of the linear module that `node` calls; None for other nodes."""
        if node.op == "call_module" and weight_layout(self._module(node)) is not None:
            return str(node.target)
        return None

    def _activation(self, node: fx.Node) -> tuple[str, Any] | None:
        """Return the name of the activation and its input node; None if `node` is no known activation."""
        inputs = node.all_input_nodes
        if (
            len(inputs) != 1
            or self._linear(node) is not None
            or node.target in (operator.getitem, "chunk", torch.chunk)
        ):
            return None
        if node.op == "call_module":
            function: Any = self._module(node)
            if any(True for _ in function.parameters()):
                return None
        elif node.op == "call_function":
            function = node.target
        elif node.op == "call_method":
            method = str(node.target)
            function = lambda x, *rest, **options: getattr(x, method)(*rest, **options)  # noqa: E731
        else:
            return None
        name = name_activation(lambda x: function(x, *node.args[1:], **node.kwargs))
        return None if name is None else (name, inputs[0])

    def _without_dropout(self, node: Any) -> Any:
        while True:
            if node.op == "call_module" and isinstance(self._module(node), DROPOUTS):
                node = node.args[0]
            elif node.target is functional.dropout:
                node = node.args[0] if node.args else node.kwargs["input"]
            else:
                return node

    def _module(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))
