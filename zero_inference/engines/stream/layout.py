"""How a block of a decoder layer lies in memory: one contiguous buffer, the same in host memory and in a device slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from zero_inference.cpu.products import quantize
from zero_inference.errors import RunError
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.kernels.products import ALIGNMENT
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.shared_memory import SharedMemory

VECTOR = 16  # bytes that kernels for codes read at once
BUFFER_ALIGNMENT = 256  # what cudaMalloc gives; a matrix multiplication picks its kernel by alignment
# Bytes of a group of experts, dequantized. Qwen3-30B-A3B has one group a layer, DeepSeek-V3 20 (all 256 experts would take 14 GiB).
GROUP_BYTES = 768 << 20


@dataclass(frozen=True)
class TensorSpan:
    """A tensor inside a buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside `buffer`, a uint8 tensor; a view, not a copy."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StoredParameter:
    """A parameter as it is stored.

    Attributes:
        plain: where the model finds its values: in the block's buffer, or in the workspace if it is quantized. Of experts in groups the
            workspace holds one group.
        packed: codes (uint8), scales and minima in the block's buffer; None if this parameter is not quantized.
        transposed: the values are stored as [..., out, in], where the model has [..., in, out].
        module_only: it is dequantized for each call of its own module; otherwise, if quantized, for the call of the block.
        group: how many experts are dequantized at a time; 0 for a weight that is dequantized whole.
    """

    name: str
    plain: TensorSpan
    packed: tuple[TensorSpan, TensorSpan, TensorSpan] | None = None
    transposed: bool = False
    module_only: bool = False
    group: int = 0

    @property
    def module(self) -> str:
        """Name of the module that it belongs to."""
        return self.name.rpartition(".")[0]

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the parameter, which is not quantized, as the model reads it, a view of the block's buffer."""
        plain = self.plain.of(buffer)
        return plain.mT if self.transposed else plain

    @property
    def pieces(self) -> tuple[TensorSpan, ...]:
        """What lies in the block's buffer."""
        return self.packed or (self.plain,)


