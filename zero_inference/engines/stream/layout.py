"""How a block of a decoder layer lies in memory: one contiguous buffer, the same in host memory and in a device slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from zero_inference.quantization.groups import GroupQuantization

VECTOR = 16  # bytes that kernels for codes read at once
ALIGNMENT = 256  # what cudaMalloc gives; a matrix multiplication picks its kernel by alignment


@dataclass(frozen=True)
class Piece:
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
        plain: where the model finds its values: in the block's buffer, or in the workspace if the block is quantized.
        packed: codes (uint8), scales and minima in the block's buffer; None if this parameter is not quantized.
        transposed: the values are stored as [..., out, in], where the model has [..., in, out].
    """

    name: str
    plain: Piece
    packed: tuple[Piece, Piece, Piece] | None = None
    transposed: bool = False

    def values(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the parameter as the model reads it, a view of the buffer or workspace `memory`."""
        plain = self.plain.of(memory)
        return plain.mT if self.transposed else plain

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What lies in the block's buffer."""
        return self.packed or (self.plain,)


@dataclass
class BlockLayout:
    """The parameters of one block; names are relative to its module.

    What is not quantized comes first, at the same offsets in the buffer and in the workspace, so that one copy of
    `plain_bytes` and one dequantization a matrix bring the block into the workspace, and its buffer is free again. Then come the codes of
    all matrices, their scales, and their minima, so that matrices which follow each other are one with the rows of all.

    Attributes:
        nbytes: length of the buffer, a multiple of `ALIGNMENT` times the number of ranks.
        stored_bytes: what the tensors in it take, without the gaps.
        plain_bytes: length of its first part, which is not quantized.
        workspace_bytes: length of the workspace; 0 for a block without quantization, which is used where it lies.
    """

    parameters: list[StoredParameter] = field(default_factory=list)
    nbytes: int = 0
    stored_bytes: int = 0
    plain_bytes: int = 0
    workspace_bytes: int = 0

    def __getitem__(self, name: str) -> StoredParameter:
        return next(p for p in self.parameters if p.name == name)


def lay_out(
    parameters: Iterable[tuple[str, torch.Tensor]],
    scheme: GroupQuantization | None,
    ranks: int,
    exact: Collection[str] = (),
    transposed: Collection[str] = (),
) -> BlockLayout:
    """Lay out `parameters`, which may be on the meta device, by name.

    Args:
        scheme: how matrices are quantized; None keeps every parameter as it is.
        ranks: the buffer is padded so that it divides by them.
        exact: names of matrices that are kept as they are.
        transposed: names of matrices [..., in, out], which are stored as [..., out, in]: groups, and the CPU's products, run along in.
    """
    layout = BlockLayout()
    own = [(name, parameter.mT if name in transposed else parameter) for name, parameter in parameters]
    packed = [(name, p) for name, p in own if scheme is not None and scheme.can_quantize(p) and name not in exact]
    end = 0  # of what lies in the buffer so far
    for name, parameter in own:
        if all(parameter is not other for _, other in packed):
            end = end if parameter.dim() == 1 else _aligned(end)  # biases that follow each other are one
            piece = Piece(end, tuple(parameter.shape), parameter.dtype)
            end += -(-piece.nbytes // VECTOR) * VECTOR
            layout.parameters.append(StoredParameter(name, piece, transposed=name in transposed))
    layout.plain_bytes = workspace = end = _aligned(end)
    kinds: list[list[Piece]] = [[], [], []]
    for kind, pieces in enumerate(kinds):
        for _, parameter in packed:
            codes, groups = scheme.packed_bytes(parameter.numel()), parameter.numel() // scheme.group_size
            pieces.append(Piece(end, (groups if kind else codes,), parameter.dtype if kind else torch.uint8))
            end += -(-pieces[-1].nbytes // VECTOR) * VECTOR
        end = _aligned(end)
    for (name, parameter), of_codes, of_scales, of_minima in zip(packed, *kinds):
        plain = Piece(workspace, tuple(parameter.shape), parameter.dtype)
        workspace += _aligned(plain.nbytes)
        layout.parameters.append(StoredParameter(name, plain, (of_codes, of_scales, of_minima), name in transposed))
    layout.nbytes = -(-end // (ALIGNMENT * ranks)) * ALIGNMENT * ranks
    layout.stored_bytes = sum(piece.nbytes for stored in layout.parameters for piece in stored.pieces)
    layout.workspace_bytes = workspace if packed else 0
    return layout


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
