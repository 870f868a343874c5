"""NVIDIA ModelOpt (`quant_method: modelopt`, or hf_quant_config.json beside config.json): FP8 and NVFP4.

FP8    W           float8_e4m3fn [N, K]
       W_scale     float32 [1] or a scalar
NVFP4  W           uint8 [..., N, K / 2]: codes of e2m1, the even one of a pair in the low nibble
       W_scale     float8_e4m3fn [..., N, K / 16]
       W_scale_2   float32 [1] or a scalar, which multiplies the scales

`input_scale`, `k_scale` and `v_scale` concern products and caches in 8 bits, which are not used here. As TensorRT Model Optimizer exports
it (modelopt/torch/export/quant_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_inference.errors import RunError
from zero_inference.kernels.formats import WeightFormat
from zero_inference.models.checkpoint_formats.base import (
    INSTEAD,
    CheckpointFormat,
    Parts,
    StoredWeight,
    dtype_and_shape,
    refuse,
    skipped_modules,
)
from zero_inference.models.checkpoint_formats.tensors import IGNORED, ROW_SCALED, e2m1_format, e2m1_weight, row_scaled

ENDS = {"": "codes", "_scale": "scales", "_scale_2": "global_scale"}
ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
GROUP = 16


@dataclass(frozen=True)
class ModelOpt(CheckpointFormat):
    algorithm: str = "NVFP4"
    of_layers: Mapping[str, str] = field(default_factory=dict)  # module -> algorithm, with MIXED_PRECISION

    @classmethod
    def of(cls, model: str, config: dict[str, Any]) -> ModelOpt:
        inner = config.get("quantization") or config  # hf_quant_config.json has it one level deeper
        algorithm = str(inner.get("quant_algo") or "no quant_algo").upper()
        layers = inner.get("quantized_layers") or {}
        of_layers = {name: str(each.get("quant_algo")).upper() for name, each in layers.items() if each}
        used = {algorithm, *of_layers.values()}
        if unread := sorted(used - {*ALGORITHMS}):
            raise refuse(model, f"modelopt with {unread[0]}", "FP8 and NVFP4 are read")
        if "NVFP4" in used and inner.get("group_size") not in (None, GROUP):
            raise refuse(model, f"modelopt NVFP4 in groups of {inner['group_size']}", f"groups of {GROUP} are read")
        skipped = skipped_modules(inner, "ignore", "exclude_modules")
        bits, size = (8, -1) if algorithm == "FP8" else (4, GROUP)
        return cls(
            f"{algorithm} (ModelOpt)",
            ENDS,
            IGNORED,
            bits=bits,
            group_size=size,
            skipped=skipped,
            algorithm=algorithm,
            of_layers=of_layers,
        )

    def weight(self, parts: Parts) -> StoredWeight:
        if "codes" not in parts and parts.key.endswith("_proj_weight"):  # gate_up_proj_weight_scale, as Llama-4's
            raise RunError(
                f"{parts.folder}: {parts.key.removesuffix('_weight')} are experts in one tensor, which are not read; {INSTEAD}."
            )
        packed = "codes" in parts and dtype_and_shape(parts.tensors["codes"])[0] in ("U8", "uint8")
        return e2m1_weight(parts, GROUP, "global_scale") if packed else row_scaled(parts)

    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        algorithm = self.of_layers.get(module) if self.algorithm == "MIXED_PRECISION" else self.algorithm
        if algorithm == "FP8":
            return ROW_SCALED
        return e2m1_format(GROUP, True) if algorithm == "NVFP4" and shape[-1] % GROUP == 0 else None
