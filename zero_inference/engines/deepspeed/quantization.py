"""int8 and int4 weights under ZeRO-3, in DeepSpeed's packed format.

DeepSpeed itself quantizes while the model is built, in the checkpoint's dtype, and reads the bits back in the model's: a float16 checkpoint
in bfloat16 becomes noise. Here a weight is converted to the model's dtype first. Also, the patched functionals are restored when the engine
closes, and an embedding dequantizes only the rows that it reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zero_inference.config.run_config import RunConfig
from zero_inference.cpu.products import quantize
from zero_inference.errors import UsageError
from zero_inference.kernels.quantization import MIN_QUANTIZED_COLUMNS, GroupQuantization, group_size_refusal
from zero_inference.models.layers import decoder_layers, unused_tower_parameters
from zero_inference.models.tracing import trace_reads
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.patching import Patches, SharedPatch
from zero_inference.utils.timing import measure_median_s

BLOCK_NUMEL = 1 << 18  # elements that are dequantized at once, to stay in a CPU's caches
QUANTIZED_LAYERS = (nn.Linear, nn.Embedding)
TIMED_SIZE = {"cuda": 8192, "cpu": 2048}  # rows and columns of the weight whose dequantization is timed
TIMED_S = 0.1  # for which it is timed
# DeepSpeed's kernel launches groups // 32 thread blocks, which cover all groups; CUDA refuses to launch none.
MIN_GROUPS = 32


def quantization_settings(config: RunConfig) -> dict:
    """Return DeepSpeed's `quantized_initialization` block."""
    return {"num_bits": config.quant_bits, "group_size": config.group_size, "group_dim": 1, "symmetric": False}


def choose_quantized(model: nn.Module, settings: dict, dtype: torch.dtype) -> set[str]:
    """Return the names of the nn.Linear and nn.Embedding weights of `dtype`, which DeepSpeed quantizes.

    Left out are weights too narrow for groups, the unused tower of a wrapper, and weights that a decoder layer reads without calling their
    module: only that call dequantizes.

    Raises:
        UsageError: the columns of a weight that is not narrow are no multiple of the group size, or of the codes in a packed element.
    """
    size, chosen = settings["group_size"], set()
    excluded = {id(p) for p in unused_tower_parameters(model)} | _read_without_call(model)
    for module_name, module in model.named_modules():
        weight = module.weight if type(module) in QUANTIZED_LAYERS else None
        if weight is None or weight.dtype != dtype or id(weight) in excluded:
            continue
        columns, codes_per_element = weight.shape[-1], weight.element_size() * 8 // settings["num_bits"]
        if columns % size == 0 and columns % codes_per_element == 0:
            chosen.add(id(weight))
        elif columns >= MIN_QUANTIZED_COLUMNS:
            raise group_size_refusal(size, f"{module_name}.weight", tuple(weight.shape), codes_per_element)
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def _read_without_call(model: nn.Module) -> set[int]:
    """Return ids of weights that decoder layers read outside of calls of their module, as Jamba's mixers do."""
    try:
        prefix, layers = decoder_layers(model)
    except UsageError:  # no list of layers
        return set()
    reads = trace_reads(model)
    found = set()
    for index, layer in enumerate(layers if reads is not None else ()):
        for name, module in layer.named_modules():
            full = f"{prefix}.{index}.{name}"
            if type(module) in QUANTIZED_LAYERS and not reads.only_inside(f"{full}.weight", full):
                found.add(id(module.weight))
    return found


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
    """Return `values` [rows, columns] after quantizing and DeepSpeed's dequantization."""
    weight = nn.Parameter(values, requires_grad=False)
    quantize_parameter(weight, settings)
    return _dequantize_to(torch.empty_like(values), weight)


def _dequantize_to(out: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Dequantize a few rows at a time into `out` [rows, columns]: DeepSpeed's Python code takes many times the memory of its input."""
    packed, scale, minimum = weight.deconcat(weight)
    parts = (out, packed.view(torch.uint8), scale, minimum)
    for rows, *chunk in zip(*(part.split(max(1, BLOCK_NUMEL // out.shape[1])) for part in parts)):
        rows.copy_(_dequantize_rows(weight.dequantizer, *chunk))
    return out


def _dequantize_rows(dequantizer, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns] of uint8 `codes` [rows, bytes], in the dtype of `scale` and `minimum` [rows, groups, 1]."""
    rows, groups_per_row = len(codes), scale.shape[1]
    padding = max(0, -(-MIN_GROUPS // groups_per_row) - rows) if codes.is_cuda else 0
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
        if not getattr(weight, "weight_quantized", False):
            return self.before(input, weight, *args, **kwargs)
        packed, scale, minimum = weight.deconcat(weight)
        codes = packed.view(torch.uint8)
        if codes.is_cuda:
            return self.before(input, _dequantize_rows(weight.dequantizer, codes, scale, minimum), *args, **kwargs)
        # all at once would unpack to bytes first, and glibc did not always reuse that memory: it grew with each token
        columns = codes.shape[1] * 8 // weight.dequantizer.config["num_bits"]
        numel = len(codes) * columns
        if self._buffer is None or self._buffer.numel() < numel:
            self._buffer = None  # free it first
            self._buffer = host_empty((numel,), scale.dtype, pinned=False)
        return self.before(input, _dequantize_to(self._buffer[:numel].view(-1, columns), weight), *args, **kwargs)


class _QuantizedEmbedding(SharedPatch):
    def __call__(self, input: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Gather the codes, scales and minima of the rows `input`, then dequantize only those."""
        if not getattr(weight, "weight_quantized", False):
            return self.before(input, weight, *args, **kwargs)
        packed, scale, minimum = weight.deconcat(weight)
        rows = input.reshape(-1)
        values = _dequantize_rows(weight.dequantizer, packed.view(torch.uint8)[rows], scale[rows], minimum[rows])
        return values.reshape(*input.shape, -1)
