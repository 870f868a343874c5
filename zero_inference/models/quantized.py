"""Checkpoints with quantized weights: float8 with a scale for each block of a matrix is read, other formats are refused.

DeepSeek-V3 and Qwen3 are published so: weight = float8 value x scale of its block. Weights are dequantized to the run's dtype while
they are read, so engines and sizes deal with plain weights only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.errors import RunError, UsageError

SCALE = "_scale_inv"  # suffix of the weight's key
INSTEAD = "use the checkpoint in bfloat16 or float16 (--quant-bits 8 or 4 stores it smaller)"
# Names of dtypes in safetensors and in torch.
FLOATS = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
SCALES = FLOATS | {"F8_E8M0", "float8_e8m0fnu"}
FLOAT8 = {"F8_E4M3", "float8_e4m3fn"}
# By code, in float32: a look-up is twice as fast on a core as torch's conversion (0.57 and 0.28 G values/s).
FLOAT8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# Values of a `quantization_config` with quant_method fp8 that are read; the first is the default.
READ = {"activation_scheme": ("dynamic",), "expert_dtype": ("fp8",), "fmt": ("e4m3", "float8_e4m3", "float8_e4m3fn")}


@dataclass(frozen=True)
class BlockScales:
    """Rows and columns of the blocks of a float8 matrix that share a scale; blocks at its edges may be smaller."""

    rows: int
    columns: int

    def scale_shape(self, shape: list[int]) -> list[int]:
        return [*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns)]


def pop_quantization_config(config: Any) -> dict[str, Any] | None:
    """Remove the quantization config from a transformers config, which then describes the plain model, and return it."""
    found = None
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config", "quantization"):
            value = getattr(part, name, None)
            value = value.to_dict() if hasattr(value, "to_dict") else value
            if value and isinstance(value, dict):
                found = found or value
                delattr(part, name)
    return found


def read_block_scales(name: str, quantization: dict[str, Any]) -> BlockScales:
    """Return the block size of checkpoint `name` by its quantization config. Raises UsageError for another format."""

    def refuse(found: str, readable: str) -> UsageError:
        return UsageError(
            f"--model {name}: its weights are quantized ({found}), and only {readable} is read; {INSTEAD}."
        )

    bitsandbytes = "bitsandbytes" if "load_in_8bit" in quantization else None
    method = quantization.get("quant_method") or bitsandbytes or "its config.json names no method"
    if method != "fp8":
        raise refuse(method, "fp8 with block scales")
    for key, readable in READ.items():
        if (quantization.get(key) or readable[0]) not in readable:
            raise refuse(f"fp8 with {key} {quantization[key]!r}", repr(readable[0]))
    size = quantization.get("weight_block_size", (128, 128))
    sides = size if isinstance(size, (list, tuple)) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise refuse(f"fp8 with weight_block_size {size!r}", "blocks of [rows, columns]")
    return BlockScales(*sides)


def dequantize_tensors(
    tensors: dict[str, Any], blocks: BlockScales | None, dtype: torch.dtype, folder: Any
) -> dict[str, Any]:
    """Return `tensors` with float8 weights that become `dtype` when they are indexed, and without their scales.

    Args:
        tensors: key -> torch tensor or safetensors slice. Scales come with their weights.
        blocks: of a checkpoint of float8 weights, None for any other.

    Raises:
        RunError: a weight is no plain float and has no scale, a scale has no float8 weight, or it has another shape.
    """
    plain = {}
    for key, tensor in tensors.items():
        stored, shape = _dtype_and_shape(tensor)
        if blocks and key.endswith(SCALE):
            weight = key.removesuffix(SCALE)
            found = _dtype_and_shape(tensors[weight])[0] if weight in tensors else "not in the checkpoint"
            if found not in FLOAT8:
                raise RunError(
                    f"{folder}: {key} scales {weight}, a float8 weight, but that is {found}; fetch it again."
                )
        elif blocks and stored in FLOAT8:
            if key + SCALE not in tensors:
                raise RunError(f"{folder}: {key} is stored as {stored} and has no {key}{SCALE}; fetch it again.")
            scales = tensors[key + SCALE]
            scale_dtype, scale_shape = _dtype_and_shape(scales)
            expected = blocks.scale_shape(shape) if len(shape) > 1 else None
            if scale_shape != expected or scale_dtype not in SCALES:
                raise RunError(
                    f"{folder}: {key}{SCALE} is {scale_dtype} of shape {scale_shape}, and {key} of shape {shape} in "
                    f"blocks of {blocks.rows} x {blocks.columns} needs floats of shape {expected}."
                )
            plain[key] = _Dequantized(tensor, scales, blocks, dtype, shape)
        elif stored not in FLOATS and (key.endswith("weight") or "F8" in stored or "float8" in stored):
            raise RunError(f"{folder}: {key} is stored as {stored}, quantized in an unsupported format; {INSTEAD}.")
        else:
            plain[key] = tensor
    return plain


def integer_keys(tensors: dict[str, Any]) -> list[str]:
    """Return the keys of the `dequantize_tensors` that hold integers or booleans: masks and positions, never weights."""
    return [
        key
        for key, tensor in tensors.items()
        if not isinstance(tensor, _Dequantized) and _dtype_and_shape(tensor)[0] not in FLOATS
    ]


def _dtype_and_shape(tensor: Any) -> tuple[str, list[int]]:
    if torch.is_tensor(tensor):
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    return tensor.get_dtype(), list(tensor.get_shape())


class _Dequantized:
    """A float8 weight [..., out, in] with its scales; indexing it reads them and returns values in `dtype`."""

    def __init__(self, weight: Any, scales: Any, blocks: BlockScales, dtype: torch.dtype, shape: list[int]):
        self.weight, self.scales, self.blocks, self.dtype, self.shape = weight, scales, blocks, dtype, shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Multiply in float32, one row of blocks at a time, so that only this is in memory beside the result."""
        scales = self.scales[...].float()
        values = torch.empty(self.shape, dtype=self.dtype)
        for number, start in enumerate(range(0, self.shape[-2], self.blocks.rows)):
            rows = slice(start, start + self.blocks.rows)
            by_column = scales[..., number, :].repeat_interleave(self.blocks.columns, -1)[..., None, : self.shape[-1]]
            values[..., rows, :] = FLOAT8_VALUES.take(self.weight[..., rows, :].view(torch.uint8).long()) * by_column
        return values[index]
