"""int8 and int4 weights under ZeRO-3, in DeepSpeed's packed format.

DeepSpeed itself quantizes while the model is built, in the checkpoint's dtype, and reads the bits back in the model's: a float16 checkpoint
in bfloat16 becomes noise. Here a weight is converted to the model's dtype first. Also, the patched functionals are restored when the engine
closes, and an embedding dequantizes only the rows that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from zero_inference.cpu.products import quantize
from zero_inference.errors import UsageError
from zero_inference.kernels.quantization import MIN_QUANTIZED_COLUMNS, GroupQuantization, group_size_refusal
from zero_inference.models.layers import decoder_layers, layer_kinds, unused_tower_parameters
from zero_inference.models.operators import trace_reads
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.patching import Patches, SharedPatch
from zero_inference.utils.timing import measure_median_s

BLOCK_NUMEL = 1 << 18  # elements that a CPU dequantizes at once, to stay in its caches
QUANTIZED_LAYERS = (nn.Linear, nn.Embedding)
TIMED_SIZE = {"cuda": 8192, "cpu": 2048}  # rows and columns of the weight whose dequantization is timed
TIMED_S = 0.1
# DeepSpeed's kernel launches groups // 32 thread blocks, which cover all groups; CUDA refuses to launch none.
MIN_GROUPS = 32


@dataclass
class QuantizationPlan:
    """Weights to quantize.

    Attributes:
        skipped: other parameters of two or more dimensions: not in nn.Linear or nn.Embedding, kept in float32 by their family, or too
            narrow for groups.
    """

    settings: dict  # DeepSpeed's quantized_initialization block
    names: set[str] = field(default_factory=set)  # parameters to quantize
    skipped: list[str] = field(default_factory=list)
    fraction: float = 0.0  # quantized share of all elements


def plan_quantization(model: nn.Module, settings: dict, dtype: torch.dtype) -> QuantizationPlan:
    """Choose nn.Linear and nn.Embedding weights of `dtype`, as DeepSpeed does.

    Skipped are the unused tower of a wrapper, and weights that a decoder layer reads without calling their module: only that call
    dequantizes.

    Raises:
        UsageError: the last dimension of a weight that is not narrow is not a multiple of the group size, or too odd to pack.
    """
    plan = QuantizationPlan(settings)
    size = settings["group_size"]
    chosen: set[int] = set()
    excluded = {id(p) for p in unused_tower_parameters(model)} | _read_without_call(model)
    for module_name, module in model.named_modules():
        weight = module.weight if type(module) in QUANTIZED_LAYERS else None
        if weight is None or weight.dtype != dtype or id(weight) in excluded:
            continue
        last, packing = weight.shape[-1], weight.element_size() * 8 // settings["num_bits"]
        if last % size == 0 and last % packing == 0:
            chosen.add(id(weight))
        elif last >= MIN_QUANTIZED_COLUMNS:
            raise group_size_refusal(size, f"{module_name}.weight", tuple(weight.shape), packing)
    total = quantized = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if id(parameter) in chosen:
            plan.names.add(name)
            quantized += parameter.numel()
        elif parameter.dim() > 1:
            plan.skipped.append(name)
    plan.fraction = quantized / total if total else 0.0
    return plan


def _read_without_call(model: nn.Module) -> set[int]:
    """Return ids of weights that decoder layers read outside of calls of their module, as Jamba's mixers do."""
    try:
        prefix, layers = decoder_layers(model)
    except UsageError:  # no list of layers
        return set()
    reads, first_of_kind = trace_reads(model), layer_kinds(model).first
    found = set()
    for index, layer in enumerate(layers if reads is not None else ()):
        for name, module in layer.named_modules():
            full = f"{prefix}.{first_of_kind.get(index, index)}.{name}"
            if type(module) in QUANTIZED_LAYERS and not reads.only_inside(f"{full}.weight", full):
                found.add(id(module.weight))
    return found


def stored_numel(quantization: QuantizationPlan | None, name: str, parameter: torch.Tensor) -> int:
    """Return the elements, of its dtype, that `parameter` is stored in: packed codes, scales and minima if it is quantized."""
    if quantization is None or name not in quantization.names:
        return parameter.numel()
    packed_bytes = parameter.numel() * quantization.settings["num_bits"] // 8
    return packed_bytes // parameter.element_size() + 2 * (parameter.numel() // quantization.settings["group_size"])