@dataclass
class BlockLayout:
    """The parameters of one block; names are relative to its module.

    Parameters that are not quantized come first. Then come the codes of all matrices, their scales, and their minima, so that matrices
    which follow each other are one with the rows of all.

    The workspace holds the matrices that are dequantized for the whole call of the block, and then those of one module at a time.

    Attributes:
        nbytes: length of the buffer, a multiple of `BUFFER_ALIGNMENT` times the number of ranks.
        stored_bytes: what the tensors in it take, without the gaps.
        workspace_bytes: length of the workspace; 0 for a block without quantization.
    """

    parameters: list[StoredParameter] = field(default_factory=list)
    nbytes: int = 0
    stored_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of its quantized parameters as the device multiplies them."""
        return sum(each.plain.nbytes for each in self.parameters if each.packed is not None)

    def __getitem__(self, name: str) -> StoredParameter:
        return next(p for p in self.parameters if p.name == name)


def lay_out(
    parameters: Iterable[tuple[str, torch.Tensor]],
    scheme: GroupQuantization | None,
    ranks: int,
    exact: Collection[str] = (),
    transposed: Collection[str] = (),
    module_only: Collection[str] = (),
    experts: Iterable[Sequence[str]] = (),
) -> BlockLayout:
    """Lay out `parameters`, which may be on the meta device, by name.

    Args:
        scheme: how matrices are quantized; None keeps every parameter as it is.
        ranks: the buffer is padded so that it divides by them.
        exact: names of matrices that are kept as they are.
        transposed: names of matrices [..., in, out], which are stored as [..., out, in]: groups, and the CPU's products, run along in.
        module_only: names of those that are dequantized for each call of their own module.
        experts: names of the fused weights of each module of experts; they are dequantized in groups of `GROUP_BYTES` at most, or of one
            expert, if they are `module_only`.
    """
    layout = BlockLayout()
    own = [(name, parameter.mT if name in transposed else parameter) for name, parameter in parameters]
    packed = [(name, p) for name, p in own if scheme is not None and scheme.can_quantize(p) and name not in exact]
    end = 0  # of what lies in the buffer so far
    for name, parameter in own:
        if all(parameter is not other for _, other in packed):
            end = end if parameter.dim() == 1 else _aligned(end)  # biases that follow each other are one
            piece = TensorSpan(end, tuple(parameter.shape), parameter.dtype)
            end += -(-piece.nbytes // VECTOR) * VECTOR
            layout.parameters.append(StoredParameter(name, piece, transposed=name in transposed))
    end = _aligned(end)
    kinds: list[list[TensorSpan]] = [[], [], []]
    for kind, pieces in enumerate(kinds):
        for _, parameter in packed:
            codes, groups = scheme.packed_bytes(parameter.numel()), parameter.numel() // scheme.group_size
            pieces.append(TensorSpan(end, (groups if kind else codes,), parameter.dtype if kind else torch.uint8))
            end += -(-pieces[-1].nbytes // VECTOR) * VECTOR
        end = _aligned(end)
    grouped = _grouped({name: parameter for name, parameter in packed if name in module_only}, experts)
    whole = sum(_aligned(parameter.nbytes) for name, parameter in packed if name not in module_only)
    begun, of_modules = (
        0,
        dict.fromkeys((name.rpartition(".")[0] for name in module_only), whole),
    )  # bytes of the workspace
    layout.workspace_bytes = whole
    for (name, parameter), *pieces in zip(packed, *kinds):
        module, group = name.rpartition(".")[0], grouped.get(name, 0)
        offset = begun if name not in module_only else whole if group else of_modules[module]
        ended = offset + _aligned(parameter.nbytes // parameter.shape[0] * group if group else parameter.nbytes)
        if name in module_only:
            of_modules[module] = ended
        else:
            begun = ended
        layout.workspace_bytes = max(layout.workspace_bytes, ended)
        plain = TensorSpan(offset, tuple(parameter.shape), parameter.dtype)
        layout.parameters.append(
            StoredParameter(name, plain, tuple(pieces), name in transposed, name in module_only, group)
        )
    layout.nbytes = -(-end // (BUFFER_ALIGNMENT * ranks)) * BUFFER_ALIGNMENT * ranks
    layout.stored_bytes = sum(piece.nbytes for stored in layout.parameters for piece in stored.pieces)
    return layout


def _grouped(weights: dict[str, torch.Tensor], experts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return by name of fused weights how many experts are dequantized at a time."""
    found: dict[str, int] = {}
    for names in experts:
        if all(name in weights for name in names):
            number = weights[names[0]].shape[0]
            largest = max(weights[name].nbytes for name in names) // number
            found |= dict.fromkeys(names, min(number, max(1, GROUP_BYTES // largest)))
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


PAGE = 4096


class BlockStore:
    """Filled parameter by parameter while a checkpoint is read. Host memory is taken when a block's first one comes, or at once if it is
    shared; that of blocks on the device at once, so that it does not lie between what loading takes for a while, and which could not be
    given back then.

    Args:
        read_whole: blocks in host memory of which more than this rank's share is read here.

    Attributes:
        buffers: block -> uint8 [nbytes / ranks] in host memory, or [nbytes] on the device.

    Raises:
        RunError: no memory that ranks could share.
    """

    def __init__(
        self,
        layouts: list[BlockLayout],
        resident: set[int],
        ranks: Ranks,
        pinned: bool,
        read_whole: Collection[int] = (),
    ):
        self.layouts, self.resident, self.ranks, self.pinned = layouts, resident, ranks, pinned
        self.buffers = {
            block: torch.empty(layouts[block].nbytes, dtype=torch.uint8, device=ranks.device) for block in resident
        }
        self.shared: dict[int, torch.Tensor] = {}  # block -> uint8 [nbytes], the same memory in all ranks
        self.memory: SharedMemory | None = None
        if read_whole and ranks.world_size > 1:
            self._share(sorted(read_whole))

    def put(self, block: int, name: str, values: torch.Tensor, scheme: GroupQuantization | None) -> None:
        """Store parameter `name` of `block`, quantized on the device if its layout says so.

        Raises:
            RunError: host memory is exhausted or may not be page-locked, or `values` do not fill the place laid out for them.
        """
        stored = self.layouts[block][name]
        if stored.transposed:
            values = values.mT
        found, expected = (tuple(values.shape), values.dtype), (stored.plain.shape, stored.plain.dtype)
        if found != expected:
            raise RunError(
                f"block {block}: {name} is {found[1]} {list(found[0])}, expected is {expected[1]} "
                f"{list(expected[0])}; use weights that match the model's config.json."
            )
        tensors = (values,) if stored.packed is None else quantize(values.to(self.ranks.device), scheme)
        buffer = self._buffer(block)
        for piece, tensor in zip(stored.pieces, tensors):
            self._write(buffer, piece, tensor, whole=block in self.resident)

    def complete(self) -> None:
        """All ranks have put everything. Raises RunError where shared memory may not be page-locked."""
        if self.memory is not None:
            self.memory.settle(self.pinned)

    def whole(self, block: int) -> torch.Tensor:
        """A block that is `read_whole`, uint8 [nbytes]."""
        return self.buffers[block] if self.ranks.world_size == 1 else self.shared[block]

    def close(self) -> None:
        """Let go of the memory."""
        self.buffers.clear()
        self.shared.clear()
        self.memory = None

    def share_bytes(self, block: int) -> int:
        """Bytes of `block` that this rank keeps in host memory."""
        return 0 if block in self.resident else self.layouts[block].nbytes // self.ranks.world_size

    def _share(self, blocks: list[int]) -> None:
        starts = [0]
        for block in blocks:
            starts.append(starts[-1] + -(-self.layouts[block].nbytes // PAGE) * PAGE)
        self.memory = SharedMemory(starts[-1], self.ranks)
        for block, start in zip(blocks, starts):
            self.shared[block] = self.memory.bytes[start : start + self.layouts[block].nbytes]

    def _buffer(self, block: int) -> torch.Tensor:
        if block not in self.buffers:
            if block in self.shared:
                self.buffers[block] = self.shared[block][self.ranks.rank * self.share_bytes(block) :][
                    : self.share_bytes(block)
                ]
            else:
                self.buffers[block] = host_empty((self.share_bytes(block),), torch.uint8, self.pinned)
        return self.buffers[block]

    def _write(self, buffer: torch.Tensor, piece: TensorSpan, tensor: torch.Tensor, whole: bool) -> None:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        first = 0 if whole else self.ranks.rank * buffer.numel()
        start, end = max(piece.offset, first), min(piece.offset + piece.nbytes, first + buffer.numel())
        if start < end:
            buffer[start - first : end - first].copy_(raw[start - piece.offset : end - piece.offset])


class Packed(NamedTuple):
    """A quantized weight as it is stored.

    Attributes:
        parts: what is dequantized at a time, a group of experts or the whole weight: codes, scales, minima, and the place in the workspace.
        plain: that place as the model reads the weight; of the first group if there are several.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    parts: tuple[tuple[torch.Tensor, ...], ...]
    plain: torch.Tensor


class BlockViews:
    """Views, which are found when a block first lies at a place, and are kept. Blocks of one layout share those in a slot: blocks times
    slots are thousands, and a slot's views are the same memory whichever block is in it.

    A place is a slot of the ring, or None: the block's own buffer.

    Args:
        slots: of the ring buffer, uint8 each; none where all blocks are on the device.
        workspace: uint8, into which weights are dequantized.
    """

    def __init__(
        self, layouts: Sequence[BlockLayout], store: BlockStore, slots: Sequence[torch.Tensor], workspace: torch.Tensor
    ):
        self.layouts, self.store, self.slots, self.workspace = layouts, store, slots, workspace
        first: dict[int, int] = {}
        self.first = [first.setdefault(id(layout), index) for index, layout in enumerate(layouts)]  # of its layout
        self.found_plain: dict[tuple[int, int | None], list[torch.Tensor]] = {}  # by block and place, as `_key` says
        self.found_packed: dict[tuple[int, int | None], dict[str, Packed]] = {}
        unlike: dict[
            int, int
        ] = {}  # by what `can_fuse` asks of an address: torch aligns memory by more, so one is found
        for slot, memory in enumerate(slots):
            unlike.setdefault(memory.data_ptr() % ALIGNMENT, slot)
        self.unlike_slots = list(unlike.values())

    def buffer(self, block: int, slot: int | None) -> torch.Tensor:
        """Of `block`, uint8 [nbytes]."""
        return self.store.buffers[block] if slot is None else self.slots[slot][: self.layouts[block].nbytes]

    def places(self, block: int) -> Sequence[int | None]:
        """Some of those where `block` can lie: kernels that take its codes there take them at all places."""
        return (None,) if block in self.store.resident else self.unlike_slots

    def plain(self, block: int, slot: int | None) -> list[torch.Tensor]:
        """Its parameters as the model reads them, in the order of its layout: in the workspace if they are quantized. Without those that
        are dequantized for each call of their module."""
        key = self._key(block, slot)
        if key not in self.found_plain:
            packed = self.packed(block, slot)
            with torch.inference_mode(False):  # a view of inference mode could not be used outside it
                buffer = self.buffer(block, slot)
                self.found_plain[key] = [
                    stored.values(buffer) if stored.packed is None else packed[stored.name].plain
                    for stored in self.layouts[block].parameters
                    if not stored.module_only
                ]
        return self.found_plain[key]

    def packed(self, block: int, slot: int | None) -> dict[str, Packed]:
        """By name those parameters of it that are quantized."""
        key = self._key(block, slot)
        if key not in self.found_packed:
            with torch.inference_mode(False):
                buffer = self.buffer(block, slot)
                self.found_packed[key] = {
                    stored.name: self._packed(stored, buffer)
                    for stored in self.layouts[block].parameters
                    if stored.packed is not None
                }
        return self.found_packed[key]

    def _packed(self, stored: StoredParameter, buffer: torch.Tensor) -> Packed:
        codes, scales, minima = (piece.of(buffer) for piece in stored.packed)
        plain, parts = stored.plain, []
        number, group = (plain.shape[0], stored.group) if stored.group else (1, 1)
        for first in range(0, number, group):
            count = min(group, number - first)
            some = (each.view(number, -1)[first : first + count].view(-1) for each in (codes, scales, minima))
            shape = (count, *plain.shape[1:]) if stored.group else plain.shape
            parts.append((*some, replace(plain, shape=shape).of(self.workspace)))
        values = parts[0][-1]
        return Packed(codes, scales, minima, tuple(parts), values.mT if stored.transposed else values)

    def close(self) -> None:
        """Let go of the memory."""
        self.found_plain.clear()
        self.found_packed.clear()

    def _key(self, block: int, slot: int | None) -> tuple[int, int | None]:
        return (block, None) if slot is None else (self.first[block], slot)
