"""Trace a pass on the meta device, where tensors have shapes and no bytes: its operators, its memory, and which modules read a weight."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zero_inference.kernels.decode_attention import using_prompt_attention
from zero_inference.models.layers import cache_per_module, decoder_layers, expert_parameters, find_layers
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
            return Pass(operators, found.calls.total(), found.peak_bytes * asked.itemsize // dtype.itemsize)
    return None


@dataclass(frozen=True)
class Reads:
    """Calls of modules that read each parameter, by names in the model."""

    callers_of: dict[str, frozenset[str]]  # parameter -> the modules whose calls contain every operator that reads it
    calls: tuple[Counter[str], ...]  # of a prefill and of a decode step: module -> number of calls
    computes_between_layers: bool  # the model itself, between the calls of two decoder layers

    def only_inside(self, parameter: str, module: str) -> bool:
        """Return whether only calls of `module` read `parameter`."""
        return module in self.callers_of.get(parameter, (module,))

    def once_a_call(self, module: str, of: str) -> bool:
        """Return whether `module` is called at most once in each call of module `of`."""
        return all(calls[module] <= calls[of] for calls in self.calls)


@cache_per_module
def trace_reads(model: Any) -> Reads | None:
    """Trace a prefill and a decode step of `model`; None if it cannot run on the meta device."""
    callers_of: dict[str, frozenset[str]] = {}
    calls, computes_between_layers = [], False
    for tokens, past in ((2, 0), (1, 2)):
        tried = ((dtype, length) for length in (past, None) for dtype in (torch.bfloat16, torch.float32))
        found = (_record_pass(model, None, dtype, tokens, length, has_values=True) for dtype, length in tried)
        recorded = next((each for each in found if each is not None), None)
        if recorded is None:
            return None
        for name, modules in recorded.callers_of.items():
            callers_of[name] = callers_of.get(name, modules) & modules
        calls.append(recorded.calls)
        computes_between_layers |= recorded.computes_between_layers
    return Reads(callers_of, tuple(calls), computes_between_layers)


def _record_pass(
    model: Any, spec: ModelSpec | None, dtype: torch.dtype, tokens: int, past: int | None, has_values: bool = False
) -> PassRecorder | None:
    """Run one sequence's pass of `tokens` tokens after `past` others (None: without a cache); None if that fails.

    `has_values`: reading a value gives zero instead of failing.
    """
    from transformers import masking_utils

    try:
        copied = copy_to_meta(model, dtype)
        recorder = PassRecorder(copied, spec, has_values)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        cache = {} if past is None else {"past_key_values": _passing_cache(model.config, past)}
        last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(copied.forward).parameters else {}
        with Patches() as patches, torch.no_grad():
            # transformers would read the values of a mask that a model makes, as OPT's
            patches.set_attr(masking_utils, "fast_all", lambda mask: True)
            recorder.hook_modules(patches)
            with using_prompt_attention(copied), _ReplacedAttention(recorder), recorder:
                copied(input_ids=ids, **cache, use_cache=past is not None, **last_only)
    except Exception:  # the model's own code may raise anything
        return None
    return recorder


def copy_to_meta(model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a new copy of `model` on the meta device: a pass may change it, as RWKV's first one divides its weights."""
    return copy.deepcopy(model).to("meta", dtype)


