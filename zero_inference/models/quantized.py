"""Checkpoints whose weights are stored quantized: which form is read, how, and what is said of all others.

Read is float8 with a scale for each block of a matrix, as DeepSeek-V3 and Qwen3 store it: true weight = float8 value x scale of
its block. It becomes the run's dtype while it is read, so engines and sizes know plain weights only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.errors import RunError, UsageError

SCALE = "_scale_inv"  # behind the weight's key
INSTEAD = "use the checkpoint in bfloat16 or float16 (--quant-bits 8 or 4 stores it smaller)"
# As safetensors and torch call them.
FLOATS = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
SCALES = FLOATS | {"F8_E8M0", "float8_e8m0fnu"}
FLOAT8 = {"F8_E4M3", "float8_e4m3fn"}
# By code, in float32: looked up twice as fast on a core as torch converts (0.57 and 0.28 G values/s).
FLOAT8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# What `quantization_config` of quant_method fp8 may say; the first is what it means where it says nothing.
READ = {"activation_scheme": ("dynamic",), "expert_dtype": ("fp8",), "fmt": ("e4m3", "float8_e4m3", "float8_e4m3fn")}


@dataclass(frozen=True)
class BlockScales:
    """Rows and columns of the blocks of a float8 matrix that have one scale each; blocks at its edges may be smaller."""

    rows: int
    columns: int

    def grid(self, shape: list[int]) -> list[int]:
        """The shape of the scales of a weight of `shape` [..., out, in]."""
        return [*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns)]


def take_quantization(config: Any) -> dict[str, Any] | None:
    """Take off a transformers config what it says of stored weights, so that it describes the plain model; None for nothing."""
    found = None
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config", "quantization"):
            said = getattr(part, name, None)
            said = said.to_dict() if hasattr(said, "to_dict") else said
            if said and isinstance(said, dict):
                found = found or said
                delattr(part, name)
    return found


def block_scales(name: str, said: dict[str, Any]) -> BlockScales:
    """The blocks of checkpoint `name`, whose config says `said` of its weights.

    Raises:
        UsageError: they are stored in a form that is not read.
    """
    method = said.get("quant_method") or (
        "bitsandbytes" if "load_in_8bit" in said else "its config.json names no method"
    )
    if method != "fp8":
        raise UsageError(
            f"--model {name}: its weights are quantized ({method}), and of quantized checkpoints only fp8 with "
            f"block scales is read; {INSTEAD}."
        )
    for key, known in READ.items():
        if (said.get(key) or known[0]) not in known:
            raise UsageError(
                f"--model {name}: its fp8 weights have {key} {said[key]!r} in config.json, and only {known[0]!r} "
                f"is read; {INSTEAD}."
            )
    size = said.get("weight_block_size", (128, 128))
    if (
        not isinstance(size, (list, tuple))
        or len(size) != 2
        or not all(isinstance(side, int) and side > 0 for side in size)
    ):
        raise UsageError(
            f"--model {name}: its fp8 weights have weight_block_size {size!r} in config.json, and only blocks of "
            f"[rows, columns] are read; {INSTEAD}."
        )
    return BlockScales(*size)


def plain_tensors(
    tensors: dict[str, Any], blocks: BlockScales | None, dtype: torch.dtype, folder: Any
) -> dict[str, Any]:
    """`tensors` as the model's code knows them: float8 weights become `dtype` when they are read, and their scales are left out.

    Args:
        tensors: key -> torch tensor or safetensors slice, which is read when it is indexed. Scales come with their weights.
        blocks: of a checkpoint of float8 weights, None for any other.

    Raises:
        RunError: a weight is no plain float and has no scale, a scale has no float8 weight, or it has another shape.
    """
    scales = {key.removesuffix(SCALE): tensors[key] for key in tensors if key.endswith(SCALE)} if blocks else {}
    plain = {}
    for key, tensor in tensors.items():
        dtype_name, shape = _described(tensor)
        if blocks and key.endswith(SCALE):
            weight = key.removesuffix(SCALE)
            if weight not in tensors:
                raise RunError(f"{folder}: {key} scales {weight}, which is not in the checkpoint; fetch it again.")
            if (stored := _described(tensors[weight])[0]) not in FLOAT8:
                raise RunError(
                    f"{folder}: {key} scales {weight}, which is stored as {stored} and not as float8; fetch it again."
                )
        elif blocks and dtype_name in FLOAT8:
            if key not in scales:
                raise RunError(
                    f"{folder}: {key} is stored as {dtype_name} and the checkpoint has no {key}{SCALE}; fetch it again."
                )
            found, scale_shape = _described(scales[key])
            expected = blocks.grid(shape) if len(shape) > 1 else None
            if scale_shape != expected or found not in SCALES:
                raise RunError(
                    f"{folder}: {key}{SCALE} is {found} of shape {scale_shape}, and {key} of shape {shape} in blocks of "
                    f"{blocks.rows} x {blocks.columns} needs floats of shape {expected}."
                )
            plain[key] = _Dequantized(tensor, scales[key], blocks, dtype, shape)
        elif dtype_name not in FLOATS and (key.endswith("weight") or "F8" in dtype_name or "float8" in dtype_name):
            raise RunError(f"{folder}: {key} is stored as {dtype_name}, quantized in an unsupported format; {INSTEAD}.")
        else:
            plain[key] = tensor
    return plain


def without_floats(tensors: dict[str, Any]) -> list[str]:
    """Keys of the `plain_tensors` that hold integers or booleans, as masks and positions do and no weights."""
    return [
        key
        for key, tensor in tensors.items()
        if not isinstance(tensor, _Dequantized) and _described(tensor)[0] not in FLOATS
    ]


def _described(tensor: Any) -> tuple[str, list[int]]:
    """Dtype and shape, without reading a value."""
    if torch.is_tensor(tensor):
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    return tensor.get_dtype(), list(tensor.get_shape())


class _Dequantized:
    """Stands for a float8 weight [..., out, in] and its scales until it is indexed; then gives its values in `dtype`."""

    def __init__(self, weight: Any, scales: Any, blocks: BlockScales, dtype: torch.dtype, shape: list[int]):
        self.weight, self.scales, self.blocks, self.dtype, self.shape = weight, scales, blocks, dtype, shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Multiplied in float32, a row of blocks at a time: beside the result no more than that is in memory."""
        scales = self.scales[...].float()
        values = torch.empty(self.shape, dtype=self.dtype)
        for number, start in enumerate(range(0, self.shape[-2], self.blocks.rows)):
            rows = slice(start, start + self.blocks.rows)
            of_columns = scales[..., number, :].repeat_interleave(self.blocks.columns, -1)[..., None, : self.shape[-1]]
            values[..., rows, :] = FLOAT8_VALUES.take(self.weight[..., rows, :].view(torch.uint8).long()) * of_columns
        return values[index]
