"""Weights of a quantized checkpoint that an engine keeps as they are stored: which parameters these are, and their tensors, read or drawn.

transformers renames and fuses the tensors of a checkpoint, as it does for plain weights: all codes of a layer, then all scales, and so on,
because its operations (stacking experts, joining gate and up) act on rows, which all of them have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_inference.errors import RunError
from zero_inference.kernels.formats import Codes, QuantizedWeight, WeightFormat
from zero_inference.models.checkpoint_files import Shards, errors_as
from zero_inference.models.checkpoint_formats import StoredWeight
from zero_inference.models.checkpoint_formats.base import FLOATS, dtype_and_shape, float_dtype
from zero_inference.models.empty_model import set_tensor
from zero_inference.models.layers import find_layers, first_of_kind
from zero_inference.models.mlp import detect_experts
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.direct_io import Extent

LARGEST_GROUP = 128  # columns, in kernels of products
LAYER = r"(^|\.)\d+\."  # first number of a key
EXPERT = r"(\.experts)\.\d+\."  # in the key of a weight
READERS = 4  # threads that read and rearrange the tensors of weights
Convert = Callable[[dict[str, Any]], None]  # gives parameters of the model the tensors of a checkpoint, by its keys
NAMES = ("codes", "scales", "offsets", "row_scales")


def stored_formats(model: nn.Module, spec: ModelSpec) -> dict[str, tuple[WeightFormat, bool]]:
    """Return parameter -> (format, stored transposed) of the weights of decoder layers that an engine can keep as they are stored.

    The files of the checkpoint decide where they are here, else its quantization config.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    checkpoint, found = spec.checkpoint_format, {}
    if checkpoint is None:
        return {}
    from_files = _formats_in_files(model, spec)
    dtype, mapping = getattr(spec.config, "dtype", None) or spec.dtype, get_model_conversion_mapping(model)
    for name, (shape, transposed) in _weights(model).items():
        form = None if from_files is None else from_files.get(name)
        if from_files is None:
            modules = checkpoint_modules(mapping, name)
            if not any(map(checkpoint.skips, modules)):
                form = checkpoint.format_of(modules[-1], shape, dtype)
        if form is not None and shape[-1] * form.bits % 8 == 0:
            found[name] = _kept_format(form, shape), transposed
    return found


def _kept_format(form: WeightFormat, shape: tuple[int, ...]) -> WeightFormat:
    """Return a format of the same values that has products: groups of at most `LARGEST_GROUP` columns of integers, and in a stack of
    matrices a scale for each row where a group of rows would belong to both gate and up, which have N / 2 rows each."""
    size = form.group_size
    if form.codes in (Codes.INT4, Codes.INT8) and size > LARGEST_GROUP:
        form = replace(form, group_size=next((each for each in (LARGEST_GROUP, 64, 32) if size % each == 0), size))
    if len(shape) > 2 and shape[-2] % (2 * form.group_rows):
        form = replace(form, group_rows=1)
    return form


