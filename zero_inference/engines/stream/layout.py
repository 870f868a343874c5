"""How a block of a decoder layer lies in memory: one contiguous buffer, the same in host memory and in a device slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from zero_inference.kernels.groups import GroupQuantization

VECTOR = 16  # bytes that kernels for codes read at once
ALIGNMENT = 256  # what cudaMalloc gives; a matrix multiplication picks its kernel by alignment
# Bytes of a group of experts, dequantized. Qwen3-30B-A3B has one group a layer, DeepSeek-V3 20 (all 256 experts would take 14 GiB).
GROUP_BYTES = 768 << 20


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
        plain: where the model finds its values: in the block's buffer, or in the workspace if it is quantized. Of experts in groups the
            workspace holds one group.
        packed: codes (uint8), scales and minima in the block's buffer; None if this parameter is not quantized.
        transposed: the values are stored as [..., out, in], where the model has [..., in, out].
        module_only: it is dequantized for each call of its own module; otherwise, if quantized, for the call of the block.
        group: how many experts are dequantized at a time; 0 for a weight that is dequantized whole.
    """

    name: str
    plain: Piece
    packed: tuple[Piece, Piece, Piece] | None = None
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
    def pieces(self) -> tuple[Piece, ...]:
        """What lies in the block's buffer."""
        return self.packed or (self.plain,)


@dataclass
class BlockLayout:
    """The parameters of one block; names are relative to its module.

    Parameters that are not quantized come first. Then come the codes of all matrices, their scales, and their minima, so that matrices
    which follow each other are one with the rows of all.

    The workspace holds the matrices that are dequantized for the whole call of the block, and then those of one module at a time.

    Attributes:
        nbytes: length of the buffer, a multiple of `ALIGNMENT` times the number of ranks.
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
            piece = Piece(end, tuple(parameter.shape), parameter.dtype)
            end += -(-piece.nbytes // VECTOR) * VECTOR
            layout.parameters.append(StoredParameter(name, piece, transposed=name in transposed))
    end = _aligned(end)
    kinds: list[list[Piece]] = [[], [], []]
    for kind, pieces in enumerate(kinds):
        for _, parameter in packed:
            codes, groups = scheme.packed_bytes(parameter.numel()), parameter.numel() // scheme.group_size
            pieces.append(Piece(end, (groups if kind else codes,), parameter.dtype if kind else torch.uint8))
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
        plain = Piece(offset, tuple(parameter.shape), parameter.dtype)
        layout.parameters.append(
            StoredParameter(name, plain, tuple(pieces), name in transposed, name in module_only, group)
        )
    layout.nbytes = -(-end // (ALIGNMENT * ranks)) * ALIGNMENT * ranks
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
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
