"""compressed-tensors (`quant_method: compressed-tensors`): Kimi-K2 in int4, GLM in FP8, MXFP4 and NVFP4 by llm-compressor.

By `format`, of the config or of a group of modules in `config_groups`:

pack-quantized         W_packed      int32 [..., N, K * b / 32]: q + 2^(b - 1) in b bits (4 or 8), consecutive k, the first in the lowest
                       W_scale       float [..., N, K / group], or [..., N, 1] by channel
                       W_zero_point  int32 [..., N * b / 32, K / group]: consecutive n in a word; only if not symmetric
                       W_g_idx       int32 [K]: the group of each k (actorder: group)
int-quantized          W int8, W_scale as above or [1] for the tensor
float-quantized        W float8_e4m3fn, W_scale float [N, 1], [1] or by block [ceil(N / rows), ceil(K / columns)]
mxfp4-pack-quantized   W_packed      uint8 [..., N, K / 2], the even code in the low nibble
                       W_scale       uint8 [..., N, K / 32]: e, for a scale of 2^(e - 127)
nvfp4-pack-quantized   W_packed      uint8 [..., N, K / 2]
                       W_scale       float8_e4m3fn [..., N, K / 16]
                       W_global_scale float [1], which divides the scales

W_shape [N, K] is stored beside packed weights. W[n, k] = (q - zero point) * scale. As compressed_tensors/compressors define it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    IGNORED,
    ROW_SCALED,
    block_format,
    block_scaled,
    column_order,
    e2m1_format,
    e2m1_weight,
    group_size_of,
    integer_format,
    row_scaled,
    take_columns,
    unpack,
)

ENDS = {
    "_packed": "codes", "": "codes", "_scale": "scales", "_zero_point": "zero_points", "_global_scale": "global_scale", "_g_idx": "groups",
    "_shape": "shape",
}  # fmt: skip
E2M1_GROUPS = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}
# format -> type and bits of the weights that it stores
FORMATS = {
    "pack-quantized": {("int", 4), ("int", 8)},
    "int-quantized": {("int", 8)},
    "float-quantized": {("float", 8)},
    "naive-quantized": {("int", 8), ("float", 8)},
    "mxfp4-pack-quantized": {("float", 4)},
    "nvfp4-pack-quantized": {("float", 4)},
}


@dataclass(frozen=True)
class Group:
    """Format of the modules that match `targets`."""

    targets: tuple[str, ...]
    format: str
    weights: dict[str, Any]

    def names(self, module: str) -> bool:
        """Return whether a target names `module`."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else f".{module}".endswith(f".{target}")
            for target in self.targets
        )


@dataclass(frozen=True)
class CompressedTensors(CheckpointFormat):
    groups: tuple[Group, ...] = ()

    @classmethod
    def of(cls, model: str, config: dict[str, Any]) -> CompressedTensors:
        groups = tuple(_groups(model, config))
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise refuse(model, "compressed-tensors with sparse weights", "dense ones are read")
        if config.get("transform_config"):
            raise refuse(model, "compressed-tensors with transforms of activations", "weights without them are read")
        skipped = skipped_modules(config, "ignore")
        least = min(groups, key=lambda each: each.weights["num_bits"])  # experts, of which there are most
        size = E2M1_GROUPS.get(least.format) or (_block_sizes(least.weights) or (1, _group_size(least.weights)))[1]
        sizes = {"bits": least.weights["num_bits"], "group_size": size}
        names = {"mxfp4-pack-quantized": "MXFP4", "nvfp4-pack-quantized": "NVFP4"}
        kind = "int" if least.weights["type"] == "int" else "FP"
        name = names.get(least.format, f"{kind}{least.weights['num_bits']}")
        return cls(f"{name} (compressed-tensors)", ENDS, IGNORED, **sizes, skipped=skipped, groups=groups)

    def _group_of(self, module: str) -> Group:
        # a target names modules or their class, which is that of linear modules
        of_class = next((each for each in self.groups if "Linear" in each.targets), self.groups[0])
        return next((each for each in self.groups if each.names(module)), of_class)

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        group = self._group_of(module)
        weights, columns = group.weights, shape[-1]
        if "Linear" not in group.targets and not group.names(module):
            return None
        if group.format in E2M1_GROUPS:
            size = E2M1_GROUPS[group.format]
            return e2m1_format(size, group.format.startswith("nvfp4"), divides=True) if columns % size == 0 else None
        if weights["type"] == "int":
            if weights.get("actorder") in ("group", "dynamic"):
                return None  # columns are in another order
            size = _group_size(weights)
            return integer_format(weights["num_bits"], size, shape, dtype, not weights.get("symmetric", True))
        blocks = _block_sizes(weights)
        return ROW_SCALED if blocks is None else block_format(*blocks)

    def weight(self, parts: Parts) -> StoredWeight:
        group = self._group_of(parts.key.removesuffix(".weight"))
        if group.format in E2M1_GROUPS:
            factor = "global_scale" if group.format.startswith("nvfp4") else None
            return e2m1_weight(parts, E2M1_GROUPS[group.format], factor, divides=True)
        if group.weights["type"] == "float":
            blocks = _block_sizes(group.weights)
            return row_scaled(parts) if blocks is None else block_scaled(parts, *blocks)
        return _integers(parts, group.weights)