def _passing_cache(config: Any, past: int) -> Any:
    """Return a cache of `past` positions that stores nothing; without a cache transformers would read position ids."""
    from transformers import DynamicCache

    class Passing(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            both = key_states, value_states  # [B, heads, tokens, width]
            if not past:
                return both
            return tuple(new.new_empty(*new.shape[:-2], past + new.shape[-2], new.shape[-1]) for new in both)

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return past

        def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
            new = query_length if isinstance(query_length, int) else query_length.shape[0]
            return past + new, 0

    return Passing(config=config)


class ShapeCache(TorchDispatchMode):
    """Runs operators on the meta device, each once for inputs of the same shapes.

    PyTorch finds many shapes in Python, 100 to 300 us an operator: a plan of 80 layers took 1.4 s of CPU more.
    """

    _outputs: ClassVar[dict[Any, tuple]] = {}  # of all passes: arguments -> size, stride and dtype

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        return self.call(function, args, kwargs, {storage_of(tensor) for tensor in tensors_in((args, kwargs))})

    def call(self, function: Any, args: tuple, kwargs: dict, given: set[int]) -> Any:
        """Return `function(*args, **kwargs)`; `given`: storages of its inputs."""
        key = function, torch.get_default_dtype(), _describe_arguments((args, kwargs))
        if key in self._outputs:
            size, stride, dtype = self._outputs[key]
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        out = function(*args, **kwargs)
        # a view or a result in place is not new
        if isinstance(out, torch.Tensor) and out.is_meta and storage_of(out) not in given:
            if out.nbytes == out.untyped_storage().nbytes():
                self._outputs[key] = out.shape, out.stride(), out.dtype
        return out


class PassRecorder(ShapeCache):
    """Records the operators of a pass on the meta device; `callers_of` and `calls` as in `Reads`."""

    def __init__(self, model: nn.Module, spec: ModelSpec | None, has_values: bool) -> None:
        super().__init__()
        self.has_values = has_values
        self.operators: Counter[Operator] = Counter()
        self.operators_seen = self.alive_bytes = self.peak_bytes = 0  # bytes of tensors that operators made
        self.callers_of: dict[str, frozenset[str]] = {}
        self.calls: Counter[str] = Counter()
        self._alive: dict[int, int] = {}  # storage -> its number, because ids of freed storages are used again
        self._storages_made = 0
        self._last_input: tuple[int, int | None] | None = None  # storage and number, of a product with a weight
        self._weight_kinds = _weight_kinds(model, spec) if spec else {}
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters: dict[int, list[str]] = {}  # names by storage
        for name, module in model.named_modules():  # a shared module has its first name
            for own, parameter in module.named_parameters(name, recurse=False):
                self._parameters.setdefault(storage_of(parameter), []).append(own)
        self._stack: list[str] = []  # modules that are being called
        self.computes_between_layers = self._computed = False  # the second since the last layer
        self._layers, self._layers_called = set(find_layers(model)[1]), 0

    def hook_modules(self, patches: Patches) -> None:
        def before(module: nn.Module, args: tuple) -> None:
            self._stack.append(self._names.get(module, ""))
            self.calls[self._stack[-1]] += 1
            if module in self._layers:
                self.computes_between_layers |= self._computed and self._layers_called > 0
                self._layers_called += 1

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self._stack.pop()
            if module in self._layers:
                self._computed = False

        hooks = torch.nn.modules.module
        patches.add_hooks(hooks.register_module_forward_pre_hook(before))
        patches.add_hooks(hooks.register_module_forward_hook(after, always_call=True))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.has_values and function is aten._local_scalar_dense.default:  # a model that reads values reads zeros
            return 0
        if self.has_values and function is aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        self.operators_seen += 1
        if self.operators_seen > MAX_OPERATORS:
            raise RuntimeError(f"more than {MAX_OPERATORS} operators")
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        given = {storage_of(tensor) for tensor in inputs}
        outputs = tensors_in(out := self.call(function, args, kwargs, given))
        for storage in given & self._parameters.keys():
            for name in self._parameters[storage]:
                self.callers_of[name] = self.callers_of.get(name, frozenset(self._stack)).intersection(self._stack)
        for tensor in outputs:
            if storage_of(tensor) not in given:
                self._add_storage(tensor.untyped_storage())
        packet, flops = function._overloadpacket, 0  # what is no product is bound by memory traffic
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif "grouped_mm" in str(packet):  # rows sorted by expert, times the weights of each
            flops = 2 * out.numel() * args[0].shape[-1]
        if not function.is_view and packet not in WITHOUT_WORK:
            self._computed = True
            self._count_operator(flops, inputs, outputs, looks_up=packet is aten.embedding)
        return out

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if key in self._alive:
            return
        self._storages_made += 1
        self._alive[key] = self._storages_made
        self.alive_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

        def remove() -> None:
            del self._alive[key]
            self.alive_bytes -= nbytes

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
            storage = storage_of(computed[0])
            given = storage, self._alive.get(storage)
            same_input = given == self._last_input
            self._last_input = given
        nbytes = sum(tensor.nbytes for tensor in (*computed, *outputs))
        weights = read["outside_bytes"], read["layer_bytes"], read["expert_bytes"]
        self.operators[Operator(flops, nbytes, *weights, same_input=same_input)] += 1

    def count_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Record attention and return its output. It is causal, so a prompt's tokens attend to half of each other."""
        batch, heads, length, width = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        pairs = length * key.shape[2] - length * (length - 1) // 2
        flops = 2 * batch * heads * pairs * (width + value.shape[-1])
        nbytes = sum(each.nbytes for each in (query, key, value, out))
        shape = AttentionShape(heads, key.shape[1], (width + value.shape[-1]) / 2, key.shape[2])
        self.operators[Operator(flops, nbytes, attention=shape)] += 1
        return out


class _ReplacedAttention(TorchFunctionMode):  # a mode, because other threads may compute with the same functions
    def __init__(self, recorder: PassRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is nn.functional.scaled_dot_product_attention:
            return self.recorder.count_attention(*args[:3])
        if function is torch.Tensor.__contains__:  # transformers looks for the padding token among the ids
            return False
        return function(*args, **(kwargs or {}))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, tuples and dictionaries (tree_leaves takes several times as long)."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for branch in branches for tensor in tensors_in(branch)]


def _describe_arguments(tree: Any) -> Any:
    """Return a hashable that is equal for arguments which give outputs of the same shape and dtype."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device
    if isinstance(tree, dict):
        return tuple((name, _describe_arguments(each)) for name, each in tree.items())
    if isinstance(tree, list | tuple):
        return tuple(map(_describe_arguments, tree))
    return type(tree), tree  # 2 and 2.0 give other dtypes


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's storage, unique while that is alive."""
    return tensor.untyped_storage()._cdata


def _weight_kinds(model: Any, spec: ModelSpec) -> dict[int, str]:
    """Return by the storage of each parameter the attribute of `Operator` that counts its bytes."""
    kinds = {storage_of(parameter): "outside_bytes" for parameter in model.parameters()}
    for layer in decoder_layers(model)[1]:
        kinds |= {storage_of(parameter): "layer_bytes" for parameter in layer.parameters()}
    return kinds | {storage_of(parameter): "expert_bytes" for parameter in expert_parameters(model, spec)}
