"""The memory of a block: its layout as one contiguous buffer, the same in host memory and in a device slot; the buffers themselves
(`BlockStore`); and the tensors in them (`BlockViews`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from zero_inference.cpu.products import quantize
from zero_inference.engines.stream.disk import DiskBlocks
from zero_inference.errors import RunError
from zero_inference.kernels.formats import TENSORS, QuantizedWeight, WeightFormat
from zero_inference.kernels.products import ALIGNMENT
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.utils.host_memory import host_empty

VECTOR_BYTES = 16  # that kernels for codes read at once
BUFFER_ALIGNMENT = 256  # what cudaMalloc gives; a matrix multiplication picks its kernel by alignment
# Bytes of a group of experts, dequantized. Qwen3-30B-A3B has one group a layer, DeepSeek-V3 20 (all 256 experts would take 14 GiB).
EXPERT_GROUP_BYTES = 768 << 20


@dataclass(frozen=True)
class TensorSpan:
    """A tensor inside a uint8 buffer; `offset` is in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of `buffer`, uint8."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedSpans:
    """A quantized weight inside a block's buffer: its format, and spans by the names in `WeightFormat.tensors`."""

    format: WeightFormat
    spans: Mapping[str, TensorSpan]

    def of(self, buffer: torch.Tensor) -> QuantizedWeight:
        """Return the weight, whose tensors are views of `buffer`."""
        return QuantizedWeight(self.format, **{name: span.of(buffer) for name, span in self.spans.items()})


@dataclass(frozen=True)
class StoredParameter:
    name: str
    plain: TensorSpan  # the values that the model reads: in the block's buffer, or in the workspace if quantized
    packed: PackedSpans | None = None  # in the buffer, if quantized
    transposed: bool = False  # stored as [..., out, in], where the model has [..., in, out]
    module_only: bool = False  # dequantized for each call of its own module; otherwise for the call of the block
    expert_group: int = 0  # experts that are dequantized at a time; 0 for a weight that is dequantized whole

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def pieces(self) -> tuple[TensorSpan, ...]:
        """Tensors in the block's buffer: the values, or codes, scales and others of a quantized weight."""
        return (self.plain,) if self.packed is None else tuple(self.packed.spans.values())

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the values of an unquantized parameter as the model reads them, a view of the block's `buffer`."""
        plain = self.plain.of(buffer)
        return plain.mT if self.transposed else plain


@dataclass
class BlockLayout:
    """The parameters of one block; names are relative to its module.

    The buffer holds unquantized parameters, then the codes of all matrices, their scales, offsets and row scales, so that kernels can
    multiply consecutive matrices as one. The workspace holds the matrices that are dequantized for the call of the block, and then those
    of one module at a time.
    """

    parameters: list[StoredParameter] = field(default_factory=list)
    nbytes: int = 0  # size of the buffer, a multiple of `BUFFER_ALIGNMENT`
    stored_bytes: int = 0  # bytes of the tensors in it, without gaps
    workspace_bytes: int = 0  # 0 for a block without quantized parameters

    @property
    def dequantized_bytes(self) -> int:
        return sum(each.plain.nbytes for each in self.parameters if each.packed is not None)

    def __getitem__(self, name: str) -> StoredParameter:
        return next(p for p in self.parameters if p.name == name)