def _groups(model: str, config: dict[str, Any]) -> Iterator[Group]:
    groups = [each for each in (config.get("config_groups") or {}).values() if each and each.get("weights")]
    if not groups:
        raise refuse(model, "compressed-tensors without config_groups", "groups with weights are read")
    for group in groups:
        kind, bits = str(group["weights"].get("type", "int")).lower(), group["weights"].get("num_bits", 8)
        stored = group.get("format") or config.get("format") or "dense"
        if (kind, bits) not in FORMATS.get(stored, ()):
            raise refuse(model, f"compressed-tensors {stored} with {kind}{bits}", f"{', '.join(FORMATS)} are read")
        yield Group(
            tuple(group.get("targets") or ["Linear"]), stored, group["weights"] | {"type": kind, "num_bits": bits}
        )


def _integers(parts: Parts, weights: dict[str, Any]) -> StoredWeight:
    """Return a weight of integers: packed in words, or int8."""
    bits, packed = weights["num_bits"], parts.keys["codes"].endswith("_packed")
    codes = parts.take("codes", WORDS if packed else ("I8", "int8"))
    rows, columns = codes.shape[:-1], codes.shape[-1] * (32 // bits if packed else 1)
    if "shape" in parts:
        stated = tuple(parts.take("shape", ("I64", "I32", "int64", "int32"))().tolist())
        if stated[:-1] != rows or not columns - 32 // bits < stated[-1] <= columns or stated[-1] * bits % 8:
            raise RunError(
                f"{parts.folder}: {parts.keys['shape']} is {list(stated)}, and {parts.keys['codes']} has shape {list(codes.shape)}; fetch "
                "it again."
            )
        columns = stated[-1]
    size = group_size_of(parts, columns, _group_size(weights))
    groups = columns // size
    of_tensor = [(1,)] if groups == 1 and len(rows) == 1 else []
    scales = parts.take("scales", FLOATS, (*rows, groups), *of_tensor)
    asymmetric = not weights.get("symmetric", True)
    words = -(-rows[-1] * bits // 32)
    zero_points = None
    if asymmetric and packed:
        zero_points = parts.take("zero_points", WORDS, (*rows[:-1], words, groups))
    elif asymmetric:
        zero_points = parts.take("zero_points", ("I8", "int8"), (*rows, groups), *of_tensor)
    order = column_order(parts, columns, size) if "groups" in parts else None
    form = WeightFormat(
        Codes.INT4 if bits == 4 else Codes.INT8,
        size,
        1,
        float_dtype(scales.tensor),
        zero_points=zero_points is not None,
    )

    def read() -> QuantizedWeight:
        found = codes().view(torch.uint8) if packed else codes().view(torch.uint8) ^ 128
        found = found[..., : columns * bits // 8].contiguous()
        if order is not None:
            found = take_columns(found, order, bits)
        zeros = None
        if zero_points is not None and packed:
            # consecutive rows are packed
            by_group = zero_points().mT.reshape(-1, words)
            zeros = unpack(by_group, bits)[:, : rows[-1]].view(*rows[:-1], groups, rows[-1]).mT.contiguous()
        elif zero_points is not None:
            zeros = (zero_points().view(torch.uint8) ^ 128).expand(*rows, groups).contiguous()
        return QuantizedWeight(form, found, scales().expand(*rows, groups).contiguous(), zeros)

    return StoredWeight((*rows, columns), form, read, column_order=order)


def _group_size(weights: dict[str, Any]) -> int:
    """Return the columns of a group of integers; -1 for whole rows."""
    return weights.get("group_size") or -1 if weights.get("strategy") in ("group", None) else -1


def _block_sizes(weights: dict[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns that share a scale of float8; None where rows have one, or the tensor."""
    if weights.get("strategy") == "block":
        rows, columns = weights.get("block_structure") or (128, 128)
        return rows, columns
    return (1, weights["group_size"]) if weights.get("strategy") in ("group", "tensor_group") else None
