"""MXFP4 as gpt-oss stores its experts (`quant_method: mxfp4`).

    W_blocks  uint8 [..., N, K / 32, 16]: 16 bytes are 32 codes of e2m1, the even one of a pair in the low nibble
    W_scales  uint8 [..., N, K / 32]: e, for a scale of 2^(e - 127)

W is `experts.gate_up_proj` or `experts.down_proj`, which the model has as [experts, K, N]. As transformers reads it
(transformers/integrations/mxfp4.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_inference.errors import RunError
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.models.checkpoint_formats.base import BYTES, CheckpointFormat, Parts, StoredWeight, skipped_modules

GROUP = 32
FORMAT = WeightFormat(Codes.E2M1, GROUP, 1, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Mxfp4(CheckpointFormat):
    @classmethod
    def of(cls, model: str, config: dict) -> Mxfp4:
        skipped = skipped_modules(config, "modules_to_not_convert")
        return cls("MXFP4", {"_blocks": "codes", "_scales": "scales"}, group_size=GROUP, skipped=skipped)

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        return FORMAT if len(shape) > 2 and shape[-1] % GROUP == 0 else None  # experts

    def weight(self, parts: Parts) -> StoredWeight:
        blocks = parts.take("codes", BYTES)
        if len(blocks.shape) < 3 or blocks.shape[-1] != GROUP // 2:
            raise RunError(
                f"{parts.folder}: {parts.keys['codes']} has shape {list(blocks.shape)}, and blocks of {GROUP} values have 16 bytes; "
                "fetch it again."
            )
        scales = parts.take("scales", BYTES, blocks.shape[:-1])
        rows = blocks.shape[:-2]

        def read() -> QuantizedWeight:
            return QuantizedWeight(FORMAT, blocks().reshape(*rows, -1), scales().view(torch.float8_e8m0fnu))

        shape = *rows, blocks.shape[-2] * GROUP
        return StoredWeight(shape, FORMAT, read, transposed=True, in_files=parts.keys)