def quantize_parameter(parameter: nn.Parameter, settings: dict) -> None:
    """Quantize in place, on its device: `parameter.data` becomes DeepSpeed's flat packed tensor of the same dtype.

    DeepSpeed's quantizer uses a group's extremes. Scale and minimum are chosen as for the stream engine instead, in the same bytes, so
    that no group has a larger error.
    """
    from deepspeed.inference.quantization.utils import DeQuantizer, concat_to_compat_param

    weight, bits, size = parameter.data, settings["num_bits"], settings["group_size"]
    codes, scale, minimum = quantize(weight, GroupQuantization(bits, size), divides=True)
    if bits == 4:
        codes = (codes << 4).bitwise_or_(codes >> 4)  # DeepSpeed packs the even element in the high nibble
    codes = codes.view(*weight.shape[:-1], -1).view(weight.dtype)
    groups = (*weight.shape[:-1], weight.shape[-1] // size, 1)
    packed = concat_to_compat_param(codes, scale.view(groups), minimum.view(groups))
    parameter.data, parameter.deconcat = packed, packed.deconcat
    parameter.dequantizer = DeQuantizer(settings, weight.dtype)
    parameter.weight_quantized = True


def quantize_dequantize(values: torch.Tensor, settings: dict) -> torch.Tensor:
    """Return `values` after quantizing and DeepSpeed's dequantization."""
    restored = torch.empty_like(values)
    rows = max(1, BLOCK_NUMEL // values.shape[-1])  # DeepSpeed's Python code takes many times the memory of its input
    for chunk, out in zip(values.split(rows), restored.split(rows)):
        parameter = nn.Parameter(chunk.clone(), requires_grad=False)
        quantize_parameter(parameter, settings)
        packed, scale, minimum = parameter.deconcat(parameter)
        out.copy_(dequantize_rows(parameter.dequantizer, packed.view(torch.uint8), scale, minimum))
    return restored


def dequantize_rows(dequantizer, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Dequantize a few rows.

    Args:
        codes: uint8 [rows, bytes].
        scale, minimum: [rows, groups, 1].

    Returns:
        [rows, columns] in the dtype of `scale`.
    """
    rows, groups_per_row = len(codes), scale.shape[1]
    padding = max(0, -(-MIN_GROUPS // groups_per_row) - rows)
    if padding:
        codes = F.pad(codes, (0, 0, 0, padding))
        scale, minimum = (F.pad(each, (0, 0, 0, 0, 0, padding)) for each in (scale, minimum))
    return dequantizer.dequantize(codes.contiguous(), scale.contiguous(), minimum.contiguous())[:rows]


def measure_dequantized_gb_per_s(settings: dict, dtype: torch.dtype, device: torch.device) -> float:
    """Return the GB/s (of `dtype`) that DeepSpeed dequantizes and multiplies with one token."""
    size = TIMED_SIZE[device.type]
    weight = nn.Parameter(torch.randn(size, size, device=device).to(dtype), requires_grad=False)
    nbytes, x = weight.nbytes, torch.randn(1, size, device=device).to(dtype)
    quantize_parameter(weight, settings)
    with torch.no_grad(), patch_functionals():
        return nbytes / measure_median_s(device, lambda: F.linear(x, weight), TIMED_S) / 1e9


def patch_functionals() -> Patches:
    """Have F.linear and F.embedding dequantize quantized parameters, until the last model that needs it closes its `Patches`."""
    patches = Patches()
    patches.share_item(vars(F), "linear", _QuantizedLinear)
    patches.share_item(vars(F), "embedding", _QuantizedEmbedding)
    return patches


class _QuantizedLinear(SharedPatch):
    _buffer: torch.Tensor | None = None  # [numel of the largest weight so far], in the model's dtype

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if getattr(weight, "weight_quantized", False):
            weight = self._dequantize(weight)
        return self.before(input, weight, *args, **kwargs)

    def _dequantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a quantized weight as a plain one [rows, columns]; on a CPU in a buffer that the next call overwrites.

        On a CPU DeepSpeed's Python code unpacks all codes to bytes first, and glibc did not always reuse that memory: it grew with each
        token. So a few rows at a time are dequantized into one buffer.
        """
        packed, scale, minimum = weight.deconcat(weight)
        codes = packed.view(torch.uint8)
        if codes.device.type != "cpu":
            return dequantize_rows(weight.dequantizer, codes, scale, minimum)
        columns = codes.shape[1] * 8 // weight.dequantizer.config["num_bits"]
        numel, rows = codes.shape[0] * columns, max(1, BLOCK_NUMEL // columns)
        if self._buffer is None or self._buffer.numel() < numel:
            self._buffer = None  # free it first
            self._buffer = host_empty((numel,), scale.dtype, pinned=False)
        values = self._buffer[:numel].view(-1, columns)
        for out, *chunk in zip(*(each.split(rows) for each in (values, codes, scale, minimum))):
            out.copy_(weight.dequantizer.dequantize(*chunk))
        return values


class _QuantizedEmbedding(SharedPatch):
    def __call__(self, input: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Gather the codes, scales and minima of the rows `input`, then dequantize only those."""
        if not getattr(weight, "weight_quantized", False):
            return self.before(input, weight, *args, **kwargs)
        packed, scale, minimum = weight.deconcat(weight)
        rows = input.reshape(-1)
        values = dequantize_rows(weight.dequantizer, packed.view(torch.uint8)[rows], scale[rows], minimum[rows])
        return values.reshape(*input.shape, -1)
