"""FP8 (`quant_method: fp8`): with block scales DeepSeek-V3, Qwen3-FP8, MiniMax-M2; with a scale for each tensor AutoFP8.

    W            float8_e4m3fn [..., N, K]
    W_scale_inv  float [..., ceil(N / rows), ceil(K / columns)], `weight_block_size` is [rows, columns]
    W_scale      float [N, 1], [1] or a scalar, instead

W[n, k] = number * scale, in float32. Blocks at the edges may be smaller. As transformers writes it
(transformers/integrations/finegrained_fp8.py). `activation_scheme` and `input_scale` concern products in FP8, which are not used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.kernels.formats import WeightFormat
from zero_inference.models.checkpoint_formats.base import (
    CheckpointFormat,
    Parts,
    StoredWeight,
    refuse,
    skipped_modules,
)
from zero_inference.models.checkpoint_formats.tensors import IGNORED, ROW_SCALED, block_format, block_scaled, row_scaled

# Values of the config that are read; the first is the default.
READABLE = {"expert_dtype": ("fp8",), "fmt": ("e4m3", "float8_e4m3", "float8_e4m3fn")}
DEFAULT_BLOCK = (128, 128)  # where no `weight_block_size` is stated, and scales are those of blocks


@dataclass(frozen=True)
class Fp8(CheckpointFormat):
    block: tuple[int, int] | None = None  # rows and columns; None where tensors or rows have a scale

    @classmethod
    def of(cls, model: str, config: dict[str, Any]) -> Fp8:
        size = config.get("weight_block_size")
        for key, readable in READABLE.items():
            if (config.get(key) or readable[0]) not in readable:
                raise refuse(model, f"fp8 with {key} {config[key]!r}", f"{readable[0]!r} is read")
        is_pair = isinstance(size, list | tuple) and [type(side) for side in size] == [int, int]
        if size is not None and not (is_pair and min(size) > 0):
            raise refuse(model, f"fp8 with weight_block_size {size!r}", "blocks of [rows, columns] are read")
        skipped = skipped_modules(config, "modules_to_not_convert", "ignored_layers")
        ends = {"": "codes", "_scale_inv": "scales"} | ({} if size else {"_scale": "scales"})
        block = (size[0], size[1]) if size else None
        return cls("FP8", ends, IGNORED, bits=8, group_size=size[1] if size else -1, skipped=skipped, block=block)

    def weight(self, parts: Parts) -> StoredWeight:
        has_blocks = self.block or parts.keys["scales"].endswith("_scale_inv")
        return block_scaled(parts, *(self.block or DEFAULT_BLOCK)) if has_blocks else row_scaled(parts)

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        return block_format(*self.block) if self.block else ROW_SCALED
