"""Integers in 32-bit words: GPTQ and AWQ. Scales and zero points are by groups of rows of the stored matrices, which are [K, N].

GPTQ (`quant_method: gptq`; bits b of 4 or 8)
    W.qweight  int32 [K * b / 32, N]: 32 / b consecutive k in a word, the first in the lowest bits
    W.qzeros   int32 [K / group, N * b / 32]: consecutive n in a word; one less than the zero point, modulo 2^b, unless
               `checkpoint_format: gptq_v2`; with `sym` all zero points are 2^(b - 1), and are not kept
    W.scales   float16 [K / group, N]
    W.g_idx    int32 [K]: the group of each k; with `desc_act` they are not in order

AWQ (`quant_method: awq`; 4 bits, version gemm)
    W.qweight  int32 [K, N / 8]: nibble i of a word is column ORDER[i] of its 8, counted from the lowest
    W.qzeros   int32 [K / group, N / 8], likewise
    W.scales   float16 [K / group, N]

W[n, k] = (code - zero point) * scale. As GPTQModel (nn_modules/qlinear) and AutoAWQ (awq/utils/packing_utils.py) define them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.errors import RunError
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.models.checkpoint_formats.base import (
    FLOATS,
    WORDS,
    CheckpointFormat,
    Parts,
    StoredWeight,
    float_dtype,
    refuse,
    skipped_modules,
)
from zero_inference.models.checkpoint_formats.tensors import (
    column_order,
    group_size_of,
    integer_format,
    take_columns,
    unpack,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CHUNK_ROWS = 1024  # of an AWQ matrix [K, N], whose nibbles are rearranged at a time
PARTS = {".qweight": "codes", ".qzeros": "zero_points", ".scales": "scales", ".g_idx": "groups"}


@dataclass(frozen=True)
class Gptq(CheckpointFormat):
    zero_point_offset: int = 1
    symmetric: bool = False  # sym
    reorders: bool = False  # desc_act

    @classmethod
    def of(cls, model: str, config: dict[str, Any]) -> Gptq:
        bits, version = config.get("bits"), config.get("checkpoint_format") or "gptq"
        if bits not in (4, 8):
            raise refuse(model, f"gptq with {bits} bits", "4 and 8 are read")
        if version not in ("gptq", "gptq_v2"):
            raise refuse(model, f"gptq with checkpoint_format {version!r}", "gptq and gptq_v2 are read")
        overrides = [key for key in config.get("dynamic") or {} if not str(key).startswith("-")]
        if overrides:
            raise refuse(
                model, f"gptq with dynamic settings for {overrides[0]!r}", "one setting for all modules is read"
            )
        offset = 0 if version == "gptq_v2" else 1
        skipped = () if config.get("lm_head") else ("lm_head",)
        return cls(
            f"int{bits} (GPTQ)",
            PARTS,
            suffix=".weight",
            skipped=(
                *skipped,
                *(f"re:{str(each)[2:]}" for each in config.get("dynamic") or () if str(each).startswith("-:")),
            ),
            bits=bits,
            group_size=config.get("group_size") or -1,
            zero_point_offset=offset,
            symmetric=config.get("sym") is True,
            reorders=bool(config.get("desc_act")) and config.get("group_size") not in (None, -1),
        )

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        return (
            None
            if self.reorders
            else integer_format(self.bits, self.group_size, shape, torch.float16, not self.symmetric)
        )

    def weight(self, parts: Parts) -> StoredWeight:
        in_word = 32 // self.bits
        codes = parts.take("codes", WORDS, (None, None))
        columns, rows = codes.shape[0] * in_word, codes.shape[1]
        size = group_size_of(parts, columns, self.group_size)
        groups = columns // size
        scales = parts.take("scales", FLOATS, (groups, rows))
        zero_points = parts.take("zero_points", WORDS, (groups, -(-rows // in_word)))
        kind = Codes.INT4 if self.bits == 4 else Codes.INT8
        form = WeightFormat(kind, size, 1, float_dtype(scales.tensor), zero_points=not self.symmetric)
        order = column_order(parts, columns, size) if "groups" in parts else None

        def read() -> QuantizedWeight:
            packed = codes().t().contiguous().view(torch.uint8)  # the bytes of a word are consecutive k, as in our rows
            packed = packed if order is None else take_columns(packed, order, self.bits)
            zeros = unpack(zero_points(), self.bits)[:, :rows] + self.zero_point_offset & 2**self.bits - 1
            if self.symmetric and bool((zeros != kind.center).any()):
                raise RunError(
                    f"{parts.folder}: {parts.keys['zero_points']} has zero points other than {kind.center}, but sym is true in "
                    "config.json; set it to false."
                )
            offsets = None if self.symmetric else zeros.t().contiguous()
            return QuantizedWeight(form, packed, scales().t().contiguous(), offsets)

        return StoredWeight((rows, columns), form, read, column_order=order)


@dataclass(frozen=True)
class Awq(CheckpointFormat):
    @classmethod
    def of(cls, model: str, config: dict[str, Any]) -> Awq:
        bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version") or "gemm").lower()
        if bits != 4:
            raise refuse(model, f"awq with {bits} bits", "4 are read")
        if version != "gemm":
            raise refuse(model, f"awq version {version!r}", "gemm is read")
        size = config.get("group_size") or config.get("q_group_size") or 128
        skipped = ("lm_head", *skipped_modules(config, "modules_to_not_convert"))
        return cls("int4 (AWQ)", PARTS, suffix=".weight", skipped=skipped, group_size=size)

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        return integer_format(4, self.group_size, shape, torch.float16, True)

    def weight(self, parts: Parts) -> StoredWeight:
        codes = parts.take("codes", WORDS, (None, None))
        columns, rows = codes.shape[0], codes.shape[1] * 8
        size = group_size_of(parts, columns, self.group_size)
        scales = parts.take("scales", FLOATS, (columns // size, rows))
        # without zero points (`zero_point: false`) AutoAWQ still stores 8
        zero_points = parts.take("zero_points", WORDS, (columns // size, rows // 8))
        form = WeightFormat(Codes.INT4, size, 1, float_dtype(scales.tensor), zero_points=True)

        def read() -> QuantizedWeight:
            words, packed = codes(), torch.empty(rows, columns // 2, dtype=torch.uint8)
            for first in range(0, columns, CHUNK_ROWS):
                some = unpack(words[first : first + CHUNK_ROWS], 4, ORDER)  # [k, N]
                packed[:, first // 2 : (first + len(some)) // 2] = (some[0::2] | some[1::2] << 4).t()
            zeros = unpack(zero_points(), 4, ORDER).t().contiguous()
            return QuantizedWeight(form, packed, scales().t().contiguous(), zeros)

        return StoredWeight((rows, columns), form, read)
