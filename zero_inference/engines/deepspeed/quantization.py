"""int8 and int4 weights under ZeRO-3, in DeepSpeed's packed format.

DeepSpeed quantizes while the model is built, with the checkpoint's dtype, and reads the bits back in the model's: a
float16 checkpoint in bfloat16 becomes noise. Here each weight already has the model's dtype when it is quantized. The
patched functionals are put back when the engine closes, and an embedding dequantizes the rows it looks up, not the table.
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
from zero_inference.utils.timing import measure_median_s

BLOCK_NUMEL = 1 << 18  # elements that a CPU dequantizes at once: near its caches
QUANTIZED_LAYERS = (nn.Linear, nn.Embedding)
DEQUANTIZED_SIZE = {"cuda": 8192, "cpu": 2048}  # of the square weight whose dequantizing is timed
DEQUANTIZED_S = 0.1
# DeepSpeed's kernel launches a thread block for each 32 groups: none for fewer, which CUDA refuses. Those it launches cover all groups.
LEAST_GROUPS = 32


@dataclass
class QuantizationPlan:
    """Which weights are quantized, decided before loading.

    Attributes:
        settings: DeepSpeed's quantized_initialization block.
        names: parameters that are quantized.
        skipped: matrices (and larger) that are not, because DeepSpeed quantizes only nn.Linear and nn.Embedding, because their family
            keeps them in float32, or because they are narrow and groups do not fit them.
        fraction: share of the elements that is quantized.
    """

    settings: dict
    names: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)
    fraction: float = 0.0

    def packed_numel(self, name: str, parameter: torch.Tensor) -> int:
        """Elements of its dtype that `parameter` takes as stored: packed values, then scales and minima."""
        if name not in self.names:
            return parameter.numel()
        packed_bytes = parameter.numel() * self.settings["num_bits"] // 8
        return packed_bytes // parameter.element_size() + 2 * (parameter.numel() // self.settings["group_size"])


def plan_quantization(model: nn.Module, settings: dict, dtype: torch.dtype) -> QuantizationPlan:
    """Decide by layer type, as DeepSpeed does, and leave alone what is not in `dtype`, the model's own, the tower of a wrapper, and
    weights that a decoder layer reads otherwise than by calling their module: only that call restores them.

    Raises:
        UsageError: the last dimension of a weight that is not narrow is not a multiple of the group size, or too odd to pack.
    """
    plan = QuantizationPlan(settings)
    size = settings["group_size"]
    chosen: set[int] = set()
    left_alone = {id(p) for p in unused_tower_parameters(model)} | _read_otherwise(model)
    for module_name, module in model.named_modules():
        weight = module.weight if type(module) in QUANTIZED_LAYERS else None
        if weight is None or weight.dtype != dtype or id(weight) in left_alone:
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


def _read_otherwise(model: nn.Module) -> set[int]:
    """Ids of weights of decoder layers that are read outside of calls of their module, as Jamba's mixers do."""
    try:
        prefix, layers = decoder_layers(model)
    except UsageError:  # a model without a list of them
        return set()
    reads, alike = trace_reads(model), layer_kinds(model).first
    found = set()
    for index, layer in enumerate(layers if reads is not None else ()):
        for name, module in layer.named_modules():
            full = f"{prefix}.{alike.get(index, index)}.{name}"
            if type(module) in QUANTIZED_LAYERS and not reads.only_inside(f"{full}.weight", full):
                found.add(id(module.weight))
    return found


def stored_numel(quantization: QuantizationPlan | None, name: str, parameter: torch.Tensor) -> int:
    return quantization.packed_numel(name, parameter) if quantization else parameter.numel()


