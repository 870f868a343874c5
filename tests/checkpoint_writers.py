"""Writers of quantized checkpoints: compressed-tensors' own compressors where it has the format, else the format's definition.

A writer takes the name and the values [N, K] of a weight and returns its tensors by key, and the values that they stand for in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Written = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]  # quantization_config
    write: Callable[[str, Tensor], Written]


def compressed(name: str, scale_dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Format:
    """The format `name` of compressed-tensors, written by its compressor; `arguments` are those of the weights in config_groups."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)

    def write(key: str, values: Tensor) -> Written:
        rows, columns = values.shape
        state: dict[str, Any] = {"weight": values}
        if args.strategy == "block":
            sides = [
                torch.arange(-(-size // side)).repeat_interleave(side)[:size]
                for size, side in zip(values.shape, args.block_structure)
            ]
            state["weight_scale"] = (
                torch.zeros(*(int(side[-1]) + 1 for side in sides)).index_put_(
                    (sides[0][:, None], sides[1][None, :]), values.abs(), accumulate=True
                )
                / 448
                / 128
            )  # any positive scale is right
        else:
            size = {"group": args.group_size, "tensor_group": args.group_size, "tensor": rows * columns}.get(
                args.strategy, columns
            )
            groups = values.view(1 if args.strategy == "tensor" else rows, -1, size)
            factor = {}
            if args.strategy == "tensor_group":
                factor["global_scale"] = generate_gparam(values.amin(), values.amax())
                state["weight_global_scale"] = factor["global_scale"]
            extremes = [
                each if args.strategy != "tensor" else each.view(1) for each in (groups.amin(-1), groups.amax(-1))
            ]
            scale, zero_point = calculate_qparams(*extremes, args, **factor)
            if name.startswith("mxfp4"):
                scale = 2.0 ** scale.log2().floor()
            state["weight_scale"] = scale if name.startswith(("mxfp4", "nvfp4")) else scale.to(scale_dtype)
            state["weight_zero_point"] = zero_point
        stored = compressor.compress(state, scheme)
        if name.startswith(("mxfp4", "nvfp4")):  # whose decompress rounds to bfloat16
            numbers = unpack_fp4_from_uint8(stored["weight_packed"], rows, columns, torch.float32)
            scale = compressor._decompress_scale(stored["weight_scale"], torch.float32)
            true = dequantize(numbers, scale, args=args, global_scale=stored.get("weight_global_scale"))
        else:
            in_float32 = {part: each.float() if part == "weight_scale" else each for part, each in stored.items()}
            true = compressor.decompress(in_float32, scheme)["weight"]
        return {f"{key.removesuffix('weight')}{part}": each.contiguous() for part, each in stored.items()}, true

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed"}
    return Format(config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}, write)


def nearest_e2m1(values: Tensor) -> Tensor:
    """Return the code of the nearest number, uint8."""
    code = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return (code + 8 * (values < 0)).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    return torch.where(codes < 8, 1.0, -1.0) * E2M1[(codes & 7).long()]


def in_pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., K] into bytes, the even one in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def in_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, columns] into int32 words [rows, columns * bits / 32], the first in the lowest bits."""
    each = codes.long().view(len(codes), -1, 32 // bits)
    words = (each << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(
    bits: int, group_size: int | None, version: str = "gptq", desc_act: bool = False, symmetric: bool = False
) -> Format:
    def write(key: str, values: Tensor) -> Written:
        rows, columns = values.shape
        size = columns if group_size in (None, -1) else group_size
        group_of = torch.arange(columns) // size
        if desc_act:
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        most = 2**bits - 1
        codes = torch.empty(rows, columns, dtype=torch.int64)
        true = torch.empty_like(values)
        scales, zeros = torch.empty(2, columns // size, rows)
        for group in range(columns // size):
            mine = group_of == group
            low, high = values[:, mine].amin(1).clamp(max=0), values[:, mine].amax(1).clamp(min=0)
            if symmetric:
                high = torch.maximum(high, -low)
                low = -high
            scales[group] = ((high - low) / most).half().float()
            zeros[group] = 2 ** (bits - 1) if symmetric else (-low / scales[group]).round().clamp(0, most)
            codes[:, mine] = (
                (values[:, mine] / scales[group, :, None] + zeros[group, :, None]).round().clamp(0, most).long()
            )
            true[:, mine] = (codes[:, mine] - zeros[group, :, None]) * scales[group, :, None]
        base = key.removesuffix(".weight")
        return {
            f"{base}.qweight": in_words(codes, bits).t().contiguous(),
            f"{base}.qzeros": in_words((zeros - int(version == "gptq")) % 2**bits, bits),
            f"{base}.scales": scales.half(),
            f"{base}.g_idx": group_of.int(),
        }, true

    config = dict(
        quant_method="gptq",
        bits=bits,
        group_size=group_size,
        desc_act=desc_act,
        sym=symmetric,
        checkpoint_format=version,
    )
    return Format(config, write)


def awq(group_size: int) -> Format:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def write(key: str, values: Tensor) -> Written:
        rows, columns = values.shape
        groups = values.view(rows, -1, group_size)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
        true = ((codes - zeros[..., None]) * scales[..., None]).view(rows, columns)

        def packed(each: Tensor) -> Tensor:  # [*, N] -> words, nibble i is column order[i]
            return in_words(each.view(len(each), -1, 8)[..., order].reshape(len(each), -1), 4)

        base = key.removesuffix(".weight")
        return {
            f"{base}.qweight": packed(codes.view(rows, columns).t().contiguous()),
            f"{base}.qzeros": packed(zeros.t().contiguous()),
            f"{base}.scales": scales.t().contiguous().half(),
        }, true

    return Format(dict(quant_method="awq", bits=4, group_size=group_size, zero_point=True, version="gemm"), write)


def modelopt(algorithm: str) -> Format:
    def fp8(key: str, values: Tensor) -> Written:
        scale = values.abs().max() / 448
        stored = (values / scale).to(torch.float8_e4m3fn)
        extra = {f"{key.removesuffix('weight')}input_scale": torch.ones(())}
        return {key: stored, f"{key}_scale": scale} | extra, stored.float() * scale

    def nvfp4(key: str, values: Tensor) -> Written:
        groups = values.view(len(values), -1, 16)
        factor = values.abs().max() / (6 * 448)
        scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        scale = scales.float() * factor
        codes = nearest_e2m1(groups / scale.clamp(min=1e-20)[..., None])
        true = (e2m1_values(codes) * scale[..., None]).view(values.shape)
        return {key: in_pairs(codes.view(values.shape)), f"{key}_scale": scales, f"{key}_scale_2": factor}, true

    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return Format(config, fp8 if algorithm == "FP8" else nvfp4)


def fp8_blocks(rows: int, columns: int) -> Format:
    def write(key: str, values: Tensor) -> Written:
        sides = [torch.arange(size) // side for size, side in zip(values.shape, (rows, columns))]
        scales = torch.rand(int(sides[0][-1]) + 1, int(sides[1][-1]) + 1) * 2e-3 + 1e-3
        by_value = scales[sides[0][:, None], sides[1][None, :]]
        stored = (values / by_value).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {key: stored, f"{key}_scale_inv": scales}, stored.float() * by_value

    config = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[rows, columns])
    return Format(config, write)


def mxfp4_experts(key: str, values: Tensor) -> Written:
    """gpt-oss's experts: `values` [experts, K, N] as the model has them."""
    groups = values.mT.unflatten(-1, (-1, 32))  # [experts, N, K / 32, 32]
    exponent = (groups.abs().amax(-1, keepdim=True) / 6).clamp(min=1e-9).log2().ceil()
    codes = nearest_e2m1(groups / 2.0**exponent)
    true = (e2m1_values(codes) * 2.0**exponent).flatten(-2).mT.contiguous()
    return {f"{key}_blocks": in_pairs(codes), f"{key}_scales": (exponent.squeeze(-1) + 127).to(torch.uint8)}, true


