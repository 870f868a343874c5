"""Formats of quantized checkpoints: one module each, found by the quantization config of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_inference.models.checkpoint_formats.base import INSTEAD, CheckpointFormat, StoredWeight, refuse
from zero_inference.models.checkpoint_formats.compressed_tensors import CompressedTensors
from zero_inference.models.checkpoint_formats.fp8 import Fp8
from zero_inference.models.checkpoint_formats.modelopt import ModelOpt
from zero_inference.models.checkpoint_formats.mxfp4 import Mxfp4
from zero_inference.models.checkpoint_formats.packed import Awq, Gptq

__all__ = ["INSTEAD", "CheckpointFormat", "StoredWeight", "checkpoint_format"]

METHODS: dict[str, Callable[[str, dict[str, Any]], CheckpointFormat]] = {
    "fp8": Fp8.of,
    "mxfp4": Mxfp4.of,
    "compressed-tensors": CompressedTensors.of,
    "modelopt": ModelOpt.of,
    "gptq": Gptq.of,
    "awq": Awq.of,
}


def checkpoint_format(model: str, config: dict[str, Any]) -> CheckpointFormat:
    """Return the format that a quantization config describes. Raises UsageError for one that is not read."""
    method = config.get("quant_method")
    if not method:
        by_key = {"load_in_8bit": "bitsandbytes", "config_groups": "compressed-tensors", "quant_algo": "modelopt"}
        producer = "modelopt" if "quantization" in config else "its config.json names no method"
        method = next((found for key, found in by_key.items() if key in config), producer)
    if method not in METHODS:
        raise refuse(model, str(method), f"{', '.join(METHODS)} are read")
    return METHODS[method](model, config)
