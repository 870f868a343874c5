"""Divides decoder layers into blocks: what is resident, streamed or CPU-computed as a whole.

Blocks are found by what a module holds and not by family: a block is a child of the layer with matrices in it, or of a mixture, whose
experts are one block. The CPU can multiply blocks whose matrices are all weights of linear modules, and experts of the usual forms. A layer
without such a child is one block.

A block's weights are there for its call only, so a layer is divided only where a traced pass shows that nothing else reads them. The
rest stays on the device: what is read outside of its layer's call, and small parts of a layer.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from zero_inference.engines.base import Job
from zero_inference.engines.stream.layout import BlockLayout, lay_out
from zero_inference.errors import UsageError
from zero_inference.kernels.formats import WeightFormat
from zero_inference.kernels.quantization import MIN_QUANTIZED_COLUMNS, GroupQuantization, group_size_refusal
from zero_inference.kv_cache.device import takes_cache
from zero_inference.models.empty_model import parameter_names
from zero_inference.models.layers import decoder_layers, find_layers, first_of_kind
from zero_inference.models.mlp import (
    COLUMNS,
    FusedExperts,
    Mlp,
    detect_experts,
    detect_mlp,
    experts_per_token,
    weight_layout,
)
from zero_inference.models.tracing import Reads, trace_reads
from zero_inference.utils.model_sizes import text_config

PYTORCH = ("builtins", "torch.")  # prefixes of Python modules whose classes read no weights of their child modules
# Share of a layer's or block's bytes that may stay on the device so that the CPU can multiply the rest
SMALL_SHARE = 1 / 16


@dataclass(frozen=True)
class Block:
    """A module of a decoder layer; all names but `module` are relative to it."""

    layer: int  # index of the decoder layer
    module: str  # the block's module, relative to the layer; empty for the layer itself
    parameters: tuple[str, ...]  # those that are placed with the block
    linears: tuple[str, ...] = ()  # linear modules that the CPU can multiply; empty if it cannot
    feed_forward: Mlp | None = None  # formula of a known feed-forward, which the CPU computes as a whole
    experts: FusedExperts | None = None  # formula of a mixture's experts, of which the CPU reads the chosen ones
    exact: tuple[str, ...] = ()  # matrices that are not quantized: routers and experts' biases
    transposed: tuple[str, ...] = ()  # matrices [in, out], which are stored as [out, in]
    module_only: tuple[str, ...] = ()  # dequantized for each call of their module, which alone reads them, once
    mixtures: tuple[tuple[str, FusedExperts], ...] = ()  # (name, formula) of the modules of experts in the block
    layout: BlockLayout = field(default_factory=BlockLayout)  # shared by blocks of layers of one kind

    @property
    def computable(self) -> bool:
        return bool(self.linears) or self.experts is not None

    def module_in(self, layer: nn.Module) -> nn.Module:
        return layer.get_submodule(self.module)

    def full_name(self, prefix: str, parameter: str) -> str:
        """Return the name of a parameter in the model whose decoder layers are named `prefix`."""
        return ".".join(filter(None, (prefix, str(self.layer), self.module, parameter)))


def lay_out_blocks(
    model: nn.Module,
    scheme: GroupQuantization | None,
    divided: bool,
    kept: Mapping[str, tuple[WeightFormat, bool]] | None = None,
) -> tuple[list[Block], int]:
    """Return the blocks of the decoder layers of a meta model, and the bytes of all other parameters.

    Args:
        scheme: how matrices are quantized while they are loaded; None if they are not.
        divided: as of `find_blocks`.
        kept: parameter -> (format, stored transposed) of those that are kept as the checkpoint stores them.

    Raises:
        UsageError: the model has no list of decoder layers, or the group size does not divide the columns of a matrix.
    """
    prefix, layers = decoder_layers(model)
    outside_layers = _parameters_outside_layers(model, layers)
    blocks = find_blocks(model, outside_layers, divided)
    same_as = {} if outside_layers else first_of_kind(model)
    by_kind: dict[tuple, BlockLayout] = {}
    kept = kept or {}
    in_blocks = set()
    for index, block in enumerate(blocks):
        module = block.module_in(layers[block.layer])
        parameters = [(name, module.get_parameter(name)) for name in block.parameters]
        in_blocks |= {id(parameter) for _, parameter in parameters}
        names = {name: block.full_name(prefix, name) for name in block.parameters if name not in block.exact}
        formats = {
            name: kept[full_name][0]
            for name, full_name in names.items()
            if full_name in kept and kept[full_name][1] == (name in block.transposed)
        }
        # a checkpoint may leave out some layers of a kind
        key = same_as.get(block.layer, block.layer), block.module, tuple(formats.items())
        if key not in by_kind:
            for name, parameter in parameters if scheme is not None else ():
                matrix = parameter.mT if name in block.transposed else parameter
                if name not in block.exact and scheme.can_quantize(matrix):
                    formats[name] = scheme.weight_format(matrix.dtype)
                elif name not in block.exact and scheme.is_for(matrix) and _is_wide(matrix):
                    raise group_size_refusal(scheme.group_size, names[name], tuple(matrix.shape))
            fused = [experts.weights_in(name) for name, experts in block.mixtures]
            by_kind[key] = lay_out(parameters, formats, block.transposed, block.module_only, fused)
        blocks[index] = replace(block, layout=by_kind[key])
    return blocks, _nbytes(p for p in model.parameters() if id(p) not in in_blocks)


def why_one_device(model: nn.Module) -> str | None:
    """Return why the decoder layers of a meta model have to be on one device, in a few words; None where each may be on any."""
    _, layers = find_layers(model)
    reads = trace_reads(model)
    if not layers:
        return "it has no list of decoder layers"
    if not takes_cache(model):
        return "it has one state for all layers and no KV cache"
    if reads is None:
        return "a pass of the model could not be traced"
    if reads.computes_between_layers:
        return "it computes between its decoder layers"
    if _parameters_outside_layers(model, layers):
        return "its decoder layers share weights"
    if getattr(text_config(getattr(model, "config", None)), "num_kv_shared_layers", 0):
        return "some of its decoder layers read keys and values of others"
    return None


def refuse_several_devices(job: Job) -> None:
    """Raise UsageError where a job has several devices and its model needs one."""
    reason = why_one_device(job.empty_model.model) if len(job.devices) > 1 else None
    if reason is not None:
        raise UsageError(
            f"{len(job.devices)} GPUs (--num-gpus, or a launcher's ranks): {job.spec.name} runs on one GPU, because {reason}; use "
            "--num-gpus 1."
        )


def find_blocks(model: nn.Module, outside_layers: set[int], divided: bool) -> list[Block]:
    """Return the blocks of all decoder layers, in the order of layers and of their children.

    A layer of which the CPU could multiply no block is one block.

    Args:
        outside_layers: ids of parameters that are in no block.
        divided: make a block of each child that has matrices; otherwise each layer is one.
    """
    prefix, layers = decoder_layers(model)
    reads = trace_reads(model)
    # a block lacks parameters that are read outside of its layer, and those of an equal layer may all be in its blocks
    same_as = {} if outside_layers else first_of_kind(model)
    blocks: dict[int, list[Block]] = {}  # by layer
    for index, layer in enumerate(layers):
        if same_as.get(index, index) != index:
            blocks[index] = [replace(block, layer=index) for block in blocks[same_as[index]]]
            continue
        experts = dict(_experts_in(layer, text_config(getattr(model, "config", None))))
        divider = _LayerDivider(index, layer, outside_layers, experts, reads, f"{prefix}.{index}")
        parts = divider.divide() if divided and reads is not None else []
        blocks[index] = parts if any(part.computable for part in parts) else [divider.whole()]
    return sum(blocks.values(), [])


def _parameters_outside_layers(model: nn.Module, layers: nn.ModuleList) -> set[int]:
    """Return ids of parameters of `layers` that cannot be placed with one layer: tied to another module, or read outside of the layer's
    call."""
    reads, prefix = trace_reads(model), decoder_layers(model)[0]
    outside = set()
    for index, layer in enumerate(layers if reads is not None else ()):
        name = f"{prefix}.{index}"
        outside |= {id(p) for own, p in layer.named_parameters() if not reads.only_inside(f"{name}.{own}", name)}
    if first_of_kind(model):
        return outside  # layers are grouped by kind only where nothing is shared
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    names = parameter_names(model)  # in the whole model
    names_in_layers = Counter(id(p) for layer in layers for _, p in layer.named_parameters(remove_duplicate=False))
    return outside | {key for key, where in owners.items() if len(where) > 1 or len(names[key]) > names_in_layers[key]}


def _experts_in(layer: nn.Module, config: object) -> Iterator[tuple[str, FusedExperts]]:
    """Yield (name, formula) of the modules of experts in `layer`."""
    for name, module in layer.named_modules():
        if name and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            experts = detect_experts(module)
            if experts is not None:
                mixture = layer.get_submodule(name.rpartition(".")[0])
                yield name, replace(experts, top_k=experts_per_token(mixture, config, experts.num_experts))


def _nbytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


def _is_wide(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and parameter.shape[-1] >= MIN_QUANTIZED_COLUMNS


class _LayerDivider:
    """Divides one layer into blocks.

    Args:
        experts: modules of experts by their name in the layer.
        reads: traced reads of the model; None if tracing failed, and only `whole` can be called.
        layer_name: name of the layer in the model.
    """

    def __init__(
        self,
        index: int,
        layer: nn.Module,
        outside_layers: set[int],
        experts: dict[str, FusedExperts],
        reads: Reads | None,
        layer_name: str,
    ):
        self.index, self.layer, self.outside_layers, self.experts = index, layer, outside_layers, experts
        self.reads, self.layer_name = reads, layer_name
        modules = layer.named_modules()
        self.transposed = {f"{name}.weight" for name, module in modules if name and weight_layout(module) == COLUMNS}
        self.exact: set[str] = set()  # routers and biases of experts
        for name, each in experts.items():
            if each.transposed:
                self.transposed |= {f"{name}.{each.gate_up}", f"{name}.{each.down}"}
            self.exact |= {f"{name}.{own}" for own in each.biases}
            mixture = name.rpartition(".")[0]
            for router, child in self._children(mixture):
                if self._is_router(mixture, child):
                    self.exact |= {f"{router}.{own}" for own, _ in child.named_parameters()}

    def whole(self) -> Block:
        owned = tuple(name for name, p in self.layer.named_parameters() if id(p) not in self.outside_layers)
        return self._make_block("", owned)

    def divide(self, prefix: str = "") -> list[Block]:
        """Return a block for each child of the module `prefix` that holds matrices; nothing if a matrix belongs to no child that is called.

        A mixture is divided likewise, and its routers stay on the device."""
        found: list[Block] = []
        module = self.layer.get_submodule(prefix)
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
        if self._matrices(module, recurse=False) or any(self._matrices(child) for child in lists):
            return found  # matrices of its own, or in a list, which is not called itself
        for name, child in self._children(prefix):
            if not self._matrices(child) or self._is_router(prefix, child):
                continue
            parts = self.divide(name) if any(each.startswith(f"{name}.") for each in self.experts) else []
            called_once = self.reads.once_a_call(f"{self.layer_name}.{name}", self.layer_name)
            if parts:
                found += parts
            elif called_once and self._alone_reads(name, child):
                found.append(self._child_block(name, child))
            elif _nbytes(child.parameters()) > SMALL_SHARE * _nbytes(self.layer.parameters()):
                return []
        return found

    def _child_block(self, name: str, module: nn.Module) -> Block:
        """Return the block of child `name`: with `experts` or `linears` if these have nearly all of its weights, so that the CPU can
        compute it."""
        owned = [(own_name, p) for own_name, p in module.named_parameters() if id(p) not in self.outside_layers]
        names = tuple(own_name for own_name, _ in owned)
        whole = len(owned) == len(list(module.named_parameters()))
        if name in self.experts:
            return self._make_block(name, names, experts=self.experts[name] if whole else None)
        linears = {
            part: child
            for part, child in module.named_modules()
            if weight_layout(child) is not None and self._alone_reads(f"{name}.{part}".rstrip("."), child)
        }
        in_linears = {id(p) for child in linears.values() for p in child.parameters()}
        others = [p for _, p in owned if _is_wide(p) and id(p) not in in_linears]
        if not whole or not linears or _nbytes(others) > SMALL_SHARE * _nbytes(module.parameters()):
            return self._make_block(name, names)
        names = tuple(own_name for own_name, p in owned if id(p) in in_linears)
        return self._make_block(name, names, linears=tuple(linears), feed_forward=detect_mlp(module))

    def _make_block(self, name: str, names: tuple[str, ...], **others: Any) -> Block:
        start = f"{name}." if name else ""
        inside = (item for item in self.experts.items() if f"{item[0]}.".startswith(start))
        return Block(
            self.index,
            name,
            names,
            exact=tuple(each for each in names if f"{start}{each}" in self.exact),
            transposed=tuple(each for each in names if f"{start}{each}" in self.transposed),
            module_only=tuple(each for each in names if self._is_module_only(f"{start}{each}", name)),
            mixtures=tuple((full[len(start) :], experts) for full, experts in inside),
            **others,
        )

    def _alone_reads(self, name: str, module: nn.Module) -> bool:
        """Return whether no other code of the model reads the parameters of `module`."""
        full = f"{self.layer_name}.{name}"
        return all(self.reads.only_inside(f"{full}.{own}", full) for own, _ in module.named_parameters())

    def _matrices(self, module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse) if _is_wide(p) and id(p) not in self.outside_layers]

    def _children(self, prefix: str) -> list[tuple[str, nn.Module]]:
        module = self.layer.get_submodule(prefix)
        return [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]

    def _is_router(self, prefix: str, child: nn.Module) -> bool:
        """Return whether `child` of `prefix` routes to sibling experts: it is no feed-forward, and has at most a row for each expert."""
        siblings = next((each for name, each in self.experts.items() if name.rpartition(".")[0] == prefix), None)
        matrices = [p for p in child.parameters() if p.dim() > 1]
        return (
            siblings is not None
            and bool(matrices)
            and all(p.numel() <= siblings.num_experts * p.shape[-1] for p in matrices)
            and detect_mlp(child) is None
        )

    def _is_module_only(self, parameter: str, block: str) -> bool:
        """Return whether `parameter` can be dequantized for each call of its module.

        Only that module reads it, it is called at most once in each call of module `block`, and it has no children with parameters, which
        would overwrite it in the workspace while it computes. The parent's code must not name it: it may read it with kernels that the
        traced pass did not use, as Mamba's does.
        """
        module, _, own = parameter.rpartition(".")
        if self.reads is None or any("." in name for name, _ in self.layer.get_submodule(module).named_parameters()):
            return False
        parent, _, child = module.rpartition(".")
        full_block, full_module = (f"{self.layer_name}.{name}".rstrip(".") for name in (block, module))
        alone_reads = self.reads.only_inside(f"{self.layer_name}.{parameter}", full_module)
        if not (alone_reads and self.reads.once_a_call(full_module, full_block)):
            return False
        parent_class: Any = type(self.layer.get_submodule(parent))
        source = _source(parent_class) if module else ""
        return source is not None and not re.search(rf"\.{re.escape(f'{child}.{own}')}\b(?!\.(dtype|device))", source)


@functools.cache
def _source(cls: type) -> str | None:
    """Return the source of `cls` and its bases, without PyTorch's; None if some of it cannot be read."""
    try:
        return "\n".join(inspect.getsource(each) for each in cls.__mro__ if not each.__module__.startswith(PYTORCH))
    except (OSError, TypeError):
        return None