def quantize_parameter(parameter: nn.Parameter, settings: dict) -> None:
    """Quantize in place, where it lies: `parameter.data` becomes DeepSpeed's flat packed tensor in the same dtype.

    DeepSpeed's own quantizer takes a group's extremes; scale and minimum are chosen as for the stream engine instead, at the same
    bytes, so that DeepSpeed restores them with no larger error in any group.
    """
    from deepspeed.inference.quantization.utils import DeQuantizer, concat_to_compat_param

    weight, bits, size = parameter.data, settings["num_bits"], settings["group_size"]
    codes, scale, minimum = quantize(weight, GroupQuantization(bits, size), divides=True)
    if bits == 4:
        codes = (codes << 4).bitwise_or_(codes >> 4)  # DeepSpeed has the even element in the high nibble
    codes = codes.view(*weight.shape[:-1], -1).view(weight.dtype)
    groups = (*weight.shape[:-1], weight.shape[-1] // size, 1)
    packed = concat_to_compat_param(codes, scale.view(groups), minimum.view(groups))
    parameter.data, parameter.deconcat = packed, packed.deconcat
    parameter.dequantizer = DeQuantizer(settings, weight.dtype)
    parameter.weight_quantized = True


def quantize_dequantize(values: torch.Tensor, settings: dict) -> torch.Tensor:
    """Return `values` after quantizing and DeepSpeed's dequantizing."""
    restored = torch.empty_like(values)
    rows = max(1, BLOCK_NUMEL // values.shape[-1])  # its Python code takes many times the memory of what it is given
    for some, their_place in zip(values.split(rows), restored.split(rows)):
        parameter = nn.Parameter(some.clone(), requires_grad=False)
        quantize_parameter(parameter, settings)
        packed, scale, minimum = parameter.deconcat(parameter)
        their_place.copy_(dequantize_rows(parameter.dequantizer, packed.view(torch.uint8), scale, minimum))
    return restored


def dequantize_rows(dequantizer, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, columns] of codes uint8 [rows, bytes], scale and minimum [rows, groups, 1], however few they are."""
    rows, of_row = len(codes), scale.shape[1]
    more = max(0, -(-LEAST_GROUPS // of_row) - rows)
    if more:
        codes = F.pad(codes, (0, 0, 0, more))
        scale, minimum = (F.pad(each, (0, 0, 0, 0, 0, more)) for each in (scale, minimum))
    return dequantizer.dequantize(codes.contiguous(), scale.contiguous(), minimum.contiguous())[:rows]


def measure_dequantized_gb_per_s(settings: dict, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes of `dtype` that DeepSpeed dequantizes, and multiplies with one token, while `QuantizedFunctionals` are installed."""
    size = DEQUANTIZED_SIZE[device.type]
    weight = nn.Parameter(torch.randn(size, size, device=device).to(dtype), requires_grad=False)
    nbytes, x = weight.nbytes, torch.randn(1, size, device=device).to(dtype)
    quantize_parameter(weight, settings)
    with torch.no_grad():
        return nbytes / measure_median_s(device, lambda: F.linear(x, weight), DEQUANTIZED_S) / 1e9


class QuantizedFunctionals:
    """While installed, F.linear and F.embedding understand quantized parameters."""

    def __init__(self) -> None:
        self._linear, self._embedding = F.linear, F.embedding
        self._kept: torch.Tensor | None = None  # of the model's dtype, as large as the largest weight so far
        F.linear = self._multiply
        F.embedding = self._lookup

    def _multiply(self, input: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if getattr(weight, "weight_quantized", False):
            weight = self._dequantized(weight)
        return self._linear(input, weight, *args, **kwargs)

    def _dequantized(self, weight: torch.Tensor) -> torch.Tensor:
        """A quantized weight as a plain one [rows, columns]; on a CPU until the next.

        There DeepSpeed's Python code unpacks all codes to bytes first, of a head once a token, and glibc could not always use again what
        that freed: memory grew from token to token. So a few rows at a time become what they are in memory that is kept.
        """
        packed, scale, minimum = weight.deconcat(weight)
        codes = packed.view(torch.uint8)
        if codes.device.type != "cpu":
            return dequantize_rows(weight.dequantizer, codes, scale, minimum)
        columns = codes.shape[1] * 8 // weight.dequantizer.config["num_bits"]
        numel, rows = codes.shape[0] * columns, max(1, BLOCK_NUMEL // columns)
        if self._kept is None or self._kept.numel() < numel:
            self._kept = None  # before more is taken
            self._kept = host_empty((numel,), scale.dtype, pinned=False)
        values = self._kept[:numel].view(-1, columns)
        for start in range(0, codes.shape[0], rows):
            part = slice(start, start + rows)
            values[part] = weight.dequantizer.dequantize(codes[part], scale[part], minimum[part])
        return values

    def _lookup(self, input: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Rows of a packed table: gather values, scales and minima of `input`, then dequantize those alone."""
        if not getattr(weight, "weight_quantized", False):
            return self._embedding(input, weight, *args, **kwargs)
        packed, scale, minimum = weight.deconcat(weight)
        rows = input.reshape(-1)
        values = dequantize_rows(weight.dequantizer, packed.view(torch.uint8)[rows], scale[rows], minimum[rows])
        return values.reshape(*input.shape, -1)

    def remove(self) -> None:
        self._kept = None
        F.linear, F.embedding = self._linear, self._embedding
