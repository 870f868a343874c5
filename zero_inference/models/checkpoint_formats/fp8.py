"""FP8 with block scales: DeepSeek-V3, Qwen3-FP8, MiniMax-M2 (`quant_method: fp8`).

    W            float8_e4m3fn [..., N, K]
    W_scale_inv  float [..., ceil(N / rows), ceil(K / columns)], `weight_block_size` is [rows, columns]

W[n, k] = number * scale of its block, in float32. Blocks at the edges may be smaller. As transformers writes it
(transformers/integrations/finegrained_fp8.py). `activation_scheme: dynamic` concerns products in FP8, which are not used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.errors import RunError
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.models.checkpoint_formats.base import (
    E8M0,
    FLOATS,
    FP8,
    CheckpointFormat,
    Parts,
    StoredWeight,
    refuse,
    skipped_modules,
)

# Values of the config that are read; the first is the default.
READABLE = {
    "activation_scheme": ("dynamic",),
    "expert_dtype": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3", "float8_e4m3fn"),
}


@dataclass(frozen=True)
class Fp8Blocks(CheckpointFormat):
    rows: int = 128  # of a block; `group_size` are its columns

    @classmethod
    def of(cls, model: str, config: dict[str, Any]) -> Fp8Blocks:
        size = config.get("weight_block_size", (128, 128))
        for key, readable in READABLE.items():
            if (config.get(key) or readable[0]) not in readable:
                raise refuse(model, f"fp8 with {key} {config[key]!r}", f"{readable[0]!r} is read")
        if not isinstance(size, list | tuple) or [type(side) for side in size] != [int, int] or min(size) < 1:
            raise refuse(model, f"fp8 with weight_block_size {size!r}", "blocks of [rows, columns] are read")
        skipped = skipped_modules(config, "modules_to_not_convert", "ignored_layers")
        ends = {"": "codes", "_scale_inv": "scales"}
        return cls("FP8", ends, bits=8, group_size=size[1], skipped=skipped, rows=size[0])

    def weight(self, parts: Parts) -> StoredWeight:
        return block_scaled(parts, self.rows, self.group_size)

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        return block_format(self.rows, self.group_size)


def block_format(rows: int, columns: int) -> WeightFormat:
    """Return the format of float8 weights whose blocks of `rows` x `columns` have a scale each."""
    return WeightFormat(Codes.E4M3, columns, rows, torch.float32)


def block_scaled(parts: Parts, rows: int, columns: int) -> StoredWeight:
    """Return the weight of `parts` in that format."""
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

    return StoredWeight(shape, form, read)