def _weights(model: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return parameter -> (shape [..., out, in], whether the model has it transposed) of linear modules and experts in decoder layers."""
    found: dict[str, tuple[tuple[int, ...], bool]] = {}
    (prefix, layers), same_as = find_layers(model), first_of_kind(model)
    by_layer: dict[int, dict[str, tuple[tuple[int, ...], bool]]] = {}
    for index, layer in enumerate(layers):
        first = same_as.get(index, index)
        by_layer[index] = by_layer[first] if first in by_layer else dict(_weights_of(layer))
        found |= {f"{prefix}.{index}.{own}": each for own, each in by_layer[index].items()}
    return found


def _weights_of(layer: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...], bool]]]:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{name}.weight", (tuple(module.weight.shape), False)
        elif any(p.dim() == 3 for p in module.parameters(recurse=False)):
            experts = detect_experts(module)
            for own in (experts.gate_up, experts.down) if experts is not None else ():
                parameter = module.get_parameter(own)
                shape = parameter.mT.shape if experts.transposed else parameter.shape
                yield f"{name}.{own}", (tuple(shape), experts.transposed)


def checkpoint_modules(mapping: Iterable[Any], name: str) -> list[str]:
    """Return the modules by which parameter `name` may be called in a checkpoint or its config, those of single experts last.

    Args:
        mapping: transformers' `get_model_conversion_mapping` of the model.
    """
    found = [name]
    for each in mapping:
        for target in each.target_patterns:
            sources = [source.replace("*", "0") for source in each.source_patterns]
            found += [known.replace(target, source) for known in [*found] for source in sources if target in known]
    return list(dict.fromkeys(each.removesuffix(".weight") for each in found))


def _formats_in_files(model: nn.Module, spec: ModelSpec) -> dict[str, WeightFormat] | None:
    """Return parameter -> format of quantized weights by the headers of the checkpoint's files; None where they are not here."""
    if not spec.weights_are_here:
        return None
    with suppress(RunError):  # damaged: loading says so
        shards = Shards(spec.checkpoint_folder(), spec.checkpoint_format, spec.dtype)
        found = _formats_of_keys(
            model, shards, [key for key in shards.quantized if re.sub(EXPERT, r"\1.0.", key) == key]
        )
        if any(re.search(EXPERT, name) for name in found):  # experts are modules of their own, not stacked
            found = _formats_of_keys(model, shards, [*shards.quantized])
        return found
    return None


def _formats_of_keys(model: nn.Module, shards: Shards, keys: list[str]) -> dict[str, WeightFormat]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = parameter_of_key(model, get_model_conversion_mapping(model), keys)
    with shards.open(keys) as tensors:
        return {names[key][0]: weight.format for key, weight in tensors.items() if weight.column_order is None}


def parameter_of_key(model: nn.Module, mapping: Iterable[Any], keys: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Return checkpoint key -> (parameter, whether it becomes a part of that), by transformers' renaming.

    Args:
        mapping: transformers' `get_model_conversion_mapping` of the model.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = model.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found = {}
    for key in keys:
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        as_it_is = name not in state and key in state  # as transformers' loader decides
        found[key] = (key, False) if as_it_is else (name, converter is not None)
    return found


def tensors_in_files(
    model: nn.Module, spec: ModelSpec, names: Collection[str], formats: Mapping[str, tuple[WeightFormat, bool]]
) -> dict[str, dict[str, list[Extent]]]:
    """Return where safetensors files have the tensors of the parameters `names` as an engine stores them. Several tensors may make up one
    parameter (fused experts), if the rows of each stay together. Other parameters are left out.

    Args:
        formats: of the weights that are kept as they are stored, as `stored_formats` gives them.

    Returns:
        parameter -> "values", or each tensor of a quantized weight -> its bytes, `buffer_offset` within the tensor.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not (names and spec.weights_are_here):
        return {}
    shards = Shards(spec.checkpoint_folder(), spec.checkpoint_format, spec.dtype)
    mapping = get_model_conversion_mapping(model)
    convert = partial(convert_tensors, model, mapping=mapping, dtype=spec.dtype, folder=shards.folder)
    parameter_of = {
        key: name for key, (name, _) in parameter_of_key(model, mapping, shards.keys).items() if name in names
    }
    # parameter -> checkpoint key -> tensor -> (key of the tensor, shape)
    weights: dict[str, dict[str, dict[str, tuple[str, tuple[int, ...]]]]] = {}
    with shards.open([*parameter_of]) as tensors:
        for key, tensor in tensors.items():
            name = parameter_of[key]
            found = _as_stored(key, tensor, model.get_parameter(name), formats.get(name))
            weights.setdefault(name, {})[key] = found
    weights = {name: of_name for name, of_name in weights.items() if all(of_name.values())}
    keys = [key for of_name in weights.values() for parts in of_name.values() for key, _ in parts.values()]
    ranges = {key: Extent(*each) for key, each in shards.byte_ranges(keys).items()}
    first_rows: dict[Any, list[int]] = {}  # layers of a kind have the same ones
    result: dict[str, dict[str, list[Extent]]] = {}
    for name, of_name in weights.items():
        result[name] = {}
        for part, (shape, dtype) in _tensor_shapes(model.get_parameter(name), formats.get(name)).items():
            shapes = {key: parts[part][1] for key, parts in of_name.items()}
            alike = shape, *((re.sub(LAYER, ".", key, count=1), each) for key, each in shapes.items())
            if alike not in first_rows:
                first_rows[alike] = _first_rows(model, name, shape, shapes, convert)
            row_bytes = math.prod(shape[-1:]) * dtype.itemsize
            extents = [ranges[parts[part][0]] for parts in of_name.values() if parts[part][0] in ranges]
            rows = first_rows[alike] if len(extents) == len(of_name) else []  # files of another kind have no ranges
            result[name][part] = [replace(each, buffer_offset=row * row_bytes) for each, row in zip(extents, rows)]
    return {name: parts for name, parts in result.items() if all(parts.values())}


def _as_stored(
    key: str, tensor: Any, plain: Tensor, kept: tuple[WeightFormat, bool] | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (key, shape) of each tensor that a weight of the checkpoint has as an engine stores it; empty if one would have to be
    converted."""
    if kept is None:
        if isinstance(tensor, StoredWeight):
            return {}
        dtype, shape = dtype_and_shape(tensor)
        return {"values": (key, shape)} if dtype in FLOATS and float_dtype(tensor) == plain.dtype else {}
    form, transposed = kept
    alike = isinstance(tensor, StoredWeight) and (tensor.format, tensor.transposed) == (form, transposed)
    if not alike or tensor.column_order is not None:
        return {}
    shapes = form.tensors(tensor.shape)
    if not shapes.keys() <= tensor.in_files.keys():
        return {}
    return {part: (tensor.in_files[part], shape) for part, (shape, _) in shapes.items()}


def _tensor_shapes(
    plain: Tensor, kept: tuple[WeightFormat, bool] | None
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of a parameter as an engine stores it."""
    if kept is None:
        return {"values": (tuple(plain.shape), plain.dtype)}
    form, transposed = kept
    return form.tensors(tuple((plain.mT if transposed else plain).shape))


def _first_rows(
    model: nn.Module, name: str, shape: tuple[int, ...], sources: Mapping[str, tuple[int, ...]], convert: Convert
) -> list[int]:
    """Return the first row of each source in a tensor of parameter `name`; empty if a source is no contiguous part of it.

    Args:
        shape: of the tensor.
        sources: checkpoint key -> shape.
        convert: is called with indices of rows instead of rows.
    """
    if any(each[-1:] != shape[-1:] for each in sources.values()):
        return []
    rows = [math.prod(each[:-1]) for each in sources.values()]
    numbers = torch.arange(1, 1 + sum(rows)).split(rows)
    tensors = {key: own.view(*each[:-1], 1) for (key, each), own in zip(sources.items(), numbers)}
    try:
        order = _converted(model, tensors, {name: ((*shape[:-1], 1), torch.int64)}, convert)[name].flatten()
    except RunError:  # the converter does not act on rows
        return []
    if not torch.equal(order.sort().values, torch.cat(numbers)):  # it adds to values, for one
        return []
    positions = order.argsort()  # of the rows in the tensor
    first = [int(own[0]) for own in positions.split(rows)]
    contiguous = (torch.arange(row, row + count) for row, count in zip(first, rows))
    return first if torch.equal(positions, torch.cat([*contiguous])) else []


def _converted(
    model: nn.Module,
    tensors: dict[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    convert: Convert,
) -> dict[str, Tensor]:
    """Return what the `tensors` of checkpoint keys become, where the model's parameters have other shapes and dtypes for them."""
    plain = {name: model.get_parameter(name) for name in shapes}
    try:
        for name, (shape, dtype) in shapes.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            set_tensor(model, [name], nn.Parameter(empty, requires_grad=False))
        convert(tensors)
        return {name: model.get_parameter(name).data for name in shapes}
    finally:
        for name, parameter in plain.items():
            set_tensor(model, [name], parameter)


def convert_tensors(model: nn.Module, tensors: dict[str, Any], mapping: list, dtype: torch.dtype, folder: Path) -> Any:
    """Read some tensors into the model, and return transformers' information about them. Raises RunError for another shape."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # no dtype plan: each tensor is cast to the dtype of its parameter in the empty model
    load_config = LoadStateDictConfig(pretrained_model_name_or_path=str(folder), dtype=dtype, weight_mapping=mapping)
    with errors_as(RunError, f"{folder}: the checkpoint cannot be read", "; fetch it again."):
        info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=load_config)
    for name, found, expected in sorted(info.mismatched_keys):
        raise RunError(
            f"{folder}: {name} has shape {list(found)} in the checkpoint and {list(expected)} in config.json."
        )
    for name, reason in info.conversion_errors.items():
        raise RunError(
            f"{folder}: {name} cannot be converted ({(str(reason).strip() or repr(reason)).splitlines()[-1]})."
        )
    return info


def read_stored(
    model: nn.Module,
    stored: Mapping[str, tuple[str, StoredWeight]],
    formats: Mapping[str, tuple[WeightFormat, bool]],
    convert: Convert,
) -> dict[str, QuantizedWeight]:
    """Read weights of a checkpoint, and return the parameters of the model that they make.

    Args:
        stored: checkpoint key -> (parameter, weight).
        formats: of these parameters, as `stored_formats` gives them.

    Raises:
        RunError: a weight is not stored in the format of its parameter.
    """

    def read(item: tuple[str, tuple[str, StoredWeight]]) -> tuple[str, QuantizedWeight]:
        key, (name, weight) = item
        form, transposed = formats[name]
        try:
            if weight.column_order is not None or weight.transposed != transposed:
                raise ValueError("its columns are in another order")
            return key, weight.read().converted(form, weight.shape)
        except ValueError as error:
            raise RunError(f"{key} cannot be kept as it is stored ({error}); use --quant-bits 16, 8 or 4.") from error

    with ThreadPoolExecutor(READERS) as pool:
        weights = dict(pool.map(read, stored.items()))
    names = dict.fromkeys(name for name, _ in stored.values())
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    plain = {name: model.get_parameter(name) for name in names}
    for part in NAMES:
        having = {key: weight for key, weight in weights.items() if part in weight.tensors}
        shapes = {}
        for name in {stored[key][0] for key in having}:
            form, transposed = formats[name]
            shape = plain[name].mT.shape if transposed else plain[name].shape
            of_part, dtype = form.tensors(tuple(shape))[part]
            # a row has one factor, and operations on rows need columns
            shapes[name] = (*of_part, 1) if part == "row_scales" else of_part, dtype
        of_keys = {key: _with_columns(part, stored[key][1].shape, weight) for key, weight in having.items()}
        for name, tensor in _converted(model, of_keys, shapes, convert).items():
            tensors[name][part] = tensor
    return {name: QuantizedWeight(formats[name][0], **parts) for name, parts in tensors.items()}


def _with_columns(part: str, shape: tuple[int, ...], weight: QuantizedWeight) -> Tensor:
    tensor = weight.tensors[part]
    return (
        tensor.view(*shape[:-1], -1)
        if part in ("codes", "row_scales")
        else tensor.view(weight.format.scale_shape(shape))
    )


def draw_stored(form: WeightFormat, shape: tuple[int, ...], std: float, generator: torch.Generator) -> QuantizedWeight:
    """Return a random weight of about the standard deviation `std`: codes, and scales that are all equal."""
    device = generator.device
    spread = {Codes.INT4: 4.3, Codes.INT8: 73.6, Codes.E2M1: 2.93, Codes.E4M3: 16.0}[form.codes]  # of random codes
    tensors: dict[str, Tensor] = {}
    for name, (of_part, dtype) in form.tensors(shape).items():
        if name == "codes" and form.codes == Codes.E4M3:
            numbers = torch.empty(of_part, dtype=torch.bfloat16, device=device)
            tensors[name] = numbers.normal_(0.0, spread, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        elif name == "codes":
            tensors[name] = _draw_codes(form.codes, of_part, generator)
        elif name == "offsets":  # zero points: the scheme with minima is that of weights which are quantized here
            tensors[name] = torch.full(of_part, form.codes.center, dtype=dtype, device=device)
        elif name == "scales" and form.row_scales:
            tensors[name] = torch.ones(of_part, device=device).to(dtype)
        elif name == "row_scales" and form.divides:
            tensors[name] = torch.full(of_part, spread / std, dtype=dtype, device=device)
        else:
            tensors[name] = torch.full(of_part, std / spread, device=device).to(dtype)
    return QuantizedWeight(form, **tensors)


def _draw_codes(codes: Codes, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random bytes of codes whose numbers have mean 0: another mean, which all tokens share, grows from layer to layer."""

    def drawn(low: int, high: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=generator.device).random_(low, high, generator=generator)

    if codes == Codes.INT4:  # 1 to 15, as 0 has no counterpart
        return drawn(1, 16).bitwise_or_(drawn(1, 16).bitwise_left_shift_(4))
    return drawn(int(codes == Codes.INT8), 256)