def lay_out(
    parameters: Iterable[tuple[str, torch.Tensor]],
    formats: Mapping[str, WeightFormat],
    transposed: Collection[str] = (),
    module_only: Collection[str] = (),
    experts: Iterable[Sequence[str]] = (),
) -> BlockLayout:
    """Return the layout of `parameters`, which may be on the meta device; other arguments are names of them.

    Args:
        formats: of the matrices that are quantized, as stored.
        transposed: matrices [..., in, out], which are stored as [..., out, in]: groups, and the CPU's products, run along in.
        module_only: those that are dequantized for each call of their own module.
        experts: the fused weights of each module of experts; they are dequantized in groups of `EXPERT_GROUP_BYTES` at most, or of one
            expert, if they are `module_only`.
    """
    layout = BlockLayout()
    stored = [(name, parameter.mT if name in transposed else parameter) for name, parameter in parameters]
    packed = {name: parameter for name, parameter in stored if name in formats}
    end = 0  # bytes of the buffer so far
    for name, parameter in stored:
        if name not in packed:
            end = end if parameter.dim() == 1 else aligned(end)  # consecutive biases are one
            span = TensorSpan(end, tuple(parameter.shape), parameter.dtype)
            end += aligned(span.nbytes, VECTOR_BYTES)
            layout.parameters.append(StoredParameter(name, span, transposed=name in transposed))
    end = aligned(end)
    spans: dict[str, dict[str, TensorSpan]] = {name: {} for name in packed}
    for kind in TENSORS:
        for name, parameter in packed.items():
            tensors = formats[name].tensors(tuple(parameter.shape))
            if kind in tensors:
                spans[name][kind] = TensorSpan(end, *tensors[kind])
                end += aligned(spans[name][kind].nbytes, VECTOR_BYTES)
        end = aligned(end)
    layout.nbytes = aligned(end)

    expert_groups: dict[str, int] = {}  # weight of experts -> how many experts of it are dequantized at a time
    for names in experts:
        if all(name in packed and name in module_only for name in names):
            number = packed[names[0]].shape[0]
            expert_bytes = max(packed[name].nbytes for name in names) // number
            expert_groups |= dict.fromkeys(names, min(number, max(1, EXPERT_GROUP_BYTES // expert_bytes)))
    per_block = sum(aligned(p.nbytes) for name, p in packed.items() if name not in module_only)
    block_end, module_ends = 0, dict[str, int]()  # of the workspace; each module's weights begin at `per_block`
    layout.workspace_bytes = per_block
    for name, parameter in packed.items():
        module, group = name.rpartition(".")[0], expert_groups.get(name, 0)
        nbytes = aligned(parameter.nbytes // parameter.shape[0] * group if group else parameter.nbytes)
        if name in module_only:
            # groups of a module's experts are dequantized one after the other, into the same memory
            offset = per_block if group else module_ends.get(module, per_block)
            module_ends[module] = offset + nbytes
        else:
            offset = block_end
            block_end += nbytes
        layout.workspace_bytes = max(layout.workspace_bytes, offset + nbytes)
        plain = TensorSpan(offset, tuple(parameter.shape), parameter.dtype)
        quantized = PackedSpans(formats[name], spans[name])
        layout.parameters.append(
            StoredParameter(name, plain, quantized, name in transposed, name in module_only, group)
        )
    layout.stored_bytes = sum(span.nbytes for parameter in layout.parameters for span in parameter.pieces)
    return layout


def lay_out_experts(layout: BlockLayout, number: int) -> BlockLayout:
    """Return the layout of a block that holds experts and nothing else, for `number` experts."""
    found, end = BlockLayout(), 0
    for stored in layout.parameters:
        shape = (number, *stored.plain.shape[1:])
        plain, packed = TensorSpan(end, shape, stored.plain.dtype), None
        if stored.packed is None:
            end = aligned(end + plain.nbytes)
        else:
            spans = {}
            for kind, tensor in stored.packed.format.tensors(shape).items():
                spans[kind] = TensorSpan(end, *tensor)
                end = aligned(end + spans[kind].nbytes)
            packed = PackedSpans(stored.packed.format, spans)
        found.parameters.append(replace(stored, plain=plain, packed=packed))
    found.nbytes = end
    found.stored_bytes = sum(span.nbytes for stored in found.parameters for span in stored.pieces)
    return found


def aligned(nbytes: int, alignment: int = BUFFER_ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


class BlockStore:
    """The buffers of all blocks: page-locked in host memory or, if resident, on the device of their layer.

    Memory of resident blocks is allocated before loading, so that its temporary tensors do not fragment device memory; host memory is
    allocated with a block's first parameter.

    Args:
        devices: of each block.
        resident: indices of resident blocks.
        shared: buffers of blocks that another store has filled.
        disk: the blocks on disk, which have no buffer; those that it writes are written as soon as they are complete.
    """

    def __init__(
        self,
        layouts: list[BlockLayout],
        devices: Sequence[torch.device],
        resident: Collection[int],
        pinned: bool,
        shared: Mapping[int, torch.Tensor],
        disk: DiskBlocks | None = None,
    ):
        self.disk = disk
        # blocks on disk that are being filled: buffer, and how many parameters are missing
        self.unwritten: dict[int, tuple[torch.Tensor, int]] = {}
        self.layouts, self.devices, self.resident, self.pinned = layouts, devices, set(resident), pinned
        self.shared = frozenset(shared)
        self.buffers = {  # block -> uint8 [nbytes]
            block: torch.empty(layouts[block].nbytes, dtype=torch.uint8, device=devices[block])
            for block in self.resident - self.shared
        } | dict(shared)

    def put(self, block: int, stored: StoredParameter, values: torch.Tensor, scheme: GroupQuantization | None) -> None:
        """Store a parameter of `block`, quantized on its device if its layout says so.

        Raises:
            RunError: host memory is exhausted or may not be page-locked, or `values` have another shape or dtype than was laid out.
        """
        values = values.mT if stored.transposed else values
        found, expected = (tuple(values.shape), values.dtype), (stored.plain.shape, stored.plain.dtype)
        if found != expected:
            raise RunError(
                f"block {block}: {stored.name} is {found[1]} {list(found[0])}, expected is {expected[1]} "
                f"{list(expected[0])}; use weights that match the model's config.json."
            )
        self._copy(
            block, stored, (values,) if stored.packed is None else quantize(values.to(self.devices[block]), scheme)
        )

    def put_stored(self, block: int, stored: StoredParameter, weight: QuantizedWeight) -> None:
        """Store a parameter of `block` that is quantized already. Raises RunError: host memory is exhausted or may not be page-locked."""
        self._copy(block, stored, weight.tensors.values())

    def _copy(self, block: int, stored: StoredParameter, tensors: Iterable[torch.Tensor]) -> None:
        layout, on_disk = self.layouts[block], self.disk is not None and block in self.disk.written
        if on_disk and block not in self.unwritten:
            self.unwritten[block] = self.disk.empty_buffer(block), len(layout.parameters)
        elif not on_disk and block not in self.buffers:
            self.buffers[block] = host_empty((layout.nbytes,), torch.uint8, self.pinned)
        buffer = self.unwritten[block][0] if on_disk else self.buffers[block]
        for span, tensor in zip(stored.pieces, tensors, strict=True):
            span.of(buffer).copy_(tensor.reshape(span.shape))
        if on_disk:
            buffer, missing = self.unwritten.pop(block)
            if missing > 1:
                self.unwritten[block] = buffer, missing - 1
            else:
                self.disk.write(block, buffer)

    def close(self) -> None:
        self.buffers.clear()


class Packed(NamedTuple):
    """A quantized weight in a buffer."""

    weight: QuantizedWeight
    parts: tuple[tuple[QuantizedWeight, torch.Tensor], ...]  # by group of experts: with its values in the workspace
    plain: torch.Tensor  # the values, of the first group if there are several, as the model reads them


class Views(NamedTuple):
    plain: list[torch.Tensor]  # parameters as the model reads them, without those that are `module_only`
    packed: dict[str, Packed]  # quantized parameters by name


class BlockViews:
    """The tensors of a layout in each of `buffers`, made at first use; plain values of quantized ones are in the workspace.

    Blocks of one layout share the views of the ring's slots: one set per block and slot would be thousands.
    """

    def __init__(self, layout: BlockLayout, buffers: Sequence[torch.Tensor], workspace: torch.Tensor):
        self.layout, self.buffers, self.workspace = layout, buffers, workspace
        self.found: dict[int, Views] = {}  # by slot

    def __getitem__(self, slot: int) -> Views:
        if slot not in self.found:
            with torch.inference_mode(False):  # a view of inference mode could not be used outside it
                buffer, parameters = self.buffers[slot], self.layout.parameters
                packed = {each.name: self._packed(each, each.packed, buffer) for each in parameters if each.packed}
                plain = [
                    packed[each.name].plain if each.packed else each.values(buffer)
                    for each in parameters
                    if not each.module_only
                ]
            self.found[slot] = Views(plain, packed)
        return self.found[slot]

    def of_each_alignment(self) -> list[Views]:
        """Return the views in a slot of each alignment: kernels that take codes there take them in all slots. It is usually one, since
        torch aligns memory by more than `can_fuse` distinguishes."""
        slots = {buffer.data_ptr() % ALIGNMENT: slot for slot, buffer in enumerate(self.buffers)}
        return [self[slot] for slot in slots.values()]

    def _packed(self, stored: StoredParameter, packed: PackedSpans, buffer: torch.Tensor) -> Packed:
        weight, plain, parts = packed.of(buffer), stored.plain, []
        # experts, and experts of a part
        number, group = (plain.shape[0], stored.expert_group) if stored.expert_group else (1, 1)
        for first in range(0, number, group):
            count = min(group, number - first)
            shape = (count, *plain.shape[1:]) if stored.expert_group else plain.shape
            part = {name: each.view(number, -1)[first : first + count] for name, each in weight.tensors.items()}
            parts.append((QuantizedWeight(packed.format, **part), replace(plain, shape=shape).of(self.workspace)))
        values = parts[0][-1]
        return Packed(weight, tuple(parts), values.mT if stored.transposed else values)
