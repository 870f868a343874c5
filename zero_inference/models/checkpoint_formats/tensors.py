"""Weights of each kind of codes, from the tensors that checkpoints have for them; several publishers share these layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_inference.errors import RunError
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.models.checkpoint_formats.base import (
    BYTES,
    E8M0,
    FLOATS,
    FP8,
    WORDS,
    Parts,
    StoredWeight,
    dtype_and_shape,
)

ROW_SCALED = WeightFormat(Codes.E4M3, row_scales=True)
# Ends of keys of scales for activations and a KV cache in 8 bits: both have 16 bits here.
IGNORED = tuple(
    f".{name}_{kind}"
    for name in ("input", "output", "k", "v", "q", "prob_output")
    for kind in ("scale", "zero_point", "global_scale", "g_idx")
)


def row_scaled(parts: Parts) -> StoredWeight:
    """Return a float8 weight with a scale for each row, or for all."""
    codes = parts.take("codes", FP8)
    rows = codes.shape[:-1]
    scales = parts.take("scales", FLOATS, (*rows, 1), rows, (1,), ())

    def read() -> QuantizedWeight:
        found = scales().float()
        of_rows = found.view(rows) if found.numel() > 1 else found.reshape(()).expand(rows)
        return QuantizedWeight(ROW_SCALED, codes().view(torch.uint8), row_scales=of_rows.contiguous())

    return StoredWeight(codes.shape, ROW_SCALED, read)


def block_format(rows: int, columns: int) -> WeightFormat:
    """Return the format of float8 weights whose blocks of `rows` x `columns` have a scale each."""
    return WeightFormat(Codes.E4M3, columns, rows, torch.float32)


def block_scaled(parts: Parts, rows: int, columns: int) -> StoredWeight:
    """Return the weight of `parts` in the `block_format`."""
    codes = parts.take("codes", FP8)
    shape = codes.shape
    if len(shape) < 2:
        raise RunError(
            f"{parts.folder}: {parts.keys['codes']} has shape {list(shape)}, and block scales need a matrix."
        )
    blocks = *shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)
    scales = parts.take("scales", (*FLOATS[:3], *E8M0[:1], *FLOATS[3:], *E8M0[1:]), blocks)
    # in a stack of matrices, blocks of rows follow each other only if they are whole
    form = block_format(rows if len(shape) == 2 or shape[-2] % rows == 0 else 1, columns)

    def read() -> QuantizedWeight:
        of_blocks = scales().float()
        if form.group_rows != rows:
            of_blocks = of_blocks.repeat_interleave(rows, -2)[..., : shape[-2], :]
        return QuantizedWeight(form, codes().view(torch.uint8), of_blocks.contiguous())

    same = dtype_and_shape(scales.tensor)[0] in ("F32", "float32") and form.group_rows == rows
    in_files = {part: parts.keys[part] for part in ("codes", "scales")[: 1 + same]}
    return StoredWeight(shape, form, read, in_files=in_files)


def e2m1_format(group_size: int, has_factor: bool, divides: bool = False) -> WeightFormat:
    """Return the format of 4-bit floats: with scales in float8 and a factor of the tensor, or with powers of two alone."""
    scale_dtype = torch.float8_e4m3fn if has_factor else torch.float8_e8m0fnu
    return WeightFormat(Codes.E2M1, group_size, 1, scale_dtype, row_scales=has_factor, divides=has_factor and divides)


def e2m1_weight(parts: Parts, group_size: int, factor: str | None = None, divides: bool = False) -> StoredWeight:
    """Return a weight of 4-bit floats: with scales 2^(e - 127), or in float8 with a part `factor` that multiplies or divides them."""
    codes = parts.take("codes", BYTES)
    rows, columns = codes.shape[:-1], 2 * codes.shape[-1]
    groups = columns // group_size_of(parts, columns, group_size)
    scales = parts.take("scales", FP8 if factor else BYTES, (*rows, groups))
    of_tensor = parts.take(factor, FLOATS, (1,), ()) if factor else None
    form = e2m1_format(group_size, factor is not None, divides)

    def read() -> QuantizedWeight:
        of_rows: Tensor | None = None
        if of_tensor is not None:
            of_rows = of_tensor().float().reshape(()).expand(rows).contiguous()
        return QuantizedWeight(form, codes(), scales().view(form.scale_dtype), row_scales=of_rows)

    return StoredWeight((*rows, columns), form, read)


def integer_format(
    bits: int, group_size: int, shape: tuple[int, ...], dtype: torch.dtype, zero_points: bool
) -> WeightFormat | None:
    """Return the format of integers with groups of `group_size` columns, -1 for whole rows; None if these do not divide the columns."""
    size = shape[-1] if group_size == -1 else group_size
    if size < 1 or shape[-1] % size:
        return None
    return WeightFormat(Codes.INT4 if bits == 4 else Codes.INT8, size, 1, dtype, zero_points=zero_points)


def group_size_of(parts: Parts, columns: int, stated: int | None) -> int:
    """Return the columns of a group of size `stated` by the config, None or -1 for whole rows; RunError if it does not divide them."""
    size = columns if stated in (None, -1) else int(stated or 0)
    if size < 1 or columns % size:
        raise RunError(
            f"{parts.folder}: {parts.key} has {columns} columns, which are not whole groups of {size} (group_size in its config)."
        )
    return size


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes uint8 [rows, words * 32 / bits] in int32 `words` [rows, words]; `order`: the column of each code of a word."""
    in_bytes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return in_bytes
    codes = torch.stack([in_bytes & 15, in_bytes >> 4], -1).view(*words.shape, 8)
    if order is not None:
        codes = codes[..., torch.tensor(order).argsort()]
    return codes.view(len(words), -1)


def column_order(parts: Parts, columns: int, size: int) -> Tensor | None:
    """Return the columns by group, int64 [K], where part "groups" gives the group of each column; None if they are in order."""
    group_of = parts.take("groups", WORDS, (columns,))().long()
    found, order = group_of.sort(stable=True)
    if not torch.equal(found, torch.arange(columns) // size):
        raise RunError(
            f"{parts.folder}: {parts.keys['groups']} does not give each group {size} columns (group_size in its config); fetch it again."
        )
    return None if torch.equal(found, group_of) else order


def take_columns(packed: Tensor, order: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, K * bits / 8] with their columns in another order."""
    if bits == 8:
        return packed[:, order]
    codes = torch.stack([packed & 15, packed >> 4], -1).view(len(packed), -1)[:, order]
    return codes[:, 0::2] | codes[:, 1::2] << 4