INT4 = dict(num_bits=4, type="int")
FORMATS = {
    "mxfp4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4_experts),
    "ct-int4-g32": compressed("pack-quantized", **INT4, strategy="group", group_size=32),
    "ct-int4-g32-zeros": compressed("pack-quantized", torch.float16, **INT4, strategy="group", group_size=32, symmetric=False),
    "ct-int4-channel": compressed("pack-quantized", **INT4, strategy="channel"),
    "ct-int4-channel-zeros": compressed("pack-quantized", **INT4, strategy="channel", symmetric=False),
    "ct-int8-g64": compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=64),
    "ct-int8-channel": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct-fp8-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-tensor": compressed("float-quantized", torch.float32, num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-block": compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    "ct-mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "ct-nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "gptq-g32": gptq(4, 32),
    "gptq-v2-8bit": gptq(8, 64, "gptq_v2"),
    "gptq-symmetric": gptq(8, 64, symmetric=True),
    "gptq-desc-act": gptq(4, 32, desc_act=True),
    "gptq-column": gptq(4, None),
    "awq-g64": awq(64),
    "modelopt-fp8": modelopt("FP8"),
    "modelopt-nvfp4": modelopt("NVFP4"),
    "fp8-blocks": fp8_blocks(128, 128),
    "fp8-small-blocks": fp8_blocks(64, 64),
    "fp8-tensor": Format(dict(quant_method="fp8", activation_scheme="static"), modelopt("FP8").write),
}  # fmt: skip


def write_pair(folder: Path, source: Path, form: Format, quantizes: Callable[[str], bool]) -> tuple[Path, Path]:
    """Write the checkpoint `source` again: quantized where `quantizes(key)`, and in float32 with the same values."""
    config = json.loads((source / "config.json").read_text())
    stored, true = {}, {}
    for shard in sorted(source.glob("*.safetensors")):
        for key, value in load_file(shard).items():
            if quantizes(key):
                tensors, true[key] = form.write(key, value.float())
                stored |= tensors
            else:
                stored[key] = true[key] = value
    for name, tensors, extra in (("quantized", stored, {"quantization_config": form.config}), ("plain", true, {})):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config | extra))
        save_file(
            {key: value.contiguous().clone() for key, value in tensors.items()},
            folder / name / "model.safetensors",
            metadata={"format": "pt"},
        )
    return folder / "quantized", folder / "plain"
